use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use client::{Connection, Watch};
use http::{Request, Response};
use serde_json::{Value as Json, json};

use super::*;

/// A fake API server that serves these paths only.
struct FakeServer(Vec<(&'static str, Json)>);

#[async_trait]
impl Connection for FakeServer {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        let path = request.uri().to_string();
        let (code, body) = match self.0.iter().find(|(known, _)| *known == path) {
            Some((_, body)) => (200, body.clone()),
            None => (404, json!({"kind": "Status", "reason": "NotFound", "message": NOT_FOUND_MESSAGE})),
        };
        Ok(Response::builder().status(code).body(Bytes::from(body.to_string())).expect("a response"))
    }

    async fn watch(&self, _: &str) -> Result<Box<dyn Watch>, Error> {
        unreachable!("this test starts no watches")
    }

    fn impersonate(&self, _: &str) -> Option<Arc<dyn Connection>> {
        None
    }
}

#[track_caller]
fn check(served: Vec<(&'static str, Json)>, metric: Json, expected: Result<&str, &str>) {
    let client = Client::new(Arc::new(FakeServer(served)), "test");
    let metric: MetricSpec = serde_json::from_value(metric).expect("a metric");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let rendered =
        runtime.block_on(fetch_metric(&client, "d", "app=web", &metric)).map(|reading| match reading {
            MetricValues::Total(total) => format!("total {total}"),
            MetricValues::Pods(pods) => {
                let rendered = |(name, sample): (&String, &PodMetric)| {
                    format!("{name} {} over {}s", sample.value, sample.window.as_secs())
                };
                pods.iter().map(rendered).collect::<Vec<_>>().join(", ")
            }
        });
    assert_eq!(rendered, expected.map(str::to_owned).map_err(str::to_owned));
}

const AT: &str = "2026-01-01T12:00:00Z";
const TARGET: &str = "1";

#[test]
fn resource_metric_is_sum_of_container_usage() {
    let cpu = json!({"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization"}}});
    let path = "/apis/metrics.k8s.io/v1beta1/namespaces/d/pods?labelSelector=app%3Dweb";
    let container = |name: &str, cpu: &str| json!({"name": name, "usage": {"cpu": cpu, "memory": "1Ki"}});
    let pods = json!({"items": [
        {"metadata": {"name": "a"}, "timestamp": AT, "window": "1m0s",
            "containers": [container("x", "1500u"), container("y", "10m")]},
        // Pod b is skipped: one of its containers has no usage.
        {"metadata": {"name": "b"}, "timestamp": AT, "window": "15s",
            "containers": [container("x", "5m"), {"name": "y", "usage": {}}]},
        {"metadata": {"name": "c"}, "timestamp": AT, "window": "15s", "containers": []}]});
    check(vec![(path, pods.clone())], cpu.clone(), Ok("a 12 over 60s"));
    let one = json!({"type": "ContainerResource",
        "containerResource": {"name": "cpu", "container": "x", "target": {"type": "Utilization"}}});
    check(vec![(path, pods)], one, Ok("a 2 over 60s, b 5 over 15s"));
    let none = Err("no metrics returned from resource metrics API");
    check(vec![(path, json!({"items": []}))], cpu.clone(), none);
    let absent = "unable to fetch metrics from resource metrics API: \
                  the server could not find the requested resource (get pods.metrics.k8s.io)";
    check(vec![], cpu, Err(absent));
}

#[test]
fn requests_custom_metrics_in_served_version() {
    let group = ("/apis/custom.metrics.k8s.io", json!({"versions": [{"version": "v1beta1"}]}));
    let value = |name: &str, value: &str| json!({"describedObject": {"name": name}, "timestamp": AT, "window": 30, "value": value});
    let metric = json!({"name": "load", "selector": {"matchLabels": {"verb": "GET"}}});
    let of_pods = json!({"type": "Pods", "pods": {"metric": metric, "target": {"type": "AverageValue"}}});
    let path = "/apis/custom.metrics.k8s.io/v1beta1/namespaces/d/pods/*/load\
                ?labelSelector=app%3Dweb&metricLabelSelector=verb%3DGET";
    let values = json!({"items": [value("a", "3"), value("b", "500m")]});
    check(vec![group.clone(), (path, values)], of_pods.clone(), Ok("a 3000 over 30s, b 500 over 30s"));
    let absent = "unable to fetch metrics from custom metrics API: \
                  no custom metrics API (custom.metrics.k8s.io) registered";
    check(vec![], of_pods, Err(absent));

    let kinds = json!({"resources": [{"name": "ingresses", "kind": "Ingress", "namespaced": true}]});
    let kinds = ("/apis/networking.k8s.io/v1", kinds);
    let object = json!({"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "name": "in"});
    let source = |object: Json| {
        let target = json!({"type": "Value", "value": TARGET});
        json!({"type": "Object",
            "object": {"metric": {"name": "load"}, "describedObject": object, "target": target}})
    };
    let path = "/apis/custom.metrics.k8s.io/v1beta1/namespaces/d/ingresses.networking.k8s.io/in/load";
    let served = vec![group.clone(), kinds, (path, json!({"items": [value("in", "7")]}))];
    check(served, source(object), Ok("total 7000"));
    let path = "/apis/custom.metrics.k8s.io/v1beta1/namespaces/d/metrics/load";
    let served = vec![group, (path, json!({"items": [value("d", "9")]}))];
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "name": "other"});
    check(served, source(namespace), Ok("total 9000"));
}

#[test]
fn external_metric_is_sum_of_values() {
    let path = "/apis/external.metrics.k8s.io/v1beta1/namespaces/d/queue";
    let value = |value: &str| json!({"metricName": "queue", "timestamp": AT, "value": value});
    let target = json!({"type": "Value", "value": TARGET});
    let metric = json!({"type": "External", "external": {"metric": {"name": "queue"}, "target": target}});
    let values = json!({"items": [value("3"), value("1500m")]});
    check(vec![(path, values)], metric.clone(), Ok("total 4500"));
    let absent = "unable to fetch metrics from external metrics API: \
                  the server could not find the requested resource (get queue.external.metrics.k8s.io)";
    check(vec![], metric, Err(absent));
}

#[test]
fn parse_go_duration_format() {
    let read = |text| parse_go_duration(text).map(|duration| duration.as_millis());
    assert_eq!(read("30s"), Some(30_000));
    assert_eq!(read("1m30.5s"), Some(90_500));
    assert_eq!(read("1h0m0s"), Some(3_600_000));
    assert_eq!(read("250ms"), Some(250));
    assert_eq!(read("3x"), None);
    assert_eq!(read("3"), None);
}

#[test]
fn encodes_selectors_in_query() {
    let selector =
        serde_json::from_value(serde_json::json!({"matchLabels": {"a": "b"}, "matchExpressions": [
        {"key": "c", "operator": "In", "values": ["d", "e"]}, {"key": "f", "operator": "DoesNotExist"}]}));
    let text = metric_selector(selector.ok().as_ref());
    assert_eq!(text, "a=b,c in (d,e),!f");
    assert_eq!(
        encode_query(&[("x", ""), ("labelSelector", &text)]),
        "?labelSelector=a%3Db%2Cc%20in%20%28d%2Ce%29%2C%21f"
    );
    assert_eq!(encode_query(&[]), "");
}
