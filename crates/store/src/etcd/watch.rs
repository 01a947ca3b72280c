//! A watch that outlives its connection.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::client::Client;
use super::header_revision;
use super::messages::{self, WatchCreateRequest, WatchResponse};
use crate::{Ear, Entry, Event, Listener, Revision, Watch};

const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

pub fn start(client: Client, prefix: &str, after: Revision, listener: Listener) -> Watch {
    let (ear, watch) = Ear::new(listener);
    let (prefix, unwanted) = (prefix.to_owned(), ear.unwanted());
    tokio::spawn(async move {
        tokio::select! {
            () = follow(client, prefix, after, ear) => {}
            () = unwanted => {}
        }
    });
    watch
}

/// Ends when history is gone.
async fn follow(client: Client, prefix: String, mut seen: Revision, mut ear: Ear) {
    let mut wait = FIRST_WAIT;
    loop {
        let before = seen;
        match follow_once(&client, &prefix, &mut seen, &mut ear).await {
            End::Compacted => return,
            End::Broken(reason) => {
                tracing::warn!(%reason, revision = seen, "the watch on etcd broke, trying again");
            }
        }
        if seen > before {
            wait = FIRST_WAIT;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

enum End {
    Compacted,
    Broken(String),
}

async fn follow_once(client: &Client, prefix: &str, seen: &mut Revision, ear: &mut Ear) -> End {
    // A response holds whole revisions since it may not be cut in fragments; so going on after the last one
    // leaves nothing out.
    let create = WatchCreateRequest {
        key: vec![0],
        range_end: vec![0],
        start_revision: i64::try_from(*seen + 1).unwrap_or(i64::MAX),
        progress_notify: true,
    };
    let mut stream = match client.watch(create).await {
        Ok(stream) => stream,
        Err(status) => return End::Broken(status.message().to_owned()),
    };
    loop {
        let response = match stream.message().await {
            Ok(Some(response)) => response,
            Ok(None) => return End::Broken("the stream ended".into()),
            Err(status) => return End::Broken(status.message().to_owned()),
        };
        if response.compact_revision > 0 {
            return End::Compacted;
        }
        if response.canceled {
            return End::Broken(response.cancel_reason);
        }
        if response.created {
            continue;
        }
        let (events, reached) = translate(response, prefix, *seen);
        if events.is_empty() && reached <= *seen {
            continue;
        }
        *seen = reached;
        ear.tell(events, reached);
    }
}

/// Our events of a response, and the revision up to which it tells everything.
fn translate(response: WatchResponse, prefix: &str, seen: Revision) -> (Vec<Event>, Revision) {
    if response.events.is_empty() {
        return (Vec::new(), header_revision(response.header.as_ref()).max(seen));
    }
    let (mut events, mut reached) = (Vec::new(), seen);
    for event in response.events {
        let Some(kv) = event.kv else { continue };
        let revision = u64::try_from(kv.mod_revision).unwrap_or(0);
        reached = reached.max(revision);
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
    (events, reached)
}
