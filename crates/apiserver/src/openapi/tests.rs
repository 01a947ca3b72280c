//! Compares the documents with upstream's published ones, if those are available.

use std::fs;
use std::path::Path;

use super::*;

/// The expected differences from upstream.
const EXPECTED_DIFF: &[&str] = &[
    // Not served.
    "/.well-known/openid-configuration/",
    "/apis/internal.apiserver.k8s.io/",
    "/apis/storagemigration.k8s.io/",
    "/logs/",
    "/logs/{logpath}",
    "/openid/v1/jwks/",
    // Newer than the source of the descriptions, or formatted differently there.
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

/// Without media types that are alpha upstream, and with shared parameters inlined.
fn flatten(value: &Value, parameters: &Value) -> Value {
    match value {
        Value::Array(list) => list
            .iter()
            .filter(|item| !item.as_str().is_some_and(|text| text.contains("cbor")))
            .map(|item| flatten(item, parameters))
            .collect(),
        Value::Object(map) => {
            match map.get("$ref").and_then(Value::as_str).and_then(|r| r.strip_prefix("#/parameters/")) {
                Some(name) => parameters[name].clone(),
                None => map.iter().map(|(key, value)| (key.clone(), flatten(value, parameters))).collect(),
            }
        }
        other => other.clone(),
    }
}

fn compare(path: &str, actual: &Value, expected: &Value, diff: &mut Vec<String>) {
    match (actual, expected) {
        (Value::Object(actual), Value::Object(expected)) => {
            for (key, expected) in expected {
                compare(&format!("{path} {key}"), actual.get(key).unwrap_or(&Value::Null), expected, diff);
            }
            diff.extend(
                actual.keys().filter(|key| !expected.contains_key(*key)).map(|key| format!("{path} +{key}")),
            );
        }
        (Value::Array(actual), Value::Array(expected)) if actual.len() == expected.len() => {
            for (at, (actual, expected)) in actual.iter().zip(expected).enumerate() {
                let name = expected["name"].as_str().map_or_else(|| at.to_string(), str::to_owned);
                compare(&format!("{path} {name}"), actual, expected, diff);
            }
        }
        _ if actual != expected => diff.push(path.to_owned()),
        _ => {}
    }
}

#[test]
fn paths_match_upstream() {
    let Some(reference) = reference() else { return };
    let document = v2::document(&rows());
    let actual = flatten(&document["paths"], &document["parameters"]);
    let expected = flatten(&reference["paths"], &reference["parameters"]);
    let mut diff = Vec::new();
    for (path, expected) in expected.as_object().expect("paths") {
        if !path.contains("alpha") && !path.contains("beta") {
            compare(path, &actual[path], expected, &mut diff);
        }
    }
    diff.extend(
        actual.as_object().expect("paths").keys().filter(|path| expected.get(path).is_none()).cloned(),
    );
    // Hundreds of operations share a parameter, so each difference is reported once.
    let mut unique_lines: BTreeSet<String> = BTreeSet::new();
    for line in diff {
        unique_lines.insert(match line.split_once(" parameters ") {
            Some((_, parameter)) => format!("parameter {parameter}"),
            None => line,
        });
    }
    assert_eq!(unique_lines.into_iter().collect::<Vec<_>>().join("\n"), EXPECTED_DIFF.join("\n"));
}

#[test]
fn shared_parameter_names_match_upstream() {
    let Some(reference) = reference() else { return };
    let document = v2::document(&rows());
    let expected = reference["parameters"].as_object().expect("parameters");
    let actual = document["parameters"].as_object().expect("parameters");
    let missing: Vec<&str> =
        expected.keys().filter(|name| !actual.contains_key(*name)).map(String::as_str).collect();
    // Parameters whose descriptions differ, and the one of a path that is not served.
    assert_eq!(missing.join(" "), "logpath-Noq7euwC sendInitialEvents-rLXlEK_k shardSelector-Kgyki_3_");
}

#[test]
fn includes_only_referenced_definitions() {
    let document = v2::document(&rows());
    let definitions = document["definitions"].as_object().expect("definitions");
    let mut names = Vec::new();
    schema::openapi::collect_references(&document["paths"], &mut names);
    schema::openapi::collect_references(&document["definitions"], &mut names);
    names.retain(|name| name.starts_with("io.k8s."));
    assert!(names.iter().all(|name| definitions.contains_key(name)));
    assert!(definitions.contains_key("io.k8s.api.core.v1.Pod"));
    assert!(!definitions.contains_key("io.k8s.api.core.v1.PodExecOptions"));
}

#[test]
fn every_index_entry_has_a_document() {
    let index = v3_index(&rows());
    for (name, entry) in index["paths"].as_object().expect("paths") {
        let document = v3_document(&rows(), name).expect("every document in the index exists");
        assert_eq!(entry["serverRelativeURL"], format!("/openapi/v3/{name}?hash={}", document.hash));
        let value: Value = serde_json::from_slice(&document.bytes).expect("a document is JSON");
        let mut names = Vec::new();
        schema::openapi::collect_references(&value, &mut names);
        assert!(names.iter().all(|name| value["components"]["schemas"].get(name).is_some()), "{name}");
        assert!(!value["paths"].as_object().expect("paths").is_empty(), "{name}");
    }
    assert!(v3_document(&rows(), "apis/nothing/v1").is_none());
}

#[test]
fn v3_operation_has_request_body() {
    let document = v3::document(&rows(), "apis/apps/v1", &Definitions::new(OpenApiVersion::V3));
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
fn protobuf_encoding_matches_upstream() {
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
