//! ResourceQuota: rejects requests that exceed a quota of the namespace.
//!
//! The usage is in the status of each quota. A request first adds its usage there, one request per
//! namespace at a time, and only then stores its object. Usage is released by the quota controller,
//! which recounts: after deletions and after a granted request that failed later.

use std::collections::HashMap;
use std::sync::Arc;

use api::json::JsonExt as _;
use api::quota::{self, QuotaResource, ScopeAttributes, usage};
use api::resources::{ResourceList, add_resources, resource_list};
use api::{Resource, Status};
use jiff::Timestamp;
use parking_lot::Mutex;
use schema::quantity::Quantity;
use serde_json::{Value, json};
use tokio::sync::Mutex as Turn;

use super::{Cluster, Operation, Request};
use crate::options::ResourceVersionMatch;
use crate::request::Target;
use crate::server::Server;
use crate::update::ObjectChange;
use crate::write::WriteOptions;

pub struct Quotas {
    enforced: bool,
    /// A lock per namespace with requests in progress. Requests of one namespace are serialized so
    /// that two of them cannot be granted the same remaining quota.
    locks: Mutex<HashMap<String, Arc<Turn<()>>>>,
}

impl Quotas {
    pub fn new(enforced: bool) -> Quotas {
        Quotas { enforced, locks: Mutex::default() }
    }

    /// Reserves what `object` uses beyond the object it replaces, or returns which quota is
    /// exceeded.
    pub async fn grant(&self, server: &Server, request: &Request<'_>, object: &Value) -> Result<(), Status> {
        if !self.enforced || !should_handle(request) {
            return Ok(());
        }
        if server.list("", "resourcequotas", request.namespace).is_empty() {
            return Ok(());
        }
        let namespace_lock = self.locks.lock().entry(request.namespace.to_owned()).or_default().clone();
        let result = {
            let _guard = namespace_lock.lock().await;
            grant_locked(server, request, object).await
        };
        // Drop our clone first: only locks that another request holds stay in the map.
        drop(namespace_lock);
        self.locks.lock().retain(|_, namespace_lock| Arc::strong_count(namespace_lock) > 1);
        result
    }
}

async fn grant_locked(server: &Server, request: &Request<'_>, object: &Value) -> Result<(), Status> {
    let change = Usage::of(request, object, Timestamp::now());
    // The cache must contain the usage that the previous request has written.
    server.wait_until_fresh(ResourceVersionMatch::MostRecent).await?;
    let quotas = server.list("", "resourcequotas", request.namespace);
    let quotas: Vec<Value> = quotas.iter().map(|quota| quota.value()).collect();
    let updates = check_request(request, object, &change, &quotas)?;
    if request.dry_run {
        return Ok(());
    }
    for (name, used) in updates {
        // Boxed: `change` runs admission, which may call this function again.
        Box::pin(write_used(server, request.namespace, &name, &used)).await?;
    }
    Ok(())
}

/// Whether quotas apply to the request.
fn should_handle(request: &Request<'_>) -> bool {
    let row = request.row;
    if !row.namespaced || (row.group.is_empty() && row.plural == "events") {
        return false;
    }
    match request.operation {
        Operation::Create => request.subresource.is_empty(),
        Operation::Update => matches!(
            (row.group, row.plural, request.subresource),
            ("", "pods", "resize") | ("", "services" | "persistentvolumeclaims", "")
        ),
        Operation::Delete | Operation::Connect => false,
    }
}

/// The usage of a request: in total, and beyond the usage of the replaced object.
struct Usage {
    total: ResourceList,
    delta: ResourceList,
}

impl Usage {
    fn of(request: &Request<'_>, object: &Value, now: Timestamp) -> Usage {
        let kind = QuotaResource::from(request.row);
        let total = usage(kind, object, now);
        let mut delta = total.clone();
        if let Some(old) = request.old {
            for (name, before) in usage(kind, old, now) {
                if let Some(quantity) = delta.get_mut(&name) {
                    *quantity = (*quantity - before).max(Quantity::ZERO);
                }
            }
        }
        Usage { total, delta }
    }
}

/// The quotas the request counts against, with their new `used` for the resources whose usage
/// grows.
fn check_request(
    request: &Request<'_>,
    object: &Value,
    change: &Usage,
    quotas: &[Value],
) -> Result<Vec<(String, ResourceList)>, Status> {
    let kind = QuotaResource::from(request.row);
    let attributes = ScopeAttributes::from_object(kind, object);
    let old_attributes = request.old.map(|old| ScopeAttributes::from_object(kind, old));
    let mut interested = Vec::new();
    for quota in quotas.iter().filter(|quota| quota::matches(quota, &attributes)) {
        let name = quota.at("metadata").text("name");
        let hard = resource_list(quota.at("status"), "hard");
        let restricted: Vec<&str> =
            hard.keys().map(String::as_str).filter(|name| quota::is_used_by(kind, name)).collect();
        if let Some(reason) = quota::missing_requirements(kind, &restricted, object) {
            return Err(request.forbidden(format!("failed quota: {name}: {reason}")));
        }
        let used = resource_list(quota.at("status"), "used");
        // A new quota has no usage before the controller has counted it. As upstream, reject until
        // then.
        if restricted.iter().any(|name| !used.contains_key(*name)) || !quota.at("status").has("hard") {
            let known = resource_list(quota.at("spec"), "hard");
            let unknown: Vec<&str> =
                known.keys().map(String::as_str).filter(|name| quota::is_used_by(kind, name)).collect();
            if unknown.is_empty() {
                continue;
            }
            return Err(request
                .forbidden(format!("status unknown for quota: {name}, resources: {}", unknown.join(","))));
        }
        interested.push((quota, name, hard, used));
    }
    if let Some(negative) = change.total.iter().find(|(_, quantity)| quantity.is_negative()) {
        return Err(request.forbidden(format!("quota usage is negative for resource(s): {}", negative.0)));
    }
    let mut updates = Vec::new();
    for (quota, name, hard, mut used) in interested {
        let counted_before = request.operation == Operation::Update
            && old_attributes.as_ref().is_some_and(|attributes| quota::matches(quota, attributes));
        let more = if counted_before { &change.delta } else { &change.total };
        let more: ResourceList = more
            .iter()
            .filter(|(name, quantity)| hard.contains_key(*name) && !quantity.is_zero())
            .map(|(name, quantity)| (name.clone(), *quantity))
            .collect();
        let exceeded = |name: &&String| {
            let (used, hard) = (used.get(*name).copied().unwrap_or(Quantity::ZERO), hard[*name]);
            used + more[*name] > hard
        };
        let exceeded: Vec<&String> = more.keys().filter(exceeded).collect();
        if !exceeded.is_empty() {
            let text = |list: &ResourceList| {
                let parts = exceeded.iter().filter_map(|name| Some(format!("{name}={}", list.get(*name)?)));
                parts.collect::<Vec<_>>().join(",")
            };
            return Err(request.forbidden(format!(
                "exceeded quota: {name}, requested: {}, used: {}, limited: {}",
                text(&more),
                text(&used),
                text(&hard)
            )));
        }
        if !more.is_empty() {
            add_resources(&mut used, &more);
            updates.push((name.to_owned(), used));
        }
    }
    Ok(updates)
}

/// Writes `status.used` of a quota.
async fn write_used(server: &Server, namespace: &str, name: &str, used: &ResourceList) -> Result<(), Status> {
    let collection = Target::collection(quotas_row(), namespace);
    let target = Target { name: name.to_owned(), subresource: "status".into(), ..collection };
    let used: Value =
        used.iter().map(|(name, quantity)| (name.clone(), json!(quantity.to_string()))).collect();
    let make = |before: &Value| {
        let mut after = before.clone();
        after.object_mut("status").insert("used".into(), used.clone());
        Ok(ObjectChange::replace(after))
    };
    match server.update_object(&target, &WriteOptions::internal(Timestamp::now()), make).await {
        // A deleted quota limits nothing.
        Err(status) if status.code == 404 => Ok(()),
        other => other.map(drop),
    }
}

fn quotas_row() -> &'static Resource {
    api::resource_table::find_resource("", "v1", "resourcequotas").expect("resourcequotas are in the table")
}
