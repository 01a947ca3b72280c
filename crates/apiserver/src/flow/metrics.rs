//! The metrics of a priority level for each of its FlowSchemas.

use std::fmt::Write as _;

/// The requests of one FlowSchema at one priority level.
pub struct SchemaMetrics {
    pub schema: String,
    pub started_total: u64,
    pub rejected: [u64; REJECTION_REASONS.len()],
    pub waiting: u64,
    pub waiting_seats: u64,
    pub running: u64,
    pub running_seats: u64,
    /// Queue times of rejected and of executed requests.
    pub wait_seconds: [Histogram<13>; 2],
    /// Execution times of requests, and initialization times of watches.
    pub execution_seconds: [Histogram<13>; 2],
    pub estimated_seats: Histogram<8>,
    pub queue_lengths: Histogram<8>,
    pub watchers: Histogram<6>,
}

/// Values of the `reason` label for rejected requests.
pub const REJECTION_REASONS: [&str; 3] = ["concurrency-limit", "queue-full", "time-out"];
const DURATION_BUCKETS: [f64; 13] = [0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0];
const SEAT_BUCKETS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100.0];
const QUEUE_LENGTH_BUCKETS: [f64; 8] = [0.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0];
const WATCHER_BUCKETS: [f64; 6] = [0.0, 1.0, 10.0, 100.0, 1000.0, 10000.0];

impl SchemaMetrics {
    pub fn new(schema: &str) -> SchemaMetrics {
        SchemaMetrics {
            schema: schema.to_owned(),
            started_total: 0,
            rejected: [0; REJECTION_REASONS.len()],
            waiting: 0,
            waiting_seats: 0,
            running: 0,
            running_seats: 0,
            wait_seconds: [Histogram::new(&DURATION_BUCKETS), Histogram::new(&DURATION_BUCKETS)],
            execution_seconds: [Histogram::new(&DURATION_BUCKETS), Histogram::new(&DURATION_BUCKETS)],
            estimated_seats: Histogram::new(&SEAT_BUCKETS),
            queue_lengths: Histogram::new(&QUEUE_LENGTH_BUCKETS),
            watchers: Histogram::new(&WATCHER_BUCKETS),
        }
    }
}

/// Counts per bucket: values up to its upper bound and above the previous one.
#[derive(Clone)]
pub struct Histogram<const N: usize> {
    bounds: &'static [f64; N],
    counts: [u64; N],
    overflow: u64,
    sum: f64,
}

impl<const N: usize> Histogram<N> {
    fn new(bounds: &'static [f64; N]) -> Histogram<N> {
        Histogram { bounds, counts: [0; N], overflow: 0, sum: 0.0 }
    }

    pub fn add(&mut self, value: f64) {
        self.sum += value;
        match self.bounds.iter().position(|bound| value <= *bound) {
            Some(i) => self.counts[i] += 1,
            None => self.overflow += 1,
        }
    }

    /// Writes the lines of one series. Writes nothing if it has no values.
    pub fn print(&self, name: &str, labels: &str, out: &mut String) {
        let mut below = 0;
        let all: u64 = self.counts.iter().sum::<u64>() + self.overflow;
        if all == 0 {
            return;
        }
        for (bound, count) in self.bounds.iter().zip(self.counts) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {all}");
        let _ = writeln!(out, "{name}_sum{{{labels}}} {}\n{name}_count{{{labels}}} {all}", self.sum);
    }
}
