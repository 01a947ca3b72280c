//! A netlink socket to netfilter.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use nft::wire::{Message, messages};
use rustix::net::netlink::{NETFILTER, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_send_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::net::{bind, getsockname, recv, sendto, socket_with};

/// The kernel responds immediately. A longer wait means that the expected response does not exist.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Extra space in the send buffer for the kernel's bookkeeping; a generous estimate.
const SEND_BUFFER_OVERHEAD: usize = 64 * 1024;

#[derive(Debug)]
pub struct NetfilterSocket(OwnedFd);

impl NetfilterSocket {
    /// Opens a socket for messages of up to `bytes` bytes.
    pub fn open(bytes: usize) -> io::Result<NetfilterSocket> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(NETFILTER))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(RECEIVE_TIMEOUT))?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        let socket = NetfilterSocket(socket);
        socket.grow_send_buffer(bytes)?;
        Ok(socket)
    }

    /// Enlarges the send buffer for messages of up to `bytes` bytes.
    pub fn grow_send_buffer(&self, bytes: usize) -> io::Result<()> {
        Ok(set_socket_send_buffer_size_force(&self.0, bytes + SEND_BUFFER_OVERHEAD)?)
    }

    /// The port ID that the kernel has assigned.
    pub fn port(&self) -> Option<u32> {
        let address = SocketAddrNetlink::try_from(getsockname(&self.0).ok()?).ok()?;
        Some(address.pid()).filter(|port| *port != 0)
    }

    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        sendto(&self.0, bytes, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        Ok(())
    }

    /// Receives one datagram of response messages.
    pub fn receive<'a>(
        &self,
        buffer: &'a mut [u8],
    ) -> io::Result<impl Iterator<Item = Message<'a>> + use<'a>> {
        let (length, _) = recv(&self.0, &mut *buffer, RecvFlags::empty())?;
        Ok(messages(buffer.get(..length).unwrap_or_default()))
    }
}
