//! The `RestartAllContainers` action of restart rules: if a container exits with a code for which
//! its rules say so, all containers of the pod restart in their order, as in a new pod but in the
//! same sandbox.
//!
//! Upstream removes all containers for that, and records in the pod's status that the restart is in
//! progress. Here the old runs stay: every run that started before the last trigger is obsolete. So
//! there is no state to keep, a kubelet that is restarted in the middle continues where it was, and
//! the logs of the last run remain available. Pure.
//!
//! A container may start after the trigger because the exit has not been observed yet, for example
//! if its image was being pulled. It must not run beside init containers that it has to wait for.
//! So the containers after the first init container are also obsolete if they started before that
//! one restarted. Containers that wait for no init container have restarted if they started after
//! the trigger.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::plan::{is_sidecar, restart_rule};
use crate::observed::{ContainerRun, ObservedPod, State};

const RESTART_ALL_ACTION: &str = "RestartAllContainers";
/// Reason and message of a container that has to restart, and of its last run.
pub const REASON: &str = "RestartingAllContainers";
pub const MESSAGE: &str = "The container is removed because RestartAllContainers in place";

/// Decides which runs of a pod are obsolete because all containers restart.
pub struct RestartAllContainers<'a> {
    pod: &'a Pod,
    seen: &'a ObservedPod,
    /// The last time a container exit triggered a restart of all containers.
    last_trigger: Option<Timestamp>,
    /// The index of the first init container that others wait for, and when it restarted.
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
        // Exits in the future are ignored: after the clock was set back, all new runs would be
        // obsolete until then.
        let last = ends.filter(|end| seen.at.is_none_or(|now| *end <= now)).max();
        RestartAllContainers {
            pod,
            seen,
            last_trigger: last,
            first_init: last.and_then(|end| first_init_restart(pod, seen, end)),
        }
    }

    /// Whether a run started before the last restart of all containers.
    pub fn is_obsolete(&self, run: &ContainerRun) -> bool {
        let (Some(since), Some(started)) = (self.last_trigger, start_time(run)) else { return false };
        // Ephemeral containers do not restart.
        let index = containers(self.pod).position(|container| container.name == run.name);
        index.is_some_and(|index| match self.first_init {
            Some((step, next_start)) if index > step => started < next_start,
            _ => started < since,
        })
    }

    /// The newest run of a container, unless it is obsolete.
    pub fn latest(&self, name: &str) -> Option<&'a ContainerRun> {
        self.seen.latest(name).filter(|run| !self.is_obsolete(run))
    }

    /// Obsolete runs that have to be stopped: main containers first, then init containers.
    pub fn obsolete_running(&self) -> impl Iterator<Item = &'a ContainerRun> {
        let init_containers = self.pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        let main_containers = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        let named =
            main_containers.chain(init_containers).filter_map(|container| self.seen.latest(&container.name));
        named.filter(|run| run.state.is_running() && self.is_obsolete(run))
    }

    /// Whether a run is obsolete and no obsolete run has to be stopped any more, so that its
    /// container can be started.
    pub fn is_ready_to_restart(&self, run: &ContainerRun) -> bool {
        self.is_obsolete(run) && self.obsolete_running().next().is_none()
    }

    /// Whether all containers have to restart and none has done so yet.
    pub fn is_restart_pending(&self) -> bool {
        let runs = || containers(self.pod).filter_map(|container| self.seen.latest(&container.name));
        self.last_trigger.is_some() && runs().all(|run| run.state == State::Created || self.is_obsolete(run))
    }
}

/// Whether any container has a rule with this action.
pub fn has_restart_rule(pod: &Pod) -> bool {
    containers(pod).any(|container| {
        container.restart_policy_rules.iter().flatten().any(|rule| rule.action == RESTART_ALL_ACTION)
    })
}

/// The index of the first init container that others wait for, and when it first started after
/// `since` (`Timestamp::MAX` if it has not). A sidecar does not qualify: it also restarts on its
/// own, and only its last runs are known.
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
        // The start failed, so the run has no start time.
        State::Exited { since, at, .. } if since == Timestamp::UNIX_EPOCH => Some(at),
        State::Running { since } | State::Exited { since, .. } => Some(since),
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}
