//! Backtracking search for devices: allocates request by request and undoes what leads to no solution.
//!
//! The only state is the list of devices allocated so far. Whether a further device can be allocated is
//! computed from it each time. Claims have few devices, so this is cheap, and undoing an allocation cannot
//! miss any state.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::resource::v1 as resource;
use schema::quantity::Quantity;

use super::allocator::{ClaimToAllocate, SubRequest};
use super::capacity;
use super::pool_set::{NodeDevices, PoolDevice, PoolSet, add, consumed_counters};

/// How many devices a claim may have (upstream's `AllocationResultsMaxSize`).
const ALLOCATION_RESULTS_MAX_SIZE: usize = 32;
/// Limit of the number of devices tried. Upstream limits the time instead.
const MAX_SEARCH_STEPS: usize = 100_000;

/// A device allocated to a request.
pub struct AllocatedDevice {
    /// Index into `pool_devices`.
    pub pool_device: usize,
    pub request: usize,
    pub sub_request: usize,
    /// The consumed capacity of a device that allows multiple allocations.
    pub consumed: Option<BTreeMap<String, Quantity>>,
}

pub struct Search<'s, 'o> {
    claims: &'s [ClaimToAllocate],
    pool_set: &'s PoolSet<'o>,
    pub pool_devices: Vec<PoolDevice<'o>>,
    /// Allocated devices by claim.
    pub allocated: Vec<Vec<AllocatedDevice>>,
    /// The selected alternative by claim and request.
    pub chosen: Vec<Vec<usize>>,
    /// Cached results of CEL selectors.
    device_matches_request: HashMap<(RequestIndices, usize), bool>,
    /// The devices of subrequests with allocation mode `All`.
    all_devices: HashMap<RequestIndices, Vec<usize>>,
    steps: usize,
}

/// Indices of claim, request and subrequest.
type RequestIndices = (usize, usize, usize);

#[derive(Clone, Copy, Debug, PartialEq)]
enum SearchResult {
    Allocated,
    NotAllocated,
    /// The claim would exceed its maximum number of devices.
    TooMany,
}

impl<'s, 'o> Search<'s, 'o> {
    /// Allocates devices for all claims; `None` if there is no solution. Fails if the search was cut short or
    /// a pool is invalid, because a solution may exist then.
    pub fn run(
        claims: &'s [ClaimToAllocate],
        pool_set: &'s PoolSet<'o>,
        node_devices: NodeDevices<'o>,
    ) -> Result<Option<Search<'s, 'o>>, String> {
        let mut search = Search {
            claims,
            pool_set,
            pool_devices: node_devices.pool_devices,
            allocated: claims.iter().map(|_| Vec::new()).collect(),
            chosen: claims.iter().map(|claim| vec![0; claim.requests.len()]).collect(),
            device_matches_request: HashMap::new(),
            all_devices: HashMap::new(),
            steps: 0,
        };
        search.collect_all_devices(&node_devices.invalid_pools)?;
        if search.allocate_request(0, 0) == SearchResult::Allocated {
            return Ok(Some(search));
        }
        if search.steps >= MAX_SEARCH_STEPS {
            return Err("timed out trying to allocate devices".to_owned());
        }
        match node_devices.invalid_pools.iter().any(|(_, reason)| *reason == "invalid") {
            true => Err("invalid resource pools were encountered".to_owned()),
            false => Ok(None),
        }
    }

    /// Collects the devices of subrequests with allocation mode `All`.
    fn collect_all_devices(&mut self, invalid_pools: &[(String, &'static str)]) -> Result<(), String> {
        for (c, claim) in self.claims.iter().enumerate() {
            for (r, request) in claim.requests.iter().enumerate() {
                for (w, sub_request) in request
                    .sub_requests
                    .iter()
                    .enumerate()
                    .filter(|(_, sub_request)| sub_request.count.is_none())
                {
                    if let Some((pool, reason)) = invalid_pools.first() {
                        return Err(format!(
                            "claim {}, request {}: asks for all devices, but resource pool {pool} is currently {reason}",
                            claim.key, sub_request.sub_request_name
                        ));
                    }
                    let matching = (0..self.pool_devices.len()).filter(|pool_device| {
                        self.is_selectable((c, r, w), *pool_device)
                            && self.consumed_capacity(sub_request, *pool_device).is_some()
                    });
                    let matching = matching.collect();
                    self.all_devices.insert((c, r, w), matching);
                }
            }
        }
        Ok(())
    }

    fn allocate_request(&mut self, claim: usize, request: usize) -> SearchResult {
        let claims = self.claims;
        let Some(claim_to_allocate) = claims.get(claim) else { return SearchResult::Allocated };
        let Some(request_spec) = claim_to_allocate.requests.get(request) else {
            // `TooMany` of the next claim does not concern this one: with other devices here the next claim
            // may use another alternative.
            return match self.allocate_request(claim + 1, 0) {
                SearchResult::TooMany => SearchResult::NotAllocated,
                found => found,
            };
        };
        let mut found = SearchResult::TooMany;
        for sub_request in 0..request_spec.sub_requests.len() {
            self.chosen[claim][request] = sub_request;
            match self.allocate_one((claim, request, sub_request), 0, 0) {
                SearchResult::Allocated => return SearchResult::Allocated,
                SearchResult::NotAllocated => found = SearchResult::NotAllocated,
                SearchResult::TooMany => {}
            }
        }
        found
    }

    /// Allocates device number `index` of a request and everything after it. Candidates start at `from`, so
    /// that the same set of devices is not tried in every order.
    fn allocate_one(&mut self, indices: RequestIndices, index: usize, from: usize) -> SearchResult {
        let (claim, request, way_index) = indices;
        let claims = self.claims;
        let sub_request = &claims[claim].requests[request].sub_requests[way_index];
        let candidates = match sub_request.count {
            Some(count) if index >= count => return self.allocate_request(claim, request + 1),
            Some(_) => (from..self.pool_devices.len()).collect(),
            None => match self.all_devices.get(&indices) {
                Some(all) if index < all.len() => vec![all[index]],
                Some(all) if !all.is_empty() => return self.allocate_request(claim, request + 1),
                _ => return SearchResult::NotAllocated,
            },
        };
        let needed = sub_request.count.unwrap_or_else(|| self.all_devices[&indices].len()) - index;
        if self.allocated[claim].len() + needed > ALLOCATION_RESULTS_MAX_SIZE {
            return SearchResult::TooMany;
        }
        for pool_device in candidates {
            self.steps += 1;
            if self.steps >= MAX_SEARCH_STEPS {
                return SearchResult::NotAllocated;
            }
            let Some(consumed) = self.check_device(indices, sub_request, pool_device) else { continue };
            self.allocated[claim].push(AllocatedDevice {
                pool_device,
                request,
                sub_request: way_index,
                consumed,
            });
            match self.allocate_one(indices, index + 1, pool_device + 1) {
                SearchResult::Allocated => return SearchResult::Allocated,
                found => {
                    self.allocated[claim].pop();
                    if found == SearchResult::TooMany {
                        return found;
                    }
                }
            }
        }
        SearchResult::NotAllocated
    }

    /// Whether a device can be allocated now. The inner value is the consumed capacity if the device allows
    /// multiple allocations.
    fn check_device(
        &mut self,
        indices: RequestIndices,
        sub_request: &SubRequest,
        pool_device: usize,
    ) -> Option<Option<BTreeMap<String, Quantity>>> {
        if self.in_use(indices.0, sub_request, pool_device) || !self.is_selectable(indices, pool_device) {
            return None;
        }
        let consumed = self.consumed_capacity(sub_request, pool_device)?;
        let device = self.pool_devices[pool_device].device;
        let allowed = tolerates_taints(device, &sub_request.tolerations)
            && self.check_available_counters(pool_device)
            && self.matches_constraints(indices, pool_device);
        allowed.then(|| is_shared(device).then_some(consumed))
    }

    fn is_selectable(&mut self, indices: RequestIndices, pool_device: usize) -> bool {
        if let Some(known) = self.device_matches_request.get(&(indices, pool_device)) {
            return *known;
        }
        let sub_request = &self.claims[indices.0].requests[indices.1].sub_requests[indices.2];
        let PoolDevice { id, device, .. } = &self.pool_devices[pool_device];
        let is_match = sub_request.selectors.iter().all(|selector| selector.matches(&id.0, device));
        self.device_matches_request.insert((indices, pool_device), is_match);
        is_match
    }

    fn in_use(&self, claim: usize, sub_request: &SubRequest, pool_device: usize) -> bool {
        if is_shared(self.pool_devices[pool_device].device) {
            return false;
        }
        let has = |given: &Vec<AllocatedDevice>| given.iter().any(|given| given.pool_device == pool_device);
        match sub_request.admin {
            // Admin access does not allocate the device, so it ignores other claims; but each device is used
            // once.
            true => has(&self.allocated[claim]),
            false => {
                self.pool_set.taken.contains(&self.pool_devices[pool_device].id)
                    || self.allocated.iter().any(has)
            }
        }
    }

    /// Returns the capacity that a subrequest consumes; `None` if the device has not enough left.
    fn consumed_capacity(
        &self,
        sub_request: &SubRequest,
        pool_device: usize,
    ) -> Option<BTreeMap<String, Quantity>> {
        let PoolDevice { id, device, .. } = &self.pool_devices[pool_device];
        let taken = capacity::consumed_capacity(sub_request.capacity.as_ref(), device)?;
        let mut total_consumed = self.pool_set.consumed.get(id).cloned().unwrap_or_default();
        let earlier = self.allocated.iter().flatten().filter(|given| given.pool_device == pool_device);
        let consumed = earlier.filter_map(|given| given.consumed.as_ref());
        for (name, amount) in consumed.chain([&taken]).flatten() {
            add(&mut total_consumed, name, *amount);
        }
        let fits_capacity = |(name, capacity): (&String, &resource::DeviceCapacity)| {
            total_consumed.get(name).is_none_or(|sum| *sum <= capacity::quantity(&capacity.value))
        };
        device.capacity.iter().flatten().all(fits_capacity).then_some(taken)
    }

    /// Whether the pool's shared counters suffice for the device.
    fn check_available_counters(&self, pool_device: usize) -> bool {
        let PoolDevice { id, device, pool, .. } = &self.pool_devices[pool_device];
        let is_already_counted = is_shared(device)
            && (self.pool_set.consumed.contains_key(id)
                || self.allocated.iter().flatten().any(|given| given.pool_device == pool_device));
        if is_already_counted || device.consumes_counters.as_ref().is_none_or(Vec::is_empty) {
            return true;
        }
        let mut given: Vec<usize> = self.allocated.iter().flatten().map(|given| given.pool_device).collect();
        given.push(pool_device);
        given.sort_unstable();
        given.dedup();
        let given = given.into_iter().map(|index| &self.pool_devices[index]).filter(|one| one.pool == *pool);
        // The counters of a shared device were subtracted with its first allocation.
        let new = given.filter(|one| !self.pool_set.consumed.contains_key(&one.id));
        let mut left = self.pool_set.pool(*pool).counters.clone();
        for (set, name, amount) in new.flat_map(|one| consumed_counters(one.device)) {
            if let Some(left) = left.get_mut(&(set, name)) {
                *left = *left - amount;
            }
        }
        left.values().all(|left| !left.is_negative())
    }

    /// Whether the device satisfies the claim's match and distinct constraints.
    fn matches_constraints(&self, indices: RequestIndices, pool_device: usize) -> bool {
        let claim = &self.claims[indices.0];
        let name = |request: usize, sub_request: usize| &claim.requests[request].sub_requests[sub_request];
        claim.constraints.iter().all(|constraint| {
            let applies_to = |sub_request: &SubRequest| {
                constraint.requests.is_empty()
                    || constraint
                        .requests
                        .iter()
                        .any(|name| *name == sub_request.name || *name == sub_request.parent)
            };
            if !applies_to(name(indices.1, indices.2)) {
                return true;
            }
            let value =
                |pool_device: usize| attribute(&self.pool_devices[pool_device], &constraint.attribute);
            let Some(own) = value(pool_device) else { return false };
            let others = self.allocated[indices.0]
                .iter()
                .filter(|given| applies_to(name(given.request, given.sub_request)));
            others
                .filter_map(|given| value(given.pool_device))
                .all(|other| (other == own) != constraint.distinct)
        })
    }
}

fn is_shared(device: &resource::Device) -> bool {
    device.allow_multiple_allocations == Some(true)
}

/// Returns an attribute by its fully qualified name. Attributes in the driver's domain may be stored without
/// it.
fn attribute<'o>(pool_device: &PoolDevice<'o>, name: &str) -> Option<&'o resource::DeviceAttribute> {
    let attributes = pool_device.device.attributes.as_ref()?;
    let short = || {
        let (domain, id) = name.split_once('/')?;
        attributes.get(id).filter(|_| domain == pool_device.id.0)
    };
    let found = attributes.get(name).or_else(short)?;
    let known =
        found.string.is_some() || found.int.is_some() || found.bool.is_some() || found.version.is_some();
    known.then_some(found)
}

fn tolerates_taints(device: &resource::Device, tolerations: &[resource::DeviceToleration]) -> bool {
    let is_match = |taint: &resource::DeviceTaint, toleration: &resource::DeviceToleration| {
        let some = |text: &Option<String>| text.clone().unwrap_or_default();
        let (key, effect) = (some(&toleration.key), some(&toleration.effect));
        (effect.is_empty() || effect == taint.effect)
            && (key.is_empty() || key == taint.key)
            && match toleration.operator.as_deref() {
                Some("Exists") => true,
                None | Some("" | "Equal") => some(&toleration.value) == some(&taint.value),
                Some(_) => false,
            }
    };
    let taints = device.taints.iter().flatten();
    let mut no_schedule_taints = taints.filter(|taint| matches!(&*taint.effect, "NoSchedule" | "NoExecute"));
    no_schedule_taints.all(|taint| tolerations.iter().any(|toleration| is_match(taint, toleration)))
}
