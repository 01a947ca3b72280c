//! Tests with a fake device plugin in this process.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

const RESOURCE: &str = "example.com/gpu";
const DEADLINE: Duration = Duration::from_secs(60);

/// A device plugin that runs until it is dropped.
struct FakePlugin {
    task: tokio::task::JoinHandle<()>,
    responses: tokio::sync::mpsc::Sender<Vec<u8>>,
    calls: Arc<Mutex<Vec<String>>>,
}

impl Drop for FakePlugin {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakePlugin {
    fn start(dir: &Path) -> FakePlugin {
        let listener = runtime::embedded::listen(&dir.join("gpu.sock")).expect("a socket");
        let (responses, receiver) = tokio::sync::mpsc::channel(8);
        let receiver = Mutex::new(Some(receiver));
        let calls: Arc<Mutex<Vec<String>>> = Arc::default();
        let call_log = calls.clone();
        let answer = move |call: &str, question: &[u8]| {
            let decode = |error: prost::DecodeError| error.to_string();
            match call.rsplit('/').next().unwrap_or_default() {
                "ListAndWatch" => {
                    Ok(GrpcReply::Many(receiver.lock().take().ok_or("ListAndWatch called twice")?))
                }
                "GetPreferredAllocation" => {
                    let request = PreferredAllocationRequest::decode(question).map_err(decode)?;
                    let preference_request = &request.containers[0];
                    let last = preference_request
                        .available
                        .iter()
                        .rev()
                        .take(usize::try_from(preference_request.size).unwrap_or(0));
                    let ids = if preference_request.must_include.is_empty() {
                        last.cloned().collect()
                    } else {
                        preference_request.must_include.clone()
                    };
                    Ok(GrpcReply::One(
                        PreferredAllocationResponse { containers: vec![DeviceIds { ids }] }.encode_to_vec(),
                    ))
                }
                "Allocate" => {
                    let ids = AllocateRequest::decode(question).map_err(decode)?.containers[0].ids.clone();
                    call_log.lock().push(format!("allocate {}", ids.join(" ")));
                    let device = runtime::cri::Device {
                        container_path: "/dev/gpu".into(),
                        host_path: "/dev/null".into(),
                        permissions: "rw".into(),
                    };
                    let answer = ContainerAllocateResponse {
                        envs: [("GPU".to_owned(), ids.join(","))].into(),
                        mounts: vec![messages::Mount {
                            container_path: "/lib/gpu".into(),
                            host_path: "/lib".into(),
                            read_only: true,
                        }],
                        devices: vec![device],
                        annotations: [("gpu".to_owned(), "yes".to_owned())].into(),
                        cdi_devices: Vec::new(),
                    };
                    Ok(GrpcReply::One(AllocateResponse { containers: vec![answer] }.encode_to_vec()))
                }
                "PreStartContainer" => {
                    let ids = DeviceIds::decode(question).map_err(decode)?.ids;
                    call_log.lock().push(format!("start {}", ids.join(" ")));
                    Ok(GrpcReply::One(Vec::new()))
                }
                other => Err(format!("unexpected call {other}")),
            }
        };
        let task = tokio::spawn(async move { runtime::embedded::serve_with(listener, answer).await });
        FakePlugin { task, responses, calls }
    }

    async fn send_devices(&self, devices: &[(&str, &str)]) {
        let device =
            |(id, health): &(&str, &str)| Device { id: (*id).to_owned(), health: (*health).to_owned() };
        let response = ListAndWatchResponse { devices: devices.iter().map(device).collect() };
        self.responses.send(response.encode_to_vec()).await.expect("the receiver is open");
    }

    #[track_caller]
    fn check_calls(&self, expected: &[&str]) {
        assert_eq!(std::mem::take(&mut *self.calls.lock()), expected);
    }
}

async fn wait_for_counts(devices: &Devices, expected: (usize, usize)) {
    let seen = async {
        while devices.device_counts().get(RESOURCE) != Some(&expected) {
            devices.devices_changed.notified().await;
        }
    };
    tokio::time::timeout(DEADLINE, seen).await.unwrap_or_else(|_| panic!("{:?}", devices.device_counts()));
}

async fn register(devices: &Devices, change: impl FnOnce(&mut RegisterRequest)) -> Result<(), String> {
    let mut request = RegisterRequest {
        version: API_VERSION.into(),
        endpoint: "gpu.sock".into(),
        resource_name: RESOURCE.into(),
        options: Some(DevicePluginOptions { pre_start_required: true, has_preferences: true }),
    };
    change(&mut request);
    let socket = GrpcClient::new(&devices.dir.join(KUBELET_SOCKET).display().to_string());
    let response: Result<Empty, _> =
        socket.call("/v1beta1.Registration/Register", &request, CALL_TIMEOUT).await;
    response.map(drop).map_err(|refusal| refusal.message)
}

/// A pod whose init and regular containers request these numbers of devices.
fn pod(uid: &str, first: &[i32], then: &[i32]) -> Pod {
    let container = |kind: &str, at: usize, count: &i32| json!({"name": format!("{kind}{at}"), "resources": {"limits": {RESOURCE: count.to_string(), "cpu": "1"}}});
    let list = |kind: &str, counts: &[i32]| {
        counts.iter().enumerate().map(|(at, count)| container(kind, at, count)).collect::<Vec<_>>()
    };
    let spec = json!({"initContainers": list("first", first), "containers": list("c", then)});
    serde_json::from_value(json!({"metadata": {"name": uid, "uid": uid}, "spec": spec})).expect("a pod")
}

#[tokio::test]
async fn devices_are_allocated_to_pods_and_reused_after_init_containers() {
    let dir = tempfile::tempdir().expect("a directory");
    let devices = Devices::new(dir.path(), &dir.path().join("pods"));
    let serving = devices.clone();
    let serving = tokio::spawn(async move { serving.run().await });
    let registered = async {
        while register(&devices, |request| request.version = "v1".into()).await.is_ok_and(|()| true)
            || !devices.dir.join(KUBELET_SOCKET).exists()
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, registered).await.expect("it listens");
    let check = async |change: fn(&mut RegisterRequest), expected: &str| {
        assert_eq!(register(&devices, change).await, Err(expected.to_owned()));
    };
    check(
        |request| request.version = "v1".into(),
        "requested API version \"v1\" is not supported by kubelet. Supported version is [\"v1beta1\"]",
    )
    .await;
    check(|request| request.resource_name = "gpu".into(), "the ResourceName \"gpu\" is invalid").await;
    check(
        |request| request.endpoint = "../x".into(),
        "invalid endpoint \"../x\": must be the file name of a socket",
    )
    .await;

    let plugin = FakePlugin::start(&devices.dir);
    register(&devices, |_| {}).await.expect("introduced");
    plugin.send_devices(&[("a", "Healthy"), ("b", "Healthy"), ("c", "Healthy"), ("d", "Unhealthy")]).await;
    wait_for_counts(&devices, (4, 3)).await;

    let over = AtomicBool::new(false);
    let is_over = |uid: &str| uid == "one" && over.load(Ordering::Relaxed);
    // The device of the init container is reused. A repeated allocation does not call the plugin.
    let one = pod("one", &[1], &[1, 1]);
    devices.allocate(&one, is_over).await.expect("lent");
    plugin.check_calls(&["allocate c", "allocate c", "allocate b"]);
    devices.allocate(&one, is_over).await.expect("lent");
    plugin.check_calls(&[]);
    let two = pod("two", &[], &[2]);
    let result = devices.allocate(&two, is_over).await;
    let expected = "requested number of devices unavailable for example.com/gpu. Requested: 2, Available: 1";
    assert_eq!(result, Err(expected.to_owned()));
    over.store(true, Ordering::Relaxed);
    devices.allocate(&two, is_over).await.expect("lent");
    plugin.check_calls(&["allocate b c"]);

    let mut config = ContainerConfig {
        envs: vec![KeyValue { key: "OWN".into(), value: "1".into() }],
        ..ContainerConfig::default()
    };
    devices.configure_container("two", "c0", &mut config).await.expect("handed over");
    plugin.check_calls(&["start b c"]);
    let envs: Vec<String> = config.envs.iter().map(|env| format!("{}={}", env.key, env.value)).collect();
    assert_eq!(envs, ["GPU=b,c", "OWN=1"]);
    assert_eq!(config.devices[0].container_path, "/dev/gpu");
    assert!(config.mounts[0].readonly && config.mounts[0].host_path == "/lib");
    assert_eq!(config.annotations["gpu"], "yes");

    // After a restart the allocations are known before the plugin registers again.
    let after = Devices::new(dir.path(), &dir.path().join("pods"));
    let mut config = ContainerConfig::default();
    after.configure_container("two", "c0", &mut config).await.expect("handed over");
    assert_eq!(config.envs.len(), 1);

    plugin.send_devices(&[("a", "Unhealthy")]).await;
    wait_for_counts(&devices, (1, 0)).await;
    let result = devices.allocate(&pod("three", &[], &[1]), is_over).await;
    let expected = "no healthy devices present; cannot allocate unhealthy devices example.com/gpu";
    assert_eq!(result, Err(expected.to_owned()));
    plugin.send_devices(&[("a", "Healthy"), ("b", "Healthy")]).await;
    wait_for_counts(&devices, (2, 2)).await;
    drop(plugin);
    serving.abort();
}
