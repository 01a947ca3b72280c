//! The way to the API server for roles in the same process: the same pipeline, without a wire.

use std::sync::Arc;

use api::table::Storage;
use async_trait::async_trait;
use bytes::Bytes;
use client::{Change, Connection, Error, Failure, Feed, News, Raw};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use tokio::sync::watch;

use crate::access::User;
use crate::authentication::Peer;
use crate::cache::{Batch, Event, Shard};
use crate::object::Object;
use crate::options::Selection;
use crate::registry::prefix;
use crate::request::{Query, Route, route};
use crate::server::Server;

/// How many changes are handed over at once.
const BATCH: usize = 512;

/// A connection as one user.
pub struct Local {
    server: Arc<Server>,
    user: User,
}

impl Local {
    /// As an administrator; roles act as [`Connection::acting_as`] their service accounts.
    pub(crate) fn new(server: Arc<Server>) -> Arc<Local> {
        let groups = vec!["system:masters".into(), "system:authenticated".into()];
        Arc::new(Local { server, user: User { name: "system:admin".into(), groups, ..User::default() } })
    }
}

#[async_trait]
impl Connection for Local {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        let response = self.server.answer(request.map(Full::new), Peer::known(self.user.clone())).await;
        let (parts, body) = response.into_parts();
        let Ok(body) = body.collect().await;
        Ok(Response::from_parts(parts, body.to_bytes()))
    }

    async fn follow(&self, collection: &str) -> Result<Box<dyn Feed>, Error> {
        let (path, query) = collection.split_once('?').unwrap_or((collection, ""));
        match route(&self.server.registry, path) {
            Ok(Route::Resource(target)) if target.resource.storage == Storage::Own => {
                let selection = Selection::parse(&Query::parse(query), &target).map_err(refused)?;
                let shard = self.server.shard(target.resource);
                Ok(Box::new(Following {
                    server: self.server.clone(),
                    newest: shard.subscribe(),
                    shard,
                    scope: prefix(target.resource),
                    selection,
                    position: None,
                }))
            }
            _ => Err(Error::Api(Box::new(Failure {
                code: 404,
                reason: "NotFound".into(),
                message: format!("{collection} is nothing that can be followed"),
                ..Failure::default()
            }))),
        }
    }

    fn acting_as(&self, name: &str) -> Option<Arc<dyn Connection>> {
        if name.starts_with("system:") {
            let mut groups = vec!["system:authenticated".to_owned()];
            if name.starts_with("system:node:") {
                groups.push("system:nodes".to_owned());
            }
            let user = User { name: name.to_owned(), groups, ..User::default() };
            return Some(Arc::new(Local { server: self.server.clone(), user }));
        }
        let groups = ["system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"];
        let user = User {
            name: format!("system:serviceaccount:kube-system:{name}"),
            groups: groups.map(str::to_owned).to_vec(),
            ..User::default()
        };
        Some(Arc::new(Local { server: self.server.clone(), user }))
    }
}

/// Reads the ring of a kind as a watcher does, and hands over the stored bytes.
struct Following {
    server: Arc<Server>,
    shard: Arc<Shard>,
    newest: watch::Receiver<u64>,
    /// What all keys begin with.
    scope: String,
    selection: Selection,
    /// The next event to look at; `None` before everything has been told.
    position: Option<u64>,
}

#[async_trait]
impl Feed for Following {
    async fn next(&mut self) -> Result<News, Error> {
        loop {
            self.newest.borrow_and_update();
            let events = self.position.map(|position| (position, self.shard.events_from(position, BATCH)));
            match events {
                Some((position, Batch::Events(events))) if !events.is_empty() => {
                    self.position = Some(position + events.len() as u64);
                    let revision = events.last().map_or(0, |event| event.revision);
                    let changes = events.iter().filter_map(|event| self.change(event)).collect();
                    return Ok(News::Changes { changes, revision });
                }
                Some((_, Batch::Events(_))) => {
                    if self.newest.changed().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                }
                // The beginning, or too slow for the ring.
                None | Some((_, Batch::Lost)) => {
                    let known = self.server.cache.revision();
                    let (snapshot, position) = self.shard.snapshot_and_position(&self.scope, known);
                    self.position = Some(position);
                    let chosen = snapshot.objects.iter().filter(|object| self.selection.matches(object));
                    let objects = chosen.map(|object| raw(object, object.revision)).collect();
                    return Ok(News::Everything { objects, revision: snapshot.revision });
                }
            }
        }
    }
}

impl Following {
    /// What an event means to whoever sees only part of the objects.
    fn change(&self, event: &Event) -> Option<Change> {
        let matches = |object: &Arc<Object>| self.selection.matches(object);
        if !event.deleted && matches(&event.object) {
            return Some(Change { object: raw(&event.object, event.revision), deleted: false });
        }
        let last = if event.deleted { Some(&event.object) } else { event.previous.as_ref() };
        let last = last.filter(|object| matches(object))?;
        Some(Change { object: raw(last, event.revision), deleted: true })
    }
}

fn refused(status: api::Status) -> Error {
    Error::Api(Box::new(Failure {
        code: status.code,
        reason: status.reason.to_string(),
        message: status.message,
        ..Failure::default()
    }))
}

fn raw(object: &Object, revision: u64) -> Raw {
    Raw::new(object.bytes(), Some(revision)).leaving_out(object.managed_fields())
}

#[cfg(test)]
mod tests;
