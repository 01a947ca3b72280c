//! Says what is wrong with a JSON text in the words of Go's scanner, which clients of upstream know.

/// Why `text` is no JSON; `None` where it is.
pub fn error(text: &[u8]) -> Option<String> {
    let mut scanner = Scanner { open: Vec::new(), step: Step::Value };
    for byte in text {
        if let Err(place) = scanner.take(*byte) {
            return Some(format!("invalid character {} {place}", quoted(*byte)));
        }
    }
    // Whatever could end here does so at a blank.
    let ended = scanner.take(b' ').is_ok() && matches!(scanner.step, Step::End) && scanner.open.is_empty();
    (!ended).then(|| "unexpected end of JSON input".to_owned())
}

/// What is expected next.
#[derive(Clone, Copy)]
enum Step {
    Value,
    /// A value, or the end of the list that has just begun.
    FirstValue,
    Key,
    /// A key, or the end of the object that has just begun.
    FirstKey,
    /// What comes after a value.
    End,
    Text,
    Escape,
    /// So many digits of a `\u` escape.
    Hex(u8),
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
    /// The letters of a word that are still to come.
    Word(&'static str, &'static str),
}

/// What is open around the value.
#[derive(Clone, Copy, PartialEq)]
enum Open {
    Key,
    Member,
    Item,
}

struct Scanner {
    open: Vec<Open>,
    step: Step,
}

impl Scanner {
    /// Takes the next byte, or says where it stands that it cannot be there.
    fn take(&mut self, byte: u8) -> Result<(), String> {
        let wrong = |place: &str| Err(place.to_owned());
        let blank = matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        self.step = match self.step {
            Step::Value | Step::FirstValue | Step::Key | Step::FirstKey if blank => self.step,
            Step::FirstValue if byte == b']' => self.close(),
            Step::Value | Step::FirstValue => match byte {
                b'{' => self.begin(Open::Key, Step::FirstKey),
                b'[' => self.begin(Open::Item, Step::FirstValue),
                b'"' => Step::Text,
                b'-' => Step::Minus,
                b'0' => Step::Zero,
                b'1'..=b'9' => Step::Digits,
                b't' => Step::Word("true", "rue"),
                b'f' => Step::Word("false", "alse"),
                b'n' => Step::Word("null", "ull"),
                _ => return wrong("looking for beginning of value"),
            },
            Step::FirstKey if byte == b'}' => self.close(),
            Step::Key | Step::FirstKey if byte == b'"' => Step::Text,
            Step::Key | Step::FirstKey => return wrong("looking for beginning of object key string"),
            Step::End => return self.after(byte),
            Step::Text => match byte {
                b'"' => Step::End,
                b'\\' => Step::Escape,
                0..0x20 => return wrong("in string literal"),
                _ => Step::Text,
            },
            Step::Escape => match byte {
                b'b' | b'f' | b'n' | b'r' | b't' | b'\\' | b'/' | b'"' => Step::Text,
                b'u' => Step::Hex(4),
                _ => return wrong("in string escape code"),
            },
            Step::Hex(left) if byte.is_ascii_hexdigit() => match left {
                1 => Step::Text,
                left => Step::Hex(left - 1),
            },
            Step::Hex(_) => return wrong("in \\u hexadecimal character escape"),
            Step::Minus => match byte {
                b'0' => Step::Zero,
                b'1'..=b'9' => Step::Digits,
                _ => return wrong("in numeric literal"),
            },
            Step::Digits | Step::Fraction | Step::ExponentDigits if byte.is_ascii_digit() => self.step,
            Step::Zero | Step::Digits if byte == b'.' => Step::Point,
            Step::Zero | Step::Digits | Step::Fraction if byte | 0x20 == b'e' => Step::Exponent,
            Step::Zero | Step::Digits | Step::Fraction | Step::ExponentDigits => return self.after(byte),
            Step::Point if byte.is_ascii_digit() => Step::Fraction,
            Step::Point => return wrong("after decimal point in numeric literal"),
            Step::Exponent if matches!(byte, b'+' | b'-') => Step::ExponentSign,
            Step::Exponent | Step::ExponentSign if byte.is_ascii_digit() => Step::ExponentDigits,
            Step::Exponent | Step::ExponentSign => return wrong("in exponent of numeric literal"),
            Step::Word(word, left) => match left.strip_prefix(char::from(byte)) {
                Some("") => Step::End,
                Some(left) => Step::Word(word, left),
                None => return Err(format!("in literal {word} (expecting '{}')", &left[..1])),
            },
        };
        Ok(())
    }

    fn begin(&mut self, open: Open, step: Step) -> Step {
        self.open.push(open);
        step
    }

    fn close(&mut self) -> Step {
        self.open.pop();
        Step::End
    }

    /// What may follow a value where it stands.
    fn after(&mut self, byte: u8) -> Result<(), String> {
        if matches!(byte, b' ' | b'\t' | b'\r' | b'\n') {
            self.step = Step::End;
            return Ok(());
        }
        let (place, step) = match (self.open.last_mut(), byte) {
            (Some(open @ Open::Key), b':') => {
                *open = Open::Member;
                ("", Step::Value)
            }
            (Some(Open::Key), _) => ("after object key", Step::End),
            (Some(open @ Open::Member), b',') => {
                *open = Open::Key;
                ("", Step::Key)
            }
            (Some(Open::Member), b'}') | (Some(Open::Item), b']') => ("", self.close()),
            (Some(Open::Member), _) => ("after object key:value pair", Step::End),
            (Some(Open::Item), b',') => ("", Step::Value),
            (Some(Open::Item), _) => ("after array element", Step::End),
            (None, _) => ("after top-level value", Step::End),
        };
        self.step = step;
        if place.is_empty() { Ok(()) } else { Err(place.to_owned()) }
    }
}

/// A byte as Go quotes the character of that number.
fn quoted(byte: u8) -> String {
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
    fn words() {
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
            assert_eq!(error(text.as_bytes()).as_deref(), Some(expected), "{text}");
        }
    }

    proptest! {
        /// Whatever the parser takes is right, and whatever it does not is wrong.
        #[test]
        fn agrees_with_the_parser(text in r#"([\[\]{}:,"\\ \t\n0-9.eE+-]|true|null|\\u00e9|"a"|"b":|\[1,|\{"x":){0,12}"#) {
            let valid = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
            prop_assert_eq!(error(text.as_bytes()).is_none(), valid, "{}", text);
        }
    }
}
