//! Encryption at rest: a store whose values of chosen kinds are sealed in the store below it.
//!
//! Sealed is what is written; whoever reads gets plain bytes, so the cache knows nothing of it. A value
//! starts with the name of what sealed it (upstream's `k8s:enc:aesgcm:v1:<key>:`) and is bound to its key
//! in the store, so that nobody can pass one object's value off as another's. The first provider of a kind
//! seals; all of them open. No value and no secret ever appears in an error.

mod aes;
mod kms;
mod older;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::RwLock;
use tokio::sync::mpsc;

use crate::{Ear, Entry, Error, Event, Listener, Page, Revision, Store, Watch, Write};

pub use aes::{AesGcm, KeyError};
pub use kms::{Kms, KmsError};
pub use older::{Kind, Older};

/// How many values are looked at in one go when the rules change.
const ADOPTED_AT_ONCE: usize = 1_000;

/// What every sealed value starts with.
const SEALED: &[u8] = b"k8s:enc:";

/// One way to keep values.
pub enum Provider {
    /// As they are.
    Identity,
    AesGcm(AesGcm),
    Older(Older),
    Kms(Box<Kms>),
}

/// Which kind a key belongs to: group and plural.
pub type KindOf = fn(&str) -> Option<(&str, &str)>;

/// The providers of each kind.
pub struct Rules {
    kind_of: KindOf,
    by_kind: HashMap<(String, String), Arc<[Provider]>>,
}

impl Rules {
    pub fn new(kind_of: KindOf) -> Rules {
        Rules { kind_of, by_kind: HashMap::new() }
    }

    /// The providers of a kind; `*` stands for every kind of a group, and for every group. Of several rules
    /// for the same kinds the first counts.
    pub fn add(&mut self, group: &str, plural: &str, providers: &Arc<[Provider]>) {
        self.by_kind.entry((group.to_owned(), plural.to_owned())).or_insert_with(|| providers.clone());
    }

    fn of(&self, key: &str) -> &[Provider] {
        let Some((group, plural)) = (self.kind_of)(key) else { return &[Provider::Identity] };
        let rule = |group: &str, plural: &str| self.by_kind.get(&(group.to_owned(), plural.to_owned()));
        let found = rule(group, plural).or_else(|| rule(group, "*")).or_else(|| rule("*", "*"));
        found.map_or(&[Provider::Identity], |providers| providers)
    }

    async fn seal(&self, key: &str, value: &Bytes) -> Result<Bytes, Error> {
        match self.of(key).first() {
            None | Some(Provider::Identity) => Ok(value.clone()),
            Some(Provider::AesGcm(aes)) => {
                aes.seal(key, value).ok_or_else(|| Error::Unavailable { reason: "no randomness".to_owned() })
            }
            Some(Provider::Older(older)) => {
                older.seal(value).ok_or_else(|| Error::Unavailable { reason: "no randomness".to_owned() })
            }
            Some(Provider::Kms(kms)) => {
                kms.seal(key, value).await.map_err(|error| Error::Unavailable { reason: error.to_string() })
            }
        }
    }

    /// The plain value, and whether it should be sealed anew.
    async fn open(&self, key: &Arc<str>, value: &Bytes) -> Result<(Bytes, bool), Error> {
        let sealed = value.starts_with(SEALED);
        let mut reason = "the provided value does not match any of the supported transformers".to_owned();
        for (i, provider) in self.of(key).iter().enumerate() {
            match provider {
                Provider::Identity if !sealed => return Ok((value.clone(), i > 0)),
                Provider::Identity => {}
                Provider::AesGcm(aes) => match aes.open(key, value) {
                    Ok((plain, first)) => return Ok((plain, i > 0 || !first)),
                    Err(Some(why)) => reason = why.to_owned(),
                    Err(None) => {}
                },
                Provider::Older(older) => match older.open(value) {
                    Ok((plain, first)) => return Ok((plain, i > 0 || !first)),
                    Err(Some(why)) => reason = why.to_owned(),
                    Err(None) => {}
                },
                Provider::Kms(kms) => match kms.open(key, value).await {
                    Some(Ok((plain, fresh))) => return Ok((plain, i > 0 || !fresh)),
                    Some(Err(error)) => reason = error.to_string(),
                    None => {}
                },
            }
        }
        Err(Error::Sealed { key: key.clone(), reason })
    }
}

/// A store that seals.
pub struct Sealed {
    inner: Arc<dyn Store>,
    seals: Arc<Seals>,
}

struct Seals {
    rules: RwLock<Arc<Rules>>,
    /// The keys whose values something else than the first provider has sealed.
    stale: RwLock<HashSet<Arc<str>>>,
}

impl Sealed {
    pub fn new(inner: Arc<dyn Store>, rules: Rules) -> Sealed {
        Sealed {
            inner,
            seals: Arc::new(Seals { rules: RwLock::new(Arc::new(rules)), stale: RwLock::default() }),
        }
    }

    /// Goes by other rules from now on, and finds out which values are to be sealed anew. A value that they
    /// cannot open is told, and stays known to whoever has read it before.
    pub async fn adopt(&self, rules: Rules) -> Result<(), Error> {
        *self.seals.rules.write() = Arc::new(rules);
        let (mut from, mut at, mut lost) = (None::<String>, None, None);
        loop {
            let page = self.inner.list("", from.as_deref(), ADOPTED_AT_ONCE, at).await?;
            at = Some(page.revision);
            // The smallest key after the last one.
            from = page.entries.last().map(|entry| format!("{}\0", entry.key));
            for entry in page.entries {
                if let Err(error) = self.seals.open(entry).await {
                    lost = Some(error);
                }
            }
            if page.remaining == 0 {
                return lost.map_or(Ok(()), Err);
            }
        }
    }
}

impl Seals {
    fn rules(&self) -> Arc<Rules> {
        self.rules.read().clone()
    }

    async fn open(&self, entry: Entry) -> Result<Entry, Error> {
        let (value, stale) = self.rules().open(&entry.key, &entry.value).await?;
        if stale {
            self.stale.write().insert(entry.key.clone());
        } else {
            self.forget(&entry.key);
        }
        Ok(Entry { value, ..entry })
    }

    fn forget(&self, key: &str) {
        // Mostly there is nothing to forget, and nobody has to wait.
        if self.stale.read().contains(key) {
            self.stale.write().remove(key);
        }
    }

    async fn open_event(&self, event: Event) -> Option<Event> {
        match event {
            Event::Put { entry, created } => match self.open(entry).await {
                Ok(entry) => Some(Event::Put { entry, created }),
                Err(error) => {
                    tracing::error!(%error, "left out of every answer");
                    None
                }
            },
            Event::Delete { key, revision } => {
                self.forget(&key);
                Some(Event::Delete { key, revision })
            }
            Event::Progress(revision) => Some(Event::Progress(revision)),
        }
    }
}

#[async_trait]
impl Store for Sealed {
    async fn revision(&self) -> Result<Revision, Error> {
        self.inner.revision().await
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        match self.inner.get(key).await? {
            Some(entry) => self.seals.open(entry).await.map(Some),
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
            entries.push(self.seals.open(entry).await?);
        }
        Ok(Page { entries, ..page })
    }

    async fn write(&self, write: Write) -> Result<Revision, Error> {
        let value = match &write.value {
            Some(value) => Some(self.seals.rules().seal(&write.key, value).await?),
            None => None,
        };
        match self.inner.write(Write { value, ..write }).await {
            Err(Error::Conflict { key, current }) => {
                let current = match current {
                    Some(entry) => Some(self.seals.open(entry).await?),
                    None => None,
                };
                Err(Error::Conflict { key, current })
            }
            other => other,
        }
    }

    async fn watch(&self, prefix: &str, after: Revision, listener: Listener) -> Result<Watch, Error> {
        let (sender, mut batches) = mpsc::unbounded_channel();
        let sealed = self.inner.watch(prefix, after, Box::new(move |batch| drop(sender.send(batch)))).await?;
        let seals = self.seals.clone();
        let (mut ear, watch) = Ear::new(listener);
        // Ends with either side.
        tokio::spawn(async move {
            let _sealed = sealed;
            let unwanted = ear.unwanted();
            let told = async {
                while let Some(batch) = batches.recv().await {
                    // Whoever waits for a revision must hear of it, whatever is left out.
                    let reached = batch.last().map_or(0, Event::revision);
                    let mut opened = Vec::with_capacity(batch.len());
                    for event in batch {
                        opened.extend(seals.open_event(event).await);
                    }
                    ear.tell(opened, reached);
                }
            };
            tokio::select! {
                () = told => {}
                () = unwanted => {}
            }
        });
        Ok(watch)
    }

    async fn compact(&self, revision: Revision) -> Result<(), Error> {
        self.inner.compact(revision).await
    }

    fn is_stale(&self, key: &str) -> bool {
        self.seals.stale.read().contains(key)
    }

    fn write_failure(&self) -> Option<String> {
        self.inner.write_failure()
    }
}
