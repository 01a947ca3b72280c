//! SchedulingGates: a pod is not scheduled while it has scheduling gates.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{ClusterEvent, Plugin, PreEnqueue, Requeue, Status};
use crate::state::{PodInfo, State};

pub const NAME: &str = "SchedulingGates";

struct SchedulingGates;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(SchedulingGates);
    Ok(Plugin::new(NAME).pre_enqueue(plugin.clone()).requeue(plugin))
}

impl PreEnqueue for SchedulingGates {
    fn pre_enqueue(&self, pod: &PodInfo, _: &State) -> Status {
        if pod.gates.is_empty() {
            return Status::success();
        }
        Status::unresolvable(format!("waiting for scheduling gates: [{}]", pod.gates.join(" ")))
    }
}

impl Requeue for SchedulingGates {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        let ClusterEvent::Pod(pair) = change else { return false };
        pair.changed()
            .is_some_and(|(old, new)| new.uid == pod.uid && !old.gates.is_empty() && new.gates.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use crate::testing::{format_status, test_cluster};

    #[test]
    fn rejection_names_scheduling_gates() {
        let plugin = super::make(&serde_json::Value::Null).unwrap();
        let gate = plugin.pre_enqueue.unwrap();
        let (mut world, state) = (test_cluster(""), crate::state::State::default());
        let (free, _) = world.info("pod p");
        expect!["ok"].assert_eq(&format_status(&gate.pre_enqueue(&free, &state)));
        let (gated, _) = world.info(r#"pod p {"spec":{"schedulingGates":[{"name":"a"},{"name":"b"}]}}"#);
        expect!["never, waiting for scheduling gates: [a b]"]
            .assert_eq(&format_status(&gate.pre_enqueue(&gated, &state)));
    }
}
