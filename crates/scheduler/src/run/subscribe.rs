//! Hears of every object the engine wants to know of.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::resource::v1::ResourceClaim;
use reconcile::{Cache, Caches, Object};
use tokio::sync::mpsc::UnboundedSender;

use crate::board::Board;
use crate::engine::{Delta, Event};

/// Begins to listen to everything, volumes and namespaces before pods.
pub(super) fn all(
    caches: &Caches,
    events: &UnboundedSender<Event>,
    (claims, resource_claims): (&Arc<Board<PersistentVolumeClaim>>, &Arc<Board<ResourceClaim>>),
) {
    post(caches.persistent_volume_claims(), claims);
    post(caches.resource_claims(), resource_claims);
    tell(caches.namespaces(), events, Event::Namespace);
    tell(caches.services(), events, Event::Service);
    tell(caches.replication_controllers(), events, Event::ReplicationController);
    tell(caches.replica_sets(), events, Event::ReplicaSet);
    tell(caches.stateful_sets(), events, Event::StatefulSet);
    tell(caches.disruption_budgets(), events, Event::Budget);
    tell(caches.storage_classes(), events, Event::StorageClass);
    tell(caches.persistent_volumes(), events, Event::Volume);
    tell(caches.persistent_volume_claims(), events, Event::VolumeClaim);
    tell(caches.csi_nodes(), events, Event::CsiNode);
    tell(caches.csi_drivers(), events, Event::CsiDriver);
    tell(caches.csi_storage_capacities(), events, Event::Capacity);
    tell(caches.volume_attachments(), events, Event::Attachment);
    tell(caches.device_classes(), events, Event::DeviceClass);
    tell(caches.resource_slices(), events, Event::ResourceSlice);
    tell(caches.resource_claims(), events, Event::ResourceClaim);
    tell(caches.nodes(), events, Event::Node);
    tell(caches.pods(), events, Event::Pod);
}

fn post<T: Object>(cache: &Cache<T>, board: &Arc<Board<T>>) {
    let board = board.clone();
    cache.listen(move |changed| board.set(&changed.newest().key().to_string(), changed.after.cloned()));
}

fn tell<T: Object>(cache: &Cache<T>, events: &UnboundedSender<Event>, event: fn(Delta<T>) -> Event) {
    let events = events.clone();
    cache.listen(move |changed| {
        let delta = Delta { before: changed.before.cloned(), after: changed.after.cloned() };
        // Nobody listens any more only when the scheduler stops.
        let _ = events.send(event(delta));
    });
}
