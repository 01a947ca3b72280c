//! Attaches volumes of CSI drivers to the nodes whose pods use them, and detaches them when none does any more.
//!
//! The work itself is the driver's: a VolumeAttachment asks for it, and says when it is done. What is attached stands
//! in the node's status before the kubelet may mount it, and is taken from there before it is detached. Disks that nodes
//! log in to by themselves need no more than that ([`disks`]).

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
    Caches, Changed, Controller, Ctx, Enqueue, Error, Key, Next, Object, Patch, claims_of, keys,
};
use serde_json::json;

use crate::pod;
use plan::{Action, Wanted};

const WORKERS: usize = 4;

pub async fn run(ctx: Ctx) {
    let name = "attachdetach-controller";
    let ctx = Ctx { client: ctx.client.acting_as(name), events: ctx.events.from(name), ..ctx };
    let controller = Controller::new("attach_detach", &ctx);
    let caches = ctx.caches.clone();
    controller.on(ctx.caches.nodes(), move |changed: &Changed<'_, Node>, enqueue| {
        keys::own::<Node>(changed, enqueue);
        let disks = |node: Option<&Arc<Node>>| {
            let names = node.map(|node| disks::on_node(node)).unwrap_or_default();
            names.into_iter().map(str::to_owned).collect::<BTreeSet<String>>()
        };
        // Another node may be waiting for it.
        if !disks(changed.before).is_subset(&disks(changed.after)) {
            caches.nodes().all().iter().for_each(|node| enqueue(node.key()));
        }
    });
    controller.on(ctx.caches.pods(), |changed: &Changed<'_, Pod>, enqueue| {
        for pod in [changed.before, changed.after].into_iter().flatten() {
            if !pod::node(pod).is_empty() && claims_of(pod).next().is_some() {
                enqueue(Key::new("", pod::node(pod)));
            }
        }
    });
    let caches = ctx.caches.clone();
    controller.on(
        ctx.caches.persistent_volume_claims(),
        move |changed: &Changed<'_, PersistentVolumeClaim>, enqueue| {
            nodes_of_claim(&caches, &changed.newest().key(), enqueue);
        },
    );
    let caches = ctx.caches.clone();
    controller.on(
        ctx.caches.persistent_volumes(),
        move |changed: &Changed<'_, PersistentVolume>, enqueue| {
            plan::claim_of(changed.newest())
                .into_iter()
                .for_each(|claim| nodes_of_claim(&caches, &claim, enqueue));
        },
    );
    let caches = ctx.caches.clone();
    controller.on(
        ctx.caches.volume_attachments(),
        move |changed: &Changed<'_, VolumeAttachment>, enqueue| {
            let attachment = changed.newest();
            enqueue(Key::new("", &attachment.spec.node_name));
            // Another node may be waiting for it.
            if changed.after.is_none() {
                let name = attachment.spec.source.persistent_volume_name.as_deref().unwrap_or_default();
                let volume = caches.persistent_volumes().get(&Key::new("", name));
                let claim = volume.and_then(|volume| plan::claim_of(&volume));
                claim.into_iter().for_each(|claim| nodes_of_claim(&caches, &claim, enqueue));
            }
        },
    );
    let nodes = ctx.caches.nodes().clone();
    controller.on(ctx.caches.csi_drivers(), move |_: &Changed<'_, CSIDriver>, enqueue| {
        nodes.all().iter().for_each(|node| enqueue(node.key()));
    });
    let desk = Desk {
        ctx: ctx.clone(),
        enqueue: controller.enqueue(),
        unwanted: Mutex::default(),
        given: Mutex::default(),
    };
    let desk = Arc::new(desk);
    let reconcile = move |key: Key| {
        let desk = desk.clone();
        async move { desk.reconcile(&key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

/// The nodes with pods that use a claim.
fn nodes_of_claim(caches: &Caches, claim: &Key, enqueue: &mut dyn FnMut(Key)) {
    for pod in caches.pods().indexed("claim", &claim.to_string()) {
        if !pod::node(&pod).is_empty() {
            enqueue(Key::new("", pod::node(&pod)));
        }
    }
}

struct Desk {
    ctx: Ctx,
    enqueue: Enqueue,
    /// Since when nobody wants what is attached, by the names of attachments.
    unwanted: Mutex<HashMap<String, Timestamp>>,
    /// The nodes that were given disks, which not everybody has seen yet.
    given: Mutex<HashMap<String, String>>,
}

impl Desk {
    async fn reconcile(&self, key: &Key) -> Result<Next, Error> {
        let (ctx, now) = (&self.ctx, self.ctx.clock.now());
        let node = ctx.caches.nodes().get(key);
        let attachments = ctx.caches.volume_attachments().indexed("node", &key.name);
        let (wanted, disks) = self.wanted(&key.name);
        let elsewhere: Vec<_> =
            wanted.iter().flat_map(|wanted| self.elsewhere(&wanted.volume, &key.name)).collect();
        let since = {
            let mut unwanted = self.unwanted.lock();
            for attachment in &attachments {
                match wanted.iter().any(|wanted| plan::name(wanted, &key.name) == attachment.name()) {
                    true => drop(unwanted.remove(attachment.name())),
                    false => drop(unwanted.entry(attachment.name().to_owned()).or_insert(now)),
                }
            }
            let wanted: BTreeSet<String> =
                disks.iter().filter_map(|disk| disks::unique_name(&disk.volume)).collect();
            for name in node.as_deref().map(disks::on_node).unwrap_or_default() {
                match wanted.contains(name) {
                    true => drop(unwanted.remove(&disks::mark(name, &key.name))),
                    false => drop(unwanted.entry(disks::mark(name, &key.name)).or_insert(now)),
                }
            }
            unwanted.clone()
        };
        let actions = {
            // Two nodes must not be given the same disk, though neither sees yet that the other was.
            let mut given = self.given.lock();
            let taken = self.taken(&disks, &key.name, &given);
            let state =
                plan::NodeState { name: &key.name, node: node.as_deref(), disks: &disks, taken: &taken };
            let actions = plan::plan(&state, &wanted, &attachments, &elsewhere, &since, now);
            if disks::remember(&mut given, &state, &actions) {
                let others = ctx.caches.nodes().all().into_iter().map(|node| node.key());
                others.filter(|other| other != key).for_each(|other| self.enqueue.now(other));
            }
            actions
        };
        let mut next = Next::Change;
        for action in actions {
            match action {
                Action::Attach(attachment) => match ctx.create(&*attachment).await {
                    Err(error) if !error.is_already_exists() => return Err(error),
                    _ => {}
                },
                Action::Report(volumes) => {
                    let mut patch = json!({"status": {"volumesAttached": volumes}});
                    let stays = |name: &str| volumes.iter().any(|volume| volume.name == name);
                    if let Some(node) = &node
                        && !disks::on_node(node).into_iter().all(stays)
                    {
                        // The node may have said meanwhile that it uses a disk again.
                        patch["metadata"] = json!({"resourceVersion": node.metadata.resource_version});
                    }
                    let patch = Patch::Merge(patch);
                    match ctx.patch_status::<Node>(key, &patch).await {
                        Err(error) if !error.is_not_found() => return Err(error),
                        _ => {}
                    }
                    let here = disks::mark("", &key.name);
                    self.unwanted.lock().retain(|mark, _| match mark.strip_suffix(&here) {
                        Some(name) if disks::is_disk(name) => stays(name),
                        _ => true,
                    });
                }
                Action::Detach(attachment) => {
                    ctx.delete(&*attachment).await?;
                    self.unwanted.lock().remove(attachment.name());
                }
                Action::Tell { pod, severity, reason, message } => {
                    ctx.events.record(reconcile::reference(&*pod), severity, reason, message);
                }
                Action::RecheckAt(at) => next = Next::At(at),
            }
        }
        Ok(next)
    }

    /// The volumes that pods on a node use and that have to be attached for that, and the disks it has to log in to.
    fn wanted(&self, node: &str) -> (Vec<Wanted>, Vec<Wanted>) {
        let caches = &self.ctx.caches;
        let (mut wanted, mut disks) = (Vec::new(), Vec::new());
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
                let all: &mut Vec<Wanted> = if plan::is_attachable(&claim, &volume, driver.as_deref()) {
                    &mut wanted
                } else if plan::is_owned(&claim, &volume) && disks::unique_name(&volume).is_some() {
                    &mut disks
                } else {
                    continue;
                };
                match all.iter_mut().find(|wanted| wanted.volume.name() == volume.name()) {
                    Some(wanted) => wanted.pods.push(pod.clone()),
                    None => {
                        let rivals = self.rivals(&claim, node);
                        all.push(Wanted { volume, pods: vec![pod.clone()], rivals });
                    }
                }
            }
        }
        (wanted, disks)
    }

    /// The disks that are for one node alone and that another has.
    fn taken(&self, disks: &[Wanted], node: &str, given: &HashMap<String, String>) -> BTreeSet<String> {
        let mut names: BTreeSet<String> = disks::exclusive(disks).collect();
        if !names.is_empty() {
            let others: Vec<Arc<Node>> =
                self.ctx.caches.nodes().all().into_iter().filter(|other| other.name() != node).collect();
            let is_taken = |name: &String| {
                let has = |other: &Arc<Node>| {
                    given.get(name).is_some_and(|node| node == other.name())
                        || disks::on_node(other).contains(name.as_str())
                };
                others.iter().any(has)
            };
            names.retain(is_taken);
        }
        names
    }

    /// The pods on other nodes that use a claim.
    fn rivals(&self, claim: &PersistentVolumeClaim, node: &str) -> Vec<String> {
        let mut pods = self.ctx.caches.pods().indexed("claim", &claim.key().to_string());
        pods.retain(|pod| !pod::is_terminal(pod) && !pod::node(pod).is_empty() && pod::node(pod) != node);
        pods.iter().map(|pod| pod.name().to_owned()).collect()
    }

    /// The attachments of a volume to other nodes.
    fn elsewhere(&self, volume: &PersistentVolume, node: &str) -> Vec<Arc<VolumeAttachment>> {
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
