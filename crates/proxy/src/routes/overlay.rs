//! Links to nodes behind routers: packets of pods go inside packets of UDP between nodes (VXLAN), one link for each kind
//! of packets they go in. What goes inside may be of the other kind.
//!
//! Nothing has to be learnt or told: a node's hardware address on such a link follows from its own address, and the
//! gateway to its pods is the first address of their network, which nothing else has.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use nft::Net;
use sys::netlink::{Neighbour, Netlink, Overlay};

use super::Way;

/// What the links are called: over IPv4, and over IPv6.
pub const LINKS: [&str; 2] = ["skiff-vxlan", "skiff-vxlan6"];
/// The port everybody else uses who does this in Linux.
pub const PORT: u16 = 8472;
const ID: u32 = 0x736b;
/// What is around a packet: Ethernet, IPv4 or IPv6, UDP and VXLAN.
const AROUND: [u32; 2] = [50, 70];
/// Of a link of which nothing is known.
const MTU: u32 = 1500;

/// Makes the links lead to the nodes that need them. The number of each, where there is need of it.
pub fn bring_about(
    netlink: &mut Netlink,
    ways: &BTreeMap<Net, (Way, IpAddr)>,
    own: &[Net],
    addresses: &[IpAddr],
) -> io::Result<[Option<u32>; 2]> {
    let mut indexes = [None; 2];
    for (kind, index) in indexes.iter_mut().enumerate() {
        let over_v6 = kind == 1;
        let address = addresses.iter().find(|address| address.is_ipv6() == over_v6);
        let far: BTreeMap<Net, (IpAddr, u32)> = ways
            .iter()
            .filter_map(|(net, (way, node))| match way {
                Way::Overlay { underlay } if node.is_ipv6() == over_v6 => Some((*net, (*node, *underlay))),
                _ => None,
            })
            .collect();
        *index = match address.filter(|_| !far.is_empty()) {
            Some(address) => Some(one(netlink, &far, own, *address)?),
            None => {
                netlink.delete_link(LINKS[kind])?;
                None
            }
        };
    }
    Ok(indexes)
}

/// One link, to nodes with their networks and the links by which packets to them leave.
fn one(
    netlink: &mut Netlink,
    far: &BTreeMap<Net, (IpAddr, u32)>,
    own: &[Net],
    address: IpAddr,
) -> io::Result<u32> {
    let (over_v6, kind) = (address.is_ipv6(), usize::from(address.is_ipv6()));
    let links = netlink.links()?;
    let size = |underlay: u32| links.iter().find(|link| link.index == underlay).map_or(MTU, |link| link.mtu);
    let mtu = far.values().map(|(_, underlay)| size(*underlay)).min().unwrap_or(MTU);
    let mtu = mtu.saturating_sub(AROUND[kind]);
    let overlay = Overlay { name: LINKS[kind], id: ID, port: PORT, mac: mac(address), mtu, over_v6 };
    let index = netlink.ensure_overlay(&overlay)?;
    for net in own {
        // What this node itself sends to pods elsewhere comes from here.
        netlink.add_address(index, net.first(), if net.is_v6() { 128 } else { 32 })?;
    }
    let wanted: BTreeSet<Neighbour> =
        far.values().map(|(node, _)| Neighbour { mac: mac(*node), place: *node }).collect();
    let there: BTreeSet<Neighbour> = netlink.neighbours(index)?.into_iter().collect();
    for gone in there.difference(&wanted) {
        netlink.delete_neighbour(index, *gone)?;
    }
    for new in wanted.difference(&there) {
        netlink.add_neighbour(index, *new)?;
    }
    for (net, (node, _)) in far {
        netlink.add_resolved(index, net.first(), mac(*node))?;
    }
    Ok(index)
}

/// A node's hardware address on these links: its address, or what an address of IPv6 comes to in as many bits.
fn mac(node: IpAddr) -> [u8; 6] {
    let [a, b, c, d] = match node {
        IpAddr::V4(node) => node.octets(),
        // FNV-1a: each bit of the address counts, and nodes are few.
        IpAddr::V6(node) => {
            let mix = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
            node.octets().iter().fold(0x811c_9dc5, mix).to_be_bytes()
        }
    };
    [0x0a, 0x73, a, b, c, d]
}
