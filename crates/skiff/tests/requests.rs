//! Features of all requests: HTTP versions, content negotiation, dry run, preconditions, grace periods,
//! finalizers and anonymous access.

use std::io::Read as _;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::{Http, Reply, Server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const PODS: &str = "/api/v1/namespaces/default/pods";
const MERGE: &str = "application/merge-patch+json";

#[test]
fn events_expire_after_ttl() {
    let server = Server::start_with(&["--kube-apiserver-arg=event-ttl=1s"]);
    let http = server.http();
    let events = "/api/v1/namespaces/default/events";
    let about = json!({"kind": "Pod", "namespace": "default", "name": "a"});
    make(&http, events, json!({"metadata": {"name": "a"}, "involvedObject": about}));
    server.wait_until("the event is gone", || http.get(&format!("{events}/a")).unwrap().status == 404);
}

#[test]
fn responses_use_requested_encoding() {
    let server = Server::start();
    let http = server.http();
    make(&http, MAPS, json!({"metadata": {"name": "a"}, "data": {"k": "x".repeat(200_000)}}));
    let one = format!("{MAPS}/a");
    let whole = http.get(&one).unwrap();
    let get = |headers: &[(&str, &str)], path: &str| http.send("GET", path, headers, b"").unwrap();

    let compressed = get(&[("accept-encoding", "gzip")], &one);
    assert_eq!(compressed.header("content-encoding"), Some("gzip"));
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&*compressed.body).read_to_end(&mut plain).unwrap();
    assert!(plain == whole.body && compressed.body.len() < 10_000, "{} bytes", compressed.body.len());
    let small = get(&[("accept-encoding", "gzip")], "/api/v1/namespaces/default");
    assert_eq!(small.header("content-encoding"), None, "small responses are not compressed");

    let space = "/api/v1/namespaces/default";
    let lines = |reply: Reply| reply.text().trim_end().lines().count();
    assert_eq!(lines(get(&[], space)), 1);
    assert!(lines(get(&[("user-agent", "curl/8.0")], space)) > 5);
    assert_eq!(lines(get(&[("user-agent", "curl/8.0")], &format!("{space}?pretty=false"))), 1);
    assert!(lines(get(&[], &format!("{space}?pretty=true"))) > 5);

    let not_acceptable = get(&[("accept", "text/html")], space);
    assert_eq!(
        (not_acceptable.status, not_acceptable.json()["reason"].as_str()),
        (406, Some("NotAcceptable"))
    );
    for path in ["/api", "/apis"] {
        let aggregated = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
        assert_eq!(get(&[("accept", aggregated)], path).json()["kind"], "APIGroupDiscoveryList");
        assert_eq!(get(&[("accept", "text/html")], path).status, 406);
    }
    let review = json!({"spec": {"nonResourceAttributes": {"path": "/", "verb": "get"}}}).to_string();
    let table =
        [("accept", "application/json;as=Table;v=v1;g=meta.k8s.io"), ("content-type", "application/json")];
    let reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    assert_eq!(http.send("POST", reviews, &table, review.as_bytes()).unwrap().status, 406, "no columns");
    assert_eq!(http.send("HEAD", "/readyz", &[], b"").unwrap().status, 200);

    for (flag, version) in [("--http2", "2"), ("--http1.1", "1.1")] {
        let output = Command::new("curl")
            .args([flag, "-sS", "-o", "/dev/null", "-w", "%{http_version} %{http_code}", "--cacert"])
            .arg(server.data_dir().join("tls/server-ca.crt"))
            .arg("--cert")
            .arg(server.data_dir().join("tls/admin.crt"))
            .arg("--key")
            .arg(server.data_dir().join("tls/admin.key"))
            .arg(format!("{}{space}", server.url()))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{version} 200"), "{output:?}");
    }
}

#[test]
fn unknown_fields_follow_field_validation() {
    let server = Server::start();
    let http = server.http();
    let map = |name: &str| json!({"metadata": {"name": name}, "depth": 3});
    let post = |name: &str, validation: &str| {
        http.post(&format!("{MAPS}?fieldValidation={validation}"), &map(name)).unwrap()
    };
    let strict = post("s", "Strict");
    assert_eq!(strict.status, 400);
    assert_eq!(
        strict.json()["message"],
        "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: strict decoding error: unknown field \"depth\""
    );
    let with_warning = post("w", "Warn");
    assert_eq!(
        (with_warning.status, with_warning.header("warning")),
        (201, Some("299 - \"unknown field \\\"depth\\\"\""))
    );
    let ignored = post("i", "Ignore");
    assert_eq!((ignored.status, ignored.header("warning")), (201, None));
    assert_eq!(http.get(&format!("{MAPS}/w")).unwrap().json()["depth"], Value::Null);
    assert_eq!(post("x", "Sometimes").status, 422);
}

#[test]
fn dry_runs_answer_and_store_nothing() {
    let server = Server::start();
    let http = server.http();
    let stored = make(&http, MAPS, json!({"metadata": {"name": "kept"}, "data": {"k": "1"}}));
    let mut changed = stored.clone();
    changed["data"]["k"] = "2".into();
    let one = format!("{MAPS}/kept");
    let one = one.as_str();
    let apply = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"z": "2"}});
    // The method, path, content type and body; then the status code and a field of the response.
    let table = [
        (
            "POST",
            MAPS,
            "application/json",
            json!({"metadata": {"name": "new"}}),
            201_u16,
            ("/metadata/name", "new"),
        ),
        ("POST", MAPS, "application/json", stored.clone(), 409, ("/reason", "AlreadyExists")),
        ("PUT", one, "application/json", changed, 200, ("/data/k", "2")),
        ("PATCH", one, MERGE, json!({"data": {"k": "3"}}), 200, ("/data/k", "3")),
        ("PATCH", one, "application/apply-patch+yaml", apply, 200, ("/data/z", "2")),
        ("DELETE", one, "application/json", json!({}), 200, ("/status", "Success")),
        ("DELETE", MAPS, "application/json", json!({}), 200, ("/kind", "ConfigMapList")),
    ];
    let before = http.get(MAPS).unwrap().json();
    for (verb, path, kind, mut body, code, (pointer, value)) in table {
        if code == 409 {
            body["metadata"].as_object_mut().unwrap().remove("resourceVersion");
        }
        let path = format!("{path}?dryRun=All&fieldManager=t");
        let reply = http.send(verb, &path, &[("content-type", kind)], body.to_string().as_bytes()).unwrap();
        assert_eq!(reply.status, code, "{verb} {path}: {}", reply.text());
        assert_eq!(reply.json().pointer(pointer), Some(&json!(value)), "{verb} {path}: {}", reply.text());
    }
    assert_eq!(http.get(MAPS).unwrap().json()["items"], before["items"]);
    assert_eq!(http.post(&format!("{MAPS}?dryRun=Some"), &json!({})).unwrap().status, 422);
}

#[test]
fn deletion_waits_for_finalizers_and_grace_period() {
    let server = Server::start();
    let http = server.http();
    let delete = |path: &str, options: Value| {
        let headers = [("content-type", "application/json")];
        http.send("DELETE", path, &headers, options.to_string().as_bytes()).unwrap()
    };
    let status = |path: &str| http.get(path).unwrap().status;

    let map = make(&http, MAPS, json!({"metadata": {"name": "held", "finalizers": ["example.com/x"]}}));
    let with_finalizer = format!("{MAPS}/held");
    for (field, wrong) in [("uid", "no-such"), ("resourceVersion", "1")] {
        let reply = delete(&with_finalizer, json!({"preconditions": {field: wrong}}));
        assert_eq!(
            (reply.status, reply.json()["reason"].as_str()),
            (409, Some("Conflict")),
            "{}",
            reply.text()
        );
    }
    let uid = &map["metadata"]["uid"];
    let deletion = delete(&with_finalizer, json!({"preconditions": {"uid": uid}}));
    assert!(deletion.json()["metadata"]["deletionTimestamp"].is_string(), "{}", deletion.text());
    assert_eq!(status(&with_finalizer), 200, "kept because of the finalizer");
    let body = json!({"metadata": {"finalizers": ["example.com/x", "example.com/y"]}}).to_string();
    let more = http.send("PATCH", &with_finalizer, &[("content-type", MERGE)], body.as_bytes()).unwrap();
    assert_eq!(more.status, 422, "finalizers cannot be added during deletion: {}", more.text());
    let body = json!({"metadata": {"finalizers": null}}).to_string();
    assert_eq!(
        http.send("PATCH", &with_finalizer, &[("content-type", MERGE)], body.as_bytes()).unwrap().status,
        200
    );
    assert_eq!(status(&with_finalizer), 404);

    let spec = |node: &str| json!({"nodeName": node, "containers": [{"name": "c", "image": "i"}]});
    make(&http, PODS, json!({"metadata": {"name": "free"}, "spec": spec("")}));
    make(&http, PODS, json!({"metadata": {"name": "placed"}, "spec": spec("n1")}));
    assert_eq!(delete(&format!("{PODS}/free"), json!({})).status, 200);
    assert_eq!(status(&format!("{PODS}/free")), 404, "deleted immediately without a node");
    let scheduled = format!("{PODS}/placed");
    let deletion = delete(&scheduled, json!({}));
    assert_eq!(deletion.json()["metadata"]["deletionGracePeriodSeconds"], 30, "{}", deletion.text());
    let short_grace = delete(&scheduled, json!({"gracePeriodSeconds": 5}));
    assert_eq!(short_grace.json()["metadata"]["deletionGracePeriodSeconds"], 5, "{}", short_grace.text());
    assert_eq!(status(&scheduled), 200);
    assert_eq!(delete(&scheduled, json!({"gracePeriodSeconds": 0})).status, 200);
    assert_eq!(status(&scheduled), 404);

    for (name, label) in [("a", "x"), ("b", "x"), ("c", "y")] {
        make(&http, MAPS, json!({"metadata": {"name": name, "labels": {"t": label}}}));
    }
    let deleted = delete(&format!("{MAPS}?labelSelector=t%3Dx"), json!({}));
    assert_eq!(deleted.json()["items"].as_array().map(Vec::len), Some(2), "{}", deleted.text());
    assert_eq!([status(&format!("{MAPS}/a")), status(&format!("{MAPS}/c"))], [404, 200]);
}

#[test]
fn stale_updates_are_rejected() {
    let server = Server::start();
    let http = server.http();
    let created = make(&http, MAPS, json!({"metadata": {"name": "a"}, "data": {"k": "1"}}));
    let one = format!("{MAPS}/a");
    let put = |object: &Value| {
        http.send("PUT", &one, &[("content-type", "application/json")], object.to_string().as_bytes())
            .unwrap()
    };
    let mut next = created.clone();
    next["data"]["k"] = "2".into();
    assert_eq!(put(&next).status, 200);
    next["data"]["k"] = "3".into();
    let stale = put(&next);
    assert_eq!(stale.status, 409);
    assert_eq!(
        stale.json()["message"],
        "Operation cannot be fulfilled on configmaps \"a\": the object has been modified; please apply your changes to the latest version and try again"
    );
    next["metadata"]["resourceVersion"] = Value::Null;
    assert_eq!(put(&next).status, 200, "an update without a version is unconditional");
    next["metadata"]["uid"] = "5c1a9a0e-2b7e-4a36-9d3e-0d7a1f0f6f1c".into();
    assert_eq!(put(&next).status, 409, "another object of this name");
    next["metadata"]["name"] = "b".into();
    assert_eq!(put(&next).status, 400);
    let absent = http.get(&format!("{MAPS}/nothing")).unwrap();
    assert_eq!(absent.json()["message"], "configmaps \"nothing\" not found");
}

#[test]
fn anonymous_access_is_limited_to_health_endpoints() {
    let server = Server::start();
    let anonymous = server.anonymous();
    for path in ["/healthz", "/livez", "/readyz", "/version"] {
        assert_eq!(anonymous.get(path).unwrap().status, 200, "{path}");
    }
    for path in ["/api", "/apis", "/openapi/v2", "/metrics", "/api/v1/namespaces", MAPS] {
        let reply = anonymous.get(path).unwrap();
        assert_eq!(reply.status, 403, "{path}: {}", reply.text());
        assert!(reply.text().contains("system:anonymous"), "{path}: {}", reply.text());
    }
    assert_eq!(anonymous.post(MAPS, &json!({"metadata": {"name": "x"}})).unwrap().status, 403);

    // A certificate with the right name from another CA.
    let folder = tempfile::tempdir().unwrap();
    let now = jiff::Timestamp::now();
    let authority = pki::Authority::load_or_create(folder.path(), "client-ca", now).unwrap();
    let admin = pki::Leaf {
        common_name: "system:admin".into(),
        organizations: vec!["system:masters".into()],
        dns_names: Vec::new(),
        ips: Vec::new(),
        usage: pki::Usage::Client,
        lifetime: Duration::from_secs(600),
    };
    let other_ca_certificate = authority.issue(&admin, now).unwrap();
    let ca = std::fs::read_to_string(server.data_dir().join("tls/server-ca.crt")).unwrap();
    let client =
        Http::from_kubeconfig(&pki::kubeconfig(&server.url(), &ca, &other_ca_certificate, "default"))
            .unwrap();
    match client.get("/api/v1/namespaces") {
        Ok(reply) => assert_eq!(reply.status, 401, "{}", reply.text()),
        Err(error) => println!("refused in the handshake: {error:#}"),
    }
    let token = [("authorization", "Bearer nonsense")];
    let reply = anonymous.send("GET", "/api/v1/namespaces", &token, b"").unwrap();
    assert_eq!((reply.status, reply.json()["message"].as_str()), (401, Some("Unauthorized")));
}

#[track_caller]
fn make(http: &Http, path: &str, object: Value) -> Value {
    let reply = http.post(path, &object).unwrap();
    assert_eq!(reply.status, 201, "{}", reply.text());
    reply.json()
}

#[test]
fn server_metrics_include_scheduler_and_controllers() {
    let server = Server::start_with(&["--controllers=*"]);
    let http = server.http();
    make(
        &http,
        PODS,
        json!({"metadata": {"name": "waits"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}),
    );
    let expected_metrics = [
        "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"unschedulable\"}",
        "workqueue_adds_total{name=\"namespace\"}",
    ];
    let started = std::time::Instant::now();
    loop {
        let text = http.get("/metrics").unwrap().text();
        if expected_metrics.iter().all(|line| text.contains(line)) {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{text}");
        std::thread::yield_now();
    }
}
