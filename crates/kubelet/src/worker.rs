//! The worker of a pod: looks, plans, acts, tells. One at a time for each pod.

mod resize;
mod stop;

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Delete, Error, Key, Next, Object as _, Severity};
use runtime::Runtime;
use tokio::sync::oneshot;
use tokio::time::error::Elapsed;

use crate::Node;
use crate::admission::{self, Refusal};
use crate::config::{self, Settings};
use crate::env::Addresses;
use crate::memory::Failure;
use crate::observed::{Observed, POD_NAME, POD_NAMESPACE, POD_UID, Ran, State};
use crate::pod::anew::Anew;
use crate::pod::back_off::restart_at;
use crate::pod::container as find;
use crate::pod::plan::{Action, comes_again, deadline, is_finished, plan};
use crate::pod::resize::Whole;
use crate::pod::status::{Host, status};
use crate::sources::Cluster;
use crate::start::Started;
use crate::static_pods::is_static;
use crate::volumes::{self, Materials};

/// More rounds than any pod needs in a row; what is left is done at the next look.
const ROUNDS: usize = 40;
/// How long drivers that do not take back their devices are left alone.
const UNGIVEN: Duration = Duration::from_secs(5);
/// How long it takes to try again to tell of a pod.
const UNTOLD: Duration = Duration::from_secs(5);
/// How long the server may take to hear of a pod: containers are not to wait for one that keeps silent.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long what is about to pass is not told of.
const PASSES: Duration = Duration::from_millis(100);
/// How long volumes that could not be refreshed are left as they are.
const STALE: SignedDuration = SignedDuration::from_secs(10);
/// How often that is tried before it is said that something is wrong.
const PATIENT: u32 = 30;

/// Looks after one pod once.
pub async fn reconcile(node: &Arc<Node>, key: &Key) -> Result<Next, Error> {
    let Some(pod) = node.pod(key) else {
        return Ok(Next::Forget);
    };
    // What the others refer to is not known before. All are looked at then.
    if !is_static(&pod) && !*node.is_filled.borrow() {
        return Ok(Next::Change);
    }
    if crate::pod::is_over(&pod) && !pod.is_deleting() {
        if is_static(&pod) && !tell_again(node, &pod).await {
            return Ok(Next::After(UNTOLD));
        }
        return Ok(tidy_up(node, &pod).await);
    }
    if let Some(referred) = node.referred.as_ref().filter(|_| !pod.is_deleting()) {
        referred.known(&pod).await?;
    }
    let uid = pod.uid().to_owned();
    let mut next = Next::Change;
    let mut untold = false;
    for _ in 0..ROUNDS {
        // It may have been changed or deleted while something was done for it; another of its name has a look of its own.
        let Some(pod) = node.pod_exactly(key, &uid) else {
            node.forget(&uid);
            return Ok(Next::Forget);
        };
        let pod = node.with_status(&pod);
        let seen = match observe(&*node.runtime, &pod, &node.settings).await {
            Ok(seen) => seen,
            Err(error) => {
                tracing::warn!(%error, pod = %key, "cannot ask the runtime");
                return Ok(Next::After(Duration::from_secs(5)));
            }
        };
        if is_kept_back(node, &pod, &seen) {
            return Ok(Next::Change);
        }
        node.watch_health(&pod, &seen);
        let now = node.ctx.clock.now();
        node.remember(&pod, |memory| {
            for container in crate::pod::containers(&pod) {
                memory.see(&container.name, container.image.as_deref().unwrap_or_default());
            }
        });
        end_in_time(node, &pod, now);
        refuse(node, &pod, &seen, now).await;
        let allocated = node.settle(&pod);
        node.follow_resize(&pod, &seen);
        // From here on it is as if it asked for no more than it was promised.
        let pod = allocated;
        tell_of_pauses(node, &pod, &seen, now);
        let memory = node.remember(&pod, |memory| memory.clone());
        if pod.is_deleting() || is_finished(&pod, &seen, &memory) {
            node.pulls.give_up(&uid);
            if !give_back(node, &pod, &seen).await {
                return Ok(Next::After(UNGIVEN));
            }
        }
        let actions = plan(&pod, &seen, &memory, now);
        let rechecks = actions.iter().filter_map(|action| match action {
            Action::Recheck(at) => Some(*at),
            _ => None,
        });
        next = rechecks.min().map_or(Next::Change, Next::At);
        let work: Vec<Action> =
            actions.into_iter().filter(|action| !matches!(action, Action::Recheck(_))).collect();
        let clears = work.contains(&Action::Clear);
        // Never two states in a row.
        let passes = !untold && is_passing(&work);
        let mut acting = pin!(act_on(node, &pod, &seen, work));
        let mut acted = None;
        if passes {
            acted = tokio::time::timeout(PASSES, &mut acting).await.ok();
            if acted == Some(true) {
                // The next look tells of both.
                untold = true;
                continue;
            }
        }
        let (done, finished) = oneshot::channel();
        let reporting = update_status_until(node, &pod, &seen, finished);
        // What is written takes the disk's time, which the pod need not wait for.
        let acting = async {
            let acted = match acted {
                Some(acted) => acted,
                None => acting.await,
            };
            drop(done);
            acted
        };
        let (told, acted) = tokio::join!(reporting, acting);
        if clears {
            return let_go(node, &pod, &seen).await;
        }
        // Containers are looked after also where nobody can be told of it.
        untold = match told {
            Err(_) | Ok(Err(Error::Unreachable(_))) => true,
            Ok(told) => told.map(|()| false)?,
        };
        if !acted {
            if let Some(stale) = refresh(node, &pod, &seen).await {
                next = match next {
                    Next::At(at) => Next::At(at.min(stale)),
                    _ => Next::At(stale),
                };
            }
            break;
        }
    }
    if untold {
        node.queue.after(key.clone(), UNTOLD);
    }
    Ok(next)
}

/// Whether a pod is in a state that it leaves at once, by what is done now: it is to have a place for its first containers,
/// or all that is left of it is the place they had. Its address is told before anything runs that others could know by it.
fn is_passing(work: &[Action]) -> bool {
    let passes =
        |action: &Action| matches!(action, Action::MakeSandbox { attempt: 0 } | Action::StopSandbox { .. });
    !work.is_empty() && work.iter().all(passes)
}

/// What the runtime has of a pod now.
pub async fn observe(runtime: &dyn Runtime, pod: &Pod, settings: &Settings) -> runtime::Result<Observed> {
    let mine = [(POD_UID, pod.uid())];
    let mut sandboxes = Vec::new();
    for sandbox in runtime.sandboxes(&mine).await? {
        match runtime.sandbox_status(&sandbox.id).await {
            Ok(status) => sandboxes.push(status),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let mut containers = Vec::new();
    for container in runtime.containers(&mine).await? {
        match runtime.container_status(&container.id).await {
            Ok(status) => containers.push((container.pod_sandbox_id, status)),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let mut seen = Observed::new(pod, &sandboxes, &containers);
    crate::last_words::add(pod, &mut seen, settings);
    Ok(seen)
}

/// A pod that has been at it for too long is ended.
fn end_in_time(node: &Node, pod: &Pod, now: Timestamp) {
    const TOO_LONG: &str = "Pod was active on the node longer than the specified deadline";
    if deadline(pod).is_none_or(|deadline| deadline > now) || pod.is_deleting() {
        return;
    }
    let first = node.remember(pod, |memory| {
        let first = memory.ended.is_none();
        memory.ended.get_or_insert_with(|| ("DeadlineExceeded".to_owned(), TOO_LONG.to_owned()));
        first
    });
    if first {
        node.ctx.events.normal(pod, "DeadlineExceeded", TOO_LONG);
    }
}

/// A pod that has no place here, that the node cannot confine as wanted, or that comes while the node is short of
/// something, is not begun.
async fn refuse(node: &Node, pod: &Pod, seen: &Observed, now: Timestamp) {
    let begun = !seen.sandboxes.is_empty() || !seen.containers.is_empty();
    if begun || pod.is_deleting() {
        return;
    }
    let unconfined = || {
        let message = crate::apparmor::problem(pod)?;
        Some(Refusal { reason: "AppArmor".to_owned(), message })
    };
    let short = || admission::under(pod, node.keeping.pressures().lasting(now, node.settings.keeping.lasts));
    let unsettled = || crate::sysctls::problem(pod, &node.settings.keeping.sysctls);
    let refusal =
        late(node).or_else(unconfined).or_else(unsettled).or_else(short).or_else(|| node.let_in(pod));
    let refusal = match refusal {
        Some(refusal) => Some(refusal),
        None => unlent(node, pod).await,
    };
    let Some(Refusal { reason, message }) = refusal else { return };
    let first = node.remember(pod, |memory| {
        let first = memory.ended.is_none();
        memory.ended.get_or_insert_with(|| (reason.clone(), format!("Pod was rejected: {message}")));
        first
    });
    if first {
        node.ctx.events.warning(pod, &reason, message);
    }
}

/// Whether there are not enough devices for it.
async fn unlent(node: &Node, pod: &Pod) -> Option<Refusal> {
    let on_node = node.pods();
    let over: BTreeSet<String> =
        on_node.iter().filter(|pod| crate::pod::is_over(pod)).map(|pod| pod.uid().to_owned()).collect();
    let why = node.devices.lend(pod, |uid| over.contains(uid)).await.err()?;
    let message = format!("Allocate failed due to {why}, which is unexpected");
    Some(Refusal { reason: "UnexpectedAdmissionError".to_owned(), message })
}

/// Whether the pod came while the machine goes down, and is to be started after a reboot.
fn is_kept_back(node: &Node, pod: &Pod, seen: &Observed) -> bool {
    *node.is_going_down.borrow()
        && node.settings.is_shutdown_default
        && seen.sandboxes.is_empty()
        && !pod.is_deleting()
}

/// Whether the machine is about to be switched off.
fn late(node: &Node) -> Option<Refusal> {
    let (reason, message) = crate::shutdown::REJECTED;
    let is_late = *node.is_going_down.borrow();
    is_late.then(|| Refusal { reason: reason.to_owned(), message: message.to_owned() })
}

/// Gives back what the pod was given by claims once nothing of it runs any more, and before anybody is told that it is
/// over: others are given it then. `false` where that has to be tried again.
async fn give_back(node: &Node, pod: &Pod, seen: &Observed) -> bool {
    if seen.running().next().is_some() || !node.dra.holds(pod.uid()) {
        return true;
    }
    let given_back = node.dra.unprepare(pod.uid()).await;
    if let Err(error) = &given_back {
        tracing::warn!(error, pod = %pod.key(), "devices are not given back yet");
    }
    given_back.is_ok()
}

/// Tells once of each run and of each failure that nothing is tried for a while.
fn tell_of_pauses(node: &Node, pod: &Pod, seen: &Observed, now: Timestamp) {
    if pod.is_deleting() || node.remember(pod, |memory| is_finished(pod, seen, memory)) {
        return;
    }
    let mut news = Vec::new();
    let anew = Anew::of(pod, seen);
    node.remember(pod, |memory| {
        for container in crate::pod::containers(pod) {
            let name = container.name.clone();
            if let Some(failure) = memory.failures.get(&name)
                && failure.quiet_from().is_some_and(|from| from <= now)
                && memory.told.insert(format!("{name} {}", failure.times))
            {
                let image = container.image.as_deref().unwrap_or_default();
                let message = format!("Back-off pulling image {image:?}");
                news.push((name.clone(), Severity::Normal, "BackOff", message));
                news.push((name.clone(), Severity::Warning, "Failed", "Error: ImagePullBackOff".to_owned()));
            }
            let waits = |run: &Ran| {
                let comes_again =
                    matches!(run.state, State::Exited { code, .. } if comes_again(pod, &container, code));
                comes_again && restart_at(run, memory).is_some_and(|at| at > now)
            };
            if let Some(run) = anew.latest(&name).filter(|run| waits(run))
                && memory.told.insert(run.id.clone())
            {
                let whole = format!("{}_{}({})", pod.name(), pod.namespace(), pod.uid());
                let message = format!("Back-off restarting failed container {name} in pod {whole}");
                news.push((name, Severity::Warning, "BackOff", message));
            }
        }
    });
    for (container, severity, reason, message) in news {
        crate::start::note(node, pod, &container, severity, reason, message);
    }
}

/// Writes the pod's status, and writes it again when a container becomes ready or unready before `finished`: ending
/// containers can take as long as the grace period, and readiness probes go on meanwhile.
async fn update_status_until(
    node: &Node,
    pod: &Pod,
    seen: &Observed,
    mut finished: oneshot::Receiver<()>,
) -> Result<Result<(), Error>, Elapsed> {
    let mut changes = node.health_changes.subscribe();
    loop {
        changes.mark_unchanged();
        let before = node.remember(pod, |memory| memory.health.clone());
        let result = tokio::time::timeout(PATIENCE, tell(node, pod, seen)).await;
        while !node.remember(pod, |memory| memory.has_other_readiness(&before)) {
            tokio::select! {
                biased;
                _ = &mut finished => return result,
                Ok(()) = changes.changed() => {}
            }
        }
    }
}

/// Writes the pod's status where it has changed.
async fn tell(node: &Node, pod: &Pod, seen: &Observed) -> Result<(), Error> {
    let Some(current) = node.pod_exactly(&pod.key(), pod.uid()) else { return Ok(()) };
    let current = node.with_status(&current);
    let memory = node.remember(pod, |memory| memory.clone());
    let (node_ips, recursive) = (node.settings.node_ips(), node.is_recursive(pod).await);
    let host = Host { ips: &node_ips, runtime: &node.runtime_name, recursive };
    let now = node.ctx.clock.now();
    let mut status = status(&node.allocated(&current), seen, &memory, &host, now);
    node.dra.tell(&current, status.container_statuses.as_deref_mut().unwrap_or_default(), now);
    if is_static(&current) {
        return node.tell_mirror(&current, status).await;
    }
    if current.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let told = Pod { status: Some(status), ..Pod::clone(&current) };
    match node.ctx.replace_status(&told).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

/// Says once more how a static pod has ended: whoever was told the first time may have been away. `false` where that has to
/// be tried again.
async fn tell_again(node: &Node, pod: &Pod) -> bool {
    let telling = node.tell_mirror(pod, pod.status.clone().unwrap_or_default());
    matches!(tokio::time::timeout(PATIENCE, telling).await, Ok(Ok(())))
}

/// What volumes are made from may have changed while containers run.
/// Says when that is the case for sure.
async fn refresh(node: &Node, pod: &Pod, seen: &Observed) -> Option<Timestamp> {
    let sandbox = seen.sandbox().filter(|_| seen.running().next().is_some())?;
    let sources = node.sources();
    let node_ips = node.settings.node_ips();
    let addresses = Addresses { host_ips: &node_ips, pod_ips: &sandbox.ips };
    let materials = Materials {
        ctx: &node.ctx,
        sources: &sources,
        settings: &node.settings,
        csi: &node.csi,
        in_memory: node.sees_mounts,
        addresses,
        is_first: false,
    };
    let refreshed = volumes::set_up(pod, &materials).await;
    let stale = [volumes::stale_from(pod, &node.settings), node.csi.republish_at(pod.uid())];
    let stale = stale.into_iter().flatten().min()?;
    match refreshed {
        Ok(_) => Some(stale),
        Err(error) => {
            tracing::debug!(%error, pod = %pod.key(), "a volume is out of date");
            // What failed is due already.
            Some(node.ctx.clock.now().checked_add(STALE).map_or(stale, |then| then.max(stale)))
        }
    }
}

/// Stops what is to be stopped, then does the rest in its order; `false` where nothing could be done or was to be. What is
/// left is not done to a pod that is to end sooner than was known, or that waits for an image. A stop can be left at any
/// time, others not: what a start has begun has to be written down.
async fn act_on(node: &Arc<Node>, pod: &Pod, seen: &Observed, work: Vec<Action>) -> bool {
    if work.is_empty() {
        return false;
    }
    let before = node.end_of(pod);
    let stops = work.iter().filter_map(|action| match action {
        Action::Stop(stop) => Some(stop),
        _ => None,
    });
    tokio::select! {
        () = stop::all(node, pod, stops) => {}
        () = node.hastened(pod, before) => return true,
    }
    let mut acted = false;
    for action in work {
        if node.is_hastened(pod, before) {
            return true;
        }
        if act(node, pod, seen, action).await == Acted::Waits {
            break;
        }
        acted = true;
    }
    acted
}

/// What has become of something that was to be done.
#[derive(PartialEq)]
enum Acted {
    Done,
    /// It is under way, and what comes after it has to wait.
    Waits,
}

/// Does one thing. What fails is remembered and tried again later.
async fn act(node: &Arc<Node>, pod: &Pod, seen: &Observed, action: Action) -> Acted {
    match action {
        Action::MakeSandbox { attempt } => {
            if attempt > 0 && memory_of_sandboxes(seen) {
                let message = "Pod sandbox changed, it will be killed and re-created.";
                node.ctx.events.normal(pod, "SandboxChanged", message);
            }
            if !end_namesakes(node, pod).await {
                return Acted::Waits;
            }
            let result = match node.dra.prepare(&node.ctx, pod).await {
                Ok(()) => make_sandbox(node, pod, attempt).await,
                Err(why) => {
                    unprepared(node, pod, why);
                    return Acted::Done;
                }
            };
            let before = node.remember(pod, |memory| memory.sandbox_failure.take());
            let tries = before.as_ref().map_or(0, |before| before.times);
            // A skiff before this one has asked for it and gone; the runtime has yet to notice.
            let waits = |message: &String| tries < PATIENT && message.contains("is reserved for");
            if let Some(message) = result.as_ref().err().filter(|message| !waits(message)) {
                node.ctx.events.warning(
                    pod,
                    "FailedCreatePodSandBox",
                    format!("Failed to create pod sandbox: {message}"),
                );
            }
            let now = node.ctx.clock.now();
            node.remember(pod, |memory| {
                memory.sandbox_failure = result.err().map(|message| match waits(&message) {
                    true => Failure { times: tries + 1, ..Failure::soon("", message, now) },
                    false => Failure::again(before.as_ref().filter(|_| tries < PATIENT), "", message, now),
                });
            });
        }
        Action::Start { container, attempt } => {
            let Some(spec) = find(pod, &container) else { return Acted::Done };
            let begun = node.ctx.clock.now();
            if let Some(run) = Anew::of(pod, seen).latest(&container) {
                node.remember(pod, |memory| {
                    memory.start_again(run, begun, node.settings.keeping.longest_pause)
                });
            }
            let result = crate::start::start(node, pod, seen, &spec, attempt).await;
            if let Ok(Started::Pulling) = result {
                return Acted::Waits;
            }
            let now = node.ctx.clock.now();
            node.remember(pod, |memory| {
                let Err(failed) = result else { return drop(memory.failures.remove(&container)) };
                let failure = match failed.waits {
                    true => Failure::soon(&failed.reason, failed.message, now),
                    false => {
                        let before = memory.failures.get(&container);
                        Failure::again(before, &failed.reason, failed.message, now)
                    }
                };
                memory.fail(&container, failure, begun);
            });
        }
        Action::Resize(wanted) => resize::carry_out(node, pod, seen, &wanted).await,
        Action::StopSandbox { id } => {
            if let Err(error) = node.runtime.stop_sandbox(&id).await {
                node.ctx.events.warning(pod, "FailedKillPod", format!("error killing pod: {error}"));
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
        Action::Stop(_) | Action::Clear | Action::Recheck(_) => {}
    }
    Acted::Done
}

/// Ends what is left of the static pod that had this name, by a manifest that was changed while nobody looked: the two
/// would have the same files and ports. `false` where something of it is still there.
async fn end_namesakes(node: &Node, pod: &Pod) -> bool {
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
fn unprepared(node: &Node, pod: &Pod, why: String) {
    let reason = crate::dra::UNPREPARED;
    node.ctx.events.warning(pod, reason, format!("Failed to prepare dynamic resources: {why}"));
    let now = node.ctx.clock.now();
    node.remember(pod, |memory| {
        let before = memory.sandbox_failure.take();
        memory.sandbox_failure = Some(Failure::again(before.as_ref(), reason, why, now));
    });
}

/// Whether something has run in the sandboxes there were.
fn memory_of_sandboxes(seen: &Observed) -> bool {
    !seen.sandboxes.is_empty() && !seen.containers.is_empty()
}

async fn make_sandbox(node: &Node, pod: &Pod, attempt: u32) -> Result<(), String> {
    config::check_hostname(pod, &node.settings)?;
    let keeping = &node.settings.keeping;
    let mut limits = crate::cgroups::limits(pod, keeping.pids);
    limits.cpu_quota = if keeping.limits_cpu { limits.cpu_quota } else { 0 };
    let group = crate::cgroups::of(pod, &node.settings);
    if let Err(error) = crate::cgroups::limit(&group, &limits) {
        // Its containers have limits of their own.
        tracing::warn!(%error, pod = %pod.key(), "cannot limit a pod as a whole");
    }
    node.note_down(pod, |record| record.whole = Whole::of(pod));
    let mut config = config::sandbox(pod, attempt, group, &node.settings);
    crate::resolver::tell(node, pod);
    node.settings.logs.begin(&pod.key(), pod.uid()).map_err(|error| error.to_string())?;
    let handler = node.runtime_handler(pod).await?;
    if crate::users::are_own(pod) {
        node.may_have_users(&handler).await?;
        crate::users::into_sandbox(&mut config, &node.users.of(pod.uid())?);
    }
    node.runtime.run_sandbox(&config, &handler).await.map(drop).map_err(|error| error.message())
}

/// The pod has ended and is to go: nothing is left of it here, then it is deleted.
async fn let_go(node: &Node, pod: &Pod, seen: &Observed) -> Result<Next, Error> {
    match tokio::time::timeout(PATIENCE, tell(node, pod, seen)).await {
        _ if is_static(pod) => {}
        Ok(told) => told?,
        Err(_) => return Ok(Next::After(UNTOLD)),
    }
    if !remove_all(node, pod.uid()).await {
        return Ok(Next::After(Duration::from_secs(1)));
    }
    let _ = std::fs::remove_dir_all(node.settings.log_dir(&pod.key(), pod.uid()));
    node.forget(pod.uid());
    if is_static(pod) {
        node.static_pods.end(pod);
        node.look_at(pod.key());
        return Ok(Next::Forget);
    }
    let options = Delete { grace_seconds: Some(0), ..Delete::uid(pod.uid()) };
    match node.ctx.client.delete::<Pod>(&pod.key(), &options).await {
        Err(error) if !error.is_not_found() && !error.is_conflict() => Err(error),
        _ => Ok(Next::Change),
    }
}

/// A pod that is over keeps its containers, for their logs, but no sandbox, and nothing that another may be waiting for.
async fn tidy_up(node: &Node, pod: &Pod) -> Next {
    node.pulls.give_up(pod.uid());
    if let Some(memory) = node.memories.lock().get_mut(pod.uid()) {
        memory.health.clear();
    }
    if let Err(error) = node.dra.unprepare(pod.uid()).await {
        tracing::warn!(error, pod = %pod.key(), "devices are not given back yet");
        return Next::After(UNGIVEN);
    }
    if let Err(error) = end_sandboxes(node, pod.uid()).await {
        tracing::warn!(%error, pod = %pod.key(), "cannot stop what is left of a pod");
        return Next::After(UNGIVEN);
    }
    if let Err(error) = give_back_volumes(node, pod.uid()).await {
        tracing::warn!(error, pod = %pod.key(), "volumes are not given back yet");
        return Next::After(UNGIVEN);
    }
    Next::Change
}

async fn end_sandboxes(node: &Node, uid: &str) -> runtime::Result<()> {
    let mine = [(POD_UID, uid)];
    let containers = node.runtime.containers(&mine).await?;
    for sandbox in node.runtime.sandboxes(&mine).await? {
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
async fn give_back_volumes(node: &Node, uid: &str) -> Result<(), String> {
    volumes::sub_path::hide(&node.settings.pods.join(uid)).map_err(|error| error.to_string())?;
    volumes::memory::release(&node.settings.pods.join(uid));
    let csi = crate::csi::volume::let_go(&node.csi, &node.settings, uid).await;
    volumes::iscsi::let_go(&node.csi, &node.settings, uid).await.and(csi)
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
        result = clear(node, uid).await;
    }
    if let Err(error) = &result {
        tracing::warn!(error, uid, "something is left of a pod");
    }
    result.is_ok()
}

/// Removes a pod's volumes and all else it has on this host beside containers.
pub async fn clear(node: &Node, uid: &str) -> Result<(), String> {
    crate::cgroups::clear(&node.settings.pods, uid).map_err(|error| error.to_string())?;
    node.dra.unprepare(uid).await?;
    // What is left of them holds a volume that is about to go; if it cannot be helped, it goes with the rest below.
    let _ = volumes::sub_path::hide(&node.settings.pods.join(uid));
    crate::csi::volume::let_go(&node.csi, &node.settings, uid).await?;
    volumes::clear(uid, &node.settings).map_err(|error| error.to_string())?;
    volumes::iscsi::let_go(&node.csi, &node.settings, uid).await?;
    node.users.release(uid);
    Ok(())
}

/// Whether a pod is to end sooner than it was before: it is being deleted now, has less time for that, or is gone.
pub fn is_hastened(before: &Pod, now: Option<&Pod>) -> bool {
    let Some(now) = now else { return true };
    let grace = |pod: &Pod| pod.metadata.deletion_grace_period_seconds;
    let has_less_time = grace(now).zip(grace(before)).is_some_and(|(now, before)| now < before);
    now.is_deleting() && (!before.is_deleting() || has_less_time)
}

/// The end that its node has in mind for a pod: whether there is one, and how soon.
#[derive(Clone, Copy)]
struct End {
    is_near: bool,
    within: Option<i64>,
}

impl End {
    fn is_sooner_than(self, before: End) -> bool {
        let has_less_time = self.within.is_some_and(|now| before.within.is_none_or(|before| now < before));
        self.is_near && (!before.is_near || has_less_time)
    }
}

impl Node {
    fn end_of(&self, pod: &Pod) -> End {
        self.remember(pod, |memory| End { is_near: memory.ended.is_some(), within: memory.end_within })
    }

    fn is_hastened(&self, pod: &Pod, before: End) -> bool {
        let known = self.pod_exactly(&pod.key(), pod.uid());
        is_hastened(pod, known.as_deref()) || self.end_of(pod).is_sooner_than(before)
    }

    /// The node ends a pod: whoever is at work for it notices.
    pub fn hasten(&self, pod: &Pod) {
        self.hastened.send_modify(|count| *count += 1);
        self.look_at(pod.key());
    }

    /// Waits until the pod is to end sooner than this one, or its node, has said.
    async fn hastened(&self, pod: &Pod, before: End) {
        let mut news = self.hastened.subscribe();
        while !self.is_hastened(pod, before) {
            if news.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Whether the pod is this node's.
    pub fn has(&self, pod: &Pod) -> bool {
        pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&self.settings.node_name)
    }

    pub fn forget(&self, uid: &str) {
        self.memories.lock().remove(uid);
        self.pulls.give_up(uid);
    }

    pub fn sources(&self) -> Cluster<'_> {
        Cluster { ctx: &self.ctx, node_name: &self.settings.node_name }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pods_that_are_to_end_sooner() {
        let pod = |grace: Option<i64>| -> Pod {
            let deleted = grace.map(|_| "2026-01-01T00:00:00Z");
            let metadata = json!({"deletionTimestamp": deleted, "deletionGracePeriodSeconds": grace});
            serde_json::from_value(json!({"metadata": metadata})).expect("a pod")
        };
        let check = |before: Option<i64>, now: Option<i64>, expected: bool| {
            assert_eq!(is_hastened(&pod(before), Some(&pod(now))), expected, "{before:?} {now:?}");
        };
        check(None, None, false);
        check(None, Some(30), true);
        check(Some(30), Some(30), false);
        check(Some(30), Some(1), true);
        check(Some(30), Some(60), false);
        assert!(is_hastened(&pod(None), None) && is_hastened(&pod(Some(30)), None), "it is gone");
    }

    #[test]
    fn nodes_that_are_in_a_hurry() {
        let check = |before: (bool, Option<i64>), now: (bool, Option<i64>), expected: bool| {
            let end = |(is_near, within)| End { is_near, within };
            assert_eq!(end(now).is_sooner_than(end(before)), expected, "{before:?} {now:?}");
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
