//! The rollout of a Deployment until all pods are running, with all controllers and simulated nodes in
//! this process: its duration and its number of API requests. Then the controllers are restarted and
//! resync all objects, which should write nothing.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use client::{Client, Connection, Error, Key, Watch};
use http::{Method, Request, Response};
use k8s_openapi::api::apps::v1::Deployment;
use reconcile::{Clock, Ctx};
use serde_json::json;
use tokio::sync::watch;

use crate::report::{Report, Unit};

/// The size of the cluster and of the Deployment.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub nodes: u32,
    pub pods: i32,
}

/// Time limit of the rollout, also on a slow machine.
const ROLLOUT_TIMEOUT: Duration = Duration::from_secs(600);
/// Time for every controller to resync all objects.
const RESYNC_WAIT: Duration = Duration::from_secs(5);

pub async fn run(report: &mut Report, dir: &Path, sizes: Sizes) -> Result<()> {
    let scratch = tempfile::Builder::new().prefix("skiff-bench-").tempdir_in(dir)?;
    let (stop, shutdown) = watch::channel(false);
    let server = apiserver::start_in_directory(scratch.path(), shutdown.clone()).await?;
    let client = Client::new(server.local(), "bench");
    let components = Components::new(&server);
    let nodes = components.nodes.ctx(&shutdown);
    tokio::spawn(simulate::run(nodes.clone(), simulate::Config { nodes: sizes.nodes, events: false }));
    let deadline = Instant::now() + ROLLOUT_TIMEOUT;
    wait_until(deadline, || nodes.caches.nodes().len() == sizes.nodes as usize).await.context("nodes")?;
    let (end, ended) = watch::channel(false);
    let tasks = components.start(&ended);

    let name = format!("rollout/pods-{}-nodes-{}", sizes.pods, sizes.nodes);
    let before = components.counts();
    let started = Instant::now();
    client.create(&deployment(sizes.pods)).await?;
    let deployments = nodes.caches.deployments();
    let available = || {
        let deployment = deployments.get(&Key::new("default", "web"));
        deployment.and_then(|deployment| deployment.status.as_ref()?.available_replicas) == Some(sizes.pods)
    };
    wait_until(deadline, available).await.context("the rollout")?;
    report.add(format!("{name}/time"), Unit::Millis, started.elapsed().as_secs_f64() * 1e3);
    for ((role, before), (_, after)) in before.iter().zip(components.counts()) {
        let each = (after - before) as f64 / f64::from(sizes.pods);
        report.add(format!("{name}/{role}-requests-per-pod"), Unit::Requests, each);
    }
    end.send_replace(true);
    tasks.into_iter().for_each(|task| task.abort());

    let before = components.writes();
    let tasks = components.start(&shutdown);
    tokio::time::sleep(RESYNC_WAIT).await;
    report.add("rollout/resync-writes", Unit::Requests, (components.writes() - before) as f64);
    stop.send_replace(true);
    tasks.into_iter().for_each(|task| task.abort());
    Ok(())
}

async fn wait_until(deadline: Instant, done: impl Fn() -> bool) -> Result<()> {
    while !done() {
        ensure!(Instant::now() < deadline, "timed out");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

fn deployment(pods: i32) -> Deployment {
    let template = json!({
        "metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [{"name": "main", "image": "web:1", "resources": {"requests": {"cpu": "10m"}}}]}
    });
    let value = json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"replicas": pods, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    });
    serde_json::from_value(value).expect("a deployment")
}

async fn schedule(ctx: Ctx) {
    let config = scheduler::config::Config::with_defaults();
    scheduler::run::run(ctx, config, &[]).await.expect("the default configuration is valid");
}

/// The connections of the components, with their request counts.
struct Components {
    controllers: CountingConnection,
    scheduler: CountingConnection,
    nodes: CountingConnection,
}

impl Components {
    fn new(server: &apiserver::RunningServer) -> Components {
        let new_connection = || CountingConnection { inner: server.local(), counts: Arc::default() };
        Components { controllers: new_connection(), scheduler: new_connection(), nodes: new_connection() }
    }

    fn start(&self, shutdown: &watch::Receiver<bool>) -> Vec<tokio::task::JoinHandle<()>> {
        let chosen = controllers::EnabledControllers::parse(&[]).expect("the default controllers are valid");
        vec![
            tokio::spawn(controllers::run(self.controllers.ctx(shutdown), chosen)),
            tokio::spawn(schedule(self.scheduler.ctx(shutdown))),
        ]
    }

    fn counts(&self) -> [(&'static str, u64); 3] {
        let all = |role: &CountingConnection| role.counts.requests.load(Relaxed);
        [
            ("controllers", all(&self.controllers)),
            ("scheduler", all(&self.scheduler)),
            ("nodes", all(&self.nodes)),
        ]
    }

    /// Writes of the controllers and the scheduler. Nodes write on their own, so they are not included.
    fn writes(&self) -> u64 {
        self.controllers.counts.writes.load(Relaxed) + self.scheduler.counts.writes.load(Relaxed)
    }
}

/// A connection that counts its requests.
#[derive(Clone)]
struct CountingConnection {
    inner: Arc<dyn Connection>,
    counts: Arc<RequestCounts>,
}

#[derive(Default)]
struct RequestCounts {
    requests: AtomicU64,
    writes: AtomicU64,
}

impl CountingConnection {
    fn ctx(&self, shutdown: &watch::Receiver<bool>) -> Ctx {
        let client = Client::new(Arc::new(self.clone()), "kube-controller-manager");
        Ctx::new(client, Clock::default(), shutdown.clone())
    }
}

#[async_trait]
impl Connection for CountingConnection {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        self.counts.requests.fetch_add(1, Relaxed);
        if request.method() != Method::GET {
            self.counts.writes.fetch_add(1, Relaxed);
        }
        self.inner.send(request).await
    }

    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error> {
        self.inner.watch(collection).await
    }

    fn impersonate(&self, name: &str) -> Option<Arc<dyn Connection>> {
        let inner = self.inner.impersonate(name)?;
        Some(Arc::new(CountingConnection { inner, counts: self.counts.clone() }))
    }
}
