//! What was granted a moment ago and may not be stored yet: a count misses it, and must not take it back.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use reconcile::Key;
use tokio::time::Instant;

/// How long after a grant its object must be among those that are counted.
const PENDING: Duration = Duration::from_millis(500);
/// Where grants never cease, what was given back is written down after this long all the same.
const LONGEST: Duration = Duration::from_secs(2);

#[derive(Default)]
pub struct Grants(Mutex<HashMap<Key, Grant>>);

struct Grant {
    last: Instant,
    /// Since when somebody wants to write down less.
    waiting: Option<Instant>,
}

impl Grants {
    /// More of a quota is used than before.
    pub fn granted(&self, key: Key) {
        let last = Instant::now();
        self.0.lock().entry(key).or_insert(Grant { last, waiting: None }).last = last;
    }

    /// How long to wait before less of a quota is said to be used.
    pub fn pause(&self, key: &Key) -> Option<Duration> {
        let mut grants = self.0.lock();
        let grant = grants.get_mut(key)?;
        let now = Instant::now();
        let until = (*grant.waiting.get_or_insert(now) + LONGEST).min(grant.last + PENDING);
        if until > now {
            return Some(until - now);
        }
        grants.remove(key);
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
    async fn what_was_just_granted_is_not_taken_back() {
        let (grants, key) = (Grants::default(), Key::new("default", "q"));
        assert_eq!(grants.pause(&key), None, "nothing was granted");
        grants.granted(key.clone());
        assert_eq!(grants.pause(&key), Some(PENDING));
        tokio::time::advance(PENDING).await;
        assert_eq!(grants.pause(&key), None);
        // Grants that never cease do not keep what was given back from being told.
        let begun = Instant::now();
        let mut waited = Duration::ZERO;
        while begun.elapsed() == waited {
            grants.granted(key.clone());
            let Some(pause) = grants.pause(&key) else { break };
            let step = pause.min(PENDING / 2);
            tokio::time::advance(step).await;
            waited += step;
        }
        assert_eq!(begun.elapsed(), LONGEST);
    }
}
