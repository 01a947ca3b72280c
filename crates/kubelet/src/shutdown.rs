//! Graceful node shutdown: ends pods in order before the machine goes down.
//!
//! The shutdown is announced in two ways. The process that runs the node is told to stop while the machine goes down, and
//! asks for it by [`HostShutdown`]; this needs nothing installed and is always in use. Where `shutdownGracePeriod` is
//! configured, systemd-logind is listened to and delayed by an inhibitor, too, as upstream does.
//!
//! Where nothing is configured, pods are only suspended: their containers end, their phase stays, and they are started
//! again after a reboot as they would be without a graceful shutdown (docs/adr/0018). Configured, they fail as upstream's.

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
use plan::Group;

/// What is said of pods that end with their node, and of those that come too late.
pub const TERMINATED: (&str, &str) =
    ("Terminated", "Pod was terminated in response to imminent node shutdown.");
pub const REJECTED: (&str, &str) = ("NodeShutdown", "Pod was rejected as the node is shutting down.");

/// Between two attempts to listen, should the host's tools end by themselves.
const AGAIN: Duration = Duration::from_secs(60);
/// Between two looks whether all pods of a group have ended.
const LOOK: Duration = Duration::from_millis(100);
const SIGNAL: &str = "type='signal',interface='org.freedesktop.login1.Manager',member='PrepareForShutdown'";

/// How much time pods have by default, and how much of it critical pods.
pub const DEFAULT_SECONDS: (i64, i64) = (10, 5);

/// Lets the process that runs the node ask for its pods to be ended.
#[derive(Clone, Debug)]
pub struct HostShutdown(Arc<watch::Sender<Progress>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Idle,
    Requested,
    Done,
}

impl Default for HostShutdown {
    fn default() -> HostShutdown {
        HostShutdown(Arc::new(watch::Sender::new(Progress::Idle)))
    }
}

impl HostShutdown {
    /// Ends the pods of the node in order; returns when they have ended or their time is over. Never returns while no node
    /// runs.
    pub async fn end_pods(&self) {
        self.0.send_if_modified(|progress| {
            let is_first = *progress == Progress::Idle;
            if is_first {
                *progress = Progress::Requested;
            }
            is_first
        });
        let _ = self.0.subscribe().wait_for(|progress| *progress == Progress::Done).await;
    }
}

/// Waits for the machine to go down, and ends all pods then.
pub async fn run(node: &Arc<Node>) {
    let requested = async {
        let mut progress = node.host_shutdown.0.subscribe();
        if progress.wait_for(|progress| *progress == Progress::Requested).await.is_ok() {
            end_all(node).await;
            node.host_shutdown.0.send_replace(Progress::Done);
        }
        std::future::pending().await
    };
    tokio::select! {
        () = requested => {}
        () = follow_logind(node) => {}
    }
}

/// Listens to logind, where the node is configured to. By default the processes that this takes are not worth it.
async fn follow_logind(node: &Arc<Node>) {
    if node.settings.shutdown.is_empty() || node.settings.is_shutdown_default {
        return std::future::pending().await;
    }
    loop {
        if let Err(why) = listen(node).await {
            tracing::warn!(why, "cannot delay a shutdown by logind, pods end when skiff is stopped for it");
            if let Some(own) = node.ctx.caches.nodes().get(&Key::new("", &node.settings.node_name)) {
                let message = format!("Cannot delay a shutdown until pods have ended: {why}");
                node.ctx.events.warning(&*own, "GracefulShutdownUnavailable", message);
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Holds logind back and listens to it for as long as it speaks.
async fn listen(node: &Arc<Node>) -> Result<(), String> {
    if !std::path::Path::new("/run/systemd/system").exists() {
        return Err("it is not run by systemd, whose logind tells of it".to_owned());
    }
    let wanted: i64 = node.settings.shutdown.iter().map(|period| period.seconds).sum();
    check_patience(wanted).await?;
    let mut lock = Some(hold()?);
    let mut command = Command::new("busctl");
    command.args(["monitor", "--system", "--json=short", "--match", SIGNAL]);
    let mut monitor = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("busctl cannot be run ({error}); it comes with systemd"))?;
    let output = monitor.stdout.take().ok_or("busctl says nothing")?;
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match is_going_down(&line) {
            Some(true) => {
                end_all(node).await;
                // Everybody may go on now.
                lock = None;
            }
            Some(false) => {
                node.is_going_down.send_replace(false);
                lock.get_or_insert(hold()?);
            }
            None => {}
        }
    }
    Ok(())
}

/// Whether a signal says that the machine goes down, or that it does not after all.
fn is_going_down(line: &str) -> Option<bool> {
    let signal: serde_json::Value = serde_json::from_str(line).ok()?;
    if signal["member"] != "PrepareForShutdown" {
        return None;
    }
    signal["payload"]["data"][0].as_bool()
}

fn hold() -> Result<Child, String> {
    let mut command = Command::new("systemd-inhibit");
    command.args(["--what=shutdown", "--mode=delay", "--who=skiff", "--why=Pods are ended in order first"]);
    command.args(["sleep", "infinity"]).stdin(Stdio::null()).kill_on_drop(true);
    command.spawn().map_err(|error| format!("systemd-inhibit cannot be run ({error}); it comes with systemd"))
}

/// logind waits for nobody longer than it is set up to.
async fn check_patience(wanted: i64) -> Result<(), String> {
    let mut command = Command::new("busctl");
    let manager = ["org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"];
    command.args(["get-property", "--json=short"]).args(manager).arg("InhibitDelayMaxUSec");
    let told = command.stdin(Stdio::null()).output().await.map_err(|error| format!("busctl: {error}"))?;
    let told: serde_json::Value = serde_json::from_slice(&told.stdout)
        .map_err(|_| "systemd-logind does not answer: is it running?".to_owned())?;
    let seconds = told["data"].as_i64().unwrap_or(0) / 1_000_000;
    if seconds >= wanted {
        return Ok(());
    }
    Err(format!(
        "logind waits for {seconds} s only, and pods are to have {wanted} s: set InhibitDelayMaxSec={wanted} in \
         /etc/systemd/logind.conf and restart systemd-logind"
    ))
}

/// Ends all pods of this node, one group after the other.
async fn end_all(node: &Arc<Node>) {
    node.is_going_down.send_replace(true);
    let pods = node.pods();
    let active: Vec<Arc<Pod>> = pods.into_iter().filter(|pod| !is_over(pod)).collect();
    let is_suspending = node.settings.is_shutdown_default;
    tracing::info!(pods = active.len(), "the machine goes down, ending pods");
    for Group { seconds, pods } in plan::plan(&node.settings.shutdown, &active) {
        for (pod, grace) in &pods {
            node.remember(pod, |memory| {
                if is_suspending {
                    memory.is_suspended = true;
                } else {
                    memory.ended.get_or_insert_with(|| (TERMINATED.0.to_owned(), TERMINATED.1.to_owned()));
                }
                memory.end_within = Some(*grace);
            });
            node.hasten(pod);
        }
        let ended = async {
            while !is_reported(node, &pods) || !have_ended(node, &pods).await {
                tokio::time::sleep(LOOK).await;
            }
        };
        let seconds = u64::try_from(seconds).unwrap_or(0);
        if tokio::time::timeout(Duration::from_secs(seconds), ended).await.is_err() {
            tracing::warn!(seconds, "not all pods have ended in time");
        }
    }
}

/// Whether the API server knows that these pods have failed, where they do.
fn is_reported(node: &Node, pods: &[(Arc<Pod>, i64)]) -> bool {
    node.settings.is_shutdown_default
        || pods.iter().all(|(pod, _)| node.pod_exactly(&pod.key(), pod.uid()).is_none_or(|pod| is_over(&pod)))
}

/// Whether nothing runs any more of these pods.
async fn have_ended(node: &Node, pods: &[(Arc<Pod>, i64)]) -> bool {
    let Ok(sandboxes) = node.runtime.sandboxes(&[]).await else { return false };
    let is_one = |uid: &String| pods.iter().any(|(pod, _)| pod.uid() == uid);
    let mut running = sandboxes.iter().filter(|sandbox| sandbox.state() == PodSandboxState::Ready);
    !running.any(|sandbox| sandbox.labels.get(POD_UID).is_some_and(is_one))
}

fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_logind_says() {
        let signal = |member: &str, data: &str| {
            format!(r#"{{"type":"signal","member":"{member}","payload":{{"type":"b","data":[{data}]}}}}"#)
        };
        assert_eq!(is_going_down(&signal("PrepareForShutdown", "true")), Some(true));
        assert_eq!(is_going_down(&signal("PrepareForShutdown", "false")), Some(false));
        assert_eq!(is_going_down(&signal("PrepareForSleep", "true")), None);
        assert_eq!(is_going_down("Monitoring bus message stream."), None);
    }
}
