//! NodeDeclaredFeatures: a pod that requires a node feature runs only on nodes that declare it.

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use serde_json::Value;

use crate::framework::{ClusterEvent, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, Requeue, Status};
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "NodeDeclaredFeatures";

struct NodeDeclaredFeatures;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(NodeDeclaredFeatures);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

/// Returns the features that a pod requires from its node.
fn required_features(pod: &core::Pod) -> Vec<&'static str> {
    let mut required = Vec::new();
    let Some(spec) = &pod.spec else { return required };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut rules = containers.flat_map(|container| container.restart_policy_rules.iter().flatten());
    if rules.any(|rule| rule.action == "RestartAllContainers") {
        required.push("RestartAllContainersOnContainerExits");
    }
    if spec.host_network == Some(true) && spec.host_users == Some(false) {
        required.push("UserNamespacesHostNetworkSupport");
    }
    required
}

impl PreFilter for NodeDeclaredFeatures {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let required = required_features(cycle.object);
        if required.is_empty() {
            return PreFilterResult::Skip;
        }
        PreFilterResult::Filter(Box::new(FnFilter(move |node: &NodeInfo| {
            if required.iter().all(|feature| node.features.iter().any(|known| known == feature)) {
                return Status::success();
            }
            Status::unresolvable("node(s) didn't match Pod's required features")
        })))
    }
}

impl Requeue for NodeDeclaredFeatures {
    /// The required features of a pod are immutable, so only node events matter.
    fn is_schedulable_after_change(&self, _: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        let ClusterEvent::Node(pair) = change else { return false };
        pair.new.is_some_and(|new| pair.old.is_none_or(|old| old.features != new.features))
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;
    use crate::framework::ObjectPair;
    use crate::testing::{node, test_cluster};

    const RESTART_ALL_CONTAINERS: &str = r#"{"name":"c","restartPolicyRules":[{"action":"RestartAllContainers","exitCodes":{"operator":"In","values":[1]}}]}"#;

    #[track_caller]
    fn check(spec: &str, expected: Expect) {
        let mut cluster = test_cluster(
            r#"
            node both {"status":{"declaredFeatures":["RestartAllContainersOnContainerExits","UserNamespacesHostNetworkSupport"]}}
            node none
            node other {"status":{"declaredFeatures":["ExtendWebSocketsToKubelet"]}}
            node restarts {"status":{"declaredFeatures":["ExtendWebSocketsToKubelet","RestartAllContainersOnContainerExits"]}}"#,
        );
        let plugin = make(&Value::Null).unwrap();
        expected.assert_eq(&cluster.filter(&plugin, &format!(r#"pod p {{"spec":{spec}}}"#)));
    }

    #[test]
    fn returns_required_features_of_pod_spec() {
        check("{}", expect!["skip\n"]);
        // Rules with other actions, host network alone and user namespaces alone require no feature.
        let restart = r#"{"containers":[{"name":"c","restartPolicyRules":[{"action":"Restart"}]}]}"#;
        check(restart, expect!["skip\n"]);
        check(r#"{"hostNetwork":true}"#, expect!["skip\n"]);
        check(r#"{"hostNetwork":true,"hostUsers":true}"#, expect!["skip\n"]);
        check(r#"{"hostUsers":false}"#, expect!["skip\n"]);
    }

    #[test]
    fn filters_nodes_without_required_features() {
        for containers in ["containers", "initContainers"] {
            check(
                &format!(r#"{{"{containers}":[{RESTART_ALL_CONTAINERS}]}}"#),
                expect![[r#"
                    both: ok
                    none: never, node(s) didn't match Pod's required features
                    other: never, node(s) didn't match Pod's required features
                    restarts: ok
                "#]],
            );
        }
        for containers in ["[]", &format!("[{RESTART_ALL_CONTAINERS}]")] {
            check(
                &format!(r#"{{"hostNetwork":true,"hostUsers":false,"containers":{containers}}}"#),
                expect![[r#"
                    both: ok
                    none: never, node(s) didn't match Pod's required features
                    other: never, node(s) didn't match Pod's required features
                    restarts: never, node(s) didn't match Pod's required features
                "#]],
            );
        }
    }

    #[test]
    fn requeues_pod_when_declared_features_change() {
        let plugin = make(&Value::Null).unwrap().requeue.unwrap();
        let mut cluster = test_cluster("");
        let (pod, _) = cluster.info("pod p");
        let mut read = |features: &str| {
            let line = format!(r#"node n {{"status":{{"declaredFeatures":{features}}}}}"#);
            let mut info = NodeInfo::named(0, "n".into());
            info.set(Arc::new(node(&line)), &mut cluster.state.strings);
            info
        };
        let (none, one, same) = (read("[]"), read(r#"["a"]"#), read(r#"["a"]"#));
        for (old, new, expected) in [
            (None, Some(&none), true),
            (Some(&none), Some(&one), true),
            (Some(&one), Some(&none), true),
            (Some(&one), Some(&same), false),
            (Some(&one), None, false),
        ] {
            assert_eq!(
                plugin.is_schedulable_after_change(
                    &pod,
                    &ClusterEvent::Node(ObjectPair { old, new }),
                    &State::default()
                ),
                expected
            );
        }
        let change = ClusterEvent::Pod(ObjectPair { old: Some(&*pod), new: Some(&*pod) });
        assert!(!plugin.is_schedulable_after_change(&pod, &change, &State::default()));
    }
}
