//! Creates and deletes many pods while the server and supervisors are killed: in the end no resources
//! remain, and a server that runs for long does not grow.
//!
//! `SKIFF_CHURN_PODS` is the number of pods (60), `SKIFF_CHURN_SEED` the seed, `SKIFF_BIN` the binary
//! (a release build, for example). Needs root, kubectl and busybox; skipped otherwise.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::{Network, Server};

const IMAGE: &str = "docker.io/library/busybox:1.36";
const DEADLINE: Duration = Duration::from_secs(60);
/// Pods that are created at once; earlier ones may still be terminating. A node takes 110.
const BATCH_SIZE: usize = 30;
/// How much one server may grow: events are kept for an hour, recent changes are kept for watches, and
/// the allocator keeps free memory.
const MAX_EXTRA_MEMORY_KB: u64 = 64 << 10;

/// Random numbers (xorshift), reproducible by the seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end.max(1) as u64).expect("small")
    }
}

fn env_number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

struct Churn {
    server: Server,
    random: Random,
    _network: Network,
    /// UIDs of all pods so far.
    uids: BTreeSet<String>,
    servers_killed: usize,
    supervisors_killed: usize,
}

#[test]
fn nothing_remains_of_pods_under_churn() {
    if !testkit::can_run_pods(&["busybox"]) {
        return;
    }
    let (count, seed) = (env_number("SKIFF_CHURN_PODS", 60), env_number("SKIFF_CHURN_SEED", 1));
    let network = Network::new().expect("a network");
    let server = Server::start_with_pods(&network, &["--controllers=*", "--node-name=here"]);
    let dir = tempfile::tempdir().expect("a directory");
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    let data = server.data_dir().display().to_string();
    server.skiff(&["image", "import", "--data-dir", &data, &archive]).ok();
    server.wait_for_default_service_account();
    let random = Random((seed as u64 * 0x9e37_79b9) | 1);
    let uids = BTreeSet::new();
    let mut churn =
        Churn { server, random, _network: network, uids, servers_killed: 0, supervisors_killed: 0 };
    let (before, started) = (churn.resource_counts(), Instant::now());
    let (mut created, mut batch, mut baseline) = (0, 0, None);
    while created < count {
        // The last quarter runs without kills, to measure whether a server that runs for long grows.
        let without_faults = created >= count * 3 / 4;
        let size = BATCH_SIZE.min(count - created);
        churn.make(batch, size);
        churn.wait_until_started(batch, size, without_faults);
        churn.remove(batch, without_faults);
        (created, batch) = (created + size, batch + 1);
        if without_faults && baseline.is_none() {
            churn.wait_for_cleanup(&before);
            baseline = Some(churn.server_usage());
        }
    }
    churn.wait_for_cleanup(&before);
    let (after, end) = (churn.resource_counts(), churn.server_usage());
    println!(
        "{count} pods in {:.0?}, seed {seed}: {} servers and {} supervisors killed",
        started.elapsed(),
        churn.servers_killed,
        churn.supervisors_killed
    );
    println!("before: {before:?}\nafter:  {after:?}");
    if let Some((files, memory)) = baseline {
        println!(
            "one server from its first pods on: {files} files became {}, {memory} kB {} kB",
            end.0, end.1
        );
        assert!(end.0 <= files + 8, "{files} files became {}", end.0);
        assert!(end.1 <= memory + MAX_EXTRA_MEMORY_KB, "{memory} kB became {} kB", end.1);
    }
}

impl Churn {
    /// Creates pods of all sorts.
    fn make(&mut self, batch: usize, size: usize) {
        let pods: Vec<Value> = (0..size).map(|at| self.pod(batch, at)).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": pods});
        let uids = ["create", "-f", "-", "-o", "jsonpath={.metadata.uid} "];
        let uids = self.server.kubectl_with(&uids, &list.to_string()).ok();
        self.uids.extend(uids.split_whitespace().map(str::to_owned));
        assert!(self.uids.len() >= size, "{uids}");
    }

    fn pod(&mut self, batch: usize, at: usize) -> Value {
        let script = match self.random.below(4) {
            0 => "exit 0",
            1 => "trap 'exit 0' TERM; while true; do sleep 0.2; done",
            _ => "exec sleep 100000",
        };
        let mut spec = json!({
            "terminationGracePeriodSeconds": 1,
            "restartPolicy": if self.random.below(2) == 0 { "Never" } else { "Always" },
            "volumes": [{"name": "own", "emptyDir": {"medium": "Memory"}}],
            "containers": [{
                "name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script],
                "volumeMounts": [{"name": "own", "mountPath": "/own"}],
            }],
        });
        match self.random.below(4) {
            0 => spec["hostUsers"] = false.into(),
            1 => spec["shareProcessNamespace"] = true.into(),
            _ => {}
        }
        let name = format!("churn-{batch}-{at}");
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "labels": {"wave": batch.to_string()}}, "spec": spec,
        })
    }

    /// Waits until all pods of a batch have started; something is killed in between.
    fn wait_until_started(&mut self, batch: usize, size: usize, without_faults: bool) {
        if !without_faults {
            let enough = 1 + self.random.below(size);
            let has_enough = || self.supervisors().len() >= enough || self.started_pods(batch) == size;
            self.server.wait_until("some pods have started", has_enough);
            self.kill();
        }
        self.server.wait_until("all pods have started", || self.started_pods(batch) == size);
    }

    /// The number of pods in a batch that are not Pending.
    fn started_pods(&self, batch: usize) -> usize {
        let label = format!("wave={batch}");
        let phases = ["get", "pods", "-l", &label, "-o", "jsonpath={.items[*].status.phase}"];
        let phases = self.server.kubectl(&phases).ok();
        phases.split_whitespace().filter(|phase| *phase != "Pending").count()
    }

    fn remove(&mut self, batch: usize, without_faults: bool) {
        let label = format!("wave={batch}");
        self.server.kubectl(&["delete", "pods", "-l", &label, "--wait=false"]).ok();
        if !without_faults && self.random.below(2) == 0 {
            let max_running = self.random.below(BATCH_SIZE);
            self.server.wait_until("some pods are gone", || self.supervisors().len() <= max_running);
            self.kill();
        }
    }

    /// Kills the server, some supervisors, or both.
    fn kill(&mut self) {
        let what = self.random.below(3);
        if what != 0 {
            let mut running = self.supervisors();
            for _ in 0..1 + self.random.below(3).min(running.len()) {
                if running.is_empty() {
                    break;
                }
                let pid = running.swap_remove(self.random.below(running.len()));
                let pid = rustix::process::Pid::from_raw(pid.cast_signed());
                let killed = pid.map(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL));
                self.supervisors_killed += usize::from(killed == Some(Ok(())));
            }
        }
        if what != 1 {
            self.server.kill9();
            self.server.restart();
            self.servers_killed += 1;
        }
    }

    fn supervisors(&self) -> Vec<u32> {
        let marker = format!(" supervise {}", self.server.data_dir().display());
        let all = testkit::processes().into_iter();
        all.filter(|(_, words)| words.contains(&marker)).map(|(pid, _)| pid).collect()
    }

    fn wait_for_cleanup(&self, before: &BTreeMap<&'static str, usize>) {
        let remaining = || self.server.kubectl(&["get", "pods", "-o", "yaml"]).ok();
        let started = Instant::now();
        while remaining().contains("kind: Pod") {
            assert!(
                started.elapsed() < DEADLINE,
                "not all pods are gone\n{}{}",
                remaining(),
                self.server.log()
            );
            std::thread::yield_now();
        }
        let is_released = || self.resource_counts().iter().all(|(what, count)| *count <= before[what]);
        let started = Instant::now();
        while !is_released() {
            assert!(
                started.elapsed() < DEADLINE,
                "{before:?} became {:?}\n{}",
                self.resource_counts(),
                self.server.log()
            );
            std::thread::yield_now();
        }
    }

    /// Counts the resources of pods on the host and in the server's directories.
    fn resource_counts(&self) -> BTreeMap<&'static str, usize> {
        let links = self.server.command("ip").args(["-o", "link"]).output().expect("ip");
        let data = self.server.data_dir();
        let runtime = data.join("agent/runtime");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let here = data.display().to_string();
        BTreeMap::from([
            ("links", String::from_utf8_lossy(&links.stdout).matches(": skp").count()),
            ("supervisors", self.supervisors().len()),
            ("mounts", mounts.matches(&here).count()),
            ("namespaces", self.namespaces()),
            ("cgroups", count_cgroups(&self.uids)),
            ("pods", count_entries(&runtime.join("pods"))),
            ("addresses", count_entries(&runtime.join("addresses"))),
            ("volumes", count_entries(&data.join("agent/pods"))),
        ])
    }

    /// Namespaces that are used or held open by the server, its children and pods.
    fn namespaces(&self) -> usize {
        let data = self.server.data_dir().display().to_string();
        let of_pods = testkit::processes().into_iter().filter(|(_, words)| words.contains(&data));
        let pids = of_pods.map(|(pid, _)| pid);
        let mut seen = BTreeSet::new();
        for pid in pids {
            for dir in [format!("/proc/{pid}/ns"), format!("/proc/{pid}/fd")] {
                for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                    let Ok(target) = std::fs::read_link(entry.path()) else { continue };
                    let name = target.display().to_string();
                    if name.contains(":[") && !name.starts_with("socket:") && !name.starts_with("pipe:") {
                        seen.insert(name);
                    }
                }
            }
        }
        seen.len()
    }

    /// The server's number of open files and its private memory in kB.
    fn server_usage(&self) -> (usize, u64) {
        let pid = self.server.pid().expect("it runs");
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("Private_Dirty:")).map(str::trim);
        let memory = line.and_then(|line| line.trim_end_matches(" kB").parse().ok()).unwrap_or_default();
        (count_entries(Path::new(&format!("/proc/{pid}/fd"))), memory)
    }
}

fn count_entries(path: &Path) -> usize {
    std::fs::read_dir(path).into_iter().flatten().count()
}

/// The number of the pods' cgroups, in all hierarchies.
fn count_cgroups(uids: &BTreeSet<String>) -> usize {
    uids.iter().map(|uid| testkit::cgroups_of_pod(uid).len()).sum()
}
