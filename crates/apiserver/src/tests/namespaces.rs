use api::json::JsonExt as _;
use serde_json::json;

use super::{TestServer, summary};

#[tokio::test]
async fn default_namespace_cannot_be_deleted() {
    let test_server = TestServer::start().await;
    let answer = test_server.call("DELETE /api/v1/namespaces/default", "", "").await;
    assert_eq!(
        summary(&answer, &[]),
        "403 namespaces \"default\" is forbidden: this namespace may not be deleted"
    );
}

#[tokio::test]
async fn empty_namespace_is_removed_by_finalize() {
    let test_server = TestServer::start().await;
    test_server.send("POST /api/v1/namespaces", json!({"metadata": {"name": "n"}})).await;
    test_server.call("DELETE /api/v1/namespaces/n", "", "").await;
    let repeated = test_server.call("DELETE /api/v1/namespaces/n", "", "").await;
    assert_eq!(summary(&repeated, &["spec.finalizers"]), "200 [\"kubernetes\"]");
    let body = json!({"metadata": {"name": "n"}, "spec": {"finalizers": ["x"]}});
    let wrong = test_server.send("PUT /api/v1/namespaces/n/finalize", body).await;
    assert_eq!(wrong.0, 422, "{}", wrong.1);
    let done =
        test_server.send("PUT /api/v1/namespaces/n/finalize", json!({"metadata": {"name": "n"}})).await;
    assert_eq!(summary(&done, &["metadata.name"]), "200 n");
    assert_eq!(test_server.get("/api/v1/namespaces/n").await.int("code"), Some(404));
}
