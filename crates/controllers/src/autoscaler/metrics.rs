//! Client for the metrics APIs: `metrics.k8s.io`, `custom.metrics.k8s.io` and `external.metrics.k8s.io`.
//!
//! Upstream: `pkg/controller/podautoscaler/metrics` and the clients in `k8s.io/metrics`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use http::Method;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::MetricSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use reconcile::{Client, Error};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::plan::{MetricValues, PodMetric};
use crate::scale;

/// The window of a custom metric that does not specify one.
const DEFAULT_METRIC_WINDOW: SignedDuration = SignedDuration::from_mins(1);

/// Fetches a metric of an autoscaler in `namespace` for the pods that `selector` matches.
pub async fn fetch_metric(
    client: &Client,
    namespace: &str,
    selector: &str,
    metric: &MetricSpec,
) -> Result<MetricValues, String> {
    match metric.type_.as_str() {
        "Resource" => {
            let name = metric.resource.as_ref().map_or("", |source| &source.name);
            fetch_resource_metric(client, namespace, selector, name, None).await
        }
        "ContainerResource" => {
            let source = metric.container_resource.as_ref();
            let name = source.map_or("", |source| &source.name);
            let container = source.map(|source| source.container.as_str());
            fetch_resource_metric(client, namespace, selector, name, container).await
        }
        "Pods" => {
            let source = metric.pods.clone().unwrap_or_default();
            let wrap_error = |error| format!("unable to fetch metrics from custom metrics API: {error}");
            let version = custom_metrics_version(client).await.map_err(wrap_error)?;
            let (name, of_metric) = (&source.metric.name, metric_selector(source.metric.selector.as_ref()));
            let path = format!(
                "/apis/{CUSTOM_METRICS_GROUP}/{version}/namespaces/{namespace}/pods/*/{name}{}",
                encode_query(&[("labelSelector", selector), ("metricLabelSelector", &of_metric)])
            );
            let what = format!("pods.{CUSTOM_METRICS_GROUP} *");
            let list: List<MetricValue> = fetch(client, &path, &what).await.map_err(wrap_error)?;
            if list.items.is_empty() {
                return Err("no metrics returned from custom metrics API".to_owned());
            }
            Ok(MetricValues::Pods(list.items.into_iter().map(MetricValue::into_sample).collect()))
        }
        "Object" => {
            let source = metric.object.clone().unwrap_or_default();
            let wrap_error = |error| format!("unable to fetch metrics from custom metrics API: {error}");
            let version = custom_metrics_version(client).await.map_err(wrap_error)?;
            let (object, name) = (&source.described_object, &source.metric.name);
            let api_version = object.api_version.as_deref().unwrap_or("v1");
            let object_path = if object.kind == "Namespace" && !api_version.contains('/') {
                format!("namespaces/{namespace}/metrics/{name}")
            } else {
                let kind = scale::find_kind(client, api_version, &object.kind).await;
                let kind = kind.map_err(|error| wrap_error(error.to_string()))?.ok_or_else(|| {
                    wrap_error(format!("no matches for kind {:?} in version {api_version:?}", object.kind))
                })?;
                let kind = scale::group_resource(&kind);
                format!("namespaces/{namespace}/{kind}/{}/{name}", object.name)
            };
            let of_metric = metric_selector(source.metric.selector.as_ref());
            let query = encode_query(&[("metricLabelSelector", &of_metric)]);
            let what = format!("{}.{CUSTOM_METRICS_GROUP} {}", object.kind.to_lowercase(), object.name);
            let path = format!("/apis/{CUSTOM_METRICS_GROUP}/{version}/{object_path}{query}");
            let list: List<MetricValue> = fetch(client, &path, &what).await.map_err(wrap_error)?;
            let [value] = &list.items[..] else {
                return Err(wrap_error(
                    "the custom metrics API server returned no or many results".to_owned(),
                ));
            };
            Ok(MetricValues::Total(milli(&value.value)))
        }
        "External" => {
            let source = metric.external.clone().unwrap_or_default();
            let wrap_error = |error| format!("unable to fetch metrics from external metrics API: {error}");
            let (name, selector) = (&source.metric.name, metric_selector(source.metric.selector.as_ref()));
            let query = encode_query(&[("labelSelector", &selector)]);
            let path = format!("/apis/{EXTERNAL_METRICS_GROUP}/v1beta1/namespaces/{namespace}/{name}{query}");
            let list: List<MetricValue> = fetch(client, &path, &format!("{name}.{EXTERNAL_METRICS_GROUP}"))
                .await
                .map_err(wrap_error)?;
            if list.items.is_empty() {
                return Err("no metrics returned from external metrics API".to_owned());
            }
            let values = list.items.iter().map(|value| milli(&value.value));
            Ok(MetricValues::Total(values.fold(0, i64::saturating_add)))
        }
        other => Err(format!("unknown metric source type {other:?}")),
    }
}

const NOT_FOUND_MESSAGE: &str = "the server could not find the requested resource";
const CUSTOM_METRICS_GROUP: &str = "custom.metrics.k8s.io";
const EXTERNAL_METRICS_GROUP: &str = "external.metrics.k8s.io";

#[derive(Deserialize)]
struct List<T> {
    #[serde(default = "Vec::new")]
    items: Vec<T>,
}

#[derive(Deserialize)]
struct PodMetrics {
    metadata: ObjectName,
    timestamp: Timestamp,
    #[serde(default)]
    window: String,
    #[serde(default)]
    containers: Vec<ContainerMetrics>,
}

#[derive(Deserialize)]
struct ContainerMetrics {
    name: String,
    #[serde(default)]
    usage: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
struct ObjectName {
    #[serde(default)]
    name: String,
}

/// An item of a custom or external metrics list.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetricValue {
    #[serde(default)]
    described_object: ObjectName,
    timestamp: Timestamp,
    #[serde(alias = "window")]
    window_seconds: Option<i64>,
    value: String,
}

impl MetricValue {
    fn into_sample(self) -> (String, PodMetric) {
        let window = self.window_seconds.map_or(DEFAULT_METRIC_WINDOW, SignedDuration::from_secs);
        (self.described_object.name, PodMetric { value: milli(&self.value), at: self.timestamp, window })
    }
}

async fn fetch_resource_metric(
    client: &Client,
    namespace: &str,
    selector: &str,
    resource: &str,
    container: Option<&str>,
) -> Result<MetricValues, String> {
    let query = encode_query(&[("labelSelector", selector)]);
    let path = format!("/apis/metrics.k8s.io/v1beta1/namespaces/{namespace}/pods{query}");
    let list: List<PodMetrics> = fetch(client, &path, "pods.metrics.k8s.io")
        .await
        .map_err(|error| format!("unable to fetch metrics from resource metrics API: {error}"))?;
    if list.items.is_empty() {
        return Err("no metrics returned from resource metrics API".to_owned());
    }
    let sample = |pod: PodMetrics| {
        let selected = |other: &&ContainerMetrics| container.is_none_or(|selected| selected == other.name);
        let usages = pod.containers.iter().filter(selected).map(|container| container.usage.get(resource));
        let usages: Vec<&String> = usages.collect::<Option<_>>()?;
        let value = usages.iter().map(|usage| milli(usage)).fold(0, i64::saturating_add);
        let window = parse_go_duration(&pod.window).unwrap_or(SignedDuration::ZERO);
        let sample = PodMetric { value, at: pod.timestamp, window };
        (!usages.is_empty()).then_some((pod.metadata.name, sample))
    };
    Ok(MetricValues::Pods(list.items.into_iter().filter_map(sample).collect()))
}

/// The preferred version of the custom metrics API that the server has.
async fn custom_metrics_version(client: &Client) -> Result<String, String> {
    #[derive(Deserialize)]
    struct Group {
        versions: Vec<Version>,
    }
    #[derive(Deserialize)]
    struct Version {
        version: String,
    }
    let none = || format!("no custom metrics API ({CUSTOM_METRICS_GROUP}) registered");
    let path = format!("/apis/{CUSTOM_METRICS_GROUP}");
    let group: Group = match client.request(Method::GET, &path, None).await {
        Ok(group) => serde_json::from_value(group).map_err(|error| error.to_string())?,
        Err(error) if error.code() == 404 => return Err(none()),
        Err(error) => return Err(error.to_string()),
    };
    let has = |selected: &str| group.versions.iter().any(|version| version.version == selected);
    let known = ["v1beta2", "v1beta1"].into_iter().find(|version| has(version));
    known.map(str::to_owned).ok_or_else(none)
}

/// Fetches `path`. `what` names the object in error messages.
async fn fetch<T: DeserializeOwned>(client: &Client, path: &str, what: &str) -> Result<T, String> {
    match client.request(Method::GET, path, None).await {
        Ok(value) => serde_json::from_value(value).map_err(|error| error.to_string()),
        // The API path is not served, as opposed to a metric that does not exist.
        Err(error)
            if error.code() == 404
                && (error.reason() != "NotFound" || error.to_string() == NOT_FOUND_MESSAGE) =>
        {
            Err(format!("{NOT_FOUND_MESSAGE} (get {what})"))
        }
        Err(Error::Api(failure)) if failure.code == 503 && failure.reason.is_empty() => {
            Err(format!("the server is currently unable to handle the request (get {what})"))
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Formats a label selector for a query string. A missing selector yields `""`.
fn metric_selector(selector: Option<&LabelSelector>) -> String {
    let Some(selector) = selector else { return String::new() };
    let mut terms: Vec<String> = Vec::new();
    for (name, value) in selector.match_labels.iter().flatten() {
        terms.push(format!("{name}={value}"));
    }
    for term in selector.match_expressions.iter().flatten() {
        let values = term.values.iter().flatten().map(String::as_str).collect::<Vec<_>>().join(",");
        terms.push(match term.operator.as_str() {
            "In" => format!("{} in ({values})", term.key),
            "NotIn" => format!("{} notin ({values})", term.key),
            "Exists" => term.key.clone(),
            _ => format!("!{}", term.key),
        });
    }
    terms.join(",")
}

fn encode_query(parameters: &[(&str, &str)]) -> String {
    let mut query = String::new();
    for (name, value) in parameters.iter().filter(|(_, value)| !value.is_empty()) {
        let _ = write!(query, "{}{name}=", if query.is_empty() { '?' } else { '&' });
        for byte in value.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    query.push(char::from(byte))
                }
                _ => _ = write!(query, "%{byte:02X}"),
            }
        }
    }
    query
}

fn milli(quantity: &str) -> i64 {
    api::quantity::Quantity::parse(quantity).map_or(0, |quantity| quantity.milli())
}

/// Parses a duration in Go's format, for example `1m30s`.
fn parse_go_duration(text: &str) -> Option<SignedDuration> {
    let (mut total, mut number) = (0.0, String::new());
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter.is_ascii_digit() || letter == '.' {
            number.push(letter);
            continue;
        }
        let seconds: f64 = match (letter, letters.peek()) {
            ('m', Some('s')) => 1e-3,
            ('u' | 'µ', Some('s')) => 1e-6,
            ('n', Some('s')) => 1e-9,
            ('h', _) => 3600.0,
            ('m', _) => 60.0,
            ('s', _) => 1.0,
            _ => return None,
        };
        if seconds < 1.0 {
            letters.next();
        }
        total += number.parse::<f64>().ok()? * seconds;
        number.clear();
    }
    number.is_empty().then(|| SignedDuration::try_from_secs_f64(total).ok()).flatten()
}

#[cfg(test)]
mod tests;
