//! Attach/detach controller: attaches CSI volumes to the nodes whose pods use them and detaches unused
//! ones.
//!
//! The CSI driver's external-attacher does the work. A VolumeAttachment requests it and its status reports
//! the result. An attached volume is listed in the node's `status.volumesAttached` before the kubelet may
//! mount it, and is removed from that list before it is detached. iSCSI volumes need no attach operation;
//! their bookkeeping is in [`disks`].
//!
//! Upstream: `pkg/controller/volume/attachdetach`.

mod disks;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use parking_lot::Mutex;
use reconcile::{
    Caches, Controller, Ctx, Enqueue, Error, Key, Object, ObjectUpdate, Patch, ReconcileAction, claims_of,
    keys,
};
use serde_json::json;

use crate::pod;
use plan::{Action, VolumeToAttach};

const WORKERS: usize = 4;

pub async fn run(ctx: Ctx) {
    let name = "attachdetach-controller";
    let ctx = Ctx { client: ctx.client.impersonate(name), events: ctx.events.from(name), ..ctx };
    let controller = Controller::new("attach_detach", &ctx);
    let caches = ctx.caches.clone();
    controller.on(ctx.caches.nodes(), move |changed: &ObjectUpdate<'_, Node>, enqueue| {
        keys::own::<Node>(changed, enqueue);
        let disks = |node: Option<&Arc<Node>>| {
            let names = node.map(|node| disks::attached_disks(node)).unwrap_or_default();
            names.into_iter().map(str::to_owned).collect::<BTreeSet<String>>()
        };
        // The node gave up a disk. Pods on another node may be waiting for it.
        if !disks(changed.before).is_subset(&disks(changed.after)) {
            caches.nodes().all().iter().for_each(|node| enqueue(node.key()));
        }
    });
    controller.on(ctx.caches.pods(), |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        for pod in [changed.before, changed.after].into_iter().flatten() {
            if !pod::node(pod).is_empty() && claims_of(pod).next().is_some() {
                enqueue(Key::new("", pod::node(pod)));
            }
        }
    });
    let caches = ctx.caches.clone();
    controller.on(
        ctx.caches.persistent_volume_claims(),
        move |changed: &ObjectUpdate<'_, PersistentVolumeClaim>, enqueue| {
            nodes_of_claim(&caches, &changed.latest().key(), enqueue);
        },
    );
    let caches = ctx.caches.clone();
    controller.on(
        ctx.caches.persistent_volumes(),
        move |changed: &ObjectUpdate<'_, PersistentVolume>, enqueue| {
            plan::claim_of(changed.latest())
                .into_iter()
                .for_each(|claim| nodes_of_claim(&caches, &claim, enqueue));
        },
    );
    let caches = ctx.caches.clone();
    controller.on(
        ctx.caches.volume_attachments(),
        move |changed: &ObjectUpdate<'_, VolumeAttachment>, enqueue| {
            let attachment = changed.latest();
            enqueue(Key::new("", &attachment.spec.node_name));
            // The volume was detached. Pods on another node may be waiting for it.
            if changed.after.is_none() {
                let name = attachment.spec.source.persistent_volume_name.as_deref().unwrap_or_default();
                let volume = caches.persistent_volumes().get(&Key::new("", name));
                let claim = volume.and_then(|volume| plan::claim_of(&volume));
                claim.into_iter().for_each(|claim| nodes_of_claim(&caches, &claim, enqueue));
            }
        },
    );
    let nodes = ctx.caches.nodes().clone();
    controller.on(ctx.caches.csi_drivers(), move |_: &ObjectUpdate<'_, CSIDriver>, enqueue| {
        nodes.all().iter().for_each(|node| enqueue(node.key()));
    });
    let reconciler = Reconciler {
        ctx: ctx.clone(),
        enqueue: controller.enqueue(),
        unused_since: Mutex::default(),
        assigned_disks: Mutex::default(),
    };
    let reconciler = Arc::new(reconciler);
    let reconcile = move |key: Key| {
        let reconciler = reconciler.clone();
        async move { reconciler.reconcile(&key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

/// Enqueues the nodes that run pods which use a claim.
fn nodes_of_claim(caches: &Caches, claim: &Key, enqueue: &mut dyn FnMut(Key)) {
    for pod in caches.pods().indexed("claim", &claim.to_string()) {
        if !pod::node(&pod).is_empty() {
            enqueue(Key::new("", pod::node(&pod)));
        }
    }
}

struct Reconciler {
    ctx: Ctx,
    enqueue: Enqueue,
    /// Since when an attachment or disk is unused, by attachment name or [`disks::disk_key`].
    unused_since: Mutex<HashMap<String, Timestamp>>,
    /// Disks assigned to nodes by this process, by disk name. The caches may not show the assignment yet.
    assigned_disks: Mutex<HashMap<String, String>>,
}

impl Reconciler {
    async fn reconcile(&self, key: &Key) -> Result<ReconcileAction, Error> {
        let (ctx, now) = (&self.ctx, self.ctx.clock.now());
        let node = ctx.caches.nodes().get(key);
        let attachments = ctx.caches.volume_attachments().indexed("node", &key.name);
        let (to_attach, disks) = self.volumes_to_attach(&key.name);
        let other_attachments: Vec<_> = to_attach
            .iter()
            .flat_map(|to_attach| self.attachments_on_other_nodes(&to_attach.volume, &key.name))
            .collect();
        let since = {
            let mut unused_since = self.unused_since.lock();
            for attachment in &attachments {
                match to_attach
                    .iter()
                    .any(|to_attach| plan::csi_attachment_name(to_attach, &key.name) == attachment.name())
                {
                    true => drop(unused_since.remove(attachment.name())),
                    false => drop(unused_since.entry(attachment.name().to_owned()).or_insert(now)),
                }
            }
            let to_attach: BTreeSet<String> =
                disks.iter().filter_map(|disk| disks::unique_name(&disk.volume)).collect();
            for name in node.as_deref().map(disks::attached_disks).unwrap_or_default() {
                match to_attach.contains(name) {
                    true => drop(unused_since.remove(&disks::disk_key(name, &key.name))),
                    false => drop(unused_since.entry(disks::disk_key(name, &key.name)).or_insert(now)),
                }
            }
            unused_since.clone()
        };
        let actions = {
            // Plans of different nodes run concurrently. The lock is held across planning, so that two
            // nodes cannot be assigned the same disk before either assignment is visible in the cache.
            let mut assigned_disks = self.assigned_disks.lock();
            let taken = self.disks_on_other_nodes(&disks, &key.name, &assigned_disks);
            let state =
                plan::NodeState { name: &key.name, node: node.as_deref(), disks: &disks, taken: &taken };
            let actions = plan::plan(&state, &to_attach, &attachments, &other_attachments, &since, now);
            if disks::record_assigned_disks(&mut assigned_disks, &state, &actions) {
                let others = ctx.caches.nodes().all().into_iter().map(|node| node.key());
                others.filter(|other| other != key).for_each(|other| self.enqueue.now(other));
            }
            actions
        };
        let mut next = ReconcileAction::AwaitChange;
        for action in actions {
            match action {
                Action::Attach(attachment) => match ctx.create(&*attachment).await {
                    Err(error) if !error.is_already_exists() => return Err(error),
                    _ => {}
                },
                Action::UpdateVolumesAttached(volumes) => {
                    let mut patch = json!({"status": {"volumesAttached": volumes}});
                    let stays = |name: &str| volumes.iter().any(|volume| volume.name == name);
                    if let Some(node) = &node
                        && !disks::attached_disks(node).into_iter().all(stays)
                    {
                        // A disk is removed from the list. The update must fail if the kubelet has
                        // meanwhile added the disk to `volumesInUse`, so it requires the resource version
                        // that was read.
                        patch["metadata"] = json!({"resourceVersion": node.metadata.resource_version});
                    }
                    let patch = Patch::Merge(patch);
                    match ctx.patch_status::<Node>(key, &patch).await {
                        Err(error) if !error.is_not_found() => return Err(error),
                        _ => {}
                    }
                    let here = disks::disk_key("", &key.name);
                    self.unused_since.lock().retain(|mark, _| match mark.strip_suffix(&here) {
                        Some(name) if disks::is_disk(name) => stays(name),
                        _ => true,
                    });
                }
                Action::Detach(attachment) => {
                    ctx.delete(&*attachment).await?;
                    self.unused_since.lock().remove(attachment.name());
                }
                Action::Event { pod, severity, reason, message } => {
                    ctx.events.record(reconcile::reference(&*pod), severity, reason, message);
                }
                Action::RequeueAt(at) => next = ReconcileAction::RequeueAt(at),
            }
        }
        Ok(next)
    }

    /// The CSI volumes to attach to a node for its pods, and the iSCSI disks that it logs in to by itself.
    fn volumes_to_attach(&self, node: &str) -> (Vec<VolumeToAttach>, Vec<VolumeToAttach>) {
        let caches = &self.ctx.caches;
        let (mut to_attach, mut disks) = (Vec::new(), Vec::new());
        for pod in caches.pods().indexed("node", node) {
            if pod::is_terminal(&pod) {
                continue;
            }
            for claim in claims_of(&pod) {
                let claim = caches.persistent_volume_claims().get(&Key::new(pod.namespace(), &claim));
                let Some(claim) = claim else { continue };
                let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
                let Some(volume) = caches.persistent_volumes().get(&Key::new("", &name)) else { continue };
                let driver =
                    plan::driver(&volume).and_then(|name| caches.csi_drivers().get(&Key::new("", name)));
                let all: &mut Vec<VolumeToAttach> = if plan::is_attachable(&claim, &volume, driver.as_deref())
                {
                    &mut to_attach
                } else if plan::is_owned(&claim, &volume) && disks::unique_name(&volume).is_some() {
                    &mut disks
                } else {
                    continue;
                };
                match all.iter_mut().find(|to_attach| to_attach.volume.name() == volume.name()) {
                    Some(to_attach) => to_attach.pods.push(pod.clone()),
                    None => {
                        let pods_on_other_nodes = self.pods_on_other_nodes(&claim, node);
                        all.push(VolumeToAttach { volume, pods: vec![pod.clone()], pods_on_other_nodes });
                    }
                }
            }
        }
        (to_attach, disks)
    }

    /// The exclusive disks among `disks` that are assigned to another node.
    fn disks_on_other_nodes(
        &self,
        disks: &[VolumeToAttach],
        node: &str,
        assigned_disks: &HashMap<String, String>,
    ) -> BTreeSet<String> {
        let mut names: BTreeSet<String> = disks::exclusive_disk_names(disks).collect();
        if !names.is_empty() {
            let others: Vec<Arc<Node>> =
                self.ctx.caches.nodes().all().into_iter().filter(|other| other.name() != node).collect();
            let is_taken = |name: &String| {
                let has = |other: &Arc<Node>| {
                    assigned_disks.get(name).is_some_and(|node| node == other.name())
                        || disks::attached_disks(other).contains(name.as_str())
                };
                others.iter().any(has)
            };
            names.retain(is_taken);
        }
        names
    }

    /// The names of non-terminal pods on other nodes that use a claim.
    fn pods_on_other_nodes(&self, claim: &PersistentVolumeClaim, node: &str) -> Vec<String> {
        let mut pods = self.ctx.caches.pods().indexed("claim", &claim.key().to_string());
        pods.retain(|pod| !pod::is_terminal(pod) && !pod::node(pod).is_empty() && pod::node(pod) != node);
        pods.iter().map(|pod| pod.name().to_owned()).collect()
    }

    /// The attachments of an exclusive volume to other nodes.
    fn attachments_on_other_nodes(
        &self,
        volume: &PersistentVolume,
        node: &str,
    ) -> Vec<Arc<VolumeAttachment>> {
        if !plan::is_exclusive(volume) {
            return Vec::new();
        }
        let mut all = self.ctx.caches.volume_attachments().all();
        all.retain(|attachment| {
            attachment.spec.node_name != node
                && attachment.spec.source.persistent_volume_name.as_deref() == Some(volume.name())
        });
        all
    }
}
