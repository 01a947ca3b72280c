//! The scheduler's core as a state machine: [`Event`]s go in, [`Action`]s come out.
//!
//! Owns the cache of the cluster and the scheduling queue. It has no clock and does no I/O: [`crate::run`]
//! executes the actions.

mod events;
mod failure;
mod objects;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1 as core;
use serde_json::Value;

pub use events::{Delta, Event};

use crate::algorithm::{Algorithm, Diagnosis, Extenders, FitError, ScheduleFailure};
use crate::bind::PermitWait;
use crate::config::{Config, ConfigError};
use crate::framework::registry::RegistryEntry;
use crate::framework::{CleanupTask, Cycle, PermitResult, Profile, Status};
use crate::metrics::Metrics;
use crate::metrics::plugin_timer::PluginTimer;
use crate::queue::{QueuedPod, SchedulingQueue};
use crate::state::{PodInfo, State};

/// How long an assumed pod may stay in the cache after a successful binding without an update event.
const ASSUMED_POD_TTL: SignedDuration = SignedDuration::from_mins(15);

/// An action for [`crate::run`] to execute.
pub enum Action {
    Bind(Binding),
    RecordEvent(PodEvent),
    PatchStatus { namespace: Arc<str>, name: Arc<str>, patch: Value },
    Preempt(Preemption),
    Cleanup(CleanupTask),
}

/// A pod in its binding cycle.
pub struct Binding {
    pub profile: Arc<Profile>,
    pub pod: QueuedPod,
    /// The assumed pod, with its node name set.
    pub info: Arc<PodInfo>,
    pub node: Arc<str>,
    /// What the Permit plugins wait for, by plugin.
    pub permit_waits: Vec<(&'static str, PermitWait)>,
    /// Measures the plugins of the binding cycle.
    pub timer: PluginTimer,
}

/// An Event to record about a pod.
pub struct PodEvent {
    pub regarding: Arc<core::Pod>,
    pub warning: bool,
    pub reason: &'static str,
    pub action: &'static str,
    pub message: String,
    pub source: String,
}

/// The victims of a preemption.
pub struct Preemption {
    pub preemptor: Arc<PodInfo>,
    pub object: Arc<core::Pod>,
    pub node: Arc<str>,
    pub victims: Vec<Arc<PodInfo>>,
    /// Pods of lower priority that are nominated to the node. Their nomination is cleared.
    pub lower_priority_nominated_pods: Vec<Arc<PodInfo>>,
}

/// Why the binding cycle of a pod failed.
pub enum BindFailure {
    /// A plugin rejected the pod.
    Rejected(Status),
    /// An internal error.
    Error(String),
}

/// The scheduler's state machine.
pub struct Engine {
    pub state: State,
    pub queue: SchedulingQueue,
    algorithm: Algorithm,
    profiles: HashMap<Arc<str>, Arc<Profile>>,
    extenders: Arc<dyn Extenders>,
    pub metrics: Arc<Metrics>,
    actions: Vec<Action>,
}

impl Engine {
    /// Creates a scheduler with an empty cache.
    pub fn new(
        config: &Config,
        rows: &[RegistryEntry],
        extenders: Arc<dyn Extenders>,
        seed: u64,
    ) -> Result<Engine, ConfigError> {
        let profiles = config.profiles(rows)?;
        let (initial, max) = config.backoff();
        let queue = SchedulingQueue::new(&profiles, initial, max);
        let metrics = queue.metrics.clone();
        let mut algorithm = Algorithm::new(config.percentage_of_nodes_to_score, seed);
        algorithm.metrics = metrics.clone();
        let profiles =
            profiles.into_iter().map(|profile| (profile.scheduler_name.clone(), Arc::new(profile)));
        Ok(Engine {
            state: State::default(),
            queue,
            algorithm,
            profiles: profiles.collect(),
            extenders,
            metrics,
            actions: Vec::new(),
        })
    }

    /// Takes the actions that were decided since the last call.
    pub fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Updates the gauges.
    pub fn update_metrics(&self) {
        self.metrics.update(&self.queue, &self.state, self.profiles.values().cloned());
    }

    /// Flushes the queue and expires assumed pods.
    pub fn tick(&mut self, now: Timestamp) {
        self.queue.flush(&self.state, now);
        self.state.remove_expired_assumed_pods(now);
    }

    /// Runs the scheduling cycle of the next pod (upstream's `ScheduleOne`). Returns whether there was one.
    pub fn schedule_one(&mut self, now: Timestamp) -> bool {
        let Some(pod) = self.queue.pop() else { return false };
        if pod.info.terminating {
            let message = format!("skip schedule deleting pod: {}", pod.info.key());
            self.record_event(&pod, true, "FailedScheduling", "Scheduling", message);
            return true;
        }
        if self.state.is_assumed(&pod.info.uid) {
            return true;
        }
        let Some(profile) = self.profiles.get(&*pod.info.scheduler_name).cloned() else { return true };
        self.state.refresh();
        let cycle = Cycle { state: &self.state, pod: &pod.info, object: &pod.object };
        let found = self.algorithm.schedule(&profile, &cycle, &self.queue.nominator, &*self.extenders);
        self.actions.extend(self.algorithm.cleanup_tasks.drain(..).map(Action::Cleanup));
        match found {
            Ok(placement) => self.assume_and_reserve(&profile, pod, &placement.node, now),
            Err(ScheduleFailure::NoNodes) => {
                let message = "no nodes available to schedule pods".to_owned();
                self.handle_error(
                    &profile,
                    pod,
                    BindFailure::Rejected(Status::unresolvable(message)),
                    None,
                    true,
                    now,
                );
            }
            Err(ScheduleFailure::Error(words)) => {
                self.handle_error(&profile, pod, BindFailure::Error(words), None, true, now)
            }
            Err(ScheduleFailure::Unschedulable { error, nomination: rescue, clear_nomination: clear }) => {
                self.handle_unschedulable(&profile, pod, &error, rescue, clear, now);
            }
        }
        true
    }

    /// Assumes the pod on the node and runs the Reserve and Permit plugins. The cache counts the pod from
    /// here on; the binding follows asynchronously.
    fn assume_and_reserve(
        &mut self,
        profile: &Arc<Profile>,
        pod: QueuedPod,
        node: &Arc<str>,
        now: Timestamp,
    ) {
        let mut info = (*pod.info).clone();
        info.node_name = Some(node.clone());
        let info = Arc::new(info);
        self.state.assume_pod(info.clone(), node);
        self.queue.nominator.remove(&info.uid);
        let mut rejection = None;
        let timer = self.algorithm.timer.clone();
        let started = Instant::now();
        for (name, plugin) in &profile.reserve {
            let reserve = || plugin.reserve(&mut self.state, &info, node);
            let status = timer.time(name, "Reserve", reserve, |status| status.code.name());
            if !status.is_success() {
                rejection = Some(status.with_plugin(name));
                break;
            }
        }
        let status_name =
            |rejection: &Option<Status>| if rejection.is_none() { "Success" } else { "Unschedulable" };
        self.metrics.observe_extension_point(
            &profile.scheduler_name,
            ("Reserve", status_name(&rejection), started.elapsed()),
        );
        let started = Instant::now();
        let mut permit_waits = Vec::new();
        for (name, plugin) in profile.permit.iter().filter(|_| rejection.is_none()) {
            match timer.time(name, "Permit", || plugin.permit(&info, node), PermitResult::name) {
                PermitResult::Allow => {}
                PermitResult::Wait(waiting) => permit_waits.push((*name, waiting)),
                PermitResult::Reject(status) => {
                    rejection = Some(status.with_plugin(name));
                    break;
                }
            }
        }
        self.metrics.observe_extension_point(
            &profile.scheduler_name,
            ("Permit", status_name(&rejection), started.elapsed()),
        );
        match rejection {
            None => {
                let (profile, node) = (profile.clone(), node.clone());
                self.actions.push(Action::Bind(Binding { profile, pod, info, node, permit_waits, timer }));
            }
            Some(status) => {
                self.unreserve_and_forget(profile, &info, node);
                let failure = if status.is_rejected() {
                    BindFailure::Rejected(status)
                } else {
                    BindFailure::Error(status.message())
                };
                self.handle_bind_failure(profile, pod, node, failure, now);
            }
        }
    }

    /// Runs the Unreserve plugins in reverse order and removes the assumed pod from the cache.
    fn unreserve_and_forget(&mut self, profile: &Profile, info: &PodInfo, node: &Arc<str>) {
        for (_, plugin) in profile.reserve.iter().rev() {
            plugin.unreserve(&mut self.state, info, node);
        }
        self.state.forget_pod(&info.uid);
    }

    /// Reports that an assumed pod was not bound and returns it to the queue.
    fn handle_bind_failure(
        &mut self,
        profile: &Arc<Profile>,
        pod: QueuedPod,
        node: &Arc<str>,
        failure: BindFailure,
        now: Timestamp,
    ) {
        match failure {
            BindFailure::Rejected(status) => {
                let mut diagnosis = Diagnosis::default();
                let id = self.state.node_by_name(node).map_or(0, |node| node.id);
                diagnosis.add(id, status);
                self.handle_unschedulable(profile, pod, &FitError { nodes: 1, diagnosis }, None, true, now);
            }
            error => self.handle_error(profile, pod, error, None, true, now),
        }
    }

    fn record_event(
        &mut self,
        pod: &QueuedPod,
        warning: bool,
        reason: &'static str,
        action: &'static str,
        message: String,
    ) {
        self.actions.push(Action::RecordEvent(PodEvent {
            regarding: pod.object.clone(),
            warning,
            reason,
            action,
            message,
            source: pod.info.scheduler_name.to_string(),
        }));
    }
}
