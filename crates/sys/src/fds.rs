//! File descriptors sent over Unix sockets (`SCM_RIGHTS`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// The maximum number of descriptors in a message.
pub const MAX_FDS: usize = 4;

/// Sends `bytes`, which must not be empty, with these descriptors. Returns the number of bytes sent.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Receives bytes and the descriptors sent with them, which are close-on-exec.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let slice = &mut [IoSliceMut::new(bytes)];
    let received = rustix::net::recvmsg(socket, slice, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((received.bytes, fds))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn sends_a_pipe_over_a_socket() {
        let (local, remote) = UnixStream::pair().unwrap();
        let (reader, mut writer) = io::pipe().unwrap();
        assert_eq!(send(&local, b"hello", &[reader.as_fd()]).unwrap(), 5);
        drop(reader);
        let mut bytes = [0; 16];
        let (count, mut fds) = receive(&remote, &mut bytes).unwrap();
        assert_eq!((&bytes[..count], fds.len()), (&b"hello"[..], 1));
        writer.write_all(b"through").unwrap();
        drop(writer);
        let mut text = String::new();
        std::fs::File::from(fds.remove(0)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
    }
}
