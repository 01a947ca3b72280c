//! Services and DNS as pods see them: real containers, the rules in a real kernel, the cluster DNS.
//!
//! Needs root, containerd and kubectl; skipped otherwise.

use std::process::Command;

use testkit::{Containerd, Server};

/// The pod network of the test's containerd, and an address of the node.
const POD_CIDR: &str = "10.88.0.0/16";
const NODE_ADDRESS: &str = "192.0.2.1";
/// Sends a request to the web server at an address and port. The image's wget cannot be used: it needs
/// files of the C library.
const REQUEST_SCRIPT: &str = r"printf 'GET / HTTP/1.0\r\n\r\n' | busybox nc -w 10 $AT | busybox tail -n 1";

struct Cluster {
    server: Server,
    containerd: Containerd,
    _dir: tempfile::TempDir,
}

fn start() -> Option<Cluster> {
    if !testkit::can_run_pods(&["containerd"]) {
        return None;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let containerd = Containerd::start(&dir.path().join("containerd")).expect("a containerd");
    // The node needs an address and a default route.
    let script = format!(
        "ip link add uplink type veth peer name far && ip link set far up && ip addr add {NODE_ADDRESS}/24 dev uplink && ip link set uplink up \
         && ip route add default via 192.0.2.254"
    );
    run_in_network(&containerd, &script);
    let flags = [
        "--controllers=*".to_owned(),
        "--node-name=here".to_owned(),
        format!("--advertise-address={NODE_ADDRESS}"),
        format!("--cluster-cidr={POD_CIDR}"),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = Server::start_with_node(&containerd, &flags);
    let cluster = Cluster { server, containerd, _dir: dir };
    cluster.server.wait_for_default_service_account();
    Some(cluster)
}

/// Runs a script in the node's network namespace.
#[track_caller]
fn run_in_network(containerd: &Containerd, script: &str) -> String {
    let network = format!("--net={}", containerd.network().display());
    let output = Command::new("nsenter").arg(network).args(["sh", "-ec", script]).output().expect("nsenter");
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Cluster {
    fn apply(&self, object: &serde_json::Value) {
        self.server.kubectl_with(&["apply", "-f", "-"], &object.to_string()).ok();
    }

    fn pod(&self, name: &str, labels: serde_json::Value, script: &str) {
        self.apply(&serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script]}],
            },
        }));
    }

    /// The output of a command in the client pod.
    fn run_in_client(&self, command: &str) -> String {
        let output = self.server.kubectl(&["exec", "client", "--", "sh", "-c", command]);
        format!("{}{}", output.stdout, output.stderr)
    }
}

#[test]
fn services_ingress_and_dns_from_pods() {
    let Some(cluster) = start() else { return };
    for name in ["one", "two"] {
        let serve = format!(
            "mkdir -p /tmp/www && echo {name} > /tmp/www/index.html && exec busybox httpd -f -p 8080 -h /tmp/www"
        );
        cluster.pod(name, serde_json::json!({"app": "web"}), &serve);
    }
    cluster.pod("client", serde_json::json!({}), "sleep 1000000");
    cluster.apply(&serde_json::json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
        "spec": {
            "type": "NodePort", "clusterIP": "10.43.7.1", "selector": {"app": "web"},
            "ports": [{"name": "http", "port": 80, "targetPort": 8080, "nodePort": 30080}],
        },
    }));
    cluster.apply(&serde_json::json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "each"},
        "spec": {"clusterIP": "None", "selector": {"app": "web"}, "ports": [{"name": "http", "port": 8080}]},
    }));
    let ready = ["wait", "--for=condition=Ready", "pod/one", "pod/two", "pod/client", "--timeout=50s"];
    cluster.server.kubectl(&ready).ok();

    // Both pods serve the Service, from a pod and from outside.
    for at in ["10.43.7.1 80", "192.0.2.1 30080"] {
        let request = REQUEST_SCRIPT.replace("$AT", at);
        let mut seen = std::collections::BTreeSet::new();
        cluster.server.wait_until("both pods respond", || {
            seen.insert(cluster.run_in_client(&request).trim().to_owned());
            seen.contains("one") && seen.contains("two")
        });
    }
    let request = REQUEST_SCRIPT.replace("$AT", "10.43.7.1 80");
    cluster.server.wait_until("the node reaches the Service", || {
        let words = run_in_network(&cluster.containerd, &request);
        words.trim() == "one" || words.trim() == "two"
    });

    // A host port is mapped to its pod by skiff's own rules, not by the portmap plugin.
    let serve = "mkdir /www; echo held > /www/index.html; exec busybox httpd -f -p 8080 -h /www";
    cluster.apply(&serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "held"},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [{
            "name": "main", "image": "busybox:1.36", "command": ["sh", "-c", serve],
            "ports": [{"containerPort": 8080, "hostPort": 8090}],
        }]},
    }));
    let port_request = REQUEST_SCRIPT.replace("$AT", "192.0.2.1 8090");
    cluster.server.wait_until("the host port is mapped to the pod", || {
        cluster.run_in_client(&port_request).trim() == "held"
    });
    let others = run_in_network(&cluster.containerd, "iptables -t nat -S 2>/dev/null || true");
    assert!(!others.contains("8090"), "{others}");

    // Ingress: requests from outside, by host and path.
    let backend = serde_json::json!({"service": {"name": "web", "port": {"name": "http"}}});
    cluster.apply(&serde_json::json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "web"},
        "spec": {"rules": [{"host": "web.example", "http": {"paths": [
            {"path": "/", "pathType": "Prefix", "backend": backend},
        ]}}]},
    }));
    let by_host = |host: &str| {
        let request = REQUEST_SCRIPT.replace("\\r\\n\\r\\n", &format!("\\r\\nHost: {host}\\r\\n\\r\\n"));
        run_in_network(&cluster.containerd, &request.replace("$AT", "192.0.2.1 80")).trim().to_owned()
    };
    cluster
        .server
        .wait_until("the Ingress routes to the pods", || ["one", "two"].contains(&&*by_host("web.example")));
    cluster.server.wait_until("other hosts get 404", || by_host("other.example") == "404 page not found");
    cluster.server.wait_until("the Ingress status has the node address", || {
        let seen = cluster.server.kubectl(&["get", "ingress", "web", "--no-headers"]).stdout;
        seen.split_whitespace().take(4).eq(["web", "skiff", "web.example", NODE_ADDRESS])
    });
    cluster.server.kubectl(&["delete", "ingress", "web"]).ok();
    cluster
        .server
        .wait_until("the deleted Ingress is not served", || by_host("web.example") == "404 page not found");

    // DNS: Service names, several addresses, SRV records, reverse lookups and NXDOMAIN.
    cluster.server.wait_until("the Service name is resolved", || {
        cluster.run_in_client("busybox nslookup web.default.svc.cluster.local").contains("10.43.7.1")
    });
    let config = cluster.run_in_client("cat /etc/resolv.conf");
    assert!(config.contains("nameserver 10.43.0.10"), "{config}");
    let each = cluster.run_in_client("busybox nslookup -type=a each.default.svc.cluster.local");
    assert_eq!(each.matches("Address: 10.88.").count(), 2, "{each}");
    let service =
        cluster.run_in_client("busybox nslookup -type=srv _http._tcp.each.default.svc.cluster.local");
    assert_eq!(service.matches("8080 10-88-").count(), 2, "{service}");
    let back = cluster.run_in_client("busybox nslookup -type=ptr 1.7.43.10.in-addr.arpa");
    assert!(back.contains("web.default.svc.cluster.local"), "{back}");
    let none = cluster.run_in_client("busybox nslookup missing.default.svc.cluster.local");
    assert!(none.contains("NXDOMAIN"), "{none}");

    // Deleting a pod breaks no connection.
    cluster.server.kubectl(&["delete", "pod", "one", "--wait=true"]).ok();
    for _ in 0..20 {
        assert_eq!(cluster.run_in_client(&request).trim(), "two");
    }
    let counted = cluster.server.kubectl(&["get", "--raw", "/metrics"]).stdout;
    assert!(
        counted.contains("coredns_dns_requests_total{proto=\"udp\",type=\"A\"}"),
        "DNS metrics are reported"
    );
}
