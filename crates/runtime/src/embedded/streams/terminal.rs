//! The near end of a terminal.

use std::io;
use std::os::fd::OwnedFd;

use tokio::net::unix::pipe;

use super::session::SessionStdio;

/// A terminal whose other end is a container's, as far as it is more than two pipes.
pub struct Terminal(OwnedFd);

impl Terminal {
    /// What is typed goes into one end and what is shown comes out of the other. Reading fails when nobody holds the
    /// container's side any more, which is its end.
    pub fn new(fd: OwnedFd) -> io::Result<(SessionStdio, Terminal)> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        let ends = SessionStdio {
            stdin: Some(pipe::Sender::from_owned_fd_unchecked(fd.try_clone()?)?),
            stdout: Some(pipe::Receiver::from_owned_fd_unchecked(fd.try_clone()?)?),
            stderr: None,
        };
        Ok((ends, Terminal(fd)))
    }

    pub fn resize(&self, rows: u16, columns: u16) {
        let size = rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let _ = rustix::termios::tcsetwinsize(&self.0, size);
    }
}
