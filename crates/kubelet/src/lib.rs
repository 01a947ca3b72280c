//! The node: runs the pods it is given in real containers and says what becomes of them.
//!
//! Every pod has a worker that looks at what the runtime has of it ([`observed`]), decides what it needs next
//! ([`pod::plan`], pure), does it, and writes what there is to say ([`pod::status`], pure). Containers outlive
//! this process; a new one finds them again by their labels. Read [`run`], then [`worker::reconcile`].

mod abilities;
mod admission;
mod allocation;
mod apparmor;
mod ask;
mod busy;
pub mod cgroups;
mod changes;
pub mod config;
mod credentials;
mod csi;
mod devices;
mod docker_config;
mod dra;
mod env;
mod health;
mod hooks;
mod huge_pages;
mod identity;
mod keeping;
mod last_words;
mod manifests;
mod memory;
pub mod network;
mod observed;
mod payload;
mod plugins;
mod pod;
mod pod_logs;
mod pull_secrets;
mod pulled;
mod pulls;
mod pulse;
mod reclaim;
mod reference;
mod referred;
mod registration;
mod resolver;
mod server;
mod shutdown;
mod sources;
mod start;
mod static_pods;
mod stats;
mod sysctls;
mod users;
mod volumes;
mod worker;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use reconcile::{Controller, Ctx, Enqueue, Key, Object as _};
use runtime::Runtime;
use runtime::cri::ContainerState;
use tokio::sync::watch;

pub use cgroups::Reserved;
pub use config::Settings;
pub use credentials::Config as CredentialProviders;
pub use k8s_openapi::api::core::v1::Taint;
pub use keeping::Keeping;
pub use keeping::images::Policy as ImagePolicy;
pub use keeping::pressure::{Amount, Limits, OVERRIDDEN as OVERRIDDEN_SIGNALS, SIGNALS};
pub use pod_logs::Logs;
pub use pulled::{Policy as PullPolicy, Verify};
pub use referred::Referred;
pub use registration::Presentation;
pub use resolver::Resolver;
pub use server::Api;
pub use shutdown::plan::{Period, periods};
pub use shutdown::{DEFAULT_SECONDS as DEFAULT_SHUTDOWN_SECONDS, HostShutdown};
pub use sysctls::is_own as is_own_sysctl;
pub use volumes::iscsi::let_all_go as let_disks_go;

use abilities::Abilities;
use memory::Memory;
use observed::{CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID};

/// The reason of pods that are put out.
const EVICTED: &str = "Evicted";
/// Pods looked after at once. More than any node has: some take minutes to end or to get their images, and nobody else is
/// to wait for that.
const WORKERS: usize = 1024;
/// Between two tries to do something with the runtime.
const RELIST: Duration = Duration::from_secs(1);
/// Changes seldom come alone; this is how long one waits for the next.
const GATHER: Duration = Duration::from_millis(20);

/// What a node needs to know.
pub struct Config {
    pub settings: Settings,
    pub presentation: Presentation,
    /// `None`: nobody can ask this node for logs and the like.
    pub api: Option<Api>,
    /// How Secrets and ConfigMaps come here where not all of them may be read.
    pub referred: Option<Arc<Referred>>,
    /// By which the process that runs the node ends its pods when the machine goes down.
    pub host_shutdown: HostShutdown,
}

/// A node at work.
struct Node {
    ctx: Ctx,
    runtime: Arc<dyn Runtime>,
    /// As in `containerd://id`.
    runtime_name: String,
    /// As in `containerd://1.7`.
    runtime_version: String,
    abilities: Mutex<Abilities>,
    /// The runtime can give containers what is mounted here.
    sees_mounts: bool,
    settings: Settings,
    /// The numbers that pods with users of their own have.
    users: users::Users,
    pulled: pulled::Pulled,
    pulls: pulls::Pulls,
    credentials: credentials::Providers,
    presentation: Presentation,
    /// By the uid of the pod.
    memories: Mutex<HashMap<String, Memory>>,
    /// Held by whoever judges whether there is room for something, so that nothing is promised twice.
    judging: Mutex<()>,
    queue: Enqueue,
    /// What is known of the pace of things.
    counts: stats::Counts,
    looking: stats::volumes::Looking,
    reviews: reconcile::review::Reviews,
    keeping: keeping::Known,
    pulse: pulse::Pulse,
    csi: csi::Drivers,
    dra: dra::Dra,
    devices: Arc<devices::Devices>,
    /// The machine is about to be switched off.
    is_going_down: watch::Sender<bool>,
    host_shutdown: HostShutdown,
    /// Counts the times when a pod was told to end sooner.
    hastened: watch::Sender<u64>,
    /// Counts the times when the health of a container changed.
    health_changes: watch::Sender<u64>,
    /// Counts the times when the runtime was seen to have changed.
    news: watch::Sender<u64>,
    referred: Option<Arc<Referred>>,
    static_pods: static_pods::StaticPods,
    /// What the API has is known. Until then there are only static pods, and nothing is known to be too much.
    is_filled: watch::Sender<bool>,
}

impl Node {
    fn look_at(&self, key: Key) {
        self.queue.now(key);
    }
}

/// Runs a node until the context's shutdown. Containers go on.
pub async fn run(ctx: Ctx, runtime: Arc<dyn Runtime>, config: Config) {
    let ctx = Ctx { events: ctx.events.from("kubelet"), ..ctx };
    let mut shutdown = ctx.shutdown.clone();
    let version = loop {
        match runtime.version().await {
            Ok(version) => break version,
            Err(error) => tracing::warn!(%error, "waiting for the container runtime"),
        }
        tokio::select! {
            () = tokio::time::sleep(RELIST) => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
    };
    let controller = Controller::new("pods", &ctx);
    let sees_mounts = runtime.sees_mounts().await;
    let abilities = runtime.status().await.map(|told| Abilities::of(&told)).unwrap_or_default();
    let node = Arc::new(Node {
        runtime,
        abilities: Mutex::new(abilities),
        sees_mounts,
        runtime_version: format!("{}://{}", version.runtime_name, version.runtime_version),
        runtime_name: version.runtime_name,
        users: users::Users::open(&config.settings.pods),
        pulled: pulled::Pulled::open(&config.settings.root),
        pulls: pulls::Pulls::new(config.settings.keeping.pulls_at_once),
        credentials: credentials::Providers::new(config.settings.keeping.credentials.clone()),
        csi: csi::Drivers::open(&config.settings.root),
        dra: dra::Dra::open(&config.settings.root),
        devices: devices::Devices::new(&config.settings.root, &config.settings.pods),
        is_going_down: watch::Sender::new(false),
        host_shutdown: config.host_shutdown,
        settings: config.settings,
        presentation: config.presentation,
        memories: Mutex::default(),
        judging: Mutex::default(),
        queue: controller.enqueue(),
        hastened: watch::Sender::new(0),
        health_changes: watch::Sender::new(0),
        news: watch::Sender::new(0),
        counts: stats::Counts::default(),
        looking: stats::volumes::Looking::default(),
        reviews: Default::default(),
        keeping: keeping::Known::default(),
        pulse: pulse::Pulse::begin(),
        referred: config.referred,
        static_pods: static_pods::StaticPods::default(),
        is_filled: watch::Sender::new(false),
        ctx,
    });
    // Before anybody misses them.
    manifests::take(&node);
    node.pulled.recover(&*node.runtime, node.ctx.clock.now()).await;
    network::recall(&node).await;
    let own = node.settings.node_name.clone();
    if let Some(referred) = &node.referred {
        referred.listen(&node.ctx.caches, &own);
    }
    controller.on(node.ctx.caches.pods(), move |changed, enqueue| {
        let spec = changed.newest().spec.as_ref();
        if spec.and_then(|spec| spec.node_name.as_deref()) == Some(&own) {
            enqueue(changed.newest().key());
        }
    });
    // Pods that are over, and those deleted by force, go without asking the node.
    let weak = Arc::downgrade(&node);
    node.ctx.caches.pods().listen(move |changed| {
        let (Some(pod), Some(node)) = (changed.before, weak.upgrade()) else { return };
        if node.has(pod) && worker::is_hastened(pod, changed.after.map(Arc::as_ref)) {
            node.hastened.send_modify(|count| *count += 1);
        }
        if node.has(pod) && !static_pods::is_static(pod) && changed.after.is_none() {
            tokio::spawn(remove_unknown(node, pod.key(), pod.uid().to_owned()));
        }
    });
    // What pods refer to is at hand when they need it.
    let caches = &node.ctx.caches;
    let _ = (caches.services(), caches.config_maps(), caches.secrets(), caches.nodes());
    refresh_volumes(&node, &controller);
    reclaim::listen(&node);
    look_again_when_attached(&node, &controller);
    let at_work = node.clone();
    let reconcile = move |key: Key| {
        let node = at_work.clone();
        // In a box, so that those who have nothing to do take no room.
        async move { Box::pin(worker::reconcile(&node, &key)).await }
    };
    let ctx = node.ctx.clone();
    tokio::select! {
        () = controller.run_at_once(&ctx, WORKERS, reconcile) => {}
        () = fill(&node) => {}
        () = registration::run(&node) => {}
        () = relist(&node) => {}
        () = keeping::run(&node) => {}
        () = manifests::run(&node) => {}
        () = shutdown::run(&node) => {}
        () = find_plugins(&node) => {}
        () = dra::run(&node.ctx, &node.settings.node_name, &node.dra.drivers, || look_at_all(&node)) => {}
        () = node.dra.give_back_lost(&node.ctx, &node.settings.node_name) => {}
        () = node.devices.run() => {}
        () = cgroups::keep(&node) => {}
        () = allocation::keep(&node) => {}
        () = server::run(&node, config.api) => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
    node.pulls.give_up_all();
}

/// Looks at the pods that the API has once everything is known that they may refer to.
async fn fill(node: &Node) {
    node.ctx.caches.filled().await;
    node.is_filled.send_replace(true);
    look_at_all(node);
    std::future::pending().await
}

/// A change to what a pod's volumes are made from reaches the pod.
fn refresh_volumes(node: &Arc<Node>, controller: &Controller) {
    let pods = node.ctx.caches.pods().clone();
    let own = node.settings.node_name.clone();
    let weak = Arc::downgrade(node);
    let changed = move |plural: &str, object: &Key, enqueue: &mut dyn FnMut(Key)| {
        let mine = pods.indexed("node", &own).into_iter().filter(|pod| *pod.namespace() == *object.namespace);
        for pod in mine {
            if let Some(node) = weak.upgrade().filter(|_| referred::refers(&pod, plural, &object.name)) {
                let now = node.ctx.clock.now();
                node.memories.lock().entry(pod.uid().to_owned()).and_modify(|memory| memory.hear(now));
            }
            enqueue(pod.key());
        }
    };
    let again = changed.clone();
    // New ones too: an optional one may have been missing when the pod began.
    controller.on(node.ctx.caches.config_maps(), move |news, enqueue| {
        changed("configmaps", &news.newest().key(), enqueue);
    });
    controller.on(node.ctx.caches.secrets(), move |news, enqueue| {
        again("secrets", &news.newest().key(), enqueue);
    });
}

/// Looks for plugins. Pods may have been waiting for one.
async fn find_plugins(node: &Node) {
    let news = || {
        node.dra.news.notify_one();
        for memory in node.memories.lock().values_mut() {
            memory.sandbox_failure.take_if(|failure| failure.reason == dra::UNPREPARED);
        }
        look_at_all(node);
    };
    let hosts = plugins::Hosts { csi: &node.csi, dra: &node.dra.drivers };
    plugins::run(&node.ctx, &node.settings, hosts, news).await;
}

/// Pods may have been waiting for something that is there now.
fn look_at_all(node: &Node) {
    node.pods().iter().for_each(|pod| node.look_at(pod.key()));
}

/// Pods wait for their volumes to be attached, which the node's own status tells.
fn look_again_when_attached(node: &Arc<Node>, controller: &Controller) {
    let pods = node.ctx.caches.pods().clone();
    let own = node.settings.node_name.clone();
    controller.on(node.ctx.caches.nodes(), move |changed, enqueue| {
        let attached = |node: Option<&Arc<k8s_openapi::api::core::v1::Node>>| {
            node.and_then(|node| node.status.as_ref()?.volumes_attached.clone()).unwrap_or_default()
        };
        if changed.newest().name() == own && attached(changed.before) != attached(changed.after) {
            pods.indexed("node", &own).iter().for_each(|pod| enqueue(pod.key()));
        }
    });
}

/// Looks for changes in what the runtime has, and for pods that nobody knows any more.
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
                // Whose it is turns out later.
                let is_strange =
                    || pod.as_ref().is_some_and(|(key, uid)| node.pod_exactly(key, uid).is_none());
                if !is_filled && is_strange() {
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
                match node.pod_exactly(key, uid) {
                    Some(_) => node.look_at(key.clone()),
                    None => drop(tokio::spawn(remove_unknown(node.clone(), key.clone(), uid.clone()))),
                }
            }
            if known != now {
                node.news.send_modify(|count| *count += 1);
            }
            known = now;
        }
        tokio::select! {
            count = node.runtime.changed(changes) => {
                changes = count;
                tokio::time::sleep(GATHER).await;
            }
            Ok(()) = filled.changed() => {}
        }
    }
}

/// A pod that is gone from the API without this node having been told in time.
async fn remove_unknown(node: Arc<Node>, key: Key, uid: String) {
    while !worker::remove_all(&node, &uid).await {
        tokio::time::sleep(RELIST).await;
    }
    let _ = std::fs::remove_dir_all(node.settings.log_dir(&key, &uid));
    node.forget(&uid);
}

fn pod_of(labels: &BTreeMap<String, String>) -> Option<(Key, String)> {
    let key = Key::new(labels.get(POD_NAMESPACE)?, labels.get(POD_NAME)?);
    Some((key, labels.get(POD_UID)?.clone()))
}
