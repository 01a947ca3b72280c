//! ResourceQuota: nobody takes more of a namespace than its quotas grant.
//!
//! What is used stands in each quota's status. A request that would use more adds to it first, one request
//! of a namespace at a time, and only then stores its object; so the sum is never less than what there is.
//! When something goes, or a granted request fails after all, the namespace is counted anew: not before
//! every request under way there has ended, so that none is missed, and no request begins meanwhile.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use api::json::Json as _;
use api::{Resource, Status};
use jiff::Timestamp;
use parking_lot::Mutex;
use schema::quantity::Quantity;
use serde_json::{Value, json};
use tokio::sync::{Mutex as Turn, Notify, OwnedRwLockReadGuard, RwLock, watch};

use super::resources::{ResourceList, add, list};
use super::{Cluster, Operation, Request, usage};
use crate::cache::{Batch, stopped};
use crate::options::Version;
use crate::registry::prefix;
use crate::request::Target;
use crate::server::Server;
use crate::update::Change;
use crate::write::WriteOptions;

/// How long to wait after a failure, such as a store that takes no writes.
const PAUSE: Duration = Duration::from_secs(1);

/// How the phases of pods that use nothing any more stand in their JSON.
const ENDED: [&str; 2] = ["\"phase\":\"Failed\"", "\"phase\":\"Succeeded\""];

pub struct Quotas {
    enforced: bool,
    spaces: Mutex<HashMap<String, Arc<Space>>>,
    recounts: Arc<Recounts>,
}

/// What the requests of one namespace share.
#[derive(Default)]
struct Space {
    /// Shared by requests from their grant until their object is stored; a recount has it alone.
    under_way: Arc<RwLock<()>>,
    turn: Turn<()>,
}

/// The namespaces to count anew.
#[derive(Default)]
struct Recounts {
    names: Mutex<BTreeSet<String>>,
    news: Notify,
}

/// What a request was granted. Dropped without `keep`, the namespace is counted anew.
#[derive(Default)]
pub struct Grant(Option<Granted>);

struct Granted {
    namespace: String,
    recounts: Arc<Recounts>,
    kept: bool,
    _under_way: OwnedRwLockReadGuard<()>,
}

impl Grant {
    /// The object has been stored.
    pub fn keep(mut self) {
        if let Some(granted) = &mut self.0 {
            granted.kept = true;
        }
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        if !self.kept {
            self.recounts.ask(&self.namespace);
        }
    }
}

impl Recounts {
    fn ask(&self, namespace: &str) {
        self.names.lock().insert(namespace.to_owned());
        self.news.notify_one();
    }
}

impl Quotas {
    pub fn new(enforced: bool) -> Quotas {
        Quotas { enforced, spaces: Mutex::default(), recounts: Arc::default() }
    }

    /// Grants what `object` uses beyond what it replaces, or says which quota is exceeded.
    pub async fn grant(
        &self,
        server: &Server,
        request: &Request<'_>,
        object: &Value,
    ) -> Result<Grant, Status> {
        if !self.enforced || !usage::concerns(request) {
            return Ok(Grant::default());
        }
        if server.list("", "resourcequotas", request.namespace).is_empty() {
            return Ok(Grant::default());
        }
        let now = Timestamp::now();
        let change = Usage::of(request, object, now);
        let space = self.space(request.namespace);
        let under_way = space.under_way.clone().read_owned().await;
        let _turn = space.turn.lock().await;
        server.fresh(Version::MostRecent).await?;
        let quotas = server.list("", "resourcequotas", request.namespace);
        let quotas: Vec<Value> = quotas.iter().map(|quota| quota.value()).collect();
        let charges = charges(request, object, &change, &quotas)?;
        if request.dry_run || charges.is_empty() {
            return Ok(Grant::default());
        }
        let granted = Granted {
            namespace: request.namespace.to_owned(),
            recounts: self.recounts.clone(),
            kept: false,
            _under_way: under_way,
        };
        for (name, used) in charges {
            // Boxed, since a change of an object may itself ask for a grant.
            Box::pin(write_used(server, request.namespace, &name, None, &used)).await?;
        }
        Ok(Grant(Some(granted)))
    }

    fn space(&self, namespace: &str) -> Arc<Space> {
        self.spaces.lock().entry(namespace.to_owned()).or_default().clone()
    }

    /// Counts what is used in a namespace and writes it down.
    pub async fn recount(&self, server: &Server, namespace: &str) -> Result<(), Status> {
        if server.list("", "resourcequotas", namespace).is_empty() {
            // Kept as long as a request is under way that the next quota's count must wait for.
            let idle = |space: &Arc<Space>| {
                Arc::strong_count(space) == 1 && Arc::strong_count(&space.under_way) == 1
            };
            self.spaces.lock().retain(|name, space| name != namespace || !idle(space));
            return Ok(());
        }
        let space = self.space(namespace);
        let _alone = space.under_way.write().await;
        server.fresh(Version::MostRecent).await?;
        for quota in server.list("", "resourcequotas", namespace) {
            let quota = quota.value();
            let hard = list(quota.at("spec"), "hard");
            let used = count(server, namespace, &quota, &hard);
            write_used(server, namespace, quota.at("metadata").text("name"), Some(&hard), &used).await?;
        }
        Ok(())
    }
}

/// What a request adds, where the quota counted what it replaces and where it did not.
struct Usage {
    whole: ResourceList,
    beyond: ResourceList,
}

impl Usage {
    fn of(request: &Request<'_>, object: &Value, now: Timestamp) -> Usage {
        let whole = usage::usage(request.row, object, now);
        let mut beyond = whole.clone();
        if let Some(old) = request.old {
            for (name, before) in usage::usage(request.row, old, now) {
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
    let mut interested = Vec::new();
    for quota in quotas.iter().filter(|quota| usage::matches(quota, request.row, object)) {
        let name = quota.at("metadata").text("name");
        let hard = list(quota.at("status"), "hard");
        let restricted: Vec<&str> =
            hard.keys().map(String::as_str).filter(|name| usage::is_of(request.row, name)).collect();
        if let Some(why) = usage::missing(request.row, &restricted, object) {
            return Err(request.forbidden(format!("failed quota: {name}: {why}")));
        }
        let used = list(quota.at("status"), "used");
        // Not counted yet, since it has only just been made.
        if restricted.iter().any(|name| !used.contains_key(*name)) || !quota.at("status").has("hard") {
            let known = list(quota.at("spec"), "hard");
            let unknown: Vec<&str> =
                known.keys().map(String::as_str).filter(|name| usage::is_of(request.row, name)).collect();
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
            && request.old.is_some_and(|old| usage::matches(quota, request.row, old));
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

/// What is used in a namespace of the resources in `hard`, as far as anything is known to use them.
fn count(server: &Server, namespace: &str, quota: &Value, hard: &ResourceList) -> ResourceList {
    let mut used = ResourceList::new();
    let now = Timestamp::now();
    for row in counted(server, hard) {
        for name in hard.keys().filter(|name| usage::is_of(row, name)) {
            used.insert(name.clone(), Quantity::ZERO);
        }
        let scoped = !quota.at("spec").items("scopes").is_empty() || quota.at("spec").has("scopeSelector");
        let look = usage::looks_inside(row);
        if scoped && !look {
            continue;
        }
        for object in server.shard(row).snapshot(&Target::collection(row, namespace).key(), 0).objects {
            let object = if look { object.value() } else { Value::Null };
            if scoped && !usage::matches(quota, row, &object) {
                continue;
            }
            for (name, quantity) in usage::usage(row, &object, now) {
                if let Some(sum) = used.get_mut(&name) {
                    // The first decides how the sum is printed.
                    *sum = if sum.is_zero() { quantity } else { *sum + quantity };
                }
            }
        }
    }
    used
}

fn counted<'a>(server: &'a Server, hard: &'a ResourceList) -> impl Iterator<Item = &'static Resource> + 'a {
    let kinds = server.registry.stored().filter(|row| row.namespaced);
    kinds.filter(|row| hard.keys().any(|name| usage::is_of(row, name)))
}

/// Writes a quota's status; without `hard` only what is used.
async fn write_used(
    server: &Server,
    namespace: &str,
    name: &str,
    hard: Option<&ResourceList>,
    used: &ResourceList,
) -> Result<(), Status> {
    let collection = Target::collection(quotas_row(), namespace);
    let target = Target { name: name.to_owned(), subresource: "status".into(), ..collection };
    let text = |list: &ResourceList| -> Value {
        list.iter().map(|(name, quantity)| (name.clone(), json!(quantity.to_string()))).collect()
    };
    let make = |before: &Value| {
        let mut after = before.clone();
        let status = after.object_mut("status");
        for (field, list) in [("hard", hard), ("used", Some(used))] {
            match list {
                // Nothing limited is not worth a write.
                Some(list) if list.is_empty() => drop(status.remove(field)),
                Some(list) => drop(status.insert(field.into(), text(list))),
                None => {}
            }
        }
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

/// Counts a namespace anew when one of its quotas changes or something that a quota counts goes. Sleeps
/// until a quota changes, or an object of a kind that some quota counts.
pub async fn keep_counts(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    let recounts = server.admission.quotas.recounts.clone();
    let mut served = server.registry.changes();
    let mut kinds: Vec<&'static Resource> = Vec::new();
    let (mut shards, mut news, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    ask_all(&server, &recounts);
    loop {
        served.borrow_and_update();
        // Custom kinds may come; those that have gone have no news any more.
        for row in server.registry.stored().filter(|row| row.namespaced) {
            if !kinds.iter().any(|known| std::ptr::eq(*known, row)) {
                let shard = server.shard(row);
                kinds.push(row);
                news.push(shard.subscribe());
                positions.push(shard.position_after(u64::MAX).unwrap_or(0));
                shards.push(shard);
            }
        }
        for (i, shard) in shards.iter().enumerate() {
            news[i].borrow_and_update();
            match shard.events_from(positions[i], usize::MAX) {
                Batch::Lost => {
                    positions[i] = shard.position_after(u64::MAX).unwrap_or(0);
                    ask_all(&server, &recounts);
                }
                Batch::Events(events) => {
                    positions[i] += events.len() as u64;
                    let quota = std::ptr::eq(kinds[i], quotas_row());
                    let pods = kinds[i].group.is_empty() && kinds[i].plural == "pods";
                    for event in events.iter().filter(|event| event.deleted || quota || pods) {
                        let ended = || ENDED.iter().any(|phase| event.object.mentions(phase));
                        if event.deleted || quota && outdated(&event.object.value()) || pods && ended() {
                            recounts.names.lock().insert(event.object.namespace().to_owned());
                        }
                    }
                }
            }
        }
        let names = std::mem::take(&mut *recounts.names.lock());
        let mut failed = false;
        for name in names {
            if let Err(status) = server.admission.quotas.recount(&server, &name).await {
                tracing::warn!(namespace = name, error = status.message, "cannot count what quotas limit");
                recounts.names.lock().insert(name);
                failed = true;
            }
        }
        let quiet = server.shard(quotas_row()).len() == 0;
        let interesting = |row: &&Resource| !quiet || std::ptr::eq(*row, quotas_row());
        let waiting = news.iter_mut().zip(&kinds).filter(|(_, row)| interesting(row));
        let waiting: Vec<_> = waiting.map(|(news, _)| Box::pin(news.changed())).collect();
        tokio::select! {
            _ = futures_util::future::select_all(waiting) => {}
            () = recounts.news.notified() => {}
            _ = served.changed(), if !quiet => {}
            () = tokio::time::sleep(PAUSE), if failed => {}
            () = stopped(&mut shutdown) => return,
        }
    }
}

fn ask_all(server: &Server, recounts: &Recounts) {
    for quota in server.shard(quotas_row()).snapshot(&prefix(quotas_row()), 0).objects {
        recounts.names.lock().insert(quota.namespace().to_owned());
    }
}

/// The quota's limits have changed since it was counted.
fn outdated(quota: &Value) -> bool {
    let (hard, known) = (list(quota.at("spec"), "hard"), list(quota.at("status"), "hard"));
    hard != known
}
