//! What became of asking webhooks, under upstream's names.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use parking_lot::Mutex;

use super::config::Hook;
use super::review::Trouble;
use crate::admission::Operation;

/// Upper bounds in seconds; beyond the last is `+Inf`.
const BUCKETS: [f64; 8] = [0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 25.0];

#[derive(Default)]
pub struct Tally(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    /// By the name of the counter and its labels.
    counters: BTreeMap<(&'static str, String), u64>,
    times: BTreeMap<String, Times>,
}

#[derive(Default)]
struct Times {
    buckets: [u64; BUCKETS.len()],
    count: u64,
    seconds: f64,
}

const REQUESTS: &str = "apiserver_admission_webhook_request_total";
const REJECTIONS: &str = "apiserver_admission_webhook_rejection_count";
const FAIL_OPEN: &str = "apiserver_admission_webhook_fail_open_count";
const EXCLUSIONS: &str = "apiserver_admission_match_condition_exclusions_total";
const UNDECIDED: &str = "apiserver_admission_match_condition_evaluation_errors_total";
const TIMES: &str = "apiserver_admission_webhook_admission_duration_seconds";

const COUNTERS: [(&str, &str); 5] = [
    (EXCLUSIONS, "Requests a webhook's match conditions excluded."),
    (UNDECIDED, "Match conditions that could not be evaluated."),
    (FAIL_OPEN, "Requests let through although a webhook failed."),
    (REJECTIONS, "Requests a webhook rejected, or its failure."),
    (REQUESTS, "Requests to webhooks."),
];

impl Tally {
    pub fn asked(
        &self,
        hook: &Hook,
        step: &'static str,
        operation: Operation,
        took: Duration,
        trouble: Option<&Trouble>,
    ) {
        let (code, error) = match trouble {
            None => (200, None),
            Some(Trouble::Calling { code, .. }) => {
                (*code, (!hook.fails_open).then_some("calling_webhook_error"))
            }
            Some(Trouble::Rejected(status)) => (status.code, Some("no_error")),
            Some(Trouble::Internal(_)) => (0, Some("apiserver_internal_error")),
        };
        let code = code.min(600);
        let (name, operation, rejected) = (&hook.name, operation.word(), error.is_some());
        let mut counts = self.0.lock();
        if let Some(error) = error {
            let labels = format!(
                "error_type=\"{error}\",name=\"{name}\",operation=\"{operation}\",rejection_code=\"{code}\",type=\"{step}\""
            );
            counts.count(REJECTIONS, labels);
        }
        counts.count(
            REQUESTS,
            format!(
                "code=\"{code}\",name=\"{name}\",operation=\"{operation}\",rejected=\"{rejected}\",type=\"{step}\""
            ),
        );
        let labels =
            format!("name=\"{name}\",operation=\"{operation}\",rejected=\"{rejected}\",type=\"{step}\"");
        let times = counts.times.entry(labels).or_default();
        let seconds = took.as_secs_f64();
        times.count += 1;
        times.seconds += seconds;
        if let Some(bucket) = BUCKETS.iter().position(|limit| seconds <= *limit) {
            times.buckets[bucket] += 1;
        }
    }

    pub fn failed_open(&self, hook: &Hook, step: &'static str) {
        self.0.lock().count(FAIL_OPEN, format!("name=\"{}\",type=\"{step}\"", hook.name));
    }

    pub fn excluded(&self, hook: &Hook, step: &'static str, operation: Operation) {
        self.0.lock().count(EXCLUSIONS, condition(hook, step, operation));
    }

    pub fn undecided(&self, hook: &Hook, step: &'static str, operation: Operation) {
        self.0.lock().count(UNDECIDED, condition(hook, step, operation));
    }

    pub fn print(&self, out: &mut String) {
        let counts = self.0.lock();
        for (name, help) in COUNTERS {
            let mut lines = counts.counters.iter().filter(|((counter, _), _)| *counter == name).peekable();
            if lines.peek().is_some() {
                let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter");
            }
            for ((_, labels), count) in lines {
                let _ = writeln!(out, "{name}{{{labels}}} {count}");
            }
        }
        if !counts.times.is_empty() {
            let _ = writeln!(out, "# HELP {TIMES} How long webhooks took.\n# TYPE {TIMES} histogram");
        }
        for (labels, times) in &counts.times {
            let mut below = 0;
            for (limit, count) in BUCKETS.iter().zip(times.buckets) {
                below += count;
                let _ = writeln!(out, "{TIMES}_bucket{{{labels},le=\"{limit}\"}} {below}");
            }
            let Times { count, seconds, .. } = times;
            let _ = writeln!(out, "{TIMES}_bucket{{{labels},le=\"+Inf\"}} {count}");
            let _ = writeln!(out, "{TIMES}_sum{{{labels}}} {seconds}\n{TIMES}_count{{{labels}}} {count}");
        }
    }
}

fn condition(hook: &Hook, step: &str, operation: Operation) -> String {
    let kind = "webhook";
    format!("kind=\"{kind}\",name=\"{}\",operation=\"{}\",type=\"{step}\"", hook.name, operation.word())
}

impl Counts {
    fn count(&mut self, counter: &'static str, labels: String) {
        *self.counters.entry((counter, labels)).or_default() += 1;
    }
}
