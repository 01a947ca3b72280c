//! Accepts the names of a CRD and computes its conditions. Upstream: `naming_controller.go`.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::{CrdNames, Definition};
use crate::json::JsonExt as _;

/// The finalizer that keeps a CRD until all its objects are deleted.
pub const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";
pub const TERMINATING_CONDITION: &str = "Terminating";

/// The names in a group that other CRDs use.
#[derive(Debug, Default)]
pub struct UsedNames {
    resources: HashSet<String>,
    kinds: HashSet<String>,
}

impl UsedNames {
    pub fn add(&mut self, names: &CrdNames) {
        self.resources.insert(names.plural.clone());
        self.resources.insert(names.singular.clone());
        self.resources.extend(names.short_names.iter().cloned());
        self.kinds.insert(names.kind.clone());
        self.kinds.insert(names.list_kind.clone());
    }
}

/// Returns the accepted names and the conditions of a definition. Names in use by others are not
/// accepted; the remaining ones are.
pub fn accept_names(definition: &Definition, used_names: &UsedNames, now: &str) -> (CrdNames, Vec<Value>) {
    let (desired, mut names) = (&definition.spec_names, definition.accepted_names.clone());
    let mut conflict: Option<(&str, String)> = None;
    let in_use_message = |name: &str| format!("{name:?} is already in use");
    let mut accept =
        |desired: &str, current: &mut String, used_names: &HashSet<String>, reason: &'static str| {
            if desired == current || !used_names.contains(desired) {
                desired.clone_into(current);
            } else {
                conflict = Some((reason, in_use_message(desired)));
            }
        };
    accept(&desired.plural, &mut names.plural, &used_names.resources, "PluralConflict");
    accept(&desired.singular, &mut names.singular, &used_names.resources, "SingularConflict");
    let conflicts: Vec<String> = desired
        .short_names
        .iter()
        .filter(|name| {
            !definition.accepted_names.short_names.contains(name) && used_names.resources.contains(*name)
        })
        .map(|name| in_use_message(name))
        .collect();
    let mut short_names_message = None;
    match conflicts.as_slice() {
        [] => names.short_names.clone_from(&desired.short_names),
        [one] => short_names_message = Some(one.clone()),
        many => short_names_message = Some(format!("[{}]", many.join(", "))),
    }
    if let Some(message) = short_names_message {
        conflict = Some(("ShortNamesConflict", message));
    }
    let mut accept = |desired: &str, current: &mut String, reason: &'static str| {
        if desired == current || !used_names.kinds.contains(desired) {
            desired.clone_into(current);
        } else {
            conflict = Some((reason, in_use_message(desired)));
        }
    };
    accept(&desired.kind, &mut names.kind, "KindConflict");
    accept(&desired.list_kind, &mut names.list_kind, "ListKindConflict");
    names.categories.clone_from(&desired.categories);

    let mut conditions = definition.conditions.clone();
    let no_conflict = conflict.is_none();
    let (status, reason, message) = match &conflict {
        Some((reason, message)) => ("False", *reason, message.as_str()),
        None => ("True", "NoConflicts", "no conflicts found"),
    };
    set_condition(&mut conditions, new_condition("NamesAccepted", status, reason, message), now);
    if !is_condition_true(&conditions, "Established") {
        let established = match no_conflict {
            true => new_condition(
                "Established",
                "True",
                "InitialNamesAccepted",
                "the initial names have been accepted",
            ),
            false => new_condition("Established", "False", "NotAccepted", "not all names are accepted"),
        };
        set_condition(&mut conditions, established, now);
    }
    if let Some(conformant) = approval_condition(definition) {
        set_condition(&mut conditions, conformant, now);
    }
    (names, conditions)
}

/// The API approval condition of CRDs in reserved groups.
fn approval_condition(definition: &Definition) -> Option<Value> {
    const CONDITION_TYPE: &str = "KubernetesAPIApprovalPolicyConformant";
    const APPROVAL_ANNOTATION: &str = "api-approved.kubernetes.io";
    const POLICY_URL: &str = "see https://github.com/kubernetes/enhancements/pull/1111";
    let is_protected = |domain: &str| {
        definition.group.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    if !is_protected("k8s.io") && !is_protected("kubernetes.io") {
        return None;
    }
    let annotation = definition.approval.as_deref().unwrap_or("");
    Some(match annotation {
        "" => {
            let message = format!(
                "protected groups must have approval annotation {APPROVAL_ANNOTATION:?}, {POLICY_URL}"
            );
            new_condition(CONDITION_TYPE, "False", "MissingAnnotation", &message)
        }
        _ if annotation.starts_with("unapproved") => new_condition(
            CONDITION_TYPE,
            "False",
            "UnapprovedAnnotation",
            &format!("not approved: {annotation:?}"),
        ),
        _ if annotation.contains("://") => {
            new_condition(CONDITION_TYPE, "True", "ApprovedAnnotation", &format!("approved in {annotation}"))
        }
        _ => {
            let message = format!(
                "protected groups must have approval annotation {APPROVAL_ANNOTATION:?} with either a URL or a reason starting with \"unapproved\", {POLICY_URL}"
            );
            new_condition(CONDITION_TYPE, "False", "InvalidAnnotation", &message)
        }
    })
}

/// The `Terminating` condition; its status follows from the reason.
pub fn terminating_condition(reason: &str, message: &str) -> Value {
    let status =
        matches!(reason, "InstanceDeletionInProgress" | "InstanceDeletionFailed" | "InstanceDeletionCheck");
    new_condition(TERMINATING_CONDITION, if status { "True" } else { "False" }, reason, message)
}

pub fn new_condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message})
}

/// Sets a condition. The transition time is kept unless the status changes.
pub fn set_condition(conditions: &mut Vec<Value>, mut condition: Value, now: &str) {
    let old = conditions.iter_mut().find(|old| old.text("type") == condition.text("type"));
    let since = match &old {
        Some(old) if old.text("status") == condition.text("status") && old.has("lastTransitionTime") => {
            old.at("lastTransitionTime").clone()
        }
        _ => now.into(),
    };
    condition.set("lastTransitionTime", since);
    match old {
        Some(old) => *old = condition,
        None => conditions.push(condition),
    }
}

pub fn is_condition_true(conditions: &[Value], kind: &str) -> bool {
    conditions.iter().any(|condition| condition.text("type") == kind && condition.text("status") == "True")
}
