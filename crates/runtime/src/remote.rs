//! A CRI runtime over its Unix socket. Upstream counterpart: `k8s.io/cri-client`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::{RwLock, watch};

use crate::cri::*;
use crate::orphans::{self, ProcessInstance};
use crate::{DEFAULT_POLL_INTERVAL, Error, ErrorCode, GrpcClient, Result, RpcError, Runtime};

/// The default of upstream's `runtimeRequestTimeout`.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// The poll interval of a runtime with events, in case one is lost.
const FALLBACK_POLL_INTERVAL: Duration = Duration::from_secs(300);
/// How long to scan for orphans after a runtime process is first seen: until then it, or its previous
/// client, may still leave some.
const ORPHAN_SCAN_PERIOD: Duration = Duration::from_secs(40);
/// Images may be large and registries slow.
const PULL_TIMEOUT: Duration = Duration::from_secs(3600);

/// A CRI runtime such as containerd or CRI-O.
#[derive(Clone)]
pub struct Remote {
    socket: GrpcClient,
    /// Counts the runtime's events. The sender is dropped if the runtime has none.
    event_count: Arc<OnceLock<watch::Receiver<u64>>>,
    /// Locked for reading while a sandbox is created, for writing to keep any from being created.
    sandbox_creation: Arc<RwLock<()>>,
    /// The runtime process that is scanned for orphans, when it was first seen, and whether the scan is
    /// done.
    orphan_scan: Arc<Mutex<Option<(ProcessInstance, Instant, bool)>>>,
}

impl Remote {
    /// `socket` may have the form `unix:///run/…`.
    pub fn new(socket: &str) -> Remote {
        Remote {
            socket: GrpcClient::new(socket),
            event_count: Arc::default(),
            sandbox_creation: Arc::default(),
            orphan_scan: Arc::default(),
        }
    }

    pub fn socket(&self) -> &Path {
        self.socket.path()
    }

    async fn call<Q, A>(&self, call: &'static str, question: &Q, timeout: Duration) -> Result<A>
    where
        Q: prost::Message,
        A: prost::Message + Default,
    {
        self.socket.call(call, question, timeout).await.map_err(|error| self.to_error(call, error))
    }

    fn to_error(&self, call: &'static str, error: RpcError) -> Error {
        let code = match error.code {
            tonic::Code::Unavailable => {
                let socket = self.socket.path().to_owned();
                return Error::Unreachable { socket, message: error.message };
            }
            tonic::Code::NotFound => ErrorCode::NotFound,
            tonic::Code::DeadlineExceeded => ErrorCode::Timeout,
            tonic::Code::Unimplemented => ErrorCode::Unimplemented,
            _ => ErrorCode::Other,
        };
        let call = call.rsplit('/').next().unwrap_or(call);
        Error::Rejected { call, code, message: error.message }
    }

    async fn runtime<Q, A>(&self, call: &'static str, question: &Q) -> Result<A>
    where
        Q: prost::Message,
        A: prost::Message + Default,
    {
        self.call(call, question, REQUEST_TIMEOUT).await
    }

    /// The process that serves the socket, if it is visible here.
    async fn server_process(&self) -> Option<ProcessInstance> {
        let stream = UnixStream::connect(self.socket.path()).await.ok()?;
        ProcessInstance::of(stream.peer_cred().ok()?.pid()?)
    }

    /// For requests that consist of an ID. A missing object is not an error.
    async fn call_allow_not_found(&self, call: &'static str, id: &str) -> Result<()> {
        match self.runtime::<_, Empty>(call, &Id { id: id.to_owned() }).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}

macro_rules! path {
    (image $name:literal) => {
        concat!("/runtime.v1.ImageService/", $name)
    };
    ($name:literal) => {
        concat!("/runtime.v1.RuntimeService/", $name)
    };
}

fn map(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
    labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Fails if a response lacks the requested part.
fn required<T>(call: &'static str, part: Option<T>) -> Result<T> {
    part.ok_or_else(|| Error::Rejected {
        call,
        code: ErrorCode::Other,
        message: "the response is empty".into(),
    })
}

/// Counts the runtime's events until the receiver is dropped or the runtime turns out to have none.
async fn listen(socket: GrpcClient, event_sender: watch::Sender<u64>) {
    const PAUSE: Duration = Duration::from_secs(1);
    let count = || event_sender.send_modify(|count| *count = count.wrapping_add(1));
    loop {
        let ended = tokio::select! {
            ended = socket.listen(path!("GetContainerEvents"), &Empty {}, |_| count()) => ended,
            () = event_sender.closed() => return,
        };
        if ended.is_err_and(|error| error.code == tonic::Code::Unimplemented) {
            return;
        }
        // Events may have been lost while disconnected.
        tokio::time::sleep(PAUSE).await;
        count();
    }
}

#[async_trait]
impl Runtime for Remote {
    async fn shares_mount_namespace(&self) -> bool {
        let peer =
            tokio::net::UnixStream::connect(self.socket.path()).await.and_then(|there| there.peer_cred());
        let pid = peer.ok().and_then(|peer| peer.pid()).map_or_else(String::new, |pid| pid.to_string());
        let mounts = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/mnt")).ok();
        mounts(&pid).is_some_and(|remote_namespace| mounts("self") == Some(remote_namespace))
    }

    async fn version(&self) -> Result<VersionResponse> {
        self.runtime(path!("Version"), &Empty {}).await
    }

    async fn status(&self) -> Result<StatusResponse> {
        self.runtime(path!("Status"), &StatusRequest { verbose: false }).await
    }

    async fn details(&self) -> Result<BTreeMap<String, String>> {
        let answer: StatusResponse = self.runtime(path!("Status"), &StatusRequest { verbose: true }).await?;
        Ok(answer.info)
    }

    async fn wait_for_change(&self, since: u64) -> u64 {
        let begin = || {
            let (event_sender, event_count) = watch::channel(0);
            tokio::spawn(listen(self.socket.clone(), event_sender));
            event_count
        };
        let mut event_count = self.event_count.get_or_init(begin).clone();
        let next_event =
            async { event_count.wait_for(|count| *count > since).await.ok().map(|count| *count) };
        match tokio::time::timeout(FALLBACK_POLL_INTERVAL, next_event).await {
            Ok(Some(count)) => count,
            // The runtime has no events.
            Ok(None) => {
                tokio::time::sleep(DEFAULT_POLL_INTERVAL).await;
                since
            }
            Err(_) => since,
        }
    }

    async fn set_pod_cidr(&self, cidr: &str) -> Result<()> {
        let network_config = Some(NetworkConfig { pod_cidr: cidr.to_owned() });
        let request = UpdateRuntimeConfigRequest { runtime_config: Some(RuntimeConfig { network_config }) };
        self.runtime::<_, Empty>(path!("UpdateRuntimeConfig"), &request).await.map(drop)
    }

    async fn remove_orphans(&self) -> Result<usize> {
        let Some(runtime) = self.server_process().await else { return Ok(0) };
        let known = self.orphan_scan.lock().filter(|(known, ..)| *known == runtime);
        let (_, since, is_done) = known.unwrap_or((runtime, Instant::now(), false));
        *self.orphan_scan.lock() = Some((runtime, since, is_done));
        if is_done {
            return Ok(0);
        }
        // A sandbox in creation already has a network namespace, but no process in it. Retry at the
        // next call.
        let Ok(_no_creation) = self.sandbox_creation.try_write() else { return Ok(0) };
        let sandboxes = self.sandboxes(&[]).await?;
        // VM-based runtimes may have no processes in a sandbox's network namespace.
        let are_plain = sandboxes.iter().all(|sandbox| sandbox.runtime_handler.is_empty());
        let mut known = BTreeSet::new();
        for sandbox in &sandboxes {
            let request = PodSandboxStatusRequest { pod_sandbox_id: sandbox.id.clone(), verbose: true };
            let answer =
                self.runtime::<_, PodSandboxStatusResponse>(path!("PodSandboxStatus"), &request).await;
            match answer {
                Err(error) if error.is_not_found() => {}
                answer => {
                    known.extend(answer?.info.get("info").and_then(|info| orphans::sandbox_netns(info)))
                }
            }
        }
        let ready = PodSandboxState::Ready;
        let running = sandboxes.into_iter().filter(|sandbox| sandbox.state() == ready);
        let running = running.map(|sandbox| sandbox.id).collect();
        let config = self.details().await?.remove("config").unwrap_or_default();
        let socket = self.socket.path().to_owned();
        let remove_orphans = move || {
            let killed_shims = orphans::kill_orphan_shims(&socket, &running);
            let networks = orphans::netns_dir(&config);
            let removed =
                if are_plain { orphans::remove_unused_netns(runtime, &networks, &known)? } else { 0 };
            Ok::<_, std::io::Error>(killed_shims + removed)
        };
        let result =
            tokio::task::spawn_blocking(remove_orphans).await.unwrap_or_else(|error| Err(error.into()));
        // An error would occur again, so the scan ends.
        *self.orphan_scan.lock() =
            Some((runtime, since, result.is_err() || since.elapsed() > ORPHAN_SCAN_PERIOD));
        result.map_err(|error| {
            let message = format!("cannot remove unused network namespaces: {error}");
            Error::Rejected { call: "sweep", code: ErrorCode::Other, message }
        })
    }

    async fn run_sandbox(&self, config: &PodSandboxConfig, handler: &str) -> Result<String> {
        let _guard = self.sandbox_creation.read().await;
        let request =
            RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: handler.to_owned() };
        let answer: RunPodSandboxResponse = self.runtime(path!("RunPodSandbox"), &request).await?;
        Ok(answer.pod_sandbox_id)
    }

    async fn stop_sandbox(&self, id: &str) -> Result<()> {
        self.call_allow_not_found(path!("StopPodSandbox"), id).await
    }

    async fn remove_sandbox(&self, id: &str) -> Result<()> {
        self.call_allow_not_found(path!("RemovePodSandbox"), id).await
    }

    async fn sandbox_status(&self, id: &str) -> Result<PodSandboxStatus> {
        let request = PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
        let answer: PodSandboxStatusResponse = self.runtime(path!("PodSandboxStatus"), &request).await?;
        required("PodSandboxStatus", answer.status)
    }

    async fn sandboxes(&self, labels: &[(&str, &str)]) -> Result<Vec<PodSandbox>> {
        let filter = PodSandboxFilter { label_selector: map(labels), ..PodSandboxFilter::default() };
        let request = ListPodSandboxRequest { filter: Some(filter) };
        let answer: ListPodSandboxResponse = self.runtime(path!("ListPodSandbox"), &request).await?;
        Ok(answer.items)
    }

    async fn create_container(
        &self,
        sandbox: &str,
        config: &ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<String> {
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config.clone()),
            sandbox_config: Some(sandbox_config.clone()),
        };
        let answer: CreateContainerResponse = self.runtime(path!("CreateContainer"), &request).await?;
        Ok(answer.container_id)
    }

    async fn start_container(&self, id: &str) -> Result<()> {
        let request = Id { id: id.to_owned() };
        self.runtime::<_, Empty>(path!("StartContainer"), &request).await.map(drop)
    }

    async fn stop_container(&self, id: &str, grace: Duration) -> Result<()> {
        let timeout = i64::try_from(grace.as_secs()).unwrap_or(i64::MAX);
        let request = StopContainerRequest { container_id: id.to_owned(), timeout };
        match self.call::<_, Empty>(path!("StopContainer"), &request, grace + REQUEST_TIMEOUT).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    async fn remove_container(&self, id: &str) -> Result<()> {
        self.call_allow_not_found(path!("RemoveContainer"), id).await
    }

    async fn container_status(&self, id: &str) -> Result<ContainerStatus> {
        let request = ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        let answer: ContainerStatusResponse = self.runtime(path!("ContainerStatus"), &request).await?;
        required("ContainerStatus", answer.status)
    }

    async fn containers(&self, labels: &[(&str, &str)]) -> Result<Vec<Container>> {
        let filter = ContainerFilter { label_selector: map(labels), ..ContainerFilter::default() };
        let request = ListContainersRequest { filter: Some(filter) };
        let answer: ListContainersResponse = self.runtime(path!("ListContainers"), &request).await?;
        Ok(answer.containers)
    }

    async fn update_resources(&self, id: &str, resources: &LinuxContainerResources) -> Result<()> {
        let request = UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(resources.clone()),
            ..UpdateContainerResourcesRequest::default()
        };
        self.runtime::<_, Empty>(path!("UpdateContainerResources"), &request).await.map(drop)
    }

    async fn reopen_log(&self, id: &str) -> Result<()> {
        let request = Id { id: id.to_owned() };
        self.runtime::<_, Empty>(path!("ReopenContainerLog"), &request).await.map(drop)
    }

    async fn stats(&self) -> Result<Vec<ContainerStats>> {
        let request = ListContainerStatsRequest { filter: None };
        let answer: ListContainerStatsResponse = self.runtime(path!("ListContainerStats"), &request).await?;
        Ok(answer.stats)
    }

    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration) -> Result<ExecSyncResponse> {
        // CRI counts whole seconds; 0 is no timeout.
        let seconds = i64::try_from(timeout.as_millis().div_ceil(1000)).unwrap_or(i64::MAX);
        let request =
            ExecSyncRequest { container_id: id.to_owned(), cmd: command.to_vec(), timeout: seconds };
        // The runtime enforces the timeout; this is for one that does not.
        self.call(path!("ExecSync"), &request, timeout.max(Duration::from_secs(1)) + REQUEST_TIMEOUT).await
    }

    async fn exec(&self, request: &ExecRequest) -> Result<String> {
        self.runtime::<_, Url>(path!("Exec"), request).await.map(|answer| answer.url)
    }

    async fn attach(&self, request: &AttachRequest) -> Result<String> {
        self.runtime::<_, Url>(path!("Attach"), request).await.map(|answer| answer.url)
    }

    async fn port_forward(&self, sandbox: &str, ports: &[i32]) -> Result<String> {
        let request = PortForwardRequest { pod_sandbox_id: sandbox.to_owned(), port: ports.to_vec() };
        self.runtime::<_, Url>(path!("PortForward"), &request).await.map(|answer| answer.url)
    }

    async fn images(&self) -> Result<Vec<Image>> {
        let request = ListImagesRequest { filter: None };
        let answer: ListImagesResponse = self.runtime(path!(image "ListImages"), &request).await?;
        Ok(answer.images)
    }

    async fn image(&self, image: &ImageSpec) -> Result<Option<Image>> {
        let request = ImageStatusRequest { image: Some(image.clone()), verbose: false };
        let answer: ImageStatusResponse = self.runtime(path!(image "ImageStatus"), &request).await?;
        Ok(answer.image)
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        auth: Option<&AuthConfig>,
        sandbox: &PodSandboxConfig,
    ) -> Result<String> {
        let request = PullImageRequest {
            image: Some(image.clone()),
            auth: auth.cloned(),
            sandbox_config: Some(sandbox.clone()),
        };
        let answer: PullImageResponse = self.call(path!(image "PullImage"), &request, PULL_TIMEOUT).await?;
        Ok(answer.image_ref)
    }

    async fn remove_image(&self, image: &ImageSpec) -> Result<()> {
        let request = RemoveImageRequest { image: Some(image.clone()) };
        self.runtime::<_, Empty>(path!(image "RemoveImage"), &request).await.map(drop)
    }

    async fn image_filesystems(&self) -> Result<Vec<FilesystemUsage>> {
        let answer: ImageFsInfoResponse = self.runtime(path!(image "ImageFsInfo"), &Empty {}).await?;
        Ok(answer.image_filesystems)
    }
}
