//! Character classes: bracket expressions, POSIX and Unicode classes.

use std::fmt::Write as _;

use super::escape::Escape;
use super::{ParseFailure, Parser, push_escaped};

const POSIX_CLASSES: [&str; 14] = [
    "alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space",
    "upper", "word", "xdigit",
];

const MISSING_BRACKET: &str = "missing closing ]";
pub(super) const INVALID_RANGE: &str = "invalid character class range";

impl<'p> Parser<'p> {
    pub(super) fn class(&mut self) -> Result<(), ParseFailure<'p>> {
        let whole = self.rest();
        self.next();
        self.out.push('[');
        if self.peek() == Some('^') {
            self.next();
            self.out.push('^');
        }
        let mut first = true;
        loop {
            let start = self.at;
            match self.peek() {
                None => return Err((MISSING_BRACKET, whole)),
                Some(']') if !first => {
                    self.next();
                    self.out.push(']');
                    return Ok(());
                }
                Some('[') if self.rest().starts_with("[:") && self.rest()[2..].contains(":]") => {
                    self.at += 2 + self.rest()[2..].find(":]").unwrap_or(0) + 2;
                    let class = self.text_since(start);
                    let name = &class[2..class.len() - 2];
                    if !POSIX_CLASSES.contains(&name.strip_prefix('^').unwrap_or(name)) {
                        return Err((INVALID_RANGE, class));
                    }
                    self.out.push_str(class);
                    first = false;
                    continue;
                }
                Some(_) => {}
            }
            first = false;
            let low = match self.class_character(whole)? {
                Escape::Class(class) => {
                    self.out.push_str(&class);
                    continue;
                }
                Escape::Literal(low) => low,
            };
            let mut ahead = self.rest().chars();
            let is_range = ahead.next() == Some('-') && ahead.next().is_some_and(|next| next != ']');
            if !is_range {
                push_escaped(&mut self.out, low);
                continue;
            }
            self.next();
            let end = self.at;
            let Escape::Literal(high) = self.class_character(whole)? else {
                // Only a character may end a range. As in Go, the error names the backslash and one
                // letter of a class escape.
                let length =
                    self.pattern[end..].char_indices().nth(2).map_or(self.pattern.len() - end, |(at, _)| at);
                return Err((super::INVALID_ESCAPE, &self.pattern[end..end + length]));
            };
            if high < low {
                return Err((INVALID_RANGE, self.text_since(start)));
            }
            push_escaped(&mut self.out, low);
            self.out.push('-');
            push_escaped(&mut self.out, high);
        }
    }

    fn class_character(&mut self, whole: &'p str) -> Result<Escape, ParseFailure<'p>> {
        match self.peek() {
            None => Err((MISSING_BRACKET, whole)),
            Some('\\') => self.escape(),
            Some(next) => {
                self.next();
                Ok(Escape::Literal(next))
            }
        }
    }

    /// Parses `\pL` or `\p{Greek}` after the `p`.
    pub(super) fn unicode_class(&mut self, start: usize, negated: bool) -> Result<Escape, ParseFailure<'p>> {
        let (name, length) = match self.rest().strip_prefix('{') {
            Some(name) => {
                let end = name.find('}').ok_or((INVALID_RANGE, &self.pattern[start..]))?;
                (&name[..end], end + 2)
            }
            None => {
                let length = self.peek().map_or(0, char::len_utf8);
                (&self.rest()[..length], length)
            }
        };
        self.at += length;
        let (name, negated) = match name.strip_prefix('^') {
            Some(name) => (name, !negated),
            None => (name, negated),
        };
        let letter = if negated { 'P' } else { 'p' };
        // The `regex` crate supports more properties than categories and scripts.
        let plain = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_- ".contains(c));
        let mut class = String::new();
        for property in ["gc", "sc"].into_iter().filter(|_| plain) {
            class.clear();
            let _ = write!(class, "\\{letter}{{{property}={name}}}");
            if ::regex::Regex::new(&class).is_ok() {
                return Ok(Escape::Class(class));
            }
        }
        Err((INVALID_RANGE, self.text_since(start)))
    }
}
