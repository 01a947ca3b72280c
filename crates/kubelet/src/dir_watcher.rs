//! Directory notifications through inotify.

use std::io;
use std::path::Path;

use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;

/// Reports writes, creations, moves and removals in a directory.
pub struct DirWatcher(AsyncFd<rustix::fd::OwnedFd>);

impl DirWatcher {
    pub fn new(dir: &Path) -> io::Result<DirWatcher> {
        let inotify = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        use inotify::WatchFlags as Watch;
        let flags = Watch::MODIFY | Watch::CREATE | Watch::MOVED_TO | Watch::MOVED_FROM | Watch::DELETE;
        inotify::add_watch(&inotify, dir, flags)?;
        #[expect(
            deprecated,
            reason = "its danger is in types that change their descriptor; an OwnedFd keeps it"
        )]
        let inotify = AsyncFd::new(inotify)?;
        Ok(DirWatcher(inotify))
    }

    /// Waits for the next batch of events.
    pub async fn next(&self) -> io::Result<()> {
        let mut buffer = [0u8; 4096];
        loop {
            let mut ready = self.0.readable().await?;
            let read = ready.try_io(|inner| rustix::io::read(inner, &mut buffer).map_err(io::Error::from));
            if let Ok(read) = read {
                return read.map(drop);
            }
        }
    }
}
