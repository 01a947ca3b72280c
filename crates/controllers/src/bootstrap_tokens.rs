//! Bootstrap token controllers. `clean` deletes expired tokens; `sign` adds a JWS signature per token to the
//! `cluster-info` ConfigMap, which a joining node verifies before it trusts the cluster.
//!
//! Upstream: `pkg/controller/bootstrap`.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction, keys};

const NAMESPACE: &str = "kube-system";
const SECRET_NAME_PREFIX: &str = "bootstrap-token-";
const SIGNATURE_PREFIX: &str = "jws-kubeconfig-";

fn cluster_info_key() -> Key {
    Key::new("kube-public", "cluster-info")
}

fn secret_data(secret: &Secret, name: &str) -> String {
    let value = secret.data.as_ref().and_then(|data| data.get(name));
    value.map(|value| String::from_utf8_lossy(&value.0).into_owned()).unwrap_or_default()
}

/// When a token expires. An unparseable time counts as expired; a token without a time never expires.
fn expires(secret: &Secret) -> Option<Timestamp> {
    let text = secret_data(secret, "expiration");
    (!text.is_empty()).then(|| text.parse().unwrap_or(Timestamp::MIN))
}

pub async fn clean(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("token-cleaner"), ..ctx };
    let controller = Controller::new("token_cleaner", &ctx);
    controller.on(ctx.caches.bootstrap_tokens(), |changed: &ObjectUpdate<'_, Secret>, enqueue| {
        if changed.latest().namespace() == NAMESPACE {
            enqueue(changed.latest().key());
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move {
            let Some(token) = ctx.caches.bootstrap_tokens().get(&key) else {
                return Ok(ReconcileAction::Forget);
            };
            match expires(&token) {
                Some(at) if at <= ctx.clock.now() => match ctx.delete(&*token).await {
                    Err(error) if !error.is_conflict() => Err(error),
                    _ => Ok(ReconcileAction::AwaitChange),
                },
                Some(at) => Ok(ReconcileAction::RequeueAt(at)),
                None => Ok(ReconcileAction::AwaitChange),
            }
        }
    };
    controller.run(&ctx, 1, reconcile).await
}

pub async fn sign(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("bootstrap-signer"), ..ctx };
    let controller = Controller::new("bootstrap_signer_queue", &ctx);
    controller.on(ctx.caches.cluster_infos(), keys::own::<ConfigMap>);
    controller.on(ctx.caches.bootstrap_tokens(), |_: &ObjectUpdate<'_, Secret>, enqueue| {
        enqueue(cluster_info_key())
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { sign_info(&ctx, &key).await }
    };
    controller.run(&ctx, 1, reconcile).await
}

async fn sign_info(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(map) = ctx.caches.cluster_infos().get(key) else { return Ok(ReconcileAction::Forget) };
    let tokens = ctx.caches.bootstrap_tokens().in_namespace(NAMESPACE);
    let now = ctx.clock.now();
    if let Some(signed) = plan(&map, &tokens, now) {
        ctx.replace(&signed).await?;
    }
    let next = tokens.iter().filter_map(|token| expires(token)).filter(|at| *at > now).min();
    Ok(next.map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt))
}

/// The ConfigMap with the correct signatures, or `None` if it has them already.
fn plan(map: &ConfigMap, tokens: &[Arc<Secret>], now: Timestamp) -> Option<ConfigMap> {
    let content = map.data.as_ref()?.get("kubeconfig")?;
    let mut signed = map.clone();
    let data = signed.data.get_or_insert_default();
    data.retain(|name, _| !name.starts_with(SIGNATURE_PREFIX));
    for (id, secret) in tokens.iter().filter_map(|token| signing_token(token, now)) {
        data.entry(format!("{SIGNATURE_PREFIX}{id}")).or_insert_with(|| signature(content, &id, &secret));
    }
    (signed.data != map.data).then_some(signed)
}

/// ID and secret of a token that is valid for signing.
fn signing_token(token: &Secret, now: Timestamp) -> Option<(String, String)> {
    let id = token.name().strip_prefix(SECRET_NAME_PREFIX)?.to_owned();
    let is_valid_id = id.len() == 6 && id.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let secret = secret_data(token, "token-secret");
    let usable = is_valid_id
        && secret_data(token, "token-id") == id
        && !secret.is_empty()
        && secret_data(token, "usage-bootstrap-signing") == "true"
        && expires(token).is_none_or(|at| at > now);
    usable.then_some((id, secret))
}

/// A JWS with detached payload (RFC 7515, appendix F).
fn signature(content: &str, id: &str, secret: &str) -> String {
    let header = URL_SAFE_NO_PAD.encode(serde_json::json!({"alg": "HS256", "kid": id}).to_string());
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, secret.as_bytes());
    let text = format!("{header}.{}", URL_SAFE_NO_PAD.encode(content));
    let tag = ring::hmac::sign(&key, text.as_bytes());
    format!("{header}..{}", URL_SAFE_NO_PAD.encode(tag.as_ref()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_cluster::{TestCluster, wait_for};

    fn secret(id: &str, more: serde_json::Value) -> serde_json::Value {
        let mut data =
            json!({"token-id": id, "token-secret": "0123456789abcdef", "usage-bootstrap-signing": "true"});
        for (name, value) in more.as_object().into_iter().flatten() {
            data[name] = value.clone();
        }
        json!({"metadata": {"name": format!("{SECRET_NAME_PREFIX}{id}"), "namespace": NAMESPACE}, "type": "bootstrap.kubernetes.io/token", "stringData": data})
    }

    #[test]
    fn signature_does_not_contain_payload() {
        // Based on RFC 7515, A.1, with another key and header.
        let signed = signature("payload", "abcdef", "secret");
        let parts: Vec<&str> = signed.split('.').collect();
        assert_eq!(parts[0], URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256","kid":"abcdef"}"#));
        assert_eq!((parts[1], parts.len()), ("", 3));
        assert_ne!(signed, signature("payload", "abcdef", "other"));
        assert_ne!(signed, signature("other", "abcdef", "secret"));
    }

    #[tokio::test]
    async fn cluster_info_is_signed_with_valid_tokens_only() {
        let test_cluster =
            TestCluster::start(&["bootstrap-signer-controller", "token-cleaner-controller"]).await;
        let path = "/api/v1/namespaces/kube-system/secrets";
        let create = async |path: &str, value: serde_json::Value| {
            test_cluster.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
        };
        create(
            "/api/v1/namespaces/kube-public/configmaps",
            json!({"metadata": {"name": "cluster-info"}, "data": {"kubeconfig": "x"}}),
        )
        .await;
        create(path, secret("aaaaaa", json!({}))).await;
        create(path, secret("bbbbbb", json!({"usage-bootstrap-signing": "false"}))).await;
        create(path, secret("cccccc", json!({"expiration": "2020-01-01T00:00:00Z"}))).await;
        let signed = || async {
            let map: ConfigMap = test_cluster.client.get(&cluster_info_key()).await.ok()?;
            let names: Vec<String> =
                map.data?.into_keys().filter(|name| name.starts_with(SIGNATURE_PREFIX)).collect();
            (names == ["jws-kubeconfig-aaaaaa"]).then_some(())
        };
        wait_for("one signature", signed).await;
        let deleted = || async {
            let key = Key::new(NAMESPACE, "bootstrap-token-cccccc");
            test_cluster.client.get::<Secret>(&key).await.is_err().then_some(())
        };
        wait_for("deletion of the expired token", deleted).await;
        assert!(
            test_cluster.client.get::<Secret>(&Key::new(NAMESPACE, "bootstrap-token-bbbbbb")).await.is_ok()
        );
    }
}
