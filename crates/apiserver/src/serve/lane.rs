//! Long answers leave a worker to short requests, as long as there are any.
//!
//! Turns alone keep a flood of lists from holding a worker for long, but then every step of a small write waits for
//! a turn of each list, and on a machine with few processors for whoever reads them. So long answers pass one after
//! the other through a lane that is one worker narrower than the server, and the rest is free for who needs little.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use http::Response;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use crate::body::Body;

/// For how long after a short request another is expected.
const EXPECTED: Duration = Duration::from_millis(100);

pub struct Lane {
    room: Arc<Semaphore>,
    begun: Instant,
    /// The last short request, in milliseconds after `begun`; 0 when there was none.
    short: AtomicU64,
}

impl Lane {
    pub fn new(workers: usize) -> Arc<Lane> {
        let room = Arc::new(Semaphore::new(workers.saturating_sub(1).max(1)));
        Arc::new(Lane { room, begun: Instant::now(), short: AtomicU64::new(0) })
    }

    fn now(&self) -> u64 {
        self.begun.elapsed().as_millis() as u64 + 1
    }

    fn expects_short_requests(&self) -> bool {
        let last = self.short.load(Ordering::Relaxed);
        last > 0 && self.now().saturating_sub(last) <= EXPECTED.as_millis() as u64
    }
}

/// What one connection is sending.
#[derive(Clone)]
pub struct Sending {
    lane: Arc<Lane>,
    long: Arc<AtomicUsize>,
}

impl Sending {
    pub fn new(lane: Arc<Lane>) -> Sending {
        Sending { lane, long: Arc::default() }
    }

    /// Takes note of what an answer is.
    pub fn note(&self, answer: Response<Body>) -> Response<Body> {
        match answer.body() {
            Body::Whole(_) => self.lane.short.store(self.lane.now(), Ordering::Relaxed),
            Body::Stream(_) => {}
            Body::Chunks(_) => {
                self.long.fetch_add(1, Ordering::Relaxed);
                let end = End(self.long.clone());
                return answer.map(|body| body.holding(end));
            }
        }
        answer
    }

    fn takes_the_lane(&self) -> bool {
        self.long.load(Ordering::Relaxed) > 0 && self.lane.expects_short_requests()
    }
}

/// The end of a long answer.
struct End(Arc<AtomicUsize>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection, which is only gone on with when there is room in the lane.
pub struct InLane<F> {
    work: Pin<Box<F>>,
    sending: Sending,
    waiting: Option<Wait>,
}

type Wait = Pin<Box<dyn Future<Output = Result<OwnedSemaphorePermit, AcquireError>> + Send>>;

impl<F> InLane<F> {
    pub fn new(work: F, sending: Sending) -> InLane<F> {
        InLane { work: Box::pin(work), sending, waiting: None }
    }
}

impl<F: Future> Future for InLane<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let InLane { work, sending, waiting } = &mut *self;
        // Held for no longer than this one step.
        let mut _room = None;
        if sending.takes_the_lane() {
            let wait = waiting.get_or_insert_with(|| Box::pin(sending.lane.room.clone().acquire_owned()));
            _room = ready!(wait.as_mut().poll(cx)).ok();
        }
        *waiting = None;
        work.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use bytes::Bytes;

    use super::*;

    fn long() -> Response<Body> {
        Response::new(Body::Chunks(Box::new([Bytes::from_static(b"x")].into_iter())))
    }

    /// Work that never ends, and counts its steps.
    fn counting(sending: &Sending) -> (InLane<impl Future<Output = ()>>, Arc<AtomicUsize>) {
        let steps = Arc::new(AtomicUsize::new(0));
        let counted = steps.clone();
        let work = std::future::poll_fn(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            Poll::Pending
        });
        (InLane::new(work, sending.clone()), steps)
    }

    #[track_caller]
    fn check(taken: bool, short: bool, is_long: bool, expected: usize) {
        let lane = Lane::new(2);
        let sending = Sending::new(lane.clone());
        let _other = taken.then(|| lane.room.clone().try_acquire_owned().expect("there is room for one"));
        if short {
            Sending::new(lane.clone()).note(Response::new(Body::empty()));
        }
        let _answer = is_long.then(|| sending.note(long()));
        let (mut work, steps) = counting(&sending);
        let _ = Pin::new(&mut work).poll(&mut Context::from_waker(Waker::noop()));
        assert_eq!(steps.load(Ordering::Relaxed), expected, "{taken} {short} {is_long}");
    }

    #[test]
    fn only_long_answers_wait_and_only_for_short_requests() {
        check(true, true, true, 0);
        check(true, true, false, 1);
        check(true, false, true, 1);
        check(false, true, true, 1);
    }

    #[test]
    fn whoever_waits_goes_on_when_there_is_room_or_nobody_else_is_left() {
        let lane = Lane::new(2);
        let sending = Sending::new(lane.clone());
        sending.note(Response::new(Body::empty()));
        let answer = sending.note(long());
        let mut cx = Context::from_waker(Waker::noop());
        let (mut work, steps) = counting(&sending);
        let mut step = || {
            let _ = Pin::new(&mut work).poll(&mut cx);
            steps.load(Ordering::Relaxed)
        };
        let room = lane.room.clone().try_acquire_owned().expect("there is room for one");
        assert_eq!(step(), 0);
        drop(room);
        assert_eq!(step(), 1);
        let _room = lane.room.clone().try_acquire_owned().expect("given back after the step");
        assert_eq!(step(), 1);
        drop(answer);
        assert_eq!(step(), 2, "the long answer has ended");
    }
}
