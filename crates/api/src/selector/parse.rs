//! Parses the text form of label selectors.

use super::{Operator, Requirement, SelectorError};
use crate::field::{ErrorList, Path};
use crate::names;

pub(super) fn parse_requirements(text: &str) -> Result<Vec<Requirement>, SelectorError> {
    let mut parser = Parser { rest: text };
    let mut requirements = Vec::new();
    loop {
        match parser.peek() {
            Token::End => return Ok(requirements),
            token if !token.starts_requirement() => {
                return parser.unexpected_token(token, ", expected: !, identifier, or 'end of string'");
            }
            _ => {}
        }
        let requirement = parser.parse_requirement();
        requirements.push(
            requirement.map_err(|reason| SelectorError(format!("unable to parse requirement: {reason}")))?,
        );
        match parser.next() {
            Token::End => return Ok(requirements),
            Token::Symbol(",") => match parser.peek() {
                token if token.starts_requirement() => {}
                token => return parser.unexpected_token(token, ", expected: identifier after ','"),
            },
            token => return parser.unexpected_token(token, ", expected: ',' or 'end of string'"),
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Token<'a> {
    End,
    /// One of `= == != ! ( ) , > <`.
    Symbol(&'a str),
    /// Any other text. This includes `in` and `notin`, which are operators in some positions only.
    Word(&'a str),
}

impl<'a> Token<'a> {
    fn text(self) -> &'a str {
        match self {
            Token::End => "",
            Token::Symbol(text) | Token::Word(text) => text,
        }
    }

    fn starts_requirement(self) -> bool {
        matches!(self, Token::Word(_) | Token::Symbol("!"))
    }
}

struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Token<'a> {
        self.split().0
    }

    fn next(&mut self) -> Token<'a> {
        let (token, rest) = self.split();
        self.rest = rest;
        token
    }

    /// The next token and the rest of the text. A NUL byte ends the text, as upstream.
    fn split(&self) -> (Token<'a>, &'a str) {
        let text = self.rest.trim_start_matches([' ', '\t', '\r', '\n']);
        let symbol = |c: char| "=!(),><".contains(c);
        match text.chars().next() {
            None | Some('\0') => (Token::End, ""),
            Some(c) if symbol(c) => {
                let two = text.starts_with("==") || text.starts_with("!=");
                let (token, rest) = text.split_at(if two { 2 } else { 1 });
                (Token::Symbol(token), rest)
            }
            Some(_) => {
                let end = text.find(|c: char| symbol(c) || " \t\r\n\0".contains(c));
                let (token, rest) = text.split_at(end.unwrap_or(text.len()));
                (Token::Word(token), rest)
            }
        }
    }

    fn parse_requirement(&mut self) -> Result<Requirement, SelectorError> {
        let mut token = self.next();
        let absent = token == Token::Symbol("!");
        if absent {
            token = self.next();
        }
        let Token::Word(key) = token else { return self.unexpected_token(token, ", expected: identifier") };
        check_key(key)?;
        if absent {
            return Requirement::new(key, Operator::DoesNotExist, Vec::new());
        }
        if matches!(self.peek(), Token::End | Token::Symbol(",")) {
            return Requirement::new(key, Operator::Exists, Vec::new());
        }
        let operator = match self.next() {
            Token::Word("in") => Operator::In,
            Token::Word("notin") => Operator::NotIn,
            Token::Symbol("=") => Operator::Equals,
            Token::Symbol("==") => Operator::DoubleEquals,
            Token::Symbol("!=") => Operator::NotEquals,
            Token::Symbol(">") => Operator::GreaterThan,
            Token::Symbol("<") => Operator::LessThan,
            token => return self.unexpected_token(token, ", expected: in, notin, =, ==, !=, gt, lt"),
        };
        let values = match operator {
            Operator::In | Operator::NotIn => self.parse_values()?,
            _ => vec![self.exact_value()?.to_owned()],
        };
        Requirement::new(key, operator, values)
    }

    fn exact_value(&mut self) -> Result<&'a str, SelectorError> {
        if matches!(self.peek(), Token::End | Token::Symbol(",")) {
            return Ok("");
        }
        match self.next() {
            Token::Word(value) => Ok(value),
            token => self.unexpected_token(token, ", expected: identifier"),
        }
    }

    /// Parses `(x,y)` into sorted unique values. Nothing between commas is the empty value.
    fn parse_values(&mut self) -> Result<Vec<String>, SelectorError> {
        match self.next() {
            Token::Symbol("(") => {}
            token => return self.unexpected_token(token, " expected: '('"),
        }
        let mut values: Vec<&str> = Vec::new();
        match self.peek() {
            Token::Word(_) | Token::Symbol(",") => {}
            Token::Symbol(")") => values.push(""),
            token => return self.unexpected_token(token, ", expected: ',', ')' or identifier"),
        }
        while self.peek() != Token::Symbol(")") {
            match self.next() {
                Token::Word(value) => {
                    values.push(value);
                    match self.peek() {
                        Token::Symbol("," | ")") => {}
                        token => return self.unexpected_token(token, ", expected: ',' or ')'"),
                    }
                }
                Token::Symbol(",") => {
                    if values.is_empty() || matches!(self.peek(), Token::Symbol("," | ")")) {
                        values.push("");
                    }
                }
                token => return self.unexpected_token(token, ", expected: ',', or identifier"),
            }
        }
        self.next();
        values.sort_unstable();
        values.dedup();
        Ok(values.into_iter().map(str::to_owned).collect())
    }

    fn unexpected_token<T>(&self, token: Token<'_>, expected: &str) -> Result<T, SelectorError> {
        Err(SelectorError(format!("found '{}'{expected}", token.text())))
    }
}

fn check_key(key: &str) -> Result<(), SelectorError> {
    let messages = names::qualified_name(key);
    if messages.is_empty() {
        return Ok(());
    }
    let mut errors = ErrorList::default();
    errors.invalid(&Path::root(), key, &messages.join("; "));
    Err(SelectorError(errors.to_string()))
}
