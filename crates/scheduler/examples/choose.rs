//! Benchmark of the scheduling algorithm without an API server: drives the engine directly.
//!
//! ```text
//! cargo run --release -p scheduler --example choose -- 5000 20000 spread
//! ```
//! Arguments: nodes, pods, and one of basic, service, spread, anti, near, preempt.

use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use scheduler::algorithm::NoExtenders;
use scheduler::config::Config;
use scheduler::engine::{Action, Delta, Engine, Event};
use scheduler::framework::registry::IN_TREE_PLUGINS;
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let nodes: usize = arguments.next().unwrap_or_else(|| "1000".to_owned()).parse()?;
    let pods: usize = arguments.next().unwrap_or_else(|| "10000".to_owned()).parse()?;
    let shape = arguments.next().unwrap_or_else(|| "basic".to_owned());
    let mut engine = Engine::new(&Config::with_defaults(), IN_TREE_PLUGINS, Arc::new(NoExtenders), 1)?;
    let now = Timestamp::from_second(1_000_000)?;
    for i in 0..nodes {
        let node: Node = serde_json::from_value(node(i))?;
        engine.handle(Event::Node(Delta { before: None, after: Some(Arc::new(node)) }), now);
    }
    if shape == "service" {
        let service =
            json!({"metadata": {"name": "s", "namespace": "default"}, "spec": {"selector": {"app": "web"}}});
        let service: Service = serde_json::from_value(service)?;
        engine.handle(Event::Service(Delta { before: None, after: Some(Arc::new(service)) }), now);
    }
    if shape == "preempt" {
        for i in 0..nodes * 8 {
            let mut low = pod(&format!("low-{i}"), "basic");
            low["spec"]["nodeName"] = format!("node-{}", i / 8).into();
            low["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "500m".into();
            add(&mut engine, low, now)?;
        }
    }
    let mut waiting = Vec::new();
    for i in 0..pods {
        let object: Pod = serde_json::from_value(pod(&format!("pod-{i}"), &shape))?;
        waiting.push(Arc::new(object));
    }
    let started = Instant::now();
    let (mut bound, mut failed) = (0, 0);
    for object in waiting {
        engine.handle(Event::Pod(Delta { before: None, after: Some(object) }), now);
        engine.schedule_one(now);
        for action in engine.actions() {
            match action {
                Action::Bind(binding) => {
                    bound += 1;
                    engine.handle(Event::Bound(Box::new(binding)), now);
                }
                Action::Preempt(_) => failed += 1,
                _ => {}
            }
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{nodes} nodes, {shape}: {:.0} pods/s, {:.1} us each ({bound} bound, {failed} preemptions)",
        pods as f64 / seconds,
        seconds * 1e6 / pods as f64
    );
    Ok(())
}

fn add(engine: &mut Engine, pod: Value, now: Timestamp) -> Result<(), serde_json::Error> {
    let pod: Pod = serde_json::from_value(pod)?;
    engine.handle(Event::Pod(Delta { before: None, after: Some(Arc::new(pod)) }), now);
    Ok(())
}

fn node(i: usize) -> Value {
    json!({
        "metadata": {"name": format!("node-{i}"), "labels": {
            "kubernetes.io/hostname": format!("node-{i}"),
            "kubernetes.io/os": "linux",
            "topology.kubernetes.io/zone": format!("zone-{}", i % 10),
        }},
        "status": {"allocatable": {"cpu": "4", "memory": "32Gi", "pods": "110"}},
    })
}

fn pod(name: &str, shape: &str) -> Value {
    let same = json!({"matchLabels": {"app": "web"}});
    let mut spec = json!({"containers": [{
        "name": "c",
        "image": "registry.k8s.io/pause:3.10",
        "resources": {"requests": {"cpu": "10m", "memory": "50Mi"}},
    }]});
    let term = |key: &str| json!([{"topologyKey": key, "labelSelector": same}]);
    match shape {
        "spread" => {
            spec["topologySpreadConstraints"] = json!([{
                "maxSkew": 5,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": same,
            }]);
        }
        "anti" => {
            spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
                term("kubernetes.io/hostname");
        }
        "near" => {
            spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
                term("topology.kubernetes.io/zone");
        }
        "preempt" => {
            spec["priority"] = 100.into();
            spec["containers"][0]["resources"]["requests"]["cpu"] = "3".into();
        }
        _ => {}
    }
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "labels": {"app": "web"}},
        "spec": spec,
    })
}
