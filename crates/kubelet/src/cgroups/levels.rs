//! What pods that were promised less than they may use have together: those that were promised something the time of
//! processors that they were promised in all, those that were promised nothing next to none.
//!
//! Upstream's kubelet does so when it makes a pod, and every minute. Here it is done whenever a pod comes, changes or ends,
//! and not otherwise.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;
use schema::quantity::Quantity;
use sys::cgroup::{Cgroups, Limits};
use tokio::sync::Notify;

use super::{LEVELS, class, host, of_node, weighed};
use crate::admission::requests;
use crate::pod::needs;
use crate::{Node, huge_pages};

/// More than any machine has.
const UNBOUNDED: u64 = 1 << 62;

/// Keeps the levels as the node's pods need them.
pub async fn keep(node: &Node) {
    let pods = node.ctx.caches.pods();
    let changed = Arc::new(Notify::new());
    let (news, own) = (changed.clone(), node.settings.node_name.clone());
    pods.listen(move |change| {
        // All that the levels depend on.
        let seen = |pod: Option<&Arc<Pod>>| {
            let pod = pod.filter(|pod| is_counted(pod))?;
            let here = pod.spec.as_ref()?.node_name.as_deref() == Some(&own);
            here.then_some(pod.metadata.generation)
        };
        if seen(change.before) != seen(change.after) {
            news.notify_one();
        }
    });
    pods.filled().await;
    let group = of_node(&node.settings.pods);
    // By uid and generation.
    let mut each: HashMap<(String, Option<i64>), i64> = HashMap::new();
    let mut set_to = None;
    loop {
        // None of them is held on to while nothing changes: by then they may be long gone.
        let here = pods.indexed("node", &node.settings.node_name).into_iter().filter(|pod| is_counted(pod));
        each = here
            .map(|pod| {
                let key = (pod.uid().to_owned(), pod.metadata.generation);
                let promised = each.get(&key).copied().unwrap_or_else(|| promised(&pod));
                (key, promised)
            })
            .collect();
        let promised = each.values().fold(0, |sum: i64, promised| sum.saturating_add(*promised));
        let done = host().and_then(|cgroups| match set_to == Some(promised) && are_there(cgroups, &group) {
            true => Ok(()),
            false => set(cgroups, &group, promised),
        });
        set_to = done.is_ok().then_some(promised);
        if let Err(error) = done {
            tracing::warn!(%error, "cannot weigh pods by what they were promised");
        }
        changed.notified().await;
    }
}

fn is_counted(pod: &Pod) -> bool {
    !crate::pod::is_over(pod)
}

/// Thousandths of a processor that a pod counts for in its level.
fn promised(pod: &Pod) -> i64 {
    if class(pod) != "Burstable" {
        return 0;
    }
    requests(&needs(pod)).get("cpu").map_or(0, Quantity::milli)
}

fn are_there(cgroups: &Cgroups, around: &str) -> bool {
    let place = |level: &str| cgroups.directory("cpu", &format!("{around}/{level}"));
    LEVELS.into_iter().filter_map(place).all(|place| place.is_dir())
}

/// Makes the levels in a group, where the first was promised so many thousandths of a processor.
fn set(cgroups: &Cgroups, around: &str, promised: i64) -> io::Result<()> {
    for (level, milli) in LEVELS.into_iter().zip([promised, 0]) {
        let group = format!("/{around}/{level}");
        let huge_pages = huge_pages::pools().into_iter().map(|pool| (pool.cgroup(), UNBOUNDED)).collect();
        cgroups.create(&group)?;
        cgroups.limit(&group, &Limits { huge_pages, ..weighed(milli) })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn levels_weigh_what_was_promised() {
        let check = |promised: i64, shares: [&str; 2], weights: [&str; 2]| {
            let dir = tempfile::tempdir().expect("a directory");
            let root = dir.path().to_owned();
            let v1 = Cgroups::V1 { hierarchies: vec![("cpu".to_owned(), root.clone())] };
            for (cgroups, name, expected) in
                [(v1, "cpu.shares", shares), (Cgroups::V2 { root: root.clone() }, "cpu.weight", weights)]
            {
                let files = LEVELS.map(|level| root.join("skiff").join(level).join(name));
                for file in &files {
                    fs::create_dir_all(file.parent().expect("a level")).expect("made");
                    fs::write(file, "").expect("written");
                }
                set(&cgroups, "skiff", promised).expect("set");
                assert_eq!(files.map(|file| fs::read_to_string(file).expect("read")), expected);
            }
        };
        check(0, ["2", "2"], ["1", "1"]);
        check(1500, ["1536", "2"], ["59", "1"]);
        check(i64::MAX, ["262144", "2"], ["10000", "1"]);
    }

    #[test]
    fn only_part_of_the_pods_counts() {
        let check = |class: &str, spec: Value, expected: i64| {
            let pod = json!({"metadata": {}, "spec": spec.clone(), "status": {"qosClass": class}});
            assert_eq!(promised(&serde_json::from_value(pod).expect("a pod")), expected, "{class} {spec}");
        };
        let one = || json!({"name": "c", "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}}});
        check("Burstable", json!({"containers": [one(), one()]}), 500);
        check("Burstable", json!({"containers": [one()], "overhead": {"cpu": "50m"}}), 300);
        check("Burstable", json!({"containers": [{"name": "c"}], "initContainers": [one()]}), 250);
        check("Guaranteed", json!({"containers": [one()]}), 0);
    }
}
