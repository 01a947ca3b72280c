use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const NOW: &str = "2026-01-01T12:00:00Z";

fn now() -> Timestamp {
    NOW.parse().expect("a time")
}

fn set(replicas: i32, more: Value) -> ReplicaSet {
    let mut value = json!({
        "metadata": {"name": "web", "namespace": "d", "uid": "set", "generation": 3},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web", "tier": "front"}}}},
    });
    merge(&mut value, more);
    serde_json::from_value(value).expect("a set")
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                merge(into.entry(name).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

/// `name word...`: `ready`, `failed`, `ending` (being deleted), `orphan`, `other` (owned by another set),
/// `stray` (labels do not match), `bare` (labels match, but some of the template's are missing).
fn pod(text: &str) -> Arc<Pod> {
    let mut words = text.split_whitespace();
    let name = words.next().expect("a name");
    let owner = |uid: &str| json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x", "uid": uid, "controller": true}]);
    let mut value = json!({
        "metadata": {"name": name, "namespace": "d", "uid": name, "ownerReferences": owner("set"),
            "labels": {"app": "web", "tier": "front"}},
        "spec": {"containers": [], "nodeName": "n"}, "status": {"phase": "Running"},
    });
    for word in words {
        match word {
            "ready" => {
                value["status"]["conditions"] =
                    json!([{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T11:59:55Z"}])
            }
            "failed" => value["status"]["phase"] = json!("Failed"),
            "ending" => value["metadata"]["deletionTimestamp"] = json!(NOW),
            "orphan" => value["metadata"]["ownerReferences"] = json!([]),
            "other" => value["metadata"]["ownerReferences"] = owner("else"),
            "stray" => value["metadata"]["labels"] = json!({"app": "db"}),
            "bare" => value["metadata"]["labels"] = json!({"app": "web"}),
            other => panic!("{other:?}"),
        }
    }
    Arc::new(serde_json::from_value(value).expect("a pod"))
}

fn pods(text: &str) -> Vec<Arc<Pod>> {
    text.split('|').map(str::trim).filter(|text| !text.is_empty()).map(pod).collect()
}

fn names(pods: &[Arc<Pod>]) -> String {
    pods.iter().map(|pod| pod.name()).collect::<Vec<_>>().join(" ")
}

#[track_caller]
fn check(set: &ReplicaSet, pods: &[Arc<Pod>], failure: Option<&str>, expected: Expect) {
    let selector = LabelSelector::parse("app=web").expect("a selector");
    let claim = claim(set, &selector, pods);
    let own = owned_pods(set, &selector, pods);
    let mut output = String::new();
    if !claim.has_no_changes() {
        output += &format!("adopt [{}] release [{}]\n", names(&claim.adopt), names(&claim.release));
    }
    match pod_change(set, &own.active, || own.active.clone(), now()) {
        PodChange::None => {}
        PodChange::Create(count) => output += &format!("create {count}\n"),
        PodChange::Delete(pods) => output += &format!("delete {}\n", names(&pods)),
    }
    let status = status(set, &own, failure, now());
    if set.status.as_ref() != Some(&status) {
        output += &format!("status {}\n", serde_json::to_string(&status).expect("a status"));
    }
    if let Some(at) = requeue_at(set, &own, now()) {
        output += &format!("requeue at {at}\n");
    }
    expected.assert_eq(&output);
}

#[test]
fn creates_and_deletes_pods_to_match_replicas() {
    check(
        &set(2, json!({})),
        &[],
        None,
        expect![[r#"
        create 2
        status {"observedGeneration":3,"replicas":0,"terminatingReplicas":0}
    "#]],
    );
    check(
        &set(2, json!({})),
        &pods("a ready | b | c ready bare"),
        None,
        expect![[r#"
        delete b
        status {"availableReplicas":2,"fullyLabeledReplicas":2,"observedGeneration":3,"readyReplicas":2,"replicas":3,"terminatingReplicas":0}
    "#]],
    );
    // Failed and terminating pods do not count. Terminating ones are reported in the status.
    check(
        &set(1, json!({})),
        &pods("a failed | b ending | c other | d"),
        None,
        expect![[r#"
        status {"fullyLabeledReplicas":1,"observedGeneration":3,"replicas":1,"terminatingReplicas":1}
    "#]],
    );
    check(
        &set(1000, json!({})),
        &[],
        None,
        expect![[r#"
        create 500
        status {"observedGeneration":3,"replicas":0,"terminatingReplicas":0}
    "#]],
    );
}

#[test]
fn matching_orphans_and_mismatched_pods_change_owner() {
    let all = pods("a | b orphan | c stray | d orphan stray | e orphan failed | f orphan ending");
    check(
        &set(1, json!({})),
        &all,
        None,
        expect![[r#"
        adopt [b] release [c]
        status {"fullyLabeledReplicas":1,"observedGeneration":3,"replicas":1,"terminatingReplicas":0}
    "#]],
    );
    // A set that is being deleted changes nothing.
    check(
        &set(3, json!({"metadata": {"deletionTimestamp": NOW}})),
        &all,
        None,
        expect![[r#"
        status {"fullyLabeledReplicas":1,"observedGeneration":3,"replicas":1,"terminatingReplicas":0}
    "#]],
    );
}

#[test]
fn failure_condition_is_set_once_and_removed() {
    let failing = json!({"status": {"replicas": 0, "observedGeneration": 3, "terminatingReplicas": 0,
        "conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "no"}]}});
    check(
        &set(1, json!({})),
        &[],
        Some("no room"),
        expect![[r#"
        create 1
        status {"conditions":[{"lastTransitionTime":"2026-01-01T12:00:00Z","message":"no room","reason":"FailedCreate","status":"True","type":"ReplicaFailure"}],"observedGeneration":3,"replicas":0,"terminatingReplicas":0}
    "#]],
    );
    check(
        &set(1, failing.clone()),
        &[],
        Some("still no room"),
        expect![[r#"
        create 1
    "#]],
    );
    check(
        &set(0, failing),
        &[],
        None,
        expect![[r#"
        status {"observedGeneration":3,"replicas":0,"terminatingReplicas":0}
    "#]],
    );
    check(
        &set(0, json!({})),
        &pods("a"),
        Some("cannot"),
        expect![[r#"
        delete a
        status {"conditions":[{"lastTransitionTime":"2026-01-01T12:00:00Z","message":"cannot","reason":"FailedDelete","status":"True","type":"ReplicaFailure"}],"fullyLabeledReplicas":1,"observedGeneration":3,"replicas":1,"terminatingReplicas":0}
    "#]],
    );
}

#[test]
fn requeues_until_pod_is_available() {
    check(
        &set(1, json!({"spec": {"minReadySeconds": 10}})),
        &pods("a ready"),
        None,
        expect![[r#"
        status {"fullyLabeledReplicas":1,"observedGeneration":3,"readyReplicas":1,"replicas":1,"terminatingReplicas":0}
        requeue at 2026-01-01T12:00:05Z
    "#]],
    );
}

const WORDS: &[&str] =
    &["", "ready", "failed", "ending", "orphan", "other", "stray", "orphan stray", "ready orphan"];

proptest! {
    /// From any pods, a few rounds lead to the desired number and a stable state, and pods of other owners
    /// are never changed.
    #[test]
    fn plan_is_stable_at_desired_replicas(replicas in 0..6_i32, words in prop::collection::vec(0..WORDS.len(), 0..8)) {
        let mut set = set(replicas, json!({}));
        let selector = LabelSelector::parse("app=web").expect("a selector");
        let mut all: Vec<Arc<Pod>> =
            words.iter().enumerate().map(|(i, word)| pod(&format!("p{i} {}", WORDS[*word]))).collect();
        let others = |all: &[Arc<Pod>]| all.iter().filter(|pod| pod.controller().is_some_and(|owner| owner.uid == "else")).count();
        let before = others(&all);
        for round in 0.. {
            prop_assert!(round < 5, "the plan does not converge");
            let claim = claim(&set, &selector, &all);
            for pod in &mut all {
                if claim.adopt.contains(pod) {
                    let owned = super::tests::pod(pod.name());
                    Arc::make_mut(pod).metadata.owner_references = owned.metadata.owner_references.clone();
                } else if claim.release.contains(pod) {
                    Arc::make_mut(pod).metadata.owner_references = None;
                }
            }
            let own = owned_pods(&set, &selector, &all);
            let change = pod_change(&set, &own.active, Vec::new, now());
            match &change {
                PodChange::None => {}
                PodChange::Create(count) => all.extend((0..*count).map(|i| pod(&format!("new{round}-{i} ready")))),
                PodChange::Delete(pods) => all.retain(|pod| !pods.contains(pod)),
            }
            let own = super::owned_pods(&set, &selector, &all);
            let status = status(&set, &own, None, now());
            if claim.has_no_changes() && change == PodChange::None && set.status.as_ref() == Some(&status) {
                break;
            }
            set.status = Some(status);
        }
        prop_assert_eq!(owned_pods(&set, &selector, &all).active.len(), replicas as usize);
        prop_assert_eq!(others(&all), before);
    }
}
