//! `skiff reset` leaves a host as it was before `skiff server`.
//!
//! Needs root, kubectl, busybox and nft; says so and passes where these are missing.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use testkit::{Network, Server};

const DEADLINE: Duration = Duration::from_secs(60);
const IMAGE: &str = "docker.io/library/busybox:1.36";

/// Links, routes, rules, mounts, cgroups and processes, as far as they are of this network or this directory.
fn state(network: &Network, needles: &[String]) -> BTreeSet<String> {
    let mut state = BTreeSet::new();
    let sysctl = "cat /proc/sys/net/ipv4/ip_forward";
    for words in ["ip -o link", "ip -o address", "ip route show table all", "nft list ruleset", sysctl] {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", network.path().display())).arg("--").args(words.split(' '));
        let output = command.output().expect("a program");
        assert!(output.status.success(), "{words}");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        state.extend(said.lines().map(|line| format!("{words}: {line}")));
    }
    let ours = |text: &str| needles.iter().any(|needle| text.contains(needle.as_str()));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    state.extend(mounts.lines().filter(|line| ours(line)).map(|line| format!("mount: {line}")));
    for hierarchy in ["", "/memory", "/cpu", "/pids"] {
        let mut within = vec![std::path::PathBuf::from(format!("/sys/fs/cgroup{hierarchy}/skiff"))];
        while let Some(place) = within.pop() {
            let entries = std::fs::read_dir(&place).into_iter().flatten().flatten();
            within.extend(entries.map(|entry| entry.path()).filter(|path| path.is_dir()));
            let name = place.display().to_string();
            if ours(&name) {
                state.insert(format!("cgroup: {name}"));
            }
        }
    }
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).replace('\0', " ");
        if ours(&words) {
            state.insert(format!("process: {words}"));
        }
    }
    state
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

#[test]
fn a_host_is_as_it_was() {
    check(&[], Server::stop);
}

/// A containerd of ours goes with the server, unless that is killed; and its pods never do.
#[test]
fn a_host_is_as_it_was_before_containerd() {
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
    let before = state(&network, &[]);
    let mut server =
        Server::start_with_pods(&network, &[&["--controllers=*", "--node-name=here"], flags].concat());
    let data = server.data_dir().display().to_string();
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    let import = ["image", "import", "--data-dir", &data, &archive];
    server.until("the runtime has the image", || server.skiff(&import).code == 0);
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
    let begun = Instant::now();
    while server.kubectl_with(&["apply", "-f", "-"], &pod.to_string()).code != 0 {
        assert!(begun.elapsed() < DEADLINE, "{}", server.log());
        std::thread::yield_now();
    }
    server.kubectl(&["expose", "pod", "p", "--port", "80"]).ok();
    let uid = loop {
        let said =
            server.kubectl(&["get", "pod", "p", "-o", "jsonpath={.status.phase} {.metadata.uid}"]).stdout;
        if let Some(uid) = said.strip_prefix("Running ") {
            break uid.to_owned();
        }
        assert!(begun.elapsed() < DEADLINE, "{said}\n{}", server.log());
        std::thread::yield_now();
    };
    let place = std::fs::metadata(server.data_dir().join("agent/pods")).expect("a directory");
    let needles = [data.clone(), uid, format!("skiff/node-{:x}-{:x}", place.dev(), place.ino())];
    let running = state(&network, &needles);
    for kind in ["ip -o link: ", "nft list ruleset: ", "mount: ", "cgroup: ", "process: "] {
        let there = running.difference(&before).any(|line| line.starts_with(kind));
        assert!(there, "no {kind} to be removed: {running:#?}");
    }

    let reset = |server: &Server, more: &[&str]| {
        let mut command = server.command(testkit::binary().expect("a program"));
        let output = command.args(["reset", "--data-dir", &data]).args(more).output().expect("skiff");
        let (said, complaint) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        (output.status.success(), format!("{said}{complaint}"))
    };
    let (done, said) = reset(&server, &[]);
    assert!(
        !done && said.contains("skiff server (pid ") && said.contains("is running on this host"),
        "{said}"
    );
    end(&mut server);
    let (done, said) = reset(&server, &[]);
    assert!(done && server.data_dir().exists(), "{said}");
    let after = state(&network, &needles);
    assert_eq!(after, before);
    // Again, since there may be nothing to remove; and with all data.
    let (done, said) = reset(&server, &["--yes"]);
    assert!(done && !server.data_dir().exists(), "{said}");
    assert_eq!(state(&network, &needles), before);
}

/// A node with two pods, one of which cannot be removed.
#[test]
fn reset_stops_the_server_and_goes_on_after_a_failure() {
    let busybox = std::path::Path::new("/bin/busybox").exists();
    if !testkit::has_kubectl() || !busybox || !has("nft") || !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root, kubectl, busybox-static and nft");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let network = Network::new().expect("a network");
    let before = state(&network, &[]);
    let mut server = Server::start_with_pods(&network, &["--controllers=*", "--node-name=here"]);
    let data = server.data_dir().display().to_string();
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    let skiff = |server: &Server, words: &[&str]| {
        let mut command = server.command(testkit::binary().expect("a program"));
        let output = command.args(words).env_remove("SKIFF_DATA_DIR").output().expect("skiff");
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), text.concat())
    };
    // Without a data directory: that of the only node in this network is meant.
    server.until("the runtime has the image", || skiff(&server, &["image", "import", &archive]).0);
    let listed = skiff(&server, &["image", "ls"]).1;
    assert!(listed.contains(&data) && listed.contains("busybox"), "{listed}");
    server.until_pods_can_be_made();
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
    // The pod's directory is not empty as long as something is mounted in it.
    let pods = server.data_dir().join("agent/runtime/pods");
    let pod =
        std::fs::read_dir(&pods).expect("pods").flatten().find(|pod| pod.path().join("socket").exists());
    let held = pod.expect("a pod").path().join("held");
    std::fs::create_dir(&held).expect("a directory");
    let mount = Command::new("mount").args(["-t", "tmpfs", "held"]).arg(&held).status().expect("mount");
    assert!(mount.success());
    let (done, text) = skiff(&server, &["reset", "--data-dir", &data, "--stop"]);
    assert!(text.contains("stopping skiff server (pid "), "{text}");
    assert!(!done && text.contains("not everything could be removed: cannot end the pod default/"), "{text}");
    assert_eq!(supervisors(), 0, "the other pod, too");
    let (done, text) = skiff(&server, &["reset", "--data-dir", &data]);
    assert!(done, "{text}");
    server.stop();
    let needles = [data.clone()];
    assert_eq!(state(&network, &needles), before);
}
