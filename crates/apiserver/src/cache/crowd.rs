//! The watchers of one kind, woken together.
//!
//! Waking a thousand watchers costs milliseconds, each a system call. If that is done for every event of a burst,
//! nothing else gets done; woken a little later, each takes several events in one go. What comes alone is told at
//! once, and a small crowd never waits.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

/// How long all are left alone for each of them after they were woken: a few times what it costs to serve one, on both
/// ends of the wire.
const EACH: Duration = Duration::from_micros(25);
/// A crowd that would wait less than this never waits.
const SMALL: Duration = Duration::from_millis(5);
/// Nobody is kept waiting for longer.
const LONGEST: Duration = Duration::from_millis(50);

pub struct Crowd {
    bell: watch::Sender<()>,
    state: Mutex<State>,
}

struct State {
    /// They are not woken before this.
    next: Instant,
    /// They will be, then.
    promised: bool,
}

impl Crowd {
    pub fn new() -> Arc<Crowd> {
        let state = State { next: Instant::now(), promised: false };
        Arc::new(Crowd { bell: watch::Sender::new(()), state: Mutex::new(state) })
    }

    pub fn join(&self) -> watch::Receiver<()> {
        self.bell.subscribe()
    }

    /// Something has happened. Must be called in a runtime.
    pub fn wake(self: &Arc<Crowd>) {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.promised {
            return;
        }
        if state.next <= now {
            state.next = now + self.pause();
            drop(state);
            self.bell.send_replace(());
            return;
        }
        state.promised = true;
        let (crowd, next) = (self.clone(), state.next);
        drop(state);
        tokio::spawn(async move {
            tokio::time::sleep_until(next).await;
            let pause = crowd.pause();
            *crowd.state.lock() = State { next: Instant::now() + pause, promised: false };
            crowd.bell.send_replace(());
        });
    }

    fn pause(&self) -> Duration {
        let watchers = u32::try_from(self.bell.receiver_count()).unwrap_or(u32::MAX);
        match EACH.saturating_mul(watchers) {
            pause if pause < SMALL => Duration::ZERO,
            pause => pause.min(LONGEST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(watchers: &mut [watch::Receiver<()>]) -> usize {
        let heard = watchers.iter_mut().filter(|watcher| watcher.has_changed().expect("the crowd is there"));
        heard.map(|watcher| watcher.mark_unchanged()).count()
    }

    #[tokio::test(start_paused = true)]
    async fn a_big_crowd_is_woken_now_and_then() {
        let crowd = Crowd::new();
        let mut watchers: Vec<_> = (0..1000).map(|_| crowd.join()).collect();
        crowd.wake();
        assert_eq!(heard(&mut watchers), 1000, "what comes alone is told at once");
        for _ in 0..24 {
            crowd.wake();
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(heard(&mut watchers), 0);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!(heard(&mut watchers), 1000, "nothing is forgotten");
        tokio::time::sleep(Duration::from_millis(60)).await;
        assert_eq!(heard(&mut watchers), 0, "nobody is woken for nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn a_small_one_never_waits() {
        let crowd = Crowd::new();
        let mut watchers: Vec<_> = (0..100).map(|_| crowd.join()).collect();
        for _ in 0..10 {
            crowd.wake();
            assert_eq!(heard(&mut watchers), 100);
        }
    }
}
