//! Where objects live: keys, bytes and revisions; never parses an object.
//!
//! [`Store`] is the contract, shaped after etcd. Two engines keep it: [`log`], all data in memory and an
//! append-only log on disk, and [`etcd`]. [`sealed`] encrypts what lies in either. `suite` holds the tests that both must pass.

pub mod encryption;
pub mod etcd;
mod grpc;
pub mod log;
#[cfg(test)]
mod suite;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

/// Counts writes. An empty store is at 1 and its first write is 2, since clients give "0" a meaning of its
/// own. A JSON `resourceVersion` is one of these.
pub type Revision = u64;

/// One object as of `revision`, its last write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: Arc<str>,
    pub value: Bytes,
    pub revision: Revision,
}

/// A request to change one key.
#[derive(Clone, Debug)]
pub struct Write {
    pub key: Arc<str>,
    /// The new value, or `None` to delete.
    pub value: Option<Bytes>,
    pub expect: Expect,
    /// The key disappears by itself after this long (Events).
    pub ttl: Option<Duration>,
    /// Heartbeats may be answered before they are on disk; they ride along with the next durable write,
    /// or are synced after a second.
    pub lazy: bool,
}

/// What must be true of the key for the write to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    Absent,
    /// The key's last write was this one.
    Revision(Revision),
}

#[derive(Clone, Debug)]
pub struct Page {
    pub entries: Vec<Entry>,
    /// The revision the list is consistent with.
    pub revision: Revision,
    /// How many more keys under the prefix follow the last entry.
    pub remaining: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Put {
        entry: Entry,
        /// The key did not exist before.
        created: bool,
    },
    Delete {
        key: Arc<str>,
        revision: Revision,
    },
    /// Everything up to this revision has been delivered.
    Progress(Revision),
}

impl Event {
    pub fn revision(&self) -> Revision {
        match self {
            Event::Put { entry, .. } => entry.revision,
            Event::Delete { revision, .. } | Event::Progress(revision) => *revision,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("key {key} already exists")]
    Exists { key: Arc<str> },
    /// `current` is the key's state that spoke against the write; `None` when it does not exist.
    #[error("key {key} is not as expected")]
    Conflict { key: Arc<str>, current: Option<Entry> },
    #[error("revision {requested} has been compacted, the oldest is {oldest}")]
    Compacted { requested: Revision, oldest: Revision },
    #[error("revision {requested} is in the future, the current one is {current}")]
    Future { requested: Revision, current: Revision },
    #[error("the store takes no writes: {reason}")]
    Unavailable { reason: String },
    #[error("cannot read the sealed value of {key}: {reason}")]
    Decrypt { key: Arc<str>, reason: String },
}

#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The newest revision; for etcd, asked from the cluster, so a later read at it is linearizable.
    async fn revision(&self) -> Result<Revision, Error>;

    async fn get(&self, key: &str) -> Result<Option<Entry>, Error>;

    /// Keys that start with `prefix` and are greater than or equal to `from` (if given), in order, at most
    /// `limit` of them (0: all), as of `at` (`None`: now).
    async fn list(
        &self,
        prefix: &str,
        from: Option<&str>,
        limit: usize,
        at: Option<Revision>,
    ) -> Result<Page, Error>;

    /// Answers once the write is as durable as it asked to be, with its revision.
    async fn write(&self, write: Write) -> Result<Revision, Error>;

    /// Tells `listener` of every change to keys under `prefix` after revision `after`, in order. Events of one revision
    /// are told once. When only other keys change, [`Event::Progress`] tells how far the watch has got.
    /// `Error::Compacted` when history no longer reaches back, `Error::Future` when `after` has yet to come.
    async fn watch(&self, prefix: &str, after: Revision, listener: Listener) -> Result<Watch, Error>;

    /// Forgets history before `revision`; current values stay.
    async fn compact(&self, revision: Revision) -> Result<(), Error>;

    /// Whether the key's value should be written again although it has not changed: it lies there as it
    /// would no longer be written.
    fn is_stale(&self, _key: &str) -> bool {
        false
    }

    /// Why the store refuses writes at present; `None` while it accepts them, as far as it knows.
    fn write_failure(&self) -> Option<String> {
        None
    }
}

/// Hears of each batch of events once it is visible, and is quick about it: a commit may be waiting.
pub type Listener = Box<dyn FnMut(Vec<Event>) + Send>;

/// A running watch; whoever drops it wants to hear no more.
pub struct Watch {
    end: mpsc::Receiver<Infallible>,
}

impl Watch {
    /// Waits until there is nothing more to hear: the store has closed, or cannot tell what has happened.
    pub async fn ended(&mut self) {
        self.end.recv().await;
    }
}

/// The store's side of a [`Watch`]; the watch ends when this is dropped.
struct WatchSender {
    listener: Listener,
    end: mpsc::Sender<Infallible>,
}

impl WatchSender {
    fn new(listener: Listener) -> (WatchSender, Watch) {
        let (sender, end) = mpsc::channel(1);
        (WatchSender { listener, end: sender }, Watch { end })
    }

    /// What there is to tell, which reaches up to `reached`.
    fn send(&mut self, mut events: Vec<Event>, progress: Revision) {
        if events.last().is_none_or(|last| last.revision() < progress) {
            events.push(Event::Progress(progress));
        }
        (self.listener)(events);
    }

    fn is_open(&self) -> bool {
        !self.end.is_closed()
    }

    /// Waits until nobody wants to hear any more.
    fn closed(&self) -> impl Future<Output = ()> + use<> {
        let end = self.end.clone();
        async move { end.closed().await }
    }
}
