//! Watches: a stream of events. Each watcher reads the shard's event ring at its own pace.
//! Upstream: `cacheWatcher`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use api::Status;
use bytes::Bytes;
use futures_util::stream;
use http::{Response, StatusCode};
use jiff::Timestamp;
use store::Revision;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

use crate::body::Body;
use crate::cache::{Cache, Event, EventBatch, Shard};
use crate::metrics::GaugeGuard;
use crate::negotiate::{MediaType, not_acceptable};
use crate::object::Object;
use crate::options::{ListOptions, ResourceVersionMatch, SelectionPredicate};
use crate::render::Renderer;
use crate::request::Target;
use crate::server::Server;

/// The most events in one write, and about how many bytes.
const MAX_EVENTS_PER_WRITE: usize = 128;
const MAX_WRITE_BYTES: usize = 64 << 10;
/// The interval of bookmarks for clients that allow them.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
const BOOKMARK_BEFORE_DEADLINE: Duration = Duration::from_secs(2);
/// The default timeout is between this and twice as long, as upstream.
const MIN_TIMEOUT: Duration = Duration::from_secs(1800);
/// The longest timeout a client can request, so that `Instant` cannot overflow.
const MAX_TIMEOUT: Duration = Duration::from_secs(366 * 24 * 3600);

struct CacheWatcher {
    server: Arc<Server>,
    /// Notified when custom resources are added or removed; `None` for built-in ones, which are
    /// never removed.
    registry_changes: Option<watch::Receiver<u64>>,
    cache: Arc<Cache>,
    shard: Arc<Shard>,
    selection: SelectionPredicate,
    /// The common key prefix of all watched objects.
    key_prefix: String,
    renderer: Renderer,
    /// The ring position of the next event to read.
    position: u64,
    /// All events up to this revision have been sent.
    sent: Revision,
    /// Initial objects that are still to be sent as ADDED events.
    initial: std::vec::IntoIter<Arc<Object>>,
    /// The bookmark that ends the initial events is still to be sent.
    initial_events_end_pending: bool,
    allow_bookmarks: bool,
    next_bookmark: Instant,
    deadline: Instant,
    /// The first event of a table includes the column definitions.
    first: bool,
    ended: bool,
    event_signal: watch::Receiver<()>,
    /// Wakes the watcher without events. Reset in place: a new timer for each event would cost more
    /// than the event.
    timer: Pin<Box<Sleep>>,
    shutdown: watch::Receiver<bool>,
    _counted: GaugeGuard,
}

pub async fn watch(
    server: &Arc<Server>,
    target: &Target,
    options: ListOptions,
    renderer: Renderer,
) -> Result<Response<Body>, Status> {
    if renderer.format.media == MediaType::Yaml {
        return Err(not_acceptable());
    }
    let watch_start = start_watch(server, target, &options).await;
    // Errors of a valid watch request are sent as an ERROR event in the stream, as upstream.
    let watch_start = match watch_start {
        Ok(watch_start) => watch_start,
        Err(status) => {
            let only = renderer.error_event(&status);
            return Ok(watch_response(&renderer, Body::Stream(Box::pin(stream::iter([only])))));
        }
    };
    let now = Instant::now();
    let timeout = options.timeout.unwrap_or_else(|| MIN_TIMEOUT + MIN_TIMEOUT.mul_f64(server.random()));
    let mut response = watch_response(&renderer, Body::empty());
    let watcher = CacheWatcher {
        server: server.clone(),
        registry_changes: target.resource.custom.map(|_| server.registry.changes()),
        cache: server.cache.clone(),
        event_signal: watch_start.shard.subscribe_watcher(),
        timer: Box::pin(tokio::time::sleep_until(now)),
        shard: watch_start.shard,
        key_prefix: target.key_prefix(&options.selection),
        selection: options.selection,
        renderer,
        position: watch_start.position,
        sent: watch_start.sent,
        initial: watch_start.initial.into_iter(),
        initial_events_end_pending: options.send_initial_events == Some(true) && options.allow_bookmarks,
        allow_bookmarks: options.allow_bookmarks,
        next_bookmark: bookmark_time(now, now + timeout.min(MAX_TIMEOUT)),
        deadline: now + timeout.min(MAX_TIMEOUT),
        first: true,
        ended: false,
        shutdown: server.shutdown.clone(),
        _counted: server.metrics.count_watch(),
    };
    *response.body_mut() = Body::Stream(Box::pin(stream::unfold(watcher, |mut watcher| async {
        watcher.next().await.map(|bytes| (bytes, watcher))
    })));
    Ok(response)
}

/// The start of a watch.
struct WatchStart {
    shard: Arc<Shard>,
    initial: Vec<Arc<Object>>,
    position: u64,
    sent: Revision,
}

async fn start_watch(server: &Server, target: &Target, options: &ListOptions) -> Result<WatchStart, Status> {
    let shard = server.shard(target.resource);
    let initial_events = options.send_initial_events;
    match options.version {
        // Later events are in the ring. A revision in the future is waited for.
        ResourceVersionMatch::NotOlderThan(sent) | ResourceVersionMatch::Exact(sent)
            if initial_events != Some(true) =>
        {
            let position = shard.position_after(sent).map_err(|error| Status::expired(error.to_string()))?;
            Ok(WatchStart { shard, initial: Vec::new(), position, sent })
        }
        version => {
            server.wait_until_fresh(version).await?;
            let known = server.cache.revision();
            let scope = target.key_prefix(&options.selection);
            let (snapshot, position) = shard.snapshot_and_position(&scope, known);
            let initial = if initial_events == Some(false) { Vec::new() } else { snapshot.objects };
            let mut initial = server.convert_all_for_request(target.resource, initial).await?;
            initial.retain(|object| options.selection.matches(object));
            Ok(WatchStart { shard, initial, position, sent: snapshot.revision })
        }
    }
}

/// Once per interval, and shortly before the deadline, so that the client resumes from there.
fn bookmark_time(now: Instant, deadline: Instant) -> Instant {
    let regular = now + BOOKMARK_INTERVAL;
    match deadline.checked_sub(BOOKMARK_BEFORE_DEADLINE) {
        Some(last) if last > now => regular.min(last),
        _ => regular,
    }
}

fn watch_response(renderer: &Renderer, body: Body) -> Response<Body> {
    let media = renderer.format.media;
    let mut response = crate::render::build_response(StatusCode::OK, media, body);
    if media == MediaType::Protobuf {
        let value = http::HeaderValue::from_static("application/vnd.kubernetes.protobuf;stream=watch");
        response.headers_mut().insert(http::header::CONTENT_TYPE, value);
    }
    response
}

impl CacheWatcher {
    /// The next bytes to send; `None` ends the watch.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            // Clear the signal before reading any state, so that no concurrent event is missed.
            self.event_signal.mark_unchanged();
            if self.ended || *self.shutdown.borrow() || Instant::now() >= self.deadline {
                return None;
            }
            if let Some(bytes) = self.initial_events() {
                return Some(bytes);
            }
            if self.allow_bookmarks && Instant::now() >= self.next_bookmark {
                self.next_bookmark = bookmark_time(Instant::now(), self.deadline);
                return Some(self.bookmark());
            }
            match self.shard.events_from(self.position, MAX_EVENTS_PER_WRITE) {
                EventBatch::TooOld => return Some(self.expire()),
                EventBatch::Events(events) if events.is_empty() => self.wait().await,
                EventBatch::Events(events) => {
                    match self.render_events(&events).await {
                        Ok(Some(bytes)) => return Some(bytes),
                        Ok(None) => {}
                        Err(status) => {
                            self.ended = true;
                            return Some(self.renderer.error_event(&status));
                        }
                    }
                    // Events that the selection filters out cost time without awaiting anything:
                    // yield to other tasks.
                    tokio::task::consume_budget().await;
                }
            }
        }
    }

    /// Waits for events, the time of a bookmark, or the deadline.
    async fn wait(&mut self) {
        let bookmark = if self.allow_bookmarks { self.next_bookmark } else { self.deadline };
        let until = self.deadline.min(bookmark);
        if self.timer.deadline() != until {
            self.timer.as_mut().reset(until);
        }
        tokio::select! {
            changed = self.event_signal.changed() => self.ended = changed.is_err(),
            () = registry_changed(&mut self.registry_changes) => self.ended = !self.is_served(),
            () = &mut self.timer => {}
        }
    }

    /// Whether the resource is still served.
    fn is_served(&self) -> bool {
        let row = self.renderer.resource;
        self.server
            .registry
            .find(row.group, row.version, row.plural)
            .is_some_and(|found| std::ptr::eq(found, row))
    }

    /// A bookmark with the revision up to which the watcher has read.
    fn bookmark(&mut self) -> Bytes {
        // Read the cache's revision first: events up to it are then in the ring. If the ring is
        // fully read afterwards, the watcher has seen everything up to that revision.
        let cache_revision = self.cache.revision();
        if matches!(self.shard.events_from(self.position, 1), EventBatch::Events(events) if events.is_empty())
        {
            self.sent = self.sent.max(cache_revision);
        }
        self.renderer.bookmark(self.sent, false, std::mem::take(&mut self.first))
    }

    fn initial_events(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        while out.len() < MAX_WRITE_BYTES
            && let Some(object) = self.initial.next()
        {
            let first = std::mem::take(&mut self.first);
            out.extend_from_slice(&self.renderer.event("ADDED", &object, object.revision, first));
        }
        if out.is_empty() && std::mem::take(&mut self.initial_events_end_pending) {
            return Some(self.renderer.bookmark(self.sent, true, std::mem::take(&mut self.first)));
        }
        (!out.is_empty()).then(|| out.into())
    }

    async fn render_events(&mut self, events: &[Arc<Event>]) -> Result<Option<Bytes>, Status> {
        // Ages in tables are relative to the event.
        self.renderer.now = Timestamp::now();
        let mut frames: Vec<Bytes> = Vec::with_capacity(events.len());
        let mut size = 0;
        for event in events {
            if size >= MAX_WRITE_BYTES {
                break;
            }
            self.position += 1;
            // A watch may start at a revision in the future: skip earlier events.
            if event.revision <= self.sent {
                continue;
            }
            self.sent = event.revision;
            if !event.object.key.starts_with(&self.key_prefix) {
                continue;
            }
            let first = self.first;
            let frame = if self.registry_changes.is_some() {
                self.custom_event(event, first).await?
            } else if self.selection.is_everything() {
                Some(self.renderer.shared_event(event, first))
            } else {
                self.selected_event(event, first)
            };
            if let Some(frame) = frame {
                self.first = false;
                size += frame.len();
                frames.push(frame);
            }
        }
        Ok(match frames.len() {
            0 => None,
            1 => frames.pop(),
            _ => Some(frames.concat().into()),
        })
    }

    /// Renders an event of a custom resource, converted to the requested version.
    async fn custom_event(&self, event: &Arc<Event>, first: bool) -> Result<Option<Bytes>, Status> {
        let row = self.renderer.resource;
        let object = self.server.convert_for_request(row, event.object.clone()).await?;
        let is_unchanged = Arc::ptr_eq(&object, &event.object);
        if self.selection.is_everything() {
            return Ok(Some(match is_unchanged {
                true => self.renderer.shared_event(event, first),
                false => self.renderer.event(event.kind(), &object, event.revision, first),
            }));
        }
        let previous = match &event.previous {
            Some(previous) => Some(self.server.convert_for_request(row, previous.clone()).await?),
            None => None,
        };
        Ok(self.transition_event(previous.as_ref(), &object, event, first))
    }

    /// Renders an event for a watch with selectors: an object that starts to match is ADDED, one
    /// that stops matching is DELETED.
    fn selected_event(&self, event: &Event, first: bool) -> Option<Bytes> {
        self.transition_event(event.previous.as_ref(), &event.object, event, first)
    }

    fn transition_event(
        &self,
        previous: Option<&Arc<Object>>,
        object: &Arc<Object>,
        event: &Event,
        first: bool,
    ) -> Option<Bytes> {
        let before = previous.filter(|object| self.selection.matches(object));
        let after = (!event.deleted && self.selection.matches(object)).then_some(object);
        let (kind, object) = match (before, after) {
            (None, Some(object)) => ("ADDED", object),
            (Some(_), Some(object)) => ("MODIFIED", object),
            (Some(object), None) => ("DELETED", object),
            (None, None) => return None,
        };
        Some(self.renderer.event(kind, object, event.revision, first))
    }

    /// The watcher was too slow, and its events have left the ring: send an Expired error.
    fn expire(&mut self) -> Bytes {
        self.ended = true;
        let status = Status::expired(format!("too old resource version: {}", self.sent));
        self.renderer.error_event(&status)
    }
}

/// Waits until custom resources are added or removed; never returns for built-in resources.
async fn registry_changed(registry_changes: &mut Option<watch::Receiver<u64>>) {
    let changed = match registry_changes {
        Some(registry_changes) => registry_changes.changed().await.is_ok(),
        None => false,
    };
    if !changed {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests;
