use api::json::Json as _;
use serde_json::json;

use super::{Rig, brief};
use crate::namespaces::empty_namespaces;

/// Waits until `path` is as `done` wants it; the test runner's own limit is the deadline.
async fn until(rig: &Rig, plural: &str, path: &str, done: impl Fn(&serde_json::Value) -> bool) {
    let row = api::table::find("", "v1", plural).unwrap();
    let mut news = rig.server.shard(row).subscribe();
    while !done(&rig.get(path).await) {
        news.changed().await.unwrap();
    }
}

#[tokio::test]
async fn a_deleted_namespace_takes_everything_with_it() {
    let rig = Rig::start().await;
    let task = tokio::spawn(empty_namespaces(rig.server.clone(), rig.stop.subscribe()));
    rig.send("POST /api/v1/namespaces", json!({"metadata": {"name": "n"}})).await;
    rig.send("POST /api/v1/namespaces/n/configmaps", json!({"metadata": {"name": "plain"}})).await;
    let held = json!({"metadata": {"name": "held", "finalizers": ["example.com/x"]}});
    rig.send("POST /api/v1/namespaces/n/configmaps", held).await;
    let answer = rig.call("DELETE /api/v1/namespaces/n", "", "").await;
    assert_eq!(brief(&answer, &["status.phase"]), "200 Terminating");

    let path = "/api/v1/namespaces/n";
    until(&rig, "namespaces", path, |namespace| !namespace.at("status").items("conditions").is_empty()).await;
    let conditions = rig.get(path).await.at("status").items("conditions").to_vec();
    let remaining: Vec<&str> = conditions
        .iter()
        .filter(|condition| condition.text("status") == "True")
        .map(|condition| condition.text("message"))
        .collect();
    assert_eq!(
        remaining,
        [
            "Some resources are remaining: configmaps. has 1 resource instances",
            "Some content in the namespace has finalizers remaining: example.com/x in 1 resource instances",
        ]
    );
    let refused =
        rig.send("POST /api/v1/namespaces/n/configmaps", json!({"metadata": {"name": "late"}})).await;
    assert_eq!(
        brief(&refused, &[]),
        "403 configmaps \"late\" is forbidden: unable to create new content in namespace n because it is being terminated"
    );

    let patch = json!({"metadata": {"finalizers": null}}).to_string();
    rig.call("PATCH /api/v1/namespaces/n/configmaps/held", "application/merge-patch+json", &patch).await;
    until(&rig, "namespaces", path, |namespace| namespace.int("code") == Some(404)).await;
    rig.stop.send_replace(true);
    task.await.unwrap();
}

#[tokio::test]
async fn some_namespaces_stay() {
    let rig = Rig::start().await;
    let answer = rig.call("DELETE /api/v1/namespaces/default", "", "").await;
    assert_eq!(
        brief(&answer, &[]),
        "403 namespaces \"default\" is forbidden: this namespace may not be deleted"
    );
}

#[tokio::test]
async fn finalize_lets_an_empty_namespace_go() {
    let rig = Rig::start().await;
    rig.send("POST /api/v1/namespaces", json!({"metadata": {"name": "n"}})).await;
    rig.call("DELETE /api/v1/namespaces/n", "", "").await;
    let repeated = rig.call("DELETE /api/v1/namespaces/n", "", "").await;
    assert_eq!(brief(&repeated, &["spec.finalizers"]), "200 [\"kubernetes\"]");
    let body = json!({"metadata": {"name": "n"}, "spec": {"finalizers": ["x"]}});
    let wrong = rig.send("PUT /api/v1/namespaces/n/finalize", body).await;
    assert_eq!(wrong.0, 422, "{}", wrong.1);
    let done = rig.send("PUT /api/v1/namespaces/n/finalize", json!({"metadata": {"name": "n"}})).await;
    assert_eq!(brief(&done, &["metadata.name"]), "200 n");
    assert_eq!(rig.get("/api/v1/namespaces/n").await.int("code"), Some(404));
}
