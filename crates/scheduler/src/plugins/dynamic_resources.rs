//! DynamicResources: the resource claims of a pod must be allocated where it runs, or be allocatable there.
//!
//! Devices are taken from the ResourceSlices a node reaches. What is chosen is marked in the state when the
//! node is reserved, and written to the claim before the pod is bound; drivers that want to prepare a device first are
//! waited for ([`conditions`]). Extended resources may be served from device classes, too ([`extended`]).

mod allocate;
mod binding;
mod capacity;
mod conditions;
pub(crate) mod extended;
mod pools;
mod rescue;
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
    Change, Cycle, Plain, Plugin, PreEnqueue, PreFilter, Prepared, Requeue, Reserve, Status,
};
use crate::state::objects::{Objects, key};
use crate::state::selection::NodeSelector;
use crate::state::{NodeInfo, PodInfo, State};

pub(crate) use binding::delete;

pub const NAME: &str = "DynamicResources";

/// So many pods may share a claim.
const MOST_USERS: usize = 256;

#[derive(Default)]
struct DynamicResources {
    /// What is chosen for pods on their way, by UID.
    chosen: Mutex<HashMap<Arc<str>, Chosen>>,
}

type Claim = Arc<resource::ResourceClaim>;

#[derive(Clone, Default)]
struct Chosen {
    /// Each claim as it was and as it will be.
    claims: Vec<(Claim, Claim)>,
    /// Which requests are for which extended resources.
    mappings: Vec<ContainerExtendedResourceRequest>,
}

/// Makes the plugin.
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

fn users(claim: &resource::ResourceClaim) -> &[resource::ResourceClaimConsumerReference] {
    claim.status.as_ref().and_then(|status| status.reserved_for.as_deref()).unwrap_or_default()
}

fn is_reserved_for(claim: &resource::ResourceClaim, pod: &PodInfo) -> bool {
    users(claim).iter().any(|user| user.uid == *pod.uid)
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
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let objects = &cycle.state.objects;
        let reject = |words: String| Prepared::Reject(Status::unresolvable(words));
        let devices = extended::backed(cycle.pod, objects);
        let claims = match claims_of(cycle.pod, objects) {
            Ok(claims) if claims.is_empty() && devices.is_empty() => return Prepared::Skip,
            Ok(claims) => claims,
            Err(words) => return reject(words),
        };
        let left_over = !devices.is_empty() && extended::left_over(cycle.pod, objects).is_some();
        let none = claims.is_empty();
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
        let plans = match Plans::new(open, cycle) {
            Ok(plans) => plans,
            Err(words) => return reject(words),
        };
        Prepared::Filter(Box::new(Plain(move |node: &NodeInfo| {
            if left_over {
                return Status::unresolvable("cannot schedule extended resource claim");
            }
            let wanted = extended::lacking(&devices, node);
            if none && wanted.is_empty() {
                return Status::success();
            }
            if places.iter().any(|place| !place.matches(node)) {
                return Status::unresolvable("resourceclaim not available on the node");
            }
            match plans.fits(&wanted, node) {
                Ok(true) => Status::success(),
                Ok(false) => Status::unresolvable("cannot allocate all claims"),
                Err(words) => Status::unresolvable(words),
            }
        })))
    }
}

type Made<'c> = Result<allocate::Plan<'c>, String>;

/// What is to be allocated, which is not the same on nodes that have other extended resources themselves.
struct Plans<'c> {
    open: Vec<Claim>,
    pod: &'c PodInfo,
    objects: &'c Objects,
    without: allocate::Plan<'c>,
    /// By the resources that are lacking.
    with: RefCell<HashMap<Vec<Arc<str>>, Made<'c>>>,
}

impl<'c> Plans<'c> {
    fn new(open: Vec<Claim>, cycle: &Cycle<'c>) -> Result<Plans<'c>, String> {
        let (pod, objects) = (&**cycle.pod, &cycle.state.objects);
        Ok(Plans {
            without: allocate::Plan::new(&open, objects)?,
            open,
            pod,
            objects,
            with: RefCell::default(),
        })
    }

    fn fits(&self, wanted: &[&extended::Backed], node: &NodeInfo) -> Result<bool, String> {
        if wanted.is_empty() {
            return self.without.fits(node);
        }
        let names = wanted.iter().map(|(name, _)| name.clone()).collect();
        let mut with = self.with.borrow_mut();
        let plan = with.entry(names).or_insert_with(|| {
            let mut open = self.open.clone();
            open.push(extended::claim(self.pod, wanted).0);
            allocate::Plan::new(&open, self.objects)
        });
        plan.as_ref().map_err(Clone::clone)?.fits(node)
    }
}

impl Reserve for DynamicResources {
    fn reserve(&self, state: &mut State, pod: &PodInfo, node: &Arc<str>) -> Status {
        let mut claims = match claims_of(pod, &state.objects) {
            Ok(claims) => claims,
            Err(words) => return Status::unresolvable(words),
        };
        let mut chosen = Chosen::default();
        let devices = extended::backed(pod, &state.objects);
        let wanted = state.node_named(node).map(|node| extended::lacking(&devices, node)).unwrap_or_default();
        if !wanted.is_empty() {
            let (claim, mappings) = extended::claim(pod, &wanted);
            claims.push(claim);
            chosen.mappings = mappings;
        }
        if claims.is_empty() {
            return Status::success();
        }
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
            chosen.claims.push((claim, promised));
        }
        if !chosen.claims.is_empty() {
            self.chosen.lock().insert(pod.uid.clone(), chosen);
        }
        Status::success()
    }

    fn unreserve(&self, state: &mut State, pod: &PodInfo, _: &Arc<str>) {
        let claims = &mut state.objects.resource_claims;
        for (was, promised) in self.chosen.lock().remove(&pod.uid).unwrap_or_default().claims {
            if let Some(now) = claims.get_mut(&claim_key(&was))
                && Arc::ptr_eq(now, &promised)
            {
                *now = was;
            }
        }
        if !pod.asking.is_empty() {
            claims.remove(&extended::unnamed_key(&pod.namespace, &pod.uid));
        }
    }
}

fn claim_key(claim: &resource::ResourceClaim) -> String {
    let meta = &claim.metadata;
    key(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

impl Requeue for DynamicResources {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, state: &State) -> bool {
        let objects = &state.objects;
        // Without its claims nothing else helps; those of a pod that has changed are looked for below.
        if !matches!(change, Change::Pod(_)) && claims_of(pod, objects).is_err() {
            return false;
        }
        match change {
            Change::ResourceClaim(pair) => {
                let own = |claim: &resource::ResourceClaim| {
                    claim.metadata.namespace.as_deref() == Some(&pod.namespace)
                        && pod.claims.iter().any(|one| one.claim.as_deref() == claim.metadata.name.as_deref())
                };
                // A claim given back frees devices for all.
                let freed = pair.old.is_some_and(|old| allocation(old).is_some())
                    && pair.new.is_none_or(|new| allocation(new).is_none());
                let made_way = pair.removed().is_some_and(|old| extended::is_of(old, pod));
                let news = pair.old.is_none_or(|old| pair.new.is_some_and(|new| old.status != new.status));
                freed || made_way || news && pair.new.is_some_and(own)
            }
            Change::Pod(pair) => pair.changed().is_some_and(|(old, new)| {
                new.uid == pod.uid && old.claims != new.claims && claims_of(new, objects).is_ok()
            }),
            Change::Node(pair) => {
                pair.new.is_some_and(|new| pair.old.is_none_or(|old| old.labels != new.labels))
            }
            Change::DeviceClass(pair) => pair.new.is_some(),
            Change::ResourceSlice(pair) => pair.new.is_some(),
            _ => false,
        }
    }
}
