//! Links that carry packets inside others (VXLAN), and whom they lead to.

use std::io;
use std::net::IpAddr;

use super::message::{Message, attributes, c_string};
use super::{ACK, CREATE, DUMP, EXCLUSIVE, Netlink, REPLACE, address, family, number, octets};

/// `IFLA_VXLAN_*`
const VXLAN_ID: u16 = 1;
const VXLAN_LEARNING: u16 = 7;
const VXLAN_PORT: u16 = 15;
const VXLAN_LOCAL6: u16 = 17;
/// `NUD_PERMANENT`, and the flag by which an entry belongs to the link itself.
const STATE_PERMANENT: u16 = 0x80;
const FLAG_SELF: u8 = 0x02;

/// A link of the kind.
#[derive(Clone, Copy, Debug)]
pub struct Overlay<'a> {
    pub name: &'a str,
    /// What tells this network from others over the same port.
    pub id: u32,
    /// The port of UDP that packets come to.
    pub port: u16,
    pub mac: [u8; 6],
    pub mtu: u32,
    /// Whether packets go inside those of IPv6 instead of IPv4; a link knows one kind only.
    pub over_v6: bool,
}

/// Who is behind such a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FdbEntry {
    /// The hardware address it has there.
    pub mac: [u8; 6],
    /// Where packets for it are sent.
    pub remote: IpAddr,
}

impl Netlink {
    /// Makes such a link, or gives the one there is this hardware address and size; switches it on. Answers its number.
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
                        // Of any address: this only says which kind.
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

    /// Says where packets for a hardware address behind such a link are sent.
    pub fn add_fdb_entry(&mut self, index: u32, fdb_entry: FdbEntry) -> io::Result<()> {
        self.request(fdb_message(libc::RTM_NEWNEIGH, CREATE | REPLACE | ACK, index, fdb_entry)).map(drop)
    }

    /// Forgets that; what is not known is no failure.
    pub fn delete_fdb_entry(&mut self, index: u32, fdb_entry: FdbEntry) -> io::Result<()> {
        match self.request(fdb_message(libc::RTM_DELNEIGH, ACK, index, fdb_entry)) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => Ok(()),
        }
    }

    /// Everybody behind such a link.
    pub fn fdb_entries(&mut self, index: u32) -> io::Result<Vec<FdbEntry>> {
        let mut message = Message::new(libc::RTM_GETNEIGH, DUMP);
        message.raw(&[libc::AF_BRIDGE as u8, 0, 0, 0]);
        message.raw(&[0; 8]);
        let responses = self.request(message)?;
        Ok(responses.iter().filter_map(|response| parse_fdb_entry(response, index)).collect())
    }

    /// Says which hardware address an address has on a link, so that nobody needs to ask.
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
