//! Allocates and releases the cluster IPs and node ports of Services.
//!
//! Does no I/O: [`AllocatorState`] reports which IPs and ports are in use, and nothing is reserved
//! here. The caller keeps this state (from its cache of Services), calls [`allocate`] before
//! `prepare_*` and validation, and applies the returned [`AllocationChanges`] once the object is
//! stored. It must serialize this sequence: overlapping allocations could return the same address.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use serde_json::Value;

use super::{is_headless, needs_cluster_ip, needs_health_check, node_port, node_ports, strings};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::networking::ip::{self, Cidr};

mod families;
mod pick;

/// An IP family as in `spec.ipFamilies`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    IPv4,
    IPv6,
}

/// The configured IP families and ranges of the cluster.
#[derive(Clone, Debug)]
pub struct AllocationRanges {
    /// The configured families; the first is the default. Never empty.
    pub families: Vec<Family>,
    /// The CIDRs ready for allocation, in the order to try them.
    pub cidrs: Vec<Cidr>,
    pub node_ports: RangeInclusive<u16>,
}

/// The IPs and ports in use, and a source of random numbers.
pub trait AllocatorState {
    fn ip_in_use(&self, ip: IpAddr) -> bool;
    fn port_in_use(&self, port: u16) -> bool;
    /// A random number below `bound`, which must not be zero.
    fn random(&mut self, bound: u64) -> u64;
}

/// The allocations and releases to apply once the Service is stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocationChanges {
    pub allocated_ips: Vec<IpAddr>,
    pub released_ips: Vec<IpAddr>,
    pub allocated_ports: BTreeSet<u16>,
    pub released_ports: Vec<u16>,
}

/// Why an allocation failed.
#[derive(Clone, Debug)]
pub enum AllocationError {
    /// Status 422: a requested value is not available.
    Invalid(ErrorList),
    /// Status 500: the range is exhausted, or the health check node port cannot be allocated.
    Internal(String),
}

impl AllocationRanges {
    /// The families are those of the CIDRs; the family of the first one is the default.
    pub fn new(cidrs: Vec<Cidr>, node_ports: RangeInclusive<u16>) -> AllocationRanges {
        let mut families = Vec::new();
        for family in cidrs.iter().map(|cidr| if cidr.is_v6() { Family::IPv6 } else { Family::IPv4 }) {
            if !families.contains(&family) {
                families.push(family);
            }
        }
        if families.is_empty() {
            families.push(Family::IPv4);
        }
        AllocationRanges { families, cidrs, node_ports }
    }

    fn is_dual_stack(&self) -> bool {
        self.families.len() > 1
    }

    fn default_family(&self) -> Family {
        self.families.first().copied().unwrap_or(Family::IPv4)
    }
}

impl Family {
    pub fn as_str(self) -> &'static str {
        match self {
            Family::IPv4 => "IPv4",
            Family::IPv6 => "IPv6",
        }
    }

    fn other_family(self) -> Family {
        match self {
            Family::IPv4 => Family::IPv6,
            Family::IPv6 => Family::IPv4,
        }
    }

    fn parse(text: &str) -> Family {
        if text == "IPv6" { Family::IPv6 } else { Family::IPv4 }
    }

    fn from_address(address: &str) -> Family {
        if ip::is_v6(address) { Family::IPv6 } else { Family::IPv4 }
    }
}

/// Allocates the fields of a Service that is created, or updated from `old`.
pub fn allocate(
    new: &mut Value,
    old: Option<&Value>,
    ranges: &AllocationRanges,
    state: &mut dyn AllocatorState,
) -> Result<AllocationChanges, AllocationError> {
    let name = new.at("metadata").text("name").to_owned();
    let mut spec = new.at("spec").clone();
    let old = old.map(|old| old.at("spec"));
    if let Some(old) = old {
        copy_allocated_fields(&mut spec, old);
    }
    sync_cluster_ips(&mut spec, old);

    let unchanged = old.is_some_and(|old| families::is_unchanged_dual_stack(&spec, old));
    if !unchanged {
        families::set_ip_families(&mut spec, old, ranges)?;
    }
    let mut allocation = ServiceAllocation { name, ranges, state, changes: AllocationChanges::default() };
    match old {
        None => {
            allocation.allocate_cluster_ips(&mut spec)?;
            if uses_node_ports(&spec) {
                allocation.allocate_node_ports(&mut spec)?;
            }
            if needs_health_check(&spec) {
                allocation.allocate_health_check_port(&mut spec)?;
            }
        }
        Some(old) => {
            if !unchanged {
                allocation.update_cluster_ips(&mut spec, old)?;
            }
            allocation.update_node_ports(&mut spec, old)?;
        }
    }
    let changes = allocation.changes;
    if let Some(object) = new.as_object_mut() {
        object.insert("spec".to_owned(), spec);
    }
    Ok(changes)
}

/// The IPs and node ports of a Service: released when it is deleted, in use when it is loaded.
pub fn allocated_resources(service: &Value) -> (Vec<IpAddr>, Vec<u16>) {
    let spec = service.at("spec");
    let ips = if needs_cluster_ip(spec) {
        strings(spec, "clusterIPs").into_iter().filter_map(ip::parse).collect()
    } else {
        Vec::new()
    };
    let health = spec.int("healthCheckNodePort").filter(|port| needs_health_check(spec) && *port != 0);
    let ports = node_ports(spec).chain(health).filter_map(|port| u16::try_from(port).ok()).collect();
    (ips, ports)
}

/// The state of one allocation.
struct ServiceAllocation<'a> {
    name: String,
    ranges: &'a AllocationRanges,
    state: &'a mut dyn AllocatorState,
    changes: AllocationChanges,
}

impl ServiceAllocation<'_> {
    /// Allocates one address per family; requested addresses are kept.
    fn allocate_cluster_ips(&mut self, spec: &mut Value) -> Result<(), AllocationError> {
        if !needs_cluster_ip(spec) || strings(spec, "clusterIPs").first() == Some(&"None") {
            return Ok(());
        }
        let families: Vec<Family> = strings(spec, "ipFamilies").into_iter().map(Family::parse).collect();
        let mut ips: Vec<String> = strings(spec, "clusterIPs").into_iter().map(str::to_owned).collect();
        // Upstream's errors contain the list with empty strings for missing addresses.
        ips.resize(ips.len().max(families.len()), String::new());
        for (i, family) in families.into_iter().enumerate() {
            ips[i] = self.allocate_ip(family, &ips[i], &ips)?;
        }
        if let Some(first) = ips.first() {
            set_field(spec, "clusterIP", Value::from(first.clone()));
        }
        set_field(spec, "clusterIPs", Value::from(ips));
        Ok(())
    }

    fn update_cluster_ips(&mut self, spec: &mut Value, old: &Value) -> Result<(), AllocationError> {
        if !needs_cluster_ip(old) && needs_cluster_ip(spec) {
            return self.allocate_cluster_ips(spec);
        }
        if is_headless(old) {
            return Ok(());
        }
        let old_ips = strings(old, "clusterIPs");
        if needs_cluster_ip(old) && !needs_cluster_ip(spec) {
            self.changes.released_ips.extend(old_ips.into_iter().filter_map(ip::parse));
            return Ok(());
        }
        match (old.items("ipFamilies").len(), strings(spec, "ipFamilies").as_slice()) {
            (1, [_, second]) => {
                let family = Family::parse(second);
                let mut ips: Vec<String> =
                    strings(spec, "clusterIPs").into_iter().map(str::to_owned).collect();
                ips.resize(ips.len().max(2), String::new());
                ips[1] = self.allocate_ip(family, &ips[1], &ips)?;
                set_field(spec, "clusterIPs", Value::from(ips));
            }
            (2, [_]) => {
                self.changes.released_ips.extend(old_ips.get(1).copied().and_then(ip::parse));
            }
            _ => {}
        }
        Ok(())
    }

    /// Allocates the requested address, or any if none is requested.
    fn allocate_ip(
        &mut self,
        family: Family,
        requested_ip: &str,
        all: &[String],
    ) -> Result<String, AllocationError> {
        let ip = if requested_ip.is_empty() {
            pick::pick_ip(family, self.ranges, &self.changes.allocated_ips, self.state).ok_or_else(|| {
                AllocationError::Internal(format!(
                    "failed to allocate a serviceIP for Service {:?}: range is full",
                    self.name
                ))
            })?
        } else {
            let ip_error = |reason: &str| {
                let detail = format!("failed to allocate IP {requested_ip}: {reason}");
                invalid_field("spec.clusterIPs", Value::from(all.to_vec()), &detail)
            };
            let ip = ip::parse(requested_ip).ok_or_else(|| {
                AllocationError::Internal(format!("failed to parse service IP {requested_ip:?}"))
            })?;
            if !self.ranges.cidrs.iter().any(|cidr| pick::is_usable(*cidr, ip)) {
                return Err(ip_error("the provided network does not match the current range"));
            }
            if self.state.ip_in_use(ip) || self.changes.allocated_ips.contains(&ip) {
                return Err(ip_error("provided IP is already allocated"));
            }
            ip
        };
        self.changes.allocated_ips.push(ip);
        Ok(if requested_ip.is_empty() { ip.to_string() } else { requested_ip.to_owned() })
    }

    /// Ports with the same number, such as TCP and UDP, share a node port.
    fn allocate_node_ports(&mut self, spec: &mut Value) -> Result<(), AllocationError> {
        let may_allocate = may_allocate_node_ports(spec);
        let mut ports = spec.items("ports").to_vec();
        let number = |port: &Value| port.int("port").unwrap_or(0);
        let mut requested: HashMap<i64, i64> = HashMap::new();
        for port in ports.iter().filter(|port| node_port(port) != 0) {
            requested.entry(number(port)).or_insert(node_port(port));
        }
        let mut allocated: HashMap<i64, i64> = HashMap::new();
        for (i, port) in ports.iter_mut().enumerate() {
            let (number, requested_port) = (number(port), node_port(port));
            if requested_port == 0 && !may_allocate {
                continue;
            }
            let node_port_value = match allocated.get(&number).copied() {
                Some(shared) if requested_port == 0 || requested_port == shared => shared,
                Some(_) => self
                    .allocate_port(requested_port)
                    .map_err(|reason| port_error(i, requested_port, &reason))?,
                None => {
                    let taken = match requested.get(&number).copied() {
                        Some(requested) => self
                            .allocate_port(requested)
                            .map_err(|reason| port_error(i, requested, &reason))?,
                        None => self.allocate_any_port()?,
                    };
                    allocated.insert(number, taken);
                    taken
                }
            };
            set_field(port, "nodePort", Value::from(node_port_value));
        }
        set_list(spec, "ports", ports);
        Ok(())
    }

    fn update_node_ports(&mut self, spec: &mut Value, old: &Value) -> Result<(), AllocationError> {
        let old_ports: BTreeSet<i64> = node_ports(old).collect();
        if uses_node_ports(old) && !uses_node_ports(spec) {
            self.release_ports(old_ports.clone());
        }
        if uses_node_ports(spec) {
            let may_allocate = may_allocate_node_ports(spec);
            let mut ports = spec.items("ports").to_vec();
            for (i, port) in ports.iter_mut().enumerate() {
                match node_port(port) {
                    0 if may_allocate => {
                        let node_port = self.allocate_any_port()?;
                        set_field(port, "nodePort", Value::from(node_port));
                    }
                    0 => {}
                    requested_port => {
                        let taken = u16::try_from(requested_port).is_ok_and(|requested_port| {
                            self.changes.allocated_ports.contains(&requested_port)
                        });
                        if !old_ports.contains(&requested_port) && !taken {
                            self.allocate_port(requested_port)
                                .map_err(|reason| port_error(i, requested_port, &reason))?;
                        }
                    }
                }
            }
            set_list(spec, "ports", ports);
            let new_ports: BTreeSet<i64> = node_ports(spec).collect();
            self.release_ports(&old_ports - &new_ports);
        }
        match (needs_health_check(old), needs_health_check(spec)) {
            (false, true) => self.allocate_health_check_port(spec)?,
            (true, false) => self.release_ports(old.int("healthCheckNodePort")),
            _ => {}
        }
        Ok(())
    }

    fn allocate_health_check_port(&mut self, spec: &mut Value) -> Result<(), AllocationError> {
        let requested_port = spec.int("healthCheckNodePort").unwrap_or(0);
        if requested_port == 0 {
            let port =
                pick::pick_port(self.ranges, &self.changes.allocated_ports, self.state).ok_or_else(|| {
                    AllocationError::Internal(
                        "failed to allocate a HealthCheck NodePort 0: range is full".to_owned(),
                    )
                })?;
            self.changes.allocated_ports.insert(port);
            set_field(spec, "healthCheckNodePort", Value::from(port));
            return Ok(());
        }
        self.allocate_port(requested_port).map(|_| ()).map_err(|reason| {
            AllocationError::Internal(format!(
                "failed to allocate requested HealthCheck NodePort {requested_port}: {reason}"
            ))
        })
    }

    /// Allocates the requested port.
    fn allocate_port(&mut self, requested_port: i64) -> Result<i64, String> {
        let range = &self.ranges.node_ports;
        let Some(port) = u16::try_from(requested_port).ok().filter(|port| range.contains(port)) else {
            return Err(format!(
                "provided port is not in the valid range. The range of valid ports is {}-{}",
                range.start(),
                range.end()
            ));
        };
        if self.state.port_in_use(port) || self.changes.allocated_ports.contains(&port) {
            return Err("provided port is already allocated".to_owned());
        }
        self.changes.allocated_ports.insert(port);
        Ok(requested_port)
    }

    fn allocate_any_port(&mut self) -> Result<i64, AllocationError> {
        let port =
            pick::pick_port(self.ranges, &self.changes.allocated_ports, self.state).ok_or_else(|| {
                AllocationError::Internal("failed to allocate a nodePort: range is full".to_owned())
            })?;
        self.changes.allocated_ports.insert(port);
        Ok(port.into())
    }

    fn release_ports(&mut self, ports: impl IntoIterator<Item = i64>) {
        let ports = ports.into_iter().filter_map(|port| u16::try_from(port).ok()).filter(|port| *port != 0);
        self.changes.released_ports.extend(ports);
    }
}

/// Copies allocated fields from the old Service if the client omits them, so that applying a manifest
/// again keeps them.
fn copy_allocated_fields(spec: &mut Value, old: &Value) {
    if needs_cluster_ip(old) && needs_cluster_ip(spec) {
        for field in ["clusterIP", "clusterIPs"] {
            let missing = spec.text(field).is_empty() && spec.items(field).is_empty();
            if missing && old.has(field) {
                set_field(spec, field, old.at(field).clone());
            }
        }
    }
    if may_allocate_node_ports(old) && may_allocate_node_ports(spec) {
        let requested_ports: BTreeSet<i64> = node_ports(spec).collect();
        // If several ports have the same name, the last one counts, as upstream.
        let by_name: HashMap<&str, i64> =
            old.items("ports").iter().map(|port| (port.text("name"), node_port(port))).collect();
        let mut ports = spec.items("ports").to_vec();
        for port in ports.iter_mut().filter(|port| node_port(port) == 0) {
            let before = by_name.get(port.text("name")).copied().unwrap_or(0);
            if before != 0 && !requested_ports.contains(&before) {
                set_field(port, "nodePort", Value::from(before));
            }
        }
        set_list(spec, "ports", ports);
    }
    if needs_health_check(old)
        && needs_health_check(spec)
        && spec.int("healthCheckNodePort").unwrap_or(0) == 0
        && old.has("healthCheckNodePort")
    {
        set_field(spec, "healthCheckNodePort", old.at("healthCheckNodePort").clone());
    }
}

/// Derives `clusterIPs` from `clusterIP` for clients that only know the latter.
fn sync_cluster_ips(spec: &mut Value, old: Option<&Value>) {
    let singular = spec.text("clusterIP").to_owned();
    let Some(old) = old else {
        if !singular.is_empty() && spec.items("clusterIPs").is_empty() {
            set_field(spec, "clusterIPs", Value::from(vec![singular]));
        }
        return;
    };
    let same_singular = old.text("clusterIP") == singular;
    if same_singular && !old.items("clusterIPs").is_empty() && spec.items("clusterIPs").is_empty() {
        set_field(spec, "clusterIPs", old.at("clusterIPs").clone());
    }
    if !same_singular && strings(old, "clusterIPs") == strings(spec, "clusterIPs") {
        let derived_ips = if singular.is_empty() { Value::Null } else { Value::from(vec![singular]) };
        set_field(spec, "clusterIPs", derived_ips);
    }
}

fn uses_node_ports(spec: &Value) -> bool {
    matches!(spec.text("type"), "NodePort" | "LoadBalancer")
}

/// Whether ports without a node port get one.
fn may_allocate_node_ports(spec: &Value) -> bool {
    match spec.text("type") {
        "NodePort" => true,
        "LoadBalancer" => spec.at("allocateLoadBalancerNodePorts").as_bool().unwrap_or(true),
        _ => false,
    }
}

/// Sets a field, or removes it if the value is `null`.
fn set_field(object: &mut Value, field: &str, value: Value) {
    if let Some(map) = object.as_object_mut() {
        if value.is_null() {
            map.remove(field);
        } else {
            map.insert(field.to_owned(), value);
        }
    }
}

fn set_list(object: &mut Value, field: &str, items: Vec<Value>) {
    if !items.is_empty() {
        set_field(object, field, Value::Array(items));
    }
}

fn invalid_field(path: &str, value: Value, detail: &str) -> AllocationError {
    let mut errors = ErrorList::default();
    errors.invalid(&Path::new(path), value, detail);
    AllocationError::Invalid(errors)
}

fn port_error(index: usize, port: i64, reason: &str) -> AllocationError {
    invalid_field(Path::new("spec.ports").index(index).child("nodePort").as_str(), Value::from(port), reason)
}

#[cfg(test)]
mod tests;
