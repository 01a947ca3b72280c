//! Helpers for the `DisruptionTarget` condition of pods.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::{Ctx, Error, Object, Patch};
use serde_json::{Value, json};

use crate::pod;

/// The `DisruptionTarget` condition to set, or `None` if the pod has it already.
pub fn disruption_target(pod: &Pod, reason: &str, message: &str, now: Timestamp) -> Option<PodCondition> {
    let known = pod::condition(pod, "DisruptionTarget");
    let same = |known: &PodCondition| {
        known.status == "True"
            && known.reason.as_deref() == Some(reason)
            && known.message.as_deref() == Some(message)
    };
    if known.is_some_and(same) {
        return None;
    }
    let since =
        known.filter(|known| known.status == "True").and_then(|known| known.last_transition_time.clone());
    Some(PodCondition {
        type_: "DisruptionTarget".into(),
        status: "True".into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_transition_time: Some(since.unwrap_or(Time(now))),
        observed_generation: pod.metadata.generation,
        ..PodCondition::default()
    })
}

/// Patches the status of this pod. The UID in the patch makes it fail for another pod with the same name.
pub async fn patch_pod_status(ctx: &Ctx, pod: &Pod, status: Value) -> Result<(), Error> {
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": status});
    ctx.patch_status::<Pod>(&pod.key(), &Patch::Strategic(patch)).await.map(drop)
}
