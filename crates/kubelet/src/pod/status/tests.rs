use expect_test::{Expect, expect};
use k8s_openapi::api::core::v1::LinuxContainerUser;
use serde_json::json;

use super::*;
use crate::observed::Sandbox;
use crate::pod::back_off::MAX_BACK_OFF;
use crate::worker_state::{ContainerHealth, StartFailure};

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).expect("a time")
}

fn pod(policy: &str, init_containers: &[&str]) -> Pod {
    let init_containers: Vec<_> =
        init_containers.iter().map(|name| json!({"name": name, "image": "init"})).collect();
    let spec = json!({
        "restartPolicy": policy,
        "initContainers": init_containers,
        "containers": [{"name": "main", "image": "web:1"}]
    });
    let metadata = json!({"name": "crash", "namespace": "default", "uid": "1234"});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")
}

fn run(name: &str, attempt: u32, state: State) -> ContainerRun {
    ContainerRun {
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
        created_from: crate::observed::CreatedFrom::default(),
        resources: None,
    }
}

fn exited(code: i32, at: i64) -> State {
    State::Exited { since: time(0), at: time(at), code }
}

fn seen(containers: Vec<ContainerRun>) -> ObservedPod {
    let sandbox = Sandbox {
        id: "s".into(),
        attempt: 0,
        ready: true,
        ips: vec!["10.42.0.7".into()],
        has_lost_network: false,
    };
    ObservedPod { sandboxes: vec![sandbox], containers, at: None }
}

#[track_caller]
fn check(pod: &Pod, seen: &ObservedPod, worker_state: &PodWorkerState, now: i64, expected: Expect) {
    let host = HostInfo { ips: &["192.0.2.1".to_owned()], runtime: "containerd", recursive_read_only: true };
    let status = generate_pod_status(pod, seen, worker_state, &host, time(now));
    let mut text = format!("{} {}\n", status.phase.unwrap_or_default(), status.pod_ip.unwrap_or_default());
    for container in status.init_container_statuses.iter().chain(&status.container_statuses).flatten() {
        let state = container.state.clone().unwrap_or_default();
        let describe = |state: &ContainerState| match (&state.waiting, &state.running, &state.terminated) {
            (Some(waiting), ..) => {
                let message = waiting.message.as_deref().map(|message| format!(" ({message})"));
                format!("{}{}", waiting.reason.as_deref().unwrap_or(""), message.unwrap_or_default())
            }
            (_, Some(_), _) => "running".to_owned(),
            (.., Some(end)) => format!("{} {}", end.reason.as_deref().unwrap_or(""), end.exit_code),
            _ => "-".to_owned(),
        };
        let last = describe(&container.last_state.clone().unwrap_or_default());
        let (name, ready, restarts) = (&container.name, container.ready, container.restart_count);
        text += &format!("{name}: {}, last {last}, ready {ready}, restarts {restarts}\n", describe(&state));
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
fn new_pod_is_pending() {
    check(
        &pod("Always", &[]),
        &ObservedPod::default(),
        &PodWorkerState::default(),
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
fn running_pod_is_ready() {
    let since = State::Running { since: time(1) };
    check(
        &pod("Always", &[]),
        &seen(vec![run("main", 0, since)]),
        &PodWorkerState::default(),
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
fn pod_is_pending_while_init_containers_run() {
    let running = seen(vec![run("prepare", 0, State::Running { since: time(1) })]);
    check(
        &pod("Always", &["prepare"]),
        &running,
        &PodWorkerState::default(),
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
    let sidecar = &mut pod.spec.as_mut().expect("a spec").init_containers.as_mut().expect("containers")[0];
    sidecar.restart_policy = Some("Always".to_owned());
    sidecar.readiness_probe = Some(Default::default());
    let running = |name: &str| run(name, 0, State::Running { since: time(1) });
    let seen = seen(vec![running("beside"), running("main")]);
    let mut worker_state = PodWorkerState::default();
    let health = ContainerHealth { started: true, ready: false, dead: false };
    worker_state.health.insert("beside0".to_owned(), health);
    worker_state.health.insert("main0".to_owned(), ContainerHealth { ready: true, ..health });
    check(
        &pod,
        &seen,
        &worker_state,
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
    worker_state.health.insert("beside0".to_owned(), ContainerHealth { ready: true, ..health });
    check(
        &pod,
        &seen,
        &worker_state,
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
fn pod_is_pending_while_init_containers_run_again_in_a_new_sandbox() {
    let before = |mut container_run: ContainerRun| {
        container_run.sandbox = "another".into();
        container_run
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
        &PodWorkerState::default(),
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
fn crash_loop_and_missing_probe_results_are_not_ready() {
    let crash_loop = seen(vec![run("main", 2, exited(1, 5)), run("main", 1, exited(1, 3))]);
    let mut worker_state = PodWorkerState::default();
    for attempt in 0..2 {
        worker_state.record_restart(&run("main", attempt, exited(1, 3)), time(4), MAX_BACK_OFF);
    }
    // The exit is reported first. The back-off is reported by a later sync.
    check(
        &pod("Always", &[]),
        &crash_loop,
        &worker_state,
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
        &crash_loop,
        &worker_state,
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
    let mut worker_state = PodWorkerState::default();
    worker_state.health.insert("main0".into(), ContainerHealth { started: true, ready: false, dead: false });
    check(
        &pod("Always", &[]),
        &seen(vec![run("main", 0, State::Running { since: time(1) })]),
        &worker_state,
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
fn start_error_and_crash_loop_back_off_are_reported() {
    let of = |policy: &str, attempt: u32, now: i64, expected: Expect| {
        let mut worker_state = PodWorkerState::default();
        for before in 0..attempt {
            worker_state.record_restart(&run("main", before, exited(128, 4)), time(4), MAX_BACK_OFF);
        }
        let message = "exec: \"nope\": executable file not found in $PATH".to_owned();
        worker_state
            .failures
            .insert("main".into(), StartFailure::with_back_off(None, "RunContainerError", message, time(5)));
        let failed = ContainerRun { reason: "StartError".into(), ..run("main", attempt, exited(128, 5)) };
        check(&pod(policy, &[]), &seen(vec![failed]), &worker_state, now, expected);
    };
    // Right after the attempt.
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
    // It does not restart.
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
fn finished_pods_are_failed_or_succeeded() {
    check(
        &pod("Never", &[]),
        &seen(vec![run("main", 0, exited(2, 5))]),
        &PodWorkerState::default(),
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
        &PodWorkerState::default(),
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
        &PodWorkerState::default(),
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
        &PodWorkerState::default(),
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
fn image_pull_back_off_is_reported() {
    let mut worker_state = PodWorkerState::default();
    let failure = StartFailure {
        reason: "ErrImagePull".into(),
        message: "no such host".into(),
        attempts: 1,
        failed_at: time(-9),
        retry_at: time(60),
    };
    worker_state.failures.insert("main".into(), failure);
    check(
        &pod("Always", &[]),
        &seen(Vec::new()),
        &worker_state,
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
fn terminated_status_remains_after_containers_are_removed() {
    let host = HostInfo { ips: &["192.0.2.1".to_owned()], runtime: "containerd", recursive_read_only: true };
    for (mut pod, state) in [(pod("Never", &["init"]), exited(3, 5)), (pod("Always", &[]), exited(0, 5))] {
        let init_containers = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        let container_run = init_containers
            .map(|init| run(&init.name, 0, exited(0, 1)))
            .chain([run("main", 2, state)])
            .collect();
        pod.metadata.deletion_timestamp = Some(Time(time(6)));
        let before =
            generate_pod_status(&pod, &seen(container_run), &PodWorkerState::default(), &host, time(7));
        pod.status = Some(before.clone());
        let after =
            generate_pod_status(&pod, &ObservedPod::default(), &PodWorkerState::default(), &host, time(8));
        assert_eq!(after.phase, before.phase);
        assert_eq!(after.container_statuses, before.container_statuses);
        assert_eq!(after.init_container_statuses, before.init_container_statuses);
    }
}

#[test]
fn restart_of_all_containers_is_reported() {
    let mut pod = pod("Never", &[]);
    let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}});
    let more =
        json!([{"name": "main", "restartPolicy": "Never", "restartPolicyRules": [rule]}, {"name": "b"}]);
    pod.spec.as_mut().expect("a spec").containers = serde_json::from_value(more).expect("containers");
    let worker_state = PodWorkerState::default();
    let running = |since: i64| State::Running { since: time(since) };
    let ended = run("main", 0, exited(42, 9));
    check(
        &pod,
        &seen(vec![ended.clone(), run("b", 0, running(0))]),
        &worker_state,
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
        &worker_state,
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
        &worker_state,
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
fn user_is_reported_by_the_runtime() {
    let host = HostInfo { ips: &["192.0.2.1".to_owned()], runtime: "containerd", recursive_read_only: true };
    let user = LinuxContainerUser { uid: 1000, gid: 3000, supplemental_groups: Some(vec![3000, 4000]) };
    let reported_user = |state: State, user: Option<&LinuxContainerUser>| {
        let seen = seen(vec![ContainerRun { user: user.cloned(), ..run("main", 0, state) }]);
        let status =
            generate_pod_status(&pod("Never", &[]), &seen, &PodWorkerState::default(), &host, time(9));
        status.container_statuses.unwrap_or_default().remove(0).user
    };
    let expected_user = Some(ContainerUser { linux: Some(user.clone()) });
    assert_eq!(reported_user(State::Running { since: time(0) }, Some(&user)), expected_user);
    assert_eq!(reported_user(exited(0, 5), Some(&user)), expected_user);
    assert_eq!(reported_user(State::Created, Some(&user)), None);
    assert_eq!(reported_user(State::Running { since: time(0) }, None), None);
}

#[test]
fn actual_and_allocated_resources_are_reported() {
    use crate::allocation::AllocationRecord;
    use crate::pod::resize::{ComputeResources, PodResources};
    use runtime::cri::LinuxContainerResources;

    let resources = |cpu: &str, worker_state: &str| json!({"requests": {"cpu": cpu, "memory": worker_state}, "limits": {"cpu": cpu, "memory": worker_state}});
    let mut pod = pod("Always", &[]);
    let allocated = serde_json::from_value(resources("500m", "64Mi")).expect("resources");
    pod.spec.as_mut().expect("a spec").containers[0].resources = Some(allocated);
    let reports = |quota: i64, shares: i64, worker_state: i64| LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: quota,
        cpu_shares: shares,
        memory_limit_in_bytes: worker_state,
        ..LinuxContainerResources::default()
    };
    let mut check = |state: State,
                     reported: Option<LinuxContainerResources>,
                     pod_resources: PodResources,
                     expected: Expect| {
        let mut main = run("main", 0, state);
        main.resources = reported;
        let given = ComputeResources {
            memory_request: 32 << 20,
            memory_limit: 32 << 20,
            cpu_request: 100,
            cpu_limit: 0,
        };
        let record = AllocationRecord {
            given: [(main.id.clone(), given)].into(),
            whole: pod_resources,
            ..AllocationRecord::default()
        };
        let worker_state = PodWorkerState { record: Some(record), ..PodWorkerState::default() };
        let host = HostInfo { ips: &[], runtime: "containerd", recursive_read_only: true };
        let status = generate_pod_status(&pod, &seen(vec![main]), &worker_state, &host, time(9));
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
    let pod_resources = PodResources { memory: 64 << 20, cpu_quota: 50_000, cpu_shares: 512 };
    check(
        exited(1, 5),
        None,
        pod_resources,
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
        pod_resources,
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
        PodResources { cpu_shares: 102, ..pod_resources },
        expect![[r#"
        {"limits":{"cpu":"100m","memory":"32Mi"},"requests":{"cpu":"100m","memory":"32Mi"}}
        {"cpu":"500m","memory":"64Mi"}
        {"limits":{"cpu":"500m","memory":"64Mi"},"requests":{"cpu":"100m","memory":"64Mi"}}
        {"cpu":"500m","memory":"64Mi"}
    "#]],
    );
    // What the runtime does not report is taken from the last status or the last resize.
    check(
        running,
        Some(reports(0, 102, 32 << 20)),
        pod_resources,
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
        pod_resources,
        expect![[r#"
        {"limits":{"cpu":"100m","memory":"32Mi"},"requests":{"cpu":"100m","memory":"32Mi"}}
        {"cpu":"500m","memory":"64Mi"}
        {"limits":{"cpu":"500m","memory":"64Mi"},"requests":{"cpu":"500m","memory":"64Mi"}}
        {"cpu":"500m","memory":"64Mi"}
    "#]],
    );
}

/// The API server rejects a transition out of the terminated state if the restart policy does not
/// allow a restart.
#[test]
fn container_stopped_for_a_resize_has_not_ended() {
    let host = HostInfo { ips: &["192.0.2.1".to_owned()], runtime: "containerd", recursive_read_only: true };
    let mut pod = pod("OnFailure", &[]);
    let mut worker_state = PodWorkerState::default();
    let running = State::Running { since: time(1) };
    let mut observe_state = |containers: Vec<ContainerRun>, worker_state: &PodWorkerState| {
        let status = generate_pod_status(&pod, &seen(containers), worker_state, &host, time(9));
        let container = status.container_statuses.as_ref().expect("containers")[0].clone();
        let phase = status.phase.clone().unwrap_or_default();
        pod.status = Some(status);
        let state = container.state.expect("a state");
        let last = container.last_state.and_then(|last| last.terminated).map(|end| end.exit_code);
        let ended = state.terminated.map(|end| end.exit_code);
        (phase, container.container_id.unwrap_or_default(), container.ready, ended, last)
    };
    let runs = ("Running".to_owned(), "containerd://main0".to_owned(), true, None, None);
    assert_eq!(observe_state(vec![run("main", 0, running)], &worker_state), runs);
    worker_state.stopped_for_resize.insert("main0".to_owned());
    let stopped = vec![run("main", 0, exited(0, 2))];
    assert_eq!(
        observe_state(stopped.clone(), &worker_state),
        (runs.0.clone(), runs.1.clone(), false, None, None)
    );
    let again = vec![run("main", 1, running), run("main", 0, exited(0, 2))];
    let expected = (runs.0.clone(), "containerd://main1".to_owned(), true, None, Some(0));
    assert_eq!(observe_state(again, &worker_state), expected);
    // It does not restart when its pod is terminated.
    worker_state.termination_reason = Some((crate::EVICTED_REASON.to_owned(), String::new()));
    assert_eq!(observe_state(stopped, &worker_state), ("Failed".to_owned(), runs.1, false, Some(0), None));
}

#[test]
fn conditions_of_a_resize() {
    let mut worker_state = PodWorkerState::default();
    let running = seen(vec![run("main", 0, State::Running { since: time(1) })]);
    let host = HostInfo { ips: &[], runtime: "containerd", recursive_read_only: true };
    let mut pod = pod("Always", &[]);
    let mut check = |worker_state: &PodWorkerState, expected: Expect| {
        let status = generate_pod_status(&pod, &running, worker_state, &host, time(9));
        let conditions = status.conditions.iter().flatten();
        let own = conditions.filter(|condition| condition.type_.starts_with("PodResize"));
        let lines: Vec<String> = own.map(|condition| format!("{}\n", json!(condition))).collect();
        expected.assert_eq(&lines.concat());
        pod.status = Some(status);
    };
    assert!(worker_state.resize_status.defer("too much", Some(2), time(1)));
    assert!(!worker_state.resize_status.defer("far too much", Some(2), time(2)));
    check(
        &worker_state,
        expect![[r#"
        {"lastProbeTime":"1970-01-12T13:46:41Z","lastTransitionTime":"1970-01-12T13:46:41Z","message":"far too much","observedGeneration":2,"reason":"Deferred","status":"True","type":"PodResizePending"}
    "#]],
    );
    // Another resize that does not fit either.
    assert!(worker_state.resize_status.defer("too much", Some(3), time(3)));
    check(
        &worker_state,
        expect![[r#"
        {"lastProbeTime":"1970-01-12T13:46:41Z","lastTransitionTime":"1970-01-12T13:46:41Z","message":"too much","observedGeneration":3,"reason":"Deferred","status":"True","type":"PodResizePending"}
    "#]],
    );
    worker_state.resize_status.start(Some(3), time(4));
    check(
        &worker_state,
        expect![[r#"
        {"lastProbeTime":"1970-01-12T13:46:44Z","lastTransitionTime":"1970-01-12T13:46:44Z","observedGeneration":3,"status":"True","type":"PodResizeInProgress"}
    "#]],
    );
    assert_eq!(worker_state.resize_status.record_error("no", Some(4), time(5)), Some(3));
    assert_eq!(worker_state.resize_status.record_error("no", Some(4), time(6)), None);
    check(
        &worker_state,
        expect![[r#"
        {"lastProbeTime":"1970-01-12T13:46:45Z","lastTransitionTime":"1970-01-12T13:46:45Z","message":"no","observedGeneration":3,"reason":"Error","status":"True","type":"PodResizeInProgress"}
    "#]],
    );
    assert_eq!(worker_state.resize_status.finish(), Some(3));
    check(&worker_state, expect![[""]]);
    assert_eq!(worker_state.resize_status.finish(), None);
}
