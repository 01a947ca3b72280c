//! The published findings of Kubernetes' security audits and its advisories that apply here, one test each.
//!
//! `TOB-K8S-…` are of the audit of 2019 (Trail of Bits), `NCC-…` of the one of 2022, `CVE-…` of advisories; what
//! the audits only warn of in general has no number.
//! Every request goes the whole way: authenticated, authorized, admitted, stored.

use std::fmt::Write as _;
use std::sync::Arc;

use api::json::Json as _;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::Rig;
use crate::access::User;
use crate::authentication::Peer;
use crate::rbac::ensure_defaults;

const JSON: (&str, &str) = ("content-type", "application/json");
const MERGE: (&str, &str) = ("content-type", "application/merge-patch+json");
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const DEFAULT: &str = "/api/v1/namespaces/default";

/// A server with upstream's roles, and a user `jo` who may do everything in `default` but make roles mightier.
async fn rig() -> Rig {
    let rig = Rig::start().await;
    ensure_defaults(&rig.server).await.expect("the default policy");
    let all = json!([{"apiGroups": ["", "rbac.authorization.k8s.io"], "resources": [
        "configmaps", "pods", "pods/ephemeralcontainers", "roles", "rolebindings", "clusterroles", "clusterrolebindings"],
        "verbs": ["get", "list", "create", "update", "patch", "delete"]}]);
    made(&rig, &format!("POST {RBAC}/clusterroles"), json!({"metadata": {"name": "jo"}, "rules": all})).await;
    let subject = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "jo"});
    let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "jo"});
    let binding = json!({"metadata": {"name": "jo"}, "subjects": [subject], "roleRef": reference});
    made(&rig, &format!("POST {RBAC}/clusterrolebindings"), binding).await;
    rig.server.fresh(crate::options::Version::MostRecent).await.expect("a fresh cache");
    rig
}

async fn made(rig: &Rig, request: &str, object: Value) -> Value {
    let (code, answer) = rig.send(request, object).await;
    assert_eq!(code, 201, "{answer}");
    answer
}

fn named(name: &str) -> Peer {
    let groups: &[&str] = if name.starts_with("system:node:") { &["system:nodes"] } else { &[] };
    let groups = groups.iter().chain(&["system:authenticated"]).map(|group| (*group).to_owned()).collect();
    Peer::known(User { name: name.into(), groups, ..User::default() })
}

/// The whole way; answers with the code and everything the client is told, headers included.
async fn send(
    rig: &Rig,
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
    let response = rig.server.answer(request, peer).await;
    let code = response.status().as_u16();
    let mut text = format!("{:?}\n", response.headers());
    let Ok(body) = response.into_body().collect().await;
    text += &String::from_utf8_lossy(&body.to_bytes());
    (code, text)
}

/// `jo` with a JSON body.
async fn jo(rig: &Rig, request: &str, body: Value) -> (u16, String) {
    send(rig, named("jo"), request, &[JSON], body.to_string()).await
}

#[track_caller]
fn refused((code, text): (u16, String), why: &str) {
    assert_eq!(code, 403, "{text}");
    assert!(text.contains(why), "{text}");
}

/// Collects what is logged in this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<String>>);

impl tracing::Subscriber for Log {
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

impl tracing::field::Visit for Log {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        let _ = writeln!(self.0.lock(), "{field}={value:?}");
    }
}

async fn token(rig: &Rig, spec: Value) -> String {
    let answer =
        made(rig, &format!("POST {DEFAULT}/serviceaccounts/default/token"), json!({"spec": spec})).await;
    answer.at("status").text("token").to_owned()
}

/// What a token is worth: the answer to a question everybody known may ask.
async fn worth(rig: &Rig, token: &str) -> u16 {
    let bearer = format!("Bearer {token}");
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}).to_string();
    let path = "POST /apis/authentication.k8s.io/v1/selfsubjectreviews";
    send(rig, Peer::default(), path, &[JSON, ("authorization", &bearer)], review).await.0
}

#[tokio::test]
async fn tob_k8s_001_and_cve_2019_11250_bearer_tokens_are_in_no_log_and_no_answer() {
    let rig = rig().await;
    let good = token(&rig, json!({})).await;
    let log = Log::default();
    let _collecting = tracing::subscriber::set_default(log.clone());
    let (forged, made_up) = (format!("{good}AAAA"), "abcdef.0123456789abcdef".to_owned());
    for token in [&good, &forged, &made_up] {
        let bearer = format!("Bearer {token}");
        let protocol = format!("base64url.bearer.authorization.k8s.io.{token}, v4.channel.k8s.io");
        for header in [("authorization", bearer.as_str()), ("sec-websocket-protocol", protocol.as_str())] {
            for path in ["/api/v1/secrets", "/api/v1/pods?watch=1&limit=x", "/nothing", "/apis/apps/v1/nope"]
            {
                let (_, text) = send(&rig, Peer::default(), &format!("GET {path}"), &[header], "").await;
                assert!(!text.contains(token.as_str()), "{text}");
            }
        }
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
        let path = "POST /apis/authentication.k8s.io/v1/tokenreviews";
        let (_, text) = jo(&rig, path, review).await;
        assert!(text.contains("forbidden") && !text.contains(token.as_str()), "{text}");
    }
    let log = log.0.lock().clone();
    for token in [good, forged, made_up] {
        let secret = token.rsplit('.').next().expect("the last part");
        assert!(!log.contains(secret), "{log}");
    }
}

#[tokio::test]
async fn secrets_are_not_in_complaints() {
    let rig = rig().await;
    let log = Log::default();
    let _collecting = tracing::subscriber::set_default(log.clone());
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
            send(&rig, admin(), &format!("POST {DEFAULT}/secrets"), &[JSON], object.to_string()).await;
        assert!(code >= 400, "{code} {object}");
        assert!(!text.contains(secret) && !text.contains("hunter2"), "{text}");
    }
    assert!(!log.0.lock().contains(secret));
}

#[tokio::test]
async fn cve_2019_11253_small_manifests_do_not_grow_without_end() {
    let rig = rig().await;
    let mut bomb = String::from(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: bomb}\na0: &a0 [x, x, x, x, x, x, x, x, x, x]\n",
    );
    for i in 1..12 {
        let _ = writeln!(bomb, "a{i}: &a{i} [{}]", vec![format!("*a{}", i - 1); 10].join(", "));
    }
    let mut merged =
        String::from("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: bomb}\nm0: &m0 {k: v}\n");
    for i in 1..24 {
        let _ = writeln!(merged, "m{i}: &m{i} {{a: *m{p}, b: *m{p}}}", p = i - 1);
    }
    let deep_json = format!("{{\"data\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let deep_yaml = format!("data: {}1{}", "[".repeat(100_000), "]".repeat(100_000));
    for (media, body) in [
        ("application/yaml", bomb.clone()),
        ("application/yaml", merged),
        ("application/yaml", deep_yaml),
        ("application/json", deep_json.clone()),
    ] {
        let begun = std::time::Instant::now();
        let request = format!("POST {DEFAULT}/configmaps");
        let (code, text) = send(&rig, named("jo"), &request, &[("content-type", media)], body).await;
        assert!((400..500).contains(&code), "{code} {}", &text[..text.len().min(300)]);
        assert!(text.len() < 100_000, "{}", text.len());
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{:?}", begun.elapsed());
    }
    made(&rig, &format!("POST {DEFAULT}/configmaps"), json!({"metadata": {"name": "m"}})).await;
    for (media, query, body) in [
        ("application/apply-patch+yaml", "?fieldManager=f", bomb),
        ("application/merge-patch+json", "", deep_json.clone()),
        ("application/strategic-merge-patch+json", "", deep_json),
    ] {
        let request = format!("PATCH {DEFAULT}/configmaps/m{query}");
        let (code, _) = send(&rig, named("jo"), &request, &[("content-type", media)], body).await;
        assert!((400..500).contains(&code), "{media} {code}");
    }
}

#[tokio::test]
async fn bodies_are_bounded() {
    let rig = rig().await;
    let body =
        format!("{{\"metadata\": {{\"name\": \"m\"}}, \"data\": {{\"k\": \"{}\"}}}}", "x".repeat(4 << 20));
    let (code, _) = send(&rig, named("jo"), &format!("POST {DEFAULT}/configmaps"), &[JSON], body).await;
    assert_eq!(code, 413);
}

#[tokio::test]
async fn cve_2019_1002100_json_patches_are_bounded() {
    let rig = rig().await;
    made(&rig, &format!("POST {DEFAULT}/configmaps"), json!({"metadata": {"name": "m"}, "data": {"k": "v"}}))
        .await;
    let many = vec![json!({"op": "test", "path": "/data/k", "value": "v"}); 10_001];
    let growing: Vec<Value> =
        (0..64).map(|i| json!({"op": "copy", "from": "/data", "path": format!("/data/c{i}")})).collect();
    for (patch, expected) in [(many, 413), (growing, 422)] {
        let media = ("content-type", "application/json-patch+json");
        let request = format!("PATCH {DEFAULT}/configmaps/m");
        let (code, text) = send(&rig, named("jo"), &request, &[media], Value::from(patch).to_string()).await;
        assert_eq!(code, expected, "{}", &text[..text.len().min(300)]);
    }
}

#[tokio::test]
async fn cve_2019_11247_what_has_no_namespace_is_not_reached_through_one() {
    let rig = rig().await;
    let node = "system:node:n";
    made(&rig, "POST /api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
    // Whoever owns a namespace may do everything in it.
    let subject = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "owner"});
    let reference =
        json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"});
    let binding = json!({"metadata": {"name": "owner"}, "subjects": [subject], "roleRef": reference});
    made(&rig, &format!("POST {RBAC}/namespaces/default/rolebindings"), binding).await;
    rig.server.fresh(crate::options::Version::MostRecent).await.expect("a fresh cache");
    for request in [
        "GET /api/v1/namespaces/default/nodes/n",
        "DELETE /api/v1/namespaces/default/nodes/n",
        "GET /api/v1/namespaces/default/persistentvolumes",
        "GET /apis/rbac.authorization.k8s.io/v1/namespaces/default/clusterroles/cluster-admin",
    ] {
        for who in ["owner", "jo", node] {
            let (code, text) = send(&rig, named(who), request, &[], "").await;
            assert!(matches!(code, 403 | 404), "{who} {request}: {code} {text}");
        }
    }
    assert_eq!(rig.get("/api/v1/nodes/n").await["metadata"]["name"], "n");
}

#[tokio::test]
async fn ncc_e003660_rkv_and_cve_2022_3162_names_and_paths_lead_to_no_other_object() {
    let rig = rig().await;
    made(&rig, "POST /api/v1/namespaces", json!({"metadata": {"name": "other"}})).await;
    made(
        &rig,
        "POST /api/v1/namespaces/other/secrets",
        json!({"metadata": {"name": "s"}, "stringData": {"k": "hunter2"}}),
    )
    .await;
    made(
        &rig,
        "POST /api/v1/namespaces/other/configmaps",
        json!({"metadata": {"name": "m"}, "data": {"k": "hunter2"}}),
    )
    .await;
    let pods = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["*"]}]);
    made(
        &rig,
        &format!("POST {RBAC}/namespaces/default/roles"),
        json!({"metadata": {"name": "maps"}, "rules": pods}),
    )
    .await;
    let subject = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "al"});
    let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "maps"});
    let binding = json!({"metadata": {"name": "al"}, "subjects": [subject], "roleRef": reference});
    made(&rig, &format!("POST {RBAC}/namespaces/default/rolebindings"), binding).await;
    rig.server.fresh(crate::options::Version::MostRecent).await.expect("a fresh cache");
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
            let (_, text) = send(&rig, named(who), &format!("GET /api/v1/{path}"), &[], "").await;
            let allowed = who == "jo" && path.ends_with("/other/configmaps/m") && !path.contains("%2F");
            assert!(!text.contains("hunter2") || allowed, "{who} {path}: {text}");
        }
    }
    // Nothing can be made under such a name either.
    for name in ["..", ".", "a/b", "a%2Fb", "../x"] {
        let (code, text) =
            jo(&rig, &format!("POST {DEFAULT}/configmaps"), json!({"metadata": {"name": name}})).await;
        assert_eq!(code, 422, "{name}: {text}");
    }
}

#[tokio::test]
async fn tob_k8s_026_no_files_of_the_host_are_served() {
    let rig = rig().await;
    made(&rig, "POST /api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
    let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}});
    made(&rig, &format!("POST {DEFAULT}/pods"), pod).await;
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
        let (code, text) = send(&rig, admin(), &format!("GET {path}"), &[], "").await;
        assert!(code >= 400 && !text.contains("root:"), "{path}: {code} {text}");
    }
}

fn grant(name: &str, role: &str) -> Value {
    let subject = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "jo"});
    let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role});
    json!({"metadata": {"name": name}, "subjects": [subject], "roleRef": reference})
}

#[tokio::test]
async fn nobody_escalates_by_binding() {
    let rig = rig().await;
    let why = "is attempting to grant RBAC permissions not currently held";
    for path in [format!("{RBAC}/clusterrolebindings"), format!("{RBAC}/namespaces/default/rolebindings")] {
        refused(jo(&rig, &format!("POST {path}"), grant("more", "cluster-admin")).await, why);
        refused(jo(&rig, &format!("POST {path}?dryRun=All"), grant("more", "cluster-admin")).await, why);
        // A PUT may make it too, and a patch may add to what is there.
        refused(jo(&rig, &format!("PUT {path}/more"), grant("more", "cluster-admin")).await, why);
        let apply = ("content-type", "application/apply-patch+yaml");
        let mut body = grant("more", "cluster-admin");
        body["apiVersion"] = json!("rbac.authorization.k8s.io/v1");
        body["kind"] = json!(if path.contains("namespaces") { "RoleBinding" } else { "ClusterRoleBinding" });
        let request = format!("PATCH {path}/more?fieldManager=f");
        refused(send(&rig, named("jo"), &request, &[apply], body.to_string()).await, why);
    }
    let subjects =
        json!({"subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "jo"}]});
    let request = format!("PATCH {RBAC}/clusterrolebindings/cluster-admin");
    refused(send(&rig, named("jo"), &request, &[MERGE], subjects.to_string()).await, why);
    let (code, _) =
        jo(&rig, &format!("POST {RBAC}/namespaces/default/rolebindings"), grant("same", "jo")).await;
    assert_eq!(code, 201, "what one has, one may give");
}

#[tokio::test]
async fn nobody_escalates_by_changing_a_role() {
    let rig = rig().await;
    let why = "is attempting to grant RBAC permissions not currently held";
    let all = json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]);
    let role = json!({"metadata": {"name": "more"}, "rules": all});
    refused(jo(&rig, &format!("POST {RBAC}/clusterroles"), role.clone()).await, why);
    refused(jo(&rig, &format!("POST {RBAC}/namespaces/default/roles"), role.clone()).await, why);
    refused(jo(&rig, &format!("PUT {RBAC}/clusterroles/more"), role).await, why);
    let patch = json!({"rules": all}).to_string();
    let request = format!("PATCH {RBAC}/clusterroles/jo");
    refused(send(&rig, named("jo"), &request, &[MERGE], patch).await, why);
    let selector =
        json!({"clusterRoleSelectors": [{"matchLabels": {"kubernetes.io/bootstrapping": "rbac-defaults"}}]});
    let gathering = json!({"metadata": {"name": "all"}, "aggregationRule": selector});
    let why = "must have cluster-admin privileges to use the aggregationRule";
    refused(jo(&rig, &format!("POST {RBAC}/clusterroles"), gathering).await, why);
}

#[tokio::test]
async fn nobody_acts_as_another_without_leave() {
    let rig = rig().await;
    for headers in [
        &[("impersonate-user", "admin")][..],
        &[("impersonate-user", "jo"), ("impersonate-group", "system:masters")],
        &[("impersonate-user", "system:serviceaccount:kube-system:default")],
        &[("impersonate-user", "system:node:n")],
        &[("impersonate-user", "jo"), ("impersonate-uid", "1")],
        &[("impersonate-user", "jo"), ("impersonate-extra-scopes", "all")],
    ] {
        refused(send(&rig, named("jo"), "GET /api/v1/secrets", headers, "").await, "cannot impersonate");
    }
    let (code, text) =
        send(&rig, named("jo"), "GET /api/v1/secrets", &[("impersonate-group", "system:masters")], "").await;
    assert_eq!(code, 400, "{text}");
    // Whoever nobody knows is nobody.
    let (code, _) =
        send(&rig, Peer::default(), "GET /api/v1/secrets", &[("impersonate-user", "admin")], "").await;
    assert!(matches!(code, 401 | 403), "{code}");
    let (code, _) = send(
        &rig,
        Peer::default(),
        "GET /api/v1/secrets",
        &[("x-remote-user", "admin"), ("x-remote-group", "system:masters")],
        "",
    )
    .await;
    assert!(matches!(code, 401 | 403), "{code}");
}

#[tokio::test]
async fn tokens_end_with_what_they_are_for() {
    let rig = rig().await;
    let bound = |kind: &str, name: &str, uid: &str| json!({"boundObjectRef": {"apiVersion": "v1", "kind": kind, "name": name, "uid": uid}});
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let pod = made(&rig, &format!("POST {DEFAULT}/pods"), pod).await;
    let secret = made(&rig, &format!("POST {DEFAULT}/secrets"), json!({"metadata": {"name": "s"}})).await;
    let uid = |object: &Value| object.at("metadata").text("uid").to_owned();
    let of_pod = token(&rig, bound("Pod", "p", &uid(&pod))).await;
    let of_secret = token(&rig, bound("Secret", "s", &uid(&secret))).await;
    let of_account = token(&rig, json!({})).await;
    for token in [&of_pod, &of_secret, &of_account] {
        assert_eq!(worth(&rig, token).await, 201);
    }
    rig.send(&format!("DELETE {DEFAULT}/pods/p"), json!({"gracePeriodSeconds": 0})).await;
    assert_eq!(worth(&rig, &of_pod).await, 401);
    rig.send(&format!("DELETE {DEFAULT}/secrets/s"), json!({})).await;
    assert_eq!(worth(&rig, &of_secret).await, 401);
    assert_eq!(worth(&rig, &of_account).await, 201);
    rig.send(&format!("DELETE {DEFAULT}/serviceaccounts/default"), json!({})).await;
    assert_eq!(worth(&rig, &of_account).await, 401);
    // One that is made again under the same name is another.
    made(&rig, &format!("POST {DEFAULT}/serviceaccounts"), json!({"metadata": {"name": "default"}})).await;
    assert_eq!(worth(&rig, &of_account).await, 401);
}

#[tokio::test]
async fn tob_k8s_015_numbers_out_of_range_are_refused() {
    let rig = rig().await;
    for number in
        ["99999999999999999999", "-99999999999999999999", "1e999", "0x10", "18446744073709551616", "NaN"]
    {
        for parameter in ["limit", "timeoutSeconds", "resourceVersion", "continue"] {
            let request = format!("GET {DEFAULT}/configmaps?{parameter}={number}");
            let (code, text) = send(&rig, named("jo"), &request, &[], "").await;
            assert!((400..500).contains(&code), "{parameter}={number}: {code} {text}");
        }
        let request = format!("DELETE {DEFAULT}/pods/p?gracePeriodSeconds={number}");
        let (code, text) = send(&rig, named("jo"), &request, &[], "").await;
        assert!((400..500).contains(&code), "{number}: {code} {text}");
    }
    for port in ["4294967376", "18446744073709551696", "-1", "1e10", "80.5"] {
        let pod = format!(
            r#"{{"metadata": {{"name": "p"}}, "spec": {{"containers": [{{"name": "c", "image": "i", "ports": [{{"containerPort": {port}}}]}}]}}}}"#
        );
        let (code, text) = send(&rig, named("jo"), &format!("POST {DEFAULT}/pods"), &[JSON], pod).await;
        assert!((400..500).contains(&code), "{port}: {code} {text}");
    }
}

#[tokio::test]
async fn cve_2023_2728_and_cve_2024_3177_only_listed_secrets_are_mounted() {
    let rig = rig().await;
    let annotations = json!({"kubernetes.io/enforce-mountable-secrets": "true"});
    let account =
        json!({"metadata": {"name": "strict", "annotations": annotations}, "secrets": [{"name": "listed"}]});
    made(&rig, &format!("POST {DEFAULT}/serviceaccounts"), account).await;
    let pod = |name: &str, container: Value| {
        let mut container = container;
        container["name"] = json!("c");
        container["image"] = json!("i");
        json!({"metadata": {"name": name}, "spec": {"serviceAccountName": "strict", "containers": [container]}})
    };
    let post = format!("POST {DEFAULT}/pods");
    let from = |name: &str| json!({"envFrom": [{"secretRef": {"name": name}}]});
    let why = "service account strict does not reference that secret";
    refused(jo(&rig, &post, pod("p", from("other"))).await, why);
    let env = json!({"env": [{"name": "E", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]});
    refused(jo(&rig, &post, pod("p", env.clone())).await, why);
    let (code, text) = jo(&rig, &post, pod("p", from("listed"))).await;
    assert_eq!(code, 201, "{text}");
    for mut debug in [from("other"), env] {
        debug["name"] = json!("d");
        debug["image"] = json!("i");
        debug["terminationMessagePolicy"] = json!("File");
        debug["imagePullPolicy"] = json!("Always");
        let patch = json!({"spec": {"ephemeralContainers": [debug]}}).to_string();
        let request = format!("PATCH {DEFAULT}/pods/p/ephemeralcontainers");
        refused(send(&rig, named("jo"), &request, &[MERGE], patch).await, why);
    }
}

/// Pods that a level forbids come neither directly nor through a debug container.
#[tokio::test]
async fn pod_security_is_enforced_on_every_way_in() {
    let rig = rig().await;
    let labels = json!({"pod-security.kubernetes.io/enforce": "baseline"});
    let patch = json!({"metadata": {"labels": labels}}).to_string();
    let (code, _) = rig.call("PATCH /api/v1/namespaces/default", MERGE.1, &patch).await;
    assert_eq!(code, 200);
    let pod = |context: Value| json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i", "securityContext": context}]}});
    let why = "violates PodSecurity";
    refused(jo(&rig, &format!("POST {DEFAULT}/pods"), pod(json!({"privileged": true}))).await, why);
    let (code, text) = jo(&rig, &format!("POST {DEFAULT}/pods"), pod(json!({}))).await;
    assert_eq!(code, 201, "{text}");
    let debug = json!({"name": "d", "image": "i", "imagePullPolicy": "Always", "terminationMessagePolicy": "File",
        "securityContext": {"privileged": true}});
    let patch = json!({"spec": {"ephemeralContainers": [debug]}}).to_string();
    let request = format!("PATCH {DEFAULT}/pods/p/ephemeralcontainers");
    refused(send(&rig, named("jo"), &request, &[MERGE], patch).await, why);
    let job = json!({"metadata": {"name": "j"}, "spec": {"template": {"spec": {"restartPolicy": "Never",
        "containers": [{"name": "c", "image": "i", "securityContext": {"privileged": true}}]}}}});
    let groups = vec!["system:masters".into()];
    let admin = Peer::known(User { name: "admin".into(), groups, ..User::default() });
    let (code, text) =
        send(&rig, admin, "POST /apis/batch/v1/namespaces/default/jobs", &[JSON], job.to_string()).await;
    assert_eq!(code, 201, "{text}");
    assert!(text.contains("would violate PodSecurity"), "workloads are warned of: {text}");
}

#[tokio::test]
async fn cve_2025_5187_and_cve_2021_25735_nodes_change_nothing_that_guards_them() {
    let rig = rig().await;
    let taints = json!([{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]);
    made(&rig, "POST /api/v1/nodes", json!({"metadata": {"name": "n"}, "spec": {"taints": taints}})).await;
    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "0"}]);
    for (subresource, patch, why) in [
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
        refused(send(&rig, named("system:node:n"), &request, &[MERGE], patch.to_string()).await, why);
        refused(
            send(&rig, named("system:node:m"), &request, &[MERGE], patch.to_string()).await,
            "is not allowed to modify node",
        );
    }
    let delete = send(&rig, named("system:node:n"), "DELETE /api/v1/nodes/n", &[], "").await;
    refused(delete, "cannot delete resource");
}

#[tokio::test]
async fn cve_2025_4563_mirror_pods_claim_no_devices() {
    let rig = rig().await;
    let node = made(&rig, "POST /api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n", "uid": node.at("metadata").text("uid"), "controller": true});
    let pod = json!({
        "metadata": {"name": "p", "annotations": {"kubernetes.io/config.mirror": "x"}, "ownerReferences": [owner]},
        "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}],
            "resourceClaims": [{"name": "r", "resourceClaimName": "somebody-elses"}]},
    });
    let post = format!("POST {DEFAULT}/pods");
    let answer = send(&rig, named("system:node:n"), &post, &[JSON], pod.to_string()).await;
    refused(answer, "can not create pods that reference resourceclaims");
}

/// Whoever runs on a node can do with its credential only what is the node's.
#[tokio::test]
async fn a_stolen_node_opens_nothing_of_the_others() {
    let rig = rig().await;
    for node in ["a", "b"] {
        made(&rig, "POST /api/v1/nodes", json!({"metadata": {"name": node}})).await;
        made(
            &rig,
            &format!("POST {DEFAULT}/secrets"),
            json!({"metadata": {"name": node}, "stringData": {"k": "hunter2"}}),
        )
        .await;
        let volumes = json!([{"name": "v", "secret": {"secretName": node}}]);
        let pod = json!({"metadata": {"name": node}, "spec": {"nodeName": node, "volumes": volumes, "containers": [{"name": "c", "image": "i"}]}});
        made(&rig, &format!("POST {DEFAULT}/pods"), pod).await;
    }
    rig.server.fresh(crate::options::Version::MostRecent).await.expect("a fresh cache");
    let a = || named("system:node:a");
    let get = |path: String| {
        let rig = &rig;
        async move { send(rig, a(), &format!("GET {path}"), &[], "").await }
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
        // The first of two selectors is the one that counts, for both questions.
        assert!(code == 403 || twice && !text.contains("\"name\":\"b\""), "{path}: {code} {text}");
    }
    let uid = rig.get(&format!("{DEFAULT}/pods/b")).await["metadata"]["uid"].clone();
    let reference = json!({"apiVersion": "v1", "kind": "Pod", "name": "b", "uid": uid});
    let body = json!({"spec": {"boundObjectRef": reference}}).to_string();
    let answer =
        send(&rig, a(), &format!("POST {DEFAULT}/serviceaccounts/default/token"), &[JSON], body).await;
    refused(answer, "node requested token bound to a pod scheduled on a different node");
    let eviction = json!({"metadata": {"name": "b"}}).to_string();
    let answer = send(&rig, a(), &format!("POST {DEFAULT}/pods/b/eviction"), &[JSON], eviction).await;
    refused(answer, "node a can only evict pods with spec.nodeName set to itself");
    let answer = send(&rig, a(), &format!("DELETE {DEFAULT}/pods/b"), &[], "").await;
    refused(answer, "can only delete pods with spec.nodeName set to itself");
    let status = json!({"status": {"phase": "Failed"}}).to_string();
    let answer = send(&rig, a(), &format!("PATCH {DEFAULT}/pods/b/status"), &[MERGE], status).await;
    refused(answer, "can only update pod status for pods with spec.nodeName set to itself");
}
