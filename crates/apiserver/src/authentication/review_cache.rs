//! TTL cache for webhook reviews.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

const MAX_CACHE_ENTRIES: usize = 16 << 10;

/// Caches results by a digest of the review, so that no token is kept in memory. The digest is
/// salted, so that clients cannot construct collisions.
pub struct ReviewCache<T> {
    salt: [u8; 16],
    entries: Mutex<HashMap<[u8; 32], (Instant, T)>>,
}

impl<T> Default for ReviewCache<T> {
    fn default() -> ReviewCache<T> {
        ReviewCache { salt: uuid::Uuid::new_v4().into_bytes(), entries: Mutex::default() }
    }
}

impl<T: Clone> ReviewCache<T> {
    pub fn key(&self, parts: &[&[u8]]) -> [u8; 32] {
        let mut hasher = Sha256::new_with_prefix(self.salt);
        for part in parts {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize().into()
    }

    pub fn get(&self, key: &[u8; 32]) -> Option<T> {
        let entries = self.entries.lock();
        entries.get(key).filter(|(until, _)| Instant::now() < *until).map(|(_, answer)| answer.clone())
    }

    pub fn insert(&self, key: [u8; 32], answer: T, ttl: Duration) {
        if ttl.is_zero() {
            return;
        }
        let now = Instant::now();
        let mut entries = self.entries.lock();
        if entries.len() >= MAX_CACHE_ENTRIES {
            entries.retain(|_, (until, _)| now < *until);
        }
        if entries.len() >= MAX_CACHE_ENTRIES {
            // All entries are valid. Clearing is simple and favors no client.
            entries.clear();
        }
        entries.insert(key, (now + ttl, answer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn entries_expire() {
        let cache = ReviewCache::<u32>::default();
        let key = cache.key(&[b"ab", b"c"]);
        assert_ne!(key, cache.key(&[b"a", b"bc"]));
        assert_ne!(key, ReviewCache::<u32>::default().key(&[b"ab", b"c"]));
        cache.insert(key, 1, Duration::ZERO);
        assert_eq!(cache.get(&key), None);
        cache.insert(key, 1, Duration::from_secs(10));
        tokio::time::advance(Duration::from_secs(9)).await;
        assert_eq!(cache.get(&key), Some(1));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(cache.get(&key), None);
        for i in 0..2 * MAX_CACHE_ENTRIES {
            cache.insert(cache.key(&[&i.to_le_bytes()]), 0, Duration::from_secs(10));
        }
        assert!(cache.entries.lock().len() <= MAX_CACHE_ENTRIES);
    }
}
