//! Computes what a pod needs next, as upstream's `computePodActions`. Pure: everything known is an
//! argument, including the time.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, ContainerRestartRule, Pod, PodSpec};
use reconcile::Object as _;

use super::back_off::{back_off_visible_at, restart_at, start_failure};
use super::resize::{self, Resize};
use super::restart_all_containers::RestartAllContainers;
use crate::observed::{ContainerRun, ObservedPod, Sandbox, State};
use crate::worker_state::{PodWorkerState, StartFailure};

/// An action of the pod worker. Actions are executed in order, and a failed one ends the round.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create the pod sandbox.
    CreateSandbox {
        attempt: u32,
    },
    Start {
        container: String,
        attempt: u32,
    },
    /// Stop a container. The stops of one plan run concurrently.
    Stop(Stop),
    /// Apply changed resources while the containers run.
    Resize(Resize),
    StopSandbox {
        id: String,
    },
    /// The pod is being deleted and nothing runs any more: remove what is left of it.
    Cleanup,
    /// Compute the plan again at this time, even if nothing changes until then.
    Recheck(Timestamp),
}

/// A run to stop.
#[derive(Clone, Debug, PartialEq)]
pub struct Stop {
    pub id: String,
    pub container: String,
    pub reason: StopReason,
    /// IDs of the runs that have to end first, as far as the grace period allows.
    pub after: Vec<String>,
}

impl Stop {
    fn new(run: &ContainerRun, reason: StopReason) -> Stop {
        Stop { id: run.id.clone(), container: run.name.clone(), reason, after: Vec::new() }
    }
}

/// Why a container is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The pod is being deleted, or the node has terminated it.
    PodTerminating,
    /// Its liveness or startup probe has failed.
    Unhealthy,
    /// Its sandbox is gone.
    SandboxLost,
    /// Its image in the spec has changed.
    SpecChanged,
    /// Its resources have changed, and its resize policy requires a restart.
    Resized,
    /// A restart rule requires that all containers restart.
    RestartAllContainers,
}

/// Whether no container of the pod will ever be started again.
pub fn is_finished(pod: &Pod, seen: &ObservedPod, worker_state: &PodWorkerState) -> bool {
    if worker_state.termination_reason.is_some() {
        return true;
    }
    let Some(spec) = &pod.spec else { return true };
    if init_failed(pod, seen) {
        return true;
    }
    let restart_all = RestartAllContainers::of(pod, seen);
    let is_done = |container: &Container| {
        let run = restart_all.latest(&container.name);
        run.is_some_and(|run| run.state.is_exited() && !restarts_after(pod, container, run, worker_state))
    };
    !spec.containers.is_empty() && spec.containers.iter().all(is_done)
}

/// When the pod exceeds its `activeDeadlineSeconds`.
pub fn deadline(pod: &Pod) -> Option<Timestamp> {
    let seconds = pod.spec.as_ref()?.active_deadline_seconds?;
    let start = pod.status.as_ref()?.start_time.as_ref()?.0;
    start.checked_add(SignedDuration::from_secs(seconds)).ok()
}

/// The next actions of a pod; none if there is nothing to do until something changes.
pub fn compute_pod_actions(
    pod: &Pod,
    seen: &ObservedPod,
    worker_state: &PodWorkerState,
    now: Timestamp,
) -> Vec<Action> {
    let mut actions = next_actions(pod, seen, worker_state, now);
    if worker_state.termination_reason.is_none() {
        actions.extend(deadline(pod).filter(|deadline| *deadline > now).map(Action::Recheck));
    }
    // The status changes from the error to the back-off at that time.
    let back_off_reports = worker_state.failures.values().filter_map(StartFailure::back_off_visible_at);
    actions.extend(back_off_reports.filter(|from| *from > now).map(Action::Recheck));
    actions
}

fn next_actions(pod: &Pod, seen: &ObservedPod, worker_state: &PodWorkerState, now: Timestamp) -> Vec<Action> {
    if pod.is_deleting() || worker_state.is_suspended || is_finished(pod, seen, worker_state) {
        return terminate(pod, seen);
    }
    let Some(sandbox) = seen.sandbox() else { return recreate_sandbox(pod, seen, worker_state, now) };
    // The containers of older sandboxes have lost theirs. No runtime is known to report a second
    // ready sandbox, but nothing forbids it.
    let mut actions = Vec::new();
    for old in seen.sandboxes.iter().filter(|old| old.ready && old.id != sandbox.id) {
        actions.push(Action::StopSandbox { id: old.id.clone() });
    }
    let context = PlanContext {
        pod,
        seen,
        sandbox,
        restart_all: RestartAllContainers::of(pod, seen),
        worker_state,
        now,
    };
    let obsolete: Vec<&ContainerRun> = context.restart_all.obsolete_running().collect();
    if !obsolete.is_empty() {
        actions.extend(
            obsolete.iter().map(|run| Action::Stop(Stop::new(run, StopReason::RestartAllContainers))),
        );
        return actions;
    }
    let spec = pod.spec.clone().unwrap_or_default();
    // Ephemeral containers wait for no other container and are never restarted.
    for container in spec.ephemeral_containers.iter().flatten().map(super::from_ephemeral) {
        if seen.latest(&container.name).is_none_or(|run| run.state == State::Created) {
            context.plan_start(&container, &mut actions);
        }
    }
    if context.plan_init_containers(&spec, &mut actions) {
        context.plan_main_containers(&spec.containers, &mut actions);
    }
    // The pod's limits are resized before the next container starts, so that it fits into them.
    let starts = |action: &Action| matches!(action, Action::Start { .. });
    let first = actions.iter().position(starts).unwrap_or(actions.len());
    if let Some(resize) = context.plan_resize() {
        actions.insert(first, resize);
    }
    actions
}

/// Everything that determines the next actions of a pod with a sandbox.
struct PlanContext<'a> {
    pod: &'a Pod,
    seen: &'a ObservedPod,
    sandbox: &'a Sandbox,
    restart_all: RestartAllContainers<'a>,
    worker_state: &'a PodWorkerState,
    now: Timestamp,
}

impl PlanContext<'_> {
    /// The newest run in this sandbox. What ran in an older sandbox has to run again.
    fn latest_in_sandbox(&self, container: &Container) -> Option<&ContainerRun> {
        self.restart_all.latest(&container.name).filter(|run| run.sandbox == self.sandbox.id)
    }

    /// Plans the init containers, one after the other. Returns whether the main containers may
    /// start.
    fn plan_init_containers(&self, spec: &PodSpec, actions: &mut Vec<Action>) -> bool {
        let init_containers = spec.init_containers.as_deref().unwrap_or_default();
        let has_started = |container: &Container| self.latest_in_sandbox(container).is_some();
        // Init containers before one that has started are done, even if the runtime has no run of
        // them any more. Sidecars among them restart while the others run.
        let done_until = match spec.containers.iter().any(has_started) {
            true => init_containers.len(),
            false => init_containers.iter().rposition(has_started).unwrap_or(0),
        };
        init_containers.iter().enumerate().all(|(index, container)| {
            let was_done = index < done_until;
            match self.latest_in_sandbox(container).map(|run| run.state) {
                _ if was_done && !is_sidecar(container) => true,
                Some(State::Exited { code: 0, .. }) if !is_sidecar(container) => true,
                Some(State::Running { .. }) if !is_sidecar(container) => false,
                Some(State::Running { .. }) => {
                    self.check_running(container, actions);
                    was_done || self.is_started(container)
                }
                _ => {
                    self.plan_start(container, actions);
                    was_done
                }
            }
        })
    }

    fn is_started(&self, container: &Container) -> bool {
        let run = self.seen.latest(&container.name);
        run.is_some_and(|run| self.worker_state.health.get(&run.id).is_none_or(|health| health.started))
    }

    fn plan_main_containers(&self, main_containers: &[Container], actions: &mut Vec<Action>) {
        for container in main_containers {
            match self.restart_all.latest(&container.name) {
                Some(run) if run.state.is_running() => self.check_running(container, actions),
                Some(run)
                    if run.state.is_exited()
                        && !restarts_after(self.pod, container, run, self.worker_state) => {}
                _ => self.plan_start(container, actions),
            }
        }
    }

    /// Checks a running container: stops it if it is unhealthy or was created from another image or
    /// other resources.
    fn check_running(&self, container: &Container, actions: &mut Vec<Action>) {
        let Some(run) = self.seen.latest(&container.name) else { return };
        let dead = self.worker_state.health.get(&run.id).is_some_and(|health| health.dead);
        let other_image = run.created_from.image.is_some() && run.created_from.image != container.image;
        let resized = || resize::requires_restart(self.pod, self.seen, self.worker_state, &container.name);
        let reason = match (dead, other_image) {
            (true, _) => StopReason::Unhealthy,
            (_, true) => StopReason::SpecChanged,
            _ if resized() => StopReason::Resized,
            _ => return,
        };
        actions.push(Action::Stop(Stop::new(run, reason)));
    }

    /// Plans the resize of running containers, or a recheck when a failed resize is due again.
    fn plan_resize(&self) -> Option<Action> {
        let needed = resize::pending_resize(self.pod, self.seen, self.worker_state)?;
        let failure =
            self.worker_state.resize_status.failure.as_ref().filter(|failure| failure.retry_at > self.now);
        Some(failure.map_or(Action::Resize(needed), |failure| Action::Recheck(failure.retry_at)))
    }

    /// Starts a container, or plans a recheck when its back-off is over.
    fn plan_start(&self, container: &Container, actions: &mut Vec<Action>) {
        let run = self.seen.latest(&container.name);
        // A container that restarts together with all others has no back-off.
        let present = run.filter(|run| !self.restart_all.is_obsolete(run));
        let after_exit = present.and_then(|run| restart_at(run, self.worker_state));
        let after_failure =
            start_failure(&container.name, run, self.worker_state).map(|failure| failure.retry_at);
        let attempt = match run {
            // It was created but never started, so this attempt is repeated.
            Some(ContainerRun { state: State::Created, attempt, .. }) => *attempt,
            Some(run) => run.attempt + 1,
            None => 0,
        };
        match after_exit.max(after_failure).filter(|at| *at > self.now) {
            Some(at) => {
                let visible_at = run
                    .and_then(|run| back_off_visible_at(run, self.worker_state))
                    .filter(|from| *from > self.now);
                actions.push(Action::Recheck(visible_at.map_or(at, |from| from.min(at))));
            }
            None => actions.push(Action::Start { container: container.name.clone(), attempt }),
        }
    }
}

/// Stops the containers, then the sandboxes.
fn terminate(pod: &Pod, seen: &ObservedPod) -> Vec<Action> {
    let stops = stop_all(pod, seen, StopReason::PodTerminating);
    if !stops.is_empty() {
        return stops;
    }
    let sandboxes = seen.sandboxes.iter().filter(|sandbox| sandbox.ready);
    let mut actions: Vec<Action> =
        sandboxes.map(|sandbox| Action::StopSandbox { id: sandbox.id.clone() }).collect();
    if actions.is_empty() && pod.is_deleting() {
        actions.push(Action::Cleanup);
    }
    actions
}

/// Stops all containers at once. Sidecars wait for the main containers and for the sidecars after
/// them.
fn stop_all(pod: &Pod, seen: &ObservedPod, reason: StopReason) -> Vec<Action> {
    let spec = pod.spec.clone().unwrap_or_default();
    let init_containers = spec.init_containers.unwrap_or_default();
    let sidecar_index = |run: &ContainerRun| {
        init_containers.iter().position(|init| init.name == run.name && is_sidecar(init))
    };
    let is_main = |run: &ContainerRun| spec.containers.iter().any(|main| main.name == run.name);
    let stop = |run: &ContainerRun| {
        let stops_first = |index: usize, other: &ContainerRun| {
            is_main(other) || sidecar_index(other).is_some_and(|later| later > index)
        };
        let after =
            sidecar_index(run).map(|index| seen.running().filter(move |other| stops_first(index, other)));
        let after = after.into_iter().flatten().map(|other| other.id.clone()).collect();
        Action::Stop(Stop { after, ..Stop::new(run, reason) })
    };
    seen.running().map(stop).collect()
}

/// Creates a new sandbox once all containers of the old one have stopped.
fn recreate_sandbox(
    pod: &Pod,
    seen: &ObservedPod,
    worker_state: &PodWorkerState,
    now: Timestamp,
) -> Vec<Action> {
    let remaining = stop_all(pod, seen, StopReason::SandboxLost);
    if !remaining.is_empty() {
        return remaining;
    }
    match &worker_state.sandbox_failure {
        Some(failure) if failure.retry_at > now => vec![Action::Recheck(failure.retry_at)],
        _ => {
            vec![Action::CreateSandbox { attempt: seen.sandboxes.first().map_or(0, |last| last.attempt + 1) }]
        }
    }
}

pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

pub fn restart_policy(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()).unwrap_or("Always")
}

/// Whether a container restarts after this run, which includes a stop for a resize.
fn restarts_after(
    pod: &Pod,
    container: &Container,
    run: &ContainerRun,
    worker_state: &PodWorkerState,
) -> bool {
    let State::Exited { code, .. } = run.state else { return false };
    worker_state.stopped_for_resize.contains(&run.id) || should_restart(pod, container, code)
}

/// Whether a container restarts after this exit code: by its restart rules, its own restart policy,
/// or that of the pod.
pub fn should_restart(pod: &Pod, container: &Container, code: i32) -> bool {
    if restart_rule(container, code).is_some_and(|rule| rule.action.starts_with("Restart")) {
        return true;
    }
    match container.restart_policy.as_deref().unwrap_or(restart_policy(pod)) {
        "Never" => false,
        "OnFailure" => code != 0,
        _ => true,
    }
}

/// Whether a container will run again after this exit code. Init containers that succeeded and
/// ephemeral containers will not.
pub fn will_restart(pod: &Pod, container: &Container, code: i32) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let is_init = spec.init_containers.iter().flatten().any(|init| init.name == container.name);
    let is_done = is_init && !is_sidecar(container) && code == 0;
    let is_ephemeral =
        spec.ephemeral_containers.iter().flatten().any(|ephemeral| ephemeral.name == container.name);
    !is_done && !is_ephemeral && should_restart(pod, container, code)
}

/// The first restart rule that matches the exit code.
pub fn restart_rule(container: &Container, code: i32) -> Option<&ContainerRestartRule> {
    let mut rules = container.restart_policy_rules.iter().flatten();
    rules.find(|rule| {
        rule.exit_codes.as_ref().is_some_and(|codes| {
            let is_named = codes.values.iter().flatten().any(|value| *value == code);
            if codes.operator == "NotIn" { !is_named } else { is_named }
        })
    })
}

/// Whether an init container has failed and does not restart.
pub fn init_failed(pod: &Pod, seen: &ObservedPod) -> bool {
    let restart_all = RestartAllContainers::of(pod, seen);
    let failed = |container: &Container| {
        let run = restart_all.latest(&container.name);
        !is_sidecar(container)
            && run.is_some_and(|run| {
                matches!(run.state, State::Exited { code, .. } if code != 0 && !should_restart(pod, container, code))
            })
    };
    let init_containers = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref());
    init_containers.into_iter().flatten().any(failed)
}

#[cfg(test)]
mod tests;
