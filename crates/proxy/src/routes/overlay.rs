//! A link to nodes behind routers: packets of pods go inside packets of UDP between nodes (VXLAN).
//!
//! Nothing has to be learnt or told: a node's hardware address on this link follows from its own address, and the
//! gateway to its pods is the first address of their network, which nothing else has.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};

use nft::Net;
use sys::netlink::{Neighbour, Netlink, Overlay};

use super::Way;

/// What the link is called.
pub const LINK: &str = "skiff-vxlan";
/// The port everybody else uses who does this in Linux.
pub const PORT: u16 = 8472;
const ID: u32 = 0x736b;
/// What is around a packet: Ethernet, IPv4, UDP and VXLAN.
const AROUND: u32 = 50;
/// Of a link of which nothing is known.
const MTU: u32 = 1500;

/// Makes the link lead to the nodes that need it. The link's number, where there is need of it.
pub fn bring_about(
    netlink: &mut Netlink,
    ways: &BTreeMap<Net, (Way, IpAddr)>,
    own: &[Net],
    address: Option<IpAddr>,
) -> io::Result<Option<u32>> {
    let mut far: BTreeMap<Net, Ipv4Addr> = BTreeMap::new();
    let mut mtu = None;
    for (net, (way, node)) in ways {
        if let (Way::Overlay { underlay }, IpAddr::V4(node)) = (way, node) {
            far.insert(*net, *node);
            let link = netlink.links()?.into_iter().find(|link| link.index == *underlay);
            let size = link.map_or(MTU, |link| link.mtu);
            mtu = Some(mtu.map_or(size, |mtu: u32| mtu.min(size)));
        }
    }
    let (Some(mtu), Some(IpAddr::V4(address))) = (mtu, address) else {
        netlink.delete_link(LINK)?;
        return Ok(None);
    };
    let mtu = mtu.saturating_sub(AROUND);
    let index =
        netlink.ensure_overlay(&Overlay { name: LINK, id: ID, port: PORT, mac: mac(address), mtu })?;
    for net in own {
        // What this node itself sends to pods elsewhere comes from here.
        netlink.add_address(index, net.first(), if net.is_v6() { 128 } else { 32 })?;
    }
    let wanted: BTreeSet<Neighbour> =
        far.values().map(|node| Neighbour { mac: mac(*node), place: *node }).collect();
    let there: BTreeSet<Neighbour> = netlink.neighbours(index)?.into_iter().collect();
    for gone in there.difference(&wanted) {
        netlink.delete_neighbour(index, *gone)?;
    }
    for new in wanted.difference(&there) {
        netlink.add_neighbour(index, *new)?;
    }
    for (net, node) in far {
        netlink.add_resolved(index, net.first(), mac(node))?;
    }
    Ok(Some(index))
}

/// A node's hardware address on this link.
fn mac(node: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = node.octets();
    [0x0a, 0x73, a, b, c, d]
}
