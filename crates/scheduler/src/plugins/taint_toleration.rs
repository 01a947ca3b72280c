//! TaintToleration: a pod stays off nodes with taints it does not tolerate, and rather off those it is asked
//! to avoid.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{
    Change, Cycle, Plain, Plugin, PreFilter, PreScore, Prepared, Requeue, Score, Scoring, Status, normalized,
};
use crate::state::selection::{Effect, Toleration, tolerated};
use crate::state::{NodeId, NodeInfo, PodInfo, State};

pub const NAME: &str = "TaintToleration";

struct TaintToleration;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(TaintToleration);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

impl PreFilter for TaintToleration {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let tolerations = &cycle.pod.tolerations;
        Prepared::Filter(Box::new(Plain(move |node: &NodeInfo| {
            if tolerated(&node.taints, tolerations) {
                return Status::success();
            }
            Status::unresolvable("node(s) had untolerated taint(s)")
        })))
    }
}

impl PreScore for TaintToleration {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> Scoring<'c> {
        let matters = |toleration: &&Toleration| {
            toleration.effect.is_none_or(|effect| effect == Effect::PreferNoSchedule)
        };
        Scoring::Score(Box::new(Untolerated(cycle.pod.tolerations.iter().filter(matters).collect())))
    }
}

/// Counts the taints to be avoided; fewer are better.
struct Untolerated<'c>(Vec<&'c Toleration>);

impl Score for Untolerated<'_> {
    fn score(&self, node: &NodeInfo) -> i64 {
        let avoided = node.taints.iter().filter(|taint| taint.effect == Effect::PreferNoSchedule);
        avoided.filter(|taint| !self.0.iter().any(|toleration| toleration.tolerates(taint))).count() as i64
    }

    fn normalize(&self, _: &[NodeId], scores: &mut [i64]) {
        normalized(scores, true);
    }
}

impl Requeue for TaintToleration {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        match change {
            Change::Node(pair) => {
                let bears = |node: &NodeInfo| tolerated(&node.taints, &pod.tolerations);
                pair.new.is_some_and(bears) && !pair.old.is_some_and(bears)
            }
            Change::Pod(pair) => pair
                .changed()
                .is_some_and(|(old, new)| new.uid == pod.uid && old.tolerations != new.tolerations),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use crate::testing::world;

    const NODES: &str = "
        node a
        node b taint=k=v:NoSchedule
        node c taint=k=v:NoExecute
        node d taint=k=v:PreferNoSchedule taint=l=w:PreferNoSchedule";

    #[track_caller]
    fn check(pod: &str, filtered: Expect, scored: Expect) {
        let plugin = super::make(&serde_json::Value::Null).unwrap();
        let mut world = world(NODES);
        filtered.assert_eq(&world.filter(&plugin, pod));
        scored.assert_eq(&world.score(&plugin, pod));
    }

    #[test]
    fn taints_keep_away_who_does_not_tolerate_them() {
        check(
            "pod p",
            expect![[r#"
                a: ok
                b: never, node(s) had untolerated taint(s)
                c: never, node(s) had untolerated taint(s)
                d: ok
            "#]],
            expect![[r#"
                a: 0 -> 100
                b: 0 -> 100
                c: 0 -> 100
                d: 2 -> 0
            "#]],
        );
        check(
            "pod p tolerates=k:",
            expect![[r#"
                a: ok
                b: ok
                c: ok
                d: ok
            "#]],
            expect![[r#"
                a: 0 -> 100
                b: 0 -> 100
                c: 0 -> 100
                d: 1 -> 0
            "#]],
        );
        check(
            "pod p tolerates=k:NoExecute",
            expect![[r#"
                a: ok
                b: never, node(s) had untolerated taint(s)
                c: ok
                d: ok
            "#]],
            expect![[r#"
                a: 0 -> 100
                b: 0 -> 100
                c: 0 -> 100
                d: 2 -> 0
            "#]],
        );
    }

    #[test]
    fn the_value_counts_unless_any_will_do() {
        let plugin = super::make(&serde_json::Value::Null).unwrap();
        let mut world = world("node a taint=k=v:NoSchedule");
        let with = |value| {
            format!(
                r#"pod p {{"spec":{{"tolerations":[{{"key":"k","value":"{value}","effect":"NoSchedule"}}]}}}}"#
            )
        };
        expect!["a: ok\n"].assert_eq(&world.filter(&plugin, &with("v")));
        expect!["a: never, node(s) had untolerated taint(s)\n"].assert_eq(&world.filter(&plugin, &with("w")));
    }
}
