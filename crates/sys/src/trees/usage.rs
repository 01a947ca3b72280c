//! The disk usage of directory trees.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Stat, statat};

use super::{MAX_OPEN_DEPTH, directory};

/// The unit of `st_blocks`, on every filesystem.
const STAT_BLOCK_BYTES: u64 = 512;

/// The number of files with several hard links that are remembered. Beyond it, every link counts.
const MAX_TRACKED_HARD_LINKS: usize = 1 << 16;

/// The bytes and the number of files of a tree, including its root. A file with several hard links
/// counts once. Other filesystems and files that disappear meanwhile do not count.
///
/// The content of the tree may be hostile: it may be changed meanwhile so that a directory becomes a
/// symlink, or be deeper than this process has descriptors or stack. So every directory is opened
/// relative to its parent, and a parent that was closed is opened again by `..`.
pub fn usage(path: &Path) -> (u64, u64) {
    let (mut all, mut linked) = ((0, 0), HashSet::new());
    let mut add = |found: &Stat, is_directory: bool| {
        let is_shared = !is_directory && found.st_nlink > 1 && linked.len() < MAX_TRACKED_HARD_LINKS;
        if !is_shared || linked.insert(found.st_ino) {
            all = (all.0 + found.st_blocks.cast_unsigned() * STAT_BLOCK_BYTES, all.1 + 1);
        }
    };
    let Ok(top) = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) else { return all };
    add(&top, true);
    let mut levels: Vec<Level> = directory(CWD, path).and_then(Level::new).into_iter().collect();
    while let Some(mut level) = levels.pop() {
        let Some(open) = &mut level.open else { continue };
        let Some(Ok(entry)) = open.read() else {
            if let Some(above) = levels.last_mut().filter(|above| above.open.is_none()) {
                let _ = above.reopen(open);
            }
            continue;
        };
        level.offset = entry.offset();
        let name = entry.file_name();
        let mut below = None;
        if !matches!(name.to_bytes(), b"." | b"..")
            && let Ok(here) = open.fd()
            && let Ok(found) = statat(here, name, AtFlags::SYMLINK_NOFOLLOW)
            && found.st_dev == top.st_dev
        {
            let is_directory = FileType::from_raw_mode(found.st_mode).is_dir();
            add(&found, is_directory);
            if is_directory {
                below = directory(here, name).and_then(Level::new).ok();
            }
        }
        if below.is_some() && levels.len() >= MAX_OPEN_DEPTH {
            level.open = None;
        }
        levels.push(level);
        levels.extend(below);
    }
    all
}

/// A directory that is being read.
struct Level {
    /// `None` while a subdirectory is read, beyond the depth at which all can stay open.
    open: Option<Dir>,
    stat: Stat,
    /// The offset of the next entry.
    offset: i64,
}

impl Level {
    fn new(fd: OwnedFd) -> rustix::io::Result<Level> {
        let stat = rustix::fs::fstat(&fd)?;
        Ok(Level { open: Some(Dir::new(fd)?), stat, offset: 0 })
    }

    /// Reopens it from a subdirectory, unless that was moved elsewhere.
    fn reopen(&mut self, below: &Dir) -> rustix::io::Result<()> {
        let above = Level::new(directory(below.fd()?, c"..")?)?;
        if (above.stat.st_dev, above.stat.st_ino) == (self.stat.st_dev, self.stat.st_ino) {
            self.open = above.open;
        }
        self.open.as_mut().map_or(Ok(()), |open| open.seek(self.offset))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{Mode, RenameFlags};

    use super::*;

    #[test]
    fn counts_disk_usage_of_files() {
        let dir = tempfile::tempdir().unwrap();
        let empty = usage(dir.path());
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("sub/file"), vec![1; 10_000]).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        let (bytes, files) = usage(dir.path());
        assert!(bytes >= empty.0 + 10_000, "{bytes}");
        assert_eq!(files, 4);
        std::fs::hard_link(dir.path().join("sub/file"), dir.path().join("sub/again")).unwrap();
        assert_eq!(usage(dir.path()), (bytes, files));
        assert_eq!(usage(&dir.path().join("link")).1, 1);
        assert_eq!(usage(&dir.path().join("nothing")), (0, 0));
    }

    /// Deeper than any path can name, with more entries to read on the way back, in a thread with a
    /// small stack.
    #[test]
    fn counts_a_deep_tree_with_a_small_stack() {
        const DEPTH: u64 = 2_000;
        let dir = tempfile::tempdir().unwrap();
        let mut here = directory(CWD, dir.path()).unwrap();
        for _ in 0..DEPTH {
            for name in ["a", "down", "z"] {
                rustix::fs::mkdirat(&here, name, Mode::RWXU).unwrap();
            }
            here = directory(&here, "down").unwrap();
        }
        drop(here);
        let top = dir.path().to_owned();
        let thread = std::thread::Builder::new().stack_size(128 << 10).spawn(move || usage(&top)).unwrap();
        assert_eq!(thread.join().unwrap().1, 1 + 3 * DEPTH);
        super::super::remove(&dir.path().join("down")).unwrap();
    }

    /// A directory and a symlink are swapped all the time.
    #[test]
    fn does_not_follow_swapped_symlinks() {
        let dir = tempfile::tempdir().unwrap();
        let (top, other) = (dir.path().join("top"), dir.path().join("other"));
        std::fs::create_dir_all(top.join("a")).unwrap();
        std::fs::create_dir(&other).unwrap();
        for file in 0..100 {
            std::fs::write(other.join(file.to_string()), "").unwrap();
        }
        std::os::unix::fs::symlink(&other, top.join("b")).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (a, b) = (top.join("a"), top.join("b"));
                while !is_over.load(Ordering::Relaxed) {
                    rustix::fs::renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE).unwrap();
                }
            });
            let most = (0..20_000).map(|_| usage(&top).1).max();
            is_over.store(true, Ordering::Relaxed);
            assert!(most < Some(100), "{most:?}");
        });
    }
}
