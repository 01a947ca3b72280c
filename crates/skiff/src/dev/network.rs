//! The network of `skiff dev`: a bridge between the nodes and this host.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Child;

use anyhow::Context as _;
use podnet::Cidr;
use proxy::Firewall as _;
use sys::netlink::{Netlink, Veth};

/// Name of the link inside each node.
pub const NODE_LINK: &str = "eth0";
/// Name of the bridge and of the nftables table.
const BRIDGE: &str = "skiff-dev";
const IP_FORWARD_SYSCTL: &str = "/proc/sys/net/ipv4/ip_forward";
/// Marker file: IP forwarding was disabled on this host before.
const FORWARDING_DISABLED_MARKER: &str = "ip-forward-disabled";
/// The name of the marker file in earlier versions, whose clusters can be removed as well.
const OLD_FORWARDING_DISABLED_MARKER: &str = "forwarding-was-off";
/// Prefix of the names of the veth ends on the host.
const HOST_LINK_PREFIX: &str = "skd";
const MTU: u32 = 1500;
/// Offset of the nodes' addresses in the network. Node 1 has the next address.
const FIRST_NODE_OFFSET: u64 = 10;

/// The bridge and the range of addresses on it.
pub struct DevNetwork {
    dir: PathBuf,
    range: Option<Cidr>,
    /// Whether nodes reach each other only through the gateway, without a common link.
    point_to_point: bool,
}

/// Holds the network namespace of a node open, even after the process of the node has exited.
pub struct NodeNamespace {
    _namespace: File,
}

impl DevNetwork {
    pub fn create(dir: &Path, range: Cidr, point_to_point: bool) -> anyhow::Result<DevNetwork> {
        let mut netlink = Netlink::open().context("cannot open a netlink socket")?;
        let is_there = netlink.link(BRIDGE)?.is_some();
        anyhow::ensure!(!is_there, "there is a link {BRIDGE} already: run skiff dev --remove");
        let mac = podnet::mac(Some(range.gateway()));
        let index =
            netlink.ensure_bridge(BRIDGE, MTU, mac).with_context(|| format!("cannot create {BRIDGE}"))?;
        netlink.add_address(index, range.gateway(), range.prefix())?;
        netlink.set_up(index)?;
        let networks = DevNetwork { dir: dir.to_owned(), range: Some(range), point_to_point };
        // If a later step fails, the bridge must be removed.
        match networks.masquerade(range) {
            Ok(()) => Ok(networks),
            Err(error) => {
                let _ = networks.remove();
                Err(error)
            }
        }
    }

    /// Masquerades traffic from the nodes and enables IP forwarding.
    fn masquerade(&self, range: Cidr) -> anyhow::Result<()> {
        let before = std::fs::read_to_string(IP_FORWARD_SYSCTL).unwrap_or_default();
        if before.trim() == "0" {
            std::fs::write(self.dir.join(FORWARDING_DISABLED_MARKER), "")?;
            std::fs::write(IP_FORWARD_SYSCTL, "1")
                .with_context(|| format!("cannot write {IP_FORWARD_SYSCTL}"))?;
        }
        let network: nft::IpNet = range.to_string().parse().context("the node network")?;
        let mut rules = nft::Ruleset::default();
        rules.put(&"outgoing".into(), proxy::base_ruleset::masquerade_outgoing(&[network]));
        proxy::NetlinkFirewall::of(BRIDGE).apply(&rules.full_batch()).context("cannot create rules")
    }

    /// The network of an earlier process, to be removed.
    pub fn from_previous_run(dir: &Path) -> DevNetwork {
        DevNetwork { dir: dir.to_owned(), range: None, point_to_point: false }
    }

    /// The address of a node, by its number.
    pub fn address(&self, number: u8) -> anyhow::Result<IpAddr> {
        let range = self.range.context("no network")?;
        range.nth(FIRST_NODE_OFFSET + u64::from(number)).with_context(|| format!("{range} is too small"))
    }

    /// Connects a process that waits in its network namespace to the bridge, and sends it its address
    /// over stdin.
    pub fn connect(&self, number: u8, process: &mut Child) -> anyhow::Result<NodeNamespace> {
        let (mut stdin, stdout) = process.stdin.take().zip(process.stdout.take()).context("no pipes")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        anyhow::ensure!(line.trim() == "ready", "the node process has not entered its network namespace");
        let path = format!("/proc/{}/ns/net", process.id());
        let namespace = File::open(&path).with_context(|| format!("cannot open {path}"))?;
        let mut netlink = Netlink::open()?;
        let bridge = netlink.link(BRIDGE)?.with_context(|| format!("{BRIDGE} is gone"))?;
        netlink.add_veth(&Veth {
            name: &format!("{HOST_LINK_PREFIX}{number}"),
            peer: NODE_LINK,
            namespace: namespace.as_fd(),
            mac: None,
            peer_mac: [0x0a, 0x73, 0, 0, 0, number],
            master: bridge.index,
            mtu: MTU,
        })?;
        let range = self.range.context("no network")?;
        let prefix = if self.point_to_point { 32 } else { range.prefix() };
        writeln!(stdin, "{} {prefix} {}", self.address(number)?, range.gateway())?;
        Ok(NodeNamespace { _namespace: namespace })
    }

    /// Removes all links and rules, and restores IP forwarding.
    pub fn remove(self) -> anyhow::Result<()> {
        proxy::NetlinkFirewall::of(BRIDGE)
            .apply(&nft::Batch::delete_table())
            .context("cannot remove rules")?;
        if forwarding_was_disabled(&self.dir) {
            std::fs::write(IP_FORWARD_SYSCTL, "0")
                .with_context(|| format!("cannot write {IP_FORWARD_SYSCTL}"))?;
        }
        let mut netlink = Netlink::open()?;
        for link in netlink.links()? {
            let is_node_link =
                link.name.strip_prefix(HOST_LINK_PREFIX).is_some_and(|rest| rest.parse::<u8>().is_ok());
            if link.name == BRIDGE || is_node_link {
                netlink.delete_link(&link.name).with_context(|| format!("cannot remove {}", link.name))?;
            }
        }
        Ok(())
    }
}

/// Whether the cluster in this directory has enabled IP forwarding on the host.
fn forwarding_was_disabled(dir: &Path) -> bool {
    [FORWARDING_DISABLED_MARKER, OLD_FORWARDING_DISABLED_MARKER].iter().any(|name| dir.join(name).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_marker_of_earlier_versions() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!forwarding_was_disabled(dir.path()));
        std::fs::write(dir.path().join("forwarding-was-off"), "").unwrap();
        assert!(forwarding_was_disabled(dir.path()));
    }
}
