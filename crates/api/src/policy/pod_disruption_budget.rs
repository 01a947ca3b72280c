//! PodDisruptionBudget: how many of some pods must stay, or may go, at one time.

use serde_json::Value;

use crate::field::{Errors, Path, Reason};
use crate::intstr::IntOrString;
use crate::json::Json;
use crate::kind::Kind;
use crate::meta::{self, SelectorOptions};
use crate::names;

pub struct PodDisruptionBudget;

impl Kind for PodDisruptionBudget {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        if spec.has("minAvailable") && spec.has("maxUnavailable") {
            let shown = inner_form(spec);
            let message =
                format!("Invalid value: {shown}: minAvailable and maxUnavailable cannot be both set");
            errors.push(Reason::Invalid, &path, message);
        }
        for field in ["minAvailable", "maxUnavailable"] {
            if spec.has(field) {
                count(spec.at(field), &path.at(field), errors);
            }
        }
        meta::label_selector(spec.at("selector"), &path.at("selector"), SelectorOptions::default(), errors);
        if spec.has("unhealthyPodEvictionPolicy") {
            let policy = spec.text("unhealthyPodEvictionPolicy");
            let known = ["AlwaysAllow", "IfHealthyBudget"];
            if !known.contains(&policy) {
                errors.not_supported(&path.at("unhealthyPodEvictionPolicy"), policy, &known);
            }
        }
    }

    fn validate_status(&self, new: &Value, _old: &Value, errors: &mut Errors) {
        let (status, path) = (new.at("status"), Path::new("status"));
        meta::conditions(status.at("conditions"), &path.at("conditions"), errors);
        for field in ["disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"] {
            meta::non_negative(status.at(field), &path.at(field), errors);
        }
    }
}

/// A number of pods, or a share of them.
fn count(value: &Value, path: &Path, errors: &mut Errors) {
    match IntOrString::read(value) {
        Some(IntOrString::Text(text)) => {
            let problems = names::percent(text);
            let more = problems.is_empty()
                && text.strip_suffix('%').and_then(|n| n.parse::<i64>().ok()).is_none_or(|n| n > 100);
            errors.invalid_each(path, text, problems);
            if more {
                errors.invalid(path, text, "must not be greater than 100%");
            }
        }
        _ => meta::non_negative(value, path, errors),
    }
}

/// The spec as upstream prints it: the fields' inner names, in their inner order.
fn inner_form(spec: &Value) -> String {
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
