//! Lists and watches: the state they return, page by page and event by event.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::{Http, Lines, Reply, Server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const PODS: &str = "/api/v1/namespaces/default/pods";
const EXPIRED: &str = "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the first chunk was returned and now may show up in the list.";

#[test]
fn list_honors_resource_version() {
    let server = Server::start();
    let http = server.http();
    let first = version(&make(&http, "a", "x"));
    let second = version(&make(&http, "b", "x"));
    let future_version = second + 1_000_000;
    // The query, then the names or the status code of the response.
    let table = [
        (String::new(), "a b"),
        ("resourceVersion=0".to_owned(), "a b"),
        (format!("resourceVersion={first}"), "a b"),
        (format!("resourceVersion={first}&resourceVersionMatch=NotOlderThan"), "a b"),
        (format!("resourceVersion={first}&resourceVersionMatch=Exact"), "a"),
        (format!("resourceVersion={second}&resourceVersionMatch=Exact"), "a b"),
        (format!("resourceVersion={first}&limit=5"), "a"),
        (format!("resourceVersion={future_version}"), "504"),
        (format!("resourceVersion={future_version}&resourceVersionMatch=Exact"), "504"),
        ("resourceVersion=0&resourceVersionMatch=Exact".to_owned(), "422"),
        ("resourceVersionMatch=Exact".to_owned(), "422"),
        ("resourceVersion=x".to_owned(), "400"),
        ("resourceVersion=1&resourceVersionMatch=Sometimes".to_owned(), "422"),
        ("sendInitialEvents=true".to_owned(), "422"),
        ("limit=x".to_owned(), "400"),
        ("labelSelector=a%20b%20c".to_owned(), "400"),
        ("fieldSelector=spec.nothing%3Dx".to_owned(), "400"),
        ("continue=rubbish".to_owned(), "400"),
    ];
    for (query, expected) in table {
        let selector = if query.contains("labelSelector") { "" } else { "labelSelector=t%3Dx&" };
        let reply = http.get(&format!("{MAPS}?{selector}{query}")).unwrap();
        let got = if reply.status == 200 { names(&reply.json()) } else { reply.status.to_string() };
        assert_eq!(got, expected, "{query}: {}", reply.text());
    }
    let one = http.get(&format!("{MAPS}/a?resourceVersion={future_version}")).unwrap();
    assert_eq!(one.status, 504, "{}", one.text());
    let list = http.get(MAPS).unwrap().json();
    assert!(list["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap() >= second);
}

#[test]
fn pages_are_consistent_while_objects_change() {
    let server = Server::start();
    let http = server.http();
    for name in ["a", "b", "c", "d", "e"] {
        make(&http, name, "p");
    }
    let page = |extra: &str| http.get(&format!("{MAPS}?labelSelector=t%3Dp&limit=2{extra}")).unwrap().json();
    let first = page("");
    assert_eq!(names(&first), "a b");
    assert_eq!(first["metadata"]["remainingItemCount"], Value::Null, "not set with a selector");
    let all = http.get("/api/v1/configmaps?limit=1").unwrap().json();
    let left = http.get("/api/v1/configmaps").unwrap().json()["items"].as_array().unwrap().len() - 1;
    assert_eq!(all["metadata"]["remainingItemCount"], left);

    make(&http, "bb", "p");
    http.send("DELETE", &format!("{MAPS}/c"), &[], b"").unwrap();
    let token =
        |list: &Value| format!("&continue={}", list["metadata"]["continue"].as_str().unwrap_or("none"));
    let second = page(&token(&first));
    assert_eq!(names(&second), "c d", "as it was when the first page was read");
    let third = page(&token(&second));
    assert_eq!(names(&third), "e");
    assert_eq!(third["metadata"]["continue"], Value::Null);
    for list in [&second, &third] {
        assert_eq!(list["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    }
    assert_eq!(names(&page("")), "a b");
    let whole = http.get(&format!("{MAPS}?labelSelector=t%3Dp")).unwrap().json();
    assert_eq!(names(&whole), "a b bb d e");
}

#[test]
fn old_pages_and_watches_expire() {
    let server = Server::start();
    let http = server.http();
    let old = version(&make(&http, "a", "p"));
    make(&http, "b", "p");
    let path = format!("{MAPS}?labelSelector=t%3Dp&limit=1");
    let first = http.get(&path).unwrap().json();
    // More changes than the server's history keeps.
    let body = json!({"data": {"k": "x".repeat(1_000_000)}}).to_string();
    for i in 0..80 {
        let body = body.replacen('x', &(i % 10).to_string(), 1);
        let reply = patch(&http, &format!("{MAPS}/b"), "application/merge-patch+json", &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let token = first["metadata"]["continue"].as_str().unwrap();
    let reply = http.get(&format!("{path}&continue={token}")).unwrap();
    assert_eq!((reply.status, reply.json()["reason"].as_str()), (410, Some("Expired")), "{}", reply.text());
    assert_eq!(reply.json()["message"], EXPIRED);
    let again = reply.json()["metadata"]["continue"].as_str().unwrap().to_owned();
    assert_eq!(names(&http.get(&format!("{path}&continue={again}")).unwrap().json()), "b");

    let mut watch = http.open(&format!("{MAPS}?watch=1&resourceVersion={old}")).unwrap();
    let event = next(&mut watch);
    assert_eq!((&event["type"], &event["object"]["code"]), (&json!("ERROR"), &json!(410)), "{event}");
    let reply = http.get(&format!("{MAPS}?resourceVersion={old}&resourceVersionMatch=Exact")).unwrap();
    assert_eq!(reply.status, 410, "{}", reply.text());
}

#[test]
fn watch_sends_added_and_deleted_on_selector_changes() {
    let server = Server::start();
    let http = server.http();
    let start = version(&make(&http, "a", "no"));
    let open = |query: &str| http.open(&format!("{MAPS}?watch=1&{query}")).unwrap();
    let mut selected = open(&format!("resourceVersion={start}&labelSelector=t%3Dyes"));
    let mut all = open(&format!("resourceVersion={start}&fieldSelector=metadata.name%3Da"));
    let label = |to: &str| {
        let body = json!({"metadata": {"labels": {"t": to}}}).to_string();
        patch(&http, &format!("{MAPS}/a"), "application/merge-patch+json", &body);
    };
    label("yes");
    label("no");
    label("yes");
    http.send("DELETE", &format!("{MAPS}/a"), &[], b"").unwrap();
    // An object that leaves the selection is sent with its last selected state.
    for expected in ["ADDED yes", "DELETED yes", "ADDED yes", "DELETED yes"] {
        assert_eq!(event_summary(&next(&mut selected)), expected);
    }
    for expected in ["MODIFIED yes", "MODIFIED no", "MODIFIED yes", "DELETED yes"] {
        assert_eq!(event_summary(&next(&mut all)), expected);
    }
    // Without a version and with version 0, the watch starts with the existing objects.
    make(&http, "b", "late");
    for query in ["labelSelector=t%3Dlate", "labelSelector=t%3Dlate&resourceVersion=0"] {
        assert_eq!(event_summary(&next(&mut open(query))), "ADDED late");
    }
}

#[test]
fn streaming_lists_end_with_a_bookmark() {
    let server = Server::start();
    let http = server.http();
    for name in ["a", "b"] {
        make(&http, name, "s");
    }
    let query = "watch=1&labelSelector=t%3Ds&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let mut watch = http.open(&format!("{MAPS}?{query}")).unwrap();
    assert_eq!(event_summary(&next(&mut watch)), "ADDED s");
    assert_eq!(event_summary(&next(&mut watch)), "ADDED s");
    let bookmark = next(&mut watch);
    assert_eq!(bookmark["type"], "BOOKMARK");
    let metadata = &bookmark["object"]["metadata"];
    assert_eq!(metadata["annotations"]["k8s.io/initial-events-end"], "true");
    let at = metadata["resourceVersion"].as_str().unwrap();
    make(&http, "c", "s");
    assert_eq!(event_summary(&next(&mut watch)), "ADDED s");
    let mut later = http.open(&format!("{MAPS}?watch=1&labelSelector=t%3Ds&resourceVersion={at}")).unwrap();
    assert_eq!(next(&mut later)["object"]["metadata"]["name"], "c", "a watch continues from a bookmark");
    let wrong = http.get(&format!("{MAPS}?watch=1&sendInitialEvents=true")).unwrap();
    assert_eq!(wrong.status, 422, "{}", wrong.text());
}

#[test]
fn watches_time_out_and_are_not_blocked_by_slow_clients() {
    let server = Server::start();
    let http = server.http();
    let started = Instant::now();
    let ended = http.get(&format!("{MAPS}?watch=1&timeoutSeconds=1&labelSelector=t%3Dnone")).unwrap();
    assert_eq!((ended.status, ended.text().as_str()), (200, ""));
    assert!(started.elapsed() >= Duration::from_millis(900), "{:?}", started.elapsed());

    // These watches are never read: the others still get their events, whatever the socket buffers
    // hold.
    let slow_watches: Vec<Lines> = (0..3).map(|_| http.open(&format!("{MAPS}?watch=1")).unwrap()).collect();
    let mut fast_watch = http.open(&format!("{MAPS}?watch=1&labelSelector=t%3Dbig")).unwrap();
    let map =
        json!({"metadata": {"name": "big", "labels": {"t": "big"}}, "data": {"k": "x".repeat(500_000)}});
    http.post(MAPS, &map).unwrap();
    assert_eq!(event_summary(&next(&mut fast_watch)), "ADDED big");
    for i in 0..30 {
        let body = json!({"data": {"i": i.to_string()}}).to_string();
        patch(&http, &format!("{MAPS}/big"), "application/merge-patch+json", &body);
        let event = next(&mut fast_watch);
        assert_eq!(event["object"]["data"]["i"], i.to_string());
    }
    drop(slow_watches);
}

#[test]
fn field_selectors_per_resource() {
    let server = Server::start();
    let http = server.http();
    for (name, node) in [("a", ""), ("b", "n1")] {
        let pod = json!({"metadata": {"name": name}, "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}});
        assert_eq!(http.post(PODS, &pod).unwrap().status, 201);
    }
    let event = json!({
        "metadata": {"name": "e"}, "regarding": {"kind": "Pod", "name": "a", "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Normal", "reason": "Sails", "action": "Sail",
        "reportingController": "mast", "reportingInstance": "m-1",
    });
    let created = http.post("/apis/events.k8s.io/v1/namespaces/default/events", &event).unwrap();
    assert_eq!(created.status, 201, "{}", created.text());
    let table = [
        ("/api/v1/events", "source=mast,involvedObject.name=a", "e"),
        ("/apis/events.k8s.io/v1/events", "reportingController=mast,regarding.kind=Pod", "e"),
        ("/apis/events.k8s.io/v1/events", "regarding.name=b", ""),
        (PODS, "spec.nodeName=n1", "b"),
        (PODS, "spec.nodeName=", "a"),
        (PODS, "spec.nodeName!=n1", "a"),
        (PODS, "status.phase=Pending", "a b"),
        (PODS, "status.phase=Pending,metadata.name=a", "a"),
        (PODS, "spec.restartPolicy=Never", ""),
        ("/api/v1/namespaces", "status.phase=Active,metadata.name=default", "default"),
        ("/api/v1/services", "spec.clusterIP=10.43.0.1", "kubernetes"),
        ("/api/v1/secrets", "type=Opaque", ""),
        ("/api/v1/events", "involvedObject.kind=Pod,reason=X", ""),
        ("/apis/batch/v1/jobs", "status.successful=1", ""),
        ("/api/v1/nodes", "spec.unschedulable=true", ""),
    ];
    for (path, selector, expected) in table {
        let reply = http.get(&format!("{path}?fieldSelector={}", selector.replace('=', "%3D"))).unwrap();
        assert_eq!(reply.status, 200, "{path} {selector}: {}", reply.text());
        assert_eq!(names(&reply.json()), expected, "{path} {selector}");
    }
    let wrong = http.get("/apis/apps/v1/deployments?fieldSelector=spec.replicas%3D1").unwrap();
    assert_eq!(wrong.status, 400, "{}", wrong.text());
    assert_eq!(
        wrong.json()["message"],
        "\"spec.replicas\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\""
    );
}

#[track_caller]
fn make(http: &Http, name: &str, label: &str) -> Value {
    let reply = http.post(MAPS, &json!({"metadata": {"name": name, "labels": {"t": label}}})).unwrap();
    assert_eq!(reply.status, 201, "{}", reply.text());
    reply.json()
}

fn patch(http: &Http, path: &str, kind: &str, body: &str) -> Reply {
    http.send("PATCH", path, &[("content-type", kind)], body.as_bytes()).unwrap()
}

#[track_caller]
fn next(watch: &mut Lines) -> Value {
    let line = watch.next_line().unwrap().expect("the watch is open");
    serde_json::from_str(&line).unwrap()
}

/// The event's type and the label of its object.
fn event_summary(event: &Value) -> String {
    let label = event["object"]["metadata"]["labels"]["t"].as_str().unwrap_or("none");
    format!("{} {label}", event["type"].as_str().unwrap_or("none"))
}

fn names(list: &Value) -> String {
    let items = list["items"].as_array().unwrap_or_else(|| panic!("no list: {list}"));
    items.iter().map(|item| item["metadata"]["name"].as_str().unwrap()).collect::<Vec<_>>().join(" ")
}

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
}
