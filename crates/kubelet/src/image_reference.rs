//! Image references: validation and the default tag.

const INVALID: &str = "invalid reference format";

/// The reference with the tag `latest` if it has neither tag nor digest. Errors are upstream's.
pub fn with_tag(name: &str) -> Result<String, String> {
    let invalid = || INVALID.to_owned();
    let (rest, digest) = match name.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (name, None),
    };
    if !digest.is_none_or(is_digest) {
        return Err(invalid());
    }
    let last = rest.rfind('/').map_or(0, |at| at + 1);
    let (path, tag) = match rest[last..].find(':') {
        Some(at) => (&rest[..last + at], Some(&rest[last + at + 1..])),
        None => (rest, None),
    };
    if !tag.is_none_or(is_tag) {
        return Err(invalid());
    }
    let (domain, path) = match path.split_once('/') {
        Some((domain, path)) if domain.contains(['.', ':']) || domain == "localhost" => (domain, path),
        _ => ("", path),
    };
    if path.bytes().any(|byte| byte.is_ascii_uppercase()) && is_path(&path.to_ascii_lowercase()) {
        let whole = if domain.is_empty() && !path.contains('/') {
            format!("library/{path}")
        } else {
            path.to_owned()
        };
        return Err(format!("{INVALID}: repository name ({whole}) must be lowercase"));
    }
    if !is_path(path) || !(domain.is_empty() || is_domain(domain)) {
        return Err(invalid());
    }
    match (tag, digest) {
        (None, None) => Ok(format!("{name}:latest")),
        _ => Ok(name.to_owned()),
    }
}

/// The reference without tag and digest.
pub fn without_tag(name: &str) -> &str {
    let rest = name.split_once('@').map_or(name, |(rest, _)| rest);
    let last = rest.rfind('/').map_or(0, |at| at + 1);
    rest[last..].find(':').map_or(rest, |at| &rest[..last + at])
}

fn is_digest(text: &str) -> bool {
    text.split_once(':').is_some_and(|(algorithm, hex)| {
        let named = algorithm.starts_with(|c: char| c.is_ascii_alphabetic());
        named && hex.len() >= 32 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

fn is_tag(text: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let mut bytes = text.bytes();
    bytes.next().is_some_and(word)
        && bytes.all(|byte| word(byte) || matches!(byte, b'.' | b'-'))
        && text.len() <= 128
}

fn is_domain(text: &str) -> bool {
    let (host, port) = text.rsplit_once(':').unwrap_or((text, "1"));
    let part = |part: &str| {
        let inner = part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        inner && !part.is_empty() && !part.starts_with('-') && !part.ends_with('-')
    };
    let is_host = host.starts_with('[') && host.ends_with(']') || host.split('.').all(part);
    is_host && !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit())
}

/// Components of lowercase letters and digits with single separators (or several dashes, or two
/// underscores) in between.
fn is_path(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let component = |part: &str| {
        let bytes = part.as_bytes();
        let ends =
            bytes.first().is_some_and(|byte| plain(*byte)) && bytes.last().is_some_and(|byte| plain(*byte));
        let separators =
            part.split(|c: char| plain(u8::try_from(c).unwrap_or(0))).filter(|gap| !gap.is_empty());
        let is_separator =
            |gap: &str| matches!(gap, "." | "_" | "__") || gap.bytes().all(|byte| byte == b'-');
        ends && separators.into_iter().all(is_separator)
    };
    text.split('/').all(component)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, expected: Result<&str, &str>) {
        assert_eq!(with_tag(name), expected.map(str::to_owned).map_err(str::to_owned), "{name}");
    }

    #[test]
    fn image_names() {
        check("busybox", Ok("busybox:latest"));
        check("busybox:1.36", Ok("busybox:1.36"));
        check("localhost:5000/a/b", Ok("localhost:5000/a/b:latest"));
        check("registry.k8s.io/pause:3.10", Ok("registry.k8s.io/pause:3.10"));
        check("a__b/c--d.e", Ok("a__b/c--d.e:latest"));
        let digest = format!("busybox@sha256:{}", "a".repeat(64));
        check(&digest, Ok(&digest));
        check("", Err(INVALID));
        check("a b", Err(INVALID));
        check("a:", Err(INVALID));
        check("a:b:c", Err(INVALID));
        check("a//b", Err(INVALID));
        check("a@sha256:12", Err(INVALID));
        check("-a", Err(INVALID));
        check("a..b", Err(INVALID));
        check(
            "BusyBox",
            Err("invalid reference format: repository name (library/BusyBox) must be lowercase"),
        );
        check("é", Err(INVALID));
    }
}
