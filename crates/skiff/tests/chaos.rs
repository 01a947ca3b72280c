//! Controllers with injected faults: requests, responses and watches are lost, the controllers are
//! killed between two writes, other clients write to the same objects, and the clock jumps. The final
//! state must be the same as without faults.
//!
//! `CHAOS_SEED` repeats a run; each failure prints the seed.

#[path = "chaos/faults.rs"]
mod faults;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use client::{Client, Key, Patch};
use faults::{FaultSource, LossyConnection, LostResponseConnection};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use reconcile::{Clock, Ctx, Object as _};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

const DEADLINE: Duration = Duration::from_secs(90);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_do_not_change_final_state() {
    let seed = std::env::var("CHAOS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_116);
    let expected = run_scenario(seed, 0).await;
    expect_test::expect![[r#"
        web: web:3 Running, web:3 Running, web:3 Running, web:3 Running
        db: db:20 Running, db:21 Running
        agent: agent:2 Running, agent:2 Running, agent:2 Running
        sums: sums Succeeded, sums Succeeded, sums Succeeded, sums Succeeded, sums Succeeded, sums Succeeded, sums Succeeded, sums Succeeded, sums Succeeded, sums Succeeded, sums Succeeded, sums Succeeded
        web replicas, updated, available: [4, 4, 4]
        db replicas, ready: [2, 2]
        agents ready: 3 of 3
        sums succeeded Some(12) failed None
        replica sets in use: 1
        settled
    "#]].assert_eq(&expected);
    for seed in seed..seed + 2 {
        assert_eq!(expected, run_scenario(seed, 15).await, "CHAOS_SEED={seed}");
    }
}

/// An object whose create response was lost is in the cache, so that a retry finds it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn create_with_lost_response_updates_cache() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (_stop, shutdown) = watch::channel(false);
    let server = apiserver::start_in_directory(directory.path(), shutdown.clone()).await.expect("a server");
    let connection = Arc::new(LostResponseConnection(server.local()));
    let ctx = Ctx::new(Client::new(connection, "test"), Clock::default(), shutdown);
    ctx.caches.nodes().wait_for_sync().await;
    let node: Node = serde_json::from_value(json!({"metadata": {"name": "a"}})).expect("a node");
    let error = ctx.create(&node).await.expect_err("no answer");
    assert!(matches!(error, client::Error::Unreachable(_)), "{error}");
    assert!(ctx.caches.nodes().get(&Key::new("", "a")).is_some());
}

/// Runs the scenario with a fault rate and returns the final state.
async fn run_scenario(seed: u64, rate: u64) -> String {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (stop, shutdown) = watch::channel(false);
    let server = apiserver::start_in_directory(directory.path(), shutdown.clone()).await.expect("a server");
    let client = Client::new(server.local(), "test");
    let clock = Clock::default();
    let faults = FaultSource::new(seed, rate);
    let nodes = Ctx::new(client.clone(), clock.clone(), shutdown.clone());
    tokio::spawn(simulate::run(nodes, simulate::Config { nodes: 3, events: false }));
    let connection = Arc::new(LossyConnection { inner: server.local(), faults: faults.clone() });
    let controller_task = tokio::spawn(keep_running(connection, clock.clone(), faults.clone(), shutdown));
    let writer = tokio::spawn(write_concurrently(client.clone(), clock, faults.clone(), rate > 0));
    apply_changes(&client, &faults, rate > 0).await;
    writer.abort();
    faults.disable();
    let end = wait_until_stable(&client, seed).await;
    stop.send_replace(true);
    let _ = controller_task.await;
    end
}

/// Runs the controllers and restarts them whenever they are killed.
async fn keep_running(
    connection: Arc<LossyConnection>,
    clock: Clock,
    faults: Arc<FaultSource>,
    mut shutdown: watch::Receiver<bool>,
) {
    loop {
        let (end, ended) = watch::channel(false);
        let ctx = Ctx::new(Client::new(connection.clone(), "kube-controller-manager"), clock.clone(), ended);
        let chosen = controllers::EnabledControllers::parse(&[]).expect("the default controllers are valid");
        let work = tokio::spawn(controllers::run(ctx.clone(), chosen));
        let scheduling = tokio::spawn(async move {
            let config = scheduler::config::Config::with_defaults();
            scheduler::run::run(ctx, config, &[]).await.expect("the default configuration is valid");
        });
        let stop = tokio::select! {
            () = faults.kill.notified() => false,
            _ = shutdown.wait_for(|stop| *stop) => true,
        };
        work.abort();
        scheduling.abort();
        end.send_replace(true);
        if stop {
            return;
        }
    }
}

/// Writes to objects that the controllers write to as well, and moves the clock.
async fn write_concurrently(client: Client, clock: Clock, faults: Arc<FaultSource>, enabled: bool) {
    if !enabled {
        return;
    }
    loop {
        tokio::time::sleep(Duration::from_millis(20 + faults.below(50))).await;
        let note =
            Patch::Merge(json!({"metadata": {"annotations": {"meddled": faults.below(1_000).to_string()}}}));
        for set in client.list::<ReplicaSet>("default").await.unwrap_or_default() {
            let _ = client.patch::<ReplicaSet>(&set.key(), &note).await;
        }
        let _ = client.patch::<Deployment>(&Key::new("default", "web"), &note).await;
        let _ = client.patch::<Job>(&Key::new("default", "sums"), &note).await;
        clock.advance(i64::try_from(faults.below(7)).unwrap_or(0) - 3);
    }
}

async fn apply_changes(client: &Client, faults: &FaultSource, delayed: bool) {
    let pause = async || {
        if delayed {
            tokio::time::sleep(Duration::from_millis(500 + faults.below(1_000))).await;
        }
    };
    let template = |app: &str, container: Value| json!({"metadata": {"labels": {"app": app}}, "spec": {"containers": [container]}});
    let workload = |kind: &str, name: &str, mut spec: Value, image: &str| {
        spec["selector"] = json!({"matchLabels": {"app": name}});
        spec["template"] = template(name, json!({"name": "main", "image": image}));
        json!({"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": "default"}, "spec": spec})
    };
    make::<Deployment>(client, workload("Deployment", "web", json!({"replicas": 6}), "web:1")).await;
    make::<StatefulSet>(
        client,
        workload("StatefulSet", "db", json!({"replicas": 3, "serviceName": "db"}), "db:1"),
    )
    .await;
    make::<DaemonSet>(client, workload("DaemonSet", "agent", json!({}), "agent:1")).await;
    let mut job = template("sums", json!({"name": "main", "image": "sums", "command": ["sleep", "1"]}));
    job["spec"]["restartPolicy"] = json!("Never");
    let spec = json!({"completions": 12, "parallelism": 4, "template": job});
    let metadata = json!({"name": "sums", "namespace": "default"});
    make::<Job>(client, json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}))
        .await;
    pause().await;
    let image = |image: &str| json!({"spec": {"template": {"spec": {"containers": [{"name": "main", "image": image}]}}}});
    change::<Deployment>(client, "web", image("web:2")).await;
    change::<StatefulSet>(client, "db", image("db:2")).await;
    pause().await;
    change::<Deployment>(client, "web", json!({"spec": {"replicas": 9}})).await;
    change::<StatefulSet>(client, "db", json!({"spec": {"replicas": 5}})).await;
    pause().await;
    change::<Deployment>(client, "web", image("web:3")).await;
    pause().await;
    change::<Deployment>(client, "web", json!({"spec": {"replicas": 4}})).await;
    change::<StatefulSet>(client, "db", json!({"spec": {"replicas": 2}})).await;
    change::<DaemonSet>(client, "agent", image("agent:2")).await;
    pause().await;
}

async fn make<T: client::Object>(client: &Client, value: Value) {
    let object: T = serde_json::from_value(value).expect("an object of this kind");
    client.create(&object).await.expect("created");
}

async fn change<T: client::Object>(client: &Client, name: &str, patch: Value) {
    client.patch::<T>(&Key::new("default", name), &Patch::Strategic(patch)).await.expect("changed");
}

/// Waits until the state is complete and has not changed for a while.
async fn wait_until_stable(client: &Client, seed: u64) -> String {
    let started = Instant::now();
    let mut last = (String::new(), Instant::now());
    loop {
        let state = describe(client).await;
        if state != last.0 {
            last = (state, Instant::now());
        }
        let is_unchanged = last.1.elapsed() > Duration::from_secs(2);
        if is_unchanged && last.0.ends_with("settled\n") {
            return last.0;
        }
        assert!(started.elapsed() < DEADLINE, "CHAOS_SEED={seed} does not settle:\n{}", last.0);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The state of the cluster, without names and times that differ between runs.
async fn describe(client: &Client) -> String {
    let pods: Vec<Pod> = client.list("default").await.expect("pods");
    let nodes = client.list::<Node>("").await.expect("nodes").len();
    let mut text = String::new();
    let mut is_stable = true;
    for app in ["web", "db", "agent", "sums"] {
        let mut app_pods: Vec<String> =
            pods.iter().filter(|pod| pod.label("app") == Some(app)).map(format_pod).collect();
        app_pods.sort();
        is_stable &= !app_pods.iter().any(|pod| pod.contains("Pending") || pod.contains("deleting"));
        let _ = writeln!(text, "{app}: {}", app_pods.join(", "));
    }
    let web: Deployment = client.get(&Key::new("default", "web")).await.expect("web");
    let status = web.status.clone().unwrap_or_default();
    let numbers =
        [status.replicas, status.updated_replicas, status.available_replicas].map(Option::unwrap_or_default);
    is_stable &= numbers == [4, 4, 4] && status.observed_generation == web.metadata.generation;
    let _ = writeln!(text, "web replicas, updated, available: {numbers:?}");
    let db: StatefulSet = client.get(&Key::new("default", "db")).await.expect("db");
    let status = db.status.clone().unwrap_or_default();
    let numbers = [Some(status.replicas), status.ready_replicas, status.updated_replicas]
        .map(Option::unwrap_or_default);
    is_stable &= numbers[..2] == [2, 2] && status.current_revision == status.update_revision;
    let _ = writeln!(text, "db replicas, ready: {:?}", &numbers[..2]);
    let agent: DaemonSet = client.get(&Key::new("default", "agent")).await.expect("agent");
    let status = agent.status.unwrap_or_default();
    is_stable &= usize::try_from(status.number_ready) == Ok(nodes)
        && status.updated_number_scheduled == Some(status.number_ready);
    let _ = writeln!(text, "agents ready: {} of {nodes}", status.number_ready);
    let job: Job = client.get(&Key::new("default", "sums")).await.expect("sums");
    let status = job.status.unwrap_or_default();
    is_stable &= status.completion_time.is_some();
    let _ = writeln!(text, "sums succeeded {:?} failed {:?}", status.succeeded, status.failed);
    let sets: Vec<ReplicaSet> = client.list("default").await.expect("replica sets");
    let current =
        sets.iter().filter(|set| set.spec.as_ref().and_then(|spec| spec.replicas) != Some(0)).count();
    let _ = writeln!(text, "replica sets in use: {current}");
    if is_stable {
        text += "settled\n";
    }
    text
}

fn format_pod(pod: &Pod) -> String {
    let image = pod.spec.as_ref().and_then(|spec| spec.containers.first()?.image.clone()).unwrap_or_default();
    let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
    let ordinal = pod.label("apps.kubernetes.io/pod-index").unwrap_or_default();
    let deleting = if pod.is_deleting() { " deleting" } else { "" };
    format!("{image}{ordinal} {phase}{deleting}")
}
