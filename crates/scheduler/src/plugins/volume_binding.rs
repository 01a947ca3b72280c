//! VolumeBinding: a pod fits a node if its volumes are accessible there or can be provisioned.
//!
//! Claims with `WaitForFirstConsumer` are matched with volumes or provisioned on the selected node. The
//! decision is assumed in the state at Reserve, so that the next pod does not select the same volume; PreBind
//! writes it to the API and waits until the claims are bound.

mod binder;
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

use super::parse_args;
use super::volume_restrictions::is_claim_of;
use crate::bind::{BindContext, PreBind};
use crate::framework::{
    ClusterEvent, Code, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, Requeue, Reserve, Status,
};
use crate::state::objects::key;
use crate::state::{NodeInfo, PodInfo, State};

use binder::{PodVolumeClaims, VolumeBindings, claims_of, volume_limit};

pub const NAME: &str = "VolumeBinding";

/// Annotation with the node on which a volume is to be provisioned.
const SELECTED_NODE_ANNOTATION: &str = "volume.kubernetes.io/selected-node";

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
    /// Assumed decisions of pods between Reserve and PreBind, by pod UID.
    assumed_pods: Mutex<HashMap<Arc<str>, PodVolumes>>,
}

/// The assumed volumes and claims of a pod, each before and after.
#[derive(Clone, Default)]
struct PodVolumes {
    volumes: Vec<(Arc<core::PersistentVolume>, Arc<core::PersistentVolume>)>,
    /// Claims to provision.
    claims: Vec<(Arc<core::PersistentVolumeClaim>, Arc<core::PersistentVolumeClaim>)>,
    /// Keys of all claims that must become bound.
    claims_to_bind: Vec<String>,
}

/// Creates the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = parse_args(args)?;
    let plugin = Arc::new(VolumeBinding {
        timeout: Duration::from_secs(args.bind_timeout_seconds),
        assumed_pods: Mutex::default(),
    });
    Ok(Plugin::new(NAME)
        .pre_filter(plugin.clone())
        .reserve(plugin.clone())
        .pre_bind(plugin.clone())
        .requeue(plugin))
}

impl PreFilter for VolumeBinding {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let objects = &cycle.state.objects;
        if !cycle.pod.volumes.iter().any(|volume| volume.claim().is_some()) {
            return PreFilterResult::Skip;
        }
        let claims = match claims_of(cycle.pod, objects) {
            Err(message) => return PreFilterResult::Reject(Status::unresolvable(message)),
            Ok(claims) => claims,
        };
        if claims.immediate {
            let message = "pod has unbound immediate PersistentVolumeClaims";
            return PreFilterResult::Reject(Status::unresolvable(message));
        }
        PreFilterResult::Filter(Box::new(FnFilter(move |node: &NodeInfo| {
            match claims.find_pod_volumes(node, objects) {
                Ok(_) => Status::success(),
                Err(reasons) => {
                    let reasons = reasons.into_iter().map(Into::into).collect();
                    Status { code: Code::UnschedulableAndUnresolvable, reasons, plugin: "" }
                }
            }
        })))
    }
}

impl Reserve for VolumeBinding {
    fn reserve(&self, state: &mut State, pod: &PodInfo, node: &Arc<str>) -> Status {
        if !pod.volumes.iter().any(|volume| volume.claim().is_some()) {
            return Status::success();
        }
        let found = match (claims_of(pod, &state.objects), state.node_by_name(node)) {
            (Ok(claims), Some(node)) => find_pod_volumes(&claims, node, state),
            (Err(message), _) => return Status::error(message),
            (_, None) => return Status::error(format!("node {node:?} not found")),
        };
        let Ok(found) = found else { return Status::error("the pod's volumes changed") };
        let mut assumed_pod = PodVolumes::default();
        for (volume, claim) in found.volumes {
            let assumed_volume = Arc::new(assume_volume_binding(&volume, &claim));
            assumed_pod.claims_to_bind.push(claim_key(&claim));
            state.objects.volumes.insert(name_of(&volume).to_owned(), assumed_volume.clone());
            assumed_pod.volumes.push((volume, assumed_volume));
        }
        for claim in found.provision {
            let mut assumed_claim = (*claim).clone();
            let annotations = assumed_claim.metadata.annotations.get_or_insert_default();
            annotations.insert(SELECTED_NODE_ANNOTATION.to_owned(), node.to_string());
            let assumed_claim = Arc::new(assumed_claim);
            assumed_pod.claims_to_bind.push(claim_key(&claim));
            state.objects.volume_claims.insert(claim_key(&claim), assumed_claim.clone());
            assumed_pod.claims.push((claim, assumed_claim));
        }
        if !assumed_pod.claims_to_bind.is_empty() {
            self.assumed_pods.lock().insert(pod.uid.clone(), assumed_pod);
        }
        Status::success()
    }

    fn unreserve(&self, state: &mut State, pod: &PodInfo, _: &Arc<str>) {
        let Some(assumed_pod) = self.assumed_pods.lock().remove(&pod.uid) else { return };
        // An object that an event has replaced since then is newer than the original: keep it.
        for (original, assumed_volume) in assumed_pod.volumes {
            if let Some(now) = state.objects.volumes.get_mut(name_of(&original))
                && Arc::ptr_eq(now, &assumed_volume)
            {
                *now = original;
            }
        }
        for (original, assumed_claim) in assumed_pod.claims {
            if let Some(now) = state.objects.volume_claims.get_mut(&claim_key(&original))
                && Arc::ptr_eq(now, &assumed_claim)
            {
                *now = original;
            }
        }
    }
}

fn find_pod_volumes(
    claims: &PodVolumeClaims,
    node: &NodeInfo,
    state: &State,
) -> Result<VolumeBindings, Vec<&'static str>> {
    claims.find_pod_volumes(node, &state.objects)
}

fn name_of(volume: &core::PersistentVolume) -> &str {
    volume.metadata.name.as_deref().unwrap_or_default()
}

fn claim_key(claim: &core::PersistentVolumeClaim) -> String {
    let meta = &claim.metadata;
    key(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

/// Returns the volume with its claimRef set to the claim.
fn assume_volume_binding(
    volume: &core::PersistentVolume,
    claim: &core::PersistentVolumeClaim,
) -> core::PersistentVolume {
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
        self.assumed_pods.lock().contains_key(&pod.uid)
    }

    async fn pre_bind(&self, context: &BindContext, pod: &PodInfo, node: &str) -> Result<(), String> {
        let Some(assumed_pod) = self.assumed_pods.lock().get(&pod.uid).cloned() else { return Ok(()) };
        for (_, volume) in &assumed_pod.volumes {
            context.api.update_volume(volume).await.map_err(|error| error.to_string())?;
        }
        for (_, claim) in &assumed_pod.claims {
            context.api.update_claim(claim).await.map_err(|error| error.to_string())?;
        }
        let provisioned: Vec<String> = assumed_pod.claims.iter().map(|(claim, _)| claim_key(claim)).collect();
        let all_bound = async {
            for key in &assumed_pod.claims_to_bind {
                let is_provisioned = provisioned.contains(key);
                context
                    .claims
                    .wait(key, |claim| is_bound(key, claim, is_provisioned.then_some(node)))
                    .await?;
            }
            Ok(())
        };
        let result = tokio::time::timeout(self.timeout, all_bound).await;
        result.unwrap_or_else(|_| Err("binding volumes: context deadline exceeded".to_owned()))?;
        self.assumed_pods.lock().remove(&pod.uid);
        Ok(())
    }
}

/// Whether a claim is bound or its provisioning has failed; `None` if neither is decided yet.
fn is_bound(
    key: &str,
    claim: Option<&core::PersistentVolumeClaim>,
    node: Option<&str>,
) -> Option<Result<(), String>> {
    let Some(claim) = claim else {
        return Some(Err(format!("binding volumes: failed to check binding: claim {key:?} not found")));
    };
    if binder::is_fully_bound(claim) {
        return Some(Ok(()));
    }
    let selected_node = claim
        .metadata
        .annotations
        .as_ref()
        .and_then(|all| all.get(SELECTED_NODE_ANNOTATION))
        .map(String::as_str);
    // A provisioner that cannot provision on this node removes or changes the annotation. A missing
    // annotation may also mean that the update has not arrived yet, so only another node's name counts as
    // failure.
    if node.is_some() && selected_node.is_some() && selected_node != node {
        return Some(Err(format!("binding volumes: provisioning failed for PVC {key:?}")));
    }
    None
}

impl Requeue for VolumeBinding {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        match change {
            ClusterEvent::Node(pair) => match pair.changed() {
                Some((old, new)) => old.labels != new.labels,
                None => pair.new.is_some(),
            },
            ClusterEvent::VolumeClaim(pair) => pair.new.is_some_and(|claim| is_claim_of(pod, claim, true)),
            ClusterEvent::Volume(pair) => pair.new.is_some(),
            ClusterEvent::StorageClass(pair) => match pair.changed() {
                Some((old, new)) => old.allowed_topologies != new.allowed_topologies,
                None => pair.new.is_some(),
            },
            ClusterEvent::CsiNode(pair) => pair.new.is_some(),
            ClusterEvent::CsiDriver(pair) => pair.changed().is_some(),
            ClusterEvent::Capacity(pair) => match pair.changed() {
                Some((old, new)) => volume_limit(new) > volume_limit(old),
                None => pair.new.is_some(),
            },
            _ => false,
        }
    }
}
