//! Collects what its owners have left behind, and makes owners wait for dependents where they are to.
//!
//! Collections of every kind are followed for their metadata alone ([`kinds`]) into a graph of owners and
//! dependents ([`graph`]), which says what to look at. Before anything is deleted, the object and its owners are
//! read anew, and it is deleted only in the state that was read ([`plan`]).

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
use reconcile::{Client, Controller, Ctx, Delete, Error, Key, Next, Patch, Served, Severity};
use serde_json::{Value, json};
use tokio::sync::watch;

use graph::{FOREGROUND, Look, Meta, ORPHAN, Partial, Uid};
use kinds::Kinds;
use plan::{Action, Standing, plan};

const WORKERS: usize = 20;
/// Dependents orphaned at once.
const AT_ONCE: usize = 32;
/// How long to wait for all collections before beginning with those there are.
const FIRST_FILL: Duration = Duration::from_secs(30);

pub async fn run(ctx: Ctx) {
    let client = ctx.client.acting_as("generic-garbage-collector");
    let ctx = Ctx { client, ..ctx };
    let controller: Controller<Uid> = Controller::new("garbage_collector_attempt_to_delete", &ctx);
    let kinds = Kinds::new(controller.enqueue());
    let (filled, mut is_filled) = watch::channel(false);
    let follow = kinds.clone().follow_all(ctx.clone(), filled);
    let work = async {
        let _ = tokio::time::timeout(FIRST_FILL, is_filled.wait_for(|filled| *filled)).await;
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

/// An object in its live state.
struct Live {
    kind: Arc<Served>,
    path: String,
    meta: Meta,
}

/// An owner could not be judged.
enum Unclear {
    /// Its kind is not served, or an object of it cannot own this one.
    Unknown,
    Failed(Error),
}

impl Collector {
    async fn reconcile(&self, uid: Uid) -> Result<Next, Error> {
        let look = self.kinds.graph.read().look(uid);
        match look {
            Look::Nothing => {}
            Look::Verify => self.verify(uid).await?,
            Look::Orphan { dependents } => {
                let release = |dependent| self.release(dependent, uid);
                iter(dependents).map(release).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
                self.finish(uid, ORPHAN).await?;
            }
            Look::Foreground { blocked_by } if blocked_by.is_empty() => self.finish(uid, FOREGROUND).await?,
            Look::Foreground { blocked_by } => {
                let graph = self.kinds.graph.read();
                let idle = blocked_by.into_iter().filter(|dependent| !graph.is_foreground(*dependent));
                idle.for_each(|dependent| self.kinds.wake(dependent));
            }
        }
        Ok(Next::Change)
    }

    /// Looks up the owners of an object and does what has to be done then.
    async fn verify(&self, uid: Uid) -> Result<(), Error> {
        let Some(live) = self.live(uid).await? else { return Ok(()) };
        let mut standings = Vec::new();
        for reference in &live.meta.owner_references {
            match self.standing(&live, reference).await {
                Ok(standing) => standings.push(standing),
                // It stays until there is such a kind.
                Err(Unclear::Unknown) => return Ok(()),
                Err(Unclear::Failed(error)) => return Err(error),
            }
        }
        let dependents: Vec<bool> = {
            let graph = self.kinds.graph.read();
            graph.dependents_of(uid).into_iter().map(|dependent| graph.is_foreground(dependent)).collect()
        };
        let mut version = live.meta.resource_version.clone();
        for action in plan(&live.meta, &standings, &dependents) {
            match action {
                Action::RemoveOwners(uids) => drop(self.set_owners(&live, without(&live.meta, &uids)).await?),
                Action::Unblock => version = self.set_owners(&live, unblocking(&live.meta)).await?,
                Action::Delete { propagation } => {
                    let delete = Delete {
                        uid: Some(live.meta.uid.clone()),
                        resource_version: Some(version.clone()),
                        propagation: Some(propagation),
                        ..Delete::default()
                    };
                    gone_is_fine(self.ctx.client.delete_at(&live.path, &delete).await)?;
                }
            }
        }
        Ok(())
    }

    async fn standing(&self, live: &Live, reference: &OwnerReference) -> Result<Standing, Unclear> {
        self.report_wrong_namespace(live, reference);
        let Some(kind) = self.kinds.named(&reference.api_version, &reference.kind) else {
            return Err(Unclear::Unknown);
        };
        if kind.namespaced && live.meta.namespace.is_empty() {
            return Err(Unclear::Unknown);
        }
        let path = kind.object(&Key::new(&live.meta.namespace, &reference.name));
        match get(&self.ctx.client, &path).await {
            Err(error) => Err(Unclear::Failed(error)),
            Ok(Some(owner)) if owner.uid == reference.uid => {
                let waits = owner.is_deleting() && owner.held_by(FOREGROUND);
                Ok(if waits { Standing::Waiting } else { Standing::Solid })
            }
            Ok(_) => Ok(Standing::Absent),
        }
    }

    /// An owner in another namespace is a mistake people should learn of.
    fn report_wrong_namespace(&self, live: &Live, reference: &OwnerReference) {
        let found = self.kinds.graph.read().whereabouts(Uid::of(&reference.uid));
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
        self.ctx.events.record(about, Severity::Warning, "OwnerRefInvalidNamespace", message);
    }

    /// Makes a dependent forget its owner.
    async fn release(&self, dependent: Uid, owner: Uid) -> Result<(), Error> {
        let Some(live) = self.live(dependent).await? else { return Ok(()) };
        let owners = live.meta.owner_references.iter();
        let kept: Vec<&OwnerReference> =
            owners.filter(|reference| Uid::of(&reference.uid) != owner).collect();
        if kept.len() < live.meta.owner_references.len() {
            gone_is_fine(self.set_owners(&live, json!(kept)).await.map(drop))?;
        }
        Ok(())
    }

    /// Lets an object go, as far as this finalizer holds it.
    async fn finish(&self, uid: Uid, finalizer: &str) -> Result<(), Error> {
        let Some(live) = self.live(uid).await? else { return Ok(()) };
        if !live.meta.held_by(finalizer) {
            return Ok(());
        }
        let left: Vec<&String> = live.meta.finalizers.iter().filter(|held| *held != finalizer).collect();
        let change = json!({"finalizers": left, "resourceVersion": live.meta.resource_version});
        let patch = Patch::Merge(json!({"metadata": change}));
        gone_is_fine(self.ctx.client.patch_at::<Value>(&live.path, &patch).await.map(drop))
    }

    async fn set_owners(&self, live: &Live, owners: Value) -> Result<String, Error> {
        let change = json!({"ownerReferences": owners, "resourceVersion": live.meta.resource_version});
        let patched: Partial =
            self.ctx.client.patch_at(&live.path, &Patch::Merge(json!({"metadata": change}))).await?;
        Ok(patched.metadata.resource_version)
    }

    /// The object of this uid as it is now, if there still is one.
    async fn live(&self, uid: Uid) -> Result<Option<Live>, Error> {
        let found = self.kinds.graph.read().whereabouts(uid);
        let Some((kind, key)) = found else { return Ok(None) };
        let Some(kind) = self.kinds.followed(kind) else { return Ok(None) };
        let path = kind.object(&key);
        let meta = get(&self.ctx.client, &path).await?;
        Ok(meta.filter(|meta| Uid::of(&meta.uid) == uid).map(|meta| Live { kind, path, meta }))
    }
}

async fn get(client: &Client, path: &str) -> Result<Option<Meta>, Error> {
    match client.read::<Partial>(path).await {
        Ok(partial) => Ok(Some(partial.metadata)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn gone_is_fine(result: Result<(), Error>) -> Result<(), Error> {
    result.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })
}

fn without(meta: &Meta, uids: &[String]) -> Value {
    let kept = meta.owner_references.iter().filter(|reference| !uids.contains(&reference.uid));
    json!(kept.collect::<Vec<_>>())
}

fn unblocking(meta: &Meta) -> Value {
    let mut owners = meta.owner_references.clone();
    owners.iter_mut().for_each(|owner| owner.block_owner_deletion = Some(false));
    json!(owners)
}
