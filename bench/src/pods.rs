//! Pods on a real node: time until they run, memory and CPU, with the embedded runtime and with
//! containerd in one run. Runs in a network namespace of its own, because bridges and addresses are
//! real.
//!
//! containerd is measured first; the results of the embedded runtime are compared with it and with a
//! threshold.

mod exec;
mod processes;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use serde_json::{Value, json};
use testkit::{Containerd, busybox_image};

use crate::client::{Client, WatchStream};
use crate::report::{Report, Threshold, Unit, median, millis, quantile};
use crate::server::Server;
use processes::RuntimeProcesses;

const IMAGE: &str = "docker.io/library/busybox:1.36";
const NODE: &str = "bench";
const PODS: &str = "/api/v1/namespaces/default/pods";
/// Time limit for pods to start or to be deleted, also on a busy machine.
const POD_TIMEOUT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Delay before the memory of running pods is measured; memory that is used only at start is free by
/// then.
const MEMORY_SAMPLE_DELAY: Duration = Duration::from_secs(2);
/// Disables disk-pressure and memory-pressure eviction, because the disk of this machine may be almost
/// full.
const NO_EVICTION_FLAG: &str = "--kubelet-arg=eviction-hard=memory.available<0,nodefs.available<0%,nodefs.inodesFree<0%,imagefs.available<0%";
/// Upstream takes 479 ms; the threshold is a quarter of that.
const RUNNING_THRESHOLD: Threshold = Threshold { ratio: Some(0.25), value: Some(120.0) };
const RATIO_THRESHOLD: Threshold = Threshold { ratio: Some(0.25), value: None };
const POD_MEMORY_THRESHOLD: Threshold = Threshold { ratio: Some(0.125), value: Some(2.0) };
const IDLE_MEMORY_THRESHOLD: Threshold = Threshold { ratio: None, value: Some(60.0) };

/// Numbers of pods.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Created one after another.
    pub sequential: usize,
    /// Created concurrently.
    pub parallel: usize,
    /// Running while memory is measured.
    pub many: usize,
    pub commands: usize,
}

pub async fn run(report: &mut Report, binary: &Path, dir: &Path, sizes: Sizes) -> Result<()> {
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().context("cannot run ip")?;
    ensure!(up.success(), "cannot set up the network");
    let scratch = tempfile::Builder::new().prefix("skiff-bench-").tempdir_in(dir)?;
    let archive = busybox_image(scratch.path(), IMAGE)?;
    let groups = {
        let containerd = Containerd::start_in_this_network(&scratch.path().join("containerd"))?;
        let socket = containerd.socket().display().to_string();
        let server = start(binary, dir, &["--container-runtime-endpoint", &socket]).await?;
        let containerd_processes =
            RuntimeProcesses::of("containerd-shim", scratch.path(), vec![server.pid(), containerd.pid()]);
        measure(report, &server, &containerd_processes, "containerd", sizes).await?;
        testkit::cgroups_of_node(&server.pods_dir())
    };
    ensure_cgroups_removed(&groups)?;
    let server = start(binary, dir, &[]).await?;
    let import = Command::new(binary)
        .args(["image", "import", "--data-dir"])
        .arg(server.data_dir())
        .arg(&archive)
        .output()
        .context("cannot run skiff")?;
    ensure!(import.status.success(), "cannot import: {}", String::from_utf8_lossy(&import.stderr));
    let embedded_processes = RuntimeProcesses::of("supervise", &server.data_dir(), vec![server.pid()]);
    measure(report, &server, &embedded_processes, "embedded", sizes).await?;
    let groups = testkit::cgroups_of_node(&server.pods_dir());
    drop(server);
    ensure_cgroups_removed(&groups)
}

/// The first node must leave nothing behind that would affect the second measurement.
fn ensure_cgroups_removed(groups: &[PathBuf]) -> Result<()> {
    let remaining: Vec<_> = groups.iter().filter(|group| group.exists()).collect();
    ensure!(
        !groups.is_empty() && remaining.is_empty(),
        "cgroups of the node: {groups:?}, of which {remaining:?} remain"
    );
    Ok(())
}

async fn start(binary: &Path, dir: &Path, flags: &[&str]) -> Result<Server> {
    let node = [
        "--kubelet-port",
        "0",
        "--node-name",
        NODE,
        NO_EVICTION_FLAG,
        "--kubelet-arg=image-gc-high-threshold=100",
    ];
    let server = Server::start_with_node(binary, dir, &[&node[..], flags].concat()).await?;
    let client = server.target.connect().await?;
    let started = Instant::now();
    while !is_ready(&client).await {
        ensure!(started.elapsed() < POD_TIMEOUT, "the node is not ready\n{}", server.log());
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(server)
}

async fn is_ready(client: &Client) -> bool {
    let Ok(node) = client.get(&format!("/api/v1/nodes/{NODE}")).await else { return false };
    let node: Value = serde_json::from_slice(&node.body).unwrap_or_default();
    let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
        && client.get("/api/v1/namespaces/default/serviceaccounts/default").await.is_ok()
}

async fn measure(
    report: &mut Report,
    server: &Server,
    processes: &RuntimeProcesses,
    runtime: &str,
    sizes: Sizes,
) -> Result<()> {
    let client = server.target.connect().await?;
    let mut node = Node { watch: watch(&client).await?, client, server };
    let mut runtime_report = RuntimeReport { report, runtime };
    // One-time work of the first pod is not measured.
    node.wait_until_running(vec![node.create("first").await?]).await?;
    node.delete_all(processes).await?;
    runtime_report.add("at-rest", Unit::Megabytes, processes.roots_rss()?, IDLE_MEMORY_THRESHOLD);

    let cpu = processes.cpu()?;
    let mut times = Vec::new();
    for number in 0..sizes.sequential {
        let created = node.create(&format!("sequential-{number}")).await?;
        times.extend(node.wait_until_running(vec![created]).await?);
    }
    node.delete_all(processes).await?;
    let cpu = (processes.cpu()? - cpu) * 1e6 / sizes.sequential as f64;
    runtime_report.add("sequential/p50", Unit::Millis, median(&mut times), RUNNING_THRESHOLD);
    runtime_report.add("sequential/p95", Unit::Millis, quantile(&mut times, 0.95), RATIO_THRESHOLD);
    runtime_report.add("cpu-per-cycle", Unit::CpuMicros, cpu, RATIO_THRESHOLD);

    let started = Instant::now();
    let named = |kind: &str, count| (0..count).map(|number| format!("{kind}-{number}")).collect::<Vec<_>>();
    let mut times = node.create_all(&named("parallel", sizes.parallel)).await?;
    runtime_report.add("parallel/all", Unit::Millis, millis(started.elapsed()), RATIO_THRESHOLD);
    runtime_report.add("parallel/p50", Unit::Millis, median(&mut times), RATIO_THRESHOLD);

    node.create_all(&named("more", sizes.many - sizes.parallel)).await?;
    tokio::time::sleep(MEMORY_SAMPLE_DELAY).await;
    let memory = processes.memory()?;
    let each = |bytes: f64| bytes / sizes.many as f64;
    runtime_report.add("memory-per-pod/resident", Unit::Megabytes, each(memory.rss), POD_MEMORY_THRESHOLD);
    runtime_report.add(
        "memory-per-pod/proportional",
        Unit::Megabytes,
        each(memory.pss),
        POD_MEMORY_THRESHOLD,
    );
    runtime_report.add("memory-per-pod/private", Unit::Megabytes, each(memory.private), POD_MEMORY_THRESHOLD);
    let mut times = Vec::new();
    for _ in 0..sizes.commands {
        let started = Instant::now();
        exec::run(&server.target, &format!("{PODS}/more-0/exec?command=true&stdout=true&stderr=true"))
            .await?;
        times.push(millis(started.elapsed()));
    }
    runtime_report.add("exec", Unit::Millis, median(&mut times), RATIO_THRESHOLD);
    node.delete_all(processes).await
}

/// Reports the results of one runtime; those of the embedded one relative to those of containerd.
struct RuntimeReport<'a> {
    report: &'a mut Report,
    runtime: &'a str,
}

impl RuntimeReport<'_> {
    fn add(&mut self, name: &str, unit: Unit, value: f64, threshold: Threshold) {
        let full = format!("pods/{}/{name}", self.runtime);
        match self.runtime {
            "embedded" => self.report.add_with_threshold(
                full,
                unit,
                value,
                &format!("pods/containerd/{name}"),
                threshold,
            ),
            _ => self.report.add(full, unit, value),
        }
    }
}

struct Node<'a> {
    client: Client,
    server: &'a Server,
    watch: WatchStream,
}

async fn watch(client: &Client) -> Result<WatchStream> {
    let list: Value = serde_json::from_slice(&client.get(&format!("{PODS}?limit=1")).await?.body)?;
    let version = list["metadata"]["resourceVersion"].as_str().context("the list has no resourceVersion")?;
    client.watch(&format!("{PODS}?watch=1&resourceVersion={version}")).await
}

impl Node<'_> {
    /// Creates a pod; returns its name and the time of the request.
    async fn create(&self, name: &str) -> Result<(String, Instant)> {
        let started = Instant::now();
        self.client.post(PODS, &pod(name)).await?;
        Ok((name.to_owned(), started))
    }

    async fn create_all(&mut self, names: &[String]) -> Result<Vec<f64>> {
        let created = try_join_all(names.iter().map(|name| self.create(name))).await?;
        self.wait_until_running(created).await
    }

    /// Milliseconds until each of these pods was Running, as seen by a watch.
    async fn wait_until_running(&mut self, mut waiting: Vec<(String, Instant)>) -> Result<Vec<f64>> {
        let mut times = Vec::new();
        while !waiting.is_empty() {
            let next = tokio::time::timeout(POD_TIMEOUT, self.watch.next()).await;
            let next = next.with_context(|| format!("{waiting:?} do not run\n{}", self.server.log()))?;
            let (at, line) = next?.context("the watch has ended")?;
            let event: Value = serde_json::from_slice(&line)?;
            let object = &event["object"];
            if object["status"]["phase"] != "Running" {
                continue;
            }
            let at_name = waiting.iter().position(|(name, _)| object["metadata"]["name"] == **name);
            times.extend(at_name.map(|index| millis(at - waiting.swap_remove(index).1)));
        }
        Ok(times)
    }

    /// Deletes all pods and waits until they are gone from the API and their processes have exited.
    async fn delete_all(&self, processes: &RuntimeProcesses) -> Result<()> {
        let list: Value = serde_json::from_slice(&self.client.get(PODS).await?.body)?;
        let names: BTreeSet<String> = list["items"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned))
            .collect();
        let delete = async |name: &String| self.client.delete(&format!("{PODS}/{name}")).await;
        try_join_all(names.iter().map(delete)).await?;
        let started = Instant::now();
        loop {
            let list: Value = serde_json::from_slice(&self.client.get(PODS).await?.body)?;
            if list["items"].as_array().is_none_or(Vec::is_empty) && processes.have_exited() {
                return Ok(());
            }
            ensure!(started.elapsed() < POD_TIMEOUT, "pods were not deleted in time\n{}", self.server.log());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main", "image": "busybox:1.36", "command": ["sleep", processes::SLEEP_SECONDS],
                "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}},
            }],
        },
    })
}
