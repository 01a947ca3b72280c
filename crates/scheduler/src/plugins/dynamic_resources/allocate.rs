//! Which devices claims would get on a node, and how that is written down.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::claim_key;
use super::pools::Market;
use super::search::{Given, Search};
use super::selectors::{self, Selector};
use crate::state::NodeInfo;
use crate::state::objects::Objects;

/// Claims to be allocated together.
pub(super) struct Plan<'o> {
    claims: Vec<Ask>,
    /// Nothing is looked at if nothing is asked.
    market: Option<Market<'o>>,
}

/// What a claim asks for.
pub(super) struct Ask {
    pub key: String,
    pub requests: Vec<Request>,
    pub constraints: Vec<Constraint>,
    config: Vec<resource::DeviceClaimConfiguration>,
}

/// A request with its alternatives, the first that can be met counts.
pub(super) struct Request {
    pub ways: Vec<Way>,
}

pub(super) struct Way {
    /// As it is named in the result.
    pub name: String,
    /// Of the request this is an alternative for; else the same as `name`.
    pub parent: String,
    /// Without that of the request.
    pub own_name: String,
    /// `None` for all there are.
    pub count: Option<usize>,
    pub admin: bool,
    pub tolerations: Vec<resource::DeviceToleration>,
    pub selectors: Vec<Selector>,
    pub capacity: Option<BTreeMap<String, Quantity>>,
    class: Arc<resource::DeviceClass>,
}

/// What the devices of requests must have in common, or must not.
pub(super) struct Constraint {
    /// Empty for all.
    pub requests: Vec<String>,
    pub attribute: String,
    pub distinct: bool,
}

impl<'o> Plan<'o> {
    /// Reads the claims' requests, or says why they cannot be met anywhere.
    pub fn new(claims: &[Arc<resource::ResourceClaim>], objects: &'o Objects) -> Result<Plan<'o>, String> {
        let claims: Vec<Ask> = claims.iter().map(|claim| ask(claim, objects)).collect::<Result<_, _>>()?;
        let market = (!claims.is_empty()).then(|| Market::new(objects));
        Ok(Plan { claims, market })
    }

    /// Whether there is enough for all claims on the node, or why that cannot be told.
    pub fn fits(&self, node: &NodeInfo) -> Result<bool, String> {
        Ok(match &self.market {
            Some(market) => Search::run(&self.claims, market, market.within_reach_of(node))?.is_some(),
            None => true,
        })
    }

    /// What each claim gets on the node, in order; `None` if one goes short.
    pub fn allocate(&self, node: &NodeInfo) -> Result<Option<Vec<resource::AllocationResult>>, String> {
        let Some(market) = &self.market else { return Ok(Some(Vec::new())) };
        let Some(search) = Search::run(&self.claims, market, market.within_reach_of(node))? else {
            return Ok(None);
        };
        let results = self.claims.iter().enumerate().map(|(index, ask)| resource::AllocationResult {
            devices: Some(resource::DeviceAllocationResult {
                config: Some(config(ask, &search.chosen[index])).filter(|config| !config.is_empty()),
                results: Some(search.given[index].iter().map(|given| result(ask, given, &search)).collect()),
            }),
            node_selector: place(&search, index, node),
            allocation_timestamp: None,
        });
        Ok(Some(results.collect()))
    }
}

fn ask(claim: &resource::ResourceClaim, objects: &Objects) -> Result<Ask, String> {
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
        let others = others.map(|sub| (format!("{parent}/{}", sub.name), sub.name.clone(), exactly(sub)));
        let mut ways = Vec::new();
        for (name, own_name, exact) in exact.into_iter().chain(others) {
            ways.push(way((name, own_name, parent.clone()), exact, &key, objects)?);
        }
        requests.push(Request { ways });
    }
    Ok(Ask { key, requests, constraints, config: devices.config.unwrap_or_default() })
}

fn way(
    (name, own_name, parent): (String, String, String),
    exact: resource::ExactDeviceRequest,
    claim: &str,
    objects: &Objects,
) -> Result<Way, String> {
    let class = objects.device_classes.get(&exact.device_class_name);
    let class = class
        .ok_or_else(|| format!("request {name}: device class {} does not exist", exact.device_class_name))?;
    let whose = format!("class {}", exact.device_class_name);
    let mut selectors = selectors::compile(class.spec.selectors.as_deref(), &whose)?;
    selectors.extend(selectors::compile(exact.selectors.as_deref(), &format!("claim {claim}"))?);
    let all = exact.allocation_mode.as_deref() == Some("All");
    let count = usize::try_from(exact.count.unwrap_or(1)).unwrap_or(1);
    Ok(Way {
        name,
        own_name,
        parent,
        count: (!all).then_some(count),
        admin: exact.admin_access == Some(true),
        tolerations: exact.tolerations.unwrap_or_default(),
        selectors,
        capacity: exact.capacity.and_then(|capacity| capacity.requests),
        class: class.clone(),
    })
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

fn result(ask: &Ask, given: &Given, search: &Search<'_, '_>) -> resource::DeviceRequestAllocationResult {
    let way = &ask.requests[given.request].ways[given.way];
    let (driver, pool, device) = search.offers[given.offer].id.clone();
    let said = search.offers[given.offer].device;
    let consumed = given.consumed.as_ref().map(|consumed| {
        consumed.iter().map(|(name, amount)| (name.clone(), Quantity(amount.to_string()))).collect()
    });
    resource::DeviceRequestAllocationResult {
        request: way.name.clone(),
        driver,
        pool,
        device,
        admin_access: way.admin.then_some(true),
        tolerations: Some(way.tolerations.clone()).filter(|list| !list.is_empty()),
        share_id: given.consumed.as_ref().map(|_| uuid::Uuid::new_v4().to_string()),
        consumed_capacity: consumed.filter(|consumed: &BTreeMap<_, _>| !consumed.is_empty()),
        binding_conditions: said.binding_conditions.clone(),
        binding_failure_conditions: said.binding_failure_conditions.clone(),
    }
}

/// What drivers are told: first by the classes, each once, then by the claim.
fn config(ask: &Ask, chosen: &[usize]) -> Vec<resource::DeviceAllocationConfiguration> {
    let mut config: Vec<resource::DeviceAllocationConfiguration> = Vec::new();
    let mut of_class: BTreeMap<&str, std::ops::Range<usize>> = BTreeMap::new();
    let ways: Vec<&Way> = ask.requests.iter().zip(chosen).map(|(request, way)| &request.ways[*way]).collect();
    for way in &ways {
        let class = way.class.metadata.name.as_deref().unwrap_or_default();
        if let Some(range) = of_class.get(class) {
            for known in &mut config[range.clone()] {
                known.requests.get_or_insert_default().push(way.name.clone());
            }
            continue;
        }
        let from = config.len();
        config.extend(way.class.spec.config.iter().flatten().map(|said| {
            resource::DeviceAllocationConfiguration {
                source: "FromClass".to_owned(),
                requests: Some(vec![way.name.clone()]),
                opaque: said.opaque.clone(),
            }
        }));
        of_class.insert(class, from..config.len());
    }
    for said in &ask.config {
        let names = said.requests.as_deref().unwrap_or_default();
        let meant =
            ways.iter().filter(|way| names.iter().any(|name| *name == way.parent || *name == way.name));
        let times = if names.is_empty() { 1 } else { meant.count() };
        config.extend((0..times).map(|_| resource::DeviceAllocationConfiguration {
            source: "FromClaim".to_owned(),
            requests: said.requests.clone(),
            opaque: said.opaque.clone(),
        }));
    }
    config
}

/// The nodes that reach all devices of a claim; `None` if every node does.
fn place(search: &Search<'_, '_>, claim: usize, node: &NodeInfo) -> Option<core::NodeSelector> {
    let mut term = core::NodeSelectorTerm::default();
    for offer in search.given[claim].iter().map(|given| &search.offers[given.offer]) {
        if offer.node.is_some() || offer.device.binds_to_node == Some(true) {
            return Some(only(&node.name));
        }
        for more in offer.selector.iter().flat_map(|selector| &selector.node_selector_terms) {
            add_missing(&mut term.match_fields, more.match_fields.as_ref());
            add_missing(&mut term.match_expressions, more.match_expressions.as_ref());
        }
    }
    let is_narrow = term.match_fields.is_some() || term.match_expressions.is_some();
    is_narrow.then(|| core::NodeSelector { node_selector_terms: vec![term] })
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
