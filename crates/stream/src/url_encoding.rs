//! Percent-encoding in request paths and queries.

/// Decodes percent-encoding. Invalid sequences stay unchanged.
pub fn unescape(text: &str) -> String {
    if !text.contains('%') {
        return text.to_owned();
    }
    let bytes = text.as_bytes();
    let digit =
        |at: usize| char::from(*bytes.get(at)?).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        match (bytes[i], digit(i + 1), digit(i + 2)) {
            (b'%', Some(high), Some(low)) => {
                out.push(high << 4 | low);
                i += 3;
            }
            (byte, ..) => {
                out.push(byte);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The decoded names and values of a query string, where `+` means a space.
pub fn parse_query(query: &str) -> impl Iterator<Item = (String, String)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (unescape(&name.replace('+', " ")), unescape(&value.replace('+', " ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unescape_keeps_invalid_escapes() {
        for (text, expected) in [
            ("a+b", "a+b"),
            ("%41%2f%2F", "A//"),
            ("%zz%4", "%zz%4"),
            ("%", "%"),
            ("%%41", "%A"),
            ("%+5", "%+5"),
            ("%é0", "%é0"),
            ("%c3%a9%ff", "é\u{fffd}"),
        ] {
            assert_eq!(unescape(text), expected, "{text}");
        }
    }

    #[test]
    fn parse_query_returns_decoded_pairs() {
        let found: Vec<(String, String)> = parse_query("a=b%26c&&d+e=f%2Bg&h").collect();
        let expected =
            [("a", "b&c"), ("d e", "f+g"), ("h", "")].map(|(name, value)| (name.into(), value.into()));
        assert_eq!(found, expected);
    }
}
