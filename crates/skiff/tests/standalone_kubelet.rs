//! `skiff kubelet`: a standalone kubelet with a server that is sometimes unavailable, and with
//! requested certificates.
//!
//! Needs root, kubectl and busybox; skipped otherwise.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::{Network, Process, Server};

const DEADLINE: Duration = Duration::from_secs(60);
const IMAGE: &str = "docker.io/library/busybox:1.36";

struct TestCluster {
    server: Server,
    network: Network,
    dir: tempfile::TempDir,
}

/// Cleans up after the nodes, whose processes have exited by then.
impl Drop for TestCluster {
    fn drop(&mut self) {
        let data = self.path("data");
        testkit::cleanup_node(&data, &data.join("agent/pods"));
    }
}

impl TestCluster {
    fn new() -> Option<TestCluster> {
        if !testkit::can_run_pods(&["busybox"]) {
            return None;
        }
        let network = Network::new().expect("a network");
        let server =
            Server::start_with_pods(&network, &["--disable-agent", "--controllers=*", "--disable-scheduler"]);
        Some(TestCluster { server, network, dir: tempfile::tempdir().expect("a directory") })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a kubeconfig for the server with this user.
    fn write_kubeconfig(&self, name: &str, user: &Value) {
        let authority = self.server.data_dir().join("tls/server-ca.crt");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {
                "server": self.server.url(), "certificate-authority": authority,
            }}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        std::fs::write(self.path(name), text.to_string()).expect("written");
    }

    fn node(&self, flags: &[&str]) -> Process {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.network.path().display())).arg("--");
        command.arg(testkit::binary().expect("a program"));
        command.args(["kubelet", "--node-name", "alone", "--node-ip", "192.0.2.8", "--kubelet-port", "0"]);
        command.arg("--kubeconfig").arg(self.path("kubeconfig")).arg("--data-dir").arg(self.path("data"));
        let mut process = Process::spawn(command.args(flags)).expect("a node");
        let is_started = |log: &str| log.contains("kubelet started").then_some(());
        process.wait_until_log(DEADLINE, is_started).unwrap_or_else(|error| panic!("{error:#}"));
        process
    }

    /// The output of `kubectl get -o json`.
    fn get(&self, what: &[&str]) -> Value {
        let output = self.server.kubectl(&[&["get", "-o", "json"], what].concat());
        serde_json::from_str(&output.stdout).unwrap_or_default()
    }

    fn is_ready(&self) -> bool {
        let node = self.get(&["node", "alone"]);
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|known| known["type"] == "Ready" && known["status"] == "True")
    }
}

/// PIDs of container processes with this command line.
fn container_pids(words: &str) -> Vec<u32> {
    testkit::processes()
        .into_iter()
        .filter(|(_, command)| command.trim() == words)
        .map(|(id, _)| id)
        .collect()
}

#[test]
fn static_pods_run_without_apiserver() {
    let Some(mut cluster) = TestCluster::new() else { return };
    let tls = cluster.server.data_dir().join("tls");
    let now = jiff::Timestamp::now();
    let authority = pki::Authority::load_or_create(&tls, "client-ca", now).expect("an authority");
    let leaf = pki::Leaf {
        common_name: "system:node:alone".to_owned(),
        organizations: vec!["system:nodes".to_owned()],
        dns_names: Vec::new(),
        ips: Vec::new(),
        usage: pki::Usage::Client,
        lifetime: Duration::from_secs(3600),
    };
    pki::store_certificate(cluster.dir.path(), "client", &authority.issue(&leaf, now).expect("issued"))
        .expect("kept");
    cluster.write_kubeconfig(
        "kubeconfig",
        &json!({"client-certificate": "client.crt", "client-key": "client.key"}),
    );
    let manifests = cluster.path("manifests");
    std::fs::create_dir(&manifests).expect("a directory");
    let flag = format!("--kubelet-arg=pod-manifest-path={}", manifests.display());
    let manifest = |seconds: u32| {
        let main = json!({
            "name": "main", "image": "busybox:1.36", "imagePullPolicy": "IfNotPresent",
            "command": ["sleep", seconds.to_string()],
        });
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "own"},
            "spec": {"hostNetwork": true, "terminationGracePeriodSeconds": 1, "containers": [main]},
        })
    };
    // A number that is unique on this machine, so that the process can be found by it.
    let seconds = 1_000_000 + 2 * std::process::id();
    let words = |seconds: u32| format!("sleep {seconds}");
    let write = |seconds: u32| {
        std::fs::write(manifests.join(".own"), manifest(seconds).to_string()).expect("written");
        std::fs::rename(manifests.join(".own"), manifests.join("own.json")).expect("there");
    };
    // Static pods start while the server is unavailable.
    cluster.server.stop();
    let mut node = cluster.node(&[&flag]);
    let archive = testkit::busybox_image(cluster.dir.path(), IMAGE).expect("an image").display().to_string();
    let data = cluster.path("data").display().to_string();
    cluster.server.skiff(&["image", "import", "--data-dir", &data, &archive]).ok();
    write(seconds);
    let single_pid = |words: &str| (container_pids(words).len() == 1).then(|| container_pids(words)[0]);
    let first =
        node.wait_until(DEADLINE, || single_pid(&words(seconds))).unwrap_or_else(|error| panic!("{error:#}"));
    assert!(node.terminate(DEADLINE).expect("an end").success());
    let mut node = cluster.node(&[&flag]);
    // The mirror pod is created when the server is available again.
    cluster.server.restart();
    let mirror_pod = |cluster: &TestCluster| {
        let pod = cluster.get(&["pod", "own-alone"]);
        let status = &pod["status"]["containerStatuses"][0];
        (pod["status"]["phase"] == "Running" && status["ready"] == true).then_some(pod)
    };
    let wait_for_mirror_pod = |node: &mut Process, cluster: &TestCluster| {
        node.wait_until(DEADLINE, || mirror_pod(cluster)).unwrap_or_else(|error| panic!("{error:#}"))
    };
    let pod = wait_for_mirror_pod(&mut node, &cluster);
    assert_eq!(single_pid(&words(seconds)), Some(first), "the container was not restarted");
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(pod["metadata"]["ownerReferences"][0]["kind"], "Node");
    let uid = |pod: &Value| pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
    let annotation = |pod: &Value| pod["metadata"]["annotations"]["kubernetes.io/config.mirror"].clone();
    // Deleting the mirror pod does not affect the static pod; the mirror pod is created again.
    cluster.server.kubectl(&["delete", "pod", "own-alone", "--wait=false"]).ok();
    cluster.server.wait_until("the mirror pod is created again", || {
        mirror_pod(&cluster).is_some_and(|other| uid(&other) != uid(&pod))
    });
    assert_eq!(single_pid(&words(seconds)), Some(first));
    // A changed manifest replaces the pod.
    write(seconds + 1);
    cluster.server.wait_until("the mirror pod is replaced", || {
        mirror_pod(&cluster).is_some_and(|other| annotation(&other) != annotation(&pod))
    });
    assert!(single_pid(&words(seconds + 1)).is_some() && container_pids(&words(seconds)).is_empty());
    // The pod ends when its manifest is removed, even if the server is unavailable.
    cluster.server.stop();
    std::fs::remove_file(manifests.join("own.json")).expect("removed");
    node.wait_until(DEADLINE, || container_pids(&words(seconds + 1)).is_empty().then_some(()))
        .expect("it goes");
    cluster.server.restart();
    cluster.server.wait_until("the mirror pod is deleted", || cluster.get(&["pod", "own-alone"]).is_null());
    assert!(node.terminate(DEADLINE).expect("an end").success());
}

/// A node without a certificate requests one, and renews it before it expires.
#[test]
fn kubelet_requests_and_rotates_client_certificate() {
    let Some(cluster) = TestCluster::new() else { return };
    let token = std::fs::read_to_string(cluster.server.data_dir().join("token")).expect("a token");
    let token = token.trim().rsplit("::").next().expect("the secret part").to_owned();
    cluster.write_kubeconfig("bootstrap", &json!({"token": token}));
    let (first, certificates) = (cluster.path("bootstrap").display().to_string(), cluster.path("pki"));
    let dir = certificates.display().to_string();
    let flags = ["--bootstrap-kubeconfig", &first, "--cert-dir", &dir];
    let current = certificates.join("kubelet-client-current.pem");
    let end = |path: &Path| pki::expiry(&std::fs::read_to_string(path).unwrap_or_default());
    let mut node = cluster.node(&flags);
    cluster.server.wait_until("the node is ready", || cluster.is_ready());
    let mode = |path: &Path| std::fs::metadata(path).expect("a file").permissions().mode() & 0o777;
    assert_eq!((mode(&cluster.path("kubeconfig")), mode(&current)), (0o600, 0o600));
    let written = std::fs::read_to_string(cluster.path("kubeconfig")).expect("a kubeconfig");
    assert!(written.contains(&current.display().to_string()) && !written.contains(&token));
    let owned_args =
        ["--kubeconfig", &cluster.path("kubeconfig").display().to_string(), "auth", "whoami", "-o", "json"]
            .map(str::to_owned);
    let auth_args: Vec<&str> = owned_args.iter().map(String::as_str).collect();
    assert!(cluster.server.kubectl(&auth_args).ok().contains("system:node:alone"));
    assert!(node.terminate(DEADLINE).expect("an end").success());
    // First with a certificate that is about to expire, then with an expired one.
    let now = jiff::Timestamp::now();
    let authority = cluster.server.data_dir().join("tls");
    let authority = pki::Authority::load_or_create(&authority, "client-ca", now).expect("an authority");
    let leaf = |seconds: u64| pki::Leaf {
        common_name: "system:node:alone".to_owned(),
        organizations: vec!["system:nodes".to_owned()],
        dns_names: Vec::new(),
        ips: Vec::new(),
        usage: pki::Usage::Client,
        lifetime: Duration::from_secs(seconds),
    };
    for (seconds, not_before) in
        [(20, now), (60, now.checked_sub(Duration::from_secs(3600)).expect("a time"))]
    {
        let certificate = authority.issue(&leaf(seconds), not_before).expect("issued");
        let pem = format!("{}{}", certificate.cert_pem, certificate.key_pem);
        std::fs::write(&current, pem).expect("written");
        let mut node = cluster.node(&flags);
        let renewed = || end(&current).filter(|end| *end > now + Duration::from_secs(24 * 3600)).map(drop);
        node.wait_until(DEADLINE, renewed).unwrap_or_else(|error| panic!("{error:#}"));
        let before = cluster.get(&["lease", "alone", "-n", "kube-node-lease"])["spec"]["renewTime"].clone();
        let lease_renewed =
            || cluster.get(&["lease", "alone", "-n", "kube-node-lease"])["spec"]["renewTime"] != before;
        node.wait_until(DEADLINE, || lease_renewed().then_some(()))
            .unwrap_or_else(|error| panic!("{error:#}"));
        assert!(node.terminate(DEADLINE).expect("an end").success());
    }
}
