//! StatefulSet controller: runs pods with stable names and volumes, in order.
//!
//! A sync loops over [`plan`](mod@plan): each step is applied, then the state is read from the caches again. The
//! order is template history, claims and pods, status; the status therefore reflects the state after the
//! pod changes.
//!
//! Upstream: `pkg/controller/statefulset`.

mod claims;
pub mod plan;
mod pods;

use futures_util::future::join_all;
use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetStatus};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use reconcile::{Controller, Ctx, DeleteOptions, Error, Key, Object as _, Patch, ReconcileAction, keys};
use serde_json::json;

use crate::history::{self, History, MissingRevision};
use crate::ownership;
use crate::slow_start::slow_start;
use plan::{Action, Plan, StatefulSetSnapshot, Step, plan};

const WORKERS: usize = 5;
/// The label with the hash of a revision.
const HASH_LABEL: &str = "controller.kubernetes.io/hash";

pub async fn run(ctx: Ctx) {
    let controller = Controller::new("statefulset", &ctx);
    let sets = ctx.caches.stateful_sets();
    controller.on(sets, keys::own);
    controller.on(ctx.caches.pods(), keys::owner_of_kind("StatefulSet"));
    controller.on(ctx.caches.controller_revisions(), keys::owner_of_kind("StatefulSet"));
    let matching_sets = keys::in_namespace(sets, |pod: &Pod, set: &StatefulSet| {
        let selector = reconcile::selector(set.spec.as_ref().map(|spec| &spec.selector));
        pods::ordinal(set, pod).is_some() && selector.matches(|name| pod.label(name))
    });
    controller.on(ctx.caches.pods(), move |changed, enqueue| {
        if changed.after.is_none_or(|pod| pod.controller().is_none()) {
            matching_sets(changed, enqueue);
        }
    });
    let claim_owners = keys::in_namespace(sets, claims::is_claim_of);
    controller.on(ctx.caches.persistent_volume_claims(), claim_owners);
    let shared = ctx.clone();
    controller
        .run(&ctx, WORKERS, move |key| {
            let ctx = shared.clone();
            async move { reconcile(&ctx, &key).await }
        })
        .await;
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(set) = ctx.caches.stateful_sets().get(key) else { return Ok(ReconcileAction::Forget) };
    let Some(spec) = &set.spec else { return Ok(ReconcileAction::AwaitChange) };
    let selector = reconcile::selector(Some(&spec.selector));
    let mut candidates = ownership::candidates(&*set, ctx.caches.pods());
    candidates.retain(|pod| pods::ordinal(&set, pod).is_some());
    ownership::adopt_and_release(ctx, &*set, &ownership::claim(&*set, &selector, candidates)).await?;
    let revisions = ownership::candidates(&*set, ctx.caches.controller_revisions());
    ownership::adopt_and_release(ctx, &*set, &ownership::claim(&*set, &selector, revisions)).await?;
    let (mut may_change_pods, mut failure) = (true, None);
    loop {
        let Some(set) = ctx.caches.stateful_sets().get_exactly(key, set.uid()) else {
            return Ok(ReconcileAction::AwaitChange);
        };
        let Some(spec) = &set.spec else { return Ok(ReconcileAction::AwaitChange) };
        let pods = ctx.caches.pods().owned_by(set.uid());
        let mut claims = Vec::new();
        if spec.volume_claim_templates.is_some() {
            claims = ctx.caches.persistent_volume_claims().in_namespace(set.namespace());
            claims.retain(|claim| claims::is_claim_of(claim, &set));
        }
        let history = History::of(&spec.template, ctx.caches.controller_revisions().owned_by(set.uid()));
        let now = ctx.clock.now();
        let snapshot =
            StatefulSetSnapshot { set: &set, spec, pods: &pods, claims: &claims, history: &history, now };
        let Plan { step, requeue_at } = plan(&snapshot, may_change_pods);
        match step {
            Step::Done => {
                return match failure {
                    Some(error) => Err(error),
                    None => Ok(requeue_at.map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt)),
                };
            }
            Step::Revise(missing_revision) => sync_revisions(ctx, &set, missing_revision).await?,
            Step::Apply(actions)
                if actions.iter().any(Action::is_create)
                    && !ownership::may_create_pods(ctx, &*set, &pods, reported_replicas(&set)).await? =>
            {
                return Ok(ReconcileAction::AwaitChange);
            }
            Step::Apply(actions) => {
                may_change_pods = false;
                failure = apply(ctx, &set, actions).await.err();
            }
            Step::TruncateHistory(old) => history::remove(ctx, &old).await?,
            Step::Status(status) => write_status(ctx, &set, status).await?,
        }
    }
}

/// The number of pods in the set's status.
fn reported_replicas(set: &StatefulSet) -> Option<i32> {
    set.status.as_ref().map(|status| status.replicas)
}

async fn write_status(ctx: &Ctx, set: &StatefulSet, status: StatefulSetStatus) -> Result<(), Error> {
    ctx.replace_status(&StatefulSet { status: Some(status), ..set.clone() }).await.map(drop)
}

async fn sync_revisions(
    ctx: &Ctx,
    set: &StatefulSet,
    missing_revision: MissingRevision,
) -> Result<(), Error> {
    let template = set.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
    let mut status = set.status.clone().unwrap_or_default();
    let collisions = status.collision_count.filter(|count| *count > 0);
    let new_revision = |number| history::new_revision(set, &template, HASH_LABEL, number, collisions);
    if !history::sync_revision(ctx, missing_revision, new_revision).await? {
        status.collision_count = Some(collisions.unwrap_or(0).saturating_add(1));
        write_status(ctx, set, status).await?;
    }
    Ok(())
}

/// Applies the actions: claims and labels first, in order; then pods are created and finally deleted, each
/// in parallel.
async fn apply(ctx: &Ctx, set: &StatefulSet, actions: Vec<Action>) -> Result<(), Error> {
    let (mut create, mut delete) = (Vec::new(), Vec::new());
    for action in actions {
        match action {
            Action::CreateClaim { claim, pod } => create_claim(ctx, set, &claim, &pod).await?,
            Action::UpdateClaimOwners(claim) => ctx.replace(&claim).await.map(drop)?,
            Action::LabelPod { pod, ordinal } => label_pod(ctx, set, &pod, ordinal).await?,
            Action::Wait { pod, message } => record_event(ctx, set, "Create", &pod, Some(&message)),
            Action::CreatePod(pod) => create.push(pod),
            Action::DeletePod(pod) => delete.push(pod),
        }
    }
    let create = &create;
    let creation = slow_start(create.len(), |i| async move {
        let created = ctx.create::<Pod>(&create[i]).await;
        match &created {
            // `NotSeen`: the pod exists, but the cache does not show it yet. It is reported by no event
            // then, and neither are name collisions and terminating namespaces.
            Err(Error::NotCached(_)) => {}
            Err(error) if error.is_already_exists() || error.is_namespace_terminating() => {}
            Err(error) => record_event(ctx, set, "Create", create[i].name(), Some(&error.to_string())),
            Ok(_) => record_event(ctx, set, "Create", create[i].name(), None),
        }
        match created {
            // The pod was created by an earlier sync, and the cache shows it now.
            Err(error) if error.is_already_exists() && already_exists(ctx, set, &create[i]) => Ok(()),
            created => created.map(drop),
        }
    });
    let (_, failure) = creation.await;
    let deletions = join_all(delete.iter().map(|pod| delete_pod(ctx, set, pod))).await;
    deletions.into_iter().collect::<Result<(), Error>>()?;
    match failure {
        Some(error) if !error.is_namespace_terminating() => Err(error),
        _ => Ok(()),
    }
}

/// Whether the set owns a pod of this name already.
fn already_exists(ctx: &Ctx, set: &StatefulSet, pod: &Pod) -> bool {
    let known = ctx.caches.pods().get(&pod.key());
    known.is_some_and(|known| known.controller().is_some_and(|owner| owner.uid == set.uid()))
}

async fn create_claim(
    ctx: &Ctx,
    set: &StatefulSet,
    claim: &PersistentVolumeClaim,
    pod: &str,
) -> Result<(), Error> {
    let created = ctx.create(claim).await;
    let (name, set_name) = (claim.name(), set.name());
    match &created {
        Ok(_) => {
            let message = format!("Create Claim {name} Pod {pod} in StatefulSet {set_name} success");
            ctx.events.normal(set, "SuccessfulCreate", message);
        }
        Err(error) if error.is_already_exists() || error.is_namespace_terminating() => {}
        Err(error) => {
            let message =
                format!("Create Claim {name} for Pod {pod} in StatefulSet {set_name} failed error: {error}");
            ctx.events.warning(set, "FailedCreate", message);
            record_event(ctx, set, "Create", pod, Some(&format!("failed to create PVC {name}: {error}")));
        }
    }
    created.map(drop)
}

async fn delete_pod(ctx: &Ctx, set: &StatefulSet, pod: &Pod) -> Result<(), Error> {
    let deleted = ctx.client.delete::<Pod>(&pod.key(), &DeleteOptions::uid(pod.uid())).await;
    match deleted {
        Ok(()) => record_event(ctx, set, "Delete", pod.name(), None),
        // The pod is deleted, or another pod has its name.
        Err(error) if error.is_not_found() || error.is_conflict() => {}
        Err(error) => {
            record_event(ctx, set, "Delete", pod.name(), Some(&error.to_string()));
            return Err(error);
        }
    }
    ctx.caches.pods().wait_until_deleted(&pod.key(), pod.uid()).await
}

async fn label_pod(ctx: &Ctx, set: &StatefulSet, pod: &Pod, ordinal: i32) -> Result<(), Error> {
    let labels: serde_json::Map<_, _> = pods::identity_labels(pod.name(), ordinal)
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value.into()))
        .collect();
    let patch = Patch::Merge(json!({"metadata": {"labels": labels, "uid": pod.uid()}}));
    let patched = ctx.patch::<Pod>(&pod.key(), &patch).await;
    let message = patched.as_ref().err().map(Error::to_string);
    record_event(ctx, set, "Update", pod.name(), message.as_deref());
    patched.map(drop)
}

fn record_event(ctx: &Ctx, set: &StatefulSet, verb: &str, pod: &str, failure: Option<&str>) {
    let what = format!("{verb} Pod {pod} in StatefulSet {}", set.name());
    match failure {
        None => ctx.events.normal(set, &format!("Successful{verb}"), format!("{what} successful")),
        Some(message) => {
            ctx.events.warning(set, &format!("Failed{verb}"), format!("{what} failed error: {message}"))
        }
    }
}

#[cfg(test)]
mod tests;
