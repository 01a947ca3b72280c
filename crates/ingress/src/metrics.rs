//! Metrics of the Ingress controller.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Requests by response code, and the number of open connections.
#[derive(Default)]
pub struct Metrics {
    responses_by_code: Mutex<BTreeMap<u16, u64>>,
    open_connections: AtomicU64,
}

impl Metrics {
    pub(crate) fn record_response(&self, code: u16) {
        *self.responses_by_code.lock().entry(code).or_default() += 1;
    }

    pub(crate) fn record_connection(&self, connected: bool) {
        match connected {
            true => self.open_connections.fetch_add(1, Ordering::Relaxed),
            false => self.open_connections.fetch_sub(1, Ordering::Relaxed),
        };
    }

    /// Appends all metrics in the Prometheus text format.
    pub fn write(&self, out: &mut String) {
        let name = "skiff_ingress_requests_total";
        let _ = writeln!(out, "# HELP {name} Ingress requests by response code.\n# TYPE {name} counter");
        for (code, count) in &*self.responses_by_code.lock() {
            let _ = writeln!(out, "{name}{{code=\"{code}\"}} {count}");
        }
        let name = "skiff_ingress_connections";
        let _ = writeln!(out, "# HELP {name} Open client connections.\n# TYPE {name} gauge");
        let _ = writeln!(out, "{name} {}", self.open_connections.load(Ordering::Relaxed));
    }
}
