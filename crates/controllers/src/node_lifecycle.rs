//! Watches over nodes: says so when one is silent, keeps pods away from those that are not well, and makes pods
//! leave them, but not everywhere at once.
//!
//! A node lives as long as its lease is renewed or its status written ([`health`]). Nothing is asked regularly: the
//! loop looks again when the first node would become silent. How quickly pods leave is up to the zone ([`zones`]).

mod health;
mod plan;
#[cfg(test)]
mod tests;
mod zones;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use parking_lot::Mutex;
use reconcile::{Changed, Controller, Ctx, Enqueue, Error, Key, Next, Object, Patch, Severity, keys};
use serde_json::json;

use crate::disruption_condition::patch_pod_status;
use crate::{node, pod};
use health::Health;
use plan::{Leaving, NO_EXECUTE, NOT_READY, UNREACHABLE};
use zones::{Admission, Shift, Zones};

const WORKERS: usize = 8;
const LEASES: &str = "kube-node-lease";
const EXCLUDED: &str = "node.kubernetes.io/exclude-disruption";

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.acting_as("node-controller"),
        events: ctx.events.from("node-controller"),
        ..ctx
    };
    let nodes = Controller::new("node_lifecycle_controller", &ctx);
    nodes.on(ctx.caches.nodes(), keys::own::<Node>);
    nodes.on(ctx.caches.leases(), |changed: &Changed<'_, Lease>, enqueue| {
        if changed.newest().namespace() == LEASES {
            enqueue(Key::new("", changed.newest().name()));
        }
    });
    let pods = Controller::new("node_lifecycle_controller_pods", &ctx);
    pods.on(ctx.caches.pods(), |changed: &Changed<'_, Pod>, enqueue| {
        let before = changed.before.map(|pod| pod::node(pod).to_owned());
        let after = changed.after.map(|pod| pod::node(pod).to_owned());
        if before != after && after.is_some_and(|node| !node.is_empty()) {
            enqueue(changed.newest().key());
        }
    });
    let watch = Arc::new(Watch {
        ctx: ctx.clone(),
        enqueue: nodes.enqueue(),
        since: ctx.clock.now().as_second(),
        state: Mutex::default(),
    });
    let pod_watch = watch.clone();
    let look = move |key: Key| {
        let watch = watch.clone();
        async move { watch.reconcile(&key).await }
    };
    let look_at_pod = move |key: Key| {
        let watch = pod_watch.clone();
        async move { watch.new_pod(&key).await }
    };
    tokio::join!(nodes.run(&ctx, WORKERS, look), pods.run(&ctx, WORKERS, look_at_pod));
}

struct Watch {
    ctx: Ctx,
    enqueue: Enqueue,
    /// When this loop began, in seconds.
    since: i64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    health: HashMap<Key, (Health, String)>,
    zones: Zones,
    /// The nodes whose pods have yet to be told that they are not ready.
    untold: HashSet<Key>,
}

impl Watch {
    async fn reconcile(&self, key: &Key) -> Result<Next, Error> {
        let now = self.ctx.clock.now();
        let Some(node) = self.ctx.caches.nodes().get(key) else {
            self.forget(key);
            return Ok(Next::Change);
        };
        let lease = self.ctx.caches.leases().get(&Key::new(LEASES, node.name()));
        let silent_at = self.learn(key, &node, lease.as_deref(), now);
        let was_ready = node::is_ready(&node);
        let mut node = (*node).clone();
        let silent = now >= silent_at;
        if silent && let Some(conditions) = health::unknown(&node, now) {
            node.status.get_or_insert_default().conditions = Some(conditions);
            node = self.ctx.replace_status(&node).await?;
        }
        let recheck = self.taint(key, &node, now).await?;
        if was_ready && !node::is_ready(&node) {
            self.tell(&node, "NodeNotReady", format!("Node {} status is now: NodeNotReady", node.name()));
            self.state.lock().untold.insert(key.clone());
        }
        let untold = self.state.lock().untold.contains(key);
        if untold && !node::is_ready(&node) {
            for pod in self.ctx.caches.pods().indexed("node", node.name()) {
                self.not_ready(&pod, now).await?;
            }
        }
        self.state.lock().untold.remove(key);
        let silent_at = (!silent).then_some(silent_at);
        Ok(silent_at.into_iter().chain(recheck).min().map_or(Next::Change, Next::At))
    }

    /// Takes in what is known of a node and answers when it counts as silent.
    fn learn(&self, key: &Key, node: &Node, lease: Option<&Lease>, now: Timestamp) -> Timestamp {
        let mut state = self.state.lock();
        let before = state.health.remove(key).filter(|(_, uid)| uid == node.uid());
        let is_new = before.is_none();
        let health = Health::observe(before.map(|(health, _)| health), node, lease, now);
        let silent_at = health.silent_at(self.ctx.settings.silence);
        state.health.insert(key.clone(), (health, node.uid().to_owned()));
        drop(state);
        // Those that were here before have been told of before.
        let created = node.metadata.creation_timestamp.as_ref().map(|created| created.0.as_second());
        if is_new && created.is_some_and(|created| created >= self.since) {
            let name = node.name();
            self.tell(
                node,
                "RegisteredNode",
                format!("Node {name} event: Registered Node {name} in Controller"),
            );
        }
        silent_at
    }

    fn forget(&self, key: &Key) {
        let name = &*key.name;
        let (known, shift) = {
            let mut state = self.state.lock();
            state.untold.remove(key);
            (state.health.remove(key), state.zones.remove(name))
        };
        self.follow(shift);
        if let Some((_, uid)) = known {
            let about = reference(name, &uid);
            let message = format!("Node {name} event: Removing Node {name} from Controller");
            self.ctx.events.record(about, Severity::Normal, "RemovingNode", message);
        }
    }

    /// Gives the node the taints and labels it should have; answers when to look again.
    async fn taint(&self, key: &Key, node: &Node, now: Timestamp) -> Result<Option<Timestamp>, Error> {
        let ready = node::condition(node, "Ready").map(|condition| condition.status.as_str());
        let zone = zone(node);
        let shift = match node.label(EXCLUDED) {
            Some(_) => self.state.lock().zones.remove(node.name()),
            None => self.state.lock().zones.set(node.name(), &zone, ready == Some("True")),
        };
        self.follow(shift);
        let (leaving, recheck) = match ready {
            Some("True") => (Leaving::None, None),
            Some("False") => self.leaving(node, &zone, NOT_READY, UNREACHABLE, now),
            Some("Unknown") => self.leaving(node, &zone, UNREACHABLE, NOT_READY, now),
            _ => (Leaving::Keep, None),
        };
        let taints = plan::taints(node, leaving, now);
        let labels = plan::labels(node);
        if taints.is_some() || !labels.is_empty() {
            let mut patch = json!({"metadata": {"resourceVersion": node.metadata.resource_version}});
            if !labels.is_empty() {
                patch["metadata"]["labels"] = json!(labels);
            }
            if let Some(taints) = taints {
                patch["spec"]["taints"] = json!(taints);
            }
            match self.ctx.patch::<Node>(key, &Patch::Merge(patch)).await {
                Err(error) if error.is_not_found() => {}
                other => drop(other?),
            }
        }
        Ok(recheck)
    }

    /// What a node that is not well does to its pods.
    fn leaving(
        &self,
        node: &Node,
        zone: &str,
        key: &'static str,
        other: &str,
        now: Timestamp,
    ) -> (Leaving, Option<Timestamp>) {
        let mut state = self.state.lock();
        if state.zones.all_away() {
            return (Leaving::None, None);
        }
        if plan::has_taint(node, key, NO_EXECUTE) || plan::has_taint(node, other, NO_EXECUTE) {
            return (Leaving::For(key), None);
        }
        match state.zones.admit(zone, now) {
            Admission::Now => (Leaving::For(key), None),
            Admission::At(at) => (Leaving::Keep, Some(at)),
            Admission::Never => (Leaving::Keep, None),
        }
    }

    /// When zones fare otherwise, their nodes are looked at again.
    fn follow(&self, shift: Shift) {
        let all = || self.ctx.caches.nodes().all().into_iter();
        match shift {
            Shift::Nothing => {}
            Shift::Paces(zones) => {
                let there = all().filter(|node| zones.contains(&zone(node)));
                there.for_each(|node| self.enqueue.now(node.key()));
            }
            Shift::AllAway => all().for_each(|node| self.enqueue.now(node.key())),
            Shift::SomeBack => {
                let now = self.ctx.clock.now();
                self.state.lock().health.values_mut().for_each(|(health, _)| health.heard = now);
                all().for_each(|node| self.enqueue.now(node.key()));
            }
        }
    }

    /// A pod that comes to a node which is not ready is not ready either.
    async fn new_pod(&self, key: &Key) -> Result<Next, Error> {
        let Some(pod) = self.ctx.caches.pods().get(key) else { return Ok(Next::Forget) };
        let node = self.ctx.caches.nodes().get(&Key::new("", pod::node(&pod)));
        let known = node
            .is_some_and(|node| node::condition(&node, "Ready").is_some_and(|ready| ready.status != "True"));
        if known {
            self.not_ready(&pod, self.ctx.clock.now()).await?;
        }
        Ok(Next::Change)
    }

    async fn not_ready(&self, pod: &Pod, now: Timestamp) -> Result<(), Error> {
        let Some(ready) = pod::condition(pod, "Ready").filter(|ready| ready.status != "False") else {
            return Ok(());
        };
        let mut ready = ready.clone();
        ready.status = "False".into();
        ready.last_transition_time = Some(Time(now));
        match patch_pod_status(&self.ctx, pod, json!({"conditions": [ready]})).await {
            Err(error) if error.is_not_found() => return Ok(()),
            other => other?,
        }
        self.ctx.events.warning(pod, "NodeNotReady", "Node is not ready");
        Ok(())
    }

    fn tell(&self, node: &Node, reason: &str, message: String) {
        self.ctx.events.record(reference(node.name(), node.uid()), Severity::Normal, reason, message);
    }
}

fn reference(name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Node".into()),
        name: Some(name.into()),
        uid: Some(uid.into()),
        ..ObjectReference::default()
    }
}

/// Region and zone as one name.
fn zone(node: &Node) -> String {
    let part = |label: &str| node.label(label).unwrap_or_default().to_owned();
    let (region, zone) = (part("topology.kubernetes.io/region"), part("topology.kubernetes.io/zone"));
    if region.is_empty() && zone.is_empty() { String::new() } else { format!("{region}:\0:{zone}") }
}
