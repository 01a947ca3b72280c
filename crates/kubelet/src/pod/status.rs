//! Computes the status of a pod: phase, conditions and container states, with upstream's reasons
//! and texts. Pure.

mod resources;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, ContainerUser, HostIP, Pod, PodIP, PodStatus, VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::Object as _;
use reconcile::conditions::{PodConditions, unready_reason};

use super::back_off::{back_off_delay, back_off_visible_at, start_failure};
use super::plan::{init_failed, is_finished, is_sidecar, will_restart};
use super::resize::status::{IN_PROGRESS, PENDING};
use super::restart_all_containers::{self, RestartAllContainers};
use crate::observed::{ContainerRun, ObservedPod, State};
use crate::worker_state::PodWorkerState;

/// The condition of pods with a `RestartAllContainers` rule, and its reason and message while all
/// containers are about to restart.
const RESTART_ALL_CONDITION: &str = "AllContainersRestarting";
const RESTART_ALL_REASON: (&str, &str) =
    ("RestartAllContainersStarted", "container exited with restart policy rule");

/// What the node contributes to the status of its pods.
pub struct HostInfo<'a> {
    /// The first is the primary address; there may be one of the other IP family.
    pub ips: &'a [String],
    /// The runtime's name, which is the scheme of container IDs such as `containerd://id`.
    pub runtime: &'a str,
    /// Whether the runtime handler of the pod supports recursive read-only mounts.
    pub recursive_read_only: bool,
}

/// The status of a pod, as upstream's `generateAPIPodStatus`.
pub fn generate_pod_status(
    pod: &Pod,
    seen: &ObservedPod,
    worker_state: &PodWorkerState,
    host: &HostInfo<'_>,
    now: Timestamp,
) -> PodStatus {
    let before = pod.status.clone().unwrap_or_default();
    let spec = pod.spec.clone().unwrap_or_default();
    let context = StatusContext {
        pod,
        seen,
        worker_state,
        host,
        now,
        restart_all: RestartAllContainers::of(pod, seen),
    };
    let init_statuses: Vec<_> =
        spec.init_containers.iter().flatten().map(|container| context.init(container)).collect();
    let initialized = context.initialized();
    let waiting_reason =
        if init_statuses.is_empty() || initialized { "ContainerCreating" } else { "PodInitializing" };
    let main_statuses: Vec<_> =
        spec.containers.iter().map(|container| context.container(container, waiting_reason)).collect();
    let phase = context.phase(initialized, &main_statuses);
    let over = matches!(phase, "Succeeded" | "Failed");
    // Sidecars count as well: a pod is not ready before they are.
    let sidecars =
        spec.init_containers.iter().flatten().zip(&init_statuses).filter(|(spec, _)| is_sidecar(spec));
    let counted = sidecars.map(|(_, status)| status).chain(&main_statuses);
    let unready: Vec<&str> =
        counted.filter(|container| !container.ready).map(|container| container.name.as_str()).collect();
    let ready = !over && initialized && unready.is_empty();
    let gates = context.failed_readiness_gates(&before);
    let not_ready_reason = (!ready).then(|| unready_reason(phase, &unready));
    let closed = (ready && !gates.is_empty()).then(|| ("ReadinessGatesNotReady", gates.join(", ")));
    let uninitialized = (!initialized).then(|| context.uninitialized());
    let ips = if spec.host_network == Some(true) {
        host.ips.to_vec()
    } else {
        seen.sandbox().map(|sandbox| sandbox.ips.clone()).unwrap_or_default()
    };
    // A terminated pod keeps its addresses.
    let ips = if ips.is_empty() { previous_ips(&before) } else { ips };
    let (resources, allocated) = resources::pod_resources(pod, worker_state, phase == "Running");
    // Resize conditions belong to the kubelet and end with the resize, so the old ones are dropped.
    let resizing = [PENDING, IN_PROGRESS];
    let before = PodStatus {
        conditions: before.conditions.map(|all| {
            all.into_iter().filter(|condition| !resizing.contains(&condition.type_.as_str())).collect()
        }),
        ..before
    };
    let conditions = PodConditions { before: &before, now, generation: pod.metadata.generation };
    let ephemeral_statuses: Vec<_> = spec
        .ephemeral_containers
        .iter()
        .flatten()
        .map(|container| ContainerStatus {
            ready: false,
            ..context.container(&super::from_ephemeral(container), "")
        })
        .collect();
    let by_node = [crate::EVICTED_REASON, crate::shutdown::TERMINATED.0];
    let disrupted =
        worker_state.termination_reason.as_ref().filter(|(reason, _)| by_node.contains(&reason.as_str()));
    let disrupted = disrupted
        .map(|(_, message)| ("DisruptionTarget", true, Some(("TerminationByKubelet", message.clone()))));
    let restart_condition = restart_all_containers::has_restart_rule(pod).then(|| match phase {
        "Succeeded" | "Failed" => {
            (RESTART_ALL_CONDITION, false, Some((unready_reason(phase, &[]).0, String::new())))
        }
        _ if context.restart_all.is_restart_pending() => {
            (RESTART_ALL_CONDITION, true, Some(RESTART_ALL_REASON).map(|(why, how)| (why, how.to_owned())))
        }
        _ => (RESTART_ALL_CONDITION, false, None),
    });
    // The condition is omitted if the pod was not disrupted.
    let updated_conditions = conditions.with_existing(
        disrupted
            .into_iter()
            .chain([
                ("PodReadyToStartContainers", seen.sandbox().is_some(), None),
                ("Initialized", initialized, uninitialized),
                ("Ready", ready && closed.is_none(), closed.or(not_ready_reason.clone())),
                ("ContainersReady", ready, not_ready_reason),
            ])
            .chain(restart_condition),
    );
    let (reason, message) = worker_state.termination_reason.clone().filter(|_| over).unzip();
    PodStatus {
        phase: Some(phase.to_owned()),
        reason: reason.or(before.reason.clone()),
        message: message.or(before.message.clone()),
        start_time: before.start_time.clone().or(Some(Time(now))),
        host_ip: host.ips.first().cloned(),
        host_ips: Some(host.ips.iter().map(|ip| HostIP { ip: ip.clone() }).collect()),
        pod_ip: ips.first().cloned(),
        pod_ips: (!ips.is_empty()).then(|| ips.into_iter().map(|ip| PodIP { ip }).collect()),
        init_container_statuses: (!init_statuses.is_empty()).then_some(init_statuses),
        ephemeral_container_statuses: (!ephemeral_statuses.is_empty()).then_some(ephemeral_statuses),
        container_statuses: (!main_statuses.is_empty()).then_some(main_statuses),
        observed_generation: pod.metadata.generation,
        resources: Some(resources),
        allocated_resources: (!allocated.is_empty()).then_some(allocated),
        conditions: Some(
            worker_state.resize_status.conditions().filter(|_| !over).chain(updated_conditions).collect(),
        ),
        ..before.clone()
    }
}

fn previous_ips(before: &PodStatus) -> Vec<String> {
    before.pod_ips.iter().flatten().map(|ip| ip.ip.clone()).collect()
}

struct StatusContext<'a> {
    pod: &'a Pod,
    seen: &'a ObservedPod,
    worker_state: &'a PodWorkerState,
    host: &'a HostInfo<'a>,
    now: Timestamp,
    restart_all: RestartAllContainers<'a>,
}

impl StatusContext<'_> {
    fn init_containers(&self) -> impl Iterator<Item = &Container> {
        self.pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten())
    }

    fn is_done(&self, container: &Container) -> bool {
        let Some(run) = self.restart_all.latest(&container.name) else { return false };
        match run.state {
            State::Exited { code, .. } if !is_sidecar(container) => code == 0,
            State::Running { .. } if is_sidecar(container) => self.is_started(container, run),
            State::Exited { .. } => is_finished(self.pod, self.seen, self.worker_state),
            _ => false,
        }
    }

    fn initialized(&self) -> bool {
        // A main container that has run was started after all init containers were done.
        let has_started = |container: &Container| self.seen.latest(&container.name).is_some();
        self.init_containers().all(|container| self.is_done(container))
            || self.pod.spec.iter().any(|spec| spec.containers.iter().any(has_started))
    }

    /// Whether main containers wait for this running init container. That may be the case again in
    /// a pod that was initialized before: in a new sandbox, or when all containers restart.
    fn blocks_start(&self, container: &Container) -> bool {
        let run = self.seen.latest(&container.name).filter(|run| run.state.is_running());
        run.is_some_and(|run| {
            let main_has_started = |main: &Container| {
                self.restart_all
                    .latest(&main.name)
                    .is_some_and(|run_after_restart| run_after_restart.sandbox == run.sandbox)
            };
            let any_started = self.pod.spec.iter().any(|spec| spec.containers.iter().any(main_has_started));
            !is_sidecar(container) || !any_started && !self.is_started(container, run)
        })
    }

    fn uninitialized(&self) -> (&'static str, String) {
        let names: Vec<&str> = self
            .init_containers()
            .filter(|container| !self.is_done(container))
            .map(|container| container.name.as_str())
            .collect();
        ("ContainersNotInitialized", format!("containers with incomplete status: [{}]", names.join(" ")))
    }

    /// Messages about readiness gates whose condition is not `True`.
    fn failed_readiness_gates(&self, before: &PodStatus) -> Vec<String> {
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

    fn phase(&self, initialized: bool, main_statuses: &[ContainerStatus]) -> &'static str {
        // A final phase does not change, even if the runtime has nothing left of the pod.
        match self.pod.status.as_ref().and_then(|status| status.phase.as_deref()) {
            Some("Succeeded") => return "Succeeded",
            Some("Failed") => return "Failed",
            _ => {}
        }
        let ends = self.worker_state.termination_reason.is_some() || init_failed(self.pod, self.seen);
        // The phase is not final while a container runs.
        if ends && self.seen.running().next().is_none() {
            return "Failed";
        }
        if !initialized || self.init_containers().any(|container| self.blocks_start(container)) {
            return "Pending";
        }
        let code =
            |container: &ContainerStatus| Some(container.state.as_ref()?.terminated.as_ref()?.exit_code);
        let stopped = self.pod.is_deleting()
            && self.seen.running().next().is_none()
            && !main_statuses.is_empty()
            && main_statuses.iter().all(|container| code(container).is_some());
        if stopped || is_finished(self.pod, self.seen, self.worker_state) && !self.has_running_sidecar() {
            let succeeded = main_statuses.iter().all(|container| code(container) == Some(0));
            return if succeeded { "Succeeded" } else { "Failed" };
        }
        let never_started = |container: &ContainerStatus| self.seen.latest(&container.name).is_none();
        if main_statuses.iter().any(never_started) { "Pending" } else { "Running" }
    }

    /// Whether a sidecar runs. Sidecars are stopped after the main containers, and the pod
    /// terminates when they have stopped.
    fn has_running_sidecar(&self) -> bool {
        let is_running = |container: &Container| {
            self.seen.latest(&container.name).is_some_and(|run| run.state.is_running())
        };
        self.init_containers().any(|container| is_sidecar(container) && is_running(container))
    }

    fn init(&self, container: &Container) -> ContainerStatus {
        let mut status = self.container(container, "PodInitializing");
        if !is_sidecar(container) {
            let end = status.state.as_ref().and_then(|state| state.terminated.as_ref());
            status.ready = end.is_some_and(|end| end.exit_code == 0);
        }
        status
    }

    /// The last reported status of a container that the runtime no longer has: how it terminated
    /// remains true.
    fn last_terminated_status(&self, container: &Container) -> Option<ContainerStatus> {
        let last_status = self.previous_status(&container.name)?;
        last_status.state.as_ref()?.terminated.as_ref()?;
        let is_removed = self.seen.latest(&container.name).is_none();
        (is_removed && !self.worker_state.failures.contains_key(&container.name)).then(|| last_status.clone())
    }

    /// The last reported status of a container that was stopped for a resize and is about to
    /// restart. Its exit is not reported: the API server rejects a transition out of the terminated
    /// state if the restart policy does not allow a restart.
    fn status_before_restart(&self, container: &Container) -> Option<ContainerStatus> {
        let run = self.seen.latest(&container.name)?;
        let restarts = run.state.is_exited() && self.worker_state.stopped_for_resize.contains(&run.id);
        if !restarts || self.pod.is_deleting() || self.worker_state.termination_reason.is_some() {
            return None;
        }
        let before = self.previous_status(&container.name)?;
        before.state.as_ref()?.running.as_ref()?;
        Some(ContainerStatus { ready: false, started: Some(false), ..before.clone() })
    }

    fn container(&self, container: &Container, waiting_reason: &str) -> ContainerStatus {
        if let Some(status) =
            self.last_terminated_status(container).or_else(|| self.status_before_restart(container))
        {
            return status;
        }
        let run = self.seen.latest(&container.name);
        let state = self.state(container, run, waiting_reason);
        let running = run.is_some_and(|run| run.state.is_running());
        let health = run.and_then(|run| self.worker_state.health.get(&run.id));
        let ready = match health {
            Some(health) => health.ready,
            None => container.readiness_probe.is_none() && container.startup_probe.is_none(),
        };
        let last = match (&state.waiting, run) {
            // The newest run has ended and the next one has not started, so it is the last one.
            (Some(_), Some(run)) => Some(run),
            _ => self.seen.previous(&container.name),
        };
        let last = last.and_then(|run| {
            if self.restart_all.is_obsolete(run) {
                Some(terminated_by_restart())
            } else {
                self.terminated_state(run)
            }
        });
        let will_restart = run.filter(|run| self.will_restart(run)).is_some();
        let visible_run = run.filter(|run| run.state != State::Created);
        let before = self.previous_status(&container.name).filter(|_| running);
        ContainerStatus {
            name: container.name.clone(),
            image: visible_run
                .map_or_else(|| container.image.clone().unwrap_or_default(), |run| run.image.clone()),
            image_id: visible_run.map(|run| run.image_id.clone()).unwrap_or_default(),
            container_id: visible_run.map(|run| self.id(run)),
            state: Some(state),
            last_state: Some(last.unwrap_or_default()),
            restart_count: run
                .map_or(0, |run| i32::try_from(run.attempt).unwrap_or(i32::MAX))
                .saturating_add(i32::from(will_restart)),
            ready: running && ready,
            started: Some(running && run.is_some_and(|run| self.is_started(container, run))),
            resources: run
                .map(|run| resources::container_resources(container, run, self.worker_state, before)),
            allocated_resources: run
                .and_then(|_| container.resources.as_ref()?.requests.clone())
                .filter(|requests| !requests.is_empty()),
            user: visible_run
                .and_then(|run| run.user.clone())
                .map(|linux| ContainerUser { linux: Some(linux) }),
            volume_mounts: container.volume_mounts.as_ref().map(|mounts| {
                mounts.iter().map(|mount| mount_status(mount, self.host.recursive_read_only)).collect()
            }),
            ..ContainerStatus::default()
        }
    }

    /// The last reported status of a container.
    fn previous_status(&self, name: &str) -> Option<&ContainerStatus> {
        let status = self.pod.status.as_ref()?;
        let status_lists = [
            &status.container_statuses,
            &status.init_container_statuses,
            &status.ephemeral_container_statuses,
        ];
        status_lists.into_iter().flatten().flatten().find(|container_status| container_status.name == name)
    }

    fn is_started(&self, container: &Container, run: &ContainerRun) -> bool {
        match self.worker_state.health.get(&run.id) {
            Some(health) => health.started,
            None => container.startup_probe.is_none(),
        }
    }

    fn state(
        &self,
        container: &Container,
        run: Option<&ContainerRun>,
        waiting_reason: &str,
    ) -> ContainerState {
        if let Some(ContainerRun { state: State::Running { since }, .. }) = run {
            let running = ContainerStateRunning { started_at: Some(Time(*since)) };
            return ContainerState { running: Some(running), ..ContainerState::default() };
        }
        if let Some(failure) = start_failure(&container.name, run, self.worker_state) {
            if failure.back_off_visible_at().is_some_and(|from| from <= self.now) {
                let image = container.image.as_deref().unwrap_or_default();
                let message =
                    format!("Back-off pulling image {image:?}: {}: {}", failure.reason, failure.message);
                return waiting("ImagePullBackOff", &message);
            }
            return waiting(&failure.reason, &failure.message);
        }
        if run.is_some_and(|run| self.will_restart(run)) {
            return waiting(restart_all_containers::REASON, restart_all_containers::MESSAGE);
        }
        let over = is_finished(self.pod, self.seen, self.worker_state);
        let again = |code: i32| !over && will_restart(self.pod, container, code);
        match run.map(|run| (run, run.state)) {
            Some((run, State::Exited { code, .. })) if again(code) && !self.pod.is_deleting() => {
                if back_off_visible_at(run, self.worker_state).is_some_and(|from| from <= self.now) {
                    return self.crash_loop_state(container, back_off_delay(run, self.worker_state));
                }
                // It is about to restart. Until then its exit is reported.
                match self.worker_state.failures.get(&container.name) {
                    Some(failure) => waiting(&failure.reason, &failure.message),
                    None => self.terminated_state(run).unwrap_or_default(),
                }
            }
            Some((run, State::Exited { .. })) => self.terminated_state(run).unwrap_or_default(),
            _ => waiting(waiting_reason, ""),
        }
    }

    /// Whether a run is obsolete and stopped, so that its container can restart.
    fn will_restart(&self, run: &ContainerRun) -> bool {
        let ends = self.pod.is_deleting() || self.worker_state.termination_reason.is_some();
        !ends && self.restart_all.is_ready_to_restart(run)
    }

    fn crash_loop_state(&self, container: &Container, pause: SignedDuration) -> ContainerState {
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

    fn terminated_state(&self, run: &ContainerRun) -> Option<ContainerState> {
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

    fn id(&self, run: &ContainerRun) -> String {
        format!("{}://{}", self.host.runtime, run.id)
    }
}

/// The last state of a run that ended because all containers restart.
fn terminated_by_restart() -> ContainerState {
    let end = ContainerStateTerminated {
        exit_code: 137,
        reason: Some(restart_all_containers::REASON.to_owned()),
        message: Some(restart_all_containers::MESSAGE.to_owned()),
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
    let is_recursive = crate::volumes::is_recursive_read_only(mount, recursive) == Ok(true);
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
