//! DynamicResources: a pod runs only where all its ResourceClaims are allocated or can be allocated.
//!
//! Devices are allocated from the ResourceSlices that a node can access. An allocation is assumed in the
//! state at Reserve and written to the claim at PreBind; the plugin then waits for devices whose drivers must
//! prepare them first ([`conditions`]). Extended resources can be backed by device classes
//! ([`extended_resources`]).

mod allocator;
mod binding;
mod capacity;
mod conditions;
pub(crate) mod extended_resources;
mod pool_set;
mod post_filter;
mod score;
mod search;
mod selectors;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ContainerExtendedResourceRequest;
use k8s_openapi::api::resource::v1 as resource;
use parking_lot::Mutex;
use serde_json::Value;

use crate::framework::{
    ClusterEvent, Cycle, FnFilter, Plugin, PreEnqueue, PreFilter, PreFilterResult, Requeue, Reserve, Status,
};
use crate::state::objects::{Objects, key};
use crate::state::selection::NodeSelector;
use crate::state::{NodeInfo, PodInfo, State};

pub(crate) use binding::delete;

pub const NAME: &str = "DynamicResources";

/// How many pods may share a claim (upstream's `ResourceClaimReservedForMaxSize`).
const RESERVED_FOR_MAX_SIZE: usize = 256;

#[derive(Default)]
struct DynamicResources {
    /// Assumed allocations of pods between Reserve and PreBind, by pod UID.
    reserved: Mutex<HashMap<Arc<str>, ReservedClaims>>,
}

type Claim = Arc<resource::ResourceClaim>;

#[derive(Clone, Default)]
struct ReservedClaims {
    /// Each claim before and after the allocation.
    claims: Vec<(Claim, Claim)>,
    /// The requests of the special claim, by container and extended resource.
    request_mappings: Vec<ContainerExtendedResourceRequest>,
}

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(DynamicResources::default());
    Ok(Plugin::new(NAME)
        .pre_enqueue(plugin.clone())
        .pre_filter(plugin.clone())
        .post_filter(plugin.clone())
        .pre_score(plugin.clone())
        .reserve(plugin.clone())
        .pre_bind(plugin.clone())
        .requeue(plugin))
}

/// Returns the existing claims of a pod. Template references for which no claim is needed are skipped.
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
        if reference.is_from_template
            && !owners.iter().any(|owner| owner.uid == *pod.uid && owner.controller == Some(true))
        {
            let claim = key(&pod.namespace, name);
            return Err(format!(
                "ResourceClaim {claim} was not created for Pod {} (Pod is not owner)",
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

fn reserved_for(claim: &resource::ResourceClaim) -> &[resource::ResourceClaimConsumerReference] {
    claim.status.as_ref().and_then(|status| status.reserved_for.as_deref()).unwrap_or_default()
}

fn is_reserved_for(claim: &resource::ResourceClaim, pod: &PodInfo) -> bool {
    reserved_for(claim).iter().any(|user| user.uid == *pod.uid)
}

impl PreEnqueue for DynamicResources {
    fn pre_enqueue(&self, pod: &PodInfo, state: &State) -> Status {
        match claims_of(pod, &state.objects) {
            Ok(_) => Status::success(),
            Err(words) => Status::unresolvable(words),
        }
    }
}

impl PreFilter for DynamicResources {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let objects = &cycle.state.objects;
        let reject = |words: String| PreFilterResult::Reject(Status::unresolvable(words));
        let devices = extended_resources::resources_with_device_class(cycle.pod, objects);
        let claims = match claims_of(cycle.pod, objects) {
            Ok(claims) if claims.is_empty() && devices.is_empty() => return PreFilterResult::Skip,
            Ok(claims) => claims,
            Err(words) => return reject(words),
        };
        let has_leftover_claim =
            !devices.is_empty() && extended_resources::find_leftover_claim(cycle.pod, objects).is_some();
        let none = claims.is_empty();
        let (mut node_selectors, mut pending) = (Vec::new(), Vec::new());
        for claim in claims {
            match allocation(&claim) {
                Some(_)
                    if reserved_for(&claim).len() >= RESERVED_FOR_MAX_SIZE
                        && !is_reserved_for(&claim, cycle.pod) =>
                {
                    return reject("resourceclaim in use".to_owned());
                }
                Some(allocated) => {
                    node_selectors.extend(allocated.node_selector.as_ref().map(NodeSelector::new))
                }
                None => pending.push(claim),
            }
        }
        let allocator_cache = match AllocatorCache::new(pending, cycle) {
            Ok(allocator_cache) => allocator_cache,
            Err(words) => return reject(words),
        };
        PreFilterResult::Filter(Box::new(FnFilter(move |node: &NodeInfo| {
            if has_leftover_claim {
                return Status::unresolvable("cannot schedule extended resource claim");
            }
            let missing = extended_resources::missing_on_node(&devices, node);
            if none && missing.is_empty() {
                return Status::success();
            }
            if node_selectors.iter().any(|node_selector| !node_selector.matches(node)) {
                return Status::unresolvable("resourceclaim not available on the node");
            }
            match allocator_cache.fits(&missing, node) {
                Ok(true) => Status::success(),
                Ok(false) => Status::unresolvable("cannot allocate all claims"),
                Err(words) => Status::unresolvable(words),
            }
        })))
    }
}

type AllocatorResult<'c> = Result<allocator::Allocator<'c>, String>;

/// The allocators for a pod. Nodes differ in the extended resources that device plugins provide, so the
/// requests of the special claim differ, too.
struct AllocatorCache<'c> {
    pending: Vec<Claim>,
    pod: &'c PodInfo,
    objects: &'c Objects,
    base: allocator::Allocator<'c>,
    /// By the extended resources that the node lacks.
    by_resources: RefCell<HashMap<Vec<Arc<str>>, AllocatorResult<'c>>>,
}

impl<'c> AllocatorCache<'c> {
    fn new(pending: Vec<Claim>, cycle: &Cycle<'c>) -> Result<AllocatorCache<'c>, String> {
        let (pod, objects) = (&**cycle.pod, &cycle.state.objects);
        Ok(AllocatorCache {
            base: allocator::Allocator::new(&pending, objects)?,
            pending,
            pod,
            objects,
            by_resources: RefCell::default(),
        })
    }

    fn fits(
        &self,
        missing: &[&extended_resources::ExtendedResource],
        node: &NodeInfo,
    ) -> Result<bool, String> {
        if missing.is_empty() {
            return self.base.fits(node);
        }
        let names = missing.iter().map(|(name, _)| name.clone()).collect();
        let mut by_resources = self.by_resources.borrow_mut();
        let allocator = by_resources.entry(names).or_insert_with(|| {
            let mut pending = self.pending.clone();
            pending.push(extended_resources::new_extended_claim(self.pod, missing).0);
            allocator::Allocator::new(&pending, self.objects)
        });
        allocator.as_ref().map_err(Clone::clone)?.fits(node)
    }
}

impl Reserve for DynamicResources {
    fn reserve(&self, state: &mut State, pod: &PodInfo, node: &Arc<str>) -> Status {
        let mut claims = match claims_of(pod, &state.objects) {
            Ok(claims) => claims,
            Err(words) => return Status::unresolvable(words),
        };
        let mut reserved = ReservedClaims::default();
        let devices = extended_resources::resources_with_device_class(pod, &state.objects);
        let missing = state
            .node_by_name(node)
            .map(|node| extended_resources::missing_on_node(&devices, node))
            .unwrap_or_default();
        if !missing.is_empty() {
            let (claim, mappings) = extended_resources::new_extended_claim(pod, &missing);
            claims.push(claim);
            reserved.request_mappings = mappings;
        }
        if claims.is_empty() {
            return Status::success();
        }
        let pending: Vec<Claim> =
            claims.iter().filter(|claim| allocation(claim).is_none()).cloned().collect();
        let allocator = match allocator::Allocator::new(&pending, &state.objects) {
            Ok(allocator) => allocator,
            Err(words) => return Status::unresolvable(words),
        };
        let allocations = state.node_by_name(node).map(|node| allocator.allocate(node)).transpose();
        let mut allocations = match allocations {
            Ok(Some(Some(allocations))) => allocations,
            Ok(_) => return Status::unresolvable("cannot allocate all claims"),
            Err(words) => return Status::unresolvable(words),
        };
        for claim in claims.into_iter().filter(|claim| !is_reserved_for(claim, pod)) {
            let mut assumed = (*claim).clone();
            let status = assumed.status.get_or_insert_default();
            if status.allocation.is_none() {
                status.allocation = (!allocations.is_empty()).then(|| allocations.remove(0));
            }
            status.reserved_for.get_or_insert_default().push(resource::ResourceClaimConsumerReference {
                api_group: None,
                resource: "pods".to_owned(),
                name: pod.name.to_string(),
                uid: pod.uid.to_string(),
            });
            let assumed = Arc::new(assumed);
            state.objects.resource_claims.insert(claim_key(&claim), assumed.clone());
            reserved.claims.push((claim, assumed));
        }
        if !reserved.claims.is_empty() {
            self.reserved.lock().insert(pod.uid.clone(), reserved);
        }
        Status::success()
    }

    fn unreserve(&self, state: &mut State, pod: &PodInfo, _: &Arc<str>) {
        let claims = &mut state.objects.resource_claims;
        for (was, assumed) in self.reserved.lock().remove(&pod.uid).unwrap_or_default().claims {
            if let Some(now) = claims.get_mut(&claim_key(&was))
                && Arc::ptr_eq(now, &assumed)
            {
                *now = was;
            }
        }
        if !pod.container_requests.is_empty() {
            claims.remove(&extended_resources::special_claim_key(&pod.namespace, &pod.uid));
        }
    }
}

fn claim_key(claim: &resource::ResourceClaim) -> String {
    let meta = &claim.metadata;
    key(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

impl Requeue for DynamicResources {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, state: &State) -> bool {
        let objects = &state.objects;
        // As long as a claim is missing no other event helps. Pod updates are checked below, with the new
        // pod.
        if !matches!(change, ClusterEvent::Pod(_)) && claims_of(pod, objects).is_err() {
            return false;
        }
        match change {
            ClusterEvent::ResourceClaim(pair) => {
                let own = |claim: &resource::ResourceClaim| {
                    claim.metadata.namespace.as_deref() == Some(&pod.namespace)
                        && pod.claims.iter().any(|one| one.claim.as_deref() == claim.metadata.name.as_deref())
                };
                // Deallocating or deleting any claim frees devices for other pods.
                let is_released = pair.old.is_some_and(|old| allocation(old).is_some())
                    && pair.new.is_none_or(|new| allocation(new).is_none());
                let is_leftover_deleted =
                    pair.removed().is_some_and(|old| extended_resources::is_extended_claim_of(old, pod));
                let is_status_changed =
                    pair.old.is_none_or(|old| pair.new.is_some_and(|new| old.status != new.status));
                is_released || is_leftover_deleted || is_status_changed && pair.new.is_some_and(own)
            }
            ClusterEvent::Pod(pair) => pair.changed().is_some_and(|(old, new)| {
                new.uid == pod.uid && old.claims != new.claims && claims_of(new, objects).is_ok()
            }),
            ClusterEvent::Node(pair) => {
                pair.new.is_some_and(|new| pair.old.is_none_or(|old| old.labels != new.labels))
            }
            ClusterEvent::DeviceClass(pair) => pair.new.is_some(),
            ClusterEvent::ResourceSlice(pair) => pair.new.is_some(),
            _ => false,
        }
    }
}
