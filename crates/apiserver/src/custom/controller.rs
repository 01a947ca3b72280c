//! The controller for CustomResourceDefinitions: accepts names, serves resources, and finalizes
//! deleted definitions.
//!
//! A resource is served before its definition says so: a client that waits for the `Established`
//! condition can use it immediately. Upstream: the naming, establishing and finalizing controllers
//! of apiextensions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::custom::{
    CLEANUP_FINALIZER, Definition, UsedNames, accept_names, set_condition, terminating_condition,
};
use api::json::JsonExt as _;
use api::{Resource, Status};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::cache::{EventBatch, wait_for_shutdown};
use crate::delete::DeleteOptions;
use crate::object::Object;
use crate::registry::prefix;
use crate::request::Target;
use crate::server::Server;
use crate::update::ObjectChange;
use crate::write::WriteOptions;

/// Delay after an error.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long to wait for the deletion of custom resources before reporting it in the condition.
const INSTANCE_DELETION_TIMEOUT: Duration = Duration::from_secs(60);

/// All definitions, and the rows of the registry for them.
pub struct Definitions {
    known: BTreeMap<String, KnownDefinition>,
    /// The position of the next event in the shard of definitions.
    position: u64,
    /// Definitions whose names and conditions must be synced.
    pending: BTreeSet<String>,
}

struct KnownDefinition {
    definition: Arc<Definition>,
    rows: Vec<&'static Resource>,
}

fn crd_resource() -> &'static Resource {
    api::resource_table::find_resource("apiextensions.k8s.io", "v1", "customresourcedefinitions")
        .expect("definitions are in the table")
}

impl Definitions {
    /// Reads all definitions and serves them.
    pub fn load(server: &Server) -> Definitions {
        let mut definitions = Definitions { known: BTreeMap::new(), position: 0, pending: BTreeSet::new() };
        definitions.reload(server);
        definitions.serve(server);
        definitions
    }

    fn reload(&mut self, server: &Server) {
        let (snapshot, position) =
            server.shard(crd_resource()).snapshot_and_position(&prefix(crd_resource()), 0);
        self.position = position;
        self.known.clear();
        snapshot.objects.iter().for_each(|object| self.observe(server, object));
    }

    fn observe(&mut self, server: &Server, object: &Object) {
        match Definition::parse(object.bytes()) {
            Ok(definition) => {
                self.pending.insert(definition.name.clone());
                self.put(server, definition);
            }
            Err(error) => {
                tracing::error!(name = object.name(), %error, "cannot decode a CustomResourceDefinition")
            }
        }
    }

    fn put(&mut self, server: &Server, definition: Definition) {
        let definition = Arc::new(definition);
        let is_served = definition.is_served()
            && !server.registry.is_built_in(&definition.group, &definition.accepted_names.plural);
        let rows = if is_served { server.registry.rows_of(&definition) } else { Vec::new() };
        self.known.insert(definition.name.clone(), KnownDefinition { definition, rows });
    }

    fn remove(&mut self, name: &str) {
        let Some(known) = self.known.remove(name) else { return };
        // Its names are available to other definitions of the group now.
        let group = &known.definition.group;
        let others = self.known.values().filter(|other| other.definition.group == *group);
        self.pending.extend(others.map(|other| other.definition.name.clone()));
        for crd in known.rows.iter().filter_map(|row| row.custom) {
            crd.set_definition(Arc::new(Definition::without_source(&known.definition)));
        }
    }

    fn serve(&self, server: &Server) {
        server.registry.set_custom_rows(self.known.values().flat_map(|known| known.rows.iter().copied()));
    }

    /// Applies new events; returns whether there were any.
    fn apply_events(&mut self, server: &Server) -> bool {
        match server.shard(crd_resource()).events_from(self.position, usize::MAX) {
            EventBatch::TooOld => self.reload(server),
            EventBatch::Events(events) if events.is_empty() => return false,
            EventBatch::Events(events) => {
                self.position += events.len() as u64;
                for event in events {
                    match event.deleted {
                        true => self.remove(event.object.name()),
                        false => self.observe(server, &event.object),
                    }
                }
            }
        }
        true
    }

    /// The accepted names of the other definitions in the group.
    fn names_in_group(&self, definition: &Definition) -> UsedNames {
        let mut names = UsedNames::default();
        let others = self.known.values().map(|known| &*known.definition);
        let others = others.filter(|other| other.group == definition.group && other.name != definition.name);
        others.for_each(|other| names.add(&other.accepted_names));
        names
    }

    /// Accepts the names of a definition and updates its status.
    async fn sync_names(&mut self, server: &Server, name: &str) -> Result<(), Status> {
        let Some(known) = self.known.get(name) else { return Ok(()) };
        let definition = known.definition.clone();
        if definition.deleting {
            return Ok(());
        }
        let options = WriteOptions::internal(Timestamp::now());
        let (accepted_names, conditions) =
            accept_names(&definition, &self.names_in_group(&definition), &options.timestamp());
        if accepted_names == definition.accepted_names && conditions == definition.conditions {
            return Ok(());
        }
        let names_changed = accepted_names != definition.accepted_names;
        let updated = definition.with_status(accepted_names.clone(), conditions.clone());
        self.put(server, updated);
        self.serve(server);
        if names_changed {
            let others = self.known.values().map(|known| &known.definition);
            let others = others.filter(|other| other.group == definition.group && other.name != name);
            self.pending
                .extend(others.filter(|other| !other.are_names_accepted()).map(|other| other.name.clone()));
        }
        let target = Target {
            name: name.to_owned(),
            subresource: "status".into(),
            ..Target::collection(crd_resource(), "")
        };
        let write = |before: &Value| {
            let mut after = before.clone();
            let status = after.object_mut("status");
            status.insert("acceptedNames".into(), json!(accepted_names));
            status.insert("conditions".into(), Value::Array(conditions.clone()));
            Ok(ObjectChange::replace(after))
        };
        match server.update_object(&target, &options, write).await {
            Err(status) if status.code != 404 => Err(status),
            _ => Ok(()),
        }
    }
}

/// Runs the controller until `shutdown`.
pub async fn run_controller(
    server: Arc<Server>,
    mut definitions: Definitions,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut changes = server.shard(crd_resource()).subscribe();
    let mut deletion_tasks: JoinSet<String> = JoinSet::new();
    let mut deleting_names: BTreeSet<String> = BTreeSet::new();
    loop {
        // Mark the change as seen before the pass, so that an event during it wakes the loop again.
        changes.borrow_and_update();
        if definitions.apply_events(&server) {
            definitions.serve(&server);
        }
        let mut failed = false;
        for name in std::mem::take(&mut definitions.pending) {
            if let Err(status) = definitions.sync_names(&server, &name).await {
                tracing::warn!(
                    definition = name,
                    error = status.message,
                    "cannot update the status of a CustomResourceDefinition, retrying"
                );
                definitions.pending.insert(name);
                failed = true;
            }
        }
        for KnownDefinition { definition, rows } in definitions.known.values() {
            let needs_cleanup =
                definition.deleting && definition.finalizers.iter().any(|name| name == CLEANUP_FINALIZER);
            if needs_cleanup && deleting_names.insert(definition.name.clone()) {
                let row = rows.first().copied();
                deletion_tasks.spawn(finalize(server.clone(), definition.clone(), row));
            }
        }
        if !definitions.pending.is_empty() && !failed {
            continue;
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            Some(done) = deletion_tasks.join_next() => drop(done.map(|name| deleting_names.remove(&name))),
            () = tokio::time::sleep(RETRY_DELAY), if failed => {}
            () = wait_for_shutdown(&mut shutdown) => return,
        }
    }
}

/// Deletes all custom resources of a deleted definition, then removes its finalizer. Returns the
/// name of the definition.
async fn finalize(
    server: Arc<Server>,
    definition: Arc<Definition>,
    row: Option<&'static Resource>,
) -> String {
    let name = definition.name.clone();
    loop {
        match finalize_once(&server, &definition, row).await {
            Ok(()) => return name,
            Err(status) if status.code == 404 => return name,
            Err(status) => {
                tracing::warn!(
                    definition = name,
                    error = status.message,
                    "cannot delete custom resources of a deleted definition, retrying"
                );
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }
    }
}

async fn finalize_once(
    server: &Server,
    definition: &Definition,
    row: Option<&'static Resource>,
) -> Result<(), Status> {
    let update_condition = async |reason: &str, message: &str, release: bool| {
        update_terminating_condition(server, &definition.name, reason, message, release).await
    };
    update_condition("InstanceDeletionInProgress", "CustomResource deletion is in progress", false).await?;
    if server.registry.is_built_in(&definition.group, &definition.spec_names.plural) {
        let detail = "instances overlap with built-in resources in storage";
        return update_condition("OverlappingBuiltInResource", detail, true).await;
    }
    let Some(row) = row.filter(|_| api::custom::is_condition_true(&definition.conditions, "Established"))
    else {
        return update_condition("NeverEstablished", "resource was never established", true).await;
    };
    if let Err(status) = delete_instances(server, row).await {
        let detail = format!("could not issue all deletes: {}", status.message);
        update_condition("InstanceDeletionFailed", &detail, false).await?;
        return Err(status);
    }
    let shard = server.shard(row);
    // Subscribe before the first check, so that no deletion is missed.
    let mut changes = shard.subscribe();
    let drained = async {
        while shard.len() > 0 {
            if changes.changed().await.is_err() {
                return;
            }
        }
    };
    if tokio::time::timeout(INSTANCE_DELETION_TIMEOUT, drained).await.is_err() {
        let detail = "could not confirm zero CustomResources remaining: timed out waiting for the condition";
        update_condition("InstanceDeletionCheck", detail, false).await?;
        return Err(Status::internal("custom resources still exist"));
    }
    update_condition("InstanceDeletionCompleted", "removed all instances", true).await
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

/// Writes the `Terminating` condition; `release` also removes the finalizer.
async fn update_terminating_condition(
    server: &Server,
    name: &str,
    reason: &str,
    message: &str,
    release: bool,
) -> Result<(), Status> {
    let target = Target {
        name: name.to_owned(),
        subresource: "status".into(),
        ..Target::collection(crd_resource(), "")
    };
    let options = WriteOptions::internal(Timestamp::now());
    let now = options.timestamp();
    let write = |before: &Value| {
        let mut after = before.clone();
        let mut conditions = before.at("status").items("conditions").to_vec();
        set_condition(&mut conditions, terminating_condition(reason, message), &now);
        after.object_mut("status").insert("conditions".into(), Value::Array(conditions));
        if release {
            let metadata = after.object_mut("metadata");
            if let Some(Value::Array(finalizers)) = metadata.get_mut("finalizers") {
                finalizers.retain(|name| name != CLEANUP_FINALIZER);
            }
        }
        Ok(ObjectChange::replace(after))
    };
    server.update_object(&target, &options, write).await.map(drop)
}
