//! The main loop of the proxy: watches the cluster and keeps the nftables table in sync.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use nft::{Fragment, IpFamily, IpNet, Name, Ruleset};
use parking_lot::Mutex;
use podnet::HostPort;
use reconcile::{Ctx, EventType, Key, Object as _, ObjectUpdate, Recorder};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::base_ruleset::{base_rules, loopback, masquerade_outgoing};
use crate::conntrack;
use crate::firewall::{Firewall, FirewallError};
use crate::forwarding::allow_loopback;
use crate::health::HealthPorts;
use crate::host_firewall;
use crate::host_ports;
use crate::plan::{NodeTopology, ServicePlan, UdpPortTargets, plan};
use crate::policy;
use crate::ruleset_monitor::{RulesetChanges, RulesetMonitor};

const ZONE: &str = "topology.kubernetes.io/zone";
/// The fragment owner of host ports of pods that are unknown to the API server.
const STANDALONE_PODS: &str = "host-ports";
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// How long the kernel may need before it allows the deletion of a chain that is no longer referenced.
const CHAIN_DELETE_DELAY: Duration = Duration::from_secs(1);
/// The delay before a retry after a failed batch: initial and maximum.
const INITIAL_RETRY_DELAY: Duration = Duration::from_millis(500);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

/// The configuration of the proxy.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The name of this node.
    pub node: String,
    /// The pod networks. Traffic from them is cluster-internal.
    pub pods: Vec<IpNet>,
    /// The Service networks.
    pub services: Vec<IpNet>,
    /// Whether to masquerade traffic from pods to destinations outside the cluster.
    pub masquerade_outgoing: bool,
    /// Whether to enforce NetworkPolicies, which requires a watch on all pods.
    pub policies: bool,
    /// Whether to implement host ports. Only one component on a node may do this.
    pub host_ports: bool,
    /// The bridge with the node's addresses in its pod CIDRs. Host ports are reachable at loopback
    /// addresses only through this bridge and the links with its addresses. Without the bridge, as with
    /// other CNI plugins, they are not.
    pub bridge: Option<&'static str>,
    /// Whether to accept pod traffic in the tables of Docker, ufw and firewalld.
    pub accept_in_host_firewall: bool,
    /// The host ports of pods that are unknown to the API server, for example pods created through the
    /// runtime's socket.
    pub ports: Option<watch::Receiver<Vec<HostPort>>>,
}

/// Keeps the table in sync until shutdown. The table stays afterwards, so that connections survive a
/// restart.
pub async fn run(ctx: Ctx, config: Config, firewall: Arc<dyn Firewall>) {
    let tracker = Arc::new(ChangeTracker::default());
    listen(&ctx, &config, &tracker);
    let mut ports = config.ports.clone();
    let mut shutdown = ctx.shutdown.clone();
    let guard = monitor_ruleset(
        &config,
        firewall.clone(),
        || tracker.table_lost(),
        Some((&ctx.events, &config.node)),
    );
    let (ctx, config) = (ctx.clone(), config.clone());
    let work = async {
        ctx.caches.wait_for_sync().await;
        Proxy::new(ctx.clone(), config, firewall).run(&tracker).await;
    };
    let others = async {
        loop {
            tracker.standalone_ports_changed();
            changed(&mut ports).await;
        }
    };
    tokio::select! {
        () = work => {}
        () = others => {}
        () = guard => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
}

/// Keeps a table with only the host ports of pods that are unknown to the API server and, if
/// configured, masquerading.
pub async fn run_standalone(config: Config, firewall: Arc<dyn Firewall>) {
    let (lost, guarded) = (Notify::new(), firewall.clone());
    let guard = monitor_ruleset(&config, guarded, || lost.notify_one(), None);
    tokio::select! {
        () = guard => {}
        () = sync_ports(&config, firewall, &lost) => {}
    }
}

async fn sync_ports(config: &Config, firewall: Arc<dyn Firewall>, lost: &Notify) {
    let mut table = KernelTable::new(config, firewall);
    let mut retry_delay = INITIAL_RETRY_DELAY;
    let mut ports = config.ports.clone();
    loop {
        if let Some(ports) = &mut ports {
            table
                .rules
                .put(&STANDALONE_PODS.into(), host_ports::redirect_fragment(&ports.borrow_and_update()));
        }
        if let Err(error) = table.sync().await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "failed to apply nftables rules, will retry with the full ruleset"
            );
            table.lost = true;
            tokio::time::sleep(retry_delay).await;
            retry_delay = (retry_delay * 2).min(MAX_RETRY_DELAY);
            continue;
        }
        retry_delay = INITIAL_RETRY_DELAY;
        tokio::select! {
            () = changed(&mut ports) => {}
            () = lost.notified() => table.lost = true,
        }
    }
}

/// Monitors nftables for changes of other programs: calls `lost` when parts of our table were deleted,
/// and accepts pod traffic in tables that drop it. Rules that cannot be changed are logged and reported
/// as events of the node.
async fn monitor_ruleset(
    config: &Config,
    firewall: Arc<dyn Firewall>,
    lost: impl Fn(),
    events: Option<(&Recorder, &str)>,
) {
    // A fake firewall has no table in the kernel.
    if firewall.port().is_none() && !config.accept_in_host_firewall {
        return std::future::pending().await;
    }
    let monitor = RulesetMonitor::open();
    let own_table = KernelTable::new(config, firewall.clone());
    let mut reported: Vec<String> = Vec::new();
    let mut changes = RulesetChanges::default();
    loop {
        if changes.own_removed {
            tracing::warn!("another program deleted rules of our table, writing the full ruleset");
            lost();
        }
        if config.accept_in_host_firewall {
            let pods = config.pods.clone();
            let accepted = tokio::task::spawn_blocking(move || host_firewall::accept(&pods)).await;
            match accepted {
                Ok(Ok(found)) => {
                    if changes.has_overflow
                        && !found.has_base_chains(own_table.rules.base_chains().map(|(name, _)| name))
                    {
                        lost();
                    }
                    report(&found.blocking_rules, &reported, events);
                    reported = found.blocking_rules;
                }
                Ok(Err(error)) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "failed to accept pod traffic in the tables of other programs");
                }
                Err(_) => {}
            }
        }
        changes = monitor.changed(|| firewall.port()).await;
    }
}

/// Reports the rules that were not reported before.
fn report(found: &[String], before: &[String], events: Option<(&Recorder, &str)>) {
    for obstacle in found.iter().filter(|obstacle| !before.contains(obstacle)) {
        tracing::warn!("{obstacle}; add a rule there that accepts the pod networks");
        let Some((events, node)) = events else { continue };
        let node = ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        events.record(node, EventType::Warning, "PodTrafficDropped", obstacle.clone());
    }
}

/// Waits for a change of the ports, forever if there can be none.
async fn changed(ports: &mut Option<watch::Receiver<Vec<HostPort>>>) {
    if let Some(ports) = ports
        && ports.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// Collects changes between two syncs.
#[derive(Default)]
struct ChangeTracker {
    dirty: Mutex<PendingProxyChanges>,
    notify: Notify,
}

#[derive(Default)]
struct PendingProxyChanges {
    services: BTreeSet<Key>,
    /// The Node object has changed.
    topology: bool,
    policies: policy::PendingPolicies,
    /// Pods with host ports.
    host_ports: BTreeSet<Key>,
    /// The host ports of pods that are unknown to the API server.
    standalone_ports: bool,
    /// Another program has deleted parts of the table.
    lost: bool,
}

impl ChangeTracker {
    fn service_changed(&self, key: Key) {
        self.dirty.lock().services.insert(key);
        self.notify.notify_one();
    }

    fn node_changed(&self) {
        self.dirty.lock().topology = true;
        self.notify.notify_one();
    }

    fn policies_changed(&self, change: &dyn Fn(&mut policy::PendingPolicies)) {
        change(&mut self.dirty.lock().policies);
        self.notify.notify_one();
    }

    fn host_ports_changed(&self, key: Key) {
        self.dirty.lock().host_ports.insert(key);
        self.notify.notify_one();
    }

    fn standalone_ports_changed(&self) {
        self.dirty.lock().standalone_ports = true;
        self.notify.notify_one();
    }

    fn table_lost(&self) {
        self.dirty.lock().lost = true;
        self.notify.notify_one();
    }

    fn take(&self) -> PendingProxyChanges {
        std::mem::take(&mut *self.dirty.lock())
    }
}

fn listen(ctx: &Ctx, config: &Config, tracker: &Arc<ChangeTracker>) {
    let changes = tracker.clone();
    ctx.caches.services().listen(move |changed| changes.service_changed(changed.latest().key()));
    let changes = tracker.clone();
    ctx.caches.endpoint_slices().listen(move |changed| {
        for slice in [changed.before, changed.after].into_iter().flatten() {
            if let Some(service) = slice.label(SERVICE_NAME) {
                changes.service_changed(Key::new(slice.namespace(), service));
            }
        }
    });
    if config.policies {
        let changes = tracker.clone();
        policy::listen(&ctx.caches, &config.node, move |change| changes.policies_changed(change));
    }
    if config.host_ports {
        let changes = tracker.clone();
        host_ports::listen(&ctx.caches, &config.node, move |key| changes.host_ports_changed(key));
    }
    let (changes, name) = (tracker.clone(), config.node.clone());
    ctx.caches.nodes().listen(move |ObjectUpdate { before, after }: ObjectUpdate<'_, Node>| {
        let seen = |node: &Arc<Node>| (node.label(ZONE).map(str::to_owned), addresses(node));
        let is_own = after.or(before).is_some_and(|node| node.name() == name);
        if is_own && before.map(seen) != after.map(seen) {
            changes.node_changed();
        }
    });
}

fn addresses(node: &Node) -> Vec<std::net::IpAddr> {
    let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref()).into_iter().flatten();
    let internal = addresses.filter(|address| address.type_ == "InternalIP");
    internal.filter_map(|address| address.address.parse().ok()).collect()
}

struct Proxy {
    ctx: Ctx,
    config: Config,
    table: KernelTable,
    topology: NodeTopology,
    health: HealthPorts,
    /// By Service, for those with UDP ports.
    udp_ports: HashMap<Key, Vec<UdpPortTargets>>,
    /// UDP ports whose stale conntrack entries must be deleted after the next successful sync.
    stale: Vec<UdpPortTargets>,
}

/// The desired content of the table and its sync state.
struct KernelTable {
    firewall: Arc<dyn Firewall>,
    rules: Ruleset,
    bridge: Option<&'static str>,
    /// The state of the kernel is unknown, so everything must be written.
    lost: bool,
    synced_at: Instant,
}

impl KernelTable {
    fn new(config: &Config, firewall: Arc<dyn Firewall>) -> KernelTable {
        let mut rules = Ruleset::default();
        rules.put(&"".into(), base_rules(&config.pods, &config.services));
        if config.masquerade_outgoing {
            rules.put(&"outgoing".into(), masquerade_outgoing(&config.pods));
        }
        if config.policies {
            rules.put(&"policies".into(), policy::plan::base_rules());
        }
        KernelTable { firewall, rules, bridge: config.bridge, lost: true, synced_at: Instant::now() }
    }

    async fn sync(&mut self) -> Result<(), FirewallError> {
        self.sync_rules().await?;
        // The order matters. `route_localnet` is enabled only after the base rules, which keep pods
        // from services that listen on loopback addresses. The rules that redirect loopback traffic to
        // pods follow only if it was enabled.
        let passes = self.bridge.is_some_and(|bridge| allow_loopback(bridge, true).is_ok());
        self.rules.put(&"loopback".into(), if passes { loopback() } else { Fragment::default() });
        self.sync_rules().await
    }

    async fn sync_rules(&mut self) -> Result<(), FirewallError> {
        let batch = match self.lost {
            true => self.rules.full_batch(),
            false if self.synced_at.elapsed() > CHAIN_DELETE_DELAY => self.rules.changes_and_prune(),
            false => self.rules.changes(),
        };
        if batch.is_empty() {
            return Ok(());
        }
        let firewall = self.firewall.clone();
        let applied = tokio::task::spawn_blocking(move || firewall.apply(&batch)).await;
        // A panic is handled like any other failure: the state of the kernel is unknown.
        applied.unwrap_or_else(|error| Err(FirewallError::Rejected(error.to_string())))?;
        self.lost = false;
        self.synced_at = Instant::now();
        Ok(())
    }
}

impl Proxy {
    fn new(ctx: Ctx, config: Config, firewall: Arc<dyn Firewall>) -> Proxy {
        Proxy {
            topology: NodeTopology {
                node: config.node.clone(),
                pods: config.pods.clone(),
                ..NodeTopology::default()
            },
            table: KernelTable::new(&config, firewall),
            ctx,
            config,
            health: HealthPorts::default(),
            udp_ports: HashMap::new(),
            stale: Vec::new(),
        }
    }

    async fn run(mut self, tracker: &ChangeTracker) {
        let mut retry_delay = INITIAL_RETRY_DELAY;
        loop {
            let mut dirty = tracker.take();
            self.table.lost |= dirty.lost;
            if dirty.topology && self.update_topology() {
                dirty.services.extend(self.ctx.caches.services().all().iter().map(|service| service.key()));
            }
            for key in &dirty.services {
                self.sync_service(key).await;
            }
            let Config { node, .. } = &self.config;
            policy::apply(&self.ctx.caches, dirty.policies, node, &IpFamily::ALL, &mut self.table.rules);
            for key in &dirty.host_ports {
                host_ports::apply(&self.ctx.caches, key, node, &mut self.table.rules);
            }
            if let Some(ports) = self.config.ports.as_ref().filter(|_| dirty.standalone_ports) {
                self.table.rules.put(&STANDALONE_PODS.into(), host_ports::redirect_fragment(&ports.borrow()));
            }
            let result = self.table.sync().await;
            self.health.set_healthy(result.is_ok());
            match result {
                Ok(()) => retry_delay = INITIAL_RETRY_DELAY,
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "failed to apply nftables rules, will retry with the full ruleset"
                    );
                    self.table.lost = true;
                    tokio::time::sleep(retry_delay).await;
                    retry_delay = (retry_delay * 2).min(MAX_RETRY_DELAY);
                    continue;
                }
            }
            self.delete_stale_conntrack().await;
            tracker.notify.notified().await;
        }
    }

    /// Updates the topology of this node. Returns whether it has changed.
    fn update_topology(&mut self) -> bool {
        let node = self.ctx.caches.nodes().get(&Key::new("", &self.config.node));
        let zone = node.as_ref().and_then(|node| node.label(ZONE)).unwrap_or_default().to_owned();
        let addresses = node.as_deref().map(addresses).unwrap_or_default();
        let topology = NodeTopology { zone, addresses, ..self.topology.clone() };
        let has_changed = self.topology != topology;
        self.topology = topology;
        has_changed
    }

    async fn sync_service(&mut self, key: &Key) {
        let service = self.ctx.caches.services().get(key);
        let slices = self.ctx.caches.endpoint_slices().indexed("service", &key.to_string());
        let ServicePlan { fragment, health, udp_ports } =
            service.map_or_else(ServicePlan::default, |service| plan(&service, &slices, &self.topology));
        self.table.rules.put(&owner(key), fragment);
        self.health.set(key, health.as_ref()).await;
        if self.udp_ports.get(key).map_or(&[][..], Vec::as_slice) != udp_ports.as_slice() {
            self.stale.extend(udp_ports.clone());
        }
        if udp_ports.is_empty() {
            self.udp_ports.remove(key);
        } else {
            self.udp_ports.insert(key.clone(), udp_ports);
        }
    }

    /// The table only affects new flows. Deleting the entries of flows to removed endpoints makes them
    /// start again.
    async fn delete_stale_conntrack(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        if stale.is_empty() {
            return;
        }
        let result = tokio::task::spawn_blocking(move || conntrack::delete_stale_entries(&stale)).await;
        if let Ok(Err(error)) = result {
            tracing::warn!(%error, "failed to delete stale conntrack entries of UDP flows");
        }
    }
}

fn owner(service: &Key) -> Name {
    format!("service/{service}").into()
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts the batches.
    #[derive(Default)]
    struct CountingFirewall(AtomicUsize);

    impl Firewall for CountingFirewall {
        fn apply(&self, _: &nft::Batch) -> Result<(), FirewallError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    #[tokio::test]
    async fn waits_while_ports_do_not_change() {
        let (ports, seen) = watch::channel(Vec::new());
        let config = Config { ports: Some(seen), ..Config::default() };
        let (firewall, polled) = (Arc::new(CountingFirewall::default()), Arc::new(AtomicUsize::new(0)));
        let mut work = Box::pin(run_standalone(config, firewall.clone()));
        let count = polled.clone();
        let counted = poll_fn(move |context| {
            count.fetch_add(1, Ordering::Relaxed);
            work.as_mut().poll(context)
        });
        tokio::spawn(counted);
        let port = HostPort {
            pod: "d/web".to_owned(),
            address: "10.42.0.5".parse().unwrap(),
            port: 80,
            protocol: "TCP".to_owned(),
            host_ip: String::new(),
            host_port: 8080,
        };
        for (changes, ports_now) in [vec![port.clone()], Vec::new(), vec![port]].into_iter().enumerate() {
            ports.send_replace(ports_now);
            while firewall.0.load(Ordering::Relaxed) <= changes {
                tokio::task::yield_now().await;
            }
        }
        polled.store(0, Ordering::Relaxed);
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        assert!(polled.load(Ordering::Relaxed) < 20, "unchanged ports are not synced again");
    }
}
