//! Allocates cluster IPs and node ports for Services.
//!
//! Several servers may share a store, so allocations are recorded there: a cluster IP by its
//! IPAddress object, as upstream, and a node port by a key of its own. Both are created before the
//! Service is stored and deleted after it is removed. A server that finds one already taken chooses
//! again. Within one server a lock spans choice and write, so that its own Services do not
//! conflict.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use api::core::service::alloc::{self, AllocationChanges, AllocationError, AllocationRanges, AllocatorState};
use api::json::JsonExt as _;
use api::{Resource, Status};
use bytes::Bytes;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use store::{Entry, Expect, Revision, Store, Write};
use tokio::sync::{Mutex, OwnedMutexGuard, watch};

use crate::cache::wait_for_shutdown;
use crate::object::Object;
use crate::options::ResourceVersionMatch;
use crate::request::Target;
use crate::server::Server;
use crate::write::{WriteOptions, WriteResult};

/// The store prefix of node port reservations; the value references the Service.
const NODE_PORT_PREFIX: &str = "/skiff/nodeports/";
/// An allocation without a Service that is older than this was orphaned by a server that stopped
/// between the two writes.
const ORPHAN_GRACE_PERIOD: SignedDuration = SignedDuration::from_secs(60);

pub struct ServiceAllocator {
    ranges: AllocationRanges,
    allocation_lock: Arc<Mutex<()>>,
}

/// The allocations of one write. Without `commit`, dropping it has no effect.
#[derive(Default)]
pub struct AllocationClaim(Option<PendingAllocation>);

struct PendingAllocation {
    guard: Option<OwnedMutexGuard<()>>,
    store: Arc<dyn Store>,
    changes: AllocationChanges,
    /// Keys and revisions of the reservations created for this write, for the rollback.
    allocated_keys: Vec<(Arc<str>, Revision)>,
}

impl ServiceAllocator {
    pub fn new(ranges: AllocationRanges) -> ServiceAllocator {
        ServiceAllocator { ranges, allocation_lock: Arc::default() }
    }

    /// Sets the allocated fields of a Service; other resources need no allocation.
    pub async fn claim(
        &self,
        server: &Server,
        stored: &Resource,
        new: &mut Value,
        old: Option<&Value>,
    ) -> Result<AllocationClaim, Status> {
        if !is_service(stored) {
            return Ok(AllocationClaim::default());
        }
        let guard = self.allocation_lock.clone().lock_owned().await;
        // Addresses that were just released are available again.
        server.wait_until_fresh(ResourceVersionMatch::MostRecent).await?;
        let ports = match new.at("spec").text("type") {
            "NodePort" | "LoadBalancer" => reserved_ports(server).await?.into_keys().collect(),
            _ => BTreeSet::new(),
        };
        match alloc::allocate(new, old, &self.ranges, &mut ServerPools { ports, server }) {
            Ok(changes) => Ok(AllocationClaim::new(server, guard, changes)),
            Err(AllocationError::Invalid(errors)) => {
                let name = new.path("metadata.name").as_str().unwrap_or("");
                Err(Status::invalid(stored.group, stored.kind, name, &errors))
            }
            Err(AllocationError::Internal(reason)) => Err(Status::internal(reason)),
        }
    }

    /// Releases everything that a Service has allocated after it is removed. Takes the lock before
    /// the removal, so that no writer of this server sees the Service removed and its addresses
    /// still allocated.
    pub async fn claim_release(
        &self,
        server: &Server,
        stored: &Resource,
        service: &Value,
    ) -> AllocationClaim {
        if !is_service(stored) {
            return AllocationClaim::default();
        }
        let guard = self.allocation_lock.clone().lock_owned().await;
        let (ips, ports) = alloc::allocated_resources(service);
        AllocationClaim::new(
            server,
            guard,
            AllocationChanges { released_ips: ips, released_ports: ports, ..AllocationChanges::default() },
        )
    }
}

impl AllocationClaim {
    fn new(server: &Server, guard: OwnedMutexGuard<()>, changes: AllocationChanges) -> AllocationClaim {
        AllocationClaim(Some(PendingAllocation {
            guard: Some(guard),
            store: server.store.clone(),
            changes,
            allocated_keys: Vec::new(),
        }))
    }

    /// Creates the reservations in the store, just before the Service is written. `false`: another
    /// server was faster, and the cache is up to date by now.
    pub async fn reserve(&mut self, server: &Server, service: &Value) -> Result<bool, Status> {
        let Some(allocation) = &mut self.0 else { return Ok(true) };
        for port in allocation.changes.allocated_ports.clone() {
            match reserve_port(server, port, service).await {
                Ok(allocated_key) => allocation.allocated_keys.push(allocated_key),
                Err(store::Error::Exists { .. }) => return Ok(false),
                Err(error) => return Err(Status::internal(error)),
            }
        }
        for ip in allocation.changes.allocated_ips.clone() {
            // Boxed because creating an object contains this future.
            match Box::pin(reserve_ip(server, ip, service)).await {
                Ok(allocated_key) => allocation.allocated_keys.push(allocated_key),
                Err(status) if status.reason == "AlreadyExists" => return Ok(false),
                Err(status) => return Err(status),
            }
        }
        Ok(true)
    }

    /// Like `commit`, without decoding objects that have no allocation.
    pub async fn commit_for(self, server: &Server, stored: &Object) {
        if self.0.is_some() {
            self.commit(server, &stored.value()).await;
        }
    }

    /// Commits after the write has succeeded.
    pub async fn commit(self, server: &Server, service: &Value) {
        let Some(mut allocation) = self.0 else { return };
        allocation.allocated_keys.clear();
        // Still under the lock, so that the next Service with this address does not find the old
        // IPAddress.
        for ip in allocation.changes.released_ips.clone() {
            release_ip(server, ip).await;
        }
        for port in allocation.changes.released_ports.clone() {
            release_port(server, port, &owner(service)).await;
        }
    }
}

/// Rolls back the reservations of a write that failed, under the lock.
impl Drop for PendingAllocation {
    fn drop(&mut self) {
        if self.allocated_keys.is_empty() {
            return;
        }
        let (guard, store, allocated_keys) =
            (self.guard.take(), self.store.clone(), std::mem::take(&mut self.allocated_keys));
        tokio::spawn(async move {
            for (key, revision) in allocated_keys {
                // Reservations that remain are released by `repair`.
                let _ = store.write(delete_write(key, revision)).await;
            }
            drop(guard);
        });
    }
}

fn is_service(stored: &Resource) -> bool {
    stored.group.is_empty() && stored.plural == "services"
}

fn delete_write(key: Arc<str>, revision: Revision) -> Write {
    Write { key, value: None, expect: Expect::Revision(revision), ttl: None, lazy: false }
}

/// `namespace/name`.
fn owner(service: &Value) -> String {
    let metadata = service.at("metadata");
    format!("{}/{}", metadata.text("namespace"), metadata.text("name"))
}

/// The value of a node port reservation.
fn port_value(owner: &str, now: Timestamp) -> Bytes {
    json!({"service": owner, "since": now.as_second()}).to_string().into()
}

async fn reserved_ports(server: &Server) -> Result<HashMap<u16, Entry>, Status> {
    let page = server.store.list(NODE_PORT_PREFIX, None, 0, None).await.map_err(Status::internal)?;
    let port = |entry: &Entry| entry.key.strip_prefix(NODE_PORT_PREFIX)?.parse().ok();
    Ok(page.entries.into_iter().filter_map(|entry| Some((port(&entry)?, entry))).collect())
}

async fn reserve_port(
    server: &Server,
    port: u16,
    service: &Value,
) -> Result<(Arc<str>, Revision), store::Error> {
    let key: Arc<str> = format!("{NODE_PORT_PREFIX}{port}").into();
    let value = Some(port_value(&owner(service), Timestamp::now()));
    let write = Write { key: key.clone(), value, expect: Expect::Absent, ttl: None, lazy: false };
    Ok((key, server.store.write(write).await?))
}

async fn release_port(server: &Server, port: u16, owner: &str) {
    let Ok(Some(entry)) = server.store.get(&format!("{NODE_PORT_PREFIX}{port}")).await else { return };
    let value: Value = serde_json::from_slice(&entry.value).unwrap_or_default();
    if value.text("service") == owner {
        // A revision mismatch means that another Service has the port now.
        let _ = server.store.write(delete_write(entry.key, entry.revision)).await;
    }
}

struct ServerPools<'a> {
    ports: BTreeSet<u16>,
    server: &'a Server,
}

impl AllocatorState for ServerPools<'_> {
    fn ip_in_use(&self, ip: IpAddr) -> bool {
        self.server.find(&ip_address_target(ip)).is_some()
    }

    fn port_in_use(&self, port: u16) -> bool {
        self.ports.contains(&port)
    }

    fn random(&mut self, bound: u64) -> u64 {
        ((self.server.random() * bound as f64) as u64).min(bound - 1)
    }
}

fn ip_address_target(ip: IpAddr) -> Target {
    let resource = api::resource_table::find_resource("networking.k8s.io", "v1", "ipaddresses")
        .expect("ipaddresses are in the resource table");
    Target { name: ip.to_string(), ..Target::collection(resource, "") }
}

async fn reserve_ip(server: &Server, ip: IpAddr, service: &Value) -> Result<(Arc<str>, Revision), Status> {
    let target = ip_address_target(ip);
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
    match server.create_object(&collection, value, &options, None).await? {
        (WriteResult::Stored(object), _) => Ok((object.key.clone(), object.revision)),
        (WriteResult::DryRun(_), _) => Err(Status::internal("IPAddress was not stored")),
    }
}

async fn release_ip(server: &Server, ip: IpAddr) {
    let target = ip_address_target(ip);
    for _ in 0..MAX_RELEASE_ATTEMPTS {
        let Ok(Some(object)) = server.current(&target).await else { return };
        if !matches!(server.remove(&object).await, Ok(None)) {
            return;
        }
    }
}

/// How often an IPAddress may change while it is being deleted.
const MAX_RELEASE_ATTEMPTS: usize = 20;

/// Reserves what Services use, and releases reservations without a Service, which a crash between
/// two writes leaves behind. Recent reservations are kept: their Service may be about to be
/// written.
pub async fn repair(server: &Server, now: Timestamp) {
    let is_old = |since: Timestamp| now.duration_since(since) > ORPHAN_GRACE_PERIOD;
    let row =
        api::resource_table::find_resource("", "v1", "services").expect("services are in the resource table");
    let (mut ips, mut ports) = (HashMap::new(), HashMap::new());
    for service in server.shard(row).snapshot(&crate::registry::prefix(row), 0).objects {
        let service = Arc::new(service.value());
        let allocation = alloc::allocated_resources(&service);
        ips.extend(allocation.0.into_iter().map(|ip| (ip, service.clone())));
        ports.extend(allocation.1.into_iter().map(|port| (port, service.clone())));
    }
    for (ip, service) in &ips {
        if server.find(&ip_address_target(*ip)).is_none()
            && let Err(status) = reserve_ip(server, *ip, service).await
        {
            tracing::warn!(%ip, error = status.message, "failed to create IPAddress for cluster IP");
        }
    }
    let addresses = ip_address_target(IpAddr::from([0, 0, 0, 0])).resource;
    for object in server.shard(addresses).snapshot(&crate::registry::prefix(addresses), 0).objects {
        let is_managed = object.label(MANAGED_BY) == Some(MANAGER);
        let created = api::time::parse_rfc3339(object.value().at("metadata").text("creationTimestamp"));
        match object.name().parse() {
            Ok(ip) if is_managed && !ips.contains_key(&ip) && created.is_none_or(is_old) => {
                release_ip(server, ip).await;
            }
            _ => {}
        }
    }
    let Ok(reserved) = reserved_ports(server).await else { return };
    for (port, service) in &ports {
        if !reserved.contains_key(port)
            && let Err(error) = reserve_port(server, *port, service).await
        {
            tracing::warn!(port, %error, "failed to reserve node port");
        }
    }
    for (port, entry) in reserved.into_iter().filter(|(port, _)| !ports.contains_key(port)) {
        let value: Value = serde_json::from_slice(&entry.value).unwrap_or_default();
        let since = value.int("since").and_then(|since| Timestamp::from_second(since).ok());
        if since.is_none_or(is_old) {
            tracing::info!(port, "releasing orphaned node port");
            let _ = server.store.write(delete_write(entry.key, entry.revision)).await;
        }
    }
}

/// Repairs again once all reservations from before the start exceed the grace period.
pub async fn repair_after_grace_period(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    tokio::select! {
        () = tokio::time::sleep(ORPHAN_GRACE_PERIOD.unsigned_abs() + Duration::from_secs(1)) => {
            repair(&server, Timestamp::now()).await;
        }
        () = wait_for_shutdown(&mut shutdown) => {}
    }
}

const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
const MANAGER: &str = "ipallocator.k8s.io";
