//! The effect of one user's LIST flood on the latency of another user's writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use futures_util::future::try_join_all;
use serde_json::json;

use crate::client::{BENCH_GROUP, Client, JSON, Target};
use crate::load::{self, StopCondition};
use crate::objects::config_map;
use crate::report::{Report, Unit};
use crate::server::Server;
use crate::wire::{Sizes, collection};

/// Connections that send LIST requests in a loop.
const FLOOD_CLIENTS: usize = 32;
const PERMISSION_TIMEOUT: Duration = Duration::from_secs(10);
/// As many threads as a flood keeps busy: one that reads, two that serve it.
const BUSY_THREADS: usize = 3;
const WRITE_BASELINE: &str = "fairness/write-alone";

pub async fn run(report: &mut Report, server: &Server, clients: &[Client], sizes: Sizes) -> Result<()> {
    let binding = json!({
        "metadata": {"name": "bench"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": BENCH_GROUP}],
    });
    clients[0].post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await?;
    let writer = [clients[0].impersonate("writer")];
    // The binding takes effect when the server's cache has received it.
    let started = Instant::now();
    while let Err(error) = writer[0].get(&format!("{}?limit=1", collection("configmaps"))).await {
        ensure!(started.elapsed() < PERMISSION_TIMEOUT, "the writer has no permission: {error:#}");
    }
    measure_writes(report, server, &writer, sizes, WRITE_BASELINE).await?;
    let busy = BusyThreads::start(BUSY_THREADS);
    measure_writes(
        report,
        server,
        &writer,
        sizes,
        &format!("fairness/write-beside-{BUSY_THREADS}-busy-threads"),
    )
    .await?;
    busy.stop()?;
    for (user, name) in [("flooder", "flood"), ("", "exempt-flood")] {
        let started = Instant::now();
        let flood = Flood::start(server.target.clone(), user);
        while flood.lists() == 0 && flood.is_running() {
            tokio::task::yield_now().await;
        }
        measure_writes(report, server, &writer, sizes, &format!("fairness/write-in-{name}")).await?;
        let rate = flood.lists() as f64 / started.elapsed().as_secs_f64();
        flood.stop()?;
        report.add(format!("fairness/{name}/lists"), Unit::PerSecond, rate);
    }
    Ok(())
}

async fn measure_writes(
    report: &mut Report,
    server: &Server,
    writer: &[Client],
    sizes: Sizes,
    name: &str,
) -> Result<()> {
    let path = collection("configmaps");
    let timed = (0, sizes.rounds, StopCondition::Time(sizes.round));
    let prefix = name.rsplit('/').next().unwrap_or(name);
    let load = load::run(server, writer, timed, async |client, index| {
        client.post(&path, &config_map(&format!("{prefix}-{index}"))).await
    })
    .await?;
    report.add_relative(format!("{name}/p50"), Unit::Millis, load.p50, &format!("{WRITE_BASELINE}/p50"));
    report.add_relative(format!("{name}/p99"), Unit::Millis, load.p99, &format!("{WRITE_BASELINE}/p99"));
    Ok(())
}

/// Threads that spin: the effect of a flood on others merely by its CPU usage.
struct BusyThreads {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyThreads {
    fn start(threads: usize) -> BusyThreads {
        let stop = Arc::new(AtomicBool::new(false));
        let spin = |stop: Arc<AtomicBool>| {
            move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        };
        let threads = (0..threads).map(|_| std::thread::spawn(spin(stop.clone()))).collect();
        BusyThreads { stop, threads }
    }

    fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked")))
    }
}

/// Sends LIST requests on a thread of its own, so that reading the responses does not delay the writer
/// in this process.
struct Flood {
    stop: Arc<AtomicBool>,
    lists: Arc<AtomicUsize>,
    thread: JoinHandle<Result<()>>,
}

impl Flood {
    fn start(target: Target, user: &'static str) -> Flood {
        let (stop, lists) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, done) = (stop.clone(), lists.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(flood(&target, user, &stopped, &done))
        });
        Flood { stop, lists, thread }
    }

    fn lists(&self) -> usize {
        self.lists.load(Ordering::Relaxed)
    }

    fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the flood thread panicked"))?
    }
}

async fn flood(target: &Target, user: &'static str, stop: &AtomicBool, lists: &AtomicUsize) -> Result<()> {
    let clients = try_join_all((0..FLOOD_CLIENTS).map(|_| target.connect())).await?;
    let path = collection("pods");
    let list = async |client: &Client| {
        let client = client.impersonate(user);
        while !stop.load(Ordering::Relaxed) {
            // Requests of a flood may be rejected (429); they are repeated immediately.
            if client.count(&path, JSON).await.is_ok() {
                lists.fetch_add(1, Ordering::Relaxed);
            }
        }
        anyhow::Ok(())
    };
    try_join_all(clients.iter().map(list)).await.map(drop)
}
