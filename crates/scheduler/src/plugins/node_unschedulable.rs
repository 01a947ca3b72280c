//! NodeUnschedulable: a cordoned node takes only pods that tolerate that.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{Change, Cycle, Plain, Plugin, PreFilter, Prepared, Requeue, Status};
use crate::state::selection::{Effect, Taint};
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "NodeUnschedulable";

struct NodeUnschedulable;

/// Makes the plugin.
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
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        if tolerates(cycle.pod) {
            return Prepared::Skip;
        }
        Prepared::Filter(Box::new(Plain(|node: &NodeInfo| {
            if node.unschedulable {
                return Status::unresolvable("node(s) were unschedulable");
            }
            Status::success()
        })))
    }
}

impl Requeue for NodeUnschedulable {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        match change {
            Change::Node(pair) => {
                let was_open = pair.old.is_some_and(|node| !node.unschedulable);
                pair.new.is_some_and(|node| !node.unschedulable) && !was_open
            }
            Change::Pod(pair) => pair.changed().is_some_and(|(old, new)| {
                new.uid == pod.uid && old.tolerations != new.tolerations && tolerates(new)
            }),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use crate::testing::world;

    #[track_caller]
    fn check(pod: &str, expected: Expect) {
        let mut world = world("node a\nnode b unschedulable");
        expected.assert_eq(&world.filter(&super::make(&serde_json::Value::Null).unwrap(), pod));
    }

    #[test]
    fn cordoned_nodes_take_only_pods_that_tolerate_it() {
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
