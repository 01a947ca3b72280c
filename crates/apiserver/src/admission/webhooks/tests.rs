//! Requests against an in-process server, with a webhook whose responses the test defines.

mod failures;
mod fields;
mod mutating;

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use testkit::{Webhook, WebhookRequest};

use crate::access::User;
use crate::tests::TestServer;
use crate::warning_recorder::WarningRecorder;

/// A server and a webhook.
struct WebhookTest {
    test_server: TestServer,
    hook: Webhook,
    bundle: String,
    _dir: tempfile::TempDir,
}

impl WebhookTest {
    async fn start(answer: impl Fn(&WebhookRequest) -> (u16, Value) + Send + Sync + 'static) -> WebhookTest {
        let dir = tempfile::tempdir().unwrap();
        let (hook, ca) = crate::https::tests::webhook(dir.path(), answer);
        WebhookTest { test_server: TestServer::start().await, hook, bundle: STANDARD.encode(ca), _dir: dir }
    }

    /// One entry of `webhooks`, called by URL.
    fn webhook(&self, name: &str, rule: Value) -> Value {
        json!({
            "name": name, "sideEffects": "None", "admissionReviewVersions": ["v1"], "rules": [rule],
            "clientConfig": {"url": format!("{}/{name}", self.hook.url()), "caBundle": self.bundle},
        })
    }

    async fn configure(&self, kind: &str, name: &str, webhooks: Value) {
        let path =
            format!("/apis/admissionregistration.k8s.io/v1/{}webhookconfigurations", kind.to_lowercase());
        let config = json!({"metadata": {"name": name}, "webhooks": webhooks});
        let (code, answer) = self.test_server.send(&format!("POST {path}"), config).await;
        assert_eq!(code, 201, "{answer}");
        self.wait_for_cache().await;
    }

    /// Waits until the cache contains the last write.
    async fn wait_for_cache(&self) {
        self.test_server
            .server
            .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
            .await
            .unwrap();
    }

    async fn send(&self, request: &str, body: Value) -> ((u16, Value), Arc<WarningRecorder>) {
        let content_type = match request.starts_with("PATCH") {
            true => "application/merge-patch+json",
            false => "application/json",
        };
        self.test_server.call_with_recorder(alice(), request, content_type, &body.to_string()).await
    }

    /// Status code and message, or only the code.
    async fn send_summary(&self, request: &str, body: Value) -> String {
        crate::tests::summary(&self.send(request, body).await.0, &[])
    }
}

fn alice() -> User {
    User {
        name: "alice".into(),
        uid: "u-1".into(),
        groups: vec!["system:masters".into()],
        extra: [("k".to_owned(), vec!["v".to_owned()])].into(),
    }
}

fn match_all_rule() -> Value {
    rule("*", "*", "*", "*")
}

fn rule(operations: &str, groups: &str, versions: &str, resources: &str) -> Value {
    let list = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
    let groups: Vec<String> = groups.split(',').map(|group| group.replace("core", "")).collect();
    json!({
        "operations": list(operations), "apiGroups": groups, "apiVersions": list(versions),
        "resources": list(resources),
    })
}

/// The response to a review, with additional fields.
fn answer(received: &WebhookRequest, more: Value) -> (u16, Value) {
    let mut response = json!({"uid": received.body["request"]["uid"], "allowed": true});
    for (key, value) in more.as_object().unwrap() {
        response[key] = value.clone();
    }
    (200, json!({"kind": "AdmissionReview", "apiVersion": received.body["apiVersion"], "response": response}))
}

fn patch(operations: Value) -> Value {
    json!({"patchType": "JSONPatch", "patch": STANDARD.encode(operations.to_string())})
}

fn config_map(name: &str) -> Value {
    json!({"metadata": {"name": name}, "data": {"a": "b"}})
}

const CONFIG_MAPS: &str = "POST /api/v1/namespaces/default/configmaps";
