//! Validates `podFailurePolicy`, `successPolicy` and the backoff limits per index.

use std::collections::BTreeSet;

use serde_json::Value;

use super::indexes;
use crate::core::pod::rules::{invalid_as, non_negative, validate_name};
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt;
use crate::names;

const ACTIONS: &[&str] = &["Count", "FailIndex", "FailJob", "Ignore"];
const MAX_RULES: usize = 20;
const MAX_EXIT_CODES: usize = 255;
const MAX_INDEXES_BYTES: usize = 64 * 1024;

pub(super) fn validate(spec: &Value, path: &Path, e: &mut ErrorList) {
    if spec.has("podFailurePolicy") {
        validate_failure_policy(spec, &path.child("podFailurePolicy.rules"), e);
    }
    if spec.has("successPolicy") {
        let at = path.child("successPolicy");
        if super::is_indexed(spec) {
            validate_success_policy(spec, &at.child("rules"), e);
        } else {
            invalid_as(
                e,
                &at,
                &render_success_policy(spec.at("successPolicy")),
                "requires indexed completion mode",
            );
        }
    }
    if let Some(policy) = spec.at("podReplacementPolicy").as_str() {
        let allowed: &[&str] =
            if spec.has("podFailurePolicy") { &["Failed"] } else { &["Failed", "TerminatingOrFailed"] };
        if !allowed.contains(&policy) {
            e.not_supported(&path.child("podReplacementPolicy"), policy, allowed);
        }
    }
}

fn validate_failure_policy(spec: &Value, path: &Path, e: &mut ErrorList) {
    let rules = spec.at("podFailurePolicy").items("rules");
    if rules.len() > MAX_RULES {
        e.too_many(path, rules.len(), MAX_RULES);
    }
    let pod = spec.path("template.spec");
    let containers: BTreeSet<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|list| pod.items(list))
        .map(|c| c.text("name"))
        .collect();
    for (i, rule) in rules.iter().enumerate() {
        let at = path.index(i);
        match rule.text("action") {
            "" => e.required(&at.child("action"), &valid_values(ACTIONS)),
            "FailIndex" if !spec.has("backoffLimitPerIndex") => {
                let message = "requires the backoffLimitPerIndex to be set";
                e.invalid(&at.child("action"), "FailIndex", message);
            }
            action if !ACTIONS.contains(&action) => e.not_supported(&at.child("action"), action, ACTIONS),
            _ => {}
        }
        let (codes, conditions) = (rule.at("onExitCodes"), rule.items("onPodConditions"));
        if !codes.is_null() {
            exit_codes(codes, &at.child("onExitCodes"), &containers, e);
        }
        pod_conditions(conditions, &at.child("onPodConditions"), e);
        let message = match (codes.is_null(), conditions.is_empty()) {
            (false, false) => "specifying both OnExitCodes and OnPodConditions is not supported",
            (true, true) => "specifying one of OnExitCodes and OnPodConditions is required",
            _ => continue,
        };
        e.push(ErrorType::Invalid, &at, format!("Invalid value: {message}"));
    }
}

fn valid_values(values: &[&str]) -> String {
    let values: Vec<String> = values.iter().map(|value| format!("\"{value}\"")).collect();
    format!("valid values: [{}]", values.join(" "))
}

fn exit_codes(codes: &Value, path: &Path, containers: &BTreeSet<&str>, e: &mut ErrorList) {
    const OPERATORS: &[&str] = &["In", "NotIn"];
    let operator = codes.text("operator");
    if operator.is_empty() {
        e.required(&path.child("operator"), &valid_values(OPERATORS));
    } else if !OPERATORS.contains(&operator) {
        e.not_supported(&path.child("operator"), operator, OPERATORS);
    }
    if let Some(name) = codes.at("containerName").as_str()
        && !containers.contains(name)
    {
        let message = "must be one of the container or initContainer names in the pod template";
        e.invalid(&path.child("containerName"), name, message);
    }
    let at = path.child("values");
    let values: Vec<i64> = codes.items("values").iter().filter_map(Value::as_i64).collect();
    if values.is_empty() {
        e.invalid(&at, codes.at("values").clone(), "at least one value is required");
    } else if values.len() > MAX_EXIT_CODES {
        e.too_many(&at, values.len(), MAX_EXIT_CODES);
    }
    let mut seen = BTreeSet::new();
    for (i, &value) in values.iter().enumerate() {
        if operator == "In" && value == 0 {
            e.invalid(&at.index(i), value, "must not be 0 for the In operator");
        }
        if !seen.insert(value) {
            e.duplicate(&at.index(i), value);
        }
    }
    if !values.is_sorted() {
        e.invalid(&at, values, "must be ordered");
    }
}

fn pod_conditions(conditions: &[Value], path: &Path, e: &mut ErrorList) {
    const STATUSES: &[&str] = &["False", "True", "Unknown"];
    if conditions.len() > MAX_RULES {
        e.too_many(path, conditions.len(), MAX_RULES);
    }
    for (i, condition) in conditions.iter().enumerate() {
        let at = path.index(i);
        validate_name(e, &at.child("type"), condition.text("type"), names::qualified_name);
        match condition.text("status") {
            "" => e.required(&at.child("status"), &valid_values(STATUSES)),
            status if !STATUSES.contains(&status) => e.not_supported(&at.child("status"), status, STATUSES),
            _ => {}
        }
    }
}

fn validate_success_policy(spec: &Value, path: &Path, e: &mut ErrorList) {
    let rules = spec.at("successPolicy").items("rules");
    if rules.is_empty() {
        e.required(path, "at least one rules must be specified when the successPolicy is specified");
    }
    if rules.len() > MAX_RULES {
        e.too_many(path, rules.len(), MAX_RULES);
    }
    // Missing completions of an Indexed Job have been reported already.
    let completions = spec.int("completions").unwrap_or(0);
    for (i, rule) in rules.iter().enumerate() {
        let at = path.index(i);
        let (indexes, count) = (rule.at("succeededIndexes").as_str(), rule.int("succeededCount"));
        if indexes.is_none() && count.is_none() {
            e.required(&at, "at least one of succeededCount or succeededIndexes must be specified");
        }
        let mut total = None;
        if let Some(list) = indexes {
            let at = at.child("succeededIndexes");
            if list.len() > MAX_INDEXES_BYTES {
                e.too_long(&at, MAX_INDEXES_BYTES);
            }
            let counted = indexes::validate_index_ranges(list, completions);
            if let Err(reason) = &counted {
                e.invalid(&at, list, &format!("error parsing succeededIndexes: {reason}"));
            }
            total = Some(counted.unwrap_or(0));
        }
        non_negative(e, rule, &at, "succeededCount");
        let limits = [
            (Some(completions), "the number of specified completions"),
            (total, "the number of indexes in the specified succeededIndexes field"),
        ];
        for (limit, what) in limits {
            if let (Some(count), Some(limit)) = (count, limit)
                && count > limit
            {
                let message = format!("must be less than or equal to {limit} ({what})");
                e.invalid(&at.child("succeededCount"), count, &message);
            }
        }
    }
}

fn render_success_policy(policy: &Value) -> String {
    let rules: Vec<String> = policy
        .items("rules")
        .iter()
        .map(|rule| {
            let fields = [("SucceededIndexes", "succeededIndexes"), ("SucceededCount", "succeededCount")];
            crate::core::pod::rules::render_fields(rule, &fields)
        })
        .collect();
    let rules = if policy.has("rules") { format!("[{}]", rules.join(",")) } else { "null".to_owned() };
    format!("{{\"Rules\":{rules}}}")
}
