//! Registry credentials from the image pull secrets of a pod.

use std::collections::BTreeMap;

use base64::Engine as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Key, Object as _};
use runtime::cri::AuthConfig;
use serde_json::Value;

use crate::image_pull_records::{self, PullSecret};
use crate::{Node, image_reference};

/// Docker Hub as pull secrets name it, whatever images use.
const DOCKER_HUB: &str = "index.docker.io";

/// The key of a Secret with the content of Docker's `config.json`.
pub const DOCKER_CONFIG_JSON: &str = ".dockerconfigjson";
/// The key of a Secret with the older format of Docker.
pub const DOCKER_CFG: &str = ".dockercfg";

/// Credentials for a registry, and the Secret or service account they come from; `None` if they are
/// the node's own.
pub struct RegistryCredential {
    pub auth: AuthConfig,
    pub source: Option<PullSecret>,
}

/// All credentials from the pod's pull secrets that match the image, in the order in which they are
/// tried: the most specific first.
pub fn registry_credentials(node: &Node, pod: &Pod, image: &str) -> Vec<RegistryCredential> {
    let mut all = Vec::new();
    let mut missing = Vec::new();
    for name in secret_names(pod) {
        let Some(secret) = node.ctx.caches.secrets().get(&Key::new(pod.namespace(), name)) else {
            missing.push(name);
            continue;
        };
        for (registry, auth) in secret_credentials(secret.data.as_ref()) {
            let from = PullSecret {
                namespace: secret.namespace().to_owned(),
                name: secret.name().to_owned(),
                uid: secret.uid().to_owned(),
                hash: image_pull_records::credential_hash(&auth),
            };
            all.push((registry, RegistryCredential { auth, source: Some(from) }));
        }
    }
    if let Some(message) = missing_secrets_message(&missing) {
        node.ctx.events.warning(pod, "FailedToRetrieveImagePullSecret", message);
    }
    matching_credentials(all, image)
}

/// The pull secrets of a pod. References without a name are valid in the API and are ignored.
fn secret_names(pod: &Pod) -> impl Iterator<Item = &str> {
    let secrets = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    secrets.map(|reference| reference.name.as_str()).filter(|name| !name.is_empty())
}

/// The event message about missing secrets. They are no error, because the image may not need them.
fn missing_secrets_message(missing: &[&str]) -> Option<String> {
    let names = missing.join(", ");
    (!missing.is_empty()).then(|| {
        format!(
            "Unable to retrieve some image pull secrets ({names}); attempting to pull the image may not succeed."
        )
    })
}

/// The credentials that match an image; each comes with its registry.
pub fn matching_credentials<T>(mut all: Vec<(String, T)>, image: &str) -> Vec<T> {
    let repository = repository(image);
    let has_own = all.iter().any(|(registry, _)| matches_repository(registry, &repository));
    all.retain(|(registry, _)| match has_own {
        true => matches_repository(registry, &repository),
        false => registry == DOCKER_HUB && repository.starts_with("docker.io/"),
    });
    all.sort_by(|(one, _), (other, _)| other.cmp(one));
    all.into_iter().map(|(_, one)| one).collect()
}

/// The credentials in a Secret by registry, in the current or the older Docker format.
fn secret_credentials(data: Option<&BTreeMap<String, ByteString>>) -> Vec<(String, AuthConfig)> {
    let read = |name: &str| parse_docker_config(name, &data?.get(name)?.0);
    read(DOCKER_CONFIG_JSON).or_else(|| read(DOCKER_CFG)).unwrap_or_default()
}

/// The credentials in a Docker configuration by registry; `None` if it is not of this format.
pub fn parse_docker_config(form: &str, text: &[u8]) -> Option<Vec<(String, AuthConfig)>> {
    let config: serde_json::Map<String, Value> = serde_json::from_slice(text).ok()?;
    let registries = match form {
        DOCKER_CONFIG_JSON => match config.get("auths") {
            None | Some(Value::Null) => return Some(Vec::new()),
            Some(registries) => registries.as_object()?.clone(),
        },
        _ => config,
    };
    Some(registries.iter().map(|(server, entry)| (normalize_registry(server), auth_config(entry))).collect())
}

fn auth_config(entry: &Value) -> AuthConfig {
    let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    let (mut username, mut password) = (text("username"), text("password"));
    // Upstream accepts base64 with and without padding, and with line breaks.
    let auth: String = text("auth").split_whitespace().collect();
    let both = base64::engine::general_purpose::STANDARD_NO_PAD.decode(auth.trim_end_matches('=')).ok();
    if let Some((name, secret)) = both
        .as_deref()
        .and_then(|bytes| std::str::from_utf8(bytes).ok())
        .and_then(|both| both.split_once(':'))
    {
        (username, password) = (name.to_owned(), secret.to_owned());
    }
    // `server_address` is not set: a runtime cannot parse it in the form of secrets if it contains
    // a port.
    AuthConfig { username, password, ..AuthConfig::default() }
}

/// The full name of the image's repository.
pub fn repository(image: &str) -> String {
    let name = image_reference::without_tag(image);
    match name.split_once('/') {
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => name.to_owned(),
        Some(_) => format!("docker.io/{name}"),
        None => format!("docker.io/library/{name}"),
    }
}

/// The registry, and the path in it, of a key in a secret: without scheme and API version.
pub fn normalize_registry(server: &str) -> String {
    let rest = server.strip_prefix("https://").or_else(|| server.strip_prefix("http://")).unwrap_or(server);
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let path = match path.get(..4) {
        Some("/v1/" | "/v2/") => &path[3..],
        _ => path,
    };
    if path == "/" { host.to_owned() } else { format!("{host}{path}") }
}

/// Whether a registry pattern matches a repository. Each label of its host may contain wildcards.
pub fn matches_repository(registry: &str, repository: &str) -> bool {
    let split = |text: &str| {
        let (host, path) = text.split_at(text.find('/').unwrap_or(text.len()));
        let (name, port) = host.rsplit_once(':').unwrap_or((host, ""));
        (name.split('.').map(str::to_owned).collect::<Vec<_>>(), port.to_owned(), path.to_owned())
    };
    let ((patterns, port, path), (parts, own_port, own_path)) = (split(registry), split(repository));
    port == own_port
        && own_path.starts_with(&path)
        && patterns.len() == parts.len()
        && patterns
            .iter()
            .zip(&parts)
            .all(|(pattern, part)| matches_glob(pattern.as_bytes(), part.as_bytes()))
}

/// Glob matching: `*` matches any text, `?` any one character. It only backtracks to the last star,
/// so that no pattern takes exponential time.
fn matches_glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut seen) = (0, 0);
    // The position of the last star, and the end of the text that it matches.
    let mut star = None;
    while seen < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, seen));
                at += 1;
            }
            Some(letter) if *letter == b'?' || *letter == text[seen] => (at, seen) = (at + 1, seen + 1),
            _ => {
                let Some((start, until)) = star else { return false };
                star = Some((start, until + 1));
                (at, seen) = (start + 1, until + 1);
            }
        }
    }
    pattern[at..].iter().all(|letter| *letter == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(servers: &[&str], image: &str, expected: &[&str]) {
        let all = servers.iter().map(|server| (normalize_registry(server), *server)).collect();
        assert_eq!(matching_credentials(all, image), expected, "{image}");
    }

    #[test]
    fn credentials_match_registries() {
        const DOCKER_HUB: &str = "https://index.docker.io/v1/";
        check(&[DOCKER_HUB, "quay.io"], "busybox:1", &[DOCKER_HUB]);
        check(&[DOCKER_HUB], "luksa/kubia:v1", &[DOCKER_HUB]);
        check(&[DOCKER_HUB, "docker.io"], "busybox", &["docker.io"]);
        check(&[DOCKER_HUB], "quay.io/a", &[]);
        check(&["r.example", "r.example:5000"], "r.example:5000/a/b:1", &["r.example:5000"]);
        check(&["http://r.example/v2/"], "r.example/a@sha256:0", &["http://r.example/v2/"]);
        check(&["r.example", "r.example/a", "r.example/b"], "r.example/a/x", &["r.example/a", "r.example"]);
        check(&["*.example", "a*.example", "*.*.example"], "r.example/a", &["*.example"]);
        check(&["r?.*example"], "r1.my-example/a", &["r?.*example"]);
        check(&["", "/", "*"], "r.example/a", &[]);
    }

    #[test]
    fn missing_secrets_are_reported() {
        let secrets = serde_json::json!([{"name": "a"}, {"name": ""}, {}, {"name": "b"}]);
        let spec = serde_json::json!({"containers": [], "imagePullSecrets": secrets});
        let pod: Pod = serde_json::from_value(serde_json::json!({"spec": spec})).expect("a pod");
        let named: Vec<&str> = secret_names(&pod).collect();
        assert_eq!(named, ["a", "b"]);
        let expected = "Unable to retrieve some image pull secrets (a, b); attempting to pull the image may not succeed.";
        assert_eq!(missing_secrets_message(&named).as_deref(), Some(expected));
        assert_eq!(missing_secrets_message(&[]), None);
    }

    #[test]
    fn glob_patterns() {
        for (pattern, text, expected) in [
            ("", "", true),
            ("*", "", true),
            ("**", "abc", true),
            ("a*c", "abbc", true),
            ("a*c", "abbcd", false),
            ("*ab*ab", "abab", true),
            ("a?c", "ac", false),
            ("abc", "ab", false),
        ] {
            assert_eq!(matches_glob(pattern.as_bytes(), text.as_bytes()), expected, "{pattern} {text}");
        }
        // Takes exponential time with full backtracking.
        assert!(!matches_glob("*a".repeat(500).as_bytes(), "a".repeat(499).as_bytes()));
    }

    #[test]
    fn reads_both_docker_secret_formats() {
        let servers = |name: &str, text: &str| {
            let data = BTreeMap::from([(name.to_owned(), ByteString(text.into()))]);
            secret_credentials(Some(&data)).into_iter().map(|(registry, _)| registry).collect::<Vec<_>>()
        };
        assert_eq!(servers(".dockerconfigjson", r#"{"auths": {"a": {}}}"#), ["a"]);
        assert_eq!(servers(".dockercfg", r#"{"a": {}}"#), ["a"]);
        for (name, text) in [(".dockerconfigjson", "[]"), (".dockercfg", "x"), ("other", "{}")] {
            assert!(servers(name, text).is_empty(), "{text}");
        }
    }

    #[test]
    fn reads_auth_with_and_without_padding() {
        for auth in ["bWU6c2VzYW1lcw==", "bWU6c2VzYW1lcw", "bWU6c2Vz\nYW1lcw==\n"] {
            let read = auth_config(&serde_json::json!({"auth": auth}));
            assert_eq!((read.username.as_str(), read.password.as_str()), ("me", "sesames"), "{auth:?}");
        }
    }
}
