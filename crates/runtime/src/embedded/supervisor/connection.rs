//! Whoever talks to the supervisor.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::embedded::protocol::{SupervisorRequest, SupervisorResponse, decode_message, encode_message};

/// More than these never come with one request.
const MAX_FDS_PER_REQUEST: usize = 4;

/// One connection. Never waits for the other side.
pub struct Connection {
    pub id: u64,
    pub stream: UnixStream,
    received: Vec<u8>,
    fds: Vec<OwnedFd>,
    outgoing: Vec<u8>,
    /// Hears of every change.
    pub is_watcher: bool,
    /// Is over as soon as all is said.
    pub closes_after_flush: bool,
    /// The other side is gone.
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

    /// The requests that have arrived as a whole, the descriptors with them.
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

    /// Says something that a descriptor belongs to.
    pub fn send_with_fd(&mut self, answer: &SupervisorResponse, fd: BorrowedFd<'_>) {
        let bytes = encode_message(answer);
        // The first thing said on a connection always fits.
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
