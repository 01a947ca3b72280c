//! The default pull policy of an image reference.

use serde_json::Value;

use crate::json::JsonExt;

/// `Always` if the tag is `latest`, explicitly or implied.
pub(super) fn pull_policy(image: &str) -> Value {
    if parse_tag(image) == Some("latest") { "Always".into() } else { "IfNotPresent".into() }
}

/// Defaults `imagePullPolicy` of a container.
pub(super) fn set_pull_policy(container: &mut Value) {
    if container.text("imagePullPolicy").is_empty() {
        container.set("imagePullPolicy", pull_policy(container.text("image")));
    }
}

/// The tag of an image reference: `latest` without tag and digest, `None` for an invalid reference.
fn parse_tag(image: &str) -> Option<&str> {
    let (named, digest) = match image.split_once('@') {
        Some((named, digest)) => (named, Some(digest)),
        None => (image, None),
    };
    if digest.is_some_and(|digest| !is_digest(digest)) {
        return None;
    }
    // A colon before the last slash separates the registry port.
    let (name, tag) = match named.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (named, None),
    };
    if !is_name(name) || tag.is_some_and(|tag| !is_tag(tag)) {
        return None;
    }
    match (tag, digest) {
        (None, None) => Some("latest"),
        (tag, _) => tag,
    }
}

fn is_name(name: &str) -> bool {
    let (registry, path) = match name.split_once('/') {
        Some((first, rest)) if has_registry_syntax(first) => (Some(first), rest),
        _ => (None, name),
    };
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    let is_image_id = name.len() == 64 && name.bytes().all(hex);
    registry.is_none_or(is_registry) && path.split('/').all(is_component) && !is_image_id
}

fn has_registry_syntax(first: &str) -> bool {
    first.contains(['.', ':']) || first == "localhost" || first.bytes().any(|b| b.is_ascii_uppercase())
}

fn is_registry(registry: &str) -> bool {
    let (host, port) = match registry.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (registry, None),
    };
    let label = |label: &str| {
        let is_letter_or_digit = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = label.as_bytes();
        is_letter_or_digit(bytes.first())
            && is_letter_or_digit(bytes.last())
            && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
    };
    let ipv6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host_fits = match ipv6 {
        Some(ip) => !ip.is_empty() && ip.bytes().all(|b| b.is_ascii_hexdigit() || b == b':'),
        None => host.split('.').all(label),
    };
    host_fits && port.is_none_or(|port| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()))
}

/// Lower-case letters and digits, separated by `.`, `_`, `__` or dashes.
fn is_component(component: &str) -> bool {
    let lower = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let mut separators = component.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    let bytes = component.as_bytes();
    let ends = |b: Option<&u8>| b.is_some_and(|b| lower(*b));
    ends(bytes.first())
        && ends(bytes.last())
        && separators
            .all(|between| matches!(between, "" | "." | "_" | "__") || between.bytes().all(|b| b == b'-'))
}

fn is_tag(tag: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    tag.len() <= 128
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|b| word(b) || b == b'.' || b == b'-')
}

fn is_digest(digest: &str) -> bool {
    let Some((algorithm, hash)) = digest.split_once(':') else { return false };
    let part = |part: &str| {
        part.bytes().next().is_some_and(|b| b.is_ascii_alphabetic())
            && part.bytes().all(|b| b.is_ascii_alphanumeric())
    };
    algorithm.split(['-', '_', '+', '.']).all(part)
        && hash.len() >= 32
        && hash.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(image: &str, expected: Option<&str>) {
        assert_eq!(parse_tag(image), expected, "the tag of {image}");
    }

    #[test]
    fn parse_tag_returns_tag_or_latest() {
        let digest = format!("sha256:{}", "a".repeat(64));
        check("nginx", Some("latest"));
        check("nginx:1.27", Some("1.27"));
        check("library/nginx", Some("latest"));
        check("registry.k8s.io/pause:3.10", Some("3.10"));
        check("localhost:5000/a/b", Some("latest"));
        check("localhost:5000/a/b:v1", Some("v1"));
        check("[::1]:5000/a:v1", Some("v1"));
        check(&format!("nginx@{digest}"), None);
        check(&format!("nginx:latest@{digest}"), Some("latest"));
        check("Nginx", None);
        check("Nginx/a", Some("latest"));
        check("a b", None);
        check("", None);
        check("a..b", None);
        check("a__b/c--d", Some("latest"));
        check("a:", None);
        check("a@sha256:1", None);
        check("é", None);
    }
}
