//! SchedulingGates: a pod with gates is not scheduled until they are gone.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{Change, Plugin, PreEnqueue, Requeue, Status};
use crate::state::{PodInfo, State};

pub const NAME: &str = "SchedulingGates";

struct SchedulingGates;

/// Makes the plugin.
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
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        let Change::Pod(pair) = change else { return false };
        pair.changed()
            .is_some_and(|(old, new)| new.uid == pod.uid && !old.gates.is_empty() && new.gates.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use crate::testing::{say, world};

    #[test]
    fn gates_are_named() {
        let plugin = super::make(&serde_json::Value::Null).unwrap();
        let gate = plugin.pre_enqueue.unwrap();
        let (mut world, state) = (world(""), crate::state::State::default());
        let (free, _) = world.info("pod p");
        expect!["ok"].assert_eq(&say(&gate.pre_enqueue(&free, &state)));
        let (gated, _) = world.info(r#"pod p {"spec":{"schedulingGates":[{"name":"a"},{"name":"b"}]}}"#);
        expect!["never, waiting for scheduling gates: [a b]"]
            .assert_eq(&say(&gate.pre_enqueue(&gated, &state)));
    }
}
