//! Attaches volumes of CSI drivers to the nodes whose pods use them, and detaches them when none does any more.
//!
//! The work itself is the driver's: a VolumeAttachment asks for it, and says when it is done. What is attached stands
//! in the node's status before the kubelet may mount it, and is taken from there before it is detached.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use parking_lot::Mutex;
use reconcile::{Caches, Changed, Controller, Ctx, Error, Key, Next, Object, Patch, claims_of, keys};
use serde_json::json;

use crate::pod;
use plan::{Action, Wanted};

const WORKERS: usize = 4;

pub async fn run(ctx: Ctx) {
    let name = "attachdetach-controller";
    let ctx = Ctx { client: ctx.client.acting_as(name), events: ctx.events.from(name), ..ctx };
    let controller = Controller::new("attach_detach", &ctx);
    controller.on(ctx.caches.nodes(), keys::own::<Node>);
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
    let desk = Arc::new(Desk { ctx: ctx.clone(), unwanted: Mutex::default() });
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
    /// Since when nobody wants what is attached, by the names of attachments.
    unwanted: Mutex<HashMap<String, Timestamp>>,
}

impl Desk {
    async fn reconcile(&self, key: &Key) -> Result<Next, Error> {
        let (ctx, now) = (&self.ctx, self.ctx.clock.now());
        let node = ctx.caches.nodes().get(key);
        let attachments = ctx.caches.volume_attachments().indexed("node", &key.name);
        let wanted = self.wanted(&key.name);
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
            unwanted.clone()
        };
        let node_state = plan::NodeState { name: &key.name, node: node.as_deref() };
        let mut next = Next::Change;
        for action in plan::plan(&node_state, &wanted, &attachments, &elsewhere, &since, now) {
            match action {
                Action::Attach(attachment) => match ctx.create(&*attachment).await {
                    Err(error) if !error.is_already_exists() => return Err(error),
                    _ => {}
                },
                Action::Report(volumes) => {
                    let patch = Patch::Merge(json!({"status": {"volumesAttached": volumes}}));
                    match ctx.patch_status::<Node>(key, &patch).await {
                        Err(error) if !error.is_not_found() => return Err(error),
                        _ => {}
                    }
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

    /// The volumes that pods on a node use and that have to be attached for that.
    fn wanted(&self, node: &str) -> Vec<Wanted> {
        let caches = &self.ctx.caches;
        let mut wanted: Vec<Wanted> = Vec::new();
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
                if !plan::is_attachable(&claim, &volume, driver.as_deref()) {
                    continue;
                }
                match wanted.iter_mut().find(|wanted| wanted.volume.name() == volume.name()) {
                    Some(wanted) => wanted.pods.push(pod.clone()),
                    None => {
                        let rivals = self.rivals(&claim, node);
                        wanted.push(Wanted { volume, pods: vec![pod.clone()], rivals });
                    }
                }
            }
        }
        wanted
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
