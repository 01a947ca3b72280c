//! What is said about a pod: phase, conditions and the states of its containers, in upstream's words. Pure.

mod resources;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, ContainerUser, HostIP, Pod, PodIP, PodStatus, VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::Object as _;
use reconcile::conditions::{PodConditions, why_unready};

use super::anew::{self, Anew};
use super::back_off::{failure, pause, waits_from};
use super::plan::{comes_again, failed_init, is_finished, is_sidecar};
use super::resize::said::{IN_PROGRESS, PENDING};
use crate::memory::Memory;
use crate::observed::{Observed, Ran, State};

/// Of pods in which that can happen: all containers are about to begin anew, and why.
const RESTARTING: &str = "AllContainersRestarting";
const RESTARTING_WHY: (&str, &str) =
    ("RestartAllContainersStarted", "container exited with restart policy rule");

/// What the node adds to what the pod is.
pub struct Host<'a> {
    /// The first is the node's own; there may be one of the other family.
    pub ips: &'a [String],
    /// The runtime's name, as in `containerd://id`.
    pub runtime: &'a str,
    /// Whether it makes all that is mounted below a mount read only as well.
    pub recursive: bool,
}

/// The status of a pod as everything known tells it.
pub fn status(pod: &Pod, seen: &Observed, memory: &Memory, host: &Host<'_>, now: Timestamp) -> PodStatus {
    let before = pod.status.clone().unwrap_or_default();
    let spec = pod.spec.clone().unwrap_or_default();
    let look = Look { pod, seen, memory, host, now, anew: Anew::of(pod, seen) };
    let inits: Vec<_> = spec.init_containers.iter().flatten().map(|container| look.init(container)).collect();
    let initialized = look.initialized();
    let idle = if inits.is_empty() || initialized { "ContainerCreating" } else { "PodInitializing" };
    let mains: Vec<_> = spec.containers.iter().map(|container| look.container(container, idle)).collect();
    let phase = look.phase(initialized, &mains);
    let over = matches!(phase, "Succeeded" | "Failed");
    // Sidecars count as well: a pod is not ready before they are.
    let sidecars = spec.init_containers.iter().flatten().zip(&inits).filter(|(spec, _)| is_sidecar(spec));
    let counted = sidecars.map(|(_, status)| status).chain(&mains);
    let unready: Vec<&str> =
        counted.filter(|container| !container.ready).map(|container| container.name.as_str()).collect();
    let ready = !over && initialized && unready.is_empty();
    let gates = look.closed_gates(&before);
    let why = (!ready).then(|| why_unready(phase, &unready));
    let closed = (ready && !gates.is_empty()).then(|| ("ReadinessGatesNotReady", gates.join(", ")));
    let uninitialized = (!initialized).then(|| look.uninitialized());
    let ips = if spec.host_network == Some(true) {
        host.ips.to_vec()
    } else {
        seen.sandbox().map(|sandbox| sandbox.ips.clone()).unwrap_or_default()
    };
    // The address of a pod that is over is remembered.
    let ips = if ips.is_empty() { known_ips(&before) } else { ips };
    let (resources, allocated) = resources::of_pod(pod, memory, phase == "Running");
    // Those of a resize are gone with it, and nobody else has any.
    let resizing = [PENDING, IN_PROGRESS];
    let before = PodStatus {
        conditions: before.conditions.map(|all| {
            all.into_iter().filter(|condition| !resizing.contains(&condition.type_.as_str())).collect()
        }),
        ..before
    };
    let conditions = PodConditions { before: &before, now, generation: pod.metadata.generation };
    let looks: Vec<_> = spec
        .ephemeral_containers
        .iter()
        .flatten()
        .map(|container| ContainerStatus { ready: false, ..look.container(&super::ephemeral(container), "") })
        .collect();
    let by_node = [crate::EVICTED, crate::shutdown::TERMINATED.0];
    let disrupted = memory.ended.as_ref().filter(|(reason, _)| by_node.contains(&reason.as_str()));
    let disrupted = disrupted
        .map(|(_, message)| ("DisruptionTarget", true, Some(("TerminationByKubelet", message.clone()))));
    let restarting = anew::can_happen(pod).then(|| match phase {
        "Succeeded" | "Failed" => (RESTARTING, false, Some((why_unready(phase, &[]).0, String::new()))),
        _ if look.anew.is_due() => {
            (RESTARTING, true, Some(RESTARTING_WHY).map(|(why, how)| (why, how.to_owned())))
        }
        _ => (RESTARTING, false, None),
    });
    // A pod that was not disrupted does not say so.
    let said = conditions.all(
        disrupted
            .into_iter()
            .chain([
                ("PodReadyToStartContainers", seen.sandbox().is_some(), None),
                ("Initialized", initialized, uninitialized),
                ("Ready", ready && closed.is_none(), closed.or(why.clone())),
                ("ContainersReady", ready, why),
            ])
            .chain(restarting),
    );
    let (reason, message) = memory.ended.clone().filter(|_| over).unzip();
    PodStatus {
        phase: Some(phase.to_owned()),
        reason: reason.or(before.reason.clone()),
        message: message.or(before.message.clone()),
        start_time: before.start_time.clone().or(Some(Time(now))),
        host_ip: host.ips.first().cloned(),
        host_ips: Some(host.ips.iter().map(|ip| HostIP { ip: ip.clone() }).collect()),
        pod_ip: ips.first().cloned(),
        pod_ips: (!ips.is_empty()).then(|| ips.into_iter().map(|ip| PodIP { ip }).collect()),
        init_container_statuses: (!inits.is_empty()).then_some(inits),
        ephemeral_container_statuses: (!looks.is_empty()).then_some(looks),
        container_statuses: (!mains.is_empty()).then_some(mains),
        observed_generation: pod.metadata.generation,
        resources: Some(resources),
        allocated_resources: (!allocated.is_empty()).then_some(allocated),
        conditions: Some(memory.resizing.conditions().filter(|_| !over).chain(said).collect()),
        ..before.clone()
    }
}

fn known_ips(before: &PodStatus) -> Vec<String> {
    before.pod_ips.iter().flatten().map(|ip| ip.ip.clone()).collect()
}

struct Look<'a> {
    pod: &'a Pod,
    seen: &'a Observed,
    memory: &'a Memory,
    host: &'a Host<'a>,
    now: Timestamp,
    anew: Anew<'a>,
}

impl Look<'_> {
    fn inits(&self) -> impl Iterator<Item = &Container> {
        self.pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten())
    }

    fn is_done(&self, container: &Container) -> bool {
        let Some(run) = self.anew.latest(&container.name) else { return false };
        match run.state {
            State::Exited { code, .. } if !is_sidecar(container) => code == 0,
            State::Running { .. } if is_sidecar(container) => self.is_started(container, run),
            State::Exited { .. } => is_finished(self.pod, self.seen, self.memory),
            _ => false,
        }
    }

    fn initialized(&self) -> bool {
        // Containers that have run at all did so because everything before them was done.
        let began = |container: &Container| self.seen.latest(&container.name).is_some();
        self.inits().all(|container| self.is_done(container))
            || self.pod.spec.iter().any(|spec| spec.containers.iter().any(began))
    }

    /// Whether others wait for it, which may be so again in a pod that once was initialized: in another sandbox, or when all
    /// begin anew.
    fn is_under_way(&self, container: &Container) -> bool {
        let run = self.seen.latest(&container.name).filter(|run| run.state.is_running());
        run.is_some_and(|run| {
            let wait_no_more = |main: &Container| {
                self.anew.latest(&main.name).is_some_and(|began| began.sandbox == run.sandbox)
            };
            let began = self.pod.spec.iter().any(|spec| spec.containers.iter().any(wait_no_more));
            !is_sidecar(container) || !began && !self.is_started(container, run)
        })
    }

    fn uninitialized(&self) -> (&'static str, String) {
        let names: Vec<&str> = self
            .inits()
            .filter(|container| !self.is_done(container))
            .map(|container| container.name.as_str())
            .collect();
        ("ContainersNotInitialized", format!("containers with incomplete status: [{}]", names.join(" ")))
    }

    /// What others have yet to say yes to.
    fn closed_gates(&self, before: &PodStatus) -> Vec<String> {
        let gates = self.pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
        let closed = gates.filter_map(|gate| {
            let type_ = &gate.condition_type;
            match before.conditions.iter().flatten().find(|condition| condition.type_ == *type_) {
                None => {
                    Some(format!("corresponding condition of pod readiness gate {type_:?} does not exist."))
                }
                Some(known) if known.status != "True" => Some(format!(
                    "the status of pod readiness gate {type_:?} is not \"True\", but {}",
                    known.status
                )),
                Some(_) => None,
            }
        });
        closed.collect()
    }

    fn phase(&self, initialized: bool, mains: &[ContainerStatus]) -> &'static str {
        // What is over stays over, though nothing may be left to tell it by.
        match self.pod.status.as_ref().and_then(|status| status.phase.as_deref()) {
            Some("Succeeded") => return "Succeeded",
            Some("Failed") => return "Failed",
            _ => {}
        }
        let ends = self.memory.ended.is_some() || failed_init(self.pod, self.seen);
        // Nothing is over as long as something runs.
        if ends && self.seen.running().next().is_none() {
            return "Failed";
        }
        if !initialized || self.inits().any(|container| self.is_under_way(container)) {
            return "Pending";
        }
        let code =
            |container: &ContainerStatus| Some(container.state.as_ref()?.terminated.as_ref()?.exit_code);
        let stopped = self.pod.is_deleting()
            && self.seen.running().next().is_none()
            && !mains.is_empty()
            && mains.iter().all(|container| code(container).is_some());
        if stopped || is_finished(self.pod, self.seen, self.memory) && !self.has_running_sidecar() {
            let well = mains.iter().all(|container| code(container) == Some(0));
            return if well { "Succeeded" } else { "Failed" };
        }
        let never_ran = |container: &ContainerStatus| self.seen.latest(&container.name).is_none();
        if mains.iter().any(never_ran) { "Pending" } else { "Running" }
    }

    /// Sidecars are stopped once all else is over, and the pod is over once they have stopped.
    fn has_running_sidecar(&self) -> bool {
        let is_running = |container: &Container| {
            self.seen.latest(&container.name).is_some_and(|run| run.state.is_running())
        };
        self.inits().any(|container| is_sidecar(container) && is_running(container))
    }

    fn init(&self, container: &Container) -> ContainerStatus {
        let mut status = self.container(container, "PodInitializing");
        if !is_sidecar(container) {
            let end = status.state.as_ref().and_then(|state| state.terminated.as_ref());
            status.ready = end.is_some_and(|end| end.exit_code == 0);
        }
        status
    }

    /// What was said last of a container that the runtime does not know any more: how it ended stays true.
    fn told(&self, container: &Container) -> Option<ContainerStatus> {
        let told = self.before(&container.name)?;
        told.state.as_ref()?.terminated.as_ref()?;
        let is_gone = self.seen.latest(&container.name).is_none();
        (is_gone && !self.memory.failures.contains_key(&container.name)).then(|| told.clone())
    }

    /// The status of a container that was stopped for a resize and is about to be started again: as it was before. Its end
    /// is not the container's, and the API would not let it start again where the restart policy does not.
    fn before_restart(&self, container: &Container) -> Option<ContainerStatus> {
        let run = self.seen.latest(&container.name)?;
        let restarts = run.state.is_exited() && self.memory.resized.contains(&run.id);
        if !restarts || self.pod.is_deleting() || self.memory.ended.is_some() {
            return None;
        }
        let before = self.before(&container.name)?;
        before.state.as_ref()?.running.as_ref()?;
        Some(ContainerStatus { ready: false, started: Some(false), ..before.clone() })
    }

    fn container(&self, container: &Container, idle: &str) -> ContainerStatus {
        if let Some(status) = self.told(container).or_else(|| self.before_restart(container)) {
            return status;
        }
        let run = self.seen.latest(&container.name);
        let state = self.state(container, run, idle);
        let running = run.is_some_and(|run| run.state.is_running());
        let health = run.and_then(|run| self.memory.health.get(&run.id));
        let ready = match health {
            Some(health) => health.ready,
            None => container.readiness_probe.is_none() && container.startup_probe.is_none(),
        };
        let last = match (&state.waiting, run) {
            // The newest run is over and the next has not begun: it is the last one.
            (Some(_), Some(run)) => Some(run),
            _ => self.seen.previous(&container.name),
        };
        let last =
            last.and_then(|run| if self.anew.is_past(run) { Some(put_away()) } else { self.ended(run) });
        let starts_anew = run.filter(|run| self.starts_anew(run)).is_some();
        let shown = run.filter(|run| run.state != State::Created);
        let before = self.before(&container.name).filter(|_| running);
        ContainerStatus {
            name: container.name.clone(),
            image: shown.map_or_else(|| container.image.clone().unwrap_or_default(), |run| run.image.clone()),
            image_id: shown.map(|run| run.image_id.clone()).unwrap_or_default(),
            container_id: shown.map(|run| self.id(run)),
            state: Some(state),
            last_state: Some(last.unwrap_or_default()),
            restart_count: run
                .map_or(0, |run| i32::try_from(run.attempt).unwrap_or(i32::MAX))
                .saturating_add(i32::from(starts_anew)),
            ready: running && ready,
            started: Some(running && run.is_some_and(|run| self.is_started(container, run))),
            resources: run.map(|run| resources::of_container(container, run, self.memory, before)),
            allocated_resources: run
                .and_then(|_| container.resources.as_ref()?.requests.clone())
                .filter(|requests| !requests.is_empty()),
            user: shown.and_then(|run| run.user.clone()).map(|linux| ContainerUser { linux: Some(linux) }),
            volume_mounts: container
                .volume_mounts
                .as_ref()
                .map(|mounts| mounts.iter().map(|mount| mount_status(mount, self.host.recursive)).collect()),
            ..ContainerStatus::default()
        }
    }

    /// What was said last of a container.
    fn before(&self, name: &str) -> Option<&ContainerStatus> {
        let status = self.pod.status.as_ref()?;
        let told = [
            &status.container_statuses,
            &status.init_container_statuses,
            &status.ephemeral_container_statuses,
        ];
        told.into_iter().flatten().flatten().find(|told| told.name == name)
    }

    fn is_started(&self, container: &Container, run: &Ran) -> bool {
        match self.memory.health.get(&run.id) {
            Some(health) => health.started,
            None => container.startup_probe.is_none(),
        }
    }

    fn state(&self, container: &Container, run: Option<&Ran>, idle: &str) -> ContainerState {
        if let Some(Ran { state: State::Running { since }, .. }) = run {
            let running = ContainerStateRunning { started_at: Some(Time(*since)) };
            return ContainerState { running: Some(running), ..ContainerState::default() };
        }
        if let Some(failure) = failure(&container.name, run, self.memory) {
            if failure.quiet_from().is_some_and(|from| from <= self.now) {
                let image = container.image.as_deref().unwrap_or_default();
                let message =
                    format!("Back-off pulling image {image:?}: {}: {}", failure.reason, failure.message);
                return waiting("ImagePullBackOff", &message);
            }
            return waiting(&failure.reason, &failure.message);
        }
        if run.is_some_and(|run| self.starts_anew(run)) {
            return waiting(anew::REASON, anew::MESSAGE);
        }
        let over = is_finished(self.pod, self.seen, self.memory);
        let again = |code: i32| !over && comes_again(self.pod, container, code);
        match run.map(|run| (run, run.state)) {
            Some((run, State::Exited { code, .. })) if again(code) && !self.pod.is_deleting() => {
                if waits_from(run, self.memory).is_some_and(|from| from <= self.now) {
                    return self.back_off(container, pause(run, self.memory));
                }
                // It is about to be started again; until then it is what it was.
                match self.memory.failures.get(&container.name) {
                    Some(failure) => waiting(&failure.reason, &failure.message),
                    None => self.ended(run).unwrap_or_default(),
                }
            }
            Some((run, State::Exited { .. })) => self.ended(run).unwrap_or_default(),
            _ => waiting(idle, ""),
        }
    }

    /// Whether a run was put away, so that the next can begin.
    fn starts_anew(&self, run: &Ran) -> bool {
        let ends = self.pod.is_deleting() || self.memory.ended.is_some();
        !ends && self.anew.is_cleared(run)
    }

    fn back_off(&self, container: &Container, pause: SignedDuration) -> ContainerState {
        let pod = self.pod;
        let pause = match (pause.as_secs() / 60, pause.as_secs() % 60) {
            (0, seconds) => format!("{seconds}s"),
            (minutes, seconds) => format!("{minutes}m{seconds}s"),
        };
        let (name, namespace, uid) = (pod.name(), pod.namespace(), pod.uid());
        let message = format!(
            "back-off {pause} restarting failed container={} pod={name}_{namespace}({uid})",
            container.name
        );
        waiting("CrashLoopBackOff", &message)
    }

    fn ended(&self, run: &Ran) -> Option<ContainerState> {
        let State::Exited { since, at, code } = run.state else { return None };
        let reason = match run.reason.as_str() {
            "" if code == 0 => "Completed",
            "" => "Error",
            reason => reason,
        };
        let end = ContainerStateTerminated {
            exit_code: code,
            reason: Some(reason.to_owned()),
            message: (!run.message.is_empty()).then(|| run.message.clone()),
            started_at: Some(Time(since)),
            finished_at: Some(Time(at)),
            container_id: Some(self.id(run)),
            signal: None,
        };
        Some(ContainerState { terminated: Some(end), ..ContainerState::default() })
    }

    fn id(&self, run: &Ran) -> String {
        format!("{}://{}", self.host.runtime, run.id)
    }
}

/// How a run ended that others have put an end to.
fn put_away() -> ContainerState {
    let end = ContainerStateTerminated {
        exit_code: 137,
        reason: Some(anew::REASON.to_owned()),
        message: Some(anew::MESSAGE.to_owned()),
        ..ContainerStateTerminated::default()
    };
    ContainerState { terminated: Some(end), ..ContainerState::default() }
}

fn waiting(reason: &str, message: &str) -> ContainerState {
    let message = (!message.is_empty()).then(|| message.to_owned());
    let waiting = ContainerStateWaiting { reason: Some(reason.to_owned()), message };
    ContainerState { waiting: Some(waiting), ..ContainerState::default() }
}

fn mount_status(mount: &k8s_openapi::api::core::v1::VolumeMount, recursive: bool) -> VolumeMountStatus {
    let is_recursive = crate::volumes::is_recursively_read_only(mount, recursive) == Ok(true);
    let how = if is_recursive { "Enabled" } else { "Disabled" };
    VolumeMountStatus {
        name: mount.name.clone(),
        mount_path: mount.mount_path.clone(),
        read_only: mount.read_only,
        recursive_read_only: mount.read_only.filter(|read_only| *read_only).map(|_| how.to_owned()),
        ..VolumeMountStatus::default()
    }
}

#[cfg(test)]
mod tests;
