//! The network of pods on one node: for every pod a pair of links, a route, and an address of the node's range.
//!
//! Pods share no link. A pod sends everything to its gateway, which is this node, and the node routes to each pod over
//! the pod's own link, so every packet passes the node's IP layer, its connection tracking and its rules
//! ([ADR 17](../../../docs/adr/0017-pods-are-routed.md)). A bridge without ports holds the node's address in the range.
//!
//! [`attach`] is called in the pod's network namespace, [`prepare`], [`restore`] and [`detach`] in the node's. Addresses
//! are allocated from a [`pool::Pool`]. Knows nothing of pods beyond an id.

mod bandwidth;
mod cidr;
pub mod cni;
pub mod pool;
mod restore;

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};
use sys::netlink::{Netlink, Veth};

pub use bandwidth::Bandwidth;
pub use cidr::Cidr;
pub use restore::{incomplete, restore};

/// The name of the link inside every pod.
pub const POD_INTERFACE: &str = "eth0";
/// What an Ethernet carries, where nothing says that less gets through.
const DEFAULT_MTU: u32 = 1500;
/// The protocol of pods' routes in the kernel's table, the same as that of routes to other nodes.
const ROUTE_PROTOCOL: u8 = 0x73;

/// Why a network cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {doing}")]
    Kernel { doing: String, source: io::Error },
    #[error("no address is free in {}", ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Exhausted { ranges: Vec<Cidr> },
    #[error("this node has no range of addresses for pods yet")]
    NoRange,
}

fn kernel_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let operation = what.into();
    move |source| Error::Kernel { doing: operation, source }
}

/// A port of this machine that leads to a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// Whose it is, by a name that no other pod of this machine has.
    pub pod: String,
    /// Where it leads.
    pub address: IpAddr,
    pub port: u16,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// At which address of this machine; any where it is empty.
    pub host_ip: String,
    pub host_port: u16,
}

/// How one pod is attached to its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The name of this node's side, by which it is removed.
    pub link: String,
    /// The bridge that has the node's addresses. Its MTU and its setting for loopback addresses are the links', too.
    pub bridge: String,
    /// One of each family at most, the first is the pod's own.
    pub addresses: Vec<Address>,
    #[serde(default)]
    pub bandwidth: Bandwidth,
}

/// One address of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub ip: IpAddr,
    /// Of the node's range. The pod's own address has the full length: nothing else is on its link.
    pub prefix: u8,
    /// This node, as pods see it.
    pub gateway: IpAddr,
}

impl Address {
    /// The length of a network that is one address.
    fn bits(&self) -> u8 {
        if self.ip.is_ipv6() { 128 } else { 32 }
    }
}

/// Makes the bridge with these ranges' first addresses and lets packets through it.
pub fn prepare(bridge: &str, ranges: &[Cidr]) -> Result<(), Error> {
    let mut host = Netlink::open().map_err(kernel_error("speak to the kernel about networks"))?;
    let mac = mac(ranges.first().map(|range| range.gateway()));
    let index = host
        .ensure_bridge(bridge, DEFAULT_MTU, mac)
        .map_err(kernel_error(format!("make the bridge {bridge}")))?;
    disable_accept_ra(bridge)?;
    for range in ranges {
        let named = kernel_error(format!("give {bridge} the address {}", range.gateway()));
        host.add_address(index, range.gateway(), range.prefix()).map_err(named)?;
    }
    host.set_up(index).map_err(kernel_error(format!("switch {bridge} on")))?;
    // Between the bridge and the world outside.
    let mut sysctls = vec!["ipv4/ip_forward".to_owned()];
    if ranges.iter().any(|range| range.gateway().is_ipv6()) {
        sysctls.push("ipv6/conf/all/forwarding".to_owned());
    }
    for sysctl in sysctls {
        let path = format!("/proc/sys/net/{sysctl}");
        let is_on = std::fs::read_to_string(&path).is_ok_and(|text| text.trim() == "1");
        if !is_on {
            std::fs::write(&path, "1").map_err(kernel_error(format!("write {path}")))?;
        }
    }
    Ok(())
}

/// Lets a bridge answer neighbour requests of its ports for addresses that this node routes elsewhere.
pub fn enable_proxy_arp(bridge: &str) -> Result<(), Error> {
    let path = format!("/proc/sys/net/ipv4/conf/{bridge}/proxy_arp");
    std::fs::write(&path, "1").map_err(kernel_error(format!("write {path}")))
}

/// Gives the network namespace this process is in its link. `host` was opened where the bridge is.
pub fn attach(host: &mut Netlink, attachment: &Attachment) -> Result<(), Error> {
    let own = std::fs::File::open("/proc/self/ns/net").map_err(kernel_error("open /proc/self/ns/net"))?;
    attach_in(host, attachment, own)
}

fn attach_in(host: &mut Netlink, attachment: &Attachment, own: std::fs::File) -> Result<(), Error> {
    let mut pod_netlink =
        Netlink::open().map_err(kernel_error("speak to the kernel about the pod's network"))?;
    loopback(&mut pod_netlink)?;
    let bridge = host.link(&attachment.bridge).map_err(kernel_error("look for the bridge"))?;
    let bridge = bridge.ok_or_else(|| {
        kernel_error(format!("find the bridge {}", attachment.bridge))(io::ErrorKind::NotFound.into())
    })?;
    // Left from a pod of the same id whose end nobody saw.
    host.delete_link(&attachment.link)
        .map_err(kernel_error(format!("remove the old link {}", attachment.link)))?;
    let veth = Veth {
        name: &attachment.link,
        peer: POD_INTERFACE,
        namespace: own.as_fd(),
        mac: Some(node_mac(attachment)),
        peer_mac: mac(attachment.addresses.first().map(|address| address.ip)),
        master: 0,
        mtu: bridge.mtu,
    };
    host.add_veth_down(&veth).map_err(kernel_error(format!("make the link {}", attachment.link)))?;
    run_in_node_namespace(host, &own, || configure(&attachment.link, &attachment.bridge))?;
    if let Some(host_link) =
        host.link(&attachment.link).map_err(kernel_error("look for the pod's link on this node"))?
    {
        // What this side sends is what the pod receives.
        bandwidth::limit(host, host_link.index, attachment.bandwidth.ingress)
            .map_err(kernel_error("limit what the pod receives"))?;
        route(host, host_link.index, attachment)?;
    }
    let link = pod_netlink.link(POD_INTERFACE).map_err(kernel_error("look for the pod's link"))?;
    let link = link.ok_or_else(|| kernel_error("find the pod's link")(io::ErrorKind::NotFound.into()))?;
    for address in &attachment.addresses {
        let named = kernel_error(format!("give the pod the address {}", address.ip));
        pod_netlink.add_address(link.index, address.ip, address.bits()).map_err(named)?;
    }
    pod_netlink.set_up(link.index).map_err(kernel_error("switch the pod's link on"))?;
    bandwidth::limit(&mut pod_netlink, link.index, attachment.bandwidth.egress)
        .map_err(kernel_error("limit what the pod sends"))?;
    for address in &attachment.addresses {
        let named = kernel_error(format!("route the pod's packets to {}", address.gateway));
        pod_netlink.add_default_route(link.index, address.gateway).map_err(named)?;
    }
    Ok(())
}

/// Leads what is for the pod to its link, whose other end finds its gateway there. What is there already stays.
fn route(host: &mut Netlink, index: u32, attachment: &Attachment) -> Result<(), Error> {
    host.set_up(index).map_err(kernel_error(format!("switch {} on", attachment.link)))?;
    for address in &attachment.addresses {
        // Each pod's link has the same address, which is only ever asked for on that link.
        let named = kernel_error(format!("give {} the address {}", attachment.link, address.gateway));
        host.add_address(index, address.gateway, address.bits()).map_err(named)?;
        let named = kernel_error(format!("route {} to {}", address.ip, attachment.link));
        host.add_link_route(index, address.ip, address.bits(), ROUTE_PROTOCOL).map_err(named)?;
    }
    Ok(())
}

/// The hardware address of this node's side of every pod's link, and of the bridge: pods that were ports of the bridge
/// know their gateway by it.
fn node_mac(attachment: &Attachment) -> [u8; 6] {
    mac(attachment.addresses.first().map(|address| address.gateway))
}

/// The kernel's settings of this node's side.
fn configure(link: &str, bridge: &str) -> Result<(), Error> {
    disable_accept_ra(link)?;
    // Without a link-local address, which detection of duplicates delays, the kernel cannot ask for the pod's neighbour
    // entry when it forwards the first packets.
    ipv6_setting(link, "accept_dad", "0")?;
    // Packets of loopback addresses pass the links to pods once there are rules that allow it, see `proxy`.
    let path = |link: &str| format!("/proc/sys/net/ipv4/conf/{link}/route_localnet");
    match std::fs::read_to_string(path(bridge)) {
        Ok(text) if text.trim() == "1" => {
            std::fs::write(path(link), "1").map_err(kernel_error(format!("write {}", path(link))))
        }
        _ => Ok(()),
    }
}

/// Takes no advice about routes from what is behind a link: a pod could draw the node's packets to itself.
fn disable_accept_ra(link: &str) -> Result<(), Error> {
    ipv6_setting(link, "accept_ra", "0")
}

fn ipv6_setting(link: &str, name: &str, value: &str) -> Result<(), Error> {
    let path = format!("/proc/sys/net/ipv6/conf/{link}/{name}");
    if std::fs::read_to_string(&path).is_ok_and(|text| text.trim() == value) {
        return Ok(());
    }
    match std::fs::write(&path, value) {
        // Without IPv6 nobody listens. Where nothing may be changed it is the administrator's business.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ReadOnlyFilesystem) => {
            Ok(())
        }
        written => written.map_err(kernel_error(format!("write {path}"))),
    }
}

/// Does something where the bridge is, and comes back.
fn run_in_node_namespace<T>(
    host: &Netlink,
    own: &std::fs::File,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    let enter = |namespace: std::os::fd::BorrowedFd<'_>| {
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace, kind).map_err(io::Error::from)
    };
    let node = host.namespace().map_err(kernel_error("find the node's network"))?;
    enter(node.as_fd()).map_err(kernel_error("enter the node's network"))?;
    let done = work();
    enter(own.as_fd()).map_err(kernel_error("come back to the pod's network"))?;
    done
}

/// Switches on what every network namespace has.
pub fn loopback(pod_netlink: &mut Netlink) -> Result<(), Error> {
    let link = pod_netlink.link("lo").map_err(kernel_error("look for the loopback"))?;
    let Some(link) = link else { return Ok(()) };
    pod_netlink.set_up(link.index).map_err(kernel_error("switch the loopback on"))
}

/// Removes a pod's link; what is gone is no failure.
pub fn detach(link: &str) -> Result<(), Error> {
    let mut host = Netlink::open().map_err(kernel_error("speak to the kernel about networks"))?;
    host.delete_link(link).map_err(kernel_error(format!("remove the link {link}")))
}

/// The links of pods that are here, by the beginning all their names have.
pub fn links(prefix: &str) -> Result<Vec<String>, Error> {
    let mut host = Netlink::open().map_err(kernel_error("speak to the kernel about networks"))?;
    let links = host.links().map_err(kernel_error("list links"))?;
    Ok(links.into_iter().map(|link| link.name).filter(|name| name.starts_with(prefix)).collect())
}

/// A hardware address that follows from a pod's own, or from the bridge's, so that neighbours who remember an address are
/// not misled when another pod gets it.
pub fn mac(address: Option<IpAddr>) -> [u8; 6] {
    let mut mac = [0x0a, 0x58, 0, 0, 0, 0];
    match address {
        Some(IpAddr::V4(ip)) => mac[2..].copy_from_slice(&ip.octets()),
        Some(IpAddr::V6(ip)) => mac[2..].copy_from_slice(&ip.octets()[12..]),
        None => {}
    }
    mac
}

#[cfg(test)]
mod tests;
