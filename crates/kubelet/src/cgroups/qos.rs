//! Weights of the cgroups of the QoS classes. The burstable class gets the sum of the CPU requests
//! of its pods, the best-effort class the minimum.
//!
//! Upstream's `qosContainerManager` updates them when a pod is created and once a minute. Here
//! every added, changed or ended pod triggers an update, without a timer.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;
use schema::quantity::Quantity;
use sys::cgroup::{Cgroups, Limits};
use tokio::sync::Notify;

use super::{QOS_CGROUPS, cpu_weight_limits, host_cgroups, node_cgroup, qos_class};
use crate::admission::requests;
use crate::pod::resource_spec;
use crate::{Node, huge_pages};

/// More than any machine has. The kernel takes it as unlimited.
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// Updates the weights whenever a pod of this node changes.
pub async fn run(node: &Node) {
    let pods = node.ctx.caches.pods();
    let changed = Arc::new(Notify::new());
    let (notify, own) = (changed.clone(), node.settings.node_name.clone());
    pods.listen(move |change| {
        // CPU requests change only together with the generation.
        let seen = |pod: Option<&Arc<Pod>>| {
            let pod = pod.filter(|pod| is_counted(pod))?;
            let here = pod.spec.as_ref()?.node_name.as_deref() == Some(&own);
            here.then_some(pod.metadata.generation)
        };
        if seen(change.before) != seen(change.after) {
            notify.notify_one();
        }
    });
    pods.wait_for_sync().await;
    let group = node_cgroup(&node.settings.pods);
    // CPU requests by UID and generation, so that only new or changed pods are computed.
    let mut cpu_by_pod: HashMap<(String, Option<i64>), i64> = HashMap::new();
    let mut applied_milli = None;
    loop {
        // Pods are not kept across the wait below: they may be deleted long before the next change.
        let here = pods.indexed("node", &node.settings.node_name).into_iter().filter(|pod| is_counted(pod));
        cpu_by_pod = here
            .map(|pod| {
                let key = (pod.uid().to_owned(), pod.metadata.generation);
                let cpu_milli = cpu_by_pod.get(&key).copied().unwrap_or_else(|| cpu_request_milli(&pod));
                (key, cpu_milli)
            })
            .collect();
        let cpu_milli = cpu_by_pod.values().fold(0, |sum: i64, cpu_milli| sum.saturating_add(*cpu_milli));
        // Write only if the sum has changed or a cgroup was removed.
        let done = host_cgroups().and_then(|cgroups| {
            match applied_milli == Some(cpu_milli) && cgroups_exist(cgroups, &group) {
                true => Ok(()),
                false => set_qos_cgroups(cgroups, &group, cpu_milli),
            }
        });
        applied_milli = done.is_ok().then_some(cpu_milli);
        if let Err(error) = done {
            tracing::warn!(%error, "failed to set the CPU weights of the QoS cgroups");
        }
        changed.notified().await;
    }
}

fn is_counted(pod: &Pod) -> bool {
    !crate::pod::is_terminal(pod)
}

/// The CPU request in millicores that a pod adds to the burstable class.
fn cpu_request_milli(pod: &Pod) -> i64 {
    if qos_class(pod) != "Burstable" {
        return 0;
    }
    requests(&resource_spec(pod)).get("cpu").map_or(0, Quantity::milli)
}

fn cgroups_exist(cgroups: &Cgroups, parent: &str) -> bool {
    let dir = |level: &str| cgroups.directory("cpu", &format!("{parent}/{level}"));
    QOS_CGROUPS.into_iter().filter_map(dir).all(|dir| dir.is_dir())
}

/// Creates the cgroups and sets their weights. `cpu_milli` is the CPU request of all burstable
/// pods.
fn set_qos_cgroups(cgroups: &Cgroups, parent: &str, cpu_milli: i64) -> io::Result<()> {
    for (level, milli) in QOS_CGROUPS.into_iter().zip([cpu_milli, 0]) {
        let group = format!("/{parent}/{level}");
        let huge_pages =
            huge_pages::pools().into_iter().map(|pool| (pool.cgroup_page_size(), NO_LIMIT_BYTES)).collect();
        cgroups.create(&group)?;
        cgroups.limit(&group, &Limits { huge_pages, ..cpu_weight_limits(milli) })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn cpu_weight_matches_requests_in_both_cgroup_versions() {
        let check = |cpu_milli: i64, shares: [&str; 2], weights: [&str; 2]| {
            let dir = tempfile::tempdir().expect("a directory");
            let root = dir.path().to_owned();
            let v1 = Cgroups::V1 { hierarchies: vec![("cpu".to_owned(), root.clone())] };
            for (cgroups, name, expected) in
                [(v1, "cpu.shares", shares), (Cgroups::V2 { root: root.clone() }, "cpu.weight", weights)]
            {
                let files = QOS_CGROUPS.map(|level| root.join("skiff").join(level).join(name));
                for file in &files {
                    fs::create_dir_all(file.parent().expect("a level")).expect("made");
                    fs::write(file, "").expect("written");
                }
                set_qos_cgroups(&cgroups, "skiff", cpu_milli).expect("set");
                assert_eq!(files.map(|file| fs::read_to_string(file).expect("read")), expected);
            }
        };
        check(0, ["2", "2"], ["1", "1"]);
        check(1500, ["1536", "2"], ["59", "1"]);
        check(i64::MAX, ["262144", "2"], ["10000", "1"]);
    }

    #[test]
    fn only_burstable_pods_count() {
        let check = |class: &str, spec: Value, expected: i64| {
            let pod = json!({"metadata": {}, "spec": spec.clone(), "status": {"qosClass": class}});
            assert_eq!(
                cpu_request_milli(&serde_json::from_value(pod).expect("a pod")),
                expected,
                "{class} {spec}"
            );
        };
        let one = || json!({"name": "c", "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}}});
        check("Burstable", json!({"containers": [one(), one()]}), 500);
        check("Burstable", json!({"containers": [one()], "overhead": {"cpu": "50m"}}), 300);
        check("Burstable", json!({"containers": [{"name": "c"}], "initContainers": [one()]}), 250);
        check("Guaranteed", json!({"containers": [one()]}), 0);
    }
}
