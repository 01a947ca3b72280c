//! Credentials for registries, from the pod's pull secrets.

use base64::Engine as _;
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Key, Object as _};
use runtime::cri::AuthConfig;
use serde_json::Value;

use crate::Node;

/// What to try, in order: every credential for the image's registry, or none at all.
pub fn keys(node: &Node, pod: &Pod, image: &str) -> Vec<Option<AuthConfig>> {
    let registry = registry(image);
    let secrets = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    let mut keys = Vec::new();
    for reference in secrets {
        let Some(secret) = node.ctx.caches.secrets().get(&Key::new(pod.namespace(), &reference.name)) else {
            continue;
        };
        let data = secret.data.as_ref().and_then(|data| data.get(".dockerconfigjson"));
        let config: Value = data.and_then(|data| serde_json::from_slice(&data.0).ok()).unwrap_or_default();
        for (server, entry) in config["auths"].as_object().into_iter().flatten() {
            if host(server) == registry {
                keys.push(Some(key(server, entry)));
            }
        }
    }
    if keys.is_empty() {
        keys.push(None);
    }
    keys
}

fn key(server: &str, entry: &Value) -> AuthConfig {
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
    AuthConfig { username, password, server_address: server.to_owned(), ..AuthConfig::default() }
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
    fn credentials_come_in_two_forms() {
        let auth = serde_json::json!({"auth": "bWU6c2VzYW1l"});
        let read = key("x", &auth);
        assert_eq!((read.username.as_str(), read.password.as_str()), ("me", "sesame"));
    }
}
