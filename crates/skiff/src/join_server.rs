//! The server's side of joining: the join token, the permissions of joining nodes, and the published
//! cluster configuration.

use std::path::Path;

use anyhow::Context as _;
use base64::Engine as _;
use client::Client;
use jiff::Timestamp;
use pki::join::{BootstrapToken, Fingerprint, JoinToken};
use serde_json::{Value, json};
use std::str::FromStr as _;

use crate::cluster_info::ClusterInfo;

/// The ConfigMap with the cluster configuration for nodes.
pub const CLUSTER_INFO_PATH: &str = "/api/v1/namespaces/kube-system/configmaps/skiff-cluster";
/// Path at which nodes open their tunnels.
pub const TUNNEL_PATH: &str = "/skiff/tunnel";
/// Where bootstrap tokens are stored, and the type and name prefix of their Secrets.
pub const SECRETS_PATH: &str = "/api/v1/namespaces/kube-system/secrets";
pub const TOKEN_TYPE: &str = "bootstrap.kubernetes.io/token";
pub const TOKEN_PREFIX: &str = "bootstrap-token-";
/// Label of the server's own token among the bootstrap tokens.
const JOIN_TOKEN_LABEL: &str = "skiff.io/join-token";
/// Group of clients that authenticate with a join token.
const BOOTSTRAP_GROUP: &str = "system:bootstrappers:skiff:nodes";
const NODES_GROUP: &str = "system:nodes";
const RBAC_PATH: &str = "/apis/rbac.authorization.k8s.io/v1";

/// The join token of this server: the one from --token, else the stored one, else a new one. It is
/// stored in a file that only its owner may read.
pub fn load_or_create_token(
    data_dir: &Path,
    requested: Option<&str>,
    authority: &str,
) -> anyhow::Result<JoinToken> {
    let authority = Fingerprint::from_pem(authority)?;
    let path = data_dir.join("token");
    let stored = match std::fs::read_to_string(&path) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let bootstrap = match (requested, &stored) {
        (Some(text), _) => {
            let token = JoinToken::from_str(text).context("--token")?;
            let other = token.authority.is_some_and(|pinned| pinned != authority);
            anyhow::ensure!(!other, "--token belongs to a cluster with another CA");
            token.bootstrap
        }
        (None, Some(text)) => {
            JoinToken::from_str(text).with_context(|| path.display().to_string())?.bootstrap
        }
        (None, None) => BootstrapToken::random()?,
    };
    let token = JoinToken { authority: Some(authority), bootstrap };
    let text = format!("{}\n", token.to_secret_string());
    if stored.as_ref() != Some(&text) {
        pki::write_file(&path, text.as_bytes(), 0o600)?;
    }
    Ok(token)
}

/// A token as the bootstrap token Secret that the API server's authenticator reads.
pub fn token_secret(token: &BootstrapToken, description: &str, expires: Option<Timestamp>) -> Value {
    let encoded = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let mut secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": TOKEN_TYPE,
        "metadata": {"name": format!("{TOKEN_PREFIX}{}", token.id), "namespace": "kube-system"},
        "data": {
            "token-id": encoded(&token.id), "token-secret": encoded(&token.secret),
            "auth-extra-groups": encoded(BOOTSTRAP_GROUP), "usage-bootstrap-authentication": encoded("true"),
            "description": encoded(description),
        },
    });
    if let Some(expires) = expires {
        let expires = expires.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        secret["data"]["expiration"] = json!(encoded(&expires));
    }
    secret
}

/// Creates the objects that joining needs: the token, RBAC rules for the token and for nodes, and the
/// cluster configuration.
pub async fn ensure_join_objects(
    client: &Client,
    token: &BootstrapToken,
    cluster_info: &ClusterInfo,
) -> anyhow::Result<()> {
    let secrets = SECRETS_PATH;
    let named = |name: &str| json!({"name": name});
    let mut secret = token_secret(token, "For nodes that join by `skiff agent`.", None);
    secret["metadata"]["labels"] = json!({JOIN_TOKEN_LABEL: "true"});
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "skiff-cluster"}, "data": cluster_info.to_data(),
    });
    let read = json!(["get", "list", "watch"]);
    let role = json!({"metadata": named("skiff:node"), "rules": [
        // The proxy, the DNS server and NetworkPolicies need objects of all namespaces.
        {"apiGroups": [""], "verbs": read,
         "resources": ["pods", "services", "nodes", "namespaces", "persistentvolumes"]},
        {"apiGroups": ["discovery.k8s.io"], "verbs": read, "resources": ["endpointslices"]},
        {"apiGroups": ["networking.k8s.io"], "verbs": read, "resources": ["networkpolicies"]},
        {"apiGroups": ["certificates.k8s.io"], "verbs": ["create"],
         "resources": ["certificatesigningrequests/selfnodeserver"]},
        {"nonResourceURLs": [TUNNEL_PATH], "verbs": ["get"]},
    ]});
    let cluster_info_role = json!({"metadata": named("skiff:node"), "rules": [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["skiff-cluster"], "verbs": ["get"]},
    ]});
    // Upstream leaves the approval of serving certificates to administrators. Here the certificate
    // controller validates and approves them.
    let approval_role = json!({"metadata": named("skiff:serving-approver"), "rules": [
        {"apiGroups": ["certificates.k8s.io"], "resources": ["signers"], "verbs": ["approve"],
         "resourceNames": ["kubernetes.io/kubelet-serving"]},
    ]});
    let binding_to = |name: &str, kind: &str, role: &str, subject: Value| {
        json!({
            "metadata": named(name),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
            "subjects": [subject],
        })
    };
    let binding = |name: &str, kind: &str, role: &str, group: &str| {
        let group = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group});
        binding_to(name, kind, role, group)
    };
    let controller =
        json!({"kind": "ServiceAccount", "namespace": "kube-system", "name": "certificate-controller"});
    let csr = "system:certificates.k8s.io:certificatesigningrequests";
    let (client_role, own_role) = (format!("{csr}:nodeclient"), format!("{csr}:selfnodeclient"));
    let roles = format!("{RBAC_PATH}/clusterroles");
    let bindings = format!("{RBAC_PATH}/clusterrolebindings");
    let objects: [(&str, &str, Value); 11] = [
        (secrets, "data", secret),
        (CLUSTER_INFO_PATH.trim_end_matches("/skiff-cluster"), "data", map),
        (&roles, "rules", role),
        (&roles, "rules", approval_role),
        (
            &bindings,
            "subjects",
            binding_to("skiff:serving-approver", "ClusterRole", "skiff:serving-approver", controller),
        ),
        (&format!("{RBAC_PATH}/namespaces/kube-system/roles"), "rules", cluster_info_role),
        (
            &format!("{RBAC_PATH}/namespaces/kube-system/rolebindings"),
            "subjects",
            binding("skiff:node", "Role", "skiff:node", NODES_GROUP),
        ),
        (&bindings, "subjects", binding("skiff:node", "ClusterRole", "skiff:node", NODES_GROUP)),
        (
            &bindings,
            "subjects",
            binding("skiff:join", "ClusterRole", "system:node-bootstrapper", BOOTSTRAP_GROUP),
        ),
        (&bindings, "subjects", binding("skiff:join-approval", "ClusterRole", &client_role, BOOTSTRAP_GROUP)),
        (&bindings, "subjects", binding("skiff:renewal-approval", "ClusterRole", &own_role, NODES_GROUP)),
    ];
    let requests = objects.iter().map(|(path, field, object)| ensure(client, path, field, object));
    futures_util::future::try_join_all(requests).await?;
    delete_old_tokens(client, secrets, token).await
}

/// Creates an object, or updates the one field that matters in an existing object.
async fn ensure(client: &Client, collection: &str, field: &str, object: &Value) -> anyhow::Result<()> {
    let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
    let path = format!("{collection}/{name}");
    let result = match client.request(http::Method::GET, &path, None).await {
        Ok(existing) if existing.get(field) == object.get(field) => return Ok(()),
        Ok(mut existing) => {
            existing[field] = object[field].clone();
            client.request(http::Method::PUT, &path, Some(&existing)).await
        }
        Err(error) if error.is_not_found() => {
            client.request(http::Method::POST, collection, Some(object)).await
        }
        Err(error) => Err(error),
    };
    result.map(drop).with_context(|| format!("cannot create {path}"))
}

/// Deletes earlier tokens of this server, so that they can no longer be used to join.
async fn delete_old_tokens(client: &Client, secrets: &str, token: &BootstrapToken) -> anyhow::Result<()> {
    let list = client
        .request(http::Method::GET, &format!("{secrets}?labelSelector={JOIN_TOKEN_LABEL}"), None)
        .await?;
    for secret in list.get("items").and_then(Value::as_array).into_iter().flatten() {
        let name = secret.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        if name == format!("{TOKEN_PREFIX}{}", token.id) {
            continue;
        }
        match client.request(http::Method::DELETE, &format!("{secrets}/{name}"), None).await {
            Err(error) if !error.is_not_found() => return Err(error).context("cannot remove an old token"),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn token_is_persistent_and_configurable() {
        let dir = tempfile::tempdir().unwrap();
        let ca = pki::Authority::load_or_create(dir.path(), "ca", jiff::Timestamp::now()).unwrap();
        let of = |requested: Option<&str>| load_or_create_token(dir.path(), requested, ca.pem());
        let first = of(None).unwrap();
        assert_eq!(of(None).unwrap(), first, "kept");
        let path = dir.path().join("token");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}\n", first.to_secret_string()));
        let set = of(Some("abcdef.0123456789abcdef")).unwrap();
        assert_eq!(set.bootstrap.id, "abcdef");
        assert_eq!(of(None).unwrap(), set, "kept as well");
        assert_eq!(of(Some(&set.to_secret_string())).unwrap(), set);
        let other = set.to_secret_string().replace(&set.to_secret_string()[3..7], "0000");
        let error = of(Some(&other)).unwrap_err().to_string();
        assert_eq!(error, "--token belongs to a cluster with another CA");
    }
}
