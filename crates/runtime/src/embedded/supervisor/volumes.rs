//! The volumes of a container: from the host, from an image, or the container's own.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Gid, Mode, Uid};
use rustix::io::Errno;
use rustix::mount::OpenTreeFlags;
use sys::mounts::{self, Attributes};

use super::users::PodUsers;
use super::{Failure, layers};
use crate::embedded::open_in_root;
use crate::embedded::spec::ImageVolume;

/// A volume to mount.
pub enum Volume {
    /// A mount tree that was opened in the host's mount namespace.
    Tree(OwnedFd),
    /// An image, or a path in it.
    Image(ImageVolume),
    /// A directory of the container's own, for a volume that its image declares.
    Own,
}

/// Builds the volumes of a container while its root contains nothing but the image.
pub struct VolumeBuilder<'a> {
    pub root: BorrowedFd<'a>,
    /// The container's directory, which is deleted with the container.
    pub directory: &'a Path,
    pub layers_dir: &'a Path,
    /// The SELinux label of the container's processes.
    pub label: Option<&'a str>,
    pub users: Option<&'a PodUsers>,
}

impl VolumeBuilder<'_> {
    /// Opens the mount tree for a target. `at` is the volume's index in the container.
    pub fn open_volume(&self, at: usize, target: &str, volume: Volume) -> Result<OwnedFd, Failure> {
        match volume {
            Volume::Tree(tree) => Ok(tree),
            Volume::Image(image) => {
                self.mount_image(&image, &self.directory.join("images").join(at.to_string()))
            }
            Volume::Own => {
                self.create_own_volume(target, &self.directory.join("volumes").join(at.to_string()))
            }
        }
    }

    /// Mounts an image as a volume: read-only, nothing in it can be executed.
    fn mount_image(&self, volume: &ImageVolume, directory: &Path) -> Result<OwnedFd, Failure> {
        let failed = |error: io::Error| Failure::during(format!("mount the image {:?}", volume.image))(error);
        let root = layers::mount_read_only(&volume.layers, self.layers_dir, directory, self.users)?;
        // Symlinks cannot lead out of the image.
        let part = if volume.sub_path.is_empty() { "." } else { &volume.sub_path };
        let part = open_in_root(root, part)
            .map_err(|error| Failure(volume.missing_error(&super::launch::plain_message(&error.into()))))?;
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = rustix::mount::open_tree(part, "", flags).map_err(|error| failed(error.into()))?;
        let attributes = Attributes {
            read_only: true,
            no_suid: true,
            no_dev: true,
            no_exec: true,
            ..Attributes::default()
        };
        mounts::set_mount_attributes(&tree, attributes).map_err(failed)?;
        Ok(tree)
    }

    /// Creates a directory with the content of the image at `target`, or an empty one if the image has
    /// none. Symlinks are resolved inside the image. The layers are mounted with the owners mapped for
    /// the pod, so the copy has them, too.
    fn create_own_volume(&self, target: &str, directory: &Path) -> Result<OwnedFd, Failure> {
        let failed =
            |error: io::Error| Failure::during(format!("create the image's volume {target:?}"))(error);
        layers::create_dir(directory).map_err(failed)?;
        let directory_fd = sys::trees::open(directory).map_err(failed)?;
        match open_in_root(self.root, target) {
            Ok(source) => sys::trees::copy(source, &directory_fd).map_err(failed)?,
            Err(Errno::NOENT) => {
                let (uid, gid) = self.users.map_or((Uid::ROOT, Gid::ROOT), PodUsers::root);
                rustix::fs::fchown(&directory_fd, Some(uid), Some(gid))
                    .and_then(|()| rustix::fs::fchmod(&directory_fd, Mode::from_raw_mode(0o755)))
                    .map_err(|error| failed(error.into()))?;
            }
            Err(error) => return Err(failed(error.into())),
        }
        if let Some(label) = self.label {
            layers::label_tree(directory, label).map_err(failed)?;
        }
        let tree = mounts::copy_mount(directory).map_err(failed)?;
        mounts::set_mount_attributes(tree.as_fd(), Attributes::default()).map_err(failed)?;
        Ok(tree)
    }
}
