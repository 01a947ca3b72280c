//! Kubelet admission: decides whether this node accepts a pod that was assigned to it. The
//! scheduler makes the same checks, but pods can be bound without it, and two schedulers can assign
//! pods at the same time.
//!
//! Upstream: `pkg/kubelet/lifecycle/predicate.go` and the eviction manager's `Admit`.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::resources::{ResourceList, add_resources, pod_resources, pod_resources_in_use, resource_list};
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod, PodSpec, Taint};
use reconcile::Object as _;
use reconcile::placement::{find_untolerated_taint, matches_node_affinity, tolerates};
use schema::quantity::Quantity;
use serde_json::{Value, json};

use crate::manifests::MIRROR_ANNOTATION;
use crate::pod::resource_spec;
use crate::runtime_features::RuntimeCapabilities;

/// The lowest priority of a critical pod (`scheduling.SystemCriticalPriority`).
const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// Why the node rejects a pod: the reason and message of the pod status, as upstream has them.
#[derive(Debug, PartialEq, Eq)]
pub struct AdmissionFailure {
    pub reason: String,
    pub message: String,
}

/// Checks a pod against the pods that are admitted already.
pub fn admit(
    pod: &Pod,
    node: &Node,
    others: &[Arc<Pod>],
    runtime: &RuntimeCapabilities,
) -> Option<AdmissionFailure> {
    let spec = pod.spec.as_ref()?;
    if let Some(rejection) = check_os(pod, spec) {
        return Some(rejection);
    }
    let is_static = pod.annotation(MIRROR_ANNOTATION).is_some();
    let is_critical = is_static || spec.priority.is_some_and(|priority| priority >= SYSTEM_CRITICAL_PRIORITY);
    // Upstream evicts other pods to make room for a critical pod. Here a critical pod skips the
    // resource check.
    if !is_critical && let Some(rejection) = check_resources(pod, node, others) {
        return Some(rejection);
    }
    let strict =
        spec.security_context.as_ref().and_then(|context| context.supplemental_groups_policy.as_deref());
    if strict == Some("Strict") && !runtime.strict_groups {
        return Some(AdmissionFailure {
            reason: "SupplementalGroupsPolicyNotSupported".to_owned(),
            message: "SupplementalGroupsPolicy=Strict is not supported in this node".to_owned(),
        });
    }
    let failed = |name: &str, why: &str| {
        Some(AdmissionFailure { reason: name.to_owned(), message: format!("Predicate {name} failed: {why}") })
    };
    if !matches_node_affinity(spec, node) {
        return failed("NodeAffinity", "node(s) didn't match Pod's node affinity/selector");
    }
    let requested_ports = host_ports(spec);
    let taken: Vec<HostPort<'_>> =
        others.iter().filter_map(|other| other.spec.as_ref()).flat_map(host_ports).collect();
    if requested_ports.iter().any(|port| taken.iter().any(|other| port.conflicts_with(other))) {
        return failed("NodePorts", "node(s) didn't have free ports for the requested pod ports");
    }
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    if !is_static && find_untolerated_taint(taints, tolerations, &["NoExecute"]).is_some() {
        return failed("TaintToleration", "node(s) had taints that the pod didn't tolerate");
    }
    None
}

/// Rejects a pod while the node is under memory, disk or PID pressure. Critical pods are always
/// accepted. If only memory is short, so are pods that are not best effort and pods that tolerate
/// the memory pressure taint.
pub fn admit_under_pressure(pod: &Pod, [memory, disk, processes]: [bool; 3]) -> Option<AdmissionFailure> {
    let conditions = [(disk, "DiskPressure"), (memory, "MemoryPressure"), (processes, "PIDPressure")];
    let conditions: Vec<&str> =
        conditions.into_iter().filter_map(|(holds, condition)| holds.then_some(condition)).collect();
    if conditions.is_empty() || !crate::maintenance::eviction::can_be_evicted(pod) {
        return None;
    }
    if conditions == ["MemoryPressure"] && allows_memory_pressure(pod) {
        return None;
    }
    let message = format!("The node had condition: [{}]. ", conditions.join(" "));
    Some(AdmissionFailure { reason: crate::EVICTED_REASON.to_owned(), message })
}

fn allows_memory_pressure(pod: &Pod) -> bool {
    let key = "node.kubernetes.io/memory-pressure".to_owned();
    let taint = Taint { key, effect: "NoSchedule".to_owned(), ..Taint::default() };
    let class = pod.status.as_ref().and_then(|status| status.qos_class.as_deref());
    let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref());
    class != Some("BestEffort")
        || tolerations.unwrap_or_default().iter().any(|toleration| tolerates(toleration, &taint))
}

fn check_os(pod: &Pod, spec: &PodSpec) -> Option<AdmissionFailure> {
    let rejection = |reason: &str, message: &str| AdmissionFailure {
        reason: reason.to_owned(),
        message: message.to_owned(),
    };
    if pod.label("kubernetes.io/os").is_some_and(|system| system != "linux") {
        let message = "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label";
        return Some(rejection("PodOSSelectorNodeLabelDoesNotMatch", message));
    }
    let other = spec.os.as_ref().is_some_and(|system| system.name != "linux");
    other.then(|| rejection("PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS"))
}

/// Checks the requests of the pod. Returns the first resource of which there is not enough.
fn check_resources(pod: &Pod, node: &Node, others: &[Arc<Pod>]) -> Option<AdmissionFailure> {
    // A node that has not reported its allocatable resources yet accepts every request.
    let allocatable = node.status.as_ref()?.allocatable.as_ref()?;
    let amount = |text: &String| Quantity::parse(text).ok();
    let has: BTreeMap<&str, Quantity> =
        allocatable.iter().filter_map(|(name, has)| Some((name.as_str(), amount(&has.0)?))).collect();
    let rejection = |name: &str, requested: i64, used: i64, capacity: i64| AdmissionFailure {
        reason: format!("OutOf{name}"),
        message: format!(
            "Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity}"
        ),
    };
    let max_pods = has.get("pods").map_or(0, Quantity::value);
    let pod_count = i64::try_from(others.len()).unwrap_or(i64::MAX);
    if pod_count >= max_pods {
        return Some(rejection("pods", 1, pod_count, max_pods));
    }
    let requested_resources = requests(&resource_spec(pod));
    let mut used = ResourceList::new();
    for other in others {
        add_resources(&mut used, &allocated_resources(other));
    }
    // The same order as upstream: the well-known resources first.
    let known = ["cpu", "memory", "ephemeral-storage"];
    let rest = requested_resources.keys().map(String::as_str).filter(|name| !known.contains(name));
    known.into_iter().chain(rest).find_map(|name| {
        let amount_of = |quantity: &Quantity| if name == "cpu" { quantity.milli() } else { quantity.value() };
        let request = requested_resources.get(name).map_or(0, amount_of);
        // The node does not advertise this resource. Upstream ignores such requests as
        // cluster-level resources.
        let capacity = match has.get(name) {
            Some(has) => amount_of(has),
            None if known.contains(&name) => 0,
            None => return None,
        };
        let used = used.get(name).map_or(0, amount_of);
        (request > 0 && request > capacity.saturating_sub(used))
            .then(|| rejection(name, request, used, capacity))
    })
}

/// The resource requests of a pod, including its overhead. `needs` is the pod spec in JSON.
pub fn requests(needs: &Value) -> ResourceList {
    let mut sum = pod_resources(needs, "requests");
    add_resources(&mut sum, &resource_list(needs, "overhead"));
    sum
}

/// The resources that count for an admitted pod: during a resize the highest of the requested,
/// allocated and actual amounts. A pod that shrinks keeps its old share until its status reports
/// the new one.
fn allocated_resources(pod: &Pod) -> ResourceList {
    let status = pod.status.as_ref();
    let container_statuses = |list: Option<&Vec<ContainerStatus>>| -> Value {
        let one = |container: &ContainerStatus| json!({"name": container.name, "resources": container.resources, "allocatedResources": container.allocated_resources});
        list.into_iter().flatten().map(one).collect()
    };
    let pod = json!({
        "spec": resource_spec(pod),
        "status": {
            "conditions": status.map(|status| &status.conditions),
            "containerStatuses": container_statuses(status.and_then(|status| status.container_statuses.as_ref())),
            "initContainerStatuses": container_statuses(status.and_then(|status| status.init_container_statuses.as_ref())),
            "resources": status.map(|status| &status.resources),
            "allocatedResources": status.map(|status| &status.allocated_resources),
        },
    });
    let mut sum = pod_resources_in_use(&pod, "requests");
    add_resources(&mut sum, &resource_list(&pod["spec"], "overhead"));
    sum
}

struct HostPort<'a> {
    ip: &'a str,
    protocol: &'a str,
    number: i32,
}

impl HostPort<'_> {
    fn conflicts_with(&self, other: &HostPort<'_>) -> bool {
        let any = |port: &HostPort<'_>| port.ip == "0.0.0.0";
        self.number == other.number
            && self.protocol == other.protocol
            && (self.ip == other.ip || any(self) || any(other))
    }
}

/// The host ports of the pod's regular and sidecar containers.
fn host_ports(spec: &PodSpec) -> Vec<HostPort<'_>> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let ports = sidecars.chain(&spec.containers).flat_map(|container| container.ports.iter().flatten());
    ports
        .filter_map(|port| {
            Some(HostPort {
                ip: port.host_ip.as_deref().filter(|ip| !ip.is_empty()).unwrap_or("0.0.0.0"),
                protocol: port.protocol.as_deref().filter(|text| !text.is_empty()).unwrap_or("TCP"),
                number: port.host_port.filter(|number| *number > 0)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: Value) -> Pod {
        let mut whole = json!({"metadata": {"name": "p"}, "spec": spec});
        if whole["spec"].get("containers").is_none() {
            whole["spec"]["containers"] = json!([{"name": "c"}]);
        }
        serde_json::from_value(whole).expect("a pod")
    }

    fn pod_with_requests(port: Value, requests: Value) -> Pod {
        pod(json!({"containers": [{"name": "c", "ports": [port], "resources": {"requests": requests}}]}))
    }

    #[track_caller]
    fn check(pod: &Pod, others: &[Pod], expected: Option<(&str, &str)>) {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n", "labels": {"disk": "ssd"}},
            "spec": {"taints": [{"key": "gone", "effect": "NoExecute"}, {"key": "full", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"cpu": "2", "memory": "1Gi", "pods": "3", "example.com/gpu": "1"}},
        }))
        .expect("a node");
        let others: Vec<Arc<Pod>> = others.iter().cloned().map(Arc::new).collect();
        let found = admit(pod, &node, &others, &RuntimeCapabilities::default())
            .map(|rejection| (rejection.reason, rejection.message));
        assert_eq!(found.as_ref().map(|(reason, message)| (reason.as_str(), message.as_str())), expected);
    }

    fn with_toleration(mut pod: Pod) -> Pod {
        let toleration = serde_json::from_value(json!({"operator": "Exists"})).expect("a toleration");
        pod.spec.as_mut().expect("a spec").tolerations = Some(vec![toleration]);
        pod
    }

    #[test]
    fn rejects_conflicting_host_ports() {
        let port = |number: i32, ip: &str, protocol: &str| {
            let port = json!({"containerPort": 80, "hostPort": number, "hostIP": ip, "protocol": protocol});
            with_toleration(pod_with_requests(port, json!({})))
        };
        let taken = "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
        let first = [port(80, "", "TCP")];
        check(&port(80, "", "TCP"), &first, Some(("NodePorts", taken)));
        check(&port(80, "10.0.0.1", ""), &first, Some(("NodePorts", taken)));
        check(&port(80, "", "UDP"), &first, None);
        check(&port(81, "", "TCP"), &first, None);
        check(&port(80, "10.0.0.1", "TCP"), &[port(80, "10.0.0.2", "TCP")], None);
    }

    #[test]
    fn rejects_pods_by_qos_class_under_node_pressure() {
        const MEMORY: [bool; 3] = [true, false, false];
        const DISK: [bool; 3] = [false, true, false];
        const PROCESSES: [bool; 3] = [false, false, true];
        let check = |class: &str, spec: Value, pressures: [bool; 3], expected: Option<&str>| {
            let mut pod = pod(spec);
            pod.status.get_or_insert_default().qos_class = Some(class.to_owned());
            let found = admit_under_pressure(&pod, pressures);
            assert!(found.iter().all(|rejection| rejection.reason == "Evicted"));
            assert_eq!(
                found.map(|rejection| rejection.message).as_deref(),
                expected,
                "{class} {pressures:?}"
            );
        };
        let plain = || json!({});
        let tolerates_key = |key: &str| json!({"tolerations": [{"key": key, "operator": "Exists"}]});
        check("BestEffort", plain(), [false; 3], None);
        check("BestEffort", plain(), MEMORY, Some("The node had condition: [MemoryPressure]. "));
        check("Burstable", plain(), MEMORY, None);
        check("BestEffort", tolerates_key("node.kubernetes.io/memory-pressure"), MEMORY, None);
        let disk = Some("The node had condition: [DiskPressure]. ");
        check(
            "BestEffort",
            tolerates_key("node.kubernetes.io/disk-pressure"),
            MEMORY,
            Some("The node had condition: [MemoryPressure]. "),
        );
        check("Burstable", tolerates_key("node.kubernetes.io/disk-pressure"), DISK, disk);
        check("Guaranteed", plain(), DISK, disk);
        check("Guaranteed", plain(), PROCESSES, Some("The node had condition: [PIDPressure]. "));
        let all = Some("The node had condition: [DiskPressure MemoryPressure PIDPressure]. ");
        check("Guaranteed", plain(), [true; 3], all);
        let both_conditions = Some("The node had condition: [DiskPressure MemoryPressure]. ");
        check(
            "Burstable",
            tolerates_key("node.kubernetes.io/memory-pressure"),
            [true, true, false],
            both_conditions,
        );
        check("BestEffort", json!({"priority": SYSTEM_CRITICAL_PRIORITY}), [true; 3], None);
    }

    #[test]
    fn rejects_pods_above_allocatable_resources() {
        let wants =
            |requests: Value| with_toleration(pod_with_requests(json!({"containerPort": 80}), requests));
        let cpu = |amount: &str| wants(json!({"cpu": amount}));
        let message = "Node didn't have enough resource: cpu, requested: 1500, used: 1000, capacity: 2000";
        check(&cpu("1500m"), &[cpu("1")], Some(("OutOfcpu", message)));
        check(&cpu("1"), &[cpu("1")], None);
        let message =
            "Node didn't have enough resource: memory, requested: 2147483648, used: 0, capacity: 1073741824";
        check(&wants(json!({"memory": "2Gi"})), &[], Some(("OutOfmemory", message)));
        let message = "Node didn't have enough resource: example.com/gpu, requested: 2, used: 0, capacity: 1";
        check(&wants(json!({"example.com/gpu": "2"})), &[], Some(("OutOfexample.com/gpu", message)));
        check(&wants(json!({"example.com/unknown": "2"})), &[], None);
        let message = "Node didn't have enough resource: pods, requested: 1, used: 3, capacity: 3";
        check(&cpu("0"), &[cpu("0"), cpu("0"), cpu("0")], Some(("OutOfpods", message)));
        let mut critical = cpu("3");
        critical.spec.as_mut().expect("a spec").priority = Some(SYSTEM_CRITICAL_PRIORITY);
        check(&critical, &[], None);
    }

    #[test]
    fn rejects_pods_by_node_selector_taint_and_os() {
        check(&with_toleration(pod(json!({"nodeSelector": {"disk": "ssd"}}))), &[], None);
        check(
            &with_toleration(pod(json!({"nodeSelector": {"disk": "hdd"}}))),
            &[],
            Some((
                "NodeAffinity",
                "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
            )),
        );
        let taints = "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate";
        check(&pod(json!({})), &[], Some(("TaintToleration", taints)));
        let mut fixed = pod(json!({}));
        fixed.metadata.annotations = Some(BTreeMap::from([(MIRROR_ANNOTATION.to_owned(), "x".to_owned())]));
        check(&fixed, &[], None);
        let os = "Failed to admit pod as the OS field doesn't match node OS";
        check(
            &with_toleration(pod(json!({"os": {"name": "windows"}}))),
            &[],
            Some(("PodOSNotSupported", os)),
        );
    }
}
