//! Recent usage increases by admission. The admitted objects may not be stored yet, and a recount that
//! misses them must not lower the usage.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use reconcile::Key;
use tokio::time::Instant;

/// How long after an increase the admitted object may be missing in the cache.
const INCREASE_GRACE: Duration = Duration::from_millis(500);
/// The maximum delay of an update with lower usage when increases keep coming.
const MAX_UPDATE_DELAY: Duration = Duration::from_secs(2);

#[derive(Default)]
pub struct PendingUsage(Mutex<HashMap<Key, Increase>>);

struct Increase {
    last: Instant,
    /// Since when an update with lower usage is waiting.
    waiting: Option<Instant>,
}

impl PendingUsage {
    /// Records that the usage of a quota increased.
    pub fn record(&self, key: Key) {
        let last = Instant::now();
        self.0.lock().entry(key).or_insert(Increase { last, waiting: None }).last = last;
    }

    /// How long to wait before lower usage is written. `None` means now.
    pub fn update_delay(&self, key: &Key) -> Option<Duration> {
        let mut pending_usage = self.0.lock();
        let grant = pending_usage.get_mut(key)?;
        let now = Instant::now();
        let until = (*grant.waiting.get_or_insert(now) + MAX_UPDATE_DELAY).min(grant.last + INCREASE_GRACE);
        if until > now {
            return Some(until - now);
        }
        pending_usage.remove(key);
        None
    }

    pub fn forget(&self, key: &Key) {
        self.0.lock().remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn update_waits_for_recent_increase() {
        let (pending_usage, key) = (PendingUsage::default(), Key::new("default", "q"));
        assert_eq!(pending_usage.update_delay(&key), None, "no increase was recorded");
        pending_usage.record(key.clone());
        assert_eq!(pending_usage.update_delay(&key), Some(INCREASE_GRACE));
        tokio::time::advance(INCREASE_GRACE).await;
        assert_eq!(pending_usage.update_delay(&key), None);
        // Continuous increases do not delay the update forever.
        let start = Instant::now();
        let mut elapsed = Duration::ZERO;
        while start.elapsed() == elapsed {
            pending_usage.record(key.clone());
            let Some(pause) = pending_usage.update_delay(&key) else { break };
            let step = pause.min(INCREASE_GRACE / 2);
            tokio::time::advance(step).await;
            elapsed += step;
        }
        assert_eq!(start.elapsed(), MAX_UPDATE_DELAY);
    }
}
