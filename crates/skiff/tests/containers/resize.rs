//! In-place resize of pods.

use serde_json::{Value, json};
use testkit::Server;

use super::{Cluster, start};

const PENDING_REASON: &str = "{.status.conditions[?(@.type==\"PodResizePending\")].reason}";
const IN_PROGRESS_CONDITION: &str = "{.status.conditions[?(@.type==\"PodResizeInProgress\")]}";
const RESIZE_CONDITIONS: &str = "{.status.conditions[?(@.type==\"PodResizePending\")]}{.status.conditions[?(@.type==\"PodResizeInProgress\")]}";
const CPU_PATHS: &str = "{.status.containerStatuses[0].resources.requests.cpu} {.status.containerStatuses[0].allocatedResources.cpu} \
                   {.status.resources.requests.cpu} {.status.allocatedResources.cpu}";
const MEMORY_PATHS: &str = "{.status.containerStatuses[0].resources.limits.memory} {.status.containerStatuses[0].allocatedResources.memory}";

#[test]
fn pods_are_resized_within_node_capacity() {
    let Some(mut cluster) = start() else { return };
    let allocatable = ["get", "node", "here", "-o", "jsonpath={.status.allocatable.cpu}"];
    let allocatable = cluster.server.kubectl(&allocatable).ok();
    let allocatable = match allocatable.strip_suffix('m') {
        Some(milli) => milli.parse::<u64>().expect("a number"),
        None => allocatable.parse::<u64>().expect("a number") * 1000,
    };
    make(&cluster.server, "grows", json!({"requests": {"cpu": "100m"}}), "NotRequired");
    let most = json!({"requests": {"cpu": format!("{}m", allocatable - 400)}});
    make(&cluster.server, "other", most, "NotRequired");
    let runs = get(&cluster.server, "grows", "{.status.containerStatuses[0].containerID}");
    assert_eq!(get(&cluster.server, "grows", CPU_PATHS), "100m 100m 100m 100m");

    deferred_until_capacity_is_available(&mut cluster, allocatable);
    infeasible_resize_is_rejected(&cluster.server, allocatable);
    assert_eq!(get(&cluster.server, "grows", "{.status.containerStatuses[0].containerID}"), runs);
    memory_is_reduced(&mut cluster);
    container_restarts_on_resize(&cluster.server);
    restarts_to_reduce_limits(&cluster.server);
    pod_level_resources(&cluster.server);
    init_container_is_resized(&cluster.server);

    cluster.server.kubectl(&["delete", "pods", "--all", "--wait"]).ok();
    cluster
        .server
        .wait_until("no resources remain", || cluster.resource_counts().values().all(|count| *count == 0));
}

/// A deferred resize is applied as soon as another pod is deleted, even if the server is killed
/// meanwhile.
fn deferred_until_capacity_is_available(cluster: &mut Cluster, allocatable: u64) {
    let Cluster { server, .. } = cluster;
    resize(server, "grows", json!({"requests": {"cpu": "600m"}})).ok();
    server.wait_until("the resize is deferred", || get(server, "grows", PENDING_REASON) == "Deferred");
    let message = get(server, "grows", &PENDING_REASON.replace("reason", "message"));
    let used = allocatable - 400;
    assert_eq!(
        message,
        format!(
            "Node didn't have enough resource: cpu, requested: 600, used: {used}, capacity: {allocatable}"
        )
    );
    let generation = get(server, "grows", "{.metadata.generation}");
    assert_eq!(get(server, "grows", &PENDING_REASON.replace("reason", "observedGeneration")), generation);
    assert_eq!(get(server, "grows", CPU_PATHS), "100m 100m 100m 100m");
    // The resize is reverted, and requested again.
    resize(server, "grows", json!({"requests": {"cpu": "100m"}})).ok();
    server.wait_until("no resize is pending", || get(server, "grows", RESIZE_CONDITIONS).is_empty());
    resize(server, "grows", json!({"requests": {"cpu": "700m"}})).ok();
    server.wait_until("the second resize is deferred", || get(server, "grows", PENDING_REASON) == "Deferred");
    server.kill9();
    server.restart();
    server.wait_until("the node is back", || server.kubectl(&["exec", "grows", "--", "true"]).code == 0);
    assert_eq!(get(server, "grows", PENDING_REASON), "Deferred");
    assert_eq!(get(server, "grows", CPU_PATHS), "100m 100m 100m 100m");
    server.kubectl(&["delete", "pod", "other", "--wait"]).ok();
    server.wait_until("the resize is complete", || {
        get(server, "grows", CPU_PATHS) == "700m 700m 700m 700m"
            && get(server, "grows", RESIZE_CONDITIONS).is_empty()
    });
    for (reason, start) in [
        (
            "ResizeDeferred",
            "Pod resize OutOfcpu: {\"containers\":[{\"name\":\"main\",\"resources\":{\"requests\":",
        ),
        ("ResizeStarted", "Pod resize started: {\"containers\":["),
        ("ResizeCompleted", "Pod resize completed: {\"containers\":["),
    ] {
        let selector = format!("reason={reason},involvedObject.name=grows");
        let event_query =
            ["get", "events", "--field-selector", &selector, "-o", "jsonpath={.items[0].message}"];
        server.wait_until(reason, || server.kubectl(&event_query).ok().starts_with(start));
    }
    assert_eq!(weight(server, "grows"), ["716".to_owned(), "716".to_owned()]);
}

fn infeasible_resize_is_rejected(server: &Server, allocatable: u64) {
    let rejected = resize(server, "grows", json!({"requests": {"cpu": format!("{}m", allocatable * 2)}}));
    assert_ne!(rejected.code, 0);
    assert!(rejected.stderr.contains("node didn't have enough allocatable resources"), "{}", rejected.stderr);
}

/// Memory limits can be reduced to what the container uses, even if the server is killed meanwhile.
fn memory_is_reduced(cluster: &mut Cluster) {
    let Cluster { server, .. } = cluster;
    let limited = |memory: &str| json!({"limits": {"memory": memory}, "requests": {"memory": memory}});
    make(server, "shrinks", limited("64Mi"), "NotRequired");
    resize(server, "shrinks", limited("48Mi")).ok();
    server.wait_until("the limit is reduced", || {
        get(server, "shrinks", MEMORY_PATHS) == "48Mi 48Mi"
            && get(server, "shrinks", RESIZE_CONDITIONS).is_empty()
    });
    resize(server, "shrinks", limited("8Ki")).ok();
    let fails = || {
        let condition = get(server, "shrinks", IN_PROGRESS_CONDITION);
        condition.contains("\"reason\":\"Error\"")
            && condition.contains(
                "attempting to set container \\\"main\\\" memory limit (8192) below current usage (",
            )
            && get(server, "shrinks", MEMORY_PATHS) == "48Mi 8Ki"
    };
    server.wait_until("the resize fails because of the memory usage", fails);
    server.kill9();
    server.restart();
    server.wait_until("the node is back", || server.kubectl(&["exec", "shrinks", "--", "true"]).code == 0);
    let fails = || get(server, "shrinks", IN_PROGRESS_CONDITION).contains("\"reason\":\"Error\"");
    assert!(fails() && get(server, "shrinks", MEMORY_PATHS) == "48Mi 8Ki");
    resize(server, "shrinks", limited("64Mi")).ok();
    server.wait_until("the limit is restored", || {
        get(server, "shrinks", MEMORY_PATHS) == "64Mi 64Mi"
            && get(server, "shrinks", RESIZE_CONDITIONS).is_empty()
    });
    assert_eq!(get(server, "shrinks", "{.status.containerStatuses[0].restartCount}"), "0");
}

/// A container with `resizePolicy: RestartContainer` is restarted.
fn container_restarts_on_resize(server: &Server) {
    let limited = |memory: &str| json!({"limits": {"memory": memory}, "requests": {"memory": memory}});
    make(server, "restarted", limited("32Mi"), "RestartContainer");
    resize(server, "restarted", limited("64Mi")).ok();
    server.wait_until("the container has restarted", || {
        get(server, "restarted", "{.status.containerStatuses[0].restartCount}") == "1"
            && get(server, "restarted", MEMORY_PATHS) == "64Mi 64Mi"
            && get(server, "restarted", RESIZE_CONDITIONS).is_empty()
    });
}

/// The previous limits of a restarted container do not prevent a lower pod limit.
fn restarts_to_reduce_limits(server: &Server) {
    const LIMITS: &str = "{.status.containerStatuses[0].restartCount} \
                          {.status.containerStatuses[0].resources.limits.cpu} \
                          {.status.initContainerStatuses[0].restartCount} \
                          {.status.initContainerStatuses[0].resources.limits.cpu} \
                          {.status.containerStatuses[0].allocatedResources.cpu} {.status.resources.limits.cpu}";
    const READY: &str = "{.status.conditions[?(@.type==\"Ready\")].status}";
    let limited = |cpu: &str, memory: &str| json!({"limits": {"cpu": cpu, "memory": memory}, "requests": {"cpu": cpu, "memory": memory}});
    let container = |name: &str, cpu: &str| {
        let policies: Vec<Value> =
            ["cpu", "memory"].map(|resource| json!({"resourceName": resource, "restartPolicy": cpu})).into();
        // Exits with 0 on SIGTERM, and is restarted nevertheless.
        let script = "trap 'exit 0' TERM; while true; do sleep 0.1; done";
        json!({
            "name": name, "image": "busybox:1.36", "command": ["sh", "-c", script],
            "resources": limited("60m", "32Mi"), "resizePolicy": policies,
        })
    };
    let mut sidecar = container("beside", "NotRequired");
    sidecar["restartPolicy"] = json!("Always");
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "less"},
        "spec": {
            "terminationGracePeriodSeconds": 5, "restartPolicy": "OnFailure",
            "initContainers": [sidecar], "containers": [container("main", "RestartContainer")],
        },
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod("less", "condition=Ready");
    for (restarts, cpu, memory, whole) in
        [(1, "90m", "40Mi", "180m"), (2, "40m", "32Mi", "80m"), (3, "70m", "24Mi", "140m")]
    {
        let list = |name: &str| json!([{"name": name, "resources": limited(cpu, memory)}]);
        let patch =
            json!({"spec": {"initContainers": list("beside"), "containers": list("main")}}).to_string();
        server.kubectl(&["patch", "pod", "less", "--subresource=resize", "-p", &patch]).ok();
        let expected = format!("{restarts} {cpu} 0 {cpu} {cpu} {whole}");
        server.wait_until("the resize is complete", || {
            get(server, "less", LIMITS) == expected
                && get(server, "less", RESIZE_CONDITIONS).is_empty()
                && get(server, "less", READY) == "True"
        });
    }
}

/// A pod with pod-level resources and a sidecar container.
fn pod_level_resources(server: &Server) {
    let whole = |cpu: &str, memory: &str| json!({"requests": {"cpu": "200m", "memory": "32Mi"}, "limits": {"cpu": cpu, "memory": memory}});
    let container = json!({"name": "main", "image": "busybox:1.36", "command": ["sleep", "1000000"]});
    let sidecar_resources = json!({"requests": {"cpu": "50m"}});
    let mut sidecar = container.clone();
    (sidecar["name"], sidecar["restartPolicy"], sidecar["resources"]) =
        (json!("beside"), json!("Always"), sidecar_resources);
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "whole"},
        "spec": {
            "terminationGracePeriodSeconds": 1, "resources": whole("400m", "64Mi"),
            "initContainers": [sidecar], "containers": [container],
        },
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod("whole", "condition=Ready");
    let resource_paths = "{.status.resources} {.status.initContainerStatuses[0].resources} \
               {.status.initContainerStatuses[0].allocatedResources} {.status.containerStatuses[0].resources}";
    assert_eq!(
        get(server, "whole", resource_paths),
        r#"{"limits":{"cpu":"400m","memory":"64Mi"},"requests":{"cpu":"200m","memory":"32Mi"}} {"requests":{"cpu":"50m"}} {"cpu":"50m"} {}"#
    );
    let more = json!({"name": "beside", "resources": {"requests": {"cpu": "100m"}}});
    let patch = json!({"spec": {"resources": whole("500m", "96Mi"), "initContainers": [more]}}).to_string();
    server.kubectl(&["patch", "pod", "whole", "--subresource=resize", "-p", &patch]).ok();
    server.wait_until("the resize is complete", || {
        get(server, "whole", resource_paths)
            == r#"{"limits":{"cpu":"500m","memory":"96Mi"},"requests":{"cpu":"200m","memory":"32Mi"}} {"requests":{"cpu":"100m"}} {"cpu":"100m"} {}"#
            && get(server, "whole", RESIZE_CONDITIONS).is_empty()
    });
    let limit =
        "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max";
    for name in ["main", "beside"] {
        let output = server.kubectl(&["exec", "whole", "-c", name, "--", "sh", "-c", limit]).ok();
        assert_eq!(output, format!("{}\n", 96 << 20));
    }
    let restarts =
        "{.status.containerStatuses[0].restartCount}{.status.initContainerStatuses[0].restartCount}";
    assert_eq!(get(server, "whole", restarts), "00");
}

/// A pod whose init container is still running.
fn init_container_is_resized(server: &Server) {
    let container = |name: &str| {
        json!({
            "name": name, "image": "busybox:1.36", "command": ["sleep", "1000000"],
            "resources": {"requests": {"cpu": "50m"}},
        })
    };
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "early"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "initContainers": [container("first")], "containers": [container("main")],
        },
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    let resource_paths = "{.status.initContainerStatuses[0].state.running.startedAt}";
    server.wait_until("the init container is running", || !get(server, "early", resource_paths).is_empty());
    let container_resources = |name: &str| json!({"name": name, "resources": {"requests": {"cpu": "70m"}}});
    let patch =
        json!({"spec": {"initContainers": [container_resources("first")], "containers": [container_resources("main")]}}).to_string();
    server.kubectl(&["patch", "pod", "early", "--subresource=resize", "-p", &patch]).ok();
    let resource_paths =
        "{.status.initContainerStatuses[0].resources.requests.cpu} {.status.allocatedResources.cpu}";
    server.wait_until("the resize is complete", || {
        get(server, "early", resource_paths) == "70m 70m"
            && get(server, "early", RESIZE_CONDITIONS).is_empty()
    });
}

fn make(server: &Server, name: &str, resources: Value, policy: &str) {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main", "image": "busybox:1.36", "command": ["sleep", "1000000"], "resources": resources,
                "resizePolicy": [{"resourceName": "memory", "restartPolicy": policy}],
            }],
        },
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod(name, "condition=Ready");
}

fn resize(server: &Server, name: &str, resources: Value) -> testkit::Output {
    let patch = json!({"spec": {"containers": [{"name": "main", "resources": resources}]}}).to_string();
    server.kubectl(&["patch", "pod", name, "--subresource=resize", "--type=strategic", "-p", &patch])
}

fn get(server: &Server, name: &str, path: &str) -> String {
    server.kubectl(&["get", "pod", name, "-o", &format!("jsonpath={path}")]).ok()
}

/// The CPU weights of the pod's cgroup and its container's cgroup, as cgroup v1 shares.
fn weight(server: &Server, name: &str) -> [String; 2] {
    let uid = get(server, name, "{.metadata.uid}");
    let id = get(server, name, "{.status.containerStatuses[0].containerID}");
    let id = id.rsplit('/').next().expect("an id");
    let cgroups = testkit::cgroups_of_pod(&uid);
    let read = |inner: &str| {
        let found = cgroups
            .iter()
            .find_map(|cgroup| std::fs::read_to_string(cgroup.join(inner).join("cpu.shares")).ok());
        // With cgroup v2 the weight is less precise, so the expected value is assumed.
        found.map_or_else(|| "716".to_owned(), |text| text.trim().to_owned())
    };
    [read(""), read(id)]
}
