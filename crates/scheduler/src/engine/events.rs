//! Events from informers and binding cycles, and their effect on pods and nodes. Counterpart of upstream's
//! `eventhandlers.go`.

use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1 as apps;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::policy::v1 as policy;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::api::storage::v1 as storage;

use super::{ASSUMED_POD_TTL, BindFailure, Binding, Engine};
use crate::framework::{ClusterEvent, ObjectPair};
use crate::plugins::dynamic_resources::extended_resources;
use crate::state::{NodeInfo, PodInfo};

/// An object before and after a change.
pub struct Delta<T> {
    pub before: Option<Arc<T>>,
    pub after: Option<Arc<T>>,
}

/// An informer event or the result of an action.
pub enum Event {
    Pod(Delta<core::Pod>),
    Node(Delta<core::Node>),
    Namespace(Delta<core::Namespace>),
    Service(Delta<core::Service>),
    ReplicationController(Delta<core::ReplicationController>),
    ReplicaSet(Delta<apps::ReplicaSet>),
    StatefulSet(Delta<apps::StatefulSet>),
    Budget(Delta<policy::PodDisruptionBudget>),
    VolumeClaim(Delta<core::PersistentVolumeClaim>),
    Volume(Delta<core::PersistentVolume>),
    StorageClass(Delta<storage::StorageClass>),
    CsiNode(Delta<storage::CSINode>),
    CsiDriver(Delta<storage::CSIDriver>),
    Capacity(Delta<storage::CSIStorageCapacity>),
    Attachment(Delta<storage::VolumeAttachment>),
    ResourceClaim(Delta<resource::ResourceClaim>),
    DeviceClass(Delta<resource::DeviceClass>),
    ResourceSlice(Delta<resource::ResourceSlice>),
    /// The binding succeeded.
    Bound(Box<Binding>),
    /// The binding cycle failed. `current` is the pod as it is now, if it still has no node.
    Unbound {
        binding: Box<Binding>,
        failure: BindFailure,
        current: Option<Arc<core::Pod>>,
    },
    /// The victims of the pod with this UID could not be deleted.
    PreemptionFailed(Arc<str>),
}

impl Engine {
    /// Applies an event to the cache and the queue.
    pub fn handle(&mut self, event: Event, now: Timestamp) {
        let started = Instant::now();
        self.queue.counters.event = "";
        self.dispatch_event(event, now);
        // Only events that can requeue pods have a label; the others are not measured.
        let cause = self.queue.counters.event;
        if !cause.is_empty() {
            self.metrics.observe_event_handling(cause, started.elapsed());
        }
    }

    fn dispatch_event(&mut self, event: Event, now: Timestamp) {
        match event {
            Event::Pod(delta) => self.handle_pod(&delta, now),
            Event::Node(delta) => self.handle_node(delta, now),
            Event::Bound(binding) => self.handle_bound(&binding, now),
            Event::Unbound { binding, failure: setback, current } => {
                self.handle_unbound(*binding, setback, current, now)
            }
            Event::PreemptionFailed(uid) => self.queue.activate_by_uid(&uid, &self.state, now),
            other => self.handle_object(other, now),
        }
    }

    fn handle_pod(&mut self, delta: &Delta<core::Pod>, now: Timestamp) {
        let after = delta.after.as_ref().filter(|pod| !is_finished(pod));
        let Some(object) = after else {
            let last = delta.after.as_ref().or(delta.before.as_ref());
            if let Some(uid) = last.and_then(|pod| pod.metadata.uid.as_deref()) {
                self.delete_pod(uid, now);
            }
            return;
        };
        let info = Arc::new(PodInfo::new(object, &mut self.state.strings));
        if info.node_name.is_some() {
            self.queue.remove(&info.uid);
            let old = self.state.set_pod(info.clone());
            // A pod that is seen on its node for the first time is an addition, even if it was assumed there.
            let had_node = |pod: &core::Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
            let old = old.filter(|_| delta.before.as_deref().is_some_and(had_node));
            let change = ClusterEvent::Pod(ObjectPair { old: old.as_deref(), new: Some(&info) });
            self.queue.move_all_to_active_or_backoff(&change, &self.state, now);
        } else if self.profiles.contains_key(&*info.scheduler_name) && !self.state.is_assumed(&info.uid) {
            if self.queue.position(&info.uid).is_some() {
                self.queue.update(info, object.clone(), &self.state, now);
            } else {
                self.queue.add(info, object.clone(), &self.state, now);
            }
        }
    }

    fn delete_pod(&mut self, uid: &str, now: Timestamp) {
        self.queue.remove(uid);
        if let Some(old) = self.state.remove_pod(uid) {
            // The pod's claim for extended resources may have been created and deleted without an event.
            let claim = extended_resources::special_claim_key(&old.namespace, uid);
            self.state.objects.resource_claims.remove(&claim);
            self.queue.move_all_to_active_or_backoff(
                &ClusterEvent::Pod(ObjectPair { old: Some(&old), new: None }),
                &self.state,
                now,
            );
        }
    }

    fn handle_node(&mut self, delta: Delta<core::Node>, now: Timestamp) {
        let Delta { before, after } = delta;
        let named = after.as_ref().or(before.as_ref()).and_then(|node| node.metadata.name.clone());
        let Some(name) = named else { return };
        let old = match after {
            Some(node) => self.state.set_node(node),
            None => self.state.remove_node(&name),
        };
        let new = self.state.node_by_name(&name);
        if let (Some(old), Some(new)) = (&old, new)
            && is_unchanged(old, new)
        {
            return;
        }
        let change = ClusterEvent::Node(ObjectPair { old: old.as_ref(), new });
        self.queue.move_all_to_active_or_backoff(&change, &self.state, now);
    }

    fn handle_bound(&mut self, binding: &Binding, now: Timestamp) {
        let deadline = now.checked_add(ASSUMED_POD_TTL).unwrap_or(Timestamp::MAX);
        self.state.finish_binding(&binding.info.uid, deadline);
        let message = format!("Successfully assigned {} to {}", binding.info.key(), binding.node);
        self.record_event(&binding.pod, false, "Scheduled", "Binding", message);
        self.metrics.observe_scheduled(&binding.profile.scheduler_name, &binding.pod, now);
    }

    fn handle_unbound(
        &mut self,
        binding: Binding,
        failure: BindFailure,
        current: Option<Arc<core::Pod>>,
        now: Timestamp,
    ) {
        let Binding { profile, mut pod, info, node, .. } = binding;
        let was_assumed = self.state.is_assumed(&info.uid);
        self.unreserve_and_forget(&profile, &info, &node);
        if was_assumed {
            // Its resources are free again. The pod itself is requeued by `handle_bind_failure`.
            let change = ClusterEvent::Pod(ObjectPair { old: Some(&info), new: None });
            self.queue.move_all_to_active_or_backoff_except(&change, &self.state, now, &info.uid);
        }
        let Some(current) = current else { return };
        pod.info = Arc::new(PodInfo::new(&current, &mut self.state.strings));
        pod.object = current;
        self.handle_bind_failure(&profile, pod, &node, failure, now);
    }
}

fn is_finished(pod: &core::Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether a node update, such as a heartbeat, changes nothing that scheduling depends on.
fn is_unchanged(old: &NodeInfo, new: &NodeInfo) -> bool {
    old.labels == new.labels
        && old.taints == new.taints
        && old.unschedulable == new.unschedulable
        && old.allocatable == new.allocatable
        && old.features == new.features
}
