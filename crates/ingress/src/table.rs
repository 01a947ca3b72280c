//! Route lookup by host and path. Does no I/O.
//!
//! The most specific host wins: an exact name before `*.domain` before rules for all hosts. Then
//! the longest matching path wins, an exact one before a prefix. Requests without a match go to a
//! default backend, preferably that of an Ingress with rules for the host. If two Ingresses have
//! the same rule, the older one wins.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathType {
    Exact,
    /// Matches by path elements: `/a` matches `/a/b` but not `/ab`.
    Prefix,
}

/// The protocol that pods expect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BackendProtocol {
    pub tls: bool,
    /// HTTP/2 with prior knowledge, as required by gRPC. Otherwise HTTP/1.1.
    pub http2: bool,
}

/// The address of a pod with its protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackendAddr {
    pub address: SocketAddr,
    pub protocol: BackendProtocol,
}

/// The pods that requests are sent to.
#[derive(Debug, Default)]
pub struct Backend {
    /// The name in logs.
    pub name: String,
    pub addresses: Vec<SocketAddr>,
    pub protocol: BackendProtocol,
    /// Whether HTTP requests are redirected to HTTPS.
    pub redirect: bool,
    next_index: AtomicUsize,
}

impl Backend {
    pub fn new(name: String, addresses: Vec<SocketAddr>) -> Backend {
        Backend { name, addresses, ..Backend::default() }
    }

    /// All addresses once, starting with a different one each time (round robin).
    pub fn rotate(&self) -> impl Iterator<Item = BackendAddr> {
        let start = self.next_index.fetch_add(1, Ordering::Relaxed);
        let count = self.addresses.len();
        let at = move |index| self.addresses[start.wrapping_add(index) % count];
        (0..count).map(move |index| BackendAddr { address: at(index), protocol: self.protocol })
    }
}

/// One path of a rule.
#[derive(Clone, Debug)]
pub struct Rule {
    /// In lower case. Empty matches all hosts.
    pub host: String,
    pub path: String,
    pub path_type: PathType,
    pub backend: Arc<Backend>,
}

/// All rules by host.
#[derive(Debug, Default)]
pub struct RouteTable {
    exact_hosts: HashMap<String, HostRules>,
    /// By the domain after the first label.
    wildcard_hosts: HashMap<String, HostRules>,
    any_host: HostRules,
}

#[derive(Debug, Default)]
struct HostRules {
    /// The longest path first, exact before prefix. The older rule first among equals.
    rules: Vec<(Vec<String>, Rule)>,
    default: Option<Arc<Backend>>,
}

impl RouteTable {
    /// Builds the table. Rules and default backends of older Ingresses come first. A default
    /// backend has one of its Ingress's hosts, or `""` if the Ingress has no rules.
    pub fn new(rules: Vec<Rule>, defaults: Vec<(String, Arc<Backend>)>) -> RouteTable {
        let mut table = RouteTable::default();
        for rule in rules {
            let elements = elements(&rule.path).map(str::to_owned).collect();
            table.host_rules(&rule.host).rules.push((elements, rule));
        }
        for (host, backend) in defaults {
            table.any_host.default.get_or_insert_with(|| backend.clone());
            table.host_rules(&host).default.get_or_insert(backend);
        }
        let entries = table
            .exact_hosts
            .values_mut()
            .chain(table.wildcard_hosts.values_mut())
            .chain([&mut table.any_host]);
        for entry in entries {
            // The sort is stable, so older rules stay first.
            entry.rules.sort_by_key(|(elements, rule)| {
                (std::cmp::Reverse(elements.len()), rule.path_type == PathType::Prefix)
            });
        }
        table
    }

    fn host_rules(&mut self, host: &str) -> &mut HostRules {
        match host.strip_prefix("*.") {
            _ if host.is_empty() => &mut self.any_host,
            Some(domain) => self.wildcard_hosts.entry(domain.to_owned()).or_default(),
            None => self.exact_hosts.entry(host.to_owned()).or_default(),
        }
    }

    /// The addresses of all backends.
    pub fn backend_addrs(&self) -> impl Iterator<Item = BackendAddr> {
        let entries = self.exact_hosts.values().chain(self.wildcard_hosts.values()).chain([&self.any_host]);
        let backends = entries.flat_map(|entry| {
            entry.rules.iter().map(|(_, rule)| &rule.backend).chain(entry.default.as_ref())
        });
        backends.flat_map(|backend| {
            backend
                .addresses
                .iter()
                .map(|address| BackendAddr { address: *address, protocol: backend.protocol })
        })
    }

    /// Finds the backend for a host without port and a path without query.
    pub fn find(&self, host: &str, path: &str) -> Option<&Arc<Backend>> {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let domain = host.split_once('.').filter(|(first, _)| !first.is_empty()).map(|(_, domain)| domain);
        let entry = self.exact_hosts.get(&host).or_else(|| self.wildcard_hosts.get(domain?));
        let entry = entry.unwrap_or(&self.any_host);
        entry.find(path).or(entry.default.as_ref()).or(self.any_host.default.as_ref())
    }
}

impl HostRules {
    fn find(&self, path: &str) -> Option<&Arc<Backend>> {
        let requested: Vec<&str> = elements(path).collect();
        let found = self.rules.iter().find(|(elements, rule)| match rule.path_type {
            PathType::Exact => rule.path == path,
            PathType::Prefix => {
                elements.len() <= requested.len() && elements.iter().zip(&requested).all(|(a, b)| a == b)
            }
        });
        found.map(|(_, rule)| &rule.backend)
    }
}

/// The path elements. A trailing slash makes no difference.
fn elements(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|element| !element.is_empty())
}

#[cfg(test)]
mod tests;
