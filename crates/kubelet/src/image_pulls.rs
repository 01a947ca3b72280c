//! Pulls under way. One may take hours, and a pod has more to do meanwhile: to be told of, to be looked after, to go. So
//! its worker begins a pull and does not wait for it; it is called again when the pull has ended, one way or the other.
//!
//! Each pod pulls for itself, as itself: one that goes takes its pulls with it, and nobody else's.

use std::collections::HashMap;

use parking_lot::Mutex;
use runtime::cri::ImageSpec;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::start_container::StartError;

/// What came of a pull.
pub type PullResult = Result<ImageSpec, StartError>;

/// The pulls of all pods, by the pod's uid.
pub struct ImagePulls {
    all: Mutex<HashMap<String, HashMap<PullKey, PullState>>>,
    /// Whose turn it is.
    pub permits: Semaphore,
}

/// For which container of a pod, and which image.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PullKey {
    pub container: String,
    pub image: String,
}

enum PullState {
    #[expect(dead_code, reason = "it is there to be dropped")]
    InProgress(PullTask),
    Finished(PullResult),
}

/// How far a pull has come.
pub enum PullProgress {
    InProgress,
    Finished(PullResult),
}

/// A task that ends with this.
struct PullTask(AbortHandle);

impl Drop for PullTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ImagePulls {
    /// So many are made at once, or any number.
    pub fn new(max_parallel: Option<usize>) -> ImagePulls {
        let permits = Semaphore::new(max_parallel.unwrap_or(Semaphore::MAX_PERMITS).max(1));
        ImagePulls { all: Mutex::default(), permits }
    }

    /// A pull by a task that says [`Pulls::ended`] in the end. It is told of while it cannot end yet.
    pub fn start(&self, uid: &str, key: PullKey, spawn: impl FnOnce() -> AbortHandle) {
        let mut pulls = self.all.lock();
        pulls.entry(uid.to_owned()).or_default().insert(key, PullState::InProgress(PullTask(spawn())));
    }

    /// How far a pull has come, if it was begun.
    pub fn progress(&self, uid: &str, key: &PullKey) -> Option<PullProgress> {
        match self.all.lock().get(uid)?.get(key)? {
            PullState::InProgress(_) => Some(PullProgress::InProgress),
            PullState::Finished(result) => Some(PullProgress::Finished(result.clone())),
        }
    }

    /// A pull is over. Nobody wants to know where it was given up meanwhile.
    pub fn finish(&self, uid: &str, key: &PullKey, result: PullResult) {
        if let Some(pull) = self.all.lock().get_mut(uid).and_then(|pulls| pulls.get_mut(key)) {
            *pull = PullState::Finished(result);
        }
    }

    /// The container has made use of what was pulled for it, or cannot.
    pub fn consume(&self, uid: &str, container: &str) {
        let mut pulls = self.all.lock();
        if let Some(of_pod) = pulls.get_mut(uid) {
            of_pod.retain(|key, _| key.container != container);
            if of_pod.is_empty() {
                pulls.remove(uid);
            }
        }
    }

    /// Gives up all pulls of a pod.
    pub fn cancel(&self, uid: &str) {
        self.all.lock().remove(uid);
    }

    pub fn cancel_all(&self) {
        self.all.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pull_key(container: &str) -> PullKey {
        PullKey { container: container.to_owned(), image: "i".to_owned() }
    }

    #[tokio::test]
    async fn pulls_are_canceled_with_their_pod() {
        let pulls = ImagePulls::new(None);
        let pending_task = || tokio::spawn(std::future::pending::<()>());
        let (one, other) = (pending_task(), pending_task());
        let is_ended = |uid: &str| {
            pulls
                .progress(uid, &pull_key("a"))
                .map(|progress| matches!(progress, PullProgress::Finished(Ok(_))))
        };
        pulls.start("u1", pull_key("a"), || one.abort_handle());
        pulls.start("u2", pull_key("a"), || other.abort_handle());
        assert_eq!((is_ended("u1"), is_ended("u2")), (Some(false), Some(false)));
        pulls.cancel("u1");
        assert!(one.await.expect_err("given up").is_cancelled());
        pulls.finish("u1", &pull_key("a"), Ok(ImageSpec::default()));
        assert_eq!(is_ended("u1"), None, "nobody is left to know of it");
        pulls.finish("u2", &pull_key("a"), Ok(ImageSpec::default()));
        pulls.consume("u2", "b");
        assert_eq!(is_ended("u2"), Some(true), "what another uses is another's");
        pulls.consume("u2", "a");
        assert!(pulls.all.lock().is_empty());
    }
}
