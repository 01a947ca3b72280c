//! Graceful node shutdown: terminates pods in order before the host goes down.
//!
//! There are two triggers. The process that runs the node is stopped during a shutdown of the host
//! and requests it by [`HostShutdown`]; this needs nothing to be installed and is always in use. If
//! `shutdownGracePeriod` is configured, systemd-logind is also watched and delayed by an inhibitor
//! lock, as upstream does.
//!
//! If nothing is configured, pods are only suspended: their containers stop, their phase stays, and
//! they start again after a reboot as they would without a graceful shutdown (docs/adr/0018). If it
//! is configured, they fail as with upstream.

pub mod plan;

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use reconcile::{Key, Object as _};
use runtime::cri::PodSandboxState;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;

use crate::Node;
use crate::observed::POD_UID;
use plan::ShutdownGroup;

/// Reason and message of pods that are terminated by a shutdown, and of those that are rejected
/// during one.
pub const TERMINATED: (&str, &str) =
    ("Terminated", "Pod was terminated in response to imminent node shutdown.");
pub const REJECTED: (&str, &str) = ("NodeShutdown", "Pod was rejected as the node is shutting down.");

/// Delay before logind is watched again, should the host's tools exit.
const LOGIND_RETRY: Duration = Duration::from_secs(60);
/// How often to check whether all pods of a group have terminated.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const SHUTDOWN_SIGNAL_MATCH: &str =
    "type='signal',interface='org.freedesktop.login1.Manager',member='PrepareForShutdown'";

/// The default grace period in seconds, and the part of it that is for critical pods.
pub const DEFAULT_SECONDS: (i64, i64) = (10, 5);

/// Lets the process that runs the node request the termination of its pods.
#[derive(Clone, Debug)]
pub struct HostShutdown(Arc<watch::Sender<ShutdownState>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShutdownState {
    Idle,
    Requested,
    Done,
}

impl Default for HostShutdown {
    fn default() -> HostShutdown {
        HostShutdown(Arc::new(watch::Sender::new(ShutdownState::Idle)))
    }
}

impl HostShutdown {
    /// Terminates the pods of the node in order. Returns when they have terminated or their time is
    /// over. Never returns if no node is running.
    pub async fn terminate_pods(&self) {
        self.0.send_if_modified(|progress| {
            let is_first = *progress == ShutdownState::Idle;
            if is_first {
                *progress = ShutdownState::Requested;
            }
            is_first
        });
        let _ = self.0.subscribe().wait_for(|progress| *progress == ShutdownState::Done).await;
    }
}

/// Waits for a shutdown of the host and terminates all pods then.
pub async fn run(node: &Arc<Node>) {
    let requested = async {
        let mut progress = node.host_shutdown.0.subscribe();
        if progress.wait_for(|progress| *progress == ShutdownState::Requested).await.is_ok() {
            terminate_all(node).await;
            node.host_shutdown.0.send_replace(ShutdownState::Done);
        }
        std::future::pending().await
    };
    tokio::select! {
        () = requested => {}
        () = watch_logind(node) => {}
    }
}

/// Watches logind if a grace period is configured. It needs additional processes, so this is not
/// the default.
async fn watch_logind(node: &Arc<Node>) {
    if node.settings.shutdown.is_empty() || node.settings.is_shutdown_default {
        return std::future::pending().await;
    }
    loop {
        if let Err(error) = delay_shutdown(node).await {
            tracing::warn!(
                error,
                "cannot delay a shutdown by logind, pods are terminated when skiff is stopped"
            );
            if let Some(own) = node.ctx.caches.nodes().get(&Key::new("", &node.settings.node_name)) {
                let message = format!("Cannot delay a shutdown until pods have terminated: {error}");
                node.ctx.events.warning(&*own, "GracefulShutdownUnavailable", message);
            }
        }
        tokio::time::sleep(LOGIND_RETRY).await;
    }
}

/// Delays a shutdown by an inhibitor lock and handles signals of logind until its monitor exits.
async fn delay_shutdown(node: &Arc<Node>) -> Result<(), String> {
    if !std::path::Path::new("/run/systemd/system").exists() {
        return Err("systemd-logind is not available, because systemd is not running".to_owned());
    }
    let required_seconds: i64 = node.settings.shutdown.iter().map(|period| period.seconds).sum();
    check_inhibit_delay(required_seconds).await?;
    let mut lock = Some(inhibit_shutdown()?);
    let mut command = Command::new("busctl");
    command.args(["monitor", "--system", "--json=short", "--match", SHUTDOWN_SIGNAL_MATCH]);
    let mut monitor = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("cannot run busctl ({error}); install systemd's tools"))?;
    let output = monitor.stdout.take().ok_or("busctl has no output")?;
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match parse_shutdown_signal(&line) {
            Some(true) => {
                terminate_all(node).await;
                // Dropping the inhibitor lock lets the shutdown continue.
                lock = None;
            }
            Some(false) => {
                node.is_shutting_down.send_replace(false);
                lock.get_or_insert(inhibit_shutdown()?);
            }
            None => {}
        }
    }
    Ok(())
}

/// Whether a signal announces a shutdown (`true`) or that it was canceled (`false`).
fn parse_shutdown_signal(line: &str) -> Option<bool> {
    let signal: serde_json::Value = serde_json::from_str(line).ok()?;
    if signal["member"] != "PrepareForShutdown" {
        return None;
    }
    signal["payload"]["data"][0].as_bool()
}

fn inhibit_shutdown() -> Result<Child, String> {
    let mut command = Command::new("systemd-inhibit");
    command.args(["--what=shutdown", "--mode=delay", "--who=skiff", "--why=Terminating pods in order"]);
    command.args(["sleep", "infinity"]).stdin(Stdio::null()).kill_on_drop(true);
    command.spawn().map_err(|error| format!("cannot run systemd-inhibit ({error}); install systemd's tools"))
}

/// Checks that logind's limit for inhibitor locks is not below the grace period.
async fn check_inhibit_delay(required_seconds: i64) -> Result<(), String> {
    let mut command = Command::new("busctl");
    let manager = ["org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"];
    command.args(["get-property", "--json=short"]).args(manager).arg("InhibitDelayMaxUSec");
    let reply = command.stdin(Stdio::null()).output().await.map_err(|error| format!("busctl: {error}"))?;
    let reply: serde_json::Value = serde_json::from_slice(&reply.stdout)
        .map_err(|_| "systemd-logind sent no valid reply: check that it is running".to_owned())?;
    let seconds = reply["data"].as_i64().unwrap_or(0) / 1_000_000;
    if seconds >= required_seconds {
        return Ok(());
    }
    Err(format!(
        "logind delays a shutdown by at most {seconds} s, but the grace period is {required_seconds} s: set InhibitDelayMaxSec={required_seconds} in \
         /etc/systemd/logind.conf and restart systemd-logind"
    ))
}

/// Terminates all pods of this node, one group after the other.
async fn terminate_all(node: &Arc<Node>) {
    node.is_shutting_down.send_replace(true);
    let pods = node.pods();
    let active: Vec<Arc<Pod>> = pods.into_iter().filter(|pod| !is_terminal(pod)).collect();
    let suspend_only = node.settings.is_shutdown_default;
    tracing::info!(pods = active.len(), "node is shutting down, terminating pods");
    for ShutdownGroup { seconds, pods } in plan::shutdown_groups(&node.settings.shutdown, &active) {
        for (pod, grace) in &pods {
            node.with_pod_state(pod, |worker_state| {
                if suspend_only {
                    worker_state.is_suspended = true;
                } else {
                    worker_state
                        .termination_reason
                        .get_or_insert_with(|| (TERMINATED.0.to_owned(), TERMINATED.1.to_owned()));
                }
                worker_state.grace_period_override = Some(*grace);
            });
            node.notify_termination(pod);
        }
        let ended = async {
            while !all_reported(node, &pods) || !all_terminated(node, &pods).await {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        let seconds = u64::try_from(seconds).unwrap_or(0);
        if tokio::time::timeout(Duration::from_secs(seconds), ended).await.is_err() {
            tracing::warn!(seconds, "not all pods terminated within the grace period");
        }
    }
}

/// Whether the API server has the final phase of these pods. Suspended pods keep their phase.
fn all_reported(node: &Node, pods: &[(Arc<Pod>, i64)]) -> bool {
    node.settings.is_shutdown_default
        || pods
            .iter()
            .all(|(pod, _)| node.pod_with_uid(&pod.key(), pod.uid()).is_none_or(|pod| is_terminal(&pod)))
}

/// Whether none of these pods has a running sandbox.
async fn all_terminated(node: &Node, pods: &[(Arc<Pod>, i64)]) -> bool {
    let Ok(sandboxes) = node.runtime.sandboxes(&[]).await else { return false };
    let is_listed = |uid: &String| pods.iter().any(|(pod, _)| pod.uid() == uid);
    let mut running = sandboxes.iter().filter(|sandbox| sandbox.state() == PodSandboxState::Ready);
    !running.any(|sandbox| sandbox.labels.get(POD_UID).is_some_and(is_listed))
}

fn is_terminal(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_logind_signals() {
        let signal = |member: &str, data: &str| {
            format!(r#"{{"type":"signal","member":"{member}","payload":{{"type":"b","data":[{data}]}}}}"#)
        };
        assert_eq!(parse_shutdown_signal(&signal("PrepareForShutdown", "true")), Some(true));
        assert_eq!(parse_shutdown_signal(&signal("PrepareForShutdown", "false")), Some(false));
        assert_eq!(parse_shutdown_signal(&signal("PrepareForSleep", "true")), None);
        assert_eq!(parse_shutdown_signal("Monitoring bus message stream."), None);
    }
}
