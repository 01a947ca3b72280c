//! Credentials for registries, from the pod's pull secrets.

use std::collections::BTreeMap;

use base64::Engine as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Key, Object as _};
use runtime::cri::AuthConfig;
use serde_json::Value;

use crate::pulled::{self, PullSecret};
use crate::{Node, reference};

/// Docker's own registry as secrets name it, whatever images do.
const HUB: &str = "index.docker.io";

/// The key of a Secret with what docker keeps in its config.json.
pub const CONFIG: &str = ".dockerconfigjson";
/// The same as docker once wrote it.
pub const OLD_CONFIG: &str = ".dockercfg";

/// What is shown to a registry, and the secret or service account it is from, unless it is the node's own.
pub struct Shown {
    pub auth: AuthConfig,
    pub from: Option<PullSecret>,
}

/// What to try, in order: every credential for the image, of the pod's secrets, the ones that are meant for the least
/// first.
pub fn keys(node: &Node, pod: &Pod, image: &str) -> Vec<Shown> {
    let mut all = Vec::new();
    let mut missing = Vec::new();
    for name in named(pod) {
        let Some(secret) = node.ctx.caches.secrets().get(&Key::new(pod.namespace(), name)) else {
            missing.push(name);
            continue;
        };
        for (place, auth) in of_secret(secret.data.as_ref()) {
            let from = PullSecret {
                namespace: secret.namespace().to_owned(),
                name: secret.name().to_owned(),
                uid: secret.uid().to_owned(),
                hash: pulled::digest(&auth),
            };
            all.push((place, Shown { auth, from: Some(from) }));
        }
    }
    if let Some(message) = warning(&missing) {
        node.ctx.events.warning(pod, "FailedToRetrieveImagePullSecret", message);
    }
    chosen(all, image)
}

/// The secrets that a pod names. Some name none, which the API has always taken.
fn named(pod: &Pod) -> impl Iterator<Item = &str> {
    let secrets = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    secrets.map(|reference| reference.name.as_str()).filter(|name| !name.is_empty())
}

/// What is said where some are missing: the image may be had without them.
fn warning(missing: &[&str]) -> Option<String> {
    let names = missing.join(", ");
    (!missing.is_empty()).then(|| {
        format!(
            "Unable to retrieve some image pull secrets ({names}); attempting to pull the image may not succeed."
        )
    })
}

/// Those of the credentials for places that are for an image.
pub fn chosen<T>(mut all: Vec<(String, T)>, image: &str) -> Vec<T> {
    let repository = repository(image);
    let has_own = all.iter().any(|(place, _)| is_for(place, &repository));
    all.retain(|(place, _)| match has_own {
        true => is_for(place, &repository),
        false => place == HUB && repository.starts_with("docker.io/"),
    });
    all.sort_by(|(one, _), (other, _)| other.cmp(one));
    all.into_iter().map(|(_, one)| one).collect()
}

/// What a secret holds, by place; in docker's form of today or of old.
fn of_secret(data: Option<&BTreeMap<String, ByteString>>) -> Vec<(String, AuthConfig)> {
    let read = |name: &str| entries(name, &data?.get(name)?.0);
    read(CONFIG).or_else(|| read(OLD_CONFIG)).unwrap_or_default()
}

/// The credentials that a text of this form has, by place; `None` if it is not of this form.
pub fn entries(form: &str, text: &[u8]) -> Option<Vec<(String, AuthConfig)>> {
    let config: serde_json::Map<String, Value> = serde_json::from_slice(text).ok()?;
    let auths = match form {
        CONFIG => match config.get("auths") {
            None | Some(Value::Null) => return Some(Vec::new()),
            Some(auths) => auths.as_object()?.clone(),
        },
        _ => config,
    };
    Some(auths.iter().map(|(server, entry)| (place(server), key(entry))).collect())
}

fn key(entry: &Value) -> AuthConfig {
    let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    let (mut username, mut password) = (text("username"), text("password"));
    // Kubernetes takes it with and without what fills it up, in any lines.
    let auth: String = text("auth").split_whitespace().collect();
    let both = base64::engine::general_purpose::STANDARD_NO_PAD.decode(auth.trim_end_matches('=')).ok();
    if let Some((name, word)) = both
        .as_deref()
        .and_then(|bytes| std::str::from_utf8(bytes).ok())
        .and_then(|both| both.split_once(':'))
    {
        (username, password) = (name.to_owned(), word.to_owned());
    }
    // Not for which server: as secrets have it, that is no address to a runtime where there is a port.
    AuthConfig { username, password, ..AuthConfig::default() }
}

/// The image's repository in full.
pub fn repository(image: &str) -> String {
    let name = reference::without_tag(image);
    match name.split_once('/') {
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => name.to_owned(),
        Some(_) => format!("docker.io/{name}"),
        None => format!("docker.io/library/{name}"),
    }
}

/// A registry, or a part of it, as secrets name it: with or without a scheme and the version of its API.
pub fn place(server: &str) -> String {
    let rest = server.strip_prefix("https://").or_else(|| server.strip_prefix("http://")).unwrap_or(server);
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let path = match path.get(..4) {
        Some("/v1/" | "/v2/") => &path[3..],
        _ => path,
    };
    if path == "/" { host.to_owned() } else { format!("{host}{path}") }
}

/// Whether a place, of whose host any part may be a pattern, has a repository.
pub fn is_for(place: &str, repository: &str) -> bool {
    let apart = |text: &str| {
        let (host, path) = text.split_at(text.find('/').unwrap_or(text.len()));
        let (name, port) = host.rsplit_once(':').unwrap_or((host, ""));
        (name.split('.').map(str::to_owned).collect::<Vec<_>>(), port.to_owned(), path.to_owned())
    };
    let ((patterns, port, path), (parts, own_port, own_path)) = (apart(place), apart(repository));
    port == own_port
        && own_path.starts_with(&path)
        && patterns.len() == parts.len()
        && patterns.iter().zip(&parts).all(|(pattern, part)| fits(pattern.as_bytes(), part.as_bytes()))
}

/// Whether a text is as a pattern says, where `*` stands for anything and `?` for any one letter.
fn fits(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut seen) = (0, 0);
    // The last star, and what it stood for up to where.
    let mut star = None;
    while seen < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, seen));
                at += 1;
            }
            Some(letter) if *letter == b'?' || *letter == text[seen] => (at, seen) = (at + 1, seen + 1),
            _ => {
                let Some((begun, until)) = star else { return false };
                star = Some((begun, until + 1));
                (at, seen) = (begun + 1, until + 1);
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
        let all = servers.iter().map(|server| (place(server), *server)).collect();
        assert_eq!(chosen(all, image), expected, "{image}");
    }

    #[test]
    fn credentials_are_for_places() {
        const HUB: &str = "https://index.docker.io/v1/";
        check(&[HUB, "quay.io"], "busybox:1", &[HUB]);
        check(&[HUB], "luksa/kubia:v1", &[HUB]);
        check(&[HUB, "docker.io"], "busybox", &["docker.io"]);
        check(&[HUB], "quay.io/a", &[]);
        check(&["r.example", "r.example:5000"], "r.example:5000/a/b:1", &["r.example:5000"]);
        check(&["http://r.example/v2/"], "r.example/a@sha256:0", &["http://r.example/v2/"]);
        check(&["r.example", "r.example/a", "r.example/b"], "r.example/a/x", &["r.example/a", "r.example"]);
        check(&["*.example", "a*.example", "*.*.example"], "r.example/a", &["*.example"]);
        check(&["r?.*example"], "r1.my-example/a", &["r?.*example"]);
        check(&["", "/", "*"], "r.example/a", &[]);
    }

    #[test]
    fn secrets_that_are_missing_are_told_of() {
        let secrets = serde_json::json!([{"name": "a"}, {"name": ""}, {}, {"name": "b"}]);
        let spec = serde_json::json!({"containers": [], "imagePullSecrets": secrets});
        let pod: Pod = serde_json::from_value(serde_json::json!({"spec": spec})).expect("a pod");
        let named: Vec<&str> = named(&pod).collect();
        assert_eq!(named, ["a", "b"]);
        let told = "Unable to retrieve some image pull secrets (a, b); attempting to pull the image may not succeed.";
        assert_eq!(warning(&named).as_deref(), Some(told));
        assert_eq!(warning(&[]), None);
    }

    #[test]
    fn patterns() {
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
            assert_eq!(fits(pattern.as_bytes(), text.as_bytes()), expected, "{pattern} {text}");
        }
        // Not even one that is made to take long does.
        assert!(!fits("*a".repeat(500).as_bytes(), "a".repeat(499).as_bytes()));
    }

    #[test]
    fn secrets_come_in_two_forms() {
        let servers = |name: &str, text: &str| {
            let data = BTreeMap::from([(name.to_owned(), ByteString(text.into()))]);
            of_secret(Some(&data)).into_iter().map(|(place, _)| place).collect::<Vec<_>>()
        };
        assert_eq!(servers(".dockerconfigjson", r#"{"auths": {"a": {}}}"#), ["a"]);
        assert_eq!(servers(".dockercfg", r#"{"a": {}}"#), ["a"]);
        for (name, text) in [(".dockerconfigjson", "[]"), (".dockercfg", "x"), ("other", "{}")] {
            assert!(servers(name, text).is_empty(), "{text}");
        }
    }

    #[test]
    fn credentials_come_in_two_forms() {
        for auth in ["bWU6c2VzYW1lcw==", "bWU6c2VzYW1lcw", "bWU6c2Vz\nYW1lcw==\n"] {
            let read = key(&serde_json::json!({"auth": auth}));
            assert_eq!((read.username.as_str(), read.password.as_str()), ("me", "sesames"), "{auth:?}");
        }
    }
}
