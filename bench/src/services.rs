//! Services in the kernel: programming many of them, changing one, and the latency of a connection.
//! Runs in a network namespace of its own, because the rules are real.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use nft::{Name, Ruleset};
use proxy::base_ruleset::base_rules;
use proxy::plan::{NodeTopology, plan};
use proxy::{Firewall, NetlinkFirewall, NftFirewall};
use serde_json::{Value, json};

use crate::report::{Report, Unit, median, millis};

const NETNS_ENV: &str = "SKIFF_BENCH_NETWORK";
const ENDPOINTS_PER_SERVICE: usize = 3;
const CHANGE_ROUNDS: usize = 20;
const CONNECTION_COUNT: usize = 2_000;
const NODE_IP: &str = "192.0.2.1";

/// Runs this program again in a new network namespace. Returns true inside of it.
pub fn run_in_netns() -> Result<bool> {
    if std::env::var_os(NETNS_ENV).is_some() {
        return Ok(true);
    }
    let mut command = Command::new("unshare");
    command.arg("--net").arg(std::env::current_exe()?).args(std::env::args_os().skip(1)).env(NETNS_ENV, "1");
    let status = command.status().context("cannot run unshare")?;
    ensure!(status.success(), "the measurement in its network namespace failed");
    Ok(false)
}

pub fn run(report: &mut Report, counts: &[usize]) -> Result<()> {
    let up = format!("ip link set lo up && ip addr add {NODE_IP}/32 dev lo && ip route add default dev lo");
    ensure!(Command::new("sh").args(["-c", &up]).status()?.success(), "cannot set up the network");
    for count in counts {
        for (backend, firewall) in
            [("netlink", &NetlinkFirewall::default() as &dyn Firewall), ("nft", &NftFirewall::default())]
        {
            measure(report, *count, backend, firewall)?;
        }
    }
    Ok(())
}

fn measure(report: &mut Report, count: usize, backend: &str, firewall: &dyn Firewall) -> Result<()> {
    let name = format!("services/{count}/{backend}");
    let topology =
        NodeTopology { node: "here".into(), pods: vec!["10.42.0.0/16".parse()?], ..NodeTopology::default() };
    let mut rules = Ruleset::default();
    rules.put(&"".into(), base_rules(&topology.pods, &["10.43.0.0/16".parse()?]));
    let before = rss_kib();
    let started = Instant::now();
    for number in 0..count {
        let (service, slice) = objects(number, 0);
        rules.put(&owner(number), plan(&service, &[Arc::new(slice)], &topology).fragment);
    }
    report.add(format!("{name}/plan"), Unit::Millis, millis(started.elapsed()));
    report.add(format!("{name}/memory"), Unit::Megabytes, (rss_kib() - before) / 1024.0);
    let started = Instant::now();
    let batch = rules.full_batch();
    firewall.apply(&batch)?;
    report.add(format!("{name}/program"), Unit::Millis, millis(started.elapsed()));
    drop(batch);

    // Adds or removes one endpoint, as a rollout does.
    let mut changes = Vec::new();
    for round in 1..=CHANGE_ROUNDS {
        let started = Instant::now();
        let (service, slice) = objects(count / 2, round);
        rules.put(&owner(count / 2), plan(&service, &[Arc::new(slice)], &topology).fragment);
        firewall.apply(&rules.changes())?;
        changes.push(millis(started.elapsed()));
    }
    report.add(format!("{name}/change"), Unit::Millis, median(&mut changes));
    report.add(
        format!("{name}/connect"),
        Unit::Nanos,
        connect_nanos(&mut rules, count, firewall, &topology)?,
    );
    Ok(())
}

/// The time to connect through the last Service, in nanoseconds.
fn connect_nanos(
    rules: &mut Ruleset,
    count: usize,
    firewall: &dyn Firewall,
    topology: &NodeTopology,
) -> Result<f64> {
    let listener = TcpListener::bind((NODE_IP, 0))?;
    let to = listener.local_addr()?;
    let (service, mut slice) = objects(count, 0);
    slice.endpoints.get_or_insert_default().truncate(1);
    for endpoint in slice.endpoints.iter_mut().flatten() {
        endpoint.addresses = vec![to.ip().to_string()];
    }
    for port in slice.ports.iter_mut().flatten() {
        port.port = Some(i32::from(to.port()));
    }
    rules.put(&owner(count), plan(&service, &[Arc::new(slice)], topology).fragment);
    firewall.apply(&rules.changes())?;
    let service: SocketAddr = (cluster_ip(count), 80).into();
    let mut times = Vec::new();
    for _ in 0..CONNECTION_COUNT {
        let started = Instant::now();
        let stream = TcpStream::connect(service)?;
        times.push(started.elapsed().as_nanos() as f64);
        drop((stream, listener.accept()?));
    }
    Ok(median(&mut times))
}

fn owner(number: usize) -> Name {
    format!("service/default/s{number}").into()
}

fn cluster_ip(number: usize) -> IpAddr {
    let number = number + 1;
    [10, 43, (number >> 8) as u8, number as u8].into()
}

/// A Service and its EndpointSlice; in odd rounds it has one endpoint less.
fn objects(number: usize, round: usize) -> (Service, EndpointSlice) {
    let ip = cluster_ip(number).to_string();
    let name = format!("s{number}");
    let service = json!({
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"clusterIP": ip, "clusterIPs": [ip], "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]},
    });
    let endpoints: Vec<Value> = (0..ENDPOINTS_PER_SERVICE - round % 2)
        .map(|endpoint| {
            let at = number * ENDPOINTS_PER_SERVICE + endpoint;
            json!({"addresses": [format!("10.42.{}.{}", at >> 8 & 255, at & 255)], "nodeName": "there"})
        })
        .collect();
    let slice = json!({
        "metadata": {"name": name, "namespace": "default"},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    });
    let (service, slice) = (serde_json::from_value(service), serde_json::from_value(slice));
    (service.expect("a Service"), slice.expect("a slice"))
}

/// Resident memory of this process in KiB.
fn rss_kib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
}
