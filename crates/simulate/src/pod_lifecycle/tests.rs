use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::json;

use super::*;

const START_SECONDS: i64 = 1_000_000;

fn pod(spec: serde_json::Value) -> Pod {
    let value = json!({"metadata": {"name": "web"}, "spec": spec});
    serde_json::from_value(value).expect("a pod")
}

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(START_SECONDS + second).expect("a time")
}

fn environment() -> PodEnvironment<'static> {
    PodEnvironment { node_ip: "198.18.0.0", pod_ip: "10.128.1.1", missing: "no/such:v1" }
}

fn describe(second: i64, snapshot: &PodSnapshot) -> String {
    let status = &snapshot.status;
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let containers = containers.map(|container| {
        let state = container.state.clone().unwrap_or_default();
        let state = match (state.running, state.waiting, state.terminated) {
            (Some(_), ..) => "running".to_owned(),
            (_, Some(waiting), _) => waiting.reason.unwrap_or_default(),
            (_, _, Some(end)) => format!("exit {}", end.exit_code),
            _ => "?".to_owned(),
        };
        let ready = if container.ready { " ready" } else { "" };
        format!("{} {state}{ready} restarts={}", container.name, container.restart_count)
    });
    let until = snapshot
        .next_change
        .map(|at| format!(" until {}", at.as_second() - START_SECONDS))
        .unwrap_or_default();
    let phase = status.phase.as_deref().unwrap_or_default();
    format!("{second}: {phase} [{}]{until}\n", containers.collect::<Vec<_>>().join(", "))
}

/// Prints the pod at each time at which it changes, at most five times.
#[track_caller]
fn check(spec: serde_json::Value, expected: Expect) {
    let mut pod = pod(spec);
    let mut text = String::new();
    let mut second = 0;
    for _ in 0..5 {
        let snapshot = snapshot_at(&pod, &environment(), time(second));
        text += &describe(second, &snapshot);
        pod.status = Some(snapshot.status);
        assert_eq!(
            snapshot_at(&pod, &environment(), time(second)).status,
            pod.status.clone().unwrap(),
            "computed twice at the same time"
        );
        match snapshot.next_change {
            Some(next) => second = next.as_second() - START_SECONDS,
            None => break,
        }
    }
    expected.assert_eq(&text);
}

#[test]
fn unknown_command_never_exits() {
    check(
        json!({"containers": [{"name": "a", "image": "nginx"}]}),
        expect![[r#"
        0: Running [a running ready restarts=0]
    "#]],
    );
}

#[test]
fn pod_with_restart_policy_never_fails() {
    check(
        json!({"restartPolicy": "Never", "containers": [{"name": "a", "command": ["sh", "-c", "sleep 2; exit 3"]}]}),
        expect![[r#"
            0: Running [a running ready restarts=0] until 2
            2: Failed [a exit 3 restarts=0]
        "#]],
    );
}

#[test]
fn failing_container_has_restart_back_off() {
    check(
        json!({"containers": [{"name": "a", "command": ["sh", "-c", "sleep 1; exit 1"]}]}),
        expect![[r#"
        0: Running [a running ready restarts=0] until 1
        1: Running [a running ready restarts=1] until 2
        2: Running [a CrashLoopBackOff restarts=1] until 12
        12: Running [a running ready restarts=2] until 13
        13: Running [a CrashLoopBackOff restarts=2] until 33
    "#]],
    );
}

#[test]
fn init_containers_run_first() {
    check(
        json!({
            "initContainers": [{"name": "i", "command": ["sleep", "3"]}],
            "containers": [{"name": "a", "readinessProbe": {"initialDelaySeconds": 5}}]
        }),
        expect![[r#"
            0: Pending [i running restarts=0, a PodInitializing restarts=0] until 3
            3: Running [i exit 0 ready restarts=0, a running restarts=0] until 8
            8: Running [i exit 0 ready restarts=0, a running ready restarts=0]
        "#]],
    );
}

#[test]
fn deleted_pod_is_terminated() {
    let mut pod = pod(json!({"containers": [{"name": "a"}]}));
    pod.status = Some(snapshot_at(&pod, &environment(), time(0)).status);
    let status = terminated_status(&pod, time(5));
    assert_eq!(
        describe(5, &PodSnapshot { status, next_change: None }),
        "5: Failed [a exit 143 restarts=0]\n"
    );
}

proptest! {
    /// The lifecycle does not depend on when and how often it is computed.
    #[test]
    fn snapshot_is_the_same_with_and_without_status_updates(update_seconds in prop::collection::vec(0i64..100, 0..8), exit in 0..2) {
        let script = format!("sleep 2; exit {exit}");
        let mut updated = pod(json!({"containers": [{"name": "a", "command": ["sh", "-c", script]}]}));
        updated.status = Some(snapshot_at(&updated, &environment(), time(0)).status);
        let mut not_updated = updated.clone();
        let mut update_seconds = update_seconds;
        update_seconds.sort_unstable();
        for second in update_seconds {
            updated.status = Some(snapshot_at(&updated, &environment(), time(second)).status);
        }
        let (a, b) = (snapshot_at(&updated, &environment(), time(100)), snapshot_at(&not_updated, &environment(), time(100)));
        not_updated.status = None;
        prop_assert_eq!(a.status.container_statuses, b.status.container_statuses);
        prop_assert_eq!(a.next_change, b.next_change);
    }
}

#[test]
fn missing_images_are_not_started() {
    let container =
        |image: &str, policy: &str| json!({"name": "c", "image": image, "imagePullPolicy": policy});
    let check = |container, expected| {
        let snapshot = snapshot_at(&pod(json!({"containers": [container]})), &environment(), time(0));
        assert_eq!(describe(0, &snapshot), expected);
    };
    check(container("no/such:v1", "Always"), "0: Pending [c ImagePullBackOff restarts=0]\n");
    check(container("no/such:v1", "Never"), "0: Pending [c ErrImageNeverPull restarts=0]\n");
    check(container("no/such:v2", "Never"), "0: Running [c running ready restarts=0]\n");
}

#[test]
fn init_containers_exit_and_sidecars_stop_with_the_pod() {
    check(
        json!({
            "restartPolicy": "Never",
            "initContainers": [
                {"name": "wait", "command": ["sh", "-c", "until nslookup db; do sleep 1; done"]},
                {"name": "mesh", "restartPolicy": "Always"},
                {"name": "setup"},
            ],
            "containers": [{"name": "a", "command": ["sleep", "3"]}]
        }),
        expect![[r#"
            0: Pending [wait running restarts=0, mesh PodInitializing restarts=0, setup PodInitializing restarts=0, a PodInitializing restarts=0] until 2
            2: Pending [wait exit 0 ready restarts=0, mesh running ready restarts=0, setup running restarts=0, a PodInitializing restarts=0] until 4
            4: Running [wait exit 0 ready restarts=0, mesh running ready restarts=0, setup exit 0 ready restarts=0, a running ready restarts=0] until 7
            7: Succeeded [wait exit 0 restarts=0, mesh exit 143 restarts=0, setup exit 0 restarts=0, a exit 0 restarts=0]
        "#]],
    );
}
