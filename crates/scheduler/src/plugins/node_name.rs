//! NodeName: a pod with a node name fits only this node.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{ClusterEvent, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, Requeue, Status};
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "NodeName";

struct NodeName;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(NodeName);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

impl PreFilter for NodeName {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let Some(node_name) = &cycle.pod.node_name else { return PreFilterResult::Skip };
        PreFilterResult::Filter(Box::new(FnFilter(move |node: &NodeInfo| {
            if node.name != *node_name {
                return Status::unresolvable("node(s) didn't match the requested node name");
            }
            Status::success()
        })))
    }
}

impl Requeue for NodeName {
    fn is_schedulable_after_change(&self, _: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        matches!(change, ClusterEvent::Node(pair) if pair.added().is_some())
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use crate::testing::test_cluster;

    #[test]
    fn filters_nodes_other_than_requested_node_name() {
        let plugin = super::make(&serde_json::Value::Null).unwrap();
        let mut cluster = test_cluster("node a\nnode b");
        expect!["skip\n"].assert_eq(&cluster.filter(&plugin, "pod p"));
        expect![[r#"
            a: never, node(s) didn't match the requested node name
            b: ok
        "#]]
        .assert_eq(&cluster.filter(&plugin, "pod p on=b"));
    }
}
