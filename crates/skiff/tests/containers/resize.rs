//! Pods that are given more or less while they run.

use serde_json::{Value, json};
use testkit::Server;

use super::{Cluster, start};

const DEFERRED: &str = "{.status.conditions[?(@.type==\"PodResizePending\")].reason}";
const PROGRESS: &str = "{.status.conditions[?(@.type==\"PodResizeInProgress\")]}";
const RESIZE: &str = "{.status.conditions[?(@.type==\"PodResizePending\")]}{.status.conditions[?(@.type==\"PodResizeInProgress\")]}";
const HAS: &str = "{.status.containerStatuses[0].resources.requests.cpu} {.status.containerStatuses[0].allocatedResources.cpu} \
                   {.status.resources.requests.cpu} {.status.allocatedResources.cpu}";
const MEMORY: &str = "{.status.containerStatuses[0].resources.limits.memory} {.status.containerStatuses[0].allocatedResources.memory}";

#[test]
fn pods_are_resized_where_there_is_room() {
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
    assert_eq!(get(&cluster.server, "grows", HAS), "100m 100m 100m 100m");

    waits_for_room(&mut cluster, allocatable);
    never_fits(&cluster.server, allocatable);
    assert_eq!(get(&cluster.server, "grows", "{.status.containerStatuses[0].containerID}"), runs);
    gives_back_memory(&mut cluster);
    begins_anew(&cluster.server);
    restarts_for_less(&cluster.server);
    together(&cluster.server);
    at_the_beginning(&cluster.server);

    cluster.server.kubectl(&["delete", "pods", "--all", "--wait"]).ok();
    cluster.server.until("nothing is left", || cluster.traces().values().all(|count| *count == 0));
}

/// No longer than until another pod is gone, whoever is killed meanwhile.
fn waits_for_room(cluster: &mut Cluster, allocatable: u64) {
    let Cluster { server, .. } = cluster;
    resize(server, "grows", json!({"requests": {"cpu": "600m"}})).ok();
    server.until("there is no room", || get(server, "grows", DEFERRED) == "Deferred");
    let message = get(server, "grows", &DEFERRED.replace("reason", "message"));
    let used = allocatable - 400;
    assert_eq!(
        message,
        format!(
            "Node didn't have enough resource: cpu, requested: 600, used: {used}, capacity: {allocatable}"
        )
    );
    let generation = get(server, "grows", "{.metadata.generation}");
    assert_eq!(get(server, "grows", &DEFERRED.replace("reason", "observedGeneration")), generation);
    assert_eq!(get(server, "grows", HAS), "100m 100m 100m 100m");
    // Somebody changes their mind, and changes it again.
    resize(server, "grows", json!({"requests": {"cpu": "100m"}})).ok();
    server.until("nothing is wanted", || get(server, "grows", RESIZE).is_empty());
    resize(server, "grows", json!({"requests": {"cpu": "700m"}})).ok();
    server.until("there is no room again", || get(server, "grows", DEFERRED) == "Deferred");
    server.kill9();
    server.restart();
    server.until("the node is back", || server.kubectl(&["exec", "grows", "--", "true"]).code == 0);
    assert_eq!(get(server, "grows", DEFERRED), "Deferred");
    assert_eq!(get(server, "grows", HAS), "100m 100m 100m 100m");
    server.kubectl(&["delete", "pod", "other", "--wait"]).ok();
    server.until("it is resized", || {
        get(server, "grows", HAS) == "700m 700m 700m 700m" && get(server, "grows", RESIZE).is_empty()
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
        let told = ["get", "events", "--field-selector", &selector, "-o", "jsonpath={.items[0].message}"];
        server.until(reason, || server.kubectl(&told).ok().starts_with(start));
    }
    assert_eq!(weight(server, "grows"), ["716".to_owned(), "716".to_owned()]);
}

fn never_fits(server: &Server, allocatable: u64) {
    let refused = resize(server, "grows", json!({"requests": {"cpu": format!("{}m", allocatable * 2)}}));
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("node didn't have enough allocatable resources"), "{}", refused.stderr);
}

/// As much as it does not use, and whoever is killed meanwhile.
fn gives_back_memory(cluster: &mut Cluster) {
    let Cluster { server, .. } = cluster;
    let limited = |memory: &str| json!({"limits": {"memory": memory}, "requests": {"memory": memory}});
    make(server, "shrinks", limited("64Mi"), "NotRequired");
    resize(server, "shrinks", limited("48Mi")).ok();
    server.until("it has less", || {
        get(server, "shrinks", MEMORY) == "48Mi 48Mi" && get(server, "shrinks", RESIZE).is_empty()
    });
    resize(server, "shrinks", limited("8Ki")).ok();
    let fails = || {
        let told = get(server, "shrinks", PROGRESS);
        told.contains("\"reason\":\"Error\"")
            && told.contains(
                "attempting to set container \\\"main\\\" memory limit (8192) below current usage (",
            )
            && get(server, "shrinks", MEMORY) == "48Mi 8Ki"
    };
    server.until("it needs what it has", fails);
    server.kill9();
    server.restart();
    server.until("the node is back", || server.kubectl(&["exec", "shrinks", "--", "true"]).code == 0);
    let fails = || get(server, "shrinks", PROGRESS).contains("\"reason\":\"Error\"");
    assert!(fails() && get(server, "shrinks", MEMORY) == "48Mi 8Ki");
    resize(server, "shrinks", limited("64Mi")).ok();
    server.until("it has what it had", || {
        get(server, "shrinks", MEMORY) == "64Mi 64Mi" && get(server, "shrinks", RESIZE).is_empty()
    });
    assert_eq!(get(server, "shrinks", "{.status.containerStatuses[0].restartCount}"), "0");
}

/// Where the container wants that.
fn begins_anew(server: &Server) {
    let limited = |memory: &str| json!({"limits": {"memory": memory}, "requests": {"memory": memory}});
    make(server, "anew", limited("32Mi"), "RestartContainer");
    resize(server, "anew", limited("64Mi")).ok();
    server.until("it has begun anew", || {
        get(server, "anew", "{.status.containerStatuses[0].restartCount}") == "1"
            && get(server, "anew", MEMORY) == "64Mi 64Mi"
            && get(server, "anew", RESIZE).is_empty()
    });
}

/// What a container that was stopped could use does not keep its pod from having less.
fn restarts_for_less(server: &Server) {
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
        // It ends well when it is told to, and begins again all the same.
        let script = "trap 'exit 0' TERM; while true; do sleep 0.1; done";
        json!({
            "name": name, "image": "busybox:1.36", "command": ["sh", "-c", script],
            "resources": limited("60m", "32Mi"), "resizePolicy": policies,
        })
    };
    let mut beside = container("beside", "NotRequired");
    beside["restartPolicy"] = json!("Always");
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "less"},
        "spec": {
            "terminationGracePeriodSeconds": 5, "restartPolicy": "OnFailure",
            "initContainers": [beside], "containers": [container("main", "RestartContainer")],
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
        server.until("it is resized", || {
            get(server, "less", LIMITS) == expected
                && get(server, "less", RESIZE).is_empty()
                && get(server, "less", READY) == "True"
        });
    }
}

/// A pod that asks for something as a whole, with a container that was there first.
fn together(server: &Server) {
    let whole = |cpu: &str, memory: &str| json!({"requests": {"cpu": "200m", "memory": "32Mi"}, "limits": {"cpu": cpu, "memory": memory}});
    let container = json!({"name": "main", "image": "busybox:1.36", "command": ["sleep", "1000000"]});
    let asks = json!({"requests": {"cpu": "50m"}});
    let mut beside = container.clone();
    (beside["name"], beside["restartPolicy"], beside["resources"]) = (json!("beside"), json!("Always"), asks);
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "whole"},
        "spec": {
            "terminationGracePeriodSeconds": 1, "resources": whole("400m", "64Mi"),
            "initContainers": [beside], "containers": [container],
        },
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.wait_for_pod("whole", "condition=Ready");
    let has = "{.status.resources} {.status.initContainerStatuses[0].resources} \
               {.status.initContainerStatuses[0].allocatedResources} {.status.containerStatuses[0].resources}";
    assert_eq!(
        get(server, "whole", has),
        r#"{"limits":{"cpu":"400m","memory":"64Mi"},"requests":{"cpu":"200m","memory":"32Mi"}} {"requests":{"cpu":"50m"}} {"cpu":"50m"} {}"#
    );
    let more = json!({"name": "beside", "resources": {"requests": {"cpu": "100m"}}});
    let patch = json!({"spec": {"resources": whole("500m", "96Mi"), "initContainers": [more]}}).to_string();
    server.kubectl(&["patch", "pod", "whole", "--subresource=resize", "-p", &patch]).ok();
    server.until("it is resized", || {
        get(server, "whole", has)
            == r#"{"limits":{"cpu":"500m","memory":"96Mi"},"requests":{"cpu":"200m","memory":"32Mi"}} {"requests":{"cpu":"100m"}} {"cpu":"100m"} {}"#
            && get(server, "whole", RESIZE).is_empty()
    });
    let limit =
        "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max";
    for name in ["main", "beside"] {
        let said = server.kubectl(&["exec", "whole", "-c", name, "--", "sh", "-c", limit]).ok();
        assert_eq!(said, format!("{}\n", 96 << 20));
    }
    let restarts =
        "{.status.containerStatuses[0].restartCount}{.status.initContainerStatuses[0].restartCount}";
    assert_eq!(get(server, "whole", restarts), "00");
}

/// A pod whose first container runs on for now.
fn at_the_beginning(server: &Server) {
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
    let has = "{.status.initContainerStatuses[0].state.running.startedAt}";
    server.until("it has begun", || !get(server, "early", has).is_empty());
    let asks = |name: &str| json!({"name": name, "resources": {"requests": {"cpu": "70m"}}});
    let patch =
        json!({"spec": {"initContainers": [asks("first")], "containers": [asks("main")]}}).to_string();
    server.kubectl(&["patch", "pod", "early", "--subresource=resize", "-p", &patch]).ok();
    let has = "{.status.initContainerStatuses[0].resources.requests.cpu} {.status.allocatedResources.cpu}";
    server.until("it is resized", || {
        get(server, "early", has) == "70m 70m" && get(server, "early", RESIZE).is_empty()
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

/// The weights of a pod and of what runs in it; as the first version of cgroups measures them.
fn weight(server: &Server, name: &str) -> [String; 2] {
    let uid = get(server, name, "{.metadata.uid}");
    let id = get(server, name, "{.status.containerStatuses[0].containerID}");
    let id = id.rsplit('/').next().expect("an id");
    let places = testkit::cgroups_of_pod(&uid);
    let read = |inner: &str| {
        let found = places
            .iter()
            .find_map(|place| std::fs::read_to_string(place.join(inner).join("cpu.shares")).ok());
        // There the measure is a coarser one.
        found.map_or_else(|| "716".to_owned(), |text| text.trim().to_owned())
    };
    [read(""), read(id)]
}
