//! Deletes conntrack entries of UDP flows whose endpoint is gone. TCP connections fail by themselves,
//! but a UDP client that keeps sending would keep the entry alive and its packets would go to the
//! removed endpoint.
//!
//! Counterpart: `pkg/proxy/conntrack`.

use std::io;
use std::net::{IpAddr, SocketAddr};

use nft::wire::{DONE, DUMP, Writer, attribute};

use crate::plan::UdpPortTargets;
use crate::socket::NetfilterSocket;

const CONNTRACK: u16 = 1;
const GET: u16 = 1;
const DELETE: u16 = 2;
const UDP: u8 = 17;
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const INET: u8 = 2;
const INET6: u8 = 10;

/// One direction of a conntrack entry.
#[derive(Debug, PartialEq)]
struct FlowTuple {
    proto: u8,
    from: SocketAddr,
    to: SocketAddr,
}

/// Deletes the entries of flows to these ports that do not go to one of their endpoints.
pub fn delete_stale_entries(ports: &[UdpPortTargets]) -> io::Result<()> {
    for family in [INET, INET6] {
        for original in stale(ports, family)? {
            delete(family, &original)?;
        }
    }
    Ok(())
}

/// The original tuple of each stale entry, as the kernel encoded it.
fn stale(ports: &[UdpPortTargets], family: u8) -> io::Result<Vec<Vec<u8>>> {
    let mut request = Writer::starting_at(1);
    request.message(CONNTRACK << 8 | GET, DUMP, (family, 0), |_| {});
    let socket = NetfilterSocket::open(request.bytes.len())?;
    socket.send(&request.bytes)?;
    let (mut found, mut buffer) = (Vec::new(), vec![0; 64 * 1024]);
    loop {
        for message in socket.receive(&mut buffer)? {
            if message.kind == DONE {
                return Ok(found);
            }
            if let Some(error) = message.error() {
                return Err(io::Error::from_raw_os_error(error));
            }
            let part = |kind| message.attributes().find(|(found, _)| *found == kind).map(|(_, value)| value);
            let (Some(original), Some(reply)) = (part(ORIGINAL), part(REPLY)) else { continue };
            let (Some(there), Some(back)) = (parse_tuple(original), parse_tuple(reply)) else { continue };
            if there.proto == UDP && is_stale(ports, there.to, back.from) {
                found.push(original.to_vec());
            }
        }
    }
}

/// Whether a flow was sent to one of these ports and goes to something other than its endpoints.
fn is_stale(ports: &[UdpPortTargets], original: SocketAddr, actual: SocketAddr) -> bool {
    ports.iter().any(|port| {
        let is_for =
            port.at.contains(&original) || port.node_port == Some(original.port()) && actual != original;
        // Entries of a port without endpoints are kept, because there is no endpoint to move the flow
        // to.
        is_for && !port.to.is_empty() && !port.to.contains(&actual)
    })
}

fn delete(family: u8, original: &[u8]) -> io::Result<()> {
    let mut request = Writer::starting_at(1);
    request.message(CONNTRACK << 8 | DELETE, 0, (family, 0), |out| {
        out.nested(ORIGINAL, |out| out.bytes.extend(original));
    });
    request.request_ack();
    let socket = NetfilterSocket::open(request.bytes.len())?;
    socket.send(&request.bytes)?;
    let mut buffer = vec![0; 4096];
    let answer = socket.receive(&mut buffer)?.find_map(|message| message.error());
    match io::Error::from_raw_os_error(answer.unwrap_or(0)) {
        _ if answer.unwrap_or(0) == 0 => Ok(()),
        // The entry has expired in the meantime.
        error if error.kind() == io::ErrorKind::NotFound => Ok(()),
        error => Err(error),
    }
}

fn parse_tuple(tuple: &[u8]) -> Option<FlowTuple> {
    let (ip, proto) = (attribute(tuple, 1)?, attribute(tuple, 2)?);
    let address = |v4: u16, v6: u16| -> Option<IpAddr> {
        match attribute(ip, v4) {
            Some(bytes) => Some(<[u8; 4]>::try_from(bytes).ok()?.into()),
            None => Some(<[u8; 16]>::try_from(attribute(ip, v6)?).ok()?.into()),
        }
    };
    let port = |kind: u16| Some(u16::from_be_bytes(attribute(proto, kind)?.try_into().ok()?));
    Some(FlowTuple {
        proto: *attribute(proto, 1)?.first()?,
        from: SocketAddr::new(address(1, 3)?, port(2)?),
        to: SocketAddr::new(address(2, 4)?, port(3)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(node_port: Option<u16>, to: &[&str]) -> UdpPortTargets {
        let to = to.iter().map(|to| to.parse().unwrap()).collect();
        UdpPortTargets { at: vec!["10.43.0.1:53".parse().unwrap()], node_port, to }
    }

    #[track_caller]
    fn check(targets: UdpPortTargets, original: &str, actual: &str, expected: bool) {
        assert_eq!(is_stale(&[targets], original.parse().unwrap(), actual.parse().unwrap()), expected);
    }

    #[test]
    fn entries_to_removed_endpoints_are_stale() {
        let one = || targets(Some(30053), &["10.42.0.5:53"]);
        check(one(), "10.43.0.1:53", "10.42.0.5:53", false);
        check(one(), "10.43.0.1:53", "10.42.0.6:53", true);
        check(one(), "10.43.0.1:53", "10.43.0.1:53", true);
        check(one(), "10.43.0.2:53", "10.42.0.6:53", false);
        check(one(), "192.0.2.1:30053", "10.42.0.6:53", true);
        check(one(), "192.0.2.1:30053", "10.42.0.5:53", false);
        check(one(), "203.0.113.1:30053", "203.0.113.1:30053", false);
        check(targets(None, &[]), "10.43.0.1:53", "10.42.0.6:53", false);
    }

    #[test]
    fn reads_conntrack_tuples() {
        let mut out = Writer::default();
        out.nested(1, |out| {
            out.attribute(1, &[10, 42, 0, 9]);
            out.attribute(2, &[10, 43, 0, 1]);
        });
        out.nested(2, |out| {
            out.attribute(1, &[17]);
            out.attribute(2, &4000u16.to_be_bytes());
            out.attribute(3, &53u16.to_be_bytes());
        });
        let expected = FlowTuple {
            proto: 17,
            from: "10.42.0.9:4000".parse().unwrap(),
            to: "10.43.0.1:53".parse().unwrap(),
        };
        assert_eq!(parse_tuple(&out.bytes), Some(expected));
        assert_eq!(parse_tuple(&out.bytes[..20]), None);
    }
}
