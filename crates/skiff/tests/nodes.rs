//! Several nodes on one machine, created with `skiff dev`: connectivity of pods, Services and DNS
//! between all nodes, a node that loses its link and recovers, a rolling update under load, and
//! cleanup.
//!
//! Needs root, kubectl and busybox; skipped otherwise.

#[path = "nodes/cluster.rs"]
mod cluster;

use std::collections::BTreeMap;
use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cluster::{Cluster, in_network};

const DEADLINE: Duration = Duration::from_secs(60);
const IMAGE: &str = "docker.io/library/busybox:1.36";

/// The objects of the tests: on every node a pod that serves TCP and UDP.
const PODS: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: words}
data: {greeting: hello}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: talk, port: 90, targetPort: 9000, protocol: UDP}]
---
apiVersion: v1
kind: Service
metadata: {name: sticky}
spec: {selector: {app: web}, sessionAffinity: ClientIP, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: c
        image: docker.io/library/busybox:1.36
        command: ["sh", "-c", "mkdir /www; echo $NODE > /www/index.html; echo $GREETING; exec busybox httpd -f -p 8080 -h /www"]
        env:
        - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: GREETING, valueFrom: {configMapKeyRef: {name: words, key: greeting}}}
"#;

fn http_get_script(address: &str, port: u16) -> String {
    format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | busybox nc -w 5 {address} {port} | busybox tail -n 1")
}

#[test]
fn three_node_cluster() {
    let Some(mut cluster) = Cluster::start(3, &[]) else { return };
    cluster.apply(PODS);
    cluster.wait_until("all pods are running", || {
        let format = "jsonpath={.status.numberReady} {.status.desiredNumberScheduled}";
        cluster.kubectl(&["get", "daemonset", "web", "-o", format]).1 == "3 3"
    });
    let pods = cluster.pods("app=web");
    assert_eq!(pods.keys().collect::<Vec<_>>(), ["node-1", "node-2", "node-3"]);
    check_pod_network(&cluster, &pods);
    host_network_hostnames(&cluster, &pods);
    check_dns(&cluster, &pods);
    dns_without_server(&cluster, &pods);
    dns_with_egress_policy(&cluster, &pods);
    session_affinity_and_load_balancing(&cluster, &pods);
    external_access(&cluster, &pods, &[]);
    node_link_down_and_up(&cluster, &pods);
    node_address_change(&cluster, &pods);
    rolling_update_under_load(&cluster, &pods);
    dns_when_node_stops(&cluster, &pods);
    let events = cluster.ok(&["get", "events", "-A"]);
    assert!(!events.contains("PodNetworkBroken"), "{events}");
    // All resources are removed at the end.
    let started = Instant::now();
    let ended = cluster.process.terminate(DEADLINE).expect("an end");
    eprintln!("removed after {:.1?}", started.elapsed());
    assert!(ended.success(), "{}", cluster.process.log());
    let left = cluster.kernel_state();
    assert!(left.iter().all(|line| line.contains("lo: ") || line.contains("dev lo")), "{left:#?}");
    assert!(!cluster.data().exists());
}

/// Pods with `hostNetwork` have the host name of their node, not of the machine that runs all nodes.
fn host_network_hostnames(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    for node in pods.keys() {
        let name = format!("named-{node}");
        let script = "hostname; cat /etc/hostname; echo $HOSTNAME";
        let pod = serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "nodeName": node, "hostNetwork": true, "restartPolicy": "Never",
                "containers": [{"name": "c", "image": IMAGE, "command": ["sh", "-c", script]}],
            },
        });
        cluster.apply(&pod.to_string());
        cluster.wait_until("the pod has succeeded", || {
            cluster.kubectl(&["get", "pod", &name, "-o", "jsonpath={.status.phase}"]).1 == "Succeeded"
        });
        assert_eq!(cluster.ok(&["logs", &name]), format!("{node}\n{node}\n{node}\n"));
        cluster.ok(&["delete", "pod", &name, "--wait=false"]);
    }
}

/// Every pod can reach every pod and the Service over TCP and UDP; logs and exec work on every node.
fn check_pod_network(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    let service = cluster.cluster_ip("web");
    let stop = AtomicBool::new(false);
    let namespaces: Vec<File> = pods.values().map(|(pod, _)| cluster.pod_netns(pod)).collect();
    std::thread::scope(|scope| {
        for (node, netns) in pods.keys().zip(&namespaces) {
            scope.spawn(|| serve_udp(netns, node, &stop));
        }
        for ((node, (pod, _)), netns) in pods.iter().zip(&namespaces) {
            assert_eq!(cluster.ok(&["logs", pod]), "hello\n");
            let mut script = String::new();
            for (_, address) in pods.values() {
                script += &format!("{}; ", http_get_script(address, 8080));
            }
            let expected: String = pods.keys().map(|node| format!("{node}\n")).collect();
            assert_eq!(cluster.sh(pod, &script), expected, "TCP from {pod}");
            let answer = cluster.sh(pod, &http_get_script(&service, 80));
            assert!(pods.contains_key(answer.trim()), "TCP from {pod} to the Service: {answer}");
            for (far, (_, address)) in pods {
                assert_eq!(
                    query_udp(netns, address, 9000).as_deref(),
                    Some(far.as_str()),
                    "UDP from {node} to {far}"
                );
            }
            let answer = query_udp(netns, &service, 90).unwrap_or_default();
            assert!(pods.contains_key(&answer), "UDP from {node} to the Service: {answer}");
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Runs a function in the network namespace of a pod. busybox has no UDP server.
fn run_in_netns<T: Send>(netns: &File, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(netns.as_fd(), kind).expect("the pod's network");
            work()
        });
        thread.join().expect("no panic")
    })
}

/// Responds to UDP packets in a pod's network namespace with this word, until stopped.
fn serve_udp(netns: &File, word: &str, stop: &AtomicBool) {
    run_in_netns(netns, || {
        let socket = UdpSocket::bind("0.0.0.0:9000").expect("a port");
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
        while !stop.load(Ordering::Relaxed) {
            if let Ok((_, from)) = socket.recv_from(&mut [0; 2000]) {
                let _ = socket.send_to(word.as_bytes(), from);
            }
        }
    });
}

/// The response to a large UDP packet. Packets may be lost, so it retries.
fn query_udp(netns: &File, address: &str, port: u16) -> Option<String> {
    run_in_netns(netns, || {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a port");
        socket.set_read_timeout(Some(Duration::from_secs(2))).expect("a timeout");
        socket.connect((address, port)).expect("an address");
        let mut buffer = [0; 2000];
        (0..5).find_map(|_| {
            socket.send(&[1; 1400]).ok()?;
            let count = socket.recv(&mut buffer).ok()?;
            Some(String::from_utf8_lossy(&buffer[..count]).into_owned())
        })
    })
}

fn check_dns(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    let service = cluster.cluster_ip("web");
    for (pod, _) in pods.values() {
        let name = "web.default.svc.cluster.local";
        let script = format!(
            "busybox nslookup {name}; busybox nslookup -type=srv _http._tcp.{name}; busybox nslookup {service}"
        );
        let output = cluster.sh(pod, &script);
        assert!(output.contains(&format!("Address: {service}")), "{output}");
        assert!(output.contains(&format!("80 {name}")), "{output}");
        assert!(output.contains(&format!("name = {name}")), "{output}");
    }
}

/// Whether a pod can resolve a Service. Uses the pod's network namespace directly, because exec needs
/// the API server.
fn resolves_service(netns: &File, service: &str) -> bool {
    let network = format!("--net=/proc/{}/fd/{}", std::process::id(), netns.as_raw_fd());
    let dns = "10.43.0.10";
    let output = Command::new("nsenter")
        .args([network.as_str(), "busybox", "nslookup", "-type=a", "web.default.svc.cluster.local", dns])
        .output()
        .expect("nsenter");
    let stdout = String::from_utf8_lossy(&output.stdout);
    stdout.contains(&format!("Address: {service}"))
}

/// Pods query the DNS server of their own node, so that DNS works while the server is unavailable.
fn dns_without_server(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    let (service, netns) = (cluster.cluster_ip("web"), cluster.pod_netns(&pods["node-2"].0));
    let server = cluster.node_process(1);
    let signal = |signal| rustix::process::kill_process(server, signal).expect("a signal");
    // The proxy may still have to update its rules, which it cannot do while the server is stopped.
    cluster.wait_until("DNS works while the server is stopped", || {
        signal(rustix::process::Signal::STOP);
        let is_resolved = resolves_service(&netns, &service);
        signal(rustix::process::Signal::CONT);
        is_resolved
    });
}

/// A policy without allowed egress does not block DNS queries to the pod's own node.
fn dns_with_egress_policy(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    let ((pod, _), (_, far)) = (&pods["node-2"], &pods["node-1"]);
    cluster.apply(
        r#"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: alone}
spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Egress]}
"#,
    );
    let request_script = format!("{} || true", http_get_script(far, 8080).replace("-w 5", "-w 1"));
    cluster.wait_until("the policy is enforced", || cluster.sh(pod, &request_script).is_empty());
    let said = cluster.sh(pod, "busybox nslookup web.default.svc.cluster.local");
    assert!(said.contains(&format!("Address: {}", cluster.cluster_ip("web"))), "{said}");
    let metrics = cluster.ok(&["get", "--raw", "/api/v1/nodes/node-2/proxy/metrics"]);
    assert!(
        metrics.contains("coredns_dns_requests_total{proto=\"udp\",type=\"A\"}"),
        "DNS metrics are reported by the node"
    );
    cluster.ok(&["delete", "networkpolicy", "alone"]);
    cluster.wait_until("the policy is removed", || cluster.sh(pod, &request_script) == "node-1\n");
}

/// When skiff stops on a node, pods on it query the DNS servers of other nodes.
fn dns_when_node_stops(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    let (service, netns) = (cluster.cluster_ip("web"), cluster.pod_netns(&pods["node-3"].0));
    let ready_dns_nodes = || {
        let format = "jsonpath={range .items[*].endpoints[?(@.conditions.ready==true)]}{.nodeName} {end}";
        let label = "kubernetes.io/service-name=kube-dns";
        let output = cluster.ok(&["get", "endpointslices", "-n", "kube-system", "-l", label, "-o", format]);
        let mut nodes: Vec<String> = output.split_whitespace().map(str::to_owned).collect();
        nodes.sort();
        nodes.join(" ")
    };
    cluster.wait_until("every node has a ready DNS endpoint", || ready_dns_nodes() == "node-1 node-2 node-3");
    let node = cluster.node_process(3);
    rustix::process::kill_process(node, rustix::process::Signal::TERM).expect("a signal");
    cluster.wait_until("the node process has exited", || {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", node.as_raw_nonzero())).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
    });
    assert_eq!(ready_dns_nodes(), "node-1 node-2");
    assert!(resolves_service(&netns, &service), "other nodes serve DNS immediately");
}

/// With session affinity one client always reaches the same pod; otherwise requests are distributed
/// evenly.
fn session_affinity_and_load_balancing(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    let (sticky, web) = (cluster.cluster_ip("sticky"), cluster.cluster_ip("web"));
    let many = |address: &str, count: u32| {
        format!("for i in $(busybox seq {count}); do {}; done", http_get_script(address, 80))
    };
    let (first, _) = pods.values().next().expect("a pod");
    for (pod, _) in pods.values() {
        let answers = cluster.sh(pod, &many(&sticky, 8));
        let mut nodes: Vec<&str> = answers.lines().collect();
        assert_eq!(nodes.len(), 8);
        nodes.dedup();
        assert_eq!(nodes.len(), 1, "{answers}");
    }
    let responses = cluster.sh(first, &many(&web, 150));
    let mut counts: BTreeMap<&str, f64> = BTreeMap::new();
    responses.lines().for_each(|node| *counts.entry(node).or_default() += 1.0);
    let expected = 50.0;
    let fairness_error: f64 = pods
        .keys()
        .map(|node| counts.get(node.as_str()).unwrap_or(&0.0))
        .map(|count| (count - expected).powi(2) / expected)
        .sum();
    // With two degrees of freedom, a larger value occurs by chance once in a million runs.
    eprintln!("spread {counts:?}, chi-square {fairness_error:.2}");
    assert!(fairness_error < 27.6, "{counts:?}: {fairness_error}");
}

/// NodePorts, LoadBalancer Services and Ingresses are reachable at every node, wherever the pods run.
/// `servers` are servers without a node, which serve Ingresses as well.
fn external_access(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>, servers: &[&str]) {
    cluster.apply(
        r#"
apiVersion: v1
kind: Service
metadata: {name: outside}
spec:
  type: LoadBalancer
  selector: {app: web}
  ports: [{name: http, port: 8088, targetPort: 8080, nodePort: 30088}]
---
apiVersion: v1
kind: Service
metadata: {name: near}
spec:
  type: NodePort
  selector: {app: web}
  externalTrafficPolicy: Local
  ports: [{port: 80, targetPort: 8080, nodePort: 30089}]
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: outside}
spec:
  rules: [{host: web.test, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: outside, port: {name: http}}}}]}}]
"#,
    );
    let format = "jsonpath={range .items[*]}{.metadata.name} {.status.addresses[0].address}{\"\\n\"}{end}";
    let nodes = cluster.ok(&["get", "nodes", "-o", format]);
    let nodes: Vec<(&str, &str)> = nodes.lines().filter_map(|line| line.split_once(' ')).collect();
    assert_eq!(nodes.len(), pods.len());
    let run_outside = |script: &str| {
        let output = in_network(&cluster.network, "sh").args(["-c", script]).output().expect("a shell");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    for (node, address) in &nodes {
        for port in [30088, 8088] {
            cluster.wait_until("a Service is reachable at a node", || {
                pods.contains_key(&run_outside(&http_get_script(address, port)))
            });
        }
        cluster.wait_until("only the node's own pod responds", || {
            run_outside(&http_get_script(address, 30089)) == *node
        });
    }
    let by_host = |address: &str| {
        http_get_script(address, 80).replace("\\r\\n\\r\\n", "\\r\\nHost: web.test\\r\\n\\r\\n")
    };
    for address in nodes.iter().map(|(_, address)| address).chain(servers) {
        cluster.wait_until("an Ingress is reachable at a node", || {
            pods.contains_key(&run_outside(&by_host(address)))
        });
    }
    for what in ["service", "ingress"] {
        let published_ips = || {
            let format = "jsonpath={.status.loadBalancer.ingress[*].ip}";
            let status_ips = cluster.ok(&["get", what, "outside", "-o", format]);
            let mut ips: Vec<String> = status_ips.split_whitespace().map(str::to_owned).collect();
            ips.sort();
            ips
        };
        let servers = if what == "ingress" { servers } else { &[] };
        let mut all: Vec<&str> = nodes.iter().map(|(_, ip)| ip).chain(servers).copied().collect();
        all.sort_unstable();
        cluster.wait_until("the status has the addresses of all nodes", || published_ips() == all);
    }
    // Deleted objects are not served any more.
    cluster.ok(&["delete", "service/outside", "service/near", "ingress/outside"]);
    let started = Instant::now();
    for (_, address) in &nodes {
        cluster.wait_until("deleted Services and Ingresses are not served", || {
            [30088, 8088, 30089]
                .iter()
                .all(|port| !pods.contains_key(&run_outside(&http_get_script(address, *port))))
                && !pods.contains_key(&run_outside(&by_host(address)))
        });
    }
    eprintln!("deleted objects are not served any more after {:.0?}", started.elapsed());
}

/// A node loses its link and gets it back: it catches up with the changes it has missed.
fn node_link_down_and_up(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    let link = |state: &str| {
        let done = in_network(&cluster.network, "ip").args(["link", "set", "skd3", state]).status();
        assert!(done.is_ok_and(|status| status.success()));
    };
    let ((here, _), (_, there)) = (&pods["node-1"], &pods["node-3"]);
    let is_reachable = || {
        cluster.sh(here, &format!("{} || true", http_get_script(there, 8080).replace("-w 5", "-w 1")))
            == "node-3\n"
    };
    assert!(is_reachable());
    link("down");
    assert!(!is_reachable());
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: late}}\nspec:\n  nodeName: node-3\n  terminationGracePeriodSeconds: 0\n  containers: [{{name: c, image: \"{IMAGE}\"}}]\n"
    ));
    link("up");
    let started = Instant::now();
    cluster.wait_until("the node is reachable again", is_reachable);
    eprintln!("recovered after {:.1?}", started.elapsed());
    cluster.wait_until("the pod that was created meanwhile is running", || {
        cluster.kubectl(&["get", "pod", "late", "-o", "jsonpath={.status.phase}"]).1 == "Running"
    });
    // Setting the link down and up removes all routes of the node.
    let processes = std::fs::read_to_string(cluster.data().join("processes")).expect("processes");
    let third = processes.lines().nth(3).expect("the third node");
    let script = "gateway=$(ip route show default | awk '{print $3}'); ip link set eth0 down; ip link set eth0 up; \
                  ip route replace default via $gateway; ! ip route show | grep -q '^10[.]42.* via '";
    let link_restart = Command::new("nsenter")
        .arg(format!("--net=/proc/{third}/ns/net"))
        .args(["sh", "-ec", script])
        .status();
    assert!(
        link_restart.is_ok_and(|status| status.success()),
        "the routes were not removed by the link change"
    );
    let (far, _) = &pods["node-3"];
    for (node, (_, address)) in pods {
        cluster.wait_until("the routes are restored", || {
            cluster
                .kubectl(&[
                    "exec",
                    far,
                    "--",
                    "sh",
                    "-c",
                    &http_get_script(address, 8080).replace("-w 5", "-w 1"),
                ])
                .1
                == format!("{node}\n")
        });
    }
}

/// A node gets another address: it reports the address, and its pods stay reachable.
fn node_address_change(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    let processes = std::fs::read_to_string(cluster.data().join("processes")).expect("processes");
    let second = processes.lines().nth(2).expect("the second node");
    let script = "old=$(ip -o -4 addr show dev eth0 | awk '{print $4}'); new=${old%.*}.77; \
                  gateway=$(ip route show default | awk '{print $3}'); ip addr del $old dev eth0; \
                  ip addr add $new/24 dev eth0; ip route replace default via $gateway; echo $new";
    let output = Command::new("nsenter")
        .arg(format!("--net=/proc/{second}/ns/net"))
        .args(["sh", "-ec", script])
        .output()
        .expect("nsenter");
    let new = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    cluster.wait_until("the node reports its new address", || {
        let format = "jsonpath={.status.addresses[?(@.type==\"InternalIP\")].address}";
        cluster.kubectl(&["get", "node", "node-2", "-o", format]).1 == new
    });
    let ((here, _), (pod, there)) = (&pods["node-1"], &pods["node-2"]);
    cluster.wait_until("its pods are reachable", || {
        cluster.kubectl(&["exec", here, "--", "sh", "-c", &http_get_script(there, 8080)]).1 == "node-2\n"
    });
    cluster.wait_until("logs of its pods are available", || cluster.kubectl(&["logs", pod]).1 == "hello\n");
    let back = cluster.sh(pod, &http_get_script(&pods["node-3"].1, 8080));
    assert_eq!(back, "node-3\n", "its pods can reach other nodes");
    cluster.wait_until("the node is Ready", || {
        let format = "jsonpath={.status.conditions[?(@.type==\"Ready\")].status}";
        cluster.kubectl(&["get", "node", "node-2", "-o", format]).1 == "True"
    });
}

/// A rolling update of a Deployment while pods on all nodes send requests: no request fails.
fn rolling_update_under_load(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    cluster.apply(&format!(
        r#"
apiVersion: v1
kind: Service
metadata: {{name: rolling}}
spec: {{selector: {{app: rolling}}, ports: [{{port: 80, targetPort: 8080}}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: rolling}}
spec:
  replicas: 3
  selector: {{matchLabels: {{app: rolling}}}}
  strategy: {{rollingUpdate: {{maxSurge: 1, maxUnavailable: 0}}}}
  template:
    metadata: {{labels: {{app: rolling}}}}
    spec:
      terminationGracePeriodSeconds: 10
      containers:
      - name: c
        image: "{IMAGE}"
        command: ["sh", "-c", "mkdir /www; echo $VERSION > /www/index.html; exec busybox httpd -f -p 8080 -h /www"]
        env: [{{name: VERSION, value: "1"}}]
        readinessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1}}
        lifecycle: {{preStop: {{sleep: {{seconds: 2}}}}}}
"#
    ));
    cluster.wait_until("the first version is available", || {
        let format = "jsonpath={.status.availableReplicas}";
        cluster.kubectl(&["get", "deployment", "rolling", "-o", format]).1 == "3"
    });
    let service = cluster.cluster_ip("rolling");
    let loop_script = format!(
        "(while ! [ -e /stop ]; do a=$({}); echo \"got $a\" >> /answers; done; echo done >> /answers) > /dev/null 2>&1 &",
        http_get_script(&service, 80)
    );
    let answers = |pod: &str| cluster.sh(pod, "cat /answers");
    for (pod, _) in pods.values() {
        cluster.sh(pod, &loop_script);
        cluster.wait_until("the pod sends requests", || answers(pod).contains("got 1\n"));
    }
    cluster.ok(&["set", "env", "deployment/rolling", "VERSION=2"]);
    cluster.ok(&["rollout", "status", "deployment/rolling", "--timeout=60s"]);
    for (pod, _) in pods.values() {
        cluster.sh(pod, "touch /stop");
        cluster.wait_until("the requests end", || answers(pod).ends_with("done\n"));
        let responses = answers(pod);
        let failed = responses.lines().filter(|line| !matches!(*line, "got 1" | "got 2" | "done")).count();
        let request_count = responses.lines().count() - 1;
        eprintln!("{failed} of {request_count} requests of {pod} failed");
        assert_eq!(failed, 0, "of {request_count} requests: {responses}");
        assert!(responses.contains("got 2\n"), "{responses}");
    }
}

/// Nodes without a common link: packets between pods are encapsulated, including large ones.
#[test]
fn pod_network_uses_overlay_across_router() {
    let Some(mut cluster) = Cluster::start(2, &["--routed"]) else { return };
    cluster.apply(PODS);
    cluster.wait_until("all pods are running", || {
        let format = "jsonpath={.status.numberReady} {.status.desiredNumberScheduled}";
        cluster.kubectl(&["get", "daemonset", "web", "-o", format]).1 == "2 2"
    });
    let pods = cluster.pods("app=web");
    check_pod_network(&cluster, &pods);
    let ((near, _), (far, address)) = (&pods["node-1"], &pods["node-2"]);
    cluster.sh(far, "busybox dd if=/dev/zero of=/www/large bs=1000 count=1000 2>/dev/null");
    let fetch =
        format!("printf 'GET /large HTTP/1.0\\r\\n\\r\\n' | busybox nc -w 5 {address} 8080 | busybox wc -c");
    let size: u32 = cluster.sh(near, &fetch).trim().parse().expect("a number");
    assert!(size > 1_000_000, "{size}");
    assert!(cluster.logs().contains("direct=false"), "{}", cluster.logs());
    assert!(cluster.process.terminate(DEADLINE).expect("an end").success());
}

/// Dual-stack pods on single-stack nodes: packets of the other family are encapsulated between nodes.
#[test]
fn dual_stack_pods_on_single_stack_nodes() {
    let flags = [
        "--server-arg=--cluster-cidr=10.42.0.0/16,fd42::/56",
        "--server-arg=--service-cidr=10.43.0.0/16,fd43::/112",
    ];
    let Some(mut cluster) = Cluster::start(2, &flags) else { return };
    let two = "spec:\n  ipFamilyPolicy: RequireDualStack\n  selector: {app: web}\n  ports: [{name: http";
    cluster.apply(&PODS.replacen("spec:\n  selector: {app: web}\n  ports: [{name: http", two, 1));
    cluster.wait_until("all pods are running", || {
        let format = "jsonpath={.status.numberReady} {.status.desiredNumberScheduled}";
        cluster.kubectl(&["get", "daemonset", "web", "-o", format]).1 == "2 2"
    });
    let pods = cluster.pods("app=web");
    check_pod_network(&cluster, &pods);
    let second = |kind: &str, name: &str, field: &str| {
        let address = cluster.ok(&["get", kind, name, "-o", &format!("jsonpath={{{field}}}")]);
        assert!(address.contains(':'), "{kind} {name}: {address}");
        address
    };
    let addresses: BTreeMap<&String, String> =
        pods.iter().map(|(node, (pod, _))| (node, second("pod", pod, ".status.podIPs[1].ip"))).collect();
    let service = second("service", "web", ".spec.clusterIPs[1]");
    for (pod, _) in pods.values() {
        for (node, address) in &addresses {
            cluster.wait_until("a pod is reachable over IPv6", || {
                cluster.kubectl(&["exec", pod, "--", "sh", "-c", &http_get_script(address, 8080)]).1.trim()
                    == *node
            });
        }
        cluster.wait_until("the Service is reachable over IPv6", || {
            let answer = cluster.kubectl(&["exec", pod, "--", "sh", "-c", &http_get_script(&service, 80)]).1;
            pods.contains_key(answer.trim())
        });
        let name = "web.default.svc.cluster.local";
        let said = cluster.sh(pod, &format!("busybox nslookup -type=aaaa {name}"));
        assert!(said.contains(&format!("Address: {service}")), "{said}");
    }
    let (far, _) = &pods["node-2"];
    cluster.sh(far, "busybox dd if=/dev/zero of=/www/large bs=1000 count=1000 2>/dev/null");
    let fetch = format!(
        "printf 'GET /large HTTP/1.0\\r\\n\\r\\n' | busybox nc -w 5 {} 8080 | busybox wc -c",
        addresses[&"node-2".to_owned()]
    );
    let size: u32 = cluster.sh(&pods["node-1"].0, &fetch).trim().parse().expect("a number");
    assert!(size > 1_000_000, "{size}");
    assert!(cluster.process.terminate(DEADLINE).expect("an end").success());
}

/// A server without a node reaches pods only through the tunnels of the nodes. DNS, LoadBalancer
/// Services and Ingresses work nevertheless.
#[test]
fn server_without_agent_supports_remote_nodes() {
    let Some(mut cluster) = Cluster::start(3, &["--server-arg=--disable-agent"]) else { return };
    cluster.apply(PODS);
    cluster.wait_until("all pods are running", || {
        let format = "jsonpath={.status.numberReady} {.status.desiredNumberScheduled}";
        cluster.kubectl(&["get", "daemonset", "web", "-o", format]).1 == "2 2"
    });
    let pods = cluster.pods("app=web");
    assert_eq!(pods.keys().collect::<Vec<_>>(), ["node-2", "node-3"]);
    check_dns(&cluster, &pods);
    let server = cluster.ok(&["config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"]);
    let server = server.trim_start_matches("https://").rsplit_once(':').expect("a port").0;
    external_access(&cluster, &pods, &[server]);
    node_access_by_tunnel(&cluster, &pods);
    assert!(cluster.process.terminate(DEADLINE).expect("an end").success());
}

/// The server cannot connect to nodes any more, and logs and exec still work through the tunnels.
fn node_access_by_tunnel(cluster: &Cluster, pods: &BTreeMap<String, (String, String)>) {
    let server = format!("--net=/proc/{}/ns/net", cluster.node_process(1).as_raw_nonzero());
    let drop_rules = "nft add table inet wall; nft add chain inet wall out '{ type filter hook output priority 0; }'; \
                nft add rule inet wall out tcp dport 10250 drop";
    let drop_status = Command::new("nsenter").args([server.as_str(), "sh", "-ec", drop_rules]).status();
    if !drop_status.is_ok_and(|status| status.success()) {
        eprintln!("skipped: needs nft to block connections from the server to nodes");
        return;
    }
    for (pod, _) in pods.values() {
        assert_eq!(cluster.ok(&["logs", pod]), "hello\n");
        assert_eq!(cluster.sh(pod, "echo said"), "said\n");
    }
}

/// A node is killed and marked NotReady, and its pods are replaced on other nodes after their
/// toleration time.
#[test]
fn pods_are_evicted_from_unreachable_node() {
    // Two heartbeats may be missed, as with upstream's longer grace period.
    let grace = "--server-arg=--node-monitor-grace-period=25s";
    let Some(cluster) = Cluster::start(3, &[grace]) else { return };
    cluster.apply(&format!(
        r#"
apiVersion: apps/v1
kind: Deployment
metadata: {{name: moving}}
spec:
  replicas: 6
  selector: {{matchLabels: {{app: moving}}}}
  template:
    metadata: {{labels: {{app: moving}}}}
    spec:
      terminationGracePeriodSeconds: 0
      tolerations:
      - {{key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 2}}
      - {{key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 2}}
      containers: [{{name: c, image: "{IMAGE}"}}]
"#
    ));
    let available =
        || cluster.kubectl(&["get", "deployment", "moving", "-o", "jsonpath={.status.availableReplicas}"]).1;
    cluster.wait_until("all replicas are available", || available() == "6");
    rustix::process::kill_process(cluster.node_process(3), rustix::process::Signal::KILL).expect("killed");
    let started = Instant::now();
    while !cluster.kubectl(&["get", "node", "node-3"]).1.contains("NotReady") {
        assert!(started.elapsed() < 2 * DEADLINE, "{}", cluster.logs());
        std::thread::yield_now();
    }
    eprintln!("not ready after {:.0?}", started.elapsed());
    cluster.wait_until("the pods are replaced on other nodes", || {
        let format = "jsonpath={range .items[?(@.status.phase==\"Running\")]}{.spec.nodeName} {.metadata.deletionTimestamp}{\"\\n\"}{end}";
        let pods = cluster.ok(&["get", "pods", "-l", "app=moving", "-o", format]);
        let running_on_others = pods.lines().filter(|line| line.trim() == "node-1" || line.trim() == "node-2").count();
        available() == "6" && running_on_others == 6
    });
    eprintln!("moved after {:.0?}", started.elapsed());
}
