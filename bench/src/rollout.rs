//! A Deployment from nothing to all pods running, with every control loop and simulated nodes in this
//! process: how long it takes and what it asks of the API server. Then the loops start again and look at
//! everything anew, which should change nothing.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use client::{Client, Connection, Error, Feed, Key};
use http::{Method, Request, Response};
use k8s_openapi::api::apps::v1::Deployment;
use reconcile::{Clock, Ctx};
use serde_json::json;
use tokio::sync::watch;

use crate::report::{Report, Unit};

/// How much is rolled out.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub nodes: u32,
    pub pods: i32,
}

/// No machine is so slow.
const DEADLINE: Duration = Duration::from_secs(600);
/// Long enough for every loop to have looked at everything.
const RESYNC: Duration = Duration::from_secs(5);

pub async fn run(report: &mut Report, dir: &Path, sizes: Sizes) -> Result<()> {
    let scratch = tempfile::Builder::new().prefix("skiff-bench-").tempdir_in(dir)?;
    let (stop, shutdown) = watch::channel(false);
    let server = apiserver::start_in(scratch.path(), shutdown.clone()).await?;
    let client = Client::new(server.local(), "bench");
    let roles = Roles::new(&server);
    let nodes = roles.nodes.ctx(&shutdown);
    tokio::spawn(simulate::run(nodes.clone(), simulate::Config { nodes: sizes.nodes, events: false }));
    let deadline = Instant::now() + DEADLINE;
    wait(deadline, || nodes.caches.nodes().len() == sizes.nodes as usize).await.context("nodes")?;
    let (end, ended) = watch::channel(false);
    let loops = roles.start(&ended);

    let name = format!("rollout/pods-{}-nodes-{}", sizes.pods, sizes.nodes);
    let before = roles.counts();
    let begun = Instant::now();
    client.create(&deployment(sizes.pods)).await?;
    let deployments = nodes.caches.deployments();
    let available = || {
        let deployment = deployments.get(&Key::new("default", "web"));
        deployment.and_then(|deployment| deployment.status.as_ref()?.available_replicas) == Some(sizes.pods)
    };
    wait(deadline, available).await.context("the rollout")?;
    report.add(format!("{name}/time"), Unit::Millis, begun.elapsed().as_secs_f64() * 1e3);
    for ((role, before), (_, after)) in before.iter().zip(roles.counts()) {
        let each = (after - before) as f64 / f64::from(sizes.pods);
        report.add(format!("{name}/{role}-requests-per-pod"), Unit::Requests, each);
    }
    end.send_replace(true);
    loops.into_iter().for_each(|task| task.abort());

    let before = roles.writes();
    let loops = roles.start(&shutdown);
    tokio::time::sleep(RESYNC).await;
    report.add("rollout/resync-writes", Unit::Requests, (roles.writes() - before) as f64);
    stop.send_replace(true);
    loops.into_iter().for_each(|task| task.abort());
    Ok(())
}

async fn wait(deadline: Instant, done: impl Fn() -> bool) -> Result<()> {
    while !done() {
        ensure!(Instant::now() < deadline, "not done in time");
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
    let config = scheduler::config::Config::standard();
    scheduler::run::run(ctx, config, &[]).await.expect("upstream's own configuration");
}

/// Who asks the API server for what.
struct Roles {
    controllers: Counted,
    scheduler: Counted,
    nodes: Counted,
}

impl Roles {
    fn new(server: &apiserver::Started) -> Roles {
        let counted = || Counted { inner: server.local(), counts: Arc::default() };
        Roles { controllers: counted(), scheduler: counted(), nodes: counted() }
    }

    fn start(&self, shutdown: &watch::Receiver<bool>) -> Vec<tokio::task::JoinHandle<()>> {
        let chosen = controllers::Chosen::parse(&[]).expect("all of them");
        vec![
            tokio::spawn(controllers::run(self.controllers.ctx(shutdown), chosen)),
            tokio::spawn(schedule(self.scheduler.ctx(shutdown))),
        ]
    }

    fn counts(&self) -> [(&'static str, u64); 3] {
        let all = |role: &Counted| role.counts.requests.load(Relaxed);
        [
            ("controllers", all(&self.controllers)),
            ("scheduler", all(&self.scheduler)),
            ("nodes", all(&self.nodes)),
        ]
    }

    /// What the loops have written; nodes write by themselves.
    fn writes(&self) -> u64 {
        self.controllers.counts.writes.load(Relaxed) + self.scheduler.counts.writes.load(Relaxed)
    }
}

/// A connection that counts what goes over it.
#[derive(Clone)]
struct Counted {
    inner: Arc<dyn Connection>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    writes: AtomicU64,
}

impl Counted {
    fn ctx(&self, shutdown: &watch::Receiver<bool>) -> Ctx {
        let client = Client::new(Arc::new(self.clone()), "kube-controller-manager");
        Ctx::new(client, Clock::default(), shutdown.clone())
    }
}

#[async_trait]
impl Connection for Counted {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        self.counts.requests.fetch_add(1, Relaxed);
        if request.method() != Method::GET {
            self.counts.writes.fetch_add(1, Relaxed);
        }
        self.inner.send(request).await
    }

    async fn follow(&self, collection: &str) -> Result<Box<dyn Feed>, Error> {
        self.inner.follow(collection).await
    }

    fn acting_as(&self, name: &str) -> Option<Arc<dyn Connection>> {
        let inner = self.inner.acting_as(name)?;
        Some(Arc::new(Counted { inner, counts: self.counts.clone() }))
    }
}
