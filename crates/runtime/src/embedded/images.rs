//! The CRI calls for images.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::spec::ImageVolume;
use super::{Embedded, call_error, error_chain, view};
use crate::Result;
use crate::cri::*;

impl Embedded {
    /// Runs blocking work on the image store in the blocking thread pool.
    pub(super) async fn with_store<T: Send + 'static>(
        &self,
        call: &'static str,
        work: impl FnOnce(&image::Store) -> std::result::Result<T, image::Error> + Send + 'static,
    ) -> Result<T> {
        let store = self.inner.images.clone();
        let done = tokio::task::spawn_blocking(move || work(&store)).await;
        match done {
            Ok(done) => done.map_err(|error| call_error(call, error_chain(&error))),
            Err(error) => Err(call_error(call, error.to_string())),
        }
    }

    pub(super) async fn list_images(&self) -> Result<Vec<Image>> {
        self.with_store("ListImages", |store| {
            let to_cri = |known: image::Image| {
                let user = store.config(&known).map(|config| config.config.user).unwrap_or_default();
                view::image(&known, &user)
            };
            Ok(store.images()?.into_iter().map(to_cri).collect())
        })
        .await
    }

    pub(super) async fn find_image(&self, spec: &ImageSpec) -> Result<Option<Image>> {
        let name = spec.image.clone();
        self.with_store("ImageStatus", move |store| {
            let Some(known) = store.find(&name)? else { return Ok(None) };
            match store.config(&known) {
                Ok(config) => Ok(Some(view::image(&known, &config.config.user))),
                // A damaged image is unusable. Reported as missing it is pulled again, which repairs
                // it.
                Err(error) if error.is_corrupt() => {
                    tracing::warn!(%error, image = name, "image is damaged, reporting it as missing");
                    Ok(None)
                }
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// The layers of the images that the container mounts as volumes, by image name.
    pub(super) async fn volume_layers(
        &self,
        config: &ContainerConfig,
    ) -> Result<BTreeMap<String, Vec<String>>> {
        let names: BTreeSet<String> = config
            .mounts
            .iter()
            .filter_map(|mount| mount.image.as_ref())
            .map(|image| image.image.clone())
            .collect();
        if names.is_empty() {
            return Ok(BTreeMap::new());
        }
        self.with_store("CreateContainer", move |store| {
            let mut found = BTreeMap::new();
            for name in names {
                if let Some(image) = store.find(&name)? {
                    found.insert(name, image.layers);
                }
            }
            Ok(found)
        })
        .await
    }

    /// Checks that the image of a volume has the requested sub path.
    pub(super) fn check_sub_path(&self, volume: &ImageVolume) -> std::result::Result<(), String> {
        if volume.sub_path.is_empty() {
            return Ok(());
        }
        let layers_dir = self.inner.images.root().join("layers");
        match sub_path_exists(&layers_dir, &volume.layers, &volume.sub_path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(volume.missing_error("no such file or directory"))
            }
            // All other errors are reported by the mount itself.
            _ => Ok(()),
        }
    }

    pub(super) async fn delete_image(&self, spec: &ImageSpec) -> Result<()> {
        let (name, runtime) = (spec.image.clone(), self.clone());
        self.with_store("RemoveImage", move |store| {
            // Removed by ID, so that all its names go, as CRI requires.
            if let Some(known) = store.find(&name)? {
                store.remove(&known.id.to_string())?;
                runtime.collect_garbage(store)?;
            }
            Ok(())
        })
        .await
    }

    /// Deletes layers and blobs of removed images. While pulls or container creations are in progress,
    /// collection is postponed until they are done.
    fn collect_garbage(&self, store: &image::Store) -> std::result::Result<(), image::Error> {
        // Cleared before the collection starts: an operation that becomes garbage during it sets the
        // flag again.
        self.inner.needs_collection.store(false, Relaxed);
        let released_bytes =
            store.collect_garbage(|| super::layers_in_use(&self.inner.config.root), |_, _| false);
        if !matches!(released_bytes, Ok(Some(_))) {
            self.inner.needs_collection.store(true, Relaxed);
        }
        released_bytes.map(drop)
    }

    /// Runs a postponed garbage collection in the background, after a pull or a container start has
    /// finished.
    pub(super) fn collect_if_needed(&self) {
        if !self.inner.needs_collection.load(Relaxed) {
            return;
        }
        let runtime = self.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = runtime.collect_garbage(&runtime.inner.images) {
                tracing::warn!(
                    error = error_chain(&error),
                    "image garbage collection failed, retrying after the next pull or start"
                );
            }
        });
    }

    pub(super) async fn pull_image(&self, spec: &ImageSpec, auth: Option<&AuthConfig>) -> Result<String> {
        let name = spec.image.clone();
        let failed =
            |why: String| call_error("PullImage", format!("failed to pull and unpack image {name:?}: {why}"));
        let reference = image::Reference::parse(&name).map_err(|error| failed(error.to_string()))?;
        // Read for each pull, so that changes of the file take effect without a restart.
        let super::Config { registries, mirrors_only, .. } = &self.inner.config;
        let settings = image::pull::RegistrySettings::read(registries).map_err(failed)?;
        let settings = settings.mirrors_only(*mirrors_only);
        let puller = image::pull::Puller::new(self.inner.images.clone(), settings);
        let collect_on_drop = CollectOnDrop(&self.inner.needs_collection);
        let pulled = puller.pull(&reference, auth.and_then(credentials).as_ref()).await;
        let image = pulled.map_err(|error| failed(error_chain(&error)))?;
        // The pull is complete, so the guard must not run.
        std::mem::forget(collect_on_drop);
        self.collect_if_needed();
        Ok(image.id.to_string())
    }
}

/// Requests a garbage collection when dropped: a pull that fails or is cancelled leaves blobs that no
/// image references. They are not deleted at once, so that a retry can resume.
struct CollectOnDrop<'a>(&'a AtomicBool);

impl Drop for CollectOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Mounts the layers, lowest first, in a private mount namespace and opens the sub path.
fn sub_path_exists(layers_dir: &Path, layers: &[String], part: &str) -> std::io::Result<()> {
    use rustix::fs::{Mode, OFlags};
    use rustix::mount::{MountFlags, MountPropagationFlags as Propagation};
    use rustix::thread::UnshareFlags;
    let open_sub_path = |place: &Path| {
        let root = rustix::fs::open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        super::open_in_root(root, part).map(drop)
    };
    if let [only] = layers {
        return Ok(open_sub_path(&layers_dir.join(only))?);
    }
    // This thread has a mount namespace of its own, which disappears with it.
    let mount_and_open = || {
        sys::process::unshare(UnshareFlags::FS | UnshareFlags::NEWNS)?;
        rustix::mount::mount_change("/", Propagation::PRIVATE | Propagation::REC)?;
        // The layers are named relative to the current directory: mount options are limited to a page.
        rustix::process::chdir(layers_dir)?;
        let names: Vec<&str> = layers.iter().rev().map(String::as_str).collect();
        let options = std::ffi::CString::new(format!("lowerdir={}", names.join(":")))?;
        rustix::mount::mount("overlay", layers_dir, "overlay", MountFlags::RDONLY, Some(options.as_c_str()))?;
        Ok(open_sub_path(layers_dir)?)
    };
    std::thread::scope(|scope| {
        let joined = std::thread::Builder::new().spawn_scoped(scope, mount_and_open)?.join();
        joined.unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()))
    })
}

fn credentials(auth: &AuthConfig) -> Option<image::pull::Credentials> {
    if !auth.registry_token.is_empty() {
        return Some(image::pull::Credentials { token: auth.registry_token.clone(), ..Default::default() });
    }
    if !auth.identity_token.is_empty() {
        let identity_token = auth.identity_token.clone();
        return Some(image::pull::Credentials { identity_token, ..Default::default() });
    }
    if auth.username.is_empty() {
        return image::pull::Credentials::from_auth(&auth.auth);
    }
    let (username, password) = (auth.username.clone(), auth.password.clone());
    Some(image::pull::Credentials { username, password, ..Default::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn failed_pulls_request_a_collection() {
        let needs_collection = AtomicBool::new(false);
        let pull = async |succeeds: bool| {
            let collect_on_drop = CollectOnDrop(&needs_collection);
            if !succeeds {
                std::future::pending::<()>().await;
            }
            std::mem::forget(collect_on_drop);
        };
        pull(true).await;
        assert!(!needs_collection.load(Relaxed));
        let _ = tokio::time::timeout(std::time::Duration::ZERO, pull(false)).await;
        assert!(needs_collection.load(Relaxed));
    }
}
