//! What becomes of a pod, from its spec and the time it began. Pure: everything a kubelet would report at a
//! moment is worked out anew each time, so nothing needs to be remembered.

mod program;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, Pod, PodIP, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use program::Program;
use reconcile::conditions::{PodConditions, why_unready};

/// How a container that keeps failing is slowed down, as a kubelet does it.
const FIRST_PAUSE: SignedDuration = SignedDuration::from_secs(10);
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_secs(300);
/// The exit code of programs that are told to stop: the number of the signal above 128.
const STOPPED: i32 = 143;

/// A pod's status at a moment, and when it will be another.
#[derive(Debug, PartialEq)]
pub struct Moment {
    pub status: PodStatus,
    pub until: Option<Timestamp>,
}

/// Where a simulated pod is.
pub struct Place<'a> {
    pub node_ip: &'a str,
    pub pod_ip: &'a str,
    /// Images that cannot be had here, separated by commas.
    pub missing: &'a str,
}

impl Place<'_> {
    /// Why a container cannot be made here.
    fn lacks(&self, container: &Container) -> Option<&'static str> {
        let image = container.image.as_deref().unwrap_or_default();
        let is_missing = self.missing.split(',').any(|missing| missing == image);
        let never = container.image_pull_policy.as_deref() == Some("Never");
        is_missing.then_some(if never { "ErrImageNeverPull" } else { "ImagePullBackOff" })
    }
}

/// The status of `pod` at `now`; its life began at `status.startTime`, or begins now.
pub fn at(pod: &Pod, place: &Place<'_>, now: Timestamp) -> Moment {
    let spec = pod.spec.clone().unwrap_or_default();
    let before = pod.status.clone().unwrap_or_default();
    let begun = before.start_time.clone().map_or(now, |time| time.0);
    let policy = spec.restart_policy.as_deref().unwrap_or("Always");
    let live = |container: &Container, program: Program, policy: &str, from: Timestamp| match place
        .lacks(container)
    {
        Some(why) => Life::waiting(why),
        None => Life::of(program, policy, from, now),
    };
    let mut from = begun;
    let mut inits = Vec::new();
    let mut initialized = true;
    let mut failed_init = false;
    for container in spec.init_containers.iter().flatten() {
        let sidecar = container.restart_policy.as_deref() == Some("Always");
        let policy = match policy {
            _ if sidecar => "Always",
            "Never" => "Never",
            _ => "OnFailure",
        };
        let mut life = if initialized && !failed_init {
            let program = Program::of(container, pod);
            live(container, if sidecar { program } else { program.ending() }, policy, from)
        } else {
            Life::waiting("PodInitializing")
        };
        // Of these, only those that have done their work count as ready.
        life.ready &= sidecar;
        if !sidecar && initialized {
            match life.ended {
                Some((at, 0)) => from = at,
                Some(_) => failed_init = true,
                None => initialized = false,
            }
        }
        inits.push((container, life));
    }
    let started = initialized && !failed_init;
    let mains: Vec<(&Container, Life)> = spec
        .containers
        .iter()
        .map(|container| match started {
            true => (container, live(container, Program::of(container, pod), policy, from)),
            false => (container, Life::waiting("PodInitializing")),
        })
        .collect();
    let phase = phase(started, failed_init, &mains);
    let over = matches!(phase, "Succeeded" | "Failed");
    if over {
        let end = mains.iter().filter_map(|(_, life)| life.ended).map(|(at, _)| at).max();
        inits.iter_mut().for_each(|(_, life)| life.stop(end.unwrap_or(now)));
    }
    let ready = started && !over && mains.iter().all(|(_, life)| life.ready);
    let until = inits.iter().chain(&mains).filter_map(|(_, life)| life.until).filter(|at| *at > now).min();
    let statuses = |lives: &[(&Container, Life)]| {
        let list: Vec<_> = lives.iter().map(|(container, life)| life.status(container, over)).collect();
        (!list.is_empty()).then_some(list)
    };
    let unready = mains.iter().filter(|(_, life)| !life.ready);
    let unready: Vec<&str> = unready.map(|(container, _)| container.name.as_str()).collect();
    let why = (!ready).then(|| why_unready(phase, &unready));
    let conditions = PodConditions { before: &before, now, generation: pod.metadata.generation };
    let conditions = conditions.all([
        ("PodReadyToStartContainers", !over, None),
        ("Initialized", started, (!started).then(|| ("ContainersNotInitialized", String::new()))),
        ("Ready", ready, why.clone()),
        ("ContainersReady", ready, why),
    ]);
    let status = PodStatus {
        phase: Some(phase.to_owned()),
        start_time: Some(Time(begun)),
        host_ip: Some(place.node_ip.to_owned()),
        host_ips: Some(vec![k8s_openapi::api::core::v1::HostIP { ip: place.node_ip.to_owned() }]),
        pod_ip: Some(place.pod_ip.to_owned()),
        pod_ips: Some(vec![PodIP { ip: place.pod_ip.to_owned() }]),
        init_container_statuses: statuses(&inits),
        container_statuses: statuses(&mains),
        observed_generation: pod.metadata.generation,
        conditions: Some(conditions),
        ..before.clone()
    };
    Moment { status, until: if over { None } else { until } }
}

/// The last status of a pod that is being deleted: everything in it has been stopped.
pub fn stopped(pod: &Pod, now: Timestamp) -> PodStatus {
    let mut status = pod.status.clone().unwrap_or_default();
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return status;
    }
    let mut all_well = true;
    for container in status.container_statuses.iter_mut().flatten() {
        let state = container.state.get_or_insert_default();
        if state.terminated.is_none() {
            let began = state.running.as_ref().and_then(|running| running.started_at.clone());
            *state = terminated(STOPPED, began.unwrap_or(Time(now)).0, now);
        }
        all_well &= state.terminated.as_ref().is_some_and(|end| end.exit_code == 0);
        (container.ready, container.started) = (false, Some(false));
    }
    for container in status.init_container_statuses.iter_mut().flatten() {
        let state = container.state.get_or_insert_default();
        if let Some(running) = &state.running {
            *state = terminated(STOPPED, running.started_at.clone().unwrap_or(Time(now)).0, now);
            (container.ready, container.started) = (false, Some(false));
        }
    }
    status.phase = Some(if all_well { "Succeeded" } else { "Failed" }.to_owned());
    for condition in status.conditions.iter_mut().flatten() {
        if matches!(condition.type_.as_str(), "Ready" | "ContainersReady") && condition.status != "False" {
            condition.status = "False".to_owned();
            condition.reason = Some("PodFailed".to_owned());
            condition.last_transition_time = Some(Time(now));
        }
    }
    status
}

fn phase(started: bool, failed_init: bool, mains: &[(&Container, Life)]) -> &'static str {
    if failed_init {
        return "Failed";
    }
    let never_begun = |life: &Life| life.state.waiting.is_some() && life.last_state.is_none();
    if !started || mains.iter().any(|(_, life)| never_begun(life)) {
        return "Pending";
    }
    if mains.iter().any(|(_, life)| life.ended.is_none()) {
        return "Running";
    }
    match mains.iter().all(|(_, life)| matches!(life.ended, Some((_, 0)))) {
        true => "Succeeded",
        false => "Failed",
    }
}

/// One container's life up to a moment.
struct Life {
    state: ContainerState,
    last_state: Option<ContainerState>,
    restarts: i32,
    ready: bool,
    /// When it ended for good, and with which code.
    ended: Option<(Timestamp, i32)>,
    until: Option<Timestamp>,
}

impl Life {
    fn waiting(reason: &str) -> Life {
        let waiting = ContainerStateWaiting { reason: Some(reason.to_owned()), message: None };
        Life {
            state: ContainerState { waiting: Some(waiting), ..ContainerState::default() },
            last_state: None,
            restarts: 0,
            ready: false,
            ended: None,
            until: None,
        }
    }

    fn of(program: Program, policy: &str, begun: Timestamp, now: Timestamp) -> Life {
        let mut life = Life::waiting("ContainerCreating");
        let mut start = begun;
        let mut pause = SignedDuration::ZERO;
        loop {
            let end = program.runs_for.and_then(|time| start.checked_add(time).ok());
            let Some(end) = end.filter(|end| *end <= now) else {
                let ready_at = start.checked_add(program.ready_after).unwrap_or(Timestamp::MAX);
                life.ready = ready_at <= now;
                life.state = ContainerState {
                    running: Some(ContainerStateRunning { started_at: Some(Time(start)) }),
                    ..ContainerState::default()
                };
                life.until = end.into_iter().chain((!life.ready).then_some(ready_at)).min();
                return life;
            };
            let over = terminated(program.exit_code, start, end);
            if policy == "Never" || policy == "OnFailure" && program.exit_code == 0 {
                life.state = over;
                life.ended = Some((end, program.exit_code));
                return life;
            }
            life.last_state = Some(over);
            let again = end.checked_add(pause).unwrap_or(Timestamp::MAX);
            if again > now {
                let waiting = Life::waiting("CrashLoopBackOff");
                return Life { state: waiting.state, until: Some(again), ..life };
            }
            life.restarts += 1;
            start = again;
            pause = if pause.is_zero() { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        }
    }

    /// Ends it if it runs, as the sidecars of a pod that is over.
    fn stop(&mut self, at: Timestamp) {
        if let Some(running) = self.state.running.take() {
            self.state = terminated(STOPPED, running.started_at.map_or(at, |time| time.0), at);
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

fn terminated(code: i32, began: Timestamp, at: Timestamp) -> ContainerState {
    let end = ContainerStateTerminated {
        exit_code: code,
        reason: Some(if code == 0 { "Completed" } else { "Error" }.to_owned()),
        started_at: Some(Time(began)),
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
