//! Compares the definitions with upstream's published document, if it is present.

use std::fs;
use std::path::Path;

use expect_test::expect;
use serde_json::json;

use super::*;

#[test]
fn definitions_match_upstream() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/reference/kubernetes-1.36/openapi-v2.json");
    let Ok(text) = fs::read(&path) else {
        eprintln!("skipped: no {}", path.display());
        return;
    };
    let reference: Value = serde_json::from_slice(&text).expect("the reference is JSON");
    let actual = Definitions::new(OpenApiVersion::V2);
    let mut diff = Vec::new();
    let expected = reference["definitions"].as_object().expect("definitions");
    for (name, expected) in
        expected.iter().filter(|(name, _)| !name.contains("alpha") && !name.contains("beta"))
    {
        match actual.definition(name) {
            Some(actual) => compare(name, &actual, expected, &mut diff),
            None => diff.push(name.clone()),
        }
    }
    // A few descriptions are newer than the Go sources they are taken from. Types, fields, required
    // lists and extensions must not differ.
    expect![[r#"
        io.k8s.api.admissionregistration.v1.MutatingAdmissionPolicyBindingList description
        io.k8s.api.admissionregistration.v1.MutatingAdmissionPolicyBindingList properties items description
        io.k8s.api.admissionregistration.v1.MutatingAdmissionPolicyBindingList properties metadata description
        io.k8s.api.admissionregistration.v1.MutatingAdmissionPolicyList description
        io.k8s.api.admissionregistration.v1.MutatingAdmissionPolicyList properties items description
        io.k8s.api.admissionregistration.v1.MutatingAdmissionPolicyList properties metadata description
        io.k8s.api.admissionregistration.v1.MutatingWebhookConfigurationList properties metadata description
        io.k8s.api.admissionregistration.v1.ValidatingAdmissionPolicyBindingList properties metadata description
        io.k8s.api.admissionregistration.v1.ValidatingAdmissionPolicyList properties metadata description
        io.k8s.api.admissionregistration.v1.ValidatingWebhookConfigurationList properties metadata description
        io.k8s.apimachinery.pkg.apis.meta.v1.WatchEvent description
        io.k8s.apimachinery.pkg.apis.meta.v1.WatchEvent properties object description"#]].assert_eq(&diff.join("\n"));
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
        (Value::Array(actual), Value::Array(expected)) if path.ends_with("required") => {
            let sorted = |list: &[Value]| {
                let mut list: Vec<String> = list.iter().map(Value::to_string).collect();
                list.sort();
                list
            };
            if sorted(actual) != sorted(expected) {
                diff.push(path.to_owned());
            }
        }
        _ if actual != expected => diff.push(path.to_owned()),
        _ => {}
    }
}

#[test]
fn v3_wraps_references() {
    let definitions = Definitions::new(OpenApiVersion::V3);
    let mut port = definitions.definition("io.k8s.api.core.v1.ContainerPort").expect("a built-in type");
    for property in port["properties"].as_object_mut().expect("properties").values_mut() {
        property.as_object_mut().expect("a schema").remove("description");
    }
    assert_eq!(
        port["properties"]["protocol"],
        json!({"default": "TCP", "enum": ["SCTP", "TCP", "UDP"], "type": "string"})
    );
    assert_eq!(
        port["properties"]["containerPort"],
        json!({"default": 0, "format": "int32", "type": "integer"})
    );
    let pod = definitions.definition("io.k8s.api.core.v1.Pod").expect("a built-in type");
    assert_eq!(pod["properties"]["spec"]["default"], json!({}));
    assert_eq!(
        pod["properties"]["spec"]["allOf"],
        json!([{"$ref": "#/components/schemas/io.k8s.api.core.v1.PodSpec"}])
    );
}

#[test]
fn all_references_are_defined() {
    for version in [OpenApiVersion::V2, OpenApiVersion::V3] {
        let definitions = Definitions::new(version);
        let definitions_map = definitions.definitions_with_references(["io.k8s.api.apps.v1.DeploymentList"]);
        let mut names = Vec::new();
        definitions_map.values().for_each(|definition| collect_references(definition, &mut names));
        assert!(definitions_map.len() > 100);
        assert!(names.iter().all(|name| definitions_map.contains_key(name)));
    }
}
