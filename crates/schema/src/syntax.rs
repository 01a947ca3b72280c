//! Reports JSON syntax errors with the text of Go's `encoding/json` scanner, which upstream's clients know.

/// The syntax error in `text`; `None` if it is valid JSON.
pub fn syntax_error(text: &[u8]) -> Option<String> {
    let mut scanner = Scanner { parse_state: Vec::new(), step: Step::Value };
    for byte in text {
        if let Err(context) = scanner.scan_byte(*byte) {
            return Some(format!("invalid character {} {context}", quote_char(*byte)));
        }
    }
    // A number at the top level ends only at the next byte, so feed a space.
    let complete = scanner.scan_byte(b' ').is_ok()
        && matches!(scanner.step, Step::End)
        && scanner.parse_state.is_empty();
    (!complete).then(|| "unexpected end of JSON input".to_owned())
}

/// The state of the scanner: what is expected next.
#[derive(Clone, Copy)]
enum Step {
    Value,
    /// A value or the end of a list, right after `[`.
    FirstValue,
    Key,
    /// A key or the end of an object, right after `{`.
    FirstKey,
    /// The end of a value was reached.
    End,
    InString,
    Escape,
    /// The remaining digits of a `\u` escape.
    Hex(u8),
    Minus,
    Zero,
    Digits,
    DecimalPoint,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
    /// The whole literal and its remaining letters.
    Literal(&'static str, &'static str),
}

/// The enclosing object or array, as Go's `parseState`.
#[derive(Clone, Copy, PartialEq)]
enum ParseState {
    ObjectKey,
    ObjectValue,
    ArrayValue,
}

struct Scanner {
    parse_state: Vec<ParseState>,
    step: Step,
}

impl Scanner {
    /// Consumes the next byte. The error is the context of the invalid character, as in Go's message.
    fn scan_byte(&mut self, byte: u8) -> Result<(), String> {
        let unexpected = |context: &str| Err(context.to_owned());
        let is_space = matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        self.step = match self.step {
            Step::Value | Step::FirstValue | Step::Key | Step::FirstKey if is_space => self.step,
            Step::FirstValue if byte == b']' => self.pop_state(),
            Step::Value | Step::FirstValue => match byte {
                b'{' => self.push_state(ParseState::ObjectKey, Step::FirstKey),
                b'[' => self.push_state(ParseState::ArrayValue, Step::FirstValue),
                b'"' => Step::InString,
                b'-' => Step::Minus,
                b'0' => Step::Zero,
                b'1'..=b'9' => Step::Digits,
                b't' => Step::Literal("true", "rue"),
                b'f' => Step::Literal("false", "alse"),
                b'n' => Step::Literal("null", "ull"),
                _ => return unexpected("looking for beginning of value"),
            },
            Step::FirstKey if byte == b'}' => self.pop_state(),
            Step::Key | Step::FirstKey if byte == b'"' => Step::InString,
            Step::Key | Step::FirstKey => return unexpected("looking for beginning of object key string"),
            Step::End => return self.end_value(byte),
            Step::InString => match byte {
                b'"' => Step::End,
                b'\\' => Step::Escape,
                0..0x20 => return unexpected("in string literal"),
                _ => Step::InString,
            },
            Step::Escape => match byte {
                b'b' | b'f' | b'n' | b'r' | b't' | b'\\' | b'/' | b'"' => Step::InString,
                b'u' => Step::Hex(4),
                _ => return unexpected("in string escape code"),
            },
            Step::Hex(left) if byte.is_ascii_hexdigit() => match left {
                1 => Step::InString,
                left => Step::Hex(left - 1),
            },
            Step::Hex(_) => return unexpected("in \\u hexadecimal character escape"),
            Step::Minus => match byte {
                b'0' => Step::Zero,
                b'1'..=b'9' => Step::Digits,
                _ => return unexpected("in numeric literal"),
            },
            Step::Digits | Step::Fraction | Step::ExponentDigits if byte.is_ascii_digit() => self.step,
            Step::Zero | Step::Digits if byte == b'.' => Step::DecimalPoint,
            Step::Zero | Step::Digits | Step::Fraction if byte | 0x20 == b'e' => Step::Exponent,
            Step::Zero | Step::Digits | Step::Fraction | Step::ExponentDigits => return self.end_value(byte),
            Step::DecimalPoint if byte.is_ascii_digit() => Step::Fraction,
            Step::DecimalPoint => return unexpected("after decimal point in numeric literal"),
            Step::Exponent if matches!(byte, b'+' | b'-') => Step::ExponentSign,
            Step::Exponent | Step::ExponentSign if byte.is_ascii_digit() => Step::ExponentDigits,
            Step::Exponent | Step::ExponentSign => return unexpected("in exponent of numeric literal"),
            Step::Literal(word, left) => match left.strip_prefix(char::from(byte)) {
                Some("") => Step::End,
                Some(left) => Step::Literal(word, left),
                None => return Err(format!("in literal {word} (expecting '{}')", &left[..1])),
            },
        };
        Ok(())
    }

    fn push_state(&mut self, parse_state: ParseState, step: Step) -> Step {
        self.parse_state.push(parse_state);
        step
    }

    fn pop_state(&mut self) -> Step {
        self.parse_state.pop();
        Step::End
    }

    /// Handles the byte after a value, depending on the enclosing object or array.
    fn end_value(&mut self, byte: u8) -> Result<(), String> {
        if matches!(byte, b' ' | b'\t' | b'\r' | b'\n') {
            self.step = Step::End;
            return Ok(());
        }
        let (context, step) = match (self.parse_state.last_mut(), byte) {
            (Some(parse_state @ ParseState::ObjectKey), b':') => {
                *parse_state = ParseState::ObjectValue;
                ("", Step::Value)
            }
            (Some(ParseState::ObjectKey), _) => ("after object key", Step::End),
            (Some(parse_state @ ParseState::ObjectValue), b',') => {
                *parse_state = ParseState::ObjectKey;
                ("", Step::Key)
            }
            (Some(ParseState::ObjectValue), b'}') | (Some(ParseState::ArrayValue), b']') => {
                ("", self.pop_state())
            }
            (Some(ParseState::ObjectValue), _) => ("after object key:value pair", Step::End),
            (Some(ParseState::ArrayValue), b',') => ("", Step::Value),
            (Some(ParseState::ArrayValue), _) => ("after array element", Step::End),
            (None, _) => ("after top-level value", Step::End),
        };
        self.step = step;
        if context.is_empty() { Ok(()) } else { Err(context.to_owned()) }
    }
}

/// Quotes a byte as Go's `quoteChar` does.
fn quote_char(byte: u8) -> String {
    match byte {
        b'\'' => r"'\''".to_owned(),
        b'\\' => r"'\\'".to_owned(),
        0x07 => r"'\a'".to_owned(),
        0x08 => r"'\b'".to_owned(),
        b'\t' => r"'\t'".to_owned(),
        b'\n' => r"'\n'".to_owned(),
        0x0b => r"'\v'".to_owned(),
        0x0c => r"'\f'".to_owned(),
        b'\r' => r"'\r'".to_owned(),
        0..0x20 | 0x7f => format!("'\\x{byte:02x}'"),
        0x80..0xa1 | 0xad => format!("'\\u{byte:04x}'"),
        byte => format!("'{}'", char::from(byte)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reports_errors_like_go() {
        for (text, expected) in [
            ("", "unexpected end of JSON input"),
            (" ", "unexpected end of JSON input"),
            ("{", "unexpected end of JSON input"),
            ("{\"a\":1", "unexpected end of JSON input"),
            ("[1,", "unexpected end of JSON input"),
            ("\"a", "unexpected end of JSON input"),
            ("-", "unexpected end of JSON input"),
            ("tru", "unexpected end of JSON input"),
            ("1.", "unexpected end of JSON input"),
            ("x", "invalid character 'x' looking for beginning of value"),
            ("é", "invalid character 'Ã' looking for beginning of value"),
            ("\u{0}", r"invalid character '\x00' looking for beginning of value"),
            ("'a'", r"invalid character '\'' looking for beginning of value"),
            ("{a:1}", "invalid character 'a' looking for beginning of object key string"),
            ("{\"a\":1,}", "invalid character '}' looking for beginning of object key string"),
            ("[1,]", "invalid character ']' looking for beginning of value"),
            ("{\"a\" 1}", "invalid character '1' after object key"),
            ("{\"a\":1 \"b\"}", "invalid character '\"' after object key:value pair"),
            ("[1 2]", "invalid character '2' after array element"),
            ("{} {}", "invalid character '{' after top-level value"),
            ("01", "invalid character '1' after top-level value"),
            ("\"\n\"", r"invalid character '\n' in string literal"),
            (r#""\x""#, "invalid character 'x' in string escape code"),
            (r#""\u00g0""#, r"invalid character 'g' in \u hexadecimal character escape"),
            ("-x", "invalid character 'x' in numeric literal"),
            ("1.x", "invalid character 'x' after decimal point in numeric literal"),
            ("1e+x", "invalid character 'x' in exponent of numeric literal"),
            ("nil", "invalid character 'i' in literal null (expecting 'u')"),
            ("[True]", "invalid character 'T' looking for beginning of value"),
        ] {
            assert_eq!(syntax_error(text.as_bytes()).as_deref(), Some(expected), "{text}");
        }
    }

    proptest! {
        /// The scanner and `serde_json` must agree on what is valid.
        #[test]
        fn error_matches_serde_json(text in r#"([\[\]{}:,"\\ \t\n0-9.eE+-]|true|null|\\u00e9|"a"|"b":|\[1,|\{"x":){0,12}"#) {
            let valid = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
            prop_assert_eq!(syntax_error(text.as_bytes()).is_none(), valid, "{}", text);
        }
    }
}
