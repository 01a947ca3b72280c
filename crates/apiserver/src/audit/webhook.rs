//! Events sent to somebody else, many at a time.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Mode, Parcel};
use crate::https::Client;

/// Where events are sent, and how.
#[derive(Clone, Debug)]
pub struct AuditWebhookOptions {
    pub kubeconfig: PathBuf,
    pub mode: Mode,
    pub batch: Batch,
    /// How long is waited before the second try; each further wait is half as long again.
    pub initial_backoff: Duration,
}

/// How many events go together, and how often.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Events beyond this are dropped.
    pub buffer: usize,
    pub max_size: usize,
    pub max_wait: Duration,
    /// Batches a second and how many at once; `None` does not hold them back.
    pub throttle: Option<(f64, u32)>,
}

impl Default for Batch {
    fn default() -> Batch {
        Batch {
            buffer: super::BUFFER,
            max_size: 400,
            max_wait: Duration::from_secs(30),
            throttle: Some((10.0, 15)),
        }
    }
}

const TRIES: u32 = 5;

/// Sends what comes until nobody can send any more.
pub fn start(client: Client, options: &AuditWebhookOptions) -> mpsc::Sender<Parcel> {
    let (sender, parcels) = mpsc::channel(options.batch.buffer.max(1));
    tokio::spawn(run(Arc::new(client), options.clone(), parcels));
    sender
}

async fn run(client: Arc<Client>, options: AuditWebhookOptions, mut parcels: mpsc::Receiver<Parcel>) {
    let single = options.mode != Mode::Batch;
    let max_size = if single { 1 } else { options.batch.max_size.max(1) };
    let mut bucket = options.batch.throttle.filter(|_| !single).map(|(rate, burst)| Bucket::new(rate, burst));
    let mut under_way = JoinSet::new();
    while let Some(first) = parcels.recv().await {
        while under_way.try_join_next().is_some() {}
        let mut batch = collect(first, &mut parcels, max_size, options.batch.max_wait).await;
        // One without an event asks whether all others have been sent.
        let end = batch.pop_if(|parcel| parcel.bytes.is_empty());
        if !batch.is_empty() {
            if let Some(bucket) = &mut bucket {
                bucket.take().await;
            }
            let (client, wait) = (client.clone(), options.initial_backoff);
            // A slow receiver holds up nobody but the batch it is given.
            under_way.spawn(async move {
                let good = deliver(&client, &batch, wait).await;
                for done in batch.into_iter().filter_map(|parcel| parcel.done) {
                    let _ = done.send(good);
                }
            });
        }
        if let Some(end) = end {
            while under_way.join_next().await.is_some() {}
            let _ = end.done.map(|done| done.send(true));
        }
    }
}

/// The first and what comes after it, until it is enough, it is time, or somebody waits for an answer.
async fn collect(
    first: Parcel,
    parcels: &mut mpsc::Receiver<Parcel>,
    max_size: usize,
    max_wait: Duration,
) -> Vec<Parcel> {
    let deadline = Instant::now() + max_wait;
    let mut batch = vec![first];
    while batch.len() < max_size && batch.last().is_none_or(|parcel| parcel.done.is_none()) {
        match tokio::time::timeout_at(deadline, parcels.recv()).await {
            Ok(Some(parcel)) => batch.push(parcel),
            _ => break,
        }
    }
    batch
}

async fn deliver(client: &Client, batch: &[Parcel], first_wait: Duration) -> bool {
    let events: Vec<&[u8]> = batch.iter().map(|parcel| parcel.bytes.as_slice()).collect();
    let mut body = br#"{"kind":"EventList","apiVersion":"audit.k8s.io/v1","metadata":{},"items":["#.to_vec();
    body.extend_from_slice(&events.join(&b','));
    body.extend_from_slice(b"]}\n");
    let body = Bytes::from(body);
    let mut wait = first_wait;
    for attempt in 1..=TRIES {
        match client.post(body.clone()).await {
            Ok(()) => return true,
            Err(error) if attempt == TRIES => {
                tracing::error!(%error, lost = events.len(), "cannot send audit events");
            }
            Err(error) => {
                tracing::debug!(%error, "sending audit events again");
                tokio::time::sleep(wait).await;
                wait = wait * 3 / 2;
            }
        }
    }
    false
}

/// So many a second, and some at once after a pause.
struct Bucket {
    rate: f64,
    burst: f64,
    tokens: f64,
    filled: Instant,
}

impl Bucket {
    fn new(rate: f64, burst: u32) -> Bucket {
        Bucket {
            rate: rate.max(0.001),
            burst: f64::from(burst),
            tokens: f64::from(burst),
            filled: Instant::now(),
        }
    }

    async fn take(&mut self) {
        let now = Instant::now();
        self.tokens = (self.tokens + (now - self.filled).as_secs_f64() * self.rate).min(self.burst.max(1.0));
        self.filled = now;
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
    async fn events_are_sent_together_and_again_where_that_failed() {
        let dir = tempfile::tempdir().unwrap();
        let count = AtomicUsize::new(0);
        let (webhook, ca) = crate::https::tests::webhook(dir.path(), move |_| {
            (if count.fetch_add(1, Ordering::SeqCst) == 0 { 503 } else { 200 }, json!({}))
        });
        let credentials = Credentials { authorities: Some(ca), ..Credentials::default() };
        let client = Client::new(&format!("{}/audit", webhook.url()), credentials).unwrap();
        let options = AuditWebhookOptions {
            kubeconfig: PathBuf::new(),
            mode: Mode::Batch,
            batch: Batch { max_size: 3, ..Batch::default() },
            initial_backoff: Duration::from_millis(1),
        };
        let sender = start(client, &options);
        for i in 0..3 {
            sender
                .send(Parcel { bytes: format!("{{\"auditID\":\"{i}\"}}").into_bytes(), done: None })
                .await
                .unwrap();
        }
        // Whoever waits does not wait for more, and whoever asks for the end waits for all.
        for bytes in [b"{}".to_vec(), Vec::new()] {
            let (done, told) = tokio::sync::oneshot::channel();
            sender.send(Parcel { bytes, done: Some(done) }).await.unwrap();
            assert!(told.await.unwrap());
        }
        assert_eq!(webhook.asked().len(), 3);
        let mut bodies: Vec<String> = webhook.asked().iter().map(|asked| asked.body.to_string()).collect();
        bodies.sort();
        bodies.dedup();
        let list = |items: &str| {
            format!(
                r#"{{"apiVersion":"audit.k8s.io/v1","items":[{items}],"kind":"EventList","metadata":{{}}}}"#
            )
        };
        let three = r#"{"auditID":"0"},{"auditID":"1"},{"auditID":"2"}"#;
        assert_eq!(bodies, [list(three), list("{}")]);
        assert!(webhook.asked().iter().all(|asked| asked.path == "/audit"));
    }

    #[tokio::test(start_paused = true)]
    async fn batches_are_full_or_due_and_not_too_many() {
        let parcel = || Parcel { bytes: b"{}".to_vec(), done: None };
        let (sender, mut parcels) = mpsc::channel(100);
        for _ in 0..7 {
            sender.send(parcel()).await.unwrap();
        }
        let second = Duration::from_secs(1);
        assert_eq!(collect(parcel(), &mut parcels, 5, second).await.len(), 5);
        let before = Instant::now();
        assert_eq!(collect(parcel(), &mut parcels, 5, second).await.len(), 4);
        assert_eq!(before.elapsed(), second);
        // Whoever waits for an answer does not wait for more events.
        let (done, _answer) = tokio::sync::oneshot::channel();
        let waiting = Parcel { bytes: Vec::new(), done: Some(done) };
        assert_eq!(collect(waiting, &mut parcels, 5, second).await.len(), 1);
        let mut bucket = Bucket::new(10.0, 15);
        let before = Instant::now();
        for _ in 0..25 {
            bucket.take().await;
        }
        assert!((before.elapsed().as_secs_f64() - 1.0).abs() < 0.05, "{:?}", before.elapsed());
    }
}
