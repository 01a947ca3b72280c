//! The pod network of a node: a veth pair, a route and an address of the node's pod CIDR for every pod.
//!
//! Pods share no link. A pod sends all packets to its gateway, which is the node, and the node routes
//! to each pod over the pod's own veth pair. Every packet therefore passes the node's IP layer with its
//! connection tracking and firewall rules ([ADR 17](../../../docs/adr/0017-pods-are-routed.md)). A
//! bridge without ports holds the node's address in the pod CIDR.
//!
//! [`attach`] must be called in the pod's network namespace; [`prepare`], [`restore`](mod@restore) and [`detach`] in
//! the node's. Addresses are allocated from a [`pool::Pool`]. Does not know pods beyond an ID.

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

/// The name of the interface in every pod.
pub const POD_INTERFACE: &str = "eth0";
/// The default MTU of Ethernet.
const DEFAULT_MTU: u32 = 1500;
/// The routing protocol number of pod routes. Routes to other nodes use the same number.
const ROUTE_PROTOCOL: u8 = 0x73;

/// An error from the pod network.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {doing}")]
    Kernel { doing: String, source: io::Error },
    #[error("no free pod address in {}", ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Exhausted { ranges: Vec<Cidr> },
    #[error("the node has no pod CIDR yet")]
    NoRange,
}

fn kernel_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let operation = what.into();
    move |source| Error::Kernel { doing: operation, source }
}

/// A host port of this node that is forwarded to a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// Identifies the pod. Unique on this node.
    pub pod: String,
    /// The pod's address.
    pub address: IpAddr,
    pub port: u16,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// The address of this node; every address if empty.
    pub host_ip: String,
    pub host_port: u16,
}

/// How a pod is attached to its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The name of the node's end of the veth pair, which [`detach`] takes.
    pub link: String,
    /// The bridge with the node's addresses. The veth pair gets the bridge's MTU and `route_localnet`
    /// setting.
    pub bridge: String,
    /// At most one per family. The first is the pod's primary address.
    pub addresses: Vec<Address>,
    #[serde(default)]
    pub bandwidth: Bandwidth,
}

/// An address of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub ip: IpAddr,
    /// The prefix length of the node's pod CIDR. The address is configured with the full length (/32 or
    /// /128), because no other address is on the link.
    pub prefix: u8,
    /// The node's address as seen by the pod.
    pub gateway: IpAddr,
}

impl Address {
    /// The length of a single-address prefix.
    fn bits(&self) -> u8 {
        if self.ip.is_ipv6() { 128 } else { 32 }
    }
}

/// Creates the bridge with the gateway addresses of these ranges and enables IP forwarding.
pub fn prepare(bridge: &str, ranges: &[Cidr]) -> Result<(), Error> {
    let mut host = Netlink::open().map_err(kernel_error("open a netlink socket"))?;
    let mac = mac(ranges.first().map(|range| range.gateway()));
    let index = host
        .ensure_bridge(bridge, DEFAULT_MTU, mac)
        .map_err(kernel_error(format!("create the bridge {bridge}")))?;
    disable_accept_ra(bridge)?;
    for range in ranges {
        let named = kernel_error(format!("assign {bridge} the address {}", range.gateway()));
        host.add_address(index, range.gateway(), range.prefix()).map_err(named)?;
    }
    host.set_up(index).map_err(kernel_error(format!("bring up {bridge}")))?;
    // Between pods and everything outside the node.
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

/// Enables proxy ARP: the node answers ARP requests on the bridge for addresses that it routes
/// elsewhere.
pub fn enable_proxy_arp(bridge: &str) -> Result<(), Error> {
    let path = format!("/proc/sys/net/ipv4/conf/{bridge}/proxy_arp");
    std::fs::write(&path, "1").map_err(kernel_error(format!("write {path}")))
}

/// Attaches the calling thread's network namespace. `host` must have been opened in the namespace of
/// the bridge.
pub fn attach(host: &mut Netlink, attachment: &Attachment) -> Result<(), Error> {
    let own = std::fs::File::open("/proc/self/ns/net").map_err(kernel_error("open /proc/self/ns/net"))?;
    attach_in(host, attachment, own)
}

fn attach_in(host: &mut Netlink, attachment: &Attachment, own: std::fs::File) -> Result<(), Error> {
    let mut pod_netlink =
        Netlink::open().map_err(kernel_error("open a netlink socket in the pod's network namespace"))?;
    loopback(&mut pod_netlink)?;
    let bridge = host.link(&attachment.bridge).map_err(kernel_error("look up the bridge"))?;
    let bridge = bridge.ok_or_else(|| {
        kernel_error(format!("find the bridge {}", attachment.bridge))(io::ErrorKind::NotFound.into())
    })?;
    // A link with this name is left over from a pod with the same ID that was not detached.
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
    host.add_veth_down(&veth).map_err(kernel_error(format!("create the link {}", attachment.link)))?;
    run_in_node_namespace(host, &own, || configure(&attachment.link, &attachment.bridge))?;
    if let Some(host_link) =
        host.link(&attachment.link).map_err(kernel_error("look up the node's end of the pod's link"))?
    {
        // What the node's end sends is the pod's ingress.
        bandwidth::limit(host, host_link.index, attachment.bandwidth.ingress)
            .map_err(kernel_error("limit the pod's ingress bandwidth"))?;
        route(host, host_link.index, attachment)?;
    }
    let link = pod_netlink.link(POD_INTERFACE).map_err(kernel_error("look up the pod's link"))?;
    let link = link.ok_or_else(|| kernel_error("find the pod's link")(io::ErrorKind::NotFound.into()))?;
    for address in &attachment.addresses {
        let named = kernel_error(format!("assign the pod the address {}", address.ip));
        pod_netlink.add_address(link.index, address.ip, address.bits()).map_err(named)?;
    }
    pod_netlink.set_up(link.index).map_err(kernel_error("bring up the pod's link"))?;
    bandwidth::limit(&mut pod_netlink, link.index, attachment.bandwidth.egress)
        .map_err(kernel_error("limit the pod's egress bandwidth"))?;
    for address in &attachment.addresses {
        let named = kernel_error(format!("add the pod's default route through {}", address.gateway));
        pod_netlink.add_default_route(link.index, address.gateway).map_err(named)?;
    }
    Ok(())
}

/// Adds the gateway address to the pod's link and routes the pod's addresses to it. Existing entries
/// are kept.
fn route(host: &mut Netlink, index: u32, attachment: &Attachment) -> Result<(), Error> {
    host.set_up(index).map_err(kernel_error(format!("bring up {}", attachment.link)))?;
    for address in &attachment.addresses {
        // Every pod's link has the same gateway address. That works because it is only resolved on that
        // link.
        let named = kernel_error(format!("assign {} the address {}", attachment.link, address.gateway));
        host.add_address(index, address.gateway, address.bits()).map_err(named)?;
        let named = kernel_error(format!("add the route for {} to {}", address.ip, attachment.link));
        host.add_link_route(index, address.ip, address.bits(), ROUTE_PROTOCOL).map_err(named)?;
    }
    Ok(())
}

/// The MAC address of the node's end of every veth pair. It is the bridge's, because pods that were
/// attached to the bridge by an earlier version have it in their neighbour tables.
fn node_mac(attachment: &Attachment) -> [u8; 6] {
    mac(attachment.addresses.first().map(|address| address.gateway))
}

/// Sets the sysctls of the node's end.
fn configure(link: &str, bridge: &str) -> Result<(), Error> {
    disable_accept_ra(link)?;
    // Duplicate address detection delays the link-local address. Without that the kernel cannot resolve
    // the pod's neighbour entry when it forwards the first packets.
    ipv6_setting(link, "accept_dad", "0")?;
    // Packets with loopback addresses may pass to pods as soon as the firewall rules for them exist:
    // see `proxy`, which sets this on the bridge.
    let path = |link: &str| format!("/proc/sys/net/ipv4/conf/{link}/route_localnet");
    match std::fs::read_to_string(path(bridge)) {
        Ok(text) if text.trim() == "1" => {
            std::fs::write(path(link), "1").map_err(kernel_error(format!("write {}", path(link))))
        }
        _ => Ok(()),
    }
}

/// Disables router advertisements on a link. Otherwise a pod could redirect the node's traffic to
/// itself.
fn disable_accept_ra(link: &str) -> Result<(), Error> {
    ipv6_setting(link, "accept_ra", "0")
}

fn ipv6_setting(link: &str, name: &str, value: &str) -> Result<(), Error> {
    let path = format!("/proc/sys/net/ipv6/conf/{link}/{name}");
    if std::fs::read_to_string(&path).is_ok_and(|text| text.trim() == value) {
        return Ok(());
    }
    match std::fs::write(&path, value) {
        // NotFound: IPv6 is disabled. ReadOnlyFilesystem: sysctls are the administrator's
        // responsibility.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ReadOnlyFilesystem) => {
            Ok(())
        }
        written => written.map_err(kernel_error(format!("write {path}"))),
    }
}

/// Runs `work` in the node's network namespace and returns to the pod's.
fn run_in_node_namespace<T>(
    host: &Netlink,
    own: &std::fs::File,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    let enter = |namespace: std::os::fd::BorrowedFd<'_>| {
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace, kind).map_err(io::Error::from)
    };
    let node = host.namespace().map_err(kernel_error("find the node's network namespace"))?;
    enter(node.as_fd()).map_err(kernel_error("enter the node's network namespace"))?;
    let done = work();
    enter(own.as_fd()).map_err(kernel_error("return to the pod's network namespace"))?;
    done
}

/// Brings up the loopback interface.
pub fn loopback(pod_netlink: &mut Netlink) -> Result<(), Error> {
    let link = pod_netlink.link("lo").map_err(kernel_error("look up the loopback interface"))?;
    let Some(link) = link else { return Ok(()) };
    pod_netlink.set_up(link.index).map_err(kernel_error("bring up the loopback interface"))
}

/// Deletes a pod's link. It is no error if it does not exist.
pub fn detach(link: &str) -> Result<(), Error> {
    let mut host = Netlink::open().map_err(kernel_error("open a netlink socket"))?;
    host.delete_link(link).map_err(kernel_error(format!("remove the link {link}")))
}

/// The names of all links with this prefix, which are those of the pods on this node.
pub fn links(prefix: &str) -> Result<Vec<String>, Error> {
    let mut host = Netlink::open().map_err(kernel_error("open a netlink socket"))?;
    let links = host.links().map_err(kernel_error("list links"))?;
    Ok(links.into_iter().map(|link| link.name).filter(|name| name.starts_with(prefix)).collect())
}

/// A MAC address derived from the IP address. When another pod gets the address, stale neighbour
/// entries are still right.
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
