//! The wall clock that controllers use. Tests can change it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use jiff::{SignedDuration, Timestamp};

/// The wall clock plus an offset that all clones share.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    offset_seconds: Arc<AtomicI64>,
}

impl Clock {
    pub fn now(&self) -> Timestamp {
        let offset = SignedDuration::from_secs(self.offset_seconds.load(Ordering::Relaxed));
        Timestamp::now().checked_add(offset).unwrap_or(Timestamp::MAX)
    }

    /// Moves the clock by `seconds`; negative values move it back.
    pub fn advance(&self, seconds: i64) {
        self.offset_seconds.fetch_add(seconds, Ordering::Relaxed);
    }
}
