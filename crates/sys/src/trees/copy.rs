//! Copies of directory trees.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps};
use rustix::fs::{Uid, XattrFlags};
use rustix::io::Errno;

/// The kernel's limit of the list of xattr names and of an xattr value.
const MAX_XATTR_BYTES: usize = 64 << 10;
/// An SELinux label depends on the location of a file, so it is not copied.
const SELINUX_XATTR: &[u8] = b"security.selinux";

/// Copies the content of a directory into an empty one, with owners, modes, times, xattrs and hard
/// links. Symlinks are never followed. A tree deeper than a path can name is an error.
pub fn copy(from: impl AsFd, to: impl AsFd) -> io::Result<()> {
    let (from, to) = (from.as_fd(), to.as_fd());
    let mut directories = vec![PathBuf::from(".")];
    let mut linked = HashMap::new();
    let mut next = 0;
    while let Some(directory) = directories.get(next).cloned() {
        next += 1;
        let pair = DirectoryPair::open(from, to, &directory)?;
        for entry in Dir::read_from(&pair.from)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let path = directory.join(std::ffi::OsStr::from_bytes(name.to_bytes()));
            let found = rustix::fs::statat(&pair.from, name, AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(found.st_mode) {
                FileType::Directory => {
                    rustix::fs::mkdirat(&pair.to, name, Mode::RWXU)?;
                    directories.push(path);
                }
                kind => {
                    let known = (found.st_nlink > 1).then(|| linked.get(&(found.st_dev, found.st_ino)));
                    if let Some(first) = known.flatten() {
                        rustix::fs::linkat(to, first, &pair.to, name, AtFlags::empty())?;
                        continue;
                    }
                    pair.create(kind, name, &found)?;
                    pair.copy_metadata(name, &found)?;
                    linked.extend((found.st_nlink > 1).then_some(((found.st_dev, found.st_ino), path)));
                }
            }
        }
    }
    // Directories come last: creating entries changes their times, and entries would inherit their
    // default ACLs.
    for directory in directories.iter().rev() {
        let pair = DirectoryPair::open(from, to, directory)?;
        let found = rustix::fs::fstat(&pair.from)?;
        pair.copy_metadata(c".", &found)?;
    }
    Ok(())
}

/// A directory and its copy.
struct DirectoryPair {
    from: OwnedFd,
    to: OwnedFd,
}

impl DirectoryPair {
    fn open(from: impl AsFd, to: impl AsFd, path: &Path) -> rustix::io::Result<DirectoryPair> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let below = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let from = rustix::fs::openat2(from, path, flags, Mode::empty(), below)?;
        let to = rustix::fs::openat2(to, path, flags, Mode::empty(), below)?;
        Ok(DirectoryPair { from, to })
    }

    fn create(&self, kind: FileType, name: &CStr, found: &Stat) -> io::Result<()> {
        match kind {
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let source = rustix::fs::openat(&self.from, name, flags, Mode::empty())?;
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let target = rustix::fs::openat(&self.to, name, flags, Mode::RUSR | Mode::WUSR)?;
                io::copy(&mut File::from(source), &mut File::from(target))?;
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&self.from, name, Vec::new())?;
                rustix::fs::symlinkat(target.as_c_str(), &self.to, name)?;
            }
            kind => {
                rustix::fs::mknodat(&self.to, name, kind, Mode::RUSR | Mode::WUSR, found.st_rdev)?;
            }
        }
        Ok(())
    }

    /// Copies the metadata of an entry. The owner comes first, since changing it clears some of the
    /// rest.
    fn copy_metadata(&self, name: &CStr, found: &Stat) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(found.st_uid), Gid::from_raw(found.st_gid));
        rustix::fs::chownat(&self.to, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
            let mode = Mode::from_raw_mode(found.st_mode);
            rustix::fs::chmodat(&self.to, name, mode, AtFlags::empty())?;
        }
        self.copy_xattrs(name)?;
        let time = |seconds: i64, nanoseconds: u64| Timespec {
            tv_sec: seconds,
            tv_nsec: nanoseconds.try_into().unwrap_or_default(),
        };
        let times = Timestamps {
            last_access: time(found.st_atime, found.st_atime_nsec),
            last_modification: time(found.st_mtime, found.st_mtime_nsec),
        };
        Ok(rustix::fs::utimensat(&self.to, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    fn copy_xattrs(&self, name: &CStr) -> io::Result<()> {
        let (from, to) = (proc_fd_path(&self.from, name), proc_fd_path(&self.to, name));
        let mut names = vec![0; MAX_XATTR_BYTES];
        let length = match rustix::fs::llistxattr(&from, &mut names[..]) {
            Err(Errno::NOTSUP) => return Ok(()),
            length => length?,
        };
        let mut value = Vec::new();
        for name in
            names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty() && *name != SELINUX_XATTR)
        {
            value.resize(MAX_XATTR_BYTES, 0);
            let length = match rustix::fs::lgetxattr(&from, name, &mut value[..]) {
                // Listed, but not readable.
                Err(Errno::NODATA | Errno::NOTSUP) => continue,
                length => length?,
            };
            match rustix::fs::lsetxattr(&to, name, &value[..length], XattrFlags::empty()) {
                // The target filesystem does not support it.
                Err(Errno::NOTSUP) => {}
                done => done?,
            }
        }
        Ok(())
    }
}

/// The path of an entry of an open directory, for syscalls that take only paths.
fn proc_fd_path(directory: &OwnedFd, name: &CStr) -> PathBuf {
    let fd_path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    fd_path.join(std::ffi::OsStr::from_bytes(name.to_bytes()))
}

/// Opens a directory for [`copy`].
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};

    use super::*;

    /// Only root may change owners.
    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    #[test]
    fn copies_content_and_metadata() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        std::fs::create_dir_all(from.join("a/b")).unwrap();
        std::fs::create_dir(&to).unwrap();
        std::fs::write(from.join("a/b/file"), vec![7; 100_000]).unwrap();
        std::fs::hard_link(from.join("a/b/file"), from.join("again")).unwrap();
        std::os::unix::fs::symlink("/nowhere", from.join("a/link")).unwrap();
        rustix::fs::mknodat(CWD, from.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        for (name, mode) in [("a/b/file", 0o4711), ("a", 0o2750), ("a/b", 0o500), ("", 0o1777)] {
            if is_root() {
                std::os::unix::fs::lchown(from.join(name), Some(1234), Some(4321)).unwrap();
            }
            std::fs::set_permissions(from.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let attribute = rustix::fs::lsetxattr(from.join("a/b"), "user.mark", b"x", XattrFlags::empty());
        let old = Timespec { tv_sec: 1000, tv_nsec: 5 };
        let times = Timestamps { last_access: old, last_modification: old };
        for name in ["a/b/file", "a/link", "a/b", "a", ""] {
            rustix::fs::utimensat(CWD, from.join(name), &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        }
        copy(open(&from).unwrap(), open(&to).unwrap()).unwrap();
        for name in ["", "a", "a/b", "a/b/file", "a/link", "again", "fifo"] {
            let seen = |top: &Path| {
                let found = std::fs::symlink_metadata(top.join(name)).unwrap();
                (found.mode(), found.uid(), found.gid(), found.mtime(), found.mtime_nsec(), found.len())
            };
            let (mut before, mut after) = (seen(&from), seen(&to));
            if std::fs::symlink_metadata(from.join(name)).unwrap().is_dir() {
                // The size of a directory depends on the filesystem.
                (before.5, after.5) = (0, 0);
            }
            assert_eq!(before, after, "{name:?}");
        }
        assert_eq!(std::fs::read(to.join("a/b/file")).unwrap(), vec![7; 100_000]);
        assert_eq!(std::fs::read_link(to.join("a/link")).unwrap(), Path::new("/nowhere"));
        assert!(std::fs::symlink_metadata(to.join("fifo")).unwrap().file_type().is_fifo());
        let inode = |name: &str| std::fs::metadata(to.join(name)).unwrap().ino();
        assert_eq!(inode("again"), inode("a/b/file"));
        if attribute.is_ok() {
            let mut value = [0; 8];
            let length = rustix::fs::lgetxattr(to.join("a/b"), "user.mark", &mut value[..]).unwrap();
            assert_eq!(&value[..length], b"x");
        }
    }
}
