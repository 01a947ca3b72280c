//! Decides what a pod needs next. Pure: everything known is an argument, the time too.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, ContainerRestartRule, Pod};
use reconcile::Object as _;

use super::anew::Anew;
use crate::config::resources_text;
use crate::memory::{Failure, Memory};
use crate::observed::{Observed, Ran, State};

/// A container that fails is started again at once, then after this long, then twice as long, and so on.
const FIRST_PAUSE: SignedDuration = SignedDuration::from_secs(10);
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_secs(300);
/// How long a pod is left alone at most, upstream.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_secs(60);
/// One that ran this long has earned a new beginning.
const LONG_ENOUGH: SignedDuration = SignedDuration::from_secs(600);

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
    Stop {
        id: String,
        container: String,
        why: Why,
    },
    /// What it may use has changed while it runs.
    Resize {
        id: String,
        container: String,
    },
    StopSandbox {
        id: String,
    },
    /// Everything is over and the pod is to go: clear away what is left of it.
    Clear,
    /// Look again then, although nothing happens.
    Recheck(Timestamp),
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
    let over = |container: &Container| match anew.latest(&container.name).map(|run| run.state) {
        Some(State::Exited { code, .. }) => !restarts(pod, container, code),
        _ => false,
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
    if pod.is_deleting() || is_finished(pod, seen, memory) {
        return end(pod, seen);
    }
    let Some(sandbox) = seen.sandbox() else { return begin_anew(seen, memory, now) };
    // What runs in older sandboxes has nothing to stand on; a runtime tells of no such thing, but may one day.
    let mut actions = Vec::new();
    for old in seen.sandboxes.iter().filter(|old| old.ready && old.id != sandbox.id) {
        actions.push(Action::StopSandbox { id: old.id.clone() });
    }
    let spec = pod.spec.clone().unwrap_or_default();
    let anew = Anew::of(pod, seen);
    let past: Vec<&Ran> = anew.still_running().collect();
    if !past.is_empty() {
        let why = Why::AllBeginAnew;
        let stop = |run: &&Ran| Action::Stop { id: run.id.clone(), container: run.name.clone(), why };
        actions.extend(past.iter().map(stop));
        return actions;
    }
    // Whoever wants to have a look waits for nobody, and has one look.
    for container in spec.ephemeral_containers.iter().flatten().map(super::ephemeral) {
        let run = seen.latest(&container.name);
        if run.is_none_or(|run| run.state == State::Created) {
            start(&container, run, &anew, memory, now, &mut actions);
        }
    }
    for container in spec.init_containers.iter().flatten() {
        let sidecar = is_sidecar(container);
        let run = seen.latest(&container.name);
        match anew.latest(&container.name).map(|run| run.state) {
            Some(State::Exited { code: 0, .. }) if !sidecar => continue,
            Some(State::Running { .. }) if sidecar => {
                keep(container, run, memory, &mut actions);
                if run.is_some_and(|run| memory.health.get(&run.id).is_none_or(|health| health.started)) {
                    continue;
                }
                return actions;
            }
            Some(State::Running { .. }) => return actions,
            _ => {
                start(container, run, &anew, memory, now, &mut actions);
                // Later ones wait for this one, be it a step to be taken or a companion to be there.
                return actions;
            }
        }
    }
    for container in &spec.containers {
        let run = seen.latest(&container.name);
        match anew.latest(&container.name).map(|run| run.state) {
            Some(State::Running { .. }) => keep(container, run, memory, &mut actions),
            Some(State::Exited { code, .. }) if !restarts(pod, container, code) => {}
            _ => start(container, run, &anew, memory, now, &mut actions),
        }
    }
    actions
}

/// Ends what runs; main containers first, then their companions in the reverse of the order they came.
fn end(pod: &Pod, seen: &Observed) -> Vec<Action> {
    let spec = pod.spec.clone().unwrap_or_default();
    let stop =
        |run: &Ran| Action::Stop { id: run.id.clone(), container: run.name.clone(), why: Why::PodEnds };
    let companions: Vec<&Container> =
        spec.init_containers.iter().flatten().filter(|container| is_sidecar(container)).collect();
    let is_companion = |run: &Ran| companions.iter().any(|container| container.name == run.name);
    let mains: Vec<Action> = seen.running().filter(|run| !is_companion(run)).map(stop).collect();
    if !mains.is_empty() {
        return mains;
    }
    for companion in companions.iter().rev() {
        if let Some(run) = seen.running().find(|run| run.name == companion.name) {
            return vec![stop(run)];
        }
    }
    let sandboxes = seen.sandboxes.iter().filter(|sandbox| sandbox.ready);
    let mut actions: Vec<Action> =
        sandboxes.map(|sandbox| Action::StopSandbox { id: sandbox.id.clone() }).collect();
    if actions.is_empty() && pod.is_deleting() {
        actions.push(Action::Clear);
    }
    actions
}

/// A new sandbox, once nothing is left running of the old one.
fn begin_anew(seen: &Observed, memory: &Memory, now: Timestamp) -> Vec<Action> {
    let left: Vec<Action> = seen
        .running()
        .map(|run| Action::Stop { id: run.id.clone(), container: run.name.clone(), why: Why::SandboxGone })
        .collect();
    if !left.is_empty() {
        return left;
    }
    match &memory.sandbox_failure {
        Some(failure) if failure.again > now => vec![Action::Recheck(failure.again)],
        _ => vec![Action::MakeSandbox { attempt: seen.sandboxes.first().map_or(0, |last| last.attempt + 1) }],
    }
}

/// Sees to a container that runs.
fn keep(container: &Container, run: Option<&Ran>, memory: &Memory, actions: &mut Vec<Action>) {
    let Some(run) = run else { return };
    let dead = memory.health.get(&run.id).is_some_and(|health| health.dead);
    let other_image = run.made_of.image.is_some() && run.made_of.image != container.image;
    let wanted = resources_text(container);
    let present = memory.resized.get(&run.id).or(run.made_of.resources.as_ref());
    let resized = present.is_some_and(|present| *present != wanted);
    let (id, name) = (run.id.clone(), container.name.clone());
    let why = match (dead, other_image || resized && must_restart(container, present, &wanted)) {
        (true, _) => Why::Unhealthy,
        (_, true) => Why::Changed,
        _ if resized => return actions.push(Action::Resize { id, container: name }),
        _ => return,
    };
    actions.push(Action::Stop { id, container: name, why });
}

/// Whether a container wants to be started anew when what has changed changes.
fn must_restart(container: &Container, before: Option<&String>, now: &str) -> bool {
    let parsed = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap_or_default();
    let (before, now) = (parsed(before.map_or("", String::as_str)), parsed(now));
    container.resize_policy.iter().flatten().any(|policy| {
        let of = |all: &serde_json::Value, kind: &str| all[kind][&policy.resource_name].clone();
        let changed = ["requests", "limits"].iter().any(|kind| of(&before, kind) != of(&now, kind));
        policy.restart_policy == "RestartContainer" && changed
    })
}

/// Starts a container, or says when it may be.
fn start(
    container: &Container,
    run: Option<&Ran>,
    anew: &Anew<'_>,
    memory: &Memory,
    now: Timestamp,
    actions: &mut Vec<Action>,
) {
    // Nobody who begins anew with all others has to wait.
    let after_exit = run.filter(|run| !anew.is_past(run)).and_then(restart_at);
    let after_failure = memory.failures.get(&container.name).map(|failure| failure.again);
    let attempt = match run {
        // Made but never started: that one is tried again.
        Some(Ran { state: State::Created, attempt, .. }) => *attempt,
        Some(run) => run.attempt + 1,
        None => 0,
    };
    match after_exit.max(after_failure).filter(|at| *at > now) {
        Some(at) => {
            let shown = run.and_then(waits_from).filter(|from| *from > now);
            actions.push(Action::Recheck(shown.map_or(at, |from| from.min(at))));
        }
        None => actions.push(Action::Start { container: container.name.clone(), attempt }),
    }
}

/// When a container that has ended may be started again.
pub fn restart_at(run: &Ran) -> Option<Timestamp> {
    let State::Exited { since, at, .. } = run.state else { return None };
    if run.attempt == 0 || at.duration_since(since) >= LONG_ENOUGH {
        return Some(at);
    }
    let doublings = run.attempt.saturating_sub(1).min(16);
    let pause = FIRST_PAUSE.saturating_mul(1 << doublings).min(LONGEST_PAUSE);
    at.checked_add(pause).ok()
}

/// From when on one sees of a container that has ended that it is made to wait. Upstream notices that when it has already
/// told how the container ended, and tells it when it looks at the pod next: when the pause is over, or after a minute.
pub fn waits_from(run: &Ran) -> Option<Timestamp> {
    let State::Exited { at, .. } = run.state else { return None };
    let then = restart_at(run).filter(|then| *then > at)?;
    Some(at.checked_add(LOOK_AGAIN).map_or(then, |look| look.min(then)))
}

pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

pub fn policy(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()).unwrap_or("Always")
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
