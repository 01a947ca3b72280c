//! What a pod's worker knows that the runtime does not: how probes went and what could not be started.
//! Lost with the process, and found out again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::{SignedDuration, Timestamp};

use crate::allocation::AllocationRecord;
use crate::pod::back_off::BackOff;
use crate::pod::resize::status::ResizeStatus;

/// What is known of one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodWorkerState {
    /// By the id of the run.
    pub health: HashMap<String, ContainerHealth>,
    /// By the name of the container that could not be started.
    pub failures: BTreeMap<String, StartFailure>,
    /// By the name of the container that was started again.
    pub back_offs: BTreeMap<String, BackOff>,
    /// What containers are to run, by their names. All failures and pauses are of these.
    pub images: BTreeMap<String, String>,
    /// When something last changed that the pod refers to.
    pub references_changed_at: Option<Timestamp>,
    /// Why there is no sandbox.
    pub sandbox_failure: Option<StartFailure>,
    /// How often containers were asked how they are: the container, which probe, whether the answer was good.
    pub probe_counts: BTreeMap<(String, &'static str, bool), u64>,
    /// What it was promised and given, once it was let in.
    pub record: Option<AllocationRecord>,
    /// How far it has come in being given something else.
    pub resize_status: ResizeStatus,
    /// Runs and failures of which was told that they are left alone for a while.
    pub reported_back_offs: BTreeSet<String>,
    /// Runs that were stopped for a resize: the container is started again at once, whatever they ended with.
    pub stopped_for_resize: BTreeSet<String>,
    /// They are made, and the pod's to change.
    pub volumes_mounted: bool,
    /// It was found to have a place on the node.
    pub admitted: bool,
    /// Why the pod was ended by the node: reason and message.
    pub termination_reason: Option<(String, String)>,
    /// The machine goes down: what runs of it is ended and nothing is started, until the node starts again.
    pub is_suspended: bool,
    /// The seconds it has for that, where these are not its own to choose.
    pub grace_period_override: Option<i64>,
}

/// How the probes of a running container went so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerHealth {
    /// The startup probe has succeeded, or there is none.
    pub started: bool,
    pub ready: bool,
    /// The liveness or the startup probe has failed too often.
    pub dead: bool,
}

/// Something that could not be done, and is tried again later.
#[derive(Clone, Debug, PartialEq)]
pub struct StartFailure {
    /// Such as `ErrImagePull`.
    pub reason: String,
    pub message: String,
    pub attempts: u32,
    pub failed_at: Timestamp,
    pub retry_at: Timestamp,
}

/// A failed attempt is what is said at first; then that it is left alone for a while.
const BACK_OFF_REPORT_DELAY: SignedDuration = SignedDuration::from_secs(2);
/// How long a thing that failed is left alone.
const RETRY_DELAY: SignedDuration = SignedDuration::from_secs(10);
/// The longest it becomes where it is doubled each time.
const MAX_RETRY_DELAY: SignedDuration = SignedDuration::from_secs(300);
/// How long something is left alone that others have to do something for first.
const WAIT_RETRY: SignedDuration = SignedDuration::from_secs(1);
/// What is tried less and less often; containers that end are too, by a count of their own.
const ERR_IMAGE_PULL: &str = "ErrImagePull";
/// What becomes of containers that were made; they end then, and tell of it themselves.
const RUN_FAILURE_REASONS: [&str; 2] = ["RunContainerError", "PostStartHookError"];
/// What may come right as soon as there is another object that the pod refers to.
const MISSING_OBJECT_REASONS: [&str; 2] = ["CreateContainerConfigError", "ContainerCreating"];

impl PodWorkerState {
    /// Looks at what containers are to run: another image is tried at once, whatever became of the one before.
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

    /// Something has changed that the pod refers to: what failed for want of it is tried again at once.
    pub fn references_changed(&mut self, now: Timestamp) {
        self.references_changed_at = Some(now);
        let waiting = self.failures.values_mut().filter(|failure| failure.is_missing_objects());
        waiting.for_each(|failure| failure.retry_at = failure.retry_at.min(now));
    }

    /// Whether a run that has been running since `before` has become ready or unready.
    pub fn readiness_changed(&self, before: &HashMap<String, ContainerHealth>) -> bool {
        self.health.iter().any(|(id, now)| before.get(id).is_some_and(|before| before.ready != now.ready))
    }

    /// A container could not be started, which was begun then.
    pub fn record_failure(&mut self, container: &str, mut failure: StartFailure, started_at: Timestamp) {
        // What changed meanwhile may have come too late to be seen.
        if failure.is_missing_objects()
            && self.references_changed_at.is_some_and(|changed_at| changed_at >= started_at)
        {
            failure.retry_at = failure.failed_at;
        }
        self.failures.insert(container.to_owned(), failure);
    }
}

impl StartFailure {
    /// Nothing has failed, but something has to be waited for.
    pub fn waiting(reason: &str, message: String, now: Timestamp) -> StartFailure {
        StartFailure::with_delay(WAIT_RETRY, reason, message, now)
    }

    /// The same failure once more, or another.
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

    /// From when on it is said that nothing is tried for a while; only of images that cannot be pulled.
    pub fn back_off_visible_at(&self) -> Option<Timestamp> {
        (self.reason == ERR_IMAGE_PULL)
            .then(|| self.failed_at.checked_add(BACK_OFF_REPORT_DELAY).ok())
            .flatten()
    }

    /// Whether it is about a run that came to an end by it.
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
            // While the container was being started.
            check(reason, 4, 4, 5);
            check(reason, 3, 4, 15);
            check(reason, 20, 4, 15);
        }
        check("ErrImagePull", 7, 4, 15);
        check("CreateContainerError", 4, 4, 15);
    }
}
