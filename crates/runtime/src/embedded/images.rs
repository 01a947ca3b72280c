//! CRI's questions about images.

use std::collections::BTreeSet;

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
            let user = store.config(&known)?.config.user;
            Ok(Some(view::image(&known, &user)))
        })
        .await
    }

    /// The layers that containers of this node stand on.
    pub(super) fn layers_in_use(&self) -> BTreeSet<String> {
        let pods = self.inner.pods.all();
        let containers =
            pods.iter().flat_map(|pod| pod.containers.lock().values().cloned().collect::<Vec<_>>());
        containers.flat_map(|container| container.record.layers.clone()).collect()
    }

    pub(super) async fn drop_image(&self, spec: &ImageSpec) -> Result<()> {
        let (name, in_use) = (spec.image.clone(), self.layers_in_use());
        self.on_images("RemoveImage", move |store| {
            // By its id, so that all its names go, as CRI wants it.
            if let Some(known) = store.find(&name)? {
                store.remove(&known.id.to_string())?;
                store.collect(&in_use, |_| false)?;
            }
            Ok(())
        })
        .await
    }

    pub(super) async fn pull_image(&self, spec: &ImageSpec, _auth: Option<&AuthConfig>) -> Result<String> {
        Err(refused(
            "PullImage",
            format!("failed to pull image {:?}: this runtime cannot reach registries yet", spec.image),
        ))
    }
}
