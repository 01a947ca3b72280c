//! Unescapes string and bytes literals.

/// The value of a literal, given with its quotes and an optional `r` before them.
pub(super) fn unescape_literal(text: &str, bytes: bool) -> Result<Vec<u8>, &'static str> {
    let raw = text.starts_with(['r', 'R']);
    let text = &text[usize::from(raw)..];
    let quotes =
        if text.len() >= 6 && (text.starts_with("\"\"\"") || text.starts_with("'''")) { 3 } else { 1 };
    let inner = text.get(quotes..text.len().saturating_sub(quotes)).ok_or("unable to unescape string")?;
    let inner = inner.replace("\r\n", "\n").replace('\r', "\n");
    if raw || !inner.contains('\\') {
        return Ok(inner.into_bytes());
    }
    unescape(&inner, bytes)
}

fn unescape(inner: &str, bytes: bool) -> Result<Vec<u8>, &'static str> {
    let mut out = Vec::with_capacity(inner.len());
    let mut rest = inner;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        if c != '\\' {
            push(&mut out, c);
            continue;
        }
        let escape = rest.chars().next().ok_or("unable to unescape string, found '\\' as last character")?;
        rest = &rest[escape.len_utf8()..];
        let simple = match escape {
            'a' => Some(7),
            'b' => Some(8),
            'f' => Some(12),
            'n' => Some(b'\n'),
            'r' => Some(b'\r'),
            't' => Some(b'\t'),
            'v' => Some(11),
            '\\' | '\'' | '"' | '`' | '?' => Some(escape as u8),
            _ => None,
        };
        if let Some(byte) = simple {
            out.push(byte);
            continue;
        }
        let (digits, radix) = match escape {
            'x' | 'X' => (2, 16),
            'u' => (4, 16),
            'U' => (8, 16),
            '0'..='3' => (2, 8),
            _ => return Err("unable to unescape string"),
        };
        let number = rest.get(..digits).ok_or("unable to unescape string")?;
        rest = &rest[digits..];
        let leading = if radix == 8 { (escape as u32 - '0' as u32) * 64 } else { 0 };
        let value = u32::from_str_radix(number, radix).map_err(|_| "unable to unescape string")? + leading;
        if bytes && !matches!(escape, 'u' | 'U') {
            out.push(u8::try_from(value).map_err(|_| "unable to unescape string")?);
        } else {
            push(&mut out, char::from_u32(value).ok_or("invalid unicode code point")?);
        }
    }
    Ok(out)
}

fn push(out: &mut Vec<u8>, c: char) {
    out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
}
