//! Object storage: keys, values and revisions. Values are opaque bytes; the store never decodes an
//! object.
//!
//! [`Store`] is the interface, modeled on etcd. Two engines implement it: [`log`] keeps all data in
//! memory with an append-only log on disk, and [`etcd`] uses an etcd cluster. [`encryption`]
//! encrypts values in front of either. `suite` contains the tests that every engine must pass.
//!
//! Counterpart upstream: `k8s.io/apiserver/pkg/storage` with its `etcd3` implementation.

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

/// The revision of the store, as in etcd: it increases by one with each write. An empty store is at
/// 1 and the first write gets 2, because clients give resourceVersion "0" a special meaning. The
/// `resourceVersion` of an object is its revision.
pub type Revision = u64;

/// An object as of `revision`, its last write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: Arc<str>,
    pub value: Bytes,
    pub revision: Revision,
}

/// A request to create, update or delete one key.
#[derive(Clone, Debug)]
pub struct Write {
    pub key: Arc<str>,
    /// The new value, or `None` to delete.
    pub value: Option<Bytes>,
    pub expect: Expect,
    /// The key is deleted after this time (Events).
    pub ttl: Option<Duration>,
    /// The write may be acknowledged before it is on disk (heartbeats). It is synced with the next
    /// durable write, or after one second.
    pub lazy: bool,
}

/// The precondition of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// The key does not exist.
    Absent,
    /// The last write of the key has this revision.
    Revision(Revision),
}

#[derive(Clone, Debug)]
pub struct Page {
    pub entries: Vec<Entry>,
    /// The revision of the listed state.
    pub revision: Revision,
    /// The number of keys under the prefix after the last entry.
    pub remaining: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Put {
        entry: Entry,
        /// Whether the write created the key.
        created: bool,
    },
    Delete {
        key: Arc<str>,
        revision: Revision,
    },
    /// All events up to this revision have been delivered.
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
    /// `current` is the state of the key that failed the precondition. `None` if the key does not
    /// exist.
    #[error("precondition failed for key {key}")]
    Conflict { key: Arc<str>, current: Option<Entry> },
    #[error("revision {requested} has been compacted, the oldest is {oldest}")]
    Compacted { requested: Revision, oldest: Revision },
    #[error("revision {requested} is in the future, the current one is {current}")]
    Future { requested: Revision, current: Revision },
    #[error("store is not writable: {reason}")]
    Unavailable { reason: String },
    #[error("cannot decrypt the value of {key}: {reason}")]
    Decrypt { key: Arc<str>, reason: String },
}

#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The current revision. The etcd engine reads it from the cluster, so a later read at this
    /// revision is linearizable.
    async fn revision(&self) -> Result<Revision, Error>;

    async fn get(&self, key: &str) -> Result<Option<Entry>, Error>;

    /// Lists keys that start with `prefix` and are not less than `from` (if given), in order, up to
    /// `limit` entries (0: no limit), at revision `at` (`None`: current).
    async fn list(
        &self,
        prefix: &str,
        from: Option<&str>,
        limit: usize,
        at: Option<Revision>,
    ) -> Result<Page, Error>;

    /// Returns the revision of the write once it is as durable as requested.
    async fn write(&self, write: Write) -> Result<Revision, Error>;

    /// Calls `listener` for every change to keys under `prefix` after revision `after`, in order.
    /// All events of a revision are delivered in one batch. [`Event::Progress`] reports the
    /// progress of the watch if only other keys change. Fails with `Error::Compacted` if the
    /// history does not reach back to `after`, and with `Error::Future` if `after` is greater than
    /// the current revision.
    async fn watch(&self, prefix: &str, after: Revision, listener: Listener) -> Result<Watch, Error>;

    /// Discards the history before `revision`. Current values are kept.
    async fn compact(&self, revision: Revision) -> Result<(), Error>;

    /// Whether the value of the key should be rewritten without a change, because it is not
    /// encrypted with the current key. Counterpart upstream: the `stale` result of a value
    /// transformer.
    fn is_stale(&self, _key: &str) -> bool {
        false
    }

    /// The reason why the store rejects writes at present. `None` while the last known write
    /// succeeded.
    fn write_failure(&self) -> Option<String> {
        None
    }
}

/// Called with each batch of events once it is visible to readers. Must return quickly, because a
/// commit may be waiting.
pub type Listener = Box<dyn FnMut(Vec<Event>) + Send>;

/// A running watch. Dropping it cancels the watch.
pub struct Watch {
    end: mpsc::Receiver<Infallible>,
}

impl Watch {
    /// Waits until the watch ends: the store was closed, or the history that the watch needs was
    /// compacted.
    pub async fn ended(&mut self) {
        self.end.recv().await;
    }
}

/// The sending side of a [`Watch`]. Dropping it ends the watch.
struct WatchSender {
    listener: Listener,
    end: mpsc::Sender<Infallible>,
}

impl WatchSender {
    fn new(listener: Listener) -> (WatchSender, Watch) {
        let (sender, end) = mpsc::channel(1);
        (WatchSender { listener, end: sender }, Watch { end })
    }

    /// Delivers a batch of events that is complete up to revision `progress`.
    fn send(&mut self, mut events: Vec<Event>, progress: Revision) {
        if events.last().is_none_or(|last| last.revision() < progress) {
            events.push(Event::Progress(progress));
        }
        (self.listener)(events);
    }

    fn is_open(&self) -> bool {
        !self.end.is_closed()
    }

    /// Waits until the watch is canceled.
    fn closed(&self) -> impl Future<Output = ()> + use<> {
        let end = self.end.clone();
        async move { end.closed().await }
    }
}
