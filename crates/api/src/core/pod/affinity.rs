//! Validates node and pod affinity, topology spread constraints and tolerations.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::rules::{NOT_POSITIVE_MESSAGE, optional_one_of, validate_name};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions};
use crate::names;

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
const WEIGHT_MESSAGE: &str = "must be in the range 1-100";

pub(super) fn validate_affinity(e: &mut ErrorList, affinity: &Value, path: &Path) {
    let node = affinity.at("nodeAffinity");
    let at = path.child("nodeAffinity");
    if node.has(REQUIRED) {
        validate_node_selector(e, node.at(REQUIRED), &at.child(REQUIRED));
    }
    for (i, term) in node.items(PREFERRED).iter().enumerate() {
        let at = at.child(PREFERRED).index(i);
        weight(e, term, &at);
        node_selector_term(e, term.at("preference"), &at.child("preference"), false);
    }
    for field in ["podAffinity", "podAntiAffinity"] {
        let (rules, at) = (affinity.at(field), path.child(field));
        for (i, term) in rules.items(REQUIRED).iter().enumerate() {
            pod_affinity_term(e, term, &at.child(REQUIRED).index(i));
        }
        for (i, term) in rules.items(PREFERRED).iter().enumerate() {
            let at = at.child(PREFERRED).index(i);
            weight(e, term, &at);
            pod_affinity_term(e, term.at("podAffinityTerm"), &at.child("podAffinityTerm"));
        }
    }
}

fn weight(e: &mut ErrorList, term: &Value, path: &Path) {
    let weight = term.int("weight").unwrap_or(0);
    if !(1..=100).contains(&weight) {
        e.invalid(&path.child("weight"), weight, WEIGHT_MESSAGE);
    }
}

/// Validates a `NodeSelector`, as in required node affinity.
pub(crate) fn validate_node_selector(e: &mut ErrorList, selector: &Value, path: &Path) {
    let at = path.child("nodeSelectorTerms");
    let terms = selector.items("nodeSelectorTerms");
    if terms.is_empty() {
        return e.required(&at, "must have at least one node selector term");
    }
    for (i, term) in terms.iter().enumerate() {
        node_selector_term(e, term, &at.index(i), true);
    }
}

/// `values` is whether values must be valid label values, which only required terms demand.
fn node_selector_term(e: &mut ErrorList, term: &Value, path: &Path, validate_values: bool) {
    for (i, requirement) in term.items("matchExpressions").iter().enumerate() {
        node_requirement(e, requirement, &path.child("matchExpressions").index(i), validate_values);
    }
    for (i, requirement) in term.items("matchFields").iter().enumerate() {
        node_field_requirement(e, requirement, &path.child("matchFields").index(i));
    }
}

fn node_requirement(e: &mut ErrorList, requirement: &Value, path: &Path, validate_values: bool) {
    let given = requirement.items("values");
    let at = path.child("values");
    match requirement.text("operator") {
        "In" | "NotIn" => {
            if given.is_empty() {
                e.required(&at, "must be specified when `operator` is 'In' or 'NotIn'");
            }
        }
        "Exists" | "DoesNotExist" => {
            if !given.is_empty() {
                e.forbidden(&at, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'");
            }
        }
        "Gt" | "Lt" => {
            if given.len() != 1 {
                e.required(&at, "must be specified single value when `operator` is 'Lt' or 'Gt'");
            }
        }
        other => e.invalid(&path.child("operator"), other, "not a valid selector operator"),
    }
    meta::validate_label_name(requirement.text("key"), &path.child("key"), e);
    if validate_values {
        for (i, value) in given.iter().enumerate() {
            validate_name(e, &at.index(i), value.as_str().unwrap_or(""), names::label_value);
        }
    }
}

fn node_field_requirement(e: &mut ErrorList, requirement: &Value, path: &Path) {
    let values = requirement.items("values");
    match requirement.text("operator") {
        "In" | "NotIn" => {
            if values.len() != 1 {
                e.required(
                    &path.child("values"),
                    "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
                );
            }
        }
        other => e.invalid(&path.child("operator"), other, "not a valid selector operator"),
    }
    match requirement.text("key") {
        "metadata.name" => {
            for (i, value) in values.iter().enumerate() {
                let value = value.as_str().unwrap_or("");
                validate_name(e, &path.child("values").index(i), value, names::dns1123_subdomain);
            }
        }
        other => e.invalid(&path.child("key"), other, "not a valid field selector key"),
    }
}

fn pod_affinity_term(e: &mut ErrorList, term: &Value, path: &Path) {
    for field in ["labelSelector", "namespaceSelector"] {
        meta::validate_label_selector(term.at(field), &path.child(field), SelectorOptions::default(), e);
    }
    for namespace in term.items("namespaces") {
        validate_name(e, &path.child("namespace"), namespace.as_str().unwrap_or(""), names::dns1123_label);
    }
    label_keys(e, term, path);
    let key = term.text("topologyKey");
    if key.is_empty() {
        e.required(&path.child("topologyKey"), "can not be empty");
    }
    meta::validate_label_name(key, &path.child("topologyKey"), e);
}

/// Validates `matchLabelKeys` and `mismatchLabelKeys`.
fn label_keys(e: &mut ErrorList, term: &Value, path: &Path) {
    let selector = term.at("labelSelector");
    for field in ["matchLabelKeys", "mismatchLabelKeys"] {
        let keys = term.items(field);
        let at = path.child(field);
        if keys.is_empty() {
            continue;
        }
        if selector.is_null() {
            e.forbidden(&at, "must not be specified when labelSelector is not set");
            continue;
        }
        for (i, key) in keys.iter().enumerate() {
            meta::validate_label_name(key.as_str().unwrap_or(""), &at.index(i), e);
        }
    }
    let matched = term.items("matchLabelKeys");
    if !selector.is_null() {
        // Merging the keys adds one expression per key to the selector. Another one with that key comes
        // from the user.
        let indexes: BTreeMap<&str, usize> =
            matched.iter().enumerate().map(|(i, key)| (key.as_str().unwrap_or(""), i)).collect();
        let mut used: BTreeSet<&str> = selector.entries("matchLabels").map(|(key, _)| key).collect();
        for expression in selector.items("matchExpressions") {
            let key = expression.text("key");
            if let Some(&i) = indexes.get(key)
                && used.contains(key)
            {
                e.invalid(&path.index(i), key, "exists in both matchLabelKeys and labelSelector");
            }
            used.insert(key);
        }
    }
    let mismatched: BTreeSet<&str> =
        term.items("mismatchLabelKeys").iter().filter_map(Value::as_str).collect();
    for (i, key) in matched.iter().enumerate() {
        if key.as_str().is_some_and(|key| mismatched.contains(key)) {
            let message = "exists in both matchLabelKeys and mismatchLabelKeys";
            e.invalid(&path.child("matchLabelKeys").index(i), key.clone(), message);
        }
    }
}

pub(super) fn validate_topology_spread<'a>(e: &mut ErrorList, constraints: &'a [Value], path: &Path) {
    let constraint_key = |one: &'a Value| (one.text("topologyKey"), one.text("whenUnsatisfiable"));
    let last: BTreeMap<(&str, &str), usize> =
        constraints.iter().enumerate().map(|(i, one)| (constraint_key(one), i)).collect();
    for (i, constraint) in constraints.iter().enumerate() {
        let at = path.index(i);
        let skew = constraint.int("maxSkew").unwrap_or(0);
        if skew <= 0 {
            e.invalid(&at.child("maxSkew"), skew, NOT_POSITIVE_MESSAGE);
        }
        let (key, action) = (constraint.text("topologyKey"), constraint.text("whenUnsatisfiable"));
        if key.is_empty() {
            e.required(&at.child("topologyKey"), "can not be empty");
        }
        const ACTIONS: &[&str] = &["DoNotSchedule", "ScheduleAnyway"];
        if !ACTIONS.contains(&action) {
            e.not_supported(&at.child("whenUnsatisfiable"), action, ACTIONS);
        }
        if last.get(&(key, action)).is_some_and(|&last| last > i) {
            e.duplicate(&at.child("{topologyKey, whenUnsatisfiable}"), format!("{{{key}, {action}}}"));
        }
        if let Some(domains) = constraint.int("minDomains") {
            if domains <= 0 {
                e.invalid(&at.child("minDomains"), domains, NOT_POSITIVE_MESSAGE);
            }
            if action != "DoNotSchedule" {
                let message =
                    format!("can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {action}");
                e.invalid(&at.child("minDomains"), domains, &message);
            }
        }
        for field in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
            optional_one_of(e, constraint, &at, field, &["Honor", "Ignore"]);
        }
        label_keys(e, constraint, &at);
        let selector = constraint.at("labelSelector");
        meta::validate_label_selector(selector, &at.child("labelSelector"), SelectorOptions::default(), e);
    }
}

/// Validates the tolerations of a Pod or RuntimeClass.
pub(crate) fn validate_tolerations(e: &mut ErrorList, tolerations: &[Value], path: &Path) {
    for (i, toleration) in tolerations.iter().enumerate() {
        let at = path.index(i);
        let (key, operator) = (toleration.text("key"), toleration.text("operator"));
        let (value, effect) = (toleration.text("value"), toleration.text("effect"));
        if !key.is_empty() {
            meta::validate_label_name(key, &at.child("key"), e);
        } else if operator != "Exists" {
            e.invalid(
                &at.child("operator"),
                operator,
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
            );
        }
        if toleration.has("tolerationSeconds") && effect != "NoExecute" {
            e.invalid(
                &at.child("effect"),
                effect,
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
            );
        }
        match operator {
            "Equal" | "" => {
                let messages = names::label_value(value);
                if !messages.is_empty() {
                    e.invalid(&at.child("operator"), value, &messages.join(";"));
                }
            }
            "Exists" => {
                if !value.is_empty() {
                    e.invalid(
                        &at.child("operator"),
                        value,
                        "value must be empty when `operator` is 'Exists'",
                    );
                }
            }
            "Lt" | "Gt" => {
                e.not_supported(&at.child("operator"), operator, &["Equal", "Exists", "Lt", "Gt"]);
            }
            other => e.not_supported(&at.child("operator"), other, &["Equal", "Exists"]),
        }
        if !effect.is_empty() {
            optional_one_of(e, toleration, &at, "effect", &["NoSchedule", "PreferNoSchedule", "NoExecute"]);
        }
    }
}
