//! Watches: a stream of changes, each watcher reading the shard's ring at its own pace.

use std::sync::Arc;
use std::time::Duration;

use api::Status;
use bytes::Bytes;
use futures_util::stream;
use http::{Response, StatusCode};
use store::Revision;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::body::Body;
use crate::cache::{Batch, Cache, Event, Shard, stopped};
use crate::object::Object;
use crate::options::{ListOptions, Selection, Version};
use crate::render::Renderer;
use crate::request::Target;
use crate::server::Server;

/// How many events are put into one write at most.
const BATCH: usize = 128;
/// How often a watcher that allows bookmarks gets one.
const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// Without `timeoutSeconds`, a watch lasts between this long and twice as long, as upstream's does.
const MIN_TIMEOUT: Duration = Duration::from_secs(1800);

struct Watcher {
    cache: Arc<Cache>,
    shard: Arc<Shard>,
    selection: Selection,
    collection: String,
    renderer: Renderer,
    /// The next event to look at.
    position: u64,
    /// Everything up to this revision has been sent.
    sent: Revision,
    /// Objects still to send as if they had just been added.
    initial: std::vec::IntoIter<Arc<Object>>,
    /// A bookmark is owed that says the initial objects are complete.
    owes_end: bool,
    bookmarks: bool,
    next_bookmark: Instant,
    deadline: Instant,
    /// The first event of a table carries the columns.
    first: bool,
    ended: bool,
    newest: watch::Receiver<u64>,
    shutdown: watch::Receiver<bool>,
}

pub async fn watch(
    server: &Server,
    target: &Target,
    options: ListOptions,
    renderer: Renderer,
) -> Result<Response<Body>, Status> {
    server.fresh(options.version).await?;
    let shard = server.shard(target.resource);
    let collection = if target.name.is_empty() {
        target.key()
    } else {
        Target { name: String::new(), ..target.clone() }.key()
    };
    let known = server.cache.revision();
    let from_now = match options.version {
        Version::MostRecent | Version::Any => true,
        // The initial events of a WatchList are the newest state, not older than asked for.
        Version::NotOlderThan(_) | Version::Exact(_) => options.send_initial_events == Some(true),
    };
    let (initial, position, sent) = match options.version {
        Version::NotOlderThan(revision) | Version::Exact(revision) if !from_now => {
            let position =
                shard.position_after(revision).map_err(|error| Status::expired(error.to_string()))?;
            (Vec::new(), position, revision)
        }
        _ => {
            let (snapshot, position) = shard.snapshot_and_position(&collection, known);
            let silent = options.send_initial_events == Some(false);
            let mut objects = if silent { Vec::new() } else { snapshot.objects };
            objects.retain(|object| options.selection.matches(object));
            (objects, position, snapshot.revision)
        }
    };
    let now = Instant::now();
    let timeout = options.timeout.unwrap_or_else(|| MIN_TIMEOUT + MIN_TIMEOUT.mul_f64(server.random()));
    let media = renderer.format.media;
    let watcher = Watcher {
        cache: server.cache.clone(),
        newest: shard.subscribe(),
        shard,
        selection: options.selection,
        collection,
        renderer,
        position,
        sent,
        initial: initial.into_iter(),
        owes_end: options.send_initial_events == Some(true) && options.bookmarks,
        bookmarks: options.bookmarks,
        next_bookmark: now + BOOKMARK_EVERY,
        deadline: now + timeout,
        first: true,
        ended: false,
        shutdown: server.shutdown.clone(),
    };
    let body = Body::Stream(Box::pin(stream::unfold(watcher, |mut watcher| async {
        watcher.next().await.map(|bytes| (bytes, watcher))
    })));
    let mut response = crate::render::respond(StatusCode::OK, media, body);
    if media == crate::negotiate::Media::Protobuf {
        let value = http::HeaderValue::from_static("application/vnd.kubernetes.protobuf;stream=watch");
        response.headers_mut().insert(http::header::CONTENT_TYPE, value);
    }
    Ok(response)
}

impl Watcher {
    /// The next bytes to send; `None` ends the watch.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if self.ended {
                return None;
            }
            if let Some(bytes) = self.initial_events() {
                return Some(bytes);
            }
            self.newest.borrow_and_update();
            match self.shard.events_from(self.position, BATCH) {
                Batch::Lost => return Some(self.send_away()),
                Batch::Events(events) if events.is_empty() => {
                    if let Some(bytes) = self.wait().await {
                        return Some(bytes);
                    }
                }
                Batch::Events(events) => {
                    if let Some(bytes) = self.render(&events) {
                        return Some(bytes);
                    }
                }
            }
        }
    }

    /// Waits for news, a bookmark's time, or the end.
    async fn wait(&mut self) -> Option<Bytes> {
        let bookmark = if self.bookmarks { self.next_bookmark } else { self.deadline };
        let time_is_up = tokio::select! {
            changed = self.newest.changed() => {
                self.ended = changed.is_err();
                false
            }
            () = stopped(&mut self.shutdown) => {
                self.ended = true;
                false
            }
            () = tokio::time::sleep_until(self.deadline.min(bookmark)) => true,
        };
        if !time_is_up {
            return None;
        }
        let now = Instant::now();
        self.ended = now >= self.deadline;
        if self.ended || !self.bookmarks {
            return None;
        }
        self.next_bookmark = now + BOOKMARK_EVERY;
        self.bookmark()
    }

    /// Says how far the watcher has seen everything.
    fn bookmark(&mut self) -> Option<Bytes> {
        // The cache's revision first: events up to it are then in the ring already.
        let reached = self.cache.revision();
        match self.shard.events_from(self.position, 1) {
            Batch::Events(events) if events.is_empty() => {
                self.sent = self.sent.max(reached);
                Some(self.renderer.bookmark(self.sent, false, std::mem::take(&mut self.first)))
            }
            _ => None,
        }
    }

    fn initial_events(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        for object in self.initial.by_ref().take(BATCH) {
            let first = std::mem::take(&mut self.first);
            out.extend_from_slice(&self.renderer.event("ADDED", &object, object.revision, first));
        }
        if out.is_empty() && std::mem::take(&mut self.owes_end) {
            return Some(self.renderer.bookmark(self.sent, true, std::mem::take(&mut self.first)));
        }
        (!out.is_empty()).then(|| out.into())
    }

    fn render(&mut self, events: &[Arc<Event>]) -> Option<Bytes> {
        self.position += events.len() as u64;
        let mut frames = Vec::with_capacity(events.len());
        for event in events {
            self.sent = event.revision;
            if !event.object.key.starts_with(&self.collection) {
                continue;
            }
            let first = self.first;
            let frame = if self.selection.is_everything() {
                Some(self.renderer.shared_event(event, first))
            } else {
                self.selected(event, first)
            };
            if let Some(frame) = frame {
                self.first = false;
                frames.push(frame);
            }
        }
        match frames.len() {
            0 => None,
            1 => frames.pop(),
            _ => Some(frames.concat().into()),
        }
    }

    /// What an event means to a watcher who sees only part of the objects: one that starts to match is
    /// added, one that ceases to match is deleted.
    fn selected(&self, event: &Event, first: bool) -> Option<Bytes> {
        let before = event.previous.as_ref().filter(|object| self.selection.matches(object));
        let after = (!event.deleted && self.selection.matches(&event.object)).then_some(&event.object);
        let (kind, object) = match (before, after) {
            (None, Some(object)) => ("ADDED", object),
            (Some(_), Some(object)) => ("MODIFIED", object),
            (Some(object), None) => ("DELETED", object),
            (None, None) => return None,
        };
        Some(self.renderer.event(kind, object, event.revision, first))
    }

    /// The ring has moved on without this watcher.
    fn send_away(&mut self) -> Bytes {
        self.ended = true;
        let status = Status::expired(format!("too old resource version: {}", self.sent));
        self.renderer.error_event(&status)
    }
}
