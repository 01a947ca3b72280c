//! Changes in a directory, as the kernel tells them.

use std::io;
use std::path::Path;

use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;

/// Tells when something in a directory is written to, made, moved or removed.
pub struct Changes(AsyncFd<rustix::fd::OwnedFd>);

impl Changes {
    pub fn of(dir: &Path) -> io::Result<Changes> {
        let inotify = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        use inotify::WatchFlags as Watch;
        let what = Watch::MODIFY | Watch::CREATE | Watch::MOVED_TO | Watch::MOVED_FROM | Watch::DELETE;
        inotify::add_watch(&inotify, dir, what)?;
        #[expect(
            deprecated,
            reason = "its danger is in types that change their descriptor; an OwnedFd keeps it"
        )]
        let inotify = AsyncFd::new(inotify)?;
        Ok(Changes(inotify))
    }

    /// Waits for the next change, or some at once.
    pub async fn next(&self) -> io::Result<()> {
        let mut told = [0u8; 4096];
        loop {
            let mut ready = self.0.readable().await?;
            let read = ready.try_io(|inner| rustix::io::read(inner, &mut told).map_err(io::Error::from));
            if let Ok(read) = read {
                return read.map(drop);
            }
        }
    }
}
