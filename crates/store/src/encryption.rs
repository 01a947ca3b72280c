//! Encryption at rest: a store that encrypts the values of configured resources in an underlying
//! store.
//!
//! Readers get plain values, so the cache above is unaware of encryption. An encrypted value starts
//! with the prefix of its provider (upstream's `k8s:enc:aesgcm:v1:<key>:`). Its key in the store is
//! authenticated data, so the value of one object is not valid for another. The first provider of a
//! resource encrypts, all of them decrypt. Errors never contain values or secrets.
//!
//! Counterpart upstream: `k8s.io/apiserver/pkg/storage/value` and
//! `pkg/server/options/encryptionconfig`.

mod aes;
mod kms;
mod legacy;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::RwLock;
use tokio::sync::mpsc;

use crate::{Entry, Error, Event, Listener, Page, Revision, Store, Watch, WatchSender, Write};

pub use aes::{AesGcm, KeyError};
pub use kms::{Kms, KmsError};
pub use legacy::{LegacyAlgorithm, LegacyCipher};

/// The number of values per page when the rules are reloaded.
const RELOAD_PAGE_SIZE: usize = 1_000;

/// The common prefix of encrypted values.
const ENCRYPTED_PREFIX: &[u8] = b"k8s:enc:";

/// A provider of an EncryptionConfiguration.
pub enum Provider {
    /// Stores values in plain text.
    Identity,
    AesGcm(AesGcm),
    Legacy(LegacyCipher),
    Kms(Box<Kms>),
}

/// Returns the API group and the resource (plural) of a key.
pub type KeyToGroupResource = fn(&str) -> Option<(&str, &str)>;

/// The providers by resource.
pub struct EncryptionRules {
    group_resource: KeyToGroupResource,
    by_resource: HashMap<(String, String), Arc<[Provider]>>,
}

impl EncryptionRules {
    pub fn new(group_resource: KeyToGroupResource) -> EncryptionRules {
        EncryptionRules { group_resource, by_resource: HashMap::new() }
    }

    /// Adds the providers of a resource. `*` matches every resource of a group, or every group. The
    /// first rule for the same resources wins.
    pub fn add(&mut self, group: &str, plural: &str, providers: &Arc<[Provider]>) {
        self.by_resource.entry((group.to_owned(), plural.to_owned())).or_insert_with(|| providers.clone());
    }

    fn providers_for(&self, key: &str) -> &[Provider] {
        let Some((group, plural)) = (self.group_resource)(key) else { return &[Provider::Identity] };
        let rule = |group: &str, plural: &str| self.by_resource.get(&(group.to_owned(), plural.to_owned()));
        let found = rule(group, plural).or_else(|| rule(group, "*")).or_else(|| rule("*", "*"));
        found.map_or(&[Provider::Identity], |providers| providers)
    }

    async fn encrypt(&self, key: &str, value: &Bytes) -> Result<Bytes, Error> {
        match self.providers_for(key).first() {
            None | Some(Provider::Identity) => Ok(value.clone()),
            Some(Provider::AesGcm(aes)) => aes
                .encrypt(key, value)
                .ok_or_else(|| Error::Unavailable { reason: "no random bytes available".to_owned() }),
            Some(Provider::Legacy(legacy)) => legacy
                .encrypt(value)
                .ok_or_else(|| Error::Unavailable { reason: "no random bytes available".to_owned() }),
            Some(Provider::Kms(kms)) => kms
                .encrypt(key, value)
                .await
                .map_err(|error| Error::Unavailable { reason: error.to_string() }),
        }
    }

    /// Returns the plain value, and whether it should be encrypted again.
    async fn decrypt(&self, key: &Arc<str>, value: &Bytes) -> Result<(Bytes, bool), Error> {
        let is_encrypted = value.starts_with(ENCRYPTED_PREFIX);
        let mut reason = "the provided value does not match any of the supported transformers".to_owned();
        for (i, provider) in self.providers_for(key).iter().enumerate() {
            match provider {
                Provider::Identity if !is_encrypted => return Ok((value.clone(), i > 0)),
                Provider::Identity => {}
                Provider::AesGcm(aes) => match aes.decrypt(key, value) {
                    Ok((plain, is_first)) => return Ok((plain, i > 0 || !is_first)),
                    Err(Some(message)) => reason = message.to_owned(),
                    Err(None) => {}
                },
                Provider::Legacy(legacy) => match legacy.decrypt(value) {
                    Ok((plain, is_first)) => return Ok((plain, i > 0 || !is_first)),
                    Err(Some(message)) => reason = message.to_owned(),
                    Err(None) => {}
                },
                Provider::Kms(kms) => match kms.decrypt(key, value).await {
                    Some(Ok((plain, is_current))) => return Ok((plain, i > 0 || !is_current)),
                    Some(Err(error)) => reason = error.to_string(),
                    None => {}
                },
            }
        }
        Err(Error::Decrypt { key: key.clone(), reason })
    }
}

/// A store that encrypts values.
pub struct EncryptionStore {
    inner: Arc<dyn Store>,
    transformer: Arc<Transformer>,
}

struct Transformer {
    rules: RwLock<Arc<EncryptionRules>>,
    /// The keys of values that were not encrypted with the first key of the first provider.
    stale: RwLock<HashSet<Arc<str>>>,
}

impl EncryptionStore {
    pub fn new(inner: Arc<dyn Store>, rules: EncryptionRules) -> EncryptionStore {
        EncryptionStore {
            inner,
            transformer: Arc::new(Transformer {
                rules: RwLock::new(Arc::new(rules)),
                stale: RwLock::default(),
            }),
        }
    }

    /// Replaces the rules and finds the values to encrypt again. Returns an error if a value cannot
    /// be decrypted with the new rules; the cache still holds it if it was read before.
    pub async fn reload(&self, rules: EncryptionRules) -> Result<(), Error> {
        *self.transformer.rules.write() = Arc::new(rules);
        let (mut from, mut at, mut last_error) = (None::<String>, None, None);
        loop {
            let page = self.inner.list("", from.as_deref(), RELOAD_PAGE_SIZE, at).await?;
            at = Some(page.revision);
            // The smallest key after the last one.
            from = page.entries.last().map(|entry| format!("{}\0", entry.key));
            for entry in page.entries {
                if let Err(error) = self.transformer.decrypt(entry).await {
                    last_error = Some(error);
                }
            }
            if page.remaining == 0 {
                return last_error.map_or(Ok(()), Err);
            }
        }
    }
}

impl Transformer {
    fn rules(&self) -> Arc<EncryptionRules> {
        self.rules.read().clone()
    }

    async fn decrypt(&self, entry: Entry) -> Result<Entry, Error> {
        let (value, stale) = self.rules().decrypt(&entry.key, &entry.value).await?;
        if stale {
            self.stale.write().insert(entry.key.clone());
        } else {
            self.clear_stale(&entry.key);
        }
        Ok(Entry { value, ..entry })
    }

    fn clear_stale(&self, key: &str) {
        // The set rarely contains the key, so a read lock is sufficient in most cases.
        if self.stale.read().contains(key) {
            self.stale.write().remove(key);
        }
    }

    async fn decrypt_event(&self, event: Event) -> Option<Event> {
        match event {
            Event::Put { entry, created } => match self.decrypt(entry).await {
                Ok(entry) => Some(Event::Put { entry, created }),
                Err(error) => {
                    tracing::error!(%error, "cannot decrypt object, omitting it from watch events");
                    None
                }
            },
            Event::Delete { key, revision } => {
                self.clear_stale(&key);
                Some(Event::Delete { key, revision })
            }
            Event::Progress(revision) => Some(Event::Progress(revision)),
        }
    }
}

#[async_trait]
impl Store for EncryptionStore {
    async fn revision(&self) -> Result<Revision, Error> {
        self.inner.revision().await
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        match self.inner.get(key).await? {
            Some(entry) => self.transformer.decrypt(entry).await.map(Some),
            None => Ok(None),
        }
    }

    async fn list(
        &self,
        prefix: &str,
        from: Option<&str>,
        limit: usize,
        at: Option<Revision>,
    ) -> Result<Page, Error> {
        let page = self.inner.list(prefix, from, limit, at).await?;
        let mut entries = Vec::with_capacity(page.entries.len());
        for entry in page.entries {
            entries.push(self.transformer.decrypt(entry).await?);
        }
        Ok(Page { entries, ..page })
    }

    async fn write(&self, write: Write) -> Result<Revision, Error> {
        let value = match &write.value {
            Some(value) => Some(self.transformer.rules().encrypt(&write.key, value).await?),
            None => None,
        };
        match self.inner.write(Write { value, ..write }).await {
            Err(Error::Conflict { key, current }) => {
                let current = match current {
                    Some(entry) => Some(self.transformer.decrypt(entry).await?),
                    None => None,
                };
                Err(Error::Conflict { key, current })
            }
            other => other,
        }
    }

    async fn watch(&self, prefix: &str, after: Revision, listener: Listener) -> Result<Watch, Error> {
        let (sender, mut batches) = mpsc::unbounded_channel();
        let inner_watch =
            self.inner.watch(prefix, after, Box::new(move |batch| drop(sender.send(batch)))).await?;
        let transformer = self.transformer.clone();
        let (mut watch_sender, watch) = WatchSender::new(listener);
        // Ends when the inner watch ends or when this watch is canceled.
        tokio::spawn(async move {
            let _inner_watch = inner_watch;
            let closed = watch_sender.closed();
            let forward = async {
                while let Some(batch) = batches.recv().await {
                    // The progress includes events that could not be decrypted, so that readers
                    // waiting for their revision do not block.
                    let progress = batch.last().map_or(0, Event::revision);
                    let mut plain_events = Vec::with_capacity(batch.len());
                    for event in batch {
                        plain_events.extend(transformer.decrypt_event(event).await);
                    }
                    watch_sender.send(plain_events, progress);
                }
            };
            tokio::select! {
                () = forward => {}
                () = closed => {}
            }
        });
        Ok(watch)
    }

    async fn compact(&self, revision: Revision) -> Result<(), Error> {
        self.inner.compact(revision).await
    }

    fn is_stale(&self, key: &str) -> bool {
        self.transformer.stale.read().contains(key)
    }

    fn write_failure(&self) -> Option<String> {
        self.inner.write_failure()
    }
}
