//! A watch that reconnects after errors.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::client::Client;
use super::header_revision;
use super::messages::{self, WatchCreateRequest, WatchResponse};
use crate::{Entry, Event, Listener, Revision, Watch, WatchSender};

const INITIAL_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

pub fn start(client: Client, prefix: &str, after: Revision, listener: Listener) -> Watch {
    let (sender, watch) = WatchSender::new(listener);
    let (prefix, closed) = (prefix.to_owned(), sender.closed());
    tokio::spawn(async move {
        tokio::select! {
            () = run(client, prefix, after, sender) => {}
            () = closed => {}
        }
    });
    watch
}

/// Runs until the history is compacted.
async fn run(client: Client, prefix: String, mut seen: Revision, mut sender: WatchSender) {
    let mut backoff = INITIAL_BACKOFF;
    loop {
        let before = seen;
        match run_once(&client, &prefix, &mut seen, &mut sender).await {
            WatchEnd::Compacted => return,
            WatchEnd::Failed(reason) => {
                tracing::warn!(%reason, revision = seen, "etcd watch failed, reconnecting");
            }
        }
        if seen > before {
            backoff = INITIAL_BACKOFF;
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

enum WatchEnd {
    Compacted,
    Failed(String),
}

async fn run_once(client: &Client, prefix: &str, seen: &mut Revision, sender: &mut WatchSender) -> WatchEnd {
    // A response contains complete revisions, because fragmentation is not requested. So resuming
    // after the last received revision loses no events.
    let create = WatchCreateRequest {
        key: vec![0],
        range_end: vec![0],
        start_revision: i64::try_from(*seen + 1).unwrap_or(i64::MAX),
        progress_notify: true,
    };
    let mut stream = match client.watch(create).await {
        Ok(stream) => stream,
        Err(status) => return WatchEnd::Failed(status.message().to_owned()),
    };
    loop {
        let response = match stream.message().await {
            Ok(Some(response)) => response,
            Ok(None) => return WatchEnd::Failed("stream closed".into()),
            Err(status) => return WatchEnd::Failed(status.message().to_owned()),
        };
        if response.compact_revision > 0 {
            return WatchEnd::Compacted;
        }
        if response.canceled {
            return WatchEnd::Failed(response.cancel_reason);
        }
        if response.created {
            continue;
        }
        let (events, progress) = convert_events(response, prefix, *seen);
        if events.is_empty() && progress <= *seen {
            continue;
        }
        *seen = progress;
        sender.send(events, progress);
    }
}

/// The events of a response under the prefix, and the revision up to which the watch is complete.
fn convert_events(response: WatchResponse, prefix: &str, seen: Revision) -> (Vec<Event>, Revision) {
    if response.events.is_empty() {
        return (Vec::new(), header_revision(response.header.as_ref()).max(seen));
    }
    let (mut events, mut progress) = (Vec::new(), seen);
    for event in response.events {
        let Some(kv) = event.kv else { continue };
        let revision = u64::try_from(kv.mod_revision).unwrap_or(0);
        progress = progress.max(revision);
        let Ok(key) = str::from_utf8(&kv.key) else { continue };
        if revision <= seen || !key.starts_with(prefix) {
            continue;
        }
        let key: Arc<str> = key.into();
        events.push(if event.r#type == messages::Event::DELETE {
            Event::Delete { key, revision }
        } else {
            let created = kv.create_revision == kv.mod_revision;
            Event::Put { entry: Entry { key, value: Bytes::from(kv.value), revision }, created }
        });
    }
    (events, progress)
}
