//! NodeDeclaredFeatures: a pod that needs a feature of the node runs only where it is declared.

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use serde_json::Value;

use crate::framework::{Change, Cycle, Plain, Plugin, PreFilter, Prepared, Requeue, Status};
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "NodeDeclaredFeatures";

struct NodeDeclaredFeatures;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(NodeDeclaredFeatures);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

/// The features a pod needs of its node.
fn needed(pod: &core::Pod) -> Vec<&'static str> {
    let mut needed = Vec::new();
    let Some(spec) = &pod.spec else { return needed };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut rules = containers.flat_map(|container| container.restart_policy_rules.iter().flatten());
    if rules.any(|rule| rule.action == "RestartAllContainers") {
        needed.push("RestartAllContainersOnContainerExits");
    }
    if spec.host_network == Some(true) && spec.host_users == Some(false) {
        needed.push("UserNamespacesHostNetworkSupport");
    }
    needed
}

impl PreFilter for NodeDeclaredFeatures {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let needed = needed(cycle.object);
        if needed.is_empty() {
            return Prepared::Skip;
        }
        Prepared::Filter(Box::new(Plain(move |node: &NodeInfo| {
            if needed.iter().all(|feature| node.features.iter().any(|known| known == feature)) {
                return Status::success();
            }
            Status::unresolvable("node(s) didn't match Pod's required features")
        })))
    }
}

impl Requeue for NodeDeclaredFeatures {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        match change {
            Change::Node(pair) => {
                pair.new.is_some_and(|new| pair.old.is_none_or(|old| old.features != new.features))
            }
            Change::Pod(pair) => pair.changed().is_some_and(|(_, new)| new.uid == pod.uid),
            _ => false,
        }
    }
}
