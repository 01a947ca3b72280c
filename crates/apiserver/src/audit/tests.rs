//! Requests and their audit events.

use std::collections::BTreeMap;

use api::json::JsonExt as _;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use serde_json::json;

use super::*;
use crate::authentication::Peer;
use crate::tests::TestServer;

struct AuditTest {
    test_server: TestServer,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

const POLICY: &str = r#"
apiVersion: audit.k8s.io/v1
kind: Policy
rules:
- {level: None, nonResourceURLs: [/version]}
- {level: Metadata, resources: [{resources: [secrets, serviceaccounts/token]}, {group: authentication.k8s.io}]}
- {level: Request, verbs: [delete, patch], omitStages: [RequestReceived]}
- {level: RequestResponse, resources: [{resources: [configmaps]}], omitStages: [RequestReceived], omitManagedFields: true}
- {level: Metadata, omitStages: [RequestReceived]}
"#;

impl AuditTest {
    async fn start(mode: Mode, json: bool) -> AuditTest {
        let dir = tempfile::tempdir().unwrap();
        let policy_file = dir.path().join("policy.yaml");
        std::fs::write(&policy_file, POLICY).unwrap();
        let path = dir.path().join("audit.log");
        let log = LogOptions { path: path.clone(), max_size: 100, max_backups: 0, max_age: 0, json, mode };
        let options = AuditOptions { policy_file: Some(policy_file), log: Some(log), webhook: None };
        let mut test_server = TestServer::start().await;
        let server = Arc::get_mut(&mut test_server.server).expect("the server is not shared yet");
        server.audit = Audit::new(&options).unwrap();
        AuditTest { test_server, path, _dir: dir }
    }

    async fn send(&self, request: &str, headers: &[(&str, &str)], body: &str) -> (u16, Bytes) {
        let groups = vec!["system:masters".into(), "system:authenticated".into()];
        let user = User { name: "admin".into(), groups, ..User::default() };
        self.send_as(Peer::known(user), request, headers, body).await
    }

    async fn send_as(&self, peer: Peer, request: &str, headers: &[(&str, &str)], body: &str) -> (u16, Bytes) {
        let (method, path) = request.split_once(' ').unwrap();
        let mut request = Request::builder().method(method).uri(path).header("audit-id", "the-id");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(Full::new(Bytes::from(body.to_owned()))).unwrap();
        request.extensions_mut().insert(RemoteAddr([192, 0, 2, 7].into()));
        let response = self.test_server.server.handle_request(request, peer).await;
        let code = response.status().as_u16();
        (code, response.into_body().collect().await.unwrap().to_bytes())
    }

    async fn text(&self) -> String {
        self.test_server.server.audit.as_ref().unwrap().flush().await;
        std::fs::read_to_string(&self.path).unwrap()
    }

    async fn lines(&self) -> Vec<Value> {
        self.text().await.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// The event with variable fields replaced.
fn normalize(event: &Value) -> String {
    let mut event = event.clone();
    for field in ["requestReceivedTimestamp", "stageTimestamp"] {
        let text = event.text(field).to_owned();
        assert!(text.len() == "2026-01-02T03:04:05.678901Z".len() && text.ends_with('Z'), "{text}");
        event[field] = "T".into();
    }
    let mut text = event.to_string();
    for field in ["uid", "resourceVersion", "creationTimestamp", "time"] {
        let mark = format!("\"{field}\":\"");
        let mut from = 0;
        while let Some(start) = text[from..].find(&mark).map(|at| from + at + mark.len()) {
            let end = start + text[start..].find('"').unwrap();
            text.replace_range(start..end, "…");
            from = start;
        }
    }
    text
}

#[tokio::test]
async fn events_match_upstream_format() {
    let test = AuditTest::start(Mode::Blocking, true).await;
    let map = r#"{"metadata":{"name":"m"},"data":{"a":"b"}}"#;
    let headers = [
        ("content-type", "application/json"),
        ("user-agent", "kubectl/v1"),
        ("x-forwarded-for", "203.0.113.9"),
    ];
    let (code, _) =
        test.send("POST /api/v1/namespaces/default/configmaps?fieldManager=x", &headers, map).await;
    assert_eq!(code, 201);
    let raw = test.text().await;
    assert!(
        raw.starts_with(r#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"RequestResponse","auditID":"the-id","stage":"ResponseComplete","requestURI":"/api/v1/namespaces/default/configmaps?fieldManager=x","verb":"create","user":{"username":"admin","groups":["system:masters","system:authenticated"]},"sourceIPs":["203.0.113.9","192.0.2.7"],"userAgent":"kubectl/v1","objectRef":{"resource":"configmaps","namespace":"default","name":"m","apiVersion":"v1"},"responseStatus":{"metadata":{},"code":201},"requestObject":{"#),
        "{raw}"
    );
    let lines = test.lines().await;
    assert_eq!(lines.len(), 1);
    expect_test::expect![[r#"{"annotations":{"authorization.k8s.io/decision":"allow","authorization.k8s.io/reason":""},"apiVersion":"audit.k8s.io/v1","auditID":"the-id","kind":"Event","level":"RequestResponse","objectRef":{"apiVersion":"v1","name":"m","namespace":"default","resource":"configmaps"},"requestObject":{"apiVersion":"v1","data":{"a":"b"},"kind":"ConfigMap","metadata":{"name":"m"}},"requestReceivedTimestamp":"T","requestURI":"/api/v1/namespaces/default/configmaps?fieldManager=x","responseObject":{"apiVersion":"v1","data":{"a":"b"},"kind":"ConfigMap","metadata":{"creationTimestamp":"…","name":"m","namespace":"default","resourceVersion":"…","uid":"…"}},"responseStatus":{"code":201,"metadata":{}},"sourceIPs":["203.0.113.9","192.0.2.7"],"stage":"ResponseComplete","stageTimestamp":"T","user":{"groups":["system:masters","system:authenticated"],"username":"admin"},"userAgent":"kubectl/v1","verb":"create"}"#]].assert_eq(&normalize(&lines[0]));
}

#[tokio::test]
async fn metadata_level_never_logs_secrets_and_tokens() {
    let test = AuditTest::start(Mode::Batch, true).await;
    let json = [("content-type", "application/json"), ("authorization", "Bearer very-secret")];
    let secret = r#"{"metadata":{"name":"s"},"stringData":{"password":"very-secret"}}"#;
    let (code, _) = test.send("POST /api/v1/namespaces/default/secrets", &json, secret).await;
    assert_eq!(code, 201);
    assert_eq!(test.send("GET /api/v1/namespaces/default/secrets/s", &json, "").await.0, 200);
    let request = "POST /api/v1/namespaces/default/serviceaccounts/default/token";
    let (code, token) = test.send(request, &json, "{}").await;
    assert_eq!(code, 201);
    let token: Value = serde_json::from_slice(&token).unwrap();
    let token = token.at("status").text("token").to_owned();
    let review = json!({"spec": {"token": token}}).to_string();
    assert_eq!(test.send("POST /apis/authentication.k8s.io/v1/tokenreviews", &json, &review).await.0, 201);
    let text = test.text().await;
    assert_eq!(text.lines().count(), 8, "{text}");
    let signature = token.rsplit('.').next().unwrap();
    for leak in ["very-secret", "dmVyeS1zZWNyZXQ", signature, "Bearer", "requestObject", "responseObject"] {
        assert!(!text.contains(leak), "{leak}: {text}");
    }
    let lines = test.lines().await;
    let stages: Vec<&str> = lines.iter().map(|line| line.text("stage")).collect();
    assert_eq!(stages[..2], ["RequestReceived", "ResponseComplete"]);
    // For a create, the name of the object comes from the body, not from the path.
    assert_eq!((lines[0].at("objectRef").text("name"), lines[1].at("objectRef").text("name")), ("", "s"));
}

#[tokio::test]
async fn logs_failures_watches_and_authentication_errors() {
    let test = AuditTest::start(Mode::Blocking, true).await;
    assert_eq!(test.send("GET /version", &[], "").await.0, 200);
    assert_eq!(test.send("GET /api/v1/namespaces/default/pods/x", &[], "").await.0, 404);
    let bearer = [("authorization", "Bearer nonsense")];
    let (code, _) = test.send_as(Peer::default(), "GET /api/v1/pods", &bearer, "").await;
    assert_eq!(code, 401);
    let without_permission = Peer::known(User { name: "anna".into(), ..User::default() });
    let (code, _) =
        test.send_as(without_permission, "DELETE /api/v1/namespaces/default/pods/x", &[], "").await;
    assert_eq!(code, 403);
    let impersonation_headers = [("impersonate-user", "bob"), ("impersonate-group", "system:masters")];
    assert_eq!(test.send("GET /healthz", &impersonation_headers, "").await.0, 200);
    test.send("GET /api/v1/nodes?watch=1&timeoutSeconds=1", &[], "").await;
    let lines = test.lines().await;
    let summary_lines: Vec<String> = lines
        .iter()
        .map(|line| {
            let status = line.at("responseStatus");
            let annotations: BTreeMap<&str, &Value> = line.entries("annotations").collect();
            let decision =
                annotations.get("authorization.k8s.io/decision").map_or("-", |v| v.as_str().unwrap());
            format!(
                "{} {} {} {} {decision} as={} {}",
                line.text("verb"),
                line.text("stage"),
                status.at("code"),
                line.at("user").text("username"),
                line.at("impersonatedUser").text("username"),
                status.text("message"),
            )
        })
        .collect();
    expect_test::expect![[r#"
        get ResponseComplete 404 admin allow as= pods "x" not found
        list ResponseStarted 401  - as= Authentication failed, attempted: bearer
        delete ResponseComplete 403 anna forbid as= pods "x" is forbidden: User "anna" cannot delete resource "pods" in API group "" in the namespace "default"
        get ResponseComplete 200 admin allow as=bob 
        watch ResponseStarted 200 admin allow as= 
        watch ResponseComplete 200 admin allow as= "#]]
    .assert_eq(&summary_lines.join("\n"));
    let missing = &lines[0].at("responseStatus").to_string();
    let details = r#""details":{"kind":"pods","name":"x"}"#;
    assert!(missing.contains(r#""metadata":{}"#) && missing.contains(details), "{missing}");
    assert!(missing.contains(r#""reason":"NotFound""#) && !missing.contains("apiVersion"), "{missing}");
}

#[tokio::test]
async fn level_controls_audit_content() {
    let test = AuditTest::start(Mode::Blocking, true).await;
    let json = [("content-type", "application/json")];
    let data = "x".repeat(100_000);
    for name in ["a", "b", "c"] {
        let map = json!({"metadata": {"name": name}, "data": {"k": data}}).to_string();
        assert_eq!(test.send("POST /api/v1/namespaces/default/configmaps", &json, &map).await.0, 201);
    }
    test.send("GET /api/v1/namespaces/default/configmaps", &[], "").await;
    let merge = [("content-type", "application/merge-patch+json")];
    let path = "/api/v1/namespaces/default/configmaps/a";
    assert_eq!(test.send(&format!("PATCH {path}"), &merge, r#"{"data":{"k":"y"}}"#).await.0, 200);
    assert_eq!(test.send(&format!("DELETE {path}"), &json, r#"{"gracePeriodSeconds":0}"#).await.0, 200);
    let lines = test.lines().await;
    let [list, patch, delete] = &lines[3..] else { panic!("{}", lines.len()) };
    let names: Vec<&str> = list
        .at("responseObject")
        .items("items")
        .iter()
        .map(|item| item.at("metadata").text("name"))
        .collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert!(!list.to_string().contains("managedFields"));
    assert_eq!(patch.at("requestObject").to_string(), r#"{"data":{"k":"y"}}"#);
    assert!(patch.at("responseObject").is_null());
    assert_eq!(delete.at("requestObject").int("gracePeriodSeconds"), Some(0));
    assert_eq!(delete.at("responseStatus").text("status"), "Success");
    let mut metrics = String::new();
    test.test_server.server.audit.as_ref().unwrap().print(&mut metrics);
    assert!(metrics.contains("apiserver_audit_event_total 6\n"), "{metrics}");
    assert!(metrics.contains("apiserver_audit_level_total{level=\"Request\"} 2\n"), "{metrics}");
}

#[tokio::test]
async fn legacy_format_is_one_line_of_text() {
    let test = AuditTest::start(Mode::Batch, false).await;
    test.send("GET /api/v1/namespaces/default/pods", &[("user-agent", "\"x\"")], "").await;
    let text = test.text().await;
    let (time, rest) = text.split_once(' ').unwrap();
    assert!(time.parse::<Timestamp>().is_ok(), "{time}");
    expect_test::expect![[r#"
        AUDIT: id="the-id" stage="ResponseComplete" ip="192.0.2.7" method="list" user="admin" groups="\"system:masters\",\"system:authenticated\"" as="<self>" asgroups="<lookup>" user-agent="\"x\"" namespace="default" uri="/api/v1/namespaces/default/pods" response="200"
    "#]]
    .assert_eq(rest);
}

#[tokio::test]
async fn strict_mode_rejects_requests_if_log_write_fails() {
    let (sender, mut events) = mpsc::channel::<EncodedEvent>(10);
    tokio::spawn(async move {
        while let Some(event) = events.recv().await {
            let _ = event.done.map(|done| done.send(false));
        }
    });
    let mut test_server = TestServer::start().await;
    let policy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata}]";
    for (mode, code) in [(Mode::BlockingStrict, 500), (Mode::Blocking, 200), (Mode::Batch, 200)] {
        let backend = AuditBackend {
            name: "log",
            format: EventFormat::Json,
            mode,
            sender: sender.clone(),
            lost: AtomicU64::new(0),
        };
        let audit = Audit {
            policy: Policy::parse(policy, std::path::Path::new("p")).unwrap(),
            backends: vec![backend],
            events: AtomicU64::new(0),
            levels: Default::default(),
            rejected: AtomicU64::new(0),
        };
        Arc::get_mut(&mut test_server.server).unwrap().audit = Some(Arc::new(audit));
        let user = User { name: "admin".into(), groups: vec!["system:masters".into()], ..User::default() };
        let request = Request::builder().uri("/healthz").body(Full::new(Bytes::new())).unwrap();
        let response = test_server.server.handle_request(request, Peer::known(user)).await;
        assert_eq!(response.status().as_u16(), code, "{mode:?}");
    }
}

#[test]
fn audit_is_disabled_without_policy_or_backend() {
    assert!(Audit::new(&AuditOptions::default()).unwrap().is_none());
    let dir = tempfile::tempdir().unwrap();
    let policy_file = Some(dir.path().join("policy.yaml"));
    std::fs::write(dir.path().join("policy.yaml"), POLICY).unwrap();
    assert!(Audit::new(&AuditOptions { policy_file, ..AuditOptions::default() }).unwrap().is_none());
    let missing_policy =
        AuditOptions { policy_file: Some(dir.path().join("gone")), ..AuditOptions::default() };
    assert!(matches!(Audit::new(&missing_policy), Err(AuditError::Policy(_))));
}

#[test]
fn reports_attempted_authentication_methods() {
    let check = |header: Option<&str>, query: &str, certificate: bool, expected: &str| {
        let mut headers = HeaderMap::new();
        if let Some(header) = header {
            headers.insert("authorization", header.parse().unwrap());
        }
        assert_eq!(
            attempted(&headers, &Query::parse(query), certificate),
            format!("Authentication failed, {expected}")
        );
    };
    check(None, "", false, "no credentials provided");
    check(Some("Bearer x"), "", true, "attempted: bearer, x509");
    check(Some("Basic eA=="), "access_token=x", false, "attempted: basic, access_token");
    check(Some("Bearer"), "", false, "no credentials provided");
}
