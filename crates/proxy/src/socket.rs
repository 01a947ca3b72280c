//! A socket to netfilter in the kernel.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use nft::wire::{Message, messages};
use rustix::net::netlink::{NETFILTER, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_send_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::net::{bind, getsockname, recv, sendto, socket_with};

/// The kernel answers at once; whoever waits longer has misunderstood something.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// What the kernel keeps of a buffer for itself, generously.
const SEND_BUFFER_OVERHEAD: usize = 64 * 1024;

#[derive(Debug)]
pub struct NetfilterSocket(OwnedFd);

impl NetfilterSocket {
    /// A socket for messages of up to this many bytes at once.
    pub fn open(bytes: usize) -> io::Result<NetfilterSocket> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(NETFILTER))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(RECEIVE_TIMEOUT))?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        let socket = NetfilterSocket(socket);
        socket.grow_send_buffer(bytes)?;
        Ok(socket)
    }

    /// Makes room for messages of up to this many bytes at once.
    pub fn grow_send_buffer(&self, bytes: usize) -> io::Result<()> {
        Ok(set_socket_send_buffer_size_force(&self.0, bytes + SEND_BUFFER_OVERHEAD)?)
    }

    /// The port that the kernel has given it.
    pub fn port(&self) -> Option<u32> {
        let address = SocketAddrNetlink::try_from(getsockname(&self.0).ok()?).ok()?;
        Some(address.pid()).filter(|port| *port != 0)
    }

    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        sendto(&self.0, bytes, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        Ok(())
    }

    /// Waits for an answer.
    pub fn receive<'a>(
        &self,
        buffer: &'a mut [u8],
    ) -> io::Result<impl Iterator<Item = Message<'a>> + use<'a>> {
        let (length, _) = recv(&self.0, &mut *buffer, RecvFlags::empty())?;
        Ok(messages(buffer.get(..length).unwrap_or_default()))
    }
}
