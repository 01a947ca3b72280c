//! The cost of many custom resources: memory for each definition, and for each with an object.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use crate::report::{Report, Unit, millis};
use crate::server::Server;

const CRD_PATH: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
/// Time limit until the last custom resource is served.
const SERVED_TIMEOUT: Duration = Duration::from_secs(60);

pub async fn run(report: &mut Report, binary: &Path, dir: &Path, count: usize) -> Result<()> {
    let server = Server::start(binary, dir).await?;
    let client = server.target.connect().await?;
    let name = format!("kinds/{count}");
    let empty = server.memory()?;
    let started = Instant::now();
    for i in 0..count {
        client.post(CRD_PATH, &definition(i)).await?;
    }
    let last = count.saturating_sub(1);
    wait_until_served(&client, last).await?;
    report.add(format!("{name}/create-each"), Unit::Millis, millis(started.elapsed()) / count as f64);
    report.add(
        format!("{name}/definition-bytes"),
        Unit::Megabytes,
        definition(0).to_string().len() as f64 * count as f64 / 1e6,
    );
    report.add(format!("{name}/memory"), Unit::Megabytes, server.memory()? - empty);
    for i in 0..count {
        let object = json!({
            "apiVersion": "bench.example.io/v1", "kind": format!("Kind{i}"),
            "metadata": {"name": "a"}, "spec": {"text0": "x", "inner": {"text1": "y"}},
        });
        client.post(&collection(i), &object).await?;
    }
    report.add(format!("{name}/memory-with-an-object-each"), Unit::Megabytes, server.memory()? - empty);
    let reply = client.get("/apis/bench.example.io/v1").await?;
    report.add(format!("{name}/discovery"), Unit::Millis, millis(reply.latency));
    Ok(())
}

async fn wait_until_served(client: &crate::client::Client, i: usize) -> Result<()> {
    let started = Instant::now();
    while client.get(&collection(i)).await.is_err() {
        ensure!(started.elapsed() < SERVED_TIMEOUT, "the last custom resource is not served in time");
        tokio::task::yield_now().await;
    }
    Ok(())
}

fn collection(i: usize) -> String {
    format!("/apis/bench.example.io/v1/namespaces/default/kind{i}s")
}

/// A definition of about 10 KB, the median size of published definitions.
fn definition(i: usize) -> Value {
    let fields = || -> Map<String, Value> {
        let field = |i: usize| {
            let text = "What the field is for, and what happens if it is not set. ".repeat(2);
            (format!("text{i}"), json!({"type": "string", "description": text, "maxLength": 253}))
        };
        (0..25).map(field).collect()
    };
    let mut spec = fields();
    spec.insert("inner".to_owned(), json!({"type": "object", "properties": fields()}));
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("kind{i}s.bench.example.io")},
        "spec": {
            "group": "bench.example.io", "scope": "Namespaced",
            "names": {"plural": format!("kind{i}s"), "kind": format!("Kind{i}")},
            "versions": [{
                "name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": {"type": "object", "properties": spec},
                    "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                }}},
            }],
        },
    })
}
