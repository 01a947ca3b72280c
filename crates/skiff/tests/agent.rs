//! Nodes that join a server: by a token, with what they keep afterwards, and not without.
//!
//! Needs root; says so and passes where that is missing.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::{Network, Process, Server};

const DEADLINE: Duration = Duration::from_secs(60);

struct Place {
    network: Network,
    server: Server,
    dir: tempfile::TempDir,
}

/// What nodes have left, which are no more by then.
impl Drop for Place {
    fn drop(&mut self) {
        sweep(self.dir.path());
        sweep(&self.dir.path().join("alone"));
    }
}

fn sweep(data: &Path) {
    testkit::sweep(data, &data.join("agent/pods"));
}

impl Place {
    fn new() -> Option<Place> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let network = Network::new().expect("a network");
        let server =
            Server::start_with_pods(&network, &["--disable-agent", "--controllers=*", "--disable-scheduler"]);
        Some(Place { network, server, dir: tempfile::tempdir().expect("a directory") })
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
    fn refusal(&self, token: Option<&str>) -> String {
        let dir = tempfile::tempdir().expect("a directory");
        let mut process = Process::spawn(&mut self.command(token, dir.path())).expect("an agent");
        // Words are written one by one.
        let whole = |log: &str| (log.contains("skiff: ") && log.ends_with('\n')).then(|| log.to_owned());
        let said = process.wait_until_log(DEADLINE, whole);
        // It may have ended before anybody looked.
        let said = said.unwrap_or_else(|error| format!("{error:#}"));
        said.lines().find_map(|line| line.strip_prefix("skiff: ")).unwrap_or_default().to_owned()
    }

    /// kubectl's answer as JSON.
    fn get(&self, what: &[&str]) -> Value {
        let said = self.server.kubectl(&[&["get", "-o", "json"], what].concat());
        serde_json::from_str(&said.stdout).unwrap_or_default()
    }

    fn until_ready(&self, process: &mut Process) {
        let is_ready = || {
            let node = self.get(&["node", "joined"]);
            let conditions = node["status"]["conditions"].as_array()?.clone();
            conditions.iter().any(|known| known["type"] == "Ready" && known["status"] == "True").then_some(())
        };
        process.wait_until(DEADLINE, is_ready).unwrap_or_else(|error| panic!("{error:#}"));
    }
}

#[test]
fn a_node_joins_by_a_token_and_is_known_afterwards() {
    let Some(mut place) = Place::new() else { return };
    if !testkit::has_kubectl() {
        eprintln!("skipped: needs kubectl");
        return;
    }
    let token = place.token();
    let mode = std::fs::metadata(place.server.data_dir().join("token")).expect("a token").permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);

    // Not without a token, with half of one, with another cluster's or with one that nobody knows.
    let (digest, secret) = token.split_once("::").expect("two parts");
    let other = format!("K10{}::{secret}", "0".repeat(64));
    let unknown = format!("{digest}::aaaaaa.aaaaaaaaaaaaaaaa");
    assert!(place.refusal(None).starts_with("a token is needed to join"));
    assert!(place.refusal(Some(secret)).starts_with("the token must say which authority to trust"));
    assert!(place.refusal(Some(&other)).starts_with("the server is not the one the token is for"));
    assert!(place.refusal(Some(&unknown)).starts_with("the server does not accept the token"));
    assert!(!place.server.log().contains(secret.split_once('.').expect("a secret").1));

    let mut agent = place.agent(Some(&token));
    place.until_ready(&mut agent);
    let requests = |place: &Place| place.get(&["csr"])["items"].as_array().map_or(0, Vec::len);
    assert_eq!(requests(&place), 2, "one for each end of connections");
    let node = place.get(&["node", "joined"]);
    for (at, address) in ["192.0.2.7", "2001:db8::7"].iter().enumerate() {
        assert_eq!(node["status"]["addresses"][at], json!({"type": "InternalIP", "address": address}));
    }

    // Another token, which is not the server's own and ends.
    let tokens = |words: &[&str]| {
        let mut command = place.server.command(testkit::binary().expect("a program"));
        command.arg("token").args(words).arg("--kubeconfig").arg(place.server.kubeconfig());
        let output = command.output().expect("skiff");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let made = tokens(&["create", "--description=one more", "--ttl=1h"]);
    let another = made.trim();
    assert!(another.starts_with(&format!("{digest}::")), "the same authority");
    let id = another.split_once("::").and_then(|(_, rest)| rest.split_once('.')).expect("an id").0;
    let command = tokens(&["create", "--print-join-command"]);
    assert!(command.starts_with("skiff agent --server https://") && command.contains(digest));
    let listed = tokens(&["list"]);
    let line = listed.lines().find(|line| line.starts_with(id)).expect("a line");
    assert!(line.contains(" 59m ") && line.ends_with(" one more"), "{line}");
    assert_eq!(listed.lines().count(), 4, "the server's own is there too: {listed}");
    let asked = |token: &str| {
        let dir = tempfile::tempdir().expect("a directory");
        let mut process = Process::spawn(&mut place.command(Some(token), dir.path())).expect("an agent");
        let outcome = |log: &str| {
            (log.ends_with('\n') && (log.contains("INFO joined") || log.contains("skiff: ")))
                .then(|| log.to_owned())
        };
        let said = process.wait_until_log(DEADLINE, outcome).unwrap_or_else(|error| format!("{error:#}"));
        process.kill();
        sweep(dir.path());
        said
    };
    assert!(asked(another).contains("INFO joined"), "a token that was made is good");
    tokens(&["delete", another]);
    assert!(asked(another).contains("the server does not accept the token"), "one that was deleted is not");
    let nodes = requests(&place);

    // It is itself and sees what is its own.
    let tls = place.dir.path().join("agent/tls");
    let read = |name: &str| std::fs::read_to_string(tls.join(name)).expect("a file");
    let node = pki::Issued { cert_pem: read("client.crt"), key_pem: read("client.key") };
    let kubeconfig = place.dir.path().join("node.kubeconfig");
    let text = pki::kubeconfig(&place.server.url(), &read("server-ca.crt"), &node, "node");
    std::fs::write(&kubeconfig, text).expect("written");
    let kubeconfig = kubeconfig.display().to_string();
    let as_node = |what: &[&str]| {
        place.server.kubectl(&[&["--kubeconfig", &kubeconfig, "auth", "can-i"], what].concat()).stdout
    };
    let allowed = ["list pods -A", "watch endpointslices.discovery.k8s.io -A", "get nodes"];
    let forbidden = [
        "list secrets -A",
        "list configmaps -A",
        "delete nodes",
        "create clusterrolebindings",
        "update pods",
    ];
    for (asked, answer) in
        allowed.map(|asked| (asked, "yes")).iter().chain(&forbidden.map(|asked| (asked, "no")))
    {
        let words: Vec<&str> = asked.split(' ').collect();
        assert!(as_node(&words).starts_with(answer), "{asked}");
    }

    // Again with what was kept: without a token and without the server, and without asking for anything.
    assert!(agent.terminate(DEADLINE).expect("an end").success());
    place.server.stop();
    let mut agent = place.agent(None);
    place.server.restart();
    place.until_ready(&mut agent);
    let heartbeat =
        |place: &Place| place.get(&["lease", "joined", "-n", "kube-node-lease"])["spec"]["renewTime"].clone();
    let before = heartbeat(&place);
    agent.wait_until(DEADLINE, || (heartbeat(&place) != before).then_some(())).expect("it lives");
    assert_eq!(requests(&place), nodes);
    assert!(agent.terminate(DEADLINE).expect("an end").success());
}

/// A node whose certificates are about to end gets new ones while it runs, and goes on when the old ones have ended.
#[test]
fn certificates_of_a_node_are_renewed_while_it_runs() {
    let Some(place) = Place::new() else { return };
    if !testkit::has_kubectl() {
        eprintln!("skipped: needs kubectl");
        return;
    }
    let mut agent = place.agent(Some(&place.token()));
    place.until_ready(&mut agent);
    assert!(agent.terminate(DEADLINE).expect("an end").success());
    // The same ones again, but for a short time.
    let now = jiff::Timestamp::now();
    let (tls, server_tls) = (place.dir.path().join("agent/tls"), place.server.data_dir().join("tls"));
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
        pki::keep(&tls, stem, &authority.issue(&leaf, now).expect("issued")).expect("kept");
    }
    let end = |stem: &str| {
        let pem = std::fs::read_to_string(tls.join(format!("{stem}.crt"))).unwrap_or_default();
        pki::ends(&pem).unwrap_or(now)
    };
    let first_end = end("client").max(end("serving"));
    assert!(first_end < now + Duration::from_secs(60));
    let mut agent = place.agent(None);
    let renewed =
        || ["client", "serving"].iter().all(|stem| end(stem) > now + Duration::from_secs(24 * 3600));
    agent.wait_until(DEADLINE, || renewed().then_some(())).unwrap_or_else(|error| panic!("{error:#}"));
    let requests = place.get(&["csr"])["items"].as_array().map_or(0, Vec::len);
    assert_eq!(requests, 4, "two at first and two now");
    // Signs of life that are given after the first ones have ended.
    let lives = || {
        let lease = place.get(&["lease", "joined", "-n", "kube-node-lease"]);
        let heard: jiff::Timestamp = lease["spec"]["renewTime"].as_str()?.parse().ok()?;
        (heard > first_end).then_some(())
    };
    agent.wait_until(2 * DEADLINE, lives).unwrap_or_else(|error| panic!("{error:#}"));
    place.until_ready(&mut agent);
    assert!(agent.terminate(DEADLINE).expect("an end").success());
}

/// A node alone is who its kubeconfig says, and has its certificate from the cluster.
#[test]
fn a_node_by_a_kubeconfig() {
    let Some(place) = Place::new() else { return };
    drop(place.agent(Some(&place.token())));
    let tls = place.dir.path().join("agent/tls");
    let kubeconfig = place.dir.path().join("kubeconfig");
    let file = |name: &str| tls.join(name).display().to_string();
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {
            "server": place.server.url(), "certificate-authority": file("server-ca.crt"),
        }}],
        "users": [{"name": "u", "user": {
            "client-certificate": file("client.crt"), "client-key": file("client.key"),
        }}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    });
    std::fs::write(&kubeconfig, text.to_string()).expect("written");
    place.server.kubectl(&["delete", "node", "joined", "--ignore-not-found"]).ok();
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net={}", place.network.path().display()))
        .arg("--")
        .arg(testkit::binary().expect("a program"));
    command.args(["kubelet", "--node-name", "joined", "--node-ip", "192.0.2.8", "--kubelet-port", "0"]);
    command.arg("--kubeconfig").arg(&kubeconfig).arg("--data-dir").arg(place.dir.path().join("alone"));
    command.args(["--kubelet-arg=node-labels=colour=red", "--kubelet-arg=cloud-provider=external"]);
    let mut process = Process::spawn(&mut command).expect("a node");
    let works = |log: &str| log.contains("a node is at work").then_some(());
    process
        .wait_until_log(DEADLINE, works)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", place.server.log()));
    place.server.until("the node has told of itself", || {
        let node = place.server.kubectl(&["get", "node", "joined", "-o", "json"]).stdout;
        let node: Value = serde_json::from_str(&node).unwrap_or_default();
        node["metadata"]["labels"]["colour"] == "red"
            && node["spec"]["taints"].to_string().contains("node.cloudprovider.kubernetes.io/uninitialized")
            && node["status"]["addresses"].to_string().contains("192.0.2.8")
    });
    assert!(!process.log().contains("vouches for itself"), "{}", process.log());
    let ended = process.terminate(DEADLINE).expect("an end");
    assert!(ended.success(), "{}", process.log());
}
