//! The cells of admission policies, role bindings and certificate signing requests.

use jiff::SignedDuration;
use serde_json::Value;

use super::text::{is_deleting, strings};
use crate::json::JsonExt as _;
use crate::time::human_duration;

pub fn param_kind(policy: &Value) -> String {
    match policy.path("spec.paramKind") {
        Value::Null => "<unset>".to_owned(),
        kind => format!("{}/{}", kind.text("apiVersion"), kind.text("kind")),
    }
}

pub fn param_ref(binding: &Value) -> String {
    let param = binding.path("spec.paramRef");
    match (param.text("name"), param.text("namespace")) {
        ("", _) if param.has("selector") => raw_selector(param.at("selector")),
        ("", _) => "<unset>".to_owned(),
        (name, "") => format!("*/{name}"),
        (name, namespace) => format!("{namespace}/{name}"),
    }
}

pub fn role(binding: &Value) -> String {
    let role = binding.at("roleRef");
    format!("{}/{}", role.text("kind"), role.text("name"))
}

pub fn users(binding: &Value) -> String {
    subjects(binding, "User", |subject| subject.text("name").to_owned())
}

pub fn groups(binding: &Value) -> String {
    subjects(binding, "Group", |subject| subject.text("name").to_owned())
}

pub fn service_accounts(binding: &Value) -> String {
    subjects(binding, "ServiceAccount", |subject| {
        format!("{}/{}", subject.text("namespace"), subject.text("name"))
    })
}

pub fn csr_condition(csr: &Value) -> String {
    let status = csr.at("status");
    let has = |kind| status.items("conditions").iter().any(|condition| condition.text("type") == kind);
    let mut words = vec![if has("Denied") {
        "Denied"
    } else if has("Approved") {
        "Approved"
    } else {
        "Pending"
    }];
    if has("Failed") {
        words.push("Failed");
    }
    if !status.text("certificate").is_empty() {
        words.push("Issued");
    }
    words.join(",")
}

pub fn csr_duration(csr: &Value) -> String {
    match csr.at("spec").int("expirationSeconds") {
        None => "<none>".to_owned(),
        Some(seconds) => human_duration(SignedDuration::from_secs(seconds)),
    }
}

pub fn claim_state(claim: &Value) -> String {
    let (status, deleting) = (claim.at("status"), is_deleting(claim));
    let allocated = status.has("allocation");
    let states = [
        (deleting, "deleted"),
        (!allocated && !deleting, "pending"),
        (allocated, "allocated"),
        (allocated && !status.items("reservedFor").is_empty(), "reserved"),
    ];
    super::text::join(states.iter().filter(|(is, _)| *is).map(|(_, word)| *word))
}

fn subjects(binding: &Value, kind: &str, name: fn(&Value) -> String) -> String {
    let of_kind = binding.items("subjects").iter().filter(|subject| subject.text("kind") == kind);
    of_kind.map(name).collect::<Vec<_>>().join(", ")
}

/// A selector in Go's `%v` format, as upstream prints it in this column.
fn raw_selector(selector: &Value) -> String {
    let labels: String = selector
        .entries("matchLabels")
        .map(|(key, value)| format!("{key}: {},", value.as_str().unwrap_or("")))
        .collect();
    let expression = |expression: &Value| {
        let values: Vec<&str> = strings(expression.items("values")).collect();
        let (key, operator) = (expression.text("key"), expression.text("operator"));
        format!("LabelSelectorRequirement{{Key:{key},Operator:{operator},Values:[{}],}},", values.join(" "))
    };
    let expressions: String = selector.items("matchExpressions").iter().map(expression).collect();
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},\
         MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )
}
