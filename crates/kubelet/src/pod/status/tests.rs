use expect_test::{Expect, expect};
use k8s_openapi::api::core::v1::LinuxContainerUser;
use serde_json::json;

use super::*;
use crate::memory::{Failure, Health};
use crate::observed::Sandbox;
use crate::pod::back_off::LONGEST;

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).expect("a time")
}

fn pod(policy: &str, inits: &[&str]) -> Pod {
    let inits: Vec<_> = inits.iter().map(|name| json!({"name": name, "image": "init"})).collect();
    let spec = json!({
        "restartPolicy": policy,
        "initContainers": inits,
        "containers": [{"name": "main", "image": "web:1"}]
    });
    let metadata = json!({"name": "crash", "namespace": "default", "uid": "1234"});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")
}

fn run(name: &str, attempt: u32, state: State) -> Ran {
    Ran {
        id: format!("{name}{attempt}"),
        sandbox: "s".into(),
        name: name.to_owned(),
        attempt,
        state,
        image: "web:1".into(),
        image_id: "sha256:1".into(),
        reason: String::new(),
        message: String::new(),
        user: None,
        made_of: crate::observed::MadeOf::default(),
        resources: None,
    }
}

fn exited(code: i32, at: i64) -> State {
    State::Exited { since: time(0), at: time(at), code }
}

fn seen(containers: Vec<Ran>) -> Observed {
    let sandbox =
        Sandbox { id: "s".into(), attempt: 0, ready: true, ips: vec!["10.42.0.7".into()], is_cut_off: false };
    Observed { sandboxes: vec![sandbox], containers, at: None }
}

#[track_caller]
fn check(pod: &Pod, seen: &Observed, memory: &Memory, now: i64, expected: Expect) {
    let host = Host { ips: &["192.0.2.1".to_owned()], runtime: "containerd", recursive: true };
    let status = status(pod, seen, memory, &host, time(now));
    let mut text = format!("{} {}\n", status.phase.unwrap_or_default(), status.pod_ip.unwrap_or_default());
    for container in status.init_container_statuses.iter().chain(&status.container_statuses).flatten() {
        let state = container.state.clone().unwrap_or_default();
        let told = |state: &ContainerState| match (&state.waiting, &state.running, &state.terminated) {
            (Some(waiting), ..) => {
                let message = waiting.message.as_deref().map(|message| format!(" ({message})"));
                format!("{}{}", waiting.reason.as_deref().unwrap_or(""), message.unwrap_or_default())
            }
            (_, Some(_), _) => "running".to_owned(),
            (.., Some(end)) => format!("{} {}", end.reason.as_deref().unwrap_or(""), end.exit_code),
            _ => "-".to_owned(),
        };
        let last = told(&container.last_state.clone().unwrap_or_default());
        let (name, ready, restarts) = (&container.name, container.ready, container.restart_count);
        text += &format!("{name}: {}, last {last}, ready {ready}, restarts {restarts}\n", told(&state));
    }
    for condition in status.conditions.iter().flatten() {
        text += &format!(
            "{}={} {}\n",
            condition.type_,
            condition.status,
            condition.reason.as_deref().unwrap_or("")
        );
    }
    let text: String = text.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    expected.assert_eq(&text);
}

#[test]
fn a_pod_that_has_just_come() {
    check(
        &pod("Always", &[]),
        &Observed::default(),
        &Memory::default(),
        0,
        expect![[r#"
        Pending
        main: ContainerCreating, last -, ready false, restarts 0
        PodReadyToStartContainers=False
        Initialized=True
        Ready=False ContainersNotReady
        ContainersReady=False ContainersNotReady
        PodScheduled=True
    "#]],
    );
}

#[test]
fn a_pod_that_runs() {
    let since = State::Running { since: time(1) };
    check(
        &pod("Always", &[]),
        &seen(vec![run("main", 0, since)]),
        &Memory::default(),
        2,
        expect![[r#"
        Running 10.42.0.7
        main: running, last -, ready true, restarts 0
        PodReadyToStartContainers=True
        Initialized=True
        Ready=True
        ContainersReady=True
        PodScheduled=True
    "#]],
    );
}

#[test]
fn a_pod_whose_first_steps_are_under_way() {
    let running = seen(vec![run("prepare", 0, State::Running { since: time(1) })]);
    check(
        &pod("Always", &["prepare"]),
        &running,
        &Memory::default(),
        2,
        expect![[r#"
        Pending 10.42.0.7
        prepare: running, last -, ready false, restarts 0
        main: PodInitializing, last -, ready false, restarts 0
        PodReadyToStartContainers=True
        Initialized=False ContainersNotInitialized
        Ready=False ContainersNotReady
        ContainersReady=False ContainersNotReady
        PodScheduled=True
    "#]],
    );
}

#[test]
fn pod_is_not_ready_before_its_sidecars_are() {
    let mut pod = pod("Always", &["beside"]);
    let beside = &mut pod.spec.as_mut().expect("a spec").init_containers.as_mut().expect("containers")[0];
    beside.restart_policy = Some("Always".to_owned());
    beside.readiness_probe = Some(Default::default());
    let running = |name: &str| run(name, 0, State::Running { since: time(1) });
    let seen = seen(vec![running("beside"), running("main")]);
    let mut memory = Memory::default();
    let health = Health { started: true, ready: false, dead: false };
    memory.health.insert("beside0".to_owned(), health);
    memory.health.insert("main0".to_owned(), Health { ready: true, ..health });
    check(
        &pod,
        &seen,
        &memory,
        2,
        expect![[r#"
        Running 10.42.0.7
        beside: running, last -, ready false, restarts 0
        main: running, last -, ready true, restarts 0
        PodReadyToStartContainers=True
        Initialized=True
        Ready=False ContainersNotReady
        ContainersReady=False ContainersNotReady
        PodScheduled=True
    "#]],
    );
    memory.health.insert("beside0".to_owned(), Health { ready: true, ..health });
    check(
        &pod,
        &seen,
        &memory,
        2,
        expect![[r#"
        Running 10.42.0.7
        beside: running, last -, ready true, restarts 0
        main: running, last -, ready true, restarts 0
        PodReadyToStartContainers=True
        Initialized=True
        Ready=True
        ContainersReady=True
        PodScheduled=True
    "#]],
    );
}

#[test]
fn a_pod_whose_first_steps_are_taken_again_in_another_sandbox() {
    let before = |mut ran: Ran| {
        ran.sandbox = "another".into();
        ran
    };
    let lost = before(run("main", 0, exited(137, 5)));
    let again = seen(vec![
        run("prepare", 1, State::Running { since: time(9) }),
        before(run("prepare", 0, exited(0, 1))),
        lost,
    ]);
    check(
        &pod("Always", &["prepare"]),
        &again,
        &Memory::default(),
        10,
        expect![[r#"
            Pending 10.42.0.7
            prepare: running, last Completed 0, ready false, restarts 1
            main: Error 137, last -, ready false, restarts 0
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False ContainersNotReady
            ContainersReady=False ContainersNotReady
            PodScheduled=True
        "#]],
    );
}

#[test]
fn a_container_that_keeps_failing_and_one_that_waits_for_its_probe() {
    let crashed = seen(vec![run("main", 2, exited(1, 5)), run("main", 1, exited(1, 3))]);
    let mut memory = Memory::default();
    for attempt in 0..2 {
        memory.start_again(&run("main", attempt, exited(1, 3)), time(4), LONGEST);
    }
    // What is told first is how it ended; that it has to wait is told when somebody looks again.
    check(
        &pod("Always", &[]),
        &crashed,
        &memory,
        6,
        expect![[r#"
        Running 10.42.0.7
        main: Error 1, last Error 1, ready false, restarts 2
        PodReadyToStartContainers=True
        Initialized=True
        Ready=False ContainersNotReady
        ContainersReady=False ContainersNotReady
        PodScheduled=True
    "#]],
    );
    check(
        &pod("Always", &[]),
        &crashed,
        &memory,
        25,
        expect![[r#"
        Running 10.42.0.7
        main: CrashLoopBackOff (back-off 20s restarting failed container=main pod=crash_default(1234)), last Error 1, ready false, restarts 2
        PodReadyToStartContainers=True
        Initialized=True
        Ready=False ContainersNotReady
        ContainersReady=False ContainersNotReady
        PodScheduled=True
    "#]],
    );
    let mut memory = Memory::default();
    memory.health.insert("main0".into(), Health { started: true, ready: false, dead: false });
    check(
        &pod("Always", &[]),
        &seen(vec![run("main", 0, State::Running { since: time(1) })]),
        &memory,
        6,
        expect![[r#"
            Running 10.42.0.7
            main: running, last -, ready false, restarts 0
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False ContainersNotReady
            ContainersReady=False ContainersNotReady
            PodScheduled=True
        "#]],
    );
}

#[test]
fn a_container_that_cannot_be_started() {
    let of = |policy: &str, attempt: u32, now: i64, expected: Expect| {
        let mut memory = Memory::default();
        for before in 0..attempt {
            memory.start_again(&run("main", before, exited(128, 4)), time(4), LONGEST);
        }
        let message = "exec: \"nope\": executable file not found in $PATH".to_owned();
        memory.failures.insert("main".into(), Failure::again(None, "RunContainerError", message, time(5)));
        let failed = Ran { reason: "StartError".into(), ..run("main", attempt, exited(128, 5)) };
        check(&pod(policy, &[]), &seen(vec![failed]), &memory, now, expected);
    };
    // Right after the try.
    of(
        "Always",
        1,
        6,
        expect![[r#"
            Running 10.42.0.7
            main: RunContainerError (exec: "nope": executable file not found in $PATH), last StartError 128, ready false, restarts 1
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False ContainersNotReady
            ContainersReady=False ContainersNotReady
            PodScheduled=True
        "#]],
    );
    of(
        "Always",
        1,
        15,
        expect![[r#"
            Running 10.42.0.7
            main: CrashLoopBackOff (back-off 10s restarting failed container=main pod=crash_default(1234)), last StartError 128, ready false, restarts 1
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False ContainersNotReady
            ContainersReady=False ContainersNotReady
            PodScheduled=True
        "#]],
    );
    // It is not tried again.
    of(
        "Never",
        0,
        6,
        expect![[r#"
            Failed 10.42.0.7
            main: StartError 128, last -, ready false, restarts 0
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False PodFailed
            ContainersReady=False PodFailed
            PodScheduled=True
        "#]],
    );
}

#[test]
fn pods_that_are_over() {
    check(
        &pod("Never", &[]),
        &seen(vec![run("main", 0, exited(2, 5))]),
        &Memory::default(),
        6,
        expect![[r#"
            Failed 10.42.0.7
            main: Error 2, last -, ready false, restarts 0
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False PodFailed
            ContainersReady=False PodFailed
            PodScheduled=True
        "#]],
    );
    check(
        &pod("OnFailure", &[]),
        &seen(vec![run("main", 0, exited(0, 5))]),
        &Memory::default(),
        6,
        expect![[r#"
            Succeeded 10.42.0.7
            main: Completed 0, last -, ready false, restarts 0
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False PodCompleted
            ContainersReady=False PodCompleted
            PodScheduled=True
        "#]],
    );
}

#[test]
fn pod_succeeds_once_its_sidecars_have_stopped() {
    let mut pod = pod("Never", &["mesh"]);
    for init in pod.spec.iter_mut().flat_map(|spec| spec.init_containers.iter_mut().flatten()) {
        init.restart_policy = Some("Always".into());
    }
    let mesh = |state: State| seen(vec![run("mesh", 0, state), run("main", 0, exited(0, 5))]);
    check(
        &pod,
        &mesh(State::Running { since: time(1) }),
        &Memory::default(),
        6,
        expect![[r#"
            Running 10.42.0.7
            mesh: running, last -, ready true, restarts 0
            main: Completed 0, last -, ready false, restarts 0
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False ContainersNotReady
            ContainersReady=False ContainersNotReady
            PodScheduled=True
        "#]],
    );
    check(
        &pod,
        &mesh(exited(137, 6)),
        &Memory::default(),
        7,
        expect![[r#"
            Succeeded 10.42.0.7
            mesh: Error 137, last -, ready false, restarts 0
            main: Completed 0, last -, ready false, restarts 0
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False PodCompleted
            ContainersReady=False PodCompleted
            PodScheduled=True
        "#]],
    );
}

#[test]
fn an_image_that_cannot_be_had() {
    let mut memory = Memory::default();
    let failure = Failure {
        reason: "ErrImagePull".into(),
        message: "no such host".into(),
        times: 1,
        at: time(-9),
        again: time(60),
    };
    memory.failures.insert("main".into(), failure);
    check(
        &pod("Always", &[]),
        &seen(Vec::new()),
        &memory,
        6,
        expect![[r#"
            Pending 10.42.0.7
            main: ImagePullBackOff (Back-off pulling image "web:1": ErrImagePull: no such host), last -, ready false, restarts 0
            PodReadyToStartContainers=True
            Initialized=True
            Ready=False ContainersNotReady
            ContainersReady=False ContainersNotReady
            PodScheduled=True
        "#]],
    );
}

#[test]
fn what_has_ended_stays_so_when_nothing_is_left_of_it() {
    let host = Host { ips: &["192.0.2.1".to_owned()], runtime: "containerd", recursive: true };
    for (mut pod, state) in [(pod("Never", &["init"]), exited(3, 5)), (pod("Always", &[]), exited(0, 5))] {
        let inits = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        let ran = inits.map(|init| run(&init.name, 0, exited(0, 1))).chain([run("main", 2, state)]).collect();
        pod.metadata.deletion_timestamp = Some(Time(time(6)));
        let before = status(&pod, &seen(ran), &Memory::default(), &host, time(7));
        pod.status = Some(before.clone());
        let after = status(&pod, &Observed::default(), &Memory::default(), &host, time(8));
        assert_eq!(after.phase, before.phase);
        assert_eq!(after.container_statuses, before.container_statuses);
        assert_eq!(after.init_container_statuses, before.init_container_statuses);
    }
}

#[test]
fn all_begin_anew() {
    let mut pod = pod("Never", &[]);
    let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}});
    let more =
        json!([{"name": "main", "restartPolicy": "Never", "restartPolicyRules": [rule]}, {"name": "b"}]);
    pod.spec.as_mut().expect("a spec").containers = serde_json::from_value(more).expect("containers");
    let memory = Memory::default();
    let running = |since: i64| State::Running { since: time(since) };
    let ended = run("main", 0, exited(42, 9));
    check(
        &pod,
        &seen(vec![ended.clone(), run("b", 0, running(0))]),
        &memory,
        10,
        expect![[r#"
        Running 10.42.0.7
        main: Error 42, last -, ready false, restarts 0
        b: running, last -, ready true, restarts 0
        PodReadyToStartContainers=True
        Initialized=True
        Ready=False ContainersNotReady
        ContainersReady=False ContainersNotReady
        AllContainersRestarting=True RestartAllContainersStarted
        PodScheduled=True
    "#]],
    );
    let past = [ended, run("b", 0, exited(137, 10))];
    check(
        &pod,
        &seen(past.to_vec()),
        &memory,
        11,
        expect![[r#"
        Running 10.42.0.7
        main: RestartingAllContainers (The container is removed because RestartAllContainers in place), last RestartingAllContainers 137, ready false, restarts 1
        b: RestartingAllContainers (The container is removed because RestartAllContainers in place), last RestartingAllContainers 137, ready false, restarts 1
        PodReadyToStartContainers=True
        Initialized=True
        Ready=False ContainersNotReady
        ContainersReady=False ContainersNotReady
        AllContainersRestarting=True RestartAllContainersStarted
        PodScheduled=True
    "#]],
    );
    let mut all = vec![run("main", 1, running(12)), run("b", 1, running(12))];
    all.extend(past);
    check(
        &pod,
        &seen(all),
        &memory,
        13,
        expect![[r#"
        Running 10.42.0.7
        main: running, last RestartingAllContainers 137, ready true, restarts 1
        b: running, last RestartingAllContainers 137, ready true, restarts 1
        PodReadyToStartContainers=True
        Initialized=True
        Ready=True
        ContainersReady=True
        AllContainersRestarting=False
        PodScheduled=True
    "#]],
    );
}

#[test]
fn the_user_is_who_the_runtime_says() {
    let host = Host { ips: &["192.0.2.1".to_owned()], runtime: "containerd", recursive: true };
    let user = LinuxContainerUser { uid: 1000, gid: 3000, supplemental_groups: Some(vec![3000, 4000]) };
    let shown = |state: State, user: Option<&LinuxContainerUser>| {
        let seen = seen(vec![Ran { user: user.cloned(), ..run("main", 0, state) }]);
        let status = status(&pod("Never", &[]), &seen, &Memory::default(), &host, time(9));
        status.container_statuses.unwrap_or_default().remove(0).user
    };
    let told = Some(ContainerUser { linux: Some(user.clone()) });
    assert_eq!(shown(State::Running { since: time(0) }, Some(&user)), told);
    assert_eq!(shown(exited(0, 5), Some(&user)), told);
    assert_eq!(shown(State::Created, Some(&user)), None);
    assert_eq!(shown(State::Running { since: time(0) }, None), None);
}

#[test]
fn what_containers_have_and_were_promised() {
    use crate::allocation::Record;
    use crate::pod::resize::{Amounts, Whole};
    use runtime::cri::LinuxContainerResources;

    let resources = |cpu: &str, memory: &str| json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}});
    let mut pod = pod("Always", &[]);
    let agreed = serde_json::from_value(resources("500m", "64Mi")).expect("resources");
    pod.spec.as_mut().expect("a spec").containers[0].resources = Some(agreed);
    let reports = |quota: i64, shares: i64, memory: i64| LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: quota,
        cpu_shares: shares,
        memory_limit_in_bytes: memory,
        ..LinuxContainerResources::default()
    };
    let mut check = |state: State, told: Option<LinuxContainerResources>, whole: Whole, expected: Expect| {
        let mut main = run("main", 0, state);
        main.resources = told;
        let given =
            Amounts { memory_request: 32 << 20, memory_limit: 32 << 20, cpu_request: 100, cpu_limit: 0 };
        let record = Record { given: [(main.id.clone(), given)].into(), whole, ..Record::default() };
        let memory = Memory { record: Some(record), ..Memory::default() };
        let host = Host { ips: &[], runtime: "containerd", recursive: true };
        let status = status(&pod, &seen(vec![main]), &memory, &host, time(9));
        let container = &status.container_statuses.iter().flatten().next().expect("a container");
        let found = json!([
            container.resources,
            container.allocated_resources,
            status.resources,
            status.allocated_resources
        ]);
        let lines: Vec<String> =
            found.as_array().expect("a list").iter().map(|one| format!("{one}\n")).collect();
        expected.assert_eq(&lines.concat());
        pod.status = Some(status);
    };
    let whole = Whole { memory: 64 << 20, cpu_quota: 50_000, cpu_shares: 512 };
    check(
        exited(1, 5),
        None,
        whole,
        expect![[r#"
        {"limits":{"cpu":"500m","memory":"64Mi"},"requests":{"cpu":"500m","memory":"64Mi"}}
        {"cpu":"500m","memory":"64Mi"}
        {"limits":{"cpu":"500m","memory":"64Mi"},"requests":{"cpu":"500m","memory":"64Mi"}}
        {"cpu":"500m","memory":"64Mi"}
    "#]],
    );
    let running = State::Running { since: time(1) };
    check(
        running,
        Some(reports(50_000, 512, 64 << 20)),
        whole,
        expect![[r#"
        {"limits":{"cpu":"500m","memory":"64Mi"},"requests":{"cpu":"500m","memory":"32Mi"}}
        {"cpu":"500m","memory":"64Mi"}
        {"limits":{"cpu":"500m","memory":"64Mi"},"requests":{"cpu":"500m","memory":"64Mi"}}
        {"cpu":"500m","memory":"64Mi"}
    "#]],
    );
    check(
        running,
        Some(reports(10_000, 102, 32 << 20)),
        Whole { cpu_shares: 102, ..whole },
        expect![[r#"
        {"limits":{"cpu":"100m","memory":"32Mi"},"requests":{"cpu":"100m","memory":"32Mi"}}
        {"cpu":"500m","memory":"64Mi"}
        {"limits":{"cpu":"500m","memory":"64Mi"},"requests":{"cpu":"100m","memory":"64Mi"}}
        {"cpu":"500m","memory":"64Mi"}
    "#]],
    );
    // What nobody tells is as it was, or as it was given.
    check(
        running,
        Some(reports(0, 102, 32 << 20)),
        whole,
        expect![[r#"
        {"limits":{"cpu":"100m","memory":"32Mi"},"requests":{"cpu":"100m","memory":"32Mi"}}
        {"cpu":"500m","memory":"64Mi"}
        {"limits":{"cpu":"500m","memory":"64Mi"},"requests":{"cpu":"500m","memory":"64Mi"}}
        {"cpu":"500m","memory":"64Mi"}
    "#]],
    );
    check(
        running,
        None,
        whole,
        expect![[r#"
        {"limits":{"cpu":"100m","memory":"32Mi"},"requests":{"cpu":"100m","memory":"32Mi"}}
        {"cpu":"500m","memory":"64Mi"}
        {"limits":{"cpu":"500m","memory":"64Mi"},"requests":{"cpu":"500m","memory":"64Mi"}}
        {"cpu":"500m","memory":"64Mi"}
    "#]],
    );
}

/// The API lets no container leave its end that its restart policy would not restart.
#[test]
fn container_stopped_for_a_resize_has_not_ended() {
    let host = Host { ips: &["192.0.2.1".to_owned()], runtime: "containerd", recursive: true };
    let mut pod = pod("OnFailure", &[]);
    let mut memory = Memory::default();
    let running = State::Running { since: time(1) };
    let mut shown = |containers: Vec<Ran>, memory: &Memory| {
        let status = status(&pod, &seen(containers), memory, &host, time(9));
        let container = status.container_statuses.as_ref().expect("containers")[0].clone();
        let phase = status.phase.clone().unwrap_or_default();
        pod.status = Some(status);
        let state = container.state.expect("a state");
        let last = container.last_state.and_then(|last| last.terminated).map(|end| end.exit_code);
        let ended = state.terminated.map(|end| end.exit_code);
        (phase, container.container_id.unwrap_or_default(), container.ready, ended, last)
    };
    let runs = ("Running".to_owned(), "containerd://main0".to_owned(), true, None, None);
    assert_eq!(shown(vec![run("main", 0, running)], &memory), runs);
    memory.resized.insert("main0".to_owned());
    let stopped = vec![run("main", 0, exited(0, 2))];
    assert_eq!(shown(stopped.clone(), &memory), (runs.0.clone(), runs.1.clone(), false, None, None));
    let again = vec![run("main", 1, running), run("main", 0, exited(0, 2))];
    let expected = (runs.0.clone(), "containerd://main1".to_owned(), true, None, Some(0));
    assert_eq!(shown(again, &memory), expected);
    // It is not started again when its pod ends.
    memory.ended = Some((crate::EVICTED.to_owned(), String::new()));
    assert_eq!(shown(stopped, &memory), ("Failed".to_owned(), runs.1, false, Some(0), None));
}

#[test]
fn conditions_of_a_resize() {
    let mut memory = Memory::default();
    let running = seen(vec![run("main", 0, State::Running { since: time(1) })]);
    let host = Host { ips: &[], runtime: "containerd", recursive: true };
    let mut pod = pod("Always", &[]);
    let mut check = |memory: &Memory, expected: Expect| {
        let status = status(&pod, &running, memory, &host, time(9));
        let conditions = status.conditions.iter().flatten();
        let own = conditions.filter(|condition| condition.type_.starts_with("PodResize"));
        let lines: Vec<String> = own.map(|condition| format!("{}\n", json!(condition))).collect();
        expected.assert_eq(&lines.concat());
        pod.status = Some(status);
    };
    assert!(memory.resizing.defer("too much", Some(2), time(1)));
    assert!(!memory.resizing.defer("far too much", Some(2), time(2)));
    check(
        &memory,
        expect![[r#"
        {"lastProbeTime":"1970-01-12T13:46:41Z","lastTransitionTime":"1970-01-12T13:46:41Z","message":"far too much","observedGeneration":2,"reason":"Deferred","status":"True","type":"PodResizePending"}
    "#]],
    );
    // Somebody asks for something else that there is no room for either.
    assert!(memory.resizing.defer("too much", Some(3), time(3)));
    check(
        &memory,
        expect![[r#"
        {"lastProbeTime":"1970-01-12T13:46:41Z","lastTransitionTime":"1970-01-12T13:46:41Z","message":"too much","observedGeneration":3,"reason":"Deferred","status":"True","type":"PodResizePending"}
    "#]],
    );
    memory.resizing.begin(Some(3), time(4));
    check(
        &memory,
        expect![[r#"
        {"lastProbeTime":"1970-01-12T13:46:44Z","lastTransitionTime":"1970-01-12T13:46:44Z","observedGeneration":3,"status":"True","type":"PodResizeInProgress"}
    "#]],
    );
    assert_eq!(memory.resizing.fail("no", Some(4), time(5)), Some(3));
    assert_eq!(memory.resizing.fail("no", Some(4), time(6)), None);
    check(
        &memory,
        expect![[r#"
        {"lastProbeTime":"1970-01-12T13:46:45Z","lastTransitionTime":"1970-01-12T13:46:45Z","message":"no","observedGeneration":3,"reason":"Error","status":"True","type":"PodResizeInProgress"}
    "#]],
    );
    assert_eq!(memory.resizing.end(), Some(3));
    check(&memory, expect![[""]]);
    assert_eq!(memory.resizing.end(), None);
}
