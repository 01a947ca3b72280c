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

use crate::algorithm::{Algorithm, Diagnosis, Extenders, Failure, FitError};
use crate::bind::Waiting;
use crate::config::{Config, ConfigError};
use crate::framework::registry::Row;
use crate::framework::{Chore, Cycle, Permission, Profile, Status};
use crate::metrics::Metrics;
use crate::metrics::stopwatch::Stopwatch;
use crate::queue::{Queue, QueuedPod};
use crate::state::{PodInfo, State};

/// How long the event of a binding that was answered may take.
const UNSEEN: SignedDuration = SignedDuration::from_mins(15);

/// What is to be done.
pub enum Action {
    Bind(Binding),
    Note(Note),
    PatchStatus { namespace: Arc<str>, name: Arc<str>, patch: Value },
    Preempt(Preemption),
    Chore(Chore),
}

/// A pod on its way to a node.
pub struct Binding {
    pub profile: Arc<Profile>,
    pub pod: QueuedPod,
    /// The pod as it is assumed, on its node.
    pub info: Arc<PodInfo>,
    pub node: Arc<str>,
    /// What must be waited for first, by plugin.
    pub waits: Vec<(&'static str, Waiting)>,
    /// Measures its plugins.
    pub watch: Stopwatch,
}

/// Something to tell about a pod.
pub struct Note {
    pub about: Arc<core::Pod>,
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
    pub outbid: Vec<Arc<PodInfo>>,
}

/// Why a pod did not get its node after all.
pub enum Setback {
    /// A plugin turned it away.
    Rejected(Status),
    /// Something went wrong.
    Error(String),
}

/// The scheduler without its hands.
pub struct Engine {
    pub state: State,
    pub queue: Queue,
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
        rows: &[Row],
        extenders: Arc<dyn Extenders>,
        seed: u64,
    ) -> Result<Engine, ConfigError> {
        let profiles = config.profiles(rows)?;
        let (initial, max) = config.backoff();
        let queue = Queue::new(&profiles, initial, max);
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
    pub fn look(&self) {
        self.metrics.look(&self.queue, &self.state, self.profiles.values().cloned());
    }

    /// Moves what time has moved.
    pub fn tick(&mut self, now: Timestamp) {
        self.queue.tick(&self.state, now);
        self.state.expire(now);
    }

    /// Tries the next pod. Says whether there was one.
    pub fn step(&mut self, now: Timestamp) -> bool {
        let Some(pod) = self.queue.pop() else { return false };
        if pod.info.terminating {
            let message = format!("skip schedule deleting pod: {}", pod.info.key());
            self.note(&pod, true, "FailedScheduling", "Scheduling", message);
            return true;
        }
        if self.state.is_assumed(&pod.info.uid) {
            return true;
        }
        let Some(profile) = self.profiles.get(&*pod.info.scheduler_name).cloned() else { return true };
        self.state.refresh();
        let cycle = Cycle { state: &self.state, pod: &pod.info, object: &pod.object };
        let found = self.algorithm.schedule(&profile, &cycle, &self.queue.nominator, &*self.extenders);
        self.actions.extend(self.algorithm.chores.drain(..).map(Action::Chore));
        match found {
            Ok(placement) => self.placed(&profile, pod, &placement.node, now),
            Err(Failure::NoNodes) => {
                let message = "no nodes available to schedule pods".to_owned();
                self.failed(&profile, pod, Setback::Rejected(Status::unresolvable(message)), None, true, now);
            }
            Err(Failure::Error(words)) => self.failed(&profile, pod, Setback::Error(words), None, true, now),
            Err(Failure::Unfit { error, rescue, clear }) => {
                self.unfit(&profile, pod, &error, rescue, clear, now);
            }
        }
        true
    }

    /// A node was found: it is taken at once, the binding comes later.
    fn placed(&mut self, profile: &Arc<Profile>, pod: QueuedPod, node: &Arc<str>, now: Timestamp) {
        let mut info = (*pod.info).clone();
        info.node_name = Some(node.clone());
        let info = Arc::new(info);
        self.state.assume(info.clone(), node);
        self.queue.nominator.remove(&info.uid);
        let mut refused = None;
        let watch = self.algorithm.watch.clone();
        let begun = Instant::now();
        for (name, plugin) in &profile.reserve {
            let reserve = || plugin.reserve(&mut self.state, &info, node);
            let status = watch.time(name, "Reserve", reserve, |status| status.code.name());
            if !status.is_success() {
                refused = Some(status.by(name));
                break;
            }
        }
        let told = |refused: &Option<Status>| if refused.is_none() { "Success" } else { "Unschedulable" };
        self.metrics.ran(&profile.scheduler_name, ("Reserve", told(&refused), begun.elapsed()));
        let begun = Instant::now();
        let mut waits = Vec::new();
        for (name, plugin) in profile.permit.iter().filter(|_| refused.is_none()) {
            match watch.time(name, "Permit", || plugin.permit(&info, node), Permission::name) {
                Permission::Allow => {}
                Permission::Wait(waiting) => waits.push((*name, waiting)),
                Permission::Reject(status) => {
                    refused = Some(status.by(name));
                    break;
                }
            }
        }
        self.metrics.ran(&profile.scheduler_name, ("Permit", told(&refused), begun.elapsed()));
        match refused {
            None => {
                let (profile, node) = (profile.clone(), node.clone());
                self.actions.push(Action::Bind(Binding { profile, pod, info, node, waits, watch }));
            }
            Some(status) => {
                self.give_back(profile, &info, node);
                let setback = if status.is_rejected() {
                    Setback::Rejected(status)
                } else {
                    Setback::Error(status.message())
                };
                self.set_back(profile, pod, node, setback, now);
            }
        }
    }

    /// Undoes what was reserved and assumed.
    fn give_back(&mut self, profile: &Profile, info: &PodInfo, node: &Arc<str>) {
        for (_, plugin) in profile.reserve.iter().rev() {
            plugin.unreserve(&mut self.state, info, node);
        }
        self.state.forget(&info.uid);
    }

    /// A pod that had a node has none again.
    fn set_back(
        &mut self,
        profile: &Arc<Profile>,
        pod: QueuedPod,
        node: &Arc<str>,
        setback: Setback,
        now: Timestamp,
    ) {
        match setback {
            Setback::Rejected(status) => {
                let mut diagnosis = Diagnosis::default();
                let id = self.state.node_named(node).map_or(0, |node| node.id);
                diagnosis.add(id, status);
                self.unfit(profile, pod, &FitError { nodes: 1, diagnosis }, None, true, now);
            }
            error => self.failed(profile, pod, error, None, true, now),
        }
    }

    fn note(
        &mut self,
        pod: &QueuedPod,
        warning: bool,
        reason: &'static str,
        action: &'static str,
        message: String,
    ) {
        self.actions.push(Action::Note(Note {
            about: pod.object.clone(),
            warning,
            reason,
            action,
            message,
            source: pod.info.scheduler_name.to_string(),
        }));
    }
}
