//! Events about objects other than pods and nodes.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::Metadata;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Delta, Engine, Event};
use crate::framework::{ClusterEvent, ObjectPair};
use crate::plugins::dynamic_resources::extended_resources;
use crate::state::objects::{ByKey, Workload};
use crate::state::selection::{selector, selector_of_set};

/// Key of an object: `namespace/name`, or `name` if it is cluster-scoped.
fn key_of<T: Metadata<Ty = ObjectMeta>>(delta: &Delta<T>) -> Option<String> {
    let meta = delta.after.as_ref().or(delta.before.as_ref())?.metadata();
    let name = meta.name.as_deref()?;
    Some(match meta.namespace.as_deref() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    })
}

/// Applies a change to a table and returns the previous object.
fn apply_delta<T: Metadata<Ty = ObjectMeta>>(table: &mut ByKey<T>, delta: &Delta<T>) -> Option<Arc<T>> {
    let key = key_of(delta)?;
    match &delta.after {
        Some(object) => table.insert(key, object.clone()),
        None => table.remove(&key),
    }
}

impl Engine {
    pub(super) fn handle_object(&mut self, event: Event, now: Timestamp) {
        let objects = &mut self.state.objects;
        macro_rules! table {
            ($delta:expr, $table:ident, $change:ident) => {{
                let delta = $delta;
                apply_delta(&mut objects.$table, &delta);
                let pair = ObjectPair { old: delta.before.as_deref(), new: delta.after.as_deref() };
                self.queue.move_all_to_active_or_backoff(&ClusterEvent::$change(pair), &self.state, now);
            }};
        }
        match event {
            Event::VolumeClaim(delta) => table!(delta, volume_claims, VolumeClaim),
            Event::Volume(delta) => table!(delta, volumes, Volume),
            Event::StorageClass(delta) => table!(delta, storage_classes, StorageClass),
            Event::CsiNode(delta) => table!(delta, csi_nodes, CsiNode),
            Event::CsiDriver(delta) => table!(delta, csi_drivers, CsiDriver),
            Event::Capacity(delta) => table!(delta, capacities, Capacity),
            Event::Attachment(delta) => table!(delta, attachments, Attachment),
            Event::ResourceClaim(delta) => {
                // Remove the entry that the claim was assumed under before it had a name: it is the same
                // claim.
                if let Some(before) =
                    delta.after.as_deref().and_then(extended_resources::special_claim_key_of)
                {
                    objects.resource_claims.remove(&before);
                }
                table!(delta, resource_claims, ResourceClaim);
            }
            Event::DeviceClass(delta) => table!(delta, device_classes, DeviceClass),
            Event::ResourceSlice(delta) => table!(delta, resource_slices, ResourceSlice),
            Event::Namespace(delta) => {
                let Some(name) = key_of(&delta) else { return };
                let labels = delta.after.as_ref();
                let labels = labels.map(|one| self.state.strings.labels(one.metadata.labels.as_ref()));
                objects.set_namespace(&name, labels);
            }
            Event::Service(delta) => {
                let Some(key) = key_of(&delta) else { return };
                let (namespace, name) = key.split_once('/').unwrap_or(("", &key));
                objects.set_service(namespace, name, delta.after.as_deref());
            }
            Event::ReplicationController(delta) => {
                let Some(key) = key_of(&delta) else { return };
                let spec = delta.after.as_ref().and_then(|one| one.spec.as_ref());
                let labels = spec.and_then(|spec| spec.selector.as_ref());
                let label_selector = labels.map(|labels| selector_of_set(Some(labels)));
                objects.set_workload(Workload::ReplicationController, &key, label_selector);
            }
            Event::ReplicaSet(delta) => {
                let Some(key) = key_of(&delta) else { return };
                let spec = delta.after.as_ref().and_then(|one| one.spec.as_ref());
                let label_selector = spec.and_then(|spec| selector(Some(&spec.selector)).ok());
                objects.set_workload(Workload::ReplicaSet, &key, label_selector);
            }
            Event::StatefulSet(delta) => {
                let Some(key) = key_of(&delta) else { return };
                let spec = delta.after.as_ref().and_then(|one| one.spec.as_ref());
                let label_selector = spec.and_then(|spec| selector(Some(&spec.selector)).ok());
                objects.set_workload(Workload::StatefulSet, &key, label_selector);
            }
            Event::Budget(delta) => {
                let Some(key) = key_of(&delta) else { return };
                objects.set_budget(&key, delta.after.as_deref());
            }
            Event::Pod(_)
            | Event::Node(_)
            | Event::Bound(_)
            | Event::Unbound { .. }
            | Event::PreemptionFailed(_) => {}
        }
    }
}
