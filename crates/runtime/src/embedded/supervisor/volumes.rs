//! What is mounted in a container, and comes from the host, from an image, or is the container's own.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Gid, Mode, Uid};
use rustix::io::Errno;
use rustix::mount::OpenTreeFlags;
use sys::mounts::{self, Attributes};

use super::users::Users;
use super::{Failure, layers};
use crate::embedded::open_inside;
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
pub struct Maker<'a> {
    pub root: BorrowedFd<'a>,
    /// The container's own, which goes with it, and so does whatever is put there.
    pub directory: &'a Path,
    pub layers_dir: &'a Path,
    /// Of SELinux, which the container's processes have.
    pub label: Option<&'a str>,
    pub users: Option<&'a Users>,
}

impl Maker<'_> {
    /// The tree to be mounted at a target. `at` tells the container's volumes from each other.
    pub fn make(&self, at: usize, target: &str, volume: Volume) -> Result<OwnedFd, Failure> {
        match volume {
            Volume::Tree(tree) => Ok(tree),
            Volume::Image(image) => self.image(&image, &self.directory.join("images").join(at.to_string())),
            Volume::Own => self.own(target, &self.directory.join("volumes").join(at.to_string())),
        }
    }

    /// An image as a volume: only to be read, and nothing in it to be run.
    fn image(&self, volume: &ImageVolume, place: &Path) -> Result<OwnedFd, Failure> {
        let failed = |error: io::Error| Failure::during(format!("mount the image {:?}", volume.image))(error);
        let root = layers::unchanged(&volume.layers, self.layers_dir, place, self.users)?;
        // Its links lead nowhere else.
        let part = if volume.sub_path.is_empty() { "." } else { &volume.sub_path };
        let part = open_inside(root, part)
            .map_err(|error| Failure(volume.missing(&super::launch::plain(&error.into()))))?;
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
        mounts::set(&tree, attributes).map_err(failed)?;
        Ok(tree)
    }

    /// A directory that begins as the image's at this path, or empty where the image has none. Links of the image are
    /// followed inside of it only; its layers are shown with the owners they have for the pod, and so is a copy of them.
    fn own(&self, target: &str, place: &Path) -> Result<OwnedFd, Failure> {
        let failed = |error: io::Error| Failure::during(format!("make the image's volume {target:?}"))(error);
        layers::make(place).map_err(failed)?;
        let made = sys::trees::open(place).map_err(failed)?;
        match open_inside(self.root, target) {
            Ok(source) => sys::trees::copy(source, &made).map_err(failed)?,
            Err(Errno::NOENT) => {
                let (uid, gid) = self.users.map_or((Uid::ROOT, Gid::ROOT), Users::root);
                rustix::fs::fchown(&made, Some(uid), Some(gid))
                    .and_then(|()| rustix::fs::fchmod(&made, Mode::from_raw_mode(0o755)))
                    .map_err(|error| failed(error.into()))?;
            }
            Err(error) => return Err(failed(error.into())),
        }
        if let Some(label) = self.label {
            layers::label(place, label).map_err(failed)?;
        }
        let tree = mounts::copy_one(place).map_err(failed)?;
        mounts::set(tree.as_fd(), Attributes::default()).map_err(failed)?;
        Ok(tree)
    }
}
