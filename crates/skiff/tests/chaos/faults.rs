//! A connection with injected faults, controlled by a seed and a rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use client::{Connection, Error, Failure, Watch, WatchEvent};
use http::{Method, Request, Response};
use tokio::sync::Notify;

/// The source of all random decisions.
pub struct FaultSource {
    state: AtomicU64,
    /// Fault rate per mille; 0 disables faults.
    rate: AtomicU64,
    /// Signals that the controllers are to be killed.
    pub kill: Notify,
}

impl FaultSource {
    pub fn new(seed: u64, rate: u64) -> Arc<FaultSource> {
        Arc::new(FaultSource { state: AtomicU64::new(seed), rate: AtomicU64::new(rate), kill: Notify::new() })
    }

    /// A random number below `limit`.
    pub fn below(&self, limit: u64) -> u64 {
        // SplitMix64.
        let mut z = self.state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    /// Whether to inject a fault that is `weight` times as frequent as most others.
    fn should_fail(&self, weight: u64) -> bool {
        self.below(1_000) < self.rate.load(Ordering::Relaxed) * weight
    }

    pub fn disable(&self) {
        self.rate.store(0, Ordering::Relaxed);
    }
}

/// A connection to the API server that loses requests, responses and watches.
pub struct LossyConnection {
    pub inner: Arc<dyn Connection>,
    pub faults: Arc<FaultSource>,
}

#[async_trait]
impl Connection for LossyConnection {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        if request.method() == Method::GET {
            return self.inner.send(request).await;
        }
        if self.faults.should_fail(1) {
            return Err(unreachable_error("the request"));
        }
        if self.faults.should_fail(1) {
            let failure = Failure {
                code: 409,
                reason: "Conflict".into(),
                message: "the object has been modified".into(),
                ..Failure::default()
            };
            return Err(Error::Api(Box::new(failure)));
        }
        let answer = self.inner.send(request).await;
        if self.faults.should_fail(1) {
            // The write was applied, but the caller never gets a response and is killed: a crash
            // between two writes.
            self.faults.kill.notify_one();
            std::future::pending::<()>().await;
        }
        if self.faults.should_fail(2) {
            return Err(unreachable_error("the answer"));
        }
        answer
    }

    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error> {
        let inner = self.inner.watch(collection).await?;
        Ok(Box::new(LossyWatch { inner, faults: self.faults.clone() }))
    }

    fn impersonate(&self, name: &str) -> Option<Arc<dyn Connection>> {
        let inner = self.inner.impersonate(name)?;
        Some(Arc::new(LossyConnection { inner, faults: self.faults.clone() }))
    }
}

/// A watch whose events are delayed, so that those of different kinds are reordered, or that ends and
/// requires a new list.
struct LossyWatch {
    inner: Box<dyn Watch>,
    faults: Arc<FaultSource>,
}

#[async_trait]
impl Watch for LossyWatch {
    async fn next(&mut self) -> Result<WatchEvent, Error> {
        let event = self.inner.next().await?;
        if self.faults.should_fail(1) {
            return Err(unreachable_error("the watch"));
        }
        if self.faults.should_fail(10) {
            tokio::time::sleep(Duration::from_millis(self.faults.below(50))).await;
        }
        Ok(event)
    }
}

/// A connection to the API server that loses every response to a POST and delays watch events.
pub struct LostResponseConnection(pub Arc<dyn Connection>);

#[async_trait]
impl Connection for LostResponseConnection {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        let is_post = request.method() == Method::POST;
        let answer = self.0.send(request).await;
        if is_post { Err(unreachable_error("the answer")) } else { answer }
    }

    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error> {
        Ok(Box::new(DelayedWatch(self.0.watch(collection).await?)))
    }

    fn impersonate(&self, name: &str) -> Option<Arc<dyn Connection>> {
        Some(Arc::new(LostResponseConnection(self.0.impersonate(name)?)))
    }
}

struct DelayedWatch(Box<dyn Watch>);

#[async_trait]
impl Watch for DelayedWatch {
    async fn next(&mut self) -> Result<WatchEvent, Error> {
        let event = self.0.next().await?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok(event)
    }
}

fn unreachable_error(what: &str) -> Error {
    Error::Unreachable(format!("{what} is lost").into())
}
