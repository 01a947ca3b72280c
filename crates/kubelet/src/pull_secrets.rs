//! Credentials for registries, from the pod's pull secrets.

use std::collections::BTreeMap;

use base64::Engine as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Key, Object as _};
use runtime::cri::AuthConfig;
use serde_json::Value;

use crate::Node;
use crate::pulled::{self, PullSecret};

/// What is shown to a registry, and the secret it is from.
pub struct Shown {
    pub auth: AuthConfig,
    pub from: PullSecret,
}

/// What to try, in order: every credential for the image's registry, of the pod's secrets.
pub fn keys(node: &Node, pod: &Pod, image: &str) -> Vec<Shown> {
    let registry = registry(image);
    let secrets = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    let mut keys = Vec::new();
    for reference in secrets {
        let Some(secret) = node.ctx.caches.secrets().get(&Key::new(pod.namespace(), &reference.name)) else {
            continue;
        };
        for (server, entry) in auths(secret.data.as_ref()) {
            if host(&server) == registry {
                let auth = key(&entry);
                let from = PullSecret {
                    namespace: secret.namespace().to_owned(),
                    name: secret.name().to_owned(),
                    uid: secret.uid().to_owned(),
                    hash: pulled::digest(&auth),
                };
                keys.push(Shown { auth, from });
            }
        }
    }
    keys
}

/// What a secret holds, by registry; in docker's form of today or of old.
fn auths(data: Option<&BTreeMap<String, ByteString>>) -> serde_json::Map<String, Value> {
    let read = |name: &str| -> Option<Value> { serde_json::from_slice(&data?.get(name)?.0).ok() };
    let auths = match read(".dockerconfigjson") {
        Some(config) => config["auths"].clone(),
        None => read(".dockercfg").unwrap_or_default(),
    };
    match auths {
        Value::Object(auths) => auths,
        _ => serde_json::Map::new(),
    }
}

fn key(entry: &Value) -> AuthConfig {
    let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    let (mut username, mut password) = (text("username"), text("password"));
    let both = base64::engine::general_purpose::STANDARD.decode(text("auth")).ok();
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

/// The host of an image's registry; images without one are the hub's.
fn registry(image: &str) -> &str {
    match image.split_once('/') {
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => first,
        _ => "docker.io",
    }
}

fn host(server: &str) -> &str {
    let server = server.trim_start_matches("https://").trim_start_matches("http://");
    match server.split('/').next().unwrap_or(server) {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        host => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_are_known_by_their_hosts() {
        assert_eq!(registry("busybox:1"), "docker.io");
        assert_eq!(registry("luksa/kubia:v1"), "docker.io");
        assert_eq!(registry("registry.example:5000/a/b"), "registry.example:5000");
        assert_eq!(host("https://index.docker.io/v1/"), "docker.io");
    }

    #[test]
    fn secrets_come_in_two_forms() {
        let servers = |name: &str, text: &str| {
            let data = BTreeMap::from([(name.to_owned(), ByteString(text.into()))]);
            auths(Some(&data)).keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(servers(".dockerconfigjson", r#"{"auths": {"a": {}}}"#), ["a"]);
        assert_eq!(servers(".dockercfg", r#"{"a": {}}"#), ["a"]);
        for (name, text) in [(".dockerconfigjson", "[]"), (".dockercfg", "x"), ("other", "{}")] {
            assert!(servers(name, text).is_empty(), "{text}");
        }
    }

    #[test]
    fn credentials_come_in_two_forms() {
        let auth = serde_json::json!({"auth": "bWU6c2VzYW1l"});
        let read = key(&auth);
        assert_eq!((read.username.as_str(), read.password.as_str()), ("me", "sesame"));
    }
}
