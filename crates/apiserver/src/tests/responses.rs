//! Answers as text, as clients get them over the wire.

use http::Request;
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};

use super::Rig;
use crate::access::User;
use crate::authentication::Peer;

async fn get(rig: &Rig, path: &str, accept: &str) -> (u16, String) {
    let groups = vec!["system:masters".into(), "system:authenticated".into()];
    let admin = Peer::known(User { name: "admin".into(), groups, ..User::default() });
    let request = Request::get(path).header("accept", accept).header("host", "192.0.2.1:6443");
    let request = request.body(Full::default()).expect("a request");
    let response = rig.server.answer(request, admin).await;
    let code = response.status().as_u16();
    let Ok(body) = response.into_body().collect().await;
    (code, String::from_utf8(body.to_bytes().to_vec()).expect("text"))
}

#[tokio::test]
async fn component_statuses_have_a_table() {
    let rig = Rig::start().await;
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    for (path, names) in [
        ("/api/v1/componentstatuses", &["controller-manager", "etcd-0", "scheduler"][..]),
        ("/api/v1/componentstatuses/etcd-0", &["etcd-0"][..]),
    ] {
        let (code, text) = get(&rig, path, table).await;
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
    let review = get(&rig, "/apis/authorization.k8s.io/v1/subjectaccessreviews", table).await;
    assert_eq!(review.0, 405, "{}", review.1);
}
