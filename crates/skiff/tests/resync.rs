//! Controllers that restart on an idle cluster process all objects and change nothing.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use client::{Client, Connection, Error, Watch};
use controllers::service_balancer::nodes::NodeBalancer;
use http::{Method, Request, Response};
use parking_lot::Mutex;
use reconcile::cloud::CloudHandle;
use reconcile::{Clock, Ctx, Settings};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

const DEADLINE: Duration = Duration::from_secs(90);
/// The cluster is idle if nothing was written for this long; controllers with pending work would have
/// written by then.
const IDLE_DURATION: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_of_controllers_writes_nothing_to_idle_cluster() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (stop, shutdown) = watch::channel(false);
    let server = apiserver::start_in_directory(directory.path(), shutdown.clone()).await.expect("a server");
    let client = Client::new(server.local(), "test");
    let nodes = Ctx::new(client.clone(), Clock::default(), shutdown.clone());
    tokio::spawn(simulate::run(nodes, simulate::Config { nodes: 3, events: false }));
    let first = start(&server);
    for object in cluster_objects() {
        let path = object["path"].as_str().expect("a path");
        client.request(Method::POST, path, Some(&object["object"])).await.expect("an object");
    }
    first.wait_until_idle(|| is_ready(&client)).await;
    first.end.send_replace(true);

    let second = start(&server);
    second.wait_until_idle(async || true).await;
    let written = second.last_writes();
    assert!(written.is_empty(), "controllers of an idle cluster wrote {written:#?}");
    second.end.send_replace(true);
    stop.send_replace(true);
}

/// One object of most kinds that controllers manage.
fn cluster_objects() -> Vec<Value> {
    let template = |app: &str| json!({"metadata": {"labels": {"app": app}}, "spec": {"containers": [{"name": "main", "image": "app:1"}]}});
    let selected = |app: &str, more: Value| {
        let mut spec = json!({"selector": {"matchLabels": {"app": app}}, "template": template(app)});
        for (name, value) in more.as_object().into_iter().flatten() {
            spec[name] = value.clone();
        }
        json!({"metadata": {"name": app}, "spec": spec})
    };
    let at = |path: &str, object: Value| json!({"path": path, "object": object});
    let apps = |plural: &str| format!("/apis/apps/v1/namespaces/default/{plural}");
    let core = |plural: &str| format!("/api/v1/namespaces/default/{plural}");
    let mut job = template("sums");
    job["spec"]["restartPolicy"] = json!("Never");
    job["spec"]["containers"][0]["command"] = json!(["sleep", "1"]);
    let claims = json!([{"metadata": {"name": "data"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "storageClassName": "by-hand", "resources": {"requests": {"storage": "1Gi"}}
    }}]);
    let volume = |name: &str| {
        let spec = json!({
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "by-hand",
            "hostPath": {"path": "/tmp"}
        });
        at("/api/v1/persistentvolumes", json!({"metadata": {"name": name}, "spec": spec}))
    };
    let budget = json!({"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}});
    vec![
        at(&apps("deployments"), selected("web", json!({"replicas": 20}))),
        volume("one"),
        volume("two"),
        at(&apps("statefulsets"), selected("db", json!({"replicas": 2, "volumeClaimTemplates": claims}))),
        at(&apps("daemonsets"), selected("agent", json!({}))),
        at(
            &core("replicationcontrollers"),
            json!({"metadata": {"name": "old"}, "spec": {
                "replicas": 2, "selector": {"app": "old"}, "template": template("old")
            }}),
        ),
        at(
            "/apis/batch/v1/namespaces/default/jobs",
            json!({"metadata": {"name": "sums"}, "spec": {
                "completions": 3, "template": job
            }}),
        ),
        at(
            "/apis/batch/v1/namespaces/default/cronjobs",
            json!({"metadata": {"name": "often"}, "spec": {
                "schedule": "0 0 1 1 *", "jobTemplate": {"spec": {"template": job}}
            }}),
        ),
        at(
            &core("services"),
            json!({"metadata": {"name": "web"}, "spec": {
                "selector": {"app": "web"}, "ports": [{"port": 80}], "type": "LoadBalancer"
            }}),
        ),
        at(
            &core("services"),
            json!({"metadata": {"name": "db"}, "spec": {
                "selector": {"app": "db"}, "ports": [{"port": 80}], "clusterIP": "None"
            }}),
        ),
        at(
            "/apis/policy/v1/namespaces/default/poddisruptionbudgets",
            json!({"metadata": {"name": "web"}, "spec": budget}),
        ),
        at(
            &core("resourcequotas"),
            json!({"metadata": {"name": "some"}, "spec": {"hard": {"pods": "100", "count/secrets": "9"}}}),
        ),
    ]
}

async fn is_ready(client: &Client) -> bool {
    let number = async |path: &str, pointer: &str| {
        let found = client.request(Method::GET, path, None).await.ok();
        found.and_then(|object| object.pointer(pointer).and_then(Value::as_i64))
    };
    let apps = "/apis/apps/v1/namespaces/default";
    number(&format!("{apps}/deployments/web"), "/status/availableReplicas").await == Some(20)
        && number(&format!("{apps}/statefulsets/db"), "/status/availableReplicas").await == Some(2)
        && number(&format!("{apps}/daemonsets/agent"), "/status/numberAvailable").await == Some(3)
        && number("/apis/batch/v1/namespaces/default/jobs/sums", "/status/succeeded").await == Some(3)
}

/// Running controllers, and the writes they have made.
struct RunningControllers {
    writes: Arc<Mutex<Vec<(Instant, String)>>>,
    started: Instant,
    end: watch::Sender<bool>,
}

fn start(server: &apiserver::RunningServer) -> RunningControllers {
    let (end, ended) = watch::channel(false);
    let writes = Arc::default();
    let connection = RecordingConnection { inner: server.local(), user: "", writes: Arc::clone(&writes) };
    let client = Client::new(Arc::new(connection), "kube-controller-manager");
    let settings = Settings {
        root_ca: "certificate".into(),
        cluster_cidrs: vec!["10.42.0.0/16".into()],
        service_cidrs: vec!["10.43.0.0/16".into()],
        local_storage: "/storage".into(),
        cloud: CloudHandle(Some(Arc::new(NodeBalancer::default()))),
        ..Settings::default()
    };
    let ctx = Ctx::new(client, Clock::default(), ended).with_settings(settings);
    let chosen = controllers::EnabledControllers::parse(&[]).expect("the default controllers are valid");
    tokio::spawn(controllers::run(ctx.clone(), chosen));
    tokio::spawn(async move {
        let config = scheduler::config::Config::with_defaults();
        scheduler::run::run(ctx, config, &[]).await.expect("the default configuration is valid");
    });
    RunningControllers { writes, started: Instant::now(), end }
}

impl RunningControllers {
    /// Waits until `done` returns true and nothing was written for a while.
    async fn wait_until_idle(&self, done: impl AsyncFn() -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !self.is_idle() || !done().await {
            assert!(
                Instant::now() < deadline,
                "the cluster is not idle; last writes: {:#?}",
                self.last_writes()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn is_idle(&self) -> bool {
        let last = self.writes.lock().last().map_or(self.started, |(at, _)| *at);
        last.elapsed() > IDLE_DURATION
    }

    fn last_writes(&self) -> Vec<String> {
        self.writes.lock().iter().rev().take(20).map(|(_, what)| what.clone()).collect()
    }
}

/// A connection that records writes.
struct RecordingConnection {
    inner: Arc<dyn Connection>,
    user: &'static str,
    writes: Arc<Mutex<Vec<(Instant, String)>>>,
}

#[async_trait]
impl Connection for RecordingConnection {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        if request.method() != Method::GET {
            let body = String::from_utf8_lossy(request.body());
            let what = format!("{} {} {} {body:.500}", self.user, request.method(), request.uri());
            self.writes.lock().push((Instant::now(), what));
        }
        self.inner.send(request).await
    }

    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error> {
        self.inner.watch(collection).await
    }

    fn impersonate(&self, name: &str) -> Option<Arc<dyn Connection>> {
        let inner = self.inner.impersonate(name)?;
        // Leaked for the duration of the test: there are few names.
        let user = Box::leak(name.to_owned().into_boxed_str());
        Some(Arc::new(RecordingConnection { inner, user, writes: self.writes.clone() }))
    }
}
