//! Many pods that come and go by the API while the server and supervisors are killed: in the end nothing is left, and one
//! server that lives long does not grow.
//!
//! `SKIFF_CHURN_PODS` says how many (60), `SKIFF_CHURN_SEED` which run of chance, `SKIFF_BIN` which program, such as a
//! release. Needs root, kubectl and busybox; says so and passes where these are missing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::{Network, Server};

const IMAGE: &str = "docker.io/library/busybox:1.36";
const DEADLINE: Duration = Duration::from_secs(60);
/// Pods made at once; those before them may still be on their way out. A node takes 110.
const WAVE: usize = 30;
/// What one server may grow by: events stay for an hour, the last changes are kept for who watches, and the allocator
/// keeps something for later.
const GROWTH: u64 = 64 << 10;

/// Numbers by chance, the same for the same seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end.max(1) as u64).expect("small")
    }
}

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

struct Churn {
    server: Server,
    chance: Chance,
    _network: Network,
    /// Of all pods there were.
    uids: BTreeSet<String>,
    skiffs_killed: usize,
    supervisors_killed: usize,
}

#[test]
fn pods_come_and_go() {
    if !testkit::can_have_pods(&["busybox"]) {
        return;
    }
    let (count, seed) = (number("SKIFF_CHURN_PODS", 60), number("SKIFF_CHURN_SEED", 1));
    let network = Network::new().expect("a network");
    let server = Server::start_with_pods(&network, &["--controllers=*", "--node-name=here"]);
    let dir = tempfile::tempdir().expect("a directory");
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    let data = server.data_dir().display().to_string();
    server.skiff(&["image", "import", "--data-dir", &data, &archive]).ok();
    server.until_pods_can_be_made();
    let chance = Chance((seed as u64 * 0x9e37_79b9) | 1);
    let uids = BTreeSet::new();
    let mut churn =
        Churn { server, chance, _network: network, uids, skiffs_killed: 0, supervisors_killed: 0 };
    let (before, begun) = (churn.held(), Instant::now());
    let (mut made, mut wave, mut steady) = (0, 0, None);
    while made < count {
        // The last of them are left alone, to see whether one server that lives long grows.
        let is_quiet = made >= count * 3 / 4;
        let size = WAVE.min(count - made);
        churn.make(wave, size);
        churn.until_begun(wave, size, is_quiet);
        churn.remove(wave, is_quiet);
        (made, wave) = (made + size, wave + 1);
        if is_quiet && steady.is_none() {
            churn.until_nothing_is_left(&before);
            steady = Some(churn.size());
        }
    }
    churn.until_nothing_is_left(&before);
    let (after, end) = (churn.held(), churn.size());
    println!(
        "{count} pods in {:.0?}, seed {seed}: {} servers and {} supervisors killed",
        begun.elapsed(),
        churn.skiffs_killed,
        churn.supervisors_killed
    );
    println!("before: {before:?}\nafter:  {after:?}");
    if let Some((files, memory)) = steady {
        println!(
            "one server from its first pods on: {files} files became {}, {memory} kB {} kB",
            end.0, end.1
        );
        assert!(end.0 <= files + 8, "{files} files became {}", end.0);
        assert!(end.1 <= memory + GROWTH, "{memory} kB became {} kB", end.1);
    }
}

impl Churn {
    /// Makes pods of all sorts.
    fn make(&mut self, wave: usize, size: usize) {
        let pods: Vec<Value> = (0..size).map(|at| self.pod(wave, at)).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": pods});
        let uids = ["create", "-f", "-", "-o", "jsonpath={.metadata.uid} "];
        let uids = self.server.kubectl_with(&uids, &list.to_string()).ok();
        self.uids.extend(uids.split_whitespace().map(str::to_owned));
        assert!(self.uids.len() >= size, "{uids}");
    }

    fn pod(&mut self, wave: usize, at: usize) -> Value {
        let script = match self.chance.below(4) {
            0 => "exit 0",
            1 => "trap 'exit 0' TERM; while true; do sleep 0.2; done",
            _ => "exec sleep 100000",
        };
        let mut spec = json!({
            "terminationGracePeriodSeconds": 1,
            "restartPolicy": if self.chance.below(2) == 0 { "Never" } else { "Always" },
            "volumes": [{"name": "own", "emptyDir": {"medium": "Memory"}}],
            "containers": [{
                "name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script],
                "volumeMounts": [{"name": "own", "mountPath": "/own"}],
            }],
        });
        match self.chance.below(4) {
            0 => spec["hostUsers"] = false.into(),
            1 => spec["shareProcessNamespace"] = true.into(),
            _ => {}
        }
        let name = format!("churn-{wave}-{at}");
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "labels": {"wave": wave.to_string()}}, "spec": spec,
        })
    }

    /// Waits until all pods of a wave have begun; something is killed in between.
    fn until_begun(&mut self, wave: usize, size: usize, is_quiet: bool) {
        if !is_quiet {
            let enough = 1 + self.chance.below(size);
            let reached = || self.supervisors().len() >= enough || self.begun(wave) == size;
            self.server.until("some pods have begun", reached);
            self.kill();
        }
        self.server.until("all pods have begun", || self.begun(wave) == size);
    }

    /// The pods of a wave that are not waiting any more.
    fn begun(&self, wave: usize) -> usize {
        let label = format!("wave={wave}");
        let phases = ["get", "pods", "-l", &label, "-o", "jsonpath={.items[*].status.phase}"];
        let phases = self.server.kubectl(&phases).ok();
        phases.split_whitespace().filter(|phase| *phase != "Pending").count()
    }

    fn remove(&mut self, wave: usize, is_quiet: bool) {
        let label = format!("wave={wave}");
        self.server.kubectl(&["delete", "pods", "-l", &label, "--wait=false"]).ok();
        if !is_quiet && self.chance.below(2) == 0 {
            let few = self.chance.below(WAVE);
            self.server.until("some pods are gone", || self.supervisors().len() <= few);
            self.kill();
        }
    }

    /// Kills the server, some supervisors, or both.
    fn kill(&mut self) {
        let what = self.chance.below(3);
        if what != 0 {
            let mut running = self.supervisors();
            for _ in 0..1 + self.chance.below(3).min(running.len()) {
                if running.is_empty() {
                    break;
                }
                let pid = running.swap_remove(self.chance.below(running.len()));
                let pid = rustix::process::Pid::from_raw(pid.cast_signed());
                let killed = pid.map(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL));
                self.supervisors_killed += usize::from(killed == Some(Ok(())));
            }
        }
        if what != 1 {
            self.server.kill9();
            self.server.restart();
            self.skiffs_killed += 1;
        }
    }

    fn supervisors(&self) -> Vec<u32> {
        let mark = format!(" supervise {}", self.server.data_dir().display());
        let all = testkit::processes().into_iter();
        all.filter(|(_, words)| words.contains(&mark)).map(|(pid, _)| pid).collect()
    }

    fn until_nothing_is_left(&self, before: &BTreeMap<&'static str, usize>) {
        let left = || self.server.kubectl(&["get", "pods", "-o", "yaml"]).ok();
        let begun = Instant::now();
        while left().contains("kind: Pod") {
            assert!(begun.elapsed() < DEADLINE, "not all pods are gone\n{}{}", left(), self.server.log());
            std::thread::yield_now();
        }
        let settled = || self.held().iter().all(|(what, count)| *count <= before[what]);
        let begun = Instant::now();
        while !settled() {
            assert!(begun.elapsed() < DEADLINE, "{before:?} became {:?}\n{}", self.held(), self.server.log());
            std::thread::yield_now();
        }
    }

    /// What pods hold on to, on the host and in the server's directories.
    fn held(&self) -> BTreeMap<&'static str, usize> {
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
            ("cgroups", cgroups(&self.uids)),
            ("pods", entries(&runtime.join("pods"))),
            ("addresses", entries(&runtime.join("addresses"))),
            ("volumes", entries(&data.join("agent/pods"))),
        ])
    }

    /// Namespaces that processes of the server's family or of pods are in, or that it holds open.
    fn namespaces(&self) -> usize {
        let data = self.server.data_dir().display().to_string();
        let of_pods = testkit::processes().into_iter().filter(|(_, words)| words.contains(&data));
        let pids = of_pods.map(|(pid, _)| pid);
        let mut seen = BTreeSet::new();
        for pid in pids {
            for place in [format!("/proc/{pid}/ns"), format!("/proc/{pid}/fd")] {
                for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
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

    /// Open files of the server, and kilobytes that are its alone.
    fn size(&self) -> (usize, u64) {
        let pid = self.server.pid().expect("it runs");
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("Private_Dirty:")).map(str::trim);
        let memory = line.and_then(|line| line.trim_end_matches(" kB").parse().ok()).unwrap_or_default();
        (entries(Path::new(&format!("/proc/{pid}/fd"))), memory)
    }
}

fn entries(path: &Path) -> usize {
    std::fs::read_dir(path).into_iter().flatten().count()
}

/// Groups of pods, in all hierarchies.
fn cgroups(uids: &BTreeSet<String>) -> usize {
    uids.iter().map(|uid| testkit::cgroups_of_pod(uid).len()).sum()
}
