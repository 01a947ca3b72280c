//! Parsed node selectors, node affinity, taints and tolerations.

use std::collections::BTreeMap;

use api::selector::{LabelSelector, Operator, Requirement};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;

use super::node::NodeInfo;

/// Parses a typed label selector. An absent one matches nothing, an empty one everything.
pub fn selector(typed: Option<&meta::LabelSelector>) -> Result<LabelSelector, String> {
    let Some(typed) = typed else { return Ok(LabelSelector::nothing()) };
    let mut requirements = Vec::new();
    for (key, value) in typed.match_labels.iter().flatten() {
        requirements.push(requirement(key, Operator::Equals, std::slice::from_ref(value))?);
    }
    for expression in typed.match_expressions.iter().flatten() {
        let operator = match &*expression.operator {
            "In" => Operator::In,
            "NotIn" => Operator::NotIn,
            "Exists" => Operator::Exists,
            "DoesNotExist" => Operator::DoesNotExist,
            other => return Err(format!("{other:?} is not a valid label selector operator")),
        };
        let values = expression.values.as_deref().unwrap_or_default();
        requirements.push(requirement(&expression.key, operator, values)?);
    }
    Ok(LabelSelector::new(requirements))
}

/// Returns the selector for a label map.
pub fn selector_of_set(labels: Option<&BTreeMap<String, String>>) -> LabelSelector {
    let equal = |(key, value): (&String, &String)| Requirement {
        key: key.clone(),
        operator: Operator::Equals,
        values: vec![value.clone()],
    };
    LabelSelector::new(labels.into_iter().flatten().map(equal).collect())
}

fn requirement(key: &str, operator: Operator, values: &[String]) -> Result<Requirement, String> {
    Requirement::new(key, operator, values.to_vec()).map_err(|error| error.to_string())
}

/// A node selector term. Without requirements it matches no node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NodeTerm {
    labels: Vec<Requirement>,
    /// On `metadata.name`, the only supported field.
    fields: Vec<Requirement>,
    /// A requirement is invalid, so the term matches no node.
    is_invalid: bool,
}

impl NodeTerm {
    /// Parses a term. An invalid requirement makes it match nothing.
    pub fn new(term: &core::NodeSelectorTerm) -> NodeTerm {
        let mut is_invalid = false;
        let mut read = |list: Option<&Vec<core::NodeSelectorRequirement>>| {
            let mut requirements = Vec::new();
            for typed in list.into_iter().flatten() {
                let values = typed.values.clone().unwrap_or_default();
                match node_operator(&typed.operator).map(|op| Requirement::new(&typed.key, op, values)) {
                    Some(Ok(requirement)) => requirements.push(requirement),
                    _ => is_invalid = true,
                }
            }
            requirements
        };
        let labels = read(term.match_expressions.as_ref());
        let fields = read(term.match_fields.as_ref());
        NodeTerm { labels, fields, is_invalid }
    }

    /// Whether the term matches the node.
    pub fn matches(&self, node: &NodeInfo) -> bool {
        if self.is_invalid || (self.labels.is_empty() && self.fields.is_empty()) {
            return false;
        }
        let field = |key: &str| (key == "metadata.name").then_some(&*node.name);
        self.labels.iter().all(|requirement| requirement.matches(node.labels.get(&requirement.key)))
            && self.fields.iter().all(|requirement| requirement.matches(field(&requirement.key)))
    }

    /// The node names in the term's `matchFields`, if it has any.
    pub fn names(&self) -> Option<Vec<&str>> {
        let mut lists = self
            .fields
            .iter()
            .filter(|requirement| requirement.key == "metadata.name" && requirement.operator == Operator::In)
            .map(|requirement| &requirement.values);
        let mut names: Vec<&str> = lists.next()?.iter().map(String::as_str).collect();
        for list in lists {
            names.retain(|name| list.iter().any(|other| other == name));
        }
        Some(names)
    }
}

fn node_operator(name: &str) -> Option<Operator> {
    Some(match name {
        "In" => Operator::In,
        "NotIn" => Operator::NotIn,
        "Exists" => Operator::Exists,
        "DoesNotExist" => Operator::DoesNotExist,
        "Gt" => Operator::GreaterThan,
        "Lt" => Operator::LessThan,
        _ => return None,
    })
}

/// A node selector: a node must match one of the terms.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NodeSelector(pub Box<[NodeTerm]>);

impl NodeSelector {
    /// Parses a node selector.
    pub fn new(typed: &core::NodeSelector) -> NodeSelector {
        NodeSelector(typed.node_selector_terms.iter().map(NodeTerm::new).collect())
    }

    /// Whether the node matches one of the terms.
    pub fn matches(&self, node: &NodeInfo) -> bool {
        self.0.iter().any(|term| term.matches(node))
    }
}

/// A pod's node selector and node affinity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSelection {
    /// `spec.nodeSelector`.
    pub labels: Option<LabelSelector>,
    /// Required node affinity.
    pub required: Option<NodeSelector>,
    /// Preferred node affinity with weights.
    pub preferred: Box<[(i32, NodeTerm)]>,
}

impl NodeSelection {
    /// Parses a pod's node selector and node affinity.
    pub fn of(spec: &core::PodSpec) -> NodeSelection {
        let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
        let preferred =
            affinity.and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_deref());
        NodeSelection {
            labels: spec.node_selector.as_ref().map(|labels| selector_of_set(Some(labels))),
            required: required.map(NodeSelector::new),
            preferred: weighted(preferred.unwrap_or_default()),
        }
    }

    /// Whether the pod has no required node selection.
    pub fn matches_all_nodes(&self) -> bool {
        self.labels.is_none() && self.required.is_none()
    }

    /// Whether the node satisfies the required node selection.
    pub fn allows(&self, node: &NodeInfo) -> bool {
        self.labels.as_ref().is_none_or(|selector| node.labels.matched_by(selector))
            && self.required.as_ref().is_none_or(|required| required.matches(node))
    }
}

/// Parses preferred terms. Terms with weight 0 are dropped.
pub fn weighted(terms: &[core::PreferredSchedulingTerm]) -> Box<[(i32, NodeTerm)]> {
    let with_weight = terms.iter().filter(|term| term.weight != 0);
    with_weight.map(|term| (term.weight, NodeTerm::new(&term.preference))).collect()
}

/// The effect of a taint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    NoSchedule,
    PreferNoSchedule,
    NoExecute,
}

impl Effect {
    fn read(text: &str) -> Option<Effect> {
        Some(match text {
            "NoSchedule" => Effect::NoSchedule,
            "PreferNoSchedule" => Effect::PreferNoSchedule,
            "NoExecute" => Effect::NoExecute,
            _ => return None,
        })
    }
}

/// A taint of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taint {
    pub key: Box<str>,
    pub value: Box<str>,
    pub effect: Effect,
}

impl Taint {
    /// Parses a taint; `None` if its effect is unknown.
    pub fn read(typed: &core::Taint) -> Option<Taint> {
        Some(Taint {
            key: (&*typed.key).into(),
            value: typed.value.as_deref().unwrap_or_default().into(),
            effect: Effect::read(&typed.effect)?,
        })
    }

    /// Whether the effect is NoSchedule or NoExecute.
    pub fn is_do_not_schedule(&self) -> bool {
        self.effect != Effect::PreferNoSchedule
    }
}

/// A toleration of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Toleration {
    key: Box<str>,
    /// `None` tolerates any value.
    value: Option<Box<str>>,
    /// `None` tolerates any effect.
    pub effect: Option<Effect>,
}

impl Toleration {
    /// Parses a toleration; `None` if it is invalid.
    pub fn read(typed: &core::Toleration) -> Option<Toleration> {
        let value = match typed.operator.as_deref().unwrap_or_default() {
            "" | "Equal" => Some(typed.value.as_deref().unwrap_or_default().into()),
            "Exists" => None,
            _ => return None,
        };
        let effect = match typed.effect.as_deref().unwrap_or_default() {
            "" => None,
            effect => Some(Effect::read(effect)?),
        };
        Some(Toleration { key: typed.key.as_deref().unwrap_or_default().into(), value, effect })
    }

    /// Whether it tolerates the taint.
    pub fn tolerates(&self, taint: &Taint) -> bool {
        self.effect.is_none_or(|effect| effect == taint.effect)
            && (self.key.is_empty() || self.key == taint.key)
            && self.value.as_ref().is_none_or(|value| *value == taint.value)
    }
}

/// Whether all NoSchedule and NoExecute taints are tolerated.
pub fn tolerates_taints(taints: &[Taint], tolerations: &[Toleration]) -> bool {
    let has_toleration = |taint: &Taint| tolerations.iter().any(|toleration| toleration.tolerates(taint));
    taints.iter().filter(|taint| taint.is_do_not_schedule()).all(has_toleration)
}
