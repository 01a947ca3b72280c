//! VolumeBinding: a pod runs where its volumes are or can be made.
//!
//! Claims of a class that waits for its first consumer are matched with volumes here, or sent to be made on
//! the node chosen. What is chosen is marked in the state when the node is reserved, so that the next pod
//! does not choose the same volume, written to the API before the pod is bound, and then waited for.

mod find;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1 as core;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;

use super::arguments;
use super::volume_restrictions::is_claim_of;
use crate::bind::{BindContext, PreBind};
use crate::framework::{Change, Code, Cycle, Plain, Plugin, PreFilter, Prepared, Requeue, Reserve, Status};
use crate::state::objects::key;
use crate::state::{NodeInfo, PodInfo, State};

use find::{Claims, Found, claims_of, volume_limit};

pub const NAME: &str = "VolumeBinding";

/// Says on which node a volume is to be made.
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Args {
    bind_timeout_seconds: u64,
}

impl Default for Args {
    fn default() -> Args {
        Args { bind_timeout_seconds: 600 }
    }
}

struct VolumeBinding {
    timeout: Duration,
    /// What is chosen for pods on their way, by UID.
    chosen: Mutex<HashMap<Arc<str>, Chosen>>,
}

/// What a pod's volumes will be, and what they were.
#[derive(Clone, Default)]
struct Chosen {
    volumes: Vec<(Arc<core::PersistentVolume>, Arc<core::PersistentVolume>)>,
    /// Claims to be provisioned.
    claims: Vec<(Arc<core::PersistentVolumeClaim>, Arc<core::PersistentVolumeClaim>)>,
    /// The keys of all claims that must be bound.
    waits_for: Vec<String>,
}

/// Makes the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = arguments(args)?;
    let plugin = Arc::new(VolumeBinding {
        timeout: Duration::from_secs(args.bind_timeout_seconds),
        chosen: Mutex::default(),
    });
    Ok(Plugin::new(NAME)
        .pre_filter(plugin.clone())
        .reserve(plugin.clone())
        .pre_bind(plugin.clone())
        .requeue(plugin))
}

impl PreFilter for VolumeBinding {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let objects = &cycle.state.objects;
        if !cycle.pod.volumes.iter().any(|volume| volume.claim().is_some()) {
            return Prepared::Skip;
        }
        let claims = match claims_of(cycle.pod, objects) {
            Err(words) => return Prepared::Reject(Status::unresolvable(words)),
            Ok(claims) => claims,
        };
        if claims.immediate {
            let words = "pod has unbound immediate PersistentVolumeClaims";
            return Prepared::Reject(Status::unresolvable(words));
        }
        Prepared::Filter(Box::new(Plain(move |node: &NodeInfo| match claims.find(node, objects) {
            Ok(_) => Status::success(),
            Err(reasons) => {
                let reasons = reasons.into_iter().map(Into::into).collect();
                Status { code: Code::UnschedulableAndUnresolvable, reasons, plugin: "" }
            }
        })))
    }
}

impl Reserve for VolumeBinding {
    fn reserve(&self, state: &mut State, pod: &PodInfo, node: &Arc<str>) -> Status {
        if !pod.volumes.iter().any(|volume| volume.claim().is_some()) {
            return Status::success();
        }
        let found = match (claims_of(pod, &state.objects), state.node_named(node)) {
            (Ok(claims), Some(node)) => found(&claims, node, state),
            (Err(words), _) => return Status::error(words),
            (_, None) => return Status::error(format!("node {node:?} not found")),
        };
        let Ok(found) = found else { return Status::error("the pod's volumes changed") };
        let mut chosen = Chosen::default();
        for (volume, claim) in found.volumes {
            let promised = Arc::new(promised(&volume, &claim));
            chosen.waits_for.push(claim_key(&claim));
            state.objects.volumes.insert(name_of(&volume).to_owned(), promised.clone());
            chosen.volumes.push((volume, promised));
        }
        for claim in found.provision {
            let mut marked = (*claim).clone();
            let annotations = marked.metadata.annotations.get_or_insert_default();
            annotations.insert(SELECTED_NODE.to_owned(), node.to_string());
            let marked = Arc::new(marked);
            chosen.waits_for.push(claim_key(&claim));
            state.objects.volume_claims.insert(claim_key(&claim), marked.clone());
            chosen.claims.push((claim, marked));
        }
        if !chosen.waits_for.is_empty() {
            self.chosen.lock().insert(pod.uid.clone(), chosen);
        }
        Status::success()
    }

    fn unreserve(&self, state: &mut State, pod: &PodInfo, _: &Arc<str>) {
        let Some(chosen) = self.chosen.lock().remove(&pod.uid) else { return };
        // What an event has changed since then is newer than what it was.
        for (was, promised) in chosen.volumes {
            if let Some(now) = state.objects.volumes.get_mut(name_of(&was))
                && Arc::ptr_eq(now, &promised)
            {
                *now = was;
            }
        }
        for (was, marked) in chosen.claims {
            if let Some(now) = state.objects.volume_claims.get_mut(&claim_key(&was))
                && Arc::ptr_eq(now, &marked)
            {
                *now = was;
            }
        }
    }
}

fn found(claims: &Claims, node: &NodeInfo, state: &State) -> Result<Found, Vec<&'static str>> {
    claims.find(node, &state.objects)
}

fn name_of(volume: &core::PersistentVolume) -> &str {
    volume.metadata.name.as_deref().unwrap_or_default()
}

fn claim_key(claim: &core::PersistentVolumeClaim) -> String {
    let meta = &claim.metadata;
    key(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

/// The volume with the claim it is for.
fn promised(volume: &core::PersistentVolume, claim: &core::PersistentVolumeClaim) -> core::PersistentVolume {
    let mut volume = volume.clone();
    let meta = &claim.metadata;
    let spec = volume.spec.get_or_insert_default();
    if spec.claim_ref.is_none() {
        let annotations = volume.metadata.annotations.get_or_insert_default();
        annotations.insert("pv.kubernetes.io/bound-by-controller".to_owned(), "yes".to_owned());
    }
    spec.claim_ref = Some(core::ObjectReference {
        kind: Some("PersistentVolumeClaim".to_owned()),
        api_version: Some("v1".to_owned()),
        namespace: meta.namespace.clone(),
        name: meta.name.clone(),
        uid: meta.uid.clone(),
        resource_version: meta.resource_version.clone(),
        field_path: None,
    });
    volume
}

#[async_trait]
impl PreBind for VolumeBinding {
    fn has_work(&self, pod: &PodInfo) -> bool {
        self.chosen.lock().contains_key(&pod.uid)
    }

    async fn pre_bind(&self, context: &BindContext, pod: &PodInfo, node: &str) -> Result<(), String> {
        let Some(chosen) = self.chosen.lock().get(&pod.uid).cloned() else { return Ok(()) };
        for (_, volume) in &chosen.volumes {
            context.api.update_volume(volume).await.map_err(|error| error.to_string())?;
        }
        for (_, claim) in &chosen.claims {
            context.api.update_claim(claim).await.map_err(|error| error.to_string())?;
        }
        let provisioned: Vec<String> = chosen.claims.iter().map(|(claim, _)| claim_key(claim)).collect();
        let all_bound = async {
            for key in &chosen.waits_for {
                let marked = provisioned.contains(key);
                context.claims.wait(key, |claim| is_bound(key, claim, marked.then_some(node))).await?;
            }
            Ok(())
        };
        let outcome = tokio::time::timeout(self.timeout, all_bound).await;
        outcome.unwrap_or_else(|_| Err("binding volumes: context deadline exceeded".to_owned()))?;
        self.chosen.lock().remove(&pod.uid);
        Ok(())
    }
}

/// Whether a claim is bound, or never will be; `None` if that is open.
fn is_bound(
    key: &str,
    claim: Option<&core::PersistentVolumeClaim>,
    node: Option<&str>,
) -> Option<Result<(), String>> {
    let Some(claim) = claim else {
        return Some(Err(format!("binding volumes: failed to check binding: claim {key:?} not found")));
    };
    if find::is_fully_bound(claim) {
        return Some(Ok(()));
    }
    let marked =
        claim.metadata.annotations.as_ref().and_then(|all| all.get(SELECTED_NODE)).map(String::as_str);
    // A provisioner that cannot make the volume there takes the mark away. Before the mark is seen at all
    // the claim is as it was.
    if node.is_some() && marked.is_some() && marked != node {
        return Some(Err(format!("binding volumes: provisioning failed for PVC {key:?}")));
    }
    None
}

impl Requeue for VolumeBinding {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        match change {
            Change::Node(pair) => match pair.changed() {
                Some((old, new)) => old.labels != new.labels,
                None => pair.new.is_some(),
            },
            Change::VolumeClaim(pair) => pair.new.is_some_and(|claim| is_claim_of(pod, claim, true)),
            Change::Volume(pair) => pair.new.is_some(),
            Change::StorageClass(pair) => match pair.changed() {
                Some((old, new)) => old.allowed_topologies != new.allowed_topologies,
                None => pair.new.is_some(),
            },
            Change::CsiNode(pair) => pair.new.is_some(),
            Change::CsiDriver(pair) => pair.changed().is_some(),
            Change::Capacity(pair) => match pair.changed() {
                Some((old, new)) => volume_limit(new) > volume_limit(old),
                None => pair.new.is_some(),
            },
            _ => false,
        }
    }
}
