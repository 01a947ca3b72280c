//! NodePorts: the host ports of a pod must be free on the node.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{ClusterEvent, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, Requeue, Status};
use crate::state::pod::HostPort;
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "NodePorts";

struct NodePorts;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(NodePorts);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

impl PreFilter for NodePorts {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let host_ports = &cycle.pod.ports;
        if host_ports.is_empty() {
            return PreFilterResult::Skip;
        }
        PreFilterResult::Filter(Box::new(FnFilter(move |node: &NodeInfo| {
            if host_ports.iter().any(|port| node.ports.conflicts(port)) {
                return Status::unschedulable("node(s) didn't have free ports for the requested pod ports");
            }
            Status::success()
        })))
    }
}

impl Requeue for NodePorts {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        match change {
            ClusterEvent::Node(pair) => pair.added().is_some(),
            ClusterEvent::Pod(pair) => pair.removed().is_some_and(|removed| {
                let is_released = |port: &HostPort| {
                    removed.ports.iter().any(|removed_port| removed_port.conflicts_with(port))
                };
                (removed.node_name.is_some() || removed.nominated.is_some())
                    && pod.ports.iter().any(is_released)
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
        let mut cluster = test_cluster(
            r#"
            node a
            node b
            pod x on=a port=80
            pod y on=b {"spec":{"containers":[{"name":"c","ports":[{"containerPort":1,"hostPort":80,"hostIP":"10.0.0.1"}]}]}}"#,
        );
        expected.assert_eq(&cluster.filter(&super::make(&serde_json::Value::Null).unwrap(), pod));
    }

    #[test]
    fn filters_nodes_with_conflicting_host_ports() {
        check("pod p", expect!["skip\n"]);
        check(
            "pod p port=81",
            expect![[r#"
            a: ok
            b: ok
        "#]],
        );
        check(
            "pod p port=80",
            expect![[r#"
            a: no, node(s) didn't have free ports for the requested pod ports
            b: no, node(s) didn't have free ports for the requested pod ports
        "#]],
        );
        check(
            r#"pod p {"spec":{"containers":[{"name":"c","ports":[{"containerPort":1,"hostPort":80,"hostIP":"10.0.0.2"}]}]}}"#,
            expect![[r#"
                a: no, node(s) didn't have free ports for the requested pod ports
                b: ok
            "#]],
        );
        check(
            r#"pod p {"spec":{"containers":[{"name":"c","ports":[{"containerPort":1,"hostPort":80,"protocol":"UDP"}]}]}}"#,
            expect![[r#"
                a: ok
                b: ok
            "#]],
        );
    }
}
