//! The pods of a DaemonSet: additions to the template, the node decision and the target node.

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{
    Affinity, Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec, Toleration,
};
use reconcile::{Object as _, placement};

use crate::history::POD_REVISION;
use crate::{pod, template};

const GENERATION_LABEL: &str = "pod-template-generation";
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";
/// Tolerations added to every daemon pod, so that node problems neither evict it nor keep it from starting.
const DAEMON_TOLERATIONS: [(&str, &str); 6] = [
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
];
const HOST_NETWORK_TOLERATION: (&str, &str) = ("node.kubernetes.io/network-unavailable", "NoSchedule");

/// What a DaemonSet decides for a node (upstream's `NodeShouldRunDaemonPod`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeDecision {
    /// The node should have a pod.
    Run,
    /// The node gets no new pod, but an existing one may stay (untolerated `NoSchedule` taint).
    ContinueRunning,
    /// The node should not have a pod.
    NotRun,
}

/// Decides whether a node should run a pod of the set.
pub fn node_should_run_daemon_pod(set: &DaemonSet, node: &Node) -> NodeDecision {
    let Some(spec) = template_spec(set) else { return NodeDecision::NotRun };
    let name = spec.node_name.as_deref().unwrap_or_default();
    if !(name.is_empty() || name == node.name()) || !placement::matches_node_affinity(spec, node) {
        return NodeDecision::NotRun;
    }
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    let tolerations = tolerations(spec);
    let free = |effects: &[&str]| placement::find_untolerated_taint(taints, &tolerations, effects).is_none();
    match (free(&["NoExecute", "NoSchedule"]), free(&["NoExecute"])) {
        (true, _) => NodeDecision::Run,
        (false, true) => NodeDecision::ContinueRunning,
        (false, false) => NodeDecision::NotRun,
    }
}

fn template_spec(set: &DaemonSet) -> Option<&PodSpec> {
    set.spec.as_ref()?.template.spec.as_ref()
}

/// The tolerations of the template plus those added to every daemon pod.
fn tolerations(spec: &PodSpec) -> Vec<Toleration> {
    let mut all = spec.tolerations.clone().unwrap_or_default();
    let network = (spec.host_network == Some(true)).then_some(HOST_NETWORK_TOLERATION);
    for (key, effect) in DAEMON_TOLERATIONS.into_iter().chain(network) {
        let desired = Toleration {
            key: Some(key.to_owned()),
            operator: Some("Exists".to_owned()),
            effect: Some(effect.to_owned()),
            ..Toleration::default()
        };
        // As upstream: tolerations are compared without `tolerationSeconds`.
        let same = |known: &Toleration| Toleration { toleration_seconds: None, ..known.clone() } == desired;
        match all.iter_mut().find(|known| same(known)) {
            Some(known) => *known = desired,
            None => all.push(desired),
        }
    }
    all
}

/// Builds the pod for a node. A node affinity by name lets the default scheduler bind it to that node only.
pub fn pod(set: &DaemonSet, node: &str, hash: &str) -> Pod {
    let mut pod = match &set.spec {
        Some(spec) => template::pod_from_template(set, &spec.template),
        None => Pod::default(),
    };
    let labels = pod.metadata.labels.get_or_insert_default();
    if let Some(generation) = template_generation(set) {
        labels.insert(GENERATION_LABEL.to_owned(), generation.to_owned());
    }
    labels.insert(POD_REVISION.to_owned(), hash.to_owned());
    let spec = pod.spec.get_or_insert_default();
    spec.tolerations = Some(tolerations(spec));
    let affinity: &mut Affinity = spec.affinity.get_or_insert_default();
    let only = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    let term = NodeSelectorTerm { match_fields: Some(vec![only]), match_expressions: None };
    affinity.node_affinity.get_or_insert_default().required_during_scheduling_ignored_during_execution =
        Some(NodeSelector { node_selector_terms: vec![term] });
    pod
}

fn template_generation(set: &DaemonSet) -> Option<&str> {
    set.annotation(TEMPLATE_GENERATION).filter(|text| text.parse::<i64>().is_ok())
}

/// The node that a pod runs on or, through its node affinity, is meant for.
pub fn target_node(pod: &Pod) -> Option<&str> {
    if !pod::node(pod).is_empty() {
        return Some(pod::node(pod));
    }
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity.required_during_scheduling_ignored_during_execution.as_ref()?;
    let fields = required.node_selector_terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    let names = fields
        .filter(|field| field.key == "metadata.name" && field.operator == "In")
        .find_map(|field| field.values.as_ref())?;
    match names.as_slice() {
        [name] => Some(name),
        _ => None,
    }
}

/// Whether a pod is of the current template.
pub fn is_updated(pod: &Pod, set: &DaemonSet, hash: &str) -> bool {
    let generation = template_generation(set);
    pod.label(POD_REVISION) == Some(hash) || generation.is_some() && pod.label(GENERATION_LABEL) == generation
}
