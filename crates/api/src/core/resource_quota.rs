//! ResourceQuota: REST strategy and validation.

use std::collections::BTreeSet;

use serde_json::Value;

use super::resources;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct ResourceQuota;

const POD_SCOPES: &[&str] = &["Terminating", "NotTerminating", "BestEffort", "NotBestEffort"];
const POD_COMPUTE: &[&str] =
    &["cpu", "memory", "limits.cpu", "limits.memory", "requests.cpu", "requests.memory"];

impl RestStrategy for ResourceQuota {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let spec = obj.at("spec");
        validate_resource_list(spec, "hard", &Path::new("spec"), errors);
        validate_scopes(spec, errors);
        scope_selector(spec, errors);
        self.validate_status_update(obj, obj, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let set = |obj: &Value| -> BTreeSet<String> {
            obj.at("spec").items("scopes").iter().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        if set(new) != set(old) {
            errors.invalid(&Path::new("spec.scopes"), new.path("spec.scopes").clone(), "field is immutable");
        }
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        for field in ["hard", "used"] {
            validate_resource_list(new.at("status"), field, &Path::new("status"), errors);
        }
    }
}

fn validate_resource_list(part: &Value, field: &str, path: &Path, errors: &mut ErrorList) {
    for (name, value) in part.entries(field) {
        let path = path.child(field).key(name);
        resources::validate_quota_resource_name(name, &path, errors);
        resources::validate_quantity(name, value, &path, errors);
    }
}

fn validate_scopes(spec: &Value, errors: &mut ErrorList) {
    let path = Path::new("spec.scopes");
    let scopes: Vec<&str> = spec.items("scopes").iter().filter_map(Value::as_str).collect();
    let mut report = |detail: &str| errors.invalid(&path, spec.at("scopes").clone(), detail);
    // Report each error once: each message contains all scopes.
    if scopes.iter().any(|scope| !is_scope(scope)) {
        report("unsupported scope");
    }
    if has_invalid_scope(spec, &scopes) {
        report("unsupported scope applied to resource");
    }
    if has_conflict(&scopes) {
        report("conflicting scopes");
    }
}

fn scope_selector(spec: &Value, errors: &mut ErrorList) {
    let path = Path::new("spec.scopeSelector.matchExpressions");
    let selector = spec.at("scopeSelector");
    let mut scopes = Vec::new();
    for requirement in selector.items("matchExpressions") {
        let (scope, operator) = (requirement.text("scopeName"), requirement.text("operator"));
        let values = requirement.items("values");
        if !is_scope(scope) {
            errors.invalid(&path.child("scopeName"), scope, "unsupported scope");
        }
        if (POD_SCOPES.contains(&scope) || scope == "CrossNamespacePodAffinity") && operator != "Exists" {
            let detail = "must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or ResourceQuotaScopeCrossNamespacePodAffinity";
            errors.invalid(&path.child("operator"), operator, detail);
        }
        match operator {
            "In" | "NotIn" if values.is_empty() => {
                let detail =
                    "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector";
                errors.required(&path.child("values"), detail);
            }
            "Exists" | "DoesNotExist" if !values.is_empty() => {
                let detail =
                    "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector";
                errors.invalid(&path.child("values"), requirement.at("values").clone(), detail);
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            _ => errors.invalid(&path.child("operator"), operator, "not a valid selector operator"),
        }
        scopes.push(scope);
    }
    if has_invalid_scope(spec, &scopes) {
        errors.invalid(&path, selector.clone(), "unsupported scope applied to resource");
    }
    if has_conflict(&scopes) {
        errors.invalid(&path, spec.at("scopes").clone(), "conflicting scopes");
    }
}

fn is_scope(scope: &str) -> bool {
    POD_SCOPES.contains(&scope)
        || matches!(scope, "PriorityClass" | "VolumeAttributesClass" | "CrossNamespacePodAffinity")
}

/// Whether a scope does not apply to one of the limited resources.
fn has_invalid_scope(spec: &Value, scopes: &[&str]) -> bool {
    let fits = |scope: &str, resource: &str| match scope {
        "BestEffort" => resource == "pods",
        "VolumeAttributesClass" => matches!(resource, "persistentvolumeclaims" | "requests.storage"),
        scope if is_scope(scope) => resource == "pods" || POD_COMPUTE.contains(&resource),
        _ => true,
    };
    let distinct: BTreeSet<&str> = scopes.iter().copied().filter(|scope| is_scope(scope)).collect();
    spec.entries("hard")
        .filter(|(name, _)| resources::is_quota_standard(name))
        .any(|(name, _)| distinct.iter().any(|scope| !fits(scope, name)))
}

fn has_conflict(scopes: &[&str]) -> bool {
    [("BestEffort", "NotBestEffort"), ("Terminating", "NotTerminating")]
        .iter()
        .any(|(one, other)| scopes.contains(one) && scopes.contains(other))
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_quotas() {
        check(
            &ResourceQuota,
            r#"{"spec": {"hard": {"pods": "2", "configmaps": "3", "requests.cpu": "1", "count/deployments.apps": "1",
                                  "requests.acme.io/gpu": "4", "hugepages-2Mi": "2Mi"}, "scopes": []}}"#,
            &expect![""],
        );
        check(
            &ResourceQuota,
            r#"{"spec": {"hard": {"disk": "1", "pods": "-1", "secrets": "1500m", "storage": "1"},
                         "scopes": ["BestEffort", "NotBestEffort", "Mine"],
                         "scopeSelector": {"matchExpressions": [
                            {"scopeName": "Terminating", "operator": "In"},
                            {"scopeName": "PriorityClass", "operator": "Exists", "values": ["a"]},
                            {"scopeName": "PriorityClass", "operator": "Is"}]}}}"#,
            &expect![[r#"
                spec.hard[disk]: Invalid value: "disk": must be a standard resource type or fully qualified
                spec.hard[disk]: Invalid value: "disk": must be a standard resource for quota
                spec.hard[pods]: Invalid value: "-1": must be greater than or equal to 0
                spec.hard[secrets]: Invalid value: "1500m": must be an integer
                spec.hard[storage]: Invalid value: "storage": must be a standard resource for quota
                spec.scopes: Invalid value: ["BestEffort","NotBestEffort","Mine"]: unsupported scope
                spec.scopes: Invalid value: ["BestEffort","NotBestEffort","Mine"]: unsupported scope applied to resource
                spec.scopes: Invalid value: ["BestEffort","NotBestEffort","Mine"]: conflicting scopes
                spec.scopeSelector.matchExpressions.operator: Invalid value: "In": must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or ResourceQuotaScopeCrossNamespacePodAffinity
                spec.scopeSelector.matchExpressions.values: Required value: must be at least one value when `operator` is 'In' or 'NotIn' for scope selector
                spec.scopeSelector.matchExpressions.values: Invalid value: ["a"]: must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector
                spec.scopeSelector.matchExpressions.operator: Invalid value: "Is": not a valid selector operator
                spec.scopeSelector.matchExpressions: Invalid value: {"matchExpressions":[{"operator":"In","scopeName":"Terminating"},{"operator":"Exists","scopeName":"PriorityClass","values":["a"]},{"operator":"Is","scopeName":"PriorityClass"}]}: unsupported scope applied to resource
            "#]],
        );
    }

    #[test]
    fn scopes_are_immutable() {
        check_update(
            &ResourceQuota,
            r#"{"spec": {"scopes": ["BestEffort"]}}"#,
            r#"{}"#,
            &expect![[r#"
            spec.scopes: Invalid value: null: field is immutable
        "#]],
        );
    }
}
