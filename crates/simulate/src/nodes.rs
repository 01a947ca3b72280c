//! Simulated nodes: created once, and kept alive by leases as a kubelet does.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::stream::{StreamExt as _, iter};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeSpec,
    NodeStatus, NodeSystemInfo,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference, Time};
use reconcile::{Ctx, Error, Key, Object as _};

use crate::{DOWN_ANNOTATION, SIMULATE_NODE_LABEL};

/// A kubelet's lease duration and renewal interval.
const LEASE_SECONDS: i32 = 40;
const RENEW_EVERY: Duration = Duration::from_secs(10);
/// The maximum number of concurrent requests.
const MAX_CONCURRENT_REQUESTS: usize = 64;
const KUBELET_VERSION: &str = "v1.36.4";

pub async fn run(ctx: Ctx, count: u32) {
    let ctx = &ctx;
    let nodes = ctx.caches.nodes().clone();
    let leases = ctx.caches.leases().clone();
    let mut shutdown = ctx.shutdown.clone();
    let work = async {
        nodes.wait_for_sync().await;
        leases.wait_for_sync().await;
        iter(0..count).for_each_concurrent(MAX_CONCURRENT_REQUESTS, |number| register(ctx, number)).await;
        loop {
            let alive = nodes.all().into_iter().filter(|node| is_alive(node));
            iter(alive)
                .for_each_concurrent(MAX_CONCURRENT_REQUESTS, |node| async move { renew(ctx, &node).await })
                .await;
            tokio::time::sleep(RENEW_EVERY).await;
        }
    };
    tokio::select! {
        () = work => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
}

/// Whether the node is simulated and up.
pub fn is_alive(node: &Node) -> bool {
    node.label(SIMULATE_NODE_LABEL).is_some() && node.annotation(DOWN_ANNOTATION).is_none()
}

async fn register(ctx: &Ctx, number: u32) {
    let name = format!("node-{number}");
    if ctx.caches.nodes().get(&Key::new("", &name)).is_some() {
        return;
    }
    let node = node(&name, number, ctx.clock.now());
    let result = match ctx.create(&node).await {
        // The API server drops the status of a new object, so it is written separately.
        Ok(created) => ctx.replace_status(&Node { status: node.status, ..created }).await.map(drop),
        Err(error) if error.is_already_exists() => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = result {
        tracing::warn!(%error, name, "cannot register a simulated node");
    }
}

async fn renew(ctx: &Ctx, node: &Node) {
    if let Err(error) = try_renew(ctx, node).await {
        tracing::warn!(%error, node = node.name(), "cannot renew the lease of a simulated node");
    }
}

async fn try_renew(ctx: &Ctx, node: &Node) -> Result<(), Error> {
    let key = Key::new("kube-node-lease", node.name());
    let now = Some(MicroTime(ctx.clock.now()));
    match ctx.caches.leases().get(&key) {
        Some(lease) => {
            let mut lease = Lease::clone(&lease);
            lease.spec.get_or_insert_default().renew_time = now;
            ctx.client.replace(&lease).await.map(drop)
        }
        None => {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(node.name().to_owned()),
                    namespace: Some(key.namespace.to_string()),
                    owner_references: Some(vec![OwnerReference {
                        api_version: "v1".into(),
                        kind: "Node".into(),
                        name: node.name().to_owned(),
                        uid: node.uid().to_owned(),
                        ..OwnerReference::default()
                    }]),
                    ..ObjectMeta::default()
                },
                spec: Some(LeaseSpec {
                    holder_identity: Some(node.name().to_owned()),
                    lease_duration_seconds: Some(LEASE_SECONDS),
                    renew_time: now,
                    ..LeaseSpec::default()
                }),
            };
            ctx.create(&lease).await.map(drop)
        }
    }
}

fn node(name: &str, number: u32, now: Timestamp) -> Node {
    let labels = [
        ("beta.kubernetes.io/arch", "amd64"),
        ("beta.kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", "amd64"),
        ("kubernetes.io/hostname", name),
        ("kubernetes.io/os", "linux"),
        (SIMULATE_NODE_LABEL, "true"),
    ];
    Node {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some(labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into()),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec::default()),
        status: Some(status(name, number, now)),
    }
}

fn status(name: &str, number: u32, now: Timestamp) -> NodeStatus {
    let resources: BTreeMap<String, Quantity> = [
        ("cpu", "32"),
        ("ephemeral-storage", "1Ti"),
        ("hugepages-1Gi", "0"),
        ("hugepages-2Mi", "0"),
        ("memory", "256Gi"),
        ("pods", "110"),
    ]
    .map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned())))
    .into();
    let condition = |type_: &str, status: &str, reason: &str, message: &str| NodeCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    };
    // From the range for benchmarks (RFC 2544), so that no address is reachable.
    let ip = format!("198.{}.{}.{}", 18 + ((number >> 16) & 1), (number >> 8) & 255, number & 255);
    let address = |type_: &str, address: String| NodeAddress { type_: type_.to_owned(), address };
    NodeStatus {
        capacity: Some(resources.clone()),
        allocatable: Some(resources),
        addresses: Some(vec![address("InternalIP", ip), address("Hostname", name.to_owned())]),
        conditions: Some(vec![
            condition(
                "MemoryPressure",
                "False",
                "KubeletHasSufficientMemory",
                "kubelet has sufficient memory available",
            ),
            condition("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            condition(
                "PIDPressure",
                "False",
                "KubeletHasSufficientPID",
                "kubelet has sufficient PID available",
            ),
            condition("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
        ]),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint { port: 10250 }),
        }),
        // Simulated pods can be resized in any way.
        declared_features: Some(
            ["InPlacePodLevelResourcesVerticalScaling", "InPlacePodVerticalScalingInitContainers"]
                .map(str::to_owned)
                .into(),
        ),
        images: Some(vec![ContainerImage {
            names: Some(vec!["registry.k8s.io/pause:3.10".into()]),
            size_bytes: Some(300_000),
        }]),
        node_info: Some(NodeSystemInfo {
            architecture: "amd64".into(),
            boot_id: format!("00000000-0000-4000-8000-{number:012}"),
            container_runtime_version: "simulated://1.0".into(),
            kernel_version: "6.0.0".into(),
            kubelet_version: KUBELET_VERSION.into(),
            machine_id: format!("{number:032}"),
            operating_system: "linux".into(),
            os_image: "Simulated".into(),
            system_uuid: format!("00000000-0000-4000-8000-{number:012}"),
            ..NodeSystemInfo::default()
        }),
        ..NodeStatus::default()
    }
}
