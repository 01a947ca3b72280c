//! CRI's questions about images.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::spec::ImageVolume;
use super::{Embedded, chain, refused, view};
use crate::Result;
use crate::cri::*;

impl Embedded {
    /// Does slow work on images where nobody waits for this thread.
    pub(super) async fn on_images<T: Send + 'static>(
        &self,
        call: &'static str,
        work: impl FnOnce(&image::Store) -> std::result::Result<T, image::Error> + Send + 'static,
    ) -> Result<T> {
        let store = self.inner.images.clone();
        let done = tokio::task::spawn_blocking(move || work(&store)).await;
        match done {
            Ok(done) => done.map_err(|error| refused(call, chain(&error))),
            Err(error) => Err(refused(call, error.to_string())),
        }
    }

    pub(super) async fn list_images(&self) -> Result<Vec<Image>> {
        self.on_images("ListImages", |store| {
            let shown = |known: image::Image| {
                let user = store.config(&known).map(|config| config.config.user).unwrap_or_default();
                view::image(&known, &user)
            };
            Ok(store.images()?.into_iter().map(shown).collect())
        })
        .await
    }

    pub(super) async fn find_image(&self, spec: &ImageSpec) -> Result<Option<Image>> {
        let name = spec.image.clone();
        self.on_images("ImageStatus", move |store| {
            let Some(known) = store.find(&name)? else { return Ok(None) };
            match store.config(&known) {
                Ok(config) => Ok(Some(view::image(&known, &config.config.user))),
                // Nothing can be made of it. Whoever is told that it is not there pulls it again, which mends it.
                Err(error) if error.is_damage() => {
                    tracing::warn!(%error, image = name, "an image is damaged");
                    Ok(None)
                }
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// The layers of the images that a container has as volumes, by what they are called there.
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
        self.on_images("CreateContainer", move |store| {
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

    /// Whether the wanted part of an image is in there.
    pub(super) fn check_part(&self, volume: &ImageVolume) -> std::result::Result<(), String> {
        if volume.sub_path.is_empty() {
            return Ok(());
        }
        let layers_dir = self.inner.images.root().join("layers");
        match part_is_there(&layers_dir, &volume.layers, &volume.sub_path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(volume.missing("no such file or directory"))
            }
            // What else there is against it is said by whoever mounts it.
            _ => Ok(()),
        }
    }

    pub(super) async fn drop_image(&self, spec: &ImageSpec) -> Result<()> {
        let (name, runtime) = (spec.image.clone(), self.clone());
        self.on_images("RemoveImage", move |store| {
            // By its id, so that all its names go, as CRI wants it.
            if let Some(known) = store.find(&name)? {
                store.remove(&known.id.to_string())?;
                runtime.collect(store)?;
            }
            Ok(())
        })
        .await
    }

    /// Removes the pieces of images that are gone. While others are on their way that is put off until they are there.
    fn collect(&self, store: &image::Store) -> std::result::Result<(), image::Error> {
        // Before: whoever finds it at work owes another one.
        self.inner.owes_collection.store(false, Relaxed);
        let freed = store.collect(|| super::layers_in_use(&self.inner.config.root), |_, _| false);
        if !matches!(freed, Ok(Some(_))) {
            self.inner.owes_collection.store(true, Relaxed);
        }
        freed.map(drop)
    }

    /// An image or a container that was on its way is there. Nobody waits for this.
    pub(super) fn collect_if_owed(&self) {
        if !self.inner.owes_collection.load(Relaxed) {
            return;
        }
        let runtime = self.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = runtime.collect(&runtime.inner.images) {
                tracing::warn!(error = chain(&error), "cannot remove pieces of images that are gone");
            }
        });
    }

    pub(super) async fn pull_image(&self, spec: &ImageSpec, auth: Option<&AuthConfig>) -> Result<String> {
        let name = spec.image.clone();
        let failed =
            |why: String| refused("PullImage", format!("failed to pull and unpack image {name:?}: {why}"));
        let reference = image::Reference::parse(&name).map_err(|error| failed(error.to_string()))?;
        // Read each time: whoever changes the file should not have to restart anything.
        let super::Config { registries, mirrors_only, .. } = &self.inner.config;
        let settings = image::pull::Settings::read(registries).map_err(failed)?;
        let settings = settings.mirrors_only(*mirrors_only);
        let puller = image::pull::Puller::new(self.inner.images.clone(), settings);
        let unfinished = Unfinished(&self.inner.owes_collection);
        let pulled = puller.pull(&reference, auth.and_then(credentials).as_ref()).await;
        let image = pulled.map_err(|error| failed(chain(&error)))?;
        std::mem::forget(unfinished);
        self.collect_if_owed();
        Ok(image.id.to_string())
    }
}

/// A pull that fails or is given up leaves pieces that no image needs. They do not go at once: whoever tries again has
/// less to fetch.
struct Unfinished<'a>(&'a AtomicBool);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Stacks layers, lowest first, where nobody sees it, and looks.
fn part_is_there(layers_dir: &Path, layers: &[String], part: &str) -> std::io::Result<()> {
    use rustix::fs::{Mode, OFlags};
    use rustix::mount::{MountFlags, MountPropagationFlags as Propagation};
    use rustix::thread::UnshareFlags;
    let look = |place: &Path| {
        let root = rustix::fs::open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        super::open_inside(root, part).map(drop)
    };
    if let [only] = layers {
        return Ok(look(&layers_dir.join(only))?);
    }
    // A thread with mounts of its own, which go with it.
    let stack_and_look = || {
        sys::process::unshare(UnshareFlags::FS | UnshareFlags::NEWNS)?;
        rustix::mount::mount_change("/", Propagation::PRIVATE | Propagation::REC)?;
        // Names alone, of which many fit into the options.
        rustix::process::chdir(layers_dir)?;
        let names: Vec<&str> = layers.iter().rev().map(String::as_str).collect();
        let options = std::ffi::CString::new(format!("lowerdir={}", names.join(":")))?;
        rustix::mount::mount("overlay", layers_dir, "overlay", MountFlags::RDONLY, Some(options.as_c_str()))?;
        Ok(look(layers_dir)?)
    };
    std::thread::scope(|scope| {
        let stacked = std::thread::Builder::new().spawn_scoped(scope, stack_and_look)?.join();
        stacked.unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()))
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
    async fn pulls_that_come_to_nothing_are_tidied_up_after() {
        let owes = AtomicBool::new(false);
        let pull = async |comes_to_something: bool| {
            let unfinished = Unfinished(&owes);
            if !comes_to_something {
                std::future::pending::<()>().await;
            }
            std::mem::forget(unfinished);
        };
        pull(true).await;
        assert!(!owes.load(Relaxed));
        let _ = tokio::time::timeout(std::time::Duration::ZERO, pull(false)).await;
        assert!(owes.load(Relaxed));
    }
}
