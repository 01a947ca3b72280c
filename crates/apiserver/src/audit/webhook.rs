//! Audit webhook backend: sends batches of events.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{EncodedEvent, Mode};
use crate::https::HttpsClient;

/// The `--audit-webhook-*` flags.
#[derive(Clone, Debug)]
pub struct AuditWebhookOptions {
    pub kubeconfig: PathBuf,
    pub mode: Mode,
    pub batch: BatchOptions,
    /// Delay before the second attempt; grows by half with each further one.
    pub initial_backoff: Duration,
}

/// The `--audit-webhook-batch-*` flags.
#[derive(Clone, Debug)]
pub struct BatchOptions {
    /// Capacity of the queue; further events are dropped.
    pub buffer: usize,
    pub max_size: usize,
    pub max_wait: Duration,
    /// QPS and burst of batches; `None` disables throttling.
    pub throttle: Option<(f64, u32)>,
}

impl Default for BatchOptions {
    fn default() -> BatchOptions {
        BatchOptions {
            buffer: super::EVENT_BUFFER_SIZE,
            max_size: 400,
            max_wait: Duration::from_secs(30),
            throttle: Some((10.0, 15)),
        }
    }
}

const MAX_ATTEMPTS: u32 = 5;

/// Starts the sender task, which ends when all senders are dropped.
pub fn start(client: HttpsClient, options: &AuditWebhookOptions) -> mpsc::Sender<EncodedEvent> {
    let (sender, events) = mpsc::channel(options.batch.buffer.max(1));
    tokio::spawn(run(Arc::new(client), options.clone(), events));
    sender
}

async fn run(
    client: Arc<HttpsClient>,
    options: AuditWebhookOptions,
    mut events: mpsc::Receiver<EncodedEvent>,
) {
    let single = options.mode != Mode::Batch;
    let max_size = if single { 1 } else { options.batch.max_size.max(1) };
    let mut bucket =
        options.batch.throttle.filter(|_| !single).map(|(rate, burst)| BatchThrottle::new(rate, burst));
    let mut in_flight = JoinSet::new();
    while let Some(first) = events.recv().await {
        while in_flight.try_join_next().is_some() {}
        let mut batch = collect(first, &mut events, max_size, options.batch.max_wait).await;
        // An event without bytes is a flush marker: wait until all batches before it are sent.
        let end = batch.pop_if(|event| event.bytes.is_empty());
        if !batch.is_empty() {
            if let Some(bucket) = &mut bucket {
                bucket.take().await;
            }
            let (client, backoff) = (client.clone(), options.initial_backoff);
            // Send in a task of its own, so that a slow receiver does not delay the next batches.
            in_flight.spawn(async move {
                let delivered = send_batch(&client, &batch, backoff).await;
                for done in batch.into_iter().filter_map(|event| event.done) {
                    let _ = done.send(delivered);
                }
            });
        }
        if let Some(end) = end {
            while in_flight.join_next().await.is_some() {}
            let _ = end.done.map(|done| done.send(true));
        }
    }
}

/// Collects a batch: until it is full, `max_wait` is over, or an event has a waiter.
async fn collect(
    first: EncodedEvent,
    events: &mut mpsc::Receiver<EncodedEvent>,
    max_size: usize,
    max_wait: Duration,
) -> Vec<EncodedEvent> {
    let deadline = Instant::now() + max_wait;
    let mut batch = vec![first];
    while batch.len() < max_size && batch.last().is_none_or(|event| event.done.is_none()) {
        match tokio::time::timeout_at(deadline, events.recv()).await {
            Ok(Some(event)) => batch.push(event),
            _ => break,
        }
    }
    batch
}

async fn send_batch(client: &HttpsClient, batch: &[EncodedEvent], first_wait: Duration) -> bool {
    let events: Vec<&[u8]> = batch.iter().map(|event| event.bytes.as_slice()).collect();
    let mut body = br#"{"kind":"EventList","apiVersion":"audit.k8s.io/v1","metadata":{},"items":["#.to_vec();
    body.extend_from_slice(&events.join(&b','));
    body.extend_from_slice(b"]}\n");
    let body = Bytes::from(body);
    let mut backoff = first_wait;
    for attempt in 1..=MAX_ATTEMPTS {
        match client.post(body.clone()).await {
            Ok(()) => return true,
            Err(error) if attempt == MAX_ATTEMPTS => {
                tracing::error!(%error, lost = events.len(), "cannot send audit events, giving up");
            }
            Err(error) => {
                tracing::debug!(%error, "cannot send audit events, retrying");
                tokio::time::sleep(backoff).await;
                backoff = backoff * 3 / 2;
            }
        }
    }
    false
}

/// Token bucket for batches.
struct BatchThrottle {
    rate: f64,
    burst: f64,
    tokens: f64,
    last_update: Instant,
}

impl BatchThrottle {
    fn new(rate: f64, burst: u32) -> BatchThrottle {
        BatchThrottle {
            rate: rate.max(0.001),
            burst: f64::from(burst),
            tokens: f64::from(burst),
            last_update: Instant::now(),
        }
    }

    async fn take(&mut self) {
        let now = Instant::now();
        self.tokens =
            (self.tokens + (now - self.last_update).as_secs_f64() * self.rate).min(self.burst.max(1.0));
        self.last_update = now;
        self.tokens -= 1.0;
        if self.tokens < 0.0 {
            tokio::time::sleep(Duration::from_secs_f64(-self.tokens / self.rate)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::json;

    use super::*;
    use crate::https::Credentials;

    #[tokio::test]
    async fn sends_one_batch_and_retries_failures() {
        let dir = tempfile::tempdir().unwrap();
        let count = AtomicUsize::new(0);
        let (webhook, ca) = crate::https::tests::webhook(dir.path(), move |_| {
            (if count.fetch_add(1, Ordering::SeqCst) == 0 { 503 } else { 200 }, json!({}))
        });
        let credentials = Credentials { authorities: Some(ca), ..Credentials::default() };
        let client = HttpsClient::new(&format!("{}/audit", webhook.url()), credentials).unwrap();
        let options = AuditWebhookOptions {
            kubeconfig: PathBuf::new(),
            mode: Mode::Batch,
            batch: BatchOptions { max_size: 3, ..BatchOptions::default() },
            initial_backoff: Duration::from_millis(1),
        };
        let sender = start(client, &options);
        for i in 0..3 {
            sender
                .send(EncodedEvent { bytes: format!("{{\"auditID\":\"{i}\"}}").into_bytes(), done: None })
                .await
                .unwrap();
        }
        // An event with a waiter is sent at once, and a flush waits for all batches.
        for bytes in [b"{}".to_vec(), Vec::new()] {
            let (done, sent) = tokio::sync::oneshot::channel();
            sender.send(EncodedEvent { bytes, done: Some(done) }).await.unwrap();
            assert!(sent.await.unwrap());
        }
        assert_eq!(webhook.requests().len(), 3);
        let mut payloads: Vec<String> =
            webhook.requests().iter().map(|received| received.body.to_string()).collect();
        payloads.sort();
        payloads.dedup();
        let list = |items: &str| {
            format!(
                r#"{{"apiVersion":"audit.k8s.io/v1","items":[{items}],"kind":"EventList","metadata":{{}}}}"#
            )
        };
        let three = r#"{"auditID":"0"},{"auditID":"1"},{"auditID":"2"}"#;
        assert_eq!(payloads, [list(three), list("{}")]);
        assert!(webhook.requests().iter().all(|received| received.path == "/audit"));
    }

    #[tokio::test(start_paused = true)]
    async fn sends_full_or_expired_batch_within_rate_limit() {
        let event = || EncodedEvent { bytes: b"{}".to_vec(), done: None };
        let (sender, mut events) = mpsc::channel(100);
        for _ in 0..7 {
            sender.send(event()).await.unwrap();
        }
        let second = Duration::from_secs(1);
        assert_eq!(collect(event(), &mut events, 5, second).await.len(), 5);
        let before = Instant::now();
        assert_eq!(collect(event(), &mut events, 5, second).await.len(), 4);
        assert_eq!(before.elapsed(), second);
        // An event with a waiter closes the batch.
        let (done, _answer) = tokio::sync::oneshot::channel();
        let waiting = EncodedEvent { bytes: Vec::new(), done: Some(done) };
        assert_eq!(collect(waiting, &mut events, 5, second).await.len(), 1);
        let mut bucket = BatchThrottle::new(10.0, 15);
        let before = Instant::now();
        for _ in 0..25 {
            bucket.take().await;
        }
        assert!((before.elapsed().as_secs_f64() - 1.0).abs() < 0.05, "{:?}", before.elapsed());
    }
}
