//! The transport of a client.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};

use crate::Error;

/// A transport to an API server.
#[async_trait]
pub trait Connection: Send + Sync + 'static {
    /// Sends a request and reads the whole response. A response with an error status is returned as
    /// `Ok`.
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error>;

    /// Watches a collection (`/apis/apps/v1/replicasets`) in all namespaces. A query may contain
    /// selectors. An object that stops matching them is reported as deleted.
    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error>;

    /// A connection that impersonates the service account `name` in kube-system, or the user `name`
    /// if it starts with `system:`. `None` if the connection has fixed credentials.
    fn impersonate(&self, name: &str) -> Option<Arc<dyn Connection>>;
}

/// The state of a collection and its changes, in order. Counterpart upstream: a Reflector's list
/// and watch.
#[async_trait]
pub trait Watch: Send {
    /// Waits for the next event. The first one is always [`WatchEvent::Replace`]. It is repeated if
    /// changes were missed.
    async fn next(&mut self) -> Result<WatchEvent, Error>;
}

/// An event of a [`Watch`].
pub enum WatchEvent {
    /// All objects at `revision`.
    Replace { objects: Vec<RawObject>, revision: u64 },
    /// The changes since the previous event. If empty, a bookmark: nothing changed up to
    /// `revision`.
    Changes { changes: Vec<WatchChange>, revision: u64 },
}

/// One object as JSON.
#[derive(Clone)]
pub struct RawObject {
    bytes: Bytes,
    /// A range of the bytes that is skipped, so that the buffer can be shared with readers that
    /// need it.
    excluded: Range<usize>,
    /// The resourceVersion, if it is not in the JSON.
    pub revision: Option<u64>,
}

impl RawObject {
    pub fn new(bytes: impl Into<Bytes>, revision: Option<u64>) -> RawObject {
        RawObject { bytes: bytes.into(), excluded: 0..0, revision }
    }

    /// Excludes a range of the bytes. The rest must be valid JSON.
    pub fn without_range(self, part: Range<usize>) -> RawObject {
        RawObject { excluded: part, ..self }
    }

    pub fn json(&self) -> Cow<'_, [u8]> {
        match self.excluded.is_empty() {
            true => Cow::Borrowed(&self.bytes),
            false => {
                Cow::Owned([&self.bytes[..self.excluded.start], &self.bytes[self.excluded.end..]].concat())
            }
        }
    }
}

/// A change of one object, with its new or last state.
pub struct WatchChange {
    pub object: RawObject,
    pub deleted: bool,
}
