//! Topology hints of endpoints. Does no I/O.
//!
//! With `trafficDistribution`, every endpoint gets a hint for its own zone or node. With the topology mode
//! annotation, endpoints are allocated in proportion to the CPUs of each zone, so that some get a hint for
//! another zone.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointHints, EndpointSlice, ForNode, ForZone};
use reconcile::Object;
use schema::quantity::Quantity;

use super::pack::SliceChanges;

/// The accepted overload of an endpoint relative to its share.
const OVERLOAD_THRESHOLD: f64 = 0.2;
const ZONE: &str = "topology.kubernetes.io/zone";
const CONTROL_PLANE: [&str; 2] = ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"];

/// The traffic distribution that a Service requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TrafficDistribution {
    Anywhere,
    PreferClose { node: bool },
    Proportional,
}

impl TrafficDistribution {
    pub fn of(service: &Service) -> TrafficDistribution {
        let annotations =
            ["service.kubernetes.io/topology-aware-hints", "service.kubernetes.io/topology-mode"];
        let mode = annotations.iter().find_map(|name| service.annotation(name));
        if matches!(mode, Some("Auto" | "auto")) {
            return TrafficDistribution::Proportional;
        }
        let spec = service.spec.as_ref();
        match spec.and_then(|spec| spec.traffic_distribution.as_deref()) {
            Some("PreferClose" | "PreferSameZone") => TrafficDistribution::PreferClose { node: false },
            Some("PreferSameNode") => TrafficDistribution::PreferClose { node: true },
            _ => TrafficDistribution::Anywhere,
        }
    }
}

fn is_ready(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().is_some_and(|conditions| conditions.ready == Some(true))
}

fn endpoints(slice: &EndpointSlice) -> &[Endpoint] {
    slice.endpoints.as_deref().unwrap_or_default()
}

/// Sets the hints of all endpoints. Slices that change are moved to the updates.
fn set_hints(changes: &mut SliceChanges, hint: impl Fn(&Endpoint) -> Option<EndpointHints>) {
    let mut keep = Vec::new();
    for slice in std::mem::take(&mut changes.keep) {
        match endpoints(&slice).iter().any(|endpoint| endpoint.hints != hint(endpoint)) {
            true => changes.update.push((*slice).clone()),
            false => keep.push(slice),
        }
    }
    changes.keep = keep;
    for slice in changes.create.iter_mut().chain(&mut changes.update) {
        for endpoint in slice.endpoints.iter_mut().flatten() {
            endpoint.hints = hint(endpoint);
        }
    }
}

/// Removes the hints of all endpoints.
pub fn remove_hints(changes: &mut SliceChanges) {
    set_hints(changes, |_| None);
}

/// Sets hints for each endpoint's zone and, if `node`, for its node.
pub fn add_close_hints(changes: &mut SliceChanges, node: bool) {
    set_hints(changes, |endpoint| {
        if !is_ready(endpoint) {
            return endpoint.hints.clone();
        }
        let zones = endpoint.zone.as_ref().map(|zone| vec![ForZone { name: zone.clone() }]);
        let nodes = endpoint.node_name.as_ref().filter(|_| node);
        let nodes = nodes.map(|name| vec![ForNode { name: name.clone() }]);
        let any = zones.is_some() || nodes.is_some();
        any.then_some(EndpointHints { for_zones: zones, for_nodes: nodes })
    });
}

/// Each zone's share of the CPUs of all ready nodes. `None` if some node lacks the information or there are
/// fewer than two zones.
pub fn cpu_share_by_zone<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Option<BTreeMap<String, f64>> {
    let mut by_zone: BTreeMap<String, f64> = BTreeMap::new();
    for node in nodes {
        let ready = crate::node::is_ready(node);
        if !ready || CONTROL_PLANE.iter().any(|label| node.label(label).is_some()) {
            continue;
        }
        let zone = node.label(ZONE).filter(|zone| !zone.is_empty())?;
        let allocatable = node.status.as_ref()?.allocatable.as_ref()?;
        let cpu = Quantity::parse(&allocatable.get("cpu")?.0).ok()?.milli();
        if cpu == 0 {
            return None;
        }
        *by_zone.entry(zone.to_owned()).or_default() += cpu as f64;
    }
    let total: f64 = by_zone.values().sum();
    by_zone.values_mut().for_each(|cpu| *cpu /= total);
    (by_zone.len() >= 2).then_some(by_zone)
}

struct ZoneAllocation {
    maximum: usize,
    desired: f64,
}

/// The number of endpoints per zone out of `total`, or why hints cannot be allocated.
fn allocations(
    shares: Option<&BTreeMap<String, f64>>,
    total: usize,
) -> Result<BTreeMap<String, ZoneAllocation>, String> {
    let Some(shares) = shares else {
        return Err(
            "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes"
                .into(),
        );
    };
    let zones = shares.len();
    if zones > total {
        return Err(format!("Insufficient number of endpoints ({total} endpoints, {zones} zones)"));
    }
    let minimum = |share: &f64| (share * total as f64 * (1.0 / (1.0 + OVERLOAD_THRESHOLD))).ceil() as usize;
    let least: usize = shares.values().map(minimum).sum();
    let Some(spare) = total.checked_sub(least) else {
        return Err(format!(
            "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold ({total} endpoints, {zones} zones)"
        ));
    };
    let allocate = |(zone, share): (&String, &f64)| {
        let minimum = minimum(share);
        let desired = (share * total as f64).max(minimum as f64);
        (zone.clone(), ZoneAllocation { maximum: minimum + spare, desired })
    };
    Ok(shares.iter().map(allocate).collect())
}

/// Sets a zone hint for every ready endpoint in proportion to `shares`, or returns why it cannot.
pub fn allocate_by_zone(
    changes: &mut SliceChanges,
    shares: Option<&BTreeMap<String, f64>>,
) -> Result<(), String> {
    let unchanged = changes.keep.iter().map(|slice| endpoints(slice));
    let written = changes.create.iter().chain(&changes.update).map(endpoints);
    let total = unchanged.chain(written).flatten().filter(|endpoint| is_ready(endpoint)).count();
    let allocations = allocations(shares, total)?;
    let mut allocated: BTreeMap<String, usize> = BTreeMap::new();
    let mut keep = Vec::new();
    for slice in std::mem::take(&mut changes.keep) {
        match valid_hints(&slice, &allocated, &allocations) {
            Some(hints) => {
                hints.into_iter().for_each(|(zone, count)| *allocated.entry(zone).or_default() += count);
                keep.push(slice);
            }
            None => changes.update.push((*slice).clone()),
        }
    }
    changes.keep = keep;
    for slice in changes.create.iter_mut().chain(&mut changes.update) {
        for endpoint in slice.endpoints.iter_mut().flatten() {
            endpoint.hints = None;
            if !is_ready(endpoint) {
                continue;
            }
            let Some(zone) = endpoint.zone.clone().filter(|zone| !zone.is_empty()) else {
                return Err("One or more endpoints do not have a zone specified".into());
            };
            *allocated.entry(zone.clone()).or_default() += 1;
            endpoint.hints = Some(for_zone(zone));
        }
    }
    if allocated.is_empty() {
        return Err("No hints allocated for zones".into());
    }
    move_surplus(changes, surplus_and_missing(&allocations, &allocated));
    Ok(())
}

fn for_zone(zone: String) -> EndpointHints {
    EndpointHints { for_zones: Some(vec![ForZone { name: zone }]), for_nodes: None }
}

/// The number of hints per zone in a slice. `None` if the slice must be rewritten.
fn valid_hints(
    slice: &EndpointSlice,
    allocated: &BTreeMap<String, usize>,
    allocations: &BTreeMap<String, ZoneAllocation>,
) -> Option<BTreeMap<String, usize>> {
    let mut hints: BTreeMap<String, usize> = BTreeMap::new();
    for endpoint in endpoints(slice).iter().filter(|endpoint| is_ready(endpoint)) {
        let zones = endpoint.hints.as_ref()?.for_zones.as_ref().filter(|zones| !zones.is_empty())?;
        for zone in zones {
            allocations.get(&zone.name)?;
            *hints.entry(zone.name.clone()).or_default() += 1;
        }
    }
    let fits = |(zone, count): (&String, &usize)| {
        let before = allocated.get(zone).copied().unwrap_or(0);
        allocations.get(zone).is_some_and(|allocation| before + count <= allocation.maximum)
    };
    hints.iter().all(fits).then_some(hints)
}

type EndpointsByZone = BTreeMap<String, usize>;

/// The surplus of zones with too many endpoints, and the deficit of zones with too few (upstream's
/// `getGivingAndReceivingZones`).
fn surplus_and_missing(
    allocations: &BTreeMap<String, ZoneAllocation>,
    allocated: &EndpointsByZone,
) -> (EndpointsByZone, EndpointsByZone) {
    let difference = |(zone, allocation): (&String, &ZoneAllocation)| {
        let has = allocated.get(zone).copied().unwrap_or(0) as f64;
        (zone.clone(), has - allocation.desired)
    };
    let mut left: BTreeMap<String, f64> = allocations.iter().map(difference).collect();
    let (mut surplus_zones, mut missing_zones) = (EndpointsByZone::new(), EndpointsByZone::new());
    loop {
        let most =
            left.iter().max_by(|a, b| a.1.total_cmp(b.1)).map(|(zone, surplus)| (zone.clone(), *surplus));
        let least =
            left.iter().min_by(|a, b| a.1.total_cmp(b.1)).map(|(zone, surplus)| (zone.clone(), -*surplus));
        let (Some((from_zone, give)), Some((to_zone, missing))) = (most, least) else { break };
        if (give < 1.0 && missing < 1.0) || give < 0.5 || missing < 0.5 {
            break;
        }
        left.entry(from_zone.clone()).and_modify(|surplus| *surplus -= 1.0);
        left.entry(to_zone.clone()).and_modify(|surplus| *surplus += 1.0);
        *surplus_zones.entry(from_zone).or_default() += 1;
        *missing_zones.entry(to_zone).or_default() += 1;
    }
    (surplus_zones, missing_zones)
}

fn move_surplus(
    changes: &mut SliceChanges,
    (mut surplus_zones, mut missing_zones): (EndpointsByZone, EndpointsByZone),
) {
    for slice in changes.create.iter_mut().chain(&mut changes.update) {
        for endpoint in slice.endpoints.iter_mut().flatten().filter(|endpoint| is_ready(endpoint)) {
            let Some(surplus) = endpoint.zone.as_ref().and_then(|zone| surplus_zones.get_mut(zone)) else {
                continue;
            };
            if *surplus == 0 {
                continue;
            }
            let Some((zone, need)) = missing_zones.iter_mut().find(|(_, need)| **need > 0) else { return };
            *surplus -= 1;
            *need -= 1;
            endpoint.hints = Some(for_zone(zone.clone()));
        }
    }
}
