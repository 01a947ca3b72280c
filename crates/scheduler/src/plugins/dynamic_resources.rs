//! DynamicResources: the resource claims of a pod must be allocated where it runs, or be allocatable there.
//!
//! Devices are taken from the ResourceSlices a node reaches. What is chosen is marked in the state when the
//! node is reserved, and written to the claim before the pod is bound; drivers that want to prepare a device first are
//! waited for ([`conditions`]). Extended resources are not served from device classes.

mod allocate;
mod capacity;
mod conditions;
mod pools;
mod search;
mod selectors;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use parking_lot::Mutex;
use serde_json::Value;

use crate::bind::{BindContext, PreBind};
use crate::framework::{
    Attempt, Change, Cycle, Plain, Plugin, PostFilter, PreFilter, Prepared, Requeue, Rescue, Reserve, Status,
};
use crate::state::objects::{Objects, key};
use crate::state::selection::NodeSelector;
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "DynamicResources";

/// Keeps an allocated claim from being deleted while it is in use.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// So many pods may share a claim.
const MOST_USERS: usize = 256;

#[derive(Default)]
struct DynamicResources {
    /// What is chosen for pods on their way, by UID: each claim as it was and as it will be.
    chosen: Mutex<HashMap<Arc<str>, Chosen>>,
}

type Claim = Arc<resource::ResourceClaim>;
type Chosen = Vec<(Claim, Claim)>;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(DynamicResources::default());
    Ok(Plugin::new(NAME)
        .pre_filter(plugin.clone())
        .post_filter(plugin.clone())
        .reserve(plugin.clone())
        .pre_bind(plugin.clone())
        .requeue(plugin))
}

/// The claims of a pod that are there. A claim that none was needed for is left out.
fn claims_of(pod: &PodInfo, objects: &Objects) -> Result<Vec<Claim>, String> {
    let mut claims = Vec::new();
    for reference in &pod.claims {
        let name = match &reference.claim {
            Some(name) if name.is_empty() => continue,
            Some(name) => name,
            None => return Err(format!("pod {:?}: ResourceClaim not created yet", pod.key())),
        };
        let claim = objects.resource_claims.get(&key(&pod.namespace, name));
        let claim = claim.ok_or_else(|| format!("resourceclaim.resource.k8s.io {:?} not found", &**name))?;
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(format!("resourceclaim {:?} is being deleted", &**name));
        }
        let owners = claim.metadata.owner_references.as_deref().unwrap_or_default();
        if reference.templated
            && !owners.iter().any(|owner| owner.uid == *pod.uid && owner.controller == Some(true))
        {
            let claim = key(&pod.namespace, name);
            return Err(format!(
                "ResourceClaim {claim} was not created for pod {} (pod is not owner)",
                pod.key()
            ));
        }
        claims.push(claim.clone());
    }
    Ok(claims)
}

fn allocation(claim: &resource::ResourceClaim) -> Option<&resource::AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

fn users(claim: &resource::ResourceClaim) -> &[resource::ResourceClaimConsumerReference] {
    claim.status.as_ref().and_then(|status| status.reserved_for.as_deref()).unwrap_or_default()
}

fn is_reserved_for(claim: &resource::ResourceClaim, pod: &PodInfo) -> bool {
    users(claim).iter().any(|user| user.uid == *pod.uid)
}

impl PreFilter for DynamicResources {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let objects = &cycle.state.objects;
        let reject = |words: String| Prepared::Reject(Status::unresolvable(words));
        if cycle.pod.claims.is_empty() {
            return Prepared::Skip;
        }
        let claims = match claims_of(cycle.pod, objects) {
            Ok(claims) if claims.is_empty() => return Prepared::Skip,
            Ok(claims) => claims,
            Err(words) => return reject(words),
        };
        let (mut places, mut open) = (Vec::new(), Vec::new());
        for claim in claims {
            match allocation(&claim) {
                Some(_) if users(&claim).len() >= MOST_USERS && !is_reserved_for(&claim, cycle.pod) => {
                    return reject("resourceclaim in use".to_owned());
                }
                Some(allocated) => places.extend(allocated.node_selector.as_ref().map(NodeSelector::new)),
                None => open.push(claim),
            }
        }
        let plan = match allocate::Plan::new(&open, objects) {
            Ok(plan) => plan,
            Err(words) => return reject(words),
        };
        Prepared::Filter(Box::new(Plain(move |node: &NodeInfo| {
            if places.iter().any(|place| !place.matches(node)) {
                return Status::unresolvable("resourceclaim not available on the node");
            }
            match plan.fits(node) {
                Ok(true) => Status::success(),
                Ok(false) => Status::unresolvable("cannot allocate all claims"),
                Err(words) => Status::unresolvable(words),
            }
        })))
    }
}

impl PostFilter for DynamicResources {
    fn post_filter(&self, attempt: &mut Attempt<'_, '_>) -> Rescue {
        let none = attempt.cycle.pod.claims.is_empty();
        let words = if none { "no new claims to deallocate" } else { "still not schedulable" };
        Rescue::Nothing { status: Status::unschedulable(words), clear: false }
    }
}

impl Reserve for DynamicResources {
    fn reserve(&self, state: &mut State, pod: &PodInfo, node: &Arc<str>) -> Status {
        if pod.claims.is_empty() {
            return Status::success();
        }
        let claims = match claims_of(pod, &state.objects) {
            Ok(claims) => claims,
            Err(words) => return Status::unresolvable(words),
        };
        let open: Vec<Claim> = claims.iter().filter(|claim| allocation(claim).is_none()).cloned().collect();
        let plan = match allocate::Plan::new(&open, &state.objects) {
            Ok(plan) => plan,
            Err(words) => return Status::unresolvable(words),
        };
        let given = state.node_named(node).map(|node| plan.allocate(node)).transpose();
        let mut given = match given {
            Ok(Some(Some(given))) => given,
            Ok(_) => return Status::unresolvable("cannot allocate all claims"),
            Err(words) => return Status::unresolvable(words),
        };
        let mut chosen = Vec::new();
        for claim in claims.into_iter().filter(|claim| !is_reserved_for(claim, pod)) {
            let mut promised = (*claim).clone();
            let status = promised.status.get_or_insert_default();
            if status.allocation.is_none() {
                status.allocation = (!given.is_empty()).then(|| given.remove(0));
            }
            status.reserved_for.get_or_insert_default().push(resource::ResourceClaimConsumerReference {
                api_group: None,
                resource: "pods".to_owned(),
                name: pod.name.to_string(),
                uid: pod.uid.to_string(),
            });
            let promised = Arc::new(promised);
            state.objects.resource_claims.insert(claim_key(&claim), promised.clone());
            chosen.push((claim, promised));
        }
        if !chosen.is_empty() {
            self.chosen.lock().insert(pod.uid.clone(), chosen);
        }
        Status::success()
    }

    fn unreserve(&self, state: &mut State, pod: &PodInfo, _: &Arc<str>) {
        for (was, promised) in self.chosen.lock().remove(&pod.uid).unwrap_or_default() {
            if let Some(now) = state.objects.resource_claims.get_mut(&claim_key(&was))
                && Arc::ptr_eq(now, &promised)
            {
                *now = was;
            }
        }
    }
}

fn claim_key(claim: &resource::ResourceClaim) -> String {
    let meta = &claim.metadata;
    key(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

#[async_trait]
impl PreBind for DynamicResources {
    fn has_work(&self, pod: &PodInfo) -> bool {
        !pod.claims.is_empty() && self.chosen.lock().contains_key(&pod.uid)
    }

    async fn pre_bind(&self, context: &BindContext, pod: &PodInfo, _: &str) -> Result<(), String> {
        let chosen = self.chosen.lock().get(&pod.uid).cloned().unwrap_or_default();
        for (was, promised) in &chosen {
            let mut claim = (**promised).clone();
            let finalizers = claim.metadata.finalizers.get_or_insert_default();
            if !finalizers.iter().any(|known| known == FINALIZER) {
                finalizers.push(FINALIZER.to_owned());
                let marked = context.api.update_resource_claim(&claim).await;
                let marked =
                    marked.map_err(|error| format!("add finalizer to claim {}: {error}", claim_key(was)))?;
                claim.metadata = marked.metadata;
            }
            if let Some(allocation) = claim.status.as_mut().and_then(|status| status.allocation.as_mut()) {
                allocation.allocation_timestamp.get_or_insert_with(|| Time(Timestamp::now()));
            }
            let written = context.api.update_resource_claim_status(&claim).await;
            written.map_err(|error| {
                format!("add allocation and reservation to claim {}: {error}", claim_key(was))
            })?;
        }
        for (was, promised) in &chosen {
            conditions::met(context, &claim_key(was), promised).await?;
        }
        self.chosen.lock().remove(&pod.uid);
        Ok(())
    }
}

impl Requeue for DynamicResources {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        match change {
            Change::ResourceClaim(pair) => {
                let own = |claim: &resource::ResourceClaim| {
                    claim.metadata.namespace.as_deref() == Some(&pod.namespace)
                        && pod.claims.iter().any(|one| one.claim.as_deref() == claim.metadata.name.as_deref())
                };
                // A claim given back frees devices for all.
                let freed = pair.old.is_some_and(|old| allocation(old).is_some())
                    && pair.new.is_none_or(|new| allocation(new).is_none());
                freed || pair.new.is_some_and(own)
            }
            Change::Pod(pair) => {
                pair.changed().is_some_and(|(old, new)| new.uid == pod.uid && old.claims != new.claims)
            }
            Change::Node(pair) => {
                pair.new.is_some_and(|new| pair.old.is_none_or(|old| old.labels != new.labels))
            }
            Change::DeviceClass(pair) => pair.new.is_some(),
            Change::ResourceSlice(pair) => pair.new.is_some(),
            _ => false,
        }
    }
}
