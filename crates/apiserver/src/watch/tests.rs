//! Watches on an in-process server, read frame by frame.

use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use super::*;
use crate::negotiate::{Format, OutputKind};
use crate::render::IncludeObject;
use crate::request::{Query, Route, route};
use crate::tests::TestServer;

struct TestWatch {
    body: Body,
    rest: Vec<u8>,
}

async fn open_as(test_server: &TestServer, path: &str, format: Format) -> Result<TestWatch, Status> {
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let query = Query::parse(&format!("watch=1&{query}"));
    let Ok(Route::Resource(target)) = route(&test_server.server.registry, path) else {
        panic!("{path} is not a resource path")
    };
    let options = ListOptions::parse(&query, &target)?;
    let now = Timestamp::now();
    let renderer = Renderer { resource: target.resource, format, include: IncludeObject::Metadata, now };
    let response = watch(&test_server.server, &target, options, renderer).await?;
    Ok(TestWatch { body: response.into_body(), rest: Vec::new() })
}

async fn open(test_server: &TestServer, path: &str) -> TestWatch {
    open_as(test_server, path, Format::JSON).await.expect("a watch")
}

impl TestWatch {
    async fn next_value(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).expect("JSON"));
            }
            let frame = self.body.frame().await?;
            self.rest.extend_from_slice(&frame.expect("no error").into_data().expect("data"));
        }
    }

    /// `ADDED a`, `BOOKMARK`, `end`.
    async fn next(&mut self) -> String {
        let Some(event) = self.next_value().await else { return "end".into() };
        let object = &event["object"];
        let name = object["metadata"]["name"].as_str().or(object["message"].as_str()).unwrap_or_default();
        format!("{} {name}", event["type"].as_str().unwrap_or_default()).trim_end().to_owned()
    }
}

const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// Writes a ConfigMap and returns its resourceVersion.
async fn put(test_server: &TestServer, name: &str, label: &str, text: &str) -> u64 {
    let map = json!({"metadata": {"name": name, "labels": {"l": label}}, "data": {"text": text}});
    let (code, value) = match test_server.send(&format!("PUT {CONFIG_MAPS}/{name}"), map.clone()).await {
        (404, _) => test_server.send(&format!("POST {CONFIG_MAPS}"), map).await,
        other => other,
    };
    assert!(code < 300, "{value}");
    value["metadata"]["resourceVersion"].as_str().and_then(|text| text.parse().ok()).expect("a revision")
}

async fn delete(test_server: &TestServer, name: &str) {
    assert_eq!(test_server.send(&format!("DELETE {CONFIG_MAPS}/{name}"), json!({})).await.0, 200);
}

fn revision(event: &Value) -> u64 {
    let text = event["object"]["metadata"]["resourceVersion"].as_str();
    text.and_then(|text| text.parse().ok()).expect("a revision")
}

#[tokio::test]
async fn watch_starts_after_list_revision() {
    let test_server = TestServer::start().await;
    put(&test_server, "a", "x", "1").await;
    let list = test_server.get(CONFIG_MAPS).await;
    let version = list["metadata"]["resourceVersion"].as_str().expect("a version").to_owned();
    let mut early = open(&test_server, &format!("{CONFIG_MAPS}?resourceVersion={version}")).await;
    put(&test_server, "a", "x", "2").await;
    put(&test_server, "b", "x", "1").await;
    delete(&test_server, "a").await;
    let mut late = open(&test_server, &format!("{CONFIG_MAPS}?resourceVersion={version}")).await;
    for watch in [&mut early, &mut late] {
        let mut last = version.parse().unwrap();
        for expected in ["MODIFIED a", "ADDED b", "DELETED a"] {
            let event = watch.next_value().await.unwrap();
            let found = format!(
                "{} {}",
                event["type"].as_str().unwrap(),
                event["object"]["metadata"]["name"].as_str().unwrap()
            );
            assert_eq!(found, expected);
            assert!(revision(&event) > last, "{event}");
            last = revision(&event);
        }
    }
}

#[tokio::test]
async fn watch_without_version_starts_with_current_objects() {
    let test_server = TestServer::start().await;
    put(&test_server, "b", "x", "1").await;
    put(&test_server, "a", "y", "1").await;
    for query in ["labelSelector=l", "labelSelector=l&resourceVersion=0"] {
        let mut watch = open(&test_server, &format!("{CONFIG_MAPS}?{query}")).await;
        assert_eq!([watch.next().await, watch.next().await], ["ADDED a", "ADDED b"]);
        put(&test_server, "b", "x", query).await;
        assert_eq!(watch.next().await, "MODIFIED b");
    }
    // By name, as `kubectl get -w NAME` requests it; `bb` only has the same prefix.
    let mut watch = open(&test_server, &format!("{CONFIG_MAPS}?fieldSelector=metadata.name%3Db")).await;
    assert_eq!(watch.next().await, "ADDED b");
    put(&test_server, "bb", "x", "1").await;
    delete(&test_server, "b").await;
    assert_eq!(watch.next().await, "DELETED b");
}

#[tokio::test]
async fn selector_changes_become_added_and_deleted_events() {
    let test_server = TestServer::start().await;
    let start = put(&test_server, "a", "x", "1").await;
    let mut watch =
        open(&test_server, &format!("{CONFIG_MAPS}?labelSelector=l%3Dy&resourceVersion={start}")).await;
    put(&test_server, "a", "x", "2").await;
    put(&test_server, "a", "y", "2").await;
    put(&test_server, "a", "y", "3").await;
    let change_revision = put(&test_server, "a", "z", "3").await;
    put(&test_server, "b", "y", "1").await;
    assert_eq!([watch.next().await, watch.next().await], ["ADDED a", "MODIFIED a"]);
    let event = watch.next_value().await.unwrap();
    // The object as it last matched, with the revision of the change.
    assert_eq!((event["type"].as_str(), revision(&event)), (Some("DELETED"), change_revision));
    assert_eq!(event["object"]["metadata"]["labels"]["l"], "y");
    assert_eq!(watch.next().await, "ADDED b");
}

#[tokio::test]
async fn initial_events_end_with_a_bookmark() {
    let test_server = TestServer::start().await;
    let written = put(&test_server, "a", "x", "1").await;
    let common =
        "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&labelSelector=l";
    for version in ["", "&resourceVersion=0", &format!("&resourceVersion={written}")] {
        let mut watch = open(&test_server, &format!("{CONFIG_MAPS}?{common}{version}")).await;
        assert_eq!(watch.next().await, "ADDED a", "{version}");
        let end = watch.next_value().await.unwrap();
        assert_eq!(end["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
        assert!(end["type"] == "BOOKMARK" && revision(&end) >= written, "{end}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn bookmarks_follow_interval_and_cache_revision() {
    let test_server = TestServer::start().await;
    let start = put(&test_server, "a", "x", "1").await;
    // PodTemplates never change here.
    let path =
        format!("/api/v1/podtemplates?resourceVersion={start}&allowWatchBookmarks=true&timeoutSeconds=90");
    let mut watch = open(&test_server, &path).await;
    let written = put(&test_server, "a", "x", "2").await;
    test_server.server.cache.wait_until_fresh(written).await.unwrap();
    tokio::time::pause();
    let paused_at = Instant::now();
    for seconds in [60.0, 88.0] {
        let event = watch.next_value().await.unwrap();
        assert_eq!(
            (event["type"].as_str(), revision(&event) >= written),
            (Some("BOOKMARK"), true),
            "{event}"
        );
        assert_eq!(paused_at.elapsed().as_secs_f64().round(), seconds);
    }
    assert_eq!(watch.next().await, "end");
    assert_eq!(paused_at.elapsed().as_secs_f64().round(), 90.0);
}

#[tokio::test]
async fn expired_versions_return_an_error_event() {
    let test_server = TestServer::start().await;
    let written = put(&test_server, "a", "x", "1").await;
    let mut watch = open(&test_server, &format!("{CONFIG_MAPS}?resourceVersion=1")).await;
    // Revision 1 is not too old: the ring has every event.
    assert_eq!(watch.next().await, "ADDED a");
    test_server
        .server
        .shard(api::resource_table::find_resource("", "v1", "configmaps").unwrap())
        .expire_events(Duration::ZERO, crate::cache::EventRetention::default());
    let mut at_floor = open(&test_server, &format!("{CONFIG_MAPS}?resourceVersion={written}")).await;
    let mut too_old = open(&test_server, &format!("{CONFIG_MAPS}?resourceVersion=1")).await;
    assert_eq!(too_old.next().await, format!("ERROR too old resource version: 1 ({written})"));
    assert_eq!(too_old.next().await, "end");
    // A future revision is waited for, and earlier events are skipped.
    let mut future = open(&test_server, &format!("{CONFIG_MAPS}?resourceVersion={}", written + 1)).await;
    put(&test_server, "a", "x", "2").await;
    assert_eq!(at_floor.next().await, "MODIFIED a");
    put(&test_server, "b", "x", "1").await;
    assert_eq!(future.next().await, "ADDED b");
}

#[tokio::test]
async fn tables_name_their_columns_once() {
    let test_server = TestServer::start().await;
    put(&test_server, "a", "x", "1").await;
    let format = Format { output_kind: OutputKind::Table, ..Format::JSON };
    let mut watch = open_as(&test_server, &format!("{CONFIG_MAPS}?labelSelector=l"), format).await.unwrap();
    put(&test_server, "b", "x", "1").await;
    let (first, second) = (watch.next_value().await.unwrap(), watch.next_value().await.unwrap());
    assert_eq!(first["object"]["columnDefinitions"][0]["name"], "Name");
    assert_eq!(first["object"]["rows"][0]["cells"][0], "a");
    assert!(second["object"]["columnDefinitions"].is_null(), "{second}");
    assert_eq!(second["object"]["rows"][0]["object"]["kind"], "PartialObjectMetadata");
    let yaml = Format { media: MediaType::Yaml, ..Format::JSON };
    assert_eq!(open_as(&test_server, CONFIG_MAPS, yaml).await.err().map(|status| status.code), Some(406));
}

#[tokio::test]
async fn shutdown_closes_every_watch() {
    let test_server = TestServer::start().await;
    let mut watch = open(&test_server, &format!("{CONFIG_MAPS}?labelSelector=l")).await;
    test_server.stop.send_replace(true);
    assert_eq!(watch.next().await, "end");
}
