//! NodeAffinity: a pod runs only on nodes its node selector and affinity mean, and rather on those it
//! prefers. A configuration can add an affinity for all pods.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use serde::Deserialize;
use serde_json::Value;

use super::arguments;
use crate::framework::{
    Change, Cycle, Plain, Plugin, PreFilter, PreScore, Prepared, Requeue, Score, Scoring, Status, normalized,
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

/// Makes the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = arguments(args)?;
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
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let nodes = &cycle.pod.nodes;
        if nodes.is_anywhere() && self.added.is_none() {
            return Prepared::Skip;
        }
        let filter = Box::new(Plain(move |node: &NodeInfo| {
            if self.added.as_ref().is_some_and(|added| !added.matches(node)) {
                return Status::unresolvable("node(s) didn't match scheduler-enforced node affinity");
            }
            if !nodes.allows(node) {
                return Status::unresolvable("node(s) didn't match Pod's node affinity/selector");
            }
            Status::success()
        }));
        match named(nodes.required.as_ref()) {
            Some(names) if names.is_empty() => {
                Prepared::Reject(Status::unresolvable("pod affinity terms conflict"))
            }
            Some(names) => Prepared::Only(names.into_iter().map(str::to_owned).collect(), filter),
            None => Prepared::Filter(filter),
        }
    }
}

/// The names of nodes that the affinity is about, if each of its terms lists names.
fn named(required: Option<&NodeSelector>) -> Option<BTreeSet<&str>> {
    let terms = &required?.0;
    let mut names = BTreeSet::new();
    for term in terms {
        names.extend(term.names()?);
    }
    (!terms.is_empty()).then_some(names)
}

impl PreScore for NodeAffinity {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> Scoring<'c> {
        let preferred = &cycle.pod.nodes.preferred;
        if preferred.is_empty() && self.added_preferences.is_empty() {
            return Scoring::Skip;
        }
        Scoring::Score(Box::new(Preferred([&self.added_preferences, preferred])))
    }
}

struct Preferred<'c>([&'c [(i32, NodeTerm)]; 2]);

impl Score for Preferred<'_> {
    fn score(&self, node: &NodeInfo) -> i64 {
        let all = self.0.iter().flat_map(|terms| terms.iter());
        all.filter(|(_, term)| term.matches(node)).map(|(weight, _)| i64::from(*weight)).sum()
    }

    fn normalize(&self, _: &[NodeId], scores: &mut [i64]) {
        normalized(scores, false);
    }
}

impl Requeue for NodeAffinity {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        let Change::Node(pair) = change else { return false };
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

    use crate::testing::world;

    const NODES: &str = "
        node a zone=z1 label=size=3
        node b zone=z2 label=size=5
        node c";

    #[track_caller]
    fn check(args: Value, pod: &str, filtered: Expect, scored: Expect) {
        let plugin = super::make(&args).unwrap();
        let mut world = world(NODES);
        filtered.assert_eq(&world.filter(&plugin, pod));
        scored.assert_eq(&world.score(&plugin, pod));
    }

    fn affinity(text: &str) -> String {
        format!(r#"pod p {{"spec":{{"affinity":{{"nodeAffinity":{text}}}}}}}"#)
    }

    #[test]
    fn selectors_and_affinity_must_match() {
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
        let bigger = r#"{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[
            {"matchExpressions":[{"key":"size","operator":"Gt","values":["3"]}]},
            {"matchExpressions":[{"key":"size","operator":"DoesNotExist"}]}]}}"#;
        check(
            Value::Null,
            &affinity(bigger),
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
    fn names_narrow_the_search() {
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
    fn preferences_add_up() {
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
    fn an_added_affinity_holds_for_all_pods() {
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
