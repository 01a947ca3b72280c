//! The lifecycle of a pod, derived from its spec and its start time. Pure: the status that a
//! kubelet would report is computed from scratch each time, so there is no state to keep.

mod program;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, Pod, PodIP, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use program::Program;
use reconcile::conditions::{PodConditions, unready_reason};

/// The restart back-off of a kubelet: initial and maximum delay.
const INITIAL_BACK_OFF: SignedDuration = SignedDuration::from_secs(10);
const MAX_BACK_OFF: SignedDuration = SignedDuration::from_secs(300);
/// The exit code of programs that are terminated by SIGTERM: 128 plus the number of the signal.
const SIGTERM_EXIT_CODE: i32 = 143;

/// The status of a pod at some time, and when it will change.
#[derive(Debug, PartialEq)]
pub struct PodSnapshot {
    pub status: PodStatus,
    pub next_change: Option<Timestamp>,
}

/// The environment of a simulated pod.
pub struct PodEnvironment<'a> {
    pub node_ip: &'a str,
    pub pod_ip: &'a str,
    /// A comma-separated list of images that cannot be pulled.
    pub missing: &'a str,
}

impl PodEnvironment<'_> {
    /// Why a container's image is not available.
    fn image_error(&self, container: &Container) -> Option<&'static str> {
        let image = container.image.as_deref().unwrap_or_default();
        let is_missing = self.missing.split(',').any(|missing| missing == image);
        let never = container.image_pull_policy.as_deref() == Some("Never");
        is_missing.then_some(if never { "ErrImageNeverPull" } else { "ImagePullBackOff" })
    }
}

/// The status of `pod` at `now`. The pod has started at `status.startTime`, or starts now.
pub fn snapshot_at(pod: &Pod, environment: &PodEnvironment<'_>, now: Timestamp) -> PodSnapshot {
    let spec = pod.spec.clone().unwrap_or_default();
    let before = pod.status.clone().unwrap_or_default();
    let started_at = before.start_time.clone().map_or(now, |time| time.0);
    let policy = spec.restart_policy.as_deref().unwrap_or("Always");
    let lifecycle_of =
        |container: &Container, program: Program, policy: &str, from: Timestamp| match environment
            .image_error(container)
        {
            Some(reason) => ContainerLifecycle::waiting(reason),
            None => ContainerLifecycle::of(program, policy, from, now),
        };
    let mut from = started_at;
    let mut init_containers = Vec::new();
    let mut initialized = true;
    let mut failed_init = false;
    for container in spec.init_containers.iter().flatten() {
        let sidecar = container.restart_policy.as_deref() == Some("Always");
        let policy = match policy {
            _ if sidecar => "Always",
            "Never" => "Never",
            _ => "OnFailure",
        };
        let mut lifecycle = if initialized && !failed_init {
            let program = Program::of(container, pod);
            lifecycle_of(container, if sidecar { program } else { program.ending() }, policy, from)
        } else {
            ContainerLifecycle::waiting("PodInitializing")
        };
        // Init containers are only ready once they have succeeded, unless they are sidecars.
        lifecycle.ready &= sidecar;
        if !sidecar && initialized {
            match lifecycle.ended {
                Some((at, 0)) => from = at,
                Some(_) => failed_init = true,
                None => initialized = false,
            }
        }
        init_containers.push((container, lifecycle));
    }
    let started = initialized && !failed_init;
    let main_containers: Vec<(&Container, ContainerLifecycle)> = spec
        .containers
        .iter()
        .map(|container| match started {
            true => (container, lifecycle_of(container, Program::of(container, pod), policy, from)),
            false => (container, ContainerLifecycle::waiting("PodInitializing")),
        })
        .collect();
    let phase = phase(started, failed_init, &main_containers);
    let over = matches!(phase, "Succeeded" | "Failed");
    if over {
        let end = main_containers.iter().filter_map(|(_, lifecycle)| lifecycle.ended).map(|(at, _)| at).max();
        init_containers.iter_mut().for_each(|(_, lifecycle)| lifecycle.stop(end.unwrap_or(now)));
    }
    let ready = started && !over && main_containers.iter().all(|(_, lifecycle)| lifecycle.ready);
    let until = init_containers
        .iter()
        .chain(&main_containers)
        .filter_map(|(_, lifecycle)| lifecycle.next_change)
        .filter(|at| *at > now)
        .min();
    let statuses = |containers: &[(&Container, ContainerLifecycle)]| {
        let list: Vec<_> =
            containers.iter().map(|(container, lifecycle)| lifecycle.status(container, over)).collect();
        (!list.is_empty()).then_some(list)
    };
    let unready = main_containers.iter().filter(|(_, lifecycle)| !lifecycle.ready);
    let unready: Vec<&str> = unready.map(|(container, _)| container.name.as_str()).collect();
    let unready_reason = (!ready).then(|| unready_reason(phase, &unready));
    let conditions = PodConditions { before: &before, now, generation: pod.metadata.generation };
    let conditions = conditions.with_existing([
        ("PodReadyToStartContainers", !over, None),
        ("Initialized", started, (!started).then(|| ("ContainersNotInitialized", String::new()))),
        ("Ready", ready, unready_reason.clone()),
        ("ContainersReady", ready, unready_reason),
    ]);
    let status = PodStatus {
        phase: Some(phase.to_owned()),
        start_time: Some(Time(started_at)),
        host_ip: Some(environment.node_ip.to_owned()),
        host_ips: Some(vec![k8s_openapi::api::core::v1::HostIP { ip: environment.node_ip.to_owned() }]),
        pod_ip: Some(environment.pod_ip.to_owned()),
        pod_ips: Some(vec![PodIP { ip: environment.pod_ip.to_owned() }]),
        init_container_statuses: statuses(&init_containers),
        container_statuses: statuses(&main_containers),
        observed_generation: pod.metadata.generation,
        conditions: Some(conditions),
        ..before.clone()
    };
    PodSnapshot { status, next_change: if over { None } else { until } }
}

/// The final status of a pod that is being deleted: all its containers have stopped.
pub fn terminated_status(pod: &Pod, now: Timestamp) -> PodStatus {
    let mut status = pod.status.clone().unwrap_or_default();
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return status;
    }
    let mut all_succeeded = true;
    for container in status.container_statuses.iter_mut().flatten() {
        let state = container.state.get_or_insert_default();
        if state.terminated.is_none() {
            let started_at = state.running.as_ref().and_then(|running| running.started_at.clone());
            *state = terminated(SIGTERM_EXIT_CODE, started_at.unwrap_or(Time(now)).0, now);
        }
        all_succeeded &= state.terminated.as_ref().is_some_and(|end| end.exit_code == 0);
        (container.ready, container.started) = (false, Some(false));
    }
    for container in status.init_container_statuses.iter_mut().flatten() {
        let state = container.state.get_or_insert_default();
        if let Some(running) = &state.running {
            *state = terminated(SIGTERM_EXIT_CODE, running.started_at.clone().unwrap_or(Time(now)).0, now);
            (container.ready, container.started) = (false, Some(false));
        }
    }
    status.phase = Some(if all_succeeded { "Succeeded" } else { "Failed" }.to_owned());
    for condition in status.conditions.iter_mut().flatten() {
        if matches!(condition.type_.as_str(), "Ready" | "ContainersReady") && condition.status != "False" {
            condition.status = "False".to_owned();
            condition.reason = Some("PodFailed".to_owned());
            condition.last_transition_time = Some(Time(now));
        }
    }
    status
}

fn phase(
    started: bool,
    failed_init: bool,
    main_containers: &[(&Container, ContainerLifecycle)],
) -> &'static str {
    if failed_init {
        return "Failed";
    }
    let never_started =
        |lifecycle: &ContainerLifecycle| lifecycle.state.waiting.is_some() && lifecycle.last_state.is_none();
    if !started || main_containers.iter().any(|(_, lifecycle)| never_started(lifecycle)) {
        return "Pending";
    }
    if main_containers.iter().any(|(_, lifecycle)| lifecycle.ended.is_none()) {
        return "Running";
    }
    match main_containers.iter().all(|(_, lifecycle)| matches!(lifecycle.ended, Some((_, 0)))) {
        true => "Succeeded",
        false => "Failed",
    }
}

/// The lifecycle of a container up to some time.
struct ContainerLifecycle {
    state: ContainerState,
    last_state: Option<ContainerState>,
    restarts: i32,
    ready: bool,
    /// When it exited for the last time, and its exit code.
    ended: Option<(Timestamp, i32)>,
    next_change: Option<Timestamp>,
}

impl ContainerLifecycle {
    fn waiting(reason: &str) -> ContainerLifecycle {
        let waiting = ContainerStateWaiting { reason: Some(reason.to_owned()), message: None };
        ContainerLifecycle {
            state: ContainerState { waiting: Some(waiting), ..ContainerState::default() },
            last_state: None,
            restarts: 0,
            ready: false,
            ended: None,
            next_change: None,
        }
    }

    fn of(program: Program, policy: &str, started_at: Timestamp, now: Timestamp) -> ContainerLifecycle {
        let mut lifecycle = ContainerLifecycle::waiting("ContainerCreating");
        let mut start = started_at;
        let mut pause = SignedDuration::ZERO;
        loop {
            let end = program.runs_for.and_then(|time| start.checked_add(time).ok());
            let Some(end) = end.filter(|end| *end <= now) else {
                let ready_at = start.checked_add(program.ready_after).unwrap_or(Timestamp::MAX);
                lifecycle.ready = ready_at <= now;
                lifecycle.state = ContainerState {
                    running: Some(ContainerStateRunning { started_at: Some(Time(start)) }),
                    ..ContainerState::default()
                };
                lifecycle.next_change = end.into_iter().chain((!lifecycle.ready).then_some(ready_at)).min();
                return lifecycle;
            };
            let over = terminated(program.exit_code, start, end);
            if policy == "Never" || policy == "OnFailure" && program.exit_code == 0 {
                lifecycle.state = over;
                lifecycle.ended = Some((end, program.exit_code));
                return lifecycle;
            }
            lifecycle.last_state = Some(over);
            let again = end.checked_add(pause).unwrap_or(Timestamp::MAX);
            if again > now {
                let waiting = ContainerLifecycle::waiting("CrashLoopBackOff");
                return ContainerLifecycle { state: waiting.state, next_change: Some(again), ..lifecycle };
            }
            lifecycle.restarts += 1;
            start = again;
            pause = if pause.is_zero() { INITIAL_BACK_OFF } else { (pause * 2).min(MAX_BACK_OFF) };
        }
    }

    /// Stops it if it is running, like the sidecars of a terminated pod.
    fn stop(&mut self, at: Timestamp) {
        if let Some(running) = self.state.running.take() {
            self.state = terminated(SIGTERM_EXIT_CODE, running.started_at.map_or(at, |time| time.0), at);
        }
    }

    fn status(&self, container: &Container, over: bool) -> ContainerStatus {
        let running = self.state.running.is_some();
        let id = || format!("simulated://{:016x}{:08x}", hash(&container.name), self.restarts);
        ContainerStatus {
            name: container.name.clone(),
            image: container.image.clone().unwrap_or_default(),
            image_id: match self.state.waiting {
                Some(_) if self.last_state.is_none() => String::new(),
                _ => format!("simulated/{}", container.image.clone().unwrap_or_default()),
            },
            container_id: (running || self.last_state.is_some() || self.state.terminated.is_some()).then(id),
            state: Some(self.state.clone()),
            last_state: Some(self.last_state.clone().unwrap_or_default()),
            restart_count: self.restarts,
            ready: !over && (self.ready || matches!(self.ended, Some((_, 0)))),
            started: Some(running),
            ..ContainerStatus::default()
        }
    }
}

fn terminated(code: i32, started_at: Timestamp, at: Timestamp) -> ContainerState {
    let end = ContainerStateTerminated {
        exit_code: code,
        reason: Some(if code == 0 { "Completed" } else { "Error" }.to_owned()),
        started_at: Some(Time(started_at)),
        finished_at: Some(Time(at)),
        ..ContainerStateTerminated::default()
    };
    ContainerState { terminated: Some(end), ..ContainerState::default() }
}

fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests;
