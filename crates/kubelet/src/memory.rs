//! What a pod's worker knows that the runtime does not: how probes went and what could not be started.
//! Lost with the process, and found out again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::{SignedDuration, Timestamp};

use crate::allocation::Record;
use crate::pod::back_off::BackOff;
use crate::pod::resize::said::Resizing;

/// What is known of one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// By the id of the run.
    pub health: HashMap<String, Health>,
    /// By the name of the container that could not be started.
    pub failures: BTreeMap<String, Failure>,
    /// By the name of the container that was started again.
    pub back_offs: BTreeMap<String, BackOff>,
    /// What containers are to run, by their names. All failures and pauses are of these.
    pub images: BTreeMap<String, String>,
    /// When something last changed that the pod refers to.
    pub news: Option<Timestamp>,
    /// Why there is no sandbox.
    pub sandbox_failure: Option<Failure>,
    /// How often containers were asked how they are: the container, which probe, whether the answer was good.
    pub asked: BTreeMap<(String, &'static str, bool), u64>,
    /// What it was promised and given, once it was let in.
    pub record: Option<Record>,
    /// How far it has come in being given something else.
    pub resizing: Resizing,
    /// Runs and failures of which was told that they are left alone for a while.
    pub told: BTreeSet<String>,
    /// Runs that were stopped for a resize: the container is started again at once, whatever they ended with.
    pub resized: BTreeSet<String>,
    /// They are made, and the pod's to change.
    pub has_volumes: bool,
    /// It was found to have a place on the node.
    pub let_in: bool,
    /// Why the pod was ended by the node: reason and message.
    pub ended: Option<(String, String)>,
    /// The machine goes down: what runs of it is ended and nothing is started, until the node starts again.
    pub is_suspended: bool,
    /// The seconds it has for that, where these are not its own to choose.
    pub end_within: Option<i64>,
}

/// How the probes of a running container went so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// The startup probe has succeeded, or there is none.
    pub started: bool,
    pub ready: bool,
    /// The liveness or the startup probe has failed too often.
    pub dead: bool,
}

/// Something that could not be done, and is tried again later.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// Such as `ErrImagePull`.
    pub reason: String,
    pub message: String,
    pub times: u32,
    pub at: Timestamp,
    pub again: Timestamp,
}

/// A failed attempt is what is said at first; then that it is left alone for a while.
const QUIET_AFTER: SignedDuration = SignedDuration::from_secs(2);
/// How long a thing that failed is left alone.
const PAUSE: SignedDuration = SignedDuration::from_secs(10);
/// The longest it becomes where it is doubled each time.
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_secs(300);
/// How long something is left alone that others have to do something for first.
const SOON: SignedDuration = SignedDuration::from_secs(1);
/// What is tried less and less often; containers that end are too, by a count of their own.
const TIRING: &str = "ErrImagePull";
/// What becomes of containers that were made; they end then, and tell of it themselves.
const OF_RUNS: [&str; 2] = ["RunContainerError", "PostStartHookError"];
/// What may come right as soon as there is another object that the pod refers to.
const FOR_WANT_OF_OBJECTS: [&str; 2] = ["CreateContainerConfigError", "ContainerCreating"];

impl Memory {
    /// Looks at what containers are to run: another image is tried at once, whatever became of the one before.
    pub fn see(&mut self, container: &str, image: &str) {
        if self.images.get(container).is_some_and(|known| known == image) {
            return;
        }
        if self.images.insert(container.to_owned(), image.to_owned()).is_some() {
            self.failures.remove(container);
            self.back_offs.remove(container);
            self.told.retain(|told| told.split(' ').next() != Some(container));
        }
    }

    /// Something has changed that the pod refers to: what failed for want of it is tried again at once.
    pub fn hear(&mut self, now: Timestamp) {
        self.news = Some(now);
        let waiting = self.failures.values_mut().filter(|failure| failure.wants_objects());
        waiting.for_each(|failure| failure.again = failure.again.min(now));
    }

    /// Whether a run that has been running since `before` has become ready or unready.
    pub fn has_other_readiness(&self, before: &HashMap<String, Health>) -> bool {
        self.health.iter().any(|(id, now)| before.get(id).is_some_and(|before| before.ready != now.ready))
    }

    /// A container could not be started, which was begun then.
    pub fn fail(&mut self, container: &str, mut failure: Failure, begun: Timestamp) {
        // What changed meanwhile may have come too late to be seen.
        if failure.wants_objects() && self.news.is_some_and(|news| news >= begun) {
            failure.again = failure.at;
        }
        self.failures.insert(container.to_owned(), failure);
    }
}

impl Failure {
    /// Nothing has failed, but something has to be waited for.
    pub fn soon(reason: &str, message: String, now: Timestamp) -> Failure {
        Failure::after(SOON, reason, message, now)
    }

    /// The same failure once more, or another.
    pub fn again(before: Option<&Failure>, reason: &str, message: String, now: Timestamp) -> Failure {
        let times = before.filter(|before| before.reason == reason).map_or(0, |before| before.times) + 1;
        let doublings = if reason == TIRING { (times - 1).min(10) } else { 0 };
        let pause = PAUSE.saturating_mul(1 << doublings).min(LONGEST_PAUSE);
        Failure { times, ..Failure::after(pause, reason, message, now) }
    }

    fn after(pause: SignedDuration, reason: &str, message: String, now: Timestamp) -> Failure {
        let again = now.checked_add(pause).unwrap_or(now);
        Failure { reason: reason.to_owned(), message, times: 1, at: now, again }
    }

    /// From when on it is said that nothing is tried for a while; only of images that cannot be pulled.
    pub fn quiet_from(&self) -> Option<Timestamp> {
        (self.reason == TIRING).then(|| self.at.checked_add(QUIET_AFTER).ok()).flatten()
    }

    /// Whether it is about a run that came to an end by it.
    pub fn is_of_run(&self) -> bool {
        OF_RUNS.contains(&self.reason.as_str())
    }

    fn wants_objects(&self) -> bool {
        FOR_WANT_OF_OBJECTS.contains(&self.reason.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn only_what_is_tiring_is_tried_less_and_less_often() {
        let check = |reasons: &[&str], expected: i64| {
            let mut failure = None;
            for reason in reasons {
                failure = Some(Failure::again(failure.as_ref(), reason, String::new(), time(0)));
            }
            let again = failure.map(|failure| failure.again.as_second());
            assert_eq!(again, Some(expected), "{reasons:?}");
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
    fn another_image_is_tried_at_once() {
        let mut memory = Memory::default();
        for name in ["a", "ab"] {
            memory.see(name, "web:1");
            let failure = Failure::again(None, "ErrImagePull", String::new(), time(5));
            memory.fail(name, failure, time(4));
            memory.told.insert(format!("{name} 1"));
        }
        let known = memory.clone();
        memory.see("a", "web:1");
        assert_eq!(memory, known);
        memory.see("a", "web:2");
        let told: Vec<&String> = memory.told.iter().collect();
        let failures: Vec<&String> = memory.failures.keys().collect();
        assert_eq!((failures, told), (vec![&"ab".to_owned()], vec![&"ab 1".to_owned()]));
    }

    #[test]
    fn what_is_missed_ends_the_pause_when_it_comes() {
        let check = |reason: &str, news: i64, begun: i64, expected: i64| {
            let mut memory = Memory::default();
            let failure = Failure::again(None, reason, String::new(), time(5));
            if news <= 5 {
                memory.hear(time(news));
            }
            memory.fail("a", failure, time(begun));
            if news > 5 {
                memory.hear(time(news));
            }
            assert_eq!(memory.failures["a"].again, time(expected), "{reason} {news} {begun}");
        };
        for reason in FOR_WANT_OF_OBJECTS {
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
