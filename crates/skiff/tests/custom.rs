//! Custom resources, from the definition to the last object, as operators and Helm charts use them.

use std::time::{Duration, Instant};

use base64::Engine as _;
use serde_json::{Map, Value, json};
use testkit::{Http, Reply, Server, Webhook};

const CRD_PATH: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const CERTIFICATES: &str = "/apis/certs.example.io/v1/namespaces/default/certificates";
const MERGE: &str = "application/merge-patch+json";
/// Time limit of every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn crd_with_validation_defaults_and_columns() {
    let server = Server::start();
    let http = server.http();
    install(&server, include_str!("custom/certificates.yaml"), "certificates.certs.example.io");
    let created =
        post(&http, CERTIFICATES, &certificate("web", json!({"dnsNames": ["a.example"], "isCA": true})));
    assert_eq!(created.status, 201, "{}", created.text());
    let spec = &created.json()["spec"];
    assert_eq!(spec["duration"], "2160h");
    assert_eq!(spec["issuerRef"], json!({"group": "certs.example.io", "kind": "Issuer", "name": "ours"}));
    assert_eq!(spec["privateKey"], json!({"algorithm": "RSA"}));
    assert_eq!(created.json()["metadata"]["generation"], 1);

    let rejection_message = |spec: Value| {
        let reply = post(&http, CERTIFICATES, &certificate("bad", spec));
        assert_eq!(reply.status, 422, "{}", reply.text());
        reply.json()["message"]
            .as_str()
            .unwrap_or_default()
            .replace("Certificate.certs.example.io \"bad\" is invalid: ", "")
    };
    assert_eq!(
        rejection_message(json!({})),
        "spec: Invalid value: a certificate needs at least one subject name"
    );
    assert_eq!(
        rejection_message(json!({"dnsNames": ["a"], "duration": "long"})),
        r#"spec.duration: Invalid value: "long": spec.duration in body should match '^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$'"#
    );
    assert_eq!(
        rejection_message(json!({"dnsNames": ["a"], "usages": ["signing", "signing"]})),
        r#"spec.usages[1]: Duplicate value: "signing""#
    );
    assert_eq!(
        rejection_message(json!({"dnsNames": ["a"], "privateKey": {"algorithm": "Ed25519", "size": 512}})),
        "spec.privateKey.size: Invalid value: a key of this algorithm has no size to choose"
    );
    let unknown = http
        .send(
            "POST",
            &format!("{CERTIFICATES}?fieldValidation=Strict"),
            JSON,
            &body(&certificate("bad", json!({"dnsNames": ["a"], "nope": 1}))),
        )
        .unwrap();
    assert_eq!(unknown.status, 400);
    assert!(
        unknown.text().contains(r#"strict decoding error: unknown field \"spec.nope\""#),
        "{}",
        unknown.text()
    );

    // The secret name is immutable, by a transition rule.
    let other = patch(&http, &format!("{CERTIFICATES}/web"), json!({"spec": {"secretName": "other"}}));
    assert!(
        other.text().contains("spec: Invalid value: the secret is and stays web-tls"),
        "{}",
        other.text()
    );

    let status =
        json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}, "spec": {"isCA": false}});
    let patched = patch(&http, &format!("{CERTIFICATES}/web/status"), status);
    assert_eq!((patched.status, &patched.json()["spec"]["isCA"]), (200, &json!(true)), "{}", patched.text());
    post(&http, CERTIFICATES, &certificate("plain", json!({"commonName": "b"})));
    let table = server.kubectl(&["get", "cert"]).ok();
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    assert_eq!(
        rows,
        [
            vec!["NAME", "READY", "SECRET"],
            vec!["plain", "plain-tls", rows[1][2]],
            vec!["web", "True", "web-tls"]
        ]
    );
    assert_eq!(server.kubectl(&["get", "certs", "-o", "name"]).ok().lines().count(), 2);
    let selected = server.kubectl(&["get", "cert", "-o", "name", "--field-selector", "spec.isCA=true"]).ok();
    assert_eq!(selected, "certificate.certs.example.io/web\n");
    let wrong = http.get(&format!("{CERTIFICATES}?fieldSelector=spec.secretName%3Dx")).unwrap();
    assert_eq!(
        (wrong.status, wrong.json()["message"].as_str()),
        (400, Some("field label not supported: spec.secretName"))
    );

    // Two appliers share a list of conditions by its keys.
    for (manager, kind) in [("one", "Issuing"), ("two", "Valid")] {
        let apply = json!({
            "apiVersion": "certs.example.io/v1", "kind": "Certificate", "metadata": {"name": "web"},
            "status": {"conditions": [{"type": kind, "status": "True"}]},
        });
        let path = format!("{CERTIFICATES}/web/status?fieldManager={manager}");
        let headers = &[("content-type", "application/apply-patch+yaml")];
        let applied = http.send("PATCH", &path, headers, &body(&apply)).unwrap();
        assert_eq!(applied.status, 200, "{}", applied.text());
    }
    let types = server.kubectl(&["get", "cert", "web", "-o", "jsonpath={.status.conditions[*].type}"]).ok();
    assert_eq!(types, "Ready Issuing Valid");
    let explain_output = server.kubectl(&["explain", "certificate.spec.privateKey.algorithm"]).ok();
    let words: Vec<&str> = explain_output.split_whitespace().collect();
    assert!(
        words.join(" ").contains("FIELD: algorithm <string> ENUM: RSA ECDSA Ed25519"),
        "{explain_output}"
    );
}

#[test]
fn crd_with_two_versions() {
    let server = Server::start();
    let http = server.http();
    install(&server, include_str!("custom/routes.yaml"), "routes.gateways.example.io");
    let at = |version: &str| format!("/apis/gateways.example.io/{version}/namespaces/default/routes");
    let route = |version: &str, name: &str, spec: Value| json!({"apiVersion": format!("gateways.example.io/{version}"), "kind": "Route", "metadata": {"name": name}, "spec": spec});
    let old = post(&http, &at("v1beta1"), &route("v1beta1", "a", json!({"hostnames": ["*.example.com"]})));
    assert_eq!(old.status, 201, "{}", old.text());
    let word = "299 - \"gateways.example.io/v1beta1 Route is deprecated; use gateways.example.io/v1 Route\"";
    assert_eq!(old.header("warning"), Some(word));
    let new = http.get(&format!("{}/a", at("v1"))).unwrap().json();
    assert_eq!(new["apiVersion"], "gateways.example.io/v1");
    assert_eq!(new["spec"]["rules"][0]["matches"][0]["path"], json!({"type": "PathPrefix", "value": "/"}));
    let list = http.get(&at("v1beta1")).unwrap().json();
    assert_eq!(
        (&list["kind"], &list["apiVersion"]),
        (&json!("RouteList"), &json!("gateways.example.io/v1beta1"))
    );
    let stored = http.get(&format!("{CRD_PATH}/routes.gateways.example.io")).unwrap().json();
    assert_eq!(stored["status"]["storedVersions"], json!(["v1"]));

    let rejection_message = |spec: Value| {
        let reply = post(&http, &at("v1"), &route("v1", "bad", spec));
        assert_eq!(reply.status, 422, "{}", reply.text());
        reply.text()
    };
    let path = json!({"rules": [{"matches": [{"path": {"value": "x"}}]}]});
    assert!(
        rejection_message(path)
            .contains("spec.rules[0].matches[0].path: Invalid value: value must be an absolute path")
    );
    let twice = json!({"rules": [{"name": "a"}, {"name": "a"}]});
    assert!(rejection_message(twice).contains("spec.rules: Invalid value: names of rules must be unique"));
    let both = json!({"rules": [{"filter": {"redirect": {"any": 1}, "rewrite": {}}}]});
    assert!(
        rejection_message(both)
            .contains("must validate one and only one schema (oneOf). Found 2 valid alternatives")
    );
    let port = json!({"rules": [{"backendRefs": [{"name": "b", "port": 0}]}]});
    assert!(rejection_message(port).contains("should be greater than or equal to 1"));
    let free = json!({"rules": [{"timeout": "5s", "filter": {"redirect": {"any": {"thing": [1]}}}}]});
    let free = post(&http, &at("v1"), &route("v1", "free", free));
    assert_eq!(
        free.json()["spec"]["rules"][0]["filter"]["redirect"],
        json!({"any": {"thing": [1]}}),
        "{}",
        free.text()
    );

    // A watch in one version receives changes made in the other.
    let version = list["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
    let mut lines = http.open(&format!("{}?watch=true&resourceVersion={version}", at("v1beta1"))).unwrap();
    let event: Value = serde_json::from_str(&lines.next_line().unwrap().unwrap()).unwrap();
    assert_eq!(
        (&event["type"], &event["object"]["apiVersion"]),
        (&json!("ADDED"), &json!("gateways.example.io/v1beta1"))
    );
    // Deleting the definition ends the watch.
    server.kubectl(&["delete", "crd", "routes.gateways.example.io"]).ok();
    while lines.next_line().unwrap().is_some() {}
    assert_eq!(http.get(&at("v1")).unwrap().status, 404);
}

/// A large schema as in the definitions of monitoring operators: hundreds of fields, deeply nested.
#[test]
fn crd_with_large_schema() {
    fn nested(depth: usize) -> Value {
        let mut fields = Map::new();
        for i in 0..8 {
            let text = "What the field is for, and what happens if it is not set. ".repeat(3);
            fields.insert(format!("text{i}"), json!({"type": "string", "description": text}));
        }
        if depth > 0 {
            for name in ["selector", "template", "rules"] {
                fields.insert(name.into(), json!({"type": "array", "items": nested(depth - 1)}));
            }
        }
        json!({"type": "object", "description": "Part of it.", "properties": fields, "required": ["text0"]})
    }
    let server = Server::start();
    let http = server.http();
    let crd = definition("monitors", "Monitor", nested(4));
    assert!(crd.to_string().len() > 150_000);
    assert_eq!(post(&http, CRD_PATH, &crd).status, 201);
    wait_established(&server, "monitors.example.io");
    let monitors = "/apis/example.io/v1/namespaces/default/monitors";
    let deep = json!({"text0": "", "rules": [{"text0": "", "template": [{"text0": "", "selector": [{"text1": "x"}]}]}]});
    let reply = post(&http, monitors, &object("Monitor", "m", deep));
    let message = reply.json()["message"].as_str().unwrap_or_default().to_owned();
    assert_eq!(
        message,
        r#"Monitor.example.io "m" is invalid: spec.rules[0].template[0].selector[0].text0: Required value"#
    );
    let flat = post(&http, monitors, &object("Monitor", "m", json!({"text0": "a", "text9": "gone"})));
    assert_eq!(flat.json()["spec"], json!({"text0": "a"}), "{}", flat.text());
}

/// `v1` has `address: host:port`, `v2` has separate fields.
fn split_or_join(review: &Value) -> Value {
    let desired_version = review["request"]["desiredAPIVersion"].as_str().unwrap_or_default();
    let convert = |object: &Value| {
        let mut object = object.clone();
        object["apiVersion"] = json!(desired_version);
        let spec = object["spec"].clone();
        object["spec"] = match desired_version.ends_with("/v2") {
            true => {
                let (host, port) =
                    spec["address"].as_str().unwrap_or_default().split_once(':').unwrap_or_default();
                json!({"host": host, "port": port})
            }
            false => {
                let text = |name: &str| spec[name].as_str().unwrap_or_default().to_owned();
                json!({"address": format!("{}:{}", text("host"), text("port"))})
            }
        };
        object
    };
    let objects: Vec<Value> =
        review["request"]["objects"].as_array().into_iter().flatten().map(convert).collect();
    let failed = objects.iter().any(|object| object["metadata"]["name"] == "never");
    let result = match failed {
        true => json!({"status": "Failure", "message": "never was there"}),
        false => json!({"status": "Success"}),
    };
    json!({
        "kind": "ConversionReview", "apiVersion": "apiextensions.k8s.io/v1",
        "response": {"uid": review["request"]["uid"], "convertedObjects": objects, "result": result},
    })
}

#[test]
fn conversion_webhook_between_versions() {
    let dir = tempfile::tempdir().unwrap();
    let now = jiff::Timestamp::now();
    let ca = pki::Authority::load_or_create(dir.path(), "webhook-ca", now).unwrap();
    let leaf = pki::Leaf {
        common_name: "webhook".into(),
        organizations: Vec::new(),
        dns_names: vec!["localhost".into()],
        ips: vec!["127.0.0.1".parse().unwrap()],
        usage: pki::Usage::Server,
        lifetime: Duration::from_secs(3600),
    };
    let certificate = ca.issue(&leaf, now).unwrap();
    let tls = pki::server_config(pki::ServingCertificate::new(&certificate).unwrap(), &[]).unwrap();
    let webhook = Webhook::start(tls, |request| (200, split_or_join(&request.body))).unwrap();

    let server = Server::start();
    let http = server.http();
    let version = |name: &str, storage: bool, fields: &[&str]| {
        let fields: Map<String, Value> =
            fields.iter().map(|field| ((*field).to_owned(), json!({"type": "string"}))).collect();
        json!({"name": name, "served": true, "storage": storage, "schema": {"openAPIV3Schema": {
            "type": "object", "properties": {"spec": {"type": "object", "properties": fields}},
        }}})
    };
    let mut crd = definition("hosts", "Host", json!({"type": "object"}));
    crd["spec"]["versions"] =
        json!([version("v1", true, &["address"]), version("v2", false, &["host", "port"])]);
    let bundle = base64::engine::general_purpose::STANDARD.encode(ca.pem());
    crd["spec"]["conversion"] = json!({"strategy": "Webhook", "webhook": {
        "conversionReviewVersions": ["v1"],
        "clientConfig": {"url": format!("{}/convert", webhook.url()), "caBundle": bundle},
    }});
    let created = post(&http, CRD_PATH, &crd);
    assert_eq!(created.status, 201, "{}", created.text());
    wait_established(&server, "hosts.example.io");
    let at = |version: &str| format!("/apis/example.io/{version}/namespaces/default/hosts");
    let host = |version: &str, name: &str, spec: Value| json!({"apiVersion": format!("example.io/{version}"), "kind": "Host", "metadata": {"name": name}, "spec": spec});
    let one = post(&http, &at("v1"), &host("v1", "one", json!({"address": "a:1"})));
    assert_eq!(one.status, 201, "{}", one.text());
    assert_eq!(webhook.requests().len(), 0, "no conversion needed");
    let two = post(&http, &at("v2"), &host("v2", "two", json!({"host": "b", "port": "2"})));
    assert_eq!(
        (two.status, &two.json()["spec"]),
        (201, &json!({"host": "b", "port": "2"})),
        "{}",
        two.text()
    );
    let before = webhook.requests().len();
    let specs = |version: &str| {
        let list = http.get(&at(version)).unwrap().json();
        list["items"].as_array().unwrap().iter().map(|item| item["spec"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(specs("v1"), [r#"{"address":"a:1"}"#, r#"{"address":"b:2"}"#]);
    assert_eq!(webhook.requests().len(), before, "all objects are stored in this version");
    assert_eq!(specs("v2"), [r#"{"host":"a","port":"1"}"#, r#"{"host":"b","port":"2"}"#]);
    assert_eq!(webhook.requests().len(), before + 1, "one request for all objects");
    let patched = patch(&http, &format!("{}/one", at("v2")), json!({"spec": {"port": "9"}}));
    assert_eq!(patched.json()["spec"], json!({"host": "a", "port": "9"}), "{}", patched.text());
    assert_eq!(http.get(&format!("{}/one", at("v1"))).unwrap().json()["spec"], json!({"address": "a:9"}));

    let never = post(&http, &at("v2"), &host("v2", "never", json!({})));
    assert_eq!(never.status, 500);
    let word = "conversion webhook for example.io/v2, Kind=Host failed: never was there";
    assert!(never.text().contains(word), "{}", never.text());
}

#[test]
fn custom_objects_after_restart_and_schema_change() {
    let mut server = Server::start();
    let http = server.http();
    let schema = |more: Value| {
        let mut properties = json!({"n": {"type": "integer"}, "old": {"type": "string"}});
        properties.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
        json!({"type": "object", "properties": properties})
    };
    post(&http, CRD_PATH, &definition("things", "Thing", schema(json!({}))));
    wait_established(&server, "things.example.io");
    let collection = "/apis/example.io/v1/namespaces/default/things";
    assert_eq!(post(&http, collection, &object("Thing", "a", json!({"n": 1, "old": "x"}))).status, 201);
    server.kill9();
    server.restart();
    let http = server.http();
    // The custom resource is served as soon as the server is ready.
    assert_eq!(http.get(&format!("{collection}/a")).unwrap().json()["spec"], json!({"n": 1, "old": "x"}));

    // A new default appears in existing objects, and a removed field is pruned.
    let mut crd = http.get(&format!("{CRD_PATH}/things.example.io")).unwrap().json();
    let mut new = schema(json!({"new": {"type": "string", "default": "d"}}));
    new["properties"].as_object_mut().unwrap().remove("old");
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"] = new;
    let put = http.send("PUT", &format!("{CRD_PATH}/things.example.io"), JSON, &body(&crd)).unwrap();
    assert_eq!(put.status, 200, "{}", put.text());
    wait_until("the new schema is in effect", || {
        http.get(&format!("{collection}/a")).unwrap().json()["spec"] == json!({"n": 1, "new": "d"})
    });
    assert_eq!(http.get(collection).unwrap().json()["items"][0]["spec"], json!({"n": 1, "new": "d"}));
    let before = http.get(&format!("{collection}/a")).unwrap().json();
    // Writing an unchanged object updates its stored form.
    let again = http.send("PUT", &format!("{collection}/a"), JSON, &body(&before)).unwrap().json();
    assert_ne!(before["metadata"]["resourceVersion"], again["metadata"]["resourceVersion"]);
    let same = http.send("PUT", &format!("{collection}/a"), JSON, &body(&again)).unwrap().json();
    assert_eq!(again["metadata"]["resourceVersion"], same["metadata"]["resourceVersion"]);
}

#[test]
fn crd_is_deleted_after_its_objects() {
    let server = Server::start();
    let http = server.http();
    post(&http, CRD_PATH, &definition("things", "Thing", json!({"type": "object"})));
    wait_established(&server, "things.example.io");
    let collection = "/apis/example.io/v1/namespaces/default/things";
    let mut with_finalizer = object("Thing", "held", json!({}));
    with_finalizer["metadata"]["finalizers"] = json!(["example.io/mine"]);
    assert_eq!(post(&http, collection, &with_finalizer).status, 201);
    assert_eq!(post(&http, collection, &object("Thing", "free", json!({}))).status, 201);
    assert_eq!(http.send("DELETE", &format!("{CRD_PATH}/things.example.io"), &[], b"").unwrap().status, 200);
    let names = || {
        let list = http.get(collection).unwrap().json();
        list["items"].as_array().map_or(0, Vec::len)
    };
    wait_until("objects without finalizers are deleted", || names() == 1);
    let rejected = post(&http, collection, &object("Thing", "late", json!({})));
    assert_eq!(rejected.status, 403);
    assert!(rejected.text().contains("create not allowed while custom resource definition is terminating"));
    let terminating = server
        .kubectl(&[
            "get",
            "crd",
            "things.example.io",
            "-o",
            r#"jsonpath={.status.conditions[?(@.type=="Terminating")].status}"#,
        ])
        .ok();
    assert_eq!(terminating, "True");
    let released = patch(&http, &format!("{collection}/held"), json!({"metadata": {"finalizers": null}}));
    assert_eq!(released.status, 200, "{}", released.text());
    wait_until("the definition is gone", || {
        http.get(&format!("{CRD_PATH}/things.example.io")).unwrap().status == 404
    });
    wait_until("the custom resource is not served", || http.get(collection).unwrap().status == 404);
    assert!(!http.get("/apis").unwrap().text().contains("\"example.io\""));
}

#[test]
fn first_crd_keeps_conflicting_names() {
    let server = Server::start();
    let http = server.http();
    let short = |plural: &str, kind: &str| {
        let mut crd = definition(plural, kind, json!({"type": "object"}));
        crd["spec"]["names"]["shortNames"] = json!(["th"]);
        crd
    };
    post(&http, CRD_PATH, &short("things", "Thing"));
    wait_established(&server, "things.example.io");
    post(&http, CRD_PATH, &short("thoughts", "Thought"));
    let condition = |name: &str| {
        server
            .kubectl(&[
                "get",
                "crd",
                name,
                "-o",
                r#"jsonpath={.status.conditions[?(@.type=="NamesAccepted")].message}"#,
            ])
            .ok()
    };
    wait_until("the name conflict is reported", || {
        condition("thoughts.example.io") == "\"th\" is already in use"
    });
    assert_eq!(http.get("/apis/example.io/v1/thoughts").unwrap().status, 404);
    server.kubectl(&["delete", "crd", "things.example.io"]).ok();
    wait_until("the name is available to the other definition", || {
        condition("thoughts.example.io") == "no conflicts found"
    });
    wait_established(&server, "thoughts.example.io");
    let served = http.get("/apis/example.io/v1").unwrap().json();
    assert_eq!(
        (&served["resources"][0]["kind"], &served["resources"][0]["shortNames"]),
        (&json!("Thought"), &json!(["th"]))
    );
}

#[test]
fn rejects_unsupported_media_types() {
    let server = Server::start();
    let http = server.http();
    post(&http, CRD_PATH, &definition("things", "Thing", json!({"type": "object"})));
    wait_established(&server, "things.example.io");
    let collection = "/apis/example.io/v1/namespaces/default/things";
    post(&http, collection, &object("Thing", "a", json!({})));
    let one = format!("{collection}/a");
    let strategic = &[("content-type", "application/strategic-merge-patch+json")];
    let reply = http.send("PATCH", &one, strategic, b"{}").unwrap();
    let accepted = "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
    assert_eq!((reply.status, reply.json()["message"].as_str()), (415, Some(accepted)));
    let protobuf = "application/vnd.kubernetes.protobuf";
    let reply = http.send("GET", &one, &[("accept", protobuf)], b"").unwrap();
    assert_eq!(reply.status, 406);
    let metadata = format!("{protobuf};as=PartialObjectMetadata;g=meta.k8s.io;v=v1");
    assert_eq!(http.send("GET", &one, &[("accept", metadata.as_str())], b"").unwrap().status, 200);
    let reply = http.send("POST", collection, &[("content-type", protobuf)], b"k8s\0").unwrap();
    assert_eq!(reply.status, 400);
    assert!(reply.text().contains("does not implement the protobuf marshalling interface"));
}

#[test]
fn custom_objects_support_gc_namespaces_and_quota() {
    let server = Server::start_with(&["--controllers=*"]);
    let http = server.http();
    post(&http, CRD_PATH, &definition("things", "Thing", json!({"type": "object"})));
    wait_established(&server, "things.example.io");
    server.kubectl(&["create", "namespace", "n"]).ok();
    let collection = "/apis/example.io/v1/namespaces/n/things";
    server.kubectl(&["create", "quota", "q", "-n", "n", "--hard=count/things.example.io=2"]).ok();
    wait_until("the quota counts", || {
        server.kubectl(&["get", "quota", "q", "-n", "n", "-o", "jsonpath={.status.used}"]).ok()
            == r#"{"count/things.example.io":"0"}"#
    });
    let owner = post(&http, collection, &object("Thing", "owner", json!({}))).json();
    let mut owned = object("Thing", "owned", json!({}));
    owned["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "example.io/v1", "kind": "Thing", "name": "owner", "uid": owner["metadata"]["uid"],
    }]);
    assert_eq!(post(&http, collection, &owned).status, 201);
    let third = post(&http, collection, &object("Thing", "third", json!({})));
    assert!(third.status == 403 && third.text().contains("exceeded quota: q"), "{}", third.text());
    assert_eq!(http.send("DELETE", &format!("{collection}/owner"), &[], b"").unwrap().status, 200);
    wait_until("the dependent object is deleted", || {
        http.get(&format!("{collection}/owned")).unwrap().status == 404
    });
    wait_until("the quota is available again", || {
        post(&http, collection, &object("Thing", "third", json!({}))).status == 201
    });
    server.kubectl(&["delete", "namespace", "n", "--wait=false"]).ok();
    wait_until("the namespace is gone", || http.get("/api/v1/namespaces/n").unwrap().status == 404);
    assert_eq!(http.get("/apis/example.io/v1/things").unwrap().json()["items"], json!([]));
}

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn body(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

#[track_caller]
fn post(http: &Http, path: &str, value: &Value) -> Reply {
    http.post(path, value).unwrap()
}

#[track_caller]
fn patch(http: &Http, path: &str, value: Value) -> Reply {
    http.send("PATCH", path, &[("content-type", MERGE)], &body(&value)).unwrap()
}

fn certificate(name: &str, more: Value) -> Value {
    let mut spec = json!({"issuerRef": {"name": "ours"}, "secretName": format!("{name}-tls")});
    spec.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
    json!({"apiVersion": "certs.example.io/v1", "kind": "Certificate", "metadata": {"name": name}, "spec": spec})
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "example.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec})
}

fn definition(plural: &str, kind: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.example.io")},
        "spec": {
            "group": "example.io", "scope": "Namespaced", "names": {"plural": plural, "kind": kind},
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
            }],
        },
    })
}

#[track_caller]
fn install(server: &Server, manifest: &str, name: &str) {
    server.kubectl_with(&["apply", "-f", "-"], manifest).ok();
    wait_established(server, name);
}

#[track_caller]
fn wait_established(server: &Server, name: &str) {
    server.kubectl(&["wait", "--for=condition=Established", &format!("crd/{name}"), "--timeout=60s"]).ok();
}

#[track_caller]
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < TIMEOUT, "timed out waiting for: {what}");
        std::thread::yield_now();
    }
}
