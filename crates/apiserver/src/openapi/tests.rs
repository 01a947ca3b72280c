//! Our documents beside upstream's, where its published one is at hand.

use std::fs;
use std::path::Path;

use super::*;

/// What differs from upstream and is meant to.
const DIFFERENCES: &[&str] = &[
    // Not served.
    "/.well-known/openid-configuration/",
    "/apis/internal.apiserver.k8s.io/",
    "/apis/storagemigration.k8s.io/",
    "/logs/",
    "/logs/{logpath}",
    "/openid/v1/jwks/",
    // Newer than the source of the descriptions, or laid out differently by it.
    "parameter sendInitialEvents description",
    "parameter shardSelector description",
];

fn rows() -> Vec<&'static Resource> {
    api::RESOURCES.iter().collect()
}

fn reference() -> Option<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/reference/kubernetes-1.36/openapi-v2.json");
    match fs::read(&path) {
        Ok(bytes) => Some(serde_json::from_slice(&bytes).expect("the reference is JSON")),
        Err(_) => {
            eprintln!("skipped: no {}", path.display());
            None
        }
    }
}

/// Without the media types that are alpha upstream, and with recurring parameters in their places.
fn flattened(value: &Value, parameters: &Value) -> Value {
    match value {
        Value::Array(list) => list
            .iter()
            .filter(|item| !item.as_str().is_some_and(|text| text.contains("cbor")))
            .map(|item| flattened(item, parameters))
            .collect(),
        Value::Object(map) => {
            match map.get("$ref").and_then(Value::as_str).and_then(|r| r.strip_prefix("#/parameters/")) {
                Some(name) => parameters[name].clone(),
                None => map.iter().map(|(key, value)| (key.clone(), flattened(value, parameters))).collect(),
            }
        }
        other => other.clone(),
    }
}

fn compare(path: &str, ours: &Value, theirs: &Value, differences: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, theirs) in theirs {
                compare(&format!("{path} {key}"), ours.get(key).unwrap_or(&Value::Null), theirs, differences);
            }
            differences.extend(
                ours.keys().filter(|key| !theirs.contains_key(*key)).map(|key| format!("{path} +{key}")),
            );
        }
        (Value::Array(ours), Value::Array(theirs)) if ours.len() == theirs.len() => {
            for (at, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                let name = theirs["name"].as_str().map_or_else(|| at.to_string(), str::to_owned);
                compare(&format!("{path} {name}"), ours, theirs, differences);
            }
        }
        _ if ours != theirs => differences.push(path.to_owned()),
        _ => {}
    }
}

#[test]
fn paths_are_those_upstream_publishes() {
    let Some(reference) = reference() else { return };
    let document = v2::document(&rows());
    let ours = flattened(&document["paths"], &document["parameters"]);
    let theirs = flattened(&reference["paths"], &reference["parameters"]);
    let mut differences = Vec::new();
    for (path, theirs) in theirs.as_object().expect("paths") {
        if !path.contains("alpha") && !path.contains("beta") {
            compare(path, &ours[path], theirs, &mut differences);
        }
    }
    differences
        .extend(ours.as_object().expect("paths").keys().filter(|path| theirs.get(path).is_none()).cloned());
    // Hundreds of operations share a parameter, so what is said of one is said once.
    let mut counted: BTreeSet<String> = BTreeSet::new();
    for difference in differences {
        counted.insert(match difference.split_once(" parameters ") {
            Some((_, parameter)) => format!("parameter {parameter}"),
            None => difference,
        });
    }
    assert_eq!(counted.into_iter().collect::<Vec<_>>().join("\n"), DIFFERENCES.join("\n"));
}

#[test]
fn recurring_parameters_have_upstreams_names() {
    let Some(reference) = reference() else { return };
    let document = v2::document(&rows());
    let theirs = reference["parameters"].as_object().expect("parameters");
    let ours = document["parameters"].as_object().expect("parameters");
    let missing: Vec<&str> =
        theirs.keys().filter(|name| !ours.contains_key(*name)).map(String::as_str).collect();
    // Those whose descriptions differ, and that of a path that is not served.
    assert_eq!(missing.join(" "), "logpath-Noq7euwC sendInitialEvents-rLXlEK_k shardSelector-Kgyki_3_");
}

#[test]
fn definitions_are_those_that_are_referred_to() {
    let document = v2::document(&rows());
    let definitions = document["definitions"].as_object().expect("definitions");
    let mut names = Vec::new();
    schema::openapi::references(&document["paths"], &mut names);
    schema::openapi::references(&document["definitions"], &mut names);
    names.retain(|name| name.starts_with("io.k8s."));
    assert!(names.iter().all(|name| definitions.contains_key(name)));
    assert!(definitions.contains_key("io.k8s.api.core.v1.Pod"));
    assert!(!definitions.contains_key("io.k8s.api.core.v1.PodExecOptions"));
}

#[test]
fn the_index_leads_to_documents() {
    let index = v3_index(&rows());
    for (name, entry) in index["paths"].as_object().expect("paths") {
        let document = v3_document(&rows(), name).expect("what the index names is there");
        assert_eq!(entry["serverRelativeURL"], format!("/openapi/v3/{name}?hash={}", document.hash));
        let value: Value = serde_json::from_slice(&document.bytes).expect("a document is JSON");
        let mut names = Vec::new();
        schema::openapi::references(&value, &mut names);
        assert!(names.iter().all(|name| value["components"]["schemas"].get(name).is_some()), "{name}");
        assert!(!value["paths"].as_object().expect("paths").is_empty(), "{name}");
    }
    assert!(v3_document(&rows(), "apis/nothing/v1").is_none());
}

#[test]
fn an_operation_of_version_three() {
    let document = v3::document(&rows(), "apis/apps/v1", &Definitions::new(Form::V3));
    let patch = &document["paths"]["/apis/apps/v1/namespaces/{namespace}/deployments/{name}"]["patch"];
    let schema = json!({"$ref": "#/components/schemas/io.k8s.apimachinery.pkg.apis.meta.v1.Patch"});
    assert_eq!(patch["requestBody"]["content"]["application/merge-patch+json"]["schema"], schema);
    assert_eq!(patch["requestBody"]["required"], true);
    let kinds = &document["components"]["schemas"]["io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions"];
    assert_eq!(
        kinds["x-kubernetes-group-version-kind"],
        json!([
            {"group": "", "version": "v1", "kind": "DeleteOptions"},
            {"group": "apps", "version": "v1", "kind": "DeleteOptions"},
        ])
    );
}

#[test]
fn the_protobuf_form_is_gnostics() {
    let document = json!({
        "swagger": "2.0",
        "info": {"title": "K", "version": "v"},
        "paths": {"/a/": {"get": {"tags": ["t"], "operationId": "o", "x-kubernetes-action": "get", "responses": {
            "200": {"description": "OK", "schema": {"$ref": "#/definitions/D"}},
        }, "parameters": [
            {"in": "body", "name": "body", "required": true, "schema": {"type": "object"}},
            {"$ref": "#/parameters/p"},
        ]}, "parameters": [{"in": "path", "name": "n", "required": true, "type": "string", "uniqueItems": true}]}},
        "definitions": {"D": {"type": "object", "required": ["a"], "properties": {
            "a": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
        }}},
    });
    let hex: String = gnostic::document(&document).iter().map(|byte| format!("{byte:02x}")).collect();
    let expected = [
        // swagger "2.0", info {title, version}
        "0a03322e30",
        "12060a014b120176",
        // paths: an entry "/a/", its item, its get with tags and operationId
        "42ae01",
        "12ab010a032f612f12a301",
        "1282010a01742a016f",
        // a body parameter {name, in, required, schema {type}} and a reference
        "421f0a1d0a1b1204626f64791a04626f647920012a0bb201080a066f626a656374",
        "421212100a0e232f706172616d65746572732f70",
        // responses: "200" {description, schema {$ref}}
        "4a240a220a03323030121b0a190a024f4b12130a110a0f232f646566696e6974696f6e732f44",
        // the extension's value, as YAML
        "6a1f0a13782d6b756265726e657465732d616374696f6e1208120622676574220a",
        // a path parameter of the item {required, in, name, type, uniqueItems}
        "4a1c0a1a12182216080112047061746822016e2a06737472696e67980101",
        // definitions: "D" {required, type, properties {"a" {type, items, extension}}}
        "4a5f0a5d0a01441258",
        "9a010161b201080a066f626a656374ca01460a440a0161123f",
        "b201070a056172726179ba010d0a0bb201080a06737472696e67",
        "fa01220a16782d6b756265726e657465732d6c6973742d747970651208120622736574220a",
    ];
    assert_eq!(hex, expected.concat());
}
