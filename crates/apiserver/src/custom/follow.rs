//! Follows CustomResourceDefinitions: gives them their names, serves their kinds, and empties kinds that go.
//!
//! A kind is served before its definition says so, so that whoever waits for `Established` can begin at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::custom::{CLEANUP, Definition, Names, accepted, set_condition, terminating};
use api::json::Json as _;
use api::{Resource, Status};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::cache::{Batch, stopped};
use crate::delete::DeleteOptions;
use crate::object::Object;
use crate::registry::prefix;
use crate::request::Target;
use crate::server::Server;
use crate::update::Change;
use crate::write::WriteOptions;

/// How long to wait after a failure.
const PAUSE: Duration = Duration::from_secs(1);
/// How long objects may take to go before the definition says that they take long.
const EMPTYING: Duration = Duration::from_secs(60);

/// The definitions there are, and the rows they bring.
pub struct Definitions {
    known: BTreeMap<String, Known>,
    /// The next event of the definitions' shard.
    position: u64,
    /// Definitions whose names and conditions are to be worked out.
    unsettled: BTreeSet<String>,
}

struct Known {
    definition: Arc<Definition>,
    rows: Vec<&'static Resource>,
}

fn crds() -> &'static Resource {
    api::table::find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
        .expect("definitions are in the table")
}

impl Definitions {
    /// Reads all there are, and serves them.
    pub fn load(server: &Server) -> Definitions {
        let mut definitions = Definitions { known: BTreeMap::new(), position: 0, unsettled: BTreeSet::new() };
        definitions.reload(server);
        definitions.serve(server);
        definitions
    }

    fn reload(&mut self, server: &Server) {
        let (snapshot, position) = server.shard(crds()).snapshot_and_position(&prefix(crds()), 0);
        self.position = position;
        self.known.clear();
        snapshot.objects.iter().for_each(|object| self.learn(server, object));
    }

    fn learn(&mut self, server: &Server, object: &Object) {
        match Definition::read(object.bytes()) {
            Ok(definition) => {
                self.unsettled.insert(definition.name.clone());
                self.put(server, definition);
            }
            Err(error) => tracing::error!(name = object.name(), %error, "a definition cannot be read"),
        }
    }

    fn put(&mut self, server: &Server, definition: Definition) {
        let definition = Arc::new(definition);
        let is_served = definition.is_served()
            && !server.registry.is_built_in(&definition.group, &definition.accepted.plural);
        let rows = if is_served { server.registry.rows_of(&definition) } else { Vec::new() };
        self.known.insert(definition.name.clone(), Known { definition, rows });
    }

    fn forget(&mut self, name: &str) {
        let Some(known) = self.known.remove(name) else { return };
        // Its names are free for others now.
        let group = &known.definition.group;
        let others = self.known.values().filter(|other| other.definition.group == *group);
        self.unsettled.extend(others.map(|other| other.definition.name.clone()));
        for slot in known.rows.iter().filter_map(|row| row.custom) {
            slot.set(Arc::new(Definition::gone(&known.definition)));
        }
    }

    fn serve(&self, server: &Server) {
        server.registry.serve(self.known.values().flat_map(|known| known.rows.iter().copied()));
    }

    /// Takes in what has happened; whether anything has.
    fn catch_up(&mut self, server: &Server) -> bool {
        match server.shard(crds()).events_from(self.position, usize::MAX) {
            Batch::Lost => self.reload(server),
            Batch::Events(events) if events.is_empty() => return false,
            Batch::Events(events) => {
                self.position += events.len() as u64;
                for event in events {
                    match event.deleted {
                        true => self.forget(event.object.name()),
                        false => self.learn(server, &event.object),
                    }
                }
            }
        }
        true
    }

    /// The names others have in a definition's group.
    fn taken(&self, definition: &Definition) -> Names {
        let mut names = Names::default();
        let others = self.known.values().map(|known| &*known.definition);
        let others = others.filter(|other| other.group == definition.group && other.name != definition.name);
        others.for_each(|other| names.take(&other.accepted));
        names
    }

    /// Gives a definition its names and says so in its status.
    async fn settle(&mut self, server: &Server, name: &str) -> Result<(), Status> {
        let Some(known) = self.known.get(name) else { return Ok(()) };
        let definition = known.definition.clone();
        if definition.deleting {
            return Ok(());
        }
        let options = WriteOptions::internal(Timestamp::now());
        let (naming, conditions) = accepted(&definition, &self.taken(&definition), &options.timestamp());
        if naming == definition.accepted && conditions == definition.conditions {
            return Ok(());
        }
        let others_care = naming != definition.accepted;
        let settled = definition.settled(naming.clone(), conditions.clone());
        self.put(server, settled);
        self.serve(server);
        if others_care {
            let others = self.known.values().map(|known| &known.definition);
            let others = others.filter(|other| other.group == definition.group && other.name != name);
            self.unsettled.extend(others.filter(|other| !other.has_names()).map(|other| other.name.clone()));
        }
        let target =
            Target { name: name.to_owned(), subresource: "status".into(), ..Target::collection(crds(), "") };
        let write = |before: &Value| {
            let mut after = before.clone();
            let status = after.object_mut("status");
            status.insert("acceptedNames".into(), json!(naming));
            status.insert("conditions".into(), Value::Array(conditions.clone()));
            Ok(Change::replace(after))
        };
        match server.change(&target, &options, write).await {
            Err(status) if status.code != 404 => Err(status),
            _ => Ok(()),
        }
    }
}

/// Follows the definitions until `shutdown`.
pub async fn keep(server: Arc<Server>, mut definitions: Definitions, mut shutdown: watch::Receiver<bool>) {
    let mut news = server.shard(crds()).subscribe();
    let mut emptying: JoinSet<String> = JoinSet::new();
    let mut going: BTreeSet<String> = BTreeSet::new();
    loop {
        news.borrow_and_update();
        if definitions.catch_up(&server) {
            definitions.serve(&server);
        }
        let mut failed = false;
        for name in std::mem::take(&mut definitions.unsettled) {
            if let Err(status) = definitions.settle(&server, &name).await {
                tracing::warn!(definition = name, error = status.message, "cannot write the names of a kind");
                definitions.unsettled.insert(name);
                failed = true;
            }
        }
        for Known { definition, rows } in definitions.known.values() {
            let held = definition.deleting && definition.finalizers.iter().any(|name| name == CLEANUP);
            if held && going.insert(definition.name.clone()) {
                let row = rows.first().copied();
                emptying.spawn(empty(server.clone(), definition.clone(), row));
            }
        }
        if !definitions.unsettled.is_empty() && !failed {
            continue;
        }
        tokio::select! {
            changed = news.changed() => if changed.is_err() { return },
            Some(done) = emptying.join_next() => drop(done.map(|name| going.remove(&name))),
            () = tokio::time::sleep(PAUSE), if failed => {}
            () = stopped(&mut shutdown) => return,
        }
    }
}

/// Deletes all objects of a kind whose definition goes, then lets the definition go. Answers with its name.
async fn empty(server: Arc<Server>, definition: Arc<Definition>, row: Option<&'static Resource>) -> String {
    let name = definition.name.clone();
    loop {
        match empty_once(&server, &definition, row).await {
            Ok(()) => return name,
            Err(status) if status.code == 404 => return name,
            Err(status) => {
                tracing::warn!(
                    definition = name,
                    error = status.message,
                    "cannot empty a kind, trying again"
                );
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn empty_once(
    server: &Server,
    definition: &Definition,
    row: Option<&'static Resource>,
) -> Result<(), Status> {
    let say = async |reason: &str, message: &str, release: bool| {
        say_terminating(server, &definition.name, reason, message, release).await
    };
    say("InstanceDeletionInProgress", "CustomResource deletion is in progress", false).await?;
    if server.registry.is_built_in(&definition.group, &definition.wanted.plural) {
        let why = "instances overlap with built-in resources in storage";
        return say("OverlappingBuiltInResource", why, true).await;
    }
    let Some(row) = row.filter(|_| api::custom::is_true(&definition.conditions, "Established")) else {
        return say("NeverEstablished", "resource was never established", true).await;
    };
    if let Err(status) = delete_instances(server, row).await {
        let why = format!("could not issue all deletes: {}", status.message);
        say("InstanceDeletionFailed", &why, false).await?;
        return Err(status);
    }
    let shard = server.shard(row);
    let mut news = shard.subscribe();
    let emptied = async {
        while shard.len() > 0 {
            if news.changed().await.is_err() {
                return;
            }
        }
    };
    if tokio::time::timeout(EMPTYING, emptied).await.is_err() {
        let why = "could not confirm zero CustomResources remaining: timed out waiting for the condition";
        say("InstanceDeletionCheck", why, false).await?;
        return Err(Status::internal("objects of the kind are still there"));
    }
    say("InstanceDeletionCompleted", "removed all instances", true).await
}

async fn delete_instances(server: &Server, row: &'static Resource) -> Result<(), Status> {
    let objects = server.shard(row).snapshot(&prefix(row), 0).objects;
    for object in objects {
        let namespace = if row.namespaced { object.namespace() } else { "" };
        let target = Target { name: object.name().to_owned(), ..Target::collection(row, namespace) };
        match server.delete_object(&target, &DeleteOptions::default(), Timestamp::now()).await {
            Err(status) if status.code != 404 => return Err(status),
            _ => {}
        }
    }
    Ok(())
}

/// Writes the `Terminating` condition; `release` takes the finalizer away.
async fn say_terminating(
    server: &Server,
    name: &str,
    reason: &str,
    message: &str,
    release: bool,
) -> Result<(), Status> {
    let target =
        Target { name: name.to_owned(), subresource: "status".into(), ..Target::collection(crds(), "") };
    let options = WriteOptions::internal(Timestamp::now());
    let now = options.timestamp();
    let write = |before: &Value| {
        let mut after = before.clone();
        let mut conditions = before.at("status").items("conditions").to_vec();
        set_condition(&mut conditions, terminating(reason, message), &now);
        after.object_mut("status").insert("conditions".into(), Value::Array(conditions));
        if release {
            let metadata = after.object_mut("metadata");
            if let Some(Value::Array(finalizers)) = metadata.get_mut("finalizers") {
                finalizers.retain(|name| name != CLEANUP);
            }
        }
        Ok(Change::replace(after))
    };
    server.change(&target, &options, write).await.map(drop)
}
