//! NodeUnschedulable: a cordoned node accepts only pods that tolerate the `unschedulable` taint.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{ClusterEvent, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, Requeue, Status};
use crate::state::selection::{Effect, Taint};
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "NodeUnschedulable";

struct NodeUnschedulable;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(NodeUnschedulable);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

fn tolerates(pod: &PodInfo) -> bool {
    if pod.tolerations.is_empty() {
        return false;
    }
    let key = "node.kubernetes.io/unschedulable".into();
    let taint = Taint { key, value: "".into(), effect: Effect::NoSchedule };
    pod.tolerations.iter().any(|toleration| toleration.tolerates(&taint))
}

impl PreFilter for NodeUnschedulable {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        if tolerates(cycle.pod) {
            return PreFilterResult::Skip;
        }
        PreFilterResult::Filter(Box::new(FnFilter(|node: &NodeInfo| {
            if node.unschedulable {
                return Status::unresolvable("node(s) were unschedulable");
            }
            Status::success()
        })))
    }
}

impl Requeue for NodeUnschedulable {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        match change {
            ClusterEvent::Node(pair) => {
                let was_schedulable = pair.old.is_some_and(|node| !node.unschedulable);
                pair.new.is_some_and(|node| !node.unschedulable) && !was_schedulable
            }
            ClusterEvent::Pod(pair) => pair.changed().is_some_and(|(old, new)| {
                new.uid == pod.uid && old.tolerations != new.tolerations && tolerates(new)
            }),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use crate::testing::test_cluster;

    #[track_caller]
    fn check(pod: &str, expected: Expect) {
        let mut cluster = test_cluster("node a\nnode b unschedulable");
        expected.assert_eq(&cluster.filter(&super::make(&serde_json::Value::Null).unwrap(), pod));
    }

    #[test]
    fn filters_unschedulable_nodes_without_toleration() {
        check(
            "pod p",
            expect![[r#"
            a: ok
            b: never, node(s) were unschedulable
        "#]],
        );
        check("pod p tolerates=node.kubernetes.io/unschedulable:NoSchedule", expect!["skip\n"]);
    }
}
