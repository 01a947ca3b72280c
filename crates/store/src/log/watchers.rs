//! Who watches. Each is told of a batch by whoever commits it, before the writers are answered: what reads after a write
//! then never waits for it.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use super::memory::{Memory, event_key};
use crate::{Ear, Error, Event, Listener, Revision, Watch};

/// Events taken from history at a time.
const CHUNK: usize = 512;

#[derive(Default)]
pub struct Watchers {
    list: Mutex<Vec<Watcher>>,
}

struct Watcher {
    prefix: Box<str>,
    /// Everything up to here has been told.
    told: Revision,
    ear: Ear,
}

impl Watchers {
    /// Tells what has happened since `after`, and then what will.
    pub fn add(
        &self,
        memory: &RwLock<Memory>,
        prefix: &str,
        after: Revision,
        listener: Listener,
    ) -> Result<Watch, Error> {
        // No batch is published before the watcher is listed. Locks are always taken in this order.
        let mut list = self.lock();
        let (mut ear, watch) = Ear::new(listener);
        let mut told = after;
        loop {
            let (events, reached) = {
                let memory = memory.read().unwrap_or_else(PoisonError::into_inner);
                memory.check_readable(told)?;
                if told == memory.revision() {
                    break;
                }
                memory.events_after(told, prefix, CHUNK)
            };
            ear.tell(events, reached);
            told = reached;
        }
        list.push(Watcher { prefix: prefix.into(), told, ear });
        Ok(watch)
    }

    /// Tells of a batch that has just become visible and reaches up to `revision`.
    pub fn publish(&self, batch: &[Event], revision: Revision) {
        self.lock().retain_mut(|watcher| {
            let is_news = |event: &&Event| {
                event.revision() > watcher.told && event_key(event).starts_with(&*watcher.prefix)
            };
            if revision > watcher.told {
                watcher.ear.tell(batch.iter().filter(is_news).cloned().collect(), revision);
                watcher.told = revision;
            }
            watcher.ear.is_wanted()
        });
    }

    /// Ends all watches.
    pub fn close(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Watcher>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
