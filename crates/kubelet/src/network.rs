//! The pod network where the runtime has none: a CNI `ptp` network with addresses from the node's
//! pod CIDRs.
//!
//! It is a CNI configuration in the runtime's configuration directory. It is written only if the
//! directory has no other, because an existing network belongs to the administrator.
//! [`CONFIG_FILE`] is the only file that is ever written there. Pods share no bridge (see
//! `podnet`), so CNI's `ptp` attaches them as `podnet` does.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::Node;

/// The name of the configuration file. It is fixed, so that the file can be found and removed.
pub const CONFIG_FILE: &str = "10-skiff.conflist";
/// The name of the network, and of the directory with its IPAM leases.
const NETWORK_NAME: &str = "skiff";
/// Longer than a runtime needs to create a pod. Younger leases are not released.
const POD_CREATION_GRACE_PERIOD: Duration = Duration::from_secs(300);
/// The bridge that holds this node's addresses in the pod CIDRs. It has no ports.
pub const BRIDGE: &str = "skiff0";

/// Passes the pod CIDRs to the runtime, and configures a network for them if the runtime has none
/// and reports its CNI configuration directory.
pub(crate) async fn configure(node: &Node, ranges: &[String]) {
    if ranges.is_empty() {
        return;
    }
    let text = ranges.join(",");
    if let Err(error) = node.runtime.set_pod_cidr(&text).await {
        tracing::warn!(%error, "cannot set the pod CIDR of the runtime");
    } else if let Err(error) = std::fs::write(pod_cidr_file(node), &text) {
        tracing::warn!(%error, "cannot save the pod CIDR for the next start");
    }
    let details = node.runtime.details().await.unwrap_or_default();
    let Some(dir) = details.get("config").and_then(|config| cni_config_dir(config)) else { return };
    let addresses = ipam_dir(node);
    if let Err(error) = prepare(ranges) {
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            "cannot set up the bridge of the pod network"
        );
    }
    match write_config(&dir, &cni_config(ranges, &addresses, !node.settings.proxied && has_iptables())) {
        Ok(true) => tracing::info!(dir = %dir.display(), bridge = BRIDGE, "CNI configuration written"),
        Ok(false) => {}
        Err(error) => tracing::warn!(%error, dir = %dir.display(), "cannot write the CNI configuration"),
    }
}

/// Passes the pod CIDRs of the last run to the runtime, so that pods can be created while the API
/// server is unreachable.
pub(crate) async fn restore_pod_cidr(node: &Node) {
    let Ok(text) = std::fs::read_to_string(pod_cidr_file(node)) else { return };
    if let Err(error) = node.runtime.set_pod_cidr(&text).await {
        tracing::warn!(%error, "cannot set the pod CIDR of the runtime");
    }
}

/// Whether the pod CIDRs differ from those of the last run.
pub(crate) fn ranges_changed(node: &Node, ranges: &[String]) -> bool {
    !ranges.is_empty()
        && std::fs::read_to_string(pod_cidr_file(node)).is_ok_and(|known| known != ranges.join(","))
}

fn pod_cidr_file(node: &Node) -> PathBuf {
    node.settings.pods.with_file_name("pod-cidr")
}

/// The data directory of CNI's `host-local` IPAM plugin: one file for each address in use.
fn ipam_dir(node: &Node) -> PathBuf {
    node.settings.pods.with_file_name("network")
}

/// Releases addresses of sandboxes that the runtime does not have. A runtime that is killed while
/// it creates a sandbox leaks its address.
pub(crate) fn release_orphaned_addresses(node: &Node, known: &BTreeSet<&str>) {
    let now = SystemTime::now();
    for lease in orphaned_leases(&ipam_dir(node).join(NETWORK_NAME), known, now) {
        tracing::info!(address = %lease.display(), "released the address of a removed pod");
        let _ = std::fs::remove_file(lease);
    }
}

/// Leases of unknown sandboxes. A sandbox is not listed while it is being created, so young leases
/// are kept.
fn orphaned_leases(dir: &Path, known: &BTreeSet<&str>, now: SystemTime) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    // The directory also contains a lock and the last reserved address.
    let addresses = entries.filter(|entry| {
        entry.file_name().to_str().is_some_and(|name| name.parse::<std::net::IpAddr>().is_ok())
    });
    let is_orphaned = |path: &PathBuf| {
        let owner = std::fs::read_to_string(path).unwrap_or_default();
        let owner = owner.lines().next().unwrap_or_default().trim();
        let assigned = path.metadata().and_then(|known| known.modified());
        let is_old = assigned.is_ok_and(|assigned| {
            now.duration_since(assigned).unwrap_or_default() > POD_CREATION_GRACE_PERIOD
        });
        is_old && !owner.is_empty() && !known.contains(owner)
    };
    addresses.map(|entry| entry.path()).filter(is_orphaned).collect()
}

/// Assigns the node its addresses in the pod CIDRs. Pods that an earlier version attached with
/// CNI's `bridge` plugin reach the others through this node as well, by proxy ARP.
fn prepare(ranges: &[String]) -> Result<(), podnet::Error> {
    let ranges: Vec<podnet::Cidr> = ranges.iter().filter_map(|range| range.parse().ok()).collect();
    podnet::prepare(BRIDGE, &ranges)?;
    podnet::enable_proxy_arp(BRIDGE)
}

/// The CNI configuration directory in the `config` of the runtime's verbose status.
fn cni_config_dir(config: &str) -> Option<PathBuf> {
    let config: Value = serde_json::from_str(config).ok()?;
    config.get("cni")?.get("confDir")?.as_str().map(PathBuf::from)
}

/// Writes the configuration unless there is another one. Returns whether the file changed.
fn write_config(dir: &Path, text: &str) -> io::Result<bool> {
    std::fs::create_dir_all(dir)?;
    let path = dir.join(CONFIG_FILE);
    for entry in std::fs::read_dir(dir)? {
        let other = entry?.path();
        let extension = other.extension().and_then(|extension| extension.to_str());
        if other != path && matches!(extension, Some("conf" | "conflist" | "json")) {
            return Ok(false);
        }
    }
    if std::fs::read_to_string(&path).is_ok_and(|current| current == text) {
        return Ok(false);
    }
    let new = dir.join(".skiff.new");
    std::fs::write(&new, text)?;
    std::fs::rename(&new, &path)?;
    Ok(true)
}

/// CNI's plugins need `iptables` for masquerading and host ports. It is not used if skiff's own
/// proxy does both. With neither of them, pods only reach each other.
fn cni_config(ranges: &[String], addresses: &Path, iptables: bool) -> String {
    let ipam_ranges: Vec<Value> = ranges.iter().map(|range| json!([{"subnet": range}])).collect();
    let default_route = |range: &String| if range.contains(':') { "::/0" } else { "0.0.0.0/0" };
    let routes: Vec<Value> = ranges.iter().map(|range| json!({"dst": default_route(range)})).collect();
    let mut plugins = vec![json!({
        "type": "ptp",
        "ipMasq": iptables,
        "ipam": {"type": "host-local", "dataDir": addresses, "ranges": ipam_ranges, "routes": routes},
    })];
    if iptables {
        plugins.push(json!({"type": "portmap", "capabilities": {"portMappings": true}}));
    }
    json!({"cniVersion": "0.4.0", "name": NETWORK_NAME, "plugins": plugins}).to_string()
}

fn has_iptables() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join("iptables").exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_only_to_an_empty_config_dir() {
        let dir = tempfile::tempdir().expect("a directory");
        let dir = dir.path().join("net.d");
        assert!(write_config(&dir, "a").expect("written"));
        assert!(!write_config(&dir, "a").expect("the same"));
        assert!(write_config(&dir, "b").expect("another range"));
        std::fs::write(dir.join("05-other.conflist"), "{}").expect("written");
        assert!(!write_config(&dir, "c").expect("another configuration exists"));
        assert_eq!(std::fs::read_to_string(dir.join(CONFIG_FILE)).expect("text"), "b");
    }

    #[test]
    fn only_old_addresses_of_unknown_pods_are_released() {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, owner) in
            [("10.0.0.2", "one\r\neth0"), ("fd00::3", "two\neth0"), ("lock", ""), ("10.0.0.4", "")]
        {
            std::fs::write(dir.path().join(name), owner).expect("written");
        }
        let now = SystemTime::now();
        let check = |known: &[&str], at: SystemTime, expected: &[&str]| {
            let mut found = orphaned_leases(dir.path(), &known.iter().copied().collect(), at);
            found.sort();
            assert_eq!(found, expected.iter().map(|name| dir.path().join(name)).collect::<Vec<_>>());
        };
        check(&[], now, &[]);
        let later = now + Duration::from_secs(600);
        check(&["one", "two"], later, &[]);
        check(&["one"], later, &["fd00::3"]);
        check(&[], later, &["10.0.0.2", "fd00::3"]);
    }

    #[test]
    fn reads_cni_config_dir_of_the_runtime() {
        let config = r#"{"cni":{"binDir":"/usr/lib/cni","confDir":"/etc/cni/net.d"},"sandboxImage":"x"}"#;
        assert_eq!(cni_config_dir(config), Some(PathBuf::from("/etc/cni/net.d")));
        assert_eq!(cni_config_dir("{}"), None);
        assert_eq!(cni_config_dir("no JSON"), None);
    }

    #[test]
    fn config_has_both_address_families() {
        let ranges = ["10.42.0.0/24".to_owned(), "fd00::/64".to_owned()];
        let text = cni_config(&ranges, Path::new("/x"), true);
        let config: Value = serde_json::from_str(&text).expect("JSON");
        let plugin = &config["plugins"][0];
        assert_eq!(plugin["type"], "ptp", "replies of pods on one bridge would bypass connection tracking");
        assert_eq!(
            plugin["ipam"]["ranges"],
            json!([[{"subnet": "10.42.0.0/24"}], [{"subnet": "fd00::/64"}]])
        );
        assert_eq!(plugin["ipam"]["routes"], json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]));
        assert_eq!(config["plugins"][1]["type"], "portmap");
        let without_iptables: Value =
            serde_json::from_str(&cni_config(&ranges, Path::new("/x"), false)).expect("JSON");
        assert_eq!(without_iptables["plugins"].as_array().map(Vec::len), Some(1));
    }
}
