//! Active watches. The committer of a batch delivers its events before the writers get their
//! results. So a reader that follows a write never has to wait for the watch.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use super::mvcc::{MvccStore, event_key};
use crate::{Error, Event, Listener, Revision, Watch, WatchSender};

/// The number of events read from the history at a time.
const HISTORY_CHUNK_EVENTS: usize = 512;

#[derive(Default)]
pub struct Watchers {
    list: Mutex<Vec<Watcher>>,
}

struct Watcher {
    prefix: Box<str>,
    /// All events up to this revision have been delivered.
    sent_revision: Revision,
    sender: WatchSender,
}

impl Watchers {
    /// Delivers the events since `after` and registers the watch for later ones.
    pub fn add(
        &self,
        mvcc: &RwLock<MvccStore>,
        prefix: &str,
        after: Revision,
        listener: Listener,
    ) -> Result<Watch, Error> {
        // The lock prevents a batch from being published between the replay and the registration.
        // Lock order: the watcher list first, then the MVCC store.
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

    /// Delivers a batch that has just become visible. `revision` is its last revision.
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
