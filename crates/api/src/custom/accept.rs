//! Which names a definition gets, and what its conditions say about it.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::{Definition, Naming};
use crate::json::Json as _;

/// Keeps a definition until all objects of its kind are gone.
pub const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";
pub const TERMINATING: &str = "Terminating";

/// The names that are taken in a group by other definitions.
#[derive(Debug, Default)]
pub struct Names {
    resources: HashSet<String>,
    kinds: HashSet<String>,
}

impl Names {
    pub fn take(&mut self, naming: &Naming) {
        self.resources.insert(naming.plural.clone());
        self.resources.insert(naming.singular.clone());
        self.resources.extend(naming.short_names.iter().cloned());
        self.kinds.insert(naming.kind.clone());
        self.kinds.insert(naming.list_kind.clone());
    }
}

/// The names a definition has from now on, and its conditions. A name that is taken is not given; the others
/// are.
pub fn accepted(definition: &Definition, taken: &Names, now: &str) -> (Naming, Vec<Value>) {
    let (wanted, mut naming) = (&definition.wanted, definition.accepted.clone());
    let mut conflict: Option<(&str, String)> = None;
    let words = |name: &str| format!("{name:?} is already in use");
    let mut give = |wanted: &str, has: &mut String, taken: &HashSet<String>, reason: &'static str| {
        if wanted == has || !taken.contains(wanted) {
            wanted.clone_into(has);
        } else {
            conflict = Some((reason, words(wanted)));
        }
    };
    give(&wanted.plural, &mut naming.plural, &taken.resources, "PluralConflict");
    give(&wanted.singular, &mut naming.singular, &taken.resources, "SingularConflict");
    let clashes: Vec<String> = wanted
        .short_names
        .iter()
        .filter(|name| !definition.accepted.short_names.contains(name) && taken.resources.contains(*name))
        .map(|name| words(name))
        .collect();
    let mut short = None;
    match clashes.as_slice() {
        [] => naming.short_names.clone_from(&wanted.short_names),
        [one] => short = Some(one.clone()),
        many => short = Some(format!("[{}]", many.join(", "))),
    }
    if let Some(message) = short {
        conflict = Some(("ShortNamesConflict", message));
    }
    let mut give = |wanted: &str, has: &mut String, reason: &'static str| {
        if wanted == has || !taken.kinds.contains(wanted) {
            wanted.clone_into(has);
        } else {
            conflict = Some((reason, words(wanted)));
        }
    };
    give(&wanted.kind, &mut naming.kind, "KindConflict");
    give(&wanted.list_kind, &mut naming.list_kind, "ListKindConflict");
    naming.categories.clone_from(&wanted.categories);

    let mut conditions = definition.conditions.clone();
    let good = conflict.is_none();
    let (status, reason, message) = match &conflict {
        Some((reason, message)) => ("False", *reason, message.as_str()),
        None => ("True", "NoConflicts", "no conflicts found"),
    };
    set_condition(&mut conditions, condition("NamesAccepted", status, reason, message), now);
    if !is_true(&conditions, "Established") {
        let established = match good {
            true => condition(
                "Established",
                "True",
                "InitialNamesAccepted",
                "the initial names have been accepted",
            ),
            false => condition("Established", "False", "NotAccepted", "not all names are accepted"),
        };
        set_condition(&mut conditions, established, now);
    }
    if let Some(conformant) = approval(definition) {
        set_condition(&mut conditions, conformant, now);
    }
    (naming, conditions)
}

/// Groups of the Kubernetes project say whether their API has been reviewed.
fn approval(definition: &Definition) -> Option<Value> {
    const KIND: &str = "KubernetesAPIApprovalPolicyConformant";
    const NOTE: &str = "api-approved.kubernetes.io";
    const SEE: &str = "see https://github.com/kubernetes/enhancements/pull/1111";
    let is_protected = |domain: &str| {
        definition.group.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    if !is_protected("k8s.io") && !is_protected("kubernetes.io") {
        return None;
    }
    let note = definition.approval.as_deref().unwrap_or("");
    Some(match note {
        "" => {
            let why = format!("protected groups must have approval annotation {NOTE:?}, {SEE}");
            condition(KIND, "False", "MissingAnnotation", &why)
        }
        _ if note.starts_with("unapproved") => {
            condition(KIND, "False", "UnapprovedAnnotation", &format!("not approved: {note:?}"))
        }
        _ if note.contains("://") => {
            condition(KIND, "True", "ApprovedAnnotation", &format!("approved in {note}"))
        }
        _ => {
            let why = format!(
                "protected groups must have approval annotation {NOTE:?} with either a URL or a reason starting with \"unapproved\", {SEE}"
            );
            condition(KIND, "False", "InvalidAnnotation", &why)
        }
    })
}

/// What the `Terminating` condition says, by its reason.
pub fn terminating(reason: &str, message: &str) -> Value {
    let status =
        matches!(reason, "InstanceDeletionInProgress" | "InstanceDeletionFailed" | "InstanceDeletionCheck");
    condition(TERMINATING, if status { "True" } else { "False" }, reason, message)
}

pub fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message})
}

/// Puts a condition in the place of the one of its type. Its time is that of the last change of its status.
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

pub fn is_true(conditions: &[Value], kind: &str) -> bool {
    conditions.iter().any(|condition| condition.text("type") == kind && condition.text("status") == "True")
}
