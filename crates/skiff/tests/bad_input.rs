//! Invalid input: every request gets a response that says what is wrong, nothing is stored, and the
//! server keeps running without using much memory.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use testkit::{Http, Reply, Server, assert_same};

const JSON: &str = "application/json";
const YAML: &str = "application/yaml";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const JSON_PATCH: &str = "application/json-patch+json";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";
const APPLY: &str = "application/apply-patch+yaml";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";
const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/default/deployments/base";
const CRD_PATH: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
/// Maximum size of a request body, as upstream.
const MAX_BODY_BYTES: usize = 3 << 20;
/// Far more than a small server needs, and far less than an attack could make it use.
const MAX_MEMORY_BYTES: u64 = 400 << 20;
const NESTING_DEPTH: usize = 10_000;

#[test]
fn rejects_invalid_body() {
    let check = InputFixture::start();
    for (name, body) in invalid_documents() {
        for (verb, path, kind) in [
            ("POST", DEPLOYMENTS, JSON),
            ("POST", DEPLOYMENTS, YAML),
            ("PUT", DEPLOYMENT, JSON),
            ("PATCH", DEPLOYMENT, JSON_PATCH),
            ("PATCH", DEPLOYMENT, MERGE),
            ("PATCH", DEPLOYMENT, STRATEGIC),
            ("PATCH", DEPLOYMENT, APPLY),
        ] {
            // An empty patch changes nothing and is valid.
            let is_noop = matches!((name, kind), ("empty object" | "null", JSON_PATCH | MERGE | STRATEGIC));
            if !is_noop {
                check.expect_rejected(name, verb, path, kind, &body);
            }
        }
    }
    for (name, body) in invalid_messages() {
        check.expect_rejected(name, "POST", DEPLOYMENTS, PROTOBUF, &body);
        check.expect_rejected(name, "PUT", DEPLOYMENT, PROTOBUF, &body);
        check.expect_rejected(name, "POST", CRD_PATH, PROTOBUF, &body);
    }
    for (name, kind, body) in invalid_patches() {
        check.expect_rejected(name, "PATCH", DEPLOYMENT, kind, body.as_bytes());
    }
    for kind in ["text/plain", "application/cbor", "application/json;charset=", "x", "", "application/xml"] {
        let reply = check.send("POST", DEPLOYMENTS, &[("content-type", kind)], b"{\"a\":");
        check.expect_status("POST", kind, &reply, 400..500);
    }
    check.end();
}

#[test]
fn rejects_corrupt_body_without_server_error() {
    let check = RefCell::new(InputFixture::start());
    let valid = deployment("x").to_string();
    let sealed = protobuf_body(&deployment("x"));
    let kinds = prop::sample::select(vec![
        ("POST", DEPLOYMENTS, JSON),
        ("POST", DEPLOYMENTS, YAML),
        ("POST", DEPLOYMENTS, PROTOBUF),
        ("PUT", DEPLOYMENT, JSON),
        ("PATCH", DEPLOYMENT, MERGE),
        ("PATCH", DEPLOYMENT, STRATEGIC),
        ("PATCH", DEPLOYMENT, APPLY),
        ("PATCH", DEPLOYMENT, JSON_PATCH),
    ]);
    let mutation = prop_oneof![
        any::<prop::sample::Index>().prop_map(Mutation::Cut),
        (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| Mutation::Byte(at, byte)),
        (any::<prop::sample::Index>(), wrong_values()).prop_map(|(at, value)| Mutation::Value(at, value)),
    ];
    let mut runner = TestRunner::new(Config { cases: 400, failure_persistence: None, ..Config::default() });
    let run = runner.run(&(kinds, mutation), |((verb, path, kind), mutation)| {
        let body = mutation.apply_to(if kind == PROTOBUF { &sealed } else { valid.as_bytes() });
        let dry = format!("{path}?dryRun=All&fieldManager=t&fieldValidation=Strict");
        let reply = check.borrow().send(verb, &dry, &[("content-type", kind)], &body);
        prop_assert!(code(kind, &reply) < 500, "{verb} {kind}: {} {}", reply.status, reply.text());
        let cut_json = matches!(mutation, Mutation::Cut(_)) && kind == JSON;
        prop_assert!(!cut_json || reply.status == 400, "{verb} {kind}: {} {}", reply.status, reply.text());
        Ok(())
    });
    run.unwrap();
    check.into_inner().end();
}

#[test]
fn rejects_malformed_requests() {
    let check = InputFixture::start();
    let long = format!("/api/v1/namespaces/{}", "x".repeat(60_000));
    let many = format!("/api/v1/pods?labelSelector={}", "a%2C".repeat(2_000));
    for (method, path) in [
        ("GET", "/api/v1/namespaces/default/configmaps/%00"),
        ("GET", "/api/v1/namespaces/default/configmaps/%ff%fe"),
        ("GET", "/api/v1/namespaces/default/configmaps/%zz"),
        ("GET", "/api/v1/namespaces/../../registry"),
        ("GET", "/api/v1/namespaces/default/configmaps/a/b/c/d/e"),
        ("GET", "/api/v1/namespaces/default/nothings"),
        ("GET", "/api/v9/pods"),
        ("GET", "/apis/none.example.com/v1/pods"),
        ("GET", "/%2F%2F"),
        ("GET", "/api/v1/pods?limit=99999999999999999999"),
        ("GET", "/api/v1/pods?limit=x&watch=perhaps"),
        ("GET", "/api/v1/pods?resourceVersion=-1"),
        ("GET", "/api/v1/pods?resourceVersion=99999999999999999999"),
        ("GET", "/api/v1/pods?watch=1&resourceVersion=rubbish"),
        ("GET", "/api/v1/pods?labelSelector=((("),
        ("GET", "/api/v1/pods?labelSelector=a%20in%20("),
        ("GET", "/api/v1/pods?fieldSelector=%3D%3D%3D"),
        ("GET", "/api/v1/pods?continue=AAAA"),
        ("GET", "/api/v1/pods?continue=%00%00"),
        ("GET", &many),
        ("GET", &long),
        ("POST", "/api/v1/pods"),
        ("PUT", "/api/v1/namespaces/default/configmaps"),
        ("PATCH", "/api/v1/namespaces/default/configmaps"),
        ("DELETE", "/api/v1/nothings/x"),
        ("FOO", "/api/v1/pods"),
        ("TRACE", "/api/v1/pods"),
        ("CONNECT", "/api/v1/pods"),
    ] {
        let reply = check.send(method, path, &[], b"");
        check.expect_status(method, path, &reply, 400..500);
    }
    let huge = "x".repeat(100_000);
    for (name, value) in [
        ("accept", "*/*;q=x,,,;=,application/json;as="),
        ("accept", "application/json;as=Table;v=v9;g=meta.k8s.io"),
        ("impersonate-user", "user\u{7f}"),
        ("authorization", "Basic ==="),
        ("content-encoding", "gzip"),
        ("accept-encoding", "gzip;q=,*;q=-1"),
        ("x-long", &huge),
        ("user-agent", "/////\t/"),
    ] {
        let reply = check.send("GET", "/api/v1/namespaces/default", &[(name, value)], b"");
        check.expect_status(name, value, &reply, 200..500);
    }
    for body in ["{", "[]", "{\"gracePeriodSeconds\":\"x\"}", "{\"propagationPolicy\":\"Sideways\"}"] {
        check.expect_rejected(body, "DELETE", DEPLOYMENT, JSON, body.as_bytes());
    }
    check.end();
}

/// A server with one object, and the state before the test.
struct InputFixture {
    server: Server,
    http: Http,
    pid: Option<u32>,
    before: Value,
    /// All failures are collected, so that none hides another.
    failures: RefCell<Vec<String>>,
}

impl InputFixture {
    fn start() -> InputFixture {
        let server = Server::start();
        let http = server.http();
        let reply = http.post(DEPLOYMENTS, &deployment("base")).unwrap();
        assert_eq!(reply.status, 201, "{}", reply.text());
        let (pid, before) = (server.pid(), all_objects(&http));
        InputFixture { server, http, pid, before, failures: RefCell::default() }
    }

    #[track_caller]
    fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        match self.http.send(method, path, headers, body) {
            Ok(reply) => reply,
            Err(error) => panic!("{method} {:.80}: {error:#}\n{}", path, self.server.log()),
        }
    }

    /// Expects a 4xx Status with a readable message.
    fn expect_rejected(&self, name: &str, verb: &str, path: &str, kind: &str, body: &[u8]) {
        let path = format!("{path}?fieldManager=t&fieldValidation=Strict");
        let path = if verb == "DELETE" { DEPLOYMENT.to_owned() } else { path };
        let reply = self.send(verb, &path, &[("content-type", kind)], body);
        let status = reply.json();
        let is_status = status["kind"] == "Status" && status["code"] == reply.status;
        let has_words = status["message"].as_str().is_some_and(|text| !text.is_empty());
        // The error of a rejected patch contains the patched object, quoted twice.
        let is_short = reply.body.len() < 5 * MAX_BODY_BYTES;
        if !((400..500).contains(&code(kind, &reply)) && is_status && has_words && is_short) {
            let what = format!("{name}: {verb} {kind}: {} {:.300}", reply.status, reply.text());
            self.failures.borrow_mut().push(what);
        }
    }

    fn expect_status(&self, method: &str, path: &str, reply: &Reply, expected: std::ops::Range<u16>) {
        if !expected.contains(&reply.status) {
            let what = format!("{method} {path:.100}: {} {:.300}", reply.status, reply.text());
            self.failures.borrow_mut().push(what);
        }
    }

    /// Checks that the server still runs and that nothing was stored.
    #[track_caller]
    fn end(self) {
        let failures = self.failures.into_inner();
        assert!(failures.is_empty(), "\n{}\n", failures.join("\n"));
        assert_eq!(self.http.get("/readyz").unwrap().status, 200);
        assert_eq!(self.server.pid(), self.pid);
        assert_same("stored", &self.before, &all_objects(&self.http));
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid.unwrap())).unwrap();
        let max_memory =
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        let max_memory = max_memory.unwrap().parse::<u64>().unwrap() << 10;
        assert!(max_memory < MAX_MEMORY_BYTES, "{} MiB at its peak", max_memory >> 20);
    }
}

/// Patches that upstream itself responds to with status 500, although the client is wrong. Such a
/// Status has no reason, while an internal error has reason `InternalError`.
const KNOWN_UPSTREAM_ERRORS: &[(&str, &str)] = &[
    (APPLY, "failed to create typed patch object ("),
    (STRATEGIC, "unknown patch type: "),
    (STRATEGIC, " does not contain declared merge key: "),
    (STRATEGIC, "expected a "),
    (STRATEGIC, "list element types are not identical: "),
    (STRATEGIC, "unable to find api field in struct "),
    (STRATEGIC, "merging an object in json but data type is not struct, instead is: "),
];

/// The status code, or 400 for one of those patches.
fn code(kind: &str, reply: &Reply) -> u16 {
    let status = reply.json();
    let words = status["message"].as_str().unwrap_or_default();
    let known = KNOWN_UPSTREAM_ERRORS.iter().any(|(patch, part)| *patch == kind && words.contains(part));
    if reply.status == 500 && status["reason"].is_null() && known { 400 } else { reply.status }
}

fn all_objects(http: &Http) -> Value {
    let kinds = ["/api/v1/secrets", "/api/v1/pods", DEPLOYMENTS, CRD_PATH, "/api/v1/namespaces"];
    kinds.iter().map(|path| http.get(path).unwrap().json()["items"].clone()).collect()
}

fn deployment(name: &str) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": {"a": "b"}},
        "spec": {
            "replicas": 2, "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{
                    "name": "web", "image": "web:1", "ports": [{"containerPort": 80}],
                    "resources": {"requests": {"cpu": "100m"}}, "env": [{"name": "A", "value": "é"}],
                }]},
            },
        },
    })
}

fn protobuf_body(object: &Value) -> Vec<u8> {
    let table = schema::kubernetes();
    let ty = table.type_by_kind("apps", "v1", "Deployment").unwrap();
    let value = schema::from_json(table, ty, object.to_string().as_bytes()).unwrap().value;
    schema::protobuf::encode_envelope(
        "apps/v1",
        "Deployment",
        &schema::protobuf::to_protobuf(table, ty, &value),
    )
}

/// Bodies that are invalid as JSON, as YAML and as any patch.
fn invalid_documents() -> Vec<(&'static str, Vec<u8>)> {
    let deep =
        |open: &str, close: &str| format!("{}{}", open.repeat(NESTING_DEPTH), close.repeat(NESTING_DEPTH));
    let wrapped = |inner: &str| {
        format!(
            "{{\"apiVersion\":\"apps/v1\",\"kind\":\"Deployment\",\"metadata\":{{\"name\":\"base\"}},\"x\":{inner}}}"
        )
    };
    let twice =
        deployment("base").to_string().replacen("\"spec\":", "\"metadata\":{\"name\":\"base\"},\"spec\":", 1);
    let mut broken = deployment("base").to_string().into_bytes();
    let at = broken.iter().position(|byte| *byte == 0xc3).unwrap();
    broken[at] = 0xff;
    let mut huge = deployment("base").to_string();
    huge.push_str(&" ".repeat(MAX_BODY_BYTES + 1 - huge.len()));
    let wrong_type = wrapped("1").replace("\"metadata\":{\"name\":\"base\"}", "\"metadata\":[7]");
    vec![
        ("empty", Vec::new()),
        ("null", b"null".to_vec()),
        ("number", b"17".to_vec()),
        ("string", b"\"x\"".to_vec()),
        ("list of numbers", b"[1]".to_vec()),
        ("empty object", b"{}".to_vec()),
        ("brace", b"{".to_vec()),
        ("comma", b"{\"a\":1,}".to_vec()),
        ("NUL", vec![0; 100]),
        ("control characters", b"{\"a\":\"\x01\"}".to_vec()),
        ("lone surrogate", b"{\"kind\":\"\\ud800\"}".to_vec()),
        ("big number", wrapped("1e999999").into_bytes()),
        ("invalid UTF-8", broken),
        ("duplicate keys", twice.into_bytes()),
        ("mistyped", wrong_type.into_bytes()),
        ("deep lists", wrapped(&deep("[", "]")).into_bytes()),
        ("deep objects", wrapped(&deep("{\"a\":", "}").replacen("\"a\":}", "\"a\":1}", 1)).into_bytes()),
        ("deep and unclosed", wrapped(&"[".repeat(NESTING_DEPTH)).into_bytes()),
        ("huge", huge.into_bytes()),
        ("alias bomb", alias_expansion().into_bytes()),
    ]
}

/// Each line doubles the one before: a few lines of YAML that expand to gigabytes.
fn alias_expansion() -> String {
    let mut text = "kind: Deployment\napiVersion: apps/v1\na0: &a0 [x, x]\n".to_owned();
    for i in 1..40 {
        text.push_str(&format!("a{i}: &a{i} [*a{}, *a{}]\n", i - 1, i - 1));
    }
    text
}

fn invalid_messages() -> Vec<(&'static str, Vec<u8>)> {
    let whole = protobuf_body(&deployment("base"));
    let seal = |raw: &[u8]| schema::protobuf::encode_envelope("apps/v1", "Deployment", raw);
    // Field 1 within field 1 and so on, each with the right length. This fits JSONSchemaProps and
    // ObjectMeta.
    let mut nested: Vec<u8> = Vec::new();
    for _ in 0..NESTING_DEPTH {
        let mut outer = vec![0x0a];
        let mut length = nested.len();
        while length >= 0x80 {
            outer.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        outer.push(length as u8);
        outer.extend(nested);
        nested = outer;
    }
    vec![
        ("empty", Vec::new()),
        ("JSON", deployment("base").to_string().into_bytes()),
        ("magic only", b"k8s\0".to_vec()),
        ("no magic", whole[4..].to_vec()),
        ("cut", whole[..whole.len() / 2].to_vec()),
        ("another kind", schema::protobuf::encode_envelope("v1", "Pod", b"")),
        ("length too long", seal(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f])),
        ("endless number", seal(&[0xff; 64])),
        ("group", seal(&[0x0b, 0x0c])),
        ("field 0", seal(&[0x02, 0x00])),
        ("deep", seal(&nested)),
        ("huge", seal(&vec![0; MAX_BODY_BYTES])),
    ]
}

fn invalid_patches() -> Vec<(&'static str, &'static str, String)> {
    let operation = |op: &str| format!("[{{\"op\":\"{op}\",\"path\":\"/metadata/labels/x\",\"value\":1}}]");
    let add = "{\"op\":\"add\",\"path\":\"/metadata/labels/x\",\"value\":\"y\"},".repeat(NESTING_DEPTH + 1);
    let double = "{\"op\":\"copy\",\"from\":\"/spec\",\"path\":\"/spec/x\"},".repeat(60);
    let list = |operations: String| format!("[{}]", operations.trim_end_matches(','));
    let kind = "apiVersion: apps/v1\nkind: Deployment\n";
    vec![
        ("no such operation", JSON_PATCH, operation("fly")),
        ("nothing to remove", JSON_PATCH, "[{\"op\":\"remove\",\"path\":\"/nothing/here\"}]".to_owned()),
        (
            "a test that fails",
            JSON_PATCH,
            "[{\"op\":\"test\",\"path\":\"/kind\",\"value\":\"Pod\"}]".to_owned(),
        ),
        (
            "index out of range",
            JSON_PATCH,
            "[{\"op\":\"add\",\"path\":\"/spec/template/spec/containers/99\",\"value\":{}}]".to_owned(),
        ),
        (
            "giant index",
            JSON_PATCH,
            "[{\"op\":\"remove\",\"path\":\"/spec/template/spec/containers/99999999999999999999\"}]"
                .to_owned(),
        ),
        ("mistyped", JSON_PATCH, operation("add")),
        ("too many", JSON_PATCH, list(add)),
        ("doubling", JSON_PATCH, list(double)),
        ("mistyped", MERGE, "{\"spec\":{\"replicas\":\"x\"}}".to_owned()),
        ("mistyped list", MERGE, "{\"spec\":{\"template\":{\"spec\":{\"containers\":{}}}}}".to_owned()),
        ("unknown directive", STRATEGIC, "{\"spec\":{\"$patch\":\"fly\"}}".to_owned()),
        (
            "no merge key",
            STRATEGIC,
            "{\"spec\":{\"template\":{\"spec\":{\"containers\":[{\"image\":\"x\"}]}}}}".to_owned(),
        ),
        ("mistyped", STRATEGIC, "{\"spec\":{\"template\":{\"spec\":{\"containers\":\"x\"}}}}".to_owned()),
        (
            "mistyped order",
            STRATEGIC,
            "{\"spec\":{\"template\":{\"spec\":{\"$setElementOrder/containers\":7}}}}".to_owned(),
        ),
        ("another kind", APPLY, "apiVersion: v1\nkind: Pod\n".to_owned()),
        ("mistyped", APPLY, format!("{kind}spec: {{replicas: [1]}}\n")),
        (
            "duplicate list keys",
            APPLY,
            format!("{kind}spec: {{template: {{spec: {{containers: [{{name: a}}, {{name: a}}]}}}}}}\n"),
        ),
        ("with owners", APPLY, format!("{kind}metadata: {{managedFields: [{{manager: x}}]}}\n")),
        ("tabs", APPLY, format!("{kind}spec:\n\treplicas: 1\n")),
    ]
}

/// A corruption of a valid body.
#[derive(Clone, Debug)]
enum Mutation {
    Cut(prop::sample::Index),
    Byte(prop::sample::Index, u8),
    /// Replaces a value; in protobuf, where values cannot be located, a byte.
    Value(prop::sample::Index, Value),
}

impl Mutation {
    fn apply_to(&self, body: &[u8]) -> Vec<u8> {
        let mut body = body.to_vec();
        match self {
            Mutation::Cut(at) => body.truncate(at.index(body.len())),
            Mutation::Byte(at, byte) => {
                let at = at.index(body.len());
                body[at] = *byte;
            }
            Mutation::Value(at, value) => match serde_json::from_slice::<Value>(&body) {
                Ok(mut object) => {
                    let mut paths = Vec::new();
                    pointers(&object, String::new(), &mut paths);
                    let target_path: &String = at.get(&paths);
                    *object.pointer_mut(target_path).unwrap() = value.clone();
                    body = object.to_string().into_bytes();
                }
                Err(_) => {
                    let at = at.index(body.len());
                    body[at] = !body[at];
                }
            },
        }
        body
    }
}

fn pointers(value: &Value, path: String, paths: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| pointers(value, format!("{path}/{key}"), paths));
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, value)| pointers(value, format!("{path}/{i}"), paths));
        }
        _ => {}
    }
    paths.push(path);
}

fn wrong_values() -> impl Strategy<Value = Value> {
    prop::sample::select(vec![
        json!(null),
        json!(true),
        json!(-1),
        json!(i64::MAX),
        json!(1e300),
        json!(""),
        json!("\u{0}"),
        json!("x".repeat(300)),
        json!([]),
        json!([null]),
        json!([[{}]]),
        json!({}),
        json!({"": null}),
    ])
}
