//! Metrics of admission policies, with upstream's names.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use parking_lot::Mutex;

use super::config::{Binding, Policy};
use super::{MUTATING, VALIDATING};

/// Upper bounds in seconds, without `+Inf`.
const DURATION_BUCKETS_SECONDS: [f64; 5] = [0.000_000_5, 0.001, 0.01, 0.1, 1.0];
const FAMILIES: [(usize, &str); 2] = [
    (MUTATING, "apiserver_mutating_admission_policy"),
    (VALIDATING, "apiserver_validating_admission_policy"),
];

/// Values of the label `error_type`.
pub const NO_ERROR: &str = "no_error";
pub const INVALID_ERROR: &str = "invalid_error";
pub const COMPILE_ERROR: &str = "compile_error";
pub const OUT_OF_BUDGET: &str = "out_of_budget";

/// By policy type and labels.
#[derive(Default)]
pub struct PolicyMetrics(Mutex<BTreeMap<(usize, String), PolicyDurationHistogram>>);

#[derive(Default)]
struct PolicyDurationHistogram {
    buckets: [u64; DURATION_BUCKETS_SECONDS.len()],
    count: u64,
    seconds: f64,
}

impl PolicyMetrics {
    /// Records one evaluation; the action is `allow`, `deny`, `audit` or `warn`.
    pub fn observe(
        &self,
        phase: usize,
        (policy, binding): (&Policy, &Binding),
        elapsed: Duration,
        (error, action): (&str, &str),
    ) {
        let labels = format!(
            "enforcement_action=\"{action}\",error_type=\"{error}\",policy=\"{}\",policy_binding=\"{}\"",
            policy.name, binding.name
        );
        let mut counts = self.0.lock();
        let times = counts.entry((phase, labels)).or_default();
        let seconds = elapsed.as_secs_f64();
        times.count += 1;
        times.seconds += seconds;
        if let Some(bucket) = DURATION_BUCKETS_SECONDS.iter().position(|limit| seconds <= *limit) {
            times.buckets[bucket] += 1;
        }
    }

    pub fn print(&self, out: &mut String) {
        let counts = self.0.lock();
        for (phase, family) in FAMILIES {
            let rows = || counts.iter().filter(|((of, _), _)| *of == phase);
            if rows().next().is_none() {
                continue;
            }
            let name = format!("{family}_check_total");
            let _ = writeln!(
                out,
                "# HELP {name} Policy evaluations by policy, binding and enforcement action.\n# TYPE {name} counter"
            );
            for ((_, labels), times) in rows() {
                let _ = writeln!(out, "{name}{{{labels}}} {}", times.count);
            }
            let name = format!("{family}_check_duration_seconds");
            let _ = writeln!(
                out,
                "# HELP {name} Latency of policy evaluations in seconds.\n# TYPE {name} histogram"
            );
            for ((_, labels), times) in rows() {
                let mut bucket_total = 0;
                for (limit, count) in DURATION_BUCKETS_SECONDS.iter().zip(times.buckets) {
                    bucket_total += count;
                    let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{limit}\"}} {bucket_total}");
                }
                let PolicyDurationHistogram { count, seconds, .. } = times;
                let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
                let _ = writeln!(out, "{name}_sum{{{labels}}} {seconds}\n{name}_count{{{labels}}} {count}");
            }
        }
    }
}
