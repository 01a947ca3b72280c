//! Who watches, and how far each has got.
//!
//! A watcher that keeps up is handed each batch by the commit thread. One that does not (its channel is
//! full, or it starts in the past) is handed to a task of its own, which feeds it from history as it makes
//! room and gives it back once it has caught up. `cursor` says what has been queued already, so that nothing
//! is queued twice or left out whoever does the queueing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::memory::{Memory, event_key};
use crate::{Error, Event, Revision, Watch};

/// Batches that may wait in a watcher's channel.
const CAPACITY: usize = 64;
/// Events taken from history at a time.
const CHUNK: usize = 512;

#[derive(Default)]
pub struct Watchers {
    list: Mutex<Vec<Arc<Watcher>>>,
}

struct Watcher {
    prefix: Box<str>,
    runtime: Handle,
    sender: mpsc::Sender<Vec<Event>>,
    place: Mutex<Place>,
}

struct Place {
    /// Everything up to here is in the channel.
    cursor: Revision,
    /// A task is feeding the watcher from history.
    lagging: bool,
    ended: bool,
}

impl Watchers {
    pub fn add(
        self: &Arc<Self>,
        memory: &Arc<RwLock<Memory>>,
        prefix: &str,
        after: Revision,
    ) -> Result<Watch, Error> {
        let (sender, events) = mpsc::channel(CAPACITY);
        let place = Mutex::new(Place { cursor: after, lagging: true, ended: false });
        let watcher = Arc::new(Watcher { prefix: prefix.into(), runtime: Handle::current(), sender, place });
        {
            // No batch is published between looking at the data and being listed. Locks are always taken
            // in the order list, place, memory.
            let mut list = lock(&self.list);
            let mut place = lock(&watcher.place);
            let memory = memory.read().unwrap_or_else(PoisonError::into_inner);
            memory.check_readable(after)?;
            place.lagging = after < memory.revision();
            list.push(watcher.clone());
        }
        if lock(&watcher.place).lagging {
            self.catch_up(memory, watcher);
        }
        Ok(Watch { events })
    }

    /// Queues a batch that has just become visible. Never waits.
    pub fn publish(self: &Arc<Self>, memory: &Arc<RwLock<Memory>>, batch: &[Event], revision: Revision) {
        let mut behind = Vec::new();
        lock(&self.list).retain(|watcher| {
            let mut place = lock(&watcher.place);
            if place.ended || watcher.sender.is_closed() {
                return false;
            }
            if place.lagging {
                return true;
            }
            if watcher.offer(&place, batch, revision) {
                place.cursor = place.cursor.max(revision);
            } else {
                place.lagging = true;
                behind.push(watcher.clone());
            }
            true
        });
        for watcher in behind {
            self.catch_up(memory, watcher);
        }
    }

    /// Ends all watches.
    pub fn close(&self) {
        for watcher in lock(&self.list).drain(..) {
            lock(&watcher.place).ended = true;
        }
    }

    fn catch_up(self: &Arc<Self>, memory: &Arc<RwLock<Memory>>, watcher: Arc<Watcher>) {
        let (watchers, memory) = (self.clone(), memory.clone());
        let runtime = watcher.runtime.clone();
        runtime.spawn(async move {
            while let Ok(permit) = watcher.sender.reserve().await {
                let mut place = lock(&watcher.place);
                let memory = memory.read().unwrap_or_else(PoisonError::into_inner);
                if place.ended || place.cursor < memory.floor() {
                    break;
                }
                let (mut events, cursor) = memory.events_after(place.cursor, &watcher.prefix, CHUNK);
                close_with_progress(&mut events, cursor);
                place.cursor = cursor;
                permit.send(events);
                if cursor == memory.revision() {
                    place.lagging = false;
                    return;
                }
            }
            lock(&watcher.place).ended = true;
            lock(&watchers.list).retain(|other| !Arc::ptr_eq(other, &watcher));
        });
    }
}

impl Watcher {
    /// False when the channel has no room for it.
    fn offer(&self, place: &Place, batch: &[Event], revision: Revision) -> bool {
        let mut events: Vec<Event> = batch
            .iter()
            .filter(|event| event.revision() > place.cursor && event_key(event).starts_with(&*self.prefix))
            .cloned()
            .collect();
        if !events.is_empty() {
            close_with_progress(&mut events, revision);
            return self.sender.try_send(events).is_ok();
        }
        // Progress leaves half the channel to real events; a task then sends one notice for many batches.
        place.cursor >= revision
            || self.sender.capacity() > CAPACITY / 2
                && self.sender.try_send(vec![Event::Progress(revision)]).is_ok()
    }
}

/// Says how far the events reach, unless the last of them does.
fn close_with_progress(events: &mut Vec<Event>, reached: Revision) {
    if events.last().is_none_or(|last| last.revision() < reached) {
        events.push(Event::Progress(reached));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
