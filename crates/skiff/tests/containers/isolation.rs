//! Isolation of pods: QoS cgroups, node allocatable limits, and volumes in memory.

use super::{Cluster, start_with};

/// A pod is in the cgroup of its QoS class, whose CPU weight is the sum of its pods' requests.
pub fn qos_cgroups(cluster: &Cluster) {
    let server = &cluster.server;
    let cgroup_of_pod = |name: &str, file: &[&str]| {
        let uid = server.kubectl(&["get", "pod", name, "-o", "jsonpath={.metadata.uid}"]).ok();
        let cgroups = testkit::cgroups_of_pod(&uid);
        let level =
            cgroups[0].parent().expect("a parent cgroup").file_name().expect("it has a name").to_owned();
        assert!(cgroups.iter().all(|cgroup| cgroup.parent().is_some_and(|around| around.ends_with(&level))));
        let read = |cgroup: &std::path::Path| {
            file.iter().find_map(|file| std::fs::read_to_string(cgroup.join(file)).ok())
        };
        let weights = cgroups.iter().find_map(|cgroup| Some((read(cgroup)?, read(cgroup.parent()?)?)));
        let (own, whole) = weights.expect("a weight");
        let values = [level.to_string_lossy().into_owned(), own.trim().to_owned(), whole.trim().to_owned()];
        (uid, values)
    };
    let requests = serde_json::json!({"requests": {"cpu": "500m"}});
    for (name, resources) in [("promised", requests), ("unpromised", serde_json::json!({}))] {
        let pod = serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "main", "image": "busybox:1.36", "resources": resources}],
            }
        });
        server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
        server.wait_for_pod(name, "condition=Ready");
    }
    let files = ["cpu.shares", "cpu.weight"];
    let is_v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let (promised, [level, own, whole]) = cgroup_of_pod("promised", &files);
    let weight = if is_v2 { "20" } else { "512" };
    assert_eq!([level.as_str(), &own], ["burstable", weight]);
    // The QoS cgroup contains other pods of this node, but none of other nodes.
    assert!(whole.parse::<u64>().expect("a number") >= weight.parse().expect("a number"), "{whole}");
    let (unpromised, best_effort) = cgroup_of_pod("unpromised", &files);
    let least = if is_v2 { "1" } else { "2" };
    assert_eq!(best_effort, ["besteffort", least, least]);
    server.kubectl(&["delete", "pods", "promised", "unpromised", "--wait"]).ok();
    let is_removed = |uid: &String| testkit::cgroups_of_pod(uid).is_empty();
    server.wait_until("their cgroups are gone", || [&promised, &unpromised].into_iter().all(is_removed));
}

/// Secrets, tokens and downward API volumes are on tmpfs, and updates reach running pods.
pub fn secret_volumes_are_tmpfs(cluster: &Cluster) {
    let server = &cluster.server;
    server.kubectl(&["create", "configmap", "plain", "--from-literal=word=open"]).ok();
    server.kubectl(&["create", "secret", "generic", "hidden", "--from-literal=word=one"]).ok();
    let mount = |name: &str| serde_json::json!({"name": name, "mountPath": format!("/{name}")});
    let part = serde_json::json!({"name": "secret", "mountPath": "/part", "subPath": "word"});
    let label = serde_json::json!({"path": "name", "fieldRef": {"fieldPath": "metadata.name"}});
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "keeper"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"fsGroup": 4000},
            "volumes": [
                {"name": "secret", "secret": {"secretName": "hidden"}},
                {"name": "config", "configMap": {"name": "plain"}},
                {"name": "info", "downwardAPI": {"items": [label]}},
            ],
            "containers": [{
                "name": "main", "image": "busybox:1.36",
                "volumeMounts": [mount("secret"), mount("config"), mount("info"), part],
            }],
        }
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod("keeper", "condition=Ready");
    let script = "cat /secret/word /config/word /info/name /part; ls -l /secret/..data/; cat /proc/mounts";
    let output = server.kubectl(&["exec", "keeper", "--", "sh", "-c", script]).ok();
    assert!(output.starts_with("oneopenkeeperone"), "{output}");
    assert!(output.contains(" 4000 ") && output.contains("-rw-r--r--"), "{output}");
    let kind = |mount_path: &str| {
        let lines = output.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let mut found = lines.filter(|words| words.get(1) == Some(&mount_path));
        found.next().map(|words| (words[2] == "tmpfs", words[3].starts_with("ro,"))).expect("a mount")
    };
    let account = "/var/run/secrets/kubernetes.io/serviceaccount";
    let mount_paths = ["/secret", "/info", "/part", account, "/config"];
    let of_disk = cluster.server.data_dir().join("agent/pods");
    let of_disk = rustix::fs::statfs(&of_disk).expect("a file system").f_type;
    // If the temporary directory is on tmpfs itself, ConfigMap volumes are on tmpfs as well.
    let tmpfs = 0x0102_1994;
    assert_eq!(
        mount_paths[..4].iter().map(|mount_path| kind(mount_path)).collect::<Vec<_>>(),
        [(true, true); 4]
    );
    assert_eq!(kind("/config"), (of_disk == tmpfs, true));
    secret_update_is_visible(cluster, "two");
}

/// An update of the Secret is visible in the running container.
pub fn secret_update_is_visible(cluster: &Cluster, word: &str) {
    let server = &cluster.server;
    let change = serde_json::json!({"stringData": {"word": word}}).to_string();
    server.kubectl(&["patch", "secret", "hidden", "-p", &change]).ok();
    let read_secret = ["exec", "keeper", "--", "cat", "/secret/word"];
    server.wait_until("the container sees the new value", || server.kubectl(&read_secret).ok() == word);
}

/// All pods together are limited to the node's allocatable resources, even without limits of their own.
#[test]
fn node_allocatable_is_enforced() {
    let total = std::fs::read_to_string("/proc/meminfo").expect("memory");
    let total: u64 =
        total.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("how much memory");
    // The memory that remains for pods, in KiB.
    let allocatable_kib = 96 << 10;
    let reserved =
        format!("--kubelet-arg=system-reserved=cpu=100m,pid=1000,memory={}Ki", total - allocatable_kib);
    let Some(cluster) = start_with(&[&reserved, "--kubelet-arg=eviction-hard=memory.available<24Mi"]) else {
        return;
    };
    let server = &cluster.server;
    server.run_pod("small", "sleep 1000000", "Never");
    server.wait_for_pod("small", "condition=Ready");
    let events =
        ["get", "events", "-o", "jsonpath={.items[?(@.reason==\"NodeAllocatableEnforced\")].message}"];
    let is_recorded = || server.kubectl(&events).ok() == "Updated Node Allocatable limit across pods";
    server.wait_until("the event is recorded", is_recorded);
    let uid = server.kubectl(&["get", "pod", "small", "-o", "jsonpath={.metadata.uid}"]).ok();
    let cgroups = testkit::cgroups_of_pod(&uid);
    let read = |file: &str| {
        let of_node = cgroups.iter().filter_map(|cgroup| cgroup.parent()?.parent());
        let mut found = of_node.filter_map(|node| std::fs::read_to_string(node.join(file)).ok());
        found.next().map(|text| text.trim().to_owned())
    };
    let memory = read("memory.limit_in_bytes").or_else(|| read("memory.max"));
    assert_eq!(memory, Some((allocatable_kib * 1024).to_string()));
    assert!(read("pids.max").is_some_and(|most| most.parse::<u64>().is_ok()), "{:?}", read("pids.max"));
    if std::fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1) {
        return eprintln!("skipped: on a host with swap, memory limits are not reached quickly");
    }
    // A process without a limit of its own allocates more than all pods may use.
    server.run_pod("big", "exec dd if=/dev/zero of=/dev/null bs=150M count=1", "Never");
    server.wait_for_pod("big", "jsonpath={.status.phase}=Failed");
    let code = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}";
    assert_eq!(server.kubectl(&["get", "pod", "big", "-o", code]).ok(), "137");
    // Another pod uses nearly as much: it is evicted before others are affected.
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "greedy"},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "room", "emptyDir": {"medium": "Memory"}}],
            "containers": [{
                "name": "main", "image": "busybox:1.36",
                "command": ["sh", "-c", "dd if=/dev/zero of=/room/x bs=1M count=80; exec sleep 1000000"],
                "volumeMounts": [{"name": "room", "mountPath": "/room"}],
            }],
        }
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod("greedy", "jsonpath={.status.reason}=Evicted");
    let message = server.kubectl(&["get", "pod", "greedy", "-o", "jsonpath={.status.message}"]).ok();
    assert!(
        message.starts_with("The node was low on resource: memory. Threshold quantity: 24Mi"),
        "{message}"
    );
    let phase = server.kubectl(&["get", "pod", "small", "-o", "jsonpath={.status.phase}"]).ok();
    assert_eq!(phase, "Running");
    server.kubectl(&["delete", "pods", "--all", "--wait"]).ok();
}
