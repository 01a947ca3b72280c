//! The pod worker: observes the runtime, plans, executes the plan and updates the status. There is
//! one at a time for each pod. Counterpart of upstream's pod workers and `syncPod`.

mod cleanup;
mod resize;
mod stop;

use cleanup::{clean_up_finished_pod, sync_terminated_pod};
pub use cleanup::{clean_up_host, remove_all};

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Error, EventType, Key, Object as _, ReconcileAction};
use runtime::Runtime;
use tokio::sync::oneshot;
use tokio::time::error::Elapsed;

use crate::Node;
use crate::admission::{self, AdmissionFailure};
use crate::config::{self, Settings};
use crate::env::Addresses;
use crate::observed::{ContainerRun, ObservedPod, POD_NAME, POD_NAMESPACE, POD_UID, State};
use crate::pod::back_off::restart_at;
use crate::pod::container as find;
use crate::pod::plan::{Action, compute_pod_actions, deadline, is_finished, will_restart};
use crate::pod::resize::PodResources;
use crate::pod::restart_all_containers::RestartAllContainers;
use crate::pod::status::{HostInfo, generate_pod_status};
use crate::sources::CachedSources;
use crate::start_container::StartResult;
use crate::static_pods::is_static;
use crate::volumes::{self, VolumeContext};
use crate::worker_state::StartFailure;

/// More rounds than any pod needs in one sync. What is left is done by the next one.
const MAX_SYNC_ROUNDS: usize = 40;
/// Delay before devices or volumes that could not be released are tried again.
const UNPREPARE_RETRY: Duration = Duration::from_secs(5);
/// Delay before a failed status update is tried again.
const STATUS_RETRY: Duration = Duration::from_secs(5);
/// Timeout of a status update. Containers must not wait for an API server that does not respond.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a status is held back that will change in a moment.
const TEMPORARY_STATUS_DELAY: Duration = Duration::from_millis(100);
/// Delay before volumes that could not be refreshed are tried again.
const VOLUME_REFRESH_RETRY: SignedDuration = SignedDuration::from_secs(10);
/// How often a sandbox is retried whose name the runtime still reserves, before that is reported as an
/// error.
const MAX_SANDBOX_NAME_RETRIES: u32 = 30;

/// Syncs one pod.
pub async fn reconcile(node: &Arc<Node>, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(pod) = node.pod(key) else {
        return Ok(ReconcileAction::Forget);
    };
    // Before the caches are filled, the objects that pods from the API reference are missing. All pods
    // are enqueued once they are filled.
    if !is_static(&pod) && !*node.is_filled.borrow() {
        return Ok(ReconcileAction::AwaitChange);
    }
    if crate::pod::is_terminal(&pod) && !pod.is_deleting() {
        if is_static(&pod) && !resend_static_status(node, &pod).await {
            return Ok(ReconcileAction::RequeueAfter(STATUS_RETRY));
        }
        return Ok(clean_up_finished_pod(node, &pod).await);
    }
    if let Some(referred) = node.object_manager.as_ref().filter(|_| !pod.is_deleting()) {
        referred.wait_synced(&pod).await?;
    }
    let uid = pod.uid().to_owned();
    let mut next = ReconcileAction::AwaitChange;
    let mut status_pending = false;
    for _ in 0..MAX_SYNC_ROUNDS {
        // The pod may have been changed or deleted since the last round. Another pod with its name
        // has its own sync.
        let Some(pod) = node.pod_with_uid(key, &uid) else {
            node.forget_pod(&uid);
            return Ok(ReconcileAction::Forget);
        };
        let pod = node.with_status(&pod);
        let seen = match observe(&*node.runtime, &pod, &node.settings).await {
            Ok(seen) => seen,
            Err(error) => {
                tracing::warn!(%error, pod = %key, "cannot get the state of a pod from the container runtime, will retry");
                return Ok(ReconcileAction::RequeueAfter(Duration::from_secs(5)));
            }
        };
        if is_deferred_by_shutdown(node, &pod, &seen) {
            return Ok(ReconcileAction::AwaitChange);
        }
        node.start_probe_workers(&pod, &seen);
        let now = node.ctx.clock.now();
        node.with_pod_state(&pod, |worker_state| {
            for container in crate::pod::containers(&pod) {
                worker_state.set_image(&container.name, container.image.as_deref().unwrap_or_default());
            }
        });
        enforce_active_deadline(node, &pod, now);
        reject_if_not_allowed(node, &pod, &seen, now).await;
        let allocated = node.update_allocation(&pod);
        node.update_resize_progress(&pod, &seen);
        // From here on, the spec has the allocated resources.
        let pod = allocated;
        record_back_off_events(node, &pod, &seen, now);
        let worker_state = node.with_pod_state(&pod, |worker_state| worker_state.clone());
        if pod.is_deleting() || is_finished(&pod, &seen, &worker_state) {
            node.pulls.cancel(&uid);
            if !unprepare_resources(node, &pod, &seen).await {
                return Ok(ReconcileAction::RequeueAfter(UNPREPARE_RETRY));
            }
        }
        let actions = compute_pod_actions(&pod, &seen, &worker_state, now);
        let retry_times = actions.iter().filter_map(|action| match action {
            Action::Recheck(at) => Some(*at),
            _ => None,
        });
        next = retry_times.min().map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt);
        let work: Vec<Action> =
            actions.into_iter().filter(|action| !matches!(action, Action::Recheck(_))).collect();
        let has_cleanup = work.contains(&Action::Cleanup);
        // Two states in a row are not held back.
        let delay_status = !status_pending && is_temporary_status(&work);
        let mut execution = pin!(execute_actions(node, &pod, &seen, work));
        let mut progress = None;
        if delay_status {
            progress = tokio::time::timeout(TEMPORARY_STATUS_DELAY, &mut execution).await.ok();
            if progress == Some(true) {
                // The next round reports both changes.
                status_pending = true;
                continue;
            }
        }
        let (done, finished) = oneshot::channel();
        let reporting = update_status_until(node, &pod, &seen, finished);
        // The status update takes disk time in the API server. The actions do not wait for it.
        let execution = async {
            let progress = match progress {
                Some(progress) => progress,
                None => execution.await,
            };
            drop(done);
            progress
        };
        let (status_result, progress) = tokio::join!(reporting, execution);
        if has_cleanup {
            return sync_terminated_pod(node, &pod, &seen).await;
        }
        // Containers are managed even if the API server is unreachable.
        status_pending = match status_result {
            Err(_) | Ok(Err(Error::Unreachable(_))) => true,
            Ok(result) => result.map(|()| false)?,
        };
        if !progress {
            if let Some(refresh_at) = refresh_volumes(node, &pod, &seen).await {
                next = match next {
                    ReconcileAction::RequeueAt(at) => ReconcileAction::RequeueAt(at.min(refresh_at)),
                    _ => ReconcileAction::RequeueAt(refresh_at),
                };
            }
            break;
        }
    }
    if status_pending {
        node.queue.after(key.clone(), STATUS_RETRY);
    }
    Ok(next)
}

/// Whether the pod leaves its current state at once: its first sandbox is created, or only its
/// sandboxes are stopped. The status with the pod IP is written before any container runs.
fn is_temporary_status(work: &[Action]) -> bool {
    let is_temporary =
        |action: &Action| matches!(action, Action::CreateSandbox { attempt: 0 } | Action::StopSandbox { .. });
    !work.is_empty() && work.iter().all(is_temporary)
}

/// The state of a pod in the runtime.
pub async fn observe(runtime: &dyn Runtime, pod: &Pod, settings: &Settings) -> runtime::Result<ObservedPod> {
    let labels = [(POD_UID, pod.uid())];
    let mut sandboxes = Vec::new();
    for sandbox in runtime.sandboxes(&labels).await? {
        match runtime.sandbox_status(&sandbox.id).await {
            Ok(status) => sandboxes.push(status),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let mut containers = Vec::new();
    for container in runtime.containers(&labels).await? {
        match runtime.container_status(&container.id).await {
            Ok(status) => containers.push((container.pod_sandbox_id, status)),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let mut seen = ObservedPod::new(pod, &sandboxes, &containers);
    crate::termination_message::add_messages(pod, &mut seen, settings);
    Ok(seen)
}

/// Terminates a pod that has exceeded its deadline.
fn enforce_active_deadline(node: &Node, pod: &Pod, now: Timestamp) {
    const DEADLINE_MESSAGE: &str = "Pod was active on the node longer than the specified deadline";
    if deadline(pod).is_none_or(|deadline| deadline > now) || pod.is_deleting() {
        return;
    }
    let first = node.with_pod_state(pod, |worker_state| {
        let first = worker_state.termination_reason.is_none();
        worker_state
            .termination_reason
            .get_or_insert_with(|| ("DeadlineExceeded".to_owned(), DEADLINE_MESSAGE.to_owned()));
        first
    });
    if first {
        node.ctx.events.normal(pod, "DeadlineExceeded", DEADLINE_MESSAGE);
    }
}

/// Rejects a pod that has not started yet if the node does not admit it, cannot apply its security
/// settings, is under pressure or is shutting down.
async fn reject_if_not_allowed(node: &Node, pod: &Pod, seen: &ObservedPod, now: Timestamp) {
    let has_started = !seen.sandboxes.is_empty() || !seen.containers.is_empty();
    if has_started || pod.is_deleting() {
        return;
    }
    let unconfined = || {
        let message = crate::apparmor::validate(pod)?;
        Some(AdmissionFailure { reason: "AppArmor".to_owned(), message })
    };
    let under_pressure = || {
        admission::admit_under_pressure(
            pod,
            node.maintenance
                .last_pressure()
                .is_active(now, node.settings.kubelet_config.pressure_transition_period),
        )
    };
    let forbidden_sysctls =
        || crate::sysctls::forbidden_sysctl(pod, &node.settings.kubelet_config.allowed_unsafe_sysctls);
    let rejection = shutdown_rejection(node)
        .or_else(unconfined)
        .or_else(forbidden_sysctls)
        .or_else(under_pressure)
        .or_else(|| node.admit(pod));
    let rejection = match rejection {
        Some(rejection) => Some(rejection),
        None => allocate_devices(node, pod).await,
    };
    let Some(AdmissionFailure { reason, message }) = rejection else { return };
    let first = node.with_pod_state(pod, |worker_state| {
        let first = worker_state.termination_reason.is_none();
        worker_state
            .termination_reason
            .get_or_insert_with(|| (reason.clone(), format!("Pod was rejected: {message}")));
        first
    });
    if first {
        node.ctx.events.warning(pod, &reason, message);
    }
}

/// Allocates the devices of a pod. Returns why it is rejected if there are not enough.
async fn allocate_devices(node: &Node, pod: &Pod) -> Option<AdmissionFailure> {
    let on_node = node.pods();
    let over: BTreeSet<String> =
        on_node.iter().filter(|pod| crate::pod::is_terminal(pod)).map(|pod| pod.uid().to_owned()).collect();
    let error = node.devices.allocate(pod, |uid| over.contains(uid)).await.err()?;
    let message = format!("Allocate failed due to {error}, which is unexpected");
    Some(AdmissionFailure { reason: "UnexpectedAdmissionError".to_owned(), message })
}

/// Whether the pod arrived during a shutdown and has to start after the reboot.
fn is_deferred_by_shutdown(node: &Node, pod: &Pod, seen: &ObservedPod) -> bool {
    *node.is_shutting_down.borrow()
        && node.settings.is_shutdown_default
        && seen.sandboxes.is_empty()
        && !pod.is_deleting()
}

/// Rejects a pod during a shutdown.
fn shutdown_rejection(node: &Node) -> Option<AdmissionFailure> {
    let (reason, message) = crate::shutdown::REJECTED;
    let is_late = *node.is_shutting_down.borrow();
    is_late.then(|| AdmissionFailure { reason: reason.to_owned(), message: message.to_owned() })
}

/// Unprepares the resource claims of a pod once none of its containers runs, and before the pod is
/// reported as terminated, because its devices may be allocated to other pods then. Returns `false`
/// if it has to be retried.
async fn unprepare_resources(node: &Node, pod: &Pod, seen: &ObservedPod) -> bool {
    if seen.running().next().is_some() || !node.dra.has_claims(pod.uid()) {
        return true;
    }
    let given_back = node.dra.unprepare(pod.uid()).await;
    if let Err(error) = &given_back {
        tracing::warn!(error, pod = %pod.key(), "cannot unprepare the resource claims of a pod, will retry");
    }
    given_back.is_ok()
}

/// Records an event about the back-off of each run and of each failure, once.
fn record_back_off_events(node: &Node, pod: &Pod, seen: &ObservedPod, now: Timestamp) {
    if pod.is_deleting() || node.with_pod_state(pod, |worker_state| is_finished(pod, seen, worker_state)) {
        return;
    }
    let mut events = Vec::new();
    let restart_all = RestartAllContainers::of(pod, seen);
    node.with_pod_state(pod, |worker_state| {
        for container in crate::pod::containers(pod) {
            let name = container.name.clone();
            if let Some(failure) = worker_state.failures.get(&name)
                && failure.back_off_visible_at().is_some_and(|from| from <= now)
                && worker_state.reported_back_offs.insert(format!("{name} {}", failure.attempts))
            {
                let image = container.image.as_deref().unwrap_or_default();
                let message = format!("Back-off pulling image {image:?}");
                events.push((name.clone(), EventType::Normal, "BackOff", message));
                events.push((
                    name.clone(),
                    EventType::Warning,
                    "Failed",
                    "Error: ImagePullBackOff".to_owned(),
                ));
            }
            let waits = |run: &ContainerRun| {
                let restarts =
                    matches!(run.state, State::Exited { code, .. } if will_restart(pod, &container, code));
                restarts && restart_at(run, worker_state).is_some_and(|at| at > now)
            };
            if let Some(run) = restart_all.latest(&name).filter(|run| waits(run))
                && worker_state.reported_back_offs.insert(run.id.clone())
            {
                let whole = format!("{}_{}({})", pod.name(), pod.namespace(), pod.uid());
                let message = format!("Back-off restarting failed container {name} in pod {whole}");
                events.push((name, EventType::Warning, "BackOff", message));
            }
        }
    });
    for (container, severity, reason, message) in events {
        crate::start_container::record_container_event(node, pod, &container, severity, reason, message);
    }
}

/// Writes the pod's status, and writes it again when a container becomes ready or unready before
/// `finished`: stopping containers can take as long as the grace period, and readiness probes
/// continue meanwhile.
async fn update_status_until(
    node: &Node,
    pod: &Pod,
    seen: &ObservedPod,
    mut finished: oneshot::Receiver<()>,
) -> Result<Result<(), Error>, Elapsed> {
    let mut changes = node.health_changes.subscribe();
    loop {
        changes.mark_unchanged();
        let before = node.with_pod_state(pod, |worker_state| worker_state.health.clone());
        let result = tokio::time::timeout(STATUS_TIMEOUT, update_status(node, pod, seen)).await;
        while !node.with_pod_state(pod, |worker_state| worker_state.readiness_changed(&before)) {
            tokio::select! {
                biased;
                _ = &mut finished => return result,
                Ok(()) = changes.changed() => {}
            }
        }
    }
}

/// Writes the pod's status if it has changed.
async fn update_status(node: &Node, pod: &Pod, seen: &ObservedPod) -> Result<(), Error> {
    let Some(current) = node.pod_with_uid(&pod.key(), pod.uid()) else { return Ok(()) };
    let current = node.with_status(&current);
    let worker_state = node.with_pod_state(pod, |worker_state| worker_state.clone());
    let (node_ips, recursive) = (node.settings.node_ips(), node.pod_supports_recursive_read_only(pod).await);
    let host = HostInfo { ips: &node_ips, runtime: &node.runtime_name, recursive_read_only: recursive };
    let now = node.ctx.clock.now();
    let mut status = generate_pod_status(&node.allocated(&current), seen, &worker_state, &host, now);
    node.dra.update_device_health(
        &current,
        status.container_statuses.as_deref_mut().unwrap_or_default(),
        now,
    );
    if is_static(&current) {
        return node.update_mirror_status(&current, status).await;
    }
    if current.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let updated = Pod { status: Some(status), ..Pod::clone(&current) };
    match node.ctx.replace_status(&updated).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

/// Writes the final status of a static pod to its mirror pod again, because the API server may have
/// been unreachable the first time. Returns `false` if it has to be retried.
async fn resend_static_status(node: &Node, pod: &Pod) -> bool {
    let update = node.update_mirror_status(pod, pod.status.clone().unwrap_or_default());
    matches!(tokio::time::timeout(STATUS_TIMEOUT, update).await, Ok(Ok(())))
}

/// Refreshes the volumes of a running pod, because what they are made from may have changed.
/// Returns when the next refresh is due.
async fn refresh_volumes(node: &Node, pod: &Pod, seen: &ObservedPod) -> Option<Timestamp> {
    let sandbox = seen.sandbox().filter(|_| seen.running().next().is_some())?;
    let sources = node.sources();
    let node_ips = node.settings.node_ips();
    let addresses = Addresses { host_ips: &node_ips, pod_ips: &sandbox.ips };
    let volume_context = VolumeContext {
        ctx: &node.ctx,
        sources: &sources,
        settings: &node.settings,
        csi: &node.csi,
        tmpfs_visible: node.shares_mounts,
        addresses,
        before_first_container: false,
    };
    let result = volumes::set_up(pod, &volume_context).await;
    let refresh_at = [volumes::token_refresh_time(pod, &node.settings), node.csi.republish_at(pod.uid())];
    let refresh_at = refresh_at.into_iter().flatten().min()?;
    match result {
        Ok(_) => Some(refresh_at),
        Err(error) => {
            tracing::debug!(%error, pod = %pod.key(), "cannot refresh the volumes of a pod, will retry");
            // A failed refresh is due already, so it is retried after a delay.
            Some(
                node.ctx
                    .clock
                    .now()
                    .checked_add(VOLUME_REFRESH_RETRY)
                    .map_or(refresh_at, |then| then.max(refresh_at)),
            )
        }
    }
}

/// Stops containers first, then executes the other actions in order. Returns `false` if nothing was
/// done. The remaining actions are skipped if the pod gets an earlier termination deadline or waits
/// for an image. A stop can be canceled at any time. Other actions cannot, because the result of a
/// start has to be recorded.
async fn execute_actions(node: &Arc<Node>, pod: &Pod, seen: &ObservedPod, work: Vec<Action>) -> bool {
    if work.is_empty() {
        return false;
    }
    let before = node.termination_deadline(pod);
    let stops = work.iter().filter_map(|action| match action {
        Action::Stop(stop) => Some(stop),
        _ => None,
    });
    tokio::select! {
        () = stop::stop_all(node, pod, stops) => {}
        () = node.wait_for_earlier_deadline(pod, before) => return true,
    }
    let mut progress = false;
    for action in work {
        if node.has_earlier_deadline(pod, before) {
            return true;
        }
        if execute_action(node, pod, seen, action).await == ActionResult::InProgress {
            break;
        }
        progress = true;
    }
    progress
}

/// The result of an action.
#[derive(PartialEq)]
enum ActionResult {
    Done,
    /// It is in progress, and the actions after it have to wait.
    InProgress,
}

/// Executes one action. A failure is recorded in the worker state and retried later.
async fn execute_action(node: &Arc<Node>, pod: &Pod, seen: &ObservedPod, action: Action) -> ActionResult {
    match action {
        Action::CreateSandbox { attempt } => {
            if attempt > 0 && had_containers(seen) {
                let message = "Pod sandbox changed, it will be killed and re-created.";
                node.ctx.events.normal(pod, "SandboxChanged", message);
            }
            if !remove_replaced_static_pods(node, pod).await {
                return ActionResult::InProgress;
            }
            let result = match node.dra.prepare(&node.ctx, pod).await {
                Ok(()) => create_sandbox(node, pod, attempt).await,
                Err(why) => {
                    record_unprepared(node, pod, why);
                    return ActionResult::Done;
                }
            };
            let before = node.with_pod_state(pod, |worker_state| worker_state.sandbox_failure.take());
            let attempts = before.as_ref().map_or(0, |before| before.attempts);
            // The runtime has not noticed yet that the process that requested this sandbox is gone.
            let waits =
                |message: &String| attempts < MAX_SANDBOX_NAME_RETRIES && message.contains("is reserved for");
            if let Some(message) = result.as_ref().err().filter(|message| !waits(message)) {
                node.ctx.events.warning(
                    pod,
                    "FailedCreatePodSandBox",
                    format!("Failed to create pod sandbox: {message}"),
                );
            }
            let now = node.ctx.clock.now();
            node.with_pod_state(pod, |worker_state| {
                worker_state.sandbox_failure = result.err().map(|message| match waits(&message) {
                    true => {
                        StartFailure { attempts: attempts + 1, ..StartFailure::waiting("", message, now) }
                    }
                    false => StartFailure::with_back_off(
                        before.as_ref().filter(|_| attempts < MAX_SANDBOX_NAME_RETRIES),
                        "",
                        message,
                        now,
                    ),
                });
            });
        }
        Action::Start { container, attempt } => {
            let Some(spec) = find(pod, &container) else { return ActionResult::Done };
            let started_at = node.ctx.clock.now();
            if let Some(run) = RestartAllContainers::of(pod, seen).latest(&container) {
                node.with_pod_state(pod, |worker_state| {
                    worker_state.record_restart(
                        run,
                        started_at,
                        node.settings.kubelet_config.max_restart_backoff,
                    )
                });
            }
            let result = crate::start_container::start_container(node, pod, seen, &spec, attempt).await;
            if let Ok(StartResult::Pulling) = result {
                return ActionResult::InProgress;
            }
            let now = node.ctx.clock.now();
            node.with_pod_state(pod, |worker_state| {
                let Err(failed) = result else { return drop(worker_state.failures.remove(&container)) };
                let failure = match failed.waits {
                    true => StartFailure::waiting(&failed.reason, failed.message, now),
                    false => {
                        let before = worker_state.failures.get(&container);
                        StartFailure::with_back_off(before, &failed.reason, failed.message, now)
                    }
                };
                worker_state.record_failure(&container, failure, started_at);
            });
        }
        Action::Resize(resize) => resize::apply_resize(node, pod, seen, &resize).await,
        Action::StopSandbox { id } => {
            if let Err(error) = node.runtime.stop_sandbox(&id).await {
                node.ctx.events.warning(pod, "FailedKillPod", format!("error killing pod: {error}"));
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
        Action::Stop(_) | Action::Cleanup | Action::Recheck(_) => {}
    }
    ActionResult::Done
}

/// Removes what is left of a static pod with the same name whose manifest was changed while the
/// kubelet was not running: both would have the same files and ports. Returns `false` if something
/// is left.
async fn remove_replaced_static_pods(node: &Node, pod: &Pod) -> bool {
    if !is_static(pod) {
        return true;
    }
    let named = [(POD_NAME, pod.name()), (POD_NAMESPACE, pod.namespace())];
    let Ok(sandboxes) = node.runtime.sandboxes(&named).await else { return false };
    let uids = sandboxes.iter().filter_map(|sandbox| sandbox.labels.get(POD_UID));
    let others: BTreeSet<&String> = uids.filter(|uid| *uid != pod.uid()).collect();
    for uid in others {
        tracing::info!(pod = %pod.key(), uid, "removing a replaced static pod");
        if !remove_all(node, uid).await {
            return false;
        }
    }
    true
}

/// Records that the pod cannot start because its devices are not prepared.
fn record_unprepared(node: &Node, pod: &Pod, error: String) {
    let reason = crate::dra::FAILED_PREPARE_REASON;
    node.ctx.events.warning(pod, reason, format!("Failed to prepare dynamic resources: {error}"));
    let now = node.ctx.clock.now();
    node.with_pod_state(pod, |worker_state| {
        let before = worker_state.sandbox_failure.take();
        worker_state.sandbox_failure = Some(StartFailure::with_back_off(before.as_ref(), reason, error, now));
    });
}

/// Whether a container has run in an earlier sandbox.
fn had_containers(seen: &ObservedPod) -> bool {
    !seen.sandboxes.is_empty() && !seen.containers.is_empty()
}

async fn create_sandbox(node: &Node, pod: &Pod, attempt: u32) -> Result<(), String> {
    config::check_hostname(pod, &node.settings)?;
    let kubelet_config = &node.settings.kubelet_config;
    let mut limits = crate::cgroups::pod_limits(pod, kubelet_config.pod_pids_limit);
    limits.cpu_quota = if kubelet_config.cpu_cfs_quota { limits.cpu_quota } else { 0 };
    let group = crate::cgroups::pod_cgroup(pod, &node.settings);
    if let Err(error) = crate::cgroups::limit(&group, &limits) {
        // Its containers have limits of their own.
        tracing::warn!(%error, pod = %pod.key(), "cannot set the limits of a pod's cgroup");
    }
    node.update_record(pod, |record| record.whole = PodResources::of(pod));
    let mut config = config::sandbox(pod, attempt, group, &node.settings);
    crate::resolver::record_limit_warnings(node, pod);
    node.settings.logs.create_pod_dir(&pod.key(), pod.uid()).map_err(|error| error.to_string())?;
    let handler = node.runtime_handler(pod).await?;
    if crate::user_namespaces::has_user_namespace(pod) {
        node.check_user_namespaces(&handler).await?;
        crate::user_namespaces::apply_to_sandbox(&mut config, &node.users.get_or_allocate(pod.uid())?);
    }
    node.runtime.run_sandbox(&config, &handler).await.map(drop).map_err(|error| error.message())
}

/// Whether a pod has to terminate earlier than before: it is being deleted now, has a shorter grace
/// period, or is gone.
pub fn has_earlier_deadline(before: &Pod, now: Option<&Pod>) -> bool {
    let Some(now) = now else { return true };
    let grace = |pod: &Pod| pod.metadata.deletion_grace_period_seconds;
    let has_less_time = grace(now).zip(grace(before)).is_some_and(|(now, before)| now < before);
    now.is_deleting() && (!before.is_deleting() || has_less_time)
}

/// Whether the node terminates a pod, and within which grace period.
#[derive(Clone, Copy)]
struct TerminationDeadline {
    is_terminating: bool,
    grace_seconds: Option<i64>,
}

impl TerminationDeadline {
    fn is_earlier_than(self, before: TerminationDeadline) -> bool {
        let has_less_time =
            self.grace_seconds.is_some_and(|now| before.grace_seconds.is_none_or(|before| now < before));
        self.is_terminating && (!before.is_terminating || has_less_time)
    }
}

impl Node {
    fn termination_deadline(&self, pod: &Pod) -> TerminationDeadline {
        self.with_pod_state(pod, |worker_state| TerminationDeadline {
            is_terminating: worker_state.termination_reason.is_some(),
            grace_seconds: worker_state.grace_period_override,
        })
    }

    fn has_earlier_deadline(&self, pod: &Pod, before: TerminationDeadline) -> bool {
        let known = self.pod_with_uid(&pod.key(), pod.uid());
        has_earlier_deadline(pod, known.as_deref()) || self.termination_deadline(pod).is_earlier_than(before)
    }

    /// Notifies the pod's worker that the node terminates the pod.
    pub fn notify_termination(&self, pod: &Pod) {
        self.termination_updates.send_modify(|count| *count += 1);
        self.enqueue(pod.key());
    }

    /// Waits until the pod has an earlier termination deadline, from the API or from the node.
    async fn wait_for_earlier_deadline(&self, pod: &Pod, before: TerminationDeadline) {
        let mut changes = self.termination_updates.subscribe();
        while !self.has_earlier_deadline(pod, before) {
            if changes.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Whether the pod is this node's.
    pub fn is_own_pod(&self, pod: &Pod) -> bool {
        pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&self.settings.node_name)
    }

    pub fn forget_pod(&self, uid: &str) {
        self.pod_states.lock().remove(uid);
        self.pulls.cancel(uid);
    }

    pub fn sources(&self) -> CachedSources<'_> {
        CachedSources { ctx: &self.ctx, node_name: &self.settings.node_name }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lower_deletion_grace_is_an_earlier_deadline() {
        let pod = |grace: Option<i64>| -> Pod {
            let deleted = grace.map(|_| "2026-01-01T00:00:00Z");
            let metadata = json!({"deletionTimestamp": deleted, "deletionGracePeriodSeconds": grace});
            serde_json::from_value(json!({"metadata": metadata})).expect("a pod")
        };
        let check = |before: Option<i64>, now: Option<i64>, expected: bool| {
            assert_eq!(has_earlier_deadline(&pod(before), Some(&pod(now))), expected, "{before:?} {now:?}");
        };
        check(None, None, false);
        check(None, Some(30), true);
        check(Some(30), Some(30), false);
        check(Some(30), Some(1), true);
        check(Some(30), Some(60), false);
        assert!(
            has_earlier_deadline(&pod(None), None) && has_earlier_deadline(&pod(Some(30)), None),
            "the pod is gone"
        );
    }

    #[test]
    fn lower_node_grace_is_an_earlier_deadline() {
        let check = |before: (bool, Option<i64>), now: (bool, Option<i64>), expected: bool| {
            let end =
                |(is_near, within)| TerminationDeadline { is_terminating: is_near, grace_seconds: within };
            assert_eq!(end(now).is_earlier_than(end(before)), expected, "{before:?} {now:?}");
        };
        check((false, None), (false, None), false);
        check((false, None), (true, None), true);
        check((true, None), (true, None), false);
        check((true, None), (true, Some(30)), true);
        check((true, Some(30)), (true, Some(30)), false);
        check((true, Some(30)), (true, Some(10)), true);
        check((true, Some(10)), (true, Some(30)), false);
        // The grace period has no effect unless the node terminates the pod.
        check((false, None), (false, Some(10)), false);
    }
}
