//! Parses patterns as Go's `regexp/syntax` does: rejects what Go rejects, with the same error texts,
//! and translates the rest to the syntax of the `regex` crate, which interprets some of it differently.

mod class;
mod escape;
mod node;

use std::fmt::Write as _;

use self::node::{Group, Node};

/// The maximum repeat count, and the maximum product of nested repeat counts.
const MAX_REPEAT: u32 = 1000;
/// The maximum height of a parsed pattern.
pub(super) const MAX_HEIGHT: u32 = 1000;
/// The maximum number of instructions of a compiled pattern: 128 MiB at 40 bytes each.
const MAX_SIZE: u64 = (128 << 20) / 40;

const INVALID_ESCAPE: &str = "invalid escape sequence";
const INVALID_REPEAT_SIZE: &str = "invalid repeat count";
const TOO_LARGE: &str = "expression too large";
const NESTING_DEPTH: &str = "expression nests too deeply";

#[derive(Debug, thiserror::Error, PartialEq)]
#[error("error parsing regexp: {code}: `{part}`")]
pub(super) struct SyntaxError {
    code: &'static str,
    /// The invalid part of the pattern.
    part: String,
}

/// Translates a pattern to the syntax of the `regex` crate. Its groups do not capture.
pub(super) fn parse(pattern: &str) -> Result<String, SyntaxError> {
    let mut parser = Parser {
        pattern,
        at: 0,
        groups: vec![Group::default()],
        has_operand: false,
        last_repeat_start: None,
        out: String::new(),
    };
    match parser.run() {
        Ok(()) => Ok(parser.out),
        Err((code, part)) => Err(SyntaxError { code, part: part.to_owned() }),
    }
}

type ParseFailure<'p> = (&'static str, &'p str);

struct Parser<'p> {
    pattern: &'p str,
    at: usize,
    /// The open groups. The first one is the whole pattern.
    groups: Vec<Group>,
    /// The preceding item can be repeated.
    has_operand: bool,
    /// The start of the directly preceding repetition operator.
    last_repeat_start: Option<usize>,
    out: String,
}

impl<'p> Parser<'p> {
    fn rest(&self) -> &'p str {
        &self.pattern[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn text_since(&self, start: usize) -> &'p str {
        &self.pattern[start..self.at]
    }

    fn run(&mut self) -> Result<(), ParseFailure<'p>> {
        while let Some(next) = self.peek() {
            let start = self.at;
            let mut repeated = None;
            match next {
                '(' => self.open_group()?,
                ')' => {
                    self.next();
                    self.close_group()?;
                }
                '|' => {
                    self.next();
                    self.out.push('|');
                    self.top().end_branch();
                    self.has_operand = false;
                }
                '[' => {
                    self.class()?;
                    self.push(Node::class())?;
                }
                '^' | '$' | '.' => {
                    self.next();
                    self.out.push(next);
                    self.push(if next == '.' { Node::class() } else { Node::leaf() })?;
                }
                '*' | '+' | '?' => {
                    self.next();
                    self.out.push(next);
                    self.repeat(start, None, if next == '*' { 2 } else { 1 })?;
                    repeated = Some(start);
                }
                '{' => match self.parse_repeat_count() {
                    Some((min, max)) => {
                        if min > MAX_REPEAT || max.is_some_and(|max| max > MAX_REPEAT || max < min) {
                            return Err((INVALID_REPEAT_SIZE, self.text_since(start)));
                        }
                        self.out.push_str(self.text_since(start));
                        self.repeat(start, Some((min, max)), 0)?;
                        repeated = Some(start);
                    }
                    None => self.literal()?,
                },
                '\\' => self.escaped()?,
                _ => self.literal()?,
            }
            self.last_repeat_start = repeated;
        }
        if self.groups.len() > 1 {
            return Err(("missing closing )", self.pattern));
        }
        let whole = self.top().close();
        self.check_limits(&whole)
    }

    fn top(&mut self) -> &mut Group {
        self.groups.last_mut().expect("the first group is never closed")
    }

    fn push(&mut self, node: Node) -> Result<(), ParseFailure<'p>> {
        self.check_limits(&node)?;
        self.top().push(node);
        self.has_operand = true;
        Ok(())
    }

    fn check_limits(&self, node: &Node) -> Result<(), ParseFailure<'p>> {
        if node.size > MAX_SIZE {
            return Err((TOO_LARGE, self.pattern));
        }
        if node.height > MAX_HEIGHT {
            return Err((NESTING_DEPTH, self.pattern));
        }
        Ok(())
    }

    fn literal(&mut self) -> Result<(), ParseFailure<'p>> {
        let Some(next) = self.next() else { return Ok(()) };
        self.push_literal(next)
    }

    fn push_literal(&mut self, literal: char) -> Result<(), ParseFailure<'p>> {
        push_escaped(&mut self.out, literal);
        self.push(Node::literal())
    }

    fn close_group(&mut self) -> Result<(), ParseFailure<'p>> {
        if self.groups.len() == 1 {
            return Err(("unexpected )", self.pattern));
        }
        let group = self.groups.pop().unwrap_or_default().close();
        self.out.push(')');
        self.push(group)
    }

    /// Repeats the preceding item: `counts` times, or by an operator that adds `extra` instructions.
    fn repeat(
        &mut self,
        start: usize,
        counts: Option<(u32, Option<u32>)>,
        extra: u64,
    ) -> Result<(), ParseFailure<'p>> {
        if self.peek() == Some('?') {
            self.next();
            self.out.push('?');
        }
        if let Some(first) = self.last_repeat_start {
            return Err(("invalid nested repetition operator", self.text_since(first)));
        }
        let node = match self.has_operand {
            true => self.top().pop(),
            false => None,
        };
        let Some(node) = node else {
            return Err(("missing argument to repetition operator", self.text_since(start)));
        };
        let node = match counts {
            None => node.with_repeat_operator(extra),
            Some((min, max)) => node.with_repeat_count(min, max),
        };
        self.check_limits(&node)?;
        if node.repeat_count > MAX_REPEAT && counts.is_some_and(|(min, max)| min.max(max.unwrap_or(0)) >= 2) {
            return Err((INVALID_REPEAT_SIZE, self.text_since(start)));
        }
        self.push(node)
    }

    fn open_group(&mut self) -> Result<(), ParseFailure<'p>> {
        let start = self.at;
        self.next();
        self.has_operand = false;
        if self.peek() != Some('?') {
            self.out.push_str("(?:");
            self.groups.push(Group::capture());
            return Ok(());
        }
        self.next();
        let rest = self.rest();
        let named = |begin: &&str| rest.len() > begin.len() && rest.starts_with(*begin);
        if let Some(begin) = ["P<", "<"].iter().copied().find(named) {
            let Some(end) = self.rest().find('>') else {
                return Err(("invalid named capture", &self.pattern[start..]));
            };
            let name = &self.rest()[begin.len()..end];
            self.at += end + 1;
            if name.is_empty() || !name.chars().all(|c| c == '_' || c.is_ascii_alphanumeric()) {
                return Err(("invalid named capture", self.text_since(start)));
            }
            self.out.push_str("(?:");
            self.groups.push(Group::capture());
            return Ok(());
        }
        let (mut negative, mut flags) = (false, false);
        while let Some(next) = self.next() {
            match next {
                'i' | 'm' | 's' | 'U' => flags = true,
                '-' if !negative => (negative, flags) = (true, false),
                ':' | ')' if !negative || flags => {
                    // `(?)` sets no flags, and the `regex` crate does not support it.
                    if self.text_since(start) != "(?)" {
                        self.push_flags(start);
                    }
                    if next == ':' {
                        self.groups.push(Group::default());
                    }
                    return Ok(());
                }
                _ => return Err(("invalid or unsupported Perl syntax", self.text_since(start))),
            }
        }
        Err(("invalid or unsupported Perl syntax", &self.pattern[start..]))
    }

    /// Writes a group of flags. Go allows repeated flags.
    fn push_flags(&mut self, start: usize) {
        let (mut on, mut off, mut negative) = (String::new(), String::new(), false);
        for flag in self.text_since(start).chars().filter(|c| matches!(c, 'i' | 'm' | 's' | 'U' | '-')) {
            match flag {
                '-' => negative = true,
                // A flag that is turned off stays off, wherever it is turned on.
                flag if negative => off.push(flag),
                flag => on.push(flag),
            }
        }
        let flags = |list: &str| "imsU".chars().filter(|flag| list.contains(*flag)).collect::<String>();
        let on: String = flags(&on).chars().filter(|flag| !off.contains(*flag)).collect();
        let off = flags(&off);
        let dash = if off.is_empty() { "" } else { "-" };
        let end = if self.text_since(start).ends_with(':') { ':' } else { ')' };
        let _ = write!(self.out, "(?{on}{dash}{off}{end}");
    }

    /// Parses `{2}`, `{2,}` or `{2,4}` and advances past it. Anything else is a literal brace.
    fn parse_repeat_count(&mut self) -> Option<(u32, Option<u32>)> {
        let (inner, _) = self.rest().strip_prefix('{')?.split_once('}')?;
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
            let plain = digits && (text.len() == 1 || !text.starts_with('0'));
            plain.then(|| text.parse().unwrap_or(u32::MAX))
        };
        let counts = match inner.split_once(',') {
            None => (number(inner)?, Some(number(inner)?)),
            Some((min, "")) => (number(min)?, None),
            Some((min, max)) => (number(min)?, Some(number(max)?)),
        };
        self.at += inner.len() + 2;
        Some(counts)
    }
}

/// Appends a literal character, escaped for use inside or outside of a class.
fn push_escaped(out: &mut String, literal: char) {
    let mut buffer = [0; 4];
    out.push_str(&::regex::escape(literal.encode_utf8(&mut buffer)));
}

#[cfg(test)]
mod tests;
