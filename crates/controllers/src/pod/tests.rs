use expect_test::{Expect, expect};
use serde_json::json;

use super::*;

const NOW: &str = "2026-01-01T12:00:00Z";

fn pod(name: &str, status: serde_json::Value, spec: serde_json::Value) -> Arc<Pod> {
    let metadata = json!({"name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"});
    let value = json!({"metadata": metadata, "spec": spec, "status": status});
    Arc::new(serde_json::from_value(value).expect("a pod"))
}

/// `name word...`, where a word is `on=NODE`, a phase, `ready=SECONDS` ago, `cost=N`, `restarts=N` or
/// `age=SECONDS`.
fn parse(text: &str) -> Arc<Pod> {
    let mut words = text.split_whitespace();
    let name = words.next().expect("a name");
    let now: Timestamp = NOW.parse().expect("a time");
    let time_before_now = |seconds: &str| {
        let seconds: i64 = seconds.parse().expect("seconds");
        (now - SignedDuration::from_secs(seconds)).to_string()
    };
    let (mut status, mut spec) = (json!({"phase": "Running"}), json!({"containers": [], "nodeName": "n"}));
    let mut metadata = json!({"name": name, "uid": name, "creationTimestamp": time_before_now("100")});
    for word in words {
        match word.split_once('=') {
            None => status["phase"] = json!(word),
            Some(("on", node)) => spec["nodeName"] = json!(node),
            Some(("ready", seconds)) => {
                status["conditions"] = json!([{"type": "Ready", "status": "True", "lastTransitionTime": time_before_now(seconds)}])
            }
            Some(("cost", cost)) => metadata["annotations"] = json!({DELETION_COST: cost}),
            Some(("age", seconds)) => metadata["creationTimestamp"] = json!(time_before_now(seconds)),
            Some(("restarts", count)) => {
                let count: i32 = count.parse().expect("a count");
                status["containerStatuses"] = json!([
                    {"name": "c", "restartCount": count, "image": "", "imageID": "", "ready": true}])
            }
            Some(other) => panic!("{other:?}"),
        }
    }
    let value = json!({"metadata": metadata, "spec": spec, "status": status});
    Arc::new(serde_json::from_value(value).expect("a pod"))
}

#[track_caller]
fn check_order(pods: &str, expected: Expect) {
    let mut pods: Vec<_> = pods.split('|').map(parse).collect();
    let related = pods.clone();
    sort_for_deletion(&mut pods, &related, NOW.parse().expect("a time"));
    let names: Vec<&str> = pods.iter().map(|pod| pod.name()).collect();
    expected.assert_eq(&names.join(" "));
}

#[test]
fn pods_are_sorted_by_deletion_priority() {
    check_order("a on=x ready=9 | b Pending on= | c on=x", expect!["b c a"]);
    check_order("a Running | b Unknown | c Pending", expect!["c b a"]);
    check_order("a ready=9 cost=5 | b ready=9 cost=-5 | c ready=9", expect!["b c a"]);
    check_order("a ready=9 cost=+5 | b ready=9 cost=-1 | c ready=9 cost=007", expect!["b a c"]);
    check_order("a on=x ready=9 | b on=y ready=9 | c on=y ready=9", expect!["b c a"]);
    check_order("a ready=90 | b ready=4", expect!["b a"]);
    check_order("a ready=90 | b ready=9 restarts=3", expect!["b a"]);
    check_order("a ready=9 | b ready=9 restarts=3", expect!["b a"]);
    check_order("a age=1000 | b age=10", expect!["b a"]);
    // Of about the same age: ordered by UID.
    check_order("a age=100 | b age=99", expect!["a b"]);
    check_order("b age=100 | a age=99", expect!["a b"]);
}

#[test]
fn pod_is_available_after_min_ready_seconds() {
    let now: Timestamp = NOW.parse().expect("a time");
    for (text, pause, expected) in [
        ("a", 0, false),
        ("a ready=0", 0, true),
        ("a ready=9", 10, false),
        ("a ready=10", 10, true),
        ("a ready=11", 10, true),
    ] {
        assert_eq!(is_available(&parse(text), pause, now), expected, "{text} {pause}");
    }
    let pods = [parse("a ready=9"), parse("b ready=3"), parse("c ready=12"), parse("d")];
    assert_eq!(next_available(&pods, 10, now), Some(now + SignedDuration::from_secs(1)));
    assert_eq!(next_available(&pods, 0, now), None);
}

#[test]
fn sidecar_restarts_are_counted_without_init_containers() {
    let status = json!({"initContainerStatuses": [
        {"name": "side", "restartCount": 2, "image": "", "imageID": "", "ready": true},
        {"name": "init", "restartCount": 7, "image": "", "imageID": "", "ready": true}]});
    let spec = json!({"containers": [], "initContainers": [
        {"name": "side", "restartPolicy": "Always"}, {"name": "init"}]});
    assert_eq!(restarts(&pod("a", status, spec)), (0, 2));
}
