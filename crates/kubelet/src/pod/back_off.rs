//! The restart back-off of containers (`CrashLoopBackOff`). Pure.
//!
//! It is counted as upstream does: the first restart is immediate, the second is delayed by ten
//! seconds, and then the delay doubles. A long run resets it. The runtime has only the last runs of
//! a container, so the delay is kept in memory. A restart of the kubelet resets it.

use jiff::{SignedDuration, Timestamp};

use crate::observed::{ContainerRun, State};
use crate::worker_state::{PodWorkerState, StartFailure};

const INITIAL_BACK_OFF: SignedDuration = SignedDuration::from_secs(10);
/// The default limit of the delay.
pub const MAX_BACK_OFF: SignedDuration = SignedDuration::from_secs(300);
/// A run that is longer than this resets the back-off.
const BACK_OFF_RESET_AFTER: SignedDuration = SignedDuration::from_secs(600);
/// How long upstream waits at most until it syncs a pod again.
const RESYNC_INTERVAL: SignedDuration = SignedDuration::from_secs(60);

/// The back-off of a container that was restarted.
#[derive(Clone, Debug, PartialEq)]
pub struct BackOff {
    /// The ID of the previous run, whose delay has passed.
    previous_run: String,
    started_at: Timestamp,
    /// The delay after the exit of the current run.
    delay: SignedDuration,
}

impl BackOff {
    fn new(
        before: Option<&BackOff>,
        run: &ContainerRun,
        end: Timestamp,
        now: Timestamp,
        max_delay: SignedDuration,
    ) -> BackOff {
        let delay = match before {
            // This restart was attempted before and failed. It does not increase the delay.
            Some(before) if before.previous_run == run.id => before.delay,
            Some(before) if !before.is_reset(end) => before.delay.saturating_mul(2),
            _ => INITIAL_BACK_OFF,
        };
        BackOff { previous_run: run.id.clone(), started_at: now, delay: delay.min(max_delay) }
    }

    fn is_reset(&self, end: Timestamp) -> bool {
        end.duration_since(self.started_at) > BACK_OFF_RESET_AFTER
    }

    /// When the next run may start.
    fn restart_time(&self, run: &ContainerRun, end: Timestamp) -> Timestamp {
        if self.previous_run == run.id || self.is_reset(end) {
            return end;
        }
        // A run does not end before it started, even if the clock was set back or the runtime has
        // not noticed the start.
        end.max(self.started_at).checked_add(self.delay).unwrap_or(end)
    }
}

impl PodWorkerState {
    /// Records that a container restarts now after `run`. The delay is at most `max_delay`.
    pub fn record_restart(&mut self, run: &ContainerRun, now: Timestamp, max_delay: SignedDuration) {
        let State::Exited { at, .. } = run.state else { return };
        // A restart for a resize is not a failure.
        if self.stopped_for_resize.contains(&run.id) {
            return;
        }
        let next = BackOff::new(self.back_offs.get(&run.name), run, at, now, max_delay);
        self.back_offs.insert(run.name.clone(), next);
    }
}

/// When a container that has exited may restart.
pub fn restart_at(run: &ContainerRun, worker_state: &PodWorkerState) -> Option<Timestamp> {
    let State::Exited { at, .. } = run.state else { return None };
    if worker_state.stopped_for_resize.contains(&run.id) {
        return Some(at);
    }
    Some(worker_state.back_offs.get(&run.name).map_or(at, |known| known.restart_time(run, at)))
}

/// Why a container could not be started. `None` if its newest run ended by that failure, since that
/// run is subject to the restart back-off. A run older than the last attempt does not count.
pub fn start_failure<'m>(
    container: &str,
    run: Option<&ContainerRun>,
    worker_state: &'m PodWorkerState,
) -> Option<&'m StartFailure> {
    let is_last = |run: &ContainerRun| {
        let is_after_restart =
            worker_state.back_offs.get(&run.name).is_some_and(|known| known.previous_run == run.id);
        matches!(run.state, State::Exited { .. }) && !is_after_restart
    };
    let failure = worker_state.failures.get(container)?;
    Some(failure).filter(|failure| !(failure.ended_run() && run.is_some_and(is_last)))
}

/// The back-off delay of a container that has exited, as the status shows it.
pub fn back_off_delay(run: &ContainerRun, worker_state: &PodWorkerState) -> SignedDuration {
    worker_state.back_offs.get(&run.name).map_or(SignedDuration::ZERO, |known| known.delay)
}

/// When the status of a container that has exited changes to `CrashLoopBackOff`. Upstream notices
/// the back-off after it has reported the exit, and reports it in the next sync of the pod: when
/// the delay is over, but after a minute at the latest.
pub fn back_off_visible_at(run: &ContainerRun, worker_state: &PodWorkerState) -> Option<Timestamp> {
    let State::Exited { at, .. } = run.state else { return None };
    let then = restart_at(run, worker_state).filter(|then| *then > at)?;
    Some(at.checked_add(RESYNC_INTERVAL).map_or(then, |resync| resync.min(then)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observed::CreatedFrom;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).expect("a time")
    }

    fn container_run(attempt: usize, state: State) -> ContainerRun {
        ContainerRun {
            id: format!("a#{attempt}"),
            sandbox: String::new(),
            name: "a".into(),
            attempt: u32::try_from(attempt).expect("a number"),
            state,
            image: String::new(),
            image_id: String::new(),
            reason: String::new(),
            message: String::new(),
            user: None,
            created_from: CreatedFrom::default(),
            resources: None,
        }
    }

    #[test]
    fn back_off_grows_until_a_long_run() {
        let check_within = |max_delay: SignedDuration, duration: &[i64], expected: &[i64]| {
            let (mut worker_state, mut now, mut back_offs) = (PodWorkerState::default(), 0, Vec::new());
            for (attempt, duration) in duration.iter().enumerate() {
                let (since, at) = (time(now), time(now + duration));
                let run = container_run(attempt, State::Exited { since, at, code: 1 });
                let next = restart_at(&run, &worker_state).expect("the run has exited");
                back_offs.push(next.duration_since(at).as_secs());
                worker_state.record_restart(&run, next, max_delay);
                assert_eq!(restart_at(&run, &worker_state), Some(at), "its delay has passed");
                now = next.as_second() - 1_000_000;
            }
            assert_eq!(back_offs, expected, "{duration:?}");
        };
        let check = |duration: &[i64], expected: &[i64]| check_within(MAX_BACK_OFF, duration, expected);
        check(&[1; 8], &[0, 10, 20, 40, 80, 160, 300, 300]);
        check(&[1, 1, 1, 1, 700, 1, 1], &[0, 10, 20, 40, 0, 10, 20]);
        check(&[1, 1, 600, 1], &[0, 10, 20, 40]);
        check(&[9000, 1, 1], &[0, 10, 20]);
        let seconds = SignedDuration::from_secs;
        check_within(seconds(30), &[1; 6], &[0, 10, 20, 30, 30, 30]);
        check_within(seconds(2), &[1; 4], &[0, 2, 2, 2]);
    }

    #[test]
    fn failed_start_does_not_increase_the_back_off() {
        let mut worker_state = PodWorkerState::default();
        let run = |attempt| container_run(attempt, State::Exited { since: time(0), at: time(1), code: 1 });
        for _ in 0..5 {
            worker_state.record_restart(&run(0), time(2), MAX_BACK_OFF);
        }
        assert_eq!(
            restart_at(&run(1), &worker_state),
            Some(time(12)),
            "the delay counts from the start of the run at the earliest"
        );
    }
}
