//! Applies the allocated resources to a running pod.

use std::collections::HashMap;
use std::io;

use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;
use sys::cgroup::Limits;

use crate::observed::ObservedPod;
use crate::pod::container as find;
use crate::pod::resize::status::resize_event_message;
use crate::pod::resize::{Resize, ResizeStep};
use crate::{Node, cgroups, config};

/// Applies a resize. A failure is reported and retried later. `pod` has the allocated resources.
pub async fn apply_resize(node: &Node, pod: &Pod, seen: &ObservedPod, resize: &Resize) {
    let Err(message) = try_resize(node, pod, seen, resize).await else {
        return node.with_pod_state(pod, |worker_state| worker_state.resize_status.failure = None);
    };
    tracing::warn!(error = message, pod = %pod.key(), "pod resize failed, will retry");
    let now = node.ctx.clock.now();
    let reported_generation = node.with_pod_state(pod, |worker_state| {
        worker_state.resize_status.record_error(&message, pod.metadata.generation, now)
    });
    if let Some(generation) = reported_generation {
        let event_message = resize_event_message("Pod resize error", pod, generation, &message);
        node.ctx.events.warning(pod, "ResizeError", event_message);
    }
}

async fn try_resize(node: &Node, pod: &Pod, seen: &ObservedPod, resize: &Resize) -> Result<(), String> {
    let group = cgroups::pod_cgroup(pod, &node.settings);
    if resize.has_lower_memory_limit() {
        let used = usage(node)
            .await
            .map_err(|_| format!("unable to read memory usage for pod {:?}", crate::pod::format_pod(pod)))?;
        let pod_usage = cgroups::memory_used(&group);
        if let Some(problem) = resize.check_memory_usage(pod_usage, |id| used.get(id).copied()) {
            return Err(problem);
        }
    }
    // Forget containers that no longer exist.
    node.update_record(pod, |record| {
        record.given.retain(|id, _| seen.containers.iter().any(|run| run.id == *id));
    });
    let limit = |limits: Limits| cgroups::limit(&group, &limits).map_err(error_text);
    for step in resize.steps() {
        match step {
            ResizeStep::PodMemory(memory) => {
                limit(Limits { memory, ..Limits::default() })?;
                node.update_record(pod, |record| record.whole.memory = memory);
            }
            ResizeStep::PodCpuQuota(cpu_quota) => {
                if node.settings.kubelet_config.cpu_cfs_quota {
                    limit(cgroups::quota_only(cpu_quota))?;
                }
                node.update_record(pod, |record| record.whole.cpu_quota = cpu_quota);
            }
            ResizeStep::PodCpuShares(cpu_shares) => {
                limit(cgroups::shares_only(cpu_shares))?;
                node.update_record(pod, |record| record.whole.cpu_shares = cpu_shares);
            }
            ResizeStep::Container { id, container, resources: desired } => {
                let Some(spec) = find(pod, &container) else { continue };
                let resources = config::resources(pod, &desired.apply_to(&spec), &node.settings);
                let done = node.runtime.update_resources(&id, &resources).await;
                done.map_err(|error| error.message())?;
                node.update_record(pod, |record| {
                    record.given.insert(id, desired);
                });
            }
        }
    }
    // A limit that cannot be removed stays, and does not count as different any more.
    node.update_record(pod, |record| record.whole = resize.to);
    Ok(())
}

/// The memory usage of containers by ID.
async fn usage(node: &Node) -> runtime::Result<HashMap<String, u64>> {
    let stats = node.runtime.stats().await?.into_iter();
    let used = stats.filter_map(|stats| {
        let used = stats.memory?.usage_bytes?.value;
        Some((stats.attributes?.id, used))
    });
    Ok(used.collect())
}

fn error_text(error: io::Error) -> String {
    error.to_string()
}
