//! The in-process connection to the API server: the same pipeline without a network.

use std::sync::Arc;

use api::resource_table::Storage;
use async_trait::async_trait;
use bytes::Bytes;
use client::{Connection, Error, Failure, RawObject, Watch, WatchChange, WatchEvent};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use tokio::sync::watch;

use crate::access::User;
use crate::authentication::Peer;
use crate::cache::{Event, EventBatch, Shard};
use crate::object::Object;
use crate::options::SelectionPredicate;
use crate::registry::prefix;
use crate::request::{Query, Route, route};
use crate::server::Server;

/// The most events in one batch.
const MAX_EVENTS_PER_BATCH: usize = 512;

/// A connection that acts as one user.
pub struct LocalConnection {
    server: Arc<Server>,
    user: User,
}

impl LocalConnection {
    /// Acts as an administrator. Components use [`Connection::impersonate`] to act as their service
    /// account.
    pub(crate) fn new(server: Arc<Server>) -> Arc<LocalConnection> {
        let groups = vec!["system:masters".into(), "system:authenticated".into()];
        Arc::new(LocalConnection {
            server,
            user: User { name: "system:admin".into(), groups, ..User::default() },
        })
    }
}

#[async_trait]
impl Connection for LocalConnection {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        let response =
            self.server.handle_request(request.map(Full::new), Peer::known(self.user.clone())).await;
        let (parts, body) = response.into_parts();
        let Ok(body) = body.collect().await;
        Ok(Response::from_parts(parts, body.to_bytes()))
    }

    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error> {
        let (path, query) = collection.split_once('?').unwrap_or((collection, ""));
        match route(&self.server.registry, path) {
            Ok(Route::Resource(target)) if target.resource.storage == Storage::Own => {
                let selection =
                    SelectionPredicate::parse(&Query::parse(query), &target).map_err(api_error)?;
                let shard = self.server.shard(target.resource);
                Ok(Box::new(LocalWatch {
                    server: self.server.clone(),
                    latest_position: shard.subscribe(),
                    shard,
                    key_prefix: prefix(target.resource),
                    selection,
                    position: None,
                }))
            }
            _ => Err(Error::Api(Box::new(Failure {
                code: 404,
                reason: "NotFound".into(),
                message: format!("{collection} is not a resource that can be watched"),
                ..Failure::default()
            }))),
        }
    }

    fn impersonate(&self, name: &str) -> Option<Arc<dyn Connection>> {
        if name.starts_with("system:") {
            let mut groups = vec!["system:authenticated".to_owned()];
            if name.starts_with("system:node:") {
                groups.push("system:nodes".to_owned());
            }
            let user = User { name: name.to_owned(), groups, ..User::default() };
            return Some(Arc::new(LocalConnection { server: self.server.clone(), user }));
        }
        let groups = ["system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"];
        let user = User {
            name: format!("system:serviceaccount:kube-system:{name}"),
            groups: groups.map(str::to_owned).to_vec(),
            ..User::default()
        };
        Some(Arc::new(LocalConnection { server: self.server.clone(), user }))
    }
}

/// Reads the event ring of a resource as a watcher does, and returns the stored bytes.
struct LocalWatch {
    server: Arc<Server>,
    shard: Arc<Shard>,
    latest_position: watch::Receiver<u64>,
    /// The common prefix of all keys.
    key_prefix: String,
    selection: SelectionPredicate,
    /// The next event to read; `None` before the initial list was returned.
    position: Option<u64>,
}

#[async_trait]
impl Watch for LocalWatch {
    async fn next(&mut self) -> Result<WatchEvent, Error> {
        loop {
            self.latest_position.borrow_and_update();
            let events = self
                .position
                .map(|position| (position, self.shard.events_from(position, MAX_EVENTS_PER_BATCH)));
            match events {
                Some((position, EventBatch::Events(events))) if !events.is_empty() => {
                    self.position = Some(position + events.len() as u64);
                    let revision = events.last().map_or(0, |event| event.revision);
                    let changes = events.iter().filter_map(|event| self.change(event)).collect();
                    return Ok(WatchEvent::Changes { changes, revision });
                }
                Some((_, EventBatch::Events(_))) => {
                    if self.latest_position.changed().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                }
                // The initial list, or the watch was too slow and its events have left the ring.
                None | Some((_, EventBatch::TooOld)) => {
                    let known = self.server.cache.revision();
                    let (snapshot, position) = self.shard.snapshot_and_position(&self.key_prefix, known);
                    self.position = Some(position);
                    let selected = snapshot.objects.iter().filter(|object| self.selection.matches(object));
                    let objects = selected.map(|object| raw(object, object.revision)).collect();
                    return Ok(WatchEvent::Replace { objects, revision: snapshot.revision });
                }
            }
        }
    }
}

impl LocalWatch {
    /// The event as a client sees it whose selector matches only part of the objects: an object
    /// that stops matching is deleted for it.
    fn change(&self, event: &Event) -> Option<WatchChange> {
        let matches = |object: &Arc<Object>| self.selection.matches(object);
        if !event.deleted && matches(&event.object) {
            return Some(WatchChange { object: raw(&event.object, event.revision), deleted: false });
        }
        let last = if event.deleted { Some(&event.object) } else { event.previous.as_ref() };
        let last = last.filter(|object| matches(object))?;
        Some(WatchChange { object: raw(last, event.revision), deleted: true })
    }
}

fn api_error(status: api::Status) -> Error {
    Error::Api(Box::new(Failure {
        code: status.code,
        reason: status.reason.to_string(),
        message: status.message,
        ..Failure::default()
    }))
}

fn raw(object: &Object, revision: u64) -> RawObject {
    RawObject::new(object.bytes(), Some(revision)).without_range(object.managed_fields())
}

#[cfg(test)]
mod tests;
