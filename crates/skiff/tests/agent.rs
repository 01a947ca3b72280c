//! `skiff agent` and `skiff kubelet`: joining with a token, restarting with the stored certificates,
//! and rejected tokens.
//!
//! Skipped unless it runs as root.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::{Network, Process, Server};

const DEADLINE: Duration = Duration::from_secs(60);

struct TestCluster {
    network: Network,
    server: Server,
    dir: tempfile::TempDir,
}

/// Cleans up after the nodes, whose processes have exited by then.
impl Drop for TestCluster {
    fn drop(&mut self) {
        cleanup_data_dir(self.dir.path());
        cleanup_data_dir(&self.dir.path().join("alone"));
    }
}

fn cleanup_data_dir(data: &Path) {
    testkit::cleanup_node(data, &data.join("agent/pods"));
}

impl TestCluster {
    fn new() -> Option<TestCluster> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let network = Network::new().expect("a network");
        let server =
            Server::start_with_pods(&network, &["--disable-agent", "--controllers=*", "--disable-scheduler"]);
        Some(TestCluster { network, server, dir: tempfile::tempdir().expect("a directory") })
    }

    fn token(&self) -> String {
        std::fs::read_to_string(self.server.data_dir().join("token")).expect("a token").trim().to_owned()
    }

    fn command(&self, token: Option<&str>, dir: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.network.path().display()))
            .arg("--")
            .arg(testkit::binary().expect("a program"));
        command.args([
            "agent",
            "--server",
            &self.server.url(),
            "--node-name",
            "joined",
            "--node-ip",
            "192.0.2.7,2001:db8::7",
        ]);
        command.args(["--kubelet-port", "0", "--data-dir"]).arg(dir);
        if let Some(token) = token {
            command.args(["--token", token]);
        }
        command
    }

    fn agent(&self, token: Option<&str>) -> Process {
        let mut process = Process::spawn(&mut self.command(token, self.dir.path())).expect("an agent");
        let joined = |log: &str| log.contains("INFO joined").then_some(());
        process
            .wait_until_log(DEADLINE, joined)
            .unwrap_or_else(|error| panic!("{error:#}\n{}", self.server.log()));
        process
    }

    /// The error of an agent that cannot join.
    fn join_error(&self, token: Option<&str>) -> String {
        let dir = tempfile::tempdir().expect("a directory");
        let mut process = Process::spawn(&mut self.command(token, dir.path())).expect("an agent");
        // The log line may be written in several parts.
        let complete_line =
            |log: &str| (log.contains("skiff: ") && log.ends_with('\n')).then(|| log.to_owned());
        let log_text = process.wait_until_log(DEADLINE, complete_line);
        // The agent may have exited before the log was read.
        let log_text = log_text.unwrap_or_else(|error| format!("{error:#}"));
        log_text.lines().find_map(|line| line.strip_prefix("skiff: ")).unwrap_or_default().to_owned()
    }

    /// The output of `kubectl get -o json`.
    fn get(&self, what: &[&str]) -> Value {
        let output = self.server.kubectl(&[&["get", "-o", "json"], what].concat());
        serde_json::from_str(&output.stdout).unwrap_or_default()
    }

    fn wait_until_ready(&self, process: &mut Process) {
        let is_ready = || {
            let node = self.get(&["node", "joined"]);
            let conditions = node["status"]["conditions"].as_array()?.clone();
            conditions.iter().any(|known| known["type"] == "Ready" && known["status"] == "True").then_some(())
        };
        process.wait_until(DEADLINE, is_ready).unwrap_or_else(|error| panic!("{error:#}"));
    }
}

#[test]
fn agent_join_with_token_and_restart_without_it() {
    let Some(mut cluster) = TestCluster::new() else { return };
    if !testkit::has_kubectl() {
        eprintln!("skipped: needs kubectl");
        return;
    }
    let token = cluster.token();
    let mode = std::fs::metadata(cluster.server.data_dir().join("token")).expect("a token").permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);

    // Joining fails without a token, with only its secret part, with that of another cluster and with
    // an unknown one.
    let (digest, secret) = token.split_once("::").expect("two parts");
    let other = format!("K10{}::{secret}", "0".repeat(64));
    let unknown = format!("{digest}::aaaaaa.aaaaaaaaaaaaaaaa");
    assert!(cluster.join_error(None).starts_with("a token is required to join"));
    assert!(cluster.join_error(Some(secret)).starts_with("the token has no CA fingerprint"));
    assert!(
        cluster.join_error(Some(&other)).starts_with("the server's certificate does not match the token")
    );
    assert!(cluster.join_error(Some(&unknown)).starts_with("the server rejected the token"));
    assert!(!cluster.server.log().contains(secret.split_once('.').expect("a secret").1));

    let mut agent = cluster.agent(Some(&token));
    cluster.wait_until_ready(&mut agent);
    let requests = |cluster: &TestCluster| cluster.get(&["csr"])["items"].as_array().map_or(0, Vec::len);
    assert_eq!(requests(&cluster), 2, "one client and one serving certificate");
    let node = cluster.get(&["node", "joined"]);
    for (at, address) in ["192.0.2.7", "2001:db8::7"].iter().enumerate() {
        assert_eq!(node["status"]["addresses"][at], json!({"type": "InternalIP", "address": address}));
    }

    // A second token, created with `skiff token` and with an expiration.
    let tokens = |words: &[&str]| {
        let mut command = cluster.server.command(testkit::binary().expect("a program"));
        command.arg("token").args(words).arg("--kubeconfig").arg(cluster.server.kubeconfig());
        let output = command.output().expect("skiff");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let created = tokens(&["create", "--description=one more", "--ttl=1h"]);
    let another = created.trim();
    assert!(another.starts_with(&format!("{digest}::")), "same CA");
    let id = another.split_once("::").and_then(|(_, rest)| rest.split_once('.')).expect("an id").0;
    let command = tokens(&["create", "--print-join-command"]);
    assert!(command.starts_with("skiff agent --server https://") && command.contains(digest));
    let listed = tokens(&["list"]);
    let line = listed.lines().find(|line| line.starts_with(id)).expect("a line");
    assert!(line.contains(" 59m ") && line.ends_with(" one more"), "{line}");
    assert_eq!(listed.lines().count(), 4, "the server's own token is listed as well: {listed}");
    let join_log = |token: &str| {
        let dir = tempfile::tempdir().expect("a directory");
        let mut process = Process::spawn(&mut cluster.command(Some(token), dir.path())).expect("an agent");
        let is_finished = |log: &str| {
            (log.ends_with('\n') && (log.contains("INFO joined") || log.contains("skiff: ")))
                .then(|| log.to_owned())
        };
        let log_text =
            process.wait_until_log(DEADLINE, is_finished).unwrap_or_else(|error| format!("{error:#}"));
        process.kill();
        cleanup_data_dir(dir.path());
        log_text
    };
    assert!(join_log(another).contains("INFO joined"), "a created token is valid");
    tokens(&["delete", another]);
    assert!(join_log(another).contains("the server rejected the token"), "a deleted token is not valid");
    let nodes = requests(&cluster);

    // The node's credentials have the permissions of a node and no others.
    let tls = cluster.dir.path().join("agent/tls");
    let read = |name: &str| std::fs::read_to_string(tls.join(name)).expect("a file");
    let node = pki::CertKeyPair { cert_pem: read("client.crt"), key_pem: read("client.key") };
    let kubeconfig = cluster.dir.path().join("node.kubeconfig");
    let text = pki::kubeconfig(&cluster.server.url(), &read("server-ca.crt"), &node, "node");
    std::fs::write(&kubeconfig, text).expect("written");
    let kubeconfig = kubeconfig.display().to_string();
    let as_node = |what: &[&str]| {
        cluster.server.kubectl(&[&["--kubeconfig", &kubeconfig, "auth", "can-i"], what].concat()).stdout
    };
    let allowed = ["list pods -A", "watch endpointslices.discovery.k8s.io -A", "get nodes"];
    let forbidden = [
        "list secrets -A",
        "list configmaps -A",
        "delete nodes",
        "create clusterrolebindings",
        "update pods",
    ];
    for (query, answer) in
        allowed.map(|query| (query, "yes")).iter().chain(&forbidden.map(|query| (query, "no")))
    {
        let words: Vec<&str> = query.split(' ').collect();
        assert!(as_node(&words).starts_with(answer), "{query}");
    }

    // A restart uses the stored certificates: it works without a token, without the server and without
    // new requests.
    assert!(agent.terminate(DEADLINE).expect("an end").success());
    cluster.server.stop();
    let mut agent = cluster.agent(None);
    cluster.server.restart();
    cluster.wait_until_ready(&mut agent);
    let heartbeat = |cluster: &TestCluster| {
        cluster.get(&["lease", "joined", "-n", "kube-node-lease"])["spec"]["renewTime"].clone()
    };
    let before = heartbeat(&cluster);
    agent.wait_until(DEADLINE, || (heartbeat(&cluster) != before).then_some(())).expect("it lives");
    assert_eq!(requests(&cluster), nodes);
    assert!(agent.terminate(DEADLINE).expect("an end").success());
}

/// A node whose certificates are about to expire renews them while it runs, and keeps working after the
/// old ones have expired.
#[test]
fn certificates_of_a_node_are_renewed_while_it_runs() {
    let Some(cluster) = TestCluster::new() else { return };
    if !testkit::has_kubectl() {
        eprintln!("skipped: needs kubectl");
        return;
    }
    let mut agent = cluster.agent(Some(&cluster.token()));
    cluster.wait_until_ready(&mut agent);
    assert!(agent.terminate(DEADLINE).expect("an end").success());
    // Replaces the certificates by equivalent ones with a short lifetime.
    let now = jiff::Timestamp::now();
    let (tls, server_tls) = (cluster.dir.path().join("agent/tls"), cluster.server.data_dir().join("tls"));
    let client = pki::Leaf {
        common_name: "system:node:joined".to_owned(),
        organizations: vec!["system:nodes".to_owned()],
        dns_names: Vec::new(),
        ips: Vec::new(),
        usage: pki::Usage::Client,
        lifetime: Duration::from_secs(45),
    };
    let serving = pki::Leaf {
        dns_names: vec!["joined".to_owned()],
        ips: ["192.0.2.7", "2001:db8::7"].map(|ip| ip.parse().expect("an address")).to_vec(),
        usage: pki::Usage::Server,
        ..client.clone()
    };
    for (stem, authority, leaf) in [("client", "client-ca", client), ("serving", "kubelet-ca", serving)] {
        let authority = pki::Authority::load_or_create(&server_tls, authority, now).expect("an authority");
        pki::store_certificate(&tls, stem, &authority.issue(&leaf, now).expect("issued")).expect("kept");
    }
    let end = |stem: &str| {
        let pem = std::fs::read_to_string(tls.join(format!("{stem}.crt"))).unwrap_or_default();
        pki::expiry(&pem).unwrap_or(now)
    };
    let first_end = end("client").max(end("serving"));
    assert!(first_end < now + Duration::from_secs(60));
    let mut agent = cluster.agent(None);
    let renewed =
        || ["client", "serving"].iter().all(|stem| end(stem) > now + Duration::from_secs(24 * 3600));
    agent.wait_until(DEADLINE, || renewed().then_some(())).unwrap_or_else(|error| panic!("{error:#}"));
    let requests = cluster.get(&["csr"])["items"].as_array().map_or(0, Vec::len);
    assert_eq!(requests, 4, "two initial requests and two renewals");
    // Waits for a heartbeat after the first certificates have expired.
    let lease_renewed = || {
        let lease = cluster.get(&["lease", "joined", "-n", "kube-node-lease"]);
        let renewed_at: jiff::Timestamp = lease["spec"]["renewTime"].as_str()?.parse().ok()?;
        (renewed_at > first_end).then_some(())
    };
    agent.wait_until(2 * DEADLINE, lease_renewed).unwrap_or_else(|error| panic!("{error:#}"));
    cluster.wait_until_ready(&mut agent);
    assert!(agent.terminate(DEADLINE).expect("an end").success());
}

/// A standalone kubelet uses the credentials of its kubeconfig and requests its serving certificate
/// from the cluster.
#[test]
fn kubelet_uses_kubeconfig_credentials() {
    let Some(cluster) = TestCluster::new() else { return };
    drop(cluster.agent(Some(&cluster.token())));
    let tls = cluster.dir.path().join("agent/tls");
    let kubeconfig = cluster.dir.path().join("kubeconfig");
    let file = |name: &str| tls.join(name).display().to_string();
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {
            "server": cluster.server.url(), "certificate-authority": file("server-ca.crt"),
        }}],
        "users": [{"name": "u", "user": {
            "client-certificate": file("client.crt"), "client-key": file("client.key"),
        }}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    std::fs::write(&kubeconfig, text.to_string()).expect("written");
    cluster.server.kubectl(&["delete", "node", "joined", "--ignore-not-found"]).ok();
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net={}", cluster.network.path().display()))
        .arg("--")
        .arg(testkit::binary().expect("a program"));
    command.args(["kubelet", "--node-name", "joined", "--node-ip", "192.0.2.8", "--kubelet-port", "0"]);
    command.arg("--kubeconfig").arg(&kubeconfig).arg("--data-dir").arg(cluster.dir.path().join("alone"));
    command.args(["--kubelet-arg=node-labels=colour=red", "--kubelet-arg=cloud-provider=external"]);
    let mut process = Process::spawn(&mut command).expect("a node");
    let is_started = |log: &str| log.contains("kubelet started").then_some(());
    process
        .wait_until_log(DEADLINE, is_started)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.server.log()));
    cluster.server.wait_until("the node is registered", || {
        let node = cluster.server.kubectl(&["get", "node", "joined", "-o", "json"]).stdout;
        let node: Value = serde_json::from_str(&node).unwrap_or_default();
        node["metadata"]["labels"]["colour"] == "red"
            && node["spec"]["taints"].to_string().contains("node.cloudprovider.kubernetes.io/uninitialized")
            && node["status"]["addresses"].to_string().contains("192.0.2.8")
    });
    assert!(!process.log().contains("self-signed"), "{}", process.log());
    let ended = process.terminate(DEADLINE).expect("an end");
    assert!(ended.success(), "{}", process.log());
}
