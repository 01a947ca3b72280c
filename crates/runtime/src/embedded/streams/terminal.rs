//! The master side of a pseudo-terminal.

use std::io;
use std::os::fd::OwnedFd;

use tokio::net::unix::pipe;

use super::session::SessionStdio;

/// A pty master, kept for resizing. The other side belongs to a container.
pub struct Terminal(OwnedFd);

impl Terminal {
    /// Returns the master as an input and an output pipe. Reading fails once no process holds the
    /// container's side, which counts as end of file.
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
