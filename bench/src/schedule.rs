//! The time from creating pods until they are bound: the server with its scheduler, and nodes that
//! exist only as objects.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result};
use futures_util::future::try_join_all;
use serde_json::{Value, json};

use crate::client::Client;
use crate::report::{Report, Unit};
use crate::server::Server;
use crate::wire::{collection, connect};

/// Sizes of the scenarios.
pub struct Sizes {
    pub nodes: &'static [usize],
    pub pods: usize,
    /// Nodes and pods of the complex scenarios.
    pub complex: (usize, usize),
}

const CREATE_CONNECTIONS: usize = 16;
const BASIC_SCENARIO: &str = "basic";
const COMPLEX_SCENARIOS: [&str; 3] = ["spread", "anti-affinity", "preemption"];

pub async fn run(report: &mut Report, binary: &Path, dir: &Path, sizes: &Sizes) -> Result<()> {
    for &nodes in sizes.nodes {
        measure(report, binary, dir, (BASIC_SCENARIO, nodes, sizes.pods)).await?;
    }
    let (nodes, pods) = sizes.complex;
    for scenario in COMPLEX_SCENARIOS {
        measure(report, binary, dir, (scenario, nodes, pods)).await?;
    }
    Ok(())
}

async fn measure(
    report: &mut Report,
    binary: &Path,
    dir: &Path,
    (scenario, nodes, pods): (&'static str, usize, usize),
) -> Result<()> {
    let server = Server::start_with(binary, dir, &[]).await?;
    let clients = connect(&server, CREATE_CONNECTIONS).await?;
    create(&clients, nodes, "/api/v1/nodes", node).await?;
    if scenario == "preemption" {
        let class = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": {"name": "bench-high"}, "value": 1000});
        clients[0].post("/apis/scheduling.k8s.io/v1/priorityclasses", &class).await?;
        create(&clients, nodes, &collection("pods"), victim).await?;
    }
    let path = format!("{}?watch=true&fieldSelector=spec.nodeName%21%3D", collection("pods"));
    let watcher = server.target.connect().await?;
    let mut bound = watcher.watch(&path).await?;
    let cpu = server.cpu()?;
    let started = Instant::now();
    let pods_path = collection("pods");
    let creation = create(&clients, pods, &pods_path, |i| pod(scenario, i));
    let counting = async {
        let mut remaining = pods;
        while remaining > 0 {
            let (_, line) = bound.next().await?.context("the watch ended before all pods were bound")?;
            let event: Value = serde_json::from_slice(&line)?;
            let name = event["object"]["metadata"]["name"].as_str().unwrap_or_default();
            if event["type"] == "ADDED" && name.starts_with("pod-") {
                remaining -= 1;
            }
        }
        anyhow::Ok(started.elapsed().as_secs_f64())
    };
    let ((), seconds) = tokio::try_join!(creation, counting)?;
    let name = format!("schedule/{scenario}-{nodes}-nodes");
    report.add(format!("{name}/rate"), Unit::PerSecond, pods as f64 / seconds);
    report.add(format!("{name}/cpu"), Unit::CpuMicros, (server.cpu()? - cpu) * 1e6 / pods as f64);
    Ok(())
}

async fn create(clients: &[Client], count: usize, path: &str, object: impl Fn(usize) -> Value) -> Result<()> {
    let next = AtomicUsize::new(0);
    let one = async |client: &Client| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return anyhow::Ok(());
            }
            client.post(path, &object(i)).await?;
        }
    };
    try_join_all(clients.iter().map(one)).await?;
    Ok(())
}

fn node(i: usize) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": format!("node-{i}"), "labels": {
            "kubernetes.io/hostname": format!("node-{i}"),
            "topology.kubernetes.io/zone": format!("zone-{}", i % 10),
        }},
        "status": {
            "allocatable": {"cpu": "4", "memory": "32Gi", "pods": "110"},
            "capacity": {"cpu": "4", "memory": "32Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}

fn pod(scenario: &str, i: usize) -> Value {
    let same = json!({"matchLabels": {"app": "bench"}});
    let mut pod = base_pod(&format!("pod-{i}"), "10m");
    match scenario {
        "spread" => {
            pod["spec"]["topologySpreadConstraints"] = json!([{
                "maxSkew": 5,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": same,
            }]);
        }
        "anti-affinity" => {
            pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
                json!([{"topologyKey": "kubernetes.io/hostname", "labelSelector": same}]);
        }
        "preemption" => {
            pod["spec"]["priorityClassName"] = "bench-high".into();
            pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "3".into();
        }
        _ => {}
    }
    pod
}

/// A pod that fills a node and is deleted without a grace period.
fn victim(i: usize) -> Value {
    let mut pod = base_pod(&format!("victim-{i}"), "3");
    pod["spec"]["nodeName"] = format!("node-{i}").into();
    pod["spec"]["terminationGracePeriodSeconds"] = 0.into();
    pod
}

fn base_pod(name: &str, cpu: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "bench"}},
        "spec": {
            "containers": [{
                "name": "c",
                "image": "registry.k8s.io/pause:3.10",
                "resources": {"requests": {"cpu": cpu, "memory": "50Mi"}},
            }],
            // Nodes without a kubelet are tainted as not ready.
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}],
        },
    })
}
