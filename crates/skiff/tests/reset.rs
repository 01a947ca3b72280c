//! `skiff reset` restores the host to its state before `skiff server`.
//!
//! Needs root, kubectl, busybox and nft; skipped otherwise.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use testkit::{Network, Server};

const DEADLINE: Duration = Duration::from_secs(60);
const IMAGE: &str = "docker.io/library/busybox:1.36";

/// Links, routes, rules, mounts, cgroups and processes that belong to this network namespace or contain
/// one of the needles.
fn host_state(network: &Network, patterns: &[String]) -> BTreeSet<String> {
    let mut state = BTreeSet::new();
    let sysctl = "cat /proc/sys/net/ipv4/ip_forward";
    for words in ["ip -o link", "ip -o address", "ip route show table all", "nft list ruleset", sysctl] {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", network.path().display())).arg("--").args(words.split(' '));
        let output = command.output().expect("a program");
        assert!(output.status.success(), "{words}");
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        state.extend(stdout.lines().map(|line| format!("{words}: {line}")));
    }
    let matches_pattern = |text: &str| patterns.iter().any(|pattern| text.contains(pattern.as_str()));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    state.extend(mounts.lines().filter(|line| matches_pattern(line)).map(|line| format!("mount: {line}")));
    for hierarchy in ["", "/memory", "/cpu", "/pids"] {
        let mut pending = vec![std::path::PathBuf::from(format!("/sys/fs/cgroup{hierarchy}/skiff"))];
        while let Some(cgroup) = pending.pop() {
            let entries = std::fs::read_dir(&cgroup).into_iter().flatten().flatten();
            pending.extend(entries.map(|entry| entry.path()).filter(|path| path.is_dir()));
            let name = cgroup.display().to_string();
            if matches_pattern(&name) {
                state.insert(format!("cgroup: {name}"));
            }
        }
    }
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).replace('\0', " ");
        if matches_pattern(&words) {
            state.insert(format!("process: {words}"));
        }
    }
    state
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

#[test]
fn host_is_clean_after_reset() {
    check(&[], Server::stop);
}

/// A managed containerd stops with the server unless that is killed; its pods keep running in both
/// cases.
#[test]
fn host_is_clean_after_reset_with_containerd() {
    if !has("containerd") || std::path::Path::new("/run/containerd/containerd.sock").exists() {
        eprintln!("skipped: needs a containerd that does not run yet");
        return;
    }
    check(&["--container-runtime-endpoint=containerd"], Server::kill9);
}

#[track_caller]
fn check(flags: &[&str], end: fn(&mut Server)) {
    let busybox = std::path::Path::new("/bin/busybox").exists();
    if !testkit::has_kubectl() || !busybox || !has("nft") || !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root, kubectl, busybox-static and nft");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let network = Network::new().expect("a network");
    let mut sysctl = Command::new("nsenter");
    sysctl.arg(format!("--net={}", network.path().display())).args(["sh", "-c"]);
    assert!(sysctl.arg("echo 0 >/proc/sys/net/ipv4/ip_forward").status().expect("nsenter").success());
    let before = host_state(&network, &[]);
    let mut server =
        Server::start_with_pods(&network, &[&["--controllers=*", "--node-name=here"], flags].concat());
    let data = server.data_dir().display().to_string();
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    let import = ["image", "import", "--data-dir", &data, &archive];
    server.wait_until("the runtime has the image", || server.skiff(&import).code == 0);
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {"app": "p"}},
        "spec": {
            "containers": [{
                "name": "c", "image": IMAGE, "ports": [{"containerPort": 80, "hostPort": 8081}],
                "volumeMounts": [{"name": "m", "mountPath": "/m"}],
            }],
            "volumes": [{"name": "m", "emptyDir": {"medium": "Memory"}}],
        },
    });
    let started = Instant::now();
    while server.kubectl_with(&["apply", "-f", "-"], &pod.to_string()).code != 0 {
        assert!(started.elapsed() < DEADLINE, "{}", server.log());
        std::thread::yield_now();
    }
    server.kubectl(&["expose", "pod", "p", "--port", "80"]).ok();
    let uid = loop {
        let pod_state =
            server.kubectl(&["get", "pod", "p", "-o", "jsonpath={.status.phase} {.metadata.uid}"]).stdout;
        if let Some(uid) = pod_state.strip_prefix("Running ") {
            break uid.to_owned();
        }
        assert!(started.elapsed() < DEADLINE, "{pod_state}\n{}", server.log());
        std::thread::yield_now();
    };
    let metadata = std::fs::metadata(server.data_dir().join("agent/pods")).expect("a directory");
    let patterns = [data.clone(), uid, format!("skiff/node-{:x}-{:x}", metadata.dev(), metadata.ino())];
    let running = host_state(&network, &patterns);
    for kind in ["ip -o link: ", "nft list ruleset: ", "mount: ", "cgroup: ", "process: "] {
        let exists = running.difference(&before).any(|line| line.starts_with(kind));
        assert!(exists, "no {kind} to be removed: {running:#?}");
    }

    let reset = |server: &Server, more: &[&str]| {
        let mut command = server.command(testkit::binary().expect("a program"));
        let output = command.args(["reset", "--data-dir", &data]).args(more).output().expect("skiff");
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        (output.status.success(), format!("{stdout}{stderr}"))
    };
    let (done, said) = reset(&server, &[]);
    assert!(
        !done && said.contains("skiff server (pid ") && said.contains("is running on this host"),
        "{said}"
    );
    end(&mut server);
    let (done, said) = reset(&server, &[]);
    assert!(done && server.data_dir().exists(), "{said}");
    let after = host_state(&network, &patterns);
    assert_eq!(after, before);
    // A second reset has nothing to remove and succeeds; this one removes all data as well.
    let (done, said) = reset(&server, &["--yes"]);
    assert!(done && !server.data_dir().exists(), "{said}");
    assert_eq!(host_state(&network, &patterns), before);
}

/// A node with two pods, one of which cannot be removed.
#[test]
fn reset_stops_server_and_handles_failed_pod_removal() {
    let busybox = std::path::Path::new("/bin/busybox").exists();
    if !testkit::has_kubectl() || !busybox || !has("nft") || !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root, kubectl, busybox-static and nft");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let network = Network::new().expect("a network");
    let before = host_state(&network, &[]);
    let mut server = Server::start_with_pods(&network, &["--controllers=*", "--node-name=here"]);
    let data = server.data_dir().display().to_string();
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    let skiff = |server: &Server, words: &[&str]| {
        let mut command = server.command(testkit::binary().expect("a program"));
        let output = command.args(words).env_remove("SKIFF_DATA_DIR").output().expect("skiff");
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), text.concat())
    };
    // Without --data-dir, the command uses that of the only node in this network namespace.
    server.wait_until("the runtime has the image", || skiff(&server, &["image", "import", &archive]).0);
    let listed = skiff(&server, &["image", "ls"]).1;
    assert!(listed.contains(&data) && listed.contains("busybox"), "{listed}");
    server.wait_for_default_service_account();
    for name in ["one", "two"] {
        server.run_pod(name, "sleep 1000000", "Always");
        server.wait_for_pod(name, "condition=Ready");
    }
    let (done, text) = skiff(&server, &["reset", "--data-dir", &dir.path().display().to_string()]);
    assert!(!done && text.contains("is running on this host"), "another directory: {text}");

    let supervisors = || {
        let mark = format!(" supervise {data}");
        testkit::processes().into_iter().filter(|(_, words)| words.contains(&mark)).count()
    };
    assert_eq!(supervisors(), 2);
    let (done, text) = skiff(&server, &["stop", "--data-dir", &data, "--grace-period", "1"]);
    assert!(done && text.contains("ended 2 pods"), "{text}");
    assert_eq!(supervisors(), 0);
    server.restart();
    for name in ["one", "two"] {
        server.wait_for_pod(name, "condition=Ready");
    }
    // The pod's directory cannot be removed while something is mounted in it.
    let pods = server.data_dir().join("agent/runtime/pods");
    let pod =
        std::fs::read_dir(&pods).expect("pods").flatten().find(|pod| pod.path().join("socket").exists());
    let mount_point = pod.expect("a pod").path().join("held");
    std::fs::create_dir(&mount_point).expect("a directory");
    let mount =
        Command::new("mount").args(["-t", "tmpfs", "held"]).arg(&mount_point).status().expect("mount");
    assert!(mount.success());
    let (done, text) = skiff(&server, &["reset", "--data-dir", &data, "--stop"]);
    assert!(text.contains("stopping skiff server (pid "), "{text}");
    assert!(!done && text.contains("not everything could be removed: cannot end the pod default/"), "{text}");
    assert_eq!(supervisors(), 0, "the other pod, too");
    let (done, text) = skiff(&server, &["reset", "--data-dir", &data]);
    assert!(done, "{text}");
    server.stop();
    let patterns = [data.clone()];
    assert_eq!(host_state(&network, &patterns), before);
}
