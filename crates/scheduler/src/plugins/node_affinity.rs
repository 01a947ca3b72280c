//! NodeAffinity: node selector, required and preferred node affinity. The configuration can add an affinity
//! for all pods (`addedAffinity`).

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use serde::Deserialize;
use serde_json::Value;

use super::parse_args;
use crate::framework::{
    ClusterEvent, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, PreScore, PreScoreResult, Requeue,
    Score, Status, default_normalize_score,
};
use crate::state::selection::{NodeSelector, NodeTerm, weighted};
use crate::state::{NodeId, NodeInfo, PodInfo, State};

pub const NAME: &str = "NodeAffinity";

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Args {
    added_affinity: Option<core::NodeAffinity>,
}

#[derive(Default)]
struct NodeAffinity {
    added: Option<NodeSelector>,
    added_preferences: Box<[(i32, NodeTerm)]>,
}

/// Creates the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = parse_args(args)?;
    let added = args.added_affinity.unwrap_or_default();
    let required = added.required_during_scheduling_ignored_during_execution;
    let preferred = added.preferred_during_scheduling_ignored_during_execution.unwrap_or_default();
    let plugin = Arc::new(NodeAffinity {
        added: required.as_ref().map(NodeSelector::new),
        added_preferences: weighted(&preferred),
    });
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

impl PreFilter for NodeAffinity {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let nodes = &cycle.pod.nodes;
        if nodes.matches_all_nodes() && self.added.is_none() {
            return PreFilterResult::Skip;
        }
        let filter = Box::new(FnFilter(move |node: &NodeInfo| {
            if self.added.as_ref().is_some_and(|added| !added.matches(node)) {
                return Status::unresolvable("node(s) didn't match scheduler-enforced node affinity");
            }
            if !nodes.allows(node) {
                return Status::unresolvable("node(s) didn't match Pod's node affinity/selector");
            }
            Status::success()
        }));
        match required_node_names(nodes.required.as_ref()) {
            Some(names) if names.is_empty() => {
                PreFilterResult::Reject(Status::unresolvable("pod affinity terms conflict"))
            }
            Some(names) => {
                PreFilterResult::FilterNodes(names.into_iter().map(str::to_owned).collect(), filter)
            }
            None => PreFilterResult::Filter(filter),
        }
    }
}

/// Returns the node names in the affinity's `matchFields`, if every term has them.
fn required_node_names(required: Option<&NodeSelector>) -> Option<BTreeSet<&str>> {
    let terms = &required?.0;
    let mut names = BTreeSet::new();
    for term in terms {
        names.extend(term.names()?);
    }
    (!terms.is_empty()).then_some(names)
}

impl PreScore for NodeAffinity {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> PreScoreResult<'c> {
        let preferred = &cycle.pod.nodes.preferred;
        if preferred.is_empty() && self.added_preferences.is_empty() {
            return PreScoreResult::Skip;
        }
        PreScoreResult::Score(Box::new(Preferred([&self.added_preferences, preferred])))
    }
}

struct Preferred<'c>([&'c [(i32, NodeTerm)]; 2]);

impl Score for Preferred<'_> {
    fn score(&self, node: &NodeInfo) -> i64 {
        let all = self.0.iter().flat_map(|terms| terms.iter());
        all.filter(|(_, term)| term.matches(node)).map(|(weight, _)| i64::from(*weight)).sum()
    }

    fn normalize(&self, _: &[NodeId], scores: &mut [i64]) {
        default_normalize_score(scores, false);
    }
}

impl Requeue for NodeAffinity {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        let ClusterEvent::Node(pair) = change else { return false };
        let allows = |node: &NodeInfo| {
            self.added.as_ref().is_none_or(|added| added.matches(node)) && pod.nodes.allows(node)
        };
        pair.new.is_some_and(allows) && !pair.old.is_some_and(allows)
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::{Value, json};

    use crate::testing::test_cluster;

    const NODES: &str = "
        node a zone=z1 label=size=3
        node b zone=z2 label=size=5
        node c";

    #[track_caller]
    fn check(args: Value, pod: &str, filtered: Expect, scored: Expect) {
        let plugin = super::make(&args).unwrap();
        let mut cluster = test_cluster(NODES);
        filtered.assert_eq(&cluster.filter(&plugin, pod));
        scored.assert_eq(&cluster.score(&plugin, pod));
    }

    fn affinity(text: &str) -> String {
        format!(r#"pod p {{"spec":{{"affinity":{{"nodeAffinity":{text}}}}}}}"#)
    }

    #[test]
    fn filters_by_node_selector_and_required_affinity() {
        check(Value::Null, "pod p", expect!["skip\n"], expect!["skip\n"]);
        check(
            Value::Null,
            r#"pod p {"spec":{"nodeSelector":{"size":"3"}}}"#,
            expect![[r#"
                a: ok
                b: never, node(s) didn't match Pod's node affinity/selector
                c: never, node(s) didn't match Pod's node affinity/selector
            "#]],
            expect!["skip\n"],
        );
        let greater_than = r#"{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[
            {"matchExpressions":[{"key":"size","operator":"Gt","values":["3"]}]},
            {"matchExpressions":[{"key":"size","operator":"DoesNotExist"}]}]}}"#;
        check(
            Value::Null,
            &affinity(greater_than),
            expect![[r#"
                a: never, node(s) didn't match Pod's node affinity/selector
                b: ok
                c: ok
            "#]],
            expect!["skip\n"],
        );
        // A term without requirements matches no node.
        let empty = r#"{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{}]}}"#;
        check(
            Value::Null,
            &affinity(empty),
            expect![[r#"
                a: never, node(s) didn't match Pod's node affinity/selector
                b: never, node(s) didn't match Pod's node affinity/selector
                c: never, node(s) didn't match Pod's node affinity/selector
            "#]],
            expect!["skip\n"],
        );
    }

    #[test]
    fn returns_node_names_of_match_fields() {
        let named = |lists: &[&str]| {
            let fields: Vec<String> = lists
                .iter()
                .map(|names| format!(r#"{{"key":"metadata.name","operator":"In","values":[{names}]}}"#))
                .collect();
            affinity(&format!(
                r#"{{"requiredDuringSchedulingIgnoredDuringExecution":{{"nodeSelectorTerms":[{{"matchFields":[{}]}}]}}}}"#,
                fields.join(",")
            ))
        };
        check(
            Value::Null,
            &named(&[r#""b""#]),
            expect![[r#"
                only b
                a: never, node(s) didn't match Pod's node affinity/selector
                b: ok
                c: never, node(s) didn't match Pod's node affinity/selector
            "#]],
            expect!["skip\n"],
        );
        check(
            Value::Null,
            &named(&[r#""b""#, r#""c""#]),
            expect!["reject never, pod affinity terms conflict\n"],
            expect!["skip\n"],
        );
    }

    #[test]
    fn adds_weights_of_preferred_terms() {
        let text = r#"{"preferredDuringSchedulingIgnoredDuringExecution":[
            {"weight":2,"preference":{"matchExpressions":[{"key":"size","operator":"Exists"}]}},
            {"weight":6,"preference":{"matchExpressions":[{"key":"size","operator":"In","values":["5"]}]}}]}"#;
        check(
            Value::Null,
            &affinity(text),
            expect!["skip\n"],
            expect![[r#"
                a: 2 -> 25
                b: 8 -> 100
                c: 0 -> 0
            "#]],
        );
    }

    #[test]
    fn applies_added_affinity_to_all_pods() {
        let added = json!({"addedAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "size", "operator": "Exists"}]}]}}});
        check(
            added,
            "pod p",
            expect![[r#"
                a: ok
                b: ok
                c: never, node(s) didn't match scheduler-enforced node affinity
            "#]],
            expect!["skip\n"],
        );
    }
}
