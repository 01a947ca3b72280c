//! Pods on a real node: how long they take to run, what they take to be kept, by the runtime of our own and by
//! containerd, in one run. In a network of its own, since bridges and addresses are real.
//!
//! containerd comes first; what the embedded runtime takes is shown against it, with the goal beside it.

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

use crate::client::{Client, Lines};
use crate::report::{Goal, Report, Unit, median, millis, quantile};
use crate::server::Server;
use processes::Processes;

const IMAGE: &str = "docker.io/library/busybox:1.36";
const NODE: &str = "bench";
const PODS: &str = "/api/v1/namespaces/default/pods";
/// No pod takes so long, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(300);
const AGAIN: Duration = Duration::from_millis(5);
/// How long pods have been running when their memory is looked at: what they need to begin is no longer in use then.
const REST: Duration = Duration::from_secs(2);
/// However full the disk of whoever measures this is.
const ROOM: &str = "--kubelet-arg=eviction-hard=memory.available<0,nodefs.available<0%,nodefs.inodesFree<0%,imagefs.available<0%";
/// Upstream takes 479 ms; a quarter of that.
const RUNNING: Goal = Goal { ratio: Some(0.25), value: Some(120.0) };
const QUARTER: Goal = Goal { ratio: Some(0.25), value: None };
const PER_POD: Goal = Goal { ratio: Some(0.125), value: Some(2.0) };
const AT_REST: Goal = Goal { ratio: None, value: Some(60.0) };

/// How many pods.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// One after the other.
    pub sequential: usize,
    /// All at once.
    pub parallel: usize,
    /// When memory is looked at.
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
        let of_containerd =
            Processes::of("containerd-shim", scratch.path(), vec![server.pid(), containerd.pid()]);
        measure(report, &server, &of_containerd, "containerd", sizes).await?;
        testkit::cgroups_of_node(&server.pods_dir())
    };
    are_gone(&groups)?;
    let server = start(binary, dir, &[]).await?;
    let imported = Command::new(binary)
        .args(["image", "import", "--data-dir"])
        .arg(server.data_dir())
        .arg(&archive)
        .output()
        .context("cannot run skiff")?;
    ensure!(imported.status.success(), "cannot import: {}", String::from_utf8_lossy(&imported.stderr));
    let own = Processes::of("supervise", &server.data_dir(), vec![server.pid()]);
    measure(report, &server, &own, "embedded", sizes).await?;
    let groups = testkit::cgroups_of_node(&server.pods_dir());
    drop(server);
    are_gone(&groups)
}

/// A node that was measured leaves nothing for the next one to be measured beside.
fn are_gone(groups: &[PathBuf]) -> Result<()> {
    let left: Vec<_> = groups.iter().filter(|group| group.exists()).collect();
    ensure!(!groups.is_empty() && left.is_empty(), "the node had {groups:?}, of which {left:?} are left");
    Ok(())
}

async fn start(binary: &Path, dir: &Path, flags: &[&str]) -> Result<Server> {
    let node =
        ["--kubelet-port", "0", "--node-name", NODE, ROOM, "--kubelet-arg=image-gc-high-threshold=100"];
    let server = Server::start_with_node(binary, dir, &[&node[..], flags].concat()).await?;
    let client = server.target.connect().await?;
    let begun = Instant::now();
    while !is_ready(&client).await {
        ensure!(begun.elapsed() < PATIENCE, "the node is not ready\n{}", server.log());
        tokio::time::sleep(AGAIN).await;
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
    processes: &Processes,
    runtime: &str,
    sizes: Sizes,
) -> Result<()> {
    let client = server.target.connect().await?;
    let mut node = Node { watch: watch(&client).await?, client, server };
    let mut figures = Figures { report, runtime };
    // Whatever is done once is not part of any figure.
    node.all_running(vec![node.create("first").await?]).await?;
    node.delete_all(processes).await?;
    figures.add("at-rest", Unit::Megabytes, processes.roots_resident()?, AT_REST);

    let cpu = processes.cpu()?;
    let mut times = Vec::new();
    for number in 0..sizes.sequential {
        let begun = node.create(&format!("sequential-{number}")).await?;
        times.extend(node.all_running(vec![begun]).await?);
    }
    node.delete_all(processes).await?;
    let cpu = (processes.cpu()? - cpu) * 1e6 / sizes.sequential as f64;
    figures.add("sequential/p50", Unit::Millis, median(&mut times), RUNNING);
    figures.add("sequential/p95", Unit::Millis, quantile(&mut times, 0.95), QUARTER);
    figures.add("cpu-per-cycle", Unit::CpuMicros, cpu, QUARTER);

    let begun = Instant::now();
    let named = |kind: &str, count| (0..count).map(|number| format!("{kind}-{number}")).collect::<Vec<_>>();
    let mut times = node.create_all(&named("parallel", sizes.parallel)).await?;
    figures.add("parallel/all", Unit::Millis, millis(begun.elapsed()), QUARTER);
    figures.add("parallel/p50", Unit::Millis, median(&mut times), QUARTER);

    node.create_all(&named("more", sizes.many - sizes.parallel)).await?;
    tokio::time::sleep(REST).await;
    let memory = processes.memory()?;
    let each = |bytes: f64| bytes / sizes.many as f64;
    figures.add("memory-per-pod/resident", Unit::Megabytes, each(memory.resident), PER_POD);
    figures.add("memory-per-pod/proportional", Unit::Megabytes, each(memory.proportional), PER_POD);
    figures.add("memory-per-pod/private", Unit::Megabytes, each(memory.private), PER_POD);
    let mut times = Vec::new();
    for _ in 0..sizes.commands {
        let begun = Instant::now();
        exec::run(&server.target, &format!("{PODS}/more-0/exec?command=true&stdout=true&stderr=true"))
            .await?;
        times.push(millis(begun.elapsed()));
    }
    figures.add("exec", Unit::Millis, median(&mut times), QUARTER);
    node.delete_all(processes).await
}

/// Figures of one runtime, those of the embedded one against those of containerd.
struct Figures<'a> {
    report: &'a mut Report,
    runtime: &'a str,
}

impl Figures<'_> {
    fn add(&mut self, name: &str, unit: Unit, value: f64, goal: Goal) {
        let full = format!("pods/{}/{name}", self.runtime);
        match self.runtime {
            "embedded" => {
                self.report.add_with_goal(full, unit, value, &format!("pods/containerd/{name}"), goal)
            }
            _ => self.report.add(full, unit, value),
        }
    }
}

struct Node<'a> {
    client: Client,
    server: &'a Server,
    watch: Lines,
}

async fn watch(client: &Client) -> Result<Lines> {
    let list: Value = serde_json::from_slice(&client.get(&format!("{PODS}?limit=1")).await?.body)?;
    let version = list["metadata"]["resourceVersion"].as_str().context("a list has a version")?;
    client.lines(&format!("{PODS}?watch=1&resourceVersion={version}")).await
}

impl Node<'_> {
    /// The pod's name and when it was asked for.
    async fn create(&self, name: &str) -> Result<(String, Instant)> {
        let begun = Instant::now();
        self.client.post(PODS, &pod(name)).await?;
        Ok((name.to_owned(), begun))
    }

    async fn create_all(&mut self, names: &[String]) -> Result<Vec<f64>> {
        let begun = try_join_all(names.iter().map(|name| self.create(name))).await?;
        self.all_running(begun).await
    }

    /// Milliseconds until each of these pods ran, as a watch has seen it.
    async fn all_running(&mut self, mut waiting: Vec<(String, Instant)>) -> Result<Vec<f64>> {
        let mut times = Vec::new();
        while !waiting.is_empty() {
            let next = tokio::time::timeout(PATIENCE, self.watch.next()).await;
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

    /// Deletes all pods and waits until nothing is left of them, in the API and among the processes.
    async fn delete_all(&self, processes: &Processes) -> Result<()> {
        let list: Value = serde_json::from_slice(&self.client.get(PODS).await?.body)?;
        let names: BTreeSet<String> = list["items"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned))
            .collect();
        let delete = async |name: &String| self.client.delete(&format!("{PODS}/{name}")).await;
        try_join_all(names.iter().map(delete)).await?;
        let begun = Instant::now();
        loop {
            let list: Value = serde_json::from_slice(&self.client.get(PODS).await?.body)?;
            if list["items"].as_array().is_none_or(Vec::is_empty) && processes.are_gone() {
                return Ok(());
            }
            ensure!(begun.elapsed() < PATIENCE, "pods do not go\n{}", self.server.log());
            tokio::time::sleep(AGAIN).await;
        }
    }
}

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main", "image": "busybox:1.36", "command": ["sleep", processes::WORK],
                "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}},
            }],
        },
    })
}
