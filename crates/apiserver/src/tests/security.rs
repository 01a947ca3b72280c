//! One test for each published finding of Kubernetes' security audits and advisories that applies
//! here.
//!
//! `TOB-K8S-…` are findings of the 2019 audit (Trail of Bits), `NCC-…` of the 2022 audit, `CVE-…`
//! of advisories. General recommendations of the audits have no number.
//!
//! Every request takes the full path: authentication, authorization, admission, storage.

use std::fmt::Write as _;
use std::sync::Arc;

use api::json::JsonExt as _;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::TestServer;
use crate::access::User;
use crate::authentication::Peer;
use crate::rbac::ensure_defaults;

const JSON: (&str, &str) = ("content-type", "application/json");
const MERGE: (&str, &str) = ("content-type", "application/merge-patch+json");
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const DEFAULT: &str = "/api/v1/namespaces/default";

/// A server with the default roles, and a user `jo` who may do anything in `default` except
/// escalate privileges.
async fn start_test_server() -> TestServer {
    let test_server = TestServer::start().await;
    ensure_defaults(&test_server.server).await.expect("the default policy");
    let all = json!([{"apiGroups": ["", "rbac.authorization.k8s.io"], "resources": [
        "configmaps", "pods", "pods/ephemeralcontainers", "roles", "rolebindings", "clusterroles", "clusterrolebindings"],
        "verbs": ["get", "list", "create", "update", "patch", "delete"]}]);
    create(
        &test_server,
        &format!("POST {RBAC}/clusterroles"),
        json!({"metadata": {"name": "jo"}, "rules": all}),
    )
    .await;
    let subject = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "jo"});
    let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "jo"});
    let binding = json!({"metadata": {"name": "jo"}, "subjects": [subject], "roleRef": reference});
    create(&test_server, &format!("POST {RBAC}/clusterrolebindings"), binding).await;
    test_server
        .server
        .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
        .await
        .expect("a fresh cache");
    test_server
}

async fn create(test_server: &TestServer, request: &str, object: Value) -> Value {
    let (code, answer) = test_server.send(request, object).await;
    assert_eq!(code, 201, "{answer}");
    answer
}

fn peer_named(name: &str) -> Peer {
    let groups: &[&str] = if name.starts_with("system:node:") { &["system:nodes"] } else { &[] };
    let groups = groups.iter().chain(&["system:authenticated"]).map(|group| (*group).to_owned()).collect();
    Peer::known(User { name: name.into(), groups, ..User::default() })
}

/// Sends a request through the full pipeline; returns the code and everything the client receives,
/// including headers.
async fn send(
    test_server: &TestServer,
    peer: Peer,
    request: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> (u16, String) {
    let (method, uri) = request.split_once(' ').expect("a method and a path");
    let mut builder = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    let request = builder.body(Full::new(body.into())).expect("a request");
    let response = test_server.server.handle_request(request, peer).await;
    let code = response.status().as_u16();
    let mut text = format!("{:?}\n", response.headers());
    let Ok(body) = response.into_body().collect().await;
    text += &String::from_utf8_lossy(&body.to_bytes());
    (code, text)
}

/// Sends a request as `jo` with a JSON body.
async fn jo(test_server: &TestServer, request: &str, body: Value) -> (u16, String) {
    send(test_server, peer_named("jo"), request, &[JSON], body.to_string()).await
}

#[track_caller]
fn assert_forbidden((code, text): (u16, String), reason: &str) {
    assert_eq!(code, 403, "{text}");
    assert!(text.contains(reason), "{text}");
}

/// Records the log of this thread.
#[derive(Clone, Default)]
struct LogRecorder(Arc<Mutex<String>>);

impl tracing::Subscriber for LogRecorder {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        span.record(&mut self.clone());
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, values: &tracing::span::Record<'_>) {
        values.record(&mut self.clone());
    }

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

impl tracing::field::Visit for LogRecorder {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        let _ = writeln!(self.0.lock(), "{field}={value:?}");
    }
}

async fn token(test_server: &TestServer, spec: Value) -> String {
    let answer =
        create(test_server, &format!("POST {DEFAULT}/serviceaccounts/default/token"), json!({"spec": spec}))
            .await;
    answer.at("status").text("token").to_owned()
}

/// The status code of a request that every authenticated user may make, with this token.
async fn token_status_code(test_server: &TestServer, token: &str) -> u16 {
    let bearer = format!("Bearer {token}");
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}).to_string();
    let path = "POST /apis/authentication.k8s.io/v1/selfsubjectreviews";
    send(test_server, Peer::default(), path, &[JSON, ("authorization", &bearer)], review).await.0
}

#[tokio::test]
async fn tob_k8s_001_and_cve_2019_11250_bearer_tokens_are_in_no_log_or_response() {
    let test_server = start_test_server().await;
    let good = token(&test_server, json!({})).await;
    let log = LogRecorder::default();
    let _subscriber = tracing::subscriber::set_default(log.clone());
    let (forged, unknown_token) = (format!("{good}AAAA"), "abcdef.0123456789abcdef".to_owned());
    for token in [&good, &forged, &unknown_token] {
        let bearer = format!("Bearer {token}");
        let protocol = format!("base64url.bearer.authorization.k8s.io.{token}, v4.channel.k8s.io");
        for header in [("authorization", bearer.as_str()), ("sec-websocket-protocol", protocol.as_str())] {
            for path in ["/api/v1/secrets", "/api/v1/pods?watch=1&limit=x", "/nothing", "/apis/apps/v1/nope"]
            {
                let (_, text) =
                    send(&test_server, Peer::default(), &format!("GET {path}"), &[header], "").await;
                assert!(!text.contains(token.as_str()), "{text}");
            }
        }
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
        let path = "POST /apis/authentication.k8s.io/v1/tokenreviews";
        let (_, text) = jo(&test_server, path, review).await;
        assert!(text.contains("forbidden") && !text.contains(token.as_str()), "{text}");
    }
    let log = log.0.lock().clone();
    for token in [good, forged, unknown_token] {
        let secret = token.rsplit('.').next().expect("the last part");
        assert!(!log.contains(secret), "{log}");
    }
}

#[tokio::test]
async fn error_messages_do_not_contain_secrets() {
    let test_server = start_test_server().await;
    let log = LogRecorder::default();
    let _subscriber = tracing::subscriber::set_default(log.clone());
    let secret = "aHVudGVyMg==";
    let admin = || {
        let groups = vec!["system:masters".into()];
        Peer::known(User { name: "admin".into(), groups, ..User::default() })
    };
    let data = json!({"k": secret});
    for object in [
        json!({"metadata": {"name": "UPPER"}, "data": data}),
        json!({"metadata": {"name": "s"}, "data": {"bad key": secret}}),
        json!({"metadata": {"name": "s"}, "data": data, "type": "kubernetes.io/tls"}),
        json!({"metadata": {"name": "s"}, "data": {"k": format!("{secret}!")}}),
        json!({"metadata": {"name": "s"}, "data": data, "stringData": {"x": "hunter2"}, "kind": "Pod"}),
        json!({"metadata": {"name": "s", "resourceVersion": "9"}, "data": data}),
    ] {
        let (code, text) =
            send(&test_server, admin(), &format!("POST {DEFAULT}/secrets"), &[JSON], object.to_string())
                .await;
        assert!(code >= 400, "{code} {object}");
        assert!(!text.contains(secret) && !text.contains("hunter2"), "{text}");
    }
    assert!(!log.0.lock().contains(secret));
}

#[tokio::test]
async fn cve_2019_11253_yaml_alias_expansion_is_limited() {
    let test_server = start_test_server().await;
    let mut alias_expansion = String::from(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: bomb}\na0: &a0 [x, x, x, x, x, x, x, x, x, x]\n",
    );
    for i in 1..12 {
        let _ = writeln!(alias_expansion, "a{i}: &a{i} [{}]", vec![format!("*a{}", i - 1); 10].join(", "));
    }
    let mut merged =
        String::from("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: bomb}\nm0: &m0 {k: v}\n");
    for i in 1..24 {
        let _ = writeln!(merged, "m{i}: &m{i} {{a: *m{p}, b: *m{p}}}", p = i - 1);
    }
    let deep_json = format!("{{\"data\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let deep_yaml = format!("data: {}1{}", "[".repeat(100_000), "]".repeat(100_000));
    for (media, body) in [
        ("application/yaml", alias_expansion.clone()),
        ("application/yaml", merged),
        ("application/yaml", deep_yaml),
        ("application/json", deep_json.clone()),
    ] {
        let start = std::time::Instant::now();
        let request = format!("POST {DEFAULT}/configmaps");
        let (code, text) =
            send(&test_server, peer_named("jo"), &request, &[("content-type", media)], body).await;
        assert!((400..500).contains(&code), "{code} {}", &text[..text.len().min(300)]);
        assert!(text.len() < 100_000, "{}", text.len());
        assert!(start.elapsed() < std::time::Duration::from_secs(20), "{:?}", start.elapsed());
    }
    create(&test_server, &format!("POST {DEFAULT}/configmaps"), json!({"metadata": {"name": "m"}})).await;
    for (media, query, body) in [
        ("application/apply-patch+yaml", "?fieldManager=f", alias_expansion),
        ("application/merge-patch+json", "", deep_json.clone()),
        ("application/strategic-merge-patch+json", "", deep_json),
    ] {
        let request = format!("PATCH {DEFAULT}/configmaps/m{query}");
        let (code, _) =
            send(&test_server, peer_named("jo"), &request, &[("content-type", media)], body).await;
        assert!((400..500).contains(&code), "{media} {code}");
    }
}

#[tokio::test]
async fn request_body_size_is_limited() {
    let test_server = start_test_server().await;
    let body =
        format!("{{\"metadata\": {{\"name\": \"m\"}}, \"data\": {{\"k\": \"{}\"}}}}", "x".repeat(4 << 20));
    let (code, _) =
        send(&test_server, peer_named("jo"), &format!("POST {DEFAULT}/configmaps"), &[JSON], body).await;
    assert_eq!(code, 413);
}

#[tokio::test]
async fn cve_2019_1002100_json_patch_size_is_limited() {
    let test_server = start_test_server().await;
    create(
        &test_server,
        &format!("POST {DEFAULT}/configmaps"),
        json!({"metadata": {"name": "m"}, "data": {"k": "v"}}),
    )
    .await;
    let many = vec![json!({"op": "test", "path": "/data/k", "value": "v"}); 10_001];
    let copies: Vec<Value> =
        (0..64).map(|i| json!({"op": "copy", "from": "/data", "path": format!("/data/c{i}")})).collect();
    for (patch, expected) in [(many, 413), (copies, 422)] {
        let media = ("content-type", "application/json-patch+json");
        let request = format!("PATCH {DEFAULT}/configmaps/m");
        let (code, text) =
            send(&test_server, peer_named("jo"), &request, &[media], Value::from(patch).to_string()).await;
        assert_eq!(code, expected, "{}", &text[..text.len().min(300)]);
    }
}

#[tokio::test]
async fn cve_2019_11247_cluster_scoped_objects_are_not_served_below_namespaces() {
    let test_server = start_test_server().await;
    let node = "system:node:n";
    create(&test_server, "POST /api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
    // The owner of a namespace may do anything in it.
    let subject = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "owner"});
    let reference =
        json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"});
    let binding = json!({"metadata": {"name": "owner"}, "subjects": [subject], "roleRef": reference});
    create(&test_server, &format!("POST {RBAC}/namespaces/default/rolebindings"), binding).await;
    test_server
        .server
        .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
        .await
        .expect("a fresh cache");
    for request in [
        "GET /api/v1/namespaces/default/nodes/n",
        "DELETE /api/v1/namespaces/default/nodes/n",
        "GET /api/v1/namespaces/default/persistentvolumes",
        "GET /apis/rbac.authorization.k8s.io/v1/namespaces/default/clusterroles/cluster-admin",
    ] {
        for who in ["owner", "jo", node] {
            let (code, text) = send(&test_server, peer_named(who), request, &[], "").await;
            assert!(matches!(code, 403 | 404), "{who} {request}: {code} {text}");
        }
    }
    assert_eq!(test_server.get("/api/v1/nodes/n").await["metadata"]["name"], "n");
}

#[tokio::test]
async fn ncc_e003660_rkv_and_cve_2022_3162_paths_cannot_escape_the_namespace() {
    let test_server = start_test_server().await;
    create(&test_server, "POST /api/v1/namespaces", json!({"metadata": {"name": "other"}})).await;
    create(
        &test_server,
        "POST /api/v1/namespaces/other/secrets",
        json!({"metadata": {"name": "s"}, "stringData": {"k": "hunter2"}}),
    )
    .await;
    create(
        &test_server,
        "POST /api/v1/namespaces/other/configmaps",
        json!({"metadata": {"name": "m"}, "data": {"k": "hunter2"}}),
    )
    .await;
    let pods = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["*"]}]);
    create(
        &test_server,
        &format!("POST {RBAC}/namespaces/default/roles"),
        json!({"metadata": {"name": "maps"}, "rules": pods}),
    )
    .await;
    let subject = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "al"});
    let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "maps"});
    let binding = json!({"metadata": {"name": "al"}, "subjects": [subject], "roleRef": reference});
    create(&test_server, &format!("POST {RBAC}/namespaces/default/rolebindings"), binding).await;
    test_server
        .server
        .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
        .await
        .expect("a fresh cache");
    for path in [
        "namespaces/default/configmaps/..%2Fother%2Fm",
        "namespaces/default/configmaps/%2e%2e/%2e%2e/other/configmaps/m",
        "namespaces/default/../other/configmaps/m",
        "namespaces/default/configmaps/../../other/configmaps/m",
        "namespaces/default%2F..%2Fother/configmaps/m",
        "namespaces/default//configmaps/..%2f..%2fother%2fm",
        "namespaces/default/configmaps/%2fregistry%2fconfigmaps%2fother%2fm",
        "namespaces/default/configmaps/..%2F..%2Fsecrets%2Fother%2Fs",
        "namespaces/default/configmaps?fieldSelector=metadata.namespace%3Dother",
        "namespaces/default/configmaps?fieldSelector=metadata.name%3D..%2Fother%2Fm",
        "watch/namespaces/default/configmaps/..%2Fother%2Fm?timeoutSeconds=1",
    ] {
        for who in ["al", "jo"] {
            let (_, text) =
                send(&test_server, peer_named(who), &format!("GET /api/v1/{path}"), &[], "").await;
            let allowed = who == "jo" && path.ends_with("/other/configmaps/m") && !path.contains("%2F");
            assert!(!text.contains("hunter2") || allowed, "{who} {path}: {text}");
        }
    }
    // Objects with such a name cannot be created either.
    for name in ["..", ".", "a/b", "a%2Fb", "../x"] {
        let (code, text) =
            jo(&test_server, &format!("POST {DEFAULT}/configmaps"), json!({"metadata": {"name": name}}))
                .await;
        assert_eq!(code, 422, "{name}: {text}");
    }
}

#[tokio::test]
async fn tob_k8s_026_host_files_are_not_served() {
    let test_server = start_test_server().await;
    create(&test_server, "POST /api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
    let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}});
    create(&test_server, &format!("POST {DEFAULT}/pods"), pod).await;
    let admin = || {
        let groups = vec!["system:masters".into()];
        Peer::known(User { name: "admin".into(), groups, ..User::default() })
    };
    for path in [
        "/logs",
        "/logs/..%2f..%2f..%2fetc/passwd",
        "/logs/../../../etc/passwd",
        "/api/v1/nodes/n/proxy/logs/..%2f..%2f..%2fetc%2fpasswd",
        "/api/v1/nodes/n/proxy/logs/../../../etc/passwd",
        "/api/v1/namespaces/default/pods/p/log?container=..%2f..%2f..%2fetc%2fpasswd",
        "/openapi/v3/..%2f..%2fetc%2fpasswd",
        "/.well-known/../../etc/passwd",
    ] {
        let (code, text) = send(&test_server, admin(), &format!("GET {path}"), &[], "").await;
        assert!(code >= 400 && !text.contains("root:"), "{path}: {code} {text}");
    }
}

fn grant(name: &str, role: &str) -> Value {
    let subject = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "jo"});
    let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role});
    json!({"metadata": {"name": name}, "subjects": [subject], "roleRef": reference})
}

#[tokio::test]
async fn user_cannot_escalate_by_role_binding() {
    let test_server = start_test_server().await;
    let reason = "is attempting to grant RBAC permissions not currently held";
    for path in [format!("{RBAC}/clusterrolebindings"), format!("{RBAC}/namespaces/default/rolebindings")] {
        assert_forbidden(
            jo(&test_server, &format!("POST {path}"), grant("more", "cluster-admin")).await,
            reason,
        );
        assert_forbidden(
            jo(&test_server, &format!("POST {path}?dryRun=All"), grant("more", "cluster-admin")).await,
            reason,
        );
        // PUT may create the object, and a patch may add to an existing one.
        assert_forbidden(
            jo(&test_server, &format!("PUT {path}/more"), grant("more", "cluster-admin")).await,
            reason,
        );
        let apply = ("content-type", "application/apply-patch+yaml");
        let mut body = grant("more", "cluster-admin");
        body["apiVersion"] = json!("rbac.authorization.k8s.io/v1");
        body["kind"] = json!(if path.contains("namespaces") { "RoleBinding" } else { "ClusterRoleBinding" });
        let request = format!("PATCH {path}/more?fieldManager=f");
        assert_forbidden(
            send(&test_server, peer_named("jo"), &request, &[apply], body.to_string()).await,
            reason,
        );
    }
    let subjects =
        json!({"subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "jo"}]});
    let request = format!("PATCH {RBAC}/clusterrolebindings/cluster-admin");
    assert_forbidden(
        send(&test_server, peer_named("jo"), &request, &[MERGE], subjects.to_string()).await,
        reason,
    );
    let (code, _) =
        jo(&test_server, &format!("POST {RBAC}/namespaces/default/rolebindings"), grant("same", "jo")).await;
    assert_eq!(code, 201, "granting held permissions is allowed");
}

#[tokio::test]
async fn user_cannot_escalate_by_role_update() {
    let test_server = start_test_server().await;
    let reason = "is attempting to grant RBAC permissions not currently held";
    let all = json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]);
    let role = json!({"metadata": {"name": "more"}, "rules": all});
    assert_forbidden(jo(&test_server, &format!("POST {RBAC}/clusterroles"), role.clone()).await, reason);
    assert_forbidden(
        jo(&test_server, &format!("POST {RBAC}/namespaces/default/roles"), role.clone()).await,
        reason,
    );
    assert_forbidden(jo(&test_server, &format!("PUT {RBAC}/clusterroles/more"), role).await, reason);
    let patch = json!({"rules": all}).to_string();
    let request = format!("PATCH {RBAC}/clusterroles/jo");
    assert_forbidden(send(&test_server, peer_named("jo"), &request, &[MERGE], patch).await, reason);
    let selector =
        json!({"clusterRoleSelectors": [{"matchLabels": {"kubernetes.io/bootstrapping": "rbac-defaults"}}]});
    let aggregated_role = json!({"metadata": {"name": "all"}, "aggregationRule": selector});
    let reason = "must have cluster-admin privileges to use the aggregationRule";
    assert_forbidden(jo(&test_server, &format!("POST {RBAC}/clusterroles"), aggregated_role).await, reason);
}

#[tokio::test]
async fn impersonation_requires_permission() {
    let test_server = start_test_server().await;
    for headers in [
        &[("impersonate-user", "admin")][..],
        &[("impersonate-user", "jo"), ("impersonate-group", "system:masters")],
        &[("impersonate-user", "system:serviceaccount:kube-system:default")],
        &[("impersonate-user", "system:node:n")],
        &[("impersonate-user", "jo"), ("impersonate-uid", "1")],
        &[("impersonate-user", "jo"), ("impersonate-extra-scopes", "all")],
    ] {
        assert_forbidden(
            send(&test_server, peer_named("jo"), "GET /api/v1/secrets", headers, "").await,
            "cannot impersonate",
        );
    }
    let (code, text) = send(
        &test_server,
        peer_named("jo"),
        "GET /api/v1/secrets",
        &[("impersonate-group", "system:masters")],
        "",
    )
    .await;
    assert_eq!(code, 400, "{text}");
    // Anonymous users cannot impersonate.
    let (code, _) =
        send(&test_server, Peer::default(), "GET /api/v1/secrets", &[("impersonate-user", "admin")], "")
            .await;
    assert!(matches!(code, 401 | 403), "{code}");
    let (code, _) = send(
        &test_server,
        Peer::default(),
        "GET /api/v1/secrets",
        &[("x-remote-user", "admin"), ("x-remote-group", "system:masters")],
        "",
    )
    .await;
    assert!(matches!(code, 401 | 403), "{code}");
}

#[tokio::test]
async fn tokens_are_invalid_after_the_bound_object_is_deleted() {
    let test_server = start_test_server().await;
    let bound = |kind: &str, name: &str, uid: &str| json!({"boundObjectRef": {"apiVersion": "v1", "kind": kind, "name": name, "uid": uid}});
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let pod = create(&test_server, &format!("POST {DEFAULT}/pods"), pod).await;
    let secret =
        create(&test_server, &format!("POST {DEFAULT}/secrets"), json!({"metadata": {"name": "s"}})).await;
    let uid = |object: &Value| object.at("metadata").text("uid").to_owned();
    let of_pod = token(&test_server, bound("Pod", "p", &uid(&pod))).await;
    let of_secret = token(&test_server, bound("Secret", "s", &uid(&secret))).await;
    let of_account = token(&test_server, json!({})).await;
    for token in [&of_pod, &of_secret, &of_account] {
        assert_eq!(token_status_code(&test_server, token).await, 201);
    }
    test_server.send(&format!("DELETE {DEFAULT}/pods/p"), json!({"gracePeriodSeconds": 0})).await;
    assert_eq!(token_status_code(&test_server, &of_pod).await, 401);
    test_server.send(&format!("DELETE {DEFAULT}/secrets/s"), json!({})).await;
    assert_eq!(token_status_code(&test_server, &of_secret).await, 401);
    assert_eq!(token_status_code(&test_server, &of_account).await, 201);
    test_server.send(&format!("DELETE {DEFAULT}/serviceaccounts/default"), json!({})).await;
    assert_eq!(token_status_code(&test_server, &of_account).await, 401);
    // An account that is created again with the same name has another UID.
    create(
        &test_server,
        &format!("POST {DEFAULT}/serviceaccounts"),
        json!({"metadata": {"name": "default"}}),
    )
    .await;
    assert_eq!(token_status_code(&test_server, &of_account).await, 401);
}

#[tokio::test]
async fn tob_k8s_015_rejects_numbers_out_of_range() {
    let test_server = start_test_server().await;
    for number in
        ["99999999999999999999", "-99999999999999999999", "1e999", "0x10", "18446744073709551616", "NaN"]
    {
        for parameter in ["limit", "timeoutSeconds", "resourceVersion", "continue"] {
            let request = format!("GET {DEFAULT}/configmaps?{parameter}={number}");
            let (code, text) = send(&test_server, peer_named("jo"), &request, &[], "").await;
            assert!((400..500).contains(&code), "{parameter}={number}: {code} {text}");
        }
        let request = format!("DELETE {DEFAULT}/pods/p?gracePeriodSeconds={number}");
        let (code, text) = send(&test_server, peer_named("jo"), &request, &[], "").await;
        assert!((400..500).contains(&code), "{number}: {code} {text}");
    }
    for port in ["4294967376", "18446744073709551696", "-1", "1e10", "80.5"] {
        let pod = format!(
            r#"{{"metadata": {{"name": "p"}}, "spec": {{"containers": [{{"name": "c", "image": "i", "ports": [{{"containerPort": {port}}}]}}]}}}}"#
        );
        let (code, text) =
            send(&test_server, peer_named("jo"), &format!("POST {DEFAULT}/pods"), &[JSON], pod).await;
        assert!((400..500).contains(&code), "{port}: {code} {text}");
    }
}

#[tokio::test]
async fn cve_2023_2728_and_cve_2024_3177_only_listed_secrets_are_mounted() {
    let test_server = start_test_server().await;
    let annotations = json!({"kubernetes.io/enforce-mountable-secrets": "true"});
    let account =
        json!({"metadata": {"name": "strict", "annotations": annotations}, "secrets": [{"name": "listed"}]});
    create(&test_server, &format!("POST {DEFAULT}/serviceaccounts"), account).await;
    let pod = |name: &str, container: Value| {
        let mut container = container;
        container["name"] = json!("c");
        container["image"] = json!("i");
        json!({"metadata": {"name": name}, "spec": {"serviceAccountName": "strict", "containers": [container]}})
    };
    let post = format!("POST {DEFAULT}/pods");
    let from = |name: &str| json!({"envFrom": [{"secretRef": {"name": name}}]});
    let reason = "service account strict does not reference that secret";
    assert_forbidden(jo(&test_server, &post, pod("p", from("other"))).await, reason);
    let env = json!({"env": [{"name": "E", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]});
    assert_forbidden(jo(&test_server, &post, pod("p", env.clone())).await, reason);
    let (code, text) = jo(&test_server, &post, pod("p", from("listed"))).await;
    assert_eq!(code, 201, "{text}");
    for mut debug in [from("other"), env] {
        debug["name"] = json!("d");
        debug["image"] = json!("i");
        debug["terminationMessagePolicy"] = json!("File");
        debug["imagePullPolicy"] = json!("Always");
        let patch = json!({"spec": {"ephemeralContainers": [debug]}}).to_string();
        let request = format!("PATCH {DEFAULT}/pods/p/ephemeralcontainers");
        assert_forbidden(send(&test_server, peer_named("jo"), &request, &[MERGE], patch).await, reason);
    }
}

/// Pods that a level forbids are rejected, directly and through an ephemeral container.
#[tokio::test]
async fn pod_security_is_enforced_on_every_write_path() {
    let test_server = start_test_server().await;
    let labels = json!({"pod-security.kubernetes.io/enforce": "baseline"});
    let patch = json!({"metadata": {"labels": labels}}).to_string();
    let (code, _) = test_server.call("PATCH /api/v1/namespaces/default", MERGE.1, &patch).await;
    assert_eq!(code, 200);
    let pod = |context: Value| json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i", "securityContext": context}]}});
    let reason = "violates PodSecurity";
    assert_forbidden(
        jo(&test_server, &format!("POST {DEFAULT}/pods"), pod(json!({"privileged": true}))).await,
        reason,
    );
    let (code, text) = jo(&test_server, &format!("POST {DEFAULT}/pods"), pod(json!({}))).await;
    assert_eq!(code, 201, "{text}");
    let debug = json!({"name": "d", "image": "i", "imagePullPolicy": "Always", "terminationMessagePolicy": "File",
        "securityContext": {"privileged": true}});
    let patch = json!({"spec": {"ephemeralContainers": [debug]}}).to_string();
    let request = format!("PATCH {DEFAULT}/pods/p/ephemeralcontainers");
    assert_forbidden(send(&test_server, peer_named("jo"), &request, &[MERGE], patch).await, reason);
    let job = json!({"metadata": {"name": "j"}, "spec": {"template": {"spec": {"restartPolicy": "Never",
        "containers": [{"name": "c", "image": "i", "securityContext": {"privileged": true}}]}}}});
    let groups = vec!["system:masters".into()];
    let admin = Peer::known(User { name: "admin".into(), groups, ..User::default() });
    let (code, text) =
        send(&test_server, admin, "POST /apis/batch/v1/namespaces/default/jobs", &[JSON], job.to_string())
            .await;
    assert_eq!(code, 201, "{text}");
    assert!(text.contains("would violate PodSecurity"), "workloads get a warning: {text}");
}

#[tokio::test]
async fn cve_2025_5187_and_cve_2021_25735_nodes_cannot_modify_protected_fields() {
    let test_server = start_test_server().await;
    let taints = json!([{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]);
    create(
        &test_server,
        "POST /api/v1/nodes",
        json!({"metadata": {"name": "n"}, "spec": {"taints": taints}}),
    )
    .await;
    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "0"}]);
    for (subresource, patch, reason) in [
        ("", json!({"metadata": {"ownerReferences": owner}}), "is not allowed to modify ownerReferences"),
        (
            "/status",
            json!({"metadata": {"ownerReferences": owner}}),
            "is not allowed to modify ownerReferences",
        ),
        ("", json!({"spec": {"taints": []}}), "is not allowed to modify taints"),
        ("/status", json!({"spec": {"taints": []}}), "is not allowed to modify taints"),
        (
            "",
            json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}),
            "is not allowed to modify labels",
        ),
    ] {
        let request = format!("PATCH /api/v1/nodes/n{subresource}");
        assert_forbidden(
            send(&test_server, peer_named("system:node:n"), &request, &[MERGE], patch.to_string()).await,
            reason,
        );
        assert_forbidden(
            send(&test_server, peer_named("system:node:m"), &request, &[MERGE], patch.to_string()).await,
            "is not allowed to modify node",
        );
    }
    let delete = send(&test_server, peer_named("system:node:n"), "DELETE /api/v1/nodes/n", &[], "").await;
    assert_forbidden(delete, "cannot delete resource");
}

#[tokio::test]
async fn cve_2025_4563_mirror_pods_cannot_reference_resource_claims() {
    let test_server = start_test_server().await;
    let node = create(&test_server, "POST /api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n", "uid": node.at("metadata").text("uid"), "controller": true});
    let pod = json!({
        "metadata": {"name": "p", "annotations": {"kubernetes.io/config.mirror": "x"}, "ownerReferences": [owner]},
        "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}],
            "resourceClaims": [{"name": "r", "resourceClaimName": "another-pods"}]},
    });
    let post = format!("POST {DEFAULT}/pods");
    let answer = send(&test_server, peer_named("system:node:n"), &post, &[JSON], pod.to_string()).await;
    assert_forbidden(answer, "can not create pods that reference resourceclaims");
}

/// A node's credential gives access only to that node's objects.
#[tokio::test]
async fn node_credential_cannot_access_objects_of_other_nodes() {
    let test_server = start_test_server().await;
    for node in ["a", "b"] {
        create(&test_server, "POST /api/v1/nodes", json!({"metadata": {"name": node}})).await;
        create(
            &test_server,
            &format!("POST {DEFAULT}/secrets"),
            json!({"metadata": {"name": node}, "stringData": {"k": "hunter2"}}),
        )
        .await;
        let volumes = json!([{"name": "v", "secret": {"secretName": node}}]);
        let pod = json!({"metadata": {"name": node}, "spec": {"nodeName": node, "volumes": volumes, "containers": [{"name": "c", "image": "i"}]}});
        create(&test_server, &format!("POST {DEFAULT}/pods"), pod).await;
    }
    test_server
        .server
        .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
        .await
        .expect("a fresh cache");
    let a = || peer_named("system:node:a");
    let get = |path: String| {
        let test_server = &test_server;
        async move { send(test_server, a(), &format!("GET {path}"), &[], "").await }
    };
    for path in ["/secrets/a", "/pods/a", "/secrets?fieldSelector=metadata.name%3Da"] {
        let (code, text) = get(format!("{DEFAULT}{path}")).await;
        assert_eq!(code, 200, "{text}");
    }
    assert_eq!(get("/api/v1/pods?fieldSelector=spec.nodeName%3Da".into()).await.0, 200);
    for path in [
        format!("{DEFAULT}/secrets/b"),
        format!("{DEFAULT}/secrets"),
        format!("{DEFAULT}/secrets?fieldSelector=metadata.name%3Db"),
        format!("{DEFAULT}/secrets?fieldSelector=metadata.name%3Da&fieldSelector=metadata.name%3Db"),
        format!("{DEFAULT}/pods/b"),
        "/api/v1/pods".into(),
        "/api/v1/secrets".into(),
        "/api/v1/pods?fieldSelector=spec.nodeName%3Db".into(),
        "/api/v1/pods?fieldSelector=spec.nodeName%21%3Da".into(),
        "/api/v1/nodes/b".into(),
    ] {
        let twice = path.contains("fieldSelector=metadata.name%3Da&");
        let (code, text) = get(path.clone()).await;
        // The first of two selectors counts, for authorization and for the list.
        assert!(code == 403 || twice && !text.contains("\"name\":\"b\""), "{path}: {code} {text}");
    }
    let uid = test_server.get(&format!("{DEFAULT}/pods/b")).await["metadata"]["uid"].clone();
    let reference = json!({"apiVersion": "v1", "kind": "Pod", "name": "b", "uid": uid});
    let body = json!({"spec": {"boundObjectRef": reference}}).to_string();
    let answer =
        send(&test_server, a(), &format!("POST {DEFAULT}/serviceaccounts/default/token"), &[JSON], body)
            .await;
    assert_forbidden(answer, "node requested token bound to a pod scheduled on a different node");
    let eviction = json!({"metadata": {"name": "b"}}).to_string();
    let answer = send(&test_server, a(), &format!("POST {DEFAULT}/pods/b/eviction"), &[JSON], eviction).await;
    assert_forbidden(answer, "node a can only evict pods with spec.nodeName set to itself");
    let answer = send(&test_server, a(), &format!("DELETE {DEFAULT}/pods/b"), &[], "").await;
    assert_forbidden(answer, "can only delete pods with spec.nodeName set to itself");
    let status = json!({"status": {"phase": "Failed"}}).to_string();
    let answer = send(&test_server, a(), &format!("PATCH {DEFAULT}/pods/b/status"), &[MERGE], status).await;
    assert_forbidden(answer, "can only update pod status for pods with spec.nodeName set to itself");
}
