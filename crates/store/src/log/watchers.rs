//! Who watches. Each is told of a batch by whoever commits it, before the writers are answered: what reads after a write
//! then never waits for it.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use super::mvcc::{MvccStore, event_key};
use crate::{Error, Event, Listener, Revision, Watch, WatchSender};

/// Events taken from history at a time.
const HISTORY_CHUNK_EVENTS: usize = 512;

#[derive(Default)]
pub struct Watchers {
    list: Mutex<Vec<Watcher>>,
}

struct Watcher {
    prefix: Box<str>,
    /// Everything up to here has been told.
    sent_revision: Revision,
    sender: WatchSender,
}

impl Watchers {
    /// Tells what has happened since `after`, and then what will.
    pub fn add(
        &self,
        mvcc: &RwLock<MvccStore>,
        prefix: &str,
        after: Revision,
        listener: Listener,
    ) -> Result<Watch, Error> {
        // No batch is published before the watcher is listed. Locks are always taken in this order.
        let mut list = self.lock();
        let (mut sender, watch) = WatchSender::new(listener);
        let mut sent_revision = after;
        loop {
            let (events, progress) = {
                let mvcc = mvcc.read().unwrap_or_else(PoisonError::into_inner);
                mvcc.check_revision(sent_revision)?;
                if sent_revision == mvcc.revision() {
                    break;
                }
                mvcc.events_after(sent_revision, prefix, HISTORY_CHUNK_EVENTS)
            };
            sender.send(events, progress);
            sent_revision = progress;
        }
        list.push(Watcher { prefix: prefix.into(), sent_revision, sender });
        Ok(watch)
    }

    /// Tells of a batch that has just become visible and reaches up to `revision`.
    pub fn publish(&self, batch: &[Event], revision: Revision) {
        self.lock().retain_mut(|watcher| {
            let is_new = |event: &&Event| {
                event.revision() > watcher.sent_revision && event_key(event).starts_with(&*watcher.prefix)
            };
            if revision > watcher.sent_revision {
                watcher.sender.send(batch.iter().filter(is_new).cloned().collect(), revision);
                watcher.sent_revision = revision;
            }
            watcher.sender.is_open()
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
