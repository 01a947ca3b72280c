//! The scheduler as a machine: events go in, actions come out.
//!
//! Owns what is known and who waits. Decides, and leaves acting to [`crate::run`]: no clock, no I/O.

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

/// How long the event of a binding that was answered may take.
const ASSUMED_POD_TTL: SignedDuration = SignedDuration::from_mins(15);

/// What is to be done.
pub enum Action {
    Bind(Binding),
    RecordEvent(PodEvent),
    PatchStatus { namespace: Arc<str>, name: Arc<str>, patch: Value },
    Preempt(Preemption),
    Cleanup(CleanupTask),
}

/// A pod on its way to a node.
pub struct Binding {
    pub profile: Arc<Profile>,
    pub pod: QueuedPod,
    /// The pod as it is assumed, on its node.
    pub info: Arc<PodInfo>,
    pub node: Arc<str>,
    /// What must be waited for first, by plugin.
    pub permit_waits: Vec<(&'static str, PermitWait)>,
    /// Measures its plugins.
    pub timer: PluginTimer,
}

/// Something to tell about a pod.
pub struct PodEvent {
    pub regarding: Arc<core::Pod>,
    pub warning: bool,
    pub reason: &'static str,
    pub action: &'static str,
    pub message: String,
    pub source: String,
}

/// Pods that must go to make room for another.
pub struct Preemption {
    pub preemptor: Arc<PodInfo>,
    pub object: Arc<core::Pod>,
    pub node: Arc<str>,
    pub victims: Vec<Arc<PodInfo>>,
    /// Pods of lower priority that were promised the node.
    pub lower_priority_nominated_pods: Vec<Arc<PodInfo>>,
}

/// Why a pod did not get its node after all.
pub enum BindFailure {
    /// A plugin turned it away.
    Rejected(Status),
    /// Something went wrong.
    Error(String),
}

/// The scheduler without its hands.
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
    /// A scheduler that knows nothing yet.
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

    /// What has been decided since the last time.
    pub fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Counts how things stand.
    pub fn update_metrics(&self) {
        self.metrics.update(&self.queue, &self.state, self.profiles.values().cloned());
    }

    /// Moves what time has moved.
    pub fn tick(&mut self, now: Timestamp) {
        self.queue.flush(&self.state, now);
        self.state.remove_expired_assumed_pods(now);
    }

    /// Tries the next pod. Says whether there was one.
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

    /// A node was found: it is taken at once, the binding comes later.
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

    /// Undoes what was reserved and assumed.
    fn unreserve_and_forget(&mut self, profile: &Profile, info: &PodInfo, node: &Arc<str>) {
        for (_, plugin) in profile.reserve.iter().rev() {
            plugin.unreserve(&mut self.state, info, node);
        }
        self.state.forget_pod(&info.uid);
    }

    /// A pod that had a node has none again.
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
