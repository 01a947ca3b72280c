//! Image pulls in progress. A pull may take hours, and meanwhile the pod worker has to report the
//! status, check the other containers and terminate the pod. So it starts a pull without waiting
//! for it, and runs again when the pull has finished.
//!
//! Each pod pulls on its own, with its own credentials. Its pulls are canceled with it, and no
//! others.

use std::collections::HashMap;

use parking_lot::Mutex;
use runtime::cri::ImageSpec;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::start_container::StartError;

/// The pulled image, or why the container cannot be started.
pub type PullResult = Result<ImageSpec, StartError>;

/// The pulls of all pods by pod UID.
pub struct ImagePulls {
    all: Mutex<HashMap<String, HashMap<PullKey, PullState>>>,
    /// Limits the number of parallel pulls.
    pub permits: Semaphore,
}

/// A container of a pod and its image.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PullKey {
    pub container: String,
    pub image: String,
}

enum PullState {
    #[expect(dead_code, reason = "dropping it aborts the task")]
    InProgress(PullTask),
    Finished(PullResult),
}

/// The state of a pull.
pub enum PullProgress {
    InProgress,
    Finished(PullResult),
}

/// A task that is aborted when this is dropped.
struct PullTask(AbortHandle);

impl Drop for PullTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ImagePulls {
    /// Allows this many parallel pulls, or any number.
    pub fn new(max_parallel: Option<usize>) -> ImagePulls {
        let permits = Semaphore::new(max_parallel.unwrap_or(Semaphore::MAX_PERMITS).max(1));
        ImagePulls { all: Mutex::default(), permits }
    }

    /// Starts a pull, whose task calls [`ImagePulls::finish`] at its end. The lock is held while it
    /// is spawned, so that it cannot finish before it is known.
    pub fn start(&self, uid: &str, key: PullKey, spawn: impl FnOnce() -> AbortHandle) {
        let mut pulls = self.all.lock();
        pulls.entry(uid.to_owned()).or_default().insert(key, PullState::InProgress(PullTask(spawn())));
    }

    /// The state of a pull, if it was started.
    pub fn progress(&self, uid: &str, key: &PullKey) -> Option<PullProgress> {
        match self.all.lock().get(uid)?.get(key)? {
            PullState::InProgress(_) => Some(PullProgress::InProgress),
            PullState::Finished(result) => Some(PullProgress::Finished(result.clone())),
        }
    }

    /// Records the result of a pull, unless the pull was canceled meanwhile.
    pub fn finish(&self, uid: &str, key: &PullKey, result: PullResult) {
        if let Some(pull) = self.all.lock().get_mut(uid).and_then(|pulls| pulls.get_mut(key)) {
            *pull = PullState::Finished(result);
        }
    }

    /// Removes the pulls of a container, whose results have been used.
    pub fn consume(&self, uid: &str, container: &str) {
        let mut pulls = self.all.lock();
        if let Some(of_pod) = pulls.get_mut(uid) {
            of_pod.retain(|key, _| key.container != container);
            if of_pod.is_empty() {
                pulls.remove(uid);
            }
        }
    }

    /// Cancels all pulls of a pod.
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
        assert_eq!(is_ended("u1"), None, "a canceled pull has no result");
        pulls.finish("u2", &pull_key("a"), Ok(ImageSpec::default()));
        pulls.consume("u2", "b");
        assert_eq!(is_ended("u2"), Some(true), "pulls of other containers remain");
        pulls.consume("u2", "a");
        assert!(pulls.all.lock().is_empty());
    }
}
