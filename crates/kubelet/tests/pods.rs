//! Pods on a real containerd: what they get, what their status is, and that nothing is left of
//! them.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod, ServiceAccount};
use reconcile::{Client, Clock, Ctx, Key, Object as _, Patch};
use runtime::{Remote, Runtime};
use serde_json::{Value, json};
use testkit::Containerd;
use tokio::sync::watch;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

struct KubeletTestCluster {
    client: Client,
    runtime: Remote,
    containerd: Containerd,
    /// Stops the server.
    _stop: watch::Sender<bool>,
    _server: apiserver::RunningServer,
    dir: tempfile::TempDir,
}

/// A running kubelet.
struct RunningKubelet {
    ctx: Ctx,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl RunningKubelet {
    async fn end(self) {
        self.stop.send_replace(true);
        self.task.await.expect("the kubelet stops on shutdown");
    }
}

/// Removes volumes and cgroups of pods that a test has not deleted; containerd removes the rest.
impl Drop for KubeletTestCluster {
    fn drop(&mut self) {
        testkit::cleanup_node(self.dir.path(), &self.path("pods"));
    }
}

impl KubeletTestCluster {
    async fn start() -> (KubeletTestCluster, RunningKubelet) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let containerd = Containerd::start(&dir.path().join("containerd")).expect("a containerd");
        let (stop, shutdown) = watch::channel(false);
        let server =
            apiserver::start_in_directory(&dir.path().join("server"), shutdown).await.expect("a server");
        let client = Client::new(server.local(), "kubelet");
        let runtime = Remote::new(&containerd.socket().display().to_string());
        let cluster = KubeletTestCluster { client, runtime, containerd, _stop: stop, _server: server, dir };
        let node = cluster.run_node();
        let ready = async || {
            let node: Node = cluster.client.get(&Key::new("", "here")).await.ok()?;
            let mut conditions = node.status?.conditions?.into_iter();
            conditions.find(|condition| condition.type_ == "Ready" && condition.status == "True")
        };
        cluster.until("the node is ready", ready).await;
        // Controllers create these in every namespace.
        let metadata = |name: &str| json!({"name": name, "namespace": "default"});
        let account = json!({"metadata": metadata("default")});
        let account: ServiceAccount = serde_json::from_value(account).expect("a service account");
        cluster.client.create(&account).await.expect("created");
        let roots = json!({"metadata": metadata("kube-root-ca.crt"), "data": {"ca.crt": "certificates"}});
        let roots: ConfigMap = serde_json::from_value(roots).expect("a config map");
        cluster.client.create(&roots).await.expect("created");
        (cluster, node)
    }

    fn run_node(&self) -> RunningKubelet {
        self.run_node_with(|_| {})
    }

    fn run_node_with(&self, change: impl FnOnce(&mut kubelet::KubeletConfig)) -> RunningKubelet {
        let mut kubelet_config = kubelet::KubeletConfig {
            // Independent of the free disk space on the test machine.
            hard_eviction: kubelet::EvictionThresholds::NONE,
            image_gc: kubelet::ImagePolicy { high_threshold_percent: 100, ..kubelet::ImagePolicy::default() },
            ..kubelet::KubeletConfig::default()
        };
        change(&mut kubelet_config);
        let (stop, shutdown) = watch::channel(false);
        let ctx = Ctx::new(self.client.clone(), Clock::default(), shutdown);
        let config = kubelet::Config {
            settings: kubelet::Settings {
                node_name: "here".into(),
                node_ip: tokio::sync::watch::channel(None).1,
                second_ip: None,
                pods: self.path("pods"),
                root: self.path("root"),
                logs: kubelet::PodLogs::within(self.path("logs")),
                cluster_domain: "cluster.local".into(),
                cluster_dns: vec!["10.43.0.10".into()],
                resolver: kubelet::ResolverConfig::from_path("/dev/null"),
                memory: 8 << 30,
                kubelet_config,
                shutdown: Vec::new(),
                is_shutdown_default: false,
                manifests: Some(self.path("manifests")),
                proxied: true,
            },
            presentation: kubelet::NodeRegistration { max_pods: 110, port: 10250, ..Default::default() },
            object_manager: None,
            api: None,
            host_shutdown: kubelet::HostShutdown::default(),
        };
        let task = tokio::spawn(kubelet::run(ctx.clone(), Arc::new(self.runtime.clone()), config));
        RunningKubelet { ctx, stop, task }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        let path = self.dir.path().join(name);
        std::fs::create_dir_all(&path).expect("a directory");
        path
    }

    async fn create(&self, name: &str, mut spec: Value) {
        spec["nodeName"] = json!("here");
        spec["terminationGracePeriodSeconds"] = json!(1);
        for list in ["initContainers", "containers"] {
            for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
                if container["image"].is_null() {
                    container["image"] = json!("busybox:1.36");
                }
            }
        }
        let value = json!({"metadata": {"name": name, "namespace": "default", "labels": {"app": name}}, "spec": spec});
        let pod: Pod = serde_json::from_value(value).expect("a pod");
        self.client.create(&pod).await.expect("created");
    }

    async fn get(&self, name: &str) -> Option<Pod> {
        self.client.get(&Key::new("default", name)).await.ok()
    }

    /// Waits until [`state`] of the pod is as expected, such as `Running main:running ready#0`.
    async fn wait_for_state(&self, name: &str, expected: &str) -> Pod {
        self.until(&format!("{name} is {expected}"), async || {
            let pod = self.get(name).await?;
            (state(&pod) == expected).then_some(pod)
        })
        .await
    }

    async fn until<T>(&self, what: &str, condition: impl AsyncFn() -> Option<T>) -> T {
        let waiting = async {
            loop {
                if let Some(found) = condition().await {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if let Ok(found) = tokio::time::timeout(TEST_TIMEOUT, waiting).await {
            return found;
        }
        let pods: Vec<Pod> = self.client.list("default").await.unwrap_or_default();
        let events: Vec<Event> = self.client.list("default").await.unwrap_or_default();
        let events: Vec<_> = events.into_iter().map(|event| (event.reason, event.message)).collect();
        let states: Vec<_> = pods.iter().map(|pod| format!("{}: {}", pod.name(), state(pod))).collect();
        panic!("timed out: {what}\n{states:?}\n{events:?}\n{}", self.containerd.log());
    }

    async fn exec(&self, pod: &Pod, container: &str, script: &str) -> String {
        let status = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
        let found =
            status.into_iter().flatten().find(|status| status.name == container).expect("a container");
        let id =
            found.container_id.as_deref().and_then(|id| id.strip_prefix("containerd://")).expect("an id");
        let command = ["sh", "-c", script].map(str::to_owned);
        let output = self.runtime.exec_sync(id, &command, Duration::from_secs(10)).await.expect("an answer");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).trim_end().to_owned()
    }
}

fn state(pod: &Pod) -> String {
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let states = containers.iter().map(|container| {
        let state = container.state.clone().unwrap_or_default();
        let description = match (state.running, state.waiting, state.terminated) {
            (Some(_), ..) if container.ready => "running ready".to_owned(),
            (Some(_), ..) => "running".to_owned(),
            (_, Some(waiting), _) => waiting.reason.unwrap_or_default(),
            (_, _, Some(end)) => format!("exit {}", end.exit_code),
            _ => "?".to_owned(),
        };
        format!("{}:{description}#{}", container.name, container.restart_count)
    });
    let states: Vec<String> = states.collect();
    format!("{} {}", status.phase.unwrap_or_default(), states.join(" "))
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_run_and_are_removed_without_a_trace() {
    let (cluster, node) = KubeletTestCluster::start().await;
    let settings: ConfigMap = serde_json::from_value(
        json!({"metadata": {"name": "settings", "namespace": "default"}, "data": {"color": "blue"}}),
    )
    .expect("a config map");
    cluster.client.create(&settings).await.expect("created");

    // A pod gets its environment, volumes, host name and token.
    cluster
        .create(
            "web",
            json!({
                "containers": [{
                    "name": "main",
                    "env": [
                        {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}}
                    ],
                    "volumeMounts": [{"name": "settings", "mountPath": "/settings"}, {"name": "room", "mountPath": "/room"}]
                }],
                "volumes": [{"name": "settings", "configMap": {"name": "settings"}}, {"name": "room", "emptyDir": {}}]
            }),
        )
        .await;
    let web = cluster.wait_for_state("web", "Running main:running ready#0").await;
    assert_eq!(
        cluster.exec(&web, "main", "echo $WHO $COLOR $(hostname) $(cat /settings/color)").await,
        "web blue web blue"
    );
    assert_eq!(
        cluster.exec(&web, "main", "ls /var/run/secrets/kubernetes.io/serviceaccount").await,
        "ca.crt\nnamespace\ntoken"
    );
    assert_eq!(cluster.exec(&web, "main", "grep -c web /etc/hosts; touch /room/x && ls /room").await, "1\nx");
    // If a pod could replace this symlink, the kubelet would follow it on the host.
    for change in [
        "touch /settings/x",
        "ln -sfn /etc /settings/..data",
        "touch /var/run/secrets/kubernetes.io/serviceaccount/x",
    ] {
        let command = format!("{change} 2>/dev/null || echo refused");
        assert_eq!(cluster.exec(&web, "main", &command).await, "refused", "{change}");
    }
    let change = Patch::Merge(json!({"data": {"color": "red"}}));
    cluster.client.patch::<ConfigMap>(&Key::new("default", "settings"), &change).await.expect("changed");
    cluster
        .until("the volume changes", async || {
            (cluster.exec(&web, "main", "cat /settings/color").await == "red").then_some(())
        })
        .await;

    // Containers that exit are restarted or not.
    let script = |text: &str| json!([{"name": "main", "command": ["sh", "-c", text]}]);
    cluster.create("crash", json!({"containers": script("exit 1")})).await;
    cluster
        .create("once", json!({"restartPolicy": "Never", "containers": script("echo done; exit 2")}))
        .await;
    cluster.wait_for_state("once", "Failed main:exit 2#0").await;
    cluster.wait_for_state("crash", "Running main:exit 1#1").await;
    // containerd reports an exit before it has written the last output.
    let path = log_of(&cluster, "once").await;
    let has_last_line = |log: &String| log.trim_end().ends_with("stdout F done");
    cluster
        .until("the last output", async || std::fs::read_to_string(&path).ok().filter(has_last_line))
        .await;

    // With a failure threshold of one, the startup probe has to succeed within its period. The
    // other two probes follow.
    let probe = |script: &str| json!({"exec": {"command": ["sh", "-c", script]}, "periodSeconds": 3, "failureThreshold": 1});
    let alive = probe("echo >> /tmp/probes; cat /tmp/started");
    let late = json!([{
        "name": "main", "command": ["sh", "-c", "sleep 0.2; touch /tmp/started; sleep 1000"],
        "startupProbe": alive, "livenessProbe": alive, "readinessProbe": probe("[ $(wc -l < /tmp/probes) -ge 3 ]"),
    }]);
    cluster.create("late", json!({"containers": late})).await;
    cluster.wait_for_state("late", "Running main:running ready#0").await;

    // Pods that cannot run report why.
    cluster.create("lost", json!({"containers": [{"name": "main", "env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "none", "key": "x"}}}]}]})).await;
    let lost = cluster.wait_for_state("lost", "Pending main:CreateContainerConfigError#0").await;
    let waiting =
        lost.status.and_then(|status| status.container_statuses?[0].state.clone()?.waiting?.message);
    assert_eq!(waiting.as_deref(), Some("secret \"none\" not found"));

    // A restarted kubelet finds its containers.
    let before =
        cluster.get("web").await.and_then(|pod| pod.status?.container_statuses?[0].container_id.clone());
    node.end().await;
    let node = cluster.run_node();
    let again = cluster.wait_for_state("web", "Running main:running ready#0").await;
    assert_eq!(again.status.and_then(|status| status.container_statuses?[0].container_id.clone()), before);

    let pods = cluster.client.list::<Pod>("default").await.expect("pods");
    let uids: Vec<String> = pods.iter().map(|pod| pod.uid().to_owned()).collect();
    for name in ["web", "crash", "once", "late", "lost"] {
        cluster
            .client
            .delete::<Pod>(&Key::new("default", name), &reconcile::DeleteOptions::default())
            .await
            .expect("deleted");
    }
    cluster
        .until("all pods are gone", async || {
            cluster.client.list::<Pod>("default").await.ok().filter(Vec::is_empty)
        })
        .await;
    // Terminated pods are removed from the API before they are removed from the node.
    let nothing = async || {
        let containers = cluster.runtime.containers(&[]).await.expect("containers");
        let sandboxes = cluster.runtime.sandboxes(&[]).await.expect("sandboxes");
        let files = !is_empty(&cluster.path("pods")) || !is_empty(&cluster.path("logs"));
        let cgroups = uids.iter().flat_map(|uid| testkit::cgroups_of_pod(uid)).count();
        (containers.is_empty() && sandboxes.is_empty() && !files && cgroups == 0).then_some(())
    };
    cluster.until("nothing is left", nothing).await;
    node.end().await;
}

/// Clients have to know when a terminating pod stops to answer requests.
#[tokio::test(flavor = "multi_thread")]
async fn readiness_probes_go_on_while_a_pod_is_terminating() {
    let (cluster, node) = KubeletTestCluster::start().await;
    let script = "trap 'rm /tmp/ready' TERM; touch /tmp/ready; until [ -e /tmp/end ]; do sleep 0.05; done";
    let exec =
        |command: [&str; 2]| json!({"exec": {"command": command}, "periodSeconds": 1, "failureThreshold": 1});
    let main = json!({
        "name": "main", "command": ["sh", "-c", script], "readinessProbe": exec(["cat", "/tmp/ready"]),
        "livenessProbe": exec(["touch", "/tmp/alive"]),
    });
    cluster.create("web", json!({"containers": [main]})).await;
    let web = cluster.wait_for_state("web", "Running main:running ready#0").await;
    let delete = reconcile::DeleteOptions { grace_seconds: Some(600), ..reconcile::DeleteOptions::default() };
    cluster.client.delete::<Pod>(&Key::new("default", "web"), &delete).await.expect("deleted");
    let unready = cluster.wait_for_state("web", "Running main:running#0").await;
    assert!(unready.is_deleting());
    let conditions = unready.status.and_then(|status| status.conditions).unwrap_or_default();
    let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready").expect("a condition");
    assert_eq!((ready.status.as_str(), ready.reason.as_deref()), ("False", Some("ContainersNotReady")));
    cluster.exec(&web, "main", "touch /tmp/ready").await;
    cluster.wait_for_state("web", "Running main:running ready#0").await;
    cluster.exec(&web, "main", "touch /tmp/end").await;
    cluster.until("the pod is removed", async || cluster.get("web").await.is_none().then_some(())).await;
    node.end().await;
}

/// The resources in the status come from the runtime.
#[tokio::test(flavor = "multi_thread")]
async fn pods_are_resized() {
    let (cluster, node) = KubeletTestCluster::start().await;
    let both = |cpu: &str, memory: &str| {
        let values = json!({"cpu": cpu, "memory": memory});
        json!({"limits": values, "requests": values})
    };
    let main = json!({"name": "main", "resources": both("100m", "64Mi")});
    cluster.create("web", json!({"containers": [main]})).await;
    cluster.wait_for_state("web", "Running main:running ready#0").await;
    let resize_to = async |desired: Value, actual: Value, error: &str| {
        let change = json!({"spec": {"containers": [{"name": "main", "resources": desired}]}});
        let path = "/api/v1/namespaces/default/pods/web/resize";
        cluster.client.patch_at::<Pod>(path, &Patch::Strategic(change)).await.expect("patched");
        let check_resized = async || {
            let status = json!(cluster.get("web").await?.status?);
            let container = &status["containerStatuses"][0];
            let conditions = status["conditions"].as_array().expect("conditions").iter();
            let in_progress: Vec<&Value> =
                conditions.filter(|one| one["type"].as_str() == Some("PodResizeInProgress")).collect();
            let is_reported = match in_progress[..] {
                [] => error.is_empty(),
                [in_progress] => {
                    !error.is_empty()
                        && in_progress["message"].as_str().is_some_and(|message| message.contains(error))
                }
                _ => false,
            };
            let has_resources = container["resources"] == actual && container["restartCount"] == 0;
            (has_resources && container["allocatedResources"] == desired["requests"] && is_reported)
                .then_some(())
        };
        cluster.until(&format!("it has {actual} {error}"), check_resized).await;
    };
    resize_to(both("200m", "96Mi"), both("200m", "96Mi"), "").await;
    resize_to(both("50m", "48Mi"), both("50m", "48Mi"), "").await;
    let error = "attempting to set container \"main\" memory limit (8192) below current usage (";
    resize_to(both("50m", "8Ki"), both("50m", "48Mi"), error).await;
    resize_to(both("60m", "32Mi"), both("60m", "32Mi"), "").await;
    node.end().await;

    // Without `cpuCFSQuota`, no cgroup has a CPU quota.
    let quotas = async |name: &str| {
        let pod = cluster.get(name).await.expect("a pod");
        let mut quotas = Vec::new();
        for group in testkit::cgroups_of_pod(pod.uid()) {
            let inside = std::fs::read_dir(&group).expect("a group").flatten().map(|entry| entry.path());
            for place in inside.filter(|path| path.is_dir()).chain([group.clone()]) {
                let quota =
                    ["cpu.cfs_quota_us", "cpu.max"].map(|file| std::fs::read_to_string(place.join(file)));
                quotas.extend(
                    quota
                        .into_iter()
                        .flatten()
                        .map(|text| !text.starts_with("-1") && !text.starts_with("max")),
                );
            }
        }
        quotas
    };
    let limited = quotas("web").await;
    assert!(limited.contains(&true), "{limited:?}");
    let node = cluster.run_node_with(|kubelet_config| kubelet_config.cpu_cfs_quota = false);
    let main = json!({"name": "main", "resources": both("100m", "64Mi")});
    cluster.create("free", json!({"containers": [main]})).await;
    cluster.wait_for_state("free", "Running main:running ready#0").await;
    let free = quotas("free").await;
    assert!(free.len() == limited.len() && !free.contains(&true), "{free:?}");
    node.end().await;
}

/// A terminated pod keeps its files, but no disk that another node may be waiting for.
#[tokio::test(flavor = "multi_thread")]
async fn disks_of_finished_pod_are_released() {
    const NAME: &str = "kubernetes.io/iscsi/192.0.2.1:iqn.2026-01.example:disk:0";
    let (cluster, node) = KubeletTestCluster::start().await;
    let script = "echo started; until [ -e /room/end ]; do sleep 0.1; done";
    let main = json!({
        "name": "main", "command": ["sh", "-c", script],
        "volumeMounts": [
            {"name": "room", "mountPath": "/room"}, {"name": "room", "mountPath": "/part", "subPath": "part"},
        ],
    });
    let volumes = json!([{"name": "room", "emptyDir": {}}]);
    cluster.create("once", json!({"restartPolicy": "Never", "containers": [main], "volumes": volumes})).await;
    let pod = cluster.wait_for_state("once", "Running main:running ready#0").await;
    node.end().await;
    // As left behind by a kubelet that had a disk for the pod.
    let disk = cluster.path("root/plugins/kubernetes.io/iscsi/iface-default/disk");
    let record = json!({
        "portals": ["192.0.2.1:3260"], "iqn": "iqn.2026-01.example:disk", "lun": 0, "iface": "default", "givenAs": NAME,
    });
    std::fs::create_dir(disk.join("users")).expect("made");
    std::fs::write(disk.join("users").join(pod.uid()), "").expect("written");
    std::fs::write(disk.join("iscsi.json"), record.to_string()).expect("written");
    let node = cluster.run_node();
    let versions: Arc<Mutex<Vec<Weak<Pod>>>> = Arc::default();
    let seen = versions.clone();
    node.ctx.caches.pods().listen(move |changed| {
        seen.lock().expect("not poisoned").extend(changed.after.map(Arc::downgrade));
    });
    let used = async || {
        let node: Option<Node> = cluster.client.get(&Key::new("", "here")).await.ok();
        node.and_then(|node| node.status?.volumes_in_use).unwrap_or_default()
    };
    cluster.until("the disk is in use", async || (used().await == [NAME]).then_some(())).await;
    let volume_dir = cluster.path("pods").join(pod.uid()).join("volumes/kubernetes.io~empty-dir/room");
    let subpath_dir = cluster.path("pods").join(pod.uid()).join("volume-subpaths/room/main/1");
    std::fs::write(volume_dir.join("part/note"), "").expect("written");
    assert!(subpath_dir.join("note").exists(), "a part of a volume is mounted");
    std::fs::write(volume_dir.join("end"), "").expect("written");
    cluster.wait_for_state("once", "Succeeded main:exit 0#0").await;
    cluster.until("the disk is released", async || used().await.is_empty().then_some(())).await;
    assert!(!disk.exists() && volume_dir.join("end").exists());
    assert!(
        subpath_dir.is_dir() && !subpath_dir.join("note").exists(),
        "a part of a volume is still mounted"
    );
    let log = log_of(&cluster, "once").await;
    assert!(std::fs::read_to_string(&log).expect("a log").contains("started"));
    let key = Key::new("default", "once");
    cluster.client.delete::<Pod>(&key, &reconcile::DeleteOptions::default()).await.expect("a deletion");
    let dir = cluster.path("pods").join(pod.uid());
    cluster.until("nothing is left", async || (!dir.exists()).then_some(())).await;
    let is_referenced =
        || versions.lock().expect("not poisoned").iter().any(|version| version.strong_count() > 0);
    cluster.until("no reference to the pod is left", async || (!is_referenced()).then_some(())).await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn environment_is_read_from_files() {
    let (cluster, node) = KubeletTestCluster::start().await;
    let pod = |written: &str, path: &str, key: &str, optional: bool| {
        let from = json!({"volumeName": "room", "path": path, "key": key, "optional": optional});
        let mounts = json!([{"name": "room", "mountPath": "/room"}]);
        json!({
            "initContainers": [{"name": "before", "command": ["sh", "-c", written], "volumeMounts": mounts}],
            // The volume need not be mounted where its file is used.
            "containers": [{"name": "main", "env": [{"name": "X", "valueFrom": {"fileKeyRef": from}}]}],
            "volumes": [{"name": "room", "emptyDir": {}}]
        })
    };
    const WRITE: &str = r##"mkdir /room/a; printf "# made\nA='1'\nB='two\nlines' # b\n" > /room/a/env"##;
    cluster.create("set", pod(WRITE, "a/env", "B", false)).await;
    cluster.create("unset", pod(WRITE, "a/env", "C", true)).await;
    for (name, expected) in [("set", "[two\nlines]"), ("unset", "[]")] {
        let pod = cluster.wait_for_state(name, "Running main:running ready#0").await;
        assert_eq!(cluster.exec(&pod, "main", "echo \"[$X]\"").await, expected);
    }
    let volume = |name: &str| format!("/{name}/volumes/kubernetes.io~empty-dir/room");
    for (name, spec, expected) in [
        ("keyless", pod(WRITE, "a/env", "C", false), "environment variable key \"C\" not found in file \""),
        ("fileless", pod(WRITE, "none", "A", true), "couldn't parse env file"),
        // A symlink in the volume must not lead to a file of the host.
        ("thief", pod("ln -s /etc/os-release /room/env", "env", "ID", false), "couldn't parse env file"),
        ("unquoted", pod("echo A=1 > /room/env", "env", "A", true), "couldn't parse env file"),
    ] {
        cluster.create(name, spec).await;
        let pod = cluster.wait_for_state(name, "Pending main:CreateContainerConfigError#0").await;
        let uid = pod.uid().to_owned();
        let waiting = pod.status.and_then(|status| status.container_statuses?[0].state.clone()?.waiting);
        let message = waiting.and_then(|waiting| waiting.message).unwrap_or_default();
        let place = format!("{}/a/env\"", volume(&uid));
        let is_expected = match expected.ends_with('"') {
            true => message.starts_with(expected) && message.ends_with(&place),
            false => message == expected,
        };
        assert!(is_expected, "{name}: {message}");
    }
    node.end().await;
}

/// A registry with the image `app:1` and the password `secret`. It responds once it is open.
fn registry(dir: &Path, network: &Path, is_open: watch::Receiver<bool>) -> String {
    let run = |words: &[&str]| {
        let done = std::process::Command::new(words[0]).args(&words[1..]).current_dir(dir).output();
        String::from_utf8_lossy(&done.expect("a tool of every system").stdout).into_owned()
    };
    run(&["install", "-D", "/bin/busybox", "root/bin/busybox"]);
    run(&["ln", "-s", "busybox", "root/bin/sh"]);
    run(&["tar", "cf", "layer", "-C", "root", "bin"]);
    let digest = |name: &str| format!("sha256:{}", run(&["sha256sum", name]).split(' ').next().expect("one"));
    let size = |name: &str| std::fs::metadata(dir.join(name)).expect("a file").len();
    let config = json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": {"Cmd": ["sh", "-c", "trap exit TERM; while :; do /bin/busybox sleep 1; done"]},
        "rootfs": {"type": "layers", "diff_ids": [digest("layer")]}
    });
    std::fs::write(dir.join("config"), config.to_string()).expect("written");
    let kind = |name: &str| format!("application/vnd.oci.image.{name}");
    let descriptor =
        |name: &str, of: &str| json!({"mediaType": kind(of), "digest": digest(name), "size": size(name)});
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": kind("manifest.v1+json"),
        "config": descriptor("config", "config.v1+json"),
        "layers": [descriptor("layer", "layer.v1.tar")]
    });
    std::fs::write(dir.join("manifest"), manifest.to_string()).expect("written");
    let files: Vec<(String, Vec<u8>)> = ["manifest", "config", "layer"]
        .map(|name| (digest(name), std::fs::read(dir.join(name)).expect("read")))
        .into();
    // containerd runs in a network namespace of its own.
    let network = std::fs::File::open(network).expect("a network");
    let bound = std::thread::spawn(move || {
        rustix::thread::move_into_link_name_space(network.as_fd(), None).expect("entered");
        std::net::TcpListener::bind("127.0.0.1:0").expect("a port")
    });
    let listener = bound.join().expect("a listener");
    listener.set_nonblocking(true).expect("set");
    let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
    let host = listener.local_addr().expect("an address").to_string();
    tokio::spawn(async move {
        let files = Arc::new(files);
        while let Ok((stream, _)) = listener.accept().await {
            let (files, mut is_open) = (files.clone(), is_open.clone());
            tokio::spawn(async move {
                is_open.wait_for(|open| *open).await.expect("the registry is opened before the test ends");
                serve_image(stream, &files).await;
            });
        }
    });
    host
}

/// Responds to one request for one of these files, the first of which is the manifest.
async fn serve_image(mut stream: tokio::net::TcpStream, files: &[(String, Vec<u8>)]) {
    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _};
    let mut head = String::new();
    let mut lines = tokio::io::BufReader::new(&mut stream);
    while lines.read_line(&mut head).await.is_ok_and(|read| read > 2) {}
    let path = head.split(' ').nth(1).unwrap_or_default().replace("manifests/1", &files[0].0);
    let found = files.iter().find(|(digest, _)| path.ends_with(digest));
    let (status, more, body) = match found {
        _ if !head.to_lowercase().contains("authorization: basic bwu6c2vjcmv0") => {
            ("401 Unauthorized", "www-authenticate: Basic realm=\"test\"".to_owned(), &[][..])
        }
        Some((digest, body)) => {
            let kind = "application/vnd.oci.image.manifest.v1+json";
            ("200 OK", format!("docker-content-digest: {digest}\r\ncontent-type: {kind}"), &body[..])
        }
        None => ("404 Not Found", "x-none: 1".to_owned(), &[][..]),
    };
    let length = body.len();
    let head_only = head.starts_with("HEAD");
    let head =
        format!("HTTP/1.1 {status}\r\n{more}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
    let _ = stream.write_all(head.as_bytes()).await;
    if !head_only {
        let _ = stream.write_all(body).await;
    }
    let _ = stream.shutdown().await;
}

impl KubeletTestCluster {
    /// Creates an image pull secret.
    async fn add_pull_secret(&self, name: &str, host: &str, password: &str) {
        let docker_config = json!({"auths": {host: {"username": "me", "password": password}}}).to_string();
        let secret = json!({
            "metadata": {"name": name, "namespace": "default"},
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": docker_config}
        });
        let secret: k8s_openapi::api::core::v1::Secret = serde_json::from_value(secret).expect("a secret");
        self.client.create(&secret).await.expect("created");
    }
}

/// A registry that does not respond must not delay the termination, the probes and the status of
/// pods.
#[tokio::test(flavor = "multi_thread")]
async fn image_pull_blocks_only_its_container() {
    let (cluster, node) = KubeletTestCluster::start().await;
    let (open, is_open) = watch::channel(false);
    let host = registry(&cluster.path("registry"), &cluster.containerd.network(), is_open);
    cluster.add_pull_secret("own", &host, "secret").await;
    let slow = json!({"name": "slow", "image": format!("{host}/app:1")});
    let script = "until [ -e /end ]; do sleep 0.1; done; exit 1";
    let fast = json!({"name": "quick", "command": ["sh", "-c", script]});
    let pod = |first: &Value, second: &Value| json!({"containers": [first, second], "imagePullSecrets": [{"name": "own"}]});
    cluster.create("goes", pod(&fast, &slow)).await;
    cluster.create("stays", pod(&fast, &slow)).await;
    const PULLS: &str = "Pending quick:running ready#0 slow:ContainerCreating#0";
    cluster.wait_for_state("goes", PULLS).await;
    let stays = cluster.wait_for_state("stays", PULLS).await;
    let deleted_key = Key::new("default", "goes");
    cluster.client.delete::<Pod>(&deleted_key, &reconcile::DeleteOptions::default()).await.expect("deleted");
    cluster.until("the pod is removed", async || cluster.get("goes").await.is_none().then_some(())).await;
    // Another container of the waiting pod exits and restarts.
    cluster.exec(&stays, "quick", "touch /end").await;
    cluster.wait_for_state("stays", "Pending quick:running ready#1 slow:ContainerCreating#0").await;
    let events: Vec<Event> = cluster.client.list("default").await.expect("events");
    let pulling = events.iter().filter(|event| event.reason.as_deref() == Some("Pulling"));
    assert_eq!(pulling.map(|event| event.count).collect::<Vec<_>>(), [Some(1), Some(1)]);
    open.send_replace(true);
    cluster.wait_for_state("stays", "Running quick:running ready#1 slow:running ready#0").await;
    node.end().await;
}

/// A present image is only available to pods that could have pulled it, also after a restart of the
/// kubelet.
#[tokio::test(flavor = "multi_thread")]
async fn present_images_require_pull_credentials() {
    let (cluster, node) = KubeletTestCluster::start().await;
    let (_open, is_open) = watch::channel(true);
    let host = registry(&cluster.path("registry"), &cluster.containerd.network(), is_open);
    for (name, password) in [("own", "secret"), ("twin", "secret"), ("wrong", "guess")] {
        cluster.add_pull_secret(name, &host, password).await;
    }
    let pod = |secret: &str, policy: &str| {
        let image = format!("{host}/app:1");
        let container = json!({"name": "main", "image": image, "imagePullPolicy": policy});
        json!({"containers": [container], "imagePullSecrets": [{"name": secret}]})
    };
    const RUNS: &str = "Running main:running ready#0";
    const NEVER: &str = "Pending main:ErrImageNeverPull#0";
    cluster.create("early", pod("own", "Never")).await;
    cluster.wait_for_state("early", NEVER).await;
    cluster.create("owner", pod("own", "IfNotPresent")).await;
    cluster.wait_for_state("owner", RUNS).await;
    cluster.create("without-secret", pod("none", "Never")).await;
    let without_secret = cluster.wait_for_state("without-secret", NEVER).await;
    let waiting =
        without_secret.status.and_then(|status| status.container_statuses?[0].state.clone()?.waiting);
    let expected = format!("Container image \"{host}/app:1\" is not present with pull policy of Never");
    assert_eq!(waiting.and_then(|waiting| waiting.message), Some(expected));
    cluster.create("guest", pod("wrong", "IfNotPresent")).await;
    cluster
        .until("the pull is rejected", async || {
            let state_text = state(&cluster.get("guest").await?);
            (state_text.contains("ErrImagePull") || state_text.contains("ImagePullBackOff")).then_some(())
        })
        .await;
    node.end().await;
    let node = cluster.run_node();
    cluster.create("friend", pod("twin", "Never")).await;
    cluster.wait_for_state("friend", RUNS).await;
    cluster.create("again", pod("own", "Never")).await;
    cluster.wait_for_state("again", RUNS).await;
    cluster.create("stranger", pod("none", "Never")).await;
    cluster.wait_for_state("stranger", NEVER).await;
    node.end().await;
    // A credential provider has credentials for one service account.
    let plugin_dir = cluster.path("programs");
    std::os::unix::fs::symlink("/bin/sh", plugin_dir.join("sh")).expect("a shell");
    let version = "credentialprovider.kubelet.k8s.io/v1";
    let answer = json!({
        "kind": "CredentialProviderResponse", "apiVersion": version, "cacheKeyType": "Registry",
        "auth": {&host: {"username": "me", "password": "secret"}},
    });
    let script = format!("grep -q serviceAccountToken && cat <<END\n{answer}\nEND");
    let attributes = json!({
        "serviceAccountTokenAudience": "registry", "requireServiceAccount": true, "cacheType": "ServiceAccount",
        "requiredServiceAccountAnnotationKeys": ["example.com/pulls"],
    });
    let provider = json!({
        "name": "sh", "apiVersion": version, "matchImages": [&host], "defaultCacheDuration": "1m",
        "args": ["-c", script], "tokenAttributes": attributes,
    });
    let annotated = json!({"metadata": {"annotations": {"example.com/pulls": "app"}}});
    let account = Key::new("default", "default");
    cluster.client.patch::<ServiceAccount>(&account, &Patch::Merge(annotated)).await.expect("annotated");
    let other = json!({"metadata": {"name": "other", "namespace": "default"}});
    let other: ServiceAccount = serde_json::from_value(other).expect("a service account");
    cluster.client.create(&other).await.expect("created");
    let credentials = kubelet::CredentialProviders { plugin_dir, providers: vec![provider] };
    let node = cluster.run_node_with(|kubelet_config| kubelet_config.credentials = credentials);
    cluster.create("helped", pod("none", "IfNotPresent")).await;
    cluster.wait_for_state("helped", RUNS).await;
    cluster.create("known", pod("none", "Never")).await;
    cluster.wait_for_state("known", RUNS).await;
    let mut unknown = pod("none", "Never");
    unknown["serviceAccountName"] = json!("other");
    cluster.create("unknown", unknown).await;
    cluster.wait_for_state("unknown", NEVER).await;
    node.end().await;
}

async fn log_of(cluster: &KubeletTestCluster, name: &str) -> std::path::PathBuf {
    let pod = cluster.get(name).await.expect("the pod");
    cluster.path("logs").join(format!("default_{name}_{}", pod.uid())).join("main/0.log")
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).expect("a directory").next().is_none()
}
