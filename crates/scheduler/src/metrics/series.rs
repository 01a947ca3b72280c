//! Counters, gauges and histograms by their labels, and how Prometheus reads them.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

/// Something that is counted: a row of [`super::table`].
pub struct Metric {
    pub name: &'static str,
    pub kind: Kind,
    /// In the order of the alphabet.
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

/// What is kept of a metric.
pub enum Kind {
    Counter,
    Gauge,
    Histogram(Buckets),
}

/// Upper bounds of a histogram: a first one, and each of the others that many times the one before.
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

/// A label's value. Cheap to make, since most are known beforehand.
#[derive(Clone, Debug)]
pub enum Word {
    Fixed(&'static str),
    Given(Arc<str>),
}

/// The values of a metric's labels; what is left over is empty.
pub type Words = [Word; 3];

/// No label.
pub const NONE: Word = Word::Fixed("");

impl Deref for Word {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Word::Fixed(word) => word,
            Word::Given(word) => word,
        }
    }
}

impl PartialEq for Word {
    fn eq(&self, other: &Word) -> bool {
        **self == **other
    }
}

impl Eq for Word {}

impl PartialOrd for Word {
    fn partial_cmp(&self, other: &Word) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Word {
    fn cmp(&self, other: &Word) -> Ordering {
        (**self).cmp(&**other)
    }
}

impl Hash for Word {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

/// Everything that is counted.
#[derive(Default)]
pub struct Series(Mutex<HashMap<(&'static str, Words), Sample>>);

struct Sample {
    metric: &'static Metric,
    /// Of a counter or a gauge, its value.
    count: u64,
    sum: f64,
    buckets: Box<[u64]>,
}

impl Series {
    fn change(&self, metric: &'static Metric, words: Words, change: impl FnOnce(&mut Sample)) {
        let mut all = self.0.lock();
        change(all.entry((metric.name, words)).or_insert_with(|| {
            let buckets = match &metric.kind {
                Kind::Histogram(buckets) => buckets.count,
                _ => 0,
            };
            Sample { metric, count: 0, sum: 0.0, buckets: vec![0; buckets].into() }
        }));
    }

    /// Counts one more.
    pub fn add(&self, metric: &'static Metric, words: Words) {
        self.change(metric, words, |sample| sample.count += 1);
    }

    /// Says how many there are.
    pub fn set(&self, metric: &'static Metric, words: Words, value: u64) {
        self.change(metric, words, |sample| sample.count = value);
    }

    /// Takes a value into a histogram.
    pub fn observe(&self, metric: &'static Metric, words: Words, value: f64) {
        self.change(metric, words, |sample| {
            if let Kind::Histogram(buckets) = &metric.kind
                && let Some(at) = buckets.bounds().position(|bound| value <= bound)
            {
                sample.buckets[at] += 1;
            }
            sample.sum += value;
            sample.count += 1;
        });
    }

    /// Appends everything in Prometheus' text form.
    pub fn write(&self, out: &mut String) {
        let all = self.0.lock();
        let mut sorted: Vec<_> = all.iter().collect();
        sorted.sort_unstable_by_key(|(key, _)| *key);
        let mut last = "";
        for ((name, words), sample) in sorted {
            if last != *name {
                begin(out, sample.metric);
                last = name;
            }
            sample.write(out, words);
        }
    }
}

impl Sample {
    fn write(&self, out: &mut String, words: &Words) {
        let name = self.metric.name;
        let mut labels = String::new();
        for (label, word) in self.metric.labels.iter().zip(words) {
            let comma = if labels.is_empty() { "" } else { "," };
            let _ = write!(labels, "{comma}{label}=\"{}\"", &**word);
        }
        let braced = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let Kind::Histogram(buckets) = &self.metric.kind else {
            let _ = writeln!(out, "{name}{braced} {}", self.count);
            return;
        };
        let comma = if labels.is_empty() { "" } else { "," };
        let mut below = 0;
        for (bound, count) in buckets.bounds().zip(&self.buckets) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{}\"}} {below}", shown(bound));
        }
        let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum{braced} {}", self.sum);
        let _ = writeln!(out, "{name}_count{braced} {}", self.count);
    }
}

/// Says what comes next.
fn begin(out: &mut String, metric: &Metric) {
    let kind = match metric.kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram(_) => "histogram",
    };
    let _ = writeln!(out, "# HELP {} {}\n# TYPE {} {kind}", metric.name, metric.help, metric.name);
}

/// A bound as upstream writes it, so that series of both have the same labels.
fn shown(bound: f64) -> String {
    if bound >= 1e-4 {
        return bound.to_string();
    }
    let text = format!("{bound:e}");
    match text.split_once("e-") {
        Some((digits, exponent)) => format!("{digits}e-{exponent:0>2}"),
        None => text,
    }
}
