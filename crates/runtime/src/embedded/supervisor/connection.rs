//! A client connection of the supervisor.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::embedded::protocol::{SupervisorRequest, SupervisorResponse, decode_message, encode_message};

/// No request has more descriptors than this.
const MAX_FDS_PER_REQUEST: usize = 4;

/// A client connection. Reading and writing never block.
pub struct Connection {
    pub id: u64,
    pub stream: UnixStream,
    received: Vec<u8>,
    fds: Vec<OwnedFd>,
    outgoing: Vec<u8>,
    /// Gets every status change.
    pub is_watcher: bool,
    /// Closes once all output is sent.
    pub closes_after_flush: bool,
    /// The peer is gone or has sent an invalid message.
    pub is_lost: bool,
}

impl Connection {
    pub fn new(id: u64, stream: UnixStream) -> io::Result<Connection> {
        stream.set_nonblocking(true)?;
        let (received, fds, outgoing) = Default::default();
        Ok(Connection {
            id,
            stream,
            received,
            fds,
            outgoing,
            is_watcher: false,
            closes_after_flush: false,
            is_lost: false,
        })
    }

    /// The requests that have arrived completely, with their descriptors.
    pub fn requests(&mut self) -> Vec<(SupervisorRequest, Vec<OwnedFd>)> {
        let mut buffer = [0; 4 << 10];
        let mut requests = Vec::new();
        loop {
            match sys::fds::receive(&self.stream, &mut buffer) {
                Ok((0, _)) => self.is_lost = true,
                Ok((count, fds)) => {
                    self.received.extend_from_slice(&buffer[..count]);
                    self.fds.extend(fds);
                    self.fds.truncate(MAX_FDS_PER_REQUEST);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => self.is_lost = true,
            }
            loop {
                match decode_message(&mut self.received) {
                    Ok(Some(request)) => requests.push((request, std::mem::take(&mut self.fds))),
                    Ok(None) => break,
                    Err(_) => {
                        self.is_lost = true;
                        break;
                    }
                }
            }
            if self.is_lost {
                break;
            }
        }
        requests
    }

    pub fn send(&mut self, answer: &SupervisorResponse) {
        self.outgoing.extend_from_slice(&encode_message(answer));
        self.flush();
    }

    /// Sends a response with a descriptor.
    pub fn send_with_fd(&mut self, answer: &SupervisorResponse, fd: BorrowedFd<'_>) {
        let bytes = encode_message(answer);
        // This is the first response on the connection, so it fits into the socket buffer.
        match sys::fds::send(self.stream.as_fd(), &bytes, &[fd]) {
            Ok(count) => self.outgoing.extend_from_slice(&bytes[count..]),
            Err(_) => self.is_lost = true,
        }
    }

    pub fn flush(&mut self) {
        while !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(count) => drop(self.outgoing.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.is_lost = true;
                    self.outgoing.clear();
                }
            }
        }
    }

    pub fn has_pending_output(&self) -> bool {
        !self.outgoing.is_empty()
    }

    pub fn is_closed(&self) -> bool {
        self.is_lost || (self.closes_after_flush && self.outgoing.is_empty())
    }
}
