//! Coalesced wake-ups for the watchers of one kind.
//!
//! Waking a thousand watchers takes milliseconds, because each wake-up is a system call. Doing so
//! for every event of a burst would starve everything else; with a short delay each watcher reads
//! several events at once. An isolated event is notified immediately, and few watchers are always
//! notified immediately.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

/// Pause after a notification, per watcher: a few times the cost of serving one event to it, on
/// both ends of the connection.
const WAKE_DELAY_PER_WATCHER: Duration = Duration::from_micros(25);
/// Shorter pauses are skipped.
const MIN_WAKE_DELAY: Duration = Duration::from_millis(5);
/// Upper bound for the delay of an event.
const MAX_WAKE_DELAY: Duration = Duration::from_millis(50);

pub struct WatchNotifier {
    sender: watch::Sender<()>,
    state: Mutex<State>,
}

struct State {
    /// No notification is sent before this time.
    next_wake: Instant,
    /// A task is waiting to send one at `next_wake`.
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

    /// Notifies watchers, now or after the pause. Must be called inside of a Tokio runtime.
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
            // Reset the state before sending: an event that arrives in between schedules its own
            // wake-up. The other way round, an event after the send could still see
            // `wake_scheduled` and never be notified.
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
            watchers.iter_mut().filter(|watcher| watcher.has_changed().expect("the notifier is alive"));
        changed.map(|watcher| watcher.mark_unchanged()).count()
    }

    #[tokio::test(start_paused = true)]
    async fn many_watchers_are_notified_after_delay() {
        let notifier = WatchNotifier::new();
        let mut watchers: Vec<_> = (0..1000).map(|_| notifier.subscribe()).collect();
        notifier.notify();
        assert_eq!(notified_count(&mut watchers), 1000, "an isolated event is notified immediately");
        for _ in 0..24 {
            notifier.notify();
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(notified_count(&mut watchers), 0);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!(notified_count(&mut watchers), 1000, "delayed events are notified");
        tokio::time::sleep(Duration::from_millis(60)).await;
        assert_eq!(notified_count(&mut watchers), 0, "no notification without an event");
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
