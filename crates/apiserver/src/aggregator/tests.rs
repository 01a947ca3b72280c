//! An in-process server with a remote API server.

mod streams;

use std::sync::Arc;
use std::time::Duration;

use api::json::JsonExt as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use testkit::{Webhook, WebhookRequest};

use crate::access::User;
use crate::authentication::Peer;
use crate::tests::TestServer;

struct AggregatorTest {
    test_server: TestServer,
    backend: Webhook,
    ca: String,
    _dir: tempfile::TempDir,
}

const PATH: &str = "/apis/apiregistration.k8s.io/v1/apiservices";

impl AggregatorTest {
    async fn start() -> AggregatorTest {
        let dir = tempfile::tempdir().unwrap();
        let (backend, ca) = crate::https::tests::webhook(dir.path(), serve_discovery);
        let test_server = TestServer::start().await;
        let stop = test_server.stop.subscribe();
        tokio::spawn(super::keep_available(test_server.server.clone(), stop.clone()));
        tokio::spawn(super::keep_registered(test_server.server.clone(), stop));
        AggregatorTest { test_server, backend, ca, _dir: dir }
    }

    /// Registers the remote server for the group of `flunders`.
    async fn register(&self, more: Value) {
        let port: u16 = self.backend.url().rsplit(':').next().unwrap().parse().unwrap();
        let mut spec = json!({
            "group": "wardle.example.com", "version": "v1", "groupPriorityMinimum": 2000, "versionPriority": 200,
            "service": {"namespace": "default", "name": "hook", "port": port}, "caBundle": STANDARD.encode(&self.ca),
        });
        for (key, value) in more.as_object().unwrap() {
            spec[key] = value.clone();
        }
        let object = json!({"metadata": {"name": "v1.wardle.example.com"}, "spec": spec});
        let (code, answer) = self.test_server.send(&format!("POST {PATH}"), object).await;
        assert_eq!(code, 201, "{answer}");
    }

    /// The only type of Service that can resolve to a loopback address.
    async fn create_service(&self) {
        let spec = json!({"type": "ExternalName", "externalName": "127.0.0.1"});
        let service = json!({"metadata": {"name": "hook"}, "spec": spec});
        assert_eq!(self.test_server.send("POST /api/v1/namespaces/default/services", service).await.0, 201);
    }

    /// Waits until the condition has this reason.
    async fn wait_for_reason(&self, reason: &str) -> Value {
        let row = api::resource_table::find_resource("apiregistration.k8s.io", "v1", "apiservices").unwrap();
        let mut changes = self.test_server.server.shard(row).subscribe();
        let found = async {
            loop {
                let found = self.test_server.get(&format!("{PATH}/v1.wardle.example.com")).await;
                let condition = found["status"]["conditions"][0].clone();
                if condition.text("reason") == reason {
                    return condition;
                }
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(20), found).await.expect(reason)
    }

    async fn send(&self, request: &str, headers: &[(&str, &str)], body: &str) -> (u16, Value) {
        // Wait until the cache contains the last write.
        self.test_server
            .server
            .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
            .await
            .unwrap();
        let (method, path) = request.split_once(' ').unwrap();
        let mut request = http::Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(bytes::Bytes::from(body.to_owned()))).unwrap();
        let user = User {
            name: "bob".into(),
            uid: "7".into(),
            groups: vec!["system:masters".into(), "g".into()],
            extra: [("example.com/key".to_owned(), vec!["v".to_owned()])].into(),
        };
        let response = self.test_server.server.handle_request(request, Peer::known(user)).await;
        let code = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        let text = || Value::String(String::from_utf8_lossy(&bytes).into_owned());
        (code, serde_json::from_slice(&bytes).unwrap_or_else(|_| text()))
    }
}

/// The responses of the remote server.
fn serve_discovery(received: &WebhookRequest) -> (u16, Value) {
    let path = received.path.split('?').next().unwrap_or("");
    match path {
        "/apis/wardle.example.com/v1" => {
            let verbs = ["get", "list"];
            let resources = json!([
                {"name": "flunders", "singularName": "flunder", "namespaced": true, "kind": "Flunder", "verbs": verbs, "shortNames": ["fl"]},
                {"name": "flunders/status", "singularName": "", "namespaced": true, "kind": "Flunder", "verbs": ["get"]},
            ]);
            (
                200,
                json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "wardle.example.com/v1", "resources": resources}),
            )
        }
        "/openapi/v3" => (
            200,
            json!({"paths": {
                "apis/wardle.example.com/v1": {"serverRelativeURL": "/openapi/v3/apis/wardle.example.com/v1?hash=H"},
                "apis/stolen/v1": {"serverRelativeURL": "/x"},
            }}),
        ),
        "/openapi/v2" => {
            let schema = json!({"$ref": "#/definitions/Flunder"});
            let get = json!({"get": {"responses": {"200": {"schema": schema}}}});
            let definitions = json!({
                "Flunder": {"properties": {"part": {"$ref": "#/definitions/Part"}}}, "Part": {"type": "object"},
                "Unused": {"type": "object"},
            });
            (
                200,
                json!({"paths": {"/apis/wardle.example.com/v1/flunders": get, "/apis/apps/v1/x": {}}, "definitions": definitions}),
            )
        }
        "/openapi/v3/apis/wardle.example.com/v1" => (200, json!({"openapi": "3.0.0"})),
        "/apis/wardle.example.com/v1/redirect" => (302, json!({})),
        _ => (200, json!({"asked": path})),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn proxies_requests_with_user_headers() {
    let test = AggregatorTest::start().await;
    test.register(json!({})).await;
    let condition = test.wait_for_reason("ServiceNotFound").await;
    assert_eq!(condition.text("message"), "service/hook in \"default\" is not present");
    let unavailable = test.send("GET /apis/wardle.example.com/v1/flunders", &[], "").await;
    assert_eq!(unavailable, (503, "service unavailable\n".into()));
    test.create_service().await;
    let condition = test.wait_for_reason("Passed").await;
    assert_eq!((condition.text("status"), condition.text("message")), ("True", "all checks passed"));
    let checks = test.backend.requests();
    let check = checks.iter().find(|received| received.path == "/apis/wardle.example.com/v1").unwrap();
    assert_eq!(
        (check.header("x-remote-user"), check.header("x-remote-group")),
        (Some("system:kube-aggregator"), Some("system:masters"))
    );
    let headers = [
        ("content-type", "application/json"),
        ("authorization", "Bearer secret"),
        ("x-remote-group", "spoofed"),
        ("x-remote-extra-evil", "1"),
        ("accept", "application/vnd.example"),
        ("connection", "keep-alive"),
    ];
    let path = "POST /apis/wardle.example.com/v1/namespaces/n/flunders?b=2&a=1%2F2";
    let (code, answer) = test.send(path, &headers, r#"{"x":1}"#).await;
    assert_eq!((code, answer), (200, json!({"asked": "/apis/wardle.example.com/v1/namespaces/n/flunders"})));
    let received = test.backend.requests().pop().unwrap();
    assert_eq!(
        (received.method.as_str(), received.path.as_str()),
        ("POST", "/apis/wardle.example.com/v1/namespaces/n/flunders?a=1%2F2&b=2")
    );
    assert_eq!(received.body, json!({"x": 1}));
    let mut seen: Vec<String> = received
        .headers
        .iter()
        .map(|(name, value)| format!("{name}: {value}"))
        .filter(|line| !line.starts_with("host") && !line.starts_with("audit"))
        .collect();
    seen.sort();
    expect_test::expect![[r#"
        accept: application/vnd.example
        content-length: 7
        content-type: application/json
        x-forwarded-host: 
        x-forwarded-proto: https
        x-forwarded-uri: /apis/wardle.example.com/v1/namespaces/n/flunders
        x-remote-extra-example.com%2fkey: v
        x-remote-group: g
        x-remote-group: system:masters
        x-remote-uid: 7
        x-remote-user: bob"#]]
    .assert_eq(&seen.join("\n"));
    let redirect = test.send("GET /apis/wardle.example.com/v1/redirect", &[], "").await;
    assert_eq!(redirect.0, 502);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_discovery_and_openapi_of_remote_servers() {
    let test = AggregatorTest::start().await;
    test.create_service().await;
    test.register(json!({})).await;
    test.wait_for_reason("Passed").await;
    let names = |list: &Value, path: &str| -> Vec<String> {
        let groups = list.as_array().unwrap().iter();
        groups.map(|group| group.pointer(path).and_then(Value::as_str).unwrap().to_owned()).collect()
    };
    let (_, groups) = test.send("GET /apis", &[], "").await;
    let found = names(&groups["groups"], "/name");
    assert_eq!(
        (found[0].as_str(), found.last().unwrap().as_str()),
        ("apiregistration.k8s.io", "wardle.example.com")
    );
    let (_, group) = test.send("GET /apis/wardle.example.com", &[], "").await;
    expect_test::expect![[r#"{"apiVersion":"v1","kind":"APIGroup","name":"wardle.example.com","preferredVersion":{"groupVersion":"wardle.example.com/v1","version":"v1"},"versions":[{"groupVersion":"wardle.example.com/v1","version":"v1"}]}"#]]
    .assert_eq(&group.to_string());
    let (_, list) = test.send("GET /apis/wardle.example.com/v1", &[], "").await;
    assert_eq!(list.text("kind"), "APIResourceList");
    let accept = ("accept", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList");
    let (code, all) = test.send("GET /apis", &[accept], "").await;
    assert_eq!(code, 200, "{all}");
    let last = all["items"].as_array().unwrap().last().unwrap();
    expect_test::expect![[r#"{"metadata":{"name":"wardle.example.com"},"versions":[{"freshness":"Current","resources":[{"resource":"flunders","responseKind":{"group":"wardle.example.com","kind":"Flunder","version":"v1"},"scope":"Namespaced","shortNames":["fl"],"singularResource":"flunder","subresources":[{"responseKind":{"group":"wardle.example.com","kind":"Flunder","version":"v1"},"subresource":"status","verbs":["get"]}],"verbs":["get","list"]}],"version":"v1"}]}"#]]
    .assert_eq(&last.to_string());
    let (_, index) = test.send("GET /openapi/v3", &[], "").await;
    assert!(
        index["paths"].get("apis/wardle.example.com/v1").is_some()
            && index["paths"].get("apis/stolen/v1").is_none()
    );
    let (_, document) = test.send("GET /openapi/v3/apis/wardle.example.com/v1", &[], "").await;
    assert_eq!(document, json!({"openapi": "3.0.0"}));
    let (_, document) = test.send("GET /openapi/v2", &[], "").await;
    assert!(document["paths"].get("/apis/wardle.example.com/v1/flunders").is_some());
    assert!(document["definitions"].get("Part").is_some() && document["definitions"].get("Unused").is_none());
    assert!(document["definitions"].get("io.k8s.api.core.v1.Pod").is_some());
    // The group's priority determines its position.
    let target = format!("PATCH {PATH}/v1.wardle.example.com");
    let patch = json!({"spec": {"groupPriorityMinimum": 17790}}).to_string();
    test.test_server.call(&target, "application/merge-patch+json", &patch).await;
    let (_, groups) = test.send("GET /apis", &[], "").await;
    assert_eq!(
        names(&groups["groups"], "/name")[..4],
        ["apiregistration.k8s.io", "apps", "wardle.example.com", "events.k8s.io"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_failed_discovery_for_unknown_authority() {
    let test = AggregatorTest::start().await;
    test.create_service().await;
    let dir = tempfile::tempdir().unwrap();
    let ca = pki::Authority::load_or_create(dir.path(), "other", jiff::Timestamp::now()).unwrap();
    test.register(json!({"caBundle": STANDARD.encode(ca.pem())})).await;
    let condition = test.wait_for_reason("FailedDiscoveryCheck").await;
    let url = format!("{}/apis/wardle.example.com/v1", test.backend.url());
    assert_eq!(
        condition.text("message"),
        format!(
            "failing or missing response from {url}: Get \"{url}\": tls: failed to verify certificate: x509: certificate signed by unknown authority"
        )
    );
    assert!(test.backend.requests().is_empty());
    // With `insecureSkipTLSVerify` the certificate is not verified.
    let patch = json!({"spec": {"insecureSkipTLSVerify": true, "caBundle": null}}).to_string();
    let target = format!("PATCH {PATH}/v1.wardle.example.com");
    test.test_server.call(&target, "application/merge-patch+json", &patch).await;
    test.wait_for_reason("Passed").await;
    assert_eq!(test.send("GET /apis/wardle.example.com/v1/flunders", &[], "").await.0, 200);
    // Discovery data is removed with the APIService.
    test.test_server.send(&format!("DELETE {PATH}/v1.wardle.example.com"), json!({})).await;
    assert_eq!(test.send("GET /apis/wardle.example.com/v1/flunders", &[], "").await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn local_groups_are_registered() {
    let test = AggregatorTest::start().await;
    let row = api::resource_table::find_resource("apiregistration.k8s.io", "v1", "apiservices").unwrap();
    let mut changes = test.test_server.server.shard(row).subscribe();
    let expected_count = 21;
    while test.test_server.server.shard(row).len() < expected_count {
        tokio::time::timeout(Duration::from_secs(20), changes.changed()).await.unwrap().unwrap();
    }
    let apps = test.test_server.get(&format!("{PATH}/v1.apps")).await;
    assert_eq!(apps["metadata"]["labels"], json!({"kube-aggregator.kubernetes.io/automanaged": "onstart"}));
    assert_eq!(
        apps["spec"],
        json!({"group": "apps", "version": "v1", "groupPriorityMinimum": 17800, "versionPriority": 15})
    );
    let condition = &apps["status"]["conditions"][0];
    assert_eq!((condition.text("status"), condition.text("reason")), ("True", "Local"));
    assert_eq!(test.test_server.get(&format!("{PATH}/v1.")).await["spec"]["groupPriorityMinimum"], 18000);
    let _: &Arc<_> = &test.test_server.server;
}
