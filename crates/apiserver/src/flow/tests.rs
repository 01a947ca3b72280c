//! Requests at the door of a real server, with the clock stopped.

use std::sync::Arc;
use std::time::Duration;

use api::json::Json as _;
use futures_util::StreamExt as _;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use super::*;
use crate::tests::Rig;

fn user(name: &str, groups: &[&str]) -> User {
    let groups = groups.iter().map(|group| (*group).to_owned()).collect();
    User { name: name.into(), groups, ..User::default() }
}

fn alice() -> User {
    user("alice", &["system:authenticated"])
}

const LIST: Ask<'static> = Ask::Resource {
    verb: "get",
    group: "",
    resource: "pods",
    subresource: "",
    namespace: "default",
    name: "x",
    fields: None,
};

async fn enter(rig: &Rig, user: &User) -> Result<Option<Entered>, Response<Body>> {
    let query = Query::default();
    let limit = Duration::from_secs(60);
    let asking = Asking { user, ask: LIST, target: None, query: &query, limit };
    rig.server.flow.enter(&rig.server, asking).await
}

async fn started() -> Rig {
    let rig = Rig::start().await;
    ensure_defaults(&rig.server).await.expect("the defaults");
    rig
}

fn state(rig: &Rig, level: &str) -> String {
    let levels = rig.server.flow.levels.lock();
    let state = levels[level].state();
    let totals = state.queues.totals;
    format!("{} of {} running, {} waiting", totals.running_seats, state.queues.limit(), totals.waiting)
}

/// Waits until `done`, with a deadline on the real clock.
async fn eventually(done: impl AsyncFn() -> bool) {
    let begun = std::time::Instant::now();
    while !done().await {
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not happen");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_defaults_are_there_and_come_back() {
    let rig = started().await;
    let all = rig.get("/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas").await;
    assert_eq!(all.items("items").len(), 11);
    let all = rig.get("/apis/flowcontrol.apiserver.k8s.io/v1/prioritylevelconfigurations").await;
    assert_eq!(all.items("items").len(), 8);
    let keeper = tokio::spawn(keep(rig.server.clone(), rig.stop.subscribe()));
    let path = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/probes";
    let condition = async || {
        let schema = rig.get(path).await;
        let conditions = schema.at("status").items("conditions").to_vec();
        conditions
            .first()
            .map(|one| format!("{} {} {}", one.text("type"), one.text("status"), one.text("message")))
    };
    let expected = "Dangling False This FlowSchema references the PriorityLevelConfiguration object named \"exempt\" and it exists";
    eventually(async || condition().await.as_deref() == Some(expected)).await;
    let uid = rig.get(path).await.path("metadata.uid").clone();
    rig.send(&format!("DELETE {path}"), json!({})).await;
    eventually(async || {
        let again = rig.get(path).await;
        again.has("metadata") && *again.path("metadata.uid") != uid && !again.path("metadata.uid").is_null()
    })
    .await;
    // What follows the server is put back; what says it does not, stays.
    let path = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/service-accounts";
    let patch = |annotation: &str| json!({"metadata": {"annotations": {"apf.kubernetes.io/autoupdate-spec": annotation}}, "spec": {"matchingPrecedence": 77}});
    let send = async |patch: Value| {
        rig.call(&format!("PATCH {path}"), "application/merge-patch+json", &patch.to_string()).await
    };
    assert_eq!(send(patch("true")).await.0, 200);
    eventually(async || *rig.get(path).await.path("spec.matchingPrecedence") == 9000).await;
    assert_eq!(send(patch("false")).await.0, 200);
    // A schema of one's own that points nowhere says so, and is removed only if it claims to be a default.
    let own = json!({"metadata": {"name": "own"}, "spec": {
        "priorityLevelConfiguration": {"name": "gone"}, "matchingPrecedence": 5,
        "rules": [{"subjects": [{"kind": "User", "user": {"name": "alice"}}],
                   "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}]}],
    }});
    let collection = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas";
    assert_eq!(rig.send(&format!("POST {collection}"), own.clone()).await.0, 201);
    let mut stale = own;
    stale["metadata"] =
        json!({"name": "stale", "annotations": {"apf.kubernetes.io/autoupdate-spec": "true"}});
    assert_eq!(rig.send(&format!("POST {collection}"), stale).await.0, 201);
    eventually(async || {
        rig.get(&format!("{collection}/own"))
            .await
            .path("status.conditions")
            .to_string()
            .contains("named \\\"gone\\\" but there is no such object")
    })
    .await;
    eventually(async || *rig.get(&format!("{collection}/stale")).await.at("code") == 404).await;
    assert_eq!(*rig.get(path).await.path("spec.matchingPrecedence"), 77);
    keeper.abort();
}

#[tokio::test(start_paused = true)]
async fn who_finds_no_seat_waits_and_is_told_to_come_again() {
    let rig = started().await;
    let mut inside = Vec::new();
    let seats = rig.server.flow.levels.lock()["global-default"].state().queues.limit();
    for _ in 0..seats {
        inside.push(enter(&rig, &alice()).await.ok().flatten().expect("a seat"));
    }
    // The next waits for a quarter of its time, then is refused.
    let before = Instant::now();
    let refusal = enter(&rig, &alice()).await.err().expect("no seat");
    assert_eq!(before.elapsed().as_secs(), 15);
    assert_eq!(refusal.status(), 429);
    assert_eq!(refusal.headers()["retry-after"], "1");
    assert!(refusal.headers()[SCHEMA_UID].len() == 36 && refusal.headers()[LEVEL_UID].len() == 36);
    let text = refusal.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(text, "Too many requests, please try again later.\n");
    // An administrator always finds a seat, and so do others at their own levels.
    assert!(enter(&rig, &user("admin", &["system:masters"])).await.is_ok());
    assert!(enter(&rig, &user("system:node:a", &["system:nodes"])).await.is_ok());
    // Who goes away while waiting leaves nothing behind.
    let rig = Arc::new(rig);
    let waiting = |name: &'static str| {
        let rig = rig.clone();
        tokio::spawn(
            async move { enter(&rig, &user(name, &["system:authenticated"])).await.map(drop).is_ok() },
        )
    };
    let (gone, stays) = (waiting("bob"), waiting("carol"));
    eventually(async || state(&rig, "global-default").ends_with(" 2 waiting")).await;
    gone.abort();
    assert!(gone.await.is_err());
    eventually(async || state(&rig, "global-default").ends_with(" 1 waiting")).await;
    inside.pop();
    assert!(stays.await.unwrap());
    inside.clear();
    assert_eq!(state(&rig, "global-default"), format!("0 of {seats} running, 0 waiting"));
    let mut text = String::new();
    rig.server.flow.print(&mut text);
    let labels = "flow_schema=\"global-default\",priority_level=\"global-default\"";
    for line in [
        format!("apiserver_flowcontrol_rejected_requests_total{{{labels},reason=\"time-out\"}} 2"),
        format!("apiserver_flowcontrol_dispatched_requests_total{{{labels}}} {}", seats + 1),
        format!("apiserver_flowcontrol_current_inqueue_requests{{{labels}}} 0"),
        format!("apiserver_flowcontrol_current_executing_seats{{{labels}}} 0"),
        "apiserver_flowcontrol_nominal_limit_seats{priority_level=\"global-default\"} 49".to_owned(),
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_nobody_reads_does_not_keep_its_seats() {
    let rig = started().await;
    let chunks = || Body::Chunks(Box::new(vec![Bytes::from_static(b"x"); 3].into_iter()));
    let attach = async |body| {
        let entered = enter(&rig, &alice()).await.ok().flatten().expect("a seat");
        entered.attach(Response::new(body))
    };
    let idle = state(&rig, "global-default");
    let busy = idle.replacen('0', "1", 1);
    // Read to its end.
    let read = attach(chunks()).await;
    assert_eq!(state(&rig, "global-default"), busy);
    read.into_body().collect().await.unwrap();
    assert_eq!(state(&rig, "global-default"), idle);
    // Dropped.
    drop(attach(chunks()).await);
    assert_eq!(state(&rig, "global-default"), idle);
    // Never read.
    let held = attach(chunks()).await;
    assert_eq!(state(&rig, "global-default"), busy);
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(state(&rig, "global-default"), idle);
    drop(held);
    // A watch gives them back once it waits for news.
    let stream =
        futures_util::stream::iter([Bytes::from_static(b"x")]).chain(futures_util::stream::pending());
    let mut watch = attach(Body::Stream(Box::pin(stream))).await.into_body();
    assert!(watch.frame().await.is_some());
    assert_eq!(state(&rig, "global-default"), busy);
    assert!(futures_util::FutureExt::now_or_never(watch.frame()).is_none());
    assert_eq!(state(&rig, "global-default"), idle);
}

#[tokio::test(start_paused = true)]
async fn a_crowded_level_borrows_what_others_do_not_use() {
    let rig = Arc::new(started().await);
    // The stopped clock jumps ahead while anybody waits for the store, so the keeper may find nothing left to write.
    assert!(keep::follow(&rig.server).await.is_none());
    let keeper = tokio::spawn(keep(rig.server.clone(), rig.stop.subscribe()));
    let limit = || rig.server.flow.levels.lock()["global-default"].state().queues.limit();
    let before = limit();
    let waiting: Vec<_> = (0..before + 100)
        .map(|i| {
            let rig = rig.clone();
            let user = user(&format!("user-{i}"), &["system:authenticated"]);
            tokio::spawn(async move {
                let seat = enter(&rig, &user).await.ok().flatten();
                tokio::time::sleep(Duration::from_secs(25)).await;
                seat.is_some()
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert!(limit() > before + 50, "{before} {}", limit());
    for task in waiting {
        assert!(task.await.unwrap());
    }
    // Long after, everything is as it was.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(limit(), before);
    keeper.abort();
}

/// What a request pays that finds a seat, by the processor's clock. Prints; judges nothing:
/// `cargo test --release -p apiserver cost_of_a_request -- --ignored --nocapture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn cost_of_a_request() {
    let rig = started().await;
    let node = user("system:node:a", &["system:nodes", "system:authenticated"]);
    for user in [user("admin", &["system:masters", "system:authenticated"]), node, alice()] {
        const TIMES: u32 = 200_000;
        let begun = cpu_seconds();
        for _ in 0..TIMES {
            drop(enter(&rig, &user).await);
        }
        println!("{}: {:.0} ns of CPU", user.name, (cpu_seconds() - begun) * 1e9 / f64::from(TIMES));
    }
}

/// Seconds of CPU this thread has used, as the kernel counts them in nanoseconds.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("this is Linux");
    text.split(' ').next().and_then(|ran| ran.parse::<f64>().ok()).expect("a number") * 1e-9
}
