//! The metrics of flow control, named as upstream's.

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
            (
                "nominal_limit_seats",
                "Nominal number of execution seats configured for each priority level",
                |s| s.bounds.nominal as f64,
            ),
            (
                "lower_limit_seats",
                "Configured lower bound on number of execution seats available to each priority level",
                |s| s.bounds.min as f64,
            ),
            (
                "upper_limit_seats",
                "Configured upper bound on number of execution seats available to each priority level",
                |s| s.bounds.max as f64,
            ),
            (
                "current_limit_seats",
                "current derived number of execution seats available to each priority level",
                |s| s.queues.limit() as f64,
            ),
            (
                "request_concurrency_limit",
                "Nominal number of execution seats configured for each priority level",
                |s| s.bounds.nominal as f64,
            ),
            ("target_seats", "Seat allocation targets", |s| s.grant.target),
            (
                "demand_seats_high_watermark",
                "High watermark, over last adjustment period, of demand_seats",
                |s| s.usage.last_period.max,
            ),
            (
                "demand_seats_average",
                "Time-weighted average, over last adjustment period, of demand_seats",
                |s| s.usage.last_period.average,
            ),
            (
                "demand_seats_stdev",
                "Time-weighted standard deviation, over last adjustment period, of demand_seats",
                |s| s.usage.last_period.deviation,
            ),
            ("demand_seats_smoothed", "Smoothed seat demands", |s| s.usage.smoothed),
            (
                "request_dispatch_no_accommodation_total",
                "Number of times a dispatch attempt resulted in a non accommodation due to lack of available seats",
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
        head(
            out,
            "seat_fair_frac",
            "gauge",
            "Fair fraction of server's concurrency to allocate to each priority level that can use it",
        );
        let _ = writeln!(out, "apiserver_flowcontrol_seat_fair_frac {}", *self.fair_fraction.lock());
        type CounterFn = fn(&SchemaMetrics) -> u64;
        let counter_metrics: [(&str, &str, &str, CounterFn); 7] = [
            (
                "dispatched_requests_total",
                "counter",
                "Number of requests executed by API Priority and Fairness subsystem",
                |t| t.started_total,
            ),
            (
                "current_inqueue_requests",
                "gauge",
                "Number of requests currently pending in queues of the API Priority and Fairness subsystem",
                |t| t.waiting,
            ),
            (
                "current_inqueue_seats",
                "gauge",
                "Number of seats currently pending in queues of the API Priority and Fairness subsystem",
                |t| t.waiting_seats,
            ),
            (
                "current_executing_requests",
                "gauge",
                "Number of requests in initial (for a WATCH) or any (for a non-WATCH) execution stage in the API Priority and Fairness subsystem",
                |t| t.running,
            ),
            (
                "current_executing_seats",
                "gauge",
                "Concurrency (number of seats) occupied by the currently executing (initial stage for a WATCH, any stage otherwise) requests in the API Priority and Fairness subsystem",
                |t| t.running_seats,
            ),
            (
                "request_concurrency_in_use",
                "gauge",
                "Concurrency (number of seats) occupied by the currently executing (initial stage for a WATCH, any stage otherwise) requests in the API Priority and Fairness subsystem",
                |t| t.running_seats,
            ),
            (
                "rejected_requests_total",
                "counter",
                "Number of requests rejected by API Priority and Fairness subsystem",
                |_| 0,
            ),
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
            (
                "request_wait_duration_seconds",
                "Length of time a request spent waiting in its queue",
                |metrics, name, labels, out| {
                    for (execute, wait_seconds) in ["false", "true"].iter().zip(&metrics.wait_seconds) {
                        wait_seconds.print(name, &format!("{labels},execute=\"{execute}\""), out);
                    }
                },
            ),
            (
                "request_execution_seconds",
                "Duration of initial stage (for a WATCH) or any (for a non-WATCH) stage of request execution in the API Priority and Fairness subsystem",
                |metrics, name, labels, out| {
                    for (kind, execution_seconds) in
                        ["regular", "watch"].iter().zip(&metrics.execution_seconds)
                    {
                        execution_seconds.print(name, &format!("{labels},type=\"{kind}\""), out);
                    }
                },
            ),
            (
                "work_estimated_seats",
                "Number of estimated seats (maximum of initial and final seats) associated with requests in API Priority and Fairness",
                |metrics, name, labels, out| {
                    metrics.estimated_seats.print(name, labels, out);
                },
            ),
            (
                "request_queue_length_after_enqueue",
                "Length of queue in the API Priority and Fairness subsystem, as seen by each request after it is enqueued",
                |metrics, name, labels, out| {
                    metrics.queue_lengths.print(name, labels, out);
                },
            ),
            (
                "watch_count_samples",
                "count of watchers for mutating requests in API Priority and Fairness",
                |metrics, name, labels, out| {
                    metrics.watchers.print(name, labels, out);
                },
            ),
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
