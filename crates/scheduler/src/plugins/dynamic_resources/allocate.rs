//! Which devices claims would get on a node.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1 as resource;

use super::selectors::{self, Selector};
use super::{allocation, claim_key};
use crate::state::NodeInfo;
use crate::state::objects::Objects;
use crate::state::selection::NodeSelector;

/// What makes a device one: driver, pool, name.
type DeviceId = (String, String, String);

/// Claims to be allocated together.
pub(super) struct Plan {
    claims: Vec<Vec<Request>>,
    /// Devices of other claims.
    taken: BTreeSet<DeviceId>,
}

/// A request with its alternatives, the first that can be met counts.
struct Request {
    ways: Vec<Way>,
}

struct Way {
    /// As it is named in the result.
    name: String,
    /// `None` for all there are.
    count: Option<usize>,
    admin: bool,
    tolerations: Vec<resource::DeviceToleration>,
    selectors: Vec<Selector>,
}

impl Plan {
    /// Reads the claims' requests, or says why they cannot be met anywhere.
    pub fn new(claims: &[Arc<resource::ResourceClaim>], objects: &Objects) -> Result<Plan, String> {
        let mut plan = Plan { claims: Vec::new(), taken: BTreeSet::new() };
        for claim in claims {
            let devices = claim.spec.devices.clone().unwrap_or_default();
            let unknown = |request: &str, what: &str| {
                let key = claim_key(claim);
                Err(format!(
                    "resource claim {key}, request {request}: {what} is not understood by this scheduler"
                ))
            };
            if devices.constraints.is_some_and(|constraints| !constraints.is_empty()) {
                return unknown("*", "a constraint on attributes");
            }
            let mut requests = Vec::new();
            for request in devices.requests.unwrap_or_default() {
                let name = request.name;
                let exact = request.exactly.map(|exact| (name.clone(), exact));
                let others = request.first_available.unwrap_or_default().into_iter();
                let others = others.map(|sub| (format!("{name}/{}", sub.name), exactly(sub)));
                let mut ways = Vec::new();
                for (name, exact) in exact.into_iter().chain(others) {
                    let class = objects.device_classes.get(&exact.device_class_name).ok_or_else(|| {
                        format!("request {name}: device class {} does not exist", exact.device_class_name)
                    })?;
                    let whose = format!("class {}", exact.device_class_name);
                    let mut selectors = selectors::compile(class.spec.selectors.as_deref(), &whose)?;
                    let whose = format!("claim {}", claim_key(claim));
                    selectors.extend(selectors::compile(exact.selectors.as_deref(), &whose)?);
                    if exact.capacity.is_some() {
                        return unknown(&name, "a part of a device's capacity");
                    }
                    let all = exact.allocation_mode.as_deref() == Some("All");
                    let count = usize::try_from(exact.count.unwrap_or(1)).unwrap_or(1);
                    ways.push(Way {
                        name,
                        count: (!all).then_some(count),
                        admin: exact.admin_access == Some(true),
                        tolerations: exact.tolerations.unwrap_or_default(),
                        selectors,
                    });
                }
                requests.push(Request { ways });
            }
            plan.claims.push(requests);
        }
        if !plan.claims.is_empty() {
            plan.taken = taken(objects);
        }
        Ok(plan)
    }

    /// What each claim gets on the node, in order; `None` if one goes short.
    pub fn allocate(&self, node: &NodeInfo, objects: &Objects) -> Option<Vec<resource::AllocationResult>> {
        let mut taken = self.taken.clone();
        let devices = if self.claims.is_empty() { Vec::new() } else { reachable(node, objects) };
        self.claims.iter().map(|requests| claim(requests, node, &devices, &mut taken)).collect()
    }
}

fn exactly(sub: resource::DeviceSubRequest) -> resource::ExactDeviceRequest {
    resource::ExactDeviceRequest {
        admin_access: None,
        allocation_mode: sub.allocation_mode,
        capacity: sub.capacity,
        count: sub.count,
        device_class_name: sub.device_class_name,
        selectors: sub.selectors,
        tolerations: sub.tolerations,
    }
}

/// The devices other claims have.
fn taken(objects: &Objects) -> BTreeSet<DeviceId> {
    let results = objects.resource_claims.values().filter_map(|claim| {
        let devices = allocation(claim)?.devices.as_ref()?;
        devices.results.as_ref()
    });
    let exclusive = results.flatten().filter(|result| result.admin_access != Some(true));
    exclusive.map(|result| (result.driver.clone(), result.pool.clone(), result.device.clone())).collect()
}

struct Offer<'o> {
    id: DeviceId,
    device: &'o resource::Device,
    /// The device belongs to this node alone.
    local: bool,
}

/// The devices a node reaches, from the newest complete generation of each pool, sorted.
fn reachable<'o>(node: &NodeInfo, objects: &'o Objects) -> Vec<Offer<'o>> {
    let newest = |slice: &resource::ResourceSlice| {
        !objects.resource_slices.values().any(|other| {
            other.spec.driver == slice.spec.driver
                && other.spec.pool.name == slice.spec.pool.name
                && other.spec.pool.generation > slice.spec.pool.generation
        })
    };
    let mut offers = Vec::new();
    for slice in objects.resource_slices.values().filter(|slice| newest(slice)) {
        let spec = &slice.spec;
        let whole = spec.per_device_node_selection != Some(true);
        if whole && !reaches(node, spec.node_name.as_deref(), spec.all_nodes, spec.node_selector.as_ref()) {
            continue;
        }
        for device in spec.devices.iter().flatten() {
            let own = whole
                || reaches(
                    node,
                    device.node_name.as_deref(),
                    device.all_nodes,
                    device.node_selector.as_ref(),
                );
            // Devices made of shared counters need accounts that are not kept here.
            if own && device.consumes_counters.as_ref().is_none_or(Vec::is_empty) {
                offers.push(Offer {
                    id: (spec.driver.clone(), spec.pool.name.clone(), device.name.clone()),
                    device,
                    local: spec.node_name.is_some() || device.node_name.is_some(),
                });
            }
        }
    }
    offers.sort_by(|a, b| a.id.cmp(&b.id));
    offers
}

fn reaches(
    node: &NodeInfo,
    name: Option<&str>,
    all: Option<bool>,
    selector: Option<&core::NodeSelector>,
) -> bool {
    all == Some(true)
        || name == Some(&*node.name)
        || selector.is_some_and(|selector| NodeSelector::new(selector).matches(node))
}

fn claim(
    requests: &[Request],
    node: &NodeInfo,
    devices: &[Offer<'_>],
    taken: &mut BTreeSet<DeviceId>,
) -> Option<resource::AllocationResult> {
    let (mut results, mut local) = (Vec::new(), false);
    for request in requests {
        let (way, chosen) = request.ways.iter().find_map(|way| Some((way, choose(way, devices, taken)?)))?;
        for offer in chosen {
            local |= offer.local;
            if !way.admin {
                taken.insert(offer.id.clone());
            }
            let (driver, pool, device) = offer.id.clone();
            results.push(resource::DeviceRequestAllocationResult {
                request: way.name.clone(),
                driver,
                pool,
                device,
                admin_access: way.admin.then_some(true),
                tolerations: Some(way.tolerations.clone()).filter(|list| !list.is_empty()),
                ..resource::DeviceRequestAllocationResult::default()
            });
        }
    }
    Some(resource::AllocationResult {
        devices: Some(resource::DeviceAllocationResult { config: None, results: Some(results) }),
        node_selector: local.then(|| only(&node.name)),
        allocation_timestamp: None,
    })
}

fn choose<'d, 'o>(
    way: &Way,
    devices: &'d [Offer<'o>],
    taken: &BTreeSet<DeviceId>,
) -> Option<Vec<&'d Offer<'o>>> {
    let free = |offer: &&Offer<'o>| way.admin || !taken.contains(&offer.id);
    let wanted =
        |offer: &&Offer<'o>| way.selectors.iter().all(|selector| selector.matches(&offer.id.0, offer.device));
    let borne = |offer: &&Offer<'o>| tolerated(offer.device, &way.tolerations);
    match way.count {
        Some(count) => {
            let chosen: Vec<_> =
                devices.iter().filter(free).filter(borne).filter(wanted).take(count).collect();
            (chosen.len() == count).then_some(chosen)
        }
        None => {
            let all: Vec<_> = devices.iter().filter(wanted).collect();
            (!all.is_empty() && all.iter().all(|offer| free(offer) && borne(offer))).then_some(all)
        }
    }
}

fn tolerated(device: &resource::Device, tolerations: &[resource::DeviceToleration]) -> bool {
    let bears = |taint: &resource::DeviceTaint, toleration: &resource::DeviceToleration| {
        let some = |text: &Option<String>| text.clone().unwrap_or_default();
        let (key, effect) = (some(&toleration.key), some(&toleration.effect));
        (effect.is_empty() || effect == taint.effect)
            && (key.is_empty() || key == taint.key)
            && (toleration.operator.as_deref() == Some("Exists")
                || some(&toleration.value) == some(&taint.value))
    };
    let mut taints = device.taints.iter().flatten().filter(|taint| taint.effect != "None");
    taints.all(|taint| tolerations.iter().any(|toleration| bears(taint, toleration)))
}

/// Means one node by its name.
fn only(node: &str) -> core::NodeSelector {
    let field = core::NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    let term = core::NodeSelectorTerm { match_fields: Some(vec![field]), match_expressions: None };
    core::NodeSelector { node_selector_terms: vec![term] }
}
