//! Node lifecycle controller: marks unresponsive nodes as `Unknown`, taints unhealthy nodes, and limits the
//! rate at which nodes get `NoExecute` taints.
//!
//! A node is healthy as long as its Lease is renewed or its status is updated ([`health`]). There is no
//! polling: a node is synced again when its grace period ends. Eviction rates depend on the zone
//! ([`zones`]).
//!
//! Upstream: `pkg/controller/nodelifecycle`.

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
use reconcile::{
    Controller, Ctx, Enqueue, Error, EventType, Key, Object, ObjectUpdate, Patch, ReconcileAction, keys,
};
use serde_json::json;

use crate::disruption_condition::patch_pod_status;
use crate::{node, pod};
use health::NodeHealth;
use plan::{NO_EXECUTE, NOT_READY, NoExecuteTaint, UNREACHABLE};
use zones::{RateLimit, ZoneChange, Zones};

const WORKERS: usize = 8;
const LEASE_NAMESPACE: &str = "kube-node-lease";
const EXCLUDE_DISRUPTION: &str = "node.kubernetes.io/exclude-disruption";

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.impersonate("node-controller"),
        events: ctx.events.from("node-controller"),
        ..ctx
    };
    let nodes = Controller::new("node_lifecycle_controller", &ctx);
    nodes.on(ctx.caches.nodes(), keys::own::<Node>);
    nodes.on(ctx.caches.leases(), |changed: &ObjectUpdate<'_, Lease>, enqueue| {
        if changed.latest().namespace() == LEASE_NAMESPACE {
            enqueue(Key::new("", changed.latest().name()));
        }
    });
    let pods = Controller::new("node_lifecycle_controller_pods", &ctx);
    pods.on(ctx.caches.pods(), |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        let before = changed.before.map(|pod| pod::node(pod).to_owned());
        let after = changed.after.map(|pod| pod::node(pod).to_owned());
        if before != after && after.is_some_and(|node| !node.is_empty()) {
            enqueue(changed.latest().key());
        }
    });
    let monitor = Arc::new(NodeMonitor {
        ctx: ctx.clone(),
        enqueue: nodes.enqueue(),
        since: ctx.clock.now().as_second(),
        state: Mutex::default(),
    });
    let pod_monitor = monitor.clone();
    let sync_node = move |key: Key| {
        let monitor = monitor.clone();
        async move { monitor.reconcile(&key).await }
    };
    let sync_pod = move |key: Key| {
        let monitor = pod_monitor.clone();
        async move { monitor.sync_new_pod(&key).await }
    };
    tokio::join!(nodes.run(&ctx, WORKERS, sync_node), pods.run(&ctx, WORKERS, sync_pod));
}

struct NodeMonitor {
    ctx: Ctx,
    enqueue: Enqueue,
    /// When this controller started, in seconds.
    since: i64,
    state: Mutex<MonitorState>,
}

#[derive(Default)]
struct MonitorState {
    health: HashMap<Key, (NodeHealth, String)>,
    zones: Zones,
    /// Nodes that became not ready and whose pods still have to be marked as not ready.
    not_ready_pending: HashSet<Key>,
}

impl NodeMonitor {
    async fn reconcile(&self, key: &Key) -> Result<ReconcileAction, Error> {
        let now = self.ctx.clock.now();
        let Some(node) = self.ctx.caches.nodes().get(key) else {
            self.forget(key);
            return Ok(ReconcileAction::AwaitChange);
        };
        let lease = self.ctx.caches.leases().get(&Key::new(LEASE_NAMESPACE, node.name()));
        let silent_at = self.observe_health(key, &node, lease.as_deref(), now);
        let was_ready = node::is_ready(&node);
        let mut node = (*node).clone();
        let silent = now >= silent_at;
        if silent && let Some(conditions) = health::unknown_conditions(&node, now) {
            node.status.get_or_insert_default().conditions = Some(conditions);
            node = self.ctx.replace_status(&node).await?;
        }
        let requeue_at = self.taint(key, &node, now).await?;
        if was_ready && !node::is_ready(&node) {
            self.record_event(
                &node,
                "NodeNotReady",
                format!("Node {} status is now: NodeNotReady", node.name()),
            );
            self.state.lock().not_ready_pending.insert(key.clone());
        }
        let not_ready_pending = self.state.lock().not_ready_pending.contains(key);
        if not_ready_pending && !node::is_ready(&node) {
            for pod in self.ctx.caches.pods().indexed("node", node.name()) {
                self.mark_pod_not_ready(&pod, now).await?;
            }
        }
        self.state.lock().not_ready_pending.remove(key);
        let silent_at = (!silent).then_some(silent_at);
        Ok(silent_at
            .into_iter()
            .chain(requeue_at)
            .min()
            .map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt))
    }

    /// Updates the health of a node. Returns when its grace period ends.
    fn observe_health(&self, key: &Key, node: &Node, lease: Option<&Lease>, now: Timestamp) -> Timestamp {
        let mut state = self.state.lock();
        let before = state.health.remove(key).filter(|(_, uid)| uid == node.uid());
        let is_new = before.is_none();
        let health = NodeHealth::observe(before.map(|(health, _)| health), node, lease, now);
        let silent_at = health.grace_period_end(self.ctx.settings.node_monitor);
        state.health.insert(key.clone(), (health, node.uid().to_owned()));
        drop(state);
        // Nodes from before the start of this controller were reported by its predecessor.
        let created = node.metadata.creation_timestamp.as_ref().map(|created| created.0.as_second());
        if is_new && created.is_some_and(|created| created >= self.since) {
            let name = node.name();
            self.record_event(
                node,
                "RegisteredNode",
                format!("Node {name} event: Registered Node {name} in Controller"),
            );
        }
        silent_at
    }

    fn forget(&self, key: &Key) {
        let name = &*key.name;
        let (known, zone_change) = {
            let mut state = self.state.lock();
            state.not_ready_pending.remove(key);
            (state.health.remove(key), state.zones.remove(name))
        };
        self.handle_zone_change(zone_change);
        if let Some((_, uid)) = known {
            let about = reference(name, &uid);
            let message = format!("Node {name} event: Removing Node {name} from Controller");
            self.ctx.events.record(about, EventType::Normal, "RemovingNode", message);
        }
    }

    /// Updates the taints and labels of a node. Returns when to sync again.
    async fn taint(&self, key: &Key, node: &Node, now: Timestamp) -> Result<Option<Timestamp>, Error> {
        let ready = node::condition(node, "Ready").map(|condition| condition.status.as_str());
        let zone = zone_key(node);
        let zone_change = match node.label(EXCLUDE_DISRUPTION) {
            Some(_) => self.state.lock().zones.remove(node.name()),
            None => self.state.lock().zones.set(node.name(), &zone, ready == Some("True")),
        };
        self.handle_zone_change(zone_change);
        let (no_execute, requeue_at) = match ready {
            Some("True") => (NoExecuteTaint::None, None),
            Some("False") => self.no_execute_taint(node, &zone, NOT_READY, UNREACHABLE, now),
            Some("Unknown") => self.no_execute_taint(node, &zone, UNREACHABLE, NOT_READY, now),
            _ => (NoExecuteTaint::Keep, None),
        };
        let taints = plan::taints(node, no_execute, now);
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
        Ok(requeue_at)
    }

    /// The `NoExecute` taint of an unhealthy node, subject to the rate limit of its zone.
    fn no_execute_taint(
        &self,
        node: &Node,
        zone: &str,
        key: &'static str,
        other: &str,
        now: Timestamp,
    ) -> (NoExecuteTaint, Option<Timestamp>) {
        let mut state = self.state.lock();
        if state.zones.all_disrupted() {
            return (NoExecuteTaint::None, None);
        }
        if plan::has_taint(node, key, NO_EXECUTE) || plan::has_taint(node, other, NO_EXECUTE) {
            return (NoExecuteTaint::For(key), None);
        }
        match state.zones.try_accept(zone, now) {
            RateLimit::Now => (NoExecuteTaint::For(key), None),
            RateLimit::At(at) => (NoExecuteTaint::Keep, Some(at)),
            RateLimit::Never => (NoExecuteTaint::Keep, None),
        }
    }

    /// Enqueues the nodes affected by a change of zone states.
    fn handle_zone_change(&self, zone_change: ZoneChange) {
        let all = || self.ctx.caches.nodes().all().into_iter();
        match zone_change {
            ZoneChange::Nothing => {}
            ZoneChange::RatesChanged(zones) => {
                let there = all().filter(|node| zones.contains(&zone_key(node)));
                there.for_each(|node| self.enqueue.now(node.key()));
            }
            ZoneChange::AllDisrupted => all().for_each(|node| self.enqueue.now(node.key())),
            // While all zones were disrupted, the fault was probably ours. All nodes get a full grace
            // period again.
            ZoneChange::SomeReady => {
                let now = self.ctx.clock.now();
                self.state.lock().health.values_mut().for_each(|(health, _)| health.probe_timestamp = now);
                all().for_each(|node| self.enqueue.now(node.key()));
            }
        }
    }

    /// A pod that is bound to a not ready node is marked as not ready.
    async fn sync_new_pod(&self, key: &Key) -> Result<ReconcileAction, Error> {
        let Some(pod) = self.ctx.caches.pods().get(key) else { return Ok(ReconcileAction::Forget) };
        let node = self.ctx.caches.nodes().get(&Key::new("", pod::node(&pod)));
        let known = node
            .is_some_and(|node| node::condition(&node, "Ready").is_some_and(|ready| ready.status != "True"));
        if known {
            self.mark_pod_not_ready(&pod, self.ctx.clock.now()).await?;
        }
        Ok(ReconcileAction::AwaitChange)
    }

    async fn mark_pod_not_ready(&self, pod: &Pod, now: Timestamp) -> Result<(), Error> {
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

    fn record_event(&self, node: &Node, reason: &str, message: String) {
        self.ctx.events.record(reference(node.name(), node.uid()), EventType::Normal, reason, message);
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

/// The topology key of a node: region and zone.
fn zone_key(node: &Node) -> String {
    let part = |label: &str| node.label(label).unwrap_or_default().to_owned();
    let (region, zone) = (part("topology.kubernetes.io/region"), part("topology.kubernetes.io/zone"));
    if region.is_empty() && zone.is_empty() { String::new() } else { format!("{region}:\0:{zone}") }
}
