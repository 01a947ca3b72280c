//! PodDisruptionBudget: REST strategy and validation.

use serde_json::Value;

use crate::field::{ErrorList, ErrorType, Path};
use crate::intstr::IntOrString;
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions};
use crate::names;
use crate::strategy::RestStrategy;

pub struct PodDisruptionBudget;

impl RestStrategy for PodDisruptionBudget {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        if spec.has("minAvailable") && spec.has("maxUnavailable") {
            let rendered = internal_format(spec);
            let message =
                format!("Invalid value: {rendered}: minAvailable and maxUnavailable cannot be both set");
            errors.push(ErrorType::Invalid, &path, message);
        }
        for field in ["minAvailable", "maxUnavailable"] {
            if spec.has(field) {
                validate_count(spec.at(field), &path.child(field), errors);
            }
        }
        meta::validate_label_selector(
            spec.at("selector"),
            &path.child("selector"),
            SelectorOptions::default(),
            errors,
        );
        if spec.has("unhealthyPodEvictionPolicy") {
            let policy = spec.text("unhealthyPodEvictionPolicy");
            let known = ["AlwaysAllow", "IfHealthyBudget"];
            if !known.contains(&policy) {
                errors.not_supported(&path.child("unhealthyPodEvictionPolicy"), policy, &known);
            }
        }
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        let (status, path) = (new.at("status"), Path::new("status"));
        meta::validate_conditions(status.at("conditions"), &path.child("conditions"), errors);
        for field in ["disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"] {
            meta::validate_non_negative(status.at(field), &path.child(field), errors);
        }
    }
}

/// Validates a number of pods or a percentage.
fn validate_count(value: &Value, path: &Path, errors: &mut ErrorList) {
    match IntOrString::from_value(value) {
        Some(IntOrString::Text(text)) => {
            let messages = names::percent(text);
            let is_over_100_percent = messages.is_empty()
                && text.strip_suffix('%').and_then(|n| n.parse::<i64>().ok()).is_none_or(|n| n > 100);
            errors.invalid_each(path, text, messages);
            if is_over_100_percent {
                errors.invalid(path, text, "must not be greater than 100%");
            }
        }
        _ => meta::validate_non_negative(value, path, errors),
    }
}

/// The spec as upstream prints its internal type: Go field names in declaration order.
fn internal_format(spec: &Value) -> String {
    let mut selector = spec.at("selector").to_string();
    if spec.at("selector").is_object() {
        let parts: Vec<String> = ["matchLabels", "matchExpressions"]
            .iter()
            .filter(|field| spec.at("selector").has(field))
            .map(|field| format!("\"{field}\":{}", spec.at("selector").at(field)))
            .collect();
        selector = format!("{{{}}}", parts.join(","));
    }
    format!(
        "{{\"MinAvailable\":{},\"Selector\":{selector},\"MaxUnavailable\":{},\"UnhealthyPodEvictionPolicy\":{}}}",
        spec.at("minAvailable"),
        spec.at("maxUnavailable"),
        spec.at("unhealthyPodEvictionPolicy"),
    )
}
