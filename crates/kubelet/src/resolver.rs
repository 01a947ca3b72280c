//! The DNS configuration of pods.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Pod, PodDNSConfigOption};
use reconcile::Object as _;
use runtime::cri::DnsConfig;

use crate::{Node, Settings};

const HOST_RESOLV_CONF: &str = "/etc/resolv.conf";
/// The upstream servers of systemd-resolved, whose own stub listens on an address that pods cannot
/// reach.
const SYSTEMD_RESOLV_CONF: &str = "/run/systemd/resolve/resolv.conf";
/// Limits of resolver libraries in containers; the values are upstream's.
const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCH_PATHS: usize = 32;
const MAX_SEARCH_PATH_BYTES: usize = 253;
const MAX_SEARCH_LINE_BYTES: usize = 2048;

/// Where the node's resolver configuration is, for pods with `dnsPolicy: Default`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ResolverConfig {
    /// The `resolv.conf` of the host.
    #[default]
    Host,
    File(PathBuf),
    /// No configuration: pods get a loopback nameserver.
    None,
}

impl ResolverConfig {
    /// As upstream's `resolvConf`: an empty path means no configuration.
    pub fn from_path(path: &str) -> ResolverConfig {
        if path.is_empty() { ResolverConfig::None } else { ResolverConfig::File(path.into()) }
    }

    /// Reads the current configuration. It changes when a host moves to another network.
    fn read(&self) -> DnsConfig {
        match self {
            ResolverConfig::Host => {
                reachable_config(&read(Path::new(HOST_RESOLV_CONF)), || read(Path::new(SYSTEMD_RESOLV_CONF)))
            }
            ResolverConfig::File(path) => read(path).unwrap_or_else(|error| {
                tracing::warn!(%error, path = %path.display(), "cannot read the resolver configuration");
                DnsConfig::default()
            }),
            ResolverConfig::None => DnsConfig::default(),
        }
    }

    /// The nameservers for a process on this host, which can reach addresses that pods cannot.
    pub fn servers(&self) -> Vec<IpAddr> {
        let dns = match self {
            ResolverConfig::Host => read(Path::new(HOST_RESOLV_CONF)).unwrap_or_default(),
            configured => configured.read(),
        };
        dns.servers.iter().filter_map(|server| server.parse().ok()).collect()
    }
}

/// The DNS configuration of a pod, and warnings about what was omitted.
pub fn pod_dns_config(pod: &Pod, settings: &Settings) -> (DnsConfig, Vec<String>) {
    let spec = pod.spec.clone().unwrap_or_default();
    let host_network = spec.host_network == Some(true);
    let mut dns = settings.resolver.read();
    match spec.dns_policy.as_deref().unwrap_or("ClusterFirst") {
        "None" => dns = DnsConfig::default(),
        "ClusterFirst" if !host_network && !settings.cluster_dns.is_empty() => {
            apply_cluster_dns(&mut dns, pod, settings)
        }
        "ClusterFirstWithHostNet" if !settings.cluster_dns.is_empty() => {
            apply_cluster_dns(&mut dns, pod, settings)
        }
        // An empty list would make the runtime use the host's configuration.
        _ if settings.resolver == ResolverConfig::None => {
            let own = |ip: &String| if ip.contains(':') { "::1" } else { "127.0.0.1" };
            dns.servers.extend(settings.node_ips().iter().map(|ip| own(ip).to_owned()));
            dns.searches.push(".".to_owned());
        }
        _ => {}
    }
    if let Some(own) = spec.dns_config {
        dns.servers.extend(own.nameservers.into_iter().flatten());
        dns.searches.extend(own.searches.into_iter().flatten());
        own.options.into_iter().flatten().for_each(|option| add_option(&mut dns.options, option));
        omit_duplicates(&mut dns.servers);
        omit_duplicates(&mut dns.searches);
    }
    let warnings = apply_limits(&mut dns);
    (dns, warnings)
}

/// Records events about what was omitted from a pod's configuration.
pub fn record_limit_warnings(node: &Node, pod: &Pod) {
    for message in pod_dns_config(pod, &node.settings).1 {
        node.ctx.events.warning(pod, "DNSConfigForming", message);
    }
}

fn apply_cluster_dns(dns: &mut DnsConfig, pod: &Pod, settings: &Settings) {
    dns.servers.clone_from(&settings.cluster_dns);
    dns.options = vec!["ndots:5".to_owned()];
    let domain = &settings.cluster_domain;
    if !domain.is_empty() {
        let own = [format!("{}.svc.{domain}", pod.namespace()), format!("svc.{domain}"), domain.clone()];
        dns.searches.splice(..0, own);
        omit_duplicates(&mut dns.searches);
    }
}

fn add_option(options: &mut Vec<String>, option: PodDNSConfigOption) {
    let name = option.name.unwrap_or_default();
    options.retain(|known| known.split(':').next() != Some(name.as_str()));
    options.push(match option.value.filter(|value| !value.is_empty()) {
        Some(value) => format!("{name}:{value}"),
        None => name,
    });
}

fn omit_duplicates(words: &mut Vec<String>) {
    let mut seen = std::collections::BTreeSet::new();
    words.retain(|word| seen.insert(word.clone()));
}

/// Omits what exceeds the limits. Returns upstream's warnings.
fn apply_limits(dns: &mut DnsConfig) -> Vec<String> {
    let mut warnings = Vec::new();
    if dns.servers.len() > MAX_NAMESERVERS {
        dns.servers.truncate(MAX_NAMESERVERS);
        warnings.push(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            dns.servers.join(" ")
        ));
    }
    let original_count = dns.searches.len();
    dns.searches.truncate(MAX_SEARCH_PATHS);
    dns.searches.retain(|search| search.len() <= MAX_SEARCH_PATH_BYTES);
    while dns.searches.join(" ").len() > MAX_SEARCH_LINE_BYTES {
        dns.searches.pop();
    }
    if dns.searches.len() < original_count {
        warnings.push(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            dns.searches.join(" ")
        ));
    }
    warnings
}

/// The host's configuration. If all its nameservers are loopback addresses, that of
/// systemd-resolved is used instead, if it has any.
fn reachable_config(
    host_config: &io::Result<DnsConfig>,
    systemd_config: impl Fn() -> io::Result<DnsConfig>,
) -> DnsConfig {
    let host_config = host_config.as_ref().cloned().unwrap_or_default();
    let is_own = |server: &String| server.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let all_own = !host_config.servers.is_empty() && host_config.servers.iter().all(is_own);
    let systemd_config = if all_own { systemd_config().ok() } else { None };
    systemd_config.filter(|systemd_config| !systemd_config.servers.is_empty()).unwrap_or(host_config)
}

fn read(path: &Path) -> io::Result<DnsConfig> {
    std::fs::read_to_string(path).map(|text| parse(&text))
}

fn parse(text: &str) -> DnsConfig {
    let mut dns = DnsConfig::default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => dns.servers.extend(words.next().map(str::to_owned)),
            // The last line applies.
            Some("search") => {
                let words = words.filter(|word| *word != ".");
                dns.searches = words.map(|word| word.strip_suffix('.').unwrap_or(word).to_owned()).collect();
            }
            Some("options") => {
                for word in words {
                    let (name, value) =
                        word.split_once(':').map_or((word, None), |(name, value)| (name, Some(value)));
                    let (name, value) = (Some(name.to_owned()), value.map(str::to_owned));
                    add_option(&mut dns.options, PodDNSConfigOption { name, value });
                }
            }
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn dns(servers: &str, searches: &str, options: &str) -> DnsConfig {
        DnsConfig { servers: words(servers), searches: words(searches), options: words(options) }
    }

    #[test]
    fn reads_resolv_conf_like_upstream() {
        let text = "# nameserver 1.1.1.1\nsearch no\nnameserver 10.0.0.1 10.0.0.9\n nameserver ::1\n\
            search a. . b\noptions ndots:1 rotate\noptions ndots:3\n";
        assert_eq!(parse(text), dns("10.0.0.1 ::1", "a b", "rotate ndots:3"));
    }

    #[test]
    fn uses_systemd_upstream_servers_instead_of_its_stub() {
        let systemd_config = || Ok(dns("10.0.0.1", "lan", ""));
        let check =
            |host_config: &str, systemd_config: &dyn Fn() -> io::Result<DnsConfig>, expected: &str| {
                let found = reachable_config(&Ok(dns(host_config, "", "")), systemd_config);
                assert_eq!(found.servers, words(expected), "{host_config}");
            };
        check("127.0.0.53", &systemd_config, "10.0.0.1");
        check("127.0.0.53 ::1", &systemd_config, "10.0.0.1");
        check("127.0.0.53 10.0.0.2", &systemd_config, "127.0.0.53 10.0.0.2");
        check("10.0.0.2", &systemd_config, "10.0.0.2");
        check("", &systemd_config, "");
        check("127.0.0.1", &|| Err(io::ErrorKind::NotFound.into()), "127.0.0.1");
        check("127.0.0.1", &|| Ok(DnsConfig::default()), "127.0.0.1");
    }

    #[test]
    fn dns_config_follows_dns_policy() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("resolv.conf");
        let mut settings = crate::config::tests::settings(dir.path());
        settings.resolver = ResolverConfig::from_path(&file.display().to_string());
        let check = |host: &str, settings: &Settings, spec: Value, expected: DnsConfig| {
            std::fs::write(&file, host).expect("written");
            let pod = json!({"metadata": {"name": "a", "namespace": "shop"}, "spec": spec});
            let pod: Pod = serde_json::from_value(pod).expect("a pod");
            assert_eq!(pod_dns_config(&pod, settings), (expected, Vec::new()), "{spec}");
        };
        let pod = |policy: &str, host_network: bool| json!({"containers": [], "dnsPolicy": policy, "hostNetwork": host_network});
        let host = "nameserver 10.0.0.1\nsearch lan\noptions rotate\n";
        let cluster =
            dns("10.43.0.10", "shop.svc.cluster.local svc.cluster.local cluster.local lan", "ndots:5");
        check(host, &settings, pod("ClusterFirst", false), cluster.clone());
        check(host, &settings, pod("ClusterFirstWithHostNet", true), cluster);
        check(host, &settings, pod("ClusterFirst", true), dns("10.0.0.1", "lan", "rotate"));
        // The file is read each time.
        check("nameserver 10.0.0.2\n", &settings, pod("Default", false), dns("10.0.0.2", "", ""));
        let mut own = pod("Default", false);
        own["dnsConfig"] = json!({
            "nameservers": ["10.0.0.3", "10.0.0.1"],
            "searches": ["x", "lan"],
            "options": [{"name": "ndots", "value": "2"}, {"name": "rotate"}],
        });
        check(host, &settings, own.clone(), dns("10.0.0.1 10.0.0.3", "lan x", "ndots:2 rotate"));
        own["dnsPolicy"] = json!("None");
        check(host, &settings, own, dns("10.0.0.3 10.0.0.1", "x lan", "ndots:2 rotate"));
        let without_resolver = Settings { resolver: ResolverConfig::from_path(""), ..settings.clone() };
        check(host, &without_resolver, pod("Default", false), dns("127.0.0.1", ".", ""));
    }

    #[test]
    fn entries_over_the_limits_are_dropped() {
        let generate = |count: usize, length: usize| -> Vec<String> {
            (0..count).map(|number| format!("{number:0length$}")).collect()
        };
        let check = |servers: usize, searches: Vec<String>, remaining: (usize, usize), expected: &[&str]| {
            let mut dns = DnsConfig { servers: generate(servers, 1), searches, options: Vec::new() };
            let words = apply_limits(&mut dns);
            assert_eq!((dns.servers.len(), dns.searches.len()), remaining);
            assert_eq!(words.len(), expected.len());
            for (words, expected) in words.iter().zip(expected) {
                assert!(words.starts_with(expected), "{words}");
            }
        };
        let servers = "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver \
            line is: 0 1 2";
        let searches = "Search Line limits were exceeded, some search paths have been omitted, the applied search \
            line is: 0";
        check(3, generate(32, 3), (3, 32), &[]);
        check(4, generate(33, 3), (3, 32), &[servers, searches]);
        check(0, vec!["0".repeat(254), "0".to_owned()], (0, 1), &[searches]);
        check(0, generate(10, 203), (0, 10), &[]);
        check(0, generate(10, 204), (0, 9), &[searches]);
    }
}
