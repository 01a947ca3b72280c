//! Garbage collector: deletes objects whose owners are gone, and implements foreground and orphan deletion.
//!
//! The metadata of all kinds is watched ([`kinds`]) and kept in an ownership graph ([`graph`]), which
//! determines the objects to process. Before anything is deleted, the object and its owners are read from
//! the API server, and the deletion is conditional on the UID and resource version that were read
//! ([`plan`](mod@plan)).
//!
//! Upstream: `pkg/controller/garbagecollector`.

mod graph;
mod kinds;
mod plan;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{StreamExt as _, TryStreamExt as _, iter};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use reconcile::{
    ApiResource, Client, Controller, Ctx, DeleteOptions, Error, EventType, Key, Patch, ReconcileAction,
};
use serde_json::{Value, json};
use tokio::sync::watch;

use graph::{
    FINALIZER_DELETE_DEPENDENTS, FINALIZER_ORPHAN_DEPENDENTS, GraphAction, ObjectMetadata, PartialObject, Uid,
};
use kinds::Kinds;
use plan::{Action, OwnerState, plan};

const WORKERS: usize = 20;
/// How many dependents are orphaned concurrently.
const MAX_CONCURRENT_ORPHANS: usize = 32;
/// How long to wait for the initial sync of all kinds before processing starts.
const INITIAL_SYNC_TIMEOUT: Duration = Duration::from_secs(30);

pub async fn run(ctx: Ctx) {
    let client = ctx.client.impersonate("generic-garbage-collector");
    let ctx = Ctx { client, ..ctx };
    let controller: Controller<Uid> = Controller::new("garbage_collector_attempt_to_delete", &ctx);
    let kinds = Kinds::new(controller.enqueue());
    let (filled, mut is_filled) = watch::channel(false);
    let follow = kinds.clone().watch_all(ctx.clone(), filled);
    let work = async {
        let _ = tokio::time::timeout(INITIAL_SYNC_TIMEOUT, is_filled.wait_for(|filled| *filled)).await;
        let collector = Arc::new(Collector { ctx: ctx.clone(), kinds });
        let reconcile = move |uid| {
            let collector = collector.clone();
            async move { collector.reconcile(uid).await }
        };
        controller.run(&ctx, WORKERS, reconcile).await
    };
    let mut shutdown = ctx.shutdown.clone();
    tokio::select! {
        () = follow => {}
        () = work => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
}

struct Collector {
    ctx: Ctx,
    kinds: Arc<Kinds>,
}

/// The live state of an object.
struct LiveObject {
    kind: Arc<ApiResource>,
    path: String,
    meta: ObjectMetadata,
}

/// Why the state of an owner is unknown.
enum OwnerError {
    /// The kind is not served, or it is namespaced and the dependent is not.
    UnknownKind,
    Failed(Error),
}

impl Collector {
    async fn reconcile(&self, uid: Uid) -> Result<ReconcileAction, Error> {
        let action = self.kinds.graph.read().next_action(uid);
        match action {
            GraphAction::Nothing => {}
            GraphAction::ProcessOwners => self.process_owners(uid).await?,
            GraphAction::Orphan { dependents } => {
                let orphan = |dependent| self.orphan_dependent(dependent, uid);
                iter(dependents)
                    .map(orphan)
                    .buffer_unordered(MAX_CONCURRENT_ORPHANS)
                    .try_collect::<()>()
                    .await?;
                self.remove_finalizer(uid, FINALIZER_ORPHAN_DEPENDENTS).await?;
            }
            GraphAction::Foreground { blocked_by } if blocked_by.is_empty() => {
                self.remove_finalizer(uid, FINALIZER_DELETE_DEPENDENTS).await?
            }
            GraphAction::Foreground { blocked_by } => {
                let graph = self.kinds.graph.read();
                let idle =
                    blocked_by.into_iter().filter(|dependent| !graph.is_deleting_dependents(*dependent));
                idle.for_each(|dependent| self.kinds.wake(dependent));
            }
        }
        Ok(ReconcileAction::AwaitChange)
    }

    /// Reads an object and its owners and applies the resulting plan.
    async fn process_owners(&self, uid: Uid) -> Result<(), Error> {
        let Some(live) = self.get_live_object(uid).await? else { return Ok(()) };
        let mut owner_states = Vec::new();
        for reference in &live.meta.owner_references {
            match self.owner_state(&live, reference).await {
                Ok(owner_state) => owner_states.push(owner_state),
                // The object is kept as long as the owner's kind is unknown.
                Err(OwnerError::UnknownKind) => return Ok(()),
                Err(OwnerError::Failed(error)) => return Err(error),
            }
        }
        let dependents: Vec<bool> = {
            let graph = self.kinds.graph.read();
            graph
                .dependents_of(uid)
                .into_iter()
                .map(|dependent| graph.is_deleting_dependents(dependent))
                .collect()
        };
        let mut version = live.meta.resource_version.clone();
        for action in plan(&live.meta, &owner_states, &dependents) {
            match action {
                Action::RemoveOwners(uids) => {
                    drop(self.patch_owner_references(&live, without_owners(&live.meta, &uids)).await?)
                }
                Action::Unblock => {
                    version = self.patch_owner_references(&live, unblock_owner_references(&live.meta)).await?
                }
                Action::Delete { propagation } => {
                    let delete = DeleteOptions {
                        uid: Some(live.meta.uid.clone()),
                        resource_version: Some(version.clone()),
                        propagation: Some(propagation),
                        ..DeleteOptions::default()
                    };
                    ignore_not_found(self.ctx.client.delete_at(&live.path, &delete).await)?;
                }
            }
        }
        Ok(())
    }

    async fn owner_state(
        &self,
        live: &LiveObject,
        reference: &OwnerReference,
    ) -> Result<OwnerState, OwnerError> {
        self.report_wrong_namespace(live, reference);
        let Some(kind) = self.kinds.find_kind(&reference.api_version, &reference.kind) else {
            return Err(OwnerError::UnknownKind);
        };
        if kind.namespaced && live.meta.namespace.is_empty() {
            return Err(OwnerError::UnknownKind);
        }
        let path = kind.object(&Key::new(&live.meta.namespace, &reference.name));
        match get_metadata(&self.ctx.client, &path).await {
            Err(error) => Err(OwnerError::Failed(error)),
            Ok(Some(owner)) if owner.uid == reference.uid => {
                let waits = owner.is_deleting() && owner.has_finalizer(FINALIZER_DELETE_DEPENDENTS);
                Ok(if waits { OwnerState::DeletingDependents } else { OwnerState::Solid })
            }
            Ok(_) => Ok(OwnerState::Dangling),
        }
    }

    /// Emits a warning event if an owner is in another namespace.
    fn report_wrong_namespace(&self, live: &LiveObject, reference: &OwnerReference) {
        let found = self.kinds.graph.read().locate(Uid::of(&reference.uid));
        let Some((_, owner)) = found else { return };
        let namespace = &*live.meta.namespace;
        if owner.namespace.is_empty() || *owner.namespace == *namespace {
            return;
        }
        let OwnerReference { api_version, kind, name, uid, .. } = reference;
        let message = format!(
            "ownerRef [{api_version}/{kind}, namespace: {namespace}, name: {name}, uid: {uid}] does not exist in namespace {namespace:?}"
        );
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let about = ObjectReference {
            api_version: Some(live.kind.api_version()),
            kind: Some(live.kind.kind.clone()),
            name: some(&live.meta.name),
            namespace: some(namespace),
            uid: some(&live.meta.uid),
            ..ObjectReference::default()
        };
        self.ctx.events.record(about, EventType::Warning, "OwnerRefInvalidNamespace", message);
    }

    /// Removes the reference to an owner from a dependent.
    async fn orphan_dependent(&self, dependent: Uid, owner: Uid) -> Result<(), Error> {
        let Some(live) = self.get_live_object(dependent).await? else { return Ok(()) };
        let owners = live.meta.owner_references.iter();
        let remaining: Vec<&OwnerReference> =
            owners.filter(|reference| Uid::of(&reference.uid) != owner).collect();
        if remaining.len() < live.meta.owner_references.len() {
            ignore_not_found(self.patch_owner_references(&live, json!(remaining)).await.map(drop))?;
        }
        Ok(())
    }

    /// Removes a finalizer from an object.
    async fn remove_finalizer(&self, uid: Uid, finalizer: &str) -> Result<(), Error> {
        let Some(live) = self.get_live_object(uid).await? else { return Ok(()) };
        if !live.meta.has_finalizer(finalizer) {
            return Ok(());
        }
        let left: Vec<&String> =
            live.meta.finalizers.iter().filter(|existing| *existing != finalizer).collect();
        let change = json!({"finalizers": left, "resourceVersion": live.meta.resource_version});
        let patch = Patch::Merge(json!({"metadata": change}));
        ignore_not_found(self.ctx.client.patch_at::<Value>(&live.path, &patch).await.map(drop))
    }

    async fn patch_owner_references(&self, live: &LiveObject, owners: Value) -> Result<String, Error> {
        let change = json!({"ownerReferences": owners, "resourceVersion": live.meta.resource_version});
        let patched: PartialObject =
            self.ctx.client.patch_at(&live.path, &Patch::Merge(json!({"metadata": change}))).await?;
        Ok(patched.metadata.resource_version)
    }

    /// The live object with this UID, if it still exists.
    async fn get_live_object(&self, uid: Uid) -> Result<Option<LiveObject>, Error> {
        let found = self.kinds.graph.read().locate(uid);
        let Some((kind, key)) = found else { return Ok(None) };
        let Some(kind) = self.kinds.monitor_kind(kind) else { return Ok(None) };
        let path = kind.object(&key);
        let meta = get_metadata(&self.ctx.client, &path).await?;
        Ok(meta.filter(|meta| Uid::of(&meta.uid) == uid).map(|meta| LiveObject { kind, path, meta }))
    }
}

async fn get_metadata(client: &Client, path: &str) -> Result<Option<ObjectMetadata>, Error> {
    match client.read::<PartialObject>(path).await {
        Ok(partial) => Ok(Some(partial.metadata)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn ignore_not_found(result: Result<(), Error>) -> Result<(), Error> {
    result.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })
}

fn without_owners(meta: &ObjectMetadata, uids: &[String]) -> Value {
    let remaining = meta.owner_references.iter().filter(|reference| !uids.contains(&reference.uid));
    json!(remaining.collect::<Vec<_>>())
}

fn unblock_owner_references(meta: &ObjectMetadata) -> Value {
    let mut owners = meta.owner_references.clone();
    owners.iter_mut().for_each(|owner| owner.block_owner_deletion = Some(false));
    json!(owners)
}
