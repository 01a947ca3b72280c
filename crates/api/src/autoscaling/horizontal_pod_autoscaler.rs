//! HorizontalPodAutoscaler, in its v2 form: a v1 request has been converted before it gets here.

mod metric;

use serde_json::Value;

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::quantity::Quantity;
use crate::{meta, names};

const MAX_PERIOD_SECONDS: i64 = 1800;
const MAX_STABILIZATION_WINDOW_SECONDS: i64 = 3600;

pub struct HorizontalPodAutoscaler;

impl Kind for HorizontalPodAutoscaler {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        spec(obj.at("spec"), &Leniency::for_new(obj), errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        // What was accepted once stays acceptable, so the strict verdict is taken back and reached anew.
        errors.0.retain(|complaint| !complaint.path.as_str().starts_with("spec"));
        spec(new.at("spec"), &Leniency::for_update(new, old), errors);
    }

    fn validate_status(&self, new: &Value, _old: &Value, errors: &mut Errors) {
        for field in ["currentReplicas", "desiredReplicas"] {
            meta::non_negative(new.at("status").at(field), &Path::new("status").at(field), errors);
        }
    }
}

/// What is overlooked, because a stored object already has it or because of the target's kind.
struct Leniency {
    min_replicas: i64,
    target: ApiVersion,
    described_objects: ApiVersion,
}

/// How a reference's apiVersion is checked.
#[derive(Clone, Copy, PartialEq)]
enum ApiVersion {
    Unchecked,
    MayLackGroup,
    NeedsGroup,
}

impl Leniency {
    fn for_new(new: &Value) -> Leniency {
        let core = new.path("spec.scaleTargetRef").text("kind") == "ReplicationController";
        Leniency {
            min_replicas: 1,
            target: if core { ApiVersion::MayLackGroup } else { ApiVersion::NeedsGroup },
            described_objects: ApiVersion::MayLackGroup,
        }
    }

    fn for_update(new: &Value, old: &Value) -> Leniency {
        let mut leniency = Leniency::for_new(new);
        let (new, old) = (new.at("spec"), old.at("spec"));
        if old.int("minReplicas") == Some(0) {
            leniency.min_replicas = 0;
        }
        let (target, before) = (new.at("scaleTargetRef"), old.at("scaleTargetRef"));
        if ["apiVersion", "kind"].iter().all(|field| target.text(field) == before.text(field)) {
            leniency.target = ApiVersion::Unchecked;
        }
        let unsound = |metric: &Value| {
            let described = metric.path("object.describedObject");
            metric.text("type") == "Object"
                && metric.has("object")
                && api_version_problem(described.text("apiVersion"), ApiVersion::MayLackGroup).is_some()
        };
        if old.items("metrics").iter().any(unsound) {
            leniency.described_objects = ApiVersion::Unchecked;
        }
        leniency
    }
}

fn spec(spec: &Value, leniency: &Leniency, errors: &mut Errors) {
    let path = Path::new("spec");
    let (min, max) = (spec.int("minReplicas"), spec.int("maxReplicas").unwrap_or(0));
    if let Some(min) = min.filter(|min| *min < leniency.min_replicas) {
        let message = format!("must be greater than or equal to {}", leniency.min_replicas);
        errors.invalid(&path.at("minReplicas"), min, &message);
    }
    if max == 0 {
        errors.required(&path.at("maxReplicas"), "must be set and greater than 0");
    } else if max < 0 {
        errors.invalid(&path.at("maxReplicas"), max, "must be greater than or equal to 1");
    }
    if min.is_some_and(|min| max < min) {
        errors.invalid(&path.at("maxReplicas"), max, "must be greater than or equal to `minReplicas`");
    }
    reference(spec.at("scaleTargetRef"), leniency.target, &path.at("scaleTargetRef"), errors);
    metric::metrics(spec, leniency.described_objects, &path.at("metrics"), errors);
    for direction in ["scaleUp", "scaleDown"] {
        let rules = spec.at("behavior").at(direction);
        if !rules.is_null() {
            scaling_rules(rules, &path.at("behavior").at(direction), errors);
        }
    }
}

fn reference(reference: &Value, api_version: ApiVersion, path: &Path, errors: &mut Errors) {
    for field in ["kind", "name"] {
        let (value, path) = (reference.text(field), path.at(field));
        if value.is_empty() {
            errors.required(&path, "");
        } else {
            for message in names::path_segment_name(value) {
                errors.invalid(&path, value, &message);
            }
        }
    }
    if let Some(problem) = api_version_problem(reference.text("apiVersion"), api_version) {
        errors.invalid(&path.at("apiVersion"), reference.text("apiVersion"), &problem);
    }
}

fn api_version_problem(value: &str, rule: ApiVersion) -> Option<String> {
    match (rule, value.matches('/').count()) {
        (ApiVersion::Unchecked, _) => None,
        (_, 2..) => Some(format!("unexpected GroupVersion string: {value}")),
        (ApiVersion::NeedsGroup, slashes) if slashes == 0 || value.starts_with('/') => {
            Some("apiVersion must specify API group".to_owned())
        }
        _ => None,
    }
}

fn scaling_rules(rules: &Value, path: &Path, errors: &mut Errors) {
    if let Some(window) = rules.int("stabilizationWindowSeconds") {
        let path = path.at("stabilizationWindowSeconds");
        if window < 0 {
            errors.invalid(&path, window, "must be greater than or equal to zero");
        }
        at_most(window, MAX_STABILIZATION_WINDOW_SECONDS, &path, errors);
    }
    if rules.has("selectPolicy") {
        let policy = rules.text("selectPolicy");
        let known = ["Disabled", "Max", "Min"];
        if !known.contains(&policy) {
            errors.not_supported(&path.at("selectPolicy"), policy, &known);
        }
    }
    let policies = rules.items("policies");
    if policies.is_empty() {
        errors.required(&path.at("policies"), "must specify at least one Policy");
    }
    for (i, policy) in policies.iter().enumerate() {
        scaling_policy(policy, &path.at("policies").index(i), errors);
    }
    if let Some(tolerance) = rules.at("tolerance").as_str()
        && Quantity::parse(tolerance).is_ok_and(|quantity| quantity.is_negative())
    {
        errors.invalid(&path.at("tolerance"), tolerance, "must be greater than or equal to 0");
    }
}

fn scaling_policy(policy: &Value, path: &Path, errors: &mut Errors) {
    let known = ["Percent", "Pods"];
    if !known.contains(&policy.text("type")) {
        errors.not_supported(&path.at("type"), policy.text("type"), &known);
    }
    for field in ["value", "periodSeconds"] {
        let value = policy.int(field).unwrap_or(0);
        if value <= 0 {
            errors.invalid(&path.at(field), value, "must be greater than zero");
        }
    }
    at_most(policy.int("periodSeconds").unwrap_or(0), MAX_PERIOD_SECONDS, &path.at("periodSeconds"), errors);
}

fn at_most(value: i64, max: i64, path: &Path, errors: &mut Errors) {
    if value > max {
        errors.invalid(path, value, &format!("must be less than or equal to {max}"));
    }
}
