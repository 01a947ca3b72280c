//! Empties namespaces that are being deleted, then lets them go.
//!
//! Everything in such a namespace is deleted as a client would delete it, so pods keep their grace period
//! and finalizers hold what they hold. While something is left, the namespace's conditions tell what. Sleeps
//! until a namespace changes or something changes among the kinds that are left in one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::json::Json as _;
use api::{Resource, Status};
use futures_util::future::select_all;
use futures_util::stream::{StreamExt as _, iter};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::cache::{Batch, Shard, stopped};
use crate::delete::DeleteOptions;
use crate::object::Object;
use crate::options::Version;
use crate::registry::prefix;
use crate::request::Target;
use crate::server::Server;
use crate::update::Change;
use crate::write::WriteOptions;

/// Deletions under way at once; they share the store's syncs.
const AT_ONCE: usize = 32;
/// How long to wait after a failure, such as a store that takes no writes.
const PAUSE: Duration = Duration::from_secs(1);

pub async fn empty_namespaces(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    let namespaces = server.shard(row());
    let mut news = namespaces.subscribe();
    let mut kinds: Vec<_> = namespaced(&server).map(|kind| (kind, server.shard(kind).subscribe())).collect();
    let mut going = Going::default();
    loop {
        news.borrow_and_update();
        kinds.iter_mut().for_each(|(_, news)| drop(news.borrow_and_update()));
        going.learn(&namespaces);
        let mut left = BTreeSet::new();
        let mut failed = false;
        for name in &going.names {
            match empty(&server, name).await {
                Ok(kinds) => left.extend(kinds),
                Err(status) => {
                    tracing::warn!(namespace = name, error = status.message, "cannot empty the namespace");
                    failed = true;
                }
            }
        }
        let waiting = kinds.iter_mut().filter(|(kind, _)| left.contains(&prefix(kind)));
        let waiting: Vec<_> = waiting.map(|(_, news)| Box::pin(news.changed())).collect();
        // Inside a block, since `select!` makes the futures of branches that are switched off too, and there
        // is no choosing from nothing.
        let change = async {
            match waiting.is_empty() {
                true => std::future::pending().await,
                false => drop(select_all(waiting).await),
            }
        };
        tokio::select! {
            _ = news.changed() => {}
            () = change => {}
            () = tokio::time::sleep(PAUSE), if failed => {}
            () = stopped(&mut shutdown) => return,
        }
    }
}

fn row() -> &'static Resource {
    api::table::find("", "v1", "namespaces").expect("namespaces are in the table")
}

fn namespaced(server: &Server) -> impl Iterator<Item = &'static Resource> + '_ {
    server.registry.stored().filter(|kind| kind.namespaced)
}

/// The namespaces that are being deleted, as far as the shard's events have been read.
#[derive(Default)]
struct Going {
    names: BTreeSet<String>,
    position: Option<u64>,
}

impl Going {
    fn learn(&mut self, shard: &Shard) {
        if let Some(position) = self.position
            && let Batch::Events(events) = shard.events_from(position, usize::MAX)
        {
            self.position = Some(position + events.len() as u64);
            events.iter().for_each(|event| self.note(&event.object, event.deleted));
            return;
        }
        self.names.clear();
        let (all, position) = shard.snapshot_and_position(&prefix(row()), 0);
        self.position = Some(position);
        all.objects.iter().for_each(|object| self.note(object, false));
    }

    fn note(&mut self, namespace: &Object, deleted: bool) {
        let name = namespace.name().to_owned();
        // One without finalizers of its own is empty, and waits for its metadata's.
        let value = namespace.value();
        let work = value.at("metadata").has("deletionTimestamp")
            && value.at("spec").items("finalizers").iter().any(|finalizer| finalizer == KUBERNETES);
        if work && !deleted {
            self.names.insert(name)
        } else {
            self.names.remove(&name)
        };
    }
}

const KUBERNETES: &str = "kubernetes";

/// Deletes what is in a namespace and answers with the kinds of which something is left. With nothing left,
/// the namespace has nothing more to wait for.
async fn empty(server: &Server, name: &str) -> Result<Vec<String>, Status> {
    let options = DeleteOptions { propagation: "Background".into(), ..DeleteOptions::default() };
    let now = Timestamp::now();
    for kind in namespaced(server) {
        let collection = Target::collection(kind, name);
        let objects = server.shard(kind).snapshot(&collection.key(), 0).objects;
        let objects = objects.iter().filter(|object| !object.value().at("metadata").has("deletionTimestamp"));
        let targets: Vec<Target> =
            objects.map(|object| Target { name: object.name().to_owned(), ..collection.clone() }).collect();
        let options = &options;
        let delete = |target: Target| async move { server.delete_object(&target, options, now).await };
        let mut deletions = iter(targets).map(delete).buffer_unordered(AT_ONCE);
        while let Some(result) = deletions.next().await {
            match result {
                Err(status) if status.code != 404 => return Err(status),
                _ => {}
            }
        }
    }
    server.fresh(Version::MostRecent).await?;
    let mut rest = Rest::default();
    for kind in namespaced(server) {
        rest.count(kind, &server.shard(kind).snapshot(&Target::collection(kind, name).key(), 0).objects);
    }
    if rest.kinds.is_empty() {
        finalize(server, name).await?
    } else {
        tell(server, name, &rest).await?
    }
    Ok(rest.kinds)
}

/// The same as a client's update through `/finalize`.
async fn finalize(server: &Server, name: &str) -> Result<(), Status> {
    let target =
        Target { name: name.to_owned(), subresource: "finalize".into(), ..Target::collection(row(), "") };
    let remove = |before: &Value| {
        let mut after = before.clone();
        if let Some(list) = after.pointer_mut("/spec/finalizers").and_then(Value::as_array_mut) {
            list.retain(|finalizer| finalizer != KUBERNETES);
        }
        Ok(Change::replace(after))
    };
    gone_is_fine(server.change(&target, &WriteOptions::internal(Timestamp::now()), remove).await.map(drop))
}

fn gone_is_fine(result: Result<(), Status>) -> Result<(), Status> {
    match result {
        Err(status) if status.code == 404 => Ok(()),
        other => other,
    }
}

/// What is left in a namespace.
#[derive(Default)]
struct Rest {
    /// The prefixes of the kinds.
    kinds: Vec<String>,
    /// `pods. has 1 resource instances`, as upstream puts it.
    counts: Vec<String>,
    finalizers: BTreeMap<String, usize>,
}

impl Rest {
    fn count(&mut self, kind: &'static Resource, objects: &[Arc<Object>]) {
        if objects.is_empty() {
            return;
        }
        self.kinds.push(prefix(kind));
        self.counts.push(format!("{}.{} has {} resource instances", kind.plural, kind.group, objects.len()));
        for object in objects {
            for finalizer in object.value().at("metadata").items("finalizers") {
                *self.finalizers.entry(finalizer.as_str().unwrap_or("").to_owned()).or_default() += 1;
            }
        }
    }

    /// Type, status, reason and message of the namespace's conditions.
    fn conditions(&self) -> [(&'static str, &'static str, &'static str, String); 5] {
        let mut counts = self.counts.clone();
        counts.sort();
        let remaining = format!("Some resources are remaining: {}", counts.join(", "));
        let held: Vec<String> = self
            .finalizers
            .iter()
            .map(|(name, count)| format!("{name} in {count} resource instances"))
            .collect();
        let finalizers = if held.is_empty() {
            ("False", "ContentHasNoFinalizers", "All content-preserving finalizers finished".to_owned())
        } else {
            let held = held.join(", ");
            let message = format!("Some content in the namespace has finalizers remaining: {held}");
            ("True", "SomeFinalizersRemain", message)
        };
        let (status, reason, message) = finalizers;
        [
            (
                "NamespaceDeletionDiscoveryFailure",
                "False",
                "ResourcesDiscovered",
                "All resources successfully discovered".to_owned(),
            ),
            (
                "NamespaceDeletionGroupVersionParsingFailure",
                "False",
                "ParsedGroupVersions",
                "All legacy kube types successfully parsed".to_owned(),
            ),
            (
                "NamespaceDeletionContentFailure",
                "False",
                "ContentDeleted",
                "All content successfully deleted, may be waiting on finalization".to_owned(),
            ),
            ("NamespaceContentRemaining", "True", "SomeResourcesRemain", remaining),
            ("NamespaceFinalizersRemaining", status, reason, message),
        ]
    }
}

async fn tell(server: &Server, name: &str, rest: &Rest) -> Result<(), Status> {
    let target =
        Target { name: name.to_owned(), subresource: "status".into(), ..Target::collection(row(), "") };
    let options = WriteOptions::internal(Timestamp::now());
    let now = options.timestamp();
    let tell = |before: &Value| {
        let mut after = before.clone();
        let mut conditions = before.at("status").items("conditions").to_vec();
        for (kind, status, reason, message) in rest.conditions() {
            let old = conditions.iter().position(|condition| condition.text("type") == kind);
            let since = old.map(|i| &conditions[i]).filter(|old| old.text("status") == status);
            let since = since.map_or(json!(now), |old| old.at("lastTransitionTime").clone());
            let new = json!({
                "type": kind, "status": status, "reason": reason, "message": message,
                "lastTransitionTime": since,
            });
            match old {
                Some(i) => conditions[i] = new,
                None => conditions.push(new),
            }
        }
        after.object_mut("status").insert("conditions".into(), conditions.into());
        Ok(Change::replace(after))
    };
    gone_is_fine(server.change(&target, &options, tell).await.map(drop))
}
