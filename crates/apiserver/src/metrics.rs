//! Counters in Prometheus' text format, under upstream's names.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use parking_lot::Mutex;

use crate::request::{Target, verb};
use crate::server::{Call, Server};

#[derive(Default)]
pub struct Metrics {
    requests: Mutex<BTreeMap<(&'static str, &'static str, &'static str, String), u64>>,
}

impl Metrics {
    pub fn count(&self, call: &Call, target: &Target) {
        let watch = call.query.flag("watch").unwrap_or(false) || target.watch;
        let row = target.resource;
        let verb = verb(&call.method, target, watch);
        let key = (verb, row.group, row.plural, target.subresource.clone());
        *self.requests.lock().entry(key).or_default() += 1;
    }

    pub fn print(&self, server: &Server) -> String {
        let mut out = String::new();
        let mut family = |name: &str, kind: &str, help: &str| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        };
        family("apiserver_request_total", "counter", "Requests by verb, group, resource and subresource.");
        for ((verb, group, resource, subresource), count) in self.requests.lock().iter() {
            let verb = verb.to_ascii_uppercase();
            let _ = writeln!(
                out,
                "apiserver_request_total{{verb=\"{verb}\",group=\"{group}\",resource=\"{resource}\",subresource=\"{subresource}\"}} {count}"
            );
        }
        let _ = writeln!(
            out,
            "# HELP apiserver_storage_objects Objects stored, by kind.\n# TYPE apiserver_storage_objects gauge"
        );
        for row in server.registry.stored() {
            let name = if row.group.is_empty() {
                row.plural.to_owned()
            } else {
                format!("{}.{}", row.plural, row.group)
            };
            let _ =
                writeln!(out, "apiserver_storage_objects{{resource=\"{name}\"}} {}", server.shard(row).len());
        }
        let revision = server.cache.revision();
        let _ = writeln!(
            out,
            "# HELP skiff_store_revision The newest revision in the cache.\n# TYPE skiff_store_revision gauge\nskiff_store_revision {revision}"
        );
        out
    }
}
