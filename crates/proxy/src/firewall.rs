//! Applies nftables batches to the kernel, by netlink or with the `nft` program.

use std::io::{self, Write as _};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use nft::netlink::Encoded;
use nft::{Batch, netlink, render};
use parking_lot::Mutex;

use crate::socket::NetfilterSocket;

/// The name of our table. Its family is `inet`, which covers IPv4 and IPv6.
pub const TABLE: &str = "skiff";

/// Applies batches. A batch is applied completely or not at all.
pub trait Firewall: Send + Sync + 'static {
    fn apply(&self, batch: &Batch) -> Result<(), FirewallError>;

    /// The netlink port ID that batches are sent from. It identifies our own changes in the kernel's
    /// notifications.
    fn port(&self) -> Option<u32> {
        None
    }
}

/// Why a batch could not be applied.
#[derive(Debug, thiserror::Error)]
pub enum FirewallError {
    #[error("cannot run {program}")]
    CannotRun { program: String, source: io::Error },
    #[error("batch rejected: {0}")]
    Rejected(String),
    #[error("netlink request to netfilter failed")]
    Socket(#[from] io::Error),
}

/// Applies batches with the `nft` program.
#[derive(Clone, Debug)]
pub struct NftFirewall {
    pub program: String,
}

impl Default for NftFirewall {
    fn default() -> NftFirewall {
        NftFirewall { program: "nft".into() }
    }
}

impl Firewall for NftFirewall {
    fn apply(&self, batch: &Batch) -> Result<(), FirewallError> {
        let cannot = |source| FirewallError::CannotRun { program: self.program.clone(), source };
        let mut command = Command::new(&self.program);
        let command = command.args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.stderr(Stdio::piped()).spawn().map_err(cannot)?;
        let text = render::render(TABLE, batch);
        let written = child.stdin.take().map(|mut stdin| stdin.write_all(text.as_bytes()));
        let output = child.wait_with_output().map_err(cannot)?;
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stderr);
            return Err(FirewallError::Rejected(words.lines().take(4).collect::<Vec<_>>().join(" ")));
        }
        written.transpose().map_err(cannot)?;
        Ok(())
    }
}

/// Applies batches by netlink. The slot allocation is that of the table this value has created.
#[derive(Debug)]
pub struct NetlinkFirewall {
    table: &'static str,
    slots: Mutex<netlink::EndpointSlots>,
    /// The socket is kept open, so that its port ID cannot be reused by another process.
    socket: Mutex<Option<NetfilterSocket>>,
    /// The port ID of that socket; zero if there is none yet.
    port: AtomicU32,
}

impl NetlinkFirewall {
    /// For a table with this name.
    pub fn of(table: &'static str) -> NetlinkFirewall {
        NetlinkFirewall { table, slots: Mutex::default(), socket: Mutex::default(), port: AtomicU32::new(0) }
    }
}

impl Default for NetlinkFirewall {
    fn default() -> NetlinkFirewall {
        NetlinkFirewall::of(TABLE)
    }
}

impl Firewall for NetlinkFirewall {
    fn apply(&self, batch: &Batch) -> Result<(), FirewallError> {
        let encoded = netlink::encode(self.table, batch, &mut self.slots.lock());
        let mut cached_socket = self.socket.lock();
        let socket = match cached_socket.take() {
            Some(socket) => socket,
            None => NetfilterSocket::open(encoded.bytes.len())?,
        };
        socket.grow_send_buffer(encoded.bytes.len())?;
        self.port.store(socket.port().unwrap_or_default(), Relaxed);
        commit(&socket, &encoded)?;
        // After a failure the socket is closed, because unread responses to this batch may remain in
        // it.
        *cached_socket = Some(socket);
        Ok(())
    }

    fn port(&self) -> Option<u32> {
        Some(self.port.load(Relaxed)).filter(|port| *port != 0)
    }
}

/// Sends a batch and waits until the kernel has committed it.
pub(crate) fn commit(socket: &NetfilterSocket, encoded: &Encoded) -> Result<(), FirewallError> {
    socket.send(&encoded.bytes)?;
    let mut buffer = vec![0; 64 * 1024];
    // The kernel responds to each message that fails and to the last one. If it rejects the batch as a
    // whole, it responds to the first message only.
    let mut first_error = None;
    loop {
        for message in socket.receive(&mut buffer)? {
            let Some(error) = message.error() else { continue };
            if error != 0 && first_error.is_none() {
                first_error = Some((message.sequence, io::Error::from_raw_os_error(error)));
            }
            if message.sequence != encoded.last && !(message.sequence == encoded.first && error != 0) {
                continue;
            }
            return match first_error {
                None => Ok(()),
                Some((number, error)) => {
                    Err(FirewallError::Rejected(format!("{error} (message {number} of {})", encoded.last)))
                }
            };
        }
    }
}
