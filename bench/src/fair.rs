//! What a flood of lists by one user does to another's writes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::Result;
use futures_util::future::try_join_all;
use serde_json::json;

use crate::client::{Client, GROUP, JSON};
use crate::load::{self, Until};
use crate::objects::config_map;
use crate::report::{Report, Unit};
use crate::server::Server;
use crate::wire::{Sizes, collection};

/// Connections that list, each as fast as it is answered.
const FLOOD: usize = 32;
const ALONE: &str = "fairness/write-alone";

pub async fn run(report: &mut Report, server: &Server, clients: &[Client], sizes: Sizes) -> Result<()> {
    let binding = json!({
        "metadata": {"name": "bench"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": GROUP}],
    });
    clients[0].post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await?;
    let writer = [clients[0].acting_as("writer")];
    writes(report, server, &writer, sizes, ALONE).await?;
    for (flooder, name) in [("flooder", "flood"), ("", "exempt-flood")] {
        let lists = clients[1..].iter().take(FLOOD).map(|client| client.acting_as(flooder));
        let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
        let path = collection("pods");
        let list = async |client: Client| {
            while !stop.load(Ordering::Relaxed) {
                // Who floods is refused at times, and asks again at once.
                if client.count(&path, JSON).await.is_ok() {
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
            anyhow::Ok(())
        };
        let measured = async {
            let begun = Instant::now();
            let result = writes(report, server, &writer, sizes, &format!("fairness/write-in-{name}")).await;
            stop.store(true, Ordering::Relaxed);
            result.map(|()| begun.elapsed())
        };
        let (took, _) = futures_util::future::try_join(measured, try_join_all(lists.map(list))).await?;
        let rate = done.into_inner() as f64 / took.as_secs_f64();
        report.add(format!("fairness/{name}/lists"), Unit::PerSecond, rate);
    }
    Ok(())
}

async fn writes(
    report: &mut Report,
    server: &Server,
    writer: &[Client],
    sizes: Sizes,
    name: &str,
) -> Result<()> {
    let path = collection("configmaps");
    let timed = (0, sizes.rounds, Until::Time(sizes.round));
    let prefix = name.rsplit('/').next().unwrap_or(name);
    let load = load::run(server, writer, timed, async |client, index| {
        client.post(&path, &config_map(&format!("{prefix}-{index}"))).await
    })
    .await?;
    report.add_against(format!("{name}/p50"), Unit::Millis, load.p50, &format!("{ALONE}/p50"));
    report.add_against(format!("{name}/p99"), Unit::Millis, load.p99, &format!("{ALONE}/p99"));
    Ok(())
}
