//! `skiff stop`: stops the server or agent of a data directory and ends its pods. All data is kept.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::join_all;
use runtime::cri::{ContainerState, PodSandbox};
use runtime::{Embedded, Runtime as _};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::flags::StopFlags;
use crate::reset::{self, Failures};
use crate::running::{self, RunningNode};
use crate::{containerd, init_system, node};

const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const TERMINATION_GRACE_PERIOD: &str = "io.kubernetes.pod.terminationGracePeriod";
/// Pods in this namespace end after all others.
const SYSTEM_NAMESPACE: &str = "kube-system";
/// Upstream's default, for pods without a recorded grace period.
const DEFAULT_GRACE_PERIOD: Duration = Duration::from_secs(30);
/// A server completes its requests first.
const STOP_TIMEOUT_SECONDS: i64 = 60;

pub fn run(flags: &StopFlags) -> anyhow::Result<()> {
    anyhow::ensure!(rustix::process::geteuid().is_root(), "skiff stop needs root");
    let absolute = std::path::absolute(&flags.data_dir)?;
    let processes = running_processes(&flags.data_dir)?;
    for process in processes.iter().filter(|process| process.data_dir.as_ref() == Some(&absolute)) {
        stop_process(process)?;
    }
    if !flags.data_dir.is_dir() {
        println!("{} does not exist, nothing to stop", flags.data_dir.display());
        return Ok(());
    }
    let _lock = reset::lock(&flags.data_dir)?;
    let mut failures = Failures::default();
    let executor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let grace = flags.grace_period.map(Duration::from_secs);
    let pods = executor.block_on(end_pods(&flags.data_dir, grace, &mut failures))?;
    failures.check("not everything could be stopped")?;
    println!("ended {pods} pods; the data in {} is kept", flags.data_dir.display());
    Ok(())
}

/// The nodes that run in this network namespace, and the process that holds the lock of the data
/// directory.
pub fn running_processes(data_dir: &Path) -> anyhow::Result<Vec<RunningNode>> {
    let absolute = std::path::absolute(data_dir)?;
    let mut found = running::nodes()?;
    if let Some(pid) = reset::lock_holder(data_dir)
        && found.iter().all(|node| node.pid != pid)
    {
        found.push(RunningNode { pid, role: "process".to_owned(), data_dir: Some(absolute) });
    }
    Ok(found)
}

/// Stops a process and waits until it has exited. A systemd service is stopped by systemd, so that it
/// is not restarted.
pub fn stop_process(process: &RunningNode) -> anyhow::Result<()> {
    let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw).context("no such process")?;
    // A pidfd keeps referring to this process even if it exits and its PID is reused.
    let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        pidfd => pidfd.with_context(|| format!("cannot stop {process}"))?,
    };
    match init_system::service_of(process.pid) {
        Some(service) => {
            let done = std::process::Command::new("systemctl").args(["stop", &service]).status();
            let done = done.with_context(|| format!("cannot run systemctl stop {service}"))?;
            anyhow::ensure!(done.success(), "systemctl stop {service} failed with {done}");
            println!("stopped {process} by its service {service}");
        }
        None => {
            rustix::process::pidfd_send_signal(&pidfd, Signal::TERM)
                .with_context(|| format!("cannot stop {process}"))?;
            println!("stopping {process}");
        }
    }
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    let timeout = Timespec { tv_sec: STOP_TIMEOUT_SECONDS, tv_nsec: 0 };
    let ended = rustix::event::poll(&mut fds, Some(&timeout))?;
    anyhow::ensure!(ended > 0, "{process} did not exit within {STOP_TIMEOUT_SECONDS} s");
    Ok(())
}

/// Ends the pods of a node that does not run, each within its grace period: first those of users, then
/// those of the system. Their records stay, and the next start of the node starts them again.
async fn end_pods(
    data_dir: &Path,
    grace: Option<Duration>,
    failures: &mut Failures,
) -> anyhow::Result<usize> {
    if !node::runtime_dir(data_dir).join("pods").exists() {
        // With another runtime, only a containerd managed by skiff has pods to end.
        failures.record(containerd::stop_all(data_dir).await.context("cannot stop containerd"));
        return Ok(0);
    }
    let runtime = Embedded::open(reset::runtime_config(data_dir)?).await?;
    let mut pods = runtime.sandboxes(&[]).await?;
    pods.retain(|pod| pod.state() == runtime::cri::PodSandboxState::Ready);
    let is_system =
        |pod: &PodSandbox| pod.labels.get(POD_NAMESPACE).is_some_and(|name| name == SYSTEM_NAMESPACE);
    let (system, users): (Vec<_>, Vec<_>) = pods.iter().partition(|pod| is_system(pod));
    for group in [users, system] {
        let ended = join_all(group.into_iter().map(|pod| end_pod(&runtime, pod, grace))).await;
        for result in ended {
            failures.record(result);
        }
    }
    Ok(pods.len())
}

async fn end_pod(runtime: &Embedded, pod: &PodSandbox, grace: Option<Duration>) -> anyhow::Result<()> {
    let name =
        || pod.metadata.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name)).unwrap_or_default();
    let containers = runtime.containers(&[]).await?;
    let running = containers.iter().filter(|container| {
        container.pod_sandbox_id == pod.id && container.state() == ContainerState::Running
    });
    let stops = running.map(|container| {
        let own = container.annotations.get(TERMINATION_GRACE_PERIOD).and_then(|text| text.parse().ok());
        let own = own.map_or(DEFAULT_GRACE_PERIOD, Duration::from_secs);
        runtime.stop_container(&container.id, grace.map_or(own, |most| own.min(most)))
    });
    // Failures are ignored: stopping the sandbox ends the supervisor and all of its containers.
    join_all(stops).await;
    runtime.stop_sandbox(&pod.id).await.with_context(|| format!("cannot end the pod {}", name()))
}

/// Describes which pods keep running after a node has stopped; `None` if there are none.
pub fn remaining_pods(data_dir: &Path) -> Option<String> {
    let pods = runtime::embedded::count_running(&node::runtime_dir(data_dir));
    let what = if pods == 1 { "1 pod keeps".to_owned() } else { format!("{pods} pods keep") };
    let dir = data_dir.display();
    (pods > 0).then(|| {
        format!(
            "{what} running, with the network; end them with `skiff stop -d {dir}`, or remove all of it with \
             `skiff reset -d {dir}`"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_pods_counts_live_supervisors() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(remaining_pods(dir.path()), None);
        let pods = node::runtime_dir(dir.path()).join("pods");
        std::fs::create_dir_all(pods.join("a")).unwrap();
        std::fs::create_dir_all(pods.join("b")).unwrap();
        assert_eq!(remaining_pods(dir.path()), None, "both have ended");
        // A socket without a listener was left behind by a power cut.
        drop(std::os::unix::net::UnixListener::bind(pods.join("b/socket")).unwrap());
        assert_eq!(remaining_pods(dir.path()), None);
        let _supervisor = std::os::unix::net::UnixListener::bind(pods.join("a/socket")).unwrap();
        let text = remaining_pods(dir.path()).unwrap();
        assert!(text.starts_with("1 pod keeps running") && text.contains("skiff stop -d "), "{text}");
    }
}
