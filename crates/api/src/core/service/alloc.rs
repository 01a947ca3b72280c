//! Which cluster IPs and node ports a Service takes and gives back.
//!
//! Pure: what is in use is asked of [`Pools`], and nothing is marked here. The caller keeps the pools (from
//! its cache of Services), calls [`allocate`] before `prepare_*` and validation, and books the returned
//! [`Changes`] only once the object is stored; it must not let two allocations overlap before that.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use serde_json::Value;

use super::{is_headless, needs_cluster_ip, needs_health_check, node_port, node_ports, texts};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::networking::ip::{self, Cidr};

mod families;
mod pick;

/// An IP family, as `spec.ipFamilies` spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    IPv4,
    IPv6,
}

/// What the cluster has to give.
#[derive(Clone, Debug)]
pub struct Ranges {
    /// The configured families, the default one first. Never empty.
    pub families: Vec<Family>,
    /// The networks that are ready for allocation, in the order to try them.
    pub cidrs: Vec<Cidr>,
    pub node_ports: RangeInclusive<u16>,
}

/// What is taken already, and chance.
pub trait Pools {
    fn ip_in_use(&self, ip: IpAddr) -> bool;
    fn port_in_use(&self, port: u16) -> bool;
    /// Any number below `bound`, which is not zero.
    fn random(&mut self, bound: u64) -> u64;
}

/// What to book once the Service is stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub taken_ips: Vec<IpAddr>,
    pub freed_ips: Vec<IpAddr>,
    pub taken_ports: BTreeSet<u16>,
    pub freed_ports: Vec<u16>,
}

/// Why a Service cannot have what it asks for.
#[derive(Clone, Debug)]
pub enum Failure {
    /// 422: a field asks for something it cannot have.
    Invalid(Errors),
    /// 500: nothing is left, or a health check port is refused.
    Internal(String),
}

impl Ranges {
    /// The families follow from the networks, the first network's being the default.
    pub fn new(cidrs: Vec<Cidr>, node_ports: RangeInclusive<u16>) -> Ranges {
        let mut families = Vec::new();
        for family in cidrs.iter().map(|cidr| if cidr.is_v6() { Family::IPv6 } else { Family::IPv4 }) {
            if !families.contains(&family) {
                families.push(family);
            }
        }
        if families.is_empty() {
            families.push(Family::IPv4);
        }
        Ranges { families, cidrs, node_ports }
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

    fn other(self) -> Family {
        match self {
            Family::IPv4 => Family::IPv6,
            Family::IPv6 => Family::IPv4,
        }
    }

    fn read(text: &str) -> Family {
        if text == "IPv6" { Family::IPv6 } else { Family::IPv4 }
    }

    fn of(address: &str) -> Family {
        if ip::is_v6(address) { Family::IPv6 } else { Family::IPv4 }
    }
}

/// Fills in the allocated fields of a Service about to be created, or updated from `old`.
pub fn allocate(
    new: &mut Value,
    old: Option<&Value>,
    ranges: &Ranges,
    pools: &mut dyn Pools,
) -> Result<Changes, Failure> {
    let name = new.at("metadata").text("name").to_owned();
    let mut spec = new.at("spec").clone();
    let old = old.map(|old| old.at("spec"));
    if let Some(old) = old {
        keep_allocated(&mut spec, old);
    }
    sync_cluster_ips(&mut spec, old);

    let untouched = old.is_some_and(|old| families::is_settled_dual_stack(&spec, old));
    if !untouched {
        families::fill_in(&mut spec, old, ranges)?;
    }
    let mut taking = Taking { name, ranges, pools, changes: Changes::default() };
    match old {
        None => {
            taking.cluster_ips(&mut spec)?;
            if uses_node_ports(&spec) {
                taking.node_ports_of_new(&mut spec)?;
            }
            if needs_health_check(&spec) {
                taking.health_check_port(&mut spec)?;
            }
        }
        Some(old) => {
            if !untouched {
                taking.changed_cluster_ips(&mut spec, old)?;
            }
            taking.changed_node_ports(&mut spec, old)?;
        }
    }
    let changes = taking.changes;
    if let Some(object) = new.as_object_mut() {
        object.insert("spec".to_owned(), spec);
    }
    Ok(changes)
}

/// What a Service holds: all of it is free once the Service is gone, and in use when it is loaded.
pub fn held(service: &Value) -> (Vec<IpAddr>, Vec<u16>) {
    let spec = service.at("spec");
    let ips = if needs_cluster_ip(spec) {
        texts(spec, "clusterIPs").into_iter().filter_map(ip::parse).collect()
    } else {
        Vec::new()
    };
    let health = spec.int("healthCheckNodePort").filter(|port| needs_health_check(spec) && *port != 0);
    let ports = node_ports(spec).chain(health).filter_map(|port| u16::try_from(port).ok()).collect();
    (ips, ports)
}

/// One allocation under way.
struct Taking<'a> {
    name: String,
    ranges: &'a Ranges,
    pools: &'a mut dyn Pools,
    changes: Changes,
}

impl Taking<'_> {
    /// One address for each family, those asked for and those not.
    fn cluster_ips(&mut self, spec: &mut Value) -> Result<(), Failure> {
        if !needs_cluster_ip(spec) || texts(spec, "clusterIPs").first() == Some(&"None") {
            return Ok(());
        }
        let families: Vec<Family> = texts(spec, "ipFamilies").into_iter().map(Family::read).collect();
        let mut ips: Vec<String> = texts(spec, "clusterIPs").into_iter().map(str::to_owned).collect();
        // Upstream shows the list with the gaps in its complaints.
        ips.resize(ips.len().max(families.len()), String::new());
        for (i, family) in families.into_iter().enumerate() {
            ips[i] = self.ip(family, &ips[i], &ips)?;
        }
        if let Some(first) = ips.first() {
            set(spec, "clusterIP", Value::from(first.clone()));
        }
        set(spec, "clusterIPs", Value::from(ips));
        Ok(())
    }

    fn changed_cluster_ips(&mut self, spec: &mut Value, old: &Value) -> Result<(), Failure> {
        if !needs_cluster_ip(old) && needs_cluster_ip(spec) {
            return self.cluster_ips(spec);
        }
        if is_headless(old) {
            return Ok(());
        }
        let old_ips = texts(old, "clusterIPs");
        if needs_cluster_ip(old) && !needs_cluster_ip(spec) {
            self.changes.freed_ips.extend(old_ips.into_iter().filter_map(ip::parse));
            return Ok(());
        }
        match (old.items("ipFamilies").len(), texts(spec, "ipFamilies").as_slice()) {
            (1, [_, second]) => {
                let family = Family::read(second);
                let mut ips: Vec<String> = texts(spec, "clusterIPs").into_iter().map(str::to_owned).collect();
                ips.resize(ips.len().max(2), String::new());
                ips[1] = self.ip(family, &ips[1], &ips)?;
                set(spec, "clusterIPs", Value::from(ips));
            }
            (2, [_]) => {
                self.changes.freed_ips.extend(old_ips.get(1).copied().and_then(ip::parse));
            }
            _ => {}
        }
        Ok(())
    }

    /// The address asked for, or any where `wanted` is empty.
    fn ip(&mut self, family: Family, wanted: &str, all: &[String]) -> Result<String, Failure> {
        let ip = if wanted.is_empty() {
            pick::ip(family, self.ranges, &self.changes.taken_ips, self.pools).ok_or_else(|| {
                Failure::Internal(format!(
                    "failed to allocate a serviceIP for Service {:?}: range is full",
                    self.name
                ))
            })?
        } else {
            let refused = |why: &str| {
                let detail = format!("failed to allocate IP {wanted}: {why}");
                invalid("spec.clusterIPs", Value::from(all.to_vec()), &detail)
            };
            let ip = ip::parse(wanted)
                .ok_or_else(|| Failure::Internal(format!("failed to parse service IP {wanted:?}")))?;
            if !self.ranges.cidrs.iter().any(|cidr| pick::is_usable(*cidr, ip)) {
                return Err(refused("the provided network does not match the current range"));
            }
            if self.pools.ip_in_use(ip) || self.changes.taken_ips.contains(&ip) {
                return Err(refused("provided IP is already allocated"));
            }
            ip
        };
        self.changes.taken_ips.push(ip);
        Ok(if wanted.is_empty() { ip.to_string() } else { wanted.to_owned() })
    }

    /// Ports of the same number (TCP and UDP, say) share one node port.
    fn node_ports_of_new(&mut self, spec: &mut Value) -> Result<(), Failure> {
        let allocates = allocates_node_ports(spec);
        let mut ports = spec.items("ports").to_vec();
        let number = |port: &Value| port.int("port").unwrap_or(0);
        let mut asked: HashMap<i64, i64> = HashMap::new();
        for port in ports.iter().filter(|port| node_port(port) != 0) {
            asked.entry(number(port)).or_insert(node_port(port));
        }
        let mut given: HashMap<i64, i64> = HashMap::new();
        for (i, port) in ports.iter_mut().enumerate() {
            let (number, wanted) = (number(port), node_port(port));
            if wanted == 0 && !allocates {
                continue;
            }
            let given_port = match given.get(&number).copied() {
                Some(shared) if wanted == 0 || wanted == shared => shared,
                Some(_) => self.port(wanted).map_err(|why| port_refused(i, wanted, &why))?,
                None => {
                    let taken = match asked.get(&number).copied() {
                        Some(asked) => self.port(asked).map_err(|why| port_refused(i, asked, &why))?,
                        None => self.any_port()?,
                    };
                    given.insert(number, taken);
                    taken
                }
            };
            set(port, "nodePort", Value::from(given_port));
        }
        set_list(spec, "ports", ports);
        Ok(())
    }

    fn changed_node_ports(&mut self, spec: &mut Value, old: &Value) -> Result<(), Failure> {
        let held: BTreeSet<i64> = node_ports(old).collect();
        if uses_node_ports(old) && !uses_node_ports(spec) {
            self.free_ports(held.clone());
        }
        if uses_node_ports(spec) {
            let allocates = allocates_node_ports(spec);
            let mut ports = spec.items("ports").to_vec();
            for (i, port) in ports.iter_mut().enumerate() {
                match node_port(port) {
                    0 if allocates => {
                        let node_port = self.any_port()?;
                        set(port, "nodePort", Value::from(node_port));
                    }
                    0 => {}
                    wanted => {
                        let taken = u16::try_from(wanted)
                            .is_ok_and(|wanted| self.changes.taken_ports.contains(&wanted));
                        if !held.contains(&wanted) && !taken {
                            self.port(wanted).map_err(|why| port_refused(i, wanted, &why))?;
                        }
                    }
                }
            }
            set_list(spec, "ports", ports);
            let kept: BTreeSet<i64> = node_ports(spec).collect();
            self.free_ports(&held - &kept);
        }
        match (needs_health_check(old), needs_health_check(spec)) {
            (false, true) => self.health_check_port(spec)?,
            (true, false) => self.free_ports(old.int("healthCheckNodePort")),
            _ => {}
        }
        Ok(())
    }

    fn health_check_port(&mut self, spec: &mut Value) -> Result<(), Failure> {
        let wanted = spec.int("healthCheckNodePort").unwrap_or(0);
        if wanted == 0 {
            let port = pick::port(self.ranges, &self.changes.taken_ports, self.pools).ok_or_else(|| {
                Failure::Internal("failed to allocate a HealthCheck NodePort 0: range is full".to_owned())
            })?;
            self.changes.taken_ports.insert(port);
            set(spec, "healthCheckNodePort", Value::from(port));
            return Ok(());
        }
        self.port(wanted).map(|_| ()).map_err(|why| {
            Failure::Internal(format!("failed to allocate requested HealthCheck NodePort {wanted}: {why}"))
        })
    }

    /// Takes the port asked for, or says why not.
    fn port(&mut self, wanted: i64) -> Result<i64, String> {
        let range = &self.ranges.node_ports;
        let Some(port) = u16::try_from(wanted).ok().filter(|port| range.contains(port)) else {
            return Err(format!(
                "provided port is not in the valid range. The range of valid ports is {}-{}",
                range.start(),
                range.end()
            ));
        };
        if self.pools.port_in_use(port) || self.changes.taken_ports.contains(&port) {
            return Err("provided port is already allocated".to_owned());
        }
        self.changes.taken_ports.insert(port);
        Ok(wanted)
    }

    fn any_port(&mut self) -> Result<i64, Failure> {
        let port = pick::port(self.ranges, &self.changes.taken_ports, self.pools)
            .ok_or_else(|| Failure::Internal("failed to allocate a nodePort: range is full".to_owned()))?;
        self.changes.taken_ports.insert(port);
        Ok(port.into())
    }

    fn free_ports(&mut self, ports: impl IntoIterator<Item = i64>) {
        let ports = ports.into_iter().filter_map(|port| u16::try_from(port).ok()).filter(|port| *port != 0);
        self.changes.freed_ports.extend(ports);
    }
}

/// A client that sends back the manifest it created a Service from keeps what was allocated then.
fn keep_allocated(spec: &mut Value, old: &Value) {
    if needs_cluster_ip(old) && needs_cluster_ip(spec) {
        for field in ["clusterIP", "clusterIPs"] {
            let missing = spec.text(field).is_empty() && spec.items(field).is_empty();
            if missing && old.has(field) {
                set(spec, field, old.at(field).clone());
            }
        }
    }
    if allocates_node_ports(old) && allocates_node_ports(spec) {
        let named: BTreeSet<i64> = node_ports(spec).collect();
        // The last of several ports with one name wins, as upstream.
        let by_name: HashMap<&str, i64> =
            old.items("ports").iter().map(|port| (port.text("name"), node_port(port))).collect();
        let mut ports = spec.items("ports").to_vec();
        for port in ports.iter_mut().filter(|port| node_port(port) == 0) {
            let before = by_name.get(port.text("name")).copied().unwrap_or(0);
            if before != 0 && !named.contains(&before) {
                set(port, "nodePort", Value::from(before));
            }
        }
        set_list(spec, "ports", ports);
    }
    if needs_health_check(old)
        && needs_health_check(spec)
        && spec.int("healthCheckNodePort").unwrap_or(0) == 0
        && old.has("healthCheckNodePort")
    {
        set(spec, "healthCheckNodePort", old.at("healthCheckNodePort").clone());
    }
}

/// Makes `clusterIPs` follow `clusterIP` for clients that know only the latter.
fn sync_cluster_ips(spec: &mut Value, old: Option<&Value>) {
    let singular = spec.text("clusterIP").to_owned();
    let Some(old) = old else {
        if !singular.is_empty() && spec.items("clusterIPs").is_empty() {
            set(spec, "clusterIPs", Value::from(vec![singular]));
        }
        return;
    };
    let same_singular = old.text("clusterIP") == singular;
    if same_singular && !old.items("clusterIPs").is_empty() && spec.items("clusterIPs").is_empty() {
        set(spec, "clusterIPs", old.at("clusterIPs").clone());
    }
    if !same_singular && texts(old, "clusterIPs") == texts(spec, "clusterIPs") {
        let follows = if singular.is_empty() { Value::Null } else { Value::from(vec![singular]) };
        set(spec, "clusterIPs", follows);
    }
}

fn uses_node_ports(spec: &Value) -> bool {
    matches!(spec.text("type"), "NodePort" | "LoadBalancer")
}

/// Ports without a node port get one.
fn allocates_node_ports(spec: &Value) -> bool {
    match spec.text("type") {
        "NodePort" => true,
        "LoadBalancer" => spec.at("allocateLoadBalancerNodePorts").as_bool().unwrap_or(true),
        _ => false,
    }
}

/// Sets a field, or removes it for `null`.
fn set(object: &mut Value, field: &str, value: Value) {
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
        set(object, field, Value::Array(items));
    }
}

fn invalid(path: &str, value: Value, detail: &str) -> Failure {
    let mut errors = Errors::default();
    errors.invalid(&Path::new(path), value, detail);
    Failure::Invalid(errors)
}

fn port_refused(index: usize, port: i64, why: &str) -> Failure {
    invalid(Path::new("spec.ports").index(index).at("nodePort").as_str(), Value::from(port), why)
}

#[cfg(test)]
mod tests;
