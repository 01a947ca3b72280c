//! Work queue metrics of a process, under upstream's names.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::time::Duration;

use parking_lot::Mutex;

/// The metrics of all controllers of a process.
#[derive(Default)]
pub struct Metrics {
    controllers: Mutex<Vec<Arc<QueueMetrics>>>,
    /// Writers of other components.
    others: Mutex<Vec<Writer>>,
}

/// Appends metrics in the Prometheus text format.
type Writer = Box<dyn Fn(&mut String) + Send + Sync>;

/// Name, type and value of a metric.
type Family = (&'static str, &'static str, fn(&QueueMetrics) -> u64);

/// The metrics of one controller's work queue.
pub struct QueueMetrics {
    name: &'static str,
    pub adds: AtomicU64,
    pub depth: AtomicU64,
    pub retries: AtomicU64,
    pub started: AtomicU64,
    done: AtomicU64,
    work_micros: AtomicU64,
}

impl QueueMetrics {
    pub fn observe_work(&self, time: Duration) {
        self.done.fetch_add(1, Relaxed);
        self.work_micros.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }
}

impl Metrics {
    /// Adds the metrics of a controller, starting at 0.
    pub fn register(&self, name: &'static str) -> Arc<QueueMetrics> {
        let counts = Arc::new(QueueMetrics {
            name,
            adds: AtomicU64::new(0),
            depth: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            started: AtomicU64::new(0),
            done: AtomicU64::new(0),
            work_micros: AtomicU64::new(0),
        });
        self.controllers.lock().push(counts.clone());
        counts
    }

    /// Adds a writer for further metrics.
    pub fn register_writer(&self, write: impl Fn(&mut String) + Send + Sync + 'static) {
        self.others.lock().push(Box::new(write));
    }

    /// Whether no controller has a ready key or a reconcile in progress. Keys with a later deadline do not
    /// count.
    pub fn all_idle(&self) -> bool {
        let is_idle = |counts: &Arc<QueueMetrics>| {
            // `done` first: it can only be too low. A worker increments `started` before it lowers `depth`,
            // so a key that leaves the queue between these loads is seen as started.
            let done = counts.done.load(SeqCst);
            counts.depth.load(SeqCst) == 0 && counts.started.load(SeqCst) == done
        };
        self.controllers.lock().iter().all(is_idle)
    }

    /// Appends all metrics in the Prometheus text format.
    pub fn write(&self, out: &mut String) {
        let controllers = self.controllers.lock();
        let families: [Family; 3] = [
            ("workqueue_adds_total", "counter", |counts| counts.adds.load(Relaxed)),
            ("workqueue_depth", "gauge", |counts| counts.depth.load(Relaxed)),
            ("workqueue_retries_total", "counter", |counts| counts.retries.load(Relaxed)),
        ];
        for (family, kind, value) in families {
            let _ = writeln!(out, "# TYPE {family} {kind}");
            for counts in &*controllers {
                let _ = writeln!(out, "{family}{{name=\"{}\"}} {}", counts.name, value(counts));
            }
        }
        let family = "workqueue_work_duration_seconds";
        let _ = writeln!(out, "# TYPE {family} summary");
        for counts in &*controllers {
            let seconds = counts.work_micros.load(Relaxed) as f64 / 1e6;
            let _ = writeln!(out, "{family}_sum{{name=\"{}\"}} {seconds}", counts.name);
            let _ = writeln!(out, "{family}_count{{name=\"{}\"}} {}", counts.name, counts.done.load(Relaxed));
        }
        drop(controllers);
        for write in &*self.others.lock() {
            write(out);
        }
    }
}
