//! Directory trees: deletion, copies, disk usage.

mod copy;
mod usage;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags};
use rustix::io::Errno;

pub use copy::{copy, open};
pub use usage::usage;

/// The depth of directories that are open at a time. Deeper ones are moved to the top first.
const MAX_OPEN_DEPTH: usize = 32;

/// Marks the subdirectories of a directory as unrelated, on filesystems that support it: ext4 then
/// places each new one, with everything below, in another block group. Within one group, ext4 checks
/// every inode that was deleted in the last minutes before it allocates a new one.
pub fn set_topdir_flag(directory: &Path) {
    let directory_fd = self::directory(CWD, directory);
    let flags = directory_fd.as_ref().map_err(|error| *error).and_then(rustix::fs::ioctl_getflags);
    if let (Ok(directory_fd), Ok(flags)) = (directory_fd, flags) {
        let _ = rustix::fs::ioctl_setflags(&directory_fd, flags | rustix::fs::IFlags::TOPDIR);
    }
}

/// Deletes a directory tree of any depth. Its content may be hostile, so descriptors and stack are
/// bounded. Symlinks are not followed.
pub fn remove(path: &Path) -> io::Result<()> {
    let top = match directory(CWD, path) {
        Err(Errno::NOTDIR | Errno::LOOP) => return std::fs::remove_file(path),
        other => other?,
    };
    let mut moved_count = 0;
    loop {
        let before = moved_count;
        remove_contents(top.as_fd(), top.as_fd(), 0, &mut moved_count)?;
        if moved_count == before {
            return Ok(rustix::fs::unlinkat(CWD, path, AtFlags::REMOVEDIR)?);
        }
    }
}

fn directory(at: impl AsFd, path: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, path, flags, Mode::empty())
}

fn remove_contents(
    top: std::os::fd::BorrowedFd<'_>,
    here: std::os::fd::BorrowedFd<'_>,
    depth: usize,
    moved_count: &mut u64,
) -> io::Result<()> {
    for entry in Dir::read_from(here)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if !entry.file_type().is_dir() {
            match rustix::fs::unlinkat(here, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => continue,
                // The errors of unlink for a directory.
                Err(Errno::ISDIR | Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if depth < MAX_OPEN_DEPTH {
            // Another process may be deleting the same tree.
            let below = match directory(here, name) {
                Err(Errno::NOENT) => continue,
                below => below?,
            };
            remove_contents(top, below.as_fd(), depth + 1, moved_count)?;
            drop(below);
            match rustix::fs::unlinkat(here, name, AtFlags::REMOVEDIR) {
                Err(Errno::NOENT) => {}
                done => done?,
            }
        } else {
            move_to_top(top, here, name, moved_count)?;
        }
    }
    Ok(())
}

fn move_to_top(
    top: impl AsFd,
    from: impl AsFd,
    name: &std::ffi::CStr,
    moved_count: &mut u64,
) -> rustix::io::Result<()> {
    loop {
        *moved_count += 1;
        let new = format!(".deep-{moved_count}");
        // The name may already exist at the top.
        match rustix::fs::renameat(&from, name, &top, new) {
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deletes_a_tree_without_following_links() {
        let dir = tempfile::tempdir().unwrap();
        let (top, other) = (dir.path().join("top"), dir.path().join("other"));
        std::fs::create_dir_all(top.join("a/b/c")).unwrap();
        std::fs::create_dir_all(&other).unwrap();
        for file in [top.join("x"), top.join("a/b/y"), other.join("kept")] {
            std::fs::write(file, "").unwrap();
        }
        std::os::unix::fs::symlink(&other, top.join("a/link")).unwrap();
        std::fs::write(top.join(".deep-1"), "").unwrap();
        remove(&top).unwrap();
        assert!(!top.exists() && other.join("kept").exists());
        assert_eq!(remove(&top).map_err(|error| error.kind()), Err(io::ErrorKind::NotFound));
        // A symlink is deleted, not its target.
        std::os::unix::fs::symlink(&other, &top).unwrap();
        remove(&top).unwrap();
        assert!(std::fs::symlink_metadata(&top).is_err() && other.join("kept").exists());
    }

    /// Deeper than any path can name, in a thread with a small stack.
    #[test]
    fn deletes_a_deep_tree_with_a_small_stack() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        let mut here = directory(CWD, &top).unwrap();
        for _ in 0..5_000 {
            rustix::fs::mkdirat(&here, "down", Mode::from_raw_mode(0o755)).unwrap();
            here = directory(&here, "down").unwrap();
        }
        drop(here);
        let path = top.clone();
        let thread = std::thread::Builder::new().stack_size(128 << 10).spawn(move || remove(&path)).unwrap();
        thread.join().unwrap().unwrap();
        assert!(!top.exists());
    }
}
