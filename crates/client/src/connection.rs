//! What a client stands on.

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
    async fn follow(&self, collection: &str) -> Result<Box<dyn Feed>, Error>;

    /// The same connection as the service account `name` in kube-system, or as the user of that name if it
    /// begins with `system:`; `None` where the credentials
    /// that were given are the only ones.
    fn acting_as(&self, name: &str) -> Option<Arc<dyn Connection>>;
}

/// The state of a collection and everything that happens to it, in order.
#[async_trait]
pub trait Feed: Send {
    /// Waits for news. The first is always [`News::Everything`]; it comes again after changes were missed.
    async fn next(&mut self) -> Result<News, Error>;
}

/// What a feed tells.
pub enum News {
    /// All objects there are as of `revision`.
    Everything { objects: Vec<Raw>, revision: u64 },
    /// What has happened since; with none, only that nothing did up to `revision`.
    Changes { changes: Vec<Change>, revision: u64 },
}

/// One object as JSON.
pub struct Raw {
    pub bytes: Bytes,
    /// Its resourceVersion, where the bytes do not have it.
    pub revision: Option<u64>,
}

/// One change to one object: its new state, or its last.
pub struct Change {
    pub object: Raw,
    pub deleted: bool,
}
