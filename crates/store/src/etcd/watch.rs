//! A watch that outlives its connection.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use etcd_client::{EventType, WatchClient, WatchOptions, WatchResponse};

use super::header_revision;
use crate::{Ear, Entry, Event, Listener, Revision, Watch};

const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

pub fn start(client: WatchClient, prefix: &str, after: Revision, listener: Listener) -> Watch {
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
async fn follow(mut client: WatchClient, prefix: String, mut seen: Revision, mut ear: Ear) {
    let mut wait = FIRST_WAIT;
    loop {
        let before = seen;
        match follow_once(&mut client, &prefix, &mut seen, &mut ear).await {
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

async fn follow_once(client: &mut WatchClient, prefix: &str, seen: &mut Revision, ear: &mut Ear) -> End {
    // A response holds whole revisions since it may not be cut in fragments; so going on after the last one
    // leaves nothing out.
    let options = WatchOptions::new()
        .with_all_keys()
        .with_start_revision(i64::try_from(*seen + 1).unwrap_or(i64::MAX))
        .with_progress_notify();
    let mut stream = match client.watch("", Some(options)).await {
        Ok(stream) => stream,
        Err(error) => return End::Broken(error.to_string()),
    };
    loop {
        let response = match stream.message().await {
            Ok(Some(response)) => response,
            Ok(None) => return End::Broken("the stream ended".into()),
            Err(error) => return End::Broken(error.to_string()),
        };
        if response.compact_revision() > 0 {
            return End::Compacted;
        }
        if response.canceled() {
            return End::Broken(response.cancel_reason().to_owned());
        }
        if response.created() {
            continue;
        }
        let (events, reached) = translate(&response, prefix, *seen);
        if events.is_empty() && reached <= *seen {
            continue;
        }
        *seen = reached;
        ear.tell(events, reached);
    }
}

/// Our events of a response, and the revision up to which it tells everything.
fn translate(response: &WatchResponse, prefix: &str, seen: Revision) -> (Vec<Event>, Revision) {
    if response.events().is_empty() {
        return (Vec::new(), header_revision(response.header()).max(seen));
    }
    let (mut events, mut reached) = (Vec::new(), seen);
    for event in response.events() {
        let Some(kv) = event.kv() else { continue };
        let revision = u64::try_from(kv.mod_revision()).unwrap_or(0);
        reached = reached.max(revision);
        let Ok(key) = kv.key_str() else { continue };
        if revision <= seen || !key.starts_with(prefix) {
            continue;
        }
        let key: Arc<str> = key.into();
        events.push(match event.event_type() {
            EventType::Put => {
                let created = kv.create_revision() == kv.mod_revision();
                Event::Put {
                    entry: Entry { key, value: Bytes::copy_from_slice(kv.value()), revision },
                    created,
                }
            }
            EventType::Delete => Event::Delete { key, revision },
        });
    }
    (events, reached)
}
