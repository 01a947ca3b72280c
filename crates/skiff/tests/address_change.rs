//! Changes of the host's address, as on laptops: everything that contains the address is updated
//! without a restart. Also connections of pods while the server restarts.
//!
//! Needs root, kubectl and busybox; skipped otherwise.

use std::process::Command;
use std::time::{Duration, Instant};

use testkit::{Network, Server};

const DEADLINE: Duration = Duration::from_secs(60);
const IMAGE: &str = "docker.io/library/busybox:1.36";

fn run_in_network(network: &Network, script: &str) -> (bool, String) {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", network.path().display())).args(["sh", "-ec", script]);
    let output = command.output().expect("nsenter");
    (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[track_caller]
fn wait_until(server: &Server, what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < DEADLINE, "timed out waiting for: {what}\n{}", server.log());
        std::thread::yield_now();
    }
}

fn can_run() -> bool {
    let busybox = std::path::Path::new("/bin/busybox").exists();
    let can = testkit::has_kubectl() && busybox && rustix::process::geteuid().is_root();
    if !can {
        eprintln!("skipped: needs root, kubectl and busybox-static");
    }
    can
}

/// A server with an imported image and a default service account.
fn start(network: &Network) -> Server {
    let server = Server::start_with_pods(network, &["--controllers=*", "--node-name=here"]);
    let data = server.data_dir().display().to_string();
    let dir = tempfile::tempdir().expect("a directory");
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    server.skiff(&["image", "import", "--data-dir", &data, &archive]).ok();
    wait_until(&server, "the default service account", || {
        server.kubectl(&["get", "serviceaccount", "default"]).code == 0
    });
    server
}

#[test]
fn pod_connections_stay_open_after_server_kill() {
    if !can_run() {
        return;
    }
    let network = Network::new().expect("a network");
    let link = "ip link add uplink type veth peer name far; ip link set uplink up; ip link set far up; \
                ip addr add 198.51.100.7/24 dev uplink; ip route add default via 198.51.100.1";
    assert!(run_in_network(&network, link).0);
    let mut server = start(&network);
    // Accepts one connection and no other.
    let echo = "exec busybox nc -l -p 9000 -e cat";
    let client_script = "(while :; do echo word; sleep 0.2; done) | busybox nc $ECHO_SERVICE_HOST $ECHO_SERVICE_PORT > /answers; \
               echo over >> /answers; sleep 100000";
    for (name, script) in [("echo", echo), ("asking", client_script)] {
        let pod = serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                "terminationGracePeriodSeconds": 0, "restartPolicy": "Never",
                "containers": [{"name": "c", "image": IMAGE, "command": ["sh", "-c", script]}],
            },
        });
        server.kubectl_with(&["apply", "-f", "-"], &pod.to_string()).ok();
        if name == "echo" {
            server.kubectl(&["expose", "pod", name, "--port", "9000"]).ok();
            wait_until(&server, "the endpoint is ready", || {
                let format = "jsonpath={.items[*].endpoints[*].conditions.ready}";
                let label = "kubernetes.io/service-name=echo";
                server.kubectl(&["get", "endpointslices", "-l", label, "-o", format]).stdout == "true"
            });
        }
    }
    let received_lines = |server: &Server| {
        let received = server.kubectl(&["exec", "asking", "--", "cat", "/answers"]).stdout;
        assert!(!received.contains("over"), "the connection has ended");
        received.lines().count()
    };
    wait_until(&server, "responses arrive", || received_lines(&server) > 2);
    let dns_port = |server: &Server| {
        let (label, format) = ("kubernetes.io/service-name=kube-dns", "jsonpath={.items[*].ports[*].port}");
        server.kubectl(&["get", "endpointslices", "-n", "kube-system", "-l", label, "-o", format]).stdout
    };
    wait_until(&server, "the DNS endpoint is published", || !dns_port(&server).is_empty());
    let (before, port) = (received_lines(&server), dns_port(&server));
    server.kill9();
    server.restart();
    wait_until(&server, "responses still arrive after the kill", || received_lines(&server) > before + 10);
    wait_until(&server, "DNS works again", || {
        let name = "echo.default.svc.cluster.local";
        server.kubectl(&["exec", "asking", "--", "busybox", "nslookup", name]).stdout.contains("Name:")
    });
    assert_eq!(dns_port(&server), port, "the port of the DNS endpoint did not change");
    // SIGTERM does not affect the connections either.
    let before = received_lines(&server);
    server.stop();
    server.restart();
    wait_until(&server, "responses arrive after the stop", || received_lines(&server) > before + 10);
}

#[test]
fn server_follows_address_change() {
    if !can_run() {
        return;
    }
    let network = Network::new().expect("a network");
    let at = |address: &str, gateway: &str| {
        let script = format!(
            "ip addr flush dev uplink; ip addr add {address}/24 dev uplink; ip route add default via {gateway}"
        );
        let (done, output) = run_in_network(&network, &script);
        assert!(done, "{output}");
    };
    let links = "ip link add uplink type veth peer name far; ip link set uplink up; ip link set far up";
    assert!(run_in_network(&network, links).0);
    at("198.51.100.7", "198.51.100.1");
    let server = start(&network);
    let kubectl_get = |what: &[&str]| server.kubectl(&[&["get"], what].concat()).stdout;
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "c", "image": IMAGE, "command": ["sleep", "100000"]}]},
    });
    server.kubectl_with(&["apply", "-f", "-"], &pod.to_string()).ok();
    let everything_at = |address: &str| {
        let slice = |namespace: &str, service: &str| {
            let label = format!("kubernetes.io/service-name={service}");
            let format = "jsonpath={.items[*].endpoints[*].addresses[*]}";
            kubectl_get(&["endpointslices", "-n", namespace, "-l", &label, "-o", format])
        };
        wait_until(&server, "the node reports its address", || {
            let format = "jsonpath={.status.addresses[?(@.type==\"InternalIP\")].address}";
            kubectl_get(&["node", "here", "-o", format]) == address
        });
        wait_until(&server, "the kubernetes endpoint has the address", || {
            slice("default", "kubernetes") == address
        });
        wait_until(&server, "the DNS endpoint has the address", || {
            slice("kube-system", "kube-dns") == address
        });
        wait_until(&server, "the pod reports the host address", || {
            kubectl_get(&["pod", "p", "-o", "jsonpath={.status.phase} {.status.hostIP}"])
                == format!("Running {address}")
        });
        // The node's certificate is valid for the new address, and DNS responses come from it.
        wait_until(&server, "DNS works in the pod", || {
            let name = "kubernetes.default.svc.cluster.local";
            let words = server.kubectl(&["exec", "p", "--", "busybox", "nslookup", name]).stdout;
            words.contains("10.43.0.1")
        });
    };
    everything_at("198.51.100.7");
    // A second address does not change the node's address.
    assert!(run_in_network(&network, "ip addr add 203.0.113.9/24 dev uplink").0);
    at("203.0.113.7", "203.0.113.1");
    everything_at("203.0.113.7");
    let log = server.log();
    assert_eq!(log.matches("node address changed").count(), 1, "{log}");
}
