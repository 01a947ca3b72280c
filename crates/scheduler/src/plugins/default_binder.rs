//! DefaultBinder: binds a pod with a request to its `binding` subresource.

use std::sync::Arc;

use serde_json::Value;

use crate::bind::{Bind, BindContext, BindStatus};
use crate::framework::Plugin;
use crate::state::PodInfo;

pub const NAME: &str = "DefaultBinder";

struct DefaultBinder;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    Ok(Plugin::new(NAME).bind(Arc::new(DefaultBinder)))
}

#[async_trait::async_trait]
impl Bind for DefaultBinder {
    async fn bind(&self, context: &BindContext, pod: &PodInfo, node: &str) -> BindStatus {
        match context.api.bind(pod, node).await {
            Ok(()) => BindStatus::Bound,
            Err(error) => BindStatus::Failed(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use client::{Client, Connection, Error, Watch};
    use http::{Request, Response};
    use parking_lot::Mutex;
    use serde_json::json;

    use super::*;
    use crate::run::ClientApi;
    use crate::testing::test_cluster;

    /// Returns the same response for every request and records the requests.
    struct FakeConnection(u16, &'static str, Mutex<Vec<String>>);

    #[async_trait::async_trait]
    impl Connection for FakeConnection {
        async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
            let body: Value = serde_json::from_slice(request.body()).expect("a binding is JSON");
            self.2.lock().push(format!("{} {} {body}", request.method(), request.uri()));
            let status = json!({"kind": "Status", "apiVersion": "v1", "code": self.0, "message": self.1});
            let answer = Response::builder().status(self.0).body(Bytes::from(status.to_string()));
            Ok(answer.expect("a response"))
        }

        async fn watch(&self, _: &str) -> Result<Box<dyn Watch>, Error> {
            unreachable!("this test does not watch")
        }

        fn impersonate(&self, _: &str) -> Option<Arc<dyn Connection>> {
            None
        }
    }

    /// Binds a pod to node `n1`; returns the requests and the result.
    fn bind_pod(pod: &str, code: u16, message: &'static str) -> (Vec<String>, String) {
        let connection = Arc::new(FakeConnection(code, message, Mutex::default()));
        let api = Arc::new(ClientApi(Client::new(connection.clone(), "test")));
        let context = BindContext {
            api,
            claims: Arc::default(),
            resource_claims: Arc::default(),
            metrics: Arc::default(),
        };
        let plugin = make(&Value::Null).unwrap().bind.unwrap();
        let (info, _) = test_cluster("").info(pod);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let result = match runtime.block_on(plugin.bind(&context, &info, "n1")) {
            BindStatus::Bound => "bound".to_owned(),
            BindStatus::Skip => "skipped".to_owned(),
            BindStatus::Failed(words) => format!("failed: {words}"),
        };
        (std::mem::take(&mut *connection.2.lock()), result)
    }

    /// Sends one request whatever the result: retries are up to the queue.
    #[test]
    fn sends_one_binding_and_reports_errors() {
        let (requests, result) = bind_pod("pod p ns=team", 201, "");
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": "p", "namespace": "team", "uid": "uid-p"},
            "target": {"kind": "Node", "name": "n1"},
        });
        assert_eq!(requests, [format!("POST /api/v1/namespaces/team/pods/p/binding {binding}")]);
        assert_eq!(result, "bound");
        for (code, message) in [
            (404, "pods \"p\" not found"),
            (409, "pod p is already assigned to node \"n2\""),
            (500, "etcdserver: request timed out"),
        ] {
            let (requests, result) = bind_pod("pod p", code, message);
            assert_eq!((requests.len(), result), (1, format!("failed: {message}")), "{code}");
        }
    }
}
