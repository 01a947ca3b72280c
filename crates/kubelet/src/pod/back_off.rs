//! How long containers are left alone that end again and again. Pure.
//!
//! As upstream counts it: the first end costs no time, the next ten seconds, then twice as long each time; and who has
//! lasted begins as if nothing had happened. Only the last runs of a container are known, so the count is remembered. It is
//! lost with the process, and begins anew.

use jiff::{SignedDuration, Timestamp};

use crate::memory::{Failure, Memory};
use crate::observed::{Ran, State};

const FIRST: SignedDuration = SignedDuration::from_secs(10);
/// The longest pause, where nobody has said otherwise.
pub const LONGEST: SignedDuration = SignedDuration::from_secs(300);
/// One that ran longer than this has earned a new beginning.
const CALM: SignedDuration = SignedDuration::from_secs(600);
/// How long a pod is left alone at most, upstream.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_secs(60);

/// What a container has to expect that was started again.
#[derive(Clone, Debug, PartialEq)]
pub struct BackOff {
    /// The run before, which has had its pause.
    after: String,
    since: Timestamp,
    /// The pause when it ends again.
    pause: SignedDuration,
}

impl BackOff {
    fn new(
        before: Option<&BackOff>,
        run: &Ran,
        end: Timestamp,
        now: Timestamp,
        longest: SignedDuration,
    ) -> BackOff {
        let pause = match before {
            // It was tried before, and came to nothing.
            Some(before) if before.after == run.id => before.pause,
            Some(before) if !before.is_calm(end) => before.pause.saturating_mul(2),
            _ => FIRST,
        };
        BackOff { after: run.id.clone(), since: now, pause: pause.min(longest) }
    }

    fn is_calm(&self, end: Timestamp) -> bool {
        end.duration_since(self.since) > CALM
    }

    /// When the next run may begin.
    fn end(&self, run: &Ran, end: Timestamp) -> Timestamp {
        if self.after == run.id || self.is_calm(end) {
            return end;
        }
        // No run ends before it begins, whatever the clock says, or a runtime that has yet to notice.
        end.max(self.since).checked_add(self.pause).unwrap_or(end)
    }
}

impl Memory {
    /// A container is started again now, whose newest run this was; no pause is to be longer than `longest`.
    pub fn start_again(&mut self, run: &Ran, now: Timestamp, longest: SignedDuration) {
        let State::Exited { at, .. } = run.state else { return };
        if self.resized.contains(&run.id) {
            return;
        }
        let next = BackOff::new(self.back_offs.get(&run.name), run, at, now, longest);
        self.back_offs.insert(run.name.clone(), next);
    }
}

/// When a container that has ended may be started again.
pub fn restart_at(run: &Ran, memory: &Memory) -> Option<Timestamp> {
    let State::Exited { at, .. } = run.state else { return None };
    if memory.resized.contains(&run.id) {
        return Some(at);
    }
    Some(memory.back_offs.get(&run.name).map_or(at, |known| known.end(run, at)))
}

/// Why a container could not be started, unless its newest run has ended by it: that one has the pause of all that have
/// ended. One that is older than the last try is not meant.
pub fn failure<'m>(container: &str, run: Option<&Ran>, memory: &'m Memory) -> Option<&'m Failure> {
    let is_last = |run: &Ran| {
        let was_tried_again = memory.back_offs.get(&run.name).is_some_and(|known| known.after == run.id);
        matches!(run.state, State::Exited { .. }) && !was_tried_again
    };
    let failure = memory.failures.get(container)?;
    Some(failure).filter(|failure| !(failure.is_of_run() && run.is_some_and(is_last)))
}

/// The pause that a container that has ended is made to keep, as it is told.
pub fn pause(run: &Ran, memory: &Memory) -> SignedDuration {
    memory.back_offs.get(&run.name).map_or(SignedDuration::ZERO, |known| known.pause)
}

/// From when on one sees of a container that has ended that it is made to wait. Upstream notices that when it has already
/// told how the container ended, and tells it when it looks at the pod next: when the pause is over, or after a minute.
pub fn waits_from(run: &Ran, memory: &Memory) -> Option<Timestamp> {
    let State::Exited { at, .. } = run.state else { return None };
    let then = restart_at(run, memory).filter(|then| *then > at)?;
    Some(at.checked_add(LOOK_AGAIN).map_or(then, |look| look.min(then)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observed::MadeOf;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).expect("a time")
    }

    fn ran(attempt: usize, state: State) -> Ran {
        Ran {
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
            made_of: MadeOf::default(),
            resources: None,
        }
    }

    #[test]
    fn pauses_grow_until_a_run_has_lasted() {
        let check_within = |longest: SignedDuration, lasted: &[i64], expected: &[i64]| {
            let (mut memory, mut now, mut pauses) = (Memory::default(), 0, Vec::new());
            for (attempt, lasted) in lasted.iter().enumerate() {
                let (since, at) = (time(now), time(now + lasted));
                let run = ran(attempt, State::Exited { since, at, code: 1 });
                let next = restart_at(&run, &memory).expect("it is over");
                pauses.push(next.duration_since(at).as_secs());
                memory.start_again(&run, next, longest);
                assert_eq!(restart_at(&run, &memory), Some(at), "it has had its pause");
                now = next.as_second() - 1_000_000;
            }
            assert_eq!(pauses, expected, "{lasted:?}");
        };
        let check = |lasted: &[i64], expected: &[i64]| check_within(LONGEST, lasted, expected);
        check(&[1; 8], &[0, 10, 20, 40, 80, 160, 300, 300]);
        check(&[1, 1, 1, 1, 700, 1, 1], &[0, 10, 20, 40, 0, 10, 20]);
        check(&[1, 1, 600, 1], &[0, 10, 20, 40]);
        check(&[9000, 1, 1], &[0, 10, 20]);
        let seconds = SignedDuration::from_secs;
        check_within(seconds(30), &[1; 6], &[0, 10, 20, 30, 30, 30]);
        check_within(seconds(2), &[1; 4], &[0, 2, 2, 2]);
    }

    #[test]
    fn a_try_that_came_to_nothing_costs_nothing_more() {
        let mut memory = Memory::default();
        let run = |attempt| ran(attempt, State::Exited { since: time(0), at: time(1), code: 1 });
        for _ in 0..5 {
            memory.start_again(&run(0), time(2), LONGEST);
        }
        assert_eq!(restart_at(&run(1), &memory), Some(time(12)), "from when it began at the earliest");
    }
}
