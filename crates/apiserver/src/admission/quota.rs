//! ResourceQuota: nobody takes more of a namespace than its quotas grant.
//!
//! What is used stands in each quota's status. A request that would use more adds to it first, one request of a
//! namespace at a time, and only then stores its object. What is given back, be it that something goes or that a
//! granted request fails after all, is found by the control loop that counts.

use std::collections::HashMap;
use std::sync::Arc;

use api::json::Json as _;
use api::quota::{self, Counted, Facts, usage};
use api::resources::{ResourceList, add, list};
use api::{Resource, Status};
use jiff::Timestamp;
use parking_lot::Mutex;
use schema::quantity::Quantity;
use serde_json::{Value, json};
use tokio::sync::Mutex as Turn;

use super::{Cluster, Operation, Request};
use crate::options::Version;
use crate::request::Target;
use crate::server::Server;
use crate::update::Change;
use crate::write::WriteOptions;

pub struct Quotas {
    enforced: bool,
    /// Whose turn it is in each namespace where somebody asks.
    turns: Mutex<HashMap<String, Arc<Turn<()>>>>,
}

impl Quotas {
    pub fn new(enforced: bool) -> Quotas {
        Quotas { enforced, turns: Mutex::default() }
    }

    /// Grants what `object` uses beyond what it replaces, or says which quota is exceeded.
    pub async fn grant(&self, server: &Server, request: &Request<'_>, object: &Value) -> Result<(), Status> {
        if !self.enforced || !concerns(request) {
            return Ok(());
        }
        if server.list("", "resourcequotas", request.namespace).is_empty() {
            return Ok(());
        }
        let turn = self.turns.lock().entry(request.namespace.to_owned()).or_default().clone();
        let granted = {
            let _turn = turn.lock().await;
            grant_alone(server, request, object).await
        };
        drop(turn);
        self.turns.lock().retain(|_, turn| Arc::strong_count(turn) > 1);
        granted
    }
}

async fn grant_alone(server: &Server, request: &Request<'_>, object: &Value) -> Result<(), Status> {
    let change = Usage::of(request, object, Timestamp::now());
    server.fresh(Version::MostRecent).await?;
    let quotas = server.list("", "resourcequotas", request.namespace);
    let quotas: Vec<Value> = quotas.iter().map(|quota| quota.value()).collect();
    let charges = charges(request, object, &change, &quotas)?;
    if request.dry_run {
        return Ok(());
    }
    for (name, used) in charges {
        // Boxed, since a change of an object may itself ask for a grant.
        Box::pin(write_used(server, request.namespace, &name, &used)).await?;
    }
    Ok(())
}

/// Whether quotas could care about a request at all.
fn concerns(request: &Request<'_>) -> bool {
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

/// What a request adds, where the quota counted what it replaces and where it did not.
struct Usage {
    whole: ResourceList,
    beyond: ResourceList,
}

impl Usage {
    fn of(request: &Request<'_>, object: &Value, now: Timestamp) -> Usage {
        let kind = Counted::from(request.row);
        let whole = usage(kind, object, now);
        let mut beyond = whole.clone();
        if let Some(old) = request.old {
            for (name, before) in usage(kind, old, now) {
                if let Some(quantity) = beyond.get_mut(&name) {
                    *quantity = (*quantity - before).max(Quantity::ZERO);
                }
            }
        }
        Usage { whole, beyond }
    }
}

/// The quotas a request counts against, each with what is used then of the resources it uses more of.
fn charges(
    request: &Request<'_>,
    object: &Value,
    change: &Usage,
    quotas: &[Value],
) -> Result<Vec<(String, ResourceList)>, Status> {
    let kind = Counted::from(request.row);
    let facts = Facts::of(kind, object);
    let facts_before = request.old.map(|old| Facts::of(kind, old));
    let mut interested = Vec::new();
    for quota in quotas.iter().filter(|quota| quota::matches(quota, &facts)) {
        let name = quota.at("metadata").text("name");
        let hard = list(quota.at("status"), "hard");
        let restricted: Vec<&str> =
            hard.keys().map(String::as_str).filter(|name| quota::is_of(kind, name)).collect();
        if let Some(why) = quota::missing(kind, &restricted, object) {
            return Err(request.forbidden(format!("failed quota: {name}: {why}")));
        }
        let used = list(quota.at("status"), "used");
        // Not counted yet, since it has only just been made.
        if restricted.iter().any(|name| !used.contains_key(*name)) || !quota.at("status").has("hard") {
            let known = list(quota.at("spec"), "hard");
            let unknown: Vec<&str> =
                known.keys().map(String::as_str).filter(|name| quota::is_of(kind, name)).collect();
            if unknown.is_empty() {
                continue;
            }
            return Err(request
                .forbidden(format!("status unknown for quota: {name}, resources: {}", unknown.join(","))));
        }
        interested.push((quota, name, hard, used));
    }
    if let Some(negative) = change.whole.iter().find(|(_, quantity)| quantity.is_negative()) {
        return Err(request.forbidden(format!("quota usage is negative for resource(s): {}", negative.0)));
    }
    let mut charges = Vec::new();
    for (quota, name, hard, mut used) in interested {
        let counted_before = request.operation == Operation::Update
            && facts_before.as_ref().is_some_and(|facts| quota::matches(quota, facts));
        let more = if counted_before { &change.beyond } else { &change.whole };
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
            add(&mut used, &more);
            charges.push((name.to_owned(), used));
        }
    }
    Ok(charges)
}

/// Writes what is used into a quota's status.
async fn write_used(server: &Server, namespace: &str, name: &str, used: &ResourceList) -> Result<(), Status> {
    let collection = Target::collection(quotas_row(), namespace);
    let target = Target { name: name.to_owned(), subresource: "status".into(), ..collection };
    let used: Value =
        used.iter().map(|(name, quantity)| (name.clone(), json!(quantity.to_string()))).collect();
    let make = |before: &Value| {
        let mut after = before.clone();
        after.object_mut("status").insert("used".into(), used.clone());
        Ok(Change::replace(after))
    };
    match server.change(&target, &WriteOptions::internal(Timestamp::now()), make).await {
        // A quota that is gone limits nothing.
        Err(status) if status.code == 404 => Ok(()),
        other => other.map(drop),
    }
}

fn quotas_row() -> &'static Resource {
    api::table::find("", "v1", "resourcequotas").expect("resourcequotas are in the table")
}
