use serde_json::{Value, json};

use super::*;

#[test]
fn pod_limits_are_container_limits_with_overhead() {
    let check = |spec: Value, expected: (i64, i64, i64)| {
        let pod: Pod = serde_json::from_value(json!({"metadata": {}, "spec": spec.clone()})).expect("a pod");
        let found = pod_limits(&pod, 0);
        assert_eq!((found.cpu_shares, found.cpu_quota, found.memory), expected, "{spec}");
    };
    let one = |requests: Value, limits: Value| json!({"name": "c", "resources": {"requests": requests, "limits": limits}});
    let whole = || one(json!({"cpu": "500m"}), json!({"cpu": "1", "memory": "64Mi"}));
    let open = || one(json!({"cpu": "250m"}), json!({"memory": "32Mi"}));
    check(json!({"containers": [{"name": "c"}]}), (2, 0, 0));
    check(json!({"containers": [whole()]}), (512, 100_000, 64 << 20));
    check(json!({"containers": [whole(), open()]}), (768, 0, 96 << 20));
    check(
        json!({"containers": [whole()], "overhead": {"cpu": "500m", "memory": "1Mi"}}),
        (1024, 150_000, 65 << 20),
    );
    let own = json!({"requests": {"cpu": "2"}, "limits": {"cpu": "3", "memory": "1Gi"}});
    check(json!({"containers": [{"name": "c"}], "resources": own}), (2048, 300_000, 1 << 30));
    let pod: Pod = serde_json::from_value(json!({"metadata": {}})).expect("a pod");
    assert_eq!(pod_limits(&pod, 100).pids, 100);
}

#[test]
fn cpu_weight_matches_upstream() {
    let weight = |milli: i64| cpu_weight_limits(milli).unified[0].1.parse::<i64>().expect("a number");
    assert_eq!([0, 1, 100, 1000, 2000, 1 << 40].map(weight), [1, 1, 4, 39, 79, 10_000]);
}

#[test]
fn pod_cgroup_is_per_qos_class() {
    let pod_path = |status: Value, resources: Value| {
        let spec = json!({"containers": [{"name": "c", "resources": resources}]});
        let pod = json!({"metadata": {"uid": "1"}, "spec": spec, "status": status});
        pod_cgroup_under("skiff/node-1", &serde_json::from_value(pod).expect("a pod"))
    };
    let cgroup_of = |class: &str| pod_path(json!({"qosClass": class}), json!({}));
    let classes = ["Guaranteed", "Burstable", "BestEffort"];
    assert_eq!(
        classes.map(cgroup_of),
        ["/skiff/node-1/pod1", "/skiff/node-1/burstable/pod1", "/skiff/node-1/besteffort/pod1"]
    );
    // Without a class in the status it is computed from the spec.
    assert_eq!(pod_path(json!({}), json!({"requests": {"cpu": "1"}})), "/skiff/node-1/burstable/pod1");
    assert_eq!(pod_path(json!({}), json!({})), "/skiff/node-1/besteffort/pod1");
}

#[test]
fn node_cgroup_is_unique_per_pods_directory() {
    let [one, other] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    assert_ne!(node_cgroup(one.path()), node_cgroup(other.path()));
    assert_eq!(node_cgroup(one.path()), node_cgroup(&other.path().join("..").join(one.path())));
    assert_eq!(node_cgroup(&one.path().join("none")), "skiff");
}

#[test]
fn pod_cgroup_removal_can_kill_remaining_processes() {
    let dir = tempfile::tempdir().expect("a directory");
    let group = |name: &str| dir.path().join(name);
    fs::create_dir_all(group("memory/skiff/node-1/burstable/pod1/a/b")).expect("made");
    fs::create_dir_all(group("memory/skiff/node-1/besteffort/pod1/a")).expect("made");
    fs::create_dir_all(group("skiff/node-1/pod1")).expect("made");
    fs::create_dir_all(group("skiff/node-1/pod2/a")).expect("made");
    let mut orphan = std::process::Command::new("sleep").arg("1000").spawn().expect("a process");
    // Stands in for processes that keep the kernel from removing the cgroup.
    fs::write(group("skiff/node-1/pod2/a/cgroup.procs"), format!("{}\n", orphan.id())).expect("written");
    remove_pod_cgroup_under(dir.path(), "skiff/node-1", "1").expect("empty");
    for removed in
        ["memory/skiff/node-1/burstable/pod1", "memory/skiff/node-1/besteffort/pod1", "skiff/node-1/pod1"]
    {
        assert!(!group(removed).exists() && group(removed).parent().is_some_and(Path::exists), "{removed}");
    }
    let error = remove_pod_cgroup_under(dir.path(), "skiff/node-1", "2").expect_err("in use");
    assert!(error.to_string().ends_with("skiff/node-1/pod2 is still in use"), "{error}");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&orphan.wait().expect("ended")), Some(9));
    fs::remove_file(group("skiff/node-1/pod2/a/cgroup.procs")).expect("removed");
    remove_pod_cgroup_under(dir.path(), "skiff/node-1", "2").expect("empty");
    remove_pod_cgroup_under(dir.path(), "skiff/node-1", "2").expect("gone already");
}
