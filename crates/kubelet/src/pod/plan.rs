//! Decides what a pod needs next. Pure: everything known is an argument, the time too.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, ContainerRestartRule, Pod, PodSpec};
use reconcile::Object as _;

use super::anew::Anew;
use super::back_off::{failure, restart_at, waits_from};
use super::resize::{self, Resize};
use crate::memory::{Failure, Memory};
use crate::observed::{Observed, Ran, Sandbox, State};

/// One thing to do. The order matters; what cannot be done ends the round.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make what the containers share.
    MakeSandbox {
        attempt: u32,
    },
    Start {
        container: String,
        attempt: u32,
    },
    /// Those of one plan are stopped beside each other.
    Stop(Stop),
    /// What it may use has changed while it runs.
    Resize(Resize),
    StopSandbox {
        id: String,
    },
    /// Everything is over and the pod is to go: clear away what is left of it.
    Clear,
    /// Look again then, although nothing happens.
    Recheck(Timestamp),
}

/// A run that is to end.
#[derive(Clone, Debug, PartialEq)]
pub struct Stop {
    pub id: String,
    pub container: String,
    pub why: Why,
    /// The runs that it is to outlive, as long as there is time.
    pub after: Vec<String>,
}

impl Stop {
    fn new(run: &Ran, why: Why) -> Stop {
        Stop { id: run.id.clone(), container: run.name.clone(), why, after: Vec::new() }
    }
}

/// Why a container is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The pod is being deleted, or has been ended.
    PodEnds,
    /// Its liveness or startup probe has failed.
    Unhealthy,
    /// What it lived in is gone.
    SandboxGone,
    /// It is to be made from something else.
    Changed,
    /// It is to have something else, and wants to be started anew for that.
    Resized,
    /// Another has ended in a way that all are to begin anew for.
    AllBeginAnew,
}

/// Whether the pod has said its last word: nothing in it will ever be started again.
pub fn is_finished(pod: &Pod, seen: &Observed, memory: &Memory) -> bool {
    if memory.ended.is_some() {
        return true;
    }
    let Some(spec) = &pod.spec else { return true };
    if failed_init(pod, seen) {
        return true;
    }
    let anew = Anew::of(pod, seen);
    let over = |container: &Container| {
        let run = anew.latest(&container.name);
        run.is_some_and(|run| run.state.is_exited() && !restarts_after(pod, container, run, memory))
    };
    !spec.containers.is_empty() && spec.containers.iter().all(over)
}

/// When the pod has been at it for as long as it may.
pub fn deadline(pod: &Pod) -> Option<Timestamp> {
    let seconds = pod.spec.as_ref()?.active_deadline_seconds?;
    let start = pod.status.as_ref()?.start_time.as_ref()?.0;
    start.checked_add(SignedDuration::from_secs(seconds)).ok()
}

pub fn plan(pod: &Pod, seen: &Observed, memory: &Memory, now: Timestamp) -> Vec<Action> {
    let mut actions = next(pod, seen, memory, now);
    if memory.ended.is_none() {
        actions.extend(deadline(pod).filter(|deadline| *deadline > now).map(Action::Recheck));
    }
    // What is said about a failure changes once nothing is tried for a while.
    let quiet = memory.failures.values().filter_map(Failure::quiet_from);
    actions.extend(quiet.filter(|from| *from > now).map(Action::Recheck));
    actions
}

fn next(pod: &Pod, seen: &Observed, memory: &Memory, now: Timestamp) -> Vec<Action> {
    if pod.is_deleting() || memory.is_suspended || is_finished(pod, seen, memory) {
        return end(pod, seen);
    }
    let Some(sandbox) = seen.sandbox() else { return begin_anew(pod, seen, memory, now) };
    // What runs in older sandboxes has nothing to stand on; a runtime tells of no such thing, but may one day.
    let mut actions = Vec::new();
    for old in seen.sandboxes.iter().filter(|old| old.ready && old.id != sandbox.id) {
        actions.push(Action::StopSandbox { id: old.id.clone() });
    }
    let look = Look { pod, seen, sandbox, anew: Anew::of(pod, seen), memory, now };
    let past: Vec<&Ran> = look.anew.still_running().collect();
    if !past.is_empty() {
        actions.extend(past.iter().map(|run| Action::Stop(Stop::new(run, Why::AllBeginAnew))));
        return actions;
    }
    let spec = pod.spec.clone().unwrap_or_default();
    // Whoever wants to have a look waits for nobody, and has one look.
    for container in spec.ephemeral_containers.iter().flatten().map(super::ephemeral) {
        if seen.latest(&container.name).is_none_or(|run| run.state == State::Created) {
            look.start(&container, &mut actions);
        }
    }
    if look.prepare(&spec, &mut actions) {
        look.run(&spec.containers, &mut actions);
    }
    let starts = |action: &Action| matches!(action, Action::Start { .. });
    let first = actions.iter().position(starts).unwrap_or(actions.len());
    if let Some(resize) = look.resize() {
        actions.insert(first, resize);
    }
    actions
}

/// All there is to go by while a pod has a sandbox.
struct Look<'a> {
    pod: &'a Pod,
    seen: &'a Observed,
    sandbox: &'a Sandbox,
    anew: Anew<'a>,
    memory: &'a Memory,
    now: Timestamp,
}

impl Look<'_> {
    /// The newest run in this sandbox: what was done in another has to be done again.
    fn here(&self, container: &Container) -> Option<&Ran> {
        self.anew.latest(&container.name).filter(|run| run.sandbox == self.sandbox.id)
    }

    /// Sees to those that come first, one after the other, and says whether the main containers may run.
    fn prepare(&self, spec: &PodSpec, actions: &mut Vec<Action>) -> bool {
        let inits = spec.init_containers.as_deref().unwrap_or_default();
        let began = |container: &Container| self.here(container).is_some();
        // Whatever stands before one that has begun was done, though nothing may be left of it. Its companions come back
        // beside those that run.
        let reached = match spec.containers.iter().any(began) {
            true => inits.len(),
            false => inits.iter().rposition(began).unwrap_or(0),
        };
        inits.iter().enumerate().all(|(place, container)| {
            let was_done = place < reached;
            match self.here(container).map(|run| run.state) {
                _ if was_done && !is_sidecar(container) => true,
                Some(State::Exited { code: 0, .. }) if !is_sidecar(container) => true,
                Some(State::Running { .. }) if !is_sidecar(container) => false,
                Some(State::Running { .. }) => {
                    self.keep(container, actions);
                    was_done || self.is_started(container)
                }
                _ => {
                    self.start(container, actions);
                    was_done
                }
            }
        })
    }

    fn is_started(&self, container: &Container) -> bool {
        let run = self.seen.latest(&container.name);
        run.is_some_and(|run| self.memory.health.get(&run.id).is_none_or(|health| health.started))
    }

    fn run(&self, mains: &[Container], actions: &mut Vec<Action>) {
        for container in mains {
            match self.anew.latest(&container.name) {
                Some(run) if run.state.is_running() => self.keep(container, actions),
                Some(run)
                    if run.state.is_exited() && !restarts_after(self.pod, container, run, self.memory) => {}
                _ => self.start(container, actions),
            }
        }
    }

    /// Sees to a container that runs.
    fn keep(&self, container: &Container, actions: &mut Vec<Action>) {
        let Some(run) = self.seen.latest(&container.name) else { return };
        let dead = self.memory.health.get(&run.id).is_some_and(|health| health.dead);
        let other_image = run.made_of.image.is_some() && run.made_of.image != container.image;
        let resized = || resize::wants_restart(self.pod, self.seen, self.memory, &container.name);
        let why = match (dead, other_image) {
            (true, _) => Why::Unhealthy,
            (_, true) => Why::Changed,
            _ if resized() => Why::Resized,
            _ => return,
        };
        actions.push(Action::Stop(Stop::new(run, why)));
    }

    /// Gives what runs what it is to have, or says when that is tried again.
    fn resize(&self) -> Option<Action> {
        let needed = resize::needed(self.pod, self.seen, self.memory)?;
        let failure = self.memory.resizing.failure.as_ref().filter(|failure| failure.again > self.now);
        Some(failure.map_or(Action::Resize(needed), |failure| Action::Recheck(failure.again)))
    }

    /// Starts a container, or says when it may be.
    fn start(&self, container: &Container, actions: &mut Vec<Action>) {
        let run = self.seen.latest(&container.name);
        // Nobody who begins anew with all others has to wait.
        let present = run.filter(|run| !self.anew.is_past(run));
        let after_exit = present.and_then(|run| restart_at(run, self.memory));
        let after_failure = failure(&container.name, run, self.memory).map(|failure| failure.again);
        let attempt = match run {
            // Made but never started: that one is tried again.
            Some(Ran { state: State::Created, attempt, .. }) => *attempt,
            Some(run) => run.attempt + 1,
            None => 0,
        };
        match after_exit.max(after_failure).filter(|at| *at > self.now) {
            Some(at) => {
                let shown = run.and_then(|run| waits_from(run, self.memory)).filter(|from| *from > self.now);
                actions.push(Action::Recheck(shown.map_or(at, |from| from.min(at))));
            }
            None => actions.push(Action::Start { container: container.name.clone(), attempt }),
        }
    }
}

/// Ends what runs, then what it lived in.
fn end(pod: &Pod, seen: &Observed) -> Vec<Action> {
    let stops = stop_all(pod, seen, Why::PodEnds);
    if !stops.is_empty() {
        return stops;
    }
    let sandboxes = seen.sandboxes.iter().filter(|sandbox| sandbox.ready);
    let mut actions: Vec<Action> =
        sandboxes.map(|sandbox| Action::StopSandbox { id: sandbox.id.clone() }).collect();
    if actions.is_empty() && pod.is_deleting() {
        actions.push(Action::Clear);
    }
    actions
}

/// Stops all that runs at once; but companions stay for the main containers, and for the companions that came after them.
fn stop_all(pod: &Pod, seen: &Observed, why: Why) -> Vec<Action> {
    let spec = pod.spec.clone().unwrap_or_default();
    let inits = spec.init_containers.unwrap_or_default();
    let companion = |run: &Ran| inits.iter().position(|init| init.name == run.name && is_sidecar(init));
    let is_main = |run: &Ran| spec.containers.iter().any(|main| main.name == run.name);
    let stop = |run: &Ran| {
        let outlives =
            |place: usize, other: &Ran| is_main(other) || companion(other).is_some_and(|later| later > place);
        let after = companion(run).map(|place| seen.running().filter(move |other| outlives(place, other)));
        let after = after.into_iter().flatten().map(|other| other.id.clone()).collect();
        Action::Stop(Stop { after, ..Stop::new(run, why) })
    };
    seen.running().map(stop).collect()
}

/// A new sandbox, once nothing is left running of the old one.
fn begin_anew(pod: &Pod, seen: &Observed, memory: &Memory, now: Timestamp) -> Vec<Action> {
    let left = stop_all(pod, seen, Why::SandboxGone);
    if !left.is_empty() {
        return left;
    }
    match &memory.sandbox_failure {
        Some(failure) if failure.again > now => vec![Action::Recheck(failure.again)],
        _ => vec![Action::MakeSandbox { attempt: seen.sandboxes.first().map_or(0, |last| last.attempt + 1) }],
    }
}

pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

pub fn policy(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()).unwrap_or("Always")
}

/// Whether a container is started again after a run that has ended: also where it was only stopped for a resize.
fn restarts_after(pod: &Pod, container: &Container, run: &Ran, memory: &Memory) -> bool {
    let State::Exited { code, .. } = run.state else { return false };
    memory.resized.contains(&run.id) || restarts(pod, container, code)
}

/// Whether a container that has ended in this way is started again: by its own rules, its own policy, or the pod's.
pub fn restarts(pod: &Pod, container: &Container, code: i32) -> bool {
    if rule(container, code).is_some_and(|rule| rule.action.starts_with("Restart")) {
        return true;
    }
    match container.restart_policy.as_deref().unwrap_or(policy(pod)) {
        "Never" => false,
        "OnFailure" => code != 0,
        _ => true,
    }
}

/// Whether a container that has ended in this way has another run. Init containers that are done have none, nor have those
/// for having a look.
pub fn comes_again(pod: &Pod, container: &Container, code: i32) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let is_init = spec.init_containers.iter().flatten().any(|init| init.name == container.name);
    let is_done = is_init && !is_sidecar(container) && code == 0;
    let is_a_look = spec.ephemeral_containers.iter().flatten().any(|look| look.name == container.name);
    !is_done && !is_a_look && restarts(pod, container, code)
}

/// The rule for a container that has ended in this way.
pub fn rule(container: &Container, code: i32) -> Option<&ContainerRestartRule> {
    let mut rules = container.restart_policy_rules.iter().flatten();
    rules.find(|rule| {
        rule.exit_codes.as_ref().is_some_and(|codes| {
            let is_named = codes.values.iter().flatten().any(|value| *value == code);
            if codes.operator == "NotIn" { !is_named } else { is_named }
        })
    })
}

/// An init container has failed and is not tried again.
pub fn failed_init(pod: &Pod, seen: &Observed) -> bool {
    let anew = Anew::of(pod, seen);
    let failed = |container: &Container| {
        let run = anew.latest(&container.name);
        !is_sidecar(container)
            && run.is_some_and(|run| {
                matches!(run.state, State::Exited { code, .. } if code != 0 && !restarts(pod, container, code))
            })
    };
    let inits = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref());
    inits.into_iter().flatten().any(failed)
}

#[cfg(test)]
mod tests;
