//! IngressClass: REST strategy and validation.

use serde_json::Value;

use super::ingress::validate_object_reference;
use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct IngressClass;

const MAX_CONTROLLER_BYTES: usize = 250;

impl RestStrategy for IngressClass {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let spec = obj.at("spec");
        let controller_path = Path::new("spec.controller");
        if spec.text("controller").len() > MAX_CONTROLLER_BYTES {
            errors.too_long(&controller_path, MAX_CONTROLLER_BYTES);
        }
        names::domain_prefixed_path(spec.text("controller"), &controller_path, errors);
        let parameters = spec.at("parameters");
        if !parameters.is_null() {
            let path = Path::new("spec.parameters");
            validate_object_reference(parameters, &path, errors);
            validate_scope(parameters, &path, errors);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let path = Path::new("spec.controller");
        meta::validate_immutable(new.path("spec.controller"), old.path("spec.controller"), &path, errors);
    }
}

fn validate_scope(parameters: &Value, path: &Path, errors: &mut ErrorList) {
    let namespace = parameters.at("namespace").as_str();
    let namespace_path = path.child("namespace");
    match parameters.at("scope").as_str() {
        None => errors.required(&path.child("scope"), ""),
        Some("Namespace") => match namespace {
            None => errors.required(&namespace_path, "`parameters.scope` is set to 'Namespace'"),
            Some(namespace) => rules::validate_name(namespace, names::dns1123_label, &namespace_path, errors),
        },
        Some("Cluster") => {
            if namespace.is_some() {
                errors.forbidden(&namespace_path, "`parameters.scope` is set to 'Cluster'");
            }
        }
        Some(other) => errors.not_supported(&path.child("scope"), other, &["Cluster", "Namespace"]),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_ingress_classes() {
        let good = r#"{"spec": {"controller": "acme.io/lb", "parameters": {"apiGroup": "k8s.acme.io",
            "kind": "Parameters", "name": "x", "scope": "Cluster"}}}"#;
        check(&IngressClass, good, &expect![""]);
        check(
            &IngressClass,
            &good.replace("Cluster\"", "Namespace\"").replace("\"kind\": \"Parameters\", ", ""),
            &expect![[r#"
                spec.parameters.kind: Required value
                spec.parameters.namespace: Required value: `parameters.scope` is set to 'Namespace'
            "#]],
        );
        check(
            &IngressClass,
            r#"{"spec": {"controller": "nope", "parameters": {"kind": "a", "name": "b", "scope": "X"}}}"#,
            &expect![[r#"
                spec.controller: Invalid value: "nope": must be a domain-prefixed path (such as "acme.io/foo")
                spec.parameters.scope: Unsupported value: "X": supported values: "Cluster", "Namespace"
            "#]],
        );
        check_update(
            &IngressClass,
            good,
            &good.replace("/lb", "/gw"),
            &expect![[r#"
            spec.controller: Invalid value: "acme.io/gw": field is immutable
        "#]],
        );
    }
}
