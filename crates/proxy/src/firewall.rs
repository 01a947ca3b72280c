//! Who puts batches into the kernel.

use std::io::{self, Write as _};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use nft::netlink::Encoded;
use nft::{Batch, netlink, render};
use parking_lot::Mutex;

use crate::socket::NetfilterSocket;

/// The table that is ours, of the family `inet`: it sees both kinds of addresses.
pub const TABLE: &str = "skiff";

/// Takes batches. All of a batch is done or nothing.
pub trait Firewall: Send + Sync + 'static {
    fn apply(&self, batch: &Batch) -> Result<(), FirewallError>;

    /// The netlink port that batches are sent from, by which the kernel's notifications of them are known.
    fn port(&self) -> Option<u32> {
        None
    }
}

/// Why a batch was not taken.
#[derive(Debug, thiserror::Error)]
pub enum FirewallError {
    #[error("cannot run {program}")]
    CannotRun { program: String, source: io::Error },
    #[error("a batch is refused: {0}")]
    Rejected(String),
    #[error("cannot speak to netfilter")]
    Socket(#[from] io::Error),
}

/// The `nft` program.
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

/// The kernel itself. What it knows of a table holds for the one it has made.
#[derive(Debug)]
pub struct NetlinkFirewall {
    table: &'static str,
    slots: Mutex<netlink::EndpointSlots>,
    /// Kept open, so that nobody else gets its port.
    socket: Mutex<Option<NetfilterSocket>>,
    /// Of that socket, zero before there is one.
    port: AtomicU32,
}

impl NetlinkFirewall {
    /// For a table of this name.
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
        // After a failure there may be answers left that are for this batch, so it gets a new one.
        *cached_socket = Some(socket);
        Ok(())
    }

    fn port(&self) -> Option<u32> {
        Some(self.port.load(Relaxed)).filter(|port| *port != 0)
    }
}

/// Sends a batch and waits until it is committed.
pub(crate) fn commit(socket: &NetfilterSocket, encoded: &Encoded) -> Result<(), FirewallError> {
    socket.send(&encoded.bytes)?;
    let mut buffer = vec![0; 64 * 1024];
    // Each message that is wrong is answered; the last one always is, unless the batch as a whole is refused.
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
