//! Links that carry packets inside others (VXLAN), and whom they lead to.

use std::io;
use std::net::IpAddr;

use super::message::{Message, attributes, text};
use super::{ACK, CREATE, DUMP, EXCLUSIVE, Netlink, REPLACE, address, family, number, octets};

/// `IFLA_VXLAN_*`
const ID: u16 = 1;
const LEARNING: u16 = 7;
const PORT: u16 = 15;
const LOCAL6: u16 = 17;
/// `NUD_PERMANENT`, and the flag by which an entry belongs to the link itself.
const PERMANENT: u16 = 0x80;
const SELF: u8 = 0x02;

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
pub struct Neighbour {
    /// The hardware address it has there.
    pub mac: [u8; 6],
    /// Where packets for it are sent.
    pub place: IpAddr,
}

impl Netlink {
    /// Makes such a link, or gives the one there is this hardware address and size; switches it on. Answers its number.
    pub fn ensure_overlay(&mut self, overlay: &Overlay<'_>) -> io::Result<u32> {
        let found = self.link(overlay.name)?;
        let (index, flags) = found.as_ref().map_or((0, CREATE | EXCLUSIVE), |link| (link.index, 0));
        let mut message = Message::link(libc::RTM_NEWLINK, flags | ACK, index, 0, 0);
        if found.is_none() {
            message.attribute(libc::IFLA_IFNAME, &text(overlay.name));
        }
        message.attribute(libc::IFLA_MTU, &overlay.mtu.to_ne_bytes());
        message.attribute(libc::IFLA_ADDRESS, &overlay.mac);
        if found.is_none() {
            message.nested(libc::IFLA_LINKINFO, |info| {
                info.attribute(libc::IFLA_INFO_KIND, b"vxlan");
                info.nested(libc::IFLA_INFO_DATA, |data| {
                    data.attribute(ID, &overlay.id.to_ne_bytes());
                    data.attribute(LEARNING, &[0]);
                    data.attribute(PORT, &overlay.port.to_be_bytes());
                    if overlay.over_v6 {
                        // Of any address: this only says which kind.
                        data.attribute(LOCAL6, &[0; 16]);
                    }
                });
            });
        }
        self.ask(message)?;
        let index = self.link(overlay.name)?.map(|link| link.index);
        let index = index.ok_or(io::ErrorKind::NotFound)?;
        self.set_up(index)?;
        Ok(index)
    }

    /// Says where packets for a hardware address behind such a link are sent.
    pub fn add_neighbour(&mut self, index: u32, neighbour: Neighbour) -> io::Result<()> {
        self.ask(entry(libc::RTM_NEWNEIGH, CREATE | REPLACE | ACK, index, neighbour)).map(drop)
    }

    /// Forgets that; what is not known is no failure.
    pub fn delete_neighbour(&mut self, index: u32, neighbour: Neighbour) -> io::Result<()> {
        match self.ask(entry(libc::RTM_DELNEIGH, ACK, index, neighbour)) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => Ok(()),
        }
    }

    /// Everybody behind such a link.
    pub fn neighbours(&mut self, index: u32) -> io::Result<Vec<Neighbour>> {
        let mut message = Message::new(libc::RTM_GETNEIGH, DUMP);
        message.raw(&[libc::AF_BRIDGE as u8, 0, 0, 0]);
        message.raw(&[0; 8]);
        let answers = self.ask(message)?;
        Ok(answers.iter().filter_map(|answer| parse(answer, index)).collect())
    }

    /// Says which hardware address an address has on a link, so that nobody needs to ask.
    pub fn add_resolved(&mut self, index: u32, to: IpAddr, mac: [u8; 6]) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWNEIGH, CREATE | REPLACE | ACK);
        header(&mut message, family(to), index, 0);
        message.attribute(libc::NDA_DST, &octets(to));
        message.attribute(libc::NDA_LLADDR, &mac);
        self.ask(message).map(drop)
    }
}

fn header(message: &mut Message, family: u8, index: u32, flags: u8) {
    message.raw(&[family, 0, 0, 0]);
    message.raw(&index.to_ne_bytes());
    message.raw(&PERMANENT.to_ne_bytes());
    message.raw(&[flags, 0]);
}

fn entry(kind: u16, flags: u16, index: u32, neighbour: Neighbour) -> Message {
    let mut message = Message::new(kind, flags);
    header(&mut message, libc::AF_BRIDGE as u8, index, SELF);
    message.attribute(libc::NDA_LLADDR, &neighbour.mac);
    message.attribute(libc::NDA_DST, &octets(neighbour.place));
    message
}

fn parse(body: &[u8], index: u32) -> Option<Neighbour> {
    if number(body.get(4..)?)? != index {
        return None;
    }
    let value = |kind| attributes(body.get(12..)?).find(|(found, _)| *found == kind).map(|(_, value)| value);
    let mac = value(libc::NDA_LLADDR)?.try_into().ok()?;
    Some(Neighbour { mac, place: address(value(libc::NDA_DST)?)? })
}
