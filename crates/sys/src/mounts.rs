//! Mounts by descriptor: a copy of a tree is made where its source is visible, changed while nobody sees it, and put
//! in place where the container is. Paths are resolved once.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};

/// What a copied tree is like; what is not said stays as at the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    pub read_only: bool,
    pub no_suid: bool,
    pub no_dev: bool,
    pub no_exec: bool,
    /// For the mounts below as well.
    pub recursive: bool,
    pub propagation: Propagation,
}

/// Whether mounts made later on one side appear on the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Propagation {
    #[default]
    Private,
    /// From the host into the container.
    Slave,
    /// Both ways.
    Shared,
    /// As it is.
    Unchanged,
}

/// A copy of what is mounted at `path` and below, which nobody else sees yet.
pub fn copy_tree(path: &Path) -> io::Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    Ok(rustix::mount::open_tree(CWD, path, flags)?)
}

/// The same for one file or directory without the mounts below it.
pub fn copy_mount(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(rustix::mount::open_tree(CWD, path, flags)?)
}

/// Puts a copied tree at `target`, an open file or directory of the same kind.
pub fn attach(tree: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(tree, c"", target, c"", flags)?)
}

/// Changes what a mount is like. `mount` may be any open file on it for a recursive change of nothing else than it.
pub fn set_mount_attributes(mount: impl AsFd, attributes: Attributes) -> io::Result<()> {
    let flag = |on: bool, bit: u64| if on { bit } else { 0 };
    // SAFETY: all zeroes is a valid value of this structure of numbers.
    let mut attr: libc::mount_attr = unsafe { std::mem::zeroed() };
    attr.attr_set = flag(attributes.read_only, libc::MOUNT_ATTR_RDONLY)
        | flag(attributes.no_suid, libc::MOUNT_ATTR_NOSUID)
        | flag(attributes.no_dev, libc::MOUNT_ATTR_NODEV)
        | flag(attributes.no_exec, libc::MOUNT_ATTR_NOEXEC);
    attr.propagation = match attributes.propagation {
        Propagation::Private => libc::MS_PRIVATE,
        Propagation::Slave => libc::MS_SLAVE,
        Propagation::Shared => libc::MS_SHARED,
        Propagation::Unchanged => 0,
    };
    let recursive = if attributes.recursive { libc::AT_RECURSIVE } else { 0 };
    mount_setattr(mount.as_fd().as_raw_fd(), &attr, libc::AT_EMPTY_PATH | recursive)
}

/// Shows the owners of a copied tree through the map of a user namespace; `recursive` is for the mounts below as well.
pub fn map_owners(mount: impl AsFd, user_namespace: impl AsFd, recursive: bool) -> io::Result<()> {
    // SAFETY: all zeroes is a valid value of this structure of numbers.
    let mut attr: libc::mount_attr = unsafe { std::mem::zeroed() };
    attr.attr_set = libc::MOUNT_ATTR_IDMAP;
    attr.userns_fd = u64::from(user_namespace.as_fd().as_raw_fd().unsigned_abs());
    let recursive = if recursive { libc::AT_RECURSIVE } else { 0 };
    mount_setattr(mount.as_fd().as_raw_fd(), &attr, libc::AT_EMPTY_PATH | recursive)
}

fn mount_setattr(fd: i32, attr: &libc::mount_attr, flags: i32) -> io::Result<()> {
    // SAFETY: the descriptor is open, the path is an empty string that lives for ever and the structure outlives the
    // call, which is told its size.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd,
            c"".as_ptr(),
            flags,
            std::ptr::from_ref(attr),
            std::mem::size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Unmounts everything below a directory, the innermost first. Fails where something stays, after all have been tried:
/// whoever removes the directory next would remove what is on somebody else's disk.
pub fn unmount_below(dir: &Path) -> io::Result<()> {
    // The kernel tells of places as they are, not by the links that lead there.
    let dir = match std::fs::canonicalize(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        dir => dir?,
    };
    let mounted =
        || Ok::<_, io::Error>(mount_points_below(&std::fs::read_to_string("/proc/self/mountinfo")?, &dir));
    for mount_point in mounted()?.iter().rev() {
        let _ = rustix::mount::unmount(mount_point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
    match mounted()?.first() {
        Some(left) => Err(io::Error::other(format!("{} is still mounted", left.display()))),
        None => Ok(()),
    }
}

fn mount_points_below(mountinfo: &str, dir: &Path) -> Vec<PathBuf> {
    let mount_points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape);
    mount_points.filter(|mount_point| mount_point != dir && mount_point.starts_with(dir)).collect()
}

/// The kernel writes spaces and the like as `\040`.
fn unescape(text: &str) -> PathBuf {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => plain = format!("{plain}\\{part}"),
        }
    }
    plain.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_only_mounts_below_a_directory() {
        let text = "1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / /var/lib/skiff/a\\040b rw - tmpfs x rw\n\
                    3 1 0:2 / /var/lib/skiff-dev/c rw - tmpfs x rw\n4 1 0:2 / /var/lib/skiff/a\\040b/d rw - tmpfs x rw\n\
                    5 1 0:2 / /var/lib/skiff rw - ext4 x rw\n";
        let found = mount_points_below(text, Path::new("/var/lib/skiff"));
        assert_eq!(found, ["/var/lib/skiff/a b", "/var/lib/skiff/a b/d"].map(PathBuf::from));
        assert_eq!(unescape("a\\b"), Path::new("a\\b"));
    }

    #[test]
    fn unmount_below_a_symlink() {
        let top = std::env::temp_dir().join(format!("skiff-mounts-{}", std::process::id()));
        let (dir, link) = (top.join("dir"), top.join("link"));
        std::fs::create_dir_all(dir.join("a/b")).unwrap();
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        let mount = |name: &str| {
            let flags = rustix::mount::MountFlags::empty();
            rustix::mount::mount("tmpfs", link.join(name), "tmpfs", flags, c"")
        };
        if mount("a").is_err() {
            eprintln!("skipped: whoever runs this may not mount anything");
        } else {
            std::fs::create_dir(link.join("a/c")).unwrap();
            mount("a/c").unwrap();
            unmount_below(&link).unwrap();
            assert!(dir.join("a/b").exists() && !dir.join("a/c").exists());
        }
        unmount_below(&top.join("none")).unwrap();
        std::fs::remove_dir_all(&top).unwrap();
    }
}
