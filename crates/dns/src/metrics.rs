//! Metrics of the DNS server, with the names that CoreDNS uses.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

/// Counters of queries and responses.
#[derive(Default)]
pub struct Metrics {
    /// By transport protocol and record type.
    requests: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
    /// By response code.
    responses: Mutex<BTreeMap<&'static str, u64>>,
    pub cache_hits: AtomicU64,
    pub cache_misses: AtomicU64,
    pub forward_requests: AtomicU64,
}

impl Metrics {
    pub fn record_request(&self, proto: &'static str, record_type: u16) {
        *self.requests.lock().entry((proto, record_type_name(record_type))).or_default() += 1;
    }

    pub fn record_response(&self, flags: u16) {
        *self.responses.lock().entry(rcode_name(flags & 0xf)).or_default() += 1;
    }

    /// Appends all metrics in the Prometheus text format.
    pub fn write(&self, out: &mut String) {
        let _ = writeln!(out, "# TYPE coredns_dns_requests_total counter");
        for ((proto, record_type), count) in &*self.requests.lock() {
            let _ = writeln!(
                out,
                "coredns_dns_requests_total{{proto=\"{proto}\",type=\"{record_type}\"}} {count}"
            );
        }
        let _ = writeln!(out, "# TYPE coredns_dns_responses_total counter");
        for (code, count) in &*self.responses.lock() {
            let _ = writeln!(out, "coredns_dns_responses_total{{rcode=\"{code}\"}} {count}");
        }
        let counters = [
            ("coredns_cache_hits_total", &self.cache_hits),
            ("coredns_cache_misses_total", &self.cache_misses),
            ("coredns_forward_requests_total", &self.forward_requests),
        ];
        for (name, count) in counters {
            let _ = writeln!(out, "# TYPE {name} counter\n{name} {}", count.load(Relaxed));
        }
    }
}

fn record_type_name(record_type: u16) -> &'static str {
    use crate::wire::record_type::{A, AAAA, ANY, CNAME, NS, PTR, SOA, SRV, TXT};
    match record_type {
        A => "A",
        AAAA => "AAAA",
        ANY => "ANY",
        CNAME => "CNAME",
        NS => "NS",
        PTR => "PTR",
        SOA => "SOA",
        SRV => "SRV",
        TXT => "TXT",
        _ => "other",
    }
}

fn rcode_name(code: u16) -> &'static str {
    match code {
        0 => "NOERROR",
        1 => "FORMERR",
        2 => "SERVFAIL",
        3 => "NXDOMAIN",
        4 => "NOTIMP",
        5 => "REFUSED",
        _ => "other",
    }
}
