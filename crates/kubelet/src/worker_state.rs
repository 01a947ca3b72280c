//! State of a pod worker that the runtime does not have: probe results, failures and back-off. It
//! is lost on a restart, and rebuilt from new probes and attempts.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::{SignedDuration, Timestamp};

use crate::allocation::AllocationRecord;
use crate::pod::back_off::BackOff;
use crate::pod::resize::status::ResizeStatus;

/// The worker state of one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodWorkerState {
    /// Probe results by container ID.
    pub health: HashMap<String, ContainerHealth>,
    /// Failed starts by container name.
    pub failures: BTreeMap<String, StartFailure>,
    /// Restart back-off by container name.
    pub back_offs: BTreeMap<String, BackOff>,
    /// The images in the spec by container name. All failures and back-offs are about these images.
    pub images: BTreeMap<String, String>,
    /// When an object that the pod references last changed.
    pub references_changed_at: Option<Timestamp>,
    /// Why the last attempt to create a sandbox failed.
    pub sandbox_failure: Option<StartFailure>,
    /// Number of probes by container, probe type and result (`true`: success).
    pub probe_counts: BTreeMap<(String, &'static str, bool), u64>,
    /// Allocated and actuated resources; set on admission.
    pub record: Option<AllocationRecord>,
    /// The state of an in-place resize.
    pub resize_status: ResizeStatus,
    /// Runs and failures whose back-off was reported in an event.
    pub reported_back_offs: BTreeSet<String>,
    /// Runs that were stopped for a resize. Their container restarts immediately, whatever its exit
    /// code and restart policy are.
    pub stopped_for_resize: BTreeSet<String>,
    /// The volumes are set up, so that containers may be writing to them.
    pub volumes_mounted: bool,
    /// The pod passed admission on this node.
    pub admitted: bool,
    /// Reason and message if the node terminated the pod.
    pub termination_reason: Option<(String, String)>,
    /// The node is shutting down: containers are stopped, and none is started until the node is up
    /// again.
    pub is_suspended: bool,
    /// Grace period in seconds that replaces the pod's own when the node terminates it.
    pub grace_period_override: Option<i64>,
}

/// Probe results of a running container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerHealth {
    /// The startup probe has succeeded, or there is none.
    pub started: bool,
    pub ready: bool,
    /// The liveness or startup probe has reached its failure threshold.
    pub dead: bool,
}

/// An operation that failed and is retried at `retry_at`.
#[derive(Clone, Debug, PartialEq)]
pub struct StartFailure {
    /// The reason in the status, such as `ErrImagePull`.
    pub reason: String,
    pub message: String,
    pub attempts: u32,
    pub failed_at: Timestamp,
    pub retry_at: Timestamp,
}

/// How long the status shows the error before it shows the back-off (`ImagePullBackOff`).
const BACK_OFF_REPORT_DELAY: SignedDuration = SignedDuration::from_secs(2);
/// Delay before a retry.
const RETRY_DELAY: SignedDuration = SignedDuration::from_secs(10);
/// Limit of a delay that doubles with each failure.
const MAX_RETRY_DELAY: SignedDuration = SignedDuration::from_secs(300);
/// Delay before a retry of something that waits for another component.
const WAIT_RETRY: SignedDuration = SignedDuration::from_secs(1);
/// The only reason whose delay doubles. Containers that exit have a separate back-off
/// ([`BackOff`]).
const ERR_IMAGE_PULL: &str = "ErrImagePull";
/// Failures of containers that were created. They leave an exited container, which has the restart
/// back-off.
const RUN_FAILURE_REASONS: [&str; 2] = ["RunContainerError", "PostStartHookError"];
/// Failures that a change of a referenced object may fix.
const MISSING_OBJECT_REASONS: [&str; 2] = ["CreateContainerConfigError", "ContainerCreating"];

impl PodWorkerState {
    /// Records the image in a container's spec. A changed image is tried immediately, because the
    /// failures and the back-off of the old one do not apply to it.
    pub fn set_image(&mut self, container: &str, image: &str) {
        if self.images.get(container).is_some_and(|known| known == image) {
            return;
        }
        if self.images.insert(container.to_owned(), image.to_owned()).is_some() {
            self.failures.remove(container);
            self.back_offs.remove(container);
            self.reported_back_offs.retain(|reported| reported.split(' ').next() != Some(container));
        }
    }

    /// A referenced object has changed: what failed because of a missing object is retried
    /// immediately.
    pub fn references_changed(&mut self, now: Timestamp) {
        self.references_changed_at = Some(now);
        let waiting = self.failures.values_mut().filter(|failure| failure.is_missing_objects());
        waiting.for_each(|failure| failure.retry_at = failure.retry_at.min(now));
    }

    /// Whether a container that `before` contains has become ready or unready.
    pub fn readiness_changed(&self, before: &HashMap<String, ContainerHealth>) -> bool {
        self.health.iter().any(|(id, now)| before.get(id).is_some_and(|before| before.ready != now.ready))
    }

    /// Records that a start failed that began at `started_at`.
    pub fn record_failure(&mut self, container: &str, mut failure: StartFailure, started_at: Timestamp) {
        // The object may have changed after the start read it. Retry immediately then.
        if failure.is_missing_objects()
            && self.references_changed_at.is_some_and(|changed_at| changed_at >= started_at)
        {
            failure.retry_at = failure.failed_at;
        }
        self.failures.insert(container.to_owned(), failure);
    }
}

impl StartFailure {
    /// Not an error: the container has to wait for something.
    pub fn waiting(reason: &str, message: String, now: Timestamp) -> StartFailure {
        StartFailure::with_delay(WAIT_RETRY, reason, message, now)
    }

    /// The failure that follows `before`. The attempt count continues if the reason is the same.
    pub fn with_back_off(
        before: Option<&StartFailure>,
        reason: &str,
        message: String,
        now: Timestamp,
    ) -> StartFailure {
        let attempts =
            before.filter(|before| before.reason == reason).map_or(0, |before| before.attempts) + 1;
        let exponent = if reason == ERR_IMAGE_PULL { (attempts - 1).min(10) } else { 0 };
        let delay = RETRY_DELAY.saturating_mul(1 << exponent).min(MAX_RETRY_DELAY);
        StartFailure { attempts, ..StartFailure::with_delay(delay, reason, message, now) }
    }

    fn with_delay(delay: SignedDuration, reason: &str, message: String, now: Timestamp) -> StartFailure {
        let retry_at = now.checked_add(delay).unwrap_or(now);
        StartFailure { reason: reason.to_owned(), message, attempts: 1, failed_at: now, retry_at }
    }

    /// When the status changes from the error to the back-off; only for image pulls.
    pub fn back_off_visible_at(&self) -> Option<Timestamp> {
        (self.reason == ERR_IMAGE_PULL)
            .then(|| self.failed_at.checked_add(BACK_OFF_REPORT_DELAY).ok())
            .flatten()
    }

    /// Whether the failure ended a run of the container.
    pub fn ended_run(&self) -> bool {
        RUN_FAILURE_REASONS.contains(&self.reason.as_str())
    }

    fn is_missing_objects(&self) -> bool {
        MISSING_OBJECT_REASONS.contains(&self.reason.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn only_image_pulls_use_exponential_back_off() {
        let check = |reasons: &[&str], expected: i64| {
            let mut failure = None;
            for reason in reasons {
                failure = Some(StartFailure::with_back_off(failure.as_ref(), reason, String::new(), time(0)));
            }
            let retry_at = failure.map(|failure| failure.retry_at.as_second());
            assert_eq!(retry_at, Some(expected), "{reasons:?}");
        };
        check(&["ErrImagePull"], 10);
        check(&["ErrImagePull"; 3], 40);
        check(&["ErrImagePull"; 9], 300);
        for reason in [
            "RunContainerError",
            "CreateContainerConfigError",
            "CreateContainerError",
            "ContainerCreating",
            "",
        ] {
            check(&[reason; 9], 10);
        }
        check(&["ErrImagePull", "ErrImagePull", "CreateContainerError", "ErrImagePull"], 10);
    }

    #[test]
    fn changed_image_clears_the_failure() {
        let mut worker_state = PodWorkerState::default();
        for name in ["a", "ab"] {
            worker_state.set_image(name, "web:1");
            let failure = StartFailure::with_back_off(None, "ErrImagePull", String::new(), time(5));
            worker_state.record_failure(name, failure, time(4));
            worker_state.reported_back_offs.insert(format!("{name} 1"));
        }
        let known = worker_state.clone();
        worker_state.set_image("a", "web:1");
        assert_eq!(worker_state, known);
        worker_state.set_image("a", "web:2");
        let reported: Vec<&String> = worker_state.reported_back_offs.iter().collect();
        let failures: Vec<&String> = worker_state.failures.keys().collect();
        assert_eq!((failures, reported), (vec![&"ab".to_owned()], vec![&"ab 1".to_owned()]));
    }

    #[test]
    fn new_reference_ends_the_retry_delay() {
        let check = |reason: &str, changed_at: i64, started_at: i64, expected: i64| {
            let mut worker_state = PodWorkerState::default();
            let failure = StartFailure::with_back_off(None, reason, String::new(), time(5));
            if changed_at <= 5 {
                worker_state.references_changed(time(changed_at));
            }
            worker_state.record_failure("a", failure, time(started_at));
            if changed_at > 5 {
                worker_state.references_changed(time(changed_at));
            }
            assert_eq!(
                worker_state.failures["a"].retry_at,
                time(expected),
                "{reason} {changed_at} {started_at}"
            );
        };
        for reason in MISSING_OBJECT_REASONS {
            check(reason, 7, 4, 7);
            // The object changed while the container was being started.
            check(reason, 4, 4, 5);
            check(reason, 3, 4, 15);
            check(reason, 20, 4, 15);
        }
        check("ErrImagePull", 7, 4, 15);
        check("CreateContainerError", 4, 4, 15);
    }
}
