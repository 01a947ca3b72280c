//! Limits large responses to all but one worker thread while short requests arrive.
//!
//! The write budget alone keeps large lists from blocking a worker for long, but each step of a
//! small write still waits for every list's next step, and on a machine with few CPUs the readers
//! of the lists compete as well. So connections with large responses need a permit to be polled,
//! and there is one permit less than worker threads.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use http::Response;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use crate::body::Body;

/// How long after a short request another one is expected.
const SHORT_REQUEST_WINDOW: Duration = Duration::from_millis(100);

pub struct LargeResponseLimiter {
    permits: Arc<Semaphore>,
    started: Instant,
    /// The last short request, in milliseconds after `started`; 0 if there was none.
    last_short_millis: AtomicU64,
}

impl LargeResponseLimiter {
    pub fn new(workers: usize) -> Arc<LargeResponseLimiter> {
        let permits = Arc::new(Semaphore::new(workers.saturating_sub(1).max(1)));
        Arc::new(LargeResponseLimiter {
            permits,
            started: Instant::now(),
            last_short_millis: AtomicU64::new(0),
        })
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64 + 1
    }

    fn has_recent_short_request(&self) -> bool {
        let last = self.last_short_millis.load(Ordering::Relaxed);
        last > 0 && self.now().saturating_sub(last) <= SHORT_REQUEST_WINDOW.as_millis() as u64
    }
}

/// The responses that one connection is sending.
#[derive(Clone)]
pub struct ConnectionResponses {
    limiter: Arc<LargeResponseLimiter>,
    large_count: Arc<AtomicUsize>,
}

impl ConnectionResponses {
    pub fn new(limiter: Arc<LargeResponseLimiter>) -> ConnectionResponses {
        ConnectionResponses { limiter, large_count: Arc::default() }
    }

    /// Tracks whether a response is large until its body is dropped.
    pub fn track(&self, answer: Response<Body>) -> Response<Body> {
        match answer.body() {
            Body::Whole(_) => self.limiter.last_short_millis.store(self.limiter.now(), Ordering::Relaxed),
            Body::Stream(_) => {}
            Body::Chunks(_) => {
                self.large_count.fetch_add(1, Ordering::Relaxed);
                let guard = LargeResponseGuard(self.large_count.clone());
                return answer.map(|body| body.with_guard(guard));
            }
        }
        answer
    }

    fn needs_permit(&self) -> bool {
        self.large_count.load(Ordering::Relaxed) > 0 && self.limiter.has_recent_short_request()
    }
}

/// Decrements the count of large responses when one ends.
struct LargeResponseGuard(Arc<AtomicUsize>);

impl Drop for LargeResponseGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection task that is polled only with a permit while it sends a large response.
pub struct LimitedConnection<F> {
    work: Pin<Box<F>>,
    responses: ConnectionResponses,
    permit_wait: Option<PermitFuture>,
}

type PermitFuture = Pin<Box<dyn Future<Output = Result<OwnedSemaphorePermit, AcquireError>> + Send>>;

impl<F> LimitedConnection<F> {
    pub fn new(work: F, responses: ConnectionResponses) -> LimitedConnection<F> {
        LimitedConnection { work: Box::pin(work), responses, permit_wait: None }
    }
}

impl<F: Future> Future for LimitedConnection<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let LimitedConnection { work, responses: sending, permit_wait } = &mut *self;
        // Held only during this poll.
        let mut _permit = None;
        if sending.needs_permit() {
            let wait =
                permit_wait.get_or_insert_with(|| Box::pin(sending.limiter.permits.clone().acquire_owned()));
            _permit = ready!(wait.as_mut().poll(cx)).ok();
        }
        *permit_wait = None;
        work.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use bytes::Bytes;

    use super::*;

    fn large_response() -> Response<Body> {
        Response::new(Body::Chunks(Box::new([Bytes::from_static(b"x")].into_iter())))
    }

    /// Work that never ends and counts its polls.
    fn counting_work(
        responses: &ConnectionResponses,
    ) -> (LimitedConnection<impl Future<Output = ()>>, Arc<AtomicUsize>) {
        let steps = Arc::new(AtomicUsize::new(0));
        let counted = steps.clone();
        let work = std::future::poll_fn(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            Poll::Pending
        });
        (LimitedConnection::new(work, responses.clone()), steps)
    }

    #[track_caller]
    fn check(taken: bool, short: bool, is_long: bool, expected: usize) {
        let limiter = LargeResponseLimiter::new(2);
        let responses = ConnectionResponses::new(limiter.clone());
        let _other =
            taken.then(|| limiter.permits.clone().try_acquire_owned().expect("there is room for one"));
        if short {
            ConnectionResponses::new(limiter.clone()).track(Response::new(Body::empty()));
        }
        let _answer = is_long.then(|| responses.track(large_response()));
        let (mut work, steps) = counting_work(&responses);
        let _ = Pin::new(&mut work).poll(&mut Context::from_waker(Waker::noop()));
        assert_eq!(steps.load(Ordering::Relaxed), expected, "{taken} {short} {is_long}");
    }

    #[test]
    fn limits_large_responses_only_after_short_requests() {
        check(true, true, true, 0);
        check(true, true, false, 1);
        check(true, false, true, 1);
        check(false, true, true, 1);
    }

    #[test]
    fn work_is_polled_with_a_permit_or_after_the_large_response() {
        let limiter = LargeResponseLimiter::new(2);
        let responses = ConnectionResponses::new(limiter.clone());
        responses.track(Response::new(Body::empty()));
        let answer = responses.track(large_response());
        let mut cx = Context::from_waker(Waker::noop());
        let (mut work, steps) = counting_work(&responses);
        let mut step = || {
            let _ = Pin::new(&mut work).poll(&mut cx);
            steps.load(Ordering::Relaxed)
        };
        let permit = limiter.permits.clone().try_acquire_owned().expect("there is room for one");
        assert_eq!(step(), 0);
        drop(permit);
        assert_eq!(step(), 1);
        let _permit =
            limiter.permits.clone().try_acquire_owned().expect("the permit is released after the step");
        assert_eq!(step(), 1);
        drop(answer);
        assert_eq!(step(), 2, "the large response has ended");
    }
}
