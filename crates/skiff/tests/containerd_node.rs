//! A node with containerd, as users see it: logs, exec, copying files and port forwarding with the real
//! kubectl.
//!
//! Needs root, containerd and kubectl; skipped otherwise.

use std::io::Read as _;

use testkit::{Containerd, Server};

struct Cluster {
    server: Server,
    containerd: Containerd,
    dir: tempfile::TempDir,
}

fn start() -> Option<Cluster> {
    if !testkit::can_run_pods(&["containerd"]) {
        return None;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let containerd = Containerd::start(&dir.path().join("containerd")).expect("a containerd");
    let server = Server::start_with_node(&containerd, &["--controllers=*", "--node-name=here"]);
    let cluster = Cluster { server, containerd, dir };
    cluster.server.wait_for_default_service_account();
    Some(cluster)
}

impl Cluster {
    #[track_caller]
    fn logs(&self, arguments: &[&str]) -> String {
        self.server.kubectl(&[&["logs"], arguments].concat()).ok()
    }

    #[track_caller]
    fn expect_failure(&self, arguments: &[&str], expected: &str) {
        let output = self.server.kubectl(arguments);
        assert_eq!((output.code, output.stderr.trim_end()), (1, expected), "{}", self.server.log());
    }

    fn uids(&self) -> String {
        self.server.kubectl(&["get", "pods", "-o", "jsonpath={.items[*].metadata.uid} "]).ok()
    }

    #[track_caller]
    fn wait_for_cgroup_removal(&self, uids: &str) {
        let is_removed = |uid: &str| testkit::cgroups_of_pod(uid).is_empty();
        self.server.wait_until("their cgroups are gone", || uids.split_whitespace().all(is_removed));
    }

    /// The number of established connections in the node's network namespace.
    fn connections(&self) -> usize {
        let listed = self.server.command("cat").arg("/proc/net/tcp").output().expect("connections");
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        text.lines().filter(|line| line.split_whitespace().nth(3) == Some("01")).count()
    }
}

#[test]
fn logs_exec_cp_attach_and_port_forward() {
    let Some(cluster) = start() else { return };
    let script = "echo one; echo two; echo three; while ! test -e /go; do sleep 0.1; done; echo four";
    cluster.server.run_pod("talker", script, "Never");
    cluster.server.run_pod("web", "sleep 1000000", "Always");
    cluster.server.run_pod("ticker", "while true; do echo tick; sleep 0.1; done", "Always");
    let page = r#"mkdir /www; echo '<a href="/there">' > /www/index.html; busybox httpd -f -p 80 -h /www"#;
    cluster.server.run_pod("site", page, "Always");
    cluster.server.run_pod("crasher", "echo run; test -e /x || exit 3", "Always");
    cluster.server.wait_for_pod("talker", "condition=Ready");
    logs(&cluster);
    cluster.server.wait_for_pod("web", "condition=Ready");
    exec(&cluster);
    terminal(&cluster);
    copy(&cluster);
    port_forward(&cluster);
    attach(&cluster);
    proxies(&cluster);
    kubelet_api_requires_certificate(&cluster);
    previous_logs(&cluster);
    images(&cluster);
    cgroups_are_removed(&cluster);
}

/// `skiff image` detects the node's runtime.
fn images(cluster: &Cluster) {
    const NAME: &str = "docker.io/library/other:1";
    let data = cluster.server.data_dir().display().to_string();
    let image = |words: &[&str]| cluster.server.skiff(&[&["image", "--data-dir", &data], words].concat());
    let archive = testkit::busybox_image(cluster.dir.path(), NAME).expect("an image").display().to_string();
    let output = image(&["import", &archive]).ok();
    assert!(output.contains(NAME), "{output}");
    assert!(image(&["ls"]).ok().contains(NAME));
    let export_path = cluster.dir.path().join("exported.tar").display().to_string();
    image(&["export", &export_path, NAME]).ok();
    image(&["rm", NAME]).ok();
    assert!(!image(&["ls"]).ok().contains(NAME));
    assert!(image(&["rm", NAME]).stderr.contains(&format!("there is no image {NAME}")));
    image(&["import", &export_path]).ok();
    cluster.server.kubectl(&["run", "other", "--image=other:1", "--image-pull-policy=Never"]).ok();
    cluster.server.wait_for_pod("other", "condition=Ready");
    let missing_dir = cluster.server.skiff(&["image", "--data-dir", "/not/there", "import", &archive]);
    assert!(
        missing_dir.stderr.contains("no node runs on this host, and /not/there does not exist"),
        "{}",
        missing_dir.stderr
    );
    let dead = cluster.dir.path().join("agent");
    std::fs::create_dir_all(&dead).expect("a directory");
    std::fs::write(dead.join("runtime-endpoint"), "unix:///not/there.sock\n").expect("written");
    let dead = cluster.dir.path().display().to_string();
    let dead = cluster.server.skiff(&["image", "--data-dir", &dead, "ls"]).stderr;
    assert!(dead.contains("cannot connect to the node's container runtime at /not/there.sock"), "{dead}");
}

/// Pods, Services and nodes are reachable through the proxy of the API server.
fn proxies(cluster: &Cluster) {
    let server = &cluster.server;
    cluster.server.wait_for_pod("site", "condition=Ready");
    server.kubectl(&["label", "pod", "site", "app=site"]).ok();
    server.kubectl(&["expose", "pod", "site", "--port=8080", "--target-port=80"]).ok();
    let get = |path: &str| server.kubectl(&["get", "--raw", path]);
    let pods = "/api/v1/namespaces/default/pods";
    let through = format!("<a href=\"{pods}/site:80/proxy/there\">\n");
    cluster
        .server
        .wait_until("the site responds", || get(&format!("{pods}/site:80/proxy/")).stdout == through);
    let services = "/api/v1/namespaces/default/services";
    cluster.server.wait_until("its service has an endpoint", || {
        let expected = format!("<a href=\"{services}/site:8080/proxy/there\">\n");
        get(&format!("{services}/site:8080/proxy/")).stdout == expected
    });
    assert_eq!(get("/api/v1/nodes/here/proxy/healthz").ok(), "ok");
    let expect_error = |path: &str, expected: &str| {
        let output = get(path);
        assert_eq!(output.stderr.trim_end(), format!("Error from server {expected}"));
    };
    expect_error(
        &format!("{services}/site:81/proxy/"),
        "(ServiceUnavailable): no service port 81 found for service \"site\"",
    );
    expect_error(&format!("{services}/none/proxy/"), "(NotFound): endpoints \"none\" not found");
    expect_error(&format!("{pods}/a:b:c:d/proxy/"), "(BadRequest): invalid pod request \"a:b:c:d\"");
}

/// The cgroups of deleted pods are removed.
fn cgroups_are_removed(cluster: &Cluster) {
    let uids = cluster.uids();
    cluster.server.kubectl(&["delete", "pods", "--all"]).ok();
    cluster.wait_for_cgroup_removal(&uids);
}

fn logs(cluster: &Cluster) {
    cluster.server.wait_until("the first lines", || cluster.logs(&["talker"]) == "one\ntwo\nthree\n");
    assert_eq!(cluster.logs(&["talker", "--tail=1"]), "three\n");
    assert_eq!(cluster.logs(&["talker", "--limit-bytes=6"]), "one\ntw");
    assert_eq!(cluster.logs(&["talker", "--since=1h", "-c", "main"]), "one\ntwo\nthree\n");
    let with_timestamps = cluster.logs(&["talker", "--timestamps"]);
    let times: Vec<_> = with_timestamps.lines().filter_map(|line| line.split_once(' ')).collect();
    assert_eq!(
        times.iter().map(|(_, text)| *text).collect::<Vec<_>>(),
        ["one", "two", "three"],
        "{with_timestamps}"
    );
    assert!(times.iter().all(|(time, _)| time.parse::<jiff::Timestamp>().is_ok()), "{with_timestamps}");
    cluster.expect_failure(
        &["logs", "talker", "-c", "nope"],
        "error: container nope is not valid for pod talker",
    );
    cluster.expect_failure(
        &["logs", "talker", "--previous"],
        "Error from server (BadRequest): previous terminated container \"main\" in pod \"talker\" not found",
    );

    // A client that disconnects leaves no connection open.
    let before = cluster.connections();
    let mut closed_stream = cluster.server.background(&["logs", "-f", "talker"]);
    assert_eq!(closed_stream.lines().next().as_deref(), Some("one"));
    drop(closed_stream);
    cluster.server.wait_until("the connections are closed", || cluster.connections() <= before);

    // A client that follows the log gets every line, and the stream ends with the container.
    let mut log_stream = cluster.server.background(&["logs", "-f", "talker", "--tail=2"]);
    let mut lines = log_stream.lines();
    assert_eq!((lines.next().as_deref(), lines.next().as_deref()), (Some("two"), Some("three")));
    cluster.server.kubectl(&["exec", "talker", "--", "touch", "/go"]).ok();
    assert_eq!((lines.next().as_deref(), lines.next()), (Some("four"), None));
    assert!(log_stream.0.wait().expect("an end").success());
    assert_eq!(cluster.logs(&["talker", "--tail=1", "-f"]), "four\n");
}

fn exec(cluster: &Cluster) {
    let server = &cluster.server;
    let output = server.kubectl(&["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((output.stdout.as_str(), output.code), ("out\n", 7), "{}", output.stderr);
    assert!(output.stderr.starts_with("err\n"), "{}", output.stderr);
    let long = "a line of text\n".repeat(20_000);
    let response = server.kubectl_with(&["exec", "-i", "web", "--", "cat"], &long).ok();
    assert!(response == long, "{} bytes of {}", response.len(), long.len());
    cluster.expect_failure(
        &["exec", "web", "-c", "nope", "--", "true"],
        "Error from server (BadRequest): container nope is not valid for pod web",
    );

    let before = cluster.connections();
    let mut closed_stream =
        cluster.server.background(&["exec", "web", "--", "sh", "-c", "echo on; sleep 1000"]);
    assert_eq!(closed_stream.lines().next().as_deref(), Some("on"));
    drop(closed_stream);
    cluster.server.wait_until("the connections are closed", || cluster.connections() <= before);
    let echo = |i: usize| cluster.server.background(&["exec", "web", "--", "echo", &i.to_string()]);
    let many: Vec<_> = (0..10).map(echo).collect();
    for (i, mut one) in many.into_iter().enumerate() {
        let mut stdout = String::new();
        one.0.stdout.take().expect("a pipe").read_to_string(&mut stdout).expect("text");
        assert_eq!(stdout, format!("{i}\n"));
        assert!(one.0.wait().expect("an end").success());
    }
}

/// A terminal in a container has the size of the client's terminal and follows its changes.
fn terminal(cluster: &Cluster) {
    for websockets in ["true", "false"] {
        let mut command = cluster.server.kubectl_command();
        command.args(["exec", "-it", "web", "--", "sh"]).env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", websockets);
        let mut terminal = testkit::Terminal::start(&mut command, (33, 111)).expect("kubectl");
        let seen = terminal.type_until("stty size", "33 111");
        seen.and_then(|()| terminal.resize((44, 122)))
            .and_then(|()| terminal.type_until("stty size", "44 122"))
            .and_then(|()| terminal.type_line("exit 5"))
            .unwrap_or_else(|error| panic!("websockets: {websockets}: {error:#}"));
        assert_eq!(terminal.end().expect("an end").code(), Some(5), "{}", terminal.output());
    }
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
    cluster.server.wait_for_pod("site", "condition=Ready");
    let page = || cluster.server.kubectl(&["exec", "site", "--", "wget", "-qO-", "http://127.0.0.1/"]).code;
    cluster.server.wait_until("the site listens", || page() == 0);
    let mut forwarding = cluster.server.background(&["port-forward", "pod/site", ":80"]);
    let mut lines = forwarding.lines();
    let line = lines.next().expect("a port");
    let port = line.split_once("127.0.0.1:").and_then(|(_, rest)| rest.split_whitespace().next());
    let url = format!("http://127.0.0.1:{}/", port.expect("a port"));
    for _ in 0..3 {
        let mut client = cluster.server.command("/bin/busybox");
        let response = client.args(["wget", "-qO-", &url]).output().expect("an answer");
        assert_eq!(String::from_utf8_lossy(&response.stdout), "<a href=\"/there\">\n");
    }
}

fn attach(cluster: &Cluster) {
    cluster.server.wait_for_pod("ticker", "condition=Ready");
    let before = cluster.connections();
    let mut attached = cluster.server.background(&["attach", "ticker"]);
    assert_eq!(attached.lines().next().as_deref(), Some("tick"));
    drop(attached);
    cluster.server.wait_until("the connections are closed", || cluster.connections() <= before);
}

/// Only the API server and administrators may access the kubelet API, for any path.
fn kubelet_api_requires_certificate(cluster: &Cluster) {
    let path = "jsonpath={.status.daemonEndpoints.kubeletEndpoint.Port}";
    let port = cluster.server.kubectl(&["get", "node", "here", "-o", path]).ok();
    let tls = cluster.server.data_dir().join("tls");
    let fetch = |certificate: Option<&str>, path: &str| {
        let mut curl = cluster.server.command("curl");
        curl.args(["-s", "-w", " %{http_code}", "--path-as-is", "--cacert"]).arg(tls.join("kubelet-ca.crt"));
        if let Some(name) = certificate {
            curl.arg("--cert").arg(tls.join(format!("{name}.crt")));
            curl.arg("--key").arg(tls.join(format!("{name}.key")));
        }
        let output = curl.arg(format!("https://127.0.0.1:{port}{path}")).output().expect("curl");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(fetch(None, "/pods"), "Unauthorized 401");
    assert_eq!(fetch(None, "/containerLogs/default/talker/main"), "Unauthorized 401");
    // A certificate of another CA is rejected.
    assert_eq!(fetch(Some("kubelet"), "/pods"), "Unauthorized 401");
    assert_eq!(fetch(Some("admin"), "/healthz"), "ok 200");
    assert_eq!(fetch(Some("kubelet-client"), "/containerLogs/default/talker/main?tailLines=1"), "four\n 200");
    let out = "/containerLogs/default/talker/..%2f..%2f..%2fetc%2fpasswd";
    assert_eq!(fetch(Some("admin"), out), "404: Page Not Found 404");
}

fn previous_logs(cluster: &Cluster) {
    cluster.server.wait_until("the container has restarted", || {
        let path = "jsonpath={.status.containerStatuses[0].restartCount}";
        cluster.server.kubectl(&["get", "pod", "crasher", "-o", path]).stdout.parse().unwrap_or(0) >= 1
    });
    assert_eq!(cluster.logs(&["crasher", "--previous"]), "run\n");
}

/// The server and containerd are killed in the middle of rollouts and find their pods again; containers
/// do not restart.
#[test]
fn pods_keep_running_when_server_and_runtime_are_killed() {
    let Some(mut cluster) = start() else { return };
    cluster.server.run_pod("bystander", "sleep 1000000", "Always");
    cluster.server.wait_for_pod("bystander", "condition=Ready");
    let id = ["get", "pod", "bystander", "-o", "jsonpath={.status.containerStatuses[0].containerID}"];
    let before = cluster.server.kubectl(&id).ok();
    let deployment = |value: &str| {
        let env = serde_json::json!([{"name": "ROUND", "value": value}]);
        let main = serde_json::json!({
            "name": "main", "image": "busybox:1.36", "command": ["sleep", "1000000"], "env": env,
        });
        serde_json::json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "many"},
            "spec": {
                "replicas": 12, "selector": {"matchLabels": {"app": "many"}},
                "template": {
                    "metadata": {"labels": {"app": "many"}},
                    "spec": {"terminationGracePeriodSeconds": 1, "containers": [main]},
                },
            },
        })
        .to_string()
    };
    let rollout_status = ["rollout", "status", "deployment/many", "--timeout=180s"];
    let pods = ["get", "pods", "-l", "app=many", "--no-headers"];
    let start_rollout = |cluster: &Cluster, value: &str| {
        cluster.server.kubectl_with(&["apply", "-f", "-"], &deployment(value)).ok();
        let is_under_way = || cluster.server.kubectl(&pods).ok().contains("Terminating");
        cluster.server.wait_until("the rollout is under way", is_under_way);
    };
    let check = |cluster: &Cluster| {
        cluster.server.kubectl(&rollout_status).ok();
        assert_eq!(cluster.server.kubectl(&id).ok(), before);
        let counts = ["get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[*].restartCount}"];
        let counts = cluster.server.kubectl(&counts).ok();
        assert!(counts.split_whitespace().all(|count| count == "0"), "{counts}");
        cluster.uids()
    };
    let delete = |cluster: &Cluster| {
        cluster.server.kubectl(&["delete", "deployment", "many"]).ok();
        cluster.server.wait_until("its pods are gone", || cluster.server.kubectl(&pods).stdout.is_empty());
    };
    cluster.server.kubectl_with(&["apply", "-f", "-"], &deployment("first")).ok();
    let mut uids = check(&cluster);
    start_rollout(&cluster, "second");
    cluster.server.kill9();
    cluster.server.restart();
    uids += &check(&cluster);
    delete(&cluster);
    // Only the resources of the bystander remain, even those that containerd has lost track of.
    let wait_for_cleanup = |cluster: &Cluster, kinds: &[&str]| {
        let mut last = Vec::new();
        cluster.server.wait_until("nothing but the bystander is left", || {
            let resource_counts = cluster.containerd.resource_counts();
            let counts: Vec<_> = kinds.iter().map(|kind| (*kind, resource_counts[kind])).collect();
            if counts != last {
                eprintln!("left: {counts:?}");
                last.clone_from(&counts);
            }
            counts.iter().all(|(_, count)| *count == 1)
        });
    };
    wait_for_cleanup(&cluster, &["shims", "networks", "links", "addresses"]);
    cluster.server.kubectl_with(&["apply", "-f", "-"], &deployment("third")).ok();
    uids += &check(&cluster);
    start_rollout(&cluster, "fourth");
    cluster.containerd.kill9_and_restart().expect("a containerd");
    uids += &check(&cluster);
    delete(&cluster);
    // Addresses belong to the CNI plugin of containerd, which has to release them itself.
    wait_for_cleanup(&cluster, &["shims", "networks", "links"]);
    cluster.server.kubectl(&["delete", "pods", "--all"]).ok();
    cluster.wait_for_cgroup_removal(&uids);
}
