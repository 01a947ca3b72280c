//! Counters in Prometheus' text format, under upstream's names.

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
    requests: Mutex<BTreeMap<Label, Series>>,
    reading: Arc<AtomicI64>,
    writing: Arc<AtomicI64>,
    watching: Arc<AtomicI64>,
    /// What the roles in this process count.
    pub roles: Mutex<Vec<Writer>>,
}

/// Appends something in Prometheus' text form.
pub type Writer = Box<dyn Fn(&mut String) + Send + Sync>;

/// What requests are counted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label {
    verb: &'static str,
    group: &'static str,
    version: &'static str,
    resource: &'static str,
    subresource: &'static str,
    scope: &'static str,
}

#[derive(Default)]
struct Series {
    codes: BTreeMap<u16, u64>,
    /// How many took at most as long as the bucket of the same index says, and longer than the one before.
    buckets: [u64; BUCKETS.len()],
    seconds: f64,
}

/// Upper bounds in seconds; beyond the last is `+Inf`.
const BUCKETS: [f64; 12] = [0.001, 0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 1.0, 2.0, 5.0, 15.0, 60.0];

/// Something under way, counted until dropped.
pub struct Counted(Arc<AtomicI64>);

impl Counted {
    fn new(counter: &Arc<AtomicI64>) -> Counted {
        counter.fetch_add(1, Ordering::Relaxed);
        Counted(counter.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Label {
    pub fn of(method: &Method, target: &Target, watch: bool) -> Label {
        let row = target.resource;
        let subresource = row.subresources.iter().find(|sub| sub.name == target.subresource);
        Label {
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
    /// A request is being answered, for as long as the answer lives.
    pub fn answering(&self, method: &Method) -> Counted {
        let reads = matches!(*method, Method::GET | Method::HEAD);
        Counted::new(if reads { &self.reading } else { &self.writing })
    }

    pub fn watching(&self) -> Counted {
        Counted::new(&self.watching)
    }

    pub fn answered(&self, label: Label, code: u16, took: Duration) {
        let seconds = took.as_secs_f64();
        let mut requests = self.requests.lock();
        let series = requests.entry(label).or_default();
        *series.codes.entry(code).or_default() += 1;
        series.seconds += seconds;
        if let Some(bucket) = BUCKETS.iter().position(|limit| seconds <= *limit) {
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
            "Requests being answered now, watches aside.",
            &[
                ("{request_kind=\"mutating\"}".into(), count(&self.writing)),
                ("{request_kind=\"readOnly\"}".into(), count(&self.reading)),
            ],
        );
        gauge(
            "apiserver_longrunning_requests",
            "Watches open now.",
            &[("{verb=\"WATCH\"}".into(), count(&self.watching))],
        );
        let stored = |row: &'static api::Resource| {
            let dot = if row.group.is_empty() { "" } else { "." };
            let labels = format!("{{resource=\"{}{dot}{}\"}}", row.plural, row.group);
            (labels, server.shard(row).len() as f64)
        };
        let objects: Vec<_> = server.registry.stored().map(stored).collect();
        gauge("apiserver_storage_objects", "Objects stored, by kind.", &objects);
        let revision = server.cache.revision() as f64;
        gauge("skiff_store_revision", "The newest revision in the cache.", &[(String::new(), revision)]);
        write_process(&mut out);
        server.flow.print(&mut out);
        server.webhooks.print(&mut out);
        server.policies.print(&mut out);
        server.reloads.print(&mut out);
        if let Some(audit) = &server.audit {
            audit.print(&mut out);
        }
        for write in &*self.roles.lock() {
            write(&mut out);
        }
        out
    }

    fn print_requests(&self) -> String {
        let requests = self.requests.lock();
        let mut out = String::from(
            "# HELP apiserver_request_total Requests by what they asked for and how they ended.\n# TYPE apiserver_request_total counter\n",
        );
        for (label, series) in requests.iter() {
            let labels = label.print();
            for (code, count) in &series.codes {
                let _ = writeln!(out, "apiserver_request_total{{{labels},code=\"{code}\"}} {count}");
            }
        }
        let name = "apiserver_request_duration_seconds";
        let _ = writeln!(out, "# HELP {name} Time until an answer began.\n# TYPE {name} histogram");
        for (label, series) in requests.iter() {
            let labels = label.print();
            let mut below = 0;
            for (limit, count) in BUCKETS.iter().zip(series.buckets) {
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

impl Label {
    fn print(&self) -> String {
        let Label { verb, group, version, resource, subresource, scope } = self;
        let verb = verb.to_ascii_uppercase();
        format!(
            "verb=\"{verb}\",group=\"{group}\",version=\"{version}\",resource=\"{resource}\",subresource=\"{subresource}\",scope=\"{scope}\""
        )
    }
}

/// Appends what this process uses, in Prometheus' text form.
pub fn write_process(out: &mut String) {
    let Some((resident, cpu)) = process() else { return };
    for (name, help, kind, value) in [
        ("process_resident_memory_bytes", "Memory in use.", "gauge", resident),
        ("process_cpu_seconds_total", "Processor time used.", "counter", cpu),
    ] {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
    }
}

/// Resident memory in bytes and processor time in seconds, where the kernel tells.
fn process() -> Option<(f64, f64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let resident: f64 = kilobytes.trim().trim_end_matches(" kB").parse().ok()?;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name in brackets may hold anything; user and system time are the 12th and 13th after it, in
    // hundredths of a second.
    let times = stat.rsplit(')').next()?.split_whitespace().skip(11).take(2);
    let ticks: f64 = times.filter_map(|text| text.parse::<f64>().ok()).sum();
    Some((resident * 1024.0, ticks / 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_code_and_time() {
        let metrics = Metrics::default();
        let label = Label { verb: "list", resource: "pods", version: "v1", ..Label::default() };
        for (code, millis) in [(200, 1), (200, 30), (504, 90_000)] {
            metrics.answered(label, code, Duration::from_millis(millis));
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
    fn what_is_under_way_is_counted_until_it_ends() {
        let metrics = Metrics::default();
        let (one, two) = (metrics.watching(), metrics.watching());
        assert_eq!(metrics.watching.load(Ordering::Relaxed), 2);
        drop((one, two));
        assert_eq!(metrics.watching.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_kernel_tells_memory_and_time() {
        let (resident, _) = process().expect("this is Linux");
        assert!(resident > 100_000.0, "{resident}");
    }
}
