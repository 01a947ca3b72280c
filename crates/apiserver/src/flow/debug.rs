//! What flow control tells about itself, under upstream's names.

use std::fmt::Write as _;

use super::FlowControl;
use super::metrics::{REJECTION_REASONS, SchemaMetrics};
use super::priority_level::LevelState;

impl FlowControl {
    pub fn print(&self, out: &mut String) {
        let levels: Vec<_> = self.levels.lock().values().cloned().collect();
        let head = |out: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(
                out,
                "# HELP apiserver_flowcontrol_{name} {help}\n# TYPE apiserver_flowcontrol_{name} {kind}"
            );
        };
        type GaugeFn = fn(&LevelState) -> f64;
        let gauge_metrics: [(&str, &str, GaugeFn); 11] = [
            ("nominal_limit_seats", "Seats of each level by its shares.", |s| s.bounds.nominal as f64),
            ("lower_limit_seats", "The fewest seats of each level.", |s| s.bounds.min as f64),
            ("upper_limit_seats", "The most seats of each level.", |s| s.bounds.max as f64),
            ("current_limit_seats", "Seats of each level now.", |s| s.queues.limit() as f64),
            ("request_concurrency_limit", "Seats of each level by its shares.", |s| s.bounds.nominal as f64),
            ("target_seats", "Seats each level was judged to need.", |s| s.grant.target),
            ("demand_seats_high_watermark", "The most seats each level could use in the last period.", |s| {
                s.usage.last_period.max
            }),
            ("demand_seats_average", "Seats each level could use in the last period, on average.", |s| {
                s.usage.last_period.average
            }),
            ("demand_seats_stdev", "The standard deviation of that.", |s| s.usage.last_period.deviation),
            ("demand_seats_smoothed", "Seats each level could use, over a longer time.", |s| {
                s.usage.smoothed
            }),
            (
                "request_dispatch_no_accommodation_total",
                "How often the next in turn found too few seats.",
                |s| s.queues.counts.failed_dispatch_count as f64,
            ),
        ];
        for (name, help, of) in gauge_metrics {
            head(out, name, if name.ends_with("_total") { "counter" } else { "gauge" }, help);
            for level in &levels {
                let value = of(&level.state());
                let _ = writeln!(
                    out,
                    "apiserver_flowcontrol_{name}{{priority_level=\"{}\"}} {value}",
                    level.name
                );
            }
        }
        head(out, "seat_fair_frac", "gauge", "The fraction of its target every level can have.");
        let _ = writeln!(out, "apiserver_flowcontrol_seat_fair_frac {}", *self.fair_fraction.lock());
        type CounterFn = fn(&SchemaMetrics) -> u64;
        let counter_metrics: [(&str, &str, &str, CounterFn); 7] = [
            ("dispatched_requests_total", "counter", "Requests that were let run.", |t| t.started_total),
            ("current_inqueue_requests", "gauge", "Requests that wait.", |t| t.waiting),
            ("current_inqueue_seats", "gauge", "Seats that are waited for.", |t| t.waiting_seats),
            ("current_executing_requests", "gauge", "Requests that run.", |t| t.running),
            ("current_executing_seats", "gauge", "Seats that are taken.", |t| t.running_seats),
            ("request_concurrency_in_use", "gauge", "Seats that are taken.", |t| t.running_seats),
            ("rejected_requests_total", "counter", "Requests that were refused.", |_| 0),
        ];
        for (name, kind, help, of) in counter_metrics {
            head(out, name, kind, help);
            for level in &levels {
                for metrics in &level.state().schema_metrics {
                    let labels = labels(metrics, &level.name);
                    if name == "rejected_requests_total" {
                        for (reason, count) in
                            REJECTION_REASONS.iter().zip(metrics.rejected).filter(|(_, n)| *n > 0)
                        {
                            let _ = writeln!(
                                out,
                                "apiserver_flowcontrol_{name}{{{labels},reason=\"{reason}\"}} {count}"
                            );
                        }
                    } else {
                        let _ = writeln!(out, "apiserver_flowcontrol_{name}{{{labels}}} {}", of(metrics));
                    }
                }
            }
        }
        type HistogramFn = fn(&SchemaMetrics, &str, &str, &mut String);
        let histogram_metrics: [(&str, &str, HistogramFn); 5] = [
            ("request_wait_duration_seconds", "How long requests waited.", |metrics, name, labels, out| {
                for (execute, wait_seconds) in ["false", "true"].iter().zip(&metrics.wait_seconds) {
                    wait_seconds.print(name, &format!("{labels},execute=\"{execute}\""), out);
                }
            }),
            ("request_execution_seconds", "How long requests ran.", |metrics, name, labels, out| {
                for (kind, execution_seconds) in ["regular", "watch"].iter().zip(&metrics.execution_seconds) {
                    execution_seconds.print(name, &format!("{labels},type=\"{kind}\""), out);
                }
            }),
            (
                "work_estimated_seats",
                "How many seats requests were thought to need.",
                |metrics, name, labels, out| {
                    metrics.estimated_seats.print(name, labels, out);
                },
            ),
            (
                "request_queue_length_after_enqueue",
                "How many were in the queue.",
                |metrics, name, labels, out| {
                    metrics.queue_lengths.print(name, labels, out);
                },
            ),
            ("watch_count_samples", "How many watched what was changed.", |metrics, name, labels, out| {
                metrics.watchers.print(name, labels, out);
            }),
        ];
        for (name, help, print) in histogram_metrics {
            head(out, name, "histogram", help);
            for level in &levels {
                for metrics in &level.state().schema_metrics {
                    print(
                        metrics,
                        &format!("apiserver_flowcontrol_{name}"),
                        &labels(metrics, &level.name),
                        out,
                    );
                }
            }
        }
    }
}

fn labels(metrics: &SchemaMetrics, level: &str) -> String {
    format!("flow_schema=\"{}\",priority_level=\"{level}\"", metrics.schema)
}
