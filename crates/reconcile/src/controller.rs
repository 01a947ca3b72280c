//! The reconcile loop: changes enqueue keys, workers process them, failed keys are retried with backoff.

use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use client::{Key, Object};
use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::cache::{Cache, ObjectUpdate};
use crate::ctx::Ctx;
use crate::metrics::QueueMetrics;
use crate::queue::WorkQueue;

/// When to process a key again if nothing about it changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReconcileAction {
    /// On the next change.
    AwaitChange,
    /// On the next change; pending requeues are dropped because the object does not exist.
    Forget,
    RequeueAt(Timestamp),
    RequeueAfter(Duration),
}

/// A controller: a work queue and the event handlers that fill it.
pub struct Controller<K = Key> {
    name: &'static str,
    shared: Arc<SharedQueue<K>>,
}

struct SharedQueue<K> {
    queue: Mutex<WorkQueue<K>>,
    notify: Notify,
    counts: Arc<QueueMetrics>,
}

/// Handle to add keys to a controller's queue.
pub struct Enqueue<K = Key>(Arc<SharedQueue<K>>);

impl<K> Clone for Enqueue<K> {
    fn clone(&self) -> Self {
        Enqueue(self.0.clone())
    }
}

impl<K: Clone + Eq + Hash + Ord + Send + 'static> Enqueue<K> {
    pub fn now(&self, key: K) {
        self.0.add(key);
    }

    pub fn after(&self, key: K, delay: Duration) {
        self.0.queue.lock().add_at(key, Instant::now() + delay);
        self.0.notify.notify_one();
    }
}

impl<K: Clone + Eq + Hash + Ord + Send> SharedQueue<K> {
    fn add(&self, key: K) {
        let mut queue = self.queue.lock();
        if queue.add(key) {
            self.counts.adds.fetch_add(1, Relaxed);
            self.counts.depth.store(queue.len() as u64, Relaxed);
            drop(queue);
            self.notify.notify_one();
        }
    }
}

impl<K: Clone + Eq + Hash + Ord + Send + Sync + std::fmt::Display + 'static> Controller<K> {
    /// `name` is the name of the controller's work queue upstream, for metrics.
    pub fn new(name: &'static str, ctx: &Ctx) -> Controller<K> {
        let counts = ctx.metrics.register(name);
        let shared = SharedQueue { queue: Mutex::default(), notify: Notify::new(), counts };
        Controller { name, shared: Arc::new(shared) }
    }

    /// Enqueues the keys that `keys` returns for each existing object and for each change.
    pub fn on<T: Object>(
        &self,
        cache: &Arc<Cache<T>>,
        keys: impl Fn(&ObjectUpdate<'_, T>, &mut dyn FnMut(K)) + Send + Sync + 'static,
    ) {
        let shared = self.shared.clone();
        cache.listen(move |changed| keys(&changed, &mut |key| shared.add(key)));
    }

    pub fn enqueue(&self) -> Enqueue<K> {
        Enqueue(self.shared.clone())
    }

    /// Runs up to `workers` reconciles in parallel until shutdown. Starts once all caches have synced, and
    /// pauses while a cache lacks a write of this process.
    pub async fn run<F, Work, E>(self, ctx: &Ctx, workers: usize, reconcile: F)
    where
        F: Fn(K) -> Work + Send + Sync + 'static,
        Work: Future<Output = Result<ReconcileAction, E>> + Send,
        E: std::error::Error + 'static,
    {
        let mut shutdown = ctx.shutdown.clone();
        tokio::select! {
            () = ctx.caches.wait_for_sync() => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
        let (caches, reconcile) = (ctx.caches.clone(), Arc::new(reconcile));
        let after_own_writes = move |key: K| {
            let (caches, reconcile) = (caches.clone(), reconcile.clone());
            async move {
                caches.wait_for_pending_writes().await;
                reconcile(key).await
            }
        };
        self.run_without_sync(ctx, workers, after_own_writes).await;
    }

    /// Like `run`, but does not wait for the caches: for controllers that have work before the first sync.
    pub async fn run_without_sync<F, Work, E>(self, ctx: &Ctx, workers: usize, reconcile: F)
    where
        F: Fn(K) -> Work + Send + Sync + 'static,
        Work: Future<Output = Result<ReconcileAction, E>> + Send,
        E: std::error::Error + 'static,
    {
        let mut shutdown = ctx.shutdown.clone();
        let reconcile = Arc::new(reconcile);
        let work = (0..workers).map(|_| self.work(ctx, &*reconcile));
        tokio::select! {
            _ = futures_util::future::join_all(work) => {}
            _ = shutdown.wait_for(|stop| *stop) => {}
        }
    }

    async fn work<F, Work, E>(&self, ctx: &Ctx, reconcile: &F)
    where
        F: Fn(K) -> Work,
        Work: Future<Output = Result<ReconcileAction, E>>,
        E: std::error::Error + 'static,
    {
        loop {
            let key = self.next().await;
            let span = tracing::debug_span!("reconcile", controller = self.name, %key);
            let started = Instant::now();
            let result = reconcile(key.clone()).instrument(span).await;
            let mut queue = self.shared.queue.lock();
            let now = Instant::now();
            match result {
                Ok(next) => {
                    queue.succeeded(&key);
                    match next {
                        ReconcileAction::AwaitChange => {}
                        ReconcileAction::Forget => queue.forget(&key),
                        ReconcileAction::RequeueAfter(delay) => queue.add_at(key.clone(), now + delay),
                        ReconcileAction::RequeueAt(at) => {
                            // Add 1 ms so that the deadline has passed when the key is taken.
                            let delay = at.duration_since(ctx.clock.now()).max(jiff::SignedDuration::ZERO);
                            let delay = Duration::try_from(delay).unwrap_or_default();
                            queue.add_at(key.clone(), now + delay + Duration::from_millis(1));
                        }
                    }
                }
                // The namespace controller deletes everything in the namespace, so a retry is useless.
                Err(error) if is_namespace_terminating(&error) => queue.succeeded(&key),
                Err(error) => {
                    self.shared.counts.retries.fetch_add(1, Relaxed);
                    queue.failed(&key, now);
                    log_error(self.name, &key, &error);
                }
            }
            queue.done(&key);
            self.shared.counts.depth.store(queue.len() as u64, Relaxed);
            self.shared.counts.observe_work(started.elapsed());
            drop(queue);
            // Wake a worker: the key may be ready again or have a deadline that no worker waits for yet.
            self.shared.notify.notify_one();
        }
    }

    async fn next(&self) -> K {
        loop {
            let deadline = {
                let mut queue = self.shared.queue.lock();
                if let Some(key) = queue.take(Instant::now()) {
                    let left = queue.len();
                    self.shared.counts.started.fetch_add(1, Relaxed);
                    self.shared.counts.depth.store(left as u64, Relaxed);
                    if left > 0 {
                        // One notification wakes one worker; pass it on for the remaining keys.
                        self.shared.notify.notify_one();
                    }
                    return key;
                }
                queue.next_deadline()
            };
            let notified = self.shared.notify.notified();
            match deadline {
                None => notified.await,
                Some(at) => tokio::select! {
                    () = notified => {}
                    () = tokio::time::sleep_until(at) => {}
                },
            }
        }
    }
}

/// Whether the API server rejected a create because the namespace is terminating. No retry can succeed.
fn is_namespace_terminating(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref::<client::Error>().is_some_and(client::Error::is_namespace_terminating)
}

/// Conflicts are normal with optimistic concurrency and logged at debug level only.
fn log_error(controller: &str, key: &impl std::fmt::Display, error: &(dyn std::error::Error + 'static)) {
    match error.downcast_ref::<client::Error>() {
        Some(conflict) if conflict.is_conflict() || conflict.is_not_found() => {
            tracing::debug!(controller, %key, %error, "write conflict or object not found, retrying")
        }
        _ => tracing::warn!(controller, %key, error, "reconcile failed, retrying"),
    }
}

#[cfg(test)]
mod tests;
