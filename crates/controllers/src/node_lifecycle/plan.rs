//! Computes the taints and labels of a node. Does no I/O.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::Object;

pub const NOT_READY: &str = "node.kubernetes.io/not-ready";
pub const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
const NO_SCHEDULE: &str = "NoSchedule";
pub const NO_EXECUTE: &str = "NoExecute";

/// `NoSchedule` taints by condition type and status.
const CONDITION_TAINTS: &[(&str, &str, &str)] = &[
    ("Ready", "False", NOT_READY),
    ("Ready", "Unknown", UNREACHABLE),
    ("MemoryPressure", "True", "node.kubernetes.io/memory-pressure"),
    ("DiskPressure", "True", "node.kubernetes.io/disk-pressure"),
    ("NetworkUnavailable", "True", "node.kubernetes.io/network-unavailable"),
    ("PIDPressure", "True", "node.kubernetes.io/pid-pressure"),
];

/// Labels and their deprecated equivalents.
const DEPRECATED_LABELS: &[(&str, &str)] =
    &[("kubernetes.io/os", "beta.kubernetes.io/os"), ("kubernetes.io/arch", "beta.kubernetes.io/arch")];

/// The desired `NoExecute` taint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NoExecuteTaint {
    /// Leave the existing taints unchanged.
    Keep,
    None,
    /// Set this taint and remove the other one.
    For(&'static str),
}

fn spec_taints(node: &Node) -> &[Taint] {
    node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default()
}

pub fn has_taint(node: &Node, key: &str, effect: &str) -> bool {
    spec_taints(node).iter().any(|taint| taint.key == key && taint.effect == effect)
}

/// The new taints of a node, or `None` if they are up to date.
pub fn taints(node: &Node, no_execute: NoExecuteTaint, now: Timestamp) -> Option<Vec<Taint>> {
    let conditions: &[NodeCondition] =
        node.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let of_condition = |condition: &NodeCondition| {
        let row = CONDITION_TAINTS.iter().find(|row| row.0 == condition.type_ && row.1 == condition.status);
        row.map(|row| (row.2, NO_SCHEDULE))
    };
    let mut desired: Vec<(&str, &str)> = conditions.iter().filter_map(of_condition).collect();
    if node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true)) {
        desired.push((UNSCHEDULABLE, NO_SCHEDULE));
    }
    if let NoExecuteTaint::For(key) = no_execute {
        desired.push((key, NO_EXECUTE));
    }
    let is_managed = |taint: &Taint| match taint.effect.as_str() {
        NO_SCHEDULE => taint.key == UNSCHEDULABLE || CONDITION_TAINTS.iter().any(|row| row.2 == taint.key),
        NO_EXECUTE => {
            no_execute != NoExecuteTaint::Keep && [NOT_READY, UNREACHABLE].contains(&taint.key.as_str())
        }
        _ => false,
    };
    let before = spec_taints(node);
    let retained =
        |taint: &&Taint| !is_managed(taint) || desired.contains(&(taint.key.as_str(), taint.effect.as_str()));
    let mut after: Vec<Taint> = before.iter().filter(retained).cloned().collect();
    for (key, effect) in desired {
        if !after.iter().any(|taint| taint.key == key && taint.effect == effect) {
            after.push(Taint {
                key: key.into(),
                effect: effect.into(),
                value: None,
                time_added: Some(Time(now)),
            });
        }
    }
    (after != before).then_some(after)
}

/// The deprecated labels that are missing or wrong.
pub fn labels(node: &Node) -> BTreeMap<&'static str, String> {
    let rows = DEPRECATED_LABELS.iter().filter_map(|(label, deprecated)| {
        let value = node.label(label)?;
        (node.label(deprecated) != Some(value)).then(|| (*deprecated, value.to_owned()))
    });
    rows.collect()
}
