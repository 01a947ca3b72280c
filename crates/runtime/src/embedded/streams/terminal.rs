//! The near end of a terminal.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

/// A terminal whose other end is a container's.
pub struct Terminal(AsyncFd<File>);

impl Terminal {
    pub fn new(fd: OwnedFd) -> io::Result<Terminal> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        // A file has the same descriptor for all its life, which is what the newer call would have us promise.
        #[expect(deprecated, reason = "its successor is unsafe")]
        let registered = AsyncFd::new(File::from(fd))?;
        Ok(Terminal(registered))
    }

    /// An error is its end: nobody holds the other side any more.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            if let Ok(done) = ready.try_io(|file| file.get_ref().read(buffer)) {
                return done;
            }
        }
    }

    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.0.writable().await?;
            if let Ok(done) = ready.try_io(|file| file.get_ref().write(bytes)) {
                bytes = &bytes[done?..];
            }
        }
        Ok(())
    }

    pub fn resize(&self, rows: u16, columns: u16) {
        let size = rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let _ = rustix::termios::tcsetwinsize(self.0.get_ref(), size);
    }
}
