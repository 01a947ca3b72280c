//! Keeps the number of pods a ReplicaSet or a ReplicationController asks for.
//!
//! Both are one loop: a ReplicationController is seen as the ReplicaSet it would be ([`Replicated`]). Claims
//! are settled first, then pods created or deleted, then the status written once from what is there after
//! that.

pub(crate) mod plan;

use std::borrow::Cow;
use std::sync::Arc;

use api::selector::LabelSelector;
use futures_util::future::join_all;
use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetStatus};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use reconcile::{Cache, Cached, Changed, Controller, Ctx, Error, Key, Next, Object, keys};

use crate::batches::slow_start;
use crate::{ownership, template};
use plan::Change;

/// Upstream's default of `--concurrent-replicaset-syncs`.
const WORKERS: usize = 5;

/// What keeps a number of like pods.
pub(crate) trait Replicated: Cached {
    fn all(ctx: &Ctx) -> &Arc<Cache<Self>>;

    fn as_set(&self) -> Cow<'_, ReplicaSet>;

    /// The same object with the status the set would have; `None` where it has it already.
    fn with_status(&self, status: ReplicaSetStatus) -> Option<Self>;

    /// The pods of all sets that have the same owner as this one.
    fn related_pods(&self, ctx: &Ctx) -> Vec<Arc<Pod>>;
}

pub async fn run(ctx: Ctx) {
    keep::<ReplicaSet>(ctx, "replicaset").await;
}

/// Runs the loop for one of the kinds.
pub(crate) async fn keep<T: Replicated>(ctx: Ctx, queue: &'static str) {
    let controller = Controller::new(queue, &ctx);
    controller.on(T::all(&ctx), keys::own);
    controller.on(ctx.caches.pods(), keys::owner_of_kind(T::KIND));
    controller.on(ctx.caches.pods(), adopters::<T>(&ctx));
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile::<T>(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await;
}

/// Who may want a pod that nobody controls: asked when it appears, loses its owner or changes its labels.
fn adopters<T: Replicated>(ctx: &Ctx) -> impl Fn(&Changed<'_, Pod>, &mut dyn FnMut(Key)) + use<T> {
    let sets = T::all(ctx).clone();
    move |changed, enqueue| {
        let Some(pod) = changed.after.filter(|pod| pod.controller().is_none()) else { return };
        let is_news = changed.before.is_none_or(|before| {
            before.metadata.labels != pod.metadata.labels || before.controller().is_some()
        });
        if !is_news || pod.metadata.labels.is_none() {
            return;
        }
        for set in sets.in_namespace(pod.namespace()) {
            if selector(&set.as_set()).matches(|name| pod.label(name)) {
                enqueue(set.key());
            }
        }
    }
}

async fn reconcile<T: Replicated>(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(owner) = T::all(ctx).get(key) else { return Ok(Next::Forget) };
    let set = owner.as_set();
    let selector = selector(&set);
    let candidates = || ownership::candidates(owner.as_ref(), ctx.caches.pods());

    let all = candidates();
    let claim = plan::claim(&set, &selector, &all);
    ownership::settle(ctx, owner.as_ref(), &claim).await?;
    // An adopted pod is judged as it was found: it may have come to life since, and is the newest all the same.
    let adopted = claim.adopt.into_iter().filter(|pod| is_ours(ctx, owner.as_ref(), pod));
    let active: Vec<Arc<Pod>> = claim.owned.into_iter().chain(adopted).collect();

    let related = || owner.related_pods(ctx);
    let change = plan::change(&set, &active, related, ctx.clock.now());
    let ending = plan::terminating(&set, &selector, &all);
    let told = set.status.as_ref().and_then(|status| usize::try_from(status.replicas).ok());
    // Where pods come to an end, the set may be gone as well, and its cache has yet to hear of it.
    let is_doubtful = matches!(change, Change::Create(_)) && (ending > 0 || told > Some(active.len()));
    if is_doubtful && !ownership::is_alive(ctx, owner.as_ref()).await? {
        return Ok(Next::Change);
    }
    let (pods, failure) = match change {
        Change::None => (plan::Pods { active, terminating: ending }, None),
        Change::Create(count) => {
            let failure = create(ctx, owner.as_ref(), &set, count).await;
            (plan::own(&set, &selector, &candidates()), failure)
        }
        Change::Delete(pods) => {
            let failure = delete(ctx, owner.as_ref(), &pods).await;
            (plan::own(&set, &selector, &candidates()), failure)
        }
    };

    let now = ctx.clock.now();
    let told = failure.as_ref().map(|(_, message)| message.as_str());
    if let Some(updated) = owner.with_status(plan::status(&set, &pods, told, now)) {
        ctx.replace_status(&updated).await?;
    }
    if let Some((error, _)) = failure {
        return Err(error);
    }
    Ok(plan::next_look(&set, &pods, now).map_or(Next::Change, Next::At))
}

fn is_ours<T: Replicated>(ctx: &Ctx, owner: &T, pod: &Pod) -> bool {
    let pod = ctx.caches.pods().get_exactly(&pod.key(), pod.uid());
    pod.is_some_and(|pod| pod.controller().is_some_and(|controller| controller.uid == owner.uid()))
}

async fn create<T: Replicated>(
    ctx: &Ctx,
    owner: &T,
    set: &ReplicaSet,
    count: usize,
) -> Option<(Error, String)> {
    let none = PodTemplateSpec::default();
    let template = set.spec.as_ref().and_then(|spec| spec.template.as_ref()).unwrap_or(&none);
    let pod = template::pod(owner, template);
    let (_, failure) = slow_start(count, async |_| match template::create(ctx, owner, &pod).await {
        Err(error) if !error.is_namespace_terminating() => Err(error),
        _ => Ok(()),
    })
    .await;
    failure.map(|error| {
        let message = error.to_string();
        (error, message)
    })
}

async fn delete<T: Replicated>(ctx: &Ctx, owner: &T, pods: &[Arc<Pod>]) -> Option<(Error, String)> {
    let results = join_all(pods.iter().map(|pod| template::delete(ctx, owner, pod))).await;
    results.into_iter().find_map(Result::err).map(|error| {
        let message = format!("unable to delete pods: {error}");
        (error, message)
    })
}

fn selector(set: &ReplicaSet) -> LabelSelector {
    reconcile::selector(set.spec.as_ref().map(|spec| &spec.selector))
}

impl Replicated for ReplicaSet {
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
