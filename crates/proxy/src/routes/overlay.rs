//! VXLAN links to nodes behind routers, one link per address family of the nodes. The encapsulated
//! packets may be of the other family. Counterpart: flannel's VXLAN backend.
//!
//! Nothing has to be learned or announced: a node's MAC address on the link is derived from its IP
//! address, and the gateway to its pods is the first address of their network, which nothing else uses.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use nft::IpNet;
use sys::netlink::{FdbEntry, Netlink, Overlay};

use super::NextHop;

/// The names of the links over IPv4 and IPv6.
pub const LINK_NAMES: [&str; 2] = ["skiff-vxlan", "skiff-vxlan6"];
/// The default VXLAN port of Linux, as flannel uses it.
pub const PORT: u16 = 8472;
const VNI: u32 = 0x736b;
/// The overhead of encapsulation: Ethernet, IPv4 or IPv6, UDP and VXLAN headers.
const HEADER_OVERHEAD_BYTES: [u32; 2] = [50, 70];
/// The MTU of a link that was not found.
const DEFAULT_MTU: u32 = 1500;

/// Creates or deletes the links and updates their neighbours. Returns the index of each link that
/// exists.
pub fn sync_links(
    netlink: &mut Netlink,
    next_hops: &BTreeMap<IpNet, (NextHop, IpAddr)>,
    own: &[IpNet],
    addresses: &[IpAddr],
) -> io::Result<[Option<u32>; 2]> {
    let mut indexes = [None; 2];
    for (kind, index) in indexes.iter_mut().enumerate() {
        let over_v6 = kind == 1;
        let address = addresses.iter().find(|address| address.is_ipv6() == over_v6);
        let remote_nodes: BTreeMap<IpNet, (IpAddr, u32)> = next_hops
            .iter()
            .filter_map(|(net, (next_hop, node))| match next_hop {
                NextHop::Overlay { underlay } if node.is_ipv6() == over_v6 => {
                    Some((*net, (*node, *underlay)))
                }
                _ => None,
            })
            .collect();
        *index = match address.filter(|_| !remote_nodes.is_empty()) {
            Some(address) => Some(sync_link(netlink, &remote_nodes, own, *address)?),
            None => {
                netlink.delete_link(LINK_NAMES[kind])?;
                None
            }
        };
    }
    Ok(indexes)
}

/// Updates one link. `remote_nodes` has the nodes by their pod networks, with the index of the link
/// that leads to each.
fn sync_link(
    netlink: &mut Netlink,
    remote_nodes: &BTreeMap<IpNet, (IpAddr, u32)>,
    own: &[IpNet],
    address: IpAddr,
) -> io::Result<u32> {
    let (over_v6, kind) = (address.is_ipv6(), usize::from(address.is_ipv6()));
    let links = netlink.links()?;
    let size =
        |underlay: u32| links.iter().find(|link| link.index == underlay).map_or(DEFAULT_MTU, |link| link.mtu);
    let mtu = remote_nodes.values().map(|(_, underlay)| size(*underlay)).min().unwrap_or(DEFAULT_MTU);
    let mtu = mtu.saturating_sub(HEADER_OVERHEAD_BYTES[kind]);
    let overlay = Overlay { name: LINK_NAMES[kind], id: VNI, port: PORT, mac: mac(address), mtu, over_v6 };
    let index = netlink.ensure_overlay(&overlay)?;
    for net in own {
        // The source address of packets from this node to pods on other nodes.
        netlink.add_address(index, net.first(), if net.is_v6() { 128 } else { 32 })?;
    }
    let desired: BTreeSet<FdbEntry> =
        remote_nodes.values().map(|(node, _)| FdbEntry { mac: mac(*node), remote: *node }).collect();
    let existing: BTreeSet<FdbEntry> = netlink.fdb_entries(index)?.into_iter().collect();
    for stale in existing.difference(&desired) {
        netlink.delete_fdb_entry(index, *stale)?;
    }
    for new in desired.difference(&existing) {
        netlink.add_fdb_entry(index, *new)?;
    }
    for (net, (node, _)) in remote_nodes {
        netlink.add_neigh_entry(index, net.first(), mac(*node))?;
    }
    Ok(index)
}

/// A node's MAC address on the link: its IPv4 address, or a 32-bit hash of its IPv6 address.
fn mac(node: IpAddr) -> [u8; 6] {
    let [a, b, c, d] = match node {
        IpAddr::V4(node) => node.octets(),
        // FNV-1a, which depends on every bit of the address. Collisions are unlikely with so few nodes.
        IpAddr::V6(node) => {
            let mix = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
            node.octets().iter().fold(0x811c_9dc5, mix).to_be_bytes()
        }
    };
    [0x0a, 0x73, a, b, c, d]
}
