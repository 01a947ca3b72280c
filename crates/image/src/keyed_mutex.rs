//! Turns at pieces: pods that begin together want the same ones, and nobody is to fetch or unpack what another already
//! does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Who is at what: locks by the names of pieces, for as long as anybody has or wants them.
#[derive(Debug, Default)]
pub struct KeyedMutex<L>(Mutex<HashMap<String, Arc<L>>>);

impl<L: Default> KeyedMutex<L> {
    /// What to hold while something is done to a piece.
    pub fn get(&self, name: &str) -> Arc<L> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, lock| Arc::strong_count(lock) > 1);
        all.entry(name.to_owned()).or_default().clone()
    }
}
