//! `kubectl attach`: output, input, a slow reader and `stdinOnce`.

use std::process::Stdio;

use testkit::BackgroundCommand;

use super::Cluster;

pub fn attach(cluster: &Cluster) {
    let mut attached = cluster.server.background(&["attach", "ticker"]);
    assert_eq!(attached.lines().next().as_deref(), Some("tick"));
    drop(attached);
    let mut attached = cluster.server.kubectl_command();
    attached.args(["attach", "-i", "reader"]);
    let mut attached = attached.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kubectl");
    let mut stdin = attached.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut stdin, b"these words\n").expect("written");
    let mut attached = BackgroundCommand(attached);
    assert_eq!(attached.lines().next().as_deref(), Some("read these words"));
    attach_with_slow_reader(cluster);
}

/// The output exceeds all buffers on the way, and the client starts to read only when the container
/// blocks.
fn attach_with_slow_reader(cluster: &Cluster) {
    const LINES: usize = 1_500_000;
    let server = &cluster.server;
    let script = format!("read line; seq 1 {LINES}; touch /done; sleep 1000000");
    let main = serde_json::json!({
        "name": "main", "image": "busybox:1.36", "stdin": true, "command": ["sh", "-c", script],
    });
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "speaker"},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [main]},
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod("speaker", "condition=Ready");
    let mut attached = server.kubectl_command();
    attached.args(["attach", "-i", "speaker"]);
    let mut attached = attached.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kubectl");
    let mut stdin = attached.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut stdin, b"go\n").expect("written");
    let mut attached = BackgroundCommand(attached);
    let mut lines = attached.lines();
    assert_eq!(lines.next().as_deref(), Some("1"));
    // Meanwhile other requests are served.
    server.kubectl(&["exec", "speaker", "--", "true"]).ok();
    for number in 2..=LINES {
        assert_eq!(lines.next(), Some(number.to_string()));
    }
    server.wait_until("the container continues", || {
        server.kubectl(&["exec", "speaker", "--", "test", "-e", "/done"]).code == 0
    });
    drop((attached, stdin));
    server.kubectl(&["delete", "pod", "speaker", "--wait"]).ok();
}

/// With `stdinOnce`, stdin is closed after the first attach session; without it, the next session may
/// continue.
pub fn attach_once(cluster: &Cluster) {
    let server = &cluster.server;
    let pod = |name: &str, once: bool| {
        let main = serde_json::json!({
            "name": "main", "image": "busybox:1.36", "stdin": true, "stdinOnce": once,
            "command": ["sh", "-c", "while read line; do echo read $line; done; echo the end"],
        });
        let pod = serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [main]},
        });
        server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
        server.wait_for_pod(name, "condition=Ready");
    };
    let logs = |name: &str| server.kubectl(&["logs", name]).ok();
    pod("once", true);
    let output = server.kubectl_with(&["attach", "-i", "once"], "one\ntwo\n").ok();
    assert_eq!(output, "read one\nread two\nthe end\n");
    server.wait_for_pod("once", "jsonpath={.status.phase}=Succeeded");
    // A client that disconnects in the middle closes stdin as well.
    pod("cut", true);
    let mut attached = server.kubectl_command();
    attached.args(["attach", "-i", "cut"]);
    let mut attached = attached.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kubectl");
    let mut stdin = attached.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut stdin, b"one\n").expect("written");
    let mut attached = BackgroundCommand(attached);
    assert_eq!(attached.lines().next().as_deref(), Some("read one"));
    drop((attached, stdin));
    server.wait_for_pod("cut", "jsonpath={.status.phase}=Succeeded");
    assert_eq!(logs("cut"), "read one\nthe end\n");
    // Without `stdinOnce` the container keeps running after a session.
    pod("often", false);
    for word in ["one", "two"] {
        server.kubectl_with(&["attach", "-i", "often"], &format!("{word}\n")).ok();
        server.wait_until("the line was read", || logs("often").ends_with(&format!("read {word}\n")));
    }
    assert_eq!(logs("often"), "read one\nread two\n");
    server.kubectl(&["delete", "pod", "once", "cut", "often", "--wait"]).ok();
}
