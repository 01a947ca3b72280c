use expect_test::{Expect, expect};
use serde_json::{Value, json};

use crate::testing::test_cluster;

const NODES: &str = "
    node a cpu=4 memory=8Gi example.com/gpu=2
    node b cpu=2 memory=4Gi pods=1
    pod x on=a cpu=3 memory=2Gi
    pod y on=b cpu=500m memory=1Gi";

#[track_caller]
fn check(args: Value, pod: &str, filtered: Expect, scoring: Expect) {
    let plugin = super::make(&args).unwrap();
    let mut cluster = test_cluster(NODES);
    filtered.assert_eq(&cluster.filter(&plugin, pod));
    scoring.assert_eq(&cluster.score(&plugin, pod));
}

#[test]
fn filters_nodes_without_enough_free_resources() {
    check(
        Value::Null,
        "pod p cpu=1 memory=1Gi",
        // b has its maximum number of pods. Least allocated: a has (4-4)/4 and (8-3)/8 left, b (2-1.5)/2 and
        // (4-2)/4.
        expect![[r#"
            a: ok
            b: no, Too many pods
        "#]],
        expect![[r#"
            a: 31 -> 31
            b: 37 -> 37
        "#]],
    );
    check(
        Value::Null,
        "pod p cpu=1001m example.com/gpu=1",
        expect![[r#"
            a: no, Insufficient cpu
            b: never, Too many pods, Insufficient example.com/gpu
        "#]],
        // Without a request the pod counts as 200Mi: a (8Gi-2Gi-200Mi)/8Gi = 72, b (4-1-0.195)/4 = 70.
        expect![[r#"
            a: 36 -> 36
            b: 47 -> 47
        "#]],
    );
    check(
        Value::Null,
        "pod p cpu=5",
        expect![[r#"
            a: never, Insufficient cpu
            b: never, Too many pods, Insufficient cpu
        "#]],
        expect![[r#"
            a: 36 -> 36
            b: 35 -> 35
        "#]],
    );
}

#[test]
fn skips_ignored_resources_and_groups() {
    for args in
        [json!({"ignoredResources": ["example.com/gpu"]}), json!({"ignoredResourceGroups": ["example.com"]})]
    {
        let plugin = super::make(&args).unwrap();
        let mut cluster = test_cluster("node a");
        expect!["a: ok\n"].assert_eq(&cluster.filter(&plugin, "pod p example.com/gpu=7"));
    }
}

#[test]
fn scores_by_most_allocated_and_requested_to_capacity_ratio() {
    check(
        json!({"scoringStrategy": {"type": "MostAllocated"}}),
        "pod p cpu=1 memory=1Gi",
        expect![[r#"
            a: ok
            b: no, Too many pods
        "#]],
        // a 4/4 and 3/8, b 1.5/2 and 2/4.
        expect![[r#"
            a: 68 -> 68
            b: 62 -> 62
        "#]],
    );
    let ratio = json!({"scoringStrategy": {
        "type": "RequestedToCapacityRatio",
        "resources": [{"name": "cpu", "weight": 3}, {"name": "example.com/gpu", "weight": 1}],
        "requestedToCapacityRatio": {"shape": [{"utilization": 0, "score": 0}, {"utilization": 100, "score": 10}]}}});
    check(
        ratio,
        "pod p cpu=500m example.com/gpu=1",
        expect![[r#"
            a: ok
            b: never, Too many pods, Insufficient example.com/gpu
        "#]],
        // a cpu 3.5/4 = 87 three times and gpu 1/2 = 50 once; b cpu 1/2 = 50, and no gpus.
        expect![[r#"
            a: 78 -> 78
            b: 50 -> 50
        "#]],
    );
}

#[test]
fn rejects_invalid_arguments() {
    let shape = |points: Value| json!({"scoringStrategy": {"type": "RequestedToCapacityRatio", "requestedToCapacityRatio": {"shape": points}}});
    for (args, message) in [
        (shape(json!([])), "shape: at least one point must be specified"),
        (
            shape(json!([{"utilization": 101, "score": 1}])),
            "shape[0].utilization: not in valid range [0, 100]",
        ),
        (shape(json!([{"utilization": 1, "score": 11}])), "shape[0].score: not in valid range [0, 10]"),
        (
            json!({"scoringStrategy": {"type": "LeastAllocated", "resources": [{"name": "cpu", "weight": 101}]}}),
            "resource weight of cpu not in valid range [1, 100]: 101",
        ),
    ] {
        assert_eq!(super::make(&args).err().as_deref(), Some(message));
    }
}

/// CPU and memory of a pod: exact, with defaults for missing requests, and for scores.
#[track_caller]
fn check_requests(spec: &str, exact: [i64; 2], nonzero: [i64; 2], scoring: [i64; 2]) {
    let mut cluster = test_cluster("");
    let (pod, _) = cluster.info(&format!("pod p {{\"spec\":{spec}}}"));
    let requests = &pod.requests;
    assert_eq!([requests.exact.milli_cpu, requests.exact.memory], exact);
    assert_eq!(requests.nonzero, nonzero);
    assert_eq!(requests.scoring, scoring);
}

#[test]
fn pod_requests_include_containers_and_sidecars() {
    const MI: i64 = 1 << 20;
    let container = |cpu: &str, memory: &str| {
        format!(r#"{{"name":"c","resources":{{"requests":{{"cpu":"{cpu}","memory":"{memory}"}}}}}}"#)
    };
    let sidecar = |cpu: &str, memory: &str| {
        format!(
            r#"{{"name":"s","restartPolicy":"Always","resources":{{"requests":{{"cpu":"{cpu}","memory":"{memory}"}}}}}}"#
        )
    };
    let spec = |init: &[String], main: &[String], rest: &str| {
        format!(r#"{{"initContainers":[{}],"containers":[{}]{rest}}}"#, init.join(","), main.join(","))
    };
    let same = |sum: [i64; 2]| (sum, sum, sum);
    // Sum of the containers versus the highest init container.
    let (a, b, c) = same([3000, 3072 * MI]);
    let init = [container("2", "1Gi"), container("2", "3Gi")];
    check_requests(&spec(&init, &[container("2", "1Gi"), container("1", "1Gi")], ""), a, b, c);
    // A sidecar is added to the containers and to the init containers that start after it.
    let (a, b, c) = same([5000, 1024 * MI]);
    let init = [container("4", "0"), sidecar("1", "512Mi"), container("4", "0")];
    check_requests(&spec(&init, &[container("1", "512Mi")], ""), a, b, c);
    // Overhead is added.
    let (a, b, c) = same([1250, 576 * MI]);
    let overhead = r#","overhead":{"cpu":"250m","memory":"64Mi"}"#;
    check_requests(&spec(&[], &[container("1", "512Mi")], overhead), a, b, c);
    // Containers without requests get default requests for scoring.
    let bare = r#"{"name":"c"}"#.to_owned();
    check_requests(&spec(&[], &[bare.clone(), bare], ""), [0, 0], [200, 400 * MI], [200, 400 * MI]);
    // Pod-level requests replace the sum, but not for scoring.
    let whole = r#","resources":{"requests":{"cpu":"2"}}"#;
    check_requests(
        &spec(&[], &[container("1", "512Mi")], whole),
        [2000, 512 * MI],
        [2000, 512 * MI],
        [1000, 512 * MI],
    );
    // Fractions are rounded up once, after summing.
    let (a, b, c) = same([1, 1]);
    check_requests(&spec(&[], &[container("400u", "0.3"), container("400u", "0.3")], ""), a, b, c);
}

#[test]
fn resizing_pod_uses_maximum_of_desired_allocated_and_actual_requests() {
    let status = r#"{"spec":{"containers":[{"name":"c","resources":{"requests":{"cpu":"2"}}}]},
        "status":{"containerStatuses":[{"name":"c","image":"","imageID":"","ready":true,"restartCount":0,
            "resources":{"requests":{"cpu":"3"}},"allocatedResources":{"cpu":"1"}}]CONDITIONS}}"#;
    let cpu = |conditions: &str| {
        let mut cluster = test_cluster("");
        let (pod, _) = cluster.info(&format!("pod p {}", status.replace("CONDITIONS", conditions)));
        pod.requests.exact.milli_cpu
    };
    assert_eq!(cpu(""), 3000);
    let infeasible = r#","conditions":[{"type":"PodResizePending","status":"True","reason":"Infeasible"}]"#;
    assert_eq!(cpu(infeasible), 3000);
    // The same with pod-level requests, whatever the containers request.
    let whole = r#","resources":{"requests":{"cpu":"4"}},"allocatedResources":{"cpu":"5"}"#;
    let with_pod_level_requests = status.replace("}]},", r#"}],"resources":{"requests":{"cpu":"1"}}},"#);
    let (pod, _) =
        test_cluster("").info(&format!("pod p {}", with_pod_level_requests.replace("CONDITIONS", whole)));
    assert_eq!(pod.requests.exact.milli_cpu, 5000);
    // For a terminated init container only the desired requests count.
    let as_init_container =
        status.replace("containers", "initContainers").replace("containerS", "initContainerS");
    let as_init_container = as_init_container.replace(
        r#"]},
        "status""#,
        r#"],"containers":[]},"status""#,
    );
    let (pod, _) = test_cluster("").info(&format!("pod p {}", as_init_container.replace("CONDITIONS", "")));
    assert_eq!(pod.requests.exact.milli_cpu, 2000);
}
