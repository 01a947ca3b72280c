//! From text to a tree, by recursive descent with operator precedence. Bounded: an expression has at most
//! [`LONGEST`] characters, nests at most [`DEEPEST`] times, and its tree is at most [`TALLEST`] high, so nothing
//! that walks it later can run out of stack.

mod literal;
mod macros;

use crate::ast::{Ast, Entry, Field, Id, Kind, Literal};
use crate::lexer::{self, Token};
use crate::source::Errors;

const LONGEST: usize = 100_000;
const DEEPEST: u32 = 250;
const TALLEST: u32 = 320;

const RESERVED: &[&str] = &[
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

/// What an expression may begin with, as cel-go's parser lists it.
const BEGINNINGS: &str = "{'[', '{', '(', '.', '-', '!', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, \
                          STRING, BYTES, IDENTIFIER}";

pub(crate) struct Parser<'s, 'e> {
    tokens: Vec<Token<'s>>,
    next: usize,
    depth: u32,
    ast: Ast,
    errors: &'e mut Errors,
    /// Whether `cel.bind` is known.
    bindings: bool,
}

/// The first syntax error ends the parse; it has been reported.
struct Stop;

type Parsed<T> = Result<T, Stop>;

/// The tree of `source`, or none with `errors` saying why.
pub(crate) fn parse(source: &str, bindings: bool, errors: &mut Errors) -> Option<Ast> {
    let length = source.chars().count();
    if length > LONGEST {
        let words = format!("expression code point size exceeds limit: size: {length}, limit {LONGEST}");
        errors.report(None, words);
        return None;
    }
    let tokens = lexer::tokens(source, errors);
    let mut parser = Parser { tokens, next: 0, depth: 0, ast: Ast::default(), errors, bindings };
    let root = parser.whole().ok()?;
    let Parser { mut ast, errors, .. } = parser;
    ast.root = root;
    errors.is_empty().then_some(ast)
}

impl<'s> Parser<'s, '_> {
    fn whole(&mut self) -> Parsed<Id> {
        let root = self.expr()?;
        let token = self.peek();
        if token.kind == lexer::Kind::End {
            return Ok(root);
        }
        let last = self.tokens.get(self.next + 1).is_some_and(|after| after.kind == lexer::Kind::End);
        let word = if last { "extraneous" } else { "mismatched" };
        Err(self.stop(token.at, format!("Syntax error: {word} input '{}' expecting <EOF>", token.text)))
    }

    fn expr(&mut self) -> Parsed<Id> {
        self.depth += 1;
        if self.depth > DEEPEST {
            self.errors.report(None, format!("expression recursion limit exceeded: {DEEPEST}"));
            return Err(Stop);
        }
        let condition = self.logic("||")?;
        let result = match self.eat("?") {
            None => condition,
            Some(at) => {
                let truthy = self.logic("||")?;
                self.expect(":")?;
                let falsy = self.expr()?;
                self.call(at, "_?_:_", vec![condition, truthy, falsy])?
            }
        };
        self.depth -= 1;
        Ok(result)
    }

    /// Terms joined by `||` or `&&`, as a balanced tree: long conjunctions are common and must not nest.
    fn logic(&mut self, sign: &'static str) -> Parsed<Id> {
        let mut terms = Vec::new();
        let mut signs = Vec::new();
        loop {
            terms.push(if sign == "||" { self.logic("&&")? } else { self.relation()? });
            match self.eat(sign) {
                Some(at) => signs.push(at),
                None => break,
            }
        }
        if signs.is_empty() {
            return Ok(terms[0]);
        }
        let function = if sign == "||" { "_||_" } else { "_&&_" };
        self.balanced(function, &terms, &signs, 0, signs.len() - 1)
    }

    fn balanced(
        &mut self,
        function: &str,
        terms: &[Id],
        signs: &[u32],
        low: usize,
        high: usize,
    ) -> Parsed<Id> {
        let middle = (low + high).div_ceil(2);
        let left = if middle == low {
            terms[middle]
        } else {
            self.balanced(function, terms, signs, low, middle - 1)?
        };
        let right = if middle == high {
            terms[middle + 1]
        } else {
            self.balanced(function, terms, signs, middle + 1, high)?
        };
        self.call(signs[middle], function, vec![left, right])
    }

    fn relation(&mut self) -> Parsed<Id> {
        let mut left = self.sum()?;
        while let Some((at, function)) = self.eat_operator(&[
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

    fn sum(&mut self) -> Parsed<Id> {
        let mut left = self.product()?;
        while let Some((at, function)) = self.eat_operator(&[("+", "_+_"), ("-", "_-_")]) {
            let right = self.product()?;
            left = self.call(at, function, vec![left, right])?;
        }
        Ok(left)
    }

    fn product(&mut self) -> Parsed<Id> {
        let mut left = self.unary()?;
        while let Some((at, function)) = self.eat_operator(&[("*", "_*_"), ("/", "_/_"), ("%", "_%_")]) {
            let right = self.unary()?;
            left = self.call(at, function, vec![left, right])?;
        }
        Ok(left)
    }

    fn unary(&mut self) -> Parsed<Id> {
        for (sign, function) in [("!", "!_"), ("-", "-_")] {
            let Some(at) = self.eat(sign) else { continue };
            let mut count = 1;
            // A minus before a number belongs to it: the smallest integer has no positive twin.
            if sign == "-" && matches!(self.peek().kind, lexer::Kind::Int | lexer::Kind::Double) {
                let number = self.number(at, true)?;
                return self.members(number);
            }
            while self.eat(sign).is_some() {
                count += 1;
            }
            let operand = self.primary()?;
            let operand = self.members(operand)?;
            return if count % 2 == 0 { Ok(operand) } else { self.call(at, function, vec![operand]) };
        }
        let operand = self.primary()?;
        self.members(operand)
    }

    /// `.field`, `.?field`, `.method(...)`, `[index]` and `[?index]` behind an operand.
    fn members(&mut self, mut operand: Id) -> Parsed<Id> {
        loop {
            if let Some(at) = self.eat(".") {
                let optional = self.eat("?").is_some();
                let name = self.peek();
                match name.kind {
                    lexer::Kind::Ident => {}
                    lexer::Kind::Escaped => {
                        self.errors.report(Some(name.at), "unsupported syntax: '`'".to_owned());
                    }
                    _ => {
                        let words = match name.text {
                            "true" | "false" | "null" => {
                                format!("Syntax error: mismatched input '{}' expecting IDENTIFIER", name.text)
                            }
                            _ => format!(
                                "Syntax error: no viable alternative at input '.{}'",
                                self.shown(name)
                            ),
                        };
                        return Err(self.stop(name.at, words));
                    }
                }
                self.next += 1;
                let open = if optional { None } else { self.eat("(") };
                operand = match open {
                    Some(open) => {
                        let args = self.arguments(")")?;
                        self.member_call(open, name.text, operand, args)?
                    }
                    None if optional => {
                        let field =
                            self.add(name.at, Kind::Literal(Literal::String(name.text.to_owned())))?;
                        let call = Kind::Call {
                            function: "_?._".to_owned(),
                            target: None,
                            args: vec![operand, field],
                        };
                        self.add(at, call)?
                    }
                    None => {
                        self.add(at, Kind::Select { operand, field: name.text.to_owned(), test: false })?
                    }
                };
            } else if let Some(at) = self.eat("[") {
                let function = if self.eat("?").is_some() { "_[?_]" } else { "_[_]" };
                let index = self.expr()?;
                self.expect("]")?;
                operand = self.call(at, function, vec![operand, index])?;
            } else {
                return Ok(operand);
            }
        }
    }

    fn primary(&mut self) -> Parsed<Id> {
        let token = self.peek();
        match token.kind {
            lexer::Kind::Ident => return self.name(),
            lexer::Kind::Int | lexer::Kind::Uint | lexer::Kind::Double => {
                return self.number(token.at, false);
            }
            lexer::Kind::String | lexer::Kind::Bytes => return self.text(),
            _ => {}
        }
        if token.kind == lexer::Kind::Sign {
            let literal = match token.text {
                "true" => Some(Literal::Bool(true)),
                "false" => Some(Literal::Bool(false)),
                "null" => Some(Literal::Null),
                _ => None,
            };
            if let Some(literal) = literal {
                self.next += 1;
                return self.add(token.at, Kind::Literal(literal));
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
        let words = match token.kind {
            lexer::Kind::End => format!("Syntax error: mismatched input '<EOF>' expecting {BEGINNINGS}"),
            _ => format!("Syntax error: mismatched input '{}' expecting {BEGINNINGS}", token.text),
        };
        Err(self.stop(token.at, words))
    }

    /// An identifier, a call of a function, or a message being built.
    fn name(&mut self) -> Parsed<Id> {
        let start = self.peek().at;
        let dot = self.eat(".").is_some();
        let token = self.peek();
        if token.kind != lexer::Kind::Ident {
            let words = format!("Syntax error: no viable alternative at input '.{}'", self.shown(token));
            return Err(self.stop(token.at, words));
        }
        if let Some(id) = self.message(dot)? {
            return Ok(id);
        }
        self.next += 1;
        let name = format!("{}{}", if dot { "." } else { "" }, token.text);
        let open = self.eat("(");
        let args = match open {
            Some(_) => self.arguments(")")?,
            None => Vec::new(),
        };
        if RESERVED.contains(&token.text) {
            self.errors.report(Some(start), format!("reserved identifier: {}", token.text));
            return self.add(start, Kind::Broken);
        }
        match open {
            Some(open) => self.call(open, &name, args),
            None => self.add(token.at, Kind::Ident(name)),
        }
    }

    /// `a.b.C{field: value}`, told from other names by the brace behind it.
    fn message(&mut self, dot: bool) -> Parsed<Option<Id>> {
        let mut end = self.next + 1;
        while self.sign_at(end, ".") && self.tokens.get(end + 1).is_some_and(|t| t.kind == lexer::Kind::Ident)
        {
            end += 2;
        }
        if !self.sign_at(end, "{") {
            return Ok(None);
        }
        let name: String = self.tokens[self.next..end].iter().map(|token| token.text).collect();
        let name = if dot { format!(".{name}") } else { name };
        let at = self.tokens[end].at;
        self.next = end + 1;
        let mut fields = Vec::new();
        while self.eat("}").is_none() {
            if !fields.is_empty() {
                self.separator("}")?;
                if self.eat("}").is_some() {
                    break;
                }
            }
            let optional = self.eat("?").is_some();
            let field = self.peek();
            if field.kind != lexer::Kind::Ident {
                let words = format!("Syntax error: mismatched input '{}' expecting IDENTIFIER", field.text);
                return Err(self.stop(field.at, words));
            }
            self.next += 1;
            let at = self.peek().at;
            self.expect(":")?;
            let value = self.expr()?;
            fields.push(Field { at, name: field.text.to_owned(), value, optional });
        }
        self.add(at, Kind::Struct { name, fields }).map(Some)
    }

    fn list(&mut self) -> Parsed<Id> {
        let at = self.peek().at;
        self.next += 1;
        let (mut items, mut optional) = (Vec::new(), Vec::new());
        while self.eat("]").is_none() {
            if !items.is_empty() {
                self.separator("]")?;
                if self.eat("]").is_some() {
                    break;
                }
            }
            optional.push(self.eat("?").is_some());
            items.push(self.expr()?);
        }
        self.add(at, Kind::List { items, optional })
    }

    fn map(&mut self) -> Parsed<Id> {
        let at = self.peek().at;
        self.next += 1;
        let mut entries = Vec::new();
        while self.eat("}").is_none() {
            if !entries.is_empty() {
                self.separator("}")?;
                if self.eat("}").is_some() {
                    break;
                }
            }
            let optional = self.eat("?").is_some();
            let key = self.expr()?;
            self.expect(":")?;
            let value = self.expr()?;
            entries.push(Entry { key, value, optional });
        }
        self.add(at, Kind::Map(entries))
    }

    fn arguments(&mut self, close: &'static str) -> Parsed<Vec<Id>> {
        let mut args = Vec::new();
        if self.eat(close).is_some() {
            return Ok(args);
        }
        loop {
            args.push(self.expr()?);
            if self.eat(close).is_some() {
                return Ok(args);
            }
            self.separator(close)?;
        }
    }

    fn number(&mut self, at: u32, negative: bool) -> Parsed<Id> {
        let token = self.peek();
        self.next += 1;
        let sign = if negative { "-" } else { "" };
        let (radix, digits) = match token.text.strip_prefix("0x") {
            Some(hex) => (16, hex),
            None => (10, token.text),
        };
        let (literal, name) = match token.kind {
            lexer::Kind::Int => {
                (i64::from_str_radix(&format!("{sign}{digits}"), radix).ok().map(Literal::Int), "int")
            }
            lexer::Kind::Uint => {
                (u64::from_str_radix(&digits[..digits.len() - 1], radix).ok().map(Literal::Uint), "uint")
            }
            _ => {
                let value = format!("{sign}{digits}").parse().ok().filter(|value: &f64| value.is_finite());
                (value.map(Literal::Double), "double")
            }
        };
        match literal {
            Some(literal) => self.add(at, Kind::Literal(literal)),
            None => {
                self.errors.report(Some(at), format!("invalid {name} literal"));
                self.add(at, Kind::Broken)
            }
        }
    }

    fn text(&mut self) -> Parsed<Id> {
        let token = self.peek();
        self.next += 1;
        let bytes = token.kind == lexer::Kind::Bytes;
        let value = literal::unquote(&token.text[usize::from(bytes)..], bytes);
        let literal = match value {
            Ok(value) if bytes => Literal::Bytes(value),
            Ok(value) => Literal::String(String::from_utf8_lossy(&value).into_owned()),
            Err(words) => {
                self.errors.report(Some(token.at), words.to_owned());
                return self.add(token.at, Kind::Broken);
            }
        };
        self.add(token.at, Kind::Literal(literal))
    }

    fn peek(&self) -> Token<'s> {
        self.tokens[self.next.min(self.tokens.len() - 1)]
    }

    fn sign_at(&self, index: usize, sign: &str) -> bool {
        self.tokens.get(index).is_some_and(|token| token.kind == lexer::Kind::Sign && token.text == sign)
    }

    fn eat(&mut self, sign: &str) -> Option<u32> {
        let found = self.sign_at(self.next, sign).then(|| self.peek().at)?;
        self.next += 1;
        Some(found)
    }

    fn eat_operator(&mut self, operators: &[(&str, &'static str)]) -> Option<(u32, &'static str)> {
        operators.iter().find_map(|(sign, function)| Some((self.eat(sign)?, *function)))
    }

    fn expect(&mut self, sign: &str) -> Parsed<()> {
        if self.eat(sign).is_some() {
            return Ok(());
        }
        let token = self.peek();
        let words = match token.kind {
            lexer::Kind::End => format!("Syntax error: missing '{sign}' at '<EOF>'"),
            _ => format!("Syntax error: mismatched input '{}' expecting '{sign}'", token.text),
        };
        Err(self.stop(token.at, words))
    }

    fn separator(&mut self, close: &str) -> Parsed<()> {
        if self.eat(",").is_some() {
            return Ok(());
        }
        let token = self.peek();
        let words = match token.kind {
            lexer::Kind::End => format!("Syntax error: missing '{close}' at '<EOF>'"),
            _ => format!("Syntax error: mismatched input '{}' expecting {{'{close}', ','}}", token.text),
        };
        Err(self.stop(token.at, words))
    }

    fn shown(&self, token: Token<'s>) -> &'s str {
        if token.kind == lexer::Kind::End { "" } else { token.text }
    }

    fn stop(&mut self, at: u32, message: String) -> Stop {
        self.errors.report(Some(at), message);
        Stop
    }

    fn add(&mut self, at: u32, kind: Kind) -> Parsed<Id> {
        let id = self.ast.add(at, kind);
        if self.ast.node(id).height > TALLEST {
            self.errors.report(None, "max recursion depth exceeded".to_owned());
            return Err(Stop);
        }
        Ok(id)
    }
}
