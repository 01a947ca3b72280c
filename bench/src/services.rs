//! Services in the kernel: programming many of them, changing one, and what a packet's way costs. In a network
//! namespace of its own, since the rules are real.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use nft::{Name, Ruleset};
use proxy::plan::{Place, plan};
use proxy::skeleton::skeleton;
use proxy::{Firewall, Kernel, Nft};
use serde_json::{Value, json};

use crate::report::{Report, Unit, median, millis};

const INSIDE: &str = "SKIFF_BENCH_NETWORK";
const ENDPOINTS: usize = 3;
const CHANGES: usize = 20;
const CONNECTIONS: usize = 2_000;
const OWN: &str = "192.0.2.1";

/// Runs this same program again in a network of its own, unless we are there. True inside.
pub fn inside() -> Result<bool> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(true);
    }
    let mut command = Command::new("unshare");
    command.arg("--net").arg(std::env::current_exe()?).args(std::env::args_os().skip(1)).env(INSIDE, "1");
    let status = command.status().context("cannot run unshare")?;
    ensure!(status.success(), "the measurement in a network of its own failed");
    Ok(false)
}

pub fn run(report: &mut Report, counts: &[usize]) -> Result<()> {
    let up = format!("ip link set lo up && ip addr add {OWN}/32 dev lo && ip route add default dev lo");
    ensure!(Command::new("sh").args(["-c", &up]).status()?.success(), "cannot set up the network");
    for count in counts {
        for (by, firewall) in [("netlink", &Kernel::default() as &dyn Firewall), ("nft", &Nft::default())] {
            measure(report, *count, by, firewall)?;
        }
    }
    Ok(())
}

fn measure(report: &mut Report, count: usize, by: &str, firewall: &dyn Firewall) -> Result<()> {
    let name = format!("services/{count}/{by}");
    let place = Place { node: "here".into(), pods: vec!["10.42.0.0/16".parse()?], ..Place::default() };
    let mut rules = Ruleset::default();
    rules.put(&"".into(), skeleton(&place.pods, &["10.43.0.0/16".parse()?]));
    let before = resident();
    let begun = Instant::now();
    for number in 0..count {
        let (service, slice) = objects(number, 0);
        rules.put(&owner(number), plan(&service, &[Arc::new(slice)], &place).fragment);
    }
    report.add(format!("{name}/plan"), Unit::Millis, millis(begun.elapsed()));
    report.add(format!("{name}/memory"), Unit::Megabytes, (resident() - before) / 1024.0);
    let begun = Instant::now();
    let batch = rules.everything();
    firewall.apply(&batch)?;
    report.add(format!("{name}/program"), Unit::Millis, millis(begun.elapsed()));
    drop(batch);

    // One endpoint more or less, as a rollout does it.
    let mut changes = Vec::new();
    for round in 1..=CHANGES {
        let begun = Instant::now();
        let (service, slice) = objects(count / 2, round);
        rules.put(&owner(count / 2), plan(&service, &[Arc::new(slice)], &place).fragment);
        firewall.apply(&rules.changes())?;
        changes.push(millis(begun.elapsed()));
    }
    report.add(format!("{name}/change"), Unit::Millis, median(&mut changes));
    report.add(format!("{name}/connect"), Unit::Nanos, connect(&mut rules, count, firewall, &place)?);
    Ok(())
}

/// How long it takes to connect through the last of the Services, in nanoseconds.
fn connect(rules: &mut Ruleset, count: usize, firewall: &dyn Firewall, place: &Place) -> Result<f64> {
    let listener = TcpListener::bind((OWN, 0))?;
    let to = listener.local_addr()?;
    let (service, mut slice) = objects(count, 0);
    slice.endpoints.get_or_insert_default().truncate(1);
    for endpoint in slice.endpoints.iter_mut().flatten() {
        endpoint.addresses = vec![to.ip().to_string()];
    }
    for port in slice.ports.iter_mut().flatten() {
        port.port = Some(i32::from(to.port()));
    }
    rules.put(&owner(count), plan(&service, &[Arc::new(slice)], place).fragment);
    firewall.apply(&rules.changes())?;
    let service: SocketAddr = (cluster_ip(count), 80).into();
    let mut times = Vec::new();
    for _ in 0..CONNECTIONS {
        let begun = Instant::now();
        let stream = TcpStream::connect(service)?;
        times.push(begun.elapsed().as_nanos() as f64);
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

/// A Service and its slice; in odd rounds it has one endpoint less.
fn objects(number: usize, round: usize) -> (Service, EndpointSlice) {
    let ip = cluster_ip(number).to_string();
    let name = format!("s{number}");
    let service = json!({
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"clusterIP": ip, "clusterIPs": [ip], "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]},
    });
    let endpoints: Vec<Value> = (0..ENDPOINTS - round % 2)
        .map(|endpoint| {
            let at = number * ENDPOINTS + endpoint;
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

/// This process' memory in KiB.
fn resident() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
}
