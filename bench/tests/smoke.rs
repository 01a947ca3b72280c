//! Smoke test: the benchmark runs and prints every result. It does not check the values.

use std::process::Command;

use expect_test::expect;
use serde_json::Value;

#[test]
fn smoke_run_reports_all_metrics() {
    let output = Command::new(env!("CARGO_BIN_EXE_bench")).arg("--quick").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));

    let (lines, last) = text.trim_end().rsplit_once('\n').unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["about"]["quick"], true);
    let metrics = last["figures"].as_object().unwrap();
    for (name, metric) in metrics {
        let value = metric["value"].as_f64().unwrap();
        // A short load may take less than one tick of the kernel's CPU accounting.
        let may_be_zero = metric["unit"] == "us-cpu" || name == "rollout/resync-writes";
        assert!(value > 0.0 || may_be_zero, "{name} is {metric}");
        assert!(lines.lines().any(|line| line.split(' ').next() == Some(name)), "no line for {name}");
    }
    let names: Vec<&str> = lines.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names.len(), metrics.len(), "each figure has one line");
    expect![[r#"
        memory/rbac-1000-roles-5000-bindings
        rbac/decide/p50
        rbac/decide/p99
        yardstick/parse-json-pod
        decode/pod
        encode/pod
        clone/pod
        defaults/pod
        validate/pod
        protobuf/encode-pod
        protobuf/decode-pod
        patch/strategic-pod
        patch/apply-pod
        patch/track-pod
        selector/parse
        selector/match-labels
        table/cells-pod
        yardstick/sync-4KiB
        store/write-1-clients
        store/write-64-clients
        store/get
        store/list-entries
        start/exec-to-readyz
        memory/empty
        yardstick/get-readyz-16-clients
        yardstick/get-readyz-cpu
        create/pod-3KiB-1-clients/rate
        create/pod-3KiB-1-clients/p50
        create/pod-3KiB-1-clients/p99
        create/pod-3KiB-1-clients/cpu
        create/pod-3KiB-16-clients/rate
        create/pod-3KiB-16-clients/p50
        create/pod-3KiB-16-clients/p99
        create/pod-3KiB-16-clients/cpu
        create/pod-3KiB-64-clients/rate
        create/pod-3KiB-64-clients/p50
        create/pod-3KiB-64-clients/p99
        create/pod-3KiB-64-clients/cpu
        memory/with-pods
        get/pod-1-clients/rate
        get/pod-1-clients/p50
        get/pod-1-clients/p99
        get/pod-1-clients/cpu
        get/pod-16-clients/rate
        get/pod-16-clients/p50
        get/pod-16-clients/p99
        get/pod-16-clients/cpu
        list/pods/rate
        list/pods/p50
        list/pods/cpu
        list/pods-as-table/rate
        list/pods-as-table/p50
        list/pods-as-table/cpu
        list/pods-1-percent/rate
        list/pods-1-percent/p50
        list/pods-1-percent/cpu
        memory/peak-while-listing
        create/configmap-1KiB-1-clients/rate
        create/configmap-1KiB-1-clients/p50
        create/configmap-1KiB-1-clients/p99
        create/configmap-1KiB-1-clients/cpu
        create/configmap-1KiB-16-clients/rate
        create/configmap-1KiB-16-clients/p50
        create/configmap-1KiB-16-clients/p99
        create/configmap-1KiB-16-clients/cpu
        create/configmap-1KiB-64-clients/rate
        create/configmap-1KiB-64-clients/p50
        create/configmap-1KiB-64-clients/p99
        create/configmap-1KiB-64-clients/cpu
        fairness/write-alone/p50
        fairness/write-alone/p99
        fairness/write-beside-3-busy-threads/p50
        fairness/write-beside-3-busy-threads/p99
        fairness/write-in-flood/p50
        fairness/write-in-flood/p99
        fairness/flood/lists
        fairness/write-in-exempt-flood/p50
        fairness/write-in-exempt-flood/p99
        fairness/exempt-flood/lists
        watch/delivery/p50
        watch/delivery/p99
        watch/delivery/slowest-watcher-p50
        watch/burst/events
        watch/burst/p99
        watch/burst/cpu-per-event
        kinds/10/create-each
        kinds/10/definition-bytes
        kinds/10/memory
        kinds/10/memory-with-an-object-each
        kinds/10/discovery
        admission/nothing/p50
        admission/nothing/p99
        admission/nothing/cpu
        admission/one-webhook/p50
        admission/one-webhook/p99
        admission/one-webhook/cpu
        admission/20-policies/p50
        admission/20-policies/p99
        admission/20-policies/cpu
        schedule/basic-5-nodes/rate
        schedule/basic-5-nodes/cpu
        schedule/spread-10-nodes/rate
        schedule/spread-10-nodes/cpu
        schedule/anti-affinity-10-nodes/rate
        schedule/anti-affinity-10-nodes/cpu
        schedule/preemption-10-nodes/rate
        schedule/preemption-10-nodes/cpu
        rollout/pods-20-nodes-3/time
        rollout/pods-20-nodes-3/controllers-requests-per-pod
        rollout/pods-20-nodes-3/scheduler-requests-per-pod
        rollout/pods-20-nodes-3/nodes-requests-per-pod
        rollout/resync-writes
    "#]]
    .assert_eq(&(names.join("\n") + "\n"));
}

#[test]
fn smoke_run_of_pods_reports_all_metrics() {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    if !is_root || !has("containerd") || !std::path::Path::new("/bin/busybox").exists() {
        return eprintln!("skipped: needs root, containerd and busybox-static");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_bench")).args(["--only-pods", "--quick"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let names: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("pods/"))
        .filter_map(|line| line.split(' ').next())
        .collect();
    let (theirs, ours) = names.split_at(names.len() / 2);
    let plain = |names: &[&str], runtime: &str| {
        names.iter().map(|name| name.replace(runtime, "") + "\n").collect::<String>()
    };
    assert_eq!(plain(theirs, "pods/containerd/"), plain(ours, "pods/embedded/"));
    expect![[r#"
        at-rest
        sequential/p50
        sequential/p95
        cpu-per-cycle
        parallel/all
        parallel/p50
        memory-per-pod/resident
        memory-per-pod/proportional
        memory-per-pod/private
        exec
    "#]]
    .assert_eq(&plain(ours, "pods/embedded/"));
    assert!(text.contains("goal 0.25x and 120 ms"), "{text}");
}
