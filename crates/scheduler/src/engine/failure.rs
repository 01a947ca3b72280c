//! What happens to a pod for which no node was found.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use serde_json::{Value, json};

use super::{Action, Engine, Preemption, Setback};
use crate::algorithm::FitError;
use crate::framework::{Nominations as _, Profile};
use crate::queue::QueuedPod;
use crate::state::PodInfo;

/// Longer messages do not fit an event.
const LONGEST: usize = 1024;

/// A node with the pods that must leave it.
type Rescue = (Arc<str>, Vec<Arc<PodInfo>>);

impl Engine {
    /// No node will do.
    pub(super) fn unfit(
        &mut self,
        profile: &Arc<Profile>,
        mut pod: QueuedPod,
        error: &FitError,
        rescue: Option<Rescue>,
        clear: bool,
        now: Timestamp,
    ) {
        pod.rejected_by = error.diagnosis.rejected_by.clone();
        pod.pending_on = error.diagnosis.pending_on.clone();
        let message = error.to_string();
        self.finish(profile, pod, ("Unschedulable", message), rescue, clear, now);
    }

    /// Something went wrong, or there is no node at all.
    pub(super) fn failed(
        &mut self,
        profile: &Arc<Profile>,
        mut pod: QueuedPod,
        setback: Setback,
        rescue: Option<Rescue>,
        clear: bool,
        now: Timestamp,
    ) {
        pod.rejected_by.clear();
        pod.pending_on.clear();
        let why = match setback {
            Setback::Rejected(status) => ("Unschedulable", status.message()),
            Setback::Error(words) => ("SchedulerError", words),
        };
        self.finish(profile, pod, why, rescue, clear, now);
    }

    fn finish(
        &mut self,
        profile: &Arc<Profile>,
        pod: QueuedPod,
        (reason, message): (&'static str, String),
        rescue: Option<Rescue>,
        clear: bool,
        now: Timestamp,
    ) {
        let result = if reason == "Unschedulable" { "unschedulable" } else { "error" };
        self.metrics.attempted(&profile.scheduler_name, result, &pod);
        self.note(&pod, true, "FailedScheduling", "Scheduling", shortened(&message));
        let nominated = match &rescue {
            Some((node, _)) => Some(Some(&**node)),
            None => clear.then_some(None),
        };
        if let Some(patch) = status_patch(&pod, reason, &message, nominated, now) {
            let (namespace, name) = (pod.info.namespace.clone(), pod.info.name.clone());
            self.actions.push(Action::PatchStatus { namespace, name, patch });
        }
        let (info, object) = (pod.info.clone(), pod.object.clone());
        self.queue.failed(pod, &self.state, now);
        match rescue {
            Some((node, victims)) => {
                let promised = self.queue.nominator.on_node(&node).iter();
                let outbid = promised.filter(|other| other.priority < info.priority).cloned().collect();
                self.queue.nominator.add(&info, Some(&node));
                self.metrics.preempted(victims.len());
                let preemption = Preemption { preemptor: info, object, node, victims, outbid };
                self.actions.push(Action::Preempt(preemption));
            }
            None if clear => self.queue.nominator.remove(&info.uid),
            None => self.queue.nominator.add(&info, None),
        }
    }
}

/// The condition and the promised node, as a strategic merge patch; `None` if the pod has them already.
fn status_patch(
    pod: &QueuedPod,
    reason: &str,
    message: &str,
    nominated: Option<Option<&str>>,
    now: Timestamp,
) -> Option<Value> {
    let mut status = json!({});
    let known = scheduled(&pod.object);
    let generation = Some(pod.info.generation).filter(|generation| *generation != 0);
    let told = known.is_some_and(|known| {
        known.status == "False"
            && known.reason.as_deref() == Some(reason)
            && known.message.as_deref() == Some(message)
            && known.observed_generation == generation
    });
    if !told {
        // The time stays while the answer stays.
        let since = known
            .filter(|known| known.status == "False")
            .and_then(|known| known.last_transition_time.clone());
        let since = since.map_or(now, |time| time.0);
        let mut condition = json!({
            "type": "PodScheduled",
            "status": "False",
            "reason": reason,
            "message": message,
            "lastProbeTime": null,
            "lastTransitionTime": k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(since),
        });
        if let Some(generation) = generation {
            condition["observedGeneration"] = generation.into();
        }
        status["conditions"] = json!([condition]);
    }
    if let Some(wanted) = nominated
        && wanted != pod.info.nominated.as_deref()
    {
        status["nominatedNodeName"] = wanted.map_or(Value::Null, Into::into);
    }
    (status != json!({})).then(|| json!({"status": status}))
}

fn scheduled(pod: &core::Pod) -> Option<&core::PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == "PodScheduled")
}

fn shortened(message: &str) -> String {
    if message.len() <= LONGEST {
        return message.to_owned();
    }
    let mut end = LONGEST - 4;
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{} ...", &message[..end])
}
