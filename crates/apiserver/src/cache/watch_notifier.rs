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
const WAKE_DELAY_PER_WATCHER: Duration = Duration::from_micros(25);
/// A crowd that would wait less than this never waits.
const MIN_WAKE_DELAY: Duration = Duration::from_millis(5);
/// Nobody is kept waiting for longer.
const MAX_WAKE_DELAY: Duration = Duration::from_millis(50);

pub struct WatchNotifier {
    sender: watch::Sender<()>,
    state: Mutex<State>,
}

struct State {
    /// They are not woken before this.
    next_wake: Instant,
    /// They will be, then.
    wake_scheduled: bool,
}

impl WatchNotifier {
    pub fn new() -> Arc<WatchNotifier> {
        let state = State { next_wake: Instant::now(), wake_scheduled: false };
        Arc::new(WatchNotifier { sender: watch::Sender::new(()), state: Mutex::new(state) })
    }

    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.sender.subscribe()
    }

    /// Something has happened. Must be called in a runtime.
    pub fn notify(self: &Arc<WatchNotifier>) {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.wake_scheduled {
            return;
        }
        if state.next_wake <= now {
            state.next_wake = now + self.wake_delay();
            drop(state);
            self.sender.send_replace(());
            return;
        }
        state.wake_scheduled = true;
        let (notifier, next_wake) = (self.clone(), state.next_wake);
        drop(state);
        tokio::spawn(async move {
            tokio::time::sleep_until(next_wake).await;
            let delay = notifier.wake_delay();
            *notifier.state.lock() = State { next_wake: Instant::now() + delay, wake_scheduled: false };
            notifier.sender.send_replace(());
        });
    }

    fn wake_delay(&self) -> Duration {
        let watchers = u32::try_from(self.sender.receiver_count()).unwrap_or(u32::MAX);
        match WAKE_DELAY_PER_WATCHER.saturating_mul(watchers) {
            delay if delay < MIN_WAKE_DELAY => Duration::ZERO,
            delay => delay.min(MAX_WAKE_DELAY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notified_count(watchers: &mut [watch::Receiver<()>]) -> usize {
        let changed =
            watchers.iter_mut().filter(|watcher| watcher.has_changed().expect("the crowd is there"));
        changed.map(|watcher| watcher.mark_unchanged()).count()
    }

    #[tokio::test(start_paused = true)]
    async fn many_watchers_are_notified_after_delay() {
        let notifier = WatchNotifier::new();
        let mut watchers: Vec<_> = (0..1000).map(|_| notifier.subscribe()).collect();
        notifier.notify();
        assert_eq!(notified_count(&mut watchers), 1000, "what comes alone is told at once");
        for _ in 0..24 {
            notifier.notify();
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(notified_count(&mut watchers), 0);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!(notified_count(&mut watchers), 1000, "nothing is forgotten");
        tokio::time::sleep(Duration::from_millis(60)).await;
        assert_eq!(notified_count(&mut watchers), 0, "nobody is woken for nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn small_number_of_watchers_is_notified_immediately() {
        let notifier = WatchNotifier::new();
        let mut watchers: Vec<_> = (0..100).map(|_| notifier.subscribe()).collect();
        for _ in 0..10 {
            notifier.notify();
            assert_eq!(notified_count(&mut watchers), 100);
        }
    }
}
