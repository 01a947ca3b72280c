use std::collections::HashMap;

use async_trait::async_trait;
use bytes::Bytes;
use client::{Client, Connection, Error, Feed};
use http::{Request, Response};
use tokio::sync::watch;

use super::*;
use crate::Clock;

/// Leads nowhere: these tests have no objects.
struct Nowhere;

#[async_trait]
impl Connection for Nowhere {
    async fn send(&self, _: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        Err(Error::Unreachable("nowhere".into()))
    }

    async fn follow(&self, _: &str) -> Result<Box<dyn Feed>, Error> {
        Err(Error::Unreachable("nowhere".into()))
    }

    fn acting_as(&self, _: &str) -> Option<Arc<dyn Connection>> {
        None
    }
}

fn ctx() -> (Ctx, watch::Sender<bool>) {
    let (stop, shutdown) = watch::channel(false);
    (Ctx::new(Client::new(Arc::new(Nowhere), "test"), Clock::default(), shutdown), stop)
}

#[tokio::test(start_paused = true)]
async fn failures_come_again_and_success_is_the_end_of_it() {
    let (ctx, stop) = ctx();
    let controller = Controller::<Key>::new("test", &ctx);
    let key = Key::new("default", "a");
    controller.enqueue().now(key.clone());
    let looks: Arc<Mutex<Vec<u128>>> = Arc::default();
    let (log, begun) = (looks.clone(), Instant::now());
    let work = controller.run(&ctx, 2, move |_| {
        let log = log.clone();
        async move {
            log.lock().push(begun.elapsed().as_millis());
            let count = log.lock().len();
            if count < 4 { Err(Error::NotSeen("x".into())) } else { Ok(Next::Change) }
        }
    });
    let end = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        stop.send_replace(true);
    };
    tokio::join!(work, end);
    let looks = looks.lock().clone();
    assert_eq!(looks.len(), 4, "{looks:?}");
    assert!(looks[3] >= 35 && looks[3] < 60, "{looks:?}");
}

#[tokio::test(start_paused = true)]
async fn keys_are_worked_on_at_once_but_each_by_one_worker() {
    let (ctx, stop) = ctx();
    let controller = Controller::<Key>::new("test", &ctx);
    let enqueue = controller.enqueue();
    let at_work: Arc<Mutex<HashMap<Key, u32>>> = Arc::default();
    let most = Arc::new(Mutex::new((0, 0)));
    let (busy, peak) = (at_work.clone(), most.clone());
    let work = controller.run(&ctx, 3, move |key| {
        let (busy, peak) = (busy.clone(), peak.clone());
        async move {
            {
                let mut busy = busy.lock();
                *busy.entry(key.clone()).or_default() += 1;
                let mut peak = peak.lock();
                peak.0 = peak.0.max(busy.values().sum::<u32>());
                peak.1 = peak.1.max(*busy.values().max().unwrap_or(&0));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            *busy.lock().entry(key).or_default() -= 1;
            Ok::<_, Error>(Next::Change)
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
    assert_eq!(*most.lock(), (3, 1));
}

#[tokio::test(start_paused = true)]
async fn a_key_comes_again_at_the_time_it_asked_for() {
    let (ctx, stop) = ctx();
    let controller = Controller::<Key>::new("test", &ctx);
    controller.enqueue().now(Key::new("", "a"));
    let looks: Arc<Mutex<Vec<u64>>> = Arc::default();
    let (log, begun) = (looks.clone(), Instant::now());
    let work = controller.run(&ctx, 1, move |_| {
        log.lock().push(begun.elapsed().as_secs());
        async { Ok::<_, Error>(Next::After(Duration::from_secs(7))) }
    });
    let end = async {
        tokio::time::sleep(Duration::from_secs(22)).await;
        stop.send_replace(true);
    };
    tokio::join!(work, end);
    assert_eq!(*looks.lock(), [0, 7, 14, 21]);
}

/// How often a controller tries within a minute what always fails with this error.
async fn failing_attempts(error: fn() -> Error) -> usize {
    let (ctx, stop) = ctx();
    let controller = Controller::<Key>::new("test", &ctx);
    controller.enqueue().now(Key::new("default", "a"));
    let attempts = Arc::new(Mutex::new(0));
    let counted = attempts.clone();
    let work = controller.run(&ctx, 1, move |_| {
        *counted.lock() += 1;
        async move { Err::<Next, Error>(error()) }
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
    assert!(failing_attempts(|| Error::NotSeen("x".into())).await > 3);
}

#[tokio::test(start_paused = true)]
async fn does_not_reconcile_while_a_cache_lacks_an_own_write() {
    let (ctx, stop) = ctx();
    let cache = crate::cache::Cache::<k8s_openapi::api::core::v1::Pod>::new(&[]);
    ctx.caches.add_pending_write(&cache.shelf, 7);
    let controller = Controller::<Key>::new("test", &ctx);
    controller.enqueue().now(Key::new("default", "a"));
    let revisions: Arc<Mutex<Vec<u64>>> = Arc::default();
    let (log, seen) = (revisions.clone(), cache.clone());
    let work = controller.run(&ctx, 1, move |_| {
        log.lock().push(seen.revision());
        async move { Ok::<Next, Error>(Next::Change) }
    });
    let updates = async {
        for revision in [3, 7, 9] {
            tokio::time::sleep(Duration::from_secs(1)).await;
            cache.shelf.follow(&mut RevisionFeed(Some(revision))).await.expect_err("feeds of tests end");
        }
        stop.send_replace(true);
    };
    tokio::join!(work, updates);
    assert_eq!(*revisions.lock(), [7]);
}

/// Tells that a revision is reached, and ends.
struct RevisionFeed(Option<u64>);

#[async_trait]
impl Feed for RevisionFeed {
    async fn next(&mut self) -> Result<client::News, Error> {
        let end = || Error::Unreachable("the end".into());
        let revision = self.0.take().ok_or_else(end)?;
        Ok(client::News::Changes { changes: Vec::new(), revision })
    }
}
