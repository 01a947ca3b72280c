//! What is counted.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Requests by the code of their answer, and how many are under way.
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

    /// Appends everything in Prometheus' text form.
    pub fn write(&self, out: &mut String) {
        let name = "skiff_ingress_requests_total";
        let _ = writeln!(out, "# HELP {name} Requests from outside, by code.\n# TYPE {name} counter");
        for (code, count) in &*self.responses_by_code.lock() {
            let _ = writeln!(out, "{name}{{code=\"{code}\"}} {count}");
        }
        let name = "skiff_ingress_connections";
        let _ = writeln!(out, "# HELP {name} Connections from outside that are open.\n# TYPE {name} gauge");
        let _ = writeln!(out, "{name} {}", self.open_connections.load(Ordering::Relaxed));
    }
}
