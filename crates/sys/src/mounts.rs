//! Mounts by descriptor: a mount tree is cloned where its source is visible, changed while it is
//! detached, and attached in the container. Each path is resolved once.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};

/// The attributes of a cloned tree. What is not set stays as at the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    pub read_only: bool,
    pub no_suid: bool,
    pub no_dev: bool,
    pub no_exec: bool,
    /// Also for nested mounts.
    pub recursive: bool,
    pub propagation: Propagation,
}

/// Whether later mounts on one side appear on the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Propagation {
    #[default]
    Private,
    /// From the host to the container.
    Slave,
    /// In both directions.
    Shared,
    /// Keep the propagation of the mount.
    Unchanged,
}

/// Clones the mount at `path` with all nested mounts. The clone is detached.
pub fn copy_tree(path: &Path) -> io::Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    Ok(rustix::mount::open_tree(CWD, path, flags)?)
}

/// Clones a single file or directory, without nested mounts.
pub fn copy_mount(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(rustix::mount::open_tree(CWD, path, flags)?)
}

/// Attaches a detached tree to `target`, an open file or directory of the same type.
pub fn attach(tree: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(tree, c"", target, c"", flags)?)
}

/// Changes the attributes of the mount that `mount` refers to.
pub fn set_mount_attributes(mount: impl AsFd, attributes: Attributes) -> io::Result<()> {
    let flag = |on: bool, bit: u64| if on { bit } else { 0 };
    // SAFETY: all zeroes is a valid value of this struct of integers.
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

/// Applies the ID mappings of a user namespace to a detached tree, and with `recursive` to its nested
/// mounts.
pub fn map_owners(mount: impl AsFd, user_namespace: impl AsFd, recursive: bool) -> io::Result<()> {
    // SAFETY: all zeroes is a valid value of this struct of integers.
    let mut attr: libc::mount_attr = unsafe { std::mem::zeroed() };
    attr.attr_set = libc::MOUNT_ATTR_IDMAP;
    attr.userns_fd = u64::from(user_namespace.as_fd().as_raw_fd().unsigned_abs());
    let recursive = if recursive { libc::AT_RECURSIVE } else { 0 };
    mount_setattr(mount.as_fd().as_raw_fd(), &attr, libc::AT_EMPTY_PATH | recursive)
}

fn mount_setattr(fd: i32, attr: &libc::mount_attr, flags: i32) -> io::Result<()> {
    // SAFETY: the descriptor is open, the path is a static empty string, and the struct outlives the
    // call, which gets its size.
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

/// Unmounts everything below a directory, innermost first. Tries all mounts, and fails if one remains:
/// deleting the directory would then delete files of another filesystem.
pub fn unmount_below(dir: &Path) -> io::Result<()> {
    // mountinfo has paths without symlinks.
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

/// mountinfo escapes spaces and the like as `\040`.
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
            eprintln!("skipped: needs permission to mount");
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
