//! Listens to the cluster and keeps the table as the plans say.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use nft::foreign::Obstacle;
use nft::{Fragment, Ip, Name, Net, Ruleset};
use parking_lot::Mutex;
use podnet::HostPort;
use reconcile::{Changed, Ctx, Key, Object as _, Recorder, Severity};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::conntrack;
use crate::firewall::{Firewall, FirewallError};
use crate::forwarding::pass_loopback;
use crate::health::HealthPorts;
use crate::host_firewall;
use crate::host_ports;
use crate::plan::{Flows, Place, Plan, plan};
use crate::policy;
use crate::ruleset_monitor::{Changes, RulesetMonitor};
use crate::skeleton::{loopback, skeleton, way_out};

const ZONE: &str = "topology.kubernetes.io/zone";
/// Who asks for the ports of pods that no API server knows.
const OTHERS: &str = "host-ports";
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// How long the kernel may need until it believes that nothing leads to a chain any more.
const GRACE: Duration = Duration::from_secs(1);
/// How long to wait after a batch was not taken, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What the proxy is told.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The name of this node.
    pub node: String,
    /// The networks of pods: what comes from there comes from inside.
    pub pods: Vec<Net>,
    /// The networks of Services.
    pub services: Vec<Net>,
    /// Whether pods reach the outside by this node's address.
    pub way_out: bool,
    /// Whether to hold connections to NetworkPolicies, for which one has to know all pods.
    pub policies: bool,
    /// Whether to open ports of this machine that pods ask for. Whoever says so keeps others from doing it, too.
    pub host_ports: bool,
    /// The bridge with this node's addresses in its pods' ranges. Host ports can be reached from loopback addresses over
    /// the links that have these addresses, too. Where it does not exist, as with an administrator's CNI plugins, they
    /// cannot.
    pub bridge: Option<&'static str>,
    /// Whether to accept packets of pods in the tables of Docker, ufw and firewalld.
    pub accept: bool,
    /// The same as `host_ports` for pods that no API server knows, as those are that somebody makes by the runtime's socket.
    pub ports: Option<watch::Receiver<Vec<HostPort>>>,
}

/// Keeps the table until the context's shutdown. The table stays then, so that connections do.
pub async fn run(ctx: Ctx, config: Config, firewall: Arc<dyn Firewall>) {
    let news = Arc::new(News::default());
    listen(&ctx, &config, &news);
    let mut ports = config.ports.clone();
    let mut shutdown = ctx.shutdown.clone();
    let guard = guard(&config, firewall.clone(), || news.lost(), Some((&ctx.events, &config.node)));
    let (ctx, config) = (ctx.clone(), config.clone());
    let work = async {
        ctx.caches.filled().await;
        Proxy::new(ctx.clone(), config, firewall).work(&news).await;
    };
    let others = async {
        loop {
            news.others();
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

/// Keeps a table that has nothing but the ports of pods that no API server knows, and the way out, where there is one.
pub async fn run_alone(config: Config, firewall: Arc<dyn Firewall>) {
    let (lost, guarded) = (Notify::new(), firewall.clone());
    let guard = guard(&config, guarded, || lost.notify_one(), None);
    tokio::select! {
        () = guard => {}
        () = keep_ports(&config, firewall, &lost) => {}
    }
}

async fn keep_ports(config: &Config, firewall: Arc<dyn Firewall>, lost: &Notify) {
    let mut table = Table::new(config, firewall);
    let mut pause = FIRST_PAUSE;
    let mut ports = config.ports.clone();
    loop {
        if let Some(ports) = &mut ports {
            table.rules.put(&OTHERS.into(), host_ports::lead_to(&ports.borrow_and_update()));
        }
        if let Err(error) = table.tell().await {
            tracing::warn!(error = &error as &dyn std::error::Error, "trying again with all rules");
            table.lost = true;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            continue;
        }
        pause = FIRST_PAUSE;
        tokio::select! {
            () = changed(&mut ports) => {}
            () = lost.notified() => table.lost = true,
        }
    }
}

/// Notices what other programs do in nftables: says when our table has lost something, and accepts packets of pods in
/// tables that drop them. What cannot be accepted is logged, and reported by an event about the node.
async fn guard(
    config: &Config,
    firewall: Arc<dyn Firewall>,
    lost: impl Fn(),
    events: Option<(&Recorder, &str)>,
) {
    // A fake keeps no table in the kernel.
    if firewall.port().is_none() && !config.accept {
        return std::future::pending().await;
    }
    let monitor = RulesetMonitor::open();
    let bases = Table::new(config, firewall.clone());
    let mut reported: Vec<Obstacle> = Vec::new();
    let mut changes = Changes::default();
    loop {
        if changes.own_removed {
            tracing::warn!("another program has removed rules of ours, writing all of them again");
            lost();
        }
        if config.accept {
            let pods = config.pods.clone();
            let accepted = tokio::task::spawn_blocking(move || host_firewall::accept(&pods)).await;
            match accepted {
                Ok(Ok(found)) => {
                    if changes.overflowed && !found.has_own(bases.rules.bases().map(|(name, _)| name)) {
                        lost();
                    }
                    report(&found.obstacles, &reported, events);
                    reported = found.obstacles;
                }
                Ok(Err(error)) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "cannot accept packets of pods in the tables of other programs");
                }
                Err(_) => {}
            }
        }
        changes = monitor.changed(|| firewall.port()).await;
    }
}

/// Reports obstacles that were not reported before.
fn report(found: &[Obstacle], before: &[Obstacle], events: Option<(&Recorder, &str)>) {
    for obstacle in found.iter().filter(|obstacle| !before.contains(obstacle)) {
        tracing::warn!("{obstacle}; accept the networks of pods there");
        let Some((events, node)) = events else { continue };
        let node = ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        events.record(node, Severity::Warning, "PodTrafficDropped", obstacle.to_string());
    }
}

/// Waits for a change; for ever where there is none to come.
async fn changed(ports: &mut Option<watch::Receiver<Vec<HostPort>>>) {
    if let Some(ports) = ports
        && ports.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// What has to be looked at.
#[derive(Default)]
struct News {
    dirty: Mutex<Dirty>,
    notify: Notify,
}

#[derive(Default)]
struct Dirty {
    services: BTreeSet<Key>,
    /// The node itself has changed.
    place: bool,
    policies: policy::Dirty,
    /// Pods with ports of this machine.
    host_ports: BTreeSet<Key>,
    /// The ports of pods that no API server knows.
    others: bool,
    /// Somebody else has removed a part of the table.
    lost: bool,
}

impl News {
    fn service(&self, key: Key) {
        self.dirty.lock().services.insert(key);
        self.notify.notify_one();
    }

    fn place(&self) {
        self.dirty.lock().place = true;
        self.notify.notify_one();
    }

    fn policies(&self, change: &dyn Fn(&mut policy::Dirty)) {
        change(&mut self.dirty.lock().policies);
        self.notify.notify_one();
    }

    fn host_ports(&self, key: Key) {
        self.dirty.lock().host_ports.insert(key);
        self.notify.notify_one();
    }

    fn others(&self) {
        self.dirty.lock().others = true;
        self.notify.notify_one();
    }

    fn lost(&self) {
        self.dirty.lock().lost = true;
        self.notify.notify_one();
    }

    fn take(&self) -> Dirty {
        std::mem::take(&mut *self.dirty.lock())
    }
}

fn listen(ctx: &Ctx, config: &Config, news: &Arc<News>) {
    let tell = news.clone();
    ctx.caches.services().listen(move |changed| tell.service(changed.newest().key()));
    let tell = news.clone();
    ctx.caches.endpoint_slices().listen(move |changed| {
        for slice in [changed.before, changed.after].into_iter().flatten() {
            if let Some(service) = slice.label(SERVICE_NAME) {
                tell.service(Key::new(slice.namespace(), service));
            }
        }
    });
    if config.policies {
        let tell = news.clone();
        policy::listen(&ctx.caches, &config.node, move |change| tell.policies(change));
    }
    if config.host_ports {
        let tell = news.clone();
        host_ports::listen(&ctx.caches, &config.node, move |key| tell.host_ports(key));
    }
    let (tell, name) = (news.clone(), config.node.clone());
    ctx.caches.nodes().listen(move |Changed { before, after }: Changed<'_, Node>| {
        let seen = |node: &Arc<Node>| (node.label(ZONE).map(str::to_owned), addresses(node));
        let is_own = after.or(before).is_some_and(|node| node.name() == name);
        if is_own && before.map(seen) != after.map(seen) {
            tell.place();
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
    table: Table,
    place: Place,
    health: HealthPorts,
    /// Of Services with UDP ports.
    flows: HashMap<Key, Vec<Flows>>,
    /// Flows that may have to be forgotten once the table is right.
    stale: Vec<Flows>,
}

/// What the kernel is to have, and what it was told of it.
struct Table {
    firewall: Arc<dyn Firewall>,
    rules: Ruleset,
    bridge: Option<&'static str>,
    /// The kernel may have anything, so it is told everything.
    lost: bool,
    told_at: Instant,
}

impl Table {
    fn new(config: &Config, firewall: Arc<dyn Firewall>) -> Table {
        let mut rules = Ruleset::default();
        rules.put(&"".into(), skeleton(&config.pods, &config.services));
        if config.way_out {
            rules.put(&"way-out".into(), way_out(&config.pods));
        }
        if config.policies {
            rules.put(&"policies".into(), policy::plan::skeleton());
        }
        Table { firewall, rules, bridge: config.bridge, lost: true, told_at: Instant::now() }
    }

    async fn tell(&mut self) -> Result<(), FirewallError> {
        self.tell_rules().await?;
        // Pods must not pass to what listens here before the rules keep them from it, and nothing is led to pods that
        // does not pass.
        let passes = self.bridge.is_some_and(|bridge| pass_loopback(bridge, true).is_ok());
        self.rules.put(&"loopback".into(), if passes { loopback() } else { Fragment::default() });
        self.tell_rules().await
    }

    async fn tell_rules(&mut self) -> Result<(), FirewallError> {
        let batch = match self.lost {
            true => self.rules.everything(),
            false if self.told_at.elapsed() > GRACE => self.rules.changes_and_sweep(),
            false => self.rules.changes(),
        };
        if batch.is_empty() {
            return Ok(());
        }
        let firewall = self.firewall.clone();
        let applied = tokio::task::spawn_blocking(move || firewall.apply(&batch)).await;
        // A panic in there is a failure like any other: nothing is known of the kernel then.
        applied.unwrap_or_else(|error| Err(FirewallError::Refused(error.to_string())))?;
        self.lost = false;
        self.told_at = Instant::now();
        Ok(())
    }
}

impl Proxy {
    fn new(ctx: Ctx, config: Config, firewall: Arc<dyn Firewall>) -> Proxy {
        Proxy {
            place: Place { node: config.node.clone(), pods: config.pods.clone(), ..Place::default() },
            table: Table::new(&config, firewall),
            ctx,
            config,
            health: HealthPorts::default(),
            flows: HashMap::new(),
            stale: Vec::new(),
        }
    }

    async fn work(mut self, news: &News) {
        let mut pause = FIRST_PAUSE;
        loop {
            let mut dirty = news.take();
            self.table.lost |= dirty.lost;
            if dirty.place && self.look_around() {
                dirty.services.extend(self.ctx.caches.services().all().iter().map(|service| service.key()));
            }
            for key in &dirty.services {
                self.look_at(key).await;
            }
            let Config { node, .. } = &self.config;
            policy::apply(&self.ctx.caches, dirty.policies, node, &Ip::BOTH, &mut self.table.rules);
            for key in &dirty.host_ports {
                host_ports::apply(&self.ctx.caches, key, node, &mut self.table.rules);
            }
            if let Some(ports) = self.config.ports.as_ref().filter(|_| dirty.others) {
                self.table.rules.put(&OTHERS.into(), host_ports::lead_to(&ports.borrow()));
            }
            let outcome = self.table.tell().await;
            self.health.set_healthy(outcome.is_ok());
            match outcome {
                Ok(()) => pause = FIRST_PAUSE,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "trying again with all rules");
                    self.table.lost = true;
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    continue;
                }
            }
            self.forget_flows().await;
            news.notify.notified().await;
        }
    }

    /// Whether this node is another one now, as far as Services go.
    fn look_around(&mut self) -> bool {
        let node = self.ctx.caches.nodes().get(&Key::new("", &self.config.node));
        let zone = node.as_ref().and_then(|node| node.label(ZONE)).unwrap_or_default().to_owned();
        let addresses = node.as_deref().map(addresses).unwrap_or_default();
        let place = Place { zone, addresses, ..self.place.clone() };
        let has_changed = self.place != place;
        self.place = place;
        has_changed
    }

    async fn look_at(&mut self, key: &Key) {
        let service = self.ctx.caches.services().get(key);
        let slices = self.ctx.caches.endpoint_slices().indexed("service", &key.to_string());
        let Plan { fragment, health, flows } =
            service.map_or_else(Plan::default, |service| plan(&service, &slices, &self.place));
        self.table.rules.put(&owner(key), fragment);
        self.health.set(key, health.as_ref()).await;
        if self.flows.get(key).map_or(&[][..], Vec::as_slice) != flows.as_slice() {
            self.stale.extend(flows.clone());
        }
        if flows.is_empty() {
            self.flows.remove(key);
        } else {
            self.flows.insert(key.clone(), flows);
        }
    }

    /// The table only decides about new flows, so those to endpoints that are gone are made to begin anew.
    async fn forget_flows(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        if stale.is_empty() {
            return;
        }
        let outcome = tokio::task::spawn_blocking(move || conntrack::forget(&stale)).await;
        if let Ok(Err(error)) = outcome {
            tracing::warn!(%error, "cannot clean up UDP flows");
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

    /// Counts what it is asked for.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Firewall for Counting {
        fn apply(&self, _: &nft::Batch) -> Result<(), FirewallError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    #[tokio::test]
    async fn who_knows_the_ports_rests() {
        let (ports, seen) = watch::channel(Vec::new());
        let config = Config { ports: Some(seen), ..Config::default() };
        let (firewall, polled) = (Arc::new(Counting::default()), Arc::new(AtomicUsize::new(0)));
        let mut work = Box::pin(run_alone(config, firewall.clone()));
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
        assert!(polled.load(Ordering::Relaxed) < 20, "it looks at the same ports over and over");
    }
}
