//! Pulls under way. One may take hours, and a pod has more to do meanwhile: to be told of, to be looked after, to go. So
//! its worker begins a pull and does not wait for it; it is called again when the pull has ended, one way or the other.
//!
//! Each pod pulls for itself, as itself: one that goes takes its pulls with it, and nobody else's.

use std::collections::HashMap;

use parking_lot::Mutex;
use runtime::cri::ImageSpec;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::start::Failed;

/// What came of a pull.
pub type Outcome = Result<ImageSpec, Failed>;

/// The pulls of all pods, by the pod's uid.
pub struct Pulls {
    all: Mutex<HashMap<String, HashMap<For, Pull>>>,
    /// Whose turn it is.
    pub turns: Semaphore,
}

/// For which container of a pod, and which image.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct For {
    pub container: String,
    pub image: String,
}

enum Pull {
    #[expect(dead_code, reason = "it is there to be dropped")]
    UnderWay(Aborted),
    Ended(Outcome),
}

/// How far a pull has come.
pub enum Progress {
    UnderWay,
    Ended(Outcome),
}

/// A task that ends with this.
struct Aborted(AbortHandle);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Pulls {
    /// So many are made at once, or any number.
    pub fn new(at_once: Option<usize>) -> Pulls {
        let turns = Semaphore::new(at_once.unwrap_or(Semaphore::MAX_PERMITS).max(1));
        Pulls { all: Mutex::default(), turns }
    }

    /// A pull by a task that says [`Pulls::ended`] in the end. It is told of while it cannot end yet.
    pub fn begin(&self, uid: &str, what: For, begin: impl FnOnce() -> AbortHandle) {
        let mut pulls = self.all.lock();
        pulls.entry(uid.to_owned()).or_default().insert(what, Pull::UnderWay(Aborted(begin())));
    }

    /// How far a pull has come, if it was begun.
    pub fn progress(&self, uid: &str, what: &For) -> Option<Progress> {
        match self.all.lock().get(uid)?.get(what)? {
            Pull::UnderWay(_) => Some(Progress::UnderWay),
            Pull::Ended(outcome) => Some(Progress::Ended(outcome.clone())),
        }
    }

    /// A pull is over. Nobody wants to know where it was given up meanwhile.
    pub fn ended(&self, uid: &str, what: &For, outcome: Outcome) {
        if let Some(pull) = self.all.lock().get_mut(uid).and_then(|pulls| pulls.get_mut(what)) {
            *pull = Pull::Ended(outcome);
        }
    }

    /// The container has made use of what was pulled for it, or cannot.
    pub fn used(&self, uid: &str, container: &str) {
        let mut pulls = self.all.lock();
        if let Some(of_pod) = pulls.get_mut(uid) {
            of_pod.retain(|what, _| what.container != container);
            if of_pod.is_empty() {
                pulls.remove(uid);
            }
        }
    }

    /// Gives up all pulls of a pod.
    pub fn give_up(&self, uid: &str) {
        self.all.lock().remove(uid);
    }

    pub fn give_up_all(&self) {
        self.all.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pull(container: &str) -> For {
        For { container: container.to_owned(), image: "i".to_owned() }
    }

    #[tokio::test]
    async fn a_pull_ends_with_its_pod_and_no_other() {
        let pulls = Pulls::new(None);
        let endless = || tokio::spawn(std::future::pending::<()>());
        let (one, other) = (endless(), endless());
        let is_ended = |uid: &str| {
            pulls.progress(uid, &pull("a")).map(|progress| matches!(progress, Progress::Ended(Ok(_))))
        };
        pulls.begin("u1", pull("a"), || one.abort_handle());
        pulls.begin("u2", pull("a"), || other.abort_handle());
        assert_eq!((is_ended("u1"), is_ended("u2")), (Some(false), Some(false)));
        pulls.give_up("u1");
        assert!(one.await.expect_err("given up").is_cancelled());
        pulls.ended("u1", &pull("a"), Ok(ImageSpec::default()));
        assert_eq!(is_ended("u1"), None, "nobody is left to know of it");
        pulls.ended("u2", &pull("a"), Ok(ImageSpec::default()));
        pulls.used("u2", "b");
        assert_eq!(is_ended("u2"), Some(true), "what another uses is another's");
        pulls.used("u2", "a");
        assert!(pulls.all.lock().is_empty());
    }
}
