//! DefaultBinder: binds a pod to its node by a Binding.

use std::sync::Arc;

use serde_json::Value;

use crate::bind::{Bind, BindContext, Bound};
use crate::framework::Plugin;
use crate::state::PodInfo;

pub const NAME: &str = "DefaultBinder";

struct DefaultBinder;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    Ok(Plugin::new(NAME).bind(Arc::new(DefaultBinder)))
}

#[async_trait::async_trait]
impl Bind for DefaultBinder {
    async fn bind(&self, context: &BindContext, pod: &PodInfo, node: &str) -> Bound {
        match context.api.bind(pod, node).await {
            Ok(()) => Bound::Yes,
            Err(error) => Bound::Failed(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use client::{Client, Connection, Error, Feed};
    use http::{Request, Response};
    use parking_lot::Mutex;
    use serde_json::json;

    use super::*;
    use crate::run::Calls;
    use crate::testing::world;

    /// Answers every request the same and remembers what was asked.
    struct Answering(u16, &'static str, Mutex<Vec<String>>);

    #[async_trait::async_trait]
    impl Connection for Answering {
        async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
            let body: Value = serde_json::from_slice(request.body()).expect("a binding is JSON");
            self.2.lock().push(format!("{} {} {body}", request.method(), request.uri()));
            let status = json!({"kind": "Status", "apiVersion": "v1", "code": self.0, "message": self.1});
            let answer = Response::builder().status(self.0).body(Bytes::from(status.to_string()));
            Ok(answer.expect("a response"))
        }

        async fn follow(&self, _: &str) -> Result<Box<dyn Feed>, Error> {
            unreachable!("nothing is followed here")
        }

        fn acting_as(&self, _: &str) -> Option<Arc<dyn Connection>> {
            None
        }
    }

    /// Binds a pod to node `n1`: what was asked, and what came of it.
    fn attempt(pod: &str, code: u16, message: &'static str) -> (Vec<String>, String) {
        let connection = Arc::new(Answering(code, message, Mutex::default()));
        let api = Arc::new(Calls(Client::new(connection.clone(), "test")));
        let context = BindContext {
            api,
            claims: Arc::default(),
            resource_claims: Arc::default(),
            metrics: Arc::default(),
        };
        let plugin = make(&Value::Null).unwrap().bind.unwrap();
        let (info, _) = world("").info(pod);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let outcome = match runtime.block_on(plugin.bind(&context, &info, "n1")) {
            Bound::Yes => "bound".to_owned(),
            Bound::Skip => "skipped".to_owned(),
            Bound::Failed(words) => format!("failed: {words}"),
        };
        (std::mem::take(&mut *connection.2.lock()), outcome)
    }

    /// One request, whatever comes of it: whether to try again is for the queue to say.
    #[test]
    fn a_pod_is_bound_by_one_binding() {
        let (asked, outcome) = attempt("pod p ns=team", 201, "");
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": "p", "namespace": "team", "uid": "uid-p"},
            "target": {"kind": "Node", "name": "n1"},
        });
        assert_eq!(asked, [format!("POST /api/v1/namespaces/team/pods/p/binding {binding}")]);
        assert_eq!(outcome, "bound");
        for (code, message) in [
            (404, "pods \"p\" not found"),
            (409, "pod p is already assigned to node \"n2\""),
            (500, "etcdserver: request timed out"),
        ] {
            let (asked, outcome) = attempt("pod p", code, message);
            assert_eq!((asked.len(), outcome), (1, format!("failed: {message}")), "{code}");
        }
    }
}
