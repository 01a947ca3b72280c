//! Nodes that join a server: by a token, with what they keep afterwards, and not without.
//!
//! Needs root; says so and passes where that is missing.

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

/// What nodes have left, which are no more by then.
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

    /// What an agent says that cannot join.
    fn join_error(&self, token: Option<&str>) -> String {
        let dir = tempfile::tempdir().expect("a directory");
        let mut process = Process::spawn(&mut self.command(token, dir.path())).expect("an agent");
        // Words are written one by one.
        let complete_line =
            |log: &str| (log.contains("skiff: ") && log.ends_with('\n')).then(|| log.to_owned());
        let log_text = process.wait_until_log(DEADLINE, complete_line);
        // It may have ended before anybody looked.
        let log_text = log_text.unwrap_or_else(|error| format!("{error:#}"));
        log_text.lines().find_map(|line| line.strip_prefix("skiff: ")).unwrap_or_default().to_owned()
    }

    /// kubectl's answer as JSON.
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

    // Not without a token, with half of one, with another cluster's or with one that nobody knows.
    let (digest, secret) = token.split_once("::").expect("two parts");
    let other = format!("K10{}::{secret}", "0".repeat(64));
    let unknown = format!("{digest}::aaaaaa.aaaaaaaaaaaaaaaa");
    assert!(cluster.join_error(None).starts_with("a token is needed to join"));
    assert!(cluster.join_error(Some(secret)).starts_with("the token must say which authority to trust"));
    assert!(cluster.join_error(Some(&other)).starts_with("the server is not the one the token is for"));
    assert!(cluster.join_error(Some(&unknown)).starts_with("the server does not accept the token"));
    assert!(!cluster.server.log().contains(secret.split_once('.').expect("a secret").1));

    let mut agent = cluster.agent(Some(&token));
    cluster.wait_until_ready(&mut agent);
    let requests = |cluster: &TestCluster| cluster.get(&["csr"])["items"].as_array().map_or(0, Vec::len);
    assert_eq!(requests(&cluster), 2, "one for each end of connections");
    let node = cluster.get(&["node", "joined"]);
    for (at, address) in ["192.0.2.7", "2001:db8::7"].iter().enumerate() {
        assert_eq!(node["status"]["addresses"][at], json!({"type": "InternalIP", "address": address}));
    }

    // Another token, which is not the server's own and ends.
    let tokens = |words: &[&str]| {
        let mut command = cluster.server.command(testkit::binary().expect("a program"));
        command.arg("token").args(words).arg("--kubeconfig").arg(cluster.server.kubeconfig());
        let output = command.output().expect("skiff");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let created = tokens(&["create", "--description=one more", "--ttl=1h"]);
    let another = created.trim();
    assert!(another.starts_with(&format!("{digest}::")), "the same authority");
    let id = another.split_once("::").and_then(|(_, rest)| rest.split_once('.')).expect("an id").0;
    let command = tokens(&["create", "--print-join-command"]);
    assert!(command.starts_with("skiff agent --server https://") && command.contains(digest));
    let listed = tokens(&["list"]);
    let line = listed.lines().find(|line| line.starts_with(id)).expect("a line");
    assert!(line.contains(" 59m ") && line.ends_with(" one more"), "{line}");
    assert_eq!(listed.lines().count(), 4, "the server's own is there too: {listed}");
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
    assert!(join_log(another).contains("INFO joined"), "a token that was made is good");
    tokens(&["delete", another]);
    assert!(
        join_log(another).contains("the server does not accept the token"),
        "one that was deleted is not"
    );
    let nodes = requests(&cluster);

    // It is itself and sees what is its own.
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

    // Again with what was kept: without a token and without the server, and without asking for anything.
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

/// A node whose certificates are about to end gets new ones while it runs, and goes on when the old ones have ended.
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
    // The same ones again, but for a short time.
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
    assert_eq!(requests, 4, "two at first and two now");
    // Signs of life that are given after the first ones have ended.
    let lease_renewed = || {
        let lease = cluster.get(&["lease", "joined", "-n", "kube-node-lease"]);
        let renewed_at: jiff::Timestamp = lease["spec"]["renewTime"].as_str()?.parse().ok()?;
        (renewed_at > first_end).then_some(())
    };
    agent.wait_until(2 * DEADLINE, lease_renewed).unwrap_or_else(|error| panic!("{error:#}"));
    cluster.wait_until_ready(&mut agent);
    assert!(agent.terminate(DEADLINE).expect("an end").success());
}

/// A node alone is who its kubeconfig says, and has its certificate from the cluster.
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
    let is_started = |log: &str| log.contains("a node is at work").then_some(());
    process
        .wait_until_log(DEADLINE, is_started)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.server.log()));
    cluster.server.wait_until("the node has told of itself", || {
        let node = cluster.server.kubectl(&["get", "node", "joined", "-o", "json"]).stdout;
        let node: Value = serde_json::from_str(&node).unwrap_or_default();
        node["metadata"]["labels"]["colour"] == "red"
            && node["spec"]["taints"].to_string().contains("node.cloudprovider.kubernetes.io/uninitialized")
            && node["status"]["addresses"].to_string().contains("192.0.2.8")
    });
    assert!(!process.log().contains("vouches for itself"), "{}", process.log());
    let ended = process.terminate(DEADLINE).expect("an end");
    assert!(ended.success(), "{}", process.log());
}
