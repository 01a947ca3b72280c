//! The lexer.

use crate::source::Errors;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Ident,
    /// An identifier in backquotes.
    Escaped,
    Int,
    Uint,
    Double,
    String,
    Bytes,
    /// An operator, bracket or keyword.
    Operator,
    End,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Token<'s> {
    pub kind: TokenKind,
    pub text: &'s str,
    /// The offset in the source, in characters.
    pub offset: u32,
}

const OPERATORS: &[&str] = &[
    "==", "!=", "<=", ">=", "&&", "||", "<", ">", "[", "]", "{", "}", "(", ")", ".", ",", "-", "!", "?", ":",
    "+", "*", "/", "%",
];

struct Lexer<'s> {
    source: &'s str,
    /// The offset in bytes.
    position: usize,
    offset: u32,
}

/// Returns all tokens; the last one is [`TokenKind::End`]. Invalid characters are reported as errors
/// and skipped.
pub(crate) fn tokens<'s>(source: &'s str, errors: &mut Errors) -> Vec<Token<'s>> {
    let mut lexer = Lexer { source, position: 0, offset: 0 };
    let mut tokens = Vec::new();
    loop {
        lexer.skip_blank();
        let rest = lexer.rest();
        if rest.is_empty() {
            tokens.push(Token { kind: TokenKind::End, text: "<EOF>", offset: lexer.offset });
            return tokens;
        }
        match token(rest) {
            Some((kind, length)) => {
                let (text, at) = (&rest[..length], lexer.offset);
                lexer.advance(length);
                tokens.push(Token { kind, text, offset: at });
            }
            None => {
                let bad = unknown(rest);
                errors
                    .report(Some(lexer.offset), format!("Syntax error: token recognition error at: '{bad}'"));
                lexer.advance(bad.len());
            }
        }
    }
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.position..]
    }

    fn advance(&mut self, bytes: usize) {
        self.offset += self.source[self.position..self.position + bytes].chars().count() as u32;
        self.position += bytes;
    }

    fn skip_blank(&mut self) {
        loop {
            let rest = self.rest();
            let blank = rest.len() - rest.trim_start_matches(['\t', ' ', '\r', '\n', '\u{c}']).len();
            let skip = match &rest[blank..] {
                comment if comment.starts_with("//") => blank + comment.find('\n').unwrap_or(comment.len()),
                _ => blank,
            };
            if skip == 0 {
                return;
            }
            self.advance(skip);
        }
    }
}

fn token(rest: &str) -> Option<(TokenKind, usize)> {
    let first = rest.chars().next()?;
    if let Some(found) = string_literal(rest) {
        return Some(found);
    }
    if first.is_ascii_digit() || (first == '.' && rest[1..].starts_with(|c: char| c.is_ascii_digit())) {
        return Some(number_literal(rest));
    }
    if first.is_ascii_alphabetic() || first == '_' {
        let length = prefix_length(rest, |c| c.is_ascii_alphanumeric() || c == '_');
        let kind = if matches!(&rest[..length], "true" | "false" | "null" | "in") {
            TokenKind::Operator
        } else {
            TokenKind::Ident
        };
        return Some((kind, length));
    }
    if first == '`' {
        let inner = prefix_length(&rest[1..], |c| c.is_ascii_alphanumeric() || "_.-/ ".contains(c));
        return (inner > 0 && rest[1 + inner..].starts_with('`')).then_some((TokenKind::Escaped, inner + 2));
    }
    OPERATORS.iter().find(|sign| rest.starts_with(**sign)).map(|sign| (TokenKind::Operator, sign.len()))
}

/// The text for the error: an unterminated string up to the end of its line, otherwise one character.
fn unknown(rest: &str) -> &str {
    let first = rest.chars().next().map_or(0, char::len_utf8);
    if rest.starts_with(['"', '\'']) {
        return &rest[..rest.find('\n').map_or(rest.len(), |end| end + 1)];
    }
    &rest[..first]
}

fn prefix_length(text: &str, predicate: impl Fn(char) -> bool) -> usize {
    text.find(|c| !predicate(c)).unwrap_or(text.len())
}

fn number_literal(rest: &str) -> (TokenKind, usize) {
    if let Some(hex) = rest.strip_prefix("0x") {
        let digits = prefix_length(hex, |c| c.is_ascii_hexdigit());
        if digits > 0 {
            let unsigned = hex[digits..].starts_with(['u', 'U']);
            return if unsigned { (TokenKind::Uint, digits + 3) } else { (TokenKind::Int, digits + 2) };
        }
    }
    let digits = |from: usize| prefix_length(&rest[from..], |c| c.is_ascii_digit());
    let mut length = digits(0);
    let mut kind = TokenKind::Int;
    if rest[length..].starts_with('.') && digits(length + 1) > 0 {
        kind = TokenKind::Double;
        length += 1 + digits(length + 1);
    }
    if rest[length..].starts_with(['e', 'E']) {
        let sign = usize::from(rest[length + 1..].starts_with(['+', '-']));
        let exponent = digits(length + 1 + sign);
        if exponent > 0 {
            return (TokenKind::Double, length + 1 + sign + exponent);
        }
    }
    if kind == TokenKind::Int && rest[length..].starts_with(['u', 'U']) {
        return (TokenKind::Uint, length + 1);
    }
    (kind, length)
}

/// Parses the prefixes, quotes and content of a string or bytes literal.
fn string_literal(rest: &str) -> Option<(TokenKind, usize)> {
    let bytes = rest.starts_with(['b', 'B']);
    let mut start = usize::from(bytes);
    let raw = rest[start..].starts_with(['r', 'R']);
    start += usize::from(raw);
    let body = &rest[start..];
    let quote = body.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let kind = if bytes { TokenKind::Bytes } else { TokenKind::String };
    let long_quote: String = [quote; 3].iter().collect();
    let (open, close): (usize, &str) = if body.starts_with(&long_quote) {
        (3, &long_quote)
    } else {
        (1, if quote == '"' { "\"" } else { "'" })
    };
    let length = find_closing_quote(&body[open..], close, raw, open == 3)
        // Unterminated triple quotes may be an empty string followed by another one.
        .map(|inner| open + inner + close.len())
        .or_else(|| (open == 3).then_some(2))?;
    Some((kind, start + length))
}

fn find_closing_quote(body: &str, close: &str, raw: bool, many_lines: bool) -> Option<usize> {
    let mut chars = body.char_indices();
    while let Some((index, c)) = chars.next() {
        if body[index..].starts_with(close) {
            return Some(index);
        }
        match c {
            '\\' if !raw => {
                chars.next()?;
            }
            '\n' | '\r' if !many_lines => return None,
            _ => {}
        }
    }
    None
}
