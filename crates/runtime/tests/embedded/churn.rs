//! Creates and deletes many pods while supervisors and skiff itself are killed. Nothing must be left at
//! the end.
//!
//! `SKIFF_CHURN_PODS` is the number of pods (40), `SKIFF_CHURN_SEED` the seed of the random numbers.
//! This program also runs as skiff, with the argument `churn`, so that it can be killed as well.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use runtime::cri::*;
use runtime::{Embedded, Runtime};

use crate::kit::{self, TestNode, script, supervisors};
use crate::{image_volumes, users};

/// Pods that one worker handles at a time.
const PARALLEL_PODS: u64 = 4;
const DEADLINE: Duration = Duration::from_secs(60);

/// A random number generator, deterministic for a seed.
struct Random(AtomicU64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(AtomicU64::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1))
    }

    fn count_nested_cgroups(&self, end: u64) -> u64 {
        let step = |mut x: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^ (x << 17)
        };
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |x| Some(step(x)));
        step(before.unwrap_or_default()) % end
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

pub async fn creates_and_deletes_pods_under_restarts(node: &TestNode) {
    let (count, seed) = (number("SKIFF_CHURN_PODS", 40), number("SKIFF_CHURN_SEED", 1));
    let random = Random::new(seed);
    image_volumes::import(node);
    let before = resource_counts(node);
    let (mut killed, mut skiffs, started) = (0, 1, Instant::now());
    let mut skiff = worker(node, count, seed);
    let mut last = (0, Instant::now());
    loop {
        tokio::time::sleep(Duration::from_millis(20 + random.count_nested_cgroups(400))).await;
        if let Some(ended) = skiff.0.try_wait().expect("its end") {
            assert!(ended.success(), "the worker failed with {ended}, seed {seed}");
            break;
        }
        let created = created_count(node.dir.path());
        if created != last.0 {
            last = (created, Instant::now());
        }
        assert!(
            last.1.elapsed() < DEADLINE,
            "{created} of {count} pods created before the timeout, seed {seed}"
        );
        // The last quarter runs without kills, to see whether a long-lived worker grows.
        if created > count * 3 / 4 {
            continue;
        }
        let running = supervisors(node.dir.path());
        match random.count_nested_cgroups(4) {
            0 => {
                drop(skiff);
                skiffs += 1;
                skiff = worker(node, count, seed + skiffs);
            }
            1 if !running.is_empty() => {
                let one = running
                    [usize::try_from(random.count_nested_cgroups(running.len() as u64)).expect("small")];
                let _ = rustix::process::kill_process(one, rustix::process::Signal::KILL);
                killed += 1;
            }
            _ => {}
        }
    }
    let wait_start = Instant::now();
    loop {
        let after = resource_counts(node);
        if after.iter().all(|(what, count)| *count <= before[what]) {
            break;
        }
        assert!(wait_start.elapsed() < DEADLINE, "seed {seed}: {before:?} became {after:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!(
        "{count} pods in {:.0?}, {killed} supervisors and {} skiffs killed, seed {seed}",
        started.elapsed(),
        skiffs - 1
    );
}

/// Counts the resources that pods use.
fn resource_counts(node: &TestNode) -> BTreeMap<&'static str, usize> {
    let files = |path: PathBuf| std::fs::read_dir(path).into_iter().flatten().count();
    let runtime = node.dir.path().join("runtime");
    let group = format!("skiff-test-{}", std::process::id());
    let cgroups = sys::cgroup::Cgroups::of_host().expect("cgroups");
    let groups: usize =
        cgroups.directories(&group).into_iter().map(|place| count_nested_cgroups(&place)).sum();
    let mut counts = kit::host_resource_counts(node.dir.path());
    // The bridge is created with the first pod and stays.
    let links = podnet::links("skp").unwrap_or_default().len();
    counts.insert("links", links);
    counts.extend([
        ("pods", files(runtime.join("pods"))),
        ("cgroups", groups),
        ("processes", count_pod_processes(&process_marker(node.dir.path()))),
    ]);
    counts
}

/// Counts the nested cgroups of pods. The pods' own cgroups are removed by the kubelet.
fn count_nested_cgroups(place: &Path) -> usize {
    let inner = |place: &Path| {
        let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
        entries.filter(|entry| entry.path().is_dir()).map(|entry| entry.path()).collect::<Vec<_>>()
    };
    inner(place).iter().map(|pod| inner(pod).len()).sum()
}

/// The text that identifies the processes of pods below a directory.
fn process_marker(dir: &Path) -> String {
    format!("churn in {}", dir.display())
}

/// Counts the processes in pods: everything that could keep a namespace alive.
fn count_pod_processes(mark: &str) -> usize {
    let is_pods = |pid: &Path| {
        let line = std::fs::read(pid.join("cmdline")).unwrap_or_default();
        line.windows(mark.len()).any(|part| part == mark.as_bytes())
    };
    std::fs::read_dir("/proc").into_iter().flatten().flatten().filter(|entry| is_pods(&entry.path())).count()
}

fn created_count(dir: &Path) -> u64 {
    std::fs::metadata(dir.join("made")).map_or(0, |file| file.len())
}

/// Killed when it is dropped.
struct Worker(std::process::Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn worker(node: &TestNode, count: u64, seed: u64) -> Worker {
    let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
    command.arg("churn").arg(node.dir.path()).args([count.to_string(), seed.to_string()]);
    command.arg(std::process::id().to_string());
    Worker(command.stdin(Stdio::null()).spawn().expect("the part of skiff"))
}

/// Runs as skiff: recovers existing pods, creates pods until there are enough, and removes all of them.
pub async fn run_worker(dir: &Path, count: u64, seed: u64, group: &str) {
    let runtime = kit::open(dir).await;
    let random = Arc::new(Random::new(seed));
    let files = || std::fs::read_dir("/proc/self/fd").into_iter().flatten().count();
    for pod in runtime.sandboxes(&[]).await.expect("pods") {
        runtime
            .remove_sandbox(&pod.id)
            .await
            .unwrap_or_else(|error| panic!("cannot remove a pod of another worker: {error}"));
    }
    let mut baseline = None;
    let mut done = 0;
    while created_count(dir) < count {
        let mut tasks = tokio::task::JoinSet::new();
        for at in 0..PARALLEL_PODS.min(count - created_count(dir).min(count)) {
            append(&dir.join("made"));
            let (runtime, random, dir, group) =
                (runtime.clone(), random.clone(), dir.to_owned(), group.to_owned());
            tasks.spawn(async move { run_pod(&runtime, &random, &dir, &group, at).await });
        }
        while let Some(result) = tasks.join_next().await {
            result.expect("a pod");
            done += 1;
        }
        // Once everything has been used for the first time, no resource may grow.
        if done >= (count / 8).min(60) && baseline.is_none() {
            baseline = Some((files(), rss_kib()));
        }
    }
    for pod in runtime.sandboxes(&[]).await.expect("pods") {
        runtime.remove_sandbox(&pod.id).await.unwrap_or_else(|error| panic!("cannot remove a pod: {error}"));
    }
    if let Some((known_files, known_memory)) = baseline {
        let started = Instant::now();
        while files() > known_files + 2 {
            assert!(started.elapsed() < DEADLINE, "{known_files} files became {}", files());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let memory = rss_kib();
        println!("after {done} pods without being killed: {known_memory} kB became {memory} kB");
        assert!(memory < known_memory + 16 * 1024, "{known_memory} kB became {memory} kB");
    }
}

/// The lifecycle of a pod. Every step may fail, since supervisors are killed, but removal must always
/// succeed.
async fn run_pod(runtime: &Embedded, random: &Random, dir: &Path, group: &str, at: u64) {
    let mut config = kit::pod_config(dir, &format!("churn{}", random.count_nested_cgroups(1 << 40)));
    let linux = config.linux.as_mut().expect("made so");
    linux.cgroup_parent = format!("/{group}/slot{at}");
    if let Some(options) = linux.security_context.as_mut().and_then(|own| own.namespace_options.as_mut()) {
        match random.count_nested_cgroups(3) {
            0 => options.userns_options = Some(users::namespace()),
            1 => options.pid = NamespaceMode::Pod.into(),
            _ => {}
        }
    }
    let Ok(pod) = runtime.run_sandbox(&config, "").await else { return };
    let mark = process_marker(dir);
    for _ in 0..=random.count_nested_cgroups(2) {
        let mut container = script(&format!("trap 'exit 0' TERM; while true; do sleep 0.05; done # {mark}"));
        if let Some(security) = container.linux.as_mut().and_then(|linux| linux.security_context.as_mut()) {
            security.namespace_options =
                config.linux.as_ref().and_then(|linux| linux.security_context.clone()?.namespace_options);
        }
        if random.count_nested_cgroups(3) == 0 {
            container.image = Some(ImageSpec { image: image_volumes::IMAGE.into(), ..ImageSpec::default() });
        }
        let Ok(id) = runtime.create_container(&pod, &container, &config).await else { break };
        if runtime.start_container(&id).await.is_err() {
            break;
        }
        if random.count_nested_cgroups(2) == 0 {
            let _ = runtime.exec_sync(&id, &["true".to_owned()], DEADLINE).await;
        }
        if random.count_nested_cgroups(3) == 0 {
            let _ =
                runtime.stop_container(&id, Duration::from_millis(random.count_nested_cgroups(100))).await;
        }
    }
    if random.count_nested_cgroups(8) == 0 {
        // Left for the next worker or the final cleanup.
        return;
    }
    runtime.remove_sandbox(&pod).await.unwrap_or_else(|error| panic!("{error}"));
}

fn append(path: &Path) {
    use std::io::Write as _;
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(b"x")).expect("counted");
}

/// Private memory of this process in kB.
fn rss_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Private_Dirty:")).map(str::trim);
    line.and_then(|line| line.trim_end_matches(" kB").parse().ok()).unwrap_or_default()
}
