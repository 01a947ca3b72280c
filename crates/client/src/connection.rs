//! What a client stands on.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};

use crate::Error;

/// A way to an API server.
#[async_trait]
pub trait Connection: Send + Sync + 'static {
    /// Sends a request and reads the whole answer. A failure the server tells is an answer too.
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error>;

    /// Follows all objects of a collection (`/apis/apps/v1/replicasets`), in all namespaces. With selectors in a
    /// query, only those selected; one that ceases to be is told as deleted.
    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error>;

    /// The same connection as the service account `name` in kube-system, or as the user of that name if it
    /// begins with `system:`; `None` where the credentials
    /// that were given are the only ones.
    fn impersonate(&self, name: &str) -> Option<Arc<dyn Connection>>;
}

/// The state of a collection and everything that happens to it, in order.
#[async_trait]
pub trait Watch: Send {
    /// Waits for news. The first is always [`News::Everything`]; it comes again after changes were missed.
    async fn next(&mut self) -> Result<WatchEvent, Error>;
}

/// What a feed tells.
pub enum WatchEvent {
    /// All objects there are as of `revision`.
    Replace { objects: Vec<RawObject>, revision: u64 },
    /// What has happened since; with none, only that nothing did up to `revision`.
    Changes { changes: Vec<WatchChange>, revision: u64 },
}

/// One object as JSON.
#[derive(Clone)]
pub struct RawObject {
    bytes: Bytes,
    /// A part that is not to be read, so that the bytes can be shared with those who need it.
    excluded: Range<usize>,
    /// Its resourceVersion, where the bytes do not have it.
    pub revision: Option<u64>,
}

impl RawObject {
    pub fn new(bytes: impl Into<Bytes>, revision: Option<u64>) -> RawObject {
        RawObject { bytes: bytes.into(), excluded: 0..0, revision }
    }

    /// The same without a part of it; what is left must be JSON.
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

/// One change to one object: its new state, or its last.
pub struct WatchChange {
    pub object: RawObject,
    pub deleted: bool,
}
