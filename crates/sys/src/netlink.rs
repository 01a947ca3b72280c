//! rtnetlink: links, addresses and routes of the network namespace in which a socket was opened.
//!
//! Only the requests that pod networks need. Start reading at [`Netlink`].

mod message;
mod overlay;
mod traffic;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use message::{Message, attributes, c_string};
pub use overlay::{FdbEntry, Overlay};
pub use traffic::Rate;

const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;
const EXCLUSIVE: u16 = 0x200;
const REPLACE: u16 = 0x100;

/// An rtnetlink socket for one network namespace.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

/// Opens a non-blocking socket that becomes readable at every change of addresses or routes in this
/// thread's network namespace. The content of its packets does not matter.
pub fn subscribe_changes() -> io::Result<OwnedFd> {
    subscribe(ADDRESSES_AND_ROUTES)
}

/// Like [`subscribe_changes`], with links as well. The packets are for [`is_removal`].
pub fn subscribe_deletes() -> io::Result<OwnedFd> {
    subscribe(libc::RTMGRP_LINK | ADDRESSES_AND_ROUTES)
}

/// Whether packets of [`subscribe_deletes`] report that a link, an address or a route was deleted, or
/// that a link was set down.
pub fn is_removal(bytes: &[u8]) -> bool {
    let is_off = |body: &[u8]| parse_link(body).is_some_and(|link| !link.is_up);
    message::split_messages(bytes).any(|(header, body)| match header.kind {
        libc::RTM_DELLINK | libc::RTM_DELADDR | libc::RTM_DELROUTE => true,
        libc::RTM_NEWLINK => is_off(body),
        _ => false,
    })
}

const ADDRESSES_AND_ROUTES: i32 =
    libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR | libc::RTMGRP_IPV4_ROUTE | libc::RTMGRP_IPV6_ROUTE;

fn subscribe(groups: i32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, groups.cast_unsigned()))?;
    Ok(socket)
}

/// A network link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The interface index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Whether it is up.
    pub is_up: bool,
    /// The index of the bridge it is a port of, or zero.
    pub master: u32,
    /// The MTU.
    pub mtu: u32,
    /// The MAC address; zeroes for a link without one of this length.
    pub mac: [u8; 6],
}

/// A veth pair, of which the peer is in another network namespace.
#[derive(Debug)]
pub struct Veth<'a> {
    /// The name on this side.
    pub name: &'a str,
    /// The name of the peer.
    pub peer: &'a str,
    /// The network namespace of the peer.
    pub namespace: BorrowedFd<'a>,
    /// The MAC address of this side; `None` lets the kernel choose.
    pub mac: Option<[u8; 6]>,
    /// The MAC address of the peer.
    pub peer_mac: [u8; 6],
    /// The index of the bridge that this side is a port of, or zero.
    pub master: u32,
    /// The MTU of both sides.
    pub mtu: u32,
}

impl Netlink {
    /// Opens a socket for this thread's network namespace.
    pub fn open() -> io::Result<Netlink> {
        // NETLINK_ROUTE, number 0.
        let socket =
            rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        Ok(Netlink { socket, sequence: 0 })
    }

    /// The network namespace of the socket, wherever this thread is now.
    pub fn namespace(&self) -> io::Result<OwnedFd> {
        // SAFETY: the request has no argument and returns a descriptor or an error.
        let fd = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCGSKNS as _) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, so it has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The link with this name.
    pub fn link(&mut self, name: &str) -> io::Result<Option<Link>> {
        let mut message = Message::link(libc::RTM_GETLINK, 0, 0, 0, 0);
        message.attribute(libc::IFLA_IFNAME, &c_string(name));
        match self.request(message) {
            Ok(responses) => Ok(responses.iter().find_map(|response| parse_link(response))),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All links.
    pub fn links(&mut self) -> io::Result<Vec<Link>> {
        let responses = self.request(Message::link(libc::RTM_GETLINK, DUMP, 0, 0, 0))?;
        Ok(responses.iter().filter_map(|response| parse_link(response)).collect())
    }

    /// Creates a bridge if it does not exist, and returns its index.
    ///
    /// Without an explicit MAC address a bridge takes the lowest of its ports and changes it with them,
    /// and hosts that have cached the old one cannot reach it any more.
    pub fn ensure_bridge(&mut self, name: &str, mtu: u32, mac: [u8; 6]) -> io::Result<u32> {
        if self.link(name)?.is_none() {
            let mut message = Message::link(libc::RTM_NEWLINK, CREATE | EXCLUSIVE | ACK, 0, 0, 0);
            message.attribute(libc::IFLA_IFNAME, &c_string(name));
            message.attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
            message.attribute(libc::IFLA_ADDRESS, &mac);
            message.nested(libc::IFLA_LINKINFO, |info| {
                info.attribute(libc::IFLA_INFO_KIND, b"bridge");
            });
            match self.request(message) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        let link = self.link(name)?.ok_or(io::ErrorKind::NotFound)?;
        if link.mac != mac {
            self.set_mac(link.index, mac)?;
        }
        Ok(link.index)
    }

    /// Sets the MAC address of a link.
    pub fn set_mac(&mut self, index: u32, mac: [u8; 6]) -> io::Result<()> {
        let mut message = Message::link(libc::RTM_NEWLINK, ACK, index, 0, 0);
        message.attribute(libc::IFLA_ADDRESS, &mac);
        self.request(message).map(drop)
    }

    /// Makes a link a port of a bridge, or of none with zero.
    pub fn set_master(&mut self, index: u32, master: u32) -> io::Result<()> {
        let mut message = Message::link(libc::RTM_NEWLINK, ACK, index, 0, 0);
        message.attribute(libc::IFLA_MASTER, &master.to_ne_bytes());
        self.request(message).map(drop)
    }

    /// Creates a veth pair with the peer in another namespace. This side is set up.
    pub fn add_veth(&mut self, veth: &Veth<'_>) -> io::Result<()> {
        self.create_veth(veth, libc::IFF_UP as u32)
    }

    /// Like [`Netlink::add_veth`], with both sides down.
    pub fn add_veth_down(&mut self, veth: &Veth<'_>) -> io::Result<()> {
        self.create_veth(veth, 0)
    }

    fn create_veth(&mut self, veth: &Veth<'_>, flags: u32) -> io::Result<()> {
        /// VETH_INFO_PEER
        const VETH_INFO_PEER: u16 = 1;
        let mut message = Message::link(libc::RTM_NEWLINK, CREATE | EXCLUSIVE | ACK, 0, flags, flags);
        message.attribute(libc::IFLA_IFNAME, &c_string(veth.name));
        message.attribute(libc::IFLA_MTU, &veth.mtu.to_ne_bytes());
        if veth.master != 0 {
            message.attribute(libc::IFLA_MASTER, &veth.master.to_ne_bytes());
        }
        if let Some(mac) = &veth.mac {
            message.attribute(libc::IFLA_ADDRESS, mac);
        }
        message.nested(libc::IFLA_LINKINFO, |info| {
            info.attribute(libc::IFLA_INFO_KIND, b"veth");
            info.nested(libc::IFLA_INFO_DATA, |data| {
                data.nested(VETH_INFO_PEER, |peer| {
                    peer.link_header(0, 0, 0);
                    peer.attribute(libc::IFLA_IFNAME, &c_string(veth.peer));
                    peer.attribute(libc::IFLA_ADDRESS, &veth.peer_mac);
                    peer.attribute(libc::IFLA_MTU, &veth.mtu.to_ne_bytes());
                    peer.attribute(libc::IFLA_NET_NS_FD, &veth.namespace.as_raw_fd().to_ne_bytes());
                });
            });
        });
        self.request(message).map(drop)
    }

    /// Deletes a link. A missing link is not an error.
    pub fn delete_link(&mut self, name: &str) -> io::Result<()> {
        let mut message = Message::link(libc::RTM_DELLINK, ACK, 0, 0, 0);
        message.attribute(libc::IFLA_IFNAME, &c_string(name));
        match self.request(message) {
            Err(error) if error.raw_os_error() != Some(libc::ENODEV) => Err(error),
            _ => Ok(()),
        }
    }

    /// Sets a link up.
    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        let up = libc::IFF_UP as u32;
        self.request(Message::link(libc::RTM_NEWLINK, ACK, index, up, up)).map(drop)
    }

    /// Adds an address to a link. An existing address is not an error.
    pub fn add_address(&mut self, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWADDR, CREATE | REPLACE | ACK);
        // IFA_F_NODAD: no duplicate address detection, since every address is allocated once.
        let flags = if address.is_ipv6() { 0x02 } else { 0 };
        message.raw(&[family(address), prefix, flags, 0]);
        message.raw(&index.to_ne_bytes());
        message.attribute(libc::IFA_LOCAL, &octets(address));
        message.attribute(libc::IFA_ADDRESS, &octets(address));
        self.request(message).map(drop)
    }

    /// The addresses of a link.
    pub fn addresses(&mut self, index: u32) -> io::Result<Vec<(IpAddr, u8)>> {
        let all = self.all_addresses()?.into_iter();
        Ok(all.filter(|(link, ..)| *link == index).map(|(_, address, prefix)| (address, prefix)).collect())
    }

    /// The addresses of all links: interface index, address, prefix length.
    pub fn all_addresses(&mut self) -> io::Result<Vec<(u32, IpAddr, u8)>> {
        let mut message = Message::new(libc::RTM_GETADDR, DUMP);
        message.raw(&[0; 8]);
        let responses = self.request(message)?;
        Ok(responses.iter().filter_map(|response| parse_address(response)).collect())
    }

    /// Adds a default route. The gateway need not be in the link's own subnet.
    pub fn add_default_route(&mut self, index: u32, gateway: IpAddr) -> io::Result<()> {
        let mut message = Message::new(libc::RTM_NEWROUTE, CREATE | REPLACE | ACK);
        let scope = libc::RT_SCOPE_UNIVERSE;
        let header =
            [family(gateway), 0, 0, 0, libc::RT_TABLE_MAIN, libc::RTPROT_BOOT, scope, libc::RTN_UNICAST];
        message.raw(&header);
        // RTNH_F_ONLINK
        message.raw(&4u32.to_ne_bytes());
        message.attribute(libc::RTA_GATEWAY, &octets(gateway));
        message.attribute(libc::RTA_OIF, &index.to_ne_bytes());
        self.request(message).map(drop)
    }

    /// Adds a route to a gateway on this link, even if the gateway does not seem to be reachable there.
    /// Otherwise like [`Netlink::add_route`].
    pub fn add_route_over(
        &mut self,
        index: u32,
        to: IpAddr,
        prefix: u8,
        gateway: IpAddr,
        mark: u8,
    ) -> io::Result<()> {
        /// RTNH_F_ONLINK
        const ON_LINK: u8 = 4;
        let mut message = Message::new(libc::RTM_NEWROUTE, CREATE | REPLACE | ACK);
        let (scope, unicast) = (libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST);
        let table = libc::RT_TABLE_MAIN;
        message.raw(&[family(to), prefix, 0, 0, table, mark, scope, unicast]);
        message.raw(&u32::from(ON_LINK).to_ne_bytes());
        message.attribute(libc::RTA_DST, &octets(to));
        message.attribute(libc::RTA_GATEWAY, &octets(gateway));
        message.attribute(libc::RTA_OIF, &index.to_ne_bytes());
        self.request(message).map(drop)
    }

    /// Adds a route to a network that is directly on a link. As with [`Netlink::add_route`], it has a
    /// mark, and replaces the route with that mark to the same network.
    pub fn add_link_route(&mut self, index: u32, to: IpAddr, prefix: u8, mark: u8) -> io::Result<()> {
        self.request(link_route(libc::RTM_NEWROUTE, CREATE | REPLACE | ACK, index, (to, prefix), mark))
            .map(drop)
    }

    /// Deletes the route to a network on a link, whatever its mark. A missing route is not an error.
    pub fn delete_link_route(&mut self, index: u32, to: IpAddr, prefix: u8) -> io::Result<()> {
        let any = libc::RTPROT_UNSPEC;
        match self.request(link_route(libc::RTM_DELROUTE, ACK, index, (to, prefix), any)) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(error),
            _ => Ok(()),
        }
    }

    /// The routes with this mark that are directly on a link: interface index, network, prefix length.
    pub fn link_routes(&mut self, mark: u8) -> io::Result<Vec<(u32, IpAddr, u8)>> {
        let mut message = Message::new(libc::RTM_GETROUTE, DUMP);
        message.raw(&[0; 12]);
        let responses = self.request(message)?;
        Ok(responses.iter().filter_map(|response| parse_link_route(response, mark)).collect())
    }

    /// Looks up the route to an address: the interface index, and the gateway if there is one.
    pub fn lookup_route(&mut self, address: IpAddr) -> io::Result<(u32, Option<IpAddr>)> {
        let mut message = Message::new(libc::RTM_GETROUTE, 0);
        let bits = octets(address).len() as u8 * 8;
        message.raw(&[family(address), bits, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        message.attribute(libc::RTA_DST, &octets(address));
        let responses = self.request(message)?;
        let body = responses.first().and_then(|body| body.get(12..)).ok_or(io::ErrorKind::InvalidData)?;
        let value = |kind| attributes(body).find(|(found, _)| *found == kind).map(|(_, value)| value);
        let index = value(libc::RTA_OIF).and_then(number).ok_or(io::ErrorKind::InvalidData)?;
        Ok((index, value(libc::RTA_GATEWAY).and_then(self::address)))
    }

    /// Adds a route to a network through a gateway on a link of this host. The mark (the route's
    /// protocol) identifies the owner's routes. A route with the same mark to the same network is
    /// replaced.
    pub fn add_route(&mut self, to: IpAddr, prefix: u8, gateway: IpAddr, mark: u8) -> io::Result<()> {
        self.request(route(libc::RTM_NEWROUTE, CREATE | REPLACE | ACK, to, prefix, gateway, mark)).map(drop)
    }

    /// Deletes such a route. A missing route is not an error.
    pub fn delete_route(&mut self, to: IpAddr, prefix: u8, gateway: IpAddr, mark: u8) -> io::Result<()> {
        match self.request(route(libc::RTM_DELROUTE, ACK, to, prefix, gateway, mark)) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(error),
            _ => Ok(()),
        }
    }

    /// The routes with this mark: network, prefix length, gateway.
    pub fn routes(&mut self, mark: u8) -> io::Result<Vec<(IpAddr, u8, IpAddr)>> {
        let mut message = Message::new(libc::RTM_GETROUTE, DUMP);
        message.raw(&[0; 12]);
        let responses = self.request(message)?;
        Ok(responses.iter().filter_map(|response| parse_route(response, mark)).collect())
    }

    /// Sends a request and collects the responses.
    fn request(&mut self, message: Message) -> io::Result<Vec<Vec<u8>>> {
        self.sequence += 1;
        let is_dump = message.flags() & DUMP == DUMP;
        let wants_ack = message.flags() & ACK != 0;
        let bytes = message.finish(self.sequence);
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(self.socket.as_fd(), &bytes, SendFlags::empty(), &kernel)?;
        let mut responses = Vec::new();
        let mut buffer = vec![0u8; 32 * 1024];
        loop {
            let (count, _) = rustix::net::recv(self.socket.as_fd(), &mut buffer[..], RecvFlags::empty())?;
            for (header, body) in message::split_messages(&buffer[..count]) {
                if header.sequence != self.sequence {
                    continue;
                }
                match i32::from(header.kind) {
                    libc::NLMSG_DONE => return Ok(responses),
                    libc::NLMSG_ERROR => {
                        let code = body.get(..4).and_then(|bytes| bytes.try_into().ok());
                        return match code.map(i32::from_ne_bytes) {
                            Some(0) => Ok(responses),
                            Some(code) => Err(io::Error::from_raw_os_error(-code)),
                            None => Err(io::ErrorKind::InvalidData.into()),
                        };
                    }
                    _ => responses.push(body.to_vec()),
                }
                if !is_dump && !wants_ack {
                    return Ok(responses);
                }
            }
        }
    }
}

fn route(kind: u16, flags: u16, to: IpAddr, prefix: u8, gateway: IpAddr, mark: u8) -> Message {
    let mut message = Message::new(kind, flags);
    let (scope, unicast) = (libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST);
    message.raw(&[family(to), prefix, 0, 0, libc::RT_TABLE_MAIN, mark, scope, unicast, 0, 0, 0, 0]);
    message.attribute(libc::RTA_DST, &octets(to));
    message.attribute(libc::RTA_GATEWAY, &octets(gateway));
    message
}

fn link_route(kind: u16, flags: u16, index: u32, (to, prefix): (IpAddr, u8), mark: u8) -> Message {
    let mut message = Message::new(kind, flags);
    // IPv6 routes have no scope. RT_SCOPE_NOWHERE matches any scope in a deletion.
    let scope = match kind {
        libc::RTM_DELROUTE => libc::RT_SCOPE_NOWHERE,
        _ if to.is_ipv6() => libc::RT_SCOPE_UNIVERSE,
        _ => libc::RT_SCOPE_LINK,
    };
    let table = libc::RT_TABLE_MAIN;
    message.raw(&[family(to), prefix, 0, 0, table, mark, scope, libc::RTN_UNICAST, 0, 0, 0, 0]);
    message.attribute(libc::RTA_DST, &octets(to));
    message.attribute(libc::RTA_OIF, &index.to_ne_bytes());
    message
}

fn parse_link_route(body: &[u8], mark: u8) -> Option<(u32, IpAddr, u8)> {
    let (prefix, found) = (*body.get(1)?, *body.get(5)?);
    let value = |kind| attributes(body.get(12..)?).find(|(found, _)| *found == kind).map(|(_, value)| value);
    if found != mark || value(libc::RTA_GATEWAY).is_some() {
        return None;
    }
    Some((number(value(libc::RTA_OIF)?)?, address(value(libc::RTA_DST)?)?, prefix))
}

fn parse_route(body: &[u8], mark: u8) -> Option<(IpAddr, u8, IpAddr)> {
    let (prefix, found) = (*body.get(1)?, *body.get(5)?);
    if found != mark {
        return None;
    }
    let value = |kind| attributes(body.get(12..)?).find(|(found, _)| *found == kind).map(|(_, value)| value);
    Some((address(value(libc::RTA_DST)?)?, prefix, address(value(libc::RTA_GATEWAY)?)?))
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(<[u8; 4]>::try_from(bytes).ok()?.into()),
        16 => Some(<[u8; 16]>::try_from(bytes).ok()?.into()),
        _ => None,
    }
}

fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { libc::AF_INET as u8 } else { libc::AF_INET6 as u8 }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes)
}

fn parse_link(body: &[u8]) -> Option<Link> {
    let flags = number(body.get(8..)?)?;
    let mut link = Link {
        index: number(body.get(4..)?)?,
        name: String::new(),
        is_up: flags & libc::IFF_UP as u32 != 0,
        master: 0,
        mtu: 0,
        mac: [0; 6],
    };
    for (kind, value) in attributes(body.get(16..)?) {
        match kind {
            libc::IFLA_IFNAME => {
                link.name = String::from_utf8_lossy(value).trim_end_matches('\0').to_owned();
            }
            libc::IFLA_MASTER => link.master = number(value)?,
            libc::IFLA_MTU => link.mtu = number(value)?,
            libc::IFLA_ADDRESS => link.mac = value.try_into().unwrap_or_default(),
            _ => {}
        }
    }
    Some(link)
}

fn parse_address(body: &[u8]) -> Option<(u32, IpAddr, u8)> {
    let (index, prefix) = (number(body.get(4..)?)?, *body.get(1)?);
    let value = attributes(body.get(8..)?).find(|(kind, _)| *kind == libc::IFA_ADDRESS)?.1;
    Some((index, address(value)?, prefix))
}

#[cfg(test)]
mod tests {
    use rustix::thread::UnshareFlags;

    use super::*;

    /// Uses two new network namespaces, one for each side.
    #[test]
    fn attach_a_pod_to_a_bridge() {
        let checks = || {
            if crate::process::unshare(UnshareFlags::NEWNET).is_err() {
                return eprintln!("skipped: needs root");
            }
            let pod = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
            let mut inside = Netlink::open().unwrap();
            crate::process::unshare(UnshareFlags::NEWNET).unwrap();
            let mut host = Netlink::open().unwrap();
            let mac = [0xfe, 0x58, 10, 1, 0, 1];
            let bridge = host.ensure_bridge("skiff0", 1500, mac).unwrap();
            assert_eq!(host.ensure_bridge("skiff0", 1500, mac).unwrap(), bridge);
            host.add_address(bridge, "10.1.0.1".parse().unwrap(), 24).unwrap();
            host.set_up(bridge).unwrap();
            let veth = Veth {
                name: "sk1",
                peer: "eth0",
                namespace: pod.as_fd(),
                mac: Some([2, 0, 10, 1, 0, 1]),
                peer_mac: [2, 0, 10, 1, 0, 2],
                master: bridge,
                mtu: 1400,
            };
            host.add_veth(&veth).unwrap();
            let taken = host.add_veth(&veth).unwrap_err();
            assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
            let eth0 = inside.link("eth0").unwrap().unwrap();
            assert_eq!((eth0.mtu, eth0.is_up), (1400, false));
            for address in ["10.1.0.2", "fd00::2"] {
                inside.add_address(eth0.index, address.parse().unwrap(), 24).unwrap();
            }
            inside.set_up(eth0.index).unwrap();
            inside.add_default_route(eth0.index, "10.1.0.1".parse().unwrap()).unwrap();
            inside.add_default_route(eth0.index, "fd00::1".parse().unwrap()).unwrap();
            let expected = ("10.1.0.2".parse().unwrap(), 24);
            assert!(inside.addresses(eth0.index).unwrap().contains(&expected));
            let events = subscribe_changes().unwrap();
            let take = || rustix::net::recv(events.as_fd(), &mut [0u8; 4096][..], RecvFlags::empty()).is_ok();
            assert!(!take());
            host.add_address(bridge, "10.1.9.1".parse().unwrap(), 24).unwrap();
            assert!(take());
            let host_link = host.links().unwrap().into_iter().find(|link| link.name == "sk1").unwrap();
            assert_eq!(host_link.master, bridge);
            // The bridge keeps the MAC address it was created with, though its port has a lower one,
            // and it can be changed later.
            assert_eq!(host.link("skiff0").unwrap().unwrap().mac, mac);
            let later = [0xfe, 0x58, 10, 2, 0, 1];
            assert_eq!(host.ensure_bridge("skiff0", 1500, later).unwrap(), bridge);
            assert_eq!(host.link("skiff0").unwrap().unwrap().mac, later);
            let (net, gateway) = ("10.2.0.0".parse().unwrap(), "10.1.0.2".parse().unwrap());
            host.add_route(net, 16, gateway, 0x73).unwrap();
            host.add_route(net, 16, gateway, 0x73).unwrap();
            assert_eq!(host.routes(0x73).unwrap(), [(net, 16, gateway)]);
            assert_eq!(host.routes(0x74).unwrap(), []);
            assert!(host.add_route(net, 16, "192.0.2.1".parse().unwrap(), 0x73).is_err(), "on no link");
            host.delete_route(net, 16, gateway, 0x73).unwrap();
            host.delete_route(net, 16, gateway, 0x73).unwrap();
            assert_eq!(host.routes(0x73).unwrap(), []);
            assert_eq!(host_link.mac, [2, 0, 10, 1, 0, 1]);
            host.set_master(host_link.index, 0).unwrap();
            host.set_mac(host_link.index, mac).unwrap();
            let host_link = host.link("sk1").unwrap().unwrap();
            assert_eq!((host_link.master, host_link.mac), (0, mac));
            for (to, prefix) in [("10.1.0.2", 32), ("fd00::2", 128)] {
                let to = to.parse().unwrap();
                host.add_link_route(host_link.index, to, prefix, 0x73).unwrap();
                host.add_link_route(host_link.index, to, prefix, 0x73).unwrap();
                assert_eq!(host.link_routes(0x73).unwrap(), [(host_link.index, to, prefix)]);
                host.delete_link_route(host_link.index, to, prefix).unwrap();
                host.delete_link_route(host_link.index, to, prefix).unwrap();
                assert_eq!(host.link_routes(0x73).unwrap(), []);
            }
            // Routes that the kernel has added itself can be deleted, too.
            inside.delete_link_route(eth0.index, "10.1.0.0".parse().unwrap(), 24).unwrap();
            assert_eq!(
                inside.lookup_route("10.1.0.7".parse().unwrap()).unwrap().1,
                Some("10.1.0.1".parse().unwrap())
            );
            host.delete_link("sk1").unwrap();
            host.delete_link("sk1").unwrap();
            assert_eq!((host.link("sk1").unwrap(), inside.link("eth0").unwrap()), (None, None));
        };
        std::thread::spawn(checks).join().unwrap();
    }
}
