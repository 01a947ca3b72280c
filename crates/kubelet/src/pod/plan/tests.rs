use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::allocation::AllocationRecord;
use crate::observed::{CreatedFrom, Sandbox};
use crate::pod::back_off::MAX_BACK_OFF;
use crate::pod::resize::{ComputeResources, PodResources};
use crate::worker_state::{ContainerHealth, StartFailure};

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).expect("a time")
}

/// `init a b | main c | side d | Never`: container names by type (`side`: sidecar); the last word
/// is the restart policy.
fn pod(text: &str) -> Pod {
    let mut init_containers = Vec::new();
    let mut main_containers = Vec::new();
    let mut policy = "Always";
    let mut deleting = false;
    for part in text.split('|').map(str::trim) {
        let mut words = part.split_whitespace();
        match words.next() {
            Some("init") => init_containers.extend(words.map(|name| json!({"name": name}))),
            Some("side") => {
                init_containers.extend(words.map(|name| json!({"name": name, "restartPolicy": "Always"})))
            }
            Some("main") => main_containers.extend(words.map(|name| json!({"name": name}))),
            Some("deleting") => deleting = true,
            Some(word) => policy = if word == "Never" { "Never" } else { "OnFailure" },
            None => {}
        }
    }
    let metadata = match deleting {
        true => json!({"name": "web", "deletionTimestamp": "2026-01-01T00:00:00Z"}),
        false => json!({"name": "web"}),
    };
    let spec =
        json!({"initContainers": init_containers, "containers": main_containers, "restartPolicy": policy});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")
}

/// `s0 ready | s1 ready alone | a#0 running | b#1 exit 3 at 5 | c#1 running since 6 | d#2 running
/// in s0`. Containers without `in` are in the newest sandbox. A sandbox that is `alone` has lost
/// its network.
fn seen(text: &str) -> ObservedPod {
    let mut observed = ObservedPod::default();
    for part in text.split('|').map(str::trim).filter(|part| !part.is_empty()) {
        let words: Vec<&str> = part.split_whitespace().collect();
        if let Some(attempt) = words[0].strip_prefix('s').and_then(|number| number.parse().ok()) {
            let id = words[0].to_owned();
            let is_cut_off = words.contains(&"alone");
            let ready = words[1] == "ready";
            observed.sandboxes.push(Sandbox {
                id,
                attempt,
                ready,
                ips: Vec::new(),
                has_lost_network: is_cut_off,
            });
            continue;
        }
        let (name, attempt) = words[0].split_once('#').expect("name#attempt");
        let after = |word: &str| {
            let place = words.iter().position(|known| *known == word);
            time(place.and_then(|place| words.get(place + 1)?.parse().ok()).unwrap_or(0))
        };
        let state = match words[1] {
            "created" => State::Created,
            "running" => State::Running { since: after("since") },
            _ => State::Exited {
                since: after("since"),
                at: after("at"),
                code: words[2].parse().expect("a code"),
            },
        };
        observed.containers.push(ContainerRun {
            id: words[0].to_owned(),
            sandbox: words.iter().skip_while(|word| **word != "in").nth(1).copied().unwrap_or("").to_owned(),
            name: name.to_owned(),
            attempt: attempt.parse().expect("a number"),
            state,
            image: String::new(),
            image_id: String::new(),
            reason: String::new(),
            message: String::new(),
            user: None,
            created_from: CreatedFrom { image: None, resources: None },
            resources: None,
        });
    }
    observed.sandboxes.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.attempt));
    observed.containers.sort_by_key(|run| std::cmp::Reverse(run.attempt));
    let latest_sandbox = observed.sandboxes.first().map(|sandbox| sandbox.id.clone()).unwrap_or_default();
    let without_sandbox = observed.containers.iter_mut().filter(|run| run.sandbox.is_empty());
    without_sandbox.for_each(|run| run.sandbox.clone_from(&latest_sandbox));
    observed
}

fn describe(actions: &[Action]) -> String {
    let line = |action: &Action| match action {
        Action::CreateSandbox { attempt } => format!("sandbox #{attempt}\n"),
        Action::Start { container, attempt } => format!("start {container}#{attempt}\n"),
        Action::Stop(Stop { id, reason, after, .. }) if after.is_empty() => format!("stop {id} {reason:?}\n"),
        Action::Stop(Stop { id, reason, after, .. }) => {
            format!("stop {id} {reason:?} after {}\n", after.join(" "))
        }
        Action::Resize(resize) => {
            let ids: Vec<&str> = resize.updates.iter().map(|update| update.id.as_str()).collect();
            format!("resize {}\n", ids.join(" "))
        }
        Action::StopSandbox { id } => format!("stop sandbox {id}\n"),
        Action::Cleanup => "clear\n".to_owned(),
        Action::Recheck(at) => format!("recheck at {}\n", at.as_second() - 1_000_000),
    };
    actions.iter().map(line).collect()
}

#[track_caller]
fn check(spec: &str, observed: &str, now: i64, expected: Expect) {
    expected.assert_eq(&describe(&compute_pod_actions(
        &pod(spec),
        &seen(observed),
        &PodWorkerState::default(),
        time(now),
    )));
}

#[test]
fn starts_sandbox_then_init_containers_in_order_then_main_containers() {
    check("init i j | main a b", "", 0, expect![["sandbox #0\n"]]);
    check("init i j | main a b", "s0 ready", 0, expect![["start i#0\n"]]);
    check("init i j | main a b", "s0 ready | i#0 running", 0, expect![[""]]);
    check("init i j | main a b", "s0 ready | i#0 exit 0", 0, expect![["start j#0\n"]]);
    check(
        "init i j | main a b",
        "s0 ready | i#0 exit 0 | j#0 exit 0",
        0,
        expect![["start a#0\nstart b#0\n"]],
    );
    check("main a b", "s0 ready | a#0 running | b#0 running", 0, expect![[""]]);
    check("main a b", "s0 ready | a#0 running | b#0 created", 0, expect![["start b#0\n"]]);
}

#[test]
fn sidecars_start_before_and_stop_after_main_containers() {
    check("side d | main a", "s0 ready", 0, expect![["start d#0\n"]]);
    check("side d | main a", "s0 ready | d#0 running", 0, expect![["start a#0\n"]]);
    check("side d | main a", "s0 ready | d#0 exit 0 at 5 | a#0 running", 6, expect![["start d#1\n"]]);
    let ends = "side d e | main a | deleting";
    check(
        ends,
        "s0 ready | d#0 running | e#0 running | a#0 running",
        0,
        expect![[r#"
            stop d#0 PodTerminating after e#0 a#0
            stop e#0 PodTerminating after a#0
            stop a#0 PodTerminating
        "#]],
    );
    check(
        ends,
        "s0 ready | d#0 running | e#0 running | a#0 exit 0",
        0,
        expect![[r#"
            stop d#0 PodTerminating after e#0
            stop e#0 PodTerminating
        "#]],
    );
    check(
        ends,
        "s0 ready | d#0 running | e#0 exit 0 | a#0 exit 0",
        0,
        expect![["stop d#0 PodTerminating\n"]],
    );
    check(ends, "s0 ready | d#0 exit 0 | e#0 exit 0 | a#0 exit 0", 0, expect![["stop sandbox s0\n"]]);
    check(ends, "s0 gone | d#0 exit 0 | e#0 exit 0 | a#0 exit 0", 0, expect![["clear\n"]]);
}

#[test]
fn stopped_sidecars_do_not_block_started_containers() {
    let spec = "side d | init i | side e | main a b";
    let check = |text: &str, expected: Expect| {
        let mut worker_state = state_after_restarts(1, "d");
        worker_state.back_offs.extend(state_after_restarts(1, "e").back_offs);
        let seen = seen(&format!("s0 ready | {text}"));
        expected.assert_eq(&describe(&compute_pod_actions(&pod(spec), &seen, &worker_state, time(50))));
    };
    check(
        "d#1 exit 1 at 45 | i#0 exit 0 | e#0 running | a#0 exit 1 at 40 | b#0 running",
        expect![[r#"
            recheck at 55
            start a#1
        "#]],
    );
    check("d#0 exit 1 at 5 | i#0 running", expect![["start d#1\n"]]);
    check("d#1 exit 1 at 45 | i#0 exit 0", expect![["recheck at 55\nstart e#0\n"]]);
    // The runtime has no run of the init containers any more.
    check("a#0 created", expect![["start d#0\nstart e#0\nstart a#0\nstart b#0\n"]]);
    check("i#0 exit 0", expect![["start d#0\nstart e#0\n"]]);
    // Containers that have not started yet wait.
    check("d#1 exit 1 at 45", expect![["recheck at 55\n"]]);
    check("d#0 running | i#0 exit 0 | e#1 exit 1 at 45", expect![["recheck at 55\n"]]);
    let mut worker_state = PodWorkerState::default();
    worker_state.health.insert("d#0".into(), ContainerHealth { started: false, ready: false, dead: true });
    worker_state.health.insert("a#0".into(), ContainerHealth { started: true, ready: false, dead: true });
    let seen = seen("s0 ready | d#0 running | a#0 running");
    let describe_plan =
        |text: &str| describe(&compute_pod_actions(&pod(text), &seen, &worker_state, time(50)));
    assert_eq!(describe_plan("side d | main a"), "stop d#0 Unhealthy\nstop a#0 Unhealthy\n");
    assert_eq!(describe_plan("side d | main c"), "stop d#0 Unhealthy\n");
}

#[test]
fn all_containers_are_stopped_at_once() {
    let all = "s0 ready | a#0 running | b#0 running | c#1 running";
    check(
        "main a b c | deleting",
        all,
        0,
        expect![[r#"
            stop c#1 PodTerminating
            stop a#0 PodTerminating
            stop b#0 PodTerminating
        "#]],
    );
    // A sidecar does not wait for a running init container.
    check(
        "side d | init i | main a | deleting",
        "s0 ready | d#0 running | i#0 running",
        0,
        expect![[r#"
            stop d#0 PodTerminating
            stop i#0 PodTerminating
        "#]],
    );
    check(
        "side d | main a",
        "s0 gone | d#0 running | a#0 running",
        0,
        expect![[r#"
            stop d#0 SandboxLost after a#0
            stop a#0 SandboxLost
        "#]],
    );
}

/// The state after so many restarts of a container whose runs were short.
fn state_after_restarts(runs: u32, container: &str) -> PodWorkerState {
    let mut worker_state = PodWorkerState::default();
    for attempt in 0..runs {
        let ended = seen(&format!("{container}#{attempt} exit 1"));
        worker_state.record_restart(&ended.containers[0], time(0), MAX_BACK_OFF);
    }
    worker_state
}

#[test]
fn failing_container_has_restart_back_off() {
    let check = |runs: u32, text: &str, now: i64, expected: Expect| {
        let seen = seen(&format!("s0 ready | {text}"));
        expected.assert_eq(&describe(&compute_pod_actions(
            &pod("main a"),
            &seen,
            &state_after_restarts(runs, "a"),
            time(now),
        )));
    };
    check(0, "a#0 exit 1 at 5", 5, expect![["start a#1\n"]]);
    check(1, "a#1 exit 1 at 5", 5, expect![["recheck at 15\n"]]);
    check(1, "a#1 exit 1 at 5", 15, expect![["start a#2\n"]]);
    check(2, "a#2 exit 1 at 5", 15, expect![["recheck at 25\n"]]);
    check(9, "a#9 exit 1 at 5", 15, expect![["recheck at 65\n"]]);
    check(9, "a#9 exit 1 at 5", 65, expect![["recheck at 305\n"]]);
    check(9, "a#9 exit 1 at 700", 700, expect![["start a#10\n"]]);
    // The attempt number does not matter.
    check(0, "a#9 exit 1 at 5", 5, expect![["start a#10\n"]]);
    check(1, "a#9 exit 1 at 5", 5, expect![["recheck at 15\n"]]);
}

#[test]
fn start_failure_counts_as_an_exit() {
    let check = |reason: &str, runs: u32, text: &str, expected: Expect| {
        let mut worker_state = state_after_restarts(runs, "a");
        worker_state
            .failures
            .insert("a".into(), StartFailure::with_back_off(None, reason, String::new(), time(8)));
        let seen = seen(&format!("s0 ready | {text}"));
        expected.assert_eq(&describe(&compute_pod_actions(&pod("main a"), &seen, &worker_state, time(9))));
    };
    for reason in ["RunContainerError", "PostStartHookError"] {
        check(reason, 0, "a#0 exit 128 at 8", expect![["start a#1\n"]]);
        check(reason, 1, "a#1 exit 128 at 8", expect![["recheck at 18\n"]]);
        check(reason, 2, "a#2 exit 128 at 8", expect![["recheck at 28\n"]]);
        // The last run is gone, or its exit has not been observed yet.
        check(reason, 2, "a#1 exit 128 at 8", expect![["recheck at 18\n"]]);
        check(reason, 2, "a#2 created", expect![["recheck at 18\n"]]);
        check(reason, 0, "", expect![["recheck at 18\n"]]);
    }
    check("CreateContainerError", 0, "a#0 exit 1 at 1", expect![["recheck at 18\n"]]);
}

#[test]
fn finished_pod_does_not_restart() {
    check("main a | OnFailure", "s0 ready | a#0 exit 0 at 5", 9, expect![["stop sandbox s0\n"]]);
    check("main a | Never", "s0 gone | a#0 exit 7 at 5", 9, expect![[""]]);
    check("main a b | Never", "s0 ready | a#0 exit 7 at 5 | b#0 running", 9, expect![[""]]);
    check("init i | main a | Never", "s0 ready | i#0 exit 7 at 5", 9, expect![["stop sandbox s0\n"]]);
}

#[test]
fn lost_sandbox_is_replaced_after_all_containers_stop() {
    check("main a", "s0 gone | a#0 running", 0, expect![["stop a#0 SandboxLost\n"]]);
    check("main a", "s0 gone | a#0 exit 137", 0, expect![["sandbox #1\n"]]);
    check("main a", "s0 gone | s1 ready | a#0 exit 137", 0, expect![["start a#1\n"]]);
    // A sandbox without a network counts as lost.
    check("main a", "s0 ready alone | a#0 running", 0, expect![["stop a#0 SandboxLost\n"]]);
    check("main a", "s0 ready alone | a#0 exit 137", 0, expect![["sandbox #1\n"]]);
    let both = "s0 ready alone | s1 ready | a#0 exit 137";
    check("main a", both, 0, expect![["stop sandbox s0\nstart a#1\n"]]);
}

#[test]
fn new_sandbox_runs_init_containers_again() {
    let spec = "init i | side s | main a";
    let before = "i#0 exit 0 in s0 | s#0 exit 137 in s0 | a#0 exit 137 in s0";
    let check = |text: &str, expected: Expect| check(spec, &format!("{text} | {before}"), 50, expected);
    check("s0 gone", expect![["sandbox #1\n"]]);
    check("s0 gone | s1 ready", expect![["start i#1\n"]]);
    check("s0 gone | s1 ready | i#1 running", expect![[""]]);
    check("s0 gone | s1 ready | i#1 exit 0", expect![["start s#1\n"]]);
    check("s0 gone | s1 ready | i#1 exit 0 | s#1 running", expect![["start a#1\n"]]);
    check("s0 gone | s1 ready | i#1 exit 0 | s#1 running | a#1 running", expect![[""]]);
}

#[test]
fn unhealthy_containers_stop_and_failed_starts_wait() {
    let mut worker_state = PodWorkerState::default();
    worker_state.health.insert("a#0".into(), ContainerHealth { started: true, ready: false, dead: true });
    let failure = StartFailure {
        reason: "ErrImagePull".into(),
        message: String::new(),
        attempts: 1,
        failed_at: time(-9),
        retry_at: time(30),
    };
    worker_state.failures.insert("b".into(), failure);
    let actions =
        compute_pod_actions(&pod("main a b"), &seen("s0 ready | a#0 running"), &worker_state, time(9));
    assert_eq!(describe(&actions), "stop a#0 Unhealthy\nrecheck at 30\n");
}

proptest! {
    /// Executing the plans leads from any state to a running pod, or to a removed one if it is
    /// deleted.
    #[test]
    fn every_plan_ends_in_the_desired_state(
        ready in any::<bool>(),
        again in any::<bool>(),
        runs in prop::collection::vec((0..3usize, 0..3u8, 0..2i32), 0..6),
        deleting in any::<bool>()
    ) {
        let pod = pod(if deleting { "init i | main a b | deleting" } else { "init i | main a b" });
        let mut text = format!("s0 {}", if ready { "ready" } else { "gone" });
        if again {
            text += " | s1 ready";
        }
        for (attempt, (name, state, code)) in runs.iter().enumerate() {
            let state = match state { 0 => "created".to_owned(), 1 => "running".to_owned(), _ => format!("exit {code} at 0") };
            // Only the newest run of a container can still be running.
            text += &format!(" | {}#{attempt} {state} in s0", ["i", "a", "b"][*name]);
        }
        let mut observed = seen(&text);
        let mut worker_state = PodWorkerState::default();
        let mut now = 0;
        for _ in 0..60 {
            // Running init containers finish.
            let steps = observed.containers.iter_mut().filter(|run| run.name == "i" && run.state.is_running());
            steps.for_each(|run| run.state = State::Exited { since: time(now), at: time(now), code: 0 });
            let actions = compute_pod_actions(&pod, &observed, &worker_state, time(now));
            if actions.is_empty() || actions == [Action::Cleanup] {
                break;
            }
            for action in actions {
                if let Action::Start { container, .. } = &action && let Some(run) = observed.latest(container) {
                    worker_state.record_restart(run, time(now), MAX_BACK_OFF);
                }
                now = apply(&mut observed, action, now);
            }
        }
        let end = compute_pod_actions(&pod, &observed, &worker_state, time(now));
        if deleting {
            prop_assert!(observed.is_terminated(), "{observed:?}");
            prop_assert_eq!(end, [Action::Cleanup]);
        } else {
            prop_assert!(["a", "b"].iter().all(|name| observed.latest(name).is_some_and(|run| run.state.is_running())));
            prop_assert_eq!(end, []);
        }
    }
}

/// A runtime in which everything succeeds and init containers exit at once.
fn apply(observed: &mut ObservedPod, action: Action, now: i64) -> i64 {
    let ended = |code| State::Exited { since: time(now), at: time(now), code };
    match action {
        Action::CreateSandbox { attempt } => {
            let id = format!("s{attempt}");
            observed
                .sandboxes
                .insert(0, Sandbox { id, attempt, ready: true, ips: Vec::new(), has_lost_network: false });
        }
        Action::Start { container, attempt } => {
            let state = if container == "i" { ended(0) } else { State::Running { since: time(now) } };
            observed.containers.retain(|run| !(run.name == container && run.attempt == attempt));
            let mut run = seen(&format!("{container}#{attempt} created")).containers.remove(0);
            run.state = state;
            run.sandbox = observed.sandboxes.first().map(|sandbox| sandbox.id.clone()).unwrap_or_default();
            observed.containers.insert(0, run);
        }
        Action::Stop(Stop { id, .. }) => {
            observed.containers.iter_mut().filter(|run| run.id == id).for_each(|run| run.state = ended(137));
        }
        Action::StopSandbox { id } => {
            observed
                .sandboxes
                .iter_mut()
                .filter(|sandbox| sandbox.id == id)
                .for_each(|sandbox| sandbox.ready = false);
        }
        Action::Recheck(at) => return at.as_second() - 1_000_000,
        Action::Cleanup | Action::Resize(_) => {}
    }
    now
}

#[test]
fn changed_image_or_resources_restart_or_resize_the_container() {
    let spec = |image: &str, cpu: &str, policy: &str| -> Pod {
        let resources = json!({"requests": {"cpu": cpu}});
        let policies = json!([{"resourceName": "cpu", "restartPolicy": policy}]);
        let main = json!({"name": "a", "image": image, "resources": resources, "resizePolicy": policies});
        serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": {"containers": [main]}}))
            .expect("a pod")
    };
    let mut observed = seen("s0 ready | a#0 running");
    let resources = Some(r#"{"limits":null,"requests":{"cpu":"1"}}"#.to_owned());
    observed.containers[0].created_from = CreatedFrom { image: Some("web:1".into()), resources };
    let check = |pod: &Pod, worker_state: &PodWorkerState, expected: &str| {
        assert_eq!(describe(&compute_pod_actions(pod, &observed, worker_state, time(9))), expected);
    };
    let mut worker_state = PodWorkerState::default();
    check(&spec("web:1", "1", "NotRequired"), &worker_state, "");
    check(&spec("web:2", "1", "NotRequired"), &worker_state, "stop a#0 SpecChanged\n");
    check(&spec("web:1", "2", "RestartContainer"), &worker_state, "stop a#0 Resized\n");
    check(&spec("web:1", "2", "NotRequired"), &worker_state, "resize a#0\n");
    check(&spec("web:1", "1000m", "NotRequired"), &worker_state, "");
    let given = |pod: &Pod| {
        let container_resources = ComputeResources { cpu_request: 2000, ..ComputeResources::default() };
        AllocationRecord {
            given: [("a#0".to_owned(), container_resources)].into(),
            whole: PodResources::of(pod),
            ..AllocationRecord::default()
        }
    };
    worker_state.record = Some(given(&spec("web:1", "2", "NotRequired")));
    check(&spec("web:1", "2", "NotRequired"), &worker_state, "");
    // Only the limits of the pod are too low. The container does not change.
    worker_state.record = Some(given(&spec("web:1", "1", "NotRequired")));
    check(&spec("web:1", "2", "NotRequired"), &worker_state, "resize \n");
    // A failed resize is retried after a delay.
    worker_state.resize_status.record_error("no", None, time(5));
    check(&spec("web:1", "2", "NotRequired"), &worker_state, "recheck at 15\n");
}

#[test]
fn container_stopped_for_a_resize_starts_immediately() {
    let check = |policy: &str, observed: &str, is_resized: bool, expected: &str| {
        let mut worker_state = PodWorkerState::default();
        let observed = seen(observed);
        let before = observed.previous("a").cloned();
        // It has restarted before, so that it has a back-off now.
        before.iter().for_each(|run| worker_state.record_restart(run, time(1), MAX_BACK_OFF));
        worker_state
            .stopped_for_resize
            .extend(is_resized.then(|| observed.latest("a").expect("a run").id.clone()));
        let pod = pod(&format!("main a | {policy}"));
        assert_eq!(is_finished(&pod, &observed, &worker_state), expected.starts_with("stop"));
        assert_eq!(
            describe(&compute_pod_actions(&pod, &observed, &worker_state, time(3))),
            expected,
            "{policy} {is_resized}"
        );
    };
    check("OnFailure", "s0 ready | a#0 exit 0 at 2", true, "start a#1\n");
    check("OnFailure", "s0 ready | a#0 exit 0 at 2", false, "stop sandbox s0\n");
    check("Always", "s0 ready | a#0 exit 1 at 1 | a#1 exit 137 at 2", true, "start a#2\n");
    check("Always", "s0 ready | a#0 exit 1 at 1 | a#1 exit 137 at 2", false, "recheck at 12\n");
}

#[test]
fn pod_is_resized_before_containers_start() {
    let resources = |cpu: &str| json!({"requests": {"cpu": cpu}});
    let main = |name: &str| json!({"name": name, "resources": resources("2")});
    let init = json!({"name": "i", "resources": resources("2")});
    let spec = json!({"containers": [main("a"), main("b")], "initContainers": [init]});
    let pod: Pod = serde_json::from_value(json!({"metadata": {}, "spec": spec})).expect("a pod");
    let worker_state =
        PodWorkerState { record: Some(AllocationRecord::default()), ..PodWorkerState::default() };
    let check = |observed: &str, expected: &str| {
        let mut observed = seen(observed);
        for run in &mut observed.containers {
            run.created_from.resources = Some(json!({"requests": {"cpu": "1"}}).to_string());
        }
        assert_eq!(
            describe(&compute_pod_actions(&pod, &observed, &worker_state, time(9))),
            expected,
            "{observed:?}"
        );
    };
    check("", "sandbox #0\n");
    check("s0 ready", "resize \nstart i#0\n");
    check("s0 ready | i#0 running", "resize i#0\n");
    check("s0 ready | i#0 exit 0 | a#0 running", "resize a#0\nstart b#0\n");
}

#[test]
fn container_restart_rules_override_the_pod_policy() {
    let check = |pod_policy: &str, own: serde_json::Value, code: i32, expected: bool| {
        let mut container = json!({"name": "c"});
        container.as_object_mut().expect("an object").extend(own.as_object().expect("an object").clone());
        let pod = json!({"metadata": {}, "spec": {"restartPolicy": pod_policy, "containers": [container]}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let container = &pod.spec.as_ref().expect("a spec").containers[0];
        assert_eq!(should_restart(&pod, container, code), expected, "{pod_policy} {own} {code}");
    };
    let rule = |operator: &str, codes: [i32; 2]| {
        let codes = json!({"operator": operator, "values": codes});
        json!({"restartPolicy": "Never", "restartPolicyRules": [{"action": "Restart", "exitCodes": codes}]})
    };
    check("Always", json!({}), 0, true);
    check("OnFailure", json!({}), 0, false);
    check("Always", json!({"restartPolicy": "Never"}), 1, false);
    check("Never", json!({"restartPolicy": "OnFailure"}), 1, true);
    check("Never", json!({"restartPolicy": "OnFailure"}), 0, false);
    check("Never", rule("In", [42, 43]), 42, true);
    check("Always", rule("In", [42, 43]), 1, false);
    check("Always", rule("NotIn", [0, 1]), 2, true);
    check("Always", rule("NotIn", [0, 1]), 1, false);
}

#[test]
fn pod_is_finished_when_no_container_will_restart() {
    let mut pod = pod("main a b");
    let containers = &mut pod.spec.as_mut().expect("a spec").containers;
    containers.iter_mut().for_each(|container| container.restart_policy = Some("Never".to_owned()));
    let over = |text: &str| is_finished(&pod, &seen(text), &PodWorkerState::default());
    assert!(!over("s0 ready | a#0 exit 1 at 1 | b#0 running"));
    assert!(over("s0 ready | a#0 exit 1 at 1 | b#0 exit 0 at 2"));
}

#[test]
fn exit_code_rule_restarts_all_containers() {
    let mut pod = pod("init i | side s | main a b | Never");
    let codes = json!({"operator": "In", "values": [42]});
    let rule = json!({"action": "RestartAllContainers", "exitCodes": codes});
    let spec = pod.spec.as_mut().expect("a spec");
    spec.containers[0].restart_policy = Some("Never".to_owned());
    spec.containers[0].restart_policy_rules = serde_json::from_value(json!([rule])).expect("rules");
    let check = |text: &str, expected: Expect| {
        let (seen, worker_state) = (seen(text), PodWorkerState::default());
        assert!(!is_finished(&pod, &seen, &worker_state), "{text}");
        expected.assert_eq(&describe(&compute_pod_actions(&pod, &seen, &worker_state, time(50))));
    };
    // No rule matches this exit code.
    check("s0 ready | i#0 exit 0 | s#0 running | a#0 exit 1 at 9 | b#0 running", expect![""]);
    check(
        "s0 ready | i#0 exit 0 | s#0 running | a#0 exit 42 at 9 | b#0 running",
        expect![[r#"
            stop b#0 RestartAllContainers
            stop s#0 RestartAllContainers
        "#]],
    );
    check(
        "s0 ready | i#0 exit 0 | s#0 running | a#0 exit 42 at 9 | b#0 exit 0 at 3",
        expect![[r#"
            stop s#0 RestartAllContainers
        "#]],
    );
    let past = "s0 ready | i#0 exit 0 | s#0 exit 137 at 10 | a#0 exit 42 at 9 | b#0 exit 137 at 10";
    check(
        past,
        expect![[r#"
            start i#1
        "#]],
    );
    check(&format!("{past} | i#1 running since 11"), expect![""]);
    let init_done = format!("{past} | i#1 exit 0 at 12 since 11 | s#1 running since 13");
    check(
        &init_done,
        expect![[r#"
            start a#1
            start b#1
        "#]],
    );
    let all_running = format!("{init_done} | a#1 running since 14 | b#1 running since 14");
    check(&all_running, expect![""]);
    // Once more, without back-off.
    check(
        &all_running.replace("a#1 running since 14", "a#1 exit 42 at 15 since 14"),
        expect![[r#"
            stop b#1 RestartAllContainers
            stop s#1 RestartAllContainers
        "#]],
    );
    // Its image was being pulled when the other container exited.
    check(
        "s0 ready | i#0 exit 0 | s#0 exit 137 at 10 | a#0 exit 42 at 9 | b#0 running since 10",
        expect![[r#"
            stop b#0 RestartAllContainers
        "#]],
    );
    let late = past.replace("b#0 exit 137 at 10", "b#0 exit 137 at 11 since 10");
    check(
        &late,
        expect![[r#"
            start i#1
        "#]],
    );
    check(
        &format!("{late} | i#1 exit 0 at 12 since 11 | s#1 running since 13"),
        expect![[r#"
            start a#1
            start b#1
        "#]],
    );
}

#[test]
fn sidecar_restart_does_not_restart_all_containers() {
    let mut pod = pod("side s | init i | main a b");
    let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}});
    let spec = pod.spec.as_mut().expect("a spec");
    spec.containers[0].restart_policy_rules = serde_json::from_value(json!([rule])).expect("rules");
    let check = |text: &str, expected: Expect| {
        expected.assert_eq(&describe(&compute_pod_actions(
            &pod,
            &seen(text),
            &PodWorkerState::default(),
            time(50),
        )));
    };
    let past = "s0 ready | i#0 exit 0 | a#0 exit 42 at 9 | b#0 exit 137 at 11 since 10";
    check(
        &format!("{past} | s#1 running since 12"),
        expect![[r#"
            start i#1
        "#]],
    );
    let init_done = "i#1 exit 0 at 14 since 13 | a#1 running since 15 | b#1 running since 15";
    check(&format!("{past} | s#2 exit 1 at 29 since 20 | s#3 running since 30 | {init_done}"), expect![""]);
}

#[test]
fn main_containers_restart_without_waiting_for_each_other() {
    let mut pod = pod("main a b | Never");
    let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}});
    let spec = pod.spec.as_mut().expect("a spec");
    spec.containers[1].restart_policy_rules = serde_json::from_value(json!([rule])).expect("rules");
    // The first container cannot be started, which must not stop the other one again and again.
    let seen = seen("s0 ready | a#0 exit 137 at 10 | b#0 exit 42 at 9 | b#1 running since 11");
    expect![[r#"
        start a#1
    "#]]
    .assert_eq(&describe(&compute_pod_actions(&pod, &seen, &PodWorkerState::default(), time(50))));
}

#[test]
fn failed_start_counts_as_a_restart() {
    let mut pod = pod("main a b");
    let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}});
    let spec = pod.spec.as_mut().expect("a spec");
    spec.containers[0].restart_policy_rules = serde_json::from_value(json!([rule])).expect("rules");
    let mut seen = seen("s0 ready | a#0 exit 42 at 9 | a#1 running since 10 | b#1 exit 128 at 11");
    for run in &mut seen.containers {
        if let State::Exited { since, code: 128, .. } = &mut run.state {
            *since = Timestamp::UNIX_EPOCH;
        }
    }
    expect![[r#"
        recheck at 21
    "#]]
    .assert_eq(&describe(&compute_pod_actions(&pod, &seen, &state_after_restarts(1, "b"), time(12))));
}

#[test]
fn clock_set_back_does_not_restart_containers() {
    let mut pod = pod("init i | main a b");
    let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}});
    let spec = pod.spec.as_mut().expect("a spec");
    spec.containers[0].restart_policy_rules = serde_json::from_value(json!([rule])).expect("rules");
    let check = |at: i64, expected: Expect| {
        let text = "s0 ready | i#0 exit 0 | a#0 exit 42 at 99 | a#1 running since 20 | b#0 running since 20";
        let seen = ObservedPod { at: Some(time(at)), ..seen(text) };
        expected.assert_eq(&describe(&compute_pod_actions(
            &pod,
            &seen,
            &PodWorkerState::default(),
            time(at),
        )));
    };
    check(98, expect![""]);
    check(
        99,
        expect![[r#"
            stop a#1 RestartAllContainers
            stop b#0 RestartAllContainers
        "#]],
    );
}

#[test]
fn suspended_pod_is_stopped_and_does_not_restart() {
    let check = |spec: &str, observed: &str, expected: Expect| {
        let worker_state = PodWorkerState { is_suspended: true, ..PodWorkerState::default() };
        let (pod, seen) = (pod(spec), seen(observed));
        expected.assert_eq(&describe(&compute_pod_actions(&pod, &seen, &worker_state, time(9))));
        assert!(!is_finished(&pod, &seen, &worker_state), "the pod continues after the reboot");
    };
    check(
        "side d | main a",
        "s0 ready | d#0 running | a#0 running",
        expect![[r#"
            stop d#0 PodTerminating after a#0
            stop a#0 PodTerminating
        "#]],
    );
    check("main a", "s0 ready | a#0 exit 143 at 5", expect![["stop sandbox s0\n"]]);
    check("main a", "s0 gone | a#0 exit 143 at 5", expect![[""]]);
    check("main a", "", expect![[""]]);
    // A pod that is not suspended restarts.
    let again = compute_pod_actions(
        &pod("main a"),
        &seen("s0 gone | a#0 exit 143 at 5"),
        &PodWorkerState::default(),
        time(9),
    );
    assert_eq!(describe(&again), "sandbox #1\n");
}
