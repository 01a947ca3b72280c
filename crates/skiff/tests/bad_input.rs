//! Whatever a client sends, it gets an answer that says what is wrong; nothing is stored, and the server stays
//! up and small.

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
const ALL: &str = "/apis/apps/v1/namespaces/default/deployments";
const ONE: &str = "/apis/apps/v1/namespaces/default/deployments/base";
const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
/// What a body may have at most, as upstream.
const LIMIT: usize = 3 << 20;
/// Far more than a small server needs and far less than an attack could make it use.
const MOST_MEMORY: u64 = 400 << 20;
const DEEP: usize = 10_000;

#[test]
fn bad_bodies_are_refused() {
    let check = Check::start();
    for (name, body) in texts() {
        for (verb, path, kind) in [
            ("POST", ALL, JSON),
            ("POST", ALL, YAML),
            ("PUT", ONE, JSON),
            ("PATCH", ONE, JSON_PATCH),
            ("PATCH", ONE, MERGE),
            ("PATCH", ONE, STRATEGIC),
            ("PATCH", ONE, APPLY),
        ] {
            // A patch that says nothing changes nothing, which is no mistake.
            let fine = matches!((name, kind), ("empty object" | "null", JSON_PATCH | MERGE | STRATEGIC));
            if !fine {
                check.refused(name, verb, path, kind, &body);
            }
        }
    }
    for (name, body) in messages() {
        check.refused(name, "POST", ALL, PROTOBUF, &body);
        check.refused(name, "PUT", ONE, PROTOBUF, &body);
        check.refused(name, "POST", CRDS, PROTOBUF, &body);
    }
    for (name, kind, body) in patches() {
        check.refused(name, "PATCH", ONE, kind, body.as_bytes());
    }
    for kind in ["text/plain", "application/cbor", "application/json;charset=", "x", "", "application/xml"] {
        let reply = check.send("POST", ALL, &[("content-type", kind)], b"{\"a\":");
        check.judge("POST", kind, &reply, 400..500);
    }
    check.end();
}

#[test]
fn broken_bodies_are_refused() {
    let check = RefCell::new(Check::start());
    let valid = deployment("x").to_string();
    let sealed = sealed(&deployment("x"));
    let kinds = prop::sample::select(vec![
        ("POST", ALL, JSON),
        ("POST", ALL, YAML),
        ("POST", ALL, PROTOBUF),
        ("PUT", ONE, JSON),
        ("PATCH", ONE, MERGE),
        ("PATCH", ONE, STRATEGIC),
        ("PATCH", ONE, APPLY),
        ("PATCH", ONE, JSON_PATCH),
    ]);
    let damage = prop_oneof![
        any::<prop::sample::Index>().prop_map(Damage::Cut),
        (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        (any::<prop::sample::Index>(), wrong_values()).prop_map(|(at, value)| Damage::Value(at, value)),
    ];
    let mut runner = TestRunner::new(Config { cases: 400, failure_persistence: None, ..Config::default() });
    let run = runner.run(&(kinds, damage), |((verb, path, kind), damage)| {
        let body = damage.done_to(if kind == PROTOBUF { &sealed } else { valid.as_bytes() });
        let dry = format!("{path}?dryRun=All&fieldManager=t&fieldValidation=Strict");
        let reply = check.borrow().send(verb, &dry, &[("content-type", kind)], &body);
        prop_assert!(code(kind, &reply) < 500, "{verb} {kind}: {} {}", reply.status, reply.text());
        let cut_json = matches!(damage, Damage::Cut(_)) && kind == JSON;
        prop_assert!(!cut_json || reply.status == 400, "{verb} {kind}: {} {}", reply.status, reply.text());
        Ok(())
    });
    run.unwrap();
    check.into_inner().end();
}

#[test]
fn odd_requests_are_refused() {
    let check = Check::start();
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
        check.judge(method, path, &reply, 400..500);
    }
    let huge = "x".repeat(100_000);
    for (name, value) in [
        ("accept", "*/*;q=x,,,;=,application/json;as="),
        ("accept", "application/json;as=Table;v=v9;g=meta.k8s.io"),
        ("impersonate-user", "somebody\u{7f}"),
        ("authorization", "Basic ==="),
        ("content-encoding", "gzip"),
        ("accept-encoding", "gzip;q=,*;q=-1"),
        ("x-long", &huge),
        ("user-agent", "/////\t/"),
    ] {
        let reply = check.send("GET", "/api/v1/namespaces/default", &[(name, value)], b"");
        check.judge(name, value, &reply, 200..500);
    }
    for body in ["{", "[]", "{\"gracePeriodSeconds\":\"x\"}", "{\"propagationPolicy\":\"Sideways\"}"] {
        check.refused(body, "DELETE", ONE, JSON, body.as_bytes());
    }
    check.end();
}

/// A server with one object, and how it was before.
struct Check {
    server: Server,
    http: Http,
    pid: Option<u32>,
    before: Value,
    /// One mistake hides no other.
    complaints: RefCell<Vec<String>>,
}

impl Check {
    fn start() -> Check {
        let server = Server::start();
        let http = server.http();
        let reply = http.post(ALL, &deployment("base")).unwrap();
        assert_eq!(reply.status, 201, "{}", reply.text());
        let (pid, before) = (server.pid(), everything(&http));
        Check { server, http, pid, before, complaints: RefCell::default() }
    }

    #[track_caller]
    fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        match self.http.send(method, path, headers, body) {
            Ok(reply) => reply,
            Err(error) => panic!("{method} {:.80}: {error:#}\n{}", path, self.server.log()),
        }
    }

    /// 4xx, in words that a client can read.
    fn refused(&self, name: &str, verb: &str, path: &str, kind: &str, body: &[u8]) {
        let path = format!("{path}?fieldManager=t&fieldValidation=Strict");
        let path = if verb == "DELETE" { ONE.to_owned() } else { path };
        let reply = self.send(verb, &path, &[("content-type", kind)], body);
        let status = reply.json();
        let is_status = status["kind"] == "Status" && status["code"] == reply.status;
        let has_words = status["message"].as_str().is_some_and(|text| !text.is_empty());
        // A refused patch shows what it made, quoted twice.
        let is_short = reply.body.len() < 5 * LIMIT;
        if !((400..500).contains(&code(kind, &reply)) && is_status && has_words && is_short) {
            let what = format!("{name}: {verb} {kind}: {} {:.300}", reply.status, reply.text());
            self.complaints.borrow_mut().push(what);
        }
    }

    fn judge(&self, method: &str, path: &str, reply: &Reply, fine: std::ops::Range<u16>) {
        if !fine.contains(&reply.status) {
            let what = format!("{method} {path:.100}: {} {:.300}", reply.status, reply.text());
            self.complaints.borrow_mut().push(what);
        }
    }

    /// Nothing came of all that.
    #[track_caller]
    fn end(self) {
        let complaints = self.complaints.into_inner();
        assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
        assert_eq!(self.http.get("/readyz").unwrap().status, 200);
        assert_eq!(self.server.pid(), self.pid);
        assert_same("stored", &self.before, &everything(&self.http));
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid.unwrap())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        let peak = peak.unwrap().parse::<u64>().unwrap() << 10;
        assert!(peak < MOST_MEMORY, "{} MiB at its peak", peak >> 20);
    }
}

/// The patches for which upstream itself has a 500, though the client is wrong; the answer has no reason then,
/// where a failure of the server's own has `InternalError`.
const UPSTREAMS_OWN: &[(&str, &str)] = &[
    (APPLY, "failed to create typed patch object ("),
    (STRATEGIC, "unknown patch type: "),
    (STRATEGIC, " does not contain declared merge key: "),
    (STRATEGIC, "expected a "),
    (STRATEGIC, "list element types are not identical: "),
    (STRATEGIC, "unable to find api field in struct "),
    (STRATEGIC, "merging an object in json but data type is not struct, instead is: "),
];

/// The answer's code, or 400 for one of those.
fn code(kind: &str, reply: &Reply) -> u16 {
    let status = reply.json();
    let words = status["message"].as_str().unwrap_or_default();
    let known = UPSTREAMS_OWN.iter().any(|(patch, part)| *patch == kind && words.contains(part));
    if reply.status == 500 && status["reason"].is_null() && known { 400 } else { reply.status }
}

fn everything(http: &Http) -> Value {
    let kinds = ["/api/v1/secrets", "/api/v1/pods", ALL, CRDS, "/api/v1/namespaces"];
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

fn sealed(object: &Value) -> Vec<u8> {
    let table = schema::kubernetes();
    let ty = table.kind("apps", "v1", "Deployment").unwrap();
    let value = schema::from_json(table, ty, object.to_string().as_bytes()).unwrap().value;
    schema::protobuf::seal("apps/v1", "Deployment", &schema::protobuf::to_protobuf(table, ty, &value))
}

/// Bodies that are wrong as JSON, as YAML and as any patch.
fn texts() -> Vec<(&'static str, Vec<u8>)> {
    let deep = |open: &str, close: &str| format!("{}{}", open.repeat(DEEP), close.repeat(DEEP));
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
    huge.push_str(&" ".repeat(LIMIT + 1 - huge.len()));
    let mistyped = wrapped("1").replace("\"metadata\":{\"name\":\"base\"}", "\"metadata\":[7]");
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
        ("mistyped", mistyped.into_bytes()),
        ("deep lists", wrapped(&deep("[", "]")).into_bytes()),
        ("deep objects", wrapped(&deep("{\"a\":", "}").replacen("\"a\":}", "\"a\":1}", 1)).into_bytes()),
        ("deep and unclosed", wrapped(&"[".repeat(DEEP)).into_bytes()),
        ("huge", huge.into_bytes()),
        ("alias bomb", alias_bomb().into_bytes()),
    ]
}

/// Each line doubles the one before: a few lines of YAML that are gigabytes when written out.
fn alias_bomb() -> String {
    let mut text = "kind: Deployment\napiVersion: apps/v1\na0: &a0 [x, x]\n".to_owned();
    for i in 1..40 {
        text.push_str(&format!("a{i}: &a{i} [*a{}, *a{}]\n", i - 1, i - 1));
    }
    text
}

fn messages() -> Vec<(&'static str, Vec<u8>)> {
    let whole = sealed(&deployment("base"));
    let seal = |raw: &[u8]| schema::protobuf::seal("apps/v1", "Deployment", raw);
    // Field 1 within field 1 and so on, each with the right length: JSONSchemaProps and ObjectMeta alike.
    let mut nested: Vec<u8> = Vec::new();
    for _ in 0..DEEP {
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
        ("another kind", schema::protobuf::seal("v1", "Pod", b"")),
        ("length too long", seal(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f])),
        ("endless number", seal(&[0xff; 64])),
        ("group", seal(&[0x0b, 0x0c])),
        ("field 0", seal(&[0x02, 0x00])),
        ("deep", seal(&nested)),
        ("huge", seal(&vec![0; LIMIT])),
    ]
}

fn patches() -> Vec<(&'static str, &'static str, String)> {
    let operation = |op: &str| format!("[{{\"op\":\"{op}\",\"path\":\"/metadata/labels/x\",\"value\":1}}]");
    let add = "{\"op\":\"add\",\"path\":\"/metadata/labels/x\",\"value\":\"y\"},".repeat(DEEP + 1);
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

/// What is done to a body that is right.
#[derive(Clone, Debug)]
enum Damage {
    Cut(prop::sample::Index),
    Byte(prop::sample::Index, u8),
    /// One of its values is another; for protobuf, which has none to find, a byte.
    Value(prop::sample::Index, Value),
}

impl Damage {
    fn done_to(&self, body: &[u8]) -> Vec<u8> {
        let mut body = body.to_vec();
        match self {
            Damage::Cut(at) => body.truncate(at.index(body.len())),
            Damage::Byte(at, byte) => {
                let at = at.index(body.len());
                body[at] = *byte;
            }
            Damage::Value(at, value) => match serde_json::from_slice::<Value>(&body) {
                Ok(mut object) => {
                    let mut places = Vec::new();
                    pointers(&object, String::new(), &mut places);
                    let place: &String = at.get(&places);
                    *object.pointer_mut(place).unwrap() = value.clone();
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

fn pointers(value: &Value, path: String, places: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| pointers(value, format!("{path}/{key}"), places));
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, value)| pointers(value, format!("{path}/{i}"), places));
        }
        _ => {}
    }
    places.push(path);
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
