use api::json::Json as _;
use serde_json::json;

use super::{Rig, brief};

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
