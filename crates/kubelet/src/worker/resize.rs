//! Gives a pod that runs what was agreed to.

use std::collections::HashMap;
use std::io;

use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;
use sys::cgroup::Limits;

use crate::observed::Observed;
use crate::pod::container as find;
use crate::pod::resize::said::summary;
use crate::pod::resize::{Resize, Step};
use crate::{Node, cgroups, config};

/// Does what is needed; what fails is told of, and tried again later. `pod` asks for what was agreed to.
pub async fn carry_out(node: &Node, pod: &Pod, seen: &Observed, resize: &Resize) {
    let Err(message) = attempt(node, pod, seen, resize).await else {
        return node.remember(pod, |memory| memory.resizing.failure = None);
    };
    tracing::warn!(error = message, pod = %pod.key(), "cannot resize a pod");
    let now = node.ctx.clock.now();
    let news = node.remember(pod, |memory| memory.resizing.fail(&message, pod.metadata.generation, now));
    if let Some(generation) = news {
        let told = summary("Pod resize error", pod, generation, &message);
        node.ctx.events.warning(pod, "ResizeError", told);
    }
}

async fn attempt(node: &Node, pod: &Pod, seen: &Observed, resize: &Resize) -> Result<(), String> {
    let group = cgroups::of(pod, &node.settings);
    if resize.takes_memory() {
        let used = usage(node)
            .await
            .map_err(|_| format!("unable to read memory usage for pod {:?}", crate::pod::whole_name(pod)))?;
        let whole = cgroups::memory_used(&group);
        if let Some(problem) = resize.too_low(whole, |id| used.get(id).copied()) {
            return Err(problem);
        }
    }
    // Of runs that are gone nothing has to be known.
    node.note_down(pod, |record| {
        record.given.retain(|id, _| seen.containers.iter().any(|run| run.id == *id));
    });
    let limit = |limits: Limits| cgroups::limit(&group, &limits).map_err(told);
    for step in resize.steps() {
        match step {
            Step::Memory(memory) => {
                limit(Limits { memory, ..Limits::default() })?;
                node.note_down(pod, |record| record.whole.memory = memory);
            }
            Step::Quota(cpu_quota) => {
                if node.settings.keeping.limits_cpu {
                    limit(cgroups::quota_only(cpu_quota))?;
                }
                node.note_down(pod, |record| record.whole.cpu_quota = cpu_quota);
            }
            Step::Shares(cpu_shares) => {
                limit(cgroups::shares_only(cpu_shares))?;
                node.note_down(pod, |record| record.whole.cpu_shares = cpu_shares);
            }
            Step::Run { id, container, amounts } => {
                let Some(spec) = find(pod, &container) else { continue };
                let resources = config::resources(pod, &amounts.put_into(&spec), &node.settings);
                let done = node.runtime.update_resources(&id, &resources).await;
                done.map_err(|error| error.message())?;
                node.note_down(pod, |record| {
                    record.given.insert(id, amounts);
                });
            }
        }
    }
    // What the whole may not lose it keeps, and is not asked for again.
    node.note_down(pod, |record| record.whole = resize.to);
    Ok(())
}

/// The memory that runs use, by their ids.
async fn usage(node: &Node) -> runtime::Result<HashMap<String, u64>> {
    let stats = node.runtime.stats().await?.into_iter();
    let used = stats.filter_map(|stats| {
        let used = stats.memory?.usage_bytes?.value;
        Some((stats.attributes?.id, used))
    });
    Ok(used.collect())
}

fn told(error: io::Error) -> String {
    error.to_string()
}
