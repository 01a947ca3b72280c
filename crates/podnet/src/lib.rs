//! The network of pods on one node: a bridge, and for every pod a pair of links with an address of the node's range.
//!
//! Nobody but the process that holds a pod's network sees into it, so the work is split: this node's side is
//! [`Network`]'s, the pod's side is [`attach`]'s, called where the pod is. Addresses are given
//! out by a [`pool::Pool`]. Knows nothing of pods beyond an id.

mod bandwidth;
mod cidr;
pub mod cni;
pub mod pool;

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};
use sys::netlink::{Netlink, Veth};

pub use bandwidth::Bandwidth;
pub use cidr::Cidr;

/// The name of the link inside every pod.
pub const INSIDE: &str = "eth0";
/// What an Ethernet carries, where nothing says that less gets through.
const MTU: u32 = 1500;

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

fn doing(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let doing = what.into();
    move |source| Error::Kernel { doing, source }
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

/// What ties one pod to the bridge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The name of this node's side, by which it is removed.
    pub link: String,
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
    pub prefix: u8,
    /// This node, as pods see it.
    pub gateway: IpAddr,
}

/// Makes the bridge with these ranges' first addresses and lets packets through it.
pub fn prepare(bridge: &str, ranges: &[Cidr]) -> Result<(), Error> {
    let mut host = Netlink::open().map_err(doing("speak to the kernel about networks"))?;
    let mac = mac(ranges.first().map(|range| range.gateway()));
    let index = host.ensure_bridge(bridge, MTU, mac).map_err(doing(format!("make the bridge {bridge}")))?;
    refuse_advertisements(bridge)?;
    for range in ranges {
        let named = doing(format!("give {bridge} the address {}", range.gateway()));
        host.add_address(index, range.gateway(), range.prefix()).map_err(named)?;
    }
    host.set_up(index).map_err(doing(format!("switch {bridge} on")))?;
    // Between the bridge and the world outside.
    let mut switches = vec!["ipv4/ip_forward".to_owned()];
    if ranges.iter().any(|range| range.gateway().is_ipv6()) {
        switches.push("ipv6/conf/all/forwarding".to_owned());
    }
    for switch in switches {
        let path = format!("/proc/sys/net/{switch}");
        let is_on = std::fs::read_to_string(&path).is_ok_and(|text| text.trim() == "1");
        if !is_on {
            std::fs::write(&path, "1").map_err(doing(format!("write {path}")))?;
        }
    }
    Ok(())
}

/// Gives the network namespace this process is in its link. `host` was opened where the bridge is.
pub fn attach(host: &mut Netlink, attachment: &Attachment) -> Result<(), Error> {
    let own = std::fs::File::open("/proc/self/ns/net").map_err(doing("open /proc/self/ns/net"))?;
    attach_in(host, attachment, own)
}

fn attach_in(host: &mut Netlink, attachment: &Attachment, own: std::fs::File) -> Result<(), Error> {
    let mut inside = Netlink::open().map_err(doing("speak to the kernel about the pod's network"))?;
    loopback(&mut inside)?;
    let bridge = host.link(&attachment.bridge).map_err(doing("look for the bridge"))?;
    let bridge = bridge.ok_or_else(|| {
        doing(format!("find the bridge {}", attachment.bridge))(io::ErrorKind::NotFound.into())
    })?;
    // Left from a pod of the same id whose end nobody saw.
    host.delete_link(&attachment.link).map_err(doing(format!("remove the old link {}", attachment.link)))?;
    let veth = Veth {
        name: &attachment.link,
        peer: INSIDE,
        namespace: own.as_fd(),
        peer_mac: mac(attachment.addresses.first().map(|address| address.ip)),
        master: bridge.index,
        mtu: bridge.mtu,
    };
    host.add_veth_off(&veth).map_err(doing(format!("make the link {}", attachment.link)))?;
    there(host, &own, || refuse_advertisements(&attachment.link))?;
    if let Some(near) = host.link(&attachment.link).map_err(doing("look for the pod's link on this node"))? {
        host.let_back(near.index).map_err(doing(format!("let {} send back", attachment.link)))?;
        // What this side sends is what the pod receives.
        bandwidth::limit(host, near.index, attachment.bandwidth.ingress)
            .map_err(doing("limit what the pod receives"))?;
        host.set_up(near.index).map_err(doing(format!("switch {} on", attachment.link)))?;
    }
    let link = inside.link(INSIDE).map_err(doing("look for the pod's link"))?;
    let link = link.ok_or_else(|| doing("find the pod's link")(io::ErrorKind::NotFound.into()))?;
    for address in &attachment.addresses {
        let named = doing(format!("give the pod the address {}", address.ip));
        inside.add_address(link.index, address.ip, address.prefix).map_err(named)?;
    }
    inside.set_up(link.index).map_err(doing("switch the pod's link on"))?;
    bandwidth::limit(&mut inside, link.index, attachment.bandwidth.egress)
        .map_err(doing("limit what the pod sends"))?;
    for address in &attachment.addresses {
        let named = doing(format!("route the pod's packets to {}", address.gateway));
        inside.add_default_route(link.index, address.gateway).map_err(named)?;
    }
    Ok(())
}

/// Takes no advice about routes from what is behind a link: a pod could draw the node's packets to itself.
fn refuse_advertisements(link: &str) -> Result<(), Error> {
    let path = format!("/proc/sys/net/ipv6/conf/{link}/accept_ra");
    if std::fs::read_to_string(&path).is_ok_and(|text| text.trim() == "0") {
        return Ok(());
    }
    match std::fs::write(&path, "0") {
        // Without IPv6 nobody listens. Where nothing may be changed it is the administrator's business.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ReadOnlyFilesystem) => {
            Ok(())
        }
        written => written.map_err(doing(format!("write {path}"))),
    }
}

/// Does something where the bridge is, and comes back.
fn there<T>(
    host: &Netlink,
    own: &std::fs::File,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    let enter = |namespace: std::os::fd::BorrowedFd<'_>| {
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace, kind).map_err(io::Error::from)
    };
    let node = host.namespace().map_err(doing("find the node's network"))?;
    enter(node.as_fd()).map_err(doing("enter the node's network"))?;
    let done = work();
    enter(own.as_fd()).map_err(doing("come back to the pod's network"))?;
    done
}

/// Switches on what every network namespace has.
pub fn loopback(inside: &mut Netlink) -> Result<(), Error> {
    let link = inside.link("lo").map_err(doing("look for the loopback"))?;
    let Some(link) = link else { return Ok(()) };
    inside.set_up(link.index).map_err(doing("switch the loopback on"))
}

/// Removes a pod's link; what is gone is no failure.
pub fn detach(link: &str) -> Result<(), Error> {
    let mut host = Netlink::open().map_err(doing("speak to the kernel about networks"))?;
    host.delete_link(link).map_err(doing(format!("remove the link {link}")))
}

/// The links of pods that are here, by the beginning all their names have.
pub fn links(prefix: &str) -> Result<Vec<String>, Error> {
    let mut host = Netlink::open().map_err(doing("speak to the kernel about networks"))?;
    let links = host.links().map_err(doing("list links"))?;
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
