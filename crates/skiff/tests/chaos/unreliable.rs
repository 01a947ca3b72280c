//! A connection on which things go wrong, as often as a seed and a rate say.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use client::{Connection, Error, Failure, Feed, News};
use http::{Method, Request, Response};
use tokio::sync::Notify;

/// Where all chance comes from.
pub struct Dice {
    state: AtomicU64,
    /// How often something goes wrong, in per mille; 0 is never.
    rate: AtomicU64,
    /// The control loops are to be killed, right now.
    pub kill: Notify,
}

impl Dice {
    pub fn new(seed: u64, rate: u64) -> Arc<Dice> {
        Arc::new(Dice { state: AtomicU64::new(seed), rate: AtomicU64::new(rate), kill: Notify::new() })
    }

    /// A number below `limit`.
    pub fn below(&self, limit: u64) -> u64 {
        // SplitMix64.
        let mut z = self.state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    /// Whether something goes wrong that does so `weight` times as often as most things.
    fn strikes(&self, weight: u64) -> bool {
        self.below(1_000) < self.rate.load(Ordering::Relaxed) * weight
    }

    pub fn calm(&self) {
        self.rate.store(0, Ordering::Relaxed);
    }
}

/// A way to the API server that loses requests, answers and watches.
pub struct Unreliable {
    pub inner: Arc<dyn Connection>,
    pub dice: Arc<Dice>,
}

#[async_trait]
impl Connection for Unreliable {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        if request.method() == Method::GET {
            return self.inner.send(request).await;
        }
        if self.dice.strikes(1) {
            return Err(lost("the request"));
        }
        if self.dice.strikes(1) {
            let failure = Failure {
                code: 409,
                reason: "Conflict".into(),
                message: "somebody was faster".into(),
                ..Failure::default()
            };
            return Err(Error::Api(Box::new(failure)));
        }
        let answer = self.inner.send(request).await;
        if self.dice.strikes(1) {
            // Done, but the one who asked never learns of it, nor does anything else: killed between two acts.
            self.dice.kill.notify_one();
            std::future::pending::<()>().await;
        }
        if self.dice.strikes(2) {
            return Err(lost("the answer"));
        }
        answer
    }

    async fn follow(&self, collection: &str) -> Result<Box<dyn Feed>, Error> {
        let inner = self.inner.follow(collection).await?;
        Ok(Box::new(UnreliableFeed { inner, dice: self.dice.clone() }))
    }

    fn acting_as(&self, name: &str) -> Option<Arc<dyn Connection>> {
        let inner = self.inner.acting_as(name)?;
        Some(Arc::new(Unreliable { inner, dice: self.dice.clone() }))
    }
}

/// News that come late, so that those of different kinds change places, or not at all until a new list.
struct UnreliableFeed {
    inner: Box<dyn Feed>,
    dice: Arc<Dice>,
}

#[async_trait]
impl Feed for UnreliableFeed {
    async fn next(&mut self) -> Result<News, Error> {
        let news = self.inner.next().await?;
        if self.dice.strikes(1) {
            return Err(lost("the watch"));
        }
        if self.dice.strikes(10) {
            tokio::time::sleep(Duration::from_millis(self.dice.below(50))).await;
        }
        Ok(news)
    }
}

/// A way to the API server on which no answer to a POST ever arrives, and news are late.
pub struct Forgetful(pub Arc<dyn Connection>);

#[async_trait]
impl Connection for Forgetful {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        let is_post = request.method() == Method::POST;
        let answer = self.0.send(request).await;
        if is_post { Err(lost("the answer")) } else { answer }
    }

    async fn follow(&self, collection: &str) -> Result<Box<dyn Feed>, Error> {
        Ok(Box::new(Late(self.0.follow(collection).await?)))
    }

    fn acting_as(&self, name: &str) -> Option<Arc<dyn Connection>> {
        Some(Arc::new(Forgetful(self.0.acting_as(name)?)))
    }
}

struct Late(Box<dyn Feed>);

#[async_trait]
impl Feed for Late {
    async fn next(&mut self) -> Result<News, Error> {
        let news = self.0.next().await?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok(news)
    }
}

fn lost(what: &str) -> Error {
    Error::Unreachable(format!("{what} is lost").into())
}
