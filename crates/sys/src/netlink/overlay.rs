//! VXLAN links and their forwarding entries.

use std::io;
use std::net::IpAddr;

use super::message::{Message, attributes, c_string};
use super::{ACK, CREATE, DUMP, EXCLUSIVE, Netlink, REPLACE, address, family, number, octets};

/// `IFLA_VXLAN_*`
const VXLAN_ID: u16 = 1;
const VXLAN_LEARNING: u16 = 7;
const VXLAN_PORT: u16 = 15;
const VXLAN_LOCAL6: u16 = 17;
/// `NUD_PERMANENT`, and `NTF_SELF`: the entry belongs to the link's own forwarding table.
const STATE_PERMANENT: u16 = 0x80;
const FLAG_SELF: u8 = 0x02;

/// A VXLAN link.
#[derive(Clone, Copy, Debug)]
pub struct Overlay<'a> {
    pub name: &'a str,
    /// The VXLAN network identifier.
    pub id: u32,
    /// The UDP destination port.
    pub port: u16,
    pub mac: [u8; 6],
    pub mtu: u32,
    /// Whether packets are encapsulated in IPv6 instead of IPv4. A link supports only one of them.
    pub over_v6: bool,
}

/// An entry of a VXLAN link's forwarding database (FDB).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FdbEntry {
    /// The MAC address behind the link.
    pub mac: [u8; 6],
    /// The address that packets for it are sent to.
    pub remote: IpAddr,
}

impl Netlink {
    /// Creates a VXLAN link, or updates the MAC address and MTU of the existing one, and sets it up.
    /// Returns its index.
    pub fn ensure_overlay(&mut self, overlay: &Overlay<'_>) -> io::Result<u32> {
        let found = self.link(overlay.name)?;
        let (index, flags) = found.as_ref().map_or((0, CREATE | EXCLUSIVE), |link| (link.index, 0));
        let mut message = Message::link(libc::RTM_NEWLINK, flags | ACK, index, 0, 0);
        if found.is_none() {
            message.attribute(libc::IFLA_IFNAME, &c_string(overlay.name));
        }
        message.attribute(libc::IFLA_MTU, &overlay.mtu.to_ne_bytes());
        message.attribute(libc::IFLA_ADDRESS, &overlay.mac);
        if found.is_none() {
            message.nested(libc::IFLA_LINKINFO, |info| {
                info.attribute(libc::IFLA_INFO_KIND, b"vxlan");
                info.nested(libc::IFLA_INFO_DATA, |data| {
                    data.attribute(VXLAN_ID, &overlay.id.to_ne_bytes());
                    data.attribute(VXLAN_LEARNING, &[0]);
                    data.attribute(VXLAN_PORT, &overlay.port.to_be_bytes());
                    if overlay.over_v6 {
                        // The unspecified address; it only selects the address family.
                        data.attribute(VXLAN_LOCAL6, &[0; 16]);
                    }
                });
            });
        }
        self.request(message)?;
        let index = self.link(overlay.name)?.map(|link| link.index);
        let index = index.ok_or(io::ErrorKind::NotFound)?;
        self.set_up(index)?;
        Ok(index)
    }

    /// Adds or replaces a forwarding entry.
    pub fn add_fdb_entry(&mut self, index: u32, fdb_entry: FdbEntry) -> io::Result<()> {
        self.request(fdb_message(libc::RTM_NEWNEIGH, CREATE | REPLACE | ACK, index, fdb_entry)).map(drop)
    }

    /// Deletes a forwarding entry. A missing entry is not an error.
    pub fn delete_fdb_entry(&mut self, index: u32, fdb_entry: FdbEntry) -> io::Result<()> {
        match self.request(fdb_message(libc::RTM_DELNEIGH, ACK, index, fdb_entry)) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => Ok(()),
        }
    }

    /// All forwarding entries of a link.
    pub fn fdb_entries(&mut self, index: u32) -> io::Result<Vec<FdbEntry>> {
        let mut message = Message::new(libc::RTM_GETNEIGH, DUMP);
        message.raw(&[libc::AF_BRIDGE as u8, 0, 0, 0]);
        message.raw(&[0; 8]);
        let responses = self.request(message)?;
        Ok(responses.iter().filter_map(|response| parse_fdb_entry(response, index)).collect())
    }

    /// Adds a permanent neighbour entry, so that the address needs no resolution by ARP or NDP.
    pub fn add_neigh_entry(&mut self, index: u32, to: IpAddr, mac: [u8; 6]) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWNEIGH, CREATE | REPLACE | ACK);
        header(&mut message, family(to), index, 0);
        message.attribute(libc::NDA_DST, &octets(to));
        message.attribute(libc::NDA_LLADDR, &mac);
        self.request(message).map(drop)
    }
}

fn header(message: &mut Message, family: u8, index: u32, flags: u8) {
    message.raw(&[family, 0, 0, 0]);
    message.raw(&index.to_ne_bytes());
    message.raw(&STATE_PERMANENT.to_ne_bytes());
    message.raw(&[flags, 0]);
}

fn fdb_message(kind: u16, flags: u16, index: u32, fdb_entry: FdbEntry) -> Message {
    let mut message = Message::new(kind, flags);
    header(&mut message, libc::AF_BRIDGE as u8, index, FLAG_SELF);
    message.attribute(libc::NDA_LLADDR, &fdb_entry.mac);
    message.attribute(libc::NDA_DST, &octets(fdb_entry.remote));
    message
}

fn parse_fdb_entry(body: &[u8], index: u32) -> Option<FdbEntry> {
    if number(body.get(4..)?)? != index {
        return None;
    }
    let value = |kind| attributes(body.get(12..)?).find(|(found, _)| *found == kind).map(|(_, value)| value);
    let mac = value(libc::NDA_LLADDR)?.try_into().ok()?;
    Some(FdbEntry { mac, remote: address(value(libc::NDA_DST)?)? })
}
