//! The Node object: registration, status updates and the lease.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node as ApiNode, NodeAddress, NodeCondition, NodeDaemonEndpoints,
    NodeSpec, NodeStatus, NodeSystemInfo, Taint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference, Time};
use reconcile::{Error, EventType, Key, Object as _, Patch};
use serde_json::json;
use tokio::sync::Notify;

use crate::runtime_features::{self, RuntimeCapabilities};
use crate::{Node, NodeReservation, enqueue_all, huge_pages, network};

const LEASE_SECONDS: i32 = 40;
/// The status is computed on each housekeeping tick. It is written if it has changed, or after this
/// many seconds.
const STATUS_REPORT_SECONDS: i64 = 300;
/// The status is computed more often until the node is ready, because pods may wait for that.
const UNREADY_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The first delay after a failed lease renewal. It doubles each time, but is not longer than until
/// the next tick.
const INITIAL_LEASE_RETRY: Duration = Duration::from_millis(200);
const CONFLICT_RETRY: Duration = Duration::from_millis(50);
const KUBELET_VERSION: &str = "v1.36.4";
/// Features that the node declares to the scheduler and to admission: streams to containers are not
/// translated, including WebSockets; pod-level resources and init containers can be resized in
/// place; and the exit of one container may restart all.
const DECLARED_FEATURES: [&str; 4] = [
    "ExtendWebSocketsToKubelet",
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];
/// Reasons and messages of each pressure condition: without pressure, and with it.
const PRESSURE_CONDITIONS: [(&str, [&str; 2], [&str; 2]); 3] = [
    (
        "MemoryPressure",
        ["KubeletHasSufficientMemory", "KubeletHasInsufficientMemory"],
        ["kubelet has sufficient memory available", "kubelet has insufficient memory available"],
    ),
    (
        "DiskPressure",
        ["KubeletHasNoDiskPressure", "KubeletHasDiskPressure"],
        ["kubelet has no disk pressure", "kubelet has disk pressure"],
    ),
    (
        "PIDPressure",
        ["KubeletHasSufficientPID", "KubeletHasInsufficientPID"],
        ["kubelet has sufficient PID available", "kubelet has insufficient PID available"],
    ),
];
const MAX_REPORTED_IMAGES: usize = 50;
/// Set if volumes are attached by the attach/detach controller and not by the kubelet.
const CONTROLLER_MANAGED_ATTACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// How the node registers itself, and what its status contains.
#[derive(Clone, Debug, Default)]
pub struct NodeRegistration {
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub max_pods: u32,
    pub reserved: NodeReservation,
    /// The port of the kubelet's API.
    pub port: u16,
    /// The kubelet does not create the Node object (`registerNode: false`).
    pub is_registered_externally: bool,
    /// An external cloud provider sets the node's addresses and removes its `uninitialized` taint.
    pub has_external_cloud_provider: bool,
    /// The ID of the node at the cloud provider.
    pub provider_id: String,
    /// How often the status is computed, if not on each tick (`nodeStatusUpdateFrequency`).
    pub status_update_frequency: Option<Duration>,
    /// How often an unchanged status is written (`nodeStatusReportFrequency`).
    pub status_report_frequency: Option<Duration>,
    /// The duration of the lease (`nodeLeaseDurationSeconds`).
    pub lease_seconds: Option<i32>,
    /// The limit of pods by the number of cores (`podsPerCore`), if it is lower than `max_pods`.
    pub max_pods_by_cores: Option<u32>,
    /// The maximum number of images in the status: 50 by default, all if it is negative
    /// (`nodeStatusMaxImages`).
    pub max_reported_images: Option<i64>,
    /// Logs, exec, attach and port-forward are disabled (`enableDebuggingHandlers: false`).
    pub debug_handlers_disabled: bool,
}

/// Registers the node, then keeps its status and lease up to date.
pub async fn run(node: &Node) {
    let nodes = node.ctx.caches.nodes().clone();
    nodes.wait_for_sync().await;
    let mut address = node.settings.node_ip.clone();
    let mut start_reported = false;
    tokio::join!(
        async {
            loop {
                let retry_after = match sync_node_status(node, &mut start_reported).await {
                    Ok(true) => None,
                    Ok(false) => Some(UNREADY_POLL_INTERVAL),
                    // Other components also write to a new node. Its first status must not wait for
                    // the next tick.
                    Err(error) if error.is_conflict() => Some(CONFLICT_RETRY),
                    Err(error) => {
                        tracing::warn!(%error, "node status update failed, will retry");
                        None
                    }
                };
                let pause = async {
                    match retry_after {
                        Some(pause) => tokio::time::sleep(pause).await,
                        None => match node.presentation.status_update_frequency {
                            Some(pause) => tokio::time::sleep(pause).await,
                            None => node.housekeeping_ticker.tick().await,
                        },
                    }
                };
                tokio::select! {
                    () = pause => {}
                    // CSI volumes are not mounted before the status lists them as in use.
                    () = node.csi.in_use_changed.notified() => {}
                    () = node.devices.devices_changed.notified() => {}
                    Ok(()) = address.changed() => {
                        // The status of a pod has the host IP, which is the pod IP with
                        // `hostNetwork`.
                        enqueue_all(node);
                    }
                }
            }
        },
        keep_lease(node)
    );
}

/// Renews the lease on each tick. It is created as soon as the Node object exists, also after that
/// was recreated.
async fn keep_lease(node: &Node) {
    let node_created = Arc::new(Notify::new());
    let (notify, own) = (node_created.clone(), node.settings.node_name.clone());
    node.ctx.caches.nodes().listen(move |changed| {
        let uid = |node: Option<&Arc<ApiNode>>| node.map(|node| node.uid().to_owned());
        if changed.latest().name() == own && uid(changed.before) != uid(changed.after) {
            notify.notify_one();
        }
    });
    let mut pause: Option<Duration> = None;
    loop {
        // The first attempt may fail, because other components create what the lease needs.
        pause = renew_lease(node).await.err().map(|error| {
            tracing::warn!(%error, "node lease renewal failed, will retry");
            pause.map_or(INITIAL_LEASE_RETRY, |pause| pause.saturating_mul(2))
        });
        let retry = async {
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        };
        // Four renewals should fit into the duration of the lease.
        let renew_early = async {
            match node.presentation.lease_seconds.and_then(|seconds| u64::try_from(seconds).ok()) {
                Some(seconds @ ..40) => tokio::time::sleep(Duration::from_millis(seconds * 250)).await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            () = node.housekeeping_ticker.tick() => {}
            () = retry => {}
            () = renew_early => {}
            () = node_created.notified() => {}
        }
    }
}

/// Updates the node's status. Returns whether the node is ready. The event about the start is
/// recorded once.
async fn sync_node_status(node: &Node, start_reported: &mut bool) -> Result<bool, Error> {
    let key = Key::new("", &node.settings.node_name);
    let current = match node.ctx.caches.nodes().get(&key) {
        Some(current) => ApiNode::clone(&current),
        // Another component creates it.
        None if node.presentation.is_registered_externally => return Ok(true),
        None => node.ctx.create(&initial_node(node)).await?,
    };
    if !std::mem::replace(start_reported, true) {
        for (severity, reason, message) in startup_events(&current, &boot_id()) {
            node.ctx.events.record(reconcile::reference(&current), severity, reason, message);
        }
    }
    if current.annotation(CONTROLLER_MANAGED_ATTACH).is_none() {
        let annotation = json!({"metadata": {"annotations": {CONTROLLER_MANAGED_ATTACH: "true"}}});
        node.ctx.client.patch::<ApiNode>(&key, &Patch::Merge(annotation)).await?;
        return Ok(false);
    }
    let status = status(node, &current).await;
    let is_ready = |condition: &NodeCondition| condition.type_ == "Ready" && condition.status == "True";
    let ready = status.conditions.iter().flatten().any(is_ready);
    let ranges = current.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_deref()).unwrap_or_default();
    if !ready || network::ranges_changed(node, ranges) {
        network::configure(node, ranges).await;
    }
    record_condition_changes(node, &current, &status);
    if needs_update(current.status.as_ref(), &status, node) {
        node.ctx.replace_status(&ApiNode { status: Some(status), ..current }).await?;
    }
    Ok(ready)
}

/// The event about the start of the kubelet, and one about a reboot if the last status has another
/// boot ID.
fn startup_events(node: &ApiNode, boot_id: &str) -> Vec<(EventType, &'static str, String)> {
    let mut events = vec![(EventType::Normal, "Starting", "Starting kubelet.".to_owned())];
    let known = node.status.as_ref().and_then(|status| status.node_info.as_ref());
    if known.is_some_and(|known| !known.boot_id.is_empty() && known.boot_id != boot_id) {
        let message = format!("Node {} has been rebooted, boot id: {boot_id}", node.name());
        events.push((EventType::Warning, "Rebooted", message));
    }
    events
}

/// Records events about changed conditions.
fn record_condition_changes(node: &Node, before: &ApiNode, now: &NodeStatus) {
    let known = before.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    for condition in now.conditions.iter().flatten() {
        let was = known.iter().find(|was| was.type_ == condition.type_).map(|was| was.status.as_str());
        if was == Some(&condition.status) {
            continue;
        }
        let reason = match (condition.type_.as_str(), condition.status.as_str()) {
            ("Ready", "True") => "NodeReady".to_owned(),
            // A new node has not become unready.
            ("Ready", _) if was.is_none() => continue,
            ("Ready", _) => "NodeNotReady".to_owned(),
            _ => condition.reason.clone().unwrap_or_default().replace("Kubelet", "Node"),
        };
        let message = format!("Node {} status is now: {reason}", node.settings.node_name);
        node.ctx.events.normal(before, &reason, message);
    }
}

fn initial_node(node: &Node) -> ApiNode {
    let name = &node.settings.node_name;
    let mut labels: BTreeMap<String, String> = [
        ("beta.kubernetes.io/arch", arch()),
        ("beta.kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", arch()),
        ("kubernetes.io/hostname", name),
        ("kubernetes.io/os", "linux"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into();
    labels.extend(node.presentation.labels.clone());
    let mut taints = node.presentation.taints.clone();
    let mut annotations: BTreeMap<String, String> =
        [(CONTROLLER_MANAGED_ATTACH.to_owned(), "true".to_owned())].into();
    if node.presentation.has_external_cloud_provider {
        taints.push(Taint {
            key: "node.cloudprovider.kubernetes.io/uninitialized".to_owned(),
            value: Some("true".to_owned()),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        });
        annotations
            .insert("alpha.kubernetes.io/provided-node-ip".to_owned(), node.settings.node_ips().join(","));
    }
    ApiNode {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            labels: Some(labels),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            taints: (!taints.is_empty()).then_some(taints),
            provider_id: Some(node.presentation.provider_id.clone()).filter(|id| !id.is_empty()),
            ..NodeSpec::default()
        }),
        status: None,
    }
}

/// Whether something other than timestamps has changed, or the last report is too old.
fn needs_update(before: Option<&NodeStatus>, now: &NodeStatus, node: &Node) -> bool {
    let Some(before) = before else { return true };
    let mut comparable = now.clone();
    let pairs = comparable.conditions.iter_mut().flatten().zip(before.conditions.iter().flatten());
    let mut oldest = None;
    // Other components set the heartbeats of their own conditions.
    let own = |condition: &NodeCondition| {
        condition.type_ == "Ready" || PRESSURE_CONDITIONS.iter().any(|(known, ..)| *known == condition.type_)
    };
    for (condition, before) in pairs.filter(|(condition, _)| own(condition)) {
        condition.last_heartbeat_time = before.last_heartbeat_time.clone();
        oldest = oldest.min(before.last_heartbeat_time.clone()).or(before.last_heartbeat_time.clone());
    }
    let every =
        node.presentation.status_report_frequency.and_then(|every| i64::try_from(every.as_secs()).ok());
    let every = every.unwrap_or(STATUS_REPORT_SECONDS);
    let is_expired = oldest.is_none_or(|time| node.ctx.clock.now().duration_since(time.0).as_secs() >= every);
    comparable != *before || is_expired
}

async fn status(node: &Node, current: &ApiNode) -> NodeStatus {
    let before = current.status.clone().unwrap_or_default();
    let now = node.ctx.clock.now();
    let mut resources = resources(node);
    // Extended resources of device plugins, or added by an administrator, are available to pods.
    let device_resources = node.devices.device_counts();
    for (name, (all, _)) in &device_resources {
        resources.insert(name.clone(), Quantity(all.to_string()));
    }
    let extended = before.capacity.iter().flatten().filter(|(name, _)| is_extended(name));
    for (name, amount) in extended {
        resources.entry(name.clone()).or_insert_with(|| amount.clone());
    }
    let runtime_status = node.runtime.status().await;
    if let Ok(runtime_status) = &runtime_status {
        *node.runtime_capabilities.lock() = RuntimeCapabilities::from_status(runtime_status);
    }
    let (runtime_handlers, features) =
        runtime_features::node_status_features(&node.runtime_name, runtime_status.as_ref().ok());
    let unready = match runtime_status {
        _ if *node.is_shutting_down.borrow() => Some("node is shutting down".to_owned()),
        Err(error) => Some(format!("[container runtime is down: {error}]")),
        Ok(status) => {
            let conditions = status.status.map(|status| status.conditions).unwrap_or_default();
            let bad = conditions.into_iter().find(|condition| !condition.status);
            bad.map(|condition| {
                let message =
                    condition.message.trim_start_matches("Network plugin returns error: ").to_owned();
                format!(
                    "container runtime network not ready: {}=false reason:{} message:{message}",
                    condition.type_, condition.reason
                )
            })
        }
    };
    let condition = |type_: &str, holds: bool, reason: &str, message: &str| {
        let status = if holds { "True" } else { "False" };
        let known = before.conditions.iter().flatten().find(|known| known.type_ == type_);
        let since =
            known.filter(|known| known.status == status).and_then(|known| known.last_transition_time.clone());
        NodeCondition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_heartbeat_time: Some(Time(now)),
            last_transition_time: since.or(Some(Time(now))),
        }
    };
    let ready = match &unready {
        None => condition("Ready", true, "KubeletReady", "kubelet is posting ready status"),
        Some(why) => condition("Ready", false, "KubeletNotReady", why),
    };
    let [memory, disk, processes] = node
        .maintenance
        .last_pressure()
        .is_active(now, node.settings.kubelet_config.pressure_transition_period);
    let pressure_condition = |type_: &str, holds: bool| {
        let (_, reasons, messages) =
            PRESSURE_CONDITIONS.iter().find(|(known, ..)| *known == type_).expect("all pressures are listed");
        condition(type_, holds, reasons[usize::from(holds)], messages[usize::from(holds)])
    };
    let address =
        |type_: &str, address: &str| NodeAddress { type_: type_.to_owned(), address: address.to_owned() };
    let mut addresses: Vec<_> = node.settings.node_ips().iter().map(|ip| address("InternalIP", ip)).collect();
    addresses.push(address("Hostname", &node.settings.node_name));
    let mut allocatable = allocatable(node, resources.clone());
    for (name, (_, healthy)) in device_resources {
        allocatable.insert(name, Quantity(healthy.to_string()));
    }
    NodeStatus {
        runtime_handlers,
        features,
        capacity: Some(resources),
        allocatable: Some(allocatable),
        addresses: Some(
            match before.addresses.clone().filter(|_| node.presentation.has_external_cloud_provider) {
                // The cloud provider's addresses take precedence once they are set.
                Some(known) if !known.is_empty() => known,
                _ => addresses,
            },
        ),
        conditions: Some(merge_conditions(
            before.conditions.clone().unwrap_or_default(),
            [
                pressure_condition("MemoryPressure", memory),
                pressure_condition("DiskPressure", disk),
                pressure_condition("PIDPressure", processes),
                ready,
            ],
        )),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint { port: i32::from(node.presentation.port) }),
        }),
        declared_features: Some(DECLARED_FEATURES.map(str::to_owned).to_vec()),
        images: Some(images(node).await),
        node_info: Some(info(node)),
        volumes_in_use: Some(node.csi.in_use()).filter(|in_use| !in_use.is_empty()),
        ..before.clone()
    }
}

/// Whether a resource is an extended one: its domain does not belong to Kubernetes.
pub fn is_extended(name: &str) -> bool {
    name.split_once('/').is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io"))
}

/// The kubelet's conditions merged into the existing ones; those of other components stay.
fn merge_conditions(mut conditions: Vec<NodeCondition>, own: [NodeCondition; 4]) -> Vec<NodeCondition> {
    for condition in own {
        match conditions.iter_mut().find(|known| known.type_ == condition.type_) {
            Some(known) => *known = condition,
            None => conditions.push(condition),
        }
    }
    conditions
}

fn resources(node: &Node) -> BTreeMap<String, Quantity> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let disk =
        rustix::fs::statvfs(&node.settings.pods).map_or(0, |stat| stat.f_blocks * stat.f_frsize / 1024);
    let own = [
        ("cpu", cpus.to_string()),
        ("ephemeral-storage", format!("{disk}Ki")),
        ("memory", format!("{}Ki", node.settings.memory / 1024)),
        ("pods", node.presentation.max_pods.to_string()),
    ];
    let huge_pages = huge_pages::pools().into_iter().map(|pool| {
        let (name, amount) = pool.resource();
        (name, Quantity(amount))
    });
    own.map(|(name, amount)| (name.to_owned(), Quantity(amount))).into_iter().chain(huge_pages).collect()
}

/// What pods can use: the capacity minus reservations and hard eviction thresholds.
fn allocatable(node: &Node, mut resources: BTreeMap<String, Quantity>) -> BTreeMap<String, Quantity> {
    let limits = &node.settings.kubelet_config.hard_eviction;
    let eviction_reserve = |amount: crate::ThresholdValue, capacity: i64| {
        i64::try_from(amount.to_number(u64::try_from(capacity).unwrap_or(0))).unwrap_or(i64::MAX)
    };
    let reserved = |name: &str| node.presentation.reserved.of(name);
    // Memory in huge page pools cannot be used as ordinary memory.
    let huge: i64 = resources
        .iter()
        .filter(|(name, _)| name.starts_with("hugepages-"))
        .filter_map(|(_, amount)| schema::quantity::Quantity::parse(&amount.0).ok())
        .map(|amount| amount.value())
        .sum();
    for (name, amount) in &mut resources {
        let Ok(capacity) = schema::quantity::Quantity::parse(&amount.0) else { continue };
        match name.as_str() {
            "cpu" if reserved("cpu") > 0 => {
                amount.0 = format!("{}m", (capacity.milli() - reserved("cpu")).max(0));
            }
            "memory" => {
                let eviction_reserve = eviction_reserve(limits.memory, capacity.value());
                let left = capacity.value() - reserved("memory") - eviction_reserve - huge;
                amount.0 = format!("{}Ki", left.max(0) / 1024);
            }
            "ephemeral-storage" => {
                let eviction_reserve = eviction_reserve(limits.disk, capacity.value());
                amount.0 =
                    (capacity.value() - eviction_reserve - reserved("ephemeral-storage")).max(0).to_string();
            }
            _ => {}
        }
    }
    resources
}

async fn images(node: &Node) -> Vec<ContainerImage> {
    let mut images = node.runtime.images().await.unwrap_or_default();
    images.sort_by_key(|image| (std::cmp::Reverse(image.size), image.id.clone()));
    let max_images = node.presentation.max_reported_images;
    images.truncate(
        max_images
            .map_or(MAX_REPORTED_IMAGES, |max_images| usize::try_from(max_images).unwrap_or(usize::MAX)),
    );
    let reported = images.into_iter().map(|image| ContainerImage {
        names: Some(image.repo_digests.into_iter().chain(image.repo_tags).collect()),
        size_bytes: i64::try_from(image.size).ok(),
    });
    reported.collect()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Changes with each boot of the host.
fn boot_id() -> String {
    read("/proc/sys/kernel/random/boot_id")
}

fn info(node: &Node) -> NodeSystemInfo {
    let release = read("/etc/os-release");
    let pretty = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let machine = read("/etc/machine-id");
    NodeSystemInfo {
        architecture: arch().into(),
        boot_id: boot_id(),
        container_runtime_version: node.runtime_version.clone(),
        kernel_version: rustix::system::uname().release().to_string_lossy().into_owned(),
        kubelet_version: KUBELET_VERSION.into(),
        operating_system: "linux".into(),
        os_image: pretty.unwrap_or("Linux").trim_matches('"').to_owned(),
        system_uuid: machine.clone(),
        machine_id: machine,
        ..NodeSystemInfo::default()
    }
}

fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

async fn renew_lease(node: &Node) -> Result<(), Error> {
    let Some(own) = node.ctx.caches.nodes().get(&Key::new("", &node.settings.node_name)) else {
        return Ok(());
    };
    let key = Key::new("kube-node-lease", &node.settings.node_name);
    let now = Some(MicroTime(node.ctx.clock.now()));
    let seconds = node.presentation.lease_seconds.unwrap_or(LEASE_SECONDS);
    match node.ctx.client.get::<Lease>(&key).await {
        Ok(mut lease) => {
            let spec = lease.spec.get_or_insert_default();
            spec.renew_time = now;
            spec.lease_duration_seconds = Some(seconds);
            node.ctx.client.replace(&lease).await.map(drop)
        }
        Err(error) if error.is_not_found() => {
            let owner = OwnerReference {
                api_version: "v1".into(),
                kind: "Node".into(),
                name: own.name().to_owned(),
                uid: own.uid().to_owned(),
                ..OwnerReference::default()
            };
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(key.name.to_string()),
                    namespace: Some(key.namespace.to_string()),
                    owner_references: Some(vec![owner]),
                    ..ObjectMeta::default()
                },
                spec: Some(LeaseSpec {
                    holder_identity: Some(key.name.to_string()),
                    lease_duration_seconds: Some(seconds),
                    renew_time: now,
                    ..LeaseSpec::default()
                }),
            };
            node.ctx.client.create(&lease).await.map(drop)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_and_reboot_are_recorded_as_events() {
        let check = |before: Option<&str>, expected: &[&str]| {
            let info =
                before.map(|id| NodeSystemInfo { boot_id: id.to_owned(), ..NodeSystemInfo::default() });
            let node = ApiNode {
                metadata: ObjectMeta { name: Some("here".to_owned()), ..ObjectMeta::default() },
                status: Some(NodeStatus { node_info: info, ..NodeStatus::default() }),
                ..ApiNode::default()
            };
            let events = startup_events(&node, "b").into_iter();
            let events: Vec<_> = events
                .map(|(severity, reason, message)| format!("{severity:?} {reason}: {message}"))
                .collect();
            assert_eq!(events, expected, "{before:?}");
        };
        let (start, reboot) = (
            "Normal Starting: Starting kubelet.",
            "Warning Rebooted: Node here has been rebooted, boot id: b",
        );
        check(None, &[start]);
        check(Some(""), &[start]);
        check(Some("b"), &[start]);
        check(Some("a"), &[start, reboot]);
    }

    #[test]
    fn foreign_conditions_are_preserved() {
        let condition = |type_: &str, status: &str| NodeCondition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            ..NodeCondition::default()
        };
        let own = || {
            ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"].map(|type_| condition(type_, "True"))
        };
        let before = vec![condition("Ready", "False"), condition("KernelDeadlock", "False")];
        let merged: Vec<(String, String)> = merge_conditions(before, own())
            .into_iter()
            .map(|condition| (condition.type_, condition.status))
            .collect();
        let expected = [
            ("Ready", "True"),
            ("KernelDeadlock", "False"),
            ("MemoryPressure", "True"),
            ("DiskPressure", "True"),
            ("PIDPressure", "True"),
        ];
        assert_eq!(merged, expected.map(|(type_, status)| (type_.to_owned(), status.to_owned())));
        assert!(is_extended("example.com/gpu"));
        assert!(!is_extended("cpu") && !is_extended("attachable-volumes.kubernetes.io/x"));
    }
}
