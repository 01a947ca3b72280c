//! Whether a pod may run on a node: node selector, node affinity, taints and tolerations.

use crate::Object as _;
use api::selector::{Operator, Requirement};
use k8s_openapi::api::core::v1::{
    Node, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Taint, Toleration,
};

/// Whether the node matches the pod's node selector and required node affinity.
pub fn matches_node_affinity(spec: &PodSpec, node: &Node) -> bool {
    let labels = spec.node_selector.iter().flatten();
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required =
        affinity.and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    labels.into_iter().all(|(key, value)| node.label(key) == Some(value))
        && required
            .is_none_or(|required| required.node_selector_terms.iter().any(|term| matches_term(term, node)))
}

/// A term without requirements matches no node, and neither does a term with an invalid requirement.
fn matches_term(term: &NodeSelectorTerm, node: &Node) -> bool {
    let labels = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let name = |key: &str| (key == "metadata.name").then(|| node.name());
    !(labels.is_empty() && fields.is_empty())
        && labels.iter().all(|expression| matches_requirement(expression, node.label(&expression.key)))
        && fields.iter().all(|expression| matches_requirement(expression, name(&expression.key)))
}

fn matches_requirement(expression: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let operator = match expression.operator.as_str() {
        "In" => Operator::In,
        "NotIn" => Operator::NotIn,
        "Exists" => Operator::Exists,
        "DoesNotExist" => Operator::DoesNotExist,
        "Gt" => Operator::GreaterThan,
        "Lt" => Operator::LessThan,
        _ => return false,
    };
    let values = expression.values.clone().unwrap_or_default();
    Requirement::new(&expression.key, operator, values).is_ok_and(|requirement| requirement.matches(value))
}

/// Returns the first taint with one of these effects that no toleration covers.
pub fn find_untolerated_taint<'a>(
    taints: &'a [Taint],
    tolerations: &[Toleration],
    effects: &[&str],
) -> Option<&'a Taint> {
    taints.iter().filter(|taint| effects.contains(&taint.effect.as_str())).find(|taint| {
        let is_match = |toleration: &Toleration| tolerates(toleration, taint);
        !tolerations.iter().any(is_match)
    })
}

/// Whether a toleration covers a taint.
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let value = toleration.value.as_deref().unwrap_or_default();
    given(&toleration.effect).is_none_or(|effect| effect == taint.effect)
        && given(&toleration.key).is_none_or(|key| key == taint.key)
        && match toleration.operator.as_deref().unwrap_or_default() {
            "" | "Equal" => value == taint.value.as_deref().unwrap_or_default(),
            operator => operator == "Exists",
        }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn check(spec: Value, expected: bool) {
        let mut spec = spec;
        spec["containers"] = json!([]);
        let spec: PodSpec = serde_json::from_value(spec).expect("a spec");
        let node: Node = serde_json::from_value(
            json!({"metadata": {"name": "one", "labels": {"disk": "ssd", "cpus": "8"}}}),
        )
        .expect("a node");
        assert_eq!(matches_node_affinity(&spec, &node), expected);
    }

    #[test]
    fn matches_node_selector_and_affinity() {
        let affinity = |terms: Value| {
            let required =
                json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
            json!({"affinity": {"nodeAffinity": required}})
        };
        let one = |key: &str, operator: &str, values: Value| json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]);
        check(json!({}), true);
        check(json!({"nodeSelector": {"disk": "ssd"}}), true);
        check(json!({"nodeSelector": {"disk": "ssd", "gpu": "x"}}), false);
        check(affinity(json!([])), false);
        check(affinity(json!([{}])), false);
        check(affinity(one("disk", "In", json!(["hdd", "ssd"]))), true);
        check(affinity(one("disk", "NotIn", json!(["ssd"]))), false);
        check(affinity(one("cpus", "Gt", json!(["4"]))), true);
        check(affinity(one("gpu", "DoesNotExist", json!([]))), true);
        check(affinity(one("gpu", "Near", json!([]))), false);
        let field = |name: &str| json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}]);
        check(affinity(field("one")), true);
        check(affinity(field("two")), false);
    }

    #[test]
    fn returns_taint_without_toleration() {
        let taint: Taint = serde_json::from_value(json!({"key": "k", "value": "v", "effect": "NoExecute"}))
            .expect("a taint");
        for (toleration, expected) in [
            (json!({"key": "k", "operator": "Exists"}), true),
            (json!({"operator": "Exists"}), true),
            (json!({"key": "k", "value": "v", "effect": "NoExecute"}), true),
            (json!({"key": "k", "value": "v", "effect": "NoSchedule"}), false),
            (json!({"key": "k"}), false),
            (json!({"key": "k", "value": "v", "operator": "Like"}), false),
        ] {
            let parsed: Toleration = serde_json::from_value(toleration.clone()).expect("a toleration");
            let taints = [taint.clone()];
            assert_eq!(
                find_untolerated_taint(&taints, &[parsed], &["NoExecute"]).is_none(),
                expected,
                "{toleration}"
            );
        }
        assert!(find_untolerated_taint(&[taint], &[], &["NoSchedule"]).is_none());
    }
}
