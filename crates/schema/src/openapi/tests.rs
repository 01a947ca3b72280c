//! Our definitions beside upstream's, where its published document is at hand.

use std::fs;
use std::path::Path;

use expect_test::expect;
use serde_json::json;

use super::*;

#[test]
fn definitions_are_those_upstream_publishes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/reference/kubernetes-1.36/openapi-v2.json");
    let Ok(text) = fs::read(&path) else {
        eprintln!("skipped: no {}", path.display());
        return;
    };
    let reference: Value = serde_json::from_slice(&text).expect("the reference is JSON");
    let ours = Definitions::new(Form::V2);
    let mut differences = Vec::new();
    let theirs = reference["definitions"].as_object().expect("definitions");
    for (name, theirs) in theirs.iter().filter(|(name, _)| !name.contains("alpha") && !name.contains("beta"))
    {
        match ours.definition(name) {
            Some(ours) => compare(name, &ours, theirs, &mut differences),
            None => differences.push(name.clone()),
        }
    }
    // A few descriptions are newer than the sources they are taken from; of types, fields, requirements and
    // extensions none may differ.
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
        io.k8s.apimachinery.pkg.apis.meta.v1.WatchEvent properties object description"#]].assert_eq(&differences.join("\n"));
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
        (Value::Array(ours), Value::Array(theirs)) if path.ends_with("required") => {
            let sorted = |list: &[Value]| {
                let mut list: Vec<String> = list.iter().map(Value::to_string).collect();
                list.sort();
                list
            };
            if sorted(ours) != sorted(theirs) {
                differences.push(path.to_owned());
            }
        }
        _ if ours != theirs => differences.push(path.to_owned()),
        _ => {}
    }
}

#[test]
fn version_three_wraps_references() {
    let definitions = Definitions::new(Form::V3);
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
fn a_closure_refers_to_itself_alone() {
    for form in [Form::V2, Form::V3] {
        let definitions = Definitions::new(form);
        let closure = definitions.closure(["io.k8s.api.apps.v1.DeploymentList"]);
        let mut names = Vec::new();
        closure.values().for_each(|definition| references(definition, &mut names));
        assert!(closure.len() > 100);
        assert!(names.iter().all(|name| closure.contains_key(name)));
    }
}
