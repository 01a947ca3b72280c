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

use super::plan::{is_sidecar, rule};
use crate::observed::{Observed, Ran, State};

const ACTION: &str = "RestartAllContainers";
/// What is said of a container that has to begin anew, and of its last run.
pub const REASON: &str = "RestartingAllContainers";
pub const MESSAGE: &str = "The container is removed because RestartAllContainers in place";

/// What of a pod's containers is of the past.
pub struct Anew<'a> {
    pod: &'a Pod,
    seen: &'a Observed,
    /// The last time that all had to begin anew.
    since: Option<Timestamp>,
    /// The place of the first container that has to end before others begin, and when it did begin anew.
    step: Option<(usize, Timestamp)>,
}

impl<'a> Anew<'a> {
    pub fn of(pod: &'a Pod, seen: &'a Observed) -> Anew<'a> {
        let ends = if can_happen(pod) { seen.containers.as_slice() } else { &[] };
        let ends = ends.iter().filter_map(|run| {
            let State::Exited { at, code, .. } = run.state else { return None };
            let container = containers(pod).find(|container| container.name == run.name)?;
            rule(container, code).filter(|rule| rule.action == ACTION).map(|_| at)
        });
        // Once a clock is set back, all that begins would be of the past for as long as an end seems to be yet to come.
        let last = ends.filter(|end| seen.at.is_none_or(|now| *end <= now)).max();
        Anew { pod, seen, since: last, step: last.and_then(|end| first_step(pod, seen, end)) }
    }

    /// Whether a run is from before all had to begin anew.
    pub fn is_past(&self, run: &Ran) -> bool {
        let (Some(since), Some(begun)) = (self.since, begun(run)) else { return false };
        // Those for having a look are not the pod's own.
        let place = containers(self.pod).position(|container| container.name == run.name);
        place.is_some_and(|place| match self.step {
            Some((step, again)) if place > step => begun < again,
            _ => begun < since,
        })
    }

    /// The newest run of a container that is not of the past.
    pub fn latest(&self, name: &str) -> Option<&'a Ran> {
        self.seen.latest(name).filter(|run| !self.is_past(run))
    }

    /// What has to be stopped: the main containers, then those before them.
    pub fn still_running(&self) -> impl Iterator<Item = &'a Ran> {
        let inits = self.pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        let mains = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        let named = mains.chain(inits).filter_map(|container| self.seen.latest(&container.name));
        named.filter(|run| run.state.is_running() && self.is_past(run))
    }

    /// Whether a run is over and what comes after it has only to be started.
    pub fn is_cleared(&self, run: &Ran) -> bool {
        self.is_past(run) && self.still_running().next().is_none()
    }

    /// Whether nothing has begun anew yet although it has to.
    pub fn is_due(&self) -> bool {
        let runs = || containers(self.pod).filter_map(|container| self.seen.latest(&container.name));
        self.since.is_some() && runs().all(|run| run.state == State::Created || self.is_past(run))
    }
}

/// Whether any container has a rule for it.
pub fn can_happen(pod: &Pod) -> bool {
    containers(pod)
        .any(|container| container.restart_policy_rules.iter().flatten().any(|rule| rule.action == ACTION))
}

/// Where the first container is that others wait for the end of, and when it first began after that time, if it did.
/// A companion would not do: it begins anew by itself, and only its last runs are known.
fn first_step(pod: &Pod, seen: &Observed, since: Timestamp) -> Option<(usize, Timestamp)> {
    let inits = pod.spec.as_ref()?.init_containers.as_ref()?;
    let (place, step) = inits.iter().enumerate().find(|(_, container)| !is_sidecar(container))?;
    let runs = seen.containers.iter().filter(|run| run.name == step.name);
    let again = runs.filter_map(begun).filter(|begun| *begun >= since).min();
    Some((place, again.unwrap_or(Timestamp::MAX)))
}

fn begun(run: &Ran) -> Option<Timestamp> {
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
