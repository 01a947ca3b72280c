//! Pods with the embedded runtime, as users see them: the real kubectl, real containers, the real
//! kernel.
//!
//! Needs root, kubectl and busybox; skipped otherwise.

#[path = "containers/attach.rs"]
mod attach;
#[path = "containers/isolation.rs"]
mod isolation;
#[path = "containers/kubelet_dir.rs"]
mod kubelet_dir;
#[path = "containers/resize.rs"]
mod resize;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::Stdio;

use testkit::{BackgroundCommand, Network, Server};

const IMAGE: &str = "docker.io/library/busybox:1.36";

struct Cluster {
    server: Server,
    dir: tempfile::TempDir,
    _network: Network,
}

fn start() -> Option<Cluster> {
    start_with(&[])
}

fn start_with(flags: &[&str]) -> Option<Cluster> {
    if !testkit::can_run_pods(&["busybox"]) {
        return None;
    }
    start_in(Network::new().expect("a network"), flags)
}

fn start_in(network: Network, flags: &[&str]) -> Option<Cluster> {
    let dir = tempfile::tempdir().expect("a directory");
    let flags = [&["--controllers=*", "--node-name=here"], flags].concat();
    let server = Server::start_with_pods(&network, &flags);
    let cluster = Cluster { server, dir, _network: network };
    let archive = testkit::busybox_image(cluster.dir.path(), IMAGE).expect("an image").display().to_string();
    let data = cluster.server.data_dir().display().to_string();
    assert_eq!(
        cluster.server.skiff(&["image", "import", "--data-dir", &data, &archive]).ok(),
        format!("{IMAGE}\n")
    );
    let listed = cluster.server.skiff(&["image", "ls", "--data-dir", &data]).ok();
    assert!(listed.contains(IMAGE), "{listed}");
    cluster.server.wait_for_default_service_account();
    Some(cluster)
}

impl Cluster {
    /// The supervisor processes of the pods, with their command lines.
    fn supervisors(&self) -> impl Iterator<Item = (u32, String)> {
        let marker = format!(" supervise {}", self.server.data_dir().display());
        testkit::processes().into_iter().filter(move |(_, words)| words.contains(&marker))
    }

    /// Counts the resources of pods on the host.
    fn resource_counts(&self) -> BTreeMap<&'static str, usize> {
        let links = self.server.command("ip").args(["-o", "link"]).output().expect("ip");
        let links = String::from_utf8_lossy(&links.stdout).matches(": skp").count();
        let data = self.server.data_dir().display().to_string();
        let count = |path: std::path::PathBuf| std::fs::read_dir(path).into_iter().flatten().count();
        let runtime = self.server.data_dir().join("agent/runtime");
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        BTreeMap::from([
            ("links", links),
            ("supervisors", self.supervisors().count()),
            ("mounts", mounts.matches(&data).count()),
            ("pods", count(runtime.join("pods"))),
            ("addresses", count(runtime.join("addresses"))),
        ])
    }
}

#[test]
fn pod_lifecycle_with_kubectl() {
    let Some(mut cluster) = start() else { return };
    cluster.server.run_pod("talker", "echo one; echo two; exit 3", "Never");
    cluster.server.run_pod("web", "exec nc -ll -p 8080 -e echo hello from web", "Never");
    cluster.server.run_pod("ticker", "while true; do echo tick; sleep 0.1; done", "Never");
    cluster.server.run_pod("reader", "while read line; do echo read $line; done", "Never");
    cluster.server.wait_for_pod("talker", "jsonpath={.status.phase}=Failed");
    let server = &cluster.server;
    assert_eq!(server.kubectl(&["logs", "talker"]).ok(), "one\ntwo\n");
    let code = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}";
    assert_eq!(server.kubectl(&["get", "pod", "talker", "-o", code]).ok(), "3");
    for name in ["web", "ticker", "reader"] {
        cluster.server.wait_for_pod(name, "condition=Ready");
    }
    exec(&cluster);
    exec_with_a_terminal(&cluster);
    copy(&cluster);
    port_forward(&cluster);
    attach::attach(&cluster);
    attach::attach_once(&cluster);
    pod_to_pod_network(&cluster);
    user_namespaces_and_image_volumes(&cluster);
    apparmor_unavailable(&cluster);
    missing_mount_tools(&cluster);
    optional_pod_fields(&cluster);
    volumes(&cluster);
    isolation::qos_cgroups(&cluster);
    isolation::secret_volumes_are_tmpfs(&cluster);
    restart_all_containers(&cluster);
    supervisor_memory_is_bounded(&cluster);
    images(&cluster);
    restart(&mut cluster);
    isolation::secret_update_is_visible(&cluster, "three");
    cluster.server.kubectl(&["delete", "pods", "--all", "--wait"]).ok();
    cluster
        .server
        .wait_until("no resources remain", || cluster.resource_counts().values().all(|count| *count == 0));
}

/// The server listens on 127.0.0.1, as with `make up`, and the `kubernetes` Service has the node's
/// address as its endpoint.
#[test]
fn pods_can_use_server_on_loopback_address() {
    if !testkit::can_run_pods(&["busybox"]) {
        return;
    }
    let network = Network::new().expect("a network");
    let in_network = |words: &str| {
        let mut command = std::process::Command::new("nsenter");
        command.arg(format!("--net={}", network.path().display())).arg("--").args(words.split(' '));
        assert!(command.status().expect("nsenter").success(), "{words}");
    };
    in_network("ip link add uplink type veth peer name far");
    in_network("ip address add 192.0.2.7/24 dev uplink");
    in_network("ip link set uplink up");
    in_network("ip link set far up");
    let Some(cluster) = start_in(network, &[]) else { return };
    // A TLS server responds to other protocols with an alert, whose first byte is 21.
    let script = "until echo nonsense | nc -w 5 $KUBERNETES_SERVICE_HOST 443 | od -An -tu1 | grep -q '^ *21 '; do \
        sleep 0.1; done; echo reached";
    cluster.server.run_pod("client", script, "Never");
    cluster.server.wait_for_pod("client", "jsonpath={.status.phase}=Succeeded");
    assert_eq!(cluster.server.kubectl(&["logs", "client"]).ok(), "reached\n");
    cluster.server.kubectl(&["delete", "pods", "--all", "--wait"]).ok();
}

/// The server is killed in the middle of several rollouts: no container restarts, and no resources
/// remain.
#[test]
fn rollout_completes_after_server_is_killed() {
    let Some(mut cluster) = start() else { return };
    cluster.server.run_pod("bystander", "sleep 1000000", "Never");
    cluster.server.wait_for_pod("bystander", "condition=Ready");
    let id = ["get", "pod", "bystander", "-o", "jsonpath={.status.containerStatuses[0].containerID}"];
    let before = cluster.server.kubectl(&id).ok();
    let pods = ["get", "pods", "-l", "app=many", "--no-headers"];
    let rollout_status = ["rollout", "status", "deployment/many", "--timeout=180s"];
    let mut uids = String::new();
    for round in 0..3 {
        let main = serde_json::json!({
            "name": "main", "image": "busybox:1.36", "command": ["sleep", "1000000"],
            "env": [{"name": "ROUND", "value": round.to_string()}],
        });
        let deployment = serde_json::json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "many"},
            "spec": {
                "replicas": 12, "selector": {"matchLabels": {"app": "many"}},
                "template": {
                    "metadata": {"labels": {"app": "many"}},
                    "spec": {"terminationGracePeriodSeconds": 1, "containers": [main]},
                },
            },
        });
        cluster.server.kubectl_with(&["apply", "-f", "-"], &deployment.to_string()).ok();
        if round > 0 {
            let is_under_way = || cluster.server.kubectl(&pods).ok().contains("Terminating");
            cluster.server.wait_until("the rollout is under way", is_under_way);
            cluster.server.kill9();
            cluster.server.restart();
        }
        let done = cluster.server.kubectl(&rollout_status);
        assert_eq!(done.code, 0, "{}\n{}", done.stderr, cluster.server.log());
        let own = "jsonpath={.items[*].metadata.uid} ";
        uids += &cluster.server.kubectl(&["get", "pods", "-o", own]).ok();
    }
    // The DNS server is back, on another port than before.
    let log = cluster.server.log();
    assert!(!log.contains("cannot make the Service kube-dns"), "{log}");
    assert_eq!(cluster.server.kubectl(&id).ok(), before);
    let counts = ["get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[*].restartCount}"];
    let counts = cluster.server.kubectl(&counts).ok();
    assert!(counts.split_whitespace().all(|count| count == "0"), "{counts}");
    cluster.server.kubectl(&["delete", "deployment", "many"]).ok();
    cluster.server.kubectl(&["delete", "pods", "--all", "--wait"]).ok();
    cluster
        .server
        .wait_until("no resources remain", || cluster.resource_counts().values().all(|count| *count == 0));
    let is_removed = |uid: &str| testkit::cgroups_of_pod(uid).is_empty();
    cluster.server.wait_until("their cgroups are gone", || uids.split_whitespace().all(is_removed));
}

/// Pods with slow termination, more than there are worker threads, do not delay the start of others.
#[test]
fn slow_termination_does_not_block_new_pods() {
    let Some(cluster) = start() else { return };
    let deployment = serde_json::json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "slow"},
        "spec": {
            "replicas": 40, "selector": {"matchLabels": {"app": "slow"}},
            "template": {
                "metadata": {"labels": {"app": "slow"}},
                "spec": {
                    "terminationGracePeriodSeconds": 600,
                    "containers": [{"name": "main", "image": "busybox:1.36", "command": ["sleep", "1000000"]}],
                },
            },
        },
    });
    cluster.server.kubectl_with(&["apply", "-f", "-"], &deployment.to_string()).ok();
    cluster.server.kubectl(&["rollout", "status", "deployment/slow", "--timeout=180s"]).ok();
    // As PID 1 of its container, `sleep` ignores SIGTERM.
    cluster.server.kubectl(&["delete", "deployment", "slow"]).ok();
    let ending = || cluster.server.kubectl(&["get", "pods"]).ok().matches("Terminating").count();
    cluster.server.wait_until("all pods are terminating", || ending() == 40);
    cluster.server.run_pod("next", "sleep 1000", "Always");
    cluster.server.wait_for_pod("next", "condition=Ready");
    assert_eq!(ending(), 40);
    cluster.server.kubectl(&["delete", "pods", "--all", "--force", "--grace-period=0"]).ok();
    cluster
        .server
        .wait_until("no resources remain", || cluster.resource_counts().values().all(|count| *count == 0));
}

/// The filesystem with the logs is full: running pods continue, exit codes are right, and new pods
/// start.
#[test]
fn full_log_disk_does_not_stop_pods() {
    let Some(cluster) = start() else { return };
    let logs = FullDisk::at(cluster.server.data_dir().join("agent/logs"));
    cluster.server.run_pod(
        "talker",
        "while true; do echo a line that takes what room there is left; done",
        "Never",
    );
    cluster.server.wait_for_pod("talker", "condition=Ready");
    cluster.server.wait_until("the filesystem is full", || logs.is_full());
    cluster.server.run_pod("brief", "echo hello; exit 3", "Never");
    cluster.server.wait_for_pod("brief", "jsonpath={.status.phase}=Failed");
    let code = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}";
    assert_eq!(cluster.server.kubectl(&["get", "pod", "brief", "-o", code]).ok(), "3");
    cluster.server.run_pod("later", "sleep 1000", "Never");
    cluster.server.wait_for_pod("later", "condition=Ready");
    let state = "jsonpath={.status.phase} {.status.containerStatuses[0].restartCount}";
    assert_eq!(cluster.server.kubectl(&["get", "pod", "talker", "-o", state]).ok(), "Running 0");
    assert_eq!(cluster.server.kubectl(&["exec", "talker", "--", "echo", "here"]).ok(), "here\n");
    cluster.server.kubectl(&["wait", "node/here", "--for=condition=Ready", "--timeout=10s"]).ok();
    cluster.server.kubectl(&["delete", "pods", "--all", "--wait"]).ok();
}

/// A small tmpfs over a directory; unmounted when dropped.
struct FullDisk(std::path::PathBuf);

impl FullDisk {
    fn at(path: std::path::PathBuf) -> FullDisk {
        let mount_status = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"])
            .arg(&path)
            .status();
        assert!(mount_status.is_ok_and(|status| status.success()), "a small disk");
        FullDisk(path)
    }

    fn is_full(&self) -> bool {
        rustix::fs::statvfs(&self.0).is_ok_and(|known| known.f_bavail == 0)
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Images can be exported, removed and imported again while containers use them.
fn images(cluster: &Cluster) {
    let data = cluster.server.data_dir().display().to_string();
    let image = |words: &[&str]| cluster.server.skiff(&[&["image", "--data-dir", &data], words].concat());
    let archive = cluster.dir.path().join("exported.tar").display().to_string();
    image(&["export", &archive, IMAGE]).ok();
    image(&["rm", IMAGE]).ok();
    assert!(!image(&["ls"]).ok().contains(IMAGE));
    assert!(image(&["rm", IMAGE]).stderr.contains(&format!("there is no image {IMAGE}")));
    assert!(image(&["gc", "--all"]).ok().starts_with("freed "));
    // Layers of running containers are kept.
    assert_eq!(cluster.server.kubectl(&["exec", "web", "--", "echo", "here"]).ok(), "here\n");
    assert_eq!(image(&["import", &archive]).ok(), format!("{IMAGE}\n"));
    cluster.server.run_pod("imported", "exit 0", "Never");
    cluster.server.wait_for_pod("imported", "jsonpath={.status.phase}=Succeeded");
    // The pod IP is reported even for a pod that ran for a very short time.
    let pod_ip = cluster.server.kubectl(&["get", "pod", "imported", "-o", "jsonpath={.status.podIP}"]);
    assert_ne!(pod_ip.ok(), "");
}

/// The private memory of a pod's supervisor, of which there is one per pod. File-backed pages are
/// excluded: they are shared, and a debug build has more of them.
fn supervisor_memory_is_bounded(cluster: &Cluster) {
    const MAX_PRIVATE_KB: u64 = 250;
    for (pid, words) in cluster.supervisors() {
        let mappings = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("what the kernel says");
        let (mut is_own, mut own) = (false, 0);
        for line in mappings.lines() {
            match line.split_whitespace().collect::<Vec<_>>()[..] {
                [range, _, _, _, inode, ..] if range.contains('-') => is_own = inode == "0",
                ["Private_Dirty:", size, "kB"] if is_own => own += size.parse::<u64>().expect("a number"),
                _ => {}
            }
        }
        assert!(own > 0 && own < MAX_PRIVATE_KB, "{words} has {own} kB of its own\n{mappings}");
    }
}

fn exec(cluster: &Cluster) {
    let server = &cluster.server;
    let output = server.kubectl(&["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((output.stdout.as_str(), output.code), ("out\n", 7), "{}", output.stderr);
    assert!(output.stderr.starts_with("err\n"), "{}", output.stderr);
    let long = "a line of text\n".repeat(20_000);
    let response = server.kubectl_with(&["exec", "-i", "web", "--", "cat"], &long).ok();
    assert!(response == long, "{} bytes of {}", response.len(), long.len());
    let missing = server.kubectl(&["exec", "web", "--", "no-such-program"]);
    assert!(
        missing.stderr.contains("exec: \"no-such-program\": executable file not found in $PATH"),
        "{}",
        missing.stderr
    );
    // The older protocol, SPDY.
    let mut old = server.kubectl_command();
    old.args(["exec", "web", "--", "sh", "-c", "echo spdy; exit 4"]);
    let old = old.env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "false").output().expect("kubectl");
    assert_eq!((String::from_utf8_lossy(&old.stdout).as_ref(), old.status.code()), ("spdy\n", Some(4)));
    let echo = |i: usize| cluster.server.background(&["exec", "web", "--", "echo", &i.to_string()]);
    for (i, mut one) in (0..5).map(echo).collect::<Vec<_>>().into_iter().enumerate() {
        let mut stdout = String::new();
        one.0.stdout.take().expect("a pipe").read_to_string(&mut stdout).expect("text");
        assert_eq!(stdout, format!("{i}\n"));
    }
}

/// `script` provides the terminal that kubectl requires.
fn exec_with_a_terminal(cluster: &Cluster) {
    let inside = "tty; read word; echo got $word; i=0; \
        until stty size | grep '33 77'; do i=$((i+1)); test $i -lt 300 || exit 9; sleep 0.1; done; exit 5";
    let mut command = cluster.server.command("script");
    command
        .args(["-qec", "stty rows 33 cols 77; exec kubectl exec -it web -- sh -c \"$INSIDE\"", "/dev/null"])
        .env("INSIDE", inside)
        .env("KUBECONFIG", cluster.server.kubeconfig())
        .env("HOME", cluster.dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let Ok(mut child) = command.spawn() else { return eprintln!("skipped: there is no program `script`") };
    let (mut stdin, stdout) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
    let mut terminal_output = String::new();
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        // The input is written when the container has started.
        if line.contains("/dev/pts/") {
            stdin.write_all(b"word\n").expect("written");
        }
        terminal_output += &line;
        terminal_output.push('\n');
    }
    let code = child.wait().expect("an end").code();
    assert!(code == Some(5) && terminal_output.contains("got word"), "{code:?}\n{terminal_output}");
}

fn copy(cluster: &Cluster) {
    let (there, back) = (cluster.dir.path().join("there"), cluster.dir.path().join("back"));
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(&there, &bytes).expect("written");
    cluster.server.kubectl(&["cp", &there.display().to_string(), "web:/tmp/file"]).ok();
    cluster.server.kubectl(&["cp", "web:/tmp/file", &back.display().to_string()]).ok();
    assert!(std::fs::read(&back).expect("a copy") == bytes);
}

fn port_forward(cluster: &Cluster) {
    for websockets in ["true", "false"] {
        let mut command = cluster.server.kubectl_command();
        command.args(["port-forward", "pod/web", ":8080"]).env("KUBECTL_PORT_FORWARD_WEBSOCKETS", websockets);
        let mut forwarding =
            BackgroundCommand(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("kubectl"));
        let mut lines = forwarding.lines();
        let line = lines.next().expect("a port");
        let port = line.split_once("127.0.0.1:").and_then(|(_, rest)| rest.split_whitespace().next());
        for _ in 0..3 {
            let mut client = cluster.server.command("/bin/busybox");
            client.args(["nc", "127.0.0.1", port.expect("a port")]).stdin(Stdio::null());
            let response = client.output().expect("an answer");
            assert_eq!(
                String::from_utf8_lossy(&response.stdout),
                "hello from web\n",
                "websockets: {websockets}"
            );
        }
    }
}

fn pod_to_pod_network(cluster: &Cluster) {
    let ip = cluster.server.kubectl(&["get", "pod", "web", "-o", "jsonpath={.status.podIP}"]).ok();
    let output =
        cluster.server.kubectl(&["exec", "ticker", "--", "sh", "-c", &format!("nc {ip} 8080 </dev/null")]);
    assert_eq!(output.stdout, "hello from web\n", "{ip}: {}", output.stderr);
}

/// A pod with a user namespace, an image volume and a volume with `subPath`.
fn user_namespaces_and_image_volumes(cluster: &Cluster) {
    let server = &cluster.server;
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "userns"},
        "spec": {
            "hostUsers": false, "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "image", "image": {"reference": "busybox:1.36", "pullPolicy": "IfNotPresent"}}, {"name": "data", "emptyDir": {}}],
            "containers": [{
                "name": "main", "image": "busybox:1.36", "command": ["sleep", "1000"],
                "volumeMounts": [
                    {"name": "image", "mountPath": "/image", "subPath": "bin"},
                    {"name": "data", "mountPath": "/data", "subPath": "part"}
                ]
            }]
        }
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    cluster.server.wait_for_pod("userns", "condition=Ready");
    let script = "id -u; tr -s ' ' </proc/self/uid_map; touch /data/x && stat -c %u /data/x /etc/hosts /image/busybox; touch /image/x 2>&1; true";
    let output = server.kubectl(&["exec", "userns", "--", "sh", "-c", script]).ok();
    assert_eq!(output, "0\n 0 65536 65536\n0\n0\n0\ntouch: /image/x: Read-only file system\n");
    server.kubectl(&["delete", "pod", "userns", "--wait"]).ok();
}

/// A pod that requires AppArmor is rejected on a host without it.
fn apparmor_unavailable(cluster: &Cluster) {
    if std::path::Path::new("/sys/kernel/security/apparmor").exists() {
        return eprintln!("skipped: this host has AppArmor");
    }
    let server = &cluster.server;
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "confined"},
        "spec": {
            "securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "main", "image": "busybox:1.36", "command": ["sleep", "1000"]}]
        }
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    cluster.server.wait_for_pod("confined", "jsonpath={.status.phase}=Failed");
    let reason = server
        .kubectl(&["get", "pod", "confined", "-o", "jsonpath={.status.reason}: {.status.message}"])
        .ok();
    assert_eq!(
        reason,
        "AppArmor: Pod was rejected: Cannot enforce AppArmor: AppArmor is not enabled on the host"
    );
}

/// Less common fields: `setHostnameAsFQDN`, recursive read-only mounts, a strict supplemental groups
/// policy and pod-level limits.
fn optional_pod_fields(cluster: &Cluster) {
    let server = &cluster.server;
    let resources = serde_json::json!({"limits": {"memory": "64Mi", "cpu": "500m"}});
    let mount = serde_json::json!({
        "name": "data", "mountPath": "/data", "readOnly": true, "recursiveReadOnly": "Enabled",
    });
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "particular"},
        "spec": {
            "hostname": "host", "subdomain": "sub", "setHostnameAsFQDN": true, "terminationGracePeriodSeconds": 1,
            "securityContext": {"supplementalGroups": [4000], "supplementalGroupsPolicy": "Strict"},
            "volumes": [{"name": "data", "emptyDir": {}}],
            "containers": [{
                "name": "main", "image": "busybox:1.36", "resources": resources, "volumeMounts": [mount],
            }],
        }
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod("particular", "condition=Ready");
    let user = "jsonpath={.status.containerStatuses[0].user}";
    let user: serde_json::Value =
        serde_json::from_str(&server.kubectl(&["get", "pod", "particular", "-o", user]).ok()).expect("JSON");
    assert_eq!(user, serde_json::json!({"linux": {"uid": 0, "gid": 0, "supplementalGroups": [0, 4000]}}));
    let script = "hostname; id -G; touch /data/x 2>&1; tail -n 1 /etc/hosts | tr '\\t' '\\n' | tail -n 2";
    let output = server.kubectl(&["exec", "particular", "--", "sh", "-c", script]).ok();
    let name = "host.sub.default.svc.cluster.local";
    let read_only = "touch: /data/x: Read-only file system";
    assert_eq!(output, format!("{name}\n0 4000\n{read_only}\n{name}\nhost\n"));
    let path = "jsonpath={.metadata.uid} {.status.containerStatuses[0].volumeMounts[0].recursiveReadOnly}";
    let pod_fields = server.kubectl(&["get", "pod", "particular", "-o", path]).ok();
    let (uid, mode) = pod_fields.split_once(' ').expect("two words");
    assert_eq!(mode, "Enabled");
    let cgroups = testkit::cgroups_of_pod(uid);
    let files = ["memory.limit_in_bytes", "memory.max"];
    let limit = cgroups
        .iter()
        .find_map(|cgroup| files.iter().find_map(|file| std::fs::read_to_string(cgroup.join(file)).ok()));
    assert_eq!(limit.as_deref().map(str::trim), Some("67108864"));
    server.kubectl(&["delete", "pod", "particular", "--wait"]).ok();

    // Sysctls that are not namespaced are rejected.
    let sysctls = serde_json::json!([{"name": "kernel.core_pattern", "value": "|/bin/sh"}]);
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "settler"},
        "spec": {
            "securityContext": {"sysctls": sysctls}, "containers": [{"name": "main", "image": "busybox:1.36"}],
        }
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod("settler", "jsonpath={.status.phase}=Failed");
    let path = "jsonpath={.status.reason}: {.status.message}";
    let reason = server.kubectl(&["get", "pod", "settler", "-o", path]).ok();
    let expected = "Pod was rejected: forbidden sysctl: \"kernel.core_pattern\" not allowlisted";
    assert_eq!(reason, format!("SysctlForbidden: {expected}"));
}

/// Volume statistics are reported, with or without a CSI driver, but not for hostPath volumes.
fn volumes(cluster: &Cluster) {
    let server = &cluster.server;
    let disk = cluster.dir.path().join("disk");
    std::fs::create_dir_all(&disk).expect("a directory");
    let size = serde_json::json!({"storage": "1Mi"});
    let here = serde_json::json!({"key": "kubernetes.io/hostname", "operator": "In", "values": ["here"]});
    let volume = serde_json::json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "disk"},
        "spec": {
            "capacity": size, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
            "local": {"path": disk},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        }
    });
    let claim = serde_json::json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "claim"},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": "disk",
            "resources": {"requests": size},
        }
    });
    let mount = |name: &str| serde_json::json!({"name": name, "mountPath": format!("/{name}")});
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "holder"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "volumes": [
                {"name": "claimed", "persistentVolumeClaim": {"claimName": "claim"}},
                {"name": "host", "hostPath": {"path": disk}},
                {"name": "room", "emptyDir": {}},
            ],
            "containers": [{
                "name": "main", "image": "busybox:1.36",
                "command": ["sh", "-c", "dd if=/dev/zero of=/room/x bs=1000 count=300; exec sleep 1000"],
                "volumeMounts": [mount("claimed"), mount("host"), mount("room")],
            }],
        }
    });
    for object in [volume, claim, pod] {
        server.kubectl_with(&["create", "-f", "-"], &object.to_string()).ok();
    }
    server.wait_for_pod("holder", "condition=Ready");
    let raw =
        |path: &str| server.kubectl(&["get", "--raw", &format!("/api/v1/nodes/here/proxy/{path}")]).ok();
    let volume_stats = || {
        let summary: serde_json::Value = serde_json::from_str(&raw("stats/summary")).expect("a summary");
        let pods = summary["pods"].as_array().cloned().unwrap_or_default();
        let pod = pods.into_iter().find(|pod| pod["podRef"]["name"] == "holder");
        pod.and_then(|pod| pod["volume"].as_array().cloned()).unwrap_or_default()
    };
    let is_written = |stats: &[serde_json::Value]| stats[0]["usedBytes"].as_u64() >= Some(300_000);
    server.wait_until("volume statistics are reported", || {
        let stats = volume_stats();
        let names: Vec<_> = stats.iter().filter_map(|one| one["name"].as_str()).collect();
        names == ["room", "claimed"] && is_written(&stats)
    });
    let stats = volume_stats();
    assert!(stats[0]["usedBytes"].as_u64() < Some(400_000) && stats[0]["inodesUsed"] == 2, "{stats:?}");
    let reference = serde_json::json!({"name": "claim", "namespace": "default"});
    assert_eq!((&stats[0]["pvcRef"], &stats[1]["pvcRef"]), (&serde_json::Value::Null, &reference));
    let capacity = stats[1]["capacityBytes"].as_u64().expect("a number");
    let metrics = raw("metrics");
    let line = r#"kubelet_volume_stats_capacity_bytes{namespace="default",persistentvolumeclaim="claim"}"#;
    assert!(metrics.contains(&format!("{line} {capacity}\n")), "{metrics}");
    assert_eq!(metrics.matches("\nkubelet_volume_stats_").count(), 6);
    server.kubectl(&["delete", "pod/holder", "pvc/claim", "pv/disk", "--wait"]).ok();
}

/// One container's exit code restarts all containers of the pod, including init containers. All run as
/// one user, who alone may read the token.
fn restart_all_containers(cluster: &Cluster) {
    let server = &cluster.server;
    let container = |name: &str, script: &str| {
        serde_json::json!({
            "name": name, "image": "busybox:1.36", "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        })
    };
    let mut trigger = container(
        "judge",
        "test -e /data/once && exec sleep 1000000; until test -e /data/go; do sleep 0.1; done; touch /data/once; exit 42",
    );
    trigger["restartPolicy"] = "Never".into();
    let codes = serde_json::json!({"operator": "In", "values": [42]});
    trigger["restartPolicyRules"] =
        serde_json::json!([{"action": "RestartAllContainers", "exitCodes": codes}]);
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "restarted"},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsUser": 1000}, "volumes": [{"name": "data", "emptyDir": {}}],
            "initContainers": [container("first", "echo run >> /data/runs")],
            "containers": [trigger, container("other", "exec sleep 1000000")],
        }
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod("restarted", "condition=Ready");
    let look = "stat -L -c '%a %u' /var/run/secrets/kubernetes.io/serviceaccount/token; touch /data/go";
    let output = server.kubectl(&["exec", "restarted", "-c", "other", "--", "sh", "-c", look]).ok();
    assert_eq!(output, "600 1000\n");
    let status_field =
        |path: &str| server.kubectl(&["get", "pod", "restarted", "-o", &format!("jsonpath={path}")]).ok();
    let counts =
        "{.status.initContainerStatuses[*].restartCount} {.status.containerStatuses[*].restartCount}";
    server.wait_until("all containers have restarted", || status_field(counts) == "1 1 1");
    server.wait_for_pod("restarted", "condition=Ready");
    let reasons = status_field("{.status.containerStatuses[*].lastState.terminated.reason}");
    assert_eq!(reasons, "RestartingAllContainers RestartingAllContainers");
    let condition = status_field("{.status.conditions[?(@.type==\"AllContainersRestarting\")].status}");
    assert_eq!(condition, "False");
    let runs = server.kubectl(&["exec", "restarted", "-c", "other", "--", "cat", "/data/runs"]).ok();
    assert_eq!(runs, "run\nrun\n");
    server.kubectl(&["delete", "pod", "restarted", "--wait"]).ok();
}

/// A pod whose volume needs a tool that the host lacks gets an event, and can be deleted.
fn missing_mount_tools(cluster: &Cluster) {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|dir| dir.join("iscsiadm").exists()) {
        return eprintln!("skipped: this host has iscsiadm");
    }
    let server = &cluster.server;
    let disk =
        || serde_json::json!({"targetPortal": "192.0.2.1", "iqn": "iqn.2026-01.example:disk", "lun": 0});
    let shared =
        serde_json::json!({"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": "disk"});
    let (mut volume, mut claim) = (shared.clone(), shared);
    volume["capacity"]["storage"] = "1Gi".into();
    volume["iscsi"] = disk();
    claim["resources"]["requests"]["storage"] = "1Gi".into();
    volume.as_object_mut().expect("an object").remove("volumeName");
    for (kind, name, spec) in
        [("PersistentVolume", "disk", volume), ("PersistentVolumeClaim", "claim", claim)]
    {
        let object =
            serde_json::json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec});
        server.kubectl_with(&["create", "-f", "-"], &object.to_string()).ok();
    }
    let claim_source = serde_json::json!({"persistentVolumeClaim": {"claimName": "claim"}});
    // The second volume must be attached to this node first.
    for (pod, mut source, name) in
        [("inline", serde_json::json!({"iscsi": disk()}), "data"), ("claimed", claim_source, "disk")]
    {
        source["name"] = "data".into();
        let spec = serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod},
            "spec": {
                "volumes": [source], "terminationGracePeriodSeconds": 1,
                "containers": [{
                    "name": "main", "image": "busybox:1.36", "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }],
            }
        });
        server.kubectl_with(&["create", "-f", "-"], &spec.to_string()).ok();
        let selector = format!("--field-selector=involvedObject.name={pod},reason=FailedMount");
        let event_message =
            || server.kubectl(&["get", "events", &selector, "-o", "jsonpath={.items[0].message}"]).stdout;
        server.wait_until("there is an event about the missing tool", || !event_message().is_empty());
        let expected = format!(
            "MountVolume.WaitForAttach failed for volume {name:?} : exec: \"iscsiadm\": executable file not found \
             in $PATH: install open-iscsi (Debian) or iscsi-initiator-utils (Fedora)"
        );
        assert_eq!(event_message(), expected);
        let path = "jsonpath={.status.volumesAttached[*].name} {.status.volumesInUse[*]}";
        let attached_volumes = || server.kubectl(&["get", "node", "here", "-o", path]).ok();
        let disk = "kubernetes.io/iscsi/192.0.2.1:iqn.2026-01.example:disk:0";
        assert_eq!(
            attached_volumes(),
            if pod == "claimed" { format!("{disk} {disk}") } else { " ".to_owned() }
        );
        server.kubectl(&["delete", "pod", pod, "--wait", "--timeout=60s"]).ok();
        let plugin_dir = server.data_dir().join("agent/kubelet/plugins/kubernetes.io/iscsi");
        server.wait_until("the plugin directory is empty", || {
            std::fs::read_dir(&plugin_dir).into_iter().flatten().count() == 0
        });
        server.wait_until("the volume is detached", || attached_volumes() == " ");
    }
    server.kubectl(&["delete", "pvc/claim", "pv/disk", "--wait", "--timeout=60s"]).ok();
}

/// A restart of the server, even after SIGKILL, does not affect containers.
fn restart(cluster: &mut Cluster) {
    let started =
        "jsonpath={.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}";
    let before = cluster.server.kubectl(&["get", "pod", "web", "-o", started]).ok();
    cluster.server.kubectl(&["exec", "web", "--", "touch", "/tmp/kept"]).ok();
    cluster.server.kill9();
    cluster.server.restart();
    cluster.server.wait_until("the node is back", || {
        cluster.server.kubectl(&["exec", "web", "--", "ls", "/tmp/kept"]).code == 0
    });
    assert_eq!(cluster.server.kubectl(&["get", "pod", "web", "-o", started]).ok(), before);
    let mut log_stream = cluster.server.background(&["logs", "-f", "--tail=1", "ticker"]);
    assert_eq!(log_stream.lines().nth(3).as_deref(), Some("tick"));
    cluster.server.run_pod("later", "sleep 1000", "Never");
    cluster.server.wait_for_pod("later", "condition=Ready");
}
