//! ReplicaSet controller: maintains the number of pods of ReplicaSets and ReplicationControllers.
//!
//! Both share one implementation: a ReplicationController is converted to a ReplicaSet ([`ReplicaOwner`]).
//! A sync first adopts and releases pods, then creates or deletes pods, and then writes the status once
//! from the state after that.
//!
//! Upstream: `pkg/controller/replicaset`.

pub(crate) mod plan;

use std::borrow::Cow;
use std::sync::Arc;

use api::selector::LabelSelector;
use futures_util::future::join_all;
use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetStatus};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use reconcile::{Cache, Cached, Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction, keys};

use crate::slow_start::slow_start;
use crate::{ownership, template};
use plan::PodChange;

/// Upstream's default of `--concurrent-replicaset-syncs`.
const WORKERS: usize = 5;

/// A kind that maintains a number of identical pods.
pub(crate) trait ReplicaOwner: Cached {
    fn all(ctx: &Ctx) -> &Arc<Cache<Self>>;

    fn as_set(&self) -> Cow<'_, ReplicaSet>;

    /// The object with the given status converted back, or `None` if it is unchanged.
    fn with_status(&self, status: ReplicaSetStatus) -> Option<Self>;

    /// The pods of all ReplicaSets with the same owner.
    fn related_pods(&self, ctx: &Ctx) -> Vec<Arc<Pod>>;
}

pub async fn run(ctx: Ctx) {
    run_controller::<ReplicaSet>(ctx, "replicaset").await;
}

/// Runs the controller for one of the kinds.
pub(crate) async fn run_controller<T: ReplicaOwner>(ctx: Ctx, queue: &'static str) {
    let controller = Controller::new(queue, &ctx);
    controller.on(T::all(&ctx), keys::own);
    controller.on(ctx.caches.pods(), keys::owner_of_kind(T::KIND));
    controller.on(ctx.caches.pods(), on_orphaned_pod::<T>(&ctx));
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile::<T>(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await;
}

/// Enqueues the sets that may adopt a pod: when it is created, loses its owner or changes its labels.
fn on_orphaned_pod<T: ReplicaOwner>(
    ctx: &Ctx,
) -> impl Fn(&ObjectUpdate<'_, Pod>, &mut dyn FnMut(Key)) + use<T> {
    let sets = T::all(ctx).clone();
    move |changed, enqueue| {
        let Some(pod) = changed.after.filter(|pod| pod.controller().is_none()) else { return };
        let labels_or_owner_changed = changed.before.is_none_or(|before| {
            before.metadata.labels != pod.metadata.labels || before.controller().is_some()
        });
        if !labels_or_owner_changed || pod.metadata.labels.is_none() {
            return;
        }
        for set in sets.in_namespace(pod.namespace()) {
            if selector(&set.as_set()).matches(|name| pod.label(name)) {
                enqueue(set.key());
            }
        }
    }
}

async fn reconcile<T: ReplicaOwner>(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(owner) = T::all(ctx).get(key) else { return Ok(ReconcileAction::Forget) };
    let set = owner.as_set();
    let selector = selector(&set);
    let candidates = || ownership::candidates(owner.as_ref(), ctx.caches.pods());

    let all = candidates();
    let claim = plan::claim(&set, &selector, &all);
    ownership::adopt_and_release(ctx, owner.as_ref(), &claim).await?;
    // An adopted pod is used in the state before its adoption. It may have changed since, but it is the
    // newest in any case.
    let new_pods = claim.adopt.into_iter().filter(|pod| is_owned_by(ctx, owner.as_ref(), pod));
    let active: Vec<Arc<Pod>> = claim.owned.into_iter().chain(new_pods).collect();

    let related = || owner.related_pods(ctx);
    let change = plan::pod_change(&set, &active, related, ctx.clock.now());
    let terminating = plan::terminating(&set, &selector, &all);
    let reported_replicas = set.status.as_ref().and_then(|status| usize::try_from(status.replicas).ok());
    // If pods disappeared or are being deleted, the set may be deleted, too, without the cache showing it
    // yet.
    let may_be_deleted =
        matches!(change, PodChange::Create(_)) && (terminating > 0 || reported_replicas > Some(active.len()));
    if may_be_deleted && !ownership::is_alive(ctx, owner.as_ref()).await? {
        return Ok(ReconcileAction::AwaitChange);
    }
    let (pods, failure) = match change {
        PodChange::None => (plan::ReplicaSetPods { active, terminating }, None),
        PodChange::Create(count) => {
            let failure = create(ctx, owner.as_ref(), &set, count).await;
            (plan::owned_pods(&set, &selector, &candidates()), failure)
        }
        PodChange::Delete(pods) => {
            let failure = delete(ctx, owner.as_ref(), &pods).await;
            (plan::owned_pods(&set, &selector, &candidates()), failure)
        }
    };

    let now = ctx.clock.now();
    let failure_message = failure.as_ref().map(|(_, message)| message.as_str());
    if let Some(updated) = owner.with_status(plan::status(&set, &pods, failure_message, now)) {
        ctx.replace_status(&updated).await?;
    }
    if let Some((error, _)) = failure {
        return Err(error);
    }
    Ok(plan::requeue_at(&set, &pods, now).map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt))
}

fn is_owned_by<T: ReplicaOwner>(ctx: &Ctx, owner: &T, pod: &Pod) -> bool {
    let pod = ctx.caches.pods().get_exactly(&pod.key(), pod.uid());
    pod.is_some_and(|pod| pod.controller().is_some_and(|controller| controller.uid == owner.uid()))
}

async fn create<T: ReplicaOwner>(
    ctx: &Ctx,
    owner: &T,
    set: &ReplicaSet,
    count: usize,
) -> Option<(Error, String)> {
    let none = PodTemplateSpec::default();
    let template = set.spec.as_ref().and_then(|spec| spec.template.as_ref()).unwrap_or(&none);
    let pod = template::pod_from_template(owner, template);
    let (_, failure) = slow_start(count, async |_| match template::create_pod(ctx, owner, &pod).await {
        Err(error) if !error.is_namespace_terminating() => Err(error),
        _ => Ok(()),
    })
    .await;
    failure.map(|error| {
        let message = error.to_string();
        (error, message)
    })
}

async fn delete<T: ReplicaOwner>(ctx: &Ctx, owner: &T, pods: &[Arc<Pod>]) -> Option<(Error, String)> {
    let results = join_all(pods.iter().map(|pod| template::delete_pod(ctx, owner, pod))).await;
    results.into_iter().find_map(Result::err).map(|error| {
        let message = format!("unable to delete pods: {error}");
        (error, message)
    })
}

fn selector(set: &ReplicaSet) -> LabelSelector {
    reconcile::selector(set.spec.as_ref().map(|spec| &spec.selector))
}

impl ReplicaOwner for ReplicaSet {
    fn all(ctx: &Ctx) -> &Arc<Cache<ReplicaSet>> {
        ctx.caches.replica_sets()
    }

    fn as_set(&self) -> Cow<'_, ReplicaSet> {
        Cow::Borrowed(self)
    }

    fn with_status(&self, status: ReplicaSetStatus) -> Option<ReplicaSet> {
        let same = self.status.as_ref() == Some(&status);
        (!same).then(|| ReplicaSet { status: Some(status), ..self.clone() })
    }

    fn related_pods(&self, ctx: &Ctx) -> Vec<Arc<Pod>> {
        let sets = match self.controller() {
            Some(owner) => ctx.caches.replica_sets().owned_by(&owner.uid),
            None => Vec::new(),
        };
        sets.iter().flat_map(|set| ctx.caches.pods().owned_by(set.uid())).collect()
    }
}

#[cfg(test)]
mod tests;
