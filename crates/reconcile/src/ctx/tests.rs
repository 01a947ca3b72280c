use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use client::{Connection, Object as _, RawObject, Watch, WatchChange, WatchEvent};
use http::{Method, Request, Response};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::*;

/// A server with one pod. Its watch reports the pod only after a request has read it.
#[derive(Default)]
struct LateConnection(Arc<WatchState>);

#[derive(Default)]
struct WatchState {
    read: Notify,
    event_sent: AtomicBool,
}

fn pod() -> Value {
    json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a", "namespace": "default", "uid": "1", "resourceVersion": "7"}})
}

#[async_trait]
impl Connection for LateConnection {
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

    async fn watch(&self, _: &str) -> Result<Box<dyn Watch>, Error> {
        Ok(Box::new(LateWatch { watch: self.0.clone(), initial_sent: false }))
    }

    fn impersonate(&self, _: &str) -> Option<Arc<dyn Connection>> {
        None
    }
}

struct LateWatch {
    watch: Arc<WatchState>,
    initial_sent: bool,
}

#[async_trait]
impl Watch for LateWatch {
    async fn next(&mut self) -> Result<WatchEvent, Error> {
        if !std::mem::replace(&mut self.initial_sent, true) {
            return Ok(WatchEvent::Replace { objects: Vec::new(), revision: 1 });
        }
        if self.watch.event_sent.swap(true, Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        self.watch.read.notified().await;
        let object = RawObject::new(pod().to_string(), Some(7));
        Ok(WatchEvent::Changes { changes: vec![WatchChange { object, deleted: false }], revision: 7 })
    }
}

#[tokio::test(start_paused = true)]
async fn create_waits_for_cache_when_object_already_exists() {
    let stop = watch::Sender::new(false);
    let client = Client::new(Arc::new(LateConnection::default()), "test");
    let ctx = Ctx::new(client, Clock::default(), stop.subscribe());
    ctx.caches.pods();
    ctx.caches.wait_for_sync().await;
    let pod: Pod = serde_json::from_value(pod()).expect("a pod");
    assert!(ctx.caches.pods().get(&pod.key()).is_none());
    let error = ctx.create(&pod).await.expect_err("it exists");
    assert!(error.is_already_exists(), "{error}");
    assert!(ctx.caches.pods().get(&pod.key()).is_some());
}
