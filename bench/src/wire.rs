//! The whole server over TLS: latency and throughput of clients, and the CPU time of the server.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;

use crate::client::{Client, JSON, TABLE};
use crate::disk;
use crate::fairness;
use crate::load::{self, Load, StopCondition};
use crate::objects::{GROUP_COUNT, NAMESPACE, config_map, pod, pod_name};
use crate::report::{Report, Unit, median, millis};
use crate::server::Server;
use crate::watch;

/// Baseline: the cost of a minimal request over TLS.
const READYZ: &str = "yardstick/get-readyz-16-clients";
const READYZ_CPU: &str = "yardstick/get-readyz-cpu";
const CLIENT_COUNTS: [usize; 3] = [1, 16, 64];
/// The percentage of all pods that 1, 16 and 64 clients create.
const POD_PERCENT: [usize; 3] = [8, 32, 60];
const LIST_CLIENTS: usize = 4;

#[derive(Clone, Copy)]
pub struct Sizes {
    pub starts: usize,
    pub pods: usize,
    pub config_maps: usize,
    pub watchers: usize,
    /// Writes with all watchers connected: sequential, then concurrent.
    pub watch_writes: (usize, usize),
    pub rounds: usize,
    pub round: Duration,
}

pub async fn run(report: &mut Report, binary: &Path, dir: &Path, sizes: Sizes) -> Result<()> {
    let server = start(report, binary, dir, sizes.starts).await?;
    report.add("memory/empty", Unit::Megabytes, server.memory()?);
    let clients = connect(&server, CLIENT_COUNTS[2]).await?;
    let timed = (0, sizes.rounds, StopCondition::Time(sizes.round));

    let load =
        load::run(&server, &clients[..16], timed, async |client, _| client.get("/readyz").await).await?;
    report.add(READYZ, Unit::PerSecond, load.per_second);
    report.add(READYZ_CPU, Unit::CpuMicros, load.cpu);

    write_pods(report, &server, &clients, sizes).await?;
    report.add_relative("memory/with-pods", Unit::Megabytes, server.memory()?, "memory/empty");

    let get = async |client: &Client, index: usize| {
        let path = format!("{}/{}", collection("pods"), pod_name(index * 7919 % sizes.pods));
        client.get(&path).await
    };
    for count in [1, 16] {
        let load = load::run(&server, &clients[..count], timed, get).await?;
        record(report, &format!("get/pod-{count}-clients"), &load, READYZ);
    }
    measure_lists(report, &server, &clients[..LIST_CLIENTS], sizes).await?;
    report.add_relative(
        "memory/peak-while-listing",
        Unit::Megabytes,
        server.max_memory()?,
        "memory/with-pods",
    );

    write_config_maps(report, &server, &clients, sizes).await?;
    fairness::run(report, &server, &clients, sizes).await?;
    watch::run(report, &server, &clients, sizes).await
}

/// Runs only the fairness benchmark, with its pods.
pub async fn run_fairness(report: &mut Report, binary: &Path, dir: &Path, sizes: Sizes) -> Result<()> {
    let server = start(report, binary, dir, 1).await?;
    let clients = connect(&server, CLIENT_COUNTS[2]).await?;
    write_pods(report, &server, &clients, sizes).await?;
    fairness::run(report, &server, &clients, sizes).await
}

pub fn collection(plural: &str) -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/{plural}")
}

pub async fn connect(server: &Server, count: usize) -> Result<Vec<Client>> {
    let mut clients = Vec::with_capacity(count);
    // Connects in batches: the time to accept connections is not measured.
    while clients.len() < count {
        let batch = (count - clients.len()).min(50);
        clients.extend(try_join_all((0..batch).map(|_| server.target.connect())).await?);
    }
    Ok(clients)
}

async fn start(report: &mut Report, binary: &Path, dir: &Path, starts: usize) -> Result<Server> {
    let mut samples = Vec::new();
    let mut last = None;
    for _ in 0..starts {
        drop(last.take());
        let server = Server::start(binary, dir).await?;
        samples.push(millis(server.ready_after));
        last = Some(server);
    }
    report.add("start/exec-to-readyz", Unit::Millis, median(&mut samples));
    last.context("no start was measured")
}

async fn write_pods(report: &mut Report, server: &Server, clients: &[Client], sizes: Sizes) -> Result<()> {
    let path = collection("pods");
    let mut first = 0;
    for (clients_now, share) in CLIENT_COUNTS.into_iter().zip(POD_PERCENT) {
        let count =
            if clients_now == CLIENT_COUNTS[2] { sizes.pods - first } else { sizes.pods * share / 100 };
        let rounds = (first, sizes.rounds, StopCondition::Count(count));
        let load = load::run(server, &clients[..clients_now], rounds, async |client, index| {
            client.post(&path, &pod(index)).await
        })
        .await?;
        first += count;
        record_writes(report, "create/pod-3KiB", clients_now, &load);
    }
    Ok(())
}

async fn write_config_maps(
    report: &mut Report,
    server: &Server,
    clients: &[Client],
    sizes: Sizes,
) -> Result<()> {
    let path = collection("configmaps");
    for (step, clients_now) in CLIENT_COUNTS.into_iter().enumerate() {
        let rounds = (step * sizes.config_maps, sizes.rounds, StopCondition::Count(sizes.config_maps));
        let load = load::run(server, &clients[..clients_now], rounds, async |client, index| {
            client.post(&path, &config_map(&format!("cm-{index:06}"))).await
        })
        .await?;
        record_writes(report, "create/configmap-1KiB", clients_now, &load);
    }
    Ok(())
}

async fn measure_lists(report: &mut Report, server: &Server, clients: &[Client], sizes: Sizes) -> Result<()> {
    let all_path = collection("pods");
    let selected_path = format!("{all_path}?labelSelector=group%3Dg7");
    let selected: serde_json::Value = serde_json::from_slice(&clients[0].get(&selected_path).await?.body)?;
    let found = selected["items"].as_array().map_or(0, Vec::len);
    ensure!(found == sizes.pods / GROUP_COUNT, "the selector found {found} of {} pods", sizes.pods);

    for (name, path, accept) in [
        ("list/pods", &all_path, JSON),
        ("list/pods-as-table", &all_path, TABLE),
        ("list/pods-1-percent", &selected_path, JSON),
    ] {
        let rounds = match path == &selected_path {
            true => (0, sizes.rounds, StopCondition::Time(sizes.round)),
            // Complete lists are slow; each client reads one per round.
            false => (0, sizes.rounds, StopCondition::Count(LIST_CLIENTS * sizes.rounds)),
        };
        let op = async |client: &Client, _| client.count(path, accept).await;
        let load = load::run(server, clients, rounds, op).await?;
        match path == &selected_path {
            true => report.add_relative(format!("{name}/rate"), Unit::PerSecond, load.per_second, READYZ),
            false => report.add_relative(
                format!("{name}/rate"),
                Unit::MegabytesPerSecond,
                load.megabytes_per_second,
                "list/pods/rate",
            ),
        }
        report.add(format!("{name}/p50"), Unit::Millis, load.p50);
        report.add_relative(format!("{name}/cpu"), Unit::CpuMicros, load.cpu, READYZ_CPU);
    }
    Ok(())
}

/// One client waits for the disk, so its rate is compared with the disk's sync rate. More clients are
/// compared with one.
fn record_writes(report: &mut Report, name: &str, clients: usize, load: &Load) {
    let single_client = format!("{name}-1-clients/rate");
    let baseline = if clients == 1 { disk::SYNC_BASELINE } else { &single_client };
    record(report, &format!("{name}-{clients}-clients"), load, baseline);
}

fn record(report: &mut Report, name: &str, load: &Load, baseline: &str) {
    report.add_relative(format!("{name}/rate"), Unit::PerSecond, load.per_second, baseline);
    report.add(format!("{name}/p50"), Unit::Millis, load.p50);
    report.add(format!("{name}/p99"), Unit::Millis, load.p99);
    report.add_relative(format!("{name}/cpu"), Unit::CpuMicros, load.cpu, READYZ_CPU);
}
