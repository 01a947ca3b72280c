//! Counters, gauges and histograms with labels, and the Prometheus text format.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

/// Definition of a metric; see [`super::table`].
pub struct Metric {
    pub name: &'static str,
    pub kind: MetricKind,
    /// Label names, sorted.
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

/// The type of a metric.
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram(Buckets),
}

/// Exponential bucket bounds: each bound is the previous one times `factor`.
pub struct Buckets {
    pub first: f64,
    pub factor: f64,
    pub count: usize,
}

impl Buckets {
    fn bounds(&self) -> impl Iterator<Item = f64> {
        std::iter::successors(Some(self.first), |bound| Some(bound * self.factor)).take(self.count)
    }
}

/// A label value. Most are static, so cloning is cheap.
#[derive(Clone, Debug)]
pub enum LabelValue {
    Static(&'static str),
    Shared(Arc<str>),
}

/// The label values of a sample; unused ones are empty.
pub type LabelValues = [LabelValue; 3];

/// Value of an unused label.
pub const NO_LABEL: LabelValue = LabelValue::Static("");

impl Deref for LabelValue {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            LabelValue::Static(label_value) => label_value,
            LabelValue::Shared(label_value) => label_value,
        }
    }
}

impl PartialEq for LabelValue {
    fn eq(&self, other: &LabelValue) -> bool {
        **self == **other
    }
}

impl Eq for LabelValue {}

impl PartialOrd for LabelValue {
    fn partial_cmp(&self, other: &LabelValue) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for LabelValue {
    fn cmp(&self, other: &LabelValue) -> Ordering {
        (**self).cmp(&**other)
    }
}

impl Hash for LabelValue {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

/// All samples.
#[derive(Default)]
pub struct Series(Mutex<HashMap<(&'static str, LabelValues), Sample>>);

struct Sample {
    metric: &'static Metric,
    /// Value of a counter or gauge, or the number of observations of a histogram.
    count: u64,
    sum: f64,
    buckets: Box<[u64]>,
}

impl Series {
    fn update(&self, metric: &'static Metric, label_values: LabelValues, change: impl FnOnce(&mut Sample)) {
        let mut all = self.0.lock();
        change(all.entry((metric.name, label_values)).or_insert_with(|| {
            let buckets = match &metric.kind {
                MetricKind::Histogram(buckets) => buckets.count,
                _ => 0,
            };
            Sample { metric, count: 0, sum: 0.0, buckets: vec![0; buckets].into() }
        }));
    }

    /// Increments a counter.
    pub fn add(&self, metric: &'static Metric, label_values: LabelValues) {
        self.update(metric, label_values, |sample| sample.count += 1);
    }

    /// Sets a gauge.
    pub fn set(&self, metric: &'static Metric, label_values: LabelValues, value: u64) {
        self.update(metric, label_values, |sample| sample.count = value);
    }

    /// Adds an observation to a histogram.
    pub fn observe(&self, metric: &'static Metric, label_values: LabelValues, value: f64) {
        self.update(metric, label_values, |sample| {
            if let MetricKind::Histogram(buckets) = &metric.kind
                && let Some(at) = buckets.bounds().position(|bound| value <= bound)
            {
                sample.buckets[at] += 1;
            }
            sample.sum += value;
            sample.count += 1;
        });
    }

    /// Appends all samples in the Prometheus text format.
    pub fn write(&self, out: &mut String) {
        let all = self.0.lock();
        let mut sorted: Vec<_> = all.iter().collect();
        sorted.sort_unstable_by_key(|(key, _)| *key);
        let mut last = "";
        for ((name, label_values), sample) in sorted {
            if last != *name {
                write_header(out, sample.metric);
                last = name;
            }
            sample.write(out, label_values);
        }
    }
}

impl Sample {
    fn write(&self, out: &mut String, label_values: &LabelValues) {
        let name = self.metric.name;
        let mut labels = String::new();
        for (label, label_value) in self.metric.labels.iter().zip(label_values) {
            let comma = if labels.is_empty() { "" } else { "," };
            let _ = write!(labels, "{comma}{label}=\"{}\"", &**label_value);
        }
        let braced = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let MetricKind::Histogram(buckets) = &self.metric.kind else {
            let _ = writeln!(out, "{name}{braced} {}", self.count);
            return;
        };
        let comma = if labels.is_empty() { "" } else { "," };
        let mut below = 0;
        for (bound, count) in buckets.bounds().zip(&self.buckets) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{}\"}} {below}", format_bound(bound));
        }
        let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum{braced} {}", self.sum);
        let _ = writeln!(out, "{name}_count{braced} {}", self.count);
    }
}

/// Writes the HELP and TYPE lines of a metric.
fn write_header(out: &mut String, metric: &Metric) {
    let kind = match metric.kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
        MetricKind::Histogram(_) => "histogram",
    };
    let _ = writeln!(out, "# HELP {} {}\n# TYPE {} {kind}", metric.name, metric.help, metric.name);
}

/// Formats a bucket bound as Go does, so that `le` labels match upstream's.
fn format_bound(bound: f64) -> String {
    if bound >= 1e-4 {
        return bound.to_string();
    }
    let text = format!("{bound:e}");
    match text.split_once("e-") {
        Some((digits, exponent)) => format!("{digits}e-{exponent:0>2}"),
        None => text,
    }
}
