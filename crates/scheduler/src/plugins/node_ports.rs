//! NodePorts: the ports of the host that a pod wants must be free.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{Change, Cycle, Plain, Plugin, PreFilter, Prepared, Requeue, Status};
use crate::state::pod::HostPort;
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "NodePorts";

struct NodePorts;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(NodePorts);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

impl PreFilter for NodePorts {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let wanted = &cycle.pod.ports;
        if wanted.is_empty() {
            return Prepared::Skip;
        }
        Prepared::Filter(Box::new(Plain(move |node: &NodeInfo| {
            if wanted.iter().any(|port| node.ports.conflicts(port)) {
                return Status::unschedulable("node(s) didn't have free ports for the requested pod ports");
            }
            Status::success()
        })))
    }
}

impl Requeue for NodePorts {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        match change {
            Change::Node(pair) => pair.added().is_some(),
            Change::Pod(pair) => pair.removed().is_some_and(|gone| {
                let frees = |port: &HostPort| gone.ports.iter().any(|freed| freed.meets(port));
                (gone.node_name.is_some() || gone.nominated.is_some()) && pod.ports.iter().any(frees)
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
        let mut world = world(
            r#"
            node a
            node b
            pod x on=a port=80
            pod y on=b {"spec":{"containers":[{"name":"c","ports":[{"containerPort":1,"hostPort":80,"hostIP":"10.0.0.1"}]}]}}"#,
        );
        expected.assert_eq(&world.filter(&super::make(&serde_json::Value::Null).unwrap(), pod));
    }

    #[test]
    fn a_taken_port_keeps_pods_away() {
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
