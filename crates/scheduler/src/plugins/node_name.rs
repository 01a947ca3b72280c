//! NodeName: a pod that names its node runs there only.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{Change, Cycle, Plain, Plugin, PreFilter, Prepared, Requeue, Status};
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "NodeName";

struct NodeName;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(NodeName);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

impl PreFilter for NodeName {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let Some(wanted) = &cycle.pod.node_name else { return Prepared::Skip };
        Prepared::Filter(Box::new(Plain(move |node: &NodeInfo| {
            if node.name != *wanted {
                return Status::unresolvable("node(s) didn't match the requested node name");
            }
            Status::success()
        })))
    }
}

impl Requeue for NodeName {
    fn helps(&self, _: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        matches!(change, Change::Node(pair) if pair.added().is_some())
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use crate::testing::world;

    #[test]
    fn only_the_named_node_will_do() {
        let plugin = super::make(&serde_json::Value::Null).unwrap();
        let mut world = world("node a\nnode b");
        expect!["skip\n"].assert_eq(&world.filter(&plugin, "pod p"));
        expect![[r#"
            a: never, node(s) didn't match the requested node name
            b: ok
        "#]]
        .assert_eq(&world.filter(&plugin, "pod p on=b"));
    }
}
