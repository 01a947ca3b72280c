//! Handling of pods that could not be scheduled. Counterpart of upstream's `handleSchedulingFailure`.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use serde_json::{Value, json};

use super::{Action, BindFailure, Engine, Preemption};
use crate::algorithm::FitError;
use crate::framework::{Nominations as _, Profile};
use crate::queue::QueuedPod;
use crate::state::PodInfo;

/// Upper limit of an event's message in the API.
const MAX_EVENT_MESSAGE_BYTES: usize = 1024;

/// The nominated node and the victims on it.
type Nomination = (Arc<str>, Vec<Arc<PodInfo>>);

impl Engine {
    /// No node fits the pod.
    pub(super) fn handle_unschedulable(
        &mut self,
        profile: &Arc<Profile>,
        mut pod: QueuedPod,
        error: &FitError,
        nomination: Option<Nomination>,
        clear_nomination: bool,
        now: Timestamp,
    ) {
        pod.rejected_by = error.diagnosis.rejected_by.clone();
        pod.pending_on = error.diagnosis.pending_on.clone();
        let message = error.to_string();
        self.handle_scheduling_failure(
            profile,
            pod,
            ("Unschedulable", message),
            nomination,
            clear_nomination,
            now,
        );
    }

    /// The attempt failed with an error, or the cluster has no nodes.
    pub(super) fn handle_error(
        &mut self,
        profile: &Arc<Profile>,
        mut pod: QueuedPod,
        failure: BindFailure,
        nomination: Option<Nomination>,
        clear_nomination: bool,
        now: Timestamp,
    ) {
        pod.rejected_by.clear();
        pod.pending_on.clear();
        let reason_and_message = match failure {
            BindFailure::Rejected(status) => ("Unschedulable", status.message()),
            BindFailure::Error(message) => ("SchedulerError", message),
        };
        self.handle_scheduling_failure(profile, pod, reason_and_message, nomination, clear_nomination, now);
    }

    fn handle_scheduling_failure(
        &mut self,
        profile: &Arc<Profile>,
        pod: QueuedPod,
        (reason, message): (&'static str, String),
        nomination: Option<Nomination>,
        clear_nomination: bool,
        now: Timestamp,
    ) {
        let result = if reason == "Unschedulable" { "unschedulable" } else { "error" };
        self.metrics.observe_attempt(&profile.scheduler_name, result, &pod);
        self.record_event(&pod, true, "FailedScheduling", "Scheduling", truncate_message(&message));
        let nominated = match &nomination {
            Some((node, _)) => Some(Some(&**node)),
            None => clear_nomination.then_some(None),
        };
        if let Some(patch) = status_patch(&pod, reason, &message, nominated, now) {
            let (namespace, name) = (pod.info.namespace.clone(), pod.info.name.clone());
            self.actions.push(Action::PatchStatus { namespace, name, patch });
        }
        let (info, object) = (pod.info.clone(), pod.object.clone());
        self.queue.add_unschedulable(pod, &self.state, now);
        match nomination {
            Some((node, victims)) => {
                let nominated_pods = self.queue.nominator.on_node(&node).iter();
                let lower_priority_nominated_pods =
                    nominated_pods.filter(|other| other.priority < info.priority).cloned().collect();
                self.queue.nominator.add(&info, Some(&node));
                self.metrics.observe_preemption(victims.len());
                let preemption =
                    Preemption { preemptor: info, object, node, victims, lower_priority_nominated_pods };
                self.actions.push(Action::Preempt(preemption));
            }
            None if clear_nomination => self.queue.nominator.remove(&info.uid),
            None => self.queue.nominator.add(&info, None),
        }
    }
}

/// Returns the strategic merge patch for the condition and `nominatedNodeName`; `None` if the pod has both
/// already.
fn status_patch(
    pod: &QueuedPod,
    reason: &str,
    message: &str,
    nominated: Option<Option<&str>>,
    now: Timestamp,
) -> Option<Value> {
    let mut status = json!({});
    let known = scheduled_condition(&pod.object);
    let generation = Some(pod.info.generation).filter(|generation| *generation != 0);
    let is_current = known.is_some_and(|known| {
        known.status == "False"
            && known.reason.as_deref() == Some(reason)
            && known.message.as_deref() == Some(message)
            && known.observed_generation == generation
    });
    if !is_current {
        // The transition time changes only with the condition's status.
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
    if let Some(desired) = nominated
        && desired != pod.info.nominated.as_deref()
    {
        status["nominatedNodeName"] = desired.map_or(Value::Null, Into::into);
    }
    (status != json!({})).then(|| json!({"status": status}))
}

fn scheduled_condition(pod: &core::Pod) -> Option<&core::PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == "PodScheduled")
}

fn truncate_message(message: &str) -> String {
    if message.len() <= MAX_EVENT_MESSAGE_BYTES {
        return message.to_owned();
    }
    let mut end = MAX_EVENT_MESSAGE_BYTES - 4;
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{} ...", &message[..end])
}
