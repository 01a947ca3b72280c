//! Carries out what the engine has decided.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::{Key, Severity, reference};
use serde_json::json;

use super::Hands;
use crate::bind::{ApiError, Bound};
use crate::engine::{Action, Binding, Event, Note, Preemption, Setback};
use crate::framework::{Chore, Status};
use crate::plugins::dynamic_resources;
use crate::state::PodInfo;

/// How often a call that failed in passing is tried, and how long to wait in between at first.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(10);

impl Hands {
    /// Begins to carry out an action.
    pub(super) fn act(&self, action: Action) {
        match action {
            Action::Note(note) => self.tell(note),
            Action::Bind(binding) => self.spawn(|hands| hands.bind_or_return(binding)),
            Action::Chore(chore) => self.spawn(|hands| async move {
                if let Err(error) = hands.do_chore(&chore).await {
                    tracing::warn!(%error, ?chore, "cannot free a resource claim");
                }
            }),
            Action::Preempt(preemption) => self.spawn(|hands| hands.preempt(preemption)),
            Action::PatchStatus { namespace, name, patch } => self.spawn(|hands| async move {
                let patched = hands.retried(|| hands.bind.api.patch_pod_status(&namespace, &name, &patch)).await;
                if let Err(error) = patched
                    && !error.is_not_found()
                {
                    tracing::warn!(%error, namespace = &*namespace, name = &*name, "cannot write a pod's status");
                }
            }),
        }
    }

    fn spawn<F: Future<Output = ()> + Send + 'static>(&self, work: impl FnOnce(Hands) -> F) {
        let work = work(self.clone());
        let at_once = self.at_once.clone();
        tokio::spawn(async move {
            // The semaphore is never closed.
            let _turn = at_once.acquire_owned().await;
            work.await;
        });
    }

    fn tell(&self, note: Note) {
        self.ctx.events.note(reconcile::Note {
            about: reference(&*note.about),
            related: None,
            severity: if note.warning { Severity::Warning } else { Severity::Normal },
            reason: note.reason.to_owned(),
            message: note.message,
            action: note.action,
            source: source(note.source),
            at: self.ctx.clock.now(),
        });
    }

    async fn retried<T, F>(&self, mut call: impl FnMut() -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let mut pause = PAUSE;
        for _ in 1..TRIES {
            match call().await {
                Err(error) if error.is_passing() => tokio::time::sleep(pause).await,
                done => return done,
            }
            pause *= 4;
        }
        call().await
    }

    async fn bind_or_return(self, mut binding: Binding) {
        self.metrics.binding_begins();
        let outcome = self.bind(&mut binding).await;
        self.metrics.binding_ends();
        let event = match outcome {
            Ok(()) => {
                let begun = Instant::now();
                for (name, plugin) in &binding.profile.post_bind {
                    let begun = Instant::now();
                    plugin.post_bind(&self.bind, &binding.info, &binding.node).await;
                    binding.watch.note(name, "PostBind", true, begun.elapsed());
                }
                let ran = ("PostBind", "Success", begun.elapsed());
                self.metrics.ran(&binding.profile.scheduler_name, ran);
                Event::Bound(Box::new(binding))
            }
            Err(setback) => {
                let key = Key { namespace: binding.info.namespace.clone(), name: binding.info.name.clone() };
                let current = self.ctx.caches.pods().get_exactly(&key, &binding.info.uid);
                let waits = |pod: &Arc<k8s_openapi::api::core::v1::Pod>| {
                    pod.spec.as_ref().is_none_or(|spec| spec.node_name.is_none())
                };
                Event::Unbound { binding: Box::new(binding), setback, current: current.filter(waits) }
            }
        };
        let _ = self.events.send(event);
    }

    async fn bind(&self, binding: &mut Binding) -> Result<(), Setback> {
        let (info, node) = (binding.info.clone(), binding.node.clone());
        let busy = binding.profile.pre_bind.iter().any(|(_, plugin)| plugin.has_work(&info));
        if busy || !binding.waits.is_empty() {
            // Others should know where the pod is going while it is not bound yet.
            let patch = json!({"status": {"nominatedNodeName": &*node}});
            let _ = self.bind.api.patch_pod_status(&info.namespace, &info.name, &patch).await;
        }
        for (plugin, waiting) in std::mem::take(&mut binding.waits) {
            let begun = Instant::now();
            let allowed = waiting.done().await;
            self.metrics.waited(if allowed.is_ok() { "Success" } else { "Unschedulable" }, begun.elapsed());
            allowed.map_err(|words| Setback::Rejected(Status::unschedulable(words).by(plugin)))?;
        }
        let profile = binding.profile.scheduler_name.clone();
        let timed = |point: &'static str, begun: Instant, done: Result<(), Setback>| {
            let status = if done.is_ok() { "Success" } else { "Error" };
            self.metrics.ran(&profile, (point, status, begun.elapsed()));
            done
        };
        let begun = Instant::now();
        timed("PreBind", begun, self.pre_bind(binding).await)?;
        let begun = Instant::now();
        timed("Bind", begun, self.bind_by_plugin(binding).await)
    }

    async fn pre_bind(&self, binding: &mut Binding) -> Result<(), Setback> {
        for (name, plugin) in &binding.profile.pre_bind {
            let begun = Instant::now();
            let done = plugin.pre_bind(&self.bind, &binding.info, &binding.node).await;
            binding.watch.note(name, "PreBind", done.is_ok(), begun.elapsed());
            done.map_err(|words| Setback::Error(format!("running PreBind plugin {name:?}: {words}")))?;
        }
        Ok(())
    }

    async fn bind_by_plugin(&self, binding: &mut Binding) -> Result<(), Setback> {
        if let Some(bound) = self.extenders.bind(&binding.info, &binding.node).await {
            return bound.map_err(Setback::Error);
        }
        for (name, plugin) in &binding.profile.bind {
            let begun = Instant::now();
            let bound = plugin.bind(&self.bind, &binding.info, &binding.node).await;
            binding.watch.note(name, "Bind", !matches!(bound, Bound::Failed(_)), begun.elapsed());
            match bound {
                Bound::Yes => return Ok(()),
                Bound::Skip => {}
                Bound::Failed(words) => {
                    return Err(Setback::Error(format!("running Bind plugin {name:?}: {words}")));
                }
            }
        }
        Err(Setback::Error("no bind plugin takes the pod".to_owned()))
    }

    async fn do_chore(&self, chore: &Chore) -> Result<(), ApiError> {
        match chore {
            Chore::Release(claim) => {
                let status = Some(ResourceClaimStatus::default());
                let claim = ResourceClaim { status, ..(**claim).clone() };
                self.bind.api.update_resource_claim_status(&claim).await.map(drop)
            }
            Chore::Delete(claim) => dynamic_resources::delete(&*self.bind.api, claim).await,
        }
    }

    /// Takes promises of lower pods back, then removes the victims, all but the last at once.
    async fn preempt(self, preemption: Preemption) {
        let begun = Instant::now();
        for pod in &preemption.outbid {
            let patch = json!({"status": {"nominatedNodeName": null}});
            let _ = self.bind.api.patch_pod_status(&pod.namespace, &pod.name, &patch).await;
        }
        let mut failed = false;
        for victim in preemption.victims.iter().filter(|victim| !victim.terminating) {
            if let Err(error) = self.remove(&preemption, victim).await {
                tracing::warn!(%error, victim = victim.key(), "cannot remove a pod to make room");
                failed = true;
                break;
            }
        }
        self.metrics.removed(!failed, begun.elapsed());
        if failed {
            let _ = self.events.send(Event::PreemptionFailed(preemption.preemptor.uid.clone()));
        }
    }

    async fn remove(&self, preemption: &Preemption, victim: &Arc<PodInfo>) -> Result<(), ApiError> {
        let scheduler = &preemption.preemptor.scheduler_name;
        let mut condition = json!({
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": format!("{scheduler}: preempting to accommodate a higher priority pod"),
            "lastProbeTime": null,
            "lastTransitionTime": Time(self.ctx.clock.now()),
        });
        if victim.generation != 0 {
            condition["observedGeneration"] = victim.generation.into();
        }
        let patch = json!({"status": {"conditions": [condition]}});
        let api = &self.bind.api;
        let gone = |done: Result<(), ApiError>| match done {
            Err(error) if error.is_not_found() => Ok(false),
            other => other.map(|()| true),
        };
        if !gone(self.retried(|| api.patch_pod_status(&victim.namespace, &victim.name, &patch)).await)? {
            return Ok(());
        }
        if !gone(self.retried(|| api.delete_pod(victim)).await)? {
            return Ok(());
        }
        let key = Key { namespace: victim.namespace.clone(), name: victim.name.clone() };
        if let Some(about) = self.ctx.caches.pods().get_exactly(&key, &victim.uid) {
            self.ctx.events.note(reconcile::Note {
                about: reference(&*about),
                related: Some(reference(&*preemption.object)),
                severity: Severity::Normal,
                reason: "Preempted".to_owned(),
                message: format!("Preempted by pod {} on node {}", preemption.preemptor.uid, preemption.node),
                action: "Preempting",
                source: source(scheduler.to_string()),
                at: self.ctx.clock.now(),
            });
        }
        Ok(())
    }
}

/// Events name their source by a constant; schedulers of other names are few and live as long as we do.
fn source(name: String) -> &'static str {
    use std::sync::LazyLock;

    use parking_lot::Mutex;
    static OTHERS: LazyLock<Mutex<Vec<&'static str>>> = LazyLock::new(Mutex::default);
    if name == "default-scheduler" {
        return "default-scheduler";
    }
    let mut others = OTHERS.lock();
    if let Some(known) = others.iter().find(|known| **known == name) {
        return known;
    }
    let kept: &'static str = name.leak();
    others.push(kept);
    kept
}
