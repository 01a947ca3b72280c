//! Allocates devices for claims on a node. Counterpart of upstream's `structured.Allocator`.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::claim_key;
use super::pool_set::PoolSet;
use super::search::{AllocatedDevice, Search};
use super::selectors::{self, Selector};
use crate::state::NodeInfo;
use crate::state::objects::Objects;

/// Allocates a set of claims together.
pub(super) struct Allocator<'o> {
    claims: Vec<ClaimToAllocate>,
    /// `None` without claims.
    pool_set: Option<PoolSet<'o>>,
}

/// A parsed claim.
pub(super) struct ClaimToAllocate {
    pub key: String,
    pub requests: Vec<Request>,
    pub constraints: Vec<Constraint>,
    config: Vec<resource::DeviceClaimConfiguration>,
}

/// A request with its alternatives (`firstAvailable`). The first one that can be satisfied is used.
pub(super) struct Request {
    pub sub_requests: Vec<SubRequest>,
}

pub(super) struct SubRequest {
    /// The name in the allocation result: `request` or `request/subrequest`.
    pub name: String,
    /// The name of the request; for a request without alternatives the same as `name`.
    pub parent: String,
    /// The name of the subrequest alone.
    pub sub_request_name: String,
    /// `None` for allocation mode `All`.
    pub count: Option<usize>,
    pub admin: bool,
    pub tolerations: Vec<resource::DeviceToleration>,
    pub selectors: Vec<Selector>,
    pub capacity: Option<BTreeMap<String, Quantity>>,
    class: Arc<resource::DeviceClass>,
}

/// An attribute that must be the same, or distinct, for all devices of some requests.
pub(super) struct Constraint {
    /// Empty for all requests.
    pub requests: Vec<String>,
    pub attribute: String,
    pub distinct: bool,
}

impl<'o> Allocator<'o> {
    /// Parses the claims. Fails if they cannot be allocated on any node.
    pub fn new(
        claims: &[Arc<resource::ResourceClaim>],
        objects: &'o Objects,
    ) -> Result<Allocator<'o>, String> {
        let claims: Vec<ClaimToAllocate> =
            claims.iter().map(|claim| parse_claim(claim, objects)).collect::<Result<_, _>>()?;
        let pool_set = (!claims.is_empty()).then(|| PoolSet::new(objects));
        Ok(Allocator { claims, pool_set })
    }

    /// Whether all claims can be allocated on the node. Fails if that cannot be determined.
    pub fn fits(&self, node: &NodeInfo) -> Result<bool, String> {
        Ok(match &self.pool_set {
            Some(pool_set) => Search::run(&self.claims, pool_set, pool_set.devices_for_node(node))?.is_some(),
            None => true,
        })
    }

    /// Allocates the claims on the node and returns the results in order; `None` if one does not fit.
    pub fn allocate(&self, node: &NodeInfo) -> Result<Option<Vec<resource::AllocationResult>>, String> {
        let Some(pool_set) = &self.pool_set else { return Ok(Some(Vec::new())) };
        let Some(search) = Search::run(&self.claims, pool_set, pool_set.devices_for_node(node))? else {
            return Ok(None);
        };
        let results =
            self.claims.iter().enumerate().map(|(index, claim_to_allocate)| resource::AllocationResult {
                devices: Some(resource::DeviceAllocationResult {
                    config: Some(allocation_config(claim_to_allocate, &search.chosen[index]))
                        .filter(|config| !config.is_empty()),
                    results: Some(
                        search.allocated[index]
                            .iter()
                            .map(|given| allocation_result(claim_to_allocate, given, &search))
                            .collect(),
                    ),
                }),
                node_selector: node_selector(&search, index, node),
                allocation_timestamp: None,
            });
        Ok(Some(results.collect()))
    }
}

fn parse_claim(claim: &resource::ResourceClaim, objects: &Objects) -> Result<ClaimToAllocate, String> {
    let key = claim_key(claim);
    let devices = claim.spec.devices.clone().unwrap_or_default();
    let mut constraints = Vec::new();
    for (index, constraint) in devices.constraints.into_iter().flatten().enumerate() {
        let (attribute, distinct) = match (constraint.match_attribute, constraint.distinct_attribute) {
            (Some(attribute), _) => (attribute, false),
            (None, Some(attribute)) => (attribute, true),
            (None, None) => {
                return Err(format!(
                    "claim {key}, constraint #{index}: empty constraint (unsupported constraint type?)"
                ));
            }
        };
        constraints.push(Constraint {
            requests: constraint.requests.unwrap_or_default(),
            attribute,
            distinct,
        });
    }
    let mut requests = Vec::new();
    for request in devices.requests.into_iter().flatten() {
        let parent = request.name;
        let exact = request.exactly.map(|exact| (parent.clone(), parent.clone(), exact));
        let others = request.first_available.unwrap_or_default().into_iter();
        let others =
            others.map(|sub| (format!("{parent}/{}", sub.name), sub.name.clone(), to_exact_request(sub)));
        let mut sub_requests = Vec::new();
        for (name, sub_request_name, exact) in exact.into_iter().chain(others) {
            sub_requests.push(parse_sub_request(
                (name, sub_request_name, parent.clone()),
                exact,
                &key,
                objects,
            )?);
        }
        requests.push(Request { sub_requests });
    }
    Ok(ClaimToAllocate { key, requests, constraints, config: devices.config.unwrap_or_default() })
}

fn parse_sub_request(
    (name, sub_request_name, parent): (String, String, String),
    exact: resource::ExactDeviceRequest,
    claim: &str,
    objects: &Objects,
) -> Result<SubRequest, String> {
    let class = objects.device_classes.get(&exact.device_class_name);
    let class = class
        .ok_or_else(|| format!("request {name}: device class {} does not exist", exact.device_class_name))?;
    let source = format!("class {}", exact.device_class_name);
    let mut selectors = selectors::compile(class.spec.selectors.as_deref(), &source)?;
    selectors.extend(selectors::compile(exact.selectors.as_deref(), &format!("claim {claim}"))?);
    let all = exact.allocation_mode.as_deref() == Some("All");
    let count = usize::try_from(exact.count.unwrap_or(1)).unwrap_or(1);
    Ok(SubRequest {
        name,
        sub_request_name,
        parent,
        count: (!all).then_some(count),
        admin: exact.admin_access == Some(true),
        tolerations: exact.tolerations.unwrap_or_default(),
        selectors,
        capacity: exact.capacity.and_then(|capacity| capacity.requests),
        class: class.clone(),
    })
}

fn to_exact_request(sub: resource::DeviceSubRequest) -> resource::ExactDeviceRequest {
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

fn allocation_result(
    claim_to_allocate: &ClaimToAllocate,
    given: &AllocatedDevice,
    search: &Search<'_, '_>,
) -> resource::DeviceRequestAllocationResult {
    let sub_request = &claim_to_allocate.requests[given.request].sub_requests[given.sub_request];
    let (driver, pool, device) = search.pool_devices[given.pool_device].id.clone();
    let device_spec = search.pool_devices[given.pool_device].device;
    let consumed = given.consumed.as_ref().map(|consumed| {
        consumed.iter().map(|(name, amount)| (name.clone(), Quantity(amount.to_string()))).collect()
    });
    resource::DeviceRequestAllocationResult {
        request: sub_request.name.clone(),
        driver,
        pool,
        device,
        admin_access: sub_request.admin.then_some(true),
        tolerations: Some(sub_request.tolerations.clone()).filter(|list| !list.is_empty()),
        share_id: given.consumed.as_ref().map(|_| uuid::Uuid::new_v4().to_string()),
        consumed_capacity: consumed.filter(|consumed: &BTreeMap<_, _>| !consumed.is_empty()),
        binding_conditions: device_spec.binding_conditions.clone(),
        binding_failure_conditions: device_spec.binding_failure_conditions.clone(),
    }
}

/// The driver configuration: that of the classes, each class once, then that of the claim.
fn allocation_config(
    claim_to_allocate: &ClaimToAllocate,
    chosen: &[usize],
) -> Vec<resource::DeviceAllocationConfiguration> {
    let mut config: Vec<resource::DeviceAllocationConfiguration> = Vec::new();
    let mut of_class: BTreeMap<&str, std::ops::Range<usize>> = BTreeMap::new();
    let sub_requests: Vec<&SubRequest> = claim_to_allocate
        .requests
        .iter()
        .zip(chosen)
        .map(|(request, sub_request)| &request.sub_requests[*sub_request])
        .collect();
    for sub_request in &sub_requests {
        let class = sub_request.class.metadata.name.as_deref().unwrap_or_default();
        if let Some(range) = of_class.get(class) {
            for known in &mut config[range.clone()] {
                known.requests.get_or_insert_default().push(sub_request.name.clone());
            }
            continue;
        }
        let from = config.len();
        config.extend(sub_request.class.spec.config.iter().flatten().map(|class_config| {
            resource::DeviceAllocationConfiguration {
                source: "FromClass".to_owned(),
                requests: Some(vec![sub_request.name.clone()]),
                opaque: class_config.opaque.clone(),
            }
        }));
        of_class.insert(class, from..config.len());
    }
    for claim_config in &claim_to_allocate.config {
        let names = claim_config.requests.as_deref().unwrap_or_default();
        let matching = sub_requests.iter().filter(|sub_request| {
            names.iter().any(|name| *name == sub_request.parent || *name == sub_request.name)
        });
        let times = if names.is_empty() { 1 } else { matching.count() };
        config.extend((0..times).map(|_| resource::DeviceAllocationConfiguration {
            source: "FromClaim".to_owned(),
            requests: claim_config.requests.clone(),
            opaque: claim_config.opaque.clone(),
        }));
    }
    config
}

/// Selector for the nodes that can access all devices of a claim; `None` if all nodes can.
fn node_selector(search: &Search<'_, '_>, claim: usize, node: &NodeInfo) -> Option<core::NodeSelector> {
    let mut term = core::NodeSelectorTerm::default();
    for pool_device in search.allocated[claim].iter().map(|given| &search.pool_devices[given.pool_device]) {
        if pool_device.node.is_some() || pool_device.device.binds_to_node == Some(true) {
            return Some(single_node_selector(&node.name));
        }
        for more in pool_device.selector.iter().flat_map(|selector| &selector.node_selector_terms) {
            add_missing(&mut term.match_fields, more.match_fields.as_ref());
            add_missing(&mut term.match_expressions, more.match_expressions.as_ref());
        }
    }
    let is_restricted = term.match_fields.is_some() || term.match_expressions.is_some();
    is_restricted.then(|| core::NodeSelector { node_selector_terms: vec![term] })
}

fn add_missing(
    known: &mut Option<Vec<core::NodeSelectorRequirement>>,
    more: Option<&Vec<core::NodeSelectorRequirement>>,
) {
    for requirement in more.into_iter().flatten() {
        let known = known.get_or_insert_default();
        if !known.contains(requirement) {
            known.push(requirement.clone());
        }
    }
}

/// Selector for one node by name.
fn single_node_selector(node: &str) -> core::NodeSelector {
    let field = core::NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    let term = core::NodeSelectorTerm { match_fields: Some(vec![field]), match_expressions: None };
    core::NodeSelector { node_selector_terms: vec![term] }
}
