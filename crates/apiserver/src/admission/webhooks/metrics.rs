//! Metrics of admission webhooks, with upstream's names.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use parking_lot::Mutex;

use super::config::Hook;
use super::review::WebhookError;
use crate::admission::Operation;

/// Upper bounds in seconds, without `+Inf`.
const DURATION_BUCKETS_SECONDS: [f64; 8] = [0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 25.0];

#[derive(Default)]
pub struct WebhookMetrics(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    /// By metric name and labels.
    counters: BTreeMap<(&'static str, String), u64>,
    times: BTreeMap<String, WebhookDurationHistogram>,
}

#[derive(Default)]
struct WebhookDurationHistogram {
    buckets: [u64; DURATION_BUCKETS_SECONDS.len()],
    count: u64,
    seconds: f64,
}

const REQUESTS: &str = "apiserver_admission_webhook_request_total";
const REJECTION_COUNT: &str = "apiserver_admission_webhook_rejection_count";
const FAIL_OPEN: &str = "apiserver_admission_webhook_fail_open_count";
const MATCH_CONDITION_EXCLUSION_TOTAL: &str = "apiserver_admission_match_condition_exclusions_total";
const MATCH_CONDITION_ERROR_TOTAL: &str = "apiserver_admission_match_condition_evaluation_errors_total";
const DURATION_SECONDS: &str = "apiserver_admission_webhook_admission_duration_seconds";

const COUNTERS: [(&str, &str); 5] = [
    (MATCH_CONDITION_EXCLUSION_TOTAL, "Requests excluded by the match conditions of a webhook."),
    (MATCH_CONDITION_ERROR_TOTAL, "Match conditions that could not be evaluated."),
    (FAIL_OPEN, "Requests allowed because a failing webhook has failurePolicy Ignore."),
    (REJECTION_COUNT, "Requests rejected by a webhook or because of its failure."),
    (REQUESTS, "Requests to webhooks."),
];

impl WebhookMetrics {
    pub fn observe(
        &self,
        hook: &Hook,
        step: &'static str,
        operation: Operation,
        elapsed: Duration,
        webhook_error: Option<&WebhookError>,
    ) {
        let (code, error) = match webhook_error {
            None => (200, None),
            Some(WebhookError::CallFailed { code, .. }) => {
                (*code, (!hook.fails_open).then_some("calling_webhook_error"))
            }
            Some(WebhookError::Rejected(status)) => (status.code, Some("no_error")),
            Some(WebhookError::Internal(_)) => (0, Some("apiserver_internal_error")),
        };
        let code = code.min(600);
        let (name, operation, rejected) = (&hook.name, operation.as_str(), error.is_some());
        let mut counts = self.0.lock();
        if let Some(error) = error {
            let labels = format!(
                "error_type=\"{error}\",name=\"{name}\",operation=\"{operation}\",rejection_code=\"{code}\",type=\"{step}\""
            );
            counts.count(REJECTION_COUNT, labels);
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
        let seconds = elapsed.as_secs_f64();
        times.count += 1;
        times.seconds += seconds;
        if let Some(bucket) = DURATION_BUCKETS_SECONDS.iter().position(|limit| seconds <= *limit) {
            times.buckets[bucket] += 1;
        }
    }

    pub fn record_failed_open(&self, hook: &Hook, step: &'static str) {
        self.0.lock().count(FAIL_OPEN, format!("name=\"{}\",type=\"{step}\"", hook.name));
    }

    pub fn record_excluded(&self, hook: &Hook, step: &'static str, operation: Operation) {
        self.0.lock().count(MATCH_CONDITION_EXCLUSION_TOTAL, condition_labels(hook, step, operation));
    }

    pub fn record_condition_error(&self, hook: &Hook, step: &'static str, operation: Operation) {
        self.0.lock().count(MATCH_CONDITION_ERROR_TOTAL, condition_labels(hook, step, operation));
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
            let _ = writeln!(
                out,
                "# HELP {DURATION_SECONDS} Latency of webhook calls in seconds.\n# TYPE {DURATION_SECONDS} histogram"
            );
        }
        for (labels, times) in &counts.times {
            let mut bucket_total = 0;
            for (limit, count) in DURATION_BUCKETS_SECONDS.iter().zip(times.buckets) {
                bucket_total += count;
                let _ = writeln!(out, "{DURATION_SECONDS}_bucket{{{labels},le=\"{limit}\"}} {bucket_total}");
            }
            let WebhookDurationHistogram { count, seconds, .. } = times;
            let _ = writeln!(out, "{DURATION_SECONDS}_bucket{{{labels},le=\"+Inf\"}} {count}");
            let _ = writeln!(
                out,
                "{DURATION_SECONDS}_sum{{{labels}}} {seconds}\n{DURATION_SECONDS}_count{{{labels}}} {count}"
            );
        }
    }
}

fn condition_labels(hook: &Hook, step: &str, operation: Operation) -> String {
    let kind = "webhook";
    format!("kind=\"{kind}\",name=\"{}\",operation=\"{}\",type=\"{step}\"", hook.name, operation.as_str())
}

impl Counts {
    fn count(&mut self, counter: &'static str, labels: String) {
        *self.counters.entry((counter, labels)).or_default() += 1;
    }
}
