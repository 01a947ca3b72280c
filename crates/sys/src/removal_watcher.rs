//! Reports deletions in a directory.
//!
//! Uses dnotify, signals for a directory. inotify would be simpler, but all processes of a user share
//! 128 instances, and there is a supervisor for every pod: programs in containers would find none left.

use std::io;
use std::os::fd::{AsRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;

/// `DN_DELETE`, `DN_RENAME` and, for more than one notification, `DN_MULTISHOT`.
const NOTIFY_MASK: libc::c_long = 0x08 | 0x10 | 0x8000_0000;
/// The pipe that the signal handler writes to. One directory per process is enough.
static NOTIFY_PIPE: AtomicI32 = AtomicI32::new(-1);

/// Watches a directory until it is dropped.
#[derive(Debug)]
pub struct RemovalWatcher {
    _directory: OwnedFd,
    /// Readable after something was deleted or renamed.
    reader: OwnedFd,
}

impl RemovalWatcher {
    /// Watches the direct entries of a directory. A process can watch only one.
    pub fn watch(directory: &std::path::Path) -> io::Result<RemovalWatcher> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty())?;
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // Never closed, since the signal may arrive at any time.
        if NOTIFY_PIPE.compare_exchange(-1, writer.as_raw_fd(), Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return Err(io::Error::other("a directory is already watched"));
        }
        let _ = writer.into_raw_fd();
        // SAFETY: all zeroes is a valid value; the handler only writes to a pipe, which is
        // async-signal-safe.
        let set = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigio as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(libc::SIGIO, &raw const action, std::ptr::null_mut())
        };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: passes integers; the descriptor is open.
        match unsafe { libc::fcntl(directory.as_raw_fd(), libc::F_NOTIFY, NOTIFY_MASK) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(RemovalWatcher { _directory: directory, reader }),
        }
    }

    /// Clears the notification.
    pub fn drain(&self) {
        let mut buffer = [0; 64];
        while let Ok(1..) = rustix::io::read(&self.reader, &mut buffer) {}
    }
}

/// Readable after a deletion.
impl std::os::fd::AsFd for RemovalWatcher {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.reader.as_fd()
    }
}

extern "C" fn on_sigio(_: libc::c_int) {
    // SAFETY: writes one byte to a pipe that never blocks and is never closed. errno of the interrupted
    // code is restored.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(NOTIFY_PIPE.load(Ordering::SeqCst), c"x".as_ptr().cast(), 1);
        *errno = before;
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    fn is_notified(watcher: &RemovalWatcher, seconds: i64) -> bool {
        let mut fds = [PollFd::new(watcher, PollFlags::IN)];
        let started = std::time::Instant::now();
        loop {
            match rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: seconds, tv_nsec: 0 })) {
                Err(rustix::io::Errno::INTR) if started.elapsed().as_secs() < 60 => {}
                done => return done.is_ok_and(|count| count > 0),
            }
        }
    }

    #[test]
    fn reports_removed_entries() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("inner")).unwrap();
        std::fs::write(at("inner/file"), "").unwrap();
        let watcher = RemovalWatcher::watch(dir.path()).unwrap();
        std::fs::write(at("file"), "").unwrap();
        std::fs::remove_file(at("inner/file")).unwrap();
        assert!(!is_notified(&watcher, 0), "no direct entry was deleted");
        std::fs::remove_file(at("file")).unwrap();
        assert!(is_notified(&watcher, 60));
        watcher.drain();
        assert!(!is_notified(&watcher, 0));
        std::fs::remove_dir_all(at("inner")).unwrap();
        assert!(is_notified(&watcher, 60));
        assert!(RemovalWatcher::watch(dir.path()).is_err(), "one for each process");
    }
}
