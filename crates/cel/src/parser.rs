//! A recursive descent parser with operator precedence. An expression has at most
//! [`MAX_EXPRESSION_CODE_POINTS`] characters and [`MAX_RECURSION_DEPTH`] levels of nesting, and the
//! tree has at most a height of [`MAX_AST_HEIGHT`]. Thus recursion over the tree cannot overflow the
//! stack.

mod literal;
mod macros;

use crate::ast::{Ast, Entry, ExprKind, Field, Id, Literal};
use crate::lexer::{self, Token};
use crate::source::Errors;

const MAX_EXPRESSION_CODE_POINTS: usize = 100_000;
const MAX_RECURSION_DEPTH: u32 = 250;
const MAX_AST_HEIGHT: u32 = 320;

const RESERVED_WORDS: &[&str] = &[
    "as",
    "break",
    "const",
    "continue",
    "else",
    "false",
    "for",
    "function",
    "if",
    "import",
    "in",
    "let",
    "loop",
    "package",
    "namespace",
    "null",
    "return",
    "true",
    "var",
    "void",
    "while",
];

/// The tokens that can start an expression, as cel-go's parser lists them in errors.
const EXPRESSION_START_TOKENS: &str = "{'[', '{', '(', '.', '-', '!', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, \
                          STRING, BYTES, IDENTIFIER}";

pub(crate) struct Parser<'s, 'e> {
    tokens: Vec<Token<'s>>,
    next: usize,
    depth: u32,
    ast: Ast,
    errors: &'e mut Errors,
    /// Whether the macro `cel.bind` is enabled.
    bindings: bool,
}

/// Parsing stops at the first syntax error, which has been reported.
struct ParseStopped;

type ParseResult<T> = Result<T, ParseStopped>;

/// Parses `source`. Returns `None` after an error, which is added to `errors`.
pub(crate) fn parse(source: &str, bindings: bool, errors: &mut Errors) -> Option<Ast> {
    let length = source.chars().count();
    if length > MAX_EXPRESSION_CODE_POINTS {
        let message = format!(
            "expression code point size exceeds limit: size: {length}, limit {MAX_EXPRESSION_CODE_POINTS}"
        );
        errors.report(None, message);
        return None;
    }
    let tokens = lexer::tokens(source, errors);
    let mut parser = Parser { tokens, next: 0, depth: 0, ast: Ast::default(), errors, bindings };
    let root = parser.parse_expression().ok()?;
    let Parser { mut ast, errors, .. } = parser;
    ast.root = root;
    errors.is_empty().then_some(ast)
}

impl<'s> Parser<'s, '_> {
    fn parse_expression(&mut self) -> ParseResult<Id> {
        let root = self.expr()?;
        let token = self.peek();
        if token.kind == lexer::TokenKind::End {
            return Ok(root);
        }
        let last = self.tokens.get(self.next + 1).is_some_and(|after| after.kind == lexer::TokenKind::End);
        let word = if last { "extraneous" } else { "mismatched" };
        Err(self.stop(token.offset, format!("Syntax error: {word} input '{}' expecting <EOF>", token.text)))
    }

    fn expr(&mut self) -> ParseResult<Id> {
        self.depth += 1;
        if self.depth > MAX_RECURSION_DEPTH {
            self.errors.report(None, format!("expression recursion limit exceeded: {MAX_RECURSION_DEPTH}"));
            return Err(ParseStopped);
        }
        let condition = self.logical_operator("||")?;
        let result = match self.accept("?") {
            None => condition,
            Some(at) => {
                let if_true = self.logical_operator("||")?;
                self.expect(":")?;
                let if_false = self.expr()?;
                self.call(at, "_?_:_", vec![condition, if_true, if_false])?
            }
        };
        self.depth -= 1;
        Ok(result)
    }

    /// Parses terms joined by `||` or `&&` into a balanced tree. Long conjunctions are common and must
    /// not reach the height limit.
    fn logical_operator(&mut self, sign: &'static str) -> ParseResult<Id> {
        let mut terms = Vec::new();
        let mut offsets = Vec::new();
        loop {
            terms.push(if sign == "||" { self.logical_operator("&&")? } else { self.relation()? });
            match self.accept(sign) {
                Some(at) => offsets.push(at),
                None => break,
            }
        }
        if offsets.is_empty() {
            return Ok(terms[0]);
        }
        let function = if sign == "||" { "_||_" } else { "_&&_" };
        self.balanced(function, &terms, &offsets, 0, offsets.len() - 1)
    }

    fn balanced(
        &mut self,
        function: &str,
        terms: &[Id],
        offsets: &[u32],
        low: usize,
        high: usize,
    ) -> ParseResult<Id> {
        let middle = (low + high).div_ceil(2);
        let left = if middle == low {
            terms[middle]
        } else {
            self.balanced(function, terms, offsets, low, middle - 1)?
        };
        let right = if middle == high {
            terms[middle + 1]
        } else {
            self.balanced(function, terms, offsets, middle + 1, high)?
        };
        self.call(offsets[middle], function, vec![left, right])
    }

    fn relation(&mut self) -> ParseResult<Id> {
        let mut left = self.sum()?;
        while let Some((at, function)) = self.accept_operator(&[
            ("<=", "_<=_"),
            (">=", "_>=_"),
            ("<", "_<_"),
            (">", "_>_"),
            ("==", "_==_"),
            ("!=", "_!=_"),
            ("in", "@in"),
        ]) {
            let right = self.sum()?;
            left = self.call(at, function, vec![left, right])?;
        }
        Ok(left)
    }

    fn sum(&mut self) -> ParseResult<Id> {
        let mut left = self.product()?;
        while let Some((at, function)) = self.accept_operator(&[("+", "_+_"), ("-", "_-_")]) {
            let right = self.product()?;
            left = self.call(at, function, vec![left, right])?;
        }
        Ok(left)
    }

    fn product(&mut self) -> ParseResult<Id> {
        let mut left = self.unary()?;
        while let Some((at, function)) = self.accept_operator(&[("*", "_*_"), ("/", "_/_"), ("%", "_%_")]) {
            let right = self.unary()?;
            left = self.call(at, function, vec![left, right])?;
        }
        Ok(left)
    }

    fn unary(&mut self) -> ParseResult<Id> {
        for (sign, function) in [("!", "!_"), ("-", "-_")] {
            let Some(at) = self.accept(sign) else { continue };
            let mut count = 1;
            // A minus before a number is part of the literal, because the smallest integer has no
            // positive counterpart.
            if sign == "-" && matches!(self.peek().kind, lexer::TokenKind::Int | lexer::TokenKind::Double) {
                let number = self.number(at, true)?;
                return self.members(number);
            }
            while self.accept(sign).is_some() {
                count += 1;
            }
            let operand = self.primary()?;
            let operand = self.members(operand)?;
            return if count % 2 == 0 { Ok(operand) } else { self.call(at, function, vec![operand]) };
        }
        let operand = self.primary()?;
        self.members(operand)
    }

    /// Parses `.field`, `.?field`, `.method(...)`, `[index]` and `[?index]` after an operand.
    fn members(&mut self, mut operand: Id) -> ParseResult<Id> {
        loop {
            if let Some(at) = self.accept(".") {
                let optional = self.accept("?").is_some();
                let name = self.peek();
                match name.kind {
                    lexer::TokenKind::Ident => {}
                    lexer::TokenKind::Escaped => {
                        self.errors.report(Some(name.offset), "unsupported syntax: '`'".to_owned());
                    }
                    _ => {
                        let message = match name.text {
                            "true" | "false" | "null" => {
                                format!("Syntax error: mismatched input '{}' expecting IDENTIFIER", name.text)
                            }
                            _ => format!(
                                "Syntax error: no viable alternative at input '.{}'",
                                self.token_text(name)
                            ),
                        };
                        return Err(self.stop(name.offset, message));
                    }
                }
                self.next += 1;
                let open = if optional { None } else { self.accept("(") };
                operand = match open {
                    Some(open) => {
                        let args = self.arguments(")")?;
                        self.member_call(open, name.text, operand, args)?
                    }
                    None if optional => {
                        let field =
                            self.add(name.offset, ExprKind::Literal(Literal::String(name.text.to_owned())))?;
                        let call = ExprKind::Call {
                            function: "_?._".to_owned(),
                            target: None,
                            args: vec![operand, field],
                        };
                        self.add(at, call)?
                    }
                    None => {
                        self.add(at, ExprKind::Select { operand, field: name.text.to_owned(), test: false })?
                    }
                };
            } else if let Some(at) = self.accept("[") {
                let function = if self.accept("?").is_some() { "_[?_]" } else { "_[_]" };
                let index = self.expr()?;
                self.expect("]")?;
                operand = self.call(at, function, vec![operand, index])?;
            } else {
                return Ok(operand);
            }
        }
    }

    fn primary(&mut self) -> ParseResult<Id> {
        let token = self.peek();
        match token.kind {
            lexer::TokenKind::Ident => return self.name(),
            lexer::TokenKind::Int | lexer::TokenKind::Uint | lexer::TokenKind::Double => {
                return self.number(token.offset, false);
            }
            lexer::TokenKind::String | lexer::TokenKind::Bytes => return self.text(),
            _ => {}
        }
        if token.kind == lexer::TokenKind::Operator {
            let literal = match token.text {
                "true" => Some(Literal::Bool(true)),
                "false" => Some(Literal::Bool(false)),
                "null" => Some(Literal::Null),
                _ => None,
            };
            if let Some(literal) = literal {
                self.next += 1;
                return self.add(token.offset, ExprKind::Literal(literal));
            }
            match token.text {
                "." => return self.name(),
                "(" => {
                    self.next += 1;
                    let inner = self.expr()?;
                    self.expect(")")?;
                    return Ok(inner);
                }
                "[" => return self.list(),
                "{" => return self.map(),
                _ => {}
            }
        }
        let message = match token.kind {
            lexer::TokenKind::End => {
                format!("Syntax error: mismatched input '<EOF>' expecting {EXPRESSION_START_TOKENS}")
            }
            _ => {
                format!("Syntax error: mismatched input '{}' expecting {EXPRESSION_START_TOKENS}", token.text)
            }
        };
        Err(self.stop(token.offset, message))
    }

    /// Parses an identifier, a function call or a message literal.
    fn name(&mut self) -> ParseResult<Id> {
        let start = self.peek().offset;
        let dot = self.accept(".").is_some();
        let token = self.peek();
        if token.kind != lexer::TokenKind::Ident {
            let message =
                format!("Syntax error: no viable alternative at input '.{}'", self.token_text(token));
            return Err(self.stop(token.offset, message));
        }
        if let Some(id) = self.message(dot)? {
            return Ok(id);
        }
        self.next += 1;
        let name = format!("{}{}", if dot { "." } else { "" }, token.text);
        let open = self.accept("(");
        let args = match open {
            Some(_) => self.arguments(")")?,
            None => Vec::new(),
        };
        if RESERVED_WORDS.contains(&token.text) {
            self.errors.report(Some(start), format!("reserved identifier: {}", token.text));
            return self.add(start, ExprKind::Unspecified);
        }
        match open {
            Some(open) => self.call(open, &name, args),
            None => self.add(token.offset, ExprKind::Ident(name)),
        }
    }

    /// Parses `a.b.C{field: value}`, which is recognized by the brace after the name.
    fn message(&mut self, dot: bool) -> ParseResult<Option<Id>> {
        let mut end = self.next + 1;
        while self.is_operator_at(end, ".")
            && self.tokens.get(end + 1).is_some_and(|t| t.kind == lexer::TokenKind::Ident)
        {
            end += 2;
        }
        if !self.is_operator_at(end, "{") {
            return Ok(None);
        }
        let name: String = self.tokens[self.next..end].iter().map(|token| token.text).collect();
        let name = if dot { format!(".{name}") } else { name };
        let at = self.tokens[end].offset;
        self.next = end + 1;
        let mut fields = Vec::new();
        while self.accept("}").is_none() {
            if !fields.is_empty() {
                self.separator("}")?;
                if self.accept("}").is_some() {
                    break;
                }
            }
            let optional = self.accept("?").is_some();
            let field = self.peek();
            if field.kind != lexer::TokenKind::Ident {
                let message = format!("Syntax error: mismatched input '{}' expecting IDENTIFIER", field.text);
                return Err(self.stop(field.offset, message));
            }
            self.next += 1;
            let at = self.peek().offset;
            self.expect(":")?;
            let value = self.expr()?;
            fields.push(Field { offset: at, name: field.text.to_owned(), value, optional });
        }
        self.add(at, ExprKind::Struct { name, fields }).map(Some)
    }

    fn list(&mut self) -> ParseResult<Id> {
        let at = self.peek().offset;
        self.next += 1;
        let (mut items, mut optional) = (Vec::new(), Vec::new());
        while self.accept("]").is_none() {
            if !items.is_empty() {
                self.separator("]")?;
                if self.accept("]").is_some() {
                    break;
                }
            }
            optional.push(self.accept("?").is_some());
            items.push(self.expr()?);
        }
        self.add(at, ExprKind::List { items, optional })
    }

    fn map(&mut self) -> ParseResult<Id> {
        let at = self.peek().offset;
        self.next += 1;
        let mut entries = Vec::new();
        while self.accept("}").is_none() {
            if !entries.is_empty() {
                self.separator("}")?;
                if self.accept("}").is_some() {
                    break;
                }
            }
            let optional = self.accept("?").is_some();
            let key = self.expr()?;
            self.expect(":")?;
            let value = self.expr()?;
            entries.push(Entry { key, value, optional });
        }
        self.add(at, ExprKind::Map(entries))
    }

    fn arguments(&mut self, close: &'static str) -> ParseResult<Vec<Id>> {
        let mut args = Vec::new();
        if self.accept(close).is_some() {
            return Ok(args);
        }
        loop {
            args.push(self.expr()?);
            if self.accept(close).is_some() {
                return Ok(args);
            }
            self.separator(close)?;
        }
    }

    fn number(&mut self, at: u32, negative: bool) -> ParseResult<Id> {
        let token = self.peek();
        self.next += 1;
        let sign = if negative { "-" } else { "" };
        let (radix, digits) = match token.text.strip_prefix("0x") {
            Some(hex) => (16, hex),
            None => (10, token.text),
        };
        let (literal, name) = match token.kind {
            lexer::TokenKind::Int => {
                (i64::from_str_radix(&format!("{sign}{digits}"), radix).ok().map(Literal::Int), "int")
            }
            lexer::TokenKind::Uint => {
                (u64::from_str_radix(&digits[..digits.len() - 1], radix).ok().map(Literal::Uint), "uint")
            }
            _ => {
                let value = format!("{sign}{digits}").parse().ok().filter(|value: &f64| value.is_finite());
                (value.map(Literal::Double), "double")
            }
        };
        match literal {
            Some(literal) => self.add(at, ExprKind::Literal(literal)),
            None => {
                self.errors.report(Some(at), format!("invalid {name} literal"));
                self.add(at, ExprKind::Unspecified)
            }
        }
    }

    fn text(&mut self) -> ParseResult<Id> {
        let token = self.peek();
        self.next += 1;
        let bytes = token.kind == lexer::TokenKind::Bytes;
        let value = literal::unescape_literal(&token.text[usize::from(bytes)..], bytes);
        let literal = match value {
            Ok(value) if bytes => Literal::Bytes(value),
            Ok(value) => Literal::String(String::from_utf8_lossy(&value).into_owned()),
            Err(message) => {
                self.errors.report(Some(token.offset), message.to_owned());
                return self.add(token.offset, ExprKind::Unspecified);
            }
        };
        self.add(token.offset, ExprKind::Literal(literal))
    }

    fn peek(&self) -> Token<'s> {
        self.tokens[self.next.min(self.tokens.len() - 1)]
    }

    fn is_operator_at(&self, index: usize, sign: &str) -> bool {
        self.tokens
            .get(index)
            .is_some_and(|token| token.kind == lexer::TokenKind::Operator && token.text == sign)
    }

    fn accept(&mut self, sign: &str) -> Option<u32> {
        let found = self.is_operator_at(self.next, sign).then(|| self.peek().offset)?;
        self.next += 1;
        Some(found)
    }

    fn accept_operator(&mut self, operators: &[(&str, &'static str)]) -> Option<(u32, &'static str)> {
        operators.iter().find_map(|(sign, function)| Some((self.accept(sign)?, *function)))
    }

    fn expect(&mut self, sign: &str) -> ParseResult<()> {
        if self.accept(sign).is_some() {
            return Ok(());
        }
        let token = self.peek();
        let message = match token.kind {
            lexer::TokenKind::End => format!("Syntax error: missing '{sign}' at '<EOF>'"),
            _ => format!("Syntax error: mismatched input '{}' expecting '{sign}'", token.text),
        };
        Err(self.stop(token.offset, message))
    }

    fn separator(&mut self, close: &str) -> ParseResult<()> {
        if self.accept(",").is_some() {
            return Ok(());
        }
        let token = self.peek();
        let message = match token.kind {
            lexer::TokenKind::End => format!("Syntax error: missing '{close}' at '<EOF>'"),
            _ => format!("Syntax error: mismatched input '{}' expecting {{'{close}', ','}}", token.text),
        };
        Err(self.stop(token.offset, message))
    }

    fn token_text(&self, token: Token<'s>) -> &'s str {
        if token.kind == lexer::TokenKind::End { "" } else { token.text }
    }

    fn stop(&mut self, at: u32, message: String) -> ParseStopped {
        self.errors.report(Some(at), message);
        ParseStopped
    }

    fn add(&mut self, at: u32, kind: ExprKind) -> ParseResult<Id> {
        let id = self.ast.add(at, kind);
        if self.ast.node(id).height > MAX_AST_HEIGHT {
            self.errors.report(None, "max recursion depth exceeded".to_owned());
            return Err(ParseStopped);
        }
        Ok(id)
    }
}
