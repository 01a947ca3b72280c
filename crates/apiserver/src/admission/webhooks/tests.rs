//! Whole requests against a server in this process, with a webhook that answers as each test says.

mod failures;
mod fields;
mod mutating;

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use testkit::{Asked, Webhook};

use crate::access::User;
use crate::remarks::Remarks;
use crate::tests::Rig;

/// A server and a webhook.
struct Stage {
    rig: Rig,
    hook: Webhook,
    bundle: String,
    _dir: tempfile::TempDir,
}

impl Stage {
    async fn start(answer: impl Fn(&Asked) -> (u16, Value) + Send + Sync + 'static) -> Stage {
        let dir = tempfile::tempdir().unwrap();
        let (hook, ca) = crate::https::tests::webhook(dir.path(), answer);
        Stage { rig: Rig::start().await, hook, bundle: STANDARD.encode(ca), _dir: dir }
    }

    /// One webhook of a configuration, reached by its URL.
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
        let (code, answer) = self.rig.send(&format!("POST {path}"), config).await;
        assert_eq!(code, 201, "{answer}");
        self.settle().await;
    }

    /// Waits until the server knows what it has been told.
    async fn settle(&self) {
        self.rig.server.fresh(crate::options::Version::MostRecent).await.unwrap();
    }

    async fn send(&self, request: &str, body: Value) -> ((u16, Value), Arc<Remarks>) {
        let content_type = match request.starts_with("PATCH") {
            true => "application/merge-patch+json",
            false => "application/json",
        };
        self.rig.call_remarked(alice(), request, content_type, &body.to_string()).await
    }

    /// The code and the message, or nothing but the code.
    async fn brief(&self, request: &str, body: Value) -> String {
        crate::tests::brief(&self.send(request, body).await.0, &[])
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

fn everything() -> Value {
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

/// The answer to a review, with more fields.
fn answer(asked: &Asked, more: Value) -> (u16, Value) {
    let mut response = json!({"uid": asked.body["request"]["uid"], "allowed": true});
    for (key, value) in more.as_object().unwrap() {
        response[key] = value.clone();
    }
    (200, json!({"kind": "AdmissionReview", "apiVersion": asked.body["apiVersion"], "response": response}))
}

fn patch(operations: Value) -> Value {
    json!({"patchType": "JSONPatch", "patch": STANDARD.encode(operations.to_string())})
}

fn config_map(name: &str) -> Value {
    json!({"metadata": {"name": name}, "data": {"a": "b"}})
}

const CONFIG_MAPS: &str = "POST /api/v1/namespaces/default/configmaps";
