//! Tests the cells of objects.

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;
use crate::RESOURCES;

const NOW: &str = "2026-11-15T12:00:00Z";

/// Checks the cells as printed by `kubectl get -o wide`, without the age. Objects are created two days ago.
#[track_caller]
fn check(group: &str, plural: &str, mut obj: Value, expected: Expect) {
    let metadata = obj.object_mut("metadata");
    metadata.entry("name").or_insert("x".into());
    metadata.entry("creationTimestamp").or_insert("2026-11-13T11:00:00Z".into());
    let cells = cells(group, plural, &obj, NOW.parse().unwrap());
    let rendered = |(column, cell): (&Column, &Value)| match cell {
        Value::String(text) if column.name == "Age" && text == "2d1h" => "AGE".to_owned(),
        Value::String(text) => text.clone(),
        other => format!("#{other}"),
    };
    let line: Vec<String> = columns(group, plural).iter().zip(&cells).map(rendered).collect();
    expected.assert_eq(&line.join(" | "));
}

fn check_core(plural: &str, obj: Value, expected: Expect) {
    check("", plural, obj, expected);
}

#[test]
fn every_table_has_a_resource_and_described_columns() {
    for (group, plural, columns) in table::TABLES {
        let known = RESOURCES.iter().any(|row| row.group == *group && row.plural == *plural);
        assert!(known || *plural == "scales", "{group}/{plural}");
        assert_eq!(table::TABLES.iter().filter(|t| t.0 == *group && t.1 == *plural).count(), 1);
        for column in *columns {
            assert!(!column.name.is_empty());
            // Upstream has no description for the handler of a RuntimeClass.
            assert_eq!(column.description.is_empty(), column.name == "Handler");
        }
    }
    let plain: Vec<&str> = RESOURCES
        .iter()
        .filter(|row| std::ptr::eq(columns(row.group, row.plural), table::DEFAULT_COLUMNS))
        .map(|row| row.plural)
        .collect();
    expect![[r#"
        [
            "bindings",
            "limitranges",
            "customresourcedefinitions",
            "selfsubjectreviews",
            "tokenreviews",
            "localsubjectaccessreviews",
            "selfsubjectaccessreviews",
            "selfsubjectrulesreviews",
            "subjectaccessreviews",
            "clusterroles",
            "roles",
            "csistoragecapacities",
        ]
    "#]]
    .assert_debug_eq(&plain);
}

/// Any JSON with field names that cells use, so that it reaches nested fields.
fn any_json() -> impl Strategy<Value = Value> {
    let names = "metadata|spec|status|conditions|containers|initContainers|initContainerStatuses|containerStatuses\
        |state|terminated|lastState|finishedAt|restartCount|name|type|rules|host|ports|port|metrics|currentMetrics\
        |resource|target|subsets|addresses|ip|endpoints|selector|matchLabels|ownerReferences|hard|series|subjects";
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "Resource|Ready|True|LoadBalancer|2026-11-15T11:59:00Z|.{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(7, 60, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::hash_map(names, inner, 0..5).prop_map(|map| map.into_iter().collect()),
        ]
    })
}

proptest! {
    #[test]
    fn cells_of_arbitrary_objects_never_panic(obj in any_json(), seconds in any::<i64>()) {
        let now = Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX);
        for (group, plural, columns) in table::TABLES {
            let cells = cells(group, plural, &obj, now);
            prop_assert_eq!(cells.len(), columns.len());
            let mut row = b"{".to_vec();
            TableRow::from_object(group, plural, &obj).write(now, &mut row);
            row.push(b'}');
            let row: Value = serde_json::from_slice(&row).unwrap();
            prop_assert_eq!(&row["cells"], &Value::Array(cells));
            let conditions = conditions(group, plural, &obj);
            prop_assert_eq!(row.items("conditions"), conditions);
        }
    }
}

#[test]
fn default_columns_are_name_and_creation_time() {
    check("rbac.authorization.k8s.io", "roles", json!({}), expect!["x | 2026-11-13T11:00:00Z"]);
    check(
        "example.com",
        "unknown",
        json!({"metadata": {"creationTimestamp": null}}),
        expect!["x | 0001-01-01T00:00:00Z"],
    );
    let created = &columns("", "limitranges")[1];
    assert_eq!((created.name, created.kind, created.format), ("Created At", "date", ""));
}

fn container(name: &str, state: Value) -> Value {
    let running = state.get("running").is_some();
    json!({"name": name, "ready": running, "started": running, "restartCount": 0, "state": state})
}

#[track_caller]
fn check_pod(spec: Value, status: Value, expected: Expect) {
    check("", "pods", json!({"spec": spec, "status": status}), expected);
}

#[test]
fn renders_pods() {
    let one = json!({"containers": [{"name": "a"}], "nodeName": "n1"});
    let two = json!({"containers": [{"name": "a"}, {"name": "b"}]});
    check_pod(
        one.clone(),
        json!({"phase": "Pending"}),
        expect!["x | 0/1 | Pending | 0 | AGE | <none> | n1 | <none> | <none>"],
    );
    check_pod(
        one.clone(),
        json!({"phase": "Running", "podIPs": [{"ip": "10.0.0.7"}, {"ip": "fd00::7"}],
            "containerStatuses": [container("a", json!({"running": {}}))]}),
        expect!["x | 1/1 | Running | 0 | AGE | 10.0.0.7 | n1 | <none> | <none>"],
    );
    check_pod(
        one.clone(),
        json!({"phase": "Running", "containerStatuses": [{"restartCount": 4,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"finishedAt": "2026-11-15T11:57:00Z"}}}]}),
        expect!["x | 0/1 | CrashLoopBackOff | 4 (3m ago) | AGE | <none> | n1 | <none> | <none>"],
    );
    let ended = |end: Value| json!({"phase": "Failed", "containerStatuses": [container("a", json!({"terminated": end}))]});
    check_pod(
        one.clone(),
        ended(json!({"exitCode": 1, "reason": "Error"})),
        expect!["x | 0/1 | Error | 0 | AGE | <none> | n1 | <none> | <none>"],
    );
    check_pod(
        one.clone(),
        ended(json!({"exitCode": 3})),
        expect!["x | 0/1 | ExitCode:3 | 0 | AGE | <none> | n1 | <none> | <none>"],
    );
    check_pod(
        one.clone(),
        ended(json!({"exitCode": 137, "signal": 9})),
        expect!["x | 0/1 | Signal:9 | 0 | AGE | <none> | n1 | <none> | <none>"],
    );
    check_pod(
        one.clone(),
        json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}),
        expect!["x | 0/1 | SchedulingGated | 0 | AGE | <none> | n1 | <none> | <none>"],
    );
    check_pod(
        one,
        json!({"phase": "Failed", "reason": "Evicted"}),
        expect!["x | 0/1 | Evicted | 0 | AGE | <none> | n1 | <none> | <none>"],
    );

    let done = json!({"terminated": {"exitCode": 0, "reason": "Completed"}});
    let half = json!([container("a", done.clone()), container("b", json!({"running": {}}))]);
    check_pod(
        two.clone(),
        json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": half.clone()}),
        expect!["x | 1/2 | Running | 0 | AGE | <none> | <none> | <none> | <none>"],
    );
    check_pod(
        two.clone(),
        json!({"phase": "Running", "containerStatuses": half}),
        expect!["x | 1/2 | NotReady | 0 | AGE | <none> | <none> | <none> | <none>"],
    );
    let failed = json!({"terminated": {"exitCode": 2, "reason": "Error"}});
    check_pod(
        two,
        json!({"phase": "Running", "containerStatuses": [container("a", done), container("b", failed)]}),
        expect!["x | 0/2 | Error | 0 | AGE | <none> | <none> | <none> | <none>"],
    );
    check_pod(
        json!({"readinessGates": [{"conditionType": "a"}, {"conditionType": "b"}]}),
        json!({"phase": "Running", "nominatedNodeName": "n2", "conditions": [{"type": "b", "status": "True"}]}),
        expect!["x | 0/0 | Running | 0 | AGE | <none> | <none> | n2 | 1/2"],
    );
}

#[test]
fn renders_terminating_pods() {
    let terminating_pod = |status: Value| json!({"metadata": {"deletionTimestamp": NOW}, "spec": {"containers": [{}]}, "status": status});
    check_core(
        "pods",
        terminating_pod(json!({"phase": "Running"})),
        expect!["x | 0/1 | Terminating | 0 | AGE | <none> | <none> | <none> | <none>"],
    );
    check_core(
        "pods",
        terminating_pod(json!({"phase": "Succeeded"})),
        expect!["x | 0/1 | Succeeded | 0 | AGE | <none> | <none> | <none> | <none>"],
    );
    check_core(
        "pods",
        terminating_pod(json!({"phase": "Running", "reason": "NodeLost"})),
        expect!["x | 0/1 | Unknown | 0 | AGE | <none> | <none> | <none> | <none>"],
    );
}

#[test]
fn renders_pods_with_init_containers() {
    let spec = json!({"containers": [{"name": "a"}], "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}]});
    let state = |first: Value, second: Value| {
        json!({"phase": "Pending", "initContainerStatuses": [first, second],
        "containerStatuses": [container("a", json!({"waiting": {"reason": "PodInitializing"}}))]})
    };
    let waiting = || container("s", json!({"waiting": {"reason": "PodInitializing"}}));
    let done = || container("i", json!({"terminated": {"exitCode": 0, "reason": "Completed"}}));
    let mut seen = Vec::new();
    for status in [
        state(container("i", json!({"running": {}})), waiting()),
        state(container("i", json!({"waiting": {"reason": "ImagePullBackOff"}})), waiting()),
        state(container("i", json!({"terminated": {"exitCode": 4}})), waiting()),
        state(container("i", json!({"terminated": {"exitCode": 4, "reason": "Error"}})), waiting()),
        state(done(), waiting()),
        state(done(), container("s", json!({"running": {}}))),
    ] {
        let pod = json!({"metadata": {"name": "x", "creationTimestamp": "2026-11-13T11:00:00Z"}, "spec": spec, "status": status});
        let cells = cells("", "pods", &pod, NOW.parse().unwrap());
        let line: Vec<&str> = cells.iter().take(4).filter_map(Value::as_str).collect();
        seen.push(line.join(" | "));
    }
    expect![[r#"
        x | 0/2 | Init:0/2 | 0
        x | 0/2 | Init:ImagePullBackOff | 0
        x | 0/2 | Init:ExitCode:4 | 0
        x | 0/2 | Init:Error | 0
        x | 0/2 | Init:1/2 | 0
        x | 1/2 | PodInitializing | 0"#]]
    .assert_eq(&seen.join("\n"));

    // During initialization all init containers' restarts count, afterwards only those of sidecars.
    let container_with_restarts = |name: &str, count: i64, state: Value| {
        json!({"name": name, "restartCount": count, "started": true,
        "ready": true, "state": state, "lastState": {"terminated": {"finishedAt": "2026-11-15T11:00:00Z"}}})
    };
    check_pod(
        spec,
        json!({"phase": "Running", "initContainerStatuses": [
                container_with_restarts("i", 5, json!({"terminated": {"exitCode": 0}})), container_with_restarts("s", 2, json!({"running": {}}))],
            "containerStatuses": [container("a", json!({"running": {}}))]}),
        expect!["x | 2/2 | Running | 2 (60m ago) | AGE | <none> | <none> | <none> | <none>"],
    );
}

#[test]
fn completed_pod_row_has_condition() {
    let of = |phase: &str| conditions("", "pods", &json!({"status": {"phase": phase}}));
    assert!(of("Running").is_empty());
    assert!(conditions("batch", "jobs", &json!({"status": {"phase": "Failed"}})).is_empty());
    assert_eq!(
        of("Succeeded"),
        [
            json!({"type": "Completed", "status": "True", "reason": "Succeeded", "message": "The pod has completed successfully."})
        ]
    );
    assert_eq!(of("Failed")[0]["message"], "The pod failed.");
}

#[test]
fn renders_workloads() {
    let template = json!({"spec": {"containers": [{"name": "a", "image": "i:1"}, {"name": "b", "image": "j"}], "nodeSelector": {"disk": "ssd"}}});
    let selector = json!({"matchLabels": {"app": "kubia"}, "matchExpressions": [
        {"key": "tier", "operator": "In", "values": ["web", "api"]}, {"key": "canary", "operator": "DoesNotExist"}]});
    let spec = json!({"replicas": 3, "template": template, "selector": selector});
    let status = json!({"replicas": 3, "readyReplicas": 2, "updatedReplicas": 1, "availableReplicas": 2});
    let obj = json!({"spec": spec, "status": status});
    check(
        "apps",
        "deployments",
        obj.clone(),
        expect!["x | 2/3 | #1 | #2 | AGE | a,b | i:1,j | app=kubia,!canary,tier in (api,web)"],
    );
    check(
        "apps",
        "replicasets",
        obj.clone(),
        expect!["x | #3 | #3 | #2 | AGE | a,b | i:1,j | app=kubia,!canary,tier in (api,web)"],
    );
    check("apps", "statefulsets", obj, expect!["x | 2/3 | AGE | a,b | i:1,j"]);
    check_core(
        "replicationcontrollers",
        json!({"spec": {"replicas": 3, "selector": {"b": "2", "a": "1"}, "template": template}, "status": {"replicas": 3}}),
        expect!["x | #3 | #3 | #0 | AGE | a,b | i:1,j | a=1,b=2"],
    );
    check(
        "apps",
        "daemonsets",
        json!({"spec": {"template": template}, "status": {"desiredNumberScheduled": 2, "currentNumberScheduled": 1}}),
        expect!["x | #2 | #1 | #0 | #0 | #0 | disk=ssd | AGE | a,b | i:1,j | <none>"],
    );
    check_core("podtemplates", json!({"template": template}), expect!["x | a,b | i:1,j | <none>"]);
    check(
        "apps",
        "controllerrevisions",
        json!({"revision": 4, "metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "controller": true}]}}),
        expect!["x | daemonset.apps/d | #4 | AGE"],
    );
    check(
        "autoscaling",
        "scales",
        json!({"spec": {"replicas": 2}, "status": {"replicas": 1}}),
        expect!["x | #2 | #1 | AGE"],
    );
}

#[test]
fn renders_jobs() {
    let conditions = |kind: &str| json!({"conditions": [{"type": kind, "status": "True"}]});
    check(
        "batch",
        "jobs",
        json!({"spec": {"completions": 3}}),
        expect!["x | Running | 0/3 |  | AGE |  |  | <none>"],
    );
    check(
        "batch",
        "jobs",
        json!({"spec": {"parallelism": 2}, "status": conditions("Suspended")}),
        expect!["x | Suspended | 0/1 of 2 |  | AGE |  |  | <none>"],
    );
    check(
        "batch",
        "jobs",
        json!({"spec": {"parallelism": 1}, "status": conditions("Failed")}),
        expect!["x | Failed | 0/1 |  | AGE |  |  | <none>"],
    );
    check(
        "batch",
        "jobs",
        json!({"status": {"conditions": [{"type": "SuccessCriteriaMet", "status": "True"}, {"type": "Complete", "status": "True"}],
            "succeeded": 1, "startTime": "2026-11-15T10:00:00Z", "completionTime": "2026-11-15T10:00:09Z"}}),
        expect!["x | Complete | 1/1 | 9s | AGE |  |  | <none>"],
    );
    check(
        "batch",
        "jobs",
        json!({"status": {"startTime": "2026-11-15T11:59:00Z"}}),
        expect!["x | Running | 0/1 | 60s | AGE |  |  | <none>"],
    );
    check(
        "batch",
        "cronjobs",
        json!({"spec": {"schedule": "* * * * *", "suspend": false, "jobTemplate": {"spec": {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}}},
            "status": {"active": [{}], "lastScheduleTime": "2026-11-15T11:59:30Z"}}),
        expect!["x | * * * * * | <none> | False | #1 | 30s | AGE | c | i | <none>"],
    );
    check(
        "batch",
        "cronjobs",
        json!({"spec": {"timeZone": "Etc/UTC"}}),
        expect!["x |  | Etc/UTC | <unset> | #0 | <none> | AGE |  |  | <none>"],
    );
}

#[test]
fn renders_autoscalers() {
    let hpa = |metrics: Value, current: Value| {
        json!({"spec": {"scaleTargetRef": {"kind": "Deployment", "name": "d"},
        "maxReplicas": 6, "metrics": metrics}, "status": {"currentMetrics": current}})
    };
    let cpu = json!({"type": "Resource", "resource": {"name": "cpu", "target": {"averageUtilization": 80}}});
    let targets = |metrics: Value, current: Value| {
        cells("autoscaling", "horizontalpodautoscalers", &hpa(metrics, current), Timestamp::MIN)[2]
            .as_str()
            .unwrap()
            .to_owned()
    };
    check(
        "autoscaling",
        "horizontalpodautoscalers",
        hpa(json!([cpu]), json!([])),
        expect!["x | Deployment/d | cpu: <unknown>/80% | <unset> | #6 | #0 | AGE"],
    );
    assert_eq!(targets(json!([]), json!([])), "<none>");
    let current = json!([{"type": "Resource", "resource": {"name": "cpu", "current": {"averageUtilization": 42, "averageValue": "42m"}}}]);
    assert_eq!(targets(json!([cpu]), current), "cpu: 42%/80%");
    let memory = json!({"type": "ContainerResource", "containerResource": {"name": "memory", "target": {"averageValue": "1Gi"}}});
    let pods = json!({"type": "Pods", "pods": {"target": {"averageValue": "10"}}});
    let external = json!({"type": "External", "external": {"target": {"averageValue": "5"}}});
    let object = json!({"type": "Object", "object": {"target": {"value": "7"}}});
    assert_eq!(targets(json!([memory, pods]), json!([])), "memory: <unknown>/1Gi, <unknown>/10");
    assert_eq!(targets(json!([external, object]), json!([])), "<unknown>/5 (avg), <unknown>/7");
    assert_eq!(
        targets(json!([{}, cpu, cpu, cpu]), json!([])),
        "<unknown type>, cpu: <unknown>/80% + 2 more..."
    );
}

#[test]
fn renders_services_and_endpoints() {
    let ports = json!([{"port": 80, "protocol": "TCP"}, {"port": 443, "nodePort": 30443, "protocol": "TCP"}]);
    check_core(
        "services",
        json!({"spec": {"type": "ClusterIP", "clusterIPs": ["10.96.0.1"], "ports": ports, "selector": {"a": "b"}}}),
        expect!["x | ClusterIP | 10.96.0.1 | <none> | 80/TCP,443:30443/TCP | AGE | a=b"],
    );
    check_core(
        "services",
        json!({"spec": {"type": "ClusterIP", "clusterIPs": ["None"], "externalIPs": ["1.2.3.4", "5.6.7.8"]}}),
        expect!["x | ClusterIP | None | 1.2.3.4,5.6.7.8 | <none> | AGE | <none>"],
    );
    check_core(
        "services",
        json!({"spec": {"type": "ExternalName", "externalName": "example.com"}}),
        expect!["x | ExternalName | <none> | example.com | <none> | AGE | <none>"],
    );
    check_core(
        "services",
        json!({"spec": {"type": "LoadBalancer"}}),
        expect!["x | LoadBalancer | <none> | <pending> | <none> | AGE | <none>"],
    );
    check_core(
        "services",
        json!({"spec": {"type": "LoadBalancer", "externalIPs": ["9.9.9.9"]}, "status": {"loadBalancer": {"ingress": [{"ip": "2.2.2.2"}, {"hostname": "a.example.com"}, {"ip": "1.1.1.1"}]}}}),
        expect!["x | LoadBalancer | <none> | 1.1.1.1,2.2.2.2,a.example.com,9.9.9.9 | <none> | AGE | <none>"],
    );
    check_core("endpoints", json!({}), expect!["x | <none> | AGE"]);
    check_core(
        "endpoints",
        json!({"subsets": [{"addresses": [{"ip": "10.0.0.1"}]}, {"addresses": [{"ip": "fd00::1"}], "ports": [{"port": 80}]}]}),
        expect!["x | 10.0.0.1,[fd00::1]:80 | AGE"],
    );
    check_core(
        "endpoints",
        json!({"subsets": [{"addresses": [{"ip": "10.0.0.1"}, {"ip": "10.0.0.2"}], "ports": [{"port": 1}, {"port": 2}]}]}),
        expect!["x | 10.0.0.1:1,10.0.0.2:1,10.0.0.1:2 + 1 more... | AGE"],
    );
    check(
        "discovery.k8s.io",
        "endpointslices",
        json!({"addressType": "IPv4"}),
        expect!["x | IPv4 | <unset> | <unset> | AGE"],
    );
    check(
        "discovery.k8s.io",
        "endpointslices",
        json!({"addressType": "IPv4", "ports": [{"port": 80}, {"name": "n"}, {}, {}], "endpoints": [{"addresses": ["1.1.1.1"]}, {"addresses": ["2.2.2.2"]}]}),
        expect!["x | IPv4 | 80,n,* + 1 more... | 1.1.1.1,2.2.2.2 | AGE"],
    );
}

#[test]
fn renders_ingresses_and_network_policies() {
    let group = "networking.k8s.io";
    check(group, "ingresses", json!({"spec": {"rules": [{}]}}), expect!["x | <none> | * |  | 80 | AGE"]);
    check(
        group,
        "ingresses",
        json!({"spec": {"ingressClassName": "c", "tls": [{}], "rules": [{"host": "a"}, {"host": "b"}, {"host": "c"}, {"host": "d"}]}, "status": {"loadBalancer": {"ingress": [{"ip": "1.1.1.1"}]}}}),
        expect!["x | c | a,b,c + 1 more... | 1.1.1.1 | 80, 443 | AGE"],
    );
    check(
        group,
        "ingressclasses",
        json!({"metadata": {"annotations": {"ingressclass.kubernetes.io/is-default-class": "true"}}, "spec": {"controller": "c/d", "parameters": {"apiGroup": "g", "kind": "K", "name": "n"}}}),
        expect!["x (default) | c/d | K.g/n | AGE"],
    );
    check(group, "networkpolicies", json!({"spec": {"podSelector": {}}}), expect!["x | <none> | AGE"]);
    check(
        group,
        "networkpolicies",
        json!({"spec": {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Odd"}]}}}),
        expect!["x | <error> | AGE"],
    );
    check(
        group,
        "servicecidrs",
        json!({"spec": {"cidrs": ["10.96.0.0/16", "fd00::/112"]}}),
        expect!["x | 10.96.0.0/16,fd00::/112 | AGE"],
    );
    check(
        group,
        "ipaddresses",
        json!({"spec": {"parentRef": {"resource": "services", "namespace": "default", "name": "kubernetes"}}}),
        expect!["x | services/default/kubernetes"],
    );
}

#[test]
fn renders_nodes() {
    check_core(
        "nodes",
        json!({"metadata": {"labels": {"node-role.kubernetes.io/worker": "", "node-role.kubernetes.io/control-plane": "", "kubernetes.io/role": "edge"}},
            "spec": {"unschedulable": true},
            "status": {"conditions": [{"type": "Ready", "status": "True"}], "addresses": [{"type": "Hostname", "address": "h"}, {"type": "InternalIP", "address": "10.1.1.1"}],
                "nodeInfo": {"kubeletVersion": "v1.36.0", "osImage": "Linux", "kernelVersion": "6.1", "architecture": "amd64"}}}),
        expect![
            "x | Ready,SchedulingDisabled | control-plane,edge,worker | AGE | v1.36.0 | 10.1.1.1 | <none> | Linux | 6.1 (amd64) | <unknown>"
        ],
    );
    check_core(
        "nodes",
        json!({}),
        expect!["x | Unknown | <none> | AGE |  | <none> | <none> | <unknown> | <unknown> | <unknown>"],
    );
}

#[test]
fn renders_events() {
    let old = json!({"type": "Normal", "reason": "Pulled", "message": " pulled\n", "involvedObject": {"kind": "Pod", "name": "p", "fieldPath": "spec.containers{a}"},
        "source": {"component": "kubelet", "host": "n1"}, "firstTimestamp": "2026-11-15T11:00:00Z", "lastTimestamp": "2026-11-15T11:59:00Z", "count": 7});
    check_core(
        "events",
        old,
        expect!["60s | Normal | Pulled | pod/p | spec.containers{a} | kubelet, n1 | pulled | 60m | #7 | x"],
    );
    let new = json!({"type": "Warning", "reason": "Failed", "note": "no", "regarding": {"kind": "Node"}, "reportingController": "c", "eventTime": "2026-11-15T11:58:00.000000Z"});
    check("events.k8s.io", "events", new, expect!["2m | Warning | Failed | node |  | c | no | 2m | #1 | x"]);
    let series = json!({"series": {"count": 3, "lastObservedTime": "2026-11-15T11:59:55.000000Z"}, "reportingComponent": "r", "reportingInstance": "i"});
    check_core("events", series, expect!["5s |  |  |  |  | r, i |  | <unknown> | #3 | x"]);
}

#[test]
fn renders_volumes() {
    check_core(
        "persistentvolumes",
        json!({"spec": {"capacity": {"storage": "5Gi"}, "accessModes": ["ReadWriteMany", "ReadWriteOnce"], "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": "ns", "name": "c"}, "storageClassName": "fast", "volumeMode": "Block"}, "status": {"phase": "Bound"}}),
        expect!["x | 5Gi | RWO,RWX | Retain | Bound | ns/c | fast | <unset> |  | AGE | Block"],
    );
    check_core(
        "persistentvolumeclaims",
        json!({"spec": {"volumeName": "v", "storageClassName": "fast"}, "status": {"phase": "Bound", "capacity": {"storage": "5Gi"}, "accessModes": ["ReadWriteOncePod", "ReadOnlyMany"]}}),
        expect!["x | Bound | v | 5Gi | ROX,RWOP | fast | <unset> | AGE | <unset>"],
    );
    check_core(
        "persistentvolumeclaims",
        json!({"metadata": {"deletionTimestamp": NOW, "annotations": {"volume.beta.kubernetes.io/storage-class": "old"}}, "status": {"phase": "Pending", "accessModes": ["ReadWriteOnce"]}}),
        expect!["x | Terminating |  |  |  | old | <unset> | AGE | <unset>"],
    );
    let group = "storage.k8s.io";
    check(
        group,
        "storageclasses",
        json!({"provisioner": "p", "allowVolumeExpansion": true, "metadata": {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}),
        expect!["x (default) | p | Delete | Immediate | #true | AGE"],
    );
    check(
        group,
        "csidrivers",
        json!({"spec": {"volumeLifecycleModes": ["Persistent", "Ephemeral"], "tokenRequests": [{"audience": "a"}, {"audience": "b"}]}}),
        expect!["x | #true | #false | #false | a,b | #false | Persistent,Ephemeral | AGE"],
    );
    check(
        group,
        "csidrivers",
        json!({"spec": {"attachRequired": false}}),
        expect!["x | #false | #false | #false | <unset> | #false | <none> | AGE"],
    );
    check(group, "csinodes", json!({"spec": {"drivers": [{}, {}]}}), expect!["x | #2 | AGE"]);
    check(
        group,
        "volumeattachments",
        json!({"spec": {"attacher": "a", "nodeName": "n", "source": {"persistentVolumeName": "v"}}, "status": {"attached": true}}),
        expect!["x | a | v | n | #true | AGE"],
    );
}

#[test]
fn renders_rbac_and_certificates() {
    let group = "rbac.authorization.k8s.io";
    let subjects = json!([{"kind": "User", "name": "u"}, {"kind": "Group", "name": "g"}, {"kind": "User", "name": "v"}, {"kind": "ServiceAccount", "namespace": "ns", "name": "s"}]);
    check(
        group,
        "rolebindings",
        json!({"roleRef": {"kind": "Role", "name": "r"}, "subjects": subjects}),
        expect!["x | Role/r | AGE | u, v | g | ns/s"],
    );
    let group = "certificates.k8s.io";
    check(
        group,
        "certificatesigningrequests",
        json!({"spec": {"username": "u"}}),
        expect!["x | AGE | <none> | u | <none> | Pending"],
    );
    check(
        group,
        "certificatesigningrequests",
        json!({"spec": {"signerName": "s", "username": "u", "expirationSeconds": 86400}, "status": {"certificate": "eA==", "conditions": [{"type": "Approved"}]}}),
        expect!["x | AGE | s | u | 24h | Approved,Issued"],
    );
}

#[test]
fn renders_admission_and_flow_control() {
    let group = "admissionregistration.k8s.io";
    check(
        group,
        "validatingadmissionpolicies",
        json!({"spec": {"validations": [{}], "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"}}}),
        expect!["x | #1 | v1/ConfigMap | AGE"],
    );
    check(group, "mutatingadmissionpolicies", json!({"spec": {}}), expect!["x | #0 | <unset> | AGE"]);
    check(
        group,
        "validatingadmissionpolicybindings",
        json!({"spec": {"policyName": "p", "paramRef": {"name": "n"}}}),
        expect!["x | p | */n | AGE"],
    );
    check(
        group,
        "mutatingadmissionpolicybindings",
        json!({"spec": {"paramRef": {"selector": {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "k", "operator": "In", "values": ["x", "y"]}]}}}}),
        expect![
            "x |  | &LabelSelector{MatchLabels:map[string]string{a: b,},MatchExpressions:[]LabelSelectorRequirement{LabelSelectorRequirement{Key:k,Operator:In,Values:[x y],},},} | AGE"
        ],
    );
    check(group, "mutatingwebhookconfigurations", json!({"webhooks": [{}, {}]}), expect!["x | #2 | AGE"]);
    check(
        "policy",
        "poddisruptionbudgets",
        json!({"spec": {"minAvailable": "50%"}, "status": {"disruptionsAllowed": 1}}),
        expect!["x | 50% | N/A | #1 | AGE"],
    );
    check(
        "policy",
        "poddisruptionbudgets",
        json!({"spec": {"maxUnavailable": 0}}),
        expect!["x | N/A | 0 | #0 | AGE"],
    );
    check(
        "flowcontrol.apiserver.k8s.io",
        "flowschemas",
        json!({"spec": {"priorityLevelConfiguration": {"name": "p"}, "matchingPrecedence": 1}, "status": {"conditions": [{"type": "Dangling", "status": "False"}]}}),
        expect!["x | p | #1 | <none> | AGE | False"],
    );
    check(
        "flowcontrol.apiserver.k8s.io",
        "prioritylevelconfigurations",
        json!({"spec": {"type": "Limited", "limited": {"nominalConcurrencyShares": 5}}}),
        expect!["x | Limited | #5 | <none> | <none> | <none> | AGE"],
    );
}

#[test]
fn renders_other_resources() {
    check_core(
        "configmaps",
        json!({"data": {"a": "1", "b": "2"}, "binaryData": {"c": ""}}),
        expect!["x | #3 | AGE"],
    );
    check_core("secrets", json!({"type": "Opaque", "data": {"a": ""}}), expect!["x | Opaque | #1 | AGE"]);
    check_core("namespaces", json!({"status": {"phase": "Active"}}), expect!["x | Active | AGE"]);
    check_core("serviceaccounts", json!({"metadata": {"creationTimestamp": null}}), expect!["x | <unknown>"]);
    check_core(
        "resourcequotas",
        json!({"status": {"hard": {"pods": "10", "limits.cpu": "2", "requests.cpu": "1"}, "used": {"pods": "3"}}}),
        expect!["x | pods: 3/10, requests.cpu: 0/1 | limits.cpu: 0/2 | AGE"],
    );
    check_core(
        "componentstatuses",
        json!({"conditions": [{"type": "Healthy", "status": "True", "message": "ok"}]}),
        expect!["x | Healthy | ok | "],
    );
    check_core(
        "componentstatuses",
        json!({"conditions": [{"type": "Healthy", "status": "False", "error": "no"}]}),
        expect!["x | Unhealthy |  | no"],
    );
    check(
        "apiregistration.k8s.io",
        "apiservices",
        json!({"spec": {}, "status": {"conditions": [{"type": "Available", "status": "True", "reason": "Local"}]}}),
        expect!["x | Local | True | AGE"],
    );
    check(
        "apiregistration.k8s.io",
        "apiservices",
        json!({"spec": {"service": {"namespace": "ns", "name": "s"}}, "status": {"conditions": [{"type": "Available", "status": "False", "reason": "MissingEndpoints"}]}}),
        expect!["x | ns/s | False (MissingEndpoints) | AGE"],
    );
    check("coordination.k8s.io", "leases", json!({"spec": {"holderIdentity": "h"}}), expect!["x | h | AGE"]);
    check("node.k8s.io", "runtimeclasses", json!({"handler": "runc"}), expect!["x | runc | AGE"]);
    check(
        "scheduling.k8s.io",
        "priorityclasses",
        json!({"value": 1000, "globalDefault": true, "preemptionPolicy": "Never"}),
        expect!["x | #1000 | #true | AGE | Never"],
    );
    check("resource.k8s.io", "resourceclaims", json!({}), expect!["x | pending | AGE"]);
    check(
        "resource.k8s.io",
        "resourceclaims",
        json!({"status": {"allocation": {}, "reservedFor": [{}]}}),
        expect!["x | allocated,reserved | AGE"],
    );
    check(
        "resource.k8s.io",
        "resourceslices",
        json!({"spec": {"nodeName": "n", "driver": "d", "pool": {"name": "p"}}}),
        expect!["x | n | d | p | AGE"],
    );
}
