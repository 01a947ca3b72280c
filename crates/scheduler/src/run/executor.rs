//! Executes the engine's actions: binding cycles, preemption, status patches and events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::{EventType, Key, reference};
use serde_json::json;

use super::Executor;
use crate::bind::{ApiError, BindStatus};
use crate::engine::{Action, BindFailure, Binding, Event, PodEvent, Preemption};
use crate::framework::{CleanupTask, Status};
use crate::plugins::dynamic_resources;
use crate::state::PodInfo;

/// How often a request with a temporary error is tried, and the first delay between attempts.
const MAX_API_ATTEMPTS: u32 = 4;
const INITIAL_RETRY_DELAY: Duration = Duration::from_millis(10);

impl Executor {
    /// Starts the execution of an action; does not wait for it.
    pub(super) fn execute(&self, action: Action) {
        match action {
            Action::RecordEvent(note) => self.record_event(note),
            Action::Bind(binding) => self.spawn(|executor| executor.run_binding_cycle(binding)),
            Action::Cleanup(task) => self.spawn(|executor| async move {
                if let Err(error) = executor.run_cleanup_task(&task).await {
                    tracing::warn!(%error, ?task, "failed to deallocate or delete ResourceClaim");
                }
            }),
            Action::Preempt(preemption) => self.spawn(|executor| executor.preempt(preemption)),
            Action::PatchStatus { namespace, name, patch } => self.spawn(|executor| async move {
                let patched = executor.retry_temporary_errors(|| executor.bind.api.patch_pod_status(&namespace, &name, &patch)).await;
                if let Err(error) = patched
                    && !error.is_not_found()
                {
                    tracing::warn!(%error, namespace = &*namespace, name = &*name, "failed to patch pod status");
                }
            }),
        }
    }

    fn spawn<F: Future<Output = ()> + Send + 'static>(&self, work: impl FnOnce(Executor) -> F) {
        let work = work(self.clone());
        let task_limit = self.task_limit.clone();
        tokio::spawn(async move {
            // `acquire_owned` fails only if the semaphore is closed, which never happens.
            let _permit = task_limit.acquire_owned().await;
            work.await;
        });
    }

    fn record_event(&self, note: PodEvent) {
        self.ctx.events.record_event(reconcile::EventRecord {
            regarding: reference(&*note.regarding),
            related: None,
            event_type: if note.warning { EventType::Warning } else { EventType::Normal },
            reason: note.reason.to_owned(),
            message: note.message,
            action: note.action,
            source: source(note.source),
            timestamp: self.ctx.clock.now(),
        });
    }

    async fn retry_temporary_errors<T, F>(&self, mut call: impl FnMut() -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let mut delay = INITIAL_RETRY_DELAY;
        for _ in 1..MAX_API_ATTEMPTS {
            match call().await {
                Err(error) if error.is_temporary() => tokio::time::sleep(delay).await,
                done => return done,
            }
            delay *= 4;
        }
        call().await
    }

    async fn run_binding_cycle(self, mut binding: Binding) {
        self.metrics.binding_started();
        let result = self.bind(&mut binding).await;
        self.metrics.binding_finished();
        let event = match result {
            Ok(()) => {
                let started = Instant::now();
                for (name, plugin) in &binding.profile.post_bind {
                    let started = Instant::now();
                    plugin.post_bind(&self.bind, &binding.info, &binding.node).await;
                    binding.timer.observe(name, "PostBind", true, started.elapsed());
                }
                let run = ("PostBind", "Success", started.elapsed());
                self.metrics.observe_extension_point(&binding.profile.scheduler_name, run);
                Event::Bound(Box::new(binding))
            }
            Err(failure) => {
                let key = Key { namespace: binding.info.namespace.clone(), name: binding.info.name.clone() };
                let current = self.ctx.caches.pods().get_exactly(&key, &binding.info.uid);
                // A pod that was bound or deleted meanwhile must not return to the queue.
                let waits = |pod: &Arc<k8s_openapi::api::core::v1::Pod>| {
                    pod.spec.as_ref().is_none_or(|spec| spec.node_name.is_none())
                };
                Event::Unbound { binding: Box::new(binding), failure, current: current.filter(waits) }
            }
        };
        let _ = self.events.send(event);
    }

    async fn bind(&self, binding: &mut Binding) -> Result<(), BindFailure> {
        let (info, node) = (binding.info.clone(), binding.node.clone());
        let has_pre_bind_work = binding.profile.pre_bind.iter().any(|(_, plugin)| plugin.has_work(&info));
        if has_pre_bind_work || !binding.permit_waits.is_empty() {
            // Written before PreBind and Permit waits, so that other components know where the pod is going.
            let patch = json!({"status": {"nominatedNodeName": &*node}});
            let _ = self.bind.api.patch_pod_status(&info.namespace, &info.name, &patch).await;
        }
        for (plugin, waiting) in std::mem::take(&mut binding.permit_waits) {
            let started = Instant::now();
            let allowed = waiting.wait().await;
            self.metrics.observe_permit_wait(
                if allowed.is_ok() { "Success" } else { "Unschedulable" },
                started.elapsed(),
            );
            allowed.map_err(|message| {
                BindFailure::Rejected(Status::unschedulable(message).with_plugin(plugin))
            })?;
        }
        let profile = binding.profile.scheduler_name.clone();
        let observe = |point: &'static str, started: Instant, done: Result<(), BindFailure>| {
            let status = if done.is_ok() { "Success" } else { "Error" };
            self.metrics.observe_extension_point(&profile, (point, status, started.elapsed()));
            done
        };
        let started = Instant::now();
        observe("PreBind", started, self.pre_bind(binding).await)?;
        let started = Instant::now();
        observe("Bind", started, self.bind_by_plugin(binding).await)
    }

    async fn pre_bind(&self, binding: &mut Binding) -> Result<(), BindFailure> {
        for (name, plugin) in &binding.profile.pre_bind {
            let started = Instant::now();
            let done = plugin.pre_bind(&self.bind, &binding.info, &binding.node).await;
            binding.timer.observe(name, "PreBind", done.is_ok(), started.elapsed());
            done.map_err(|message| {
                BindFailure::Error(format!("running PreBind plugin {name:?}: {message}"))
            })?;
        }
        Ok(())
    }

    async fn bind_by_plugin(&self, binding: &mut Binding) -> Result<(), BindFailure> {
        if let Some(bound) = self.extenders.bind(&binding.info, &binding.node).await {
            return bound.map_err(BindFailure::Error);
        }
        for (name, plugin) in &binding.profile.bind {
            let started = Instant::now();
            let bound = plugin.bind(&self.bind, &binding.info, &binding.node).await;
            binding.timer.observe(name, "Bind", !matches!(bound, BindStatus::Failed(_)), started.elapsed());
            match bound {
                BindStatus::Bound => return Ok(()),
                BindStatus::Skip => {}
                BindStatus::Failed(message) => {
                    return Err(BindFailure::Error(format!("running Bind plugin {name:?}: {message}")));
                }
            }
        }
        Err(BindFailure::Error("all Bind plugins skipped the pod".to_owned()))
    }

    async fn run_cleanup_task(&self, task: &CleanupTask) -> Result<(), ApiError> {
        match task {
            CleanupTask::Release(claim) => {
                let status = Some(ResourceClaimStatus::default());
                let claim = ResourceClaim { status, ..(**claim).clone() };
                self.bind.api.update_resource_claim_status(&claim).await.map(drop)
            }
            CleanupTask::Delete(claim) => dynamic_resources::delete(&*self.bind.api, claim).await,
        }
    }

    /// Clears the nominations of pods with lower priority, then deletes the victims one by one. If one cannot
    /// be deleted, the preemptor is activated again.
    async fn preempt(self, preemption: Preemption) {
        let started = Instant::now();
        for pod in &preemption.lower_priority_nominated_pods {
            let patch = json!({"status": {"nominatedNodeName": null}});
            let _ = self.bind.api.patch_pod_status(&pod.namespace, &pod.name, &patch).await;
        }
        let mut failed = false;
        for victim in preemption.victims.iter().filter(|victim| !victim.terminating) {
            if let Err(error) = self.preempt_pod(&preemption, victim).await {
                tracing::warn!(%error, victim = victim.key(), "failed to delete preemption victim");
                failed = true;
                break;
            }
        }
        self.metrics.observe_victim_deletion(!failed, started.elapsed());
        if failed {
            let _ = self.events.send(Event::PreemptionFailed(preemption.preemptor.uid.clone()));
        }
    }

    async fn preempt_pod(&self, preemption: &Preemption, victim: &Arc<PodInfo>) -> Result<(), ApiError> {
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
        let is_found = |done: Result<(), ApiError>| match done {
            Err(error) if error.is_not_found() => Ok(false),
            other => other.map(|()| true),
        };
        if !is_found(
            self.retry_temporary_errors(|| api.patch_pod_status(&victim.namespace, &victim.name, &patch))
                .await,
        )? {
            return Ok(());
        }
        if !is_found(self.retry_temporary_errors(|| api.delete_pod(victim)).await)? {
            return Ok(());
        }
        let key = Key { namespace: victim.namespace.clone(), name: victim.name.clone() };
        if let Some(about) = self.ctx.caches.pods().get_exactly(&key, &victim.uid) {
            self.ctx.events.record_event(reconcile::EventRecord {
                regarding: reference(&*about),
                related: Some(reference(&*preemption.object)),
                event_type: EventType::Normal,
                reason: "Preempted".to_owned(),
                message: format!("Preempted by pod {} on node {}", preemption.preemptor.uid, preemption.node),
                action: "Preempting",
                source: source(scheduler.to_string()),
                timestamp: self.ctx.clock.now(),
            });
        }
        Ok(())
    }
}

/// Leaks the name because event sources are `&'static str`. Custom scheduler names are few and live as long
/// as the process.
fn source(name: String) -> &'static str {
    use std::sync::LazyLock;

    use parking_lot::Mutex;
    static SCHEDULER_NAMES: LazyLock<Mutex<Vec<&'static str>>> = LazyLock::new(Mutex::default);
    if name == "default-scheduler" {
        return "default-scheduler";
    }
    let mut names = SCHEDULER_NAMES.lock();
    if let Some(known) = names.iter().find(|known| **known == name) {
        return known;
    }
    let name_static: &'static str = name.leak();
    names.push(name_static);
    name_static
}
