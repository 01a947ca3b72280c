//! Overlay mounts: a container's root with a writable layer, and image volumes without.
//!
//! Runs in the process that becomes the container, so that no other process sees the intermediate
//! mounts.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Mode, OFlags, Uid, XattrFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::process::chdir;
use sys::mounts;

use super::Failure;
use super::users::PodUsers;
use crate::embedded::spec::Container;

/// Mounts the layers of a container's image with a writable layer on top.
pub fn mount_root(spec: &Container, directory: &Path, users: Option<&PodUsers>) -> Result<OwnedFd, Failure> {
    fn failed<E: Into<io::Error>>(error: E) -> Failure {
        Failure::during("mount the container root")(error)
    }
    let none = spec.layers.is_empty().then_some("none");
    for name in ["upper", "work"].into_iter().chain(none) {
        create_dir(&directory.join(name)).map_err(failed)?;
    }
    // The root directory of an overlay has the attributes of the upper directory, so these are copied
    // from the topmost layer.
    let top =
        spec.layers.last().map(|name| spec.layers_dir.join(name)).unwrap_or_else(|| directory.join("none"));
    let upper = directory.join("upper");
    let metadata = rustix::fs::stat(&top).map_err(failed)?;
    let (uid, gid) = match users {
        Some(users) => users.outside(metadata.st_uid, metadata.st_gid),
        None => (Uid::from_raw(metadata.st_uid), Gid::from_raw(metadata.st_gid)),
    };
    rustix::fs::chown(&upper, Some(uid), Some(gid)).map_err(failed)?;
    rustix::fs::chmod(&upper, Mode::from_raw_mode(metadata.st_mode)).map_err(failed)?;
    let stack = OverlayStack { directory, layers_dir: &spec.layers_dir, layers: &spec.layers, users };
    let context = spec.selinux.as_deref().map(file_context);
    stack.mount(true, context.as_deref())
}

/// Mounts the layers of an image without a writable layer, in `directory`.
pub fn mount_read_only(
    layers: &[String],
    layers_dir: &Path,
    directory: &Path,
    users: Option<&PodUsers>,
) -> Result<OwnedFd, Failure> {
    for name in ["root", "none"] {
        create_dir(&directory.join(name)).map_err(Failure::during("create the layer directories"))?;
    }
    OverlayStack { directory, layers_dir, layers, users }.mount(false, None)
}

struct OverlayStack<'a> {
    /// Has the empty directory `none`, and `upper` and `work` for a writable overlay or `root` for a
    /// read-only one. The overlay is mounted on `upper` or `root`.
    directory: &'a Path,
    layers_dir: &'a Path,
    /// Lowest first.
    layers: &'a [String],
    users: Option<&'a PodUsers>,
}

impl OverlayStack<'_> {
    fn mount(&self, has_changes: bool, context: Option<&str>) -> Result<OwnedFd, Failure> {
        fn failed<E: Into<io::Error>>(error: E) -> Failure {
            Failure::during("mount the overlay")(error)
        }
        let own = rustix::fs::open(self.directory, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(failed)?;
        // Paths through /proc/self/fd are short, since mount options are limited to a page, and have no
        // comma.
        let own_path = format!("/proc/self/fd/{}", own.as_raw_fd());
        let mapped = self.users.map(|users| self.mount_mapped(users)).transpose()?;
        let (place, layers) = match &mapped {
            Some((place, names)) => (place.as_path(), &names[..]),
            None => (self.layers_dir, self.layers),
        };
        chdir(place).map_err(failed)?;
        let mut lower: Vec<&str> = layers.iter().rev().map(String::as_str).collect();
        let none = format!("{own_path}/none");
        // overlayfs needs two layers, including the upper one.
        if lower.len() < 2 && (!has_changes || lower.is_empty()) {
            lower.push(&none);
        }
        let nothing = format!("{own_path}/root");
        if lower.len() < 2 && !has_changes {
            lower.push(&nothing);
        }
        let mut options = format!("lowerdir={}", lower.join(":"));
        if has_changes {
            options += &format!(",upperdir={own_path}/upper,workdir={own_path}/work");
        }
        if let Some(context) = context {
            options += &format!(",context=\"{context}\"");
        }
        let options = std::ffi::CString::new(options).map_err(failed)?;
        let target = format!("{own_path}/{}", if has_changes { "upper" } else { "root" });
        rustix::mount::mount("overlay", &target, "overlay", MountFlags::empty(), Some(options.as_c_str()))
            .map_err(|error| match self.users {
                Some(_) if error == Errno::INVAL => Failure(
                    "cannot mount the overlay for a pod with a user namespace: overlayfs of this kernel does not \
                     support idmapped layers (Linux 5.19 or later is required)"
                        .to_owned(),
                ),
                _ => failed(error),
            })?;
        rustix::fs::open(&target, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(failed)
    }

    /// Mounts the layers with owners mapped to the pod's user namespace. Returns their directory and
    /// their names in it.
    fn mount_mapped(&self, users: &PodUsers) -> Result<(PathBuf, Vec<String>), Failure> {
        fn failed<E: Into<io::Error>>(error: E) -> Failure {
            Failure::during("map the image layers to the pod's user namespace")(error)
        }
        let place = self.directory.join("lower");
        create_dir(&place).map_err(failed)?;
        let mut names = Vec::new();
        for (at, layer) in self.layers.iter().enumerate() {
            let source = self.layers_dir.join(layer);
            let tree = mounts::copy_mount(&source).map_err(failed)?;
            users.map(&tree, &source)?;
            let name = at.to_string();
            create_dir(&place.join(&name)).map_err(failed)?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let target = rustix::fs::open(place.join(&name), flags, Mode::empty()).map_err(failed)?;
            mounts::attach(tree, target).map_err(failed)?;
            names.push(name);
        }
        Ok((place, names))
    }
}

/// Creates a world-readable directory and its parents.
pub fn create_dir(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().mode(0o755).recursive(true).create(directory)
}

/// The label of files that processes with this label may use: the same level.
fn file_context(label: &str) -> String {
    let level = label.splitn(4, ':').nth(3).unwrap_or("s0");
    format!("system_u:object_r:container_file_t:{level}")
}

/// Relabels a path and everything below it for processes with this label. Symlinks are not followed,
/// even if they replace directories meanwhile.
pub fn label_tree(path: &Path, process: &str) -> io::Result<()> {
    const NAME: &str = "security.selinux";
    fn one(path: &Path, context: &str) -> io::Result<()> {
        match rustix::fs::lsetxattr(path, NAME, context.as_bytes(), XattrFlags::empty()) {
            // Not every filesystem supports labels; the kernel then uses a single one for the whole
            // filesystem.
            Err(Errno::NOTSUP | Errno::NOENT) => Ok(()),
            done => Ok(done?),
        }
    }
    fn below(dir: OwnedFd, context: &str) -> io::Result<()> {
        let place = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
        for entry in std::fs::read_dir(&place)? {
            let entry = entry?;
            one(&place.join(entry.file_name()), context)?;
            if entry.file_type()?.is_dir() {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                match rustix::fs::openat(&dir, entry.file_name(), flags, Mode::empty()) {
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                    inner => below(inner?, context)?,
                }
            }
        }
        Ok(())
    }
    let context = file_context(process);
    one(path, &context)?;
    match rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOTDIR) => Ok(()),
        dir => below(dir?, &context),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_all_files_below_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::write(dir.path().join("a/b/file"), "").unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("a/link")).unwrap();
        label_tree(dir.path(), "system_u:system_r:container_t:s0:c1,c2").unwrap();
        let read = |name: &str| {
            let mut found = [0; 80];
            let read = rustix::fs::lgetxattr(dir.path().join(name), "security.selinux", &mut found[..]);
            read.map(|length| String::from_utf8_lossy(&found[..length]).into_owned())
        };
        for name in ["", "a", "a/b", "a/b/file", "a/link"] {
            // Without SELinux the kernel stores the xattr as it is, or does not support it.
            if let Ok(context) = read(name) {
                assert_eq!(context, "system_u:object_r:container_file_t:s0:c1,c2", "{name}");
            }
        }
        let mut outside = [0; 80];
        let root = rustix::fs::lgetxattr("/", "security.selinux", &mut outside[..]).unwrap_or(0);
        assert!(!String::from_utf8_lossy(&outside[..root]).contains("c1,c2"));
    }
}
