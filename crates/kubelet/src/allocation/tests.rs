use serde_json::{Value, json};

use super::*;

fn resources(cpu: &str) -> Value {
    json!({"requests": {"cpu": cpu}})
}

fn pod(name: &str, cpu: &str) -> Pod {
    let spec = json!({"containers": [{"name": "main", "resources": resources(cpu)}]});
    let metadata = json!({"name": name, "uid": name, "generation": 2});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")
}

/// `a 1 2 | b 1 1 at 5 priority 7 | c 1 3 guaranteed | d 1 0 reported 1 | e 1 2 deleting`: the
/// allocated and requested CPUs of each pod. `reported` sets what its status reports.
fn present(text: &str) -> Vec<AdmittedPod> {
    let one = |text: &str| {
        let words: Vec<&str> = text.split_whitespace().collect();
        let after = |word: &str| {
            let at = words.iter().position(|known| *known == word)?;
            words.get(at + 1).map(|text| text.parse::<i64>().expect("a number"))
        };
        let mut pod = pod(words[0], words[2]);
        pod.spec.as_mut().expect("a spec").priority = after("priority").map(|priority| priority as i32);
        let class = if words.contains(&"guaranteed") { "Guaranteed" } else { "Burstable" };
        let mut status = json!({"qosClass": class});
        if let Some(reported) = after("reported") {
            status["containerStatuses"] = json!([{
                "name": "main", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "resources": resources(&reported.to_string()),
            }]);
        }
        pod.status = serde_json::from_value(status).expect("a status");
        if words.contains(&"deleting") {
            let now = jiff::Timestamp::UNIX_EPOCH;
            pod.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now));
        }
        let allocated = Some(Allocation::from_pod(&self::pod(words[0], words[1])));
        let since = after("at").map(|second| jiff::Timestamp::from_second(second).expect("a time"));
        AdmittedPod { pod: Arc::new(pod), allocated, since }
    };
    text.split('|').map(one).collect()
}

#[track_caller]
fn check(text: &str, expected: &[&str]) {
    let node = json!({
        "metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "10", "memory": "1Gi", "pods": "9"}},
    });
    let node = serde_json::from_value(node).expect("a node");
    let present = present(text);
    let admit = |pod: &Pod, others: &[Arc<Pod>]| {
        admission::admit(pod, &node, others, &crate::runtime_features::RuntimeCapabilities::default())
    };
    let results = evaluate_resizes(&present, admit).into_iter().map(|(pod, rejection)| match rejection {
        None => format!("{} yes", pod.name()),
        Some(rejection) => format!("{} {}: {}", pod.name(), rejection.reason, rejection.message),
    });
    assert_eq!(results.collect::<Vec<_>>(), expected);
}

#[test]
fn resize_requires_available_resources() {
    check("a 1 2 | b 1 1", &["a yes"]);
    check("a 1 9 | b 1 1", &["a yes"]);
    let no =
        "a OutOfcpu: Node didn't have enough resource: cpu, requested: 9500, used: 1000, capacity: 10000";
    check("a 1 9500m | b 1 1", &[no]);
    // No resize without a different request.
    check("a 1 1 | b 1 1000m", &[]);
    // A pending resize of one pod does not count against another pod.
    let no =
        "b OutOfcpu: Node didn't have enough resource: cpu, requested: 12000, used: 7000, capacity: 10000";
    check("a 1 7 at 1 | b 1 12 at 2", &["a yes", no]);
    // A terminating pod keeps its share until it is gone, and is not resized any more.
    let no =
        "a OutOfcpu: Node didn't have enough resource: cpu, requested: 8000, used: 3000, capacity: 10000";
    check("a 1 8 | b 3 5 deleting", &[no]);
}

#[test]
fn lower_request_is_first_and_counts_until_status_reports_it() {
    check("a 5 6 | b 5 4", &["b yes", "a yes"]);
    let no =
        "a OutOfcpu: Node didn't have enough resource: cpu, requested: 6000, used: 5000, capacity: 10000";
    check("a 5 6 | b 5 4 reported 5", &["b yes", no]);
}

#[test]
fn resize_order_is_priority_then_qos_then_wait_time() {
    let all = "a 1 2 at 4 | b 1 2 at 3 | c 1 2 at 9 guaranteed | d 1 2 at 9 priority 5 | e 1 2";
    check(all, &["d yes", "c yes", "b yes", "a yes", "e yes"]);
    let all = "a 2 5 at 1 | b 2 5 at 2 priority 9";
    let no =
        "a OutOfcpu: Node didn't have enough resource: cpu, requested: 6000, used: 5000, capacity: 10000";
    check(&all.replace("a 2 5", "a 2 6"), &["b yes", no]);
}

#[test]
fn applies_allocated_resources_to_pod_spec() {
    let requested = json!({"metadata": {}, "spec": {
        "resources": {"limits": {"cpu": "9"}},
        "containers": [{"name": "a", "resources": resources("2")}, {"name": "b"}],
        "initContainers": [{"name": "i", "resources": resources("3")}],
    }});
    let mut accepted = requested.clone();
    let pod = |value: &Value| -> Pod { serde_json::from_value(value.clone()).expect("a pod") };
    let check = |accepted: &Value, differs: bool| {
        let allocation = Allocation::from_pod(&pod(accepted));
        assert_eq!(allocation.differs(&pod(&requested)), differs, "{accepted}");
        let requested = pod(&requested);
        let put = allocation.apply_to(&requested);
        assert!(!allocation.differs(&put));
        assert_eq!(put.spec.as_ref().expect("a spec").containers[1].resources, Some(Default::default()));
    };
    check(&accepted, false);
    accepted["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("2000m");
    check(&accepted, false);
    for pointer in ["/spec/resources/limits/cpu", "/spec/initContainers/0/resources/requests/cpu"] {
        let mut other = accepted.clone();
        *other.pointer_mut(pointer).expect("is there") = json!("1");
        check(&other, true);
    }
}

#[test]
fn allocation_record_round_trip() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("uid");
    assert_eq!(AllocationRecord::read(&path), None);
    let mut record = AllocationRecord::new(&pod("a", "1"));
    record.given.insert("id".to_owned(), ComputeResources { cpu_limit: 5, ..ComputeResources::default() });
    record.write(&path).expect("kept");
    assert_eq!(AllocationRecord::read(&path), Some(record));
    std::fs::write(path.join(ALLOCATION_FILE), "{").expect("written");
    assert_eq!(AllocationRecord::read(&path), None);
}

#[test]
fn detects_released_resources() {
    let pod = |phase: &str, given: &str| -> Arc<Pod> {
        let container_status = json!({"name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0, "resources": resources(given)});
        let status = json!({"phase": phase, "containerStatuses": [container_status]});
        Arc::new(serde_json::from_value(json!({"metadata": {}, "status": status})).expect("a pod"))
    };
    let running = pod("Running", "2");
    assert!(has_released_resources(&running, None));
    assert!(has_released_resources(&running, Some(&pod("Failed", "2"))));
    assert!(has_released_resources(&running, Some(&pod("Running", "1"))));
    assert!(!has_released_resources(&running, Some(&pod("Running", "2"))));
    assert!(!has_released_resources(&pod("Failed", "2"), None));
}
