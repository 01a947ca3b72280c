//! Monitors the changes of other programs to nftables.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use nft::foreign::Family;
use nft::netlink::{SUBSYS_NFTABLES, message};
use nft::wire::{Message, messages};
use rustix::net::netlink::{NETFILTER, SocketAddrNetlink};
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use tokio::net::UnixDatagram;

use crate::firewall::TABLE;

/// NFNLGRP_NFTABLES, as a bit mask.
const NFT_MULTICAST_GROUP: u32 = 1 << 6;
/// The size of the receive buffer. A program that loads its rules makes many changes at once.
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;
/// Changes come in groups. They are handled together after this delay.
const BATCH_DELAY: Duration = Duration::from_millis(200);

/// Receives notifications of nftables changes.
pub struct RulesetMonitor(Option<UnixDatagram>);

/// Which changes were observed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RulesetChanges {
    /// Another program has deleted parts of our table.
    pub own_removed: bool,
    /// Notifications were lost, so anything may have changed.
    pub has_overflow: bool,
}

impl RulesetMonitor {
    /// Subscribes to changes from now on. If that fails, a warning is logged and no change is ever
    /// reported.
    pub fn open() -> RulesetMonitor {
        let socket = subscribe().map(std::os::unix::net::UnixDatagram::from).and_then(UnixDatagram::from_std);
        if let Err(error) = &socket {
            tracing::warn!(%error, "failed to subscribe to nftables changes, changes of other programs will not be noticed");
        }
        RulesetMonitor(socket.ok())
    }

    /// Waits for relevant changes, except those made by the socket with this port ID, and for others
    /// that closely follow them.
    pub async fn changed(&self, own_port: impl Fn() -> Option<u32>) -> RulesetChanges {
        let Some(socket) = &self.0 else { return std::future::pending().await };
        let mut buffer = vec![0; 64 * 1024];
        let mut changes = None;
        while changes.is_none() {
            let received = socket.recv(&mut buffer).await;
            record(&mut changes, received, &buffer, own_port());
        }
        tokio::time::sleep(BATCH_DELAY).await;
        loop {
            let received = socket.try_recv(&mut buffer);
            match &received {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                _ => record(&mut changes, received, &buffer, own_port()),
            }
        }
        changes.unwrap_or_default()
    }
}

fn subscribe() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(NETFILTER))?;
    set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER_BYTES)?;
    bind(&socket, &SocketAddrNetlink::new(0, NFT_MULTICAST_GROUP))?;
    Ok(socket)
}

fn record(
    changes: &mut Option<RulesetChanges>,
    received: io::Result<usize>,
    buffer: &[u8],
    own_port: Option<u32>,
) {
    let Ok(count) = received else {
        changes.get_or_insert_default().has_overflow = true;
        return;
    };
    for message in messages(&buffer[..count]) {
        if let Some(is_own_removal) = changed_table(&message, own_port) {
            changes.get_or_insert_default().own_removed |= is_own_removal;
        }
    }
}

/// Whether a change is relevant (`None`: it is not), and if so, whether it deletes something from our
/// table.
fn changed_table(changed: &Message<'_>, own_port: Option<u32>) -> Option<bool> {
    let kind = changed.kind ^ SUBSYS_NFTABLES << 8;
    let is_removal = matches!(
        kind,
        message::DELETE_TABLE
            | message::DELETE_CHAIN
            | message::DELETE_RULE
            | message::DELETE_SET
            | message::DELETE_ELEMENTS
    );
    if !is_removal && !matches!(kind, message::NEW_CHAIN | message::NEW_RULE) {
        return None;
    }
    let table = changed.attributes().find(|(kind, _)| *kind == 1).map(|(_, name)| name);
    let is_own_table = Family::of_message(changed) == Some(Family::Inet)
        && table.is_some_and(|name| name.strip_suffix(b"\0") == Some(TABLE.as_bytes()));
    match is_own_table {
        true if !is_removal || Some(changed.port) == own_port => None,
        is_own_table => Some(is_own_table),
    }
}

#[cfg(test)]
mod tests {
    use nft::wire::Writer;

    use super::*;

    #[track_caller]
    fn check(kind: u16, table: &str, port: u32, expected: Option<bool>) {
        let mut out = Writer::starting_at(1);
        out.message(SUBSYS_NFTABLES << 8 | kind, 0, (nft::netlink::INET, 0), |out| out.text(1, table));
        out.bytes[12..16].copy_from_slice(&port.to_ne_bytes());
        let message = messages(&out.bytes).next().unwrap();
        assert_eq!(changed_table(&message, Some(7)), expected);
    }

    #[test]
    fn foreign_deletes_in_own_table_are_detected() {
        check(message::DELETE_TABLE, TABLE, 8, Some(true));
        check(message::DELETE_TABLE, TABLE, 7, None);
        check(message::DELETE_ELEMENTS, TABLE, 8, Some(true));
        check(message::NEW_RULE, TABLE, 8, None);
    }

    #[test]
    fn changes_in_other_tables_are_detected() {
        for kind in [message::NEW_CHAIN, message::NEW_RULE, message::DELETE_RULE, message::DELETE_TABLE] {
            check(kind, "firewalld", 8, Some(false));
        }
        check(message::NEW_ELEMENTS, "firewalld", 8, None);
        check(message::NEW_SET, "firewalld", 8, None);
    }
}
