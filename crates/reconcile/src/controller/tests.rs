use std::collections::HashMap;

use async_trait::async_trait;
use bytes::Bytes;
use client::{Client, Connection, Error, Watch};
use http::{Request, Response};
use tokio::sync::watch;

use super::*;
use crate::Clock;

/// A connection that always fails: these tests use no objects.
struct UnreachableConnection;

#[async_trait]
impl Connection for UnreachableConnection {
    async fn send(&self, _: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        Err(Error::Unreachable("nowhere".into()))
    }

    async fn watch(&self, _: &str) -> Result<Box<dyn Watch>, Error> {
        Err(Error::Unreachable("nowhere".into()))
    }

    fn impersonate(&self, _: &str) -> Option<Arc<dyn Connection>> {
        None
    }
}

fn ctx() -> (Ctx, watch::Sender<bool>) {
    let (stop, shutdown) = watch::channel(false);
    (Ctx::new(Client::new(Arc::new(UnreachableConnection), "test"), Clock::default(), shutdown), stop)
}

#[tokio::test(start_paused = true)]
async fn retries_with_backoff_until_success() {
    let (ctx, stop) = ctx();
    let controller = Controller::<Key>::new("test", &ctx);
    let key = Key::new("default", "a");
    controller.enqueue().now(key.clone());
    let attempts: Arc<Mutex<Vec<u128>>> = Arc::default();
    let (log, started) = (attempts.clone(), Instant::now());
    let work = controller.run(&ctx, 2, move |_| {
        let log = log.clone();
        async move {
            log.lock().push(started.elapsed().as_millis());
            let count = log.lock().len();
            if count < 4 { Err(Error::NotCached("x".into())) } else { Ok(ReconcileAction::AwaitChange) }
        }
    });
    let end = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        stop.send_replace(true);
    };
    tokio::join!(work, end);
    let attempts = attempts.lock().clone();
    assert_eq!(attempts.len(), 4, "{attempts:?}");
    assert!(attempts[3] >= 35 && attempts[3] < 60, "{attempts:?}");
}

#[tokio::test(start_paused = true)]
async fn processes_keys_concurrently_but_each_key_by_one_worker() {
    let (ctx, stop) = ctx();
    let controller = Controller::<Key>::new("test", &ctx);
    let enqueue = controller.enqueue();
    let active_keys: Arc<Mutex<HashMap<Key, u32>>> = Arc::default();
    let max_active = Arc::new(Mutex::new((0, 0)));
    let (active, maximum) = (active_keys.clone(), max_active.clone());
    let work = controller.run(&ctx, 3, move |key| {
        let (active, maximum) = (active.clone(), maximum.clone());
        async move {
            {
                let mut active = active.lock();
                *active.entry(key.clone()).or_default() += 1;
                let mut maximum = maximum.lock();
                maximum.0 = maximum.0.max(active.values().sum::<u32>());
                maximum.1 = maximum.1.max(*active.values().max().unwrap_or(&0));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            *active.lock().entry(key).or_default() -= 1;
            Ok::<_, Error>(ReconcileAction::AwaitChange)
        }
    });
    let updates = async {
        for i in 0..100 {
            enqueue.now(Key::new("default", &format!("k{}", i % 5)));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
        stop.send_replace(true);
    };
    tokio::join!(work, updates);
    assert_eq!(*max_active.lock(), (3, 1));
}

#[tokio::test(start_paused = true)]
async fn requeues_key_after_requested_delay() {
    let (ctx, stop) = ctx();
    let controller = Controller::<Key>::new("test", &ctx);
    controller.enqueue().now(Key::new("", "a"));
    let attempts: Arc<Mutex<Vec<u64>>> = Arc::default();
    let (log, started) = (attempts.clone(), Instant::now());
    let work = controller.run(&ctx, 1, move |_| {
        log.lock().push(started.elapsed().as_secs());
        async { Ok::<_, Error>(ReconcileAction::RequeueAfter(Duration::from_secs(7))) }
    });
    let end = async {
        tokio::time::sleep(Duration::from_secs(22)).await;
        stop.send_replace(true);
    };
    tokio::join!(work, end);
    assert_eq!(*attempts.lock(), [0, 7, 14, 21]);
}

/// Returns how often a controller reconciles a key within a minute if every attempt fails with this error.
async fn failing_attempts(error: fn() -> Error) -> usize {
    let (ctx, stop) = ctx();
    let controller = Controller::<Key>::new("test", &ctx);
    controller.enqueue().now(Key::new("default", "a"));
    let attempts = Arc::new(Mutex::new(0));
    let counted = attempts.clone();
    let work = controller.run(&ctx, 1, move |_| {
        *counted.lock() += 1;
        async move { Err::<ReconcileAction, Error>(error()) }
    });
    let end = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        stop.send_replace(true);
    };
    tokio::join!(work, end);
    *attempts.lock()
}

#[tokio::test(start_paused = true)]
async fn does_not_retry_in_a_terminating_namespace() {
    let terminating = || {
        let causes = vec![client::Cause { reason: "NamespaceTerminating".into(), ..Default::default() }];
        let details = client::Details { causes, ..Default::default() };
        Error::Api(Box::new(client::Failure { code: 403, details, ..Default::default() }))
    };
    assert_eq!(failing_attempts(terminating).await, 1);
    assert!(failing_attempts(|| Error::NotCached("x".into())).await > 3);
}

#[tokio::test(start_paused = true)]
async fn waits_for_pending_writes_before_reconcile() {
    let (ctx, stop) = ctx();
    let cache = crate::cache::Cache::<k8s_openapi::api::core::v1::Pod>::new(&[]);
    ctx.caches.add_pending_write(&cache.indexer, 7);
    let controller = Controller::<Key>::new("test", &ctx);
    controller.enqueue().now(Key::new("default", "a"));
    let revisions: Arc<Mutex<Vec<u64>>> = Arc::default();
    let (log, seen) = (revisions.clone(), cache.clone());
    let work = controller.run(&ctx, 1, move |_| {
        log.lock().push(seen.revision());
        async move { Ok::<ReconcileAction, Error>(ReconcileAction::AwaitChange) }
    });
    let updates = async {
        for revision in [3, 7, 9] {
            tokio::time::sleep(Duration::from_secs(1)).await;
            cache
                .indexer
                .run_watch(&mut RevisionWatch(Some(revision)))
                .await
                .expect_err("feeds of tests end");
        }
        stop.send_replace(true);
    };
    tokio::join!(work, updates);
    assert_eq!(*revisions.lock(), [7]);
}

/// Reports a revision and then fails.
struct RevisionWatch(Option<u64>);

#[async_trait]
impl Watch for RevisionWatch {
    async fn next(&mut self) -> Result<client::WatchEvent, Error> {
        let end = || Error::Unreachable("the end".into());
        let revision = self.0.take().ok_or_else(end)?;
        Ok(client::WatchEvent::Changes { changes: Vec::new(), revision })
    }
}
