//! Registers the event handlers of all informers.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::resource::v1::ResourceClaim;
use reconcile::{Cache, Caches, Object};
use tokio::sync::mpsc::UnboundedSender;

use crate::engine::{Delta, Event};
use crate::object_waiter::ObjectWaiter;

/// Registers all handlers, those for volumes and namespaces before those for pods: pods are then added with
/// their dependencies known.
pub(super) fn add_all_event_handlers(
    caches: &Caches,
    events: &UnboundedSender<Event>,
    (claims, resource_claims): (&Arc<ObjectWaiter<PersistentVolumeClaim>>, &Arc<ObjectWaiter<ResourceClaim>>),
) {
    add_waiter_handler(caches.persistent_volume_claims(), claims);
    add_waiter_handler(caches.resource_claims(), resource_claims);
    add_event_handler(caches.namespaces(), events, Event::Namespace);
    add_event_handler(caches.services(), events, Event::Service);
    add_event_handler(caches.replication_controllers(), events, Event::ReplicationController);
    add_event_handler(caches.replica_sets(), events, Event::ReplicaSet);
    add_event_handler(caches.stateful_sets(), events, Event::StatefulSet);
    add_event_handler(caches.disruption_budgets(), events, Event::Budget);
    add_event_handler(caches.storage_classes(), events, Event::StorageClass);
    add_event_handler(caches.persistent_volumes(), events, Event::Volume);
    add_event_handler(caches.persistent_volume_claims(), events, Event::VolumeClaim);
    add_event_handler(caches.csi_nodes(), events, Event::CsiNode);
    add_event_handler(caches.csi_drivers(), events, Event::CsiDriver);
    add_event_handler(caches.csi_storage_capacities(), events, Event::Capacity);
    add_event_handler(caches.volume_attachments(), events, Event::Attachment);
    add_event_handler(caches.device_classes(), events, Event::DeviceClass);
    add_event_handler(caches.resource_slices(), events, Event::ResourceSlice);
    add_event_handler(caches.resource_claims(), events, Event::ResourceClaim);
    add_event_handler(caches.nodes(), events, Event::Node);
    add_event_handler(caches.pods(), events, Event::Pod);
}

fn add_waiter_handler<T: Object>(cache: &Cache<T>, waiter: &Arc<ObjectWaiter<T>>) {
    let waiter = waiter.clone();
    cache.listen(move |changed| waiter.set(&changed.latest().key().to_string(), changed.after.cloned()));
}

fn add_event_handler<T: Object>(
    cache: &Cache<T>,
    events: &UnboundedSender<Event>,
    event: fn(Delta<T>) -> Event,
) {
    let events = events.clone();
    cache.listen(move |changed| {
        let delta = Delta { before: changed.before.cloned(), after: changed.after.cloned() };
        // The receiver is dropped only when the scheduler stops.
        let _ = events.send(event(delta));
    });
}
