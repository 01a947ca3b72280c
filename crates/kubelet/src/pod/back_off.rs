//! How long containers are left alone that end again and again. Pure.
//!
//! As upstream counts it: the first end costs no time, the next ten seconds, then twice as long each time; and who has
//! lasted begins as if nothing had happened. Only the last runs of a container are known, so the count is remembered. It is
//! lost with the process, and begins anew.

use jiff::{SignedDuration, Timestamp};

use crate::observed::{ContainerRun, State};
use crate::worker_state::{PodWorkerState, StartFailure};

const INITIAL_BACK_OFF: SignedDuration = SignedDuration::from_secs(10);
/// The longest pause, where nobody has said otherwise.
pub const MAX_BACK_OFF: SignedDuration = SignedDuration::from_secs(300);
/// One that ran longer than this has earned a new beginning.
const BACK_OFF_RESET_AFTER: SignedDuration = SignedDuration::from_secs(600);
/// How long a pod is left alone at most, upstream.
const RESYNC_INTERVAL: SignedDuration = SignedDuration::from_secs(60);

/// What a container has to expect that was started again.
#[derive(Clone, Debug, PartialEq)]
pub struct BackOff {
    /// The run before, which has had its pause.
    previous_run: String,
    started_at: Timestamp,
    /// The pause when it ends again.
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
            // It was tried before, and came to nothing.
            Some(before) if before.previous_run == run.id => before.delay,
            Some(before) if !before.is_reset(end) => before.delay.saturating_mul(2),
            _ => INITIAL_BACK_OFF,
        };
        BackOff { previous_run: run.id.clone(), started_at: now, delay: delay.min(max_delay) }
    }

    fn is_reset(&self, end: Timestamp) -> bool {
        end.duration_since(self.started_at) > BACK_OFF_RESET_AFTER
    }

    /// When the next run may begin.
    fn restart_time(&self, run: &ContainerRun, end: Timestamp) -> Timestamp {
        if self.previous_run == run.id || self.is_reset(end) {
            return end;
        }
        // No run ends before it begins, whatever the clock says, or a runtime that has yet to notice.
        end.max(self.started_at).checked_add(self.delay).unwrap_or(end)
    }
}

impl PodWorkerState {
    /// A container is started again now, whose newest run this was; no pause is to be longer than `longest`.
    pub fn record_restart(&mut self, run: &ContainerRun, now: Timestamp, max_delay: SignedDuration) {
        let State::Exited { at, .. } = run.state else { return };
        if self.stopped_for_resize.contains(&run.id) {
            return;
        }
        let next = BackOff::new(self.back_offs.get(&run.name), run, at, now, max_delay);
        self.back_offs.insert(run.name.clone(), next);
    }
}

/// When a container that has ended may be started again.
pub fn restart_at(run: &ContainerRun, worker_state: &PodWorkerState) -> Option<Timestamp> {
    let State::Exited { at, .. } = run.state else { return None };
    if worker_state.stopped_for_resize.contains(&run.id) {
        return Some(at);
    }
    Some(worker_state.back_offs.get(&run.name).map_or(at, |known| known.restart_time(run, at)))
}

/// Why a container could not be started, unless its newest run has ended by it: that one has the pause of all that have
/// ended. One that is older than the last try is not meant.
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

/// The pause that a container that has ended is made to keep, as it is told.
pub fn back_off_delay(run: &ContainerRun, worker_state: &PodWorkerState) -> SignedDuration {
    worker_state.back_offs.get(&run.name).map_or(SignedDuration::ZERO, |known| known.delay)
}

/// From when on one sees of a container that has ended that it is made to wait. Upstream notices that when it has already
/// told how the container ended, and tells it when it looks at the pod next: when the pause is over, or after a minute.
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
                let next = restart_at(&run, &worker_state).expect("it is over");
                back_offs.push(next.duration_since(at).as_secs());
                worker_state.record_restart(&run, next, max_delay);
                assert_eq!(restart_at(&run, &worker_state), Some(at), "it has had its pause");
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
        assert_eq!(restart_at(&run(1), &worker_state), Some(time(12)), "from when it began at the earliest");
    }
}
