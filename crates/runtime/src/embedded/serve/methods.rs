//! Dispatches CRI calls by method name. Most go to [`Runtime`](crate::Runtime) as they are; filters and the calls that
//! only clients other than the kubelet use are implemented here.

use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use super::{GrpcReply, GrpcStatus, STREAM_BUFFER_MESSAGES, UNIMPLEMENTED};
use crate::cri::*;
use crate::embedded::pods::{Container as Known, Pod};
use crate::embedded::{Embedded, now, record, usage, view};
use crate::{Result as Answered, Runtime as _};

/// The cgroupfs driver, not systemd.
const CGROUPFS: i32 = 1;

fn unary(message: &impl Message) -> Result<GrpcReply, GrpcStatus> {
    Ok(GrpcReply::One(message.encode_to_vec()))
}

fn decode<T: Message + Default>(bytes: &[u8]) -> Result<T, GrpcStatus> {
    T::decode(bytes).map_err(|error| GrpcStatus::invalid(error.to_string()))
}

/// Decodes a request that consists of an ID.
fn decode_id(bytes: &[u8]) -> Result<String, GrpcStatus> {
    decode::<Id>(bytes).map(|request| request.id)
}

fn seconds(count: i64) -> Duration {
    Duration::from_secs(u64::try_from(count).unwrap_or(0))
}

/// Handles a call. The `Stream*` calls send all items in a single message, like their unary
/// counterparts.
pub(super) async fn call(runtime: Embedded, path: &str, bytes: &[u8]) -> Result<GrpcReply, GrpcStatus> {
    match path {
        "/runtime.v1.ImageService/ListImages" | "/runtime.v1.ImageService/StreamImages" => {
            let filter = decode::<ListImagesRequest>(bytes)?.filter.and_then(|filter| filter.image);
            let images = match filter.filter(|wanted| !wanted.image.is_empty()) {
                Some(wanted) => runtime.image(&wanted).await?.into_iter().collect(),
                None => runtime.list_images().await?,
            };
            unary(&ListImagesResponse { images })
        }
        "/runtime.v1.ImageService/ImageStatus" => {
            let request: ImageStatusRequest = decode(bytes)?;
            let image = runtime.image(&request.image.unwrap_or_default()).await?;
            unary(&ImageStatusResponse { image, ..ImageStatusResponse::default() })
        }
        "/runtime.v1.ImageService/PullImage" => {
            let request: PullImageRequest = decode(bytes)?;
            let sandbox = request.sandbox_config.unwrap_or_default();
            let image = request.image.unwrap_or_default();
            let image_ref = runtime.pull(&image, request.auth.as_ref(), &sandbox).await?;
            unary(&PullImageResponse { image_ref })
        }
        "/runtime.v1.ImageService/RemoveImage" => {
            let request: RemoveImageRequest = decode(bytes)?;
            runtime.remove_image(&request.image.unwrap_or_default()).await?;
            unary(&Empty {})
        }
        "/runtime.v1.ImageService/ImageFsInfo" => {
            let pods = runtime.inner.pods_dir();
            let counted = tokio::task::spawn_blocking(move || usage::filesystem_usage(&pods, &[])).await;
            unary(&ImageFsInfoResponse {
                image_filesystems: runtime.image_filesystems().await?,
                container_filesystems: counted.into_iter().collect(),
            })
        }
        _ => match path.strip_prefix("/runtime.v1.RuntimeService/") {
            Some(method) => call_sandbox_method(runtime, method, bytes).await,
            None => Err(unknown(path)),
        },
    }
}

fn unknown(what: &str) -> GrpcStatus {
    GrpcStatus { code: UNIMPLEMENTED, message: format!("unknown method {what}") }
}

async fn call_sandbox_method(runtime: Embedded, method: &str, bytes: &[u8]) -> Result<GrpcReply, GrpcStatus> {
    match method {
        "Version" => unary(&runtime.version().await?),
        "Status" => {
            let request: StatusRequest = decode(bytes)?;
            let mut status = runtime.status().await?;
            if request.verbose {
                status.info = runtime.details().await?;
            }
            unary(&status)
        }
        "UpdateRuntimeConfig" => {
            let request: UpdateRuntimeConfigRequest = decode(bytes)?;
            let network = request.runtime_config.and_then(|config| config.network_config).unwrap_or_default();
            if !network.pod_cidr.is_empty() {
                runtime.set_pod_cidr(&network.pod_cidr).await?;
            }
            unary(&Empty {})
        }
        "RuntimeConfig" => {
            let linux = Some(LinuxRuntimeConfiguration { cgroup_driver: CGROUPFS });
            unary(&RuntimeConfigResponse { linux })
        }
        "RunPodSandbox" => {
            let request: RunPodSandboxRequest = decode(bytes)?;
            let config = request.config.ok_or_else(|| GrpcStatus::invalid("sandbox config is missing"))?;
            let pod_sandbox_id = runtime.run_pod(&config, &request.runtime_handler, true).await?;
            unary(&RunPodSandboxResponse { pod_sandbox_id })
        }
        "StopPodSandbox" => {
            runtime.stop_sandbox(&pod_id(&runtime, decode_id(bytes)?)).await?;
            unary(&Empty {})
        }
        "RemovePodSandbox" => {
            runtime.remove_sandbox(&pod_id(&runtime, decode_id(bytes)?)).await?;
            unary(&Empty {})
        }
        "PodSandboxStatus" => unary(&pod_status(&runtime, decode(bytes)?).await?),
        "ListPodSandbox" | "StreamPodSandboxes" => {
            let filter = decode::<ListPodSandboxRequest>(bytes)?.filter.unwrap_or_default();
            let matches = |pod: &PodSandbox| {
                pod.id.starts_with(&filter.id)
                    && filter.state.as_ref().is_none_or(|wanted| wanted.state == pod.state)
                    && has_all(&pod.labels, &filter.label_selector)
            };
            unary(&ListPodSandboxResponse {
                items: runtime.sandboxes(&[]).await?.into_iter().filter(matches).collect(),
            })
        }
        "PodSandboxStats" => {
            let pod = runtime.inner.pod(&pod_id(&runtime, decode_id(bytes)?), "PodSandboxStats")?;
            unary(&ListPodSandboxStatsResponse { stats: runtime.usage_of_pods(vec![pod]).await })
        }
        "ListPodSandboxStats" | "StreamPodSandboxStats" => {
            let filter = decode::<ListPodSandboxStatsRequest>(bytes)?.filter.unwrap_or_default();
            let matches = |pod: &Arc<Pod>| {
                let labels = pod.record.lock().config.clone().unwrap_or_default().labels;
                pod.id.starts_with(&filter.id) && has_all(&labels, &filter.label_selector)
            };
            let pods = runtime.inner.pods.all().into_iter().filter(matches).collect();
            unary(&ListPodSandboxStatsResponse { stats: runtime.usage_of_pods(pods).await })
        }
        "UpdatePodSandboxResources" => update_pod(&runtime, decode(bytes)?),
        "PortForward" => {
            let request: PortForwardRequest = decode(bytes)?;
            let id = pod_id(&runtime, request.pod_sandbox_id);
            unary(&Url { url: runtime.port_forward(&id, &request.port).await? })
        }
        "GetContainerEvents" => Ok(GrpcReply::Many(events(&runtime))),
        // There are no metrics beyond the stats.
        "ListMetricDescriptors" | "ListPodSandboxMetrics" | "StreamPodSandboxMetrics" => unary(&Empty {}),
        _ => call_container_method(runtime, method, bytes).await,
    }
}

async fn call_container_method(
    runtime: Embedded,
    method: &str,
    bytes: &[u8],
) -> Result<GrpcReply, GrpcStatus> {
    match method {
        "CreateContainer" => {
            let request: CreateContainerRequest = decode(bytes)?;
            let pod = pod_id(&runtime, request.pod_sandbox_id);
            let config = request.config.ok_or_else(|| GrpcStatus::invalid("container config is missing"))?;
            let of_pod = request.sandbox_config.unwrap_or_default();
            unary(&CreateContainerResponse {
                container_id: runtime.create_container(&pod, &config, &of_pod).await?,
            })
        }
        "StartContainer" => {
            runtime.start_container(&container_id(&runtime, decode_id(bytes)?)).await?;
            unary(&Empty {})
        }
        "StopContainer" => {
            let request: StopContainerRequest = decode(bytes)?;
            runtime
                .stop_container(&container_id(&runtime, request.container_id), seconds(request.timeout))
                .await?;
            unary(&Empty {})
        }
        "RemoveContainer" => {
            runtime.remove_container(&container_id(&runtime, decode_id(bytes)?)).await?;
            unary(&Empty {})
        }
        "ContainerStatus" => unary(&container_status(&runtime, decode(bytes)?)?),
        "ListContainers" | "StreamContainers" => {
            let filter = decode::<ListContainersRequest>(bytes)?.filter.unwrap_or_default();
            let matches = |container: &Container| {
                container.id.starts_with(&filter.id)
                    && container.pod_sandbox_id.starts_with(&filter.pod_sandbox_id)
                    && filter.state.as_ref().is_none_or(|wanted| wanted.state == container.state)
                    && has_all(&container.labels, &filter.label_selector)
            };
            let containers = runtime.containers(&[]).await?.into_iter().filter(matches).collect();
            unary(&ListContainersResponse { containers })
        }
        "UpdateContainerResources" => {
            let request: UpdateContainerResourcesRequest = decode(bytes)?;
            let resources = request.linux.unwrap_or_default();
            runtime.update_resources(&container_id(&runtime, request.container_id), &resources).await?;
            unary(&Empty {})
        }
        "ReopenContainerLog" => {
            runtime.reopen_log(&container_id(&runtime, decode_id(bytes)?)).await?;
            unary(&Empty {})
        }
        "ExecSync" => {
            let request: ExecSyncRequest = decode(bytes)?;
            let id = container_id(&runtime, request.container_id);
            unary(&runtime.exec_sync(&id, &request.cmd, seconds(request.timeout)).await?)
        }
        "Exec" => {
            let request: ExecRequest = decode(bytes)?;
            let container_id = container_id(&runtime, request.container_id.clone());
            unary(&Url { url: runtime.exec(&ExecRequest { container_id, ..request }).await? })
        }
        "Attach" => {
            let request: AttachRequest = decode(bytes)?;
            let container_id = container_id(&runtime, request.container_id.clone());
            unary(&Url { url: runtime.attach(&AttachRequest { container_id, ..request }).await? })
        }
        "ContainerStats" => {
            let id = container_id(&runtime, decode_id(bytes)?);
            let (pod, _) = runtime.inner.container(&id, "ContainerStats")?;
            let stats = stats_of(&runtime, vec![pod]).await;
            let stats =
                stats.into_iter().find(|stats| stats.attributes.as_ref().is_some_and(|of| of.id == id));
            unary(&ContainerStatsResponse { stats })
        }
        "ListContainerStats" | "StreamContainerStats" => {
            let filter = decode::<ListContainerStatsRequest>(bytes)?.filter.unwrap_or_default();
            let pods = runtime.inner.pods.all().into_iter();
            let pods = pods.filter(|pod| pod.id.starts_with(&filter.pod_sandbox_id)).collect();
            let matches = |stats: &ContainerStats| {
                let of = stats.attributes.clone().unwrap_or_default();
                of.id.starts_with(&filter.id) && has_all(&of.labels, &filter.label_selector)
            };
            let stats = stats_of(&runtime, pods).await.into_iter().filter(matches).collect();
            unary(&ListContainerStatsResponse { stats })
        }
        _ => Err(unknown(method)),
    }
}

fn has_all(
    labels: &std::collections::BTreeMap<String, String>,
    selector: &std::collections::BTreeMap<String, String>,
) -> bool {
    selector.iter().all(|(name, value)| labels.get(name) == Some(value))
}

async fn stats_of(runtime: &Embedded, pods: Vec<Arc<Pod>>) -> Vec<ContainerStats> {
    runtime.usage_of(pods).await.into_iter().flat_map(|(_, stats)| stats).collect()
}

/// Clients may abbreviate the IDs of pods and containers to a unique prefix.
fn pod_id(runtime: &Embedded, given: String) -> String {
    resolve_id_prefix(given, runtime.inner.pods.all().iter().map(|pod| pod.id.clone()))
}

fn container_id(runtime: &Embedded, given: String) -> String {
    let pods = runtime.inner.pods.all();
    let of = |pod: &Arc<Pod>| pod.containers.lock().keys().cloned().collect::<Vec<_>>();
    resolve_id_prefix(given, pods.iter().flat_map(of))
}

fn resolve_id_prefix(given: String, known: impl Iterator<Item = String>) -> String {
    let mut candidates = known.filter(|id| !given.is_empty() && id.starts_with(&given));
    match (candidates.next(), candidates.next()) {
        (Some(id), None) => id,
        _ => given,
    }
}

async fn pod_status(
    runtime: &Embedded,
    request: PodSandboxStatusRequest,
) -> Answered<PodSandboxStatusResponse> {
    let pod = runtime.inner.pod(&pod_id(runtime, request.pod_sandbox_id), "PodSandboxStatus")?;
    let containers: Vec<Arc<Known>> = pod.containers.lock().values().cloned().collect();
    let mut answer = PodSandboxStatusResponse {
        status: Some(view::sandbox_status(&pod)),
        containers_statuses: containers.iter().map(|known| view::container_status(&pod, known)).collect(),
        timestamp: now(),
        ..PodSandboxStatusResponse::default()
    };
    if request.verbose {
        let handler = pod.record.lock().handler.clone();
        let network = match runtime.check_by_cni(&pod).await {
            None => Value::Null,
            Some(Ok(())) => "ok".into(),
            Some(Err(why)) => why.into(),
        };
        let info = json!({"runtimeHandler": handler, "directory": pod.directory, "cniCheck": network});
        answer.info.insert("info".to_owned(), info.to_string());
    }
    Ok(answer)
}

fn container_status(
    runtime: &Embedded,
    request: ContainerStatusRequest,
) -> Answered<ContainerStatusResponse> {
    let id = container_id(runtime, request.container_id);
    let (pod, known) = runtime.inner.container(&id, "ContainerStatus")?;
    let status = Some(view::container_status(&pod, &known));
    let mut answer = ContainerStatusResponse { status, ..ContainerStatusResponse::default() };
    if request.verbose {
        let pid = known.status().map_or(0, |status| status.pid);
        let info = json!({"sandboxID": pod.id, "pid": pid, "layers": known.record.layers});
        answer.info.insert("info".to_owned(), info.to_string());
    }
    Ok(answer)
}

/// Records the pod's new resources, for later queries. The client has already changed the pod's cgroup.
fn update_pod(
    runtime: &Embedded,
    request: UpdatePodSandboxResourcesRequest,
) -> Result<GrpcReply, GrpcStatus> {
    const CALL: &str = "UpdatePodSandboxResources";
    let pod = runtime.inner.pod(&pod_id(runtime, request.pod_sandbox_id), CALL)?;
    let mut changed = pod.record.lock();
    let linux = changed.config.get_or_insert_default().linux.get_or_insert_default();
    linux.overhead = request.overhead.or(linux.overhead.take());
    linux.resources = request.resources.or(linux.resources.take());
    let written = record::write(&pod.directory, &*changed);
    written.map_err(|error| GrpcStatus::from(crate::embedded::call_error(CALL, error.to_string())))?;
    unary(&Empty {})
}

/// Streams all events from now on, until the client disconnects.
fn events(runtime: &Embedded) -> mpsc::Receiver<Vec<u8>> {
    let mut event_receiver = runtime.inner.events.subscribe();
    let (sender, receiver) = mpsc::channel(STREAM_BUFFER_MESSAGES);
    tokio::spawn(async move {
        loop {
            let event = tokio::select! {
                event = event_receiver.recv() => event,
                () = sender.closed() => return,
            };
            let sent = match event {
                Ok(event) => sender.send(event.encode_to_vec()).await,
                // The client missed events. It sees their result at its next relist.
                Err(RecvError::Lagged(_)) => Ok(()),
                Err(RecvError::Closed) => return,
            };
            if sent.is_err() {
                return;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolves_unique_id_prefixes() {
        let known = || ["abc1", "abd2", "xyz3"].into_iter().map(str::to_owned);
        for (given, expected) in [("x", "xyz3"), ("abc", "abc1"), ("ab", "ab"), ("", ""), ("no", "no")] {
            assert_eq!(resolve_id_prefix(given.to_owned(), known()), expected);
        }
    }
}
