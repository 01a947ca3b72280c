//! Image references: `nginx`, `quay.io/team/app:v1`, `app@sha256:…`.

use std::fmt;

use crate::Digest;

const DEFAULT_REGISTRY: &str = "docker.io";
const MAX_NAME_BYTES: usize = 512;

/// An image reference with the defaults for registry, repository prefix and tag filled in.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference {
    /// The host with an optional port.
    pub registry: String,
    pub repository: String,
    pub tag: Option<String>,
    pub digest: Option<Digest>,
}

/// An image name that is not a valid reference.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("couldn't parse image name {name:?}: invalid reference format")]
pub struct InvalidReference {
    pub name: String,
}

impl Reference {
    pub fn parse(name: &str) -> Result<Reference, InvalidReference> {
        parse(name).ok_or_else(|| InvalidReference { name: name.to_owned() })
    }

    /// `registry/repository` without tag and digest.
    pub fn repository_path(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// `registry/repository@digest`.
    pub fn with_digest(&self, digest: &Digest) -> String {
        format!("{}@{digest}", self.repository_path())
    }
}

/// Omits the tag if there is a digest, because the digest alone selects the image.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        match (&self.digest, &self.tag) {
            (Some(digest), _) => write!(f, "@{digest}"),
            (None, Some(tag)) => write!(f, ":{tag}"),
            (None, None) => Ok(()),
        }
    }
}

fn parse(name: &str) -> Option<Reference> {
    if name.len() > MAX_NAME_BYTES {
        return None;
    }
    let (rest, digest) = match name.split_once('@') {
        Some((rest, digest)) => (rest, Some(Digest::parse(digest)?)),
        None => (name, None),
    };
    let (path, tag) = match rest.rsplit_once(':') {
        // A colon before a slash separates the port, not a tag.
        Some((path, tag)) if !tag.contains('/') => (path, Some(tag)),
        _ => (rest, None),
    };
    let (registry, repository) = match path.split_once('/') {
        Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => {
            (if first == "index.docker.io" { DEFAULT_REGISTRY } else { first }, rest.to_owned())
        }
        _ => (DEFAULT_REGISTRY, path.to_owned()),
    };
    let is_library = registry == DEFAULT_REGISTRY && !repository.contains('/');
    let repository = if is_library { format!("library/{repository}") } else { repository };
    let tag = tag.or(if digest.is_none() { Some("latest") } else { None });
    let is_valid = repository.split('/').all(is_component) && tag.is_none_or(is_tag) && is_host(registry);
    is_valid.then(|| Reference {
        registry: registry.to_owned(),
        repository,
        tag: tag.map(str::to_owned),
        digest,
    })
}

fn is_host(text: &str) -> bool {
    let (host, port) = text.rsplit_once(':').unwrap_or((text, "1"));
    let named = host.split('.').all(|part| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    });
    let literal = host.starts_with('[') && host.ends_with(']');
    (named || literal) && port.parse::<u16>().is_ok()
}

/// Lower-case letters and digits, separated by periods, underscores or dashes.
fn is_component(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let ends =
        bytes.first().is_some_and(|byte| plain(*byte)) && bytes.last().is_some_and(|byte| plain(*byte));
    ends && bytes.iter().all(|byte| plain(*byte) || b"._-".contains(byte)) && !text.contains("..")
}

fn is_tag(text: &str) -> bool {
    let starts = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let word = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    starts && text.len() <= 128 && text.bytes().all(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, expected: &str) {
        let parsed = Reference::parse(name).map(|reference| reference.to_string());
        assert_eq!(parsed.unwrap_or_else(|error| error.to_string()), expected);
    }

    #[test]
    fn names_are_completed_with_defaults() {
        let digest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        check("nginx", "docker.io/library/nginx:latest");
        check("luksa/kubia:v1", "docker.io/luksa/kubia:v1");
        check("docker.io/nginx", "docker.io/library/nginx:latest");
        check("localhost/a", "localhost/a:latest");
        check("127.0.0.1:5000/a/b:x_Y.1", "127.0.0.1:5000/a/b:x_Y.1");
        check(&format!("quay.io/a/b@{digest}"), &format!("quay.io/a/b@{digest}"));
        check(&format!("a:v1@{digest}"), &format!("docker.io/library/a@{digest}"));
    }

    #[test]
    fn rejects_invalid_names() {
        for name in
            ["", "NGINX", "a b", "a//b", "../a", "a:", "a@sha256:12", "a:-x", "quay.io/../../x", "a:x/y z"]
        {
            let expected = format!("couldn't parse image name {name:?}: invalid reference format");
            check(name, &expected);
        }
    }
}
