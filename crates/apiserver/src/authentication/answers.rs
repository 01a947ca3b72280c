//! Answers of webhooks, kept for a while.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

/// More answers are not kept at a time.
const CAPACITY: usize = 16 << 10;

/// Answers by the digest of what was asked, so that no token is kept. Salted, so that nobody can choose
/// questions that share a digest's beginning.
pub struct Answers<T> {
    salt: [u8; 16],
    kept: Mutex<HashMap<[u8; 32], (Instant, T)>>,
}

impl<T> Default for Answers<T> {
    fn default() -> Answers<T> {
        Answers { salt: uuid::Uuid::new_v4().into_bytes(), kept: Mutex::default() }
    }
}

impl<T: Clone> Answers<T> {
    pub fn key(&self, question: &[&[u8]]) -> [u8; 32] {
        let mut hasher = Sha256::new_with_prefix(self.salt);
        for part in question {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize().into()
    }

    pub fn get(&self, key: &[u8; 32]) -> Option<T> {
        let kept = self.kept.lock();
        kept.get(key).filter(|(until, _)| Instant::now() < *until).map(|(_, answer)| answer.clone())
    }

    pub fn keep(&self, key: [u8; 32], answer: T, time: Duration) {
        if time.is_zero() {
            return;
        }
        let now = Instant::now();
        let mut kept = self.kept.lock();
        if kept.len() >= CAPACITY {
            kept.retain(|_, (until, _)| now < *until);
        }
        if kept.len() >= CAPACITY {
            // All are in use: starting over is simple, and fair.
            kept.clear();
        }
        kept.insert(key, (now + time, answer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn answers_are_forgotten() {
        let answers = Answers::<u32>::default();
        let key = answers.key(&[b"ab", b"c"]);
        assert_ne!(key, answers.key(&[b"a", b"bc"]));
        assert_ne!(key, Answers::<u32>::default().key(&[b"ab", b"c"]));
        answers.keep(key, 1, Duration::ZERO);
        assert_eq!(answers.get(&key), None);
        answers.keep(key, 1, Duration::from_secs(10));
        tokio::time::advance(Duration::from_secs(9)).await;
        assert_eq!(answers.get(&key), Some(1));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(answers.get(&key), None);
        for i in 0..2 * CAPACITY {
            answers.keep(answers.key(&[&i.to_le_bytes()]), 0, Duration::from_secs(10));
        }
        assert!(answers.kept.lock().len() <= CAPACITY);
    }
}
