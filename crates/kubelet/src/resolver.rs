//! Whom pods ask for names, and how.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Pod, PodDNSConfigOption};
use reconcile::Object as _;
use runtime::cri::DnsConfig;

use crate::{Node, Settings};

const USUAL: &str = "/etc/resolv.conf";
/// Whom systemd's resolver asks, which itself is at an address that pods cannot reach.
const BEHIND_SYSTEMD: &str = "/run/systemd/resolve/resolv.conf";
/// What programs in containers can do with; upstream's numbers.
const MOST_SERVERS: usize = 3;
const MOST_SEARCHES: usize = 32;
const LONGEST_SEARCH: usize = 253;
const LONGEST_LINE: usize = 2048;

/// Where the node's own settings of the resolver are, for pods that want them.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Resolver {
    /// Where all programs of this host look.
    #[default]
    Host,
    File(PathBuf),
    /// Nowhere: pods have nobody to ask but themselves.
    None,
}

impl Resolver {
    /// Upstream's way to say it: no path is no settings.
    pub fn at(path: &str) -> Resolver {
        if path.is_empty() { Resolver::None } else { Resolver::File(path.into()) }
    }

    /// The settings as they are now: hosts change them as they go from one network to another.
    fn read(&self) -> DnsConfig {
        match self {
            Resolver::Host => reachable(&read(Path::new(USUAL)), || read(Path::new(BEHIND_SYSTEMD))),
            Resolver::File(path) => read(path).unwrap_or_else(|error| {
                tracing::warn!(%error, path = %path.display(), "no settings of the resolver");
                DnsConfig::default()
            }),
            Resolver::None => DnsConfig::default(),
        }
    }

    /// Whom a program of this host asks: it can reach what pods cannot.
    pub fn servers(&self) -> Vec<IpAddr> {
        let dns = match self {
            Resolver::Host => read(Path::new(USUAL)).unwrap_or_default(),
            told => told.read(),
        };
        dns.servers.iter().filter_map(|server| server.parse().ok()).collect()
    }
}

/// What a pod gets, and what is to be told of what it does not get.
pub fn of(pod: &Pod, settings: &Settings) -> (DnsConfig, Vec<String>) {
    let spec = pod.spec.clone().unwrap_or_default();
    let host_network = spec.host_network == Some(true);
    let mut dns = settings.resolver.read();
    match spec.dns_policy.as_deref().unwrap_or("ClusterFirst") {
        "None" => dns = DnsConfig::default(),
        "ClusterFirst" if !host_network && !settings.cluster_dns.is_empty() => {
            of_cluster(&mut dns, pod, settings)
        }
        "ClusterFirstWithHostNet" if !settings.cluster_dns.is_empty() => of_cluster(&mut dns, pod, settings),
        // So that the runtime does not put the host's in their place.
        _ if settings.resolver == Resolver::None => {
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
    let told = fit(&mut dns);
    (dns, told)
}

/// Tells a pod what was left out for it.
pub fn tell(node: &Node, pod: &Pod) {
    for message in of(pod, &node.settings).1 {
        node.ctx.events.warning(pod, "DNSConfigForming", message);
    }
}

fn of_cluster(dns: &mut DnsConfig, pod: &Pod, settings: &Settings) {
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

/// Leaves out what would be too much, and says so in upstream's words.
fn fit(dns: &mut DnsConfig) -> Vec<String> {
    let mut told = Vec::new();
    if dns.servers.len() > MOST_SERVERS {
        dns.servers.truncate(MOST_SERVERS);
        told.push(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            dns.servers.join(" ")
        ));
    }
    let wanted = dns.searches.len();
    dns.searches.truncate(MOST_SEARCHES);
    dns.searches.retain(|search| search.len() <= LONGEST_SEARCH);
    while dns.searches.join(" ").len() > LONGEST_LINE {
        dns.searches.pop();
    }
    if dns.searches.len() < wanted {
        told.push(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            dns.searches.join(" ")
        ));
    }
    told
}

/// The host's settings, unless all servers there are the host itself and somebody else knows whom that asks.
fn reachable(usual: &io::Result<DnsConfig>, behind: impl Fn() -> io::Result<DnsConfig>) -> DnsConfig {
    let usual = usual.as_ref().cloned().unwrap_or_default();
    let is_own = |server: &String| server.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let all_own = !usual.servers.is_empty() && usual.servers.iter().all(is_own);
    let behind = if all_own { behind().ok() } else { None };
    behind.filter(|behind| !behind.servers.is_empty()).unwrap_or(usual)
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
            // The last line counts.
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
    fn settings_are_read_as_upstream_does() {
        let text = "# nameserver 1.1.1.1\nsearch no\nnameserver 10.0.0.1 10.0.0.9\n nameserver ::1\n\
            search a. . b\noptions ndots:1 rotate\noptions ndots:3\n";
        assert_eq!(parse(text), dns("10.0.0.1 ::1", "a b", "rotate ndots:3"));
    }

    #[test]
    fn whom_systemd_asks_is_asked_by_pods() {
        let behind = || Ok(dns("10.0.0.1", "lan", ""));
        let check = |usual: &str, behind: &dyn Fn() -> io::Result<DnsConfig>, expected: &str| {
            let found = reachable(&Ok(dns(usual, "", "")), behind);
            assert_eq!(found.servers, words(expected), "{usual}");
        };
        check("127.0.0.53", &behind, "10.0.0.1");
        check("127.0.0.53 ::1", &behind, "10.0.0.1");
        check("127.0.0.53 10.0.0.2", &behind, "127.0.0.53 10.0.0.2");
        check("10.0.0.2", &behind, "10.0.0.2");
        check("", &behind, "");
        check("127.0.0.1", &|| Err(io::ErrorKind::NotFound.into()), "127.0.0.1");
        check("127.0.0.1", &|| Ok(DnsConfig::default()), "127.0.0.1");
    }

    #[test]
    fn what_pods_get() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("resolv.conf");
        let mut settings = crate::config::tests::settings(dir.path());
        settings.resolver = Resolver::at(&file.display().to_string());
        let check = |host: &str, settings: &Settings, spec: Value, expected: DnsConfig| {
            std::fs::write(&file, host).expect("written");
            let pod = json!({"metadata": {"name": "a", "namespace": "shop"}, "spec": spec});
            let pod: Pod = serde_json::from_value(pod).expect("a pod");
            assert_eq!(of(&pod, settings), (expected, Vec::new()), "{spec}");
        };
        let pod = |policy: &str, host_network: bool| json!({"containers": [], "dnsPolicy": policy, "hostNetwork": host_network});
        let host = "nameserver 10.0.0.1\nsearch lan\noptions rotate\n";
        let cluster =
            dns("10.43.0.10", "shop.svc.cluster.local svc.cluster.local cluster.local lan", "ndots:5");
        check(host, &settings, pod("ClusterFirst", false), cluster.clone());
        check(host, &settings, pod("ClusterFirstWithHostNet", true), cluster);
        check(host, &settings, pod("ClusterFirst", true), dns("10.0.0.1", "lan", "rotate"));
        // As the file is now, not as it was.
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
        let nowhere = Settings { resolver: Resolver::at(""), ..settings.clone() };
        check(host, &nowhere, pod("Default", false), dns("127.0.0.1", ".", ""));
    }

    #[test]
    fn what_is_too_much_is_left_out() {
        let numbered = |count: usize, length: usize| -> Vec<String> {
            (0..count).map(|number| format!("{number:0length$}")).collect()
        };
        let check = |servers: usize, searches: Vec<String>, kept: (usize, usize), told: &[&str]| {
            let mut dns = DnsConfig { servers: numbered(servers, 1), searches, options: Vec::new() };
            let words = fit(&mut dns);
            assert_eq!((dns.servers.len(), dns.searches.len()), kept);
            assert_eq!(words.len(), told.len());
            for (words, told) in words.iter().zip(told) {
                assert!(words.starts_with(told), "{words}");
            }
        };
        let servers = "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver \
            line is: 0 1 2";
        let searches = "Search Line limits were exceeded, some search paths have been omitted, the applied search \
            line is: 0";
        check(3, numbered(32, 3), (3, 32), &[]);
        check(4, numbered(33, 3), (3, 32), &[servers, searches]);
        check(0, vec!["0".repeat(254), "0".to_owned()], (0, 1), &[searches]);
        check(0, numbered(10, 203), (0, 10), &[]);
        check(0, numbered(10, 204), (0, 9), &[searches]);
    }
}
