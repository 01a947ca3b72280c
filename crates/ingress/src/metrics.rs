//! What is counted.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Requests by the code of their answer, and how many are under way.
#[derive(Default)]
pub struct Metrics {
    codes: Mutex<BTreeMap<u16, u64>>,
    open: AtomicU64,
}

impl Metrics {
    pub(crate) fn answered(&self, code: u16) {
        *self.codes.lock().entry(code).or_default() += 1;
    }

    pub(crate) fn connected(&self, connected: bool) {
        match connected {
            true => self.open.fetch_add(1, Ordering::Relaxed),
            false => self.open.fetch_sub(1, Ordering::Relaxed),
        };
    }

    /// Appends everything in Prometheus' text form.
    pub fn write(&self, out: &mut String) {
        let name = "skiff_ingress_requests_total";
        let _ = writeln!(out, "# HELP {name} Requests from outside, by code.\n# TYPE {name} counter");
        for (code, count) in &*self.codes.lock() {
            let _ = writeln!(out, "{name}{{code=\"{code}\"}} {count}");
        }
        let name = "skiff_ingress_connections";
        let _ = writeln!(out, "# HELP {name} Connections from outside that are open.\n# TYPE {name} gauge");
        let _ = writeln!(out, "{name} {}", self.open.load(Ordering::Relaxed));
    }
}
