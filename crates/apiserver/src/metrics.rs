//! Metrics of the API server in Prometheus' text format, named as upstream's.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use http::Method;
use parking_lot::Mutex;

use crate::request::{Target, verb};
use crate::server::Server;

#[derive(Default)]
pub struct Metrics {
    requests: Mutex<BTreeMap<RequestLabels, RequestSeries>>,
    read_only: Arc<AtomicI64>,
    mutating: Arc<AtomicI64>,
    watches: Arc<AtomicI64>,
    /// Writers of other components in this process.
    pub extra_metrics: Mutex<Vec<Writer>>,
}

/// Appends metrics in Prometheus' text format.
pub type Writer = Box<dyn Fn(&mut String) + Send + Sync>;

/// The labels that requests are counted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestLabels {
    verb: &'static str,
    group: &'static str,
    version: &'static str,
    resource: &'static str,
    subresource: &'static str,
    scope: &'static str,
}

#[derive(Default)]
struct RequestSeries {
    codes: BTreeMap<u16, u64>,
    /// Requests per bucket: durations up to its upper bound and above the previous one.
    buckets: [u64; DURATION_BUCKETS.len()],
    seconds: f64,
}

/// Upper bounds in seconds; above the last is `+Inf`.
const DURATION_BUCKETS: [f64; 12] = [0.001, 0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 1.0, 2.0, 5.0, 15.0, 60.0];

/// Increments a gauge until it is dropped.
pub struct GaugeGuard(Arc<AtomicI64>);

impl GaugeGuard {
    fn new(counter: &Arc<AtomicI64>) -> GaugeGuard {
        counter.fetch_add(1, Ordering::Relaxed);
        GaugeGuard(counter.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl RequestLabels {
    pub fn of(method: &Method, target: &Target, watch: bool) -> RequestLabels {
        let row = target.resource;
        let subresource = row.subresources.iter().find(|sub| sub.name == target.subresource);
        RequestLabels {
            verb: verb(method, target, watch),
            group: row.group,
            version: row.version,
            resource: row.plural,
            subresource: subresource.map_or("", |sub| sub.name),
            scope: match (target.name.is_empty(), target.namespace.is_empty()) {
                (false, _) => "resource",
                (true, false) => "namespace",
                (true, true) => "cluster",
            },
        }
    }
}

impl Metrics {
    /// Counts a request as in flight until the response is dropped.
    pub fn count_inflight(&self, method: &Method) -> GaugeGuard {
        let reads = matches!(*method, Method::GET | Method::HEAD);
        GaugeGuard::new(if reads { &self.read_only } else { &self.mutating })
    }

    pub fn count_watch(&self) -> GaugeGuard {
        GaugeGuard::new(&self.watches)
    }

    pub fn record_request(&self, label: RequestLabels, code: u16, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let mut requests = self.requests.lock();
        let series = requests.entry(label).or_default();
        *series.codes.entry(code).or_default() += 1;
        series.seconds += seconds;
        if let Some(bucket) = DURATION_BUCKETS.iter().position(|limit| seconds <= *limit) {
            series.buckets[bucket] += 1;
        }
    }

    pub fn print(&self, server: &Server) -> String {
        let mut out = self.print_requests();
        let mut gauge = |name: &str, help: &str, lines: &[(String, f64)]| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
            for (labels, value) in lines {
                let _ = writeln!(out, "{name}{labels} {value}");
            }
        };
        let count = |counter: &AtomicI64| counter.load(Ordering::Relaxed) as f64;
        gauge(
            "apiserver_current_inflight_requests",
            "Number of requests that are currently in flight per request kind, without watches.",
            &[
                ("{request_kind=\"mutating\"}".into(), count(&self.mutating)),
                ("{request_kind=\"readOnly\"}".into(), count(&self.read_only)),
            ],
        );
        gauge(
            "apiserver_longrunning_requests",
            "Gauge of all active long-running apiserver requests broken out by verb. Only watches are counted.",
            &[("{verb=\"WATCH\"}".into(), count(&self.watches))],
        );
        let stored = |row: &'static api::Resource| {
            let dot = if row.group.is_empty() { "" } else { "." };
            let labels = format!("{{resource=\"{}{dot}{}\"}}", row.plural, row.group);
            (labels, server.shard(row).len() as f64)
        };
        let objects: Vec<_> = server.registry.stored().map(stored).collect();
        gauge("apiserver_storage_objects", "Number of stored objects split by kind.", &objects);
        let revision = server.cache.revision() as f64;
        gauge(
            "skiff_store_revision",
            "Latest store revision in the watch cache.",
            &[(String::new(), revision)],
        );
        write_process(&mut out);
        server.flow.print(&mut out);
        server.webhooks.print(&mut out);
        server.policies.print(&mut out);
        server.reload_metrics.print(&mut out);
        if let Some(audit) = &server.audit {
            audit.print(&mut out);
        }
        for write in &*self.extra_metrics.lock() {
            write(&mut out);
        }
        out
    }

    fn print_requests(&self) -> String {
        let requests = self.requests.lock();
        let mut out = String::from(
            "# HELP apiserver_request_total Counter of apiserver requests broken out for each verb, group, version, resource, scope and HTTP response code.\n# TYPE apiserver_request_total counter\n",
        );
        for (label, series) in requests.iter() {
            let labels = label.print();
            for (code, count) in &series.codes {
                let _ = writeln!(out, "apiserver_request_total{{{labels},code=\"{code}\"}} {count}");
            }
        }
        let name = "apiserver_request_duration_seconds";
        let _ = writeln!(
            out,
            "# HELP {name} Response latency distribution in seconds for each verb, group, version, resource, subresource and scope.\n# TYPE {name} histogram"
        );
        for (label, series) in requests.iter() {
            let labels = label.print();
            let mut below = 0;
            for (limit, count) in DURATION_BUCKETS.iter().zip(series.buckets) {
                below += count;
                let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{limit}\"}} {below}");
            }
            let all: u64 = series.codes.values().sum();
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {all}");
            let _ =
                writeln!(out, "{name}_sum{{{labels}}} {}\n{name}_count{{{labels}}} {all}", series.seconds);
        }
        out
    }
}

impl RequestLabels {
    fn print(&self) -> String {
        let RequestLabels { verb, group, version, resource, subresource, scope } = self;
        let verb = verb.to_ascii_uppercase();
        format!(
            "verb=\"{verb}\",group=\"{group}\",version=\"{version}\",resource=\"{resource}\",subresource=\"{subresource}\",scope=\"{scope}\""
        )
    }
}

/// Appends the memory and CPU metrics of this process in Prometheus' text format.
pub fn write_process(out: &mut String) {
    let Some((rss_bytes, cpu)) = process() else { return };
    for (name, help, kind, value) in [
        ("process_resident_memory_bytes", "Resident memory size in bytes.", "gauge", rss_bytes),
        ("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.", "counter", cpu),
    ] {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
    }
}

/// Resident memory in bytes and CPU time in seconds; `None` without `/proc`.
fn process() -> Option<(f64, f64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let rss_text = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let rss_bytes: f64 = rss_text.trim().trim_end_matches(" kB").parse().ok()?;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The command name in parentheses may contain any character, hence the search for the last `)`.
    // utime and stime are the 12th and 13th fields after it, in clock ticks of 1/100 s.
    let times = stat.rsplit(')').next()?.split_whitespace().skip(11).take(2);
    let ticks: f64 = times.filter_map(|text| text.parse::<f64>().ok()).sum();
    Some((rss_bytes * 1024.0, ticks / 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_code_and_time() {
        let metrics = Metrics::default();
        let label =
            RequestLabels { verb: "list", resource: "pods", version: "v1", ..RequestLabels::default() };
        for (code, millis) in [(200, 1), (200, 30), (504, 90_000)] {
            metrics.record_request(label, code, Duration::from_millis(millis));
        }
        let text = metrics.print_requests();
        let labels = "verb=\"LIST\",group=\"\",version=\"v1\",resource=\"pods\",subresource=\"\",scope=\"\"";
        for line in [
            format!("apiserver_request_total{{{labels},code=\"200\"}} 2"),
            format!("apiserver_request_duration_seconds_bucket{{{labels},le=\"0.001\"}} 1"),
            format!("apiserver_request_duration_seconds_bucket{{{labels},le=\"0.05\"}} 2"),
            format!("apiserver_request_duration_seconds_bucket{{{labels},le=\"+Inf\"}} 3"),
            format!("apiserver_request_duration_seconds_sum{{{labels}}} 90.031"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }

    #[test]
    fn gauge_guard_is_released_on_drop() {
        let metrics = Metrics::default();
        let (one, two) = (metrics.count_watch(), metrics.count_watch());
        assert_eq!(metrics.watches.load(Ordering::Relaxed), 2);
        drop((one, two));
        assert_eq!(metrics.watches.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn reads_process_memory_and_cpu_time() {
        let (rss_bytes, _) = process().expect("/proc is readable");
        assert!(rss_bytes > 100_000.0, "{rss_bytes}");
    }
}
