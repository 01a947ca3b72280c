//! Calls of other CRI clients over the socket.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use runtime::cri::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic_prost::ProstCodec;

use crate::kit::{TestNode, script};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

pub struct CriClient(tonic::client::Grpc<Channel>);

impl CriClient {
    pub fn connect(node: &TestNode) -> CriClient {
        let path = node.socket();
        let connect = move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        };
        let endpoint = Endpoint::from_static("http://localhost");
        CriClient(tonic::client::Grpc::new(endpoint.connect_with_connector_lazy(tower::service_fn(connect))))
    }

    async fn request<A: prost::Message + Default + 'static>(
        &mut self,
        call: &str,
        question: impl prost::Message + 'static,
    ) -> Result<A, tonic::Status> {
        self.0.ready().await.unwrap();
        let path: PathAndQuery = format!("/runtime.v1.{call}").parse().unwrap();
        let response = self.0.unary(tonic::Request::new(question), path, ProstCodec::default());
        tokio::time::timeout(REQUEST_TIMEOUT, response)
            .await
            .expect("an answer")
            .map(tonic::Response::into_inner)
    }

    pub async fn get<A: prost::Message + Default + 'static>(
        &mut self,
        call: &str,
        question: impl prost::Message + 'static,
    ) -> A {
        self.request(&format!("RuntimeService/{call}"), question)
            .await
            .unwrap_or_else(|status| panic!("{call}: {status}"))
    }
}

pub async fn handles_calls_of_other_cri_clients(node: &TestNode) {
    let mode = std::fs::metadata(node.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut client = CriClient::connect(node);
    let (one, two) = (node.pod("one").await, node.pod("two").await);
    let id = one.start(&script("echo x >/file; sleep 1000")).await;
    let ended = two.start(&script("true")).await;
    crate::kit::wait_exited(&node.runtime, &ended).await;

    let status: StatusResponse = client.get("Status", StatusRequest { verbose: true }).await;
    assert!(status.status.unwrap().conditions.iter().all(|condition| condition.status));
    let driver: RuntimeConfigResponse = client.get("RuntimeConfig", Empty {}).await;
    assert_eq!(driver.linux.unwrap().cgroup_driver, 1);

    // By ID prefix, state and label.
    let filter = |id: &str, state: Option<PodSandboxState>, label: &[&str]| ListPodSandboxRequest {
        filter: Some(PodSandboxFilter {
            id: id.to_owned(),
            state: state.map(|state| StateValue { state: state.into() }),
            label_selector: label.iter().map(|name| ("pod".to_owned(), (*name).to_owned())).collect(),
        }),
    };
    for (request, expected) in [
        (filter("", None, &[]), 2),
        (filter(&one.id[..12], None, &[]), 1),
        (filter("", Some(PodSandboxState::NotReady), &[]), 0),
        (filter("", Some(PodSandboxState::Ready), &["two"]), 1),
        (filter("", None, &["three"]), 0),
    ] {
        let text = format!("{request:?}");
        let found: ListPodSandboxResponse = client.get("ListPodSandbox", request).await;
        assert_eq!(found.items.len(), expected, "{text}");
    }
    let exited = Some(StateValue { state: ContainerState::Exited.into() });
    let request =
        ListContainersRequest { filter: Some(ContainerFilter { state: exited, ..Default::default() }) };
    let found: ListContainersResponse = client.get("ListContainers", request).await;
    assert_eq!(found.containers.iter().map(|found| found.id.as_str()).collect::<Vec<_>>(), [ended.as_str()]);

    let request = PodSandboxStatusRequest { pod_sandbox_id: one.id[..13].to_owned(), verbose: true };
    let found: PodSandboxStatusResponse = client.get("PodSandboxStatus", request).await;
    assert_eq!(found.containers_statuses.len(), 1);
    assert!(found.info["info"].contains("directory"), "{found:?}");
    let request = ContainerStatusRequest { container_id: id[..13].to_owned(), verbose: true };
    let found: ContainerStatusResponse = client.get("ContainerStatus", request).await;
    let info: serde_json::Value = serde_json::from_str(&found.info["info"]).unwrap();
    assert!(info["pid"].as_i64().unwrap() > 0, "{info}");

    let one_container = Id { id: id.clone() };
    let found: ContainerStatsResponse = client.get("ContainerStats", one_container).await;
    let found = found.stats.unwrap();
    assert!(found.memory.unwrap().working_set_bytes.unwrap().value > 0);
    let layer = found.writable_layer.unwrap();
    assert!(layer.used_bytes.unwrap().value > 0 && layer.inodes_used.unwrap().value >= 2);
    let found: ListPodSandboxStatsResponse =
        client.get("ListPodSandboxStats", ListPodSandboxStatsRequest::default()).await;
    assert_eq!(found.stats.len(), 2);
    let found: ListPodSandboxStatsResponse = client.get("PodSandboxStats", Id { id: one.id.clone() }).await;
    let found = found.stats[0].linux.clone().unwrap();
    assert_eq!(found.network.unwrap().default_interface.unwrap().name, "eth0");
    assert!(found.process.unwrap().process_count.unwrap().value > 0);
    assert_eq!(found.containers.len(), 1);

    let images: ListImagesResponse =
        client.request("ImageService/ListImages", ListImagesRequest::default()).await.unwrap();
    assert_eq!(images.images.len(), 1);
    let disks: ImageFsInfoResponse = client.request("ImageService/ImageFsInfo", Empty {}).await.unwrap();
    assert!(disks.image_filesystems[0].used_bytes.as_ref().unwrap().value > 100_000);
    assert_eq!(disks.container_filesystems.len(), 1);

    let resources = LinuxContainerResources { cpu_shares: 7, ..Default::default() };
    let request = UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: one.id.clone(),
        resources: Some(resources),
        overhead: None,
    };
    client.get::<Empty>("UpdatePodSandboxResources", request).await;

    // The URL of a stream is valid for one connection.
    let request = ExecRequest {
        container_id: id[..12].to_owned(),
        cmd: ["echo", "streamed"].map(str::to_owned).into(),
        stdout: true,
        ..ExecRequest::default()
    };
    let url = client.get::<Url>("Exec", request).await.url;
    let output = stream(&url).await;
    assert!(output.contains("101 Switching") && output.contains("streamed"), "{output}");
    assert!(stream(&url).await.contains("404 Not Found"));
}

/// Everything that a WebSocket client receives until the connection is closed.
async fn stream(url: &str) -> String {
    let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = TcpStream::connect(host).await.unwrap();
    let request = format!(
        "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
         Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut output = Vec::new();
    let received = async {
        let mut buffer = [0; 1024];
        loop {
            let count = stream.read(&mut buffer).await.unwrap_or(0);
            output.extend_from_slice(&buffer[..count]);
            let text = String::from_utf8_lossy(&output);
            if count == 0 || text.contains("\"status\":") || text.contains("page not found") {
                break;
            }
        }
    };
    tokio::time::timeout(REQUEST_TIMEOUT, received).await.expect("an answer");
    String::from_utf8_lossy(&output).into_owned()
}

pub async fn sends_container_events(node: &TestNode) {
    let mut client = CriClient::connect(node);
    client.0.ready().await.unwrap();
    let path = PathAndQuery::from_static("/runtime.v1.RuntimeService/GetContainerEvents");
    let codec: ProstCodec<Empty, ContainerEventResponse> = ProstCodec::default();
    let mut events =
        client.0.server_streaming(tonic::Request::new(Empty {}), path, codec).await.unwrap().into_inner();
    let pod = node.pod("watched").await;
    let id = pod.start(&script("exit 3")).await;
    crate::kit::wait_exited(&node.runtime, &id).await;
    node.runtime.remove_sandbox(&pod.id).await.unwrap();
    let mut received = Vec::new();
    while received.len() < 8 {
        let next = tokio::time::timeout(REQUEST_TIMEOUT, events.message()).await.expect("an event");
        let event = next.unwrap().expect("the stream goes on");
        let object = if event.container_id == pod.id { "pod" } else { "container" };
        if event.container_event_type() == ContainerEventType::Stopped && object == "container" {
            assert_eq!(event.containers_statuses[0].exit_code, 3);
        }
        assert_eq!(event.pod_sandbox_status.as_ref().unwrap().id, pod.id);
        received.push(format!("{object} {:?}", event.container_event_type()));
    }
    let expected = [
        "pod Created",
        "pod Started",
        "container Created",
        "container Started",
        "container Stopped",
        "pod Stopped",
        "container Deleted",
        "pod Deleted",
    ];
    assert_eq!(received, expected);
}

pub async fn rejects_invalid_requests(node: &TestNode) {
    let mut client = CriClient::connect(node);
    for (call, expected) in [
        ("RuntimeService/NoSuchThing", tonic::Code::Unimplemented),
        ("OtherService/Version", tonic::Code::Unimplemented),
        ("RuntimeService/CheckpointContainer", tonic::Code::Unimplemented),
        ("RuntimeService/RunPodSandbox", tonic::Code::InvalidArgument),
        ("RuntimeService/PodSandboxStatus", tonic::Code::NotFound),
        ("RuntimeService/ContainerStatus", tonic::Code::NotFound),
        ("RuntimeService/ContainerStats", tonic::Code::NotFound),
        ("RuntimeService/StartContainer", tonic::Code::NotFound),
        ("RuntimeService/ExecSync", tonic::Code::NotFound),
    ] {
        let error = client.request::<Empty>(call, Empty {}).await.unwrap_err();
        assert_eq!(error.code(), expected, "{call}: {error}");
    }
    // A field of the wrong type.
    let wrong = Uint64Value { value: 7 };
    let error = client.request::<Empty>("RuntimeService/StopPodSandbox", wrong).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::InvalidArgument, "{error}");
}

/// A client repeats a request after a timeout.
pub async fn rejects_duplicate_names(node: &TestNode) {
    let pod = node.pod("one").await;
    let error = node.runtime.run_sandbox(&pod.config, "").await.unwrap_err().message();
    let expected =
        format!("failed to reserve sandbox name: name \"one_d_one_0\" is reserved for {:?}", pod.id);
    assert!(error.contains(&expected), "{error}");
    let config = script("sleep 1000");
    let id = node.runtime.create_container(&pod.id, &config, &pod.config).await.unwrap();
    let error = node.runtime.create_container(&pod.id, &config, &pod.config).await.unwrap_err().message();
    assert!(error.contains(&format!("is reserved for {id:?}")), "{error}");
    node.runtime.start_container(&id).await.unwrap();
    let error = node.runtime.start_container(&id).await.unwrap_err().message();
    assert!(error.contains("container is in CONTAINER_RUNNING state"), "{error}");
    // A removed container can be created again; a stopped pod accepts no containers.
    node.runtime.remove_container(&id).await.unwrap();
    node.runtime.create_container(&pod.id, &config, &pod.config).await.unwrap();
    node.runtime.stop_sandbox(&pod.id).await.unwrap();
    let error = node.runtime.create_container(&pod.id, &script(""), &pod.config).await.unwrap_err().message();
    assert!(error.contains("is not running"), "{error}");
    node.runtime.remove_sandbox(&pod.id).await.unwrap();
    node.runtime.run_sandbox(&pod.config, "").await.unwrap();
}

pub async fn rejects_conflicting_options(node: &TestNode) {
    for mode in [NamespaceMode::Container, NamespaceMode::Target, NamespaceMode::Pod] {
        let mut config = node.pod_config("users");
        let userns_options = Some(UserNamespace { mode: mode.into(), ..UserNamespace::default() });
        config.linux.as_mut().unwrap().security_context.as_mut().unwrap().namespace_options =
            Some(NamespaceOption { userns_options, ..NamespaceOption::default() });
        let error = node.runtime.run_sandbox(&config, "").await.unwrap_err().message();
        assert!(error.contains("user namespace"), "{mode:?}: {error}");
    }
    let pod = node.pod("mixed").await;
    let create = async |config: &ContainerConfig| {
        node.runtime.create_container(&pod.id, config, &pod.config).await.map(drop).unwrap_err().message()
    };
    for (readonly, propagation) in [
        (false, MountPropagation::Private),
        (true, MountPropagation::HostToContainer),
        (true, MountPropagation::Bidirectional),
    ] {
        let mut config = script("");
        config.mounts = vec![Mount {
            container_path: "/mnt".into(),
            host_path: node.dir.path().display().to_string(),
            readonly,
            propagation: propagation.into(),
            recursive_read_only: true,
            ..Mount::default()
        }];
        let error = create(&config).await;
        assert!(error.contains("must be read-only and private"), "{error}");
    }
    let mut security = crate::kit::security();
    security.run_as_group = Some(Int64Value { value: 1002 });
    let error = create(&crate::kit::with(security, "")).await;
    assert!(error.contains("user group \"1002\" is specified without user"), "{error}");
}

/// Also for a pod without a parent cgroup: it has one of its own, which is removed with it.
pub async fn updates_limits_before_start(node: &TestNode) {
    let mut config = node.pod_config("early");
    config.linux.as_mut().unwrap().cgroup_parent = String::new();
    config.dns_config = None;
    let pod = node.pod_with(config).await;
    let id = pod.create(&script("cat /etc/resolv.conf; exec sleep 1000")).await;
    let resources = LinuxContainerResources { memory_limit_in_bytes: 48 << 20, ..Default::default() };
    node.runtime.update_resources(&id, &resources).await.unwrap();
    node.runtime.start_container(&id).await.unwrap();
    let cgroups = sys::cgroup::Cgroups::of_host().unwrap();
    let group = format!("/skiff/sandbox-{}", pod.id);
    assert_eq!(cgroups.usage(&format!("{group}/{id}")).memory_limit, Some(48 << 20));
    let received = node.runtime.container_status(&id).await.unwrap().resources.unwrap().linux.unwrap();
    assert_eq!(received.memory_limit_in_bytes, 48 << 20);
    let (_, output, _) = pod.exec(&id, "cat /etc/resolv.conf").await;
    assert_eq!(output, std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default());
    node.runtime.remove_sandbox(&pod.id).await.unwrap();
    assert!(
        cgroups.directories(&group).iter().all(|directory| !directory.exists()),
        "its cgroup was not removed"
    );
}
