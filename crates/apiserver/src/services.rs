//! Cluster IPs and node ports: what is taken, and the claims of Services on the rest.
//!
//! One lock spans the choice and the write of a Service, so two can never get the same address. Each
//! cluster IP is also shown as an IPAddress object, as upstream shows it.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use api::core::service::alloc::{self, Changes, Failure, Pools, Ranges};
use api::json::Json as _;
use api::{Resource, Status};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::object::Object;
use crate::request::Target;
use crate::server::Server;
use crate::write::WriteOptions;

pub struct Allocations {
    ranges: Ranges,
    /// `None` until the first Service asks, when the cache tells what is taken.
    used: Arc<Mutex<Option<Used>>>,
}

#[derive(Default)]
struct Used {
    ips: HashSet<IpAddr>,
    ports: HashSet<u16>,
}

/// What a write will take and give back; dropped without `keep`, nothing happens.
#[derive(Default)]
pub struct Claim(Option<(OwnedMutexGuard<Option<Used>>, Changes)>);

impl Allocations {
    pub fn new(ranges: Ranges) -> Allocations {
        Allocations { ranges, used: Arc::default() }
    }

    /// Fills in the allocated fields of a Service; other kinds claim nothing.
    pub async fn claim(
        &self,
        server: &Server,
        stored: &Resource,
        new: &mut Value,
        old: Option<&Value>,
    ) -> Result<Claim, Status> {
        if !is_service(stored) {
            return Ok(Claim::default());
        }
        let mut guard = self.used.clone().lock_owned().await;
        let used = guard.get_or_insert_with(|| taken(server));
        let mut pools = View { used, server };
        match alloc::allocate(new, old, &self.ranges, &mut pools) {
            Ok(changes) => Ok(Claim(Some((guard, changes)))),
            Err(Failure::Invalid(errors)) => {
                let name = new.path("metadata.name").as_str().unwrap_or("");
                Err(Status::invalid(stored.group, stored.kind, name, &errors))
            }
            Err(Failure::Internal(why)) => Err(Status::internal(why)),
        }
    }

    /// Everything a Service holds, to be given back once it is removed. Claimed before that, so that nobody
    /// sees the Service gone and its addresses still taken.
    pub async fn giving_back(&self, server: &Server, stored: &Resource, service: &Value) -> Claim {
        if !is_service(stored) {
            return Claim::default();
        }
        let mut guard = self.used.clone().lock_owned().await;
        guard.get_or_insert_with(|| taken(server));
        let (ips, ports) = alloc::held(service);
        Claim(Some((guard, Changes { freed_ips: ips, freed_ports: ports, ..Changes::default() })))
    }
}

impl Claim {
    /// The Service has been stored; kinds that claim nothing are not even decoded.
    pub async fn keep_for(self, server: &Server, stored: &Object) {
        if self.0.is_some() {
            // Boxed, since keeping a claim may itself create an object.
            Box::pin(self.keep(server, &stored.value())).await;
        }
    }

    /// The write has happened.
    pub async fn keep(self, server: &Server, service: &Value) {
        let Some((mut guard, changes)) = self.0 else { return };
        if let Some(used) = guard.as_mut() {
            used.ips.extend(&changes.taken_ips);
            used.ports.extend(&changes.taken_ports);
            used.ips.retain(|ip| !changes.freed_ips.contains(ip));
            used.ports.retain(|port| !changes.freed_ports.contains(port));
        }
        // Still under the lock, so that the next one to hold an address does not find the last one's IPAddress.
        for ip in &changes.taken_ips {
            show(server, *ip, service).await;
        }
        for ip in &changes.freed_ips {
            hide(server, *ip).await;
        }
    }
}

fn is_service(stored: &Resource) -> bool {
    stored.group.is_empty() && stored.plural == "services"
}

fn taken(server: &Server) -> Used {
    let services = api::table::find("", "v1", "services").expect("services are in the table");
    let mut used = Used::default();
    for service in server.shard(services).snapshot(&crate::registry::prefix(services), 0).objects {
        let (ips, ports) = alloc::held(&service.value());
        used.ips.extend(ips);
        used.ports.extend(ports);
    }
    used
}

struct View<'a> {
    used: &'a Used,
    server: &'a Server,
}

impl Pools for View<'_> {
    fn ip_in_use(&self, ip: IpAddr) -> bool {
        self.used.ips.contains(&ip)
    }

    fn port_in_use(&self, port: u16) -> bool {
        self.used.ports.contains(&port)
    }

    fn random(&mut self, bound: u64) -> u64 {
        ((self.server.random() * bound as f64) as u64).min(bound - 1)
    }
}

fn address(ip: IpAddr) -> Target {
    let resource =
        api::table::find("networking.k8s.io", "v1", "ipaddresses").expect("ipaddresses are in the table");
    Target { name: ip.to_string(), ..Target::collection(resource, "") }
}

async fn show(server: &Server, ip: IpAddr, service: &Value) {
    let target = address(ip);
    let metadata = service.at("metadata");
    let value = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "IPAddress",
        "metadata": {
            "name": target.name,
            "labels": {
                "ipaddress.kubernetes.io/ip-family": if ip.is_ipv4() { "IPv4" } else { "IPv6" },
                MANAGED_BY: MANAGER,
            },
        },
        "spec": {"parentRef": {
            "resource": "services", "namespace": metadata.text("namespace"), "name": metadata.text("name"),
        }},
    });
    let collection = Target::collection(target.resource, "");
    let options = WriteOptions::internal(Timestamp::now());
    if let Err(status) = server.create_object(&collection, value, &options, None).await {
        tracing::warn!(%ip, error = status.message, "cannot show a cluster IP as an IPAddress");
    }
}

async fn hide(server: &Server, ip: IpAddr) {
    let target = address(ip);
    for _ in 0..TRIES {
        let Ok(Some(object)) = server.current(&target).await else { return };
        if !matches!(server.remove(&object).await, Ok(None)) {
            return;
        }
    }
}

/// How often an IPAddress may change while it is being removed.
const TRIES: usize = 20;

/// Shows what is taken and hides what is not, in case the server stopped between a Service and its address.
pub async fn repair(server: &Server) {
    let row = api::table::find("", "v1", "services").expect("services are in the table");
    let mut held = HashMap::new();
    for service in server.shard(row).snapshot(&crate::registry::prefix(row), 0).objects {
        let service = service.value();
        held.extend(alloc::held(&service).0.into_iter().map(|ip| (ip, service.clone())));
    }
    for (ip, service) in &held {
        if server.find(&address(*ip)).is_none() {
            show(server, *ip, service).await;
        }
    }
    let addresses = address(IpAddr::from([0, 0, 0, 0])).resource;
    for object in server.shard(addresses).snapshot(&crate::registry::prefix(addresses), 0).objects {
        let ours = object.label(MANAGED_BY) == Some(MANAGER);
        match object.name().parse() {
            Ok(ip) if ours && !held.contains_key(&ip) => hide(server, ip).await,
            _ => {}
        }
    }
}

const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
const MANAGER: &str = "ipallocator.k8s.io";
