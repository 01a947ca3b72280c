//! The dependencies of a controller.

use std::sync::Arc;

use client::{Client, DeleteOptions, Error, Key, Patch};
use tokio::sync::watch;

use crate::cache::Cache;
use crate::caches::{Cached, Caches};
use crate::clock::Clock;
use crate::events::Recorder;
use crate::metrics::Metrics;
use crate::settings::Settings;

/// A controller's access to the cluster. Cheap to clone.
///
/// Writes return once the cache shows them, so the next reconcile sees its own writes.
#[derive(Clone)]
pub struct Ctx {
    pub client: Client,
    pub caches: Arc<Caches>,
    pub clock: Clock,
    pub events: Recorder,
    pub metrics: Arc<Metrics>,
    pub settings: Arc<Settings>,
    pub shutdown: watch::Receiver<bool>,
}

impl Ctx {
    pub fn new(client: Client, clock: Clock, shutdown: watch::Receiver<bool>) -> Ctx {
        Ctx {
            caches: Caches::new(client.clone(), shutdown.clone()),
            events: Recorder::new(client.clone(), clock.clone(), shutdown.clone()),
            client,
            clock,
            metrics: Arc::default(),
            settings: Arc::default(),
            shutdown,
        }
    }

    /// The same context with other settings.
    pub fn with_settings(self, settings: Settings) -> Ctx {
        Ctx { settings: Arc::new(settings), ..self }
    }

    /// The same context for a controller: its service account for requests and its event source.
    pub fn for_controller(&self, controller: &'static str) -> Ctx {
        Ctx {
            client: self.client.impersonate(controller),
            events: self.events.from(controller),
            ..self.clone()
        }
    }

    /// Creates an object. If the outcome is unknown, the objects of the namespace are listed and the cache
    /// waits for them: a retry that does not see the object would create a second one. The same holds if the
    /// object already exists.
    pub async fn create<T: Cached>(&self, object: &T) -> Result<T, Error> {
        match self.client.create(object).await {
            Err(lost @ Error::Unreachable(_)) => {
                for existing in self.client.list::<T>(object.namespace()).await.unwrap_or_default() {
                    self.wait_for_caches(existing).await?;
                }
                Err(lost)
            }
            Err(error) if error.is_already_exists() && !object.name().is_empty() => {
                if let Ok(existing) = self.client.get::<T>(&object.key()).await {
                    self.wait_for_caches(existing).await?;
                }
                Err(error)
            }
            result => self.wait_for_caches(result?).await,
        }
    }

    /// Replaces the object. A stale resourceVersion is a conflict.
    pub async fn replace<T: Cached>(&self, object: &T) -> Result<T, Error> {
        self.wait_for_caches(self.client.replace(object).await?).await
    }

    /// Replaces the object's status. A stale resourceVersion is a conflict.
    pub async fn replace_status<T: Cached>(&self, object: &T) -> Result<T, Error> {
        self.wait_for_caches(self.client.replace_status(object).await?).await
    }

    pub async fn patch<T: Cached>(&self, key: &Key, patch: &Patch) -> Result<T, Error> {
        self.wait_for_caches(self.client.patch(key, patch).await?).await
    }

    pub async fn patch_status<T: Cached>(&self, key: &Key, patch: &Patch) -> Result<T, Error> {
        self.wait_for_caches(self.client.patch_status(key, patch).await?).await
    }

    /// Deletes this object, with its UID as precondition. Succeeds if it is already gone.
    pub async fn delete<T: Cached>(&self, object: &T) -> Result<(), Error> {
        self.delete_with::<T>(&object.key(), &DeleteOptions::uid(object.uid())).await
    }

    pub async fn delete_with<T: Cached>(&self, key: &Key, options: &DeleteOptions) -> Result<(), Error> {
        match self.client.delete::<T>(key, options).await {
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
        let Some(uid) = &options.uid else { return Ok(()) };
        for cache in self.caches_of::<T>(|_| true) {
            cache.wait_until_deleted(key, uid).await?;
        }
        Ok(())
    }

    async fn wait_for_caches<T: Cached>(&self, object: T) -> Result<T, Error> {
        // A filtered cache never shows an object that its filter excludes.
        for cache in self.caches_of::<T>(|holds| holds(&object)) {
            if let Err(error) = cache.wait_until_revision(object.revision()).await {
                self.caches.add_pending_write(&cache.indexer, object.revision());
                return Err(error);
            }
        }
        Ok(object)
    }

    fn caches_of<T: Cached>(&self, predicate: impl Fn(fn(&T) -> bool) -> bool) -> Vec<&Arc<Cache<T>>> {
        let mut caches: Vec<_> = T::cache(&self.caches).into_iter().collect();
        T::for_each_filtered(&self.caches, &mut |cache, holds| {
            if predicate(holds) {
                caches.push(cache);
            }
        });
        caches
    }
}

#[cfg(test)]
mod tests;
