//! The lifecycle of pods and containers.

use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use runtime::cri::*;
use runtime::{Error, ErrorCode, Runtime as _};

use crate::kit::{TestNode, kill_supervisors, open_with, script, security, supervisors, wait_exited, with};

pub async fn run_and_remove_a_pod(node: &TestNode) {
    let pod = node.pod("one").await;
    let status = node.runtime.sandbox_status(&pod.id).await.unwrap();
    assert_eq!((status.state(), status.network.unwrap().ip.as_str()), (PodSandboxState::Ready, "10.88.0.2"));
    let (code, output) = pod.finish(&script("echo hello; echo world >&2; exit 3")).await;
    let mut lines: Vec<_> = output.lines().collect();
    lines.sort_unstable();
    assert_eq!((code, lines), (3, vec!["hello", "world"]));

    let id = pod.start(&script("trap 'exit 7' TERM; while true; do sleep 0.05; done")).await;
    let listed = node.runtime.containers(&[]).await.unwrap();
    assert_eq!((listed.len(), listed[0].state()), (1, ContainerState::Running));
    assert_eq!(pod.exec(&id, "echo out; echo err >&2; exit 5").await, (5, "out\n".into(), "err\n".into()));
    let (_, seen, _) =
        pod.exec(&id, "hostname; cat /etc/hostname /etc/resolv.conf; echo $$; echo $HOME").await;
    assert_eq!(seen.lines().take(3).collect::<Vec<_>>(), ["one", "one", "nameserver 10.43.0.10"]);
    let hosts = std::fs::read_to_string("/etc/hosts").unwrap();
    assert_eq!(pod.exec(&id, "cat /etc/hosts").await.1, hosts, "the pod has no hosts file of its own");
    // The default mounts of a container need no entries in its writable layer.
    let upper = node.dir.path().join("runtime/pods").join(&pod.id).join(&id).join("upper");
    assert_eq!(std::fs::read_dir(&upper).unwrap().count(), 0, "{}", upper.display());
    let stats = node.runtime.stats().await.unwrap();
    assert!(stats[0].memory.as_ref().unwrap().usage_bytes.as_ref().unwrap().value > 0, "{stats:?}");
    node.runtime.stop_container(&id, Duration::from_secs(30)).await.unwrap();
    let status = node.runtime.container_status(&id).await.unwrap();
    assert_eq!((status.exit_code, status.reason.as_str()), (7, "Error"));
    assert!(status.started_at <= status.finished_at && status.created_at <= status.started_at);

    let ignores_sigterm = pod.start(&script("trap '' TERM; while true; do sleep 0.05; done")).await;
    node.runtime.stop_container(&ignores_sigterm, Duration::from_millis(200)).await.unwrap();
    assert_eq!(node.runtime.container_status(&ignores_sigterm).await.unwrap().exit_code, 137);

    node.runtime.stop_sandbox(&pod.id).await.unwrap();
    assert_eq!(node.runtime.sandbox_status(&pod.id).await.unwrap().state(), PodSandboxState::NotReady);
    node.runtime.stop_sandbox(&pod.id).await.unwrap();
    node.runtime.remove_sandbox(&pod.id).await.unwrap();
    node.runtime.remove_sandbox(&pod.id).await.unwrap();
    assert!(node.runtime.container_status(&ignores_sigterm).await.unwrap_err().is_not_found());
}

pub async fn containers_share_pod_namespaces(node: &TestNode) {
    let pod = node.pod("share").await;
    let first = pod
        .start(&script("echo shared >/dev/shm/x; touch /mine; while true; do echo hi | nc -l -p 8080; done"))
        .await;
    let second = pod.start(&script("sleep 1000")).await;
    let (_, seen, _) = pod
        .exec(&second, "until nc 127.0.0.1 8080 </dev/null | grep hi; do :; done 2>/dev/null; until cat /dev/shm/x 2>/dev/null; do :; done")
        .await;
    assert_eq!(seen, "hi\nshared\n");
    assert_eq!(pod.exec(&first, "until test -e /mine; do :; done").await.0, 0);
    assert_eq!(pod.exec(&second, "test -e /mine").await.0, 1);
    // Each container sees only its own processes.
    assert_eq!(pod.exec(&second, "cat /proc/1/cmdline").await.1, "sleep\x001000\x00");

    let mut config = node.pod_config("pids");
    config.linux.as_mut().unwrap().security_context.as_mut().unwrap().namespace_options =
        Some(NamespaceOption { pid: NamespaceMode::Pod.into(), ..NamespaceOption::default() });
    let pod = node.pod_with(config).await;
    let mut shared = security();
    shared.namespace_options =
        Some(NamespaceOption { pid: NamespaceMode::Pod.into(), ..NamespaceOption::default() });
    let one = pod.start(&with(shared.clone(), "sleep 1001; true")).await;
    let two = pod.start(&with(shared, "sleep 1002; true")).await;
    let (_, seen, _) = pod.exec(&two, "ps").await;
    assert!(seen.contains("sleep 1001") && seen.contains("sleep 1002"), "{seen}");
    node.runtime.stop_container(&one, Duration::ZERO).await.unwrap();
    // A killed process takes a moment to exit.
    let (_, seen, _) = pod.exec(&two, "while ps | grep -q '[s]leep 1001'; do :; done; ps").await;
    assert!(seen.contains("sleep 1002"), "{seen}");
}

pub async fn environment_keeps_its_order(node: &TestNode) {
    let pod = node.pod("variables").await;
    let mut config = script("env");
    config.envs = ["Z", "M", "A"].map(|key| KeyValue { key: key.into(), value: "1".into() }).into();
    let names = |text: &str| -> Vec<String> {
        // The shell adds these variables.
        let names = text.lines().filter_map(|line| line.split('=').next());
        names.filter(|name| !["SHLVL", "PWD", "OLDPWD"].contains(name)).map(str::to_owned).collect()
    };
    let expected = ["PATH", "HOSTNAME", "Z", "M", "A", "HOME"];
    config.command = vec!["env".to_owned()];
    let (code, printed) = pod.finish(&config).await;
    assert_eq!((code, names(&printed)), (0, expected.map(str::to_owned).into()));
    config.command = script("sleep 1000").command;
    let id = pod.start(&config).await;
    let output = node.runtime.exec_sync(&id, &["env".to_owned()], Duration::from_secs(30)).await.unwrap();
    assert_eq!(names(&String::from_utf8_lossy(&output.stdout)), expected);
    // A program starts with the signal dispositions of a new process.
    let (_, signals, _) = pod.exec(&id, "grep -E '^Sig(Blk|Ign)' /proc/self/status").await;
    let ignored = signals.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
    assert!(signals.starts_with("SigBlk:\t0000000000000000\n"), "{signals}");
    // SIGPIPE, which this program itself ignores.
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() & 1 << 12, 0, "{signals}");
}

pub async fn start_failure_reports_the_reason(node: &TestNode) {
    let pod = node.pod("broken").await;
    for (command, expected) in [
        ("no-such-program", "exec: \"no-such-program\": executable file not found in $PATH"),
        ("/no/such", "exec: \"/no/such\": stat /no/such: no such file or directory"),
        ("/etc/passwd", "exec: \"/etc/passwd\": permission denied"),
    ] {
        let mut config = script("");
        config.command = vec![command.to_owned()];
        let id = pod.create(&config).await;
        let error = node.runtime.start_container(&id).await.unwrap_err().message();
        assert!(error.ends_with(expected), "{error}");
        let status = node.runtime.container_status(&id).await.unwrap();
        assert_eq!((status.exit_code, status.reason.as_str()), (128, "StartError"), "{status:?}");
        assert_eq!(status.message, expected);
    }
    let mut config = script("true");
    config.linux.as_mut().unwrap().security_context.as_mut().unwrap().run_as_username = "missing-user".into();
    let id = pod.create(&config).await;
    let error = node.runtime.start_container(&id).await.unwrap_err().message();
    assert!(
        error.ends_with("unable to find user missing-user: no matching entries in passwd file"),
        "{error}"
    );
    let missing = ContainerConfig {
        image: Some(ImageSpec { image: "nosuch:1".into(), ..Default::default() }),
        // A name that differs from those of the other containers.
        metadata: Some(ContainerMetadata { name: "missing".into(), attempt: 0 }),
        ..script("")
    };
    let error = node.runtime.create_container(&pod.id, &missing, &pod.config).await.unwrap_err();
    assert!(error.is_not_found(), "{error}");

    let id = pod.start(&script("sleep 1000")).await;
    let error =
        node.runtime.exec_sync(&id, &["nothing-there".to_owned()], Duration::from_secs(9)).await.unwrap_err();
    assert!(
        error.message().contains("exec: \"nothing-there\": executable file not found in $PATH"),
        "{error}"
    );
    let sleep = ["sleep", "4711"].map(str::to_owned);
    let error = node.runtime.exec_sync(&id, &sleep, Duration::from_millis(100)).await.unwrap_err();
    assert!(matches!(error, Error::Rejected { code: ErrorCode::Timeout, .. }), "{error}");
    // The command that timed out was killed.
    let (_, seen, _) = pod.exec(&id, "while ps | grep -q 'sleep [4]711'; do :; done; echo gone").await;
    assert_eq!(seen, "gone\n");
    let bad = PodSandboxConfig {
        linux: Some(LinuxPodSandboxConfig {
            sysctls: [("net.no.such.thing".to_owned(), "1".to_owned())].into(),
            ..LinuxPodSandboxConfig::default()
        }),
        ..node.pod_config("sysctl")
    };
    let error = node.runtime.run_sandbox(&bad, "").await.unwrap_err();
    assert!(error.message().contains("cannot set net.no.such.thing"), "{error}");
    let hosts = PodSandboxConfig {
        linux: Some(LinuxPodSandboxConfig {
            sysctls: [("kernel.core_pattern".to_owned(), "|/bin/sh".to_owned())].into(),
            ..LinuxPodSandboxConfig::default()
        }),
        ..node.pod_config("not-own")
    };
    let error = node.runtime.run_sandbox(&hosts, "").await.unwrap_err();
    let expected = "sysctl \"kernel.core_pattern\" is not in a separate kernel namespace";
    assert!(error.message().contains(expected), "{error}");
}

/// A pod is removed while commands in it are exiting.
pub async fn remove_a_pod_with_running_commands(node: &TestNode) {
    for round in 0..10 {
        let pod = node.pod(&format!("busy{round}")).await;
        let id = pod.start(&script("sleep 1000")).await;
        let command = |text: &str| ["sh", "-c", text].map(str::to_owned);
        let (short, none) = (command("exit 0"), ["/none".to_owned()]);
        let timeout = Duration::from_secs(60);
        let ends = async {
            for _ in 0..20 {
                let _ = node.runtime.exec_sync(&id, &short, timeout).await;
                let _ = node.runtime.exec_sync(&id, &none, timeout).await;
            }
        };
        let remove = async {
            tokio::time::sleep(Duration::from_millis(5 * round)).await;
            node.runtime.stop_sandbox(&pod.id).await.unwrap_or_else(|error| panic!("{error}"));
        };
        tokio::join!(ends, remove);
    }
}

pub async fn container_processes_are_in_its_cgroup(node: &TestNode) {
    let pod = node.pod("counted").await;
    let id = pod.start(&script("cat /proc/self/cgroup; exec sleep 1000")).await;
    let (_, command, _) = pod.exec(&id, "cat /proc/self/cgroup").await;
    // A container sees its own cgroup as the root. Hierarchies without a controller are not used on v1.
    let first = pod.wait_for_log("main.log", &command).await;
    assert_eq!(command, first);
    let is_v2 = sys::cgroup::Cgroups::of_host().unwrap().is_v2();
    let used = if is_v2 { "0:" } else { "memory" };
    let found: Vec<&str> = first.lines().filter(|line| line.contains(used)).collect();
    assert!(matches!(found[..], [line] if line.ends_with(":/")), "{first}");
}

/// On cgroup v1, no group may have a quota above that of its parent.
pub async fn pod_quota_can_drop_below_an_exited_container(node: &TestNode) {
    let cgroups = sys::cgroup::Cgroups::of_host().unwrap();
    let pod = node.pod("groups").await;
    let parent = pod.config.linux.as_ref().unwrap().cgroup_parent.clone();
    let limit = |cpu_quota| {
        let limits = sys::cgroup::Limits { cpu_quota, cpu_period: 100_000, ..Default::default() };
        cgroups.limit(&parent, &limits)
    };
    cgroups.create(&parent).unwrap();
    limit(50_000).unwrap();
    let mut config = script("exec sleep 1000");
    let resources = LinuxContainerResources { cpu_period: 100_000, cpu_quota: 50_000, ..Default::default() };
    config.linux.as_mut().unwrap().resources = Some(resources);
    let id = pod.start(&config).await;
    if !cgroups.is_v2() {
        limit(20_000).expect_err("less than its container has");
    }
    node.runtime.stop_container(&id, Duration::ZERO).await.unwrap();
    limit(20_000).unwrap();
}

/// Only the supervisor reaps a container in another container's PID namespace, and the exit of that
/// namespace's first process waits for it.
pub async fn remove_a_pod_with_a_shared_process_namespace(node: &TestNode) {
    // Which of the two the supervisor waits for first depends on their random IDs.
    for number in 0..6 {
        let pod = node.pod(&format!("looked-into-{number}")).await;
        let target_id = pod.start(&script("exec sleep 1000")).await;
        let mut target_security = security();
        target_security.namespace_options = Some(NamespaceOption {
            pid: NamespaceMode::Target.into(),
            target_id,
            ..NamespaceOption::default()
        });
        pod.start(&with(target_security, "exec sleep 1000")).await;
        let stopped = tokio::time::timeout(Duration::from_secs(30), node.runtime.stop_sandbox(&pod.id)).await;
        stopped.expect("it ends").unwrap();
    }
}

pub async fn startup_does_not_wait_for_a_silent_supervisor(node: &TestNode) {
    let (silent, other) = (node.pod("silent").await, node.pod("other").await);
    let supervisor = *supervisors(&node.dir.path().join("runtime/pods").join(&silent.id)).first().unwrap();
    rustix::process::kill_process(supervisor, rustix::process::Signal::STOP).unwrap();
    let later = node.reopen().await;
    let state = async |id: &str| later.sandbox_status(id).await.unwrap().state();
    let (of_silent, of_other) = (state(&silent.id).await, state(&other.id).await);
    rustix::process::kill_process(supervisor, rustix::process::Signal::CONT).unwrap();
    assert_eq!((of_silent, of_other), (PodSandboxState::NotReady, PodSandboxState::Ready));
    // The supervisor is still followed.
    let started = Instant::now();
    while state(&silent.id).await != PodSandboxState::Ready {
        assert!(started.elapsed() < Duration::from_secs(30), "the supervisor is not followed");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// On cgroup v2, a group with controllers enabled for its children has no processes of its own.
pub async fn exec_runs_in_nested_cgroups(node: &TestNode) {
    let controllers = match sys::cgroup::Cgroups::of_host().unwrap() {
        sys::cgroup::Cgroups::V2 { root } => {
            std::fs::read_to_string(root.join("cgroup.controllers")).unwrap()
        }
        sys::cgroup::Cgroups::V1 { .. } => String::new(),
    };
    let Some(controller) = controllers.split_whitespace().next() else {
        return println!("skipped: no cgroup v2 controller");
    };
    let pod = node.pod("nested").await;
    let mut security = security();
    security.privileged = true;
    let nest = format!(
        "g=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup); mkdir $g/inner; echo 0 >$g/inner/cgroup.procs; \
         echo +{controller} >$g/cgroup.subtree_control && echo nested; exec sleep 1000"
    );
    let id = pod.start(&with(security, &nest)).await;
    let started = Instant::now();
    while pod.log_output("main.log") != "nested\n" {
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "no nested cgroup was created: {}",
            pod.log_output("main.log")
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (code, found, _) = pod.exec(&id, "cat /proc/self/cgroup").await;
    assert!(code == 0 && found.trim_end().ends_with("/inner"), "{code} {found}");
}

pub async fn pod_exits_with_its_pause_process(node: &TestNode) {
    let mut config = node.pod_config("kept");
    config.linux.as_mut().unwrap().security_context.as_mut().unwrap().namespace_options =
        Some(NamespaceOption { pid: NamespaceMode::Pod.into(), ..NamespaceOption::default() });
    let pod = node.pod_with(config).await;
    let supervisor = *supervisors(&node.dir.path().join("runtime/pods").join(&pod.id)).first().unwrap();
    let parent = format!("PPid:\t{}\n", supervisor.as_raw_nonzero());
    let is_child = |pid: &rustix::process::Pid| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()));
        status.is_ok_and(|status| status.contains(&parent))
    };
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let pause_process =
        pids.find_map(|pid| rustix::process::Pid::from_raw(pid).filter(is_child)).expect("a keeper");
    rustix::process::kill_process(pause_process, rustix::process::Signal::KILL).unwrap();
    let started = Instant::now();
    while node.runtime.sandbox_status(&pod.id).await.unwrap().state() == PodSandboxState::Ready {
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "the pod is still running without its pause process"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn passes_streams_and_signals(node: &TestNode) {
    let pod = node.pod("streams").await;
    let long = "i=0; while [ $i -lt 2000 ]; do echo \"line $i of many that are longer than a pipe\"; i=$((i+1)); done";
    let (code, output) = pod.finish(&script(long)).await;
    assert_eq!((code, output.lines().count()), (0, 2000));
    let (code, output) = pod.finish(&script("echo -n no end of line")).await;
    assert_eq!((code, output.as_str()), (0, "no end of line\n"));
    let (code, _) = pod.finish(&script("kill -9 $$; sleep 10")).await;
    // The first process of a PID namespace is not killed by its own signals.
    assert!(code == 137 || code == 0, "{code}");
    let tty = ContainerConfig {
        tty: true,
        stdin: true,
        ..script("tty; test -t 0 && echo a terminal; ls -l /dev/console | head -c 1")
    };
    let (code, output) = pod.finish(&tty).await;
    assert_eq!((code, output.replace('\r', "").as_str()), (0, "/dev/pts/0\na terminal\nc\n"));
    let id = pod.start(&script("while true; do echo tick; sleep 0.02; done")).await;
    // Of excessive output the first part is kept, and the command still runs to its end.
    let (code, output, _) = pod.exec(&id, "head -c 20000000 /dev/zero; exit 3").await;
    assert_eq!((code, output.len()), (3, (8 << 20) - (1 << 10)));
    let log = node.logs().join("main.log");
    std::fs::rename(&log, node.logs().join("old.log")).unwrap();
    node.runtime.reopen_log(&id).await.unwrap();
    while std::fs::read_to_string(&log).unwrap_or_default().lines().count() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn enforces_resource_limits(node: &TestNode) {
    let pod = node.pod("limits").await;
    let limited = |memory: i64, text: &str| {
        let mut config = script(text);
        config.linux.as_mut().unwrap().resources = Some(LinuxContainerResources {
            memory_limit_in_bytes: memory,
            cpu_shares: 512,
            cpu_quota: 50_000,
            cpu_period: 100_000,
            oom_score_adj: 900,
            ..LinuxContainerResources::default()
        });
        config
    };
    let id = pod.start(&limited(32 << 20, "head -c 200000000 /dev/zero | tail")).await;
    let status = wait_exited(&node.runtime, &id).await;
    assert_eq!(status.reason, "OOMKilled", "{status:?}");
    let id = pod.start(&limited(32 << 20, "sleep 1000")).await;
    let (_, seen, _) = pod.exec(&id, "cat /proc/self/oom_score_adj").await;
    assert_eq!(seen, "900\n");
    let group =
        "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max";
    assert_eq!(pod.exec(&id, group).await.1, "33554432\n");
    let more =
        LinuxContainerResources { memory_limit_in_bytes: 64 << 20, ..LinuxContainerResources::default() };
    // Without a swap limit of its own, no swap may be used.
    let swap = node.runtime.stats().await.unwrap()[0].swap.clone();
    let left = swap.and_then(|swap| Some((swap.swap_usage_bytes?.value, swap.swap_available_bytes?.value)));
    assert!(left.is_none_or(|left| left == (0, 0)), "{left:?}");
    let fields = |status: ContainerStatus| {
        let linux = status.resources.unwrap().linux.unwrap();
        (linux.memory_limit_in_bytes, linux.cpu_shares, linux.cpu_quota, linux.oom_score_adj)
    };
    let before = node.runtime.container_status(&id).await.unwrap();
    assert_eq!(fields(before), (32 << 20, 512, 50_000, 900));
    node.runtime.update_resources(&id, &more).await.unwrap();
    assert_eq!(pod.exec(&id, group).await.1, "67108864\n");
    // Fields that were not updated keep their value, and the runtime reports both after a restart.
    let after = node.runtime.container_status(&id).await.unwrap();
    assert_eq!(fields(after), (64 << 20, 512, 50_000, 900));
    let later = node.reopen().await;
    assert_eq!(fields(later.container_status(&id).await.unwrap()), (64 << 20, 512, 50_000, 900));
}

pub async fn running_pods_are_known_after_restart(node: &TestNode) {
    let pod = node.pod("kept").await;
    let id =
        pod.start(&script("echo $$ >/tmp/it; while ! test -e /tmp/go; do sleep 0.01; done; exit 4")).await;
    let later = node.reopen().await;
    // The user is reported by the supervisor, so it survives the restart.
    let user = later.container_status(&id).await.unwrap().user.unwrap().linux.unwrap();
    assert_eq!((user.uid, user.gid, user.supplemental_groups), (0, 0, vec![0]));
    let status = later.sandbox_status(&pod.id).await.unwrap();
    assert_eq!((status.state(), status.network.unwrap().ip.as_str()), (PodSandboxState::Ready, "10.88.0.2"));
    assert_eq!(later.container_status(&id).await.unwrap().state(), ContainerState::Running);
    let look = ["sh", "-c", "until grep . /tmp/it 2>/dev/null; do :; done"].map(str::to_owned);
    let output = later.exec_sync(&id, &look, Duration::from_secs(60)).await.unwrap();
    assert_eq!(output.stdout, b"1\n");
    // An address that is in use is not allocated again.
    let other = later.run_sandbox(&node.pod_config("other"), "").await.unwrap();
    assert_eq!(later.sandbox_status(&other).await.unwrap().network.unwrap().ip, "10.88.0.3");
    later.remove_sandbox(&other).await.unwrap();
    later.exec_sync(&id, &["touch", "/tmp/go"].map(str::to_owned), Duration::from_secs(9)).await.unwrap();
    assert_eq!(wait_exited(&later, &id).await.exit_code, 4);
    // It exited while no runtime was running.
    let third = node.reopen().await;
    assert_eq!(third.container_status(&id).await.unwrap().exit_code, 4);
    // The address of a stopped pod is allocated again, also after a restart and when the stopped pod is
    // removed.
    third.stop_sandbox(&pod.id).await.unwrap();
    let fourth = node.reopen().await;
    let new_pod = fourth.run_sandbox(&node.pod_config("heir"), "").await.unwrap();
    assert_eq!(fourth.sandbox_status(&new_pod).await.unwrap().network.unwrap().ip, "10.88.0.2");
    let last = node.reopen().await;
    last.remove_sandbox(&pod.id).await.unwrap();
    let next = last.run_sandbox(&node.pod_config("next"), "").await.unwrap();
    assert_eq!(last.sandbox_status(&next).await.unwrap().network.unwrap().ip, "10.88.0.3");
    for one in [&new_pod, &next] {
        last.remove_sandbox(one).await.unwrap();
    }
}

/// An upgrade replaces the program's file. Running containers are not affected.
pub async fn upgrade_keeps_running_containers(node: &TestNode) {
    let program = node.dir.path().join("program");
    let install = || {
        let new = program.with_extension("new");
        std::fs::copy(crate::kit::program(), &new).unwrap();
        std::fs::rename(new, &program).unwrap();
    };
    let runs = |pid: &rustix::process::Pid| {
        std::fs::metadata(format!("/proc/{}/exe", pid.as_raw_nonzero())).unwrap().ino()
    };
    install();
    let old = open_with(node.dir.path(), program.clone()).await;
    let config = node.pod_config("before");
    let pod = old.run_sandbox(&config, "").await.unwrap();
    let id = old.create_container(&pod, &script("sleep 1000"), &config).await.unwrap();
    old.start_container(&id).await.unwrap();
    let started_at = old.container_status(&id).await.unwrap().started_at;
    let before = supervisors(node.dir.path());
    drop(old);

    let was = std::fs::metadata(&program).unwrap().ino();
    install();
    let new = open_with(node.dir.path(), program.clone()).await;
    let status = new.container_status(&id).await.unwrap();
    assert_eq!((status.state(), status.started_at), (ContainerState::Running, started_at));
    assert_eq!(supervisors(node.dir.path()), before);
    assert_eq!(runs(&before[0]), was);
    let output = new.exec_sync(&id, &["echo".to_owned(), "here".to_owned()], Duration::from_secs(60)).await;
    assert_eq!(output.unwrap().stdout, b"here\n");
    // New pods use the new program.
    let other = new.run_sandbox(&node.pod_config("after"), "").await.unwrap();
    let now = supervisors(node.dir.path());
    let later = now.iter().find(|pid| !before.contains(pid)).unwrap();
    assert_eq!(runs(later), std::fs::metadata(&program).unwrap().ino());
    for pod in [other, pod] {
        new.remove_sandbox(&pod).await.unwrap();
    }
}

pub async fn killed_supervisor_leaves_no_processes(node: &TestNode) {
    let pod = node.pod("killed").await;
    let id = pod.start(&script("sleep 1000")).await;
    kill_supervisors(node.dir.path());
    let status = wait_exited(&node.runtime, &id).await;
    assert_eq!(status.exit_code, 255);
    let pods = node.runtime.sandboxes(&[("pod", "killed")]).await.unwrap();
    assert_eq!(pods[0].state(), PodSandboxState::NotReady);
    assert!(node.runtime.exec_sync(&id, &["true".to_owned()], Duration::from_secs(9)).await.is_err());
    let later = node.reopen().await;
    assert_eq!(later.container_status(&id).await.unwrap().exit_code, 255);
}

pub async fn applies_user_and_working_directory(node: &TestNode) {
    let pod = node.pod("users").await;
    let number = |value| Some(Int64Value { value });
    let mut user = security();
    user.run_as_user = number(1234);
    user.run_as_group = number(55);
    user.supplemental_groups = vec![77, 88];
    let mut config = with(user, "id; pwd; touch /x; echo again >/dev/stderr; echo $HOME");
    config.working_dir = "/tmp".into();
    let (_, output) = pod.finish(&config).await;
    let expected = "uid=1234 gid=55 groups=55,77,88";
    assert!(
        output.contains(expected)
            && output.contains("/tmp\n")
            && output.contains("touch: /x: Permission denied"),
        "{output}"
    );
    assert!(output.contains("again\n"), "{output}");
    // CRI reports the user, but not before the container has started.
    let id = pod.create(&config).await;
    assert_eq!(node.runtime.container_status(&id).await.unwrap().user, None);
    node.runtime.start_container(&id).await.unwrap();
    let reported_user = wait_exited(&node.runtime, &id).await.user.unwrap().linux.unwrap();
    assert_eq!(
        (reported_user.uid, reported_user.gid, reported_user.supplemental_groups),
        (1234, 55, vec![55, 77, 88])
    );
    let mut config = script("pwd");
    config.working_dir = "/made/for/it".into();
    assert_eq!(pod.finish(&config).await, (0, "/made/for/it\n".into()));
    let mut locked = security();
    locked.readonly_rootfs = true;
    let (_, output) = pod
        .finish(&with(locked, "touch /x; touch /dev/shm/y && echo but; cat /proc/mounts | grep ' / '"))
        .await;
    assert!(
        output.contains("Read-only file system") && output.contains("but\n") && output.contains(" ro,"),
        "{output}"
    );
}

pub async fn mounts_volumes_with_propagation(node: &TestNode) {
    let pod = node.pod("volumes").await;
    let host = node.dir.path().join("volume");
    std::fs::create_dir_all(host.join("sub")).unwrap();
    std::fs::write(host.join("file"), "from the host\n").unwrap();
    let mount = |path: &str, source: &str, readonly| Mount {
        container_path: path.into(),
        host_path: host.join(source).display().to_string(),
        readonly,
        ..Mount::default()
    };
    let mut config = script("cat /data/file; echo x >/data/new; echo y >/locked/new; cat /one; ls /made");
    config.mounts = vec![
        mount("/one", "file", true),
        mount("/data", "", false),
        mount("/locked", "", true),
        mount("/made", "not/there", false),
    ];
    let (code, output) = pod.finish(&config).await;
    assert_eq!(code, 0, "{output}");
    assert!(
        output.contains("from the host\n")
            && output.contains("can't create /locked/new: Read-only file system"),
        "{output}"
    );
    assert_eq!(std::fs::read_to_string(host.join("new")).unwrap(), "x\n");
}

/// The memory that each pod needs for its supervisor, without the pages of the program.
pub async fn supervisor_memory_is_small(node: &TestNode) {
    const MAX_PRIVATE_KIB: u64 = 400;
    let pod = node.pod("small").await;
    let print_lines =
        "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; echo done >/dev/shm/done; sleep 1000";
    let id = pod.start(&script(print_lines)).await;
    pod.exec(&id, "until test -e /dev/shm/done; do sleep 0.01; done").await;
    let pid = supervisors(node.dir.path())[0].as_raw_nonzero();
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut is_own = false;
    let mut own = 0;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [range, _, _, _, inode, ..] if range.contains('-') => is_own = inode == "0",
            ["Private_Dirty:", size, "kB"] if is_own => own += size.parse::<u64>().unwrap(),
            _ => {}
        }
    }
    println!("a supervisor has {own} kB for itself");
    assert!(own > 0 && own < MAX_PRIVATE_KIB, "{own} kB\n{text}");
}

/// Deleting skiff's data directory stops the pods, whether skiff is running or not.
pub async fn pod_exits_when_its_directory_is_deleted(node: &TestNode) {
    let until = async |what: &str, done: &dyn Fn() -> bool| {
        let started = std::time::Instant::now();
        while !done() {
            assert!(started.elapsed() < Duration::from_secs(60), "timed out: {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let pods = node.dir.path().join("runtime/pods");
    let group = |pod: &str| format!("/skiff-test-{}/pod{pod}", std::process::id());
    let groups = sys::cgroup::Cgroups::of_host().unwrap();
    let is_there = |group: &str| groups.directories(group).iter().any(|place| place.exists());
    let links = || podnet::links("skp").unwrap().len();
    for (name, shared) in [("orphan", false), ("orphans", true)] {
        let mut config = node.pod_config(name);
        let options = NamespaceOption {
            pid: if shared { NamespaceMode::Pod } else { NamespaceMode::Container }.into(),
            ..NamespaceOption::default()
        };
        let linux = config.linux.as_mut().unwrap();
        linux.security_context.as_mut().unwrap().namespace_options = Some(options.clone());
        let pod = node.pod_with(config).await;
        let own = LinuxContainerSecurityContext { namespace_options: Some(options), ..security() };
        let id = pod.start(&with(own, "trap '' TERM; sleep 1000 & sleep 1000 & wait")).await;
        assert_eq!((supervisors(node.dir.path()).is_empty(), links()), (false, 1));
        std::fs::remove_dir_all(pods.join(&pod.id)).unwrap();
        until("the supervisor has exited", &|| supervisors(node.dir.path()).is_empty()).await;
        assert_eq!(links(), 0);
        assert!(!is_there(&group(name)), "the cgroups of the pod are removed");
        // The running runtime notices it and continues.
        assert_eq!(wait_exited(&node.runtime, &id).await.exit_code, 137);
        node.runtime.remove_sandbox(&pod.id).await.unwrap();
    }
    // If only the directory of a container is deleted, only that container stops.
    let pod = node.pod("half").await;
    let [first, second] = [pod.start(&script("sleep 1000")).await, pod.start(&script("sleep 1000")).await];
    std::fs::remove_dir_all(pods.join(&pod.id).join(&first)).unwrap();
    assert_eq!(wait_exited(&node.runtime, &first).await.exit_code, 137);
    assert_eq!(node.runtime.container_status(&second).await.unwrap().state(), ContainerState::Running);
    assert_eq!(pod.exec(&second, "echo still here").await.1, "still here\n");
}

pub async fn supervisor_terminates_containers_on_sigterm(node: &TestNode) {
    const DEADLINE: Duration = Duration::from_secs(60);
    let pod = node.pod("sigterm").await;
    let handles_sigterm =
        pod.start(&script("trap 'exit 7' TERM; touch /ready; while true; do sleep 0.05; done")).await;
    let ignores_sigterm =
        pod.start(&script("trap '' TERM; touch /ready; while true; do sleep 0.05; done")).await;
    for id in [&handles_sigterm, &ignores_sigterm] {
        assert_eq!(pod.exec(id, "until test -e /ready; do :; done").await.0, 0);
    }
    let started = Instant::now();
    let cgroups = sys::cgroup::Cgroups::of_host().unwrap();
    for pid in supervisors(node.dir.path()) {
        // On cgroup v2, supervisors are not in the cgroup of skiff's service.
        let group = cgroups.of_process(pid.as_raw_nonzero().get());
        assert!(group.is_none_or(|group| group == runtime::embedded::SUPERVISORS_CGROUP));
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }
    let code = async |id: &str| node.runtime.container_status(id).await.unwrap().exit_code;
    let ready =
        async || node.runtime.sandbox_status(&pod.id).await.unwrap().state() == PodSandboxState::Ready;
    while ready().await {
        assert!(started.elapsed() < DEADLINE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!((code(&handles_sigterm).await, code(&ignores_sigterm).await), (7, 137));
    assert!(supervisors(node.dir.path()).is_empty());
}
