use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use client::{Change, Connection, Feed, News, Object as _, Raw};
use http::{Method, Request, Response};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::*;

/// A server with one pod, of which its watch tells only once somebody has read it.
#[derive(Default)]
struct Late(Arc<Watch>);

#[derive(Default)]
struct Watch {
    read: Notify,
    told: AtomicBool,
}

fn pod() -> Value {
    json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a", "namespace": "default", "uid": "1", "resourceVersion": "7"}})
}

#[async_trait]
impl Connection for Late {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        let (code, answer) = match *request.method() {
            Method::GET => {
                self.0.read.notify_one();
                (200, pod())
            }
            _ => {
                (409, json!({"kind": "Status", "status": "Failure", "reason": "AlreadyExists", "code": 409}))
            }
        };
        let response = Response::builder().status(code).body(answer.to_string().into());
        Ok(response.expect("a response"))
    }

    async fn follow(&self, _: &str) -> Result<Box<dyn Feed>, Error> {
        Ok(Box::new(LateFeed { watch: self.0.clone(), begun: false }))
    }

    fn acting_as(&self, _: &str) -> Option<Arc<dyn Connection>> {
        None
    }
}

struct LateFeed {
    watch: Arc<Watch>,
    begun: bool,
}

#[async_trait]
impl Feed for LateFeed {
    async fn next(&mut self) -> Result<News, Error> {
        if !std::mem::replace(&mut self.begun, true) {
            return Ok(News::Everything { objects: Vec::new(), revision: 1 });
        }
        if self.watch.told.swap(true, Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        self.watch.read.notified().await;
        let object = Raw::new(pod().to_string(), Some(7));
        Ok(News::Changes { changes: vec![Change { object, deleted: false }], revision: 7 })
    }
}

#[tokio::test(start_paused = true)]
async fn the_cache_shows_an_object_that_exists_already() {
    let stop = watch::Sender::new(false);
    let client = Client::new(Arc::new(Late::default()), "test");
    let ctx = Ctx::new(client, Clock::default(), stop.subscribe());
    ctx.caches.pods();
    ctx.caches.filled().await;
    let pod: Pod = serde_json::from_value(pod()).expect("a pod");
    assert!(ctx.caches.pods().get(&pod.key()).is_none());
    let refused = ctx.create(&pod).await.expect_err("it exists");
    assert!(refused.is_already_exists(), "{refused}");
    assert!(ctx.caches.pods().get(&pod.key()).is_some());
}
