//! The conditions and events of a resize while it is pending or in progress; reasons and texts are
//! upstream's. Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use crate::worker_state::StartFailure;

pub const PENDING: &str = "PodResizePending";
pub const IN_PROGRESS: &str = "PodResizeInProgress";
const DEFERRED: &str = "Deferred";
const ERROR: &str = "Error";

/// The state of a pod's resize.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResizeStatus {
    /// The resize is deferred: the node lacks the resources.
    pub pending: Option<ResizeCondition>,
    /// The resize is allocated but not complete.
    pub progress: Option<ResizeCondition>,
    /// The last attempt failed. It is retried later.
    pub failure: Option<StartFailure>,
    /// The generation of the pod that was last deferred.
    pub deferred_generation: Option<i64>,
}

/// A condition with status `True`.
#[derive(Clone, Debug, PartialEq)]
pub struct ResizeCondition {
    pub reason: String,
    pub message: String,
    /// The generation of the pod that it is about.
    pub generation: Option<i64>,
    pub since: Timestamp,
}

impl ResizeStatus {
    /// Restores the state from the conditions in a pod's status.
    pub fn from_status(status: &PodStatus) -> ResizeStatus {
        let find = |type_: &str| {
            let mut conditions = status.conditions.iter().flatten();
            let found = conditions.find(|condition| condition.type_ == type_)?;
            Some(ResizeCondition {
                reason: found.reason.clone().unwrap_or_default(),
                message: found.message.clone().unwrap_or_default(),
                generation: found.observed_generation,
                since: found.last_transition_time.as_ref().map(|time| time.0).unwrap_or_default(),
            })
        };
        ResizeStatus { pending: find(PENDING), progress: find(IN_PROGRESS), ..ResizeStatus::default() }
    }

    /// Defers the resize. Returns whether the condition or its generation is new; a changed message
    /// alone is not.
    pub fn defer(&mut self, message: &str, generation: Option<i64>, now: Timestamp) -> bool {
        let before = self.pending.take();
        let is_known = before.as_ref().is_some_and(|before| before.reason == DEFERRED);
        let since = before.as_ref().filter(|_| is_known).map_or(now, |before| before.since);
        let is_new = !is_known || before.as_ref().is_some_and(|before| before.generation != generation);
        let (reason, message) = (DEFERRED.to_owned(), message.to_owned());
        self.pending = Some(ResizeCondition { reason, message, generation, since });
        self.deferred_generation = generation;
        is_new
    }

    /// The spec matches the allocated resources again.
    pub fn clear_pending(&mut self) {
        (self.pending, self.deferred_generation) = (None, None);
    }

    /// The resize is allocated. It replaces any resize before it.
    pub fn start(&mut self, generation: Option<i64>, now: Timestamp) {
        *self = ResizeStatus::default();
        self.set_in_progress(generation, now);
    }

    /// Adds the in-progress condition, unless it is set already.
    pub fn set_in_progress(&mut self, generation: Option<i64>, now: Timestamp) {
        let (reason, message) = (String::new(), String::new());
        self.progress.get_or_insert(ResizeCondition { reason, message, generation, since: now });
    }

    /// An attempt failed. Returns the generation of the resize if this error is new.
    pub fn record_error(&mut self, message: &str, generation: Option<i64>, now: Timestamp) -> Option<i64> {
        self.set_in_progress(generation, now);
        self.failure =
            Some(StartFailure::with_back_off(self.failure.as_ref(), ERROR, message.to_owned(), now));
        let progress = self.progress.as_mut()?;
        if progress.reason != ERROR {
            progress.since = now;
        }
        let is_new = progress.reason != ERROR || progress.message != message;
        (progress.reason, progress.message) = (ERROR.to_owned(), message.to_owned());
        is_new.then_some(progress.generation.unwrap_or_default())
    }

    /// The resize is complete. Returns its generation if it was in progress.
    pub fn finish(&mut self) -> Option<i64> {
        self.failure = None;
        self.progress.take().map(|progress| progress.generation.unwrap_or_default())
    }

    pub fn conditions(&self) -> impl Iterator<Item = PodCondition> {
        let both = [(PENDING, &self.pending), (IN_PROGRESS, &self.progress)];
        both.into_iter().filter_map(|(type_, condition)| {
            let ResizeCondition { reason, message, generation, since } = condition.as_ref()?;
            Some(PodCondition {
                type_: type_.to_owned(),
                status: "True".to_owned(),
                reason: Some(reason.clone()).filter(|reason| !reason.is_empty()),
                message: Some(message.clone()).filter(|message| !message.is_empty()),
                observed_generation: *generation,
                last_probe_time: Some(Time(*since)),
                last_transition_time: Some(Time(*since)),
            })
        })
    }
}

/// The message of a resize event: what happened, and the pod's resources as JSON.
pub fn resize_event_message(what: &str, pod: &Pod, generation: i64, error: &str) -> String {
    // Written by hand, since the order of the fields is part of the message.
    let list = |field: &str, containers: &[Container]| {
        let one = |container: &Container| {
            let resources = json!(container.resources.clone().unwrap_or_default());
            format!(r#"{{"name":{},"resources":{resources}}}"#, json!(container.name))
        };
        let all: Vec<String> = containers.iter().map(one).collect();
        if all.is_empty() { String::new() } else { format!(r#""{field}":[{}],"#, all.join(",")) }
    };
    let spec = pod.spec.clone().unwrap_or_default();
    let init_containers = list("initContainers", &spec.init_containers.unwrap_or_default());
    let main_containers = list("containers", &spec.containers);
    let error = if error.is_empty() { String::new() } else { format!(r#","error":{}"#, json!(error)) };
    format!("{what}: {{{init_containers}{main_containers}\"generation\":{generation}{error}}}")
}
