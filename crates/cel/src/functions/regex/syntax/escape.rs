//! Escape sequences.

use super::node::Node;
use super::{INVALID_ESCAPE, ParseFailure, Parser};

/// In Go, Perl classes and word boundaries are ASCII only.
const PERL_CLASSES: [(char, &str); 6] = [
    ('d', "[0-9]"),
    ('D', "[^0-9]"),
    ('w', "[0-9A-Za-z_]"),
    ('W', "[^0-9A-Za-z_]"),
    ('s', r"[\t\n\x0C\r ]"),
    ('S', r"[^\t\n\x0C\r ]"),
];
const ZERO_WIDTH_ESCAPES: [(char, &str); 4] =
    [('A', r"\A"), ('b', r"(?-u:\b)"), ('B', r"(?-u:\B)"), ('z', r"\z")];

pub(super) enum Escape {
    Literal(char),
    /// A class in the syntax of the `regex` crate.
    Class(String),
}

impl<'p> Parser<'p> {
    /// Parses an escape outside of a class.
    pub(super) fn escaped(&mut self) -> Result<(), ParseFailure<'p>> {
        let letter = self.rest().chars().nth(1);
        if letter == Some('Q') {
            return self.quoted();
        }
        if let Some((_, assertion)) = ZERO_WIDTH_ESCAPES.iter().find(|(name, _)| Some(*name) == letter) {
            self.at += 2;
            self.out.push_str(assertion);
            return self.push(Node::leaf());
        }
        match self.escape()? {
            Escape::Literal(literal) => self.push_literal(literal),
            Escape::Class(class) => {
                self.out.push_str(&class);
                self.push(Node::class())
            }
        }
    }

    /// Parses `\Q...\E`: everything up to `\E` is literal.
    fn quoted(&mut self) -> Result<(), ParseFailure<'p>> {
        self.at += 2;
        let (literal, length) = match self.rest().split_once(r"\E") {
            Some((literal, _)) => (literal, literal.len() + 2),
            None => (self.rest(), self.rest().len()),
        };
        self.at += length;
        literal.chars().try_for_each(|literal| self.push_literal(literal))
    }

    pub(super) fn escape(&mut self) -> Result<Escape, ParseFailure<'p>> {
        let start = self.at;
        self.next();
        let Some(next) = self.next() else { return Err(("trailing backslash at end of expression", "")) };
        if let Some((_, class)) = PERL_CLASSES.iter().find(|(name, _)| *name == next) {
            return Ok(Escape::Class((*class).to_owned()));
        }
        let literal = match next {
            'p' | 'P' => return self.unicode_class(start, next == 'P'),
            '0'..='7' => self.octal(start, next)?,
            'x' => self.hex(start)?,
            'a' => '\u{7}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\u{b}',
            next if next.is_ascii() && !next.is_ascii_alphanumeric() => next,
            _ => return Err((INVALID_ESCAPE, self.text_since(start))),
        };
        Ok(Escape::Literal(literal))
    }

    /// Parses up to three octal digits. A single digit other than 0 would be a backreference, which Go
    /// does not support.
    fn octal(&mut self, start: usize, first: char) -> Result<char, ParseFailure<'p>> {
        let digit = |next: Option<char>| next.and_then(|next| next.to_digit(8));
        if first != '0' && digit(self.peek()).is_none() {
            return Err((INVALID_ESCAPE, self.text_since(start)));
        }
        let mut value = first.to_digit(8).unwrap_or(0);
        for _ in 0..2 {
            let Some(digit) = digit(self.peek()) else { break };
            self.next();
            value = value * 8 + digit;
        }
        char::from_u32(value).ok_or((INVALID_ESCAPE, self.text_since(start)))
    }

    fn hex(&mut self, start: usize) -> Result<char, ParseFailure<'p>> {
        if self.peek() == Some('{') {
            self.next();
            let (mut value, mut digits) = (0, 0);
            while let Some(next) = self.next() {
                match next.to_digit(16) {
                    Some(digit) => value = value * 16 + digit,
                    None if next == '}' && digits > 0 => {
                        return char::from_u32(value).ok_or((INVALID_ESCAPE, self.text_since(start)));
                    }
                    None => break,
                }
                digits += 1;
                if value > u32::from(char::MAX) {
                    break;
                }
            }
            return Err((INVALID_ESCAPE, self.text_since(start)));
        }
        let mut digit = || self.next().and_then(|next| next.to_digit(16));
        let (high, low) = (digit(), digit());
        let value = high.zip(low).and_then(|(high, low)| char::from_u32(high * 16 + low));
        value.ok_or((INVALID_ESCAPE, self.text_since(start)))
    }
}
