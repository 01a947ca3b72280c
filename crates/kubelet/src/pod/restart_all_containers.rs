//! When one container ends in a way for which its rules say so, all containers of the pod begin anew, in their order, as in
//! a new pod in the same place.
//!
//! Upstream removes all of them for that, and remembers in the pod's status that it is at it. Here they stay as what was
//! before: whatever began before the last such end is of the past. So nothing has to be remembered, a node that is stopped
//! in the midst of it goes on where it was, and logs of the last run can still be read. Pure.
//!
//! Something may begin after that end because nobody has seen it yet: its image was being pulled meanwhile. It must not run
//! beside init containers that it had to wait for, so what stands behind the first of them is of the past too if it began
//! before that one did again. Those that wait for no such thing have begun anew if they began after the end.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::plan::{is_sidecar, restart_rule};
use crate::observed::{ContainerRun, ObservedPod, State};

const RESTART_ALL_ACTION: &str = "RestartAllContainers";
/// What is said of a container that has to begin anew, and of its last run.
pub const REASON: &str = "RestartingAllContainers";
pub const MESSAGE: &str = "The container is removed because RestartAllContainers in place";

/// What of a pod's containers is of the past.
pub struct RestartAllContainers<'a> {
    pod: &'a Pod,
    seen: &'a ObservedPod,
    /// The last time that all had to begin anew.
    last_trigger: Option<Timestamp>,
    /// The place of the first container that has to end before others begin, and when it did begin anew.
    first_init: Option<(usize, Timestamp)>,
}

impl<'a> RestartAllContainers<'a> {
    pub fn of(pod: &'a Pod, seen: &'a ObservedPod) -> RestartAllContainers<'a> {
        let ends = if has_restart_rule(pod) { seen.containers.as_slice() } else { &[] };
        let ends = ends.iter().filter_map(|run| {
            let State::Exited { at, code, .. } = run.state else { return None };
            let container = containers(pod).find(|container| container.name == run.name)?;
            restart_rule(container, code).filter(|rule| rule.action == RESTART_ALL_ACTION).map(|_| at)
        });
        // Once a clock is set back, all that begins would be of the past for as long as an end seems to be yet to come.
        let last = ends.filter(|end| seen.at.is_none_or(|now| *end <= now)).max();
        RestartAllContainers {
            pod,
            seen,
            last_trigger: last,
            first_init: last.and_then(|end| first_init_restart(pod, seen, end)),
        }
    }

    /// Whether a run is from before all had to begin anew.
    pub fn is_obsolete(&self, run: &ContainerRun) -> bool {
        let (Some(since), Some(started)) = (self.last_trigger, start_time(run)) else { return false };
        // Those for having a look are not the pod's own.
        let index = containers(self.pod).position(|container| container.name == run.name);
        index.is_some_and(|index| match self.first_init {
            Some((step, next_start)) if index > step => started < next_start,
            _ => started < since,
        })
    }

    /// The newest run of a container that is not of the past.
    pub fn latest(&self, name: &str) -> Option<&'a ContainerRun> {
        self.seen.latest(name).filter(|run| !self.is_obsolete(run))
    }

    /// What has to be stopped: the main containers, then those before them.
    pub fn obsolete_running(&self) -> impl Iterator<Item = &'a ContainerRun> {
        let init_containers = self.pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        let main_containers = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        let named =
            main_containers.chain(init_containers).filter_map(|container| self.seen.latest(&container.name));
        named.filter(|run| run.state.is_running() && self.is_obsolete(run))
    }

    /// Whether a run is over and what comes after it has only to be started.
    pub fn is_ready_to_restart(&self, run: &ContainerRun) -> bool {
        self.is_obsolete(run) && self.obsolete_running().next().is_none()
    }

    /// Whether nothing has begun anew yet although it has to.
    pub fn is_restart_pending(&self) -> bool {
        let runs = || containers(self.pod).filter_map(|container| self.seen.latest(&container.name));
        self.last_trigger.is_some() && runs().all(|run| run.state == State::Created || self.is_obsolete(run))
    }
}

/// Whether any container has a rule for it.
pub fn has_restart_rule(pod: &Pod) -> bool {
    containers(pod).any(|container| {
        container.restart_policy_rules.iter().flatten().any(|rule| rule.action == RESTART_ALL_ACTION)
    })
}

/// Where the first container is that others wait for the end of, and when it first began after that time, if it did.
/// A companion would not do: it begins anew by itself, and only its last runs are known.
fn first_init_restart(pod: &Pod, seen: &ObservedPod, since: Timestamp) -> Option<(usize, Timestamp)> {
    let init_containers = pod.spec.as_ref()?.init_containers.as_ref()?;
    let (index, step) = init_containers.iter().enumerate().find(|(_, container)| !is_sidecar(container))?;
    let runs = seen.containers.iter().filter(|run| run.name == step.name);
    let next_start = runs.filter_map(start_time).filter(|started| *started >= since).min();
    Some((index, next_start.unwrap_or(Timestamp::MAX)))
}

fn start_time(run: &ContainerRun) -> Option<Timestamp> {
    match run.state {
        State::Created => None,
        // It could not be started.
        State::Exited { since, at, .. } if since == Timestamp::UNIX_EPOCH => Some(at),
        State::Running { since } | State::Exited { since, .. } => Some(since),
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}
