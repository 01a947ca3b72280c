//! `skiff dev`: a temporary cluster of several nodes on one machine. Each node is a skiff process with
//! its own network namespace and host name, and all are connected to one bridge. The first node is the
//! server.
//!
//! All state is in one directory and on one bridge, so that it can be removed by the same process or by
//! a later `skiff dev --remove`.

mod network;
mod node_namespace;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use client::{Client, Kubeconfig, remote::Remote};
use serde_json::Value;

use crate::flags::DevFlags;
use crate::reset::{self, Failures};
use crate::server::{create_private_dir, shutdown_signal};

use network::{DevNetwork, NodeNamespace};
pub use node_namespace::run_in_namespace;

/// Time limits for the start of a cluster and for the exit of its processes.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

pub fn run(flags: DevFlags) -> anyhow::Result<()> {
    anyhow::ensure!(rustix::process::geteuid().is_root(), "skiff dev needs root to create networks");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        if flags.remove {
            return remove(&flags.data_dir).await;
        }
        let mut cluster = create_cluster(&flags)?;
        let stopped = tokio::select! {
            result = cluster.start_all(&flags) => match result {
                Ok(()) => {
                    shutdown_signal().await;
                    Ok(())
                }
                Err(error) => Err(error.context(cluster.recent_logs())),
            },
            () = shutdown_signal() => Ok(()),
        };
        eprintln!("removing the cluster");
        let shutdown_result = cluster.shutdown().await;
        stopped.and(shutdown_result)
    })
}

/// A running cluster, or the part of it that was created before an error.
struct DevCluster {
    dir: PathBuf,
    nodes: Vec<DevNode>,
    dev_network: DevNetwork,
    _lock: Option<File>,
}

struct DevNode {
    name: String,
    process: Child,
    netns: NodeNamespace,
}

/// Creates the directory, lock and network of a cluster.
fn create_cluster(flags: &DevFlags) -> anyhow::Result<DevCluster> {
    create_private_dir(&flags.data_dir)?;
    let lock =
        reset::lock(&flags.data_dir).context("a cluster with this data directory is running already")?;
    let leftover = flags.data_dir.join("processes").exists();
    anyhow::ensure!(!leftover, "an earlier cluster was not removed: run skiff dev --remove");
    let dev_network = DevNetwork::create(&flags.data_dir, flags.network, flags.routed)?;
    Ok(DevCluster { dir: flags.data_dir.clone(), nodes: Vec::new(), dev_network, _lock: lock })
}

impl DevCluster {
    /// Starts all nodes and waits until they are Ready.
    async fn start_all(&mut self, flags: &DevFlags) -> anyhow::Result<()> {
        let started = Instant::now();
        self.record_processes()?;
        for number in 1..=flags.nodes {
            import(&self.node_dir(number), &flags.image)?;
        }
        let server = self.dev_network.address(1)?;
        let kubeconfig = self.dir.join("kubeconfig");
        let mut arguments = vec![
            "server".to_owned(),
            format!("--bind-address={server}"),
            format!("--write-kubeconfig={}", kubeconfig.display()),
        ];
        arguments.extend(flags.server_arg.iter().cloned());
        self.start_node(1, &arguments, &flags.rest)?;
        let token = self.node_dir(1).join("token");
        wait_until("the server writes its kubeconfig", || Ok(kubeconfig.exists() && token.exists())).await?;
        for number in 2..=flags.nodes {
            let arguments = [
                "agent".to_owned(),
                format!("--server=https://{server}:6443"),
                format!("--token-file={}", token.display()),
            ];
            self.start_node(number, &arguments, &flags.rest)?;
        }
        let client = Remote::new(&Kubeconfig::read(&kubeconfig)?)?;
        let client = Client::new(std::sync::Arc::new(client), "skiff-dev");
        let deadline = Instant::now() + READY_TIMEOUT;
        let without_agent = flags.server_arg.iter().any(|argument| argument == "--disable-agent");
        let nodes = flags.nodes - u8::from(without_agent);
        while ready_nodes(&client).await < usize::from(nodes) {
            self.check_processes()?;
            anyhow::ensure!(Instant::now() < deadline, "the nodes were not ready in time");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let seconds = started.elapsed().as_secs_f32();
        println!("{nodes} nodes are ready after {seconds:.1} s");
        println!("export KUBECONFIG={}", kubeconfig.display());
        println!("Ctrl-C removes everything");
        Ok(())
    }

    fn node_dir(&self, number: u8) -> PathBuf {
        self.dir.join(node_name(number))
    }

    fn start_node(&mut self, number: u8, arguments: &[String], rest: &[String]) -> anyhow::Result<()> {
        let name = node_name(number);
        let log = self.dir.join(format!("{name}.log"));
        let log = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut process = Command::new("/proc/self/exe")
            .arg("inside")
            .arg(&name)
            .args(arguments)
            .arg(format!("--data-dir={}", self.node_dir(number).display()))
            .arg(format!("--node-name={name}"))
            // The host's CNI configuration must not be used: its network does not connect these nodes.
            .arg(format!("--cni-conf-dir={}", self.dir.join("no-cni").display()))
            .args(rest)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let netns = match self.dev_network.connect(number, &mut process) {
            Ok(netns) => netns,
            Err(error) => {
                let _ = process.kill();
                let _ = process.wait();
                return Err(error.context(format!("cannot connect {name} to the network")));
            }
        };
        self.nodes.push(DevNode { name, process, netns });
        self.record_processes()
    }

    /// Records the process IDs, so that `skiff dev --remove` can end them if this process cannot.
    fn record_processes(&self) -> anyhow::Result<()> {
        let mut text = format!("{}\n", std::process::id());
        for node in &self.nodes {
            text += &format!("{}\n", node.process.id());
        }
        let path = self.dir.join("processes");
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn check_processes(&mut self) -> anyhow::Result<()> {
        for node in &mut self.nodes {
            if let Some(status) = node.process.try_wait()? {
                bail!("{} exited with {status}", node.name);
            }
        }
        Ok(())
    }

    /// The last lines of each node's log.
    fn recent_logs(&self) -> String {
        let mut logs = String::new();
        for node in &self.nodes {
            let log =
                std::fs::read_to_string(self.dir.join(format!("{}.log", node.name))).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(5)..];
            logs += &format!("{}:\n{}\n", node.name, last.join("\n"));
        }
        logs
    }

    /// Stops all nodes and removes everything.
    async fn shutdown(self) -> anyhow::Result<()> {
        let DevCluster { dir, nodes, dev_network: networks, _lock } = self;
        for node in &nodes {
            if let Some(pid) = i32::try_from(node.process.id()).ok().and_then(rustix::process::Pid::from_raw)
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
        }
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        for DevNode { mut process, netns: network, .. } in nodes {
            while process.try_wait()?.is_none() && Instant::now() < deadline {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            let _ = process.kill();
            let _ = process.wait();
            drop(network);
        }
        cleanup(&dir, networks).await
    }
}

/// Removes pods, network links and files. A failure of one does not prevent the others.
async fn cleanup(dir: &Path, dev_network: DevNetwork) -> anyhow::Result<()> {
    let mut failures = Failures::default();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            reset::remove_pods(&entry.path(), &mut failures).await;
        }
    }
    let links = dev_network.remove();
    let files = reset::remove_dir(dir);
    failures.check("not everything could be removed")?;
    links.and(files)
}

/// Removes a cluster of an earlier process.
async fn remove(dir: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(dir.join("processes")).unwrap_or_default();
    let mut processes = text.lines().filter_map(|line| line.parse::<i32>().ok());
    let signal = |pid: i32, signal| {
        if let Some(pid) = rustix::process::Pid::from_raw(pid) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    };
    let parent = processes.next().filter(|pid| is_skiff_process(*pid, "dev"));
    if let Some(parent) = parent {
        // If the `skiff dev` process still runs, it removes its cluster itself.
        signal(parent, rustix::process::Signal::TERM);
        wait_until("the cluster is removed", || Ok(!is_skiff_process(parent, "dev"))).await?;
    }
    let remaining: Vec<i32> =
        processes.filter(|pid| is_skiff_process(*pid, &dir.display().to_string())).collect();
    for pid in &remaining {
        signal(*pid, rustix::process::Signal::KILL);
    }
    for pid in remaining {
        wait_until("a node exits", || Ok(!is_skiff_process(pid, &dir.display().to_string()))).await?;
    }
    cleanup(dir, DevNetwork::from_previous_run(dir)).await
}

/// Whether a live process has this word on its command line. The check is needed because PIDs are
/// reused.
fn is_skiff_process(pid: i32, argument: &str) -> bool {
    let command_line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let has_exited = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X']));
    !has_exited && String::from_utf8_lossy(&command_line).contains(argument)
}

fn node_name(number: u8) -> String {
    format!("node-{number}")
}

/// Imports images into a node's image store before the node starts.
fn import(dir: &Path, images: &[PathBuf]) -> anyhow::Result<()> {
    create_private_dir(dir)?;
    if images.is_empty() {
        return Ok(());
    }
    let done = Command::new("/proc/self/exe")
        .args(["image", "import", "--data-dir"])
        .arg(dir)
        .args(images)
        .stdout(Stdio::null())
        .status()
        .context("cannot import images")?;
    anyhow::ensure!(done.success(), "cannot import images");
    Ok(())
}

async fn wait_until(
    description: &str,
    mut condition: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + READY_TIMEOUT;
    while !condition()? {
        anyhow::ensure!(Instant::now() < deadline, "timed out waiting until {description}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

async fn ready_nodes(client: &Client) -> usize {
    let list = client.request(http::Method::GET, "/api/v1/nodes", None).await.unwrap_or_default();
    let nodes = list.get("items").and_then(Value::as_array).into_iter().flatten();
    let is_ready = |node: &&Value| {
        let conditions = node.pointer("/status/conditions").and_then(Value::as_array);
        conditions.into_iter().flatten().any(|known| known["type"] == "Ready" && known["status"] == "True")
    };
    nodes.filter(is_ready).count()
}
