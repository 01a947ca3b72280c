//! Requests against a real server, with the tokio clock paused.

use std::sync::Arc;
use std::time::Duration;

use api::json::JsonExt as _;
use futures_util::StreamExt as _;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use super::*;
use crate::tests::TestServer;

fn user(name: &str, groups: &[&str]) -> User {
    let groups = groups.iter().map(|group| (*group).to_owned()).collect();
    User { name: name.into(), groups, ..User::default() }
}

fn alice() -> User {
    user("alice", &["system:authenticated"])
}

const GET_POD_ATTRIBUTES: Attributes<'static> = Attributes::Resource {
    verb: "get",
    group: "",
    resource: "pods",
    subresource: "",
    namespace: "default",
    name: "x",
    fields: None,
};

async fn start_request(
    test_server: &TestServer,
    user: &User,
) -> Result<Option<ExecutingRequest>, Response<Body>> {
    let query = Query::default();
    let timeout = Duration::from_secs(60);
    let request = FlowRequest { user, attributes: GET_POD_ATTRIBUTES, target: None, query: &query, timeout };
    test_server.server.flow.start_request(&test_server.server, request).await
}

async fn start_server() -> TestServer {
    let test_server = TestServer::start().await;
    ensure_defaults(&test_server.server).await.expect("the defaults");
    test_server
}

fn state(test_server: &TestServer, level: &str) -> String {
    let levels = test_server.server.flow.levels.lock();
    let state = levels[level].state();
    let counts = state.queues.counts;
    format!("{} of {} running, {} waiting", counts.running_seats, state.queues.limit(), counts.waiting)
}

/// Waits until `done` is true, with a deadline on the real clock.
async fn wait_until(done: impl AsyncFn() -> bool) {
    let start = std::time::Instant::now();
    while !done().await {
        assert!(start.elapsed() < Duration::from_secs(20), "condition not met within 20 seconds");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn default_objects_are_created_and_reconciled() {
    let test_server = start_server().await;
    let all = test_server.get("/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas").await;
    assert_eq!(all.items("items").len(), 11);
    let all = test_server.get("/apis/flowcontrol.apiserver.k8s.io/v1/prioritylevelconfigurations").await;
    assert_eq!(all.items("items").len(), 8);
    let controller = tokio::spawn(run(test_server.server.clone(), test_server.stop.subscribe()));
    let path = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/probes";
    let condition = async || {
        let schema = test_server.get(path).await;
        let conditions = schema.at("status").items("conditions").to_vec();
        conditions
            .first()
            .map(|one| format!("{} {} {}", one.text("type"), one.text("status"), one.text("message")))
    };
    let expected = "Dangling False This FlowSchema references the PriorityLevelConfiguration object named \"exempt\" and it exists";
    wait_until(async || condition().await.as_deref() == Some(expected)).await;
    let uid = test_server.get(path).await.path("metadata.uid").clone();
    test_server.send(&format!("DELETE {path}"), json!({})).await;
    wait_until(async || {
        let again = test_server.get(path).await;
        again.has("metadata") && *again.path("metadata.uid") != uid && !again.path("metadata.uid").is_null()
    })
    .await;
    // Objects that auto-update are reverted; objects with `autoupdate-spec: false` keep their
    // changes.
    let path = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/service-accounts";
    let patch = |annotation: &str| json!({"metadata": {"annotations": {"apf.kubernetes.io/autoupdate-spec": annotation}}, "spec": {"matchingPrecedence": 77}});
    let send = async |patch: Value| {
        test_server.call(&format!("PATCH {path}"), "application/merge-patch+json", &patch.to_string()).await
    };
    assert_eq!(send(patch("true")).await.0, 200);
    wait_until(async || *test_server.get(path).await.path("spec.matchingPrecedence") == 9000).await;
    assert_eq!(send(patch("false")).await.0, 200);
    // A user's schema with an unknown priority level is dangling. It is deleted only if it is
    // annotated as a default.
    let own = json!({"metadata": {"name": "own"}, "spec": {
        "priorityLevelConfiguration": {"name": "gone"}, "matchingPrecedence": 5,
        "rules": [{"subjects": [{"kind": "User", "user": {"name": "alice"}}],
                   "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}]}],
    }});
    let collection = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas";
    assert_eq!(test_server.send(&format!("POST {collection}"), own.clone()).await.0, 201);
    let mut stale = own;
    stale["metadata"] =
        json!({"name": "stale", "annotations": {"apf.kubernetes.io/autoupdate-spec": "true"}});
    assert_eq!(test_server.send(&format!("POST {collection}"), stale).await.0, 201);
    wait_until(async || {
        test_server
            .get(&format!("{collection}/own"))
            .await
            .path("status.conditions")
            .to_string()
            .contains("named \\\"gone\\\" but there is no such object")
    })
    .await;
    wait_until(async || *test_server.get(&format!("{collection}/stale")).await.at("code") == 404).await;
    assert_eq!(*test_server.get(path).await.path("spec.matchingPrecedence"), 77);
    controller.abort();
}

#[tokio::test(start_paused = true)]
async fn request_without_seat_waits_then_gets_429() {
    let test_server = start_server().await;
    let mut executing = Vec::new();
    let seats = test_server.server.flow.levels.lock()["global-default"].state().queues.limit();
    for _ in 0..seats {
        executing.push(start_request(&test_server, &alice()).await.ok().flatten().expect("a seat"));
    }
    // The next request waits for a quarter of its timeout, then is rejected.
    let before = Instant::now();
    let response = start_request(&test_server, &alice()).await.err().expect("no seat");
    assert_eq!(before.elapsed().as_secs(), 15);
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["retry-after"], "1");
    assert!(
        response.headers()[FLOW_SCHEMA_UID_HEADER].len() == 36
            && response.headers()[PRIORITY_LEVEL_UID_HEADER].len() == 36
    );
    let text = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(text, "Too many requests, please try again later.\n");
    // An administrator always gets a seat, and so do users of other priority levels.
    assert!(start_request(&test_server, &user("admin", &["system:masters"])).await.is_ok());
    assert!(start_request(&test_server, &user("system:node:a", &["system:nodes"])).await.is_ok());
    // A request that is canceled while it is queued leaves no state.
    let test_server = Arc::new(test_server);
    let waiting = |name: &'static str| {
        let test_server = test_server.clone();
        tokio::spawn(async move {
            start_request(&test_server, &user(name, &["system:authenticated"])).await.map(drop).is_ok()
        })
    };
    let (canceled, queued) = (waiting("bob"), waiting("carol"));
    wait_until(async || state(&test_server, "global-default").ends_with(" 2 waiting")).await;
    canceled.abort();
    assert!(canceled.await.is_err());
    wait_until(async || state(&test_server, "global-default").ends_with(" 1 waiting")).await;
    executing.pop();
    assert!(queued.await.unwrap());
    executing.clear();
    assert_eq!(state(&test_server, "global-default"), format!("0 of {seats} running, 0 waiting"));
    let mut text = String::new();
    test_server.server.flow.print(&mut text);
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
async fn seats_of_a_response_body_without_reader_are_released_after_timeout() {
    let test_server = start_server().await;
    let chunks = || Body::Chunks(Box::new(vec![Bytes::from_static(b"x"); 3].into_iter()));
    let attach = async |body| {
        let entered = start_request(&test_server, &alice()).await.ok().flatten().expect("a seat");
        entered.hold_seats(Response::new(body))
    };
    let idle = state(&test_server, "global-default");
    let busy = idle.replacen('0', "1", 1);
    // Body read to its end.
    let read = attach(chunks()).await;
    assert_eq!(state(&test_server, "global-default"), busy);
    read.into_body().collect().await.unwrap();
    assert_eq!(state(&test_server, "global-default"), idle);
    // Body dropped.
    drop(attach(chunks()).await);
    assert_eq!(state(&test_server, "global-default"), idle);
    // Body never read.
    let pending_response = attach(chunks()).await;
    assert_eq!(state(&test_server, "global-default"), busy);
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(state(&test_server, "global-default"), idle);
    drop(pending_response);
    // A watch releases its seats once it waits for events.
    let stream =
        futures_util::stream::iter([Bytes::from_static(b"x")]).chain(futures_util::stream::pending());
    let mut watch = attach(Body::Stream(Box::pin(stream))).await.into_body();
    assert!(watch.frame().await.is_some());
    assert_eq!(state(&test_server, "global-default"), busy);
    assert!(futures_util::FutureExt::now_or_never(watch.frame()).is_none());
    assert_eq!(state(&test_server, "global-default"), idle);
}

#[tokio::test(start_paused = true)]
async fn busy_level_borrows_unused_seats() {
    let test_server = Arc::new(start_server().await);
    // The paused clock jumps ahead while a task waits for the store, so the controller may find
    // nothing left to write.
    assert!(config_controller::sync(&test_server.server).await.is_none());
    let controller = tokio::spawn(run(test_server.server.clone(), test_server.stop.subscribe()));
    let timeout = || test_server.server.flow.levels.lock()["global-default"].state().queues.limit();
    let before = timeout();
    let waiting: Vec<_> = (0..before + 100)
        .map(|i| {
            let test_server = test_server.clone();
            let user = user(&format!("user-{i}"), &["system:authenticated"]);
            tokio::spawn(async move {
                let seat = start_request(&test_server, &user).await.ok().flatten();
                tokio::time::sleep(Duration::from_secs(25)).await;
                seat.is_some()
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert!(timeout() > before + 50, "{before} {}", timeout());
    for task in waiting {
        assert!(task.await.unwrap());
    }
    // Much later, seats are back at their nominal allocation.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(timeout(), before);
    controller.abort();
}

/// CPU time of a request that finds a seat. Prints the result and asserts nothing: `cargo test
/// --release -p apiserver cost_of_a_request -- --ignored --nocapture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn cost_of_a_request() {
    let test_server = start_server().await;
    let node = user("system:node:a", &["system:nodes", "system:authenticated"]);
    for user in [user("admin", &["system:masters", "system:authenticated"]), node, alice()] {
        const TIMES: u32 = 200_000;
        let start = cpu_seconds();
        for _ in 0..TIMES {
            drop(start_request(&test_server, &user).await);
        }
        println!("{}: {:.0} ns of CPU", user.name, (cpu_seconds() - start) * 1e9 / f64::from(TIMES));
    }
}

/// CPU seconds of this thread. The kernel counts them in nanoseconds.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")
        .expect("/proc/thread-self/schedstat is readable");
    text.split(' ').next().and_then(|ran| ran.parse::<f64>().ok()).expect("a number") * 1e-9
}
