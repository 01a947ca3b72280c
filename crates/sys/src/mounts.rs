//! Mounts by descriptor: a copy of a tree is made where its source is visible, changed while nobody sees it, and put
//! in place where the container is. Paths are resolved once.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};

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
pub fn copy_one(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(rustix::mount::open_tree(CWD, path, flags)?)
}

/// Puts a copied tree at `target`, an open file or directory of the same kind.
pub fn attach(tree: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(tree, c"", target, c"", flags)?)
}

/// Changes what a mount is like. `mount` may be any open file on it for a recursive change of nothing else than it.
pub fn set(mount: impl AsFd, attributes: Attributes) -> io::Result<()> {
    let flag = |on: bool, bit: u64| if on { bit } else { 0 };
    // SAFETY: all zeroes is a valid value of this structure of numbers.
    let mut wanted: libc::mount_attr = unsafe { std::mem::zeroed() };
    wanted.attr_set = flag(attributes.read_only, libc::MOUNT_ATTR_RDONLY)
        | flag(attributes.no_suid, libc::MOUNT_ATTR_NOSUID)
        | flag(attributes.no_dev, libc::MOUNT_ATTR_NODEV)
        | flag(attributes.no_exec, libc::MOUNT_ATTR_NOEXEC);
    wanted.propagation = match attributes.propagation {
        Propagation::Private => libc::MS_PRIVATE,
        Propagation::Slave => libc::MS_SLAVE,
        Propagation::Shared => libc::MS_SHARED,
        Propagation::Unchanged => 0,
    };
    let recursive = if attributes.recursive { libc::AT_RECURSIVE } else { 0 };
    set_attributes(mount.as_fd().as_raw_fd(), &wanted, libc::AT_EMPTY_PATH | recursive)
}

/// Shows the owners of a copied tree through the map of a user namespace; `recursive` is for the mounts below as well.
pub fn map_owners(mount: impl AsFd, user_namespace: impl AsFd, recursive: bool) -> io::Result<()> {
    // SAFETY: all zeroes is a valid value of this structure of numbers.
    let mut wanted: libc::mount_attr = unsafe { std::mem::zeroed() };
    wanted.attr_set = libc::MOUNT_ATTR_IDMAP;
    wanted.userns_fd = u64::from(user_namespace.as_fd().as_raw_fd().unsigned_abs());
    let recursive = if recursive { libc::AT_RECURSIVE } else { 0 };
    set_attributes(mount.as_fd().as_raw_fd(), &wanted, libc::AT_EMPTY_PATH | recursive)
}

fn set_attributes(fd: i32, wanted: &libc::mount_attr, flags: i32) -> io::Result<()> {
    // SAFETY: the descriptor is open, the path is an empty string that lives for ever and the structure outlives the
    // call, which is told its size.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd,
            c"".as_ptr(),
            flags,
            std::ptr::from_ref(wanted),
            std::mem::size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
