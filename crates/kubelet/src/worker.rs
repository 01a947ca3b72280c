//! The worker of a pod: looks, plans, acts, tells. One at a time for each pod.

mod resize;
mod stop;

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use reconcile::{DeleteOptions, Error, EventType, Key, Object as _, ReconcileAction};
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

/// More rounds than any pod needs in a row; what is left is done at the next look.
const MAX_SYNC_ROUNDS: usize = 40;
/// How long drivers that do not take back their devices are left alone.
const UNPREPARE_RETRY: Duration = Duration::from_secs(5);
/// How long it takes to try again to tell of a pod.
const STATUS_RETRY: Duration = Duration::from_secs(5);
/// How long the server may take to hear of a pod: containers are not to wait for one that keeps silent.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);
/// How long what is about to pass is not told of.
const TEMPORARY_STATUS_DELAY: Duration = Duration::from_millis(100);
/// How long volumes that could not be refreshed are left as they are.
const VOLUME_REFRESH_RETRY: SignedDuration = SignedDuration::from_secs(10);
/// How often that is tried before it is said that something is wrong.
const MAX_SANDBOX_NAME_RETRIES: u32 = 30;

/// Looks after one pod once.
pub async fn reconcile(node: &Arc<Node>, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(pod) = node.pod(key) else {
        return Ok(ReconcileAction::Forget);
    };
    // What the others refer to is not known before. All are looked at then.
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
        // It may have been changed or deleted while something was done for it; another of its name has a look of its own.
        let Some(pod) = node.pod_with_uid(key, &uid) else {
            node.forget_pod(&uid);
            return Ok(ReconcileAction::Forget);
        };
        let pod = node.with_status(&pod);
        let seen = match observe(&*node.runtime, &pod, &node.settings).await {
            Ok(seen) => seen,
            Err(error) => {
                tracing::warn!(%error, pod = %key, "cannot ask the runtime");
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
        // From here on it is as if it asked for no more than it was promised.
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
        // Never two states in a row.
        let delay_status = !status_pending && is_temporary_status(&work);
        let mut execution = pin!(execute_actions(node, &pod, &seen, work));
        let mut progress = None;
        if delay_status {
            progress = tokio::time::timeout(TEMPORARY_STATUS_DELAY, &mut execution).await.ok();
            if progress == Some(true) {
                // The next look tells of both.
                status_pending = true;
                continue;
            }
        }
        let (done, finished) = oneshot::channel();
        let reporting = update_status_until(node, &pod, &seen, finished);
        // What is written takes the disk's time, which the pod need not wait for.
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
        // Containers are looked after also where nobody can be told of it.
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

/// Whether a pod is in a state that it leaves at once, by what is done now: it is to have a place for its first containers,
/// or all that is left of it is the place they had. Its address is told before anything runs that others could know by it.
fn is_temporary_status(work: &[Action]) -> bool {
    let is_temporary =
        |action: &Action| matches!(action, Action::CreateSandbox { attempt: 0 } | Action::StopSandbox { .. });
    !work.is_empty() && work.iter().all(is_temporary)
}

/// What the runtime has of a pod now.
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

/// A pod that has been at it for too long is ended.
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

/// A pod that has no place here, that the node cannot confine as wanted, or that comes while the node is short of
/// something, is not begun.
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

/// Whether there are not enough devices for it.
async fn allocate_devices(node: &Node, pod: &Pod) -> Option<AdmissionFailure> {
    let on_node = node.pods();
    let over: BTreeSet<String> =
        on_node.iter().filter(|pod| crate::pod::is_terminal(pod)).map(|pod| pod.uid().to_owned()).collect();
    let error = node.devices.allocate(pod, |uid| over.contains(uid)).await.err()?;
    let message = format!("Allocate failed due to {error}, which is unexpected");
    Some(AdmissionFailure { reason: "UnexpectedAdmissionError".to_owned(), message })
}

/// Whether the pod came while the machine goes down, and is to be started after a reboot.
fn is_deferred_by_shutdown(node: &Node, pod: &Pod, seen: &ObservedPod) -> bool {
    *node.is_shutting_down.borrow()
        && node.settings.is_shutdown_default
        && seen.sandboxes.is_empty()
        && !pod.is_deleting()
}

/// Whether the machine is about to be switched off.
fn shutdown_rejection(node: &Node) -> Option<AdmissionFailure> {
    let (reason, message) = crate::shutdown::REJECTED;
    let is_late = *node.is_shutting_down.borrow();
    is_late.then(|| AdmissionFailure { reason: reason.to_owned(), message: message.to_owned() })
}

/// Gives back what the pod was given by claims once nothing of it runs any more, and before anybody is told that it is
/// over: others are given it then. `false` where that has to be tried again.
async fn unprepare_resources(node: &Node, pod: &Pod, seen: &ObservedPod) -> bool {
    if seen.running().next().is_some() || !node.dra.has_claims(pod.uid()) {
        return true;
    }
    let given_back = node.dra.unprepare(pod.uid()).await;
    if let Err(error) = &given_back {
        tracing::warn!(error, pod = %pod.key(), "devices are not given back yet");
    }
    given_back.is_ok()
}

/// Tells once of each run and of each failure that nothing is tried for a while.
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

/// Writes the pod's status, and writes it again when a container becomes ready or unready before `finished`: ending
/// containers can take as long as the grace period, and readiness probes go on meanwhile.
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

/// Writes the pod's status where it has changed.
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

/// Says once more how a static pod has ended: whoever was told the first time may have been away. `false` where that has to
/// be tried again.
async fn resend_static_status(node: &Node, pod: &Pod) -> bool {
    let update = node.update_mirror_status(pod, pod.status.clone().unwrap_or_default());
    matches!(tokio::time::timeout(STATUS_TIMEOUT, update).await, Ok(Ok(())))
}

/// What volumes are made from may have changed while containers run.
/// Says when that is the case for sure.
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
            tracing::debug!(%error, pod = %pod.key(), "a volume is out of date");
            // What failed is due already.
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

/// Stops what is to be stopped, then does the rest in its order; `false` where nothing could be done or was to be. What is
/// left is not done to a pod that is to end sooner than was known, or that waits for an image. A stop can be left at any
/// time, others not: what a start has begun has to be written down.
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

/// What has become of something that was to be done.
#[derive(PartialEq)]
enum ActionResult {
    Done,
    /// It is under way, and what comes after it has to wait.
    InProgress,
}

/// Does one thing. What fails is remembered and tried again later.
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
            // A skiff before this one has asked for it and gone; the runtime has yet to notice.
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

/// Ends what is left of the static pod that had this name, by a manifest that was changed while nobody looked: the two
/// would have the same files and ports. `false` where something of it is still there.
async fn remove_replaced_static_pods(node: &Node, pod: &Pod) -> bool {
    if !is_static(pod) {
        return true;
    }
    let named = [(POD_NAME, pod.name()), (POD_NAMESPACE, pod.namespace())];
    let Ok(sandboxes) = node.runtime.sandboxes(&named).await else { return false };
    let uids = sandboxes.iter().filter_map(|sandbox| sandbox.labels.get(POD_UID));
    let others: BTreeSet<&String> = uids.filter(|uid| *uid != pod.uid()).collect();
    for uid in others {
        tracing::info!(pod = %pod.key(), uid, "ending the static pod that had this name");
        if !remove_all(node, uid).await {
            return false;
        }
    }
    true
}

/// The pod's devices are not ready, so that it cannot begin.
fn record_unprepared(node: &Node, pod: &Pod, error: String) {
    let reason = crate::dra::FAILED_PREPARE_REASON;
    node.ctx.events.warning(pod, reason, format!("Failed to prepare dynamic resources: {error}"));
    let now = node.ctx.clock.now();
    node.with_pod_state(pod, |worker_state| {
        let before = worker_state.sandbox_failure.take();
        worker_state.sandbox_failure = Some(StartFailure::with_back_off(before.as_ref(), reason, error, now));
    });
}

/// Whether something has run in the sandboxes there were.
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
        tracing::warn!(%error, pod = %pod.key(), "cannot limit a pod as a whole");
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

/// The pod has ended and is to go: nothing is left of it here, then it is deleted.
async fn sync_terminated_pod(node: &Node, pod: &Pod, seen: &ObservedPod) -> Result<ReconcileAction, Error> {
    match tokio::time::timeout(STATUS_TIMEOUT, update_status(node, pod, seen)).await {
        _ if is_static(pod) => {}
        Ok(result) => result?,
        Err(_) => return Ok(ReconcileAction::RequeueAfter(STATUS_RETRY)),
    }
    if !remove_all(node, pod.uid()).await {
        return Ok(ReconcileAction::RequeueAfter(Duration::from_secs(1)));
    }
    let _ = std::fs::remove_dir_all(node.settings.log_dir(&pod.key(), pod.uid()));
    node.forget_pod(pod.uid());
    if is_static(pod) {
        node.static_pods.remove(pod);
        node.enqueue(pod.key());
        return Ok(ReconcileAction::Forget);
    }
    let options = DeleteOptions { grace_seconds: Some(0), ..DeleteOptions::uid(pod.uid()) };
    match node.ctx.client.delete::<Pod>(&pod.key(), &options).await {
        Err(error) if !error.is_not_found() && !error.is_conflict() => Err(error),
        _ => Ok(ReconcileAction::AwaitChange),
    }
}

/// A pod that is over keeps its containers, for their logs, but no sandbox, and nothing that another may be waiting for.
async fn clean_up_finished_pod(node: &Node, pod: &Pod) -> ReconcileAction {
    node.pulls.cancel(pod.uid());
    if let Some(worker_state) = node.pod_states.lock().get_mut(pod.uid()) {
        worker_state.health.clear();
    }
    if let Err(error) = node.dra.unprepare(pod.uid()).await {
        tracing::warn!(error, pod = %pod.key(), "devices are not given back yet");
        return ReconcileAction::RequeueAfter(UNPREPARE_RETRY);
    }
    if let Err(error) = stop_sandboxes(node, pod.uid()).await {
        tracing::warn!(%error, pod = %pod.key(), "cannot stop what is left of a pod");
        return ReconcileAction::RequeueAfter(UNPREPARE_RETRY);
    }
    if let Err(error) = release_volumes(node, pod.uid()).await {
        tracing::warn!(error, pod = %pod.key(), "volumes are not given back yet");
        return ReconcileAction::RequeueAfter(UNPREPARE_RETRY);
    }
    ReconcileAction::AwaitChange
}

async fn stop_sandboxes(node: &Node, uid: &str) -> runtime::Result<()> {
    let labels = [(POD_UID, uid)];
    let containers = node.runtime.containers(&labels).await?;
    for sandbox in node.runtime.sandboxes(&labels).await? {
        let runs = containers.iter().any(|container| {
            container.pod_sandbox_id == sandbox.id
                && container.state() == runtime::cri::ContainerState::Running
        });
        if runs || sandbox.state() == runtime::cri::PodSandboxState::Ready {
            node.runtime.stop_sandbox(&sandbox.id).await?;
        }
    }
    Ok(())
}

/// Takes from a pod that is over what others may be waiting for, and the memory its secrets are in; its own directories
/// stay.
async fn release_volumes(node: &Node, uid: &str) -> Result<(), String> {
    volumes::sub_path::unmount_all(&node.settings.pods.join(uid)).map_err(|error| error.to_string())?;
    volumes::tmpfs::release(&node.settings.pods.join(uid));
    let csi = crate::csi::volume::tear_down(&node.csi, &node.settings, uid).await;
    volumes::iscsi::detach_pod(&node.csi, &node.settings, uid).await.and(csi)
}

/// Removes everything of a pod, which may be one nobody knows any more; `false` where something is left.
pub async fn remove_all(node: &Node, uid: &str) -> bool {
    let result = async {
        for sandbox in node.runtime.sandboxes(&[(POD_UID, uid)]).await? {
            node.runtime.stop_sandbox(&sandbox.id).await?;
            node.runtime.remove_sandbox(&sandbox.id).await?;
        }
        for container in node.runtime.containers(&[(POD_UID, uid)]).await? {
            node.runtime.remove_container(&container.id).await?;
        }
        runtime::Result::Ok(())
    };
    let mut result = result.await.map_err(|error| error.to_string());
    if result.is_ok() {
        result = clean_up_host(node, uid).await;
    }
    if let Err(error) = &result {
        tracing::warn!(error, uid, "something is left of a pod");
    }
    result.is_ok()
}

/// Removes a pod's volumes and all else it has on this host beside containers.
pub async fn clean_up_host(node: &Node, uid: &str) -> Result<(), String> {
    crate::cgroups::remove_pod_cgroup(&node.settings.pods, uid).map_err(|error| error.to_string())?;
    node.dra.unprepare(uid).await?;
    // What is left of them holds a volume that is about to go; if it cannot be helped, it goes with the rest below.
    let _ = volumes::sub_path::unmount_all(&node.settings.pods.join(uid));
    crate::csi::volume::tear_down(&node.csi, &node.settings, uid).await?;
    volumes::remove_volumes(uid, &node.settings).map_err(|error| error.to_string())?;
    volumes::iscsi::detach_pod(&node.csi, &node.settings, uid).await?;
    node.users.release(uid);
    Ok(())
}

/// Whether a pod is to end sooner than it was before: it is being deleted now, has less time for that, or is gone.
pub fn has_earlier_deadline(before: &Pod, now: Option<&Pod>) -> bool {
    let Some(now) = now else { return true };
    let grace = |pod: &Pod| pod.metadata.deletion_grace_period_seconds;
    let has_less_time = grace(now).zip(grace(before)).is_some_and(|(now, before)| now < before);
    now.is_deleting() && (!before.is_deleting() || has_less_time)
}

/// The end that its node has in mind for a pod: whether there is one, and how soon.
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

    /// The node ends a pod: whoever is at work for it notices.
    pub fn notify_termination(&self, pod: &Pod) {
        self.termination_updates.send_modify(|count| *count += 1);
        self.enqueue(pod.key());
    }

    /// Waits until the pod is to end sooner than this one, or its node, has said.
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
            "it is gone"
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
        // What it would have is not what it has to hurry for.
        check((false, None), (false, Some(10)), false);
    }
}
