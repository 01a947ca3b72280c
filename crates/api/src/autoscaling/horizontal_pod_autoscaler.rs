//! HorizontalPodAutoscaler: REST strategy and validation of `autoscaling/v2`. Requests in v1 are
//! converted first.

mod metric;

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::quantity::Quantity;
use crate::strategy::RestStrategy;
use crate::{meta, names};

const MAX_PERIOD_SECONDS: i64 = 1800;
const MAX_STABILIZATION_WINDOW_SECONDS: i64 = 3600;

pub struct HorizontalPodAutoscaler;

impl RestStrategy for HorizontalPodAutoscaler {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate_spec(obj.at("spec"), &ValidationOptions::for_new(obj), errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        // The errors about the spec are replaced, because an update may keep values that the old object has.
        errors.0.retain(|error| !error.path.as_str().starts_with("spec"));
        validate_spec(new.at("spec"), &ValidationOptions::for_update(new, old), errors);
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        for field in ["currentReplicas", "desiredReplicas"] {
            meta::validate_non_negative(
                new.at("status").at(field),
                &Path::new("status").child(field),
                errors,
            );
        }
    }
}

/// Relaxed rules for values of the old object and for some target kinds.
struct ValidationOptions {
    min_replicas: i64,
    target: ApiVersionCheck,
    described_object: ApiVersionCheck,
}

/// How the `apiVersion` of a reference is validated.
#[derive(Clone, Copy, PartialEq)]
enum ApiVersionCheck {
    Unchecked,
    MayLackGroup,
    NeedsGroup,
}

impl ValidationOptions {
    fn for_new(new: &Value) -> ValidationOptions {
        let core = new.path("spec.scaleTargetRef").text("kind") == "ReplicationController";
        ValidationOptions {
            min_replicas: 1,
            target: if core { ApiVersionCheck::MayLackGroup } else { ApiVersionCheck::NeedsGroup },
            described_object: ApiVersionCheck::MayLackGroup,
        }
    }

    fn for_update(new: &Value, old: &Value) -> ValidationOptions {
        let mut options = ValidationOptions::for_new(new);
        let (new, old) = (new.at("spec"), old.at("spec"));
        if old.int("minReplicas") == Some(0) {
            options.min_replicas = 0;
        }
        let (target, before) = (new.at("scaleTargetRef"), old.at("scaleTargetRef"));
        if ["apiVersion", "kind"].iter().all(|field| target.text(field) == before.text(field)) {
            options.target = ApiVersionCheck::Unchecked;
        }
        let is_invalid = |metric: &Value| {
            let described = metric.path("object.describedObject");
            metric.text("type") == "Object"
                && metric.has("object")
                && api_version_error(described.text("apiVersion"), ApiVersionCheck::MayLackGroup).is_some()
        };
        if old.items("metrics").iter().any(is_invalid) {
            options.described_object = ApiVersionCheck::Unchecked;
        }
        options
    }
}

fn validate_spec(spec: &Value, options: &ValidationOptions, errors: &mut ErrorList) {
    let path = Path::new("spec");
    let (min, max) = (spec.int("minReplicas"), spec.int("maxReplicas").unwrap_or(0));
    if let Some(min) = min.filter(|min| *min < options.min_replicas) {
        let message = format!("must be greater than or equal to {}", options.min_replicas);
        errors.invalid(&path.child("minReplicas"), min, &message);
    }
    if max == 0 {
        errors.required(&path.child("maxReplicas"), "must be set and greater than 0");
    } else if max < 0 {
        errors.invalid(&path.child("maxReplicas"), max, "must be greater than or equal to 1");
    }
    if min.is_some_and(|min| max < min) {
        errors.invalid(&path.child("maxReplicas"), max, "must be greater than or equal to `minReplicas`");
    }
    validate_reference(spec.at("scaleTargetRef"), options.target, &path.child("scaleTargetRef"), errors);
    metric::validate_metrics(spec, options.described_object, &path.child("metrics"), errors);
    for direction in ["scaleUp", "scaleDown"] {
        let rules = spec.at("behavior").at(direction);
        if !rules.is_null() {
            scaling_rules(rules, &path.child("behavior").child(direction), errors);
        }
    }
}

fn validate_reference(reference: &Value, api_version: ApiVersionCheck, path: &Path, errors: &mut ErrorList) {
    for field in ["kind", "name"] {
        let (value, path) = (reference.text(field), path.child(field));
        if value.is_empty() {
            errors.required(&path, "");
        } else {
            for message in names::path_segment_name(value) {
                errors.invalid(&path, value, &message);
            }
        }
    }
    if let Some(error) = api_version_error(reference.text("apiVersion"), api_version) {
        errors.invalid(&path.child("apiVersion"), reference.text("apiVersion"), &error);
    }
}

fn api_version_error(value: &str, rule: ApiVersionCheck) -> Option<String> {
    match (rule, value.matches('/').count()) {
        (ApiVersionCheck::Unchecked, _) => None,
        (_, 2..) => Some(format!("unexpected GroupVersion string: {value}")),
        (ApiVersionCheck::NeedsGroup, slashes) if slashes == 0 || value.starts_with('/') => {
            Some("apiVersion must specify API group".to_owned())
        }
        _ => None,
    }
}

fn scaling_rules(rules: &Value, path: &Path, errors: &mut ErrorList) {
    if let Some(window) = rules.int("stabilizationWindowSeconds") {
        let path = path.child("stabilizationWindowSeconds");
        if window < 0 {
            errors.invalid(&path, window, "must be greater than or equal to zero");
        }
        at_most(window, MAX_STABILIZATION_WINDOW_SECONDS, &path, errors);
    }
    if rules.has("selectPolicy") {
        let policy = rules.text("selectPolicy");
        let known = ["Disabled", "Max", "Min"];
        if !known.contains(&policy) {
            errors.not_supported(&path.child("selectPolicy"), policy, &known);
        }
    }
    let policies = rules.items("policies");
    if policies.is_empty() {
        errors.required(&path.child("policies"), "must specify at least one Policy");
    }
    for (i, policy) in policies.iter().enumerate() {
        scaling_policy(policy, &path.child("policies").index(i), errors);
    }
    if let Some(tolerance) = rules.at("tolerance").as_str()
        && Quantity::parse(tolerance).is_ok_and(|quantity| quantity.is_negative())
    {
        errors.invalid(&path.child("tolerance"), tolerance, "must be greater than or equal to 0");
    }
}

fn scaling_policy(policy: &Value, path: &Path, errors: &mut ErrorList) {
    let known = ["Percent", "Pods"];
    if !known.contains(&policy.text("type")) {
        errors.not_supported(&path.child("type"), policy.text("type"), &known);
    }
    for field in ["value", "periodSeconds"] {
        let value = policy.int(field).unwrap_or(0);
        if value <= 0 {
            errors.invalid(&path.child(field), value, "must be greater than zero");
        }
    }
    at_most(
        policy.int("periodSeconds").unwrap_or(0),
        MAX_PERIOD_SECONDS,
        &path.child("periodSeconds"),
        errors,
    );
}

fn at_most(value: i64, max: i64, path: &Path, errors: &mut ErrorList) {
    if value > max {
        errors.invalid(path, value, &format!("must be less than or equal to {max}"));
    }
}
