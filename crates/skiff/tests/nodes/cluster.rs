//! The `skiff dev` cluster of these tests, in a network namespace of its own.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use testkit::{NO_EVICTION_FLAGS, Network, Process};

use super::{DEADLINE, IMAGE};

pub struct Cluster {
    pub process: Process,
    pub network: Network,
    pub dir: tempfile::TempDir,
}

impl Cluster {
    pub fn start(nodes: u8, flags: &[&str]) -> Option<Cluster> {
        let busybox = std::path::Path::new("/bin/busybox").exists();
        if !testkit::has_kubectl() || !busybox || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root, kubectl and busybox-static");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("skiff-dev-").tempdir().expect("a directory");
        let network = Network::new().expect("a network");
        let image = testkit::busybox_image(dir.path(), IMAGE).expect("an image");
        let mut command = in_network(&network, testkit::binary().expect("a program"));
        command.args(["dev", "--nodes", &nodes.to_string(), "--data-dir"]).arg(dir.path().join("cluster"));
        command.arg("--image").arg(image).args(flags).arg("--").args(NO_EVICTION_FLAGS);
        let started = Instant::now();
        let mut process = Process::spawn(&mut command).expect("a process");
        let ready = |log: &str| log.contains("Ctrl-C removes everything").then_some(());
        if let Err(error) = process.wait_until_log(2 * DEADLINE, ready) {
            panic!("{error:#}");
        }
        eprintln!("{nodes} nodes after {:.1?}", started.elapsed());
        Some(Cluster { process, network, dir })
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("cluster")
    }

    /// Runs kubectl; returns whether it succeeded, and its output.
    pub fn kubectl(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = in_network(&self.network, "kubectl");
        command
            .args(arguments)
            .env("KUBECONFIG", self.data().join("kubeconfig"))
            .env("HOME", self.dir.path());
        let output = command.output().expect("kubectl");
        let text = if output.status.success() { &output.stdout } else { &output.stderr };
        (output.status.success(), String::from_utf8_lossy(text).into_owned())
    }

    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let (is_success, output) = self.kubectl(arguments);
        assert!(is_success, "kubectl {}: {output}\n{}", arguments.join(" "), self.logs());
        output
    }

    #[track_caller]
    pub fn apply(&self, yaml: &str) {
        let path = self.dir.path().join("objects.yaml");
        std::fs::write(&path, yaml).expect("a file");
        self.ok(&["apply", "-f", &path.display().to_string()]);
    }

    #[track_caller]
    pub fn sh(&self, pod: &str, script: &str) -> String {
        self.ok(&["exec", pod, "--", "sh", "-c", script])
    }

    #[track_caller]
    pub fn wait_until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let started = Instant::now();
        while !condition() {
            if started.elapsed() > DEADLINE {
                let (_, state) = self.kubectl(&["get", "pods,events,nodes", "-A", "-o", "wide"]);
                panic!("timed out waiting for: {what}\n{state}\n{}", self.logs());
            }
            std::thread::yield_now();
        }
    }

    pub fn logs(&self) -> String {
        let names = ["node-1", "node-2", "node-3"];
        let read =
            |name| std::fs::read_to_string(self.data().join(format!("{name}.log"))).unwrap_or_default();
        names.map(|name| format!("{name}:\n{}", read(name))).join("\n")
    }

    /// Pods with a label: name and address by node.
    pub fn pods(&self, label: &str) -> BTreeMap<String, (String, String)> {
        let format =
            "jsonpath={range .items[*]}{.spec.nodeName} {.metadata.name} {.status.podIP}{\"\\n\"}{end}";
        let listed = self.ok(&["get", "pods", "-l", label, "-o", format]);
        let words = |line: &str| {
            let mut words = line.split_whitespace().map(str::to_owned);
            Some((words.next()?, (words.next()?, words.next()?)))
        };
        listed.lines().filter_map(words).collect()
    }

    /// The network namespace of a pod, found by one of its processes.
    pub fn pod_netns(&self, pod: &str) -> File {
        let uid = self.ok(&["get", "pod", pod, "-o", "jsonpath={.metadata.uid}"]);
        let processes = std::fs::read_dir("/proc").expect("processes").flatten();
        let found = processes.map(|entry| entry.path()).find(|path| {
            std::fs::read_to_string(path.join("cgroup"))
                .is_ok_and(|groups| groups.contains(&format!("pod{uid}")))
        });
        File::open(found.expect("a process of the pod").join("ns/net")).expect("a network")
    }

    /// The process of a node.
    pub fn node_process(&self, node: usize) -> rustix::process::Pid {
        let processes = std::fs::read_to_string(self.data().join("processes")).expect("processes");
        let number = processes.lines().nth(node).and_then(|line| line.parse().ok());
        number.and_then(rustix::process::Pid::from_raw).expect("the process of a node")
    }

    pub fn cluster_ip(&self, service: &str) -> String {
        self.ok(&["get", "service", service, "-o", "jsonpath={.spec.clusterIP}"])
    }

    /// Links, routes, rules, mounts and processes of this cluster.
    pub fn kernel_state(&self) -> Vec<String> {
        kernel_state(&self.network, &self.dir.path().display().to_string())
    }
}

/// Cleans up after a failed test as well.
impl Drop for Cluster {
    fn drop(&mut self) {
        if self.data().exists() {
            self.process.kill();
            let mut command = in_network(&self.network, testkit::binary().expect("a program"));
            let _ = command.args(["dev", "--remove", "--data-dir"]).arg(self.data()).status();
        }
    }
}

pub fn in_network(network: &Network, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", network.path().display())).arg("--").arg(program);
    command
}

pub fn kernel_state(network: &Network, dir: &str) -> Vec<String> {
    let mut state = Vec::new();
    for words in
        [&["ip", "-o", "link"][..], &["ip", "route", "show", "table", "all"], &["nft", "list", "ruleset"]]
    {
        let output = in_network(network, words[0]).args(&words[1..]).output();
        let text =
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        state.extend(text.lines().map(|line| format!("{}: {line}", words.join(" "))));
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    state.extend(mounts.lines().filter(|line| line.contains(dir)).map(str::to_owned));
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let command_line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&command_line).replace('\0', " ");
        if words.contains(dir) {
            state.push(words);
        }
    }
    state
}
