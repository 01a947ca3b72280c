//! What is mounted in a container, and comes from the host, from an image, or is the container's own.

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

/// What is to be mounted.
pub enum Volume {
    /// What was opened where the host's files are seen.
    Tree(OwnedFd),
    /// An image, or a part of one.
    Image(ImageVolume),
    /// A directory of the container's own, since its image declares it as a volume.
    Own,
}

/// Makes volumes of a container that has nothing in its root yet but its image.
pub struct VolumeBuilder<'a> {
    pub root: BorrowedFd<'a>,
    /// The container's own, which goes with it, and so does whatever is put there.
    pub directory: &'a Path,
    pub layers_dir: &'a Path,
    /// Of SELinux, which the container's processes have.
    pub label: Option<&'a str>,
    pub users: Option<&'a PodUsers>,
}

impl VolumeBuilder<'_> {
    /// The tree to be mounted at a target. `at` tells the container's volumes from each other.
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

    /// An image as a volume: only to be read, and nothing in it to be run.
    fn mount_image(&self, volume: &ImageVolume, directory: &Path) -> Result<OwnedFd, Failure> {
        let failed = |error: io::Error| Failure::during(format!("mount the image {:?}", volume.image))(error);
        let root = layers::mount_read_only(&volume.layers, self.layers_dir, directory, self.users)?;
        // Its links lead nowhere else.
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

    /// A directory that begins as the image's at this path, or empty where the image has none. Links of the image are
    /// followed inside of it only; its layers are shown with the owners they have for the pod, and so is a copy of them.
    fn create_own_volume(&self, target: &str, directory: &Path) -> Result<OwnedFd, Failure> {
        let failed = |error: io::Error| Failure::during(format!("make the image's volume {target:?}"))(error);
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
