//! Removes what pods leave on this node: sandboxes, containers, volumes, devices and cgroups.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use reconcile::{DeleteOptions, Error, Object as _, ReconcileAction};

use super::{STATUS_RETRY, STATUS_TIMEOUT, UNPREPARE_RETRY, update_status};
use crate::Node;
use crate::observed::{ObservedPod, POD_UID};
use crate::static_pods::is_static;
use crate::volumes;

/// Finishes a deleted pod: removes everything of it from this node, then its object from the API.
pub(super) async fn sync_terminated_pod(
    node: &Node,
    pod: &Pod,
    seen: &ObservedPod,
) -> Result<ReconcileAction, Error> {
    match tokio::time::timeout(STATUS_TIMEOUT, update_status(node, pod, seen)).await {
        _ if is_static(pod) => {}
        Ok(result) => result?,
        Err(_) => return Ok(ReconcileAction::RequeueAfter(STATUS_RETRY)),
    }
    if !remove_all(node, pod.uid()).await {
        return Ok(ReconcileAction::RequeueAfter(Duration::from_secs(1)));
    }
    let _ = std::fs::remove_dir_all(node.settings.log_dir(&pod.key(), pod.uid()));
    node.forget_pod(pod.uid());
    if is_static(pod) {
        node.static_pods.remove(pod);
        node.enqueue(pod.key());
        return Ok(ReconcileAction::Forget);
    }
    let options = DeleteOptions { grace_seconds: Some(0), ..DeleteOptions::uid(pod.uid()) };
    match node.ctx.client.delete::<Pod>(&pod.key(), &options).await {
        Err(error) if !error.is_not_found() && !error.is_conflict() => Err(error),
        _ => Ok(ReconcileAction::AwaitChange),
    }
}

/// Cleans up a terminated pod. It keeps its containers for their logs, but no sandbox, and nothing
/// that another pod may be waiting for.
pub(super) async fn clean_up_finished_pod(node: &Node, pod: &Pod) -> ReconcileAction {
    node.pulls.cancel(pod.uid());
    if let Some(worker_state) = node.pod_states.lock().get_mut(pod.uid()) {
        worker_state.health.clear();
    }
    if let Err(error) = node.dra.unprepare(pod.uid()).await {
        tracing::warn!(error, pod = %pod.key(), "cannot unprepare the resource claims of a pod, will retry");
        return ReconcileAction::RequeueAfter(UNPREPARE_RETRY);
    }
    if let Err(error) = stop_sandboxes(node, pod.uid()).await {
        tracing::warn!(%error, pod = %pod.key(), "cannot stop the sandboxes of a terminated pod, will retry");
        return ReconcileAction::RequeueAfter(UNPREPARE_RETRY);
    }
    if let Err(error) = release_volumes(node, pod.uid()).await {
        tracing::warn!(error, pod = %pod.key(), "cannot release the volumes of a terminated pod, will retry");
        return ReconcileAction::RequeueAfter(UNPREPARE_RETRY);
    }
    ReconcileAction::AwaitChange
}

async fn stop_sandboxes(node: &Node, uid: &str) -> runtime::Result<()> {
    let labels = [(POD_UID, uid)];
    let containers = node.runtime.containers(&labels).await?;
    for sandbox in node.runtime.sandboxes(&labels).await? {
        let runs = containers.iter().any(|container| {
            container.pod_sandbox_id == sandbox.id
                && container.state() == runtime::cri::ContainerState::Running
        });
        if runs || sandbox.state() == runtime::cri::PodSandboxState::Ready {
            node.runtime.stop_sandbox(&sandbox.id).await?;
        }
    }
    Ok(())
}

/// Releases the volumes of a terminated pod that others may be waiting for, and the memory of its
/// secrets. The pod's own directories stay.
async fn release_volumes(node: &Node, uid: &str) -> Result<(), String> {
    volumes::sub_path::unmount_all(&node.settings.pods.join(uid)).map_err(|error| error.to_string())?;
    volumes::tmpfs::release(&node.settings.pods.join(uid));
    let csi = crate::csi::volume::tear_down(&node.csi, &node.settings, uid).await;
    volumes::iscsi::detach_pod(&node.csi, &node.settings, uid).await.and(csi)
}

/// Removes everything of a pod, which may be an unknown one. Returns `false` if something is left.
pub async fn remove_all(node: &Node, uid: &str) -> bool {
    let result = async {
        for sandbox in node.runtime.sandboxes(&[(POD_UID, uid)]).await? {
            node.runtime.stop_sandbox(&sandbox.id).await?;
            node.runtime.remove_sandbox(&sandbox.id).await?;
        }
        for container in node.runtime.containers(&[(POD_UID, uid)]).await? {
            node.runtime.remove_container(&container.id).await?;
        }
        runtime::Result::Ok(())
    };
    let mut result = result.await.map_err(|error| error.to_string());
    if result.is_ok() {
        result = clean_up_host(node, uid).await;
    }
    if let Err(error) = &result {
        tracing::warn!(error, uid, "cannot remove everything of a pod, will retry");
    }
    result.is_ok()
}

/// Removes a pod's volumes and everything else on this host except its containers.
pub async fn clean_up_host(node: &Node, uid: &str) -> Result<(), String> {
    crate::cgroups::remove_pod_cgroup(&node.settings.pods, uid).map_err(|error| error.to_string())?;
    node.dra.unprepare(uid).await?;
    // A sub-path keeps its volume busy. If it cannot be unmounted here, it is removed with the rest
    // below.
    let _ = volumes::sub_path::unmount_all(&node.settings.pods.join(uid));
    crate::csi::volume::tear_down(&node.csi, &node.settings, uid).await?;
    volumes::remove_volumes(uid, &node.settings).map_err(|error| error.to_string())?;
    volumes::iscsi::detach_pod(&node.csi, &node.settings, uid).await?;
    node.users.release(uid);
    Ok(())
}
