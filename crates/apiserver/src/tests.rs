//! End-to-end requests against an in-process server with a store in a temporary directory.

mod health;
mod namespaces;
mod responses;
mod security;
mod services;
mod subresources;
mod write;

use std::sync::Arc;

use api::json::JsonExt as _;
use api::networking::ip::Cidr;
use http_body_util::BodyExt as _;
use serde_json::Value;
use store::log::{Config, LogStore};
use tokio::sync::watch;

use crate::access::User;
use crate::bootstrap::{self, ClusterNetworkConfig};
use crate::cache::Cache;
use crate::negotiate::negotiate;
use crate::registry::Registry;
use crate::request::{Query, Route, route};
use crate::server::{Call, Server};
use crate::services::ServiceAllocator;
use crate::tokens::Tokens;
use crate::warning_recorder::WarningRecorder;

/// The maximum token lifetime of the test servers.
pub const MAX_TOKEN_SECONDS: i64 = 400 * 24 * 3600;

pub struct TestServer {
    pub server: Arc<Server>,
    pub stop: watch::Sender<bool>,
    _directory: tempfile::TempDir,
}

impl TestServer {
    /// A started server with its bootstrap objects.
    pub async fn start() -> TestServer {
        TestServer::start_with(Config::default()).await
    }

    /// Like `start`, with this store configuration.
    pub async fn start_with(config: Config) -> TestServer {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let store = Arc::new(LogStore::open(directory.path(), config).expect("an empty store"));
        let stop = watch::Sender::new(false);
        let cache = Cache::new();
        cache.start(store.clone(), stop.subscribe()).await.expect("an empty cache");
        let network = Cidr::parse("10.43.0.0/16").expect("a network");
        let ranges = api::core::service::alloc::AllocationRanges::new(vec![network], 30000..=32767);
        let ready = watch::Sender::new(true);
        let keys = pki::token::Keys::load_or_create(&directory.path().join("tls")).expect("new keys");
        let tokens = crate::ServiceAccountTokenConfig {
            keys,
            issuers: vec!["https://kubernetes.default.svc.cluster.local".into()],
            audiences: Vec::new(),
            key_set_url: None,
            max_expiration_seconds: Some(MAX_TOKEN_SECONDS),
            extend_expiration: true,
        };
        let server = Arc::new(Server::new(
            store,
            cache,
            Registry::new(&[]).expect("every kind"),
            ServiceAllocator::new(ranges),
            Tokens::new(tokens, "192.0.2.1:6443"),
            (stop.subscribe(), ready.subscribe()),
        ));
        let test_server = TestServer { server, stop, _directory: directory };
        test_server.bootstrap(6443).await;
        // The ServiceAccount admission plugin rejects pods without it.
        test_server
            .send(
                "POST /api/v1/namespaces/default/serviceaccounts",
                serde_json::json!({"metadata": {"name": "default"}}),
            )
            .await;
        test_server
    }

    pub fn cluster(port: u16) -> ClusterNetworkConfig {
        ClusterNetworkConfig {
            address: tokio::sync::watch::channel(Some([192, 0, 2, 1].into())).1,
            port,
            service_ip: [10, 43, 0, 1].into(),
            service_cidrs: vec!["10.43.0.0/16".into()],
        }
    }

    pub async fn bootstrap(&self, port: u16) {
        bootstrap::ensure_default_objects(&self.server, &TestServer::cluster(port))
            .await
            .expect("the first objects");
    }

    /// Sends `"POST /api/v1/…?query"` and returns the status code and the JSON body.
    pub async fn call(&self, request: &str, content_type: &str, body: &str) -> (u16, Value) {
        let groups = vec!["system:masters".into()];
        let admin = User { name: "admin".into(), groups, ..User::default() };
        self.call_as(admin, request, content_type, body).await
    }

    /// Like `call`, as any user, without authorization.
    pub async fn call_as(&self, user: User, request: &str, content_type: &str, body: &str) -> (u16, Value) {
        self.call_with_recorder(user, request, content_type, body).await.0
    }

    /// Like `call_as`, and returns the warnings and audit annotations.
    pub async fn call_with_recorder(
        &self,
        user: User,
        request: &str,
        content_type: &str,
        body: &str,
    ) -> ((u16, Value), Arc<WarningRecorder>) {
        let recorder = Arc::new(WarningRecorder::default());
        let (method, rest) = request.split_once(' ').expect("a method and a path");
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut headers = http::HeaderMap::new();
        headers.insert(http::header::CONTENT_TYPE, content_type.parse().expect("a header"));
        let query = Query::parse(query);
        let call = Call {
            method: method.parse().expect("a method"),
            path: path.to_owned(),
            format: negotiate(&headers, &query).expect("JSON"),
            query,
            raw_query: String::new(),
            remote: None,
            headers,
            body: body.to_owned().into(),
            user,
            now: jiff::Timestamp::now(),
            upgrade: None,
            recorder: recorder.clone(),
        };
        let answer = match route(&self.server.registry, path) {
            Ok(Route::Resource(target)) => self.server.handle_resource(&call, target).await,
            Ok(_) => panic!("{path} is not a resource path"),
            Err(status) => Err(status),
        };
        let answer = match answer {
            Err(status) => (status.code, serde_json::to_value(&status).expect("a status")),
            Ok(response) => {
                let code = response.status().as_u16();
                let bytes = response.into_body().collect().await.expect("a body").to_bytes();
                (code, serde_json::from_slice(&bytes).expect("JSON"))
            }
        };
        (answer, recorder)
    }

    pub async fn send(&self, request: &str, body: Value) -> (u16, Value) {
        self.call(request, "application/json", &body.to_string()).await
    }

    pub async fn get(&self, path: &str) -> Value {
        self.call(&format!("GET {path}"), "application/json", "").await.1
    }
}

/// The code and the message of a failure, or the values at `paths`.
pub fn summary((code, value): &(u16, Value), paths: &[&str]) -> String {
    if value.text("kind") == "Status" && value.text("status") == "Failure" {
        return format!("{code} {}", value.text("message"));
    }
    let values = paths.iter().map(|path| match value.path(path) {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    });
    std::iter::once(code.to_string()).chain(values).collect::<Vec<_>>().join(" ")
}
