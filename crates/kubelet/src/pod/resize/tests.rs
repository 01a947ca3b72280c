use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::*;
use crate::pod::resize::status::resize_event_message;

/// `memory limit/memory request cpu limit/cpu request`.
fn container_resources(text: &str) -> ComputeResources {
    let numbers: Vec<i64> = text.split(['/', ' ']).map(|number| number.parse().expect("a number")).collect();
    let [memory_limit, memory_request, cpu_limit, cpu_request] = numbers[..] else { panic!("{text}") };
    ComputeResources { memory_limit, memory_request, cpu_limit, cpu_request }
}

fn update(name: &str, from: &str, to: &str) -> ContainerUpdate {
    ContainerUpdate {
        id: format!("{name}#0"),
        container: name.to_owned(),
        from: container_resources(from),
        to: container_resources(to),
    }
}

fn pod_resources([memory, cpu_quota, cpu_shares]: [i64; 3]) -> PodResources {
    PodResources { memory, cpu_quota, cpu_shares }
}

#[track_caller]
fn check(from: [i64; 3], to: [i64; 3], updates: Vec<ContainerUpdate>, expected: Expect) {
    let resize = Resize { from: pod_resources(from), to: pod_resources(to), updates };
    let line = |step: &ResizeStep| match step {
        ResizeStep::PodMemory(memory) => format!("memory {memory}\n"),
        ResizeStep::PodCpuQuota(quota) => format!("quota {quota}\n"),
        ResizeStep::PodCpuShares(shares) => format!("shares {shares}\n"),
        ResizeStep::Container { id, resources, .. } => {
            let ComputeResources { memory_limit, memory_request, cpu_limit, cpu_request } = resources;
            format!("{id} {memory_limit}/{memory_request} {cpu_limit}/{cpu_request}\n")
        }
    };
    let steps: String = resize.steps().iter().map(line).collect();
    expected.assert_eq(&steps);
}

#[test]
fn pod_limits_are_never_below_container_limits() {
    check(
        [10, 10, 10],
        [20, 20, 20],
        vec![update("a", "10/10 10/10", "20/20 20/20")],
        expect![[r#"
            memory 20
            a#0 20/20 10/10
            quota 20
            shares 20
            a#0 20/20 20/20
        "#]],
    );
    check(
        [20, 20, 20],
        [10, 10, 10],
        vec![update("a", "20/20 20/20", "10/10 10/10")],
        expect![[r#"
            a#0 10/10 20/20
            memory 10
            a#0 10/10 10/10
            shares 10
            quota 10
        "#]],
    );
    // Memory grows and CPU shrinks.
    check(
        [10, 20, 20],
        [20, 10, 10],
        vec![update("a", "10/10 20/20", "20/20 10/10")],
        expect![[r#"
            memory 20
            a#0 20/20 20/20
            a#0 20/20 10/10
            shares 10
            quota 10
        "#]],
    );
}

#[test]
fn runs_that_shrink_are_updated_before_runs_that_grow() {
    let updates = vec![
        update("a", "1/1 5/5", "2/2 4/4"),
        update("b", "5/5 1/1", "4/4 2/2"),
        update("c", "3/3 3/3", "3/2 3/4"),
    ];
    check(
        [9, 9, 9],
        [9, 9, 9],
        updates,
        expect![[r#"
            b#0 4/4 1/1
            c#0 3/2 3/3
            a#0 2/2 5/5
            a#0 2/2 4/4
            b#0 4/4 2/2
            c#0 3/2 3/4
        "#]],
    );
}

#[test]
fn pod_limits_are_added_but_never_removed() {
    check(
        [0, 0, 2],
        [10, 10, 20],
        vec![update("a", "0/0 0/0", "10/10 10/10")],
        expect![[r#"
            a#0 10/10 0/0
            memory 10
            shares 20
            a#0 10/10 10/10
            quota 10
        "#]],
    );
    check([10, 10, 20], [0, 0, 20], vec![], expect![[""]]);
}

#[test]
fn rejects_memory_limits_below_usage() {
    let check = |from: [i64; 3],
                 to: [i64; 3],
                 updates: Vec<ContainerUpdate>,
                 used: [u64; 2],
                 expected: Option<&str>| {
        let resize = Resize { from: pod_resources(from), to: pod_resources(to), updates };
        let error = resize.check_memory_usage(used[0], |id| (id == "a#0").then_some(used[1]));
        assert_eq!(error.as_deref(), expected);
        assert!(error.is_none() || resize.has_lower_memory_limit());
    };
    let lower = |name: &str| vec![update(name, "20/20 0/0", "10/10 0/0")];
    check([20, 0, 0], [10, 0, 0], lower("a"), [9, 9], None);
    let one = "cannot decrease memory limits: attempting to set container \"a\" memory limit (10) below current usage (10)";
    check([0, 0, 0], [0, 0, 0], lower("a"), [15, 10], Some(one));
    let both = "cannot decrease memory limits: [attempting to set pod memory limit (10) below current usage (15), \
                attempting to set container \"a\" memory limit (10) below current usage (10)]";
    check([20, 0, 0], [10, 0, 0], lower("a"), [15, 10], Some(both));
    let unknown = "cannot decrease memory limits: missing container \"b\" memory usage";
    check([0, 0, 0], [0, 0, 0], lower("b"), [0, 0], Some(unknown));
    // A first limit also counts as a decrease. A higher limit or a lower request does not.
    check([0, 0, 0], [0, 0, 0], vec![update("a", "0/0 0/0", "10/10 0/0")], [15, 10], Some(one));
    check([10, 0, 0], [20, 0, 0], vec![update("a", "10/10 0/0", "20/20 0/0")], [99, 99], None);
    check([10, 0, 0], [10, 0, 0], vec![update("a", "10/10 0/0", "10/5 0/0")], [99, 99], None);
}

#[test]
fn container_without_limits_gets_pod_limits() {
    let check = |of_pod: Value, own: Value, expected: &str| {
        let spec = json!({"containers": [{"name": "a", "resources": own}], "resources": of_pod});
        let pod: Pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
        let container = &pod.spec.as_ref().expect("a spec").containers[0];
        let found = ComputeResources::of(&pod, container);
        assert_eq!(found, container_resources(expected));
        // The amounts are applied, and other resources are kept.
        let mut other = container.clone();
        let limits = other.resources.get_or_insert_default().limits.get_or_insert_default();
        limits.insert("hugepages-2Mi".to_owned(), Text("4Mi".to_owned()));
        let other = container_resources("9/8 7/0").apply_to(&other);
        let limits = other.resources.clone().and_then(|resources| resources.limits).expect("limits");
        assert_eq!(limits["hugepages-2Mi"].0, "4Mi");
        assert_eq!(ComputeResources::of(&Pod::default(), &other), container_resources("9/8 7/0"));
    };
    check(Value::Null, json!({}), "0/0 0/0");
    check(Value::Null, json!({"limits": {"cpu": "1", "memory": "1Ki"}}), "1024/0 1000/0");
    let of_pod = json!({"limits": {"cpu": "2"}, "requests": {"cpu": "1"}});
    check(of_pod.clone(), json!({"requests": {"cpu": "100m"}}), "0/0 2000/100");
    check(of_pod, json!({"limits": {"cpu": "100m"}}), "0/0 100/0");
}

#[test]
fn event_message_lists_container_resources() {
    let main = json!({"name": "a", "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}});
    let pod = json!({"metadata": {}, "spec": {"containers": [main, {"name": "b"}], "initContainers": [{"name": "i"}]}});
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let summary = |error: &str| resize_event_message("Pod resize started", &pod, 3, error);
    let all = concat!(
        r#"Pod resize started: {"initContainers":[{"name":"i","resources":{}}],"containers":["#,
        r#"{"name":"a","resources":{"limits":{"memory":"1Gi"},"requests":{"cpu":"1"}}},"#,
        r#"{"name":"b","resources":{}}],"generation":3"#,
    );
    assert_eq!(summary(""), format!("{all}}}"));
    assert_eq!(summary("no \"room\""), format!(r#"{all},"error":"no \"room\""}}"#));
}
