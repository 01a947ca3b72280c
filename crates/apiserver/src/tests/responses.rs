//! Response bodies as text.

use http::Request;
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};

use super::TestServer;
use crate::access::User;
use crate::authentication::Peer;

async fn get(test_server: &TestServer, path: &str, accept: &str) -> (u16, String) {
    let groups = vec!["system:masters".into(), "system:authenticated".into()];
    let admin = Peer::known(User { name: "admin".into(), groups, ..User::default() });
    let request = Request::get(path).header("accept", accept).header("host", "192.0.2.1:6443");
    let request = request.body(Full::default()).expect("a request");
    let response = test_server.server.handle_request(request, admin).await;
    let code = response.status().as_u16();
    let Ok(body) = response.into_body().collect().await;
    (code, String::from_utf8(body.to_bytes().to_vec()).expect("text"))
}

#[tokio::test]
async fn component_statuses_have_a_table() {
    let test_server = TestServer::start().await;
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    for (path, names) in [
        ("/api/v1/componentstatuses", &["controller-manager", "etcd-0", "scheduler"][..]),
        ("/api/v1/componentstatuses/etcd-0", &["etcd-0"][..]),
    ] {
        let (code, text) = get(&test_server, path, table).await;
        assert_eq!(code, 200, "{text}");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        let columns = value["columnDefinitions"].as_array().expect("columns").iter();
        let columns: Vec<&Value> = columns.map(|column| &column["name"]).collect();
        assert_eq!(columns, ["Name", "Status", "Message", "Error"]);
        let rows: Vec<&Value> =
            value["rows"].as_array().expect("rows").iter().map(|row| &row["cells"]).collect();
        let expected: Vec<Value> = names.iter().map(|name| json!([name, "Healthy", "ok", ""])).collect();
        assert_eq!(rows, expected.iter().collect::<Vec<_>>());
    }
    let review = get(&test_server, "/apis/authorization.k8s.io/v1/subjectaccessreviews", table).await;
    assert_eq!(review.0, 405, "{}", review.1);
}

#[tokio::test]
async fn response_fields_follow_upstream_order() {
    let test_server = TestServer::start().await;
    for (path, start) in [
        (
            "/api",
            r#"{"kind":"APIVersions","versions":["v1"],"serverAddressByClientCIDRs":[{"clientCIDR":"0.0.0.0/0","serverAddress":"192.0.2.1:6443"}]}"#,
        ),
        (
            "/api/v1",
            r#"{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"bindings","singularName":"binding","#,
        ),
        (
            "/apis",
            r#"{"kind":"APIGroupList","apiVersion":"v1","groups":[{"name":"apiregistration.k8s.io","versions":[{"#,
        ),
        ("/apis/apps", r#"{"kind":"APIGroup","apiVersion":"v1","name":"apps","versions":["#),
        (
            "/version",
            r#"{"major":"1","minor":"36","emulationMajor":"1","emulationMinor":"36","minCompatibilityMajor":"1","minCompatibilityMinor":"35","gitVersion":"#,
        ),
        (
            "/api/v1/namespaces/default/pods/none",
            r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"pods \"none\" not found","reason":"NotFound","details":{"name":"none","kind":"pods"},"code":404}"#,
        ),
    ] {
        let (_, text) = get(&test_server, path, "application/json").await;
        assert!(text.starts_with(start), "{path} {text:.400}");
    }
}
