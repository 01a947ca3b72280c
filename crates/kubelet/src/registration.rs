//! The Node object: made when the node comes up, kept true, and kept alive by a lease.

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
/// The status is looked at with each beat of the node; it is written when it has changed, or after so many seconds.
const STATUS_REPORT_SECONDS: i64 = 300;
/// Until the node can be used somebody waits for it.
const UNREADY_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// How long a lease that could not be written is left alone, doubled each time, but no longer than until the next beat.
const INITIAL_LEASE_RETRY: Duration = Duration::from_millis(200);
const CONFLICT_RETRY: Duration = Duration::from_millis(50);
const KUBELET_VERSION: &str = "v1.36.4";
/// What the scheduler and admission may count on: streams reach containers as they come, in WebSockets too; pods are resized
/// as a whole, and while they begin; and one container's end may begin all others anew.
const DECLARED_FEATURES: [&str; 4] = [
    "ExtendWebSocketsToKubelet",
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "RestartAllContainersOnContainerExits",
];
/// What is said of each shortage: reason and message where there is none, and where there is.
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
/// Says that volumes are attached by a control loop, not by the node itself.
const CONTROLLER_MANAGED_ATTACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// How the node presents itself.
#[derive(Clone, Debug, Default)]
pub struct NodeRegistration {
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub max_pods: u32,
    pub reserved: NodeReservation,
    /// Where logs and streams of its containers can be had.
    pub port: u16,
    /// The Node object is made by somebody else.
    pub is_registered_externally: bool,
    /// A controller of the cloud it is in looks after its addresses, and says when it may be used.
    pub has_external_cloud_provider: bool,
    /// What that cloud calls it.
    pub provider_id: String,
    /// How often its status is looked at, if not with each beat.
    pub status_update_frequency: Option<Duration>,
    /// How often it is told though nothing has changed.
    pub status_report_frequency: Option<Duration>,
    /// How long the node is taken to live after each sign of that.
    pub lease_seconds: Option<i32>,
    /// How many pods there may be by what it has of processors, if that is less than `max_pods`.
    pub max_pods_by_cores: Option<u32>,
    /// How many images it tells of: 50 if nothing is said, all if it is less than nothing.
    pub max_reported_images: Option<i64>,
    /// Nobody is let into containers, nor told what they have said.
    pub debug_handlers_disabled: bool,
}

/// Registers, then keeps the node's status and lease.
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
                    // Others write to a new node as well; its first status must not wait for long.
                    Err(error) if error.is_conflict() => Some(CONFLICT_RETRY),
                    Err(error) => {
                        tracing::warn!(%error, "cannot report the node's status");
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
                    // Volumes are not mounted before it is told that they are going to be used.
                    () = node.csi.in_use_changed.notified() => {}
                    () = node.devices.devices_changed.notified() => {}
                    Ok(()) = address.changed() => {
                        // Pods tell where their node is, and those in its network are there too.
                        enqueue_all(node);
                    }
                }
            }
        },
        keep_lease(node)
    );
}

/// Renews the lease with each beat. It is made as soon as the node is, also when that was made anew.
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
        // Others need not have made yet what a lease needs.
        pause = renew_lease(node).await.err().map(|error| {
            tracing::warn!(%error, "cannot renew the node's lease");
            pause.map_or(INITIAL_LEASE_RETRY, |pause| pause.saturating_mul(2))
        });
        let retry = async {
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        };
        // Four signs of life should fit into the time.
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

/// Whether the node is ready. That it starts is told once.
async fn sync_node_status(node: &Node, start_reported: &mut bool) -> Result<bool, Error> {
    let key = Key::new("", &node.settings.node_name);
    let current = match node.ctx.caches.nodes().get(&key) {
        Some(current) => ApiNode::clone(&current),
        // Somebody else makes it.
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

/// Events for the start of a node, and for the machine's if the node was last heard of before that.
fn startup_events(node: &ApiNode, boot_id: &str) -> Vec<(EventType, &'static str, String)> {
    let mut events = vec![(EventType::Normal, "Starting", "Starting kubelet.".to_owned())];
    let known = node.status.as_ref().and_then(|status| status.node_info.as_ref());
    if known.is_some_and(|known| !known.boot_id.is_empty() && known.boot_id != boot_id) {
        let message = format!("Node {} has been rebooted, boot id: {boot_id}", node.name());
        events.push((EventType::Warning, "Rebooted", message));
    }
    events
}

/// Events for conditions that are not what they were.
fn record_condition_changes(node: &Node, before: &ApiNode, now: &NodeStatus) {
    let known = before.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    for condition in now.conditions.iter().flatten() {
        let was = known.iter().find(|was| was.type_ == condition.type_).map(|was| was.status.as_str());
        if was == Some(&condition.status) {
            continue;
        }
        let reason = match (condition.type_.as_str(), condition.status.as_str()) {
            ("Ready", "True") => "NodeReady".to_owned(),
            // A node that is only just being set up has not stopped being ready.
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

/// Whether something other than the time has changed, or nothing was said for long.
fn needs_update(before: Option<&NodeStatus>, now: &NodeStatus, node: &Node) -> bool {
    let Some(before) = before else { return true };
    let mut comparable = now.clone();
    let pairs = comparable.conditions.iter_mut().flatten().zip(before.conditions.iter().flatten());
    let mut oldest = None;
    // Others say when they like what they have to say.
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
    // What others say this node has, such as a device plugin's or an administrator's, is there for pods too.
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
                // The cloud's own controller knows better.
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

/// Whether a resource is one that Kubernetes itself knows nothing of.
pub fn is_extended(name: &str) -> bool {
    name.split_once('/').is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io"))
}

/// Our conditions among those that others have added to the node.
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

/// What is there for pods: all but what is reserved, and what must always be left.
fn allocatable(node: &Node, mut resources: BTreeMap<String, Quantity>) -> BTreeMap<String, Quantity> {
    let limits = &node.settings.kubelet_config.hard_eviction;
    let eviction_reserve = |amount: crate::ThresholdValue, capacity: i64| {
        i64::try_from(amount.to_number(u64::try_from(capacity).unwrap_or(0))).unwrap_or(i64::MAX)
    };
    let reserved = |name: &str| node.presentation.reserved.of(name);
    // Memory that is nothing else any more.
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

/// Another one each time the machine is switched on.
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
