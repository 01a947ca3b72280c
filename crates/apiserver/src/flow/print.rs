//! What flow control tells about itself, under upstream's names.

use std::fmt::Write as _;

use super::Flow;
use super::level::State;
use super::tally::{REASONS, Tally};

impl Flow {
    pub fn print(&self, out: &mut String) {
        let levels: Vec<_> = self.levels.lock().values().cloned().collect();
        let head = |out: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(
                out,
                "# HELP apiserver_flowcontrol_{name} {help}\n# TYPE apiserver_flowcontrol_{name} {kind}"
            );
        };
        type Of = fn(&State) -> f64;
        let gauges: [(&str, &str, Of); 11] = [
            ("nominal_limit_seats", "Seats of each level by its shares.", |s| s.bounds.nominal as f64),
            ("lower_limit_seats", "The fewest seats of each level.", |s| s.bounds.min as f64),
            ("upper_limit_seats", "The most seats of each level.", |s| s.bounds.max as f64),
            ("current_limit_seats", "Seats of each level now.", |s| s.queues.limit() as f64),
            ("request_concurrency_limit", "Seats of each level by its shares.", |s| s.bounds.nominal as f64),
            ("target_seats", "Seats each level was judged to need.", |s| s.grant.target),
            ("demand_seats_high_watermark", "The most seats each level could use in the last period.", |s| {
                s.usage.seen.peak
            }),
            ("demand_seats_average", "Seats each level could use in the last period, on average.", |s| {
                s.usage.seen.average
            }),
            ("demand_seats_stdev", "The standard deviation of that.", |s| s.usage.seen.deviation),
            ("demand_seats_smoothed", "Seats each level could use, over a longer time.", |s| {
                s.usage.smoothed
            }),
            (
                "request_dispatch_no_accommodation_total",
                "How often the next in turn found too few seats.",
                |s| s.queues.totals.no_room as f64,
            ),
        ];
        for (name, help, of) in gauges {
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
        let _ = writeln!(out, "apiserver_flowcontrol_seat_fair_frac {}", *self.fair.lock());
        type Count = fn(&Tally) -> u64;
        let counts: [(&str, &str, &str, Count); 7] = [
            ("dispatched_requests_total", "counter", "Requests that were let run.", |t| t.dispatched),
            ("current_inqueue_requests", "gauge", "Requests that wait.", |t| t.waiting),
            ("current_inqueue_seats", "gauge", "Seats that are waited for.", |t| t.waiting_seats),
            ("current_executing_requests", "gauge", "Requests that run.", |t| t.running),
            ("current_executing_seats", "gauge", "Seats that are taken.", |t| t.running_seats),
            ("request_concurrency_in_use", "gauge", "Seats that are taken.", |t| t.running_seats),
            ("rejected_requests_total", "counter", "Requests that were refused.", |_| 0),
        ];
        for (name, kind, help, of) in counts {
            head(out, name, kind, help);
            for level in &levels {
                for tally in &level.state().tallies {
                    let labels = labels(tally, &level.name);
                    if name == "rejected_requests_total" {
                        for (reason, count) in REASONS.iter().zip(tally.rejected).filter(|(_, n)| *n > 0) {
                            let _ = writeln!(
                                out,
                                "apiserver_flowcontrol_{name}{{{labels},reason=\"{reason}\"}} {count}"
                            );
                        }
                    } else {
                        let _ = writeln!(out, "apiserver_flowcontrol_{name}{{{labels}}} {}", of(tally));
                    }
                }
            }
        }
        type Print = fn(&Tally, &str, &str, &mut String);
        let histograms: [(&str, &str, Print); 5] = [
            ("request_wait_duration_seconds", "How long requests waited.", |tally, name, labels, out| {
                for (execute, waited) in ["false", "true"].iter().zip(&tally.waited) {
                    waited.print(name, &format!("{labels},execute=\"{execute}\""), out);
                }
            }),
            ("request_execution_seconds", "How long requests ran.", |tally, name, labels, out| {
                for (kind, ran) in ["regular", "watch"].iter().zip(&tally.ran) {
                    ran.print(name, &format!("{labels},type=\"{kind}\""), out);
                }
            }),
            (
                "work_estimated_seats",
                "How many seats requests were thought to need.",
                |tally, name, labels, out| {
                    tally.widths.print(name, labels, out);
                },
            ),
            (
                "request_queue_length_after_enqueue",
                "How many were in the queue.",
                |tally, name, labels, out| {
                    tally.lengths.print(name, labels, out);
                },
            ),
            ("watch_count_samples", "How many watched what was changed.", |tally, name, labels, out| {
                tally.watchers.print(name, labels, out);
            }),
        ];
        for (name, help, print) in histograms {
            head(out, name, "histogram", help);
            for level in &levels {
                for tally in &level.state().tallies {
                    print(tally, &format!("apiserver_flowcontrol_{name}"), &labels(tally, &level.name), out);
                }
            }
        }
    }
}

fn labels(tally: &Tally, level: &str) -> String {
    format!("flow_schema=\"{}\",priority_level=\"{level}\"", tally.schema)
}
