//! TaintToleration: filters nodes with taints that the pod does not tolerate, and prefers nodes with fewer
//! untolerated PreferNoSchedule taints.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{
    ClusterEvent, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, PreScore, PreScoreResult, Requeue,
    Score, Status, default_normalize_score,
};
use crate::state::selection::{Effect, Toleration, tolerates_taints};
use crate::state::{NodeId, NodeInfo, PodInfo, State};

pub const NAME: &str = "TaintToleration";

struct TaintToleration;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(TaintToleration);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

impl PreFilter for TaintToleration {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let tolerations = &cycle.pod.tolerations;
        PreFilterResult::Filter(Box::new(FnFilter(move |node: &NodeInfo| {
            if tolerates_taints(&node.taints, tolerations) {
                return Status::success();
            }
            Status::unresolvable("node(s) had untolerated taint(s)")
        })))
    }
}

impl PreScore for TaintToleration {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> PreScoreResult<'c> {
        let is_prefer_no_schedule = |toleration: &&Toleration| {
            toleration.effect.is_none_or(|effect| effect == Effect::PreferNoSchedule)
        };
        PreScoreResult::Score(Box::new(TaintScore(
            cycle.pod.tolerations.iter().filter(is_prefer_no_schedule).collect(),
        )))
    }
}

/// Counts the untolerated PreferNoSchedule taints; fewer are better.
struct TaintScore<'c>(Vec<&'c Toleration>);

impl Score for TaintScore<'_> {
    fn score(&self, node: &NodeInfo) -> i64 {
        let prefer_no_schedule = node.taints.iter().filter(|taint| taint.effect == Effect::PreferNoSchedule);
        prefer_no_schedule
            .filter(|taint| !self.0.iter().any(|toleration| toleration.tolerates(taint)))
            .count() as i64
    }

    fn normalize(&self, _: &[NodeId], scores: &mut [i64]) {
        default_normalize_score(scores, true);
    }
}

impl Requeue for TaintToleration {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        match change {
            ClusterEvent::Node(pair) => {
                let tolerates_node = |node: &NodeInfo| tolerates_taints(&node.taints, &pod.tolerations);
                pair.new.is_some_and(tolerates_node) && !pair.old.is_some_and(tolerates_node)
            }
            ClusterEvent::Pod(pair) => pair
                .changed()
                .is_some_and(|(old, new)| new.uid == pod.uid && old.tolerations != new.tolerations),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use crate::testing::test_cluster;

    const NODES: &str = "
        node a
        node b taint=k=v:NoSchedule
        node c taint=k=v:NoExecute
        node d taint=k=v:PreferNoSchedule taint=l=w:PreferNoSchedule";

    #[track_caller]
    fn check(pod: &str, filtered: Expect, scored: Expect) {
        let plugin = super::make(&serde_json::Value::Null).unwrap();
        let mut cluster = test_cluster(NODES);
        filtered.assert_eq(&cluster.filter(&plugin, pod));
        scored.assert_eq(&cluster.score(&plugin, pod));
    }

    #[test]
    fn filters_and_scores_nodes_by_taints() {
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
    fn equal_operator_matches_taint_value() {
        let plugin = super::make(&serde_json::Value::Null).unwrap();
        let mut cluster = test_cluster("node a taint=k=v:NoSchedule");
        let with = |value| {
            format!(
                r#"pod p {{"spec":{{"tolerations":[{{"key":"k","value":"{value}","effect":"NoSchedule"}}]}}}}"#
            )
        };
        expect!["a: ok\n"].assert_eq(&cluster.filter(&plugin, &with("v")));
        expect!["a: never, node(s) had untolerated taint(s)\n"]
            .assert_eq(&cluster.filter(&plugin, &with("w")));
    }
}
