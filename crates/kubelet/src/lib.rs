//! The kubelet: runs the pods that are assigned to this node and reports their status.
//!
//! Each pod has a worker that observes the state in the runtime ([`observed`]), plans the next
//! actions ([`pod::plan`], no I/O), executes them, and computes the status ([`pod::status`], no
//! I/O). Containers survive a restart of this process, which finds them by their labels. Start
//! reading at [`run`], then [`worker::reconcile`].

mod admission;
mod allocation;
mod apparmor;
mod atomic_writer;
pub mod cgroups;
pub mod config;
mod credentials;
mod csi;
mod devices;
mod dir_watcher;
mod docker_config;
mod dra;
mod env;
mod hooks;
mod housekeeping;
mod huge_pages;
mod image_pull_records;
mod image_pulls;
mod image_reference;
mod keyed_mutex;
mod maintenance;
mod manifests;
pub mod network;
mod object_manager;
mod observed;
mod plugins;
mod pod;
mod pod_logs;
mod probe_manager;
mod prober;
mod pull_secrets;
mod reclaim;
mod registration;
mod resolver;
mod run_as_non_root;
mod runtime_features;
mod server;
mod shutdown;
mod sources;
mod start_container;
mod static_pods;
mod stats;
mod sysctls;
mod termination_message;
mod user_namespaces;
mod volumes;
mod worker;
mod worker_state;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use reconcile::{Controller, Ctx, Enqueue, Key, Object as _};
use runtime::Runtime;
use runtime::cri::ContainerState;
use tokio::sync::watch;

pub use cgroups::NodeReservation;
pub use config::Settings;
pub use credentials::Config as CredentialProviders;
pub use image_pull_records::{CredentialVerification, VerificationPolicy as PullPolicy};
pub use k8s_openapi::api::core::v1::Taint;
pub use maintenance::KubeletConfig;
pub use maintenance::eviction::{
    EvictionThresholds, IGNORED_SIGNALS as OVERRIDDEN_SIGNALS, SIGNALS, ThresholdValue,
};
pub use maintenance::image_gc::ImageGcPolicy as ImagePolicy;
pub use object_manager::ObjectManager;
pub use pod_logs::PodLogs;
pub use registration::NodeRegistration;
pub use resolver::ResolverConfig;
pub use server::KubeletServer;
pub use shutdown::plan::{PriorityGracePeriod, periods};
pub use shutdown::{DEFAULT_SECONDS as DEFAULT_SHUTDOWN_SECONDS, HostShutdown};
pub use sysctls::is_namespaced as is_own_sysctl;
pub use volumes::iscsi::detach_all as let_disks_go;

use observed::{CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID};
use runtime_features::RuntimeCapabilities;
use worker_state::PodWorkerState;

/// The reason in the status and events of evicted pods.
const EVICTED_REASON: &str = "Evicted";
/// The maximum number of concurrent pod workers. More than any node has pods: some workers take
/// minutes to terminate a pod or pull an image, and must not block the others.
const MAX_POD_WORKERS: usize = 1024;
/// The delay between two attempts to reach the runtime.
const RELIST_PERIOD: Duration = Duration::from_secs(1);
/// Changes come in bursts. This delay collects them.
const EVENT_COALESCE_DELAY: Duration = Duration::from_millis(20);

/// The configuration of a node.
pub struct Config {
    pub settings: Settings,
    pub presentation: NodeRegistration,
    /// `None`: the kubelet serves no API for logs, exec and the like.
    pub api: Option<KubeletServer>,
    /// Provides the Secrets and ConfigMaps that pods refer to, if the node may not list all of
    /// them.
    pub object_manager: Option<Arc<ObjectManager>>,
    /// Through which the host process starts and awaits a graceful shutdown.
    pub host_shutdown: HostShutdown,
}

/// A running kubelet.
struct Node {
    ctx: Ctx,
    runtime: Arc<dyn Runtime>,
    /// The prefix of container IDs, as in `containerd://id`.
    runtime_name: String,
    /// As in `containerd://1.7`.
    runtime_version: String,
    runtime_capabilities: Mutex<RuntimeCapabilities>,
    /// The runtime shares the mount namespace, so it can bind-mount what is mounted here.
    shares_mounts: bool,
    settings: Settings,
    /// The ID ranges of pods with user namespaces.
    users: user_namespaces::UserNamespaceManager,
    pulled: image_pull_records::ImagePullRecords,
    pulls: image_pulls::ImagePulls,
    credentials: credentials::Providers,
    presentation: NodeRegistration,
    /// By pod UID.
    pod_states: Mutex<HashMap<String, PodWorkerState>>,
    /// Held while a pod or a resize is admitted, so that no resource is allocated twice.
    admission_lock: Mutex<()>,
    queue: Enqueue,
    /// The previous CPU counters, from which usage rates are computed.
    counts: stats::CpuRates,
    volume_stats: stats::volumes::VolumeStatsCollector,
    reviews: reconcile::review::ReviewClient,
    maintenance: maintenance::MaintenanceState,
    housekeeping_ticker: housekeeping::HousekeepingTicker,
    csi: csi::Drivers,
    dra: dra::Dra,
    devices: Arc<devices::Devices>,
    /// The machine is shutting down.
    is_shutting_down: watch::Sender<bool>,
    host_shutdown: HostShutdown,
    /// Incremented whenever a pod gets an earlier termination deadline.
    termination_updates: watch::Sender<u64>,
    /// Incremented whenever the health of a container changes.
    health_changes: watch::Sender<u64>,
    /// Incremented whenever a change in the runtime is seen.
    runtime_changes: watch::Sender<u64>,
    object_manager: Option<Arc<ObjectManager>>,
    static_pods: static_pods::StaticPods,
    /// The caches have synced. Before that only static pods are known, and no pod counts as
    /// orphaned.
    is_filled: watch::Sender<bool>,
}

impl Node {
    fn enqueue(&self, key: Key) {
        self.queue.now(key);
    }
}

/// Runs the kubelet until the context is shut down. Containers keep running.
pub async fn run(ctx: Ctx, runtime: Arc<dyn Runtime>, config: Config) {
    let ctx = Ctx { events: ctx.events.from("kubelet"), ..ctx };
    let mut shutdown = ctx.shutdown.clone();
    let version = loop {
        match runtime.version().await {
            Ok(version) => break version,
            Err(error) => tracing::warn!(%error, "waiting for the container runtime"),
        }
        tokio::select! {
            () = tokio::time::sleep(RELIST_PERIOD) => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
    };
    let controller = Controller::new("pods", &ctx);
    let shares_mounts = runtime.shares_mount_namespace().await;
    let runtime_capabilities =
        runtime.status().await.map(|status| RuntimeCapabilities::from_status(&status)).unwrap_or_default();
    let node = Arc::new(Node {
        runtime,
        runtime_capabilities: Mutex::new(runtime_capabilities),
        shares_mounts,
        runtime_version: format!("{}://{}", version.runtime_name, version.runtime_version),
        runtime_name: version.runtime_name,
        users: user_namespaces::UserNamespaceManager::open(&config.settings.pods),
        pulled: image_pull_records::ImagePullRecords::open(&config.settings.root),
        pulls: image_pulls::ImagePulls::new(config.settings.kubelet_config.max_parallel_image_pulls),
        credentials: credentials::Providers::new(config.settings.kubelet_config.credentials.clone()),
        csi: csi::Drivers::open(&config.settings.root),
        dra: dra::Dra::open(&config.settings.root),
        devices: devices::Devices::new(&config.settings.root, &config.settings.pods),
        is_shutting_down: watch::Sender::new(false),
        host_shutdown: config.host_shutdown,
        settings: config.settings,
        presentation: config.presentation,
        pod_states: Mutex::default(),
        admission_lock: Mutex::default(),
        queue: controller.enqueue(),
        termination_updates: watch::Sender::new(0),
        health_changes: watch::Sender::new(0),
        runtime_changes: watch::Sender::new(0),
        counts: stats::CpuRates::default(),
        volume_stats: stats::volumes::VolumeStatsCollector::default(),
        reviews: Default::default(),
        maintenance: maintenance::MaintenanceState::default(),
        housekeeping_ticker: housekeeping::HousekeepingTicker::start(),
        object_manager: config.object_manager,
        static_pods: static_pods::StaticPods::default(),
        is_filled: watch::Sender::new(false),
        ctx,
    });
    // Static pods must be known before orphans are removed.
    manifests::reload(&node);
    node.pulled.recover(&*node.runtime, node.ctx.clock.now()).await;
    network::restore_pod_cidr(&node).await;
    let own = node.settings.node_name.clone();
    if let Some(object_manager) = &node.object_manager {
        object_manager.listen(&node.ctx.caches, &own);
    }
    controller.on(node.ctx.caches.pods(), move |changed, enqueue| {
        let spec = changed.latest().spec.as_ref();
        if spec.and_then(|spec| spec.node_name.as_deref()) == Some(&own) {
            enqueue(changed.latest().key());
        }
    });
    // Finished and force-deleted pods disappear from the API without the kubelet's part in it.
    let weak = Arc::downgrade(&node);
    node.ctx.caches.pods().listen(move |changed| {
        let (Some(pod), Some(node)) = (changed.before, weak.upgrade()) else { return };
        if node.is_own_pod(pod) && worker::has_earlier_deadline(pod, changed.after.map(Arc::as_ref)) {
            node.termination_updates.send_modify(|count| *count += 1);
        }
        if node.is_own_pod(pod) && !static_pods::is_static(pod) && changed.after.is_none() {
            tokio::spawn(remove_unknown(node, pod.key(), pod.uid().to_owned()));
        }
    });
    // Start the watches for objects that pods refer to before the first pod needs them.
    let caches = &node.ctx.caches;
    let _ = (caches.services(), caches.config_maps(), caches.secrets(), caches.nodes());
    refresh_volumes(&node, &controller);
    reclaim::listen(&node);
    enqueue_when_attached(&node, &controller);
    let reconcile_node = node.clone();
    let reconcile = move |key: Key| {
        let node = reconcile_node.clone();
        // Boxed, so that idle workers stay small.
        async move { Box::pin(worker::reconcile(&node, &key)).await }
    };
    let ctx = node.ctx.clone();
    tokio::select! {
        () = controller.run_without_sync(&ctx, MAX_POD_WORKERS, reconcile) => {}
        () = enqueue_when_synced(&node) => {}
        () = registration::run(&node) => {}
        () = relist(&node) => {}
        () = maintenance::run(&node) => {}
        () = manifests::run(&node) => {}
        () = shutdown::run(&node) => {}
        () = run_plugin_watcher(&node) => {}
        () = dra::run(&node.ctx, &node.settings.node_name, &node.dra.drivers, || enqueue_all(&node)) => {}
        () = node.dra.unprepare_orphaned_claims(&node.ctx, &node.settings.node_name) => {}
        () = node.devices.run() => {}
        () = cgroups::run(&node) => {}
        () = allocation::run_resize_loop(&node) => {}
        () = server::run(&node, config.api) => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
    node.pulls.cancel_all();
}

/// Enqueues all pods once the caches have synced. Before that, objects that pods refer to could be
/// missing.
async fn enqueue_when_synced(node: &Node) {
    node.ctx.caches.wait_for_sync().await;
    node.is_filled.send_replace(true);
    enqueue_all(node);
    std::future::pending().await
}

/// Enqueues pods when a ConfigMap or Secret that they may refer to changes.
fn refresh_volumes(node: &Arc<Node>, controller: &Controller) {
    let pods = node.ctx.caches.pods().clone();
    let own = node.settings.node_name.clone();
    let weak = Arc::downgrade(node);
    let changed = move |plural: &str, object: &Key, enqueue: &mut dyn FnMut(Key)| {
        let own_pods =
            pods.indexed("node", &own).into_iter().filter(|pod| *pod.namespace() == *object.namespace);
        for pod in own_pods {
            if let Some(node) =
                weak.upgrade().filter(|_| object_manager::references_object(&pod, plural, &object.name))
            {
                let now = node.ctx.clock.now();
                node.pod_states
                    .lock()
                    .entry(pod.uid().to_owned())
                    .and_modify(|state| state.references_changed(now));
            }
            enqueue(pod.key());
        }
    };
    let again = changed.clone();
    // New objects as well: an optional one may have been missing when the pod started.
    controller.on(node.ctx.caches.config_maps(), move |change, enqueue| {
        changed("configmaps", &change.latest().key(), enqueue);
    });
    controller.on(node.ctx.caches.secrets(), move |change, enqueue| {
        again("secrets", &change.latest().key(), enqueue);
    });
}

/// Runs the plugin watcher. A pod may wait for a plugin that has just registered.
async fn run_plugin_watcher(node: &Node) {
    let on_plugin_change = || {
        node.dra.driver_registered.notify_one();
        for state in node.pod_states.lock().values_mut() {
            state.sandbox_failure.take_if(|failure| failure.reason == dra::FAILED_PREPARE_REASON);
        }
        enqueue_all(node);
    };
    let hosts = plugins::PluginHandlers { csi: &node.csi, dra: &node.dra.drivers };
    plugins::run(&node.ctx, &node.settings, hosts, on_plugin_change).await;
}

fn enqueue_all(node: &Node) {
    node.pods().iter().for_each(|pod| node.enqueue(pod.key()));
}

/// Enqueues pods when the node status shows other attached volumes.
fn enqueue_when_attached(node: &Arc<Node>, controller: &Controller) {
    let pods = node.ctx.caches.pods().clone();
    let own = node.settings.node_name.clone();
    controller.on(node.ctx.caches.nodes(), move |changed, enqueue| {
        let attached = |node: Option<&Arc<k8s_openapi::api::core::v1::Node>>| {
            node.and_then(|node| node.status.as_ref()?.volumes_attached.clone()).unwrap_or_default()
        };
        if changed.latest().name() == own && attached(changed.before) != attached(changed.after) {
            pods.indexed("node", &own).iter().for_each(|pod| enqueue(pod.key()));
        }
    });
}

/// Enqueues pods whose containers have changed in the runtime, and removes those that do not exist
/// in the API.
async fn relist(node: &Arc<Node>) {
    let mut known: BTreeMap<String, i32> = BTreeMap::new();
    let mut changes = 0;
    let mut filled = node.is_filled.subscribe();
    loop {
        let is_filled = *filled.borrow_and_update();
        if let (Ok(sandboxes), Ok(containers)) =
            (node.runtime.sandboxes(&[]).await, node.runtime.containers(&[]).await)
        {
            let mut now = BTreeMap::new();
            let mut changed: BTreeSet<(Key, String)> = BTreeSet::new();
            let listed = sandboxes.iter().map(|sandbox| (&sandbox.id, sandbox.state, &sandbox.labels)).chain(
                containers.iter().map(|container| (&container.id, container.state + 10, &container.labels)),
            );
            for (id, state, labels) in listed {
                let pod = pod_of(labels);
                // Before the caches have synced, an unknown pod may still turn up.
                let is_unknown =
                    || pod.as_ref().is_some_and(|(key, uid)| node.pod_with_uid(key, uid).is_none());
                if !is_filled && is_unknown() {
                    continue;
                }
                if known.get(id) != Some(&state) {
                    changed.extend(pod);
                }
                now.insert(id.clone(), state);
            }
            let started = containers.iter().filter(|container| {
                container.state() != ContainerState::Created
                    && known.get(&container.id) != now.get(&container.id)
            });
            started.for_each(|container| node.settings.logs.link(container));
            for (key, uid) in &changed {
                match node.pod_with_uid(key, uid) {
                    Some(_) => node.enqueue(key.clone()),
                    None => drop(tokio::spawn(remove_unknown(node.clone(), key.clone(), uid.clone()))),
                }
            }
            if known != now {
                node.runtime_changes.send_modify(|count| *count += 1);
            }
            known = now;
        }
        tokio::select! {
            count = node.runtime.wait_for_change(changes) => {
                changes = count;
                tokio::time::sleep(EVENT_COALESCE_DELAY).await;
            }
            Ok(()) = filled.changed() => {}
        }
    }
}

/// Removes the containers and logs of a pod that was deleted from the API without being terminated
/// here.
async fn remove_unknown(node: Arc<Node>, key: Key, uid: String) {
    while !worker::remove_all(&node, &uid).await {
        tokio::time::sleep(RELIST_PERIOD).await;
    }
    let _ = std::fs::remove_dir_all(node.settings.log_dir(&key, &uid));
    node.forget_pod(&uid);
}

fn pod_of(labels: &BTreeMap<String, String>) -> Option<(Key, String)> {
    let key = Key::new(labels.get(POD_NAMESPACE)?, labels.get(POD_NAME)?);
    Some((key, labels.get(POD_UID)?.clone()))
}
