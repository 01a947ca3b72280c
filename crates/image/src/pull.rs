//! Image pulls according to the OCI distribution specification.
//!
//! Content is written to a temporary file, verified against its digest and then moved into the
//! store. An interrupted download is resumed with a range request. Start with [`Puller::pull`].

mod credentials;
mod proxy;
mod registry;
mod settings;

use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use sha2::{Digest as _, Sha256};
use tokio::task::JoinSet;

use crate::manifest::{Descriptor, Document, MAX_DOCUMENT_BYTES, Manifest};
use crate::{Digest, Error, Image, Reference, Store, file_error};

pub use credentials::Credentials;
pub use settings::RegistrySettings;

use proxy::Proxies;
use registry::{Registry, RegistryRequest, RegistryTimeouts, next_chunk};

/// Concurrent blob downloads per image, as in containerd.
const FETCH_CONCURRENCY: usize = 3;
/// The number of received bytes that are written at a time.
const WRITE_CHUNK_BYTES: usize = 256 << 10;
/// Attempts for a blob without progress, and for a manifest request that is rate limited.
const MAX_ATTEMPTS: u32 = 5;
/// Attempts for a manifest request that fails. A second failure is rarely transient. Rate limits
/// get [`MAX_ATTEMPTS`].
const MAX_MANIFEST_ATTEMPTS: u32 = 2;
/// The upper limit for the `Retry-After` of a registry.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Limits the nesting of indexes.
const MAX_INDEX_DEPTH: usize = 4;

/// A failed pull. The messages equal those of containerd, because users search for them.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error("failed to resolve reference {name:?}: {name}: not found")]
    NotFound { name: String },
    #[error(
        "failed to resolve reference {name:?}: pull access denied, repository does not exist or may require authorization: {reason}"
    )]
    Denied { name: String, reason: String },
    #[error("failed to do request: {method} {url:?}: {reason}")]
    Unreachable { method: &'static str, url: String, reason: String },
    #[error("unexpected status from {method} request to {url}: {status}{errors}")]
    Status {
        method: &'static str,
        url: String,
        status: StatusCode,
        /// The errors in the response body, one per line.
        errors: String,
        /// The `Retry-After` of the response.
        after: Option<Duration>,
    },
    #[error("{url} ended after {got} bytes of {expected}")]
    Cut { url: String, got: u64, expected: u64 },
    #[error(transparent)]
    Store(#[from] Error),
}

impl PullError {
    /// Whether a retry may succeed.
    fn can_retry(&self) -> bool {
        match self {
            PullError::Unreachable { .. } | PullError::Cut { .. } => true,
            PullError::Status { status, .. } if status.is_server_error() => true,
            other => other.is_rate_limited(),
        }
    }

    /// Whether the registry is overloaded or limits the request rate.
    fn is_rate_limited(&self) -> bool {
        use StatusCode as Code;
        matches!(self, PullError::Status { status: Code::REQUEST_TIMEOUT | Code::TOO_MANY_REQUESTS, .. })
    }

    /// The delay before the next attempt: exponential backoff, or `Retry-After` if that is longer,
    /// up to [`MAX_RETRY_DELAY`].
    fn retry_delay(&self, timeouts: RegistryTimeouts, attempts: u32) -> Duration {
        let backoff = timeouts.initial_backoff * 2u32.pow(attempts);
        match self {
            PullError::Status { after: Some(after), .. } => (*after).max(backoff).min(MAX_RETRY_DELAY),
            _ => backoff,
        }
    }
}

/// Pulls images into a store.
#[derive(Clone)]
pub struct Puller {
    store: Store,
    settings: Arc<RegistrySettings>,
    timeouts: RegistryTimeouts,
    proxies: Arc<Proxies>,
}

/// The manifest that a reference resolves to.
struct ResolvedManifest {
    /// The digest that the reference itself resolves to: the manifest, or an index.
    reference_digest: Digest,
    digest: Digest,
    manifest: Manifest,
    /// The manifest as received. Its bytes determine the digest.
    bytes: Bytes,
}

impl Puller {
    pub fn new(store: Store, settings: RegistrySettings) -> Puller {
        let proxies = Arc::new(Proxies::from_env());
        Puller { store, settings: Arc::new(settings), timeouts: RegistryTimeouts::default(), proxies }
    }

    /// Pulls an image from the first registry host (mirrors first) that provides it. If all fail,
    /// the error of the last one is returned.
    pub async fn pull(
        &self,
        name: &Reference,
        credentials: Option<&Credentials>,
    ) -> Result<Image, PullError> {
        let mut last = PullError::NotFound { name: name.to_string() };
        for host in self.settings.registry_hosts(&name.registry, &name.repository) {
            let own = self.settings.credentials(&host.host);
            let auth = credentials.cloned().or(own);
            let registry = Registry::new(host, name, auth, self.timeouts, self.proxies.clone())?;
            match self.pull_from(Arc::new(registry), name).await {
                Ok(image) => return Ok(image),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn pull_from(&self, registry: Arc<Registry>, name: &Reference) -> Result<Image, PullError> {
        let tag_or_digest = match (&name.digest, &name.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => "latest".to_owned(),
        };
        if let Some(image) = self.unchanged(&registry, name, &tag_or_digest).await? {
            return Ok(image);
        }
        let ResolvedManifest { reference_digest: named, digest, manifest, bytes } =
            self.manifest(&registry, name, tag_or_digest).await?;
        let Descriptor { digest: id, size, .. } = &manifest.config;
        if !(1..=MAX_DOCUMENT_BYTES).contains(size) {
            let reason = format!("config {id} has an invalid size of {size} bytes");
            return Err(Error::Unusable { what: name.to_string(), reason }.into());
        }
        let mut descriptors: Vec<Descriptor> = vec![manifest.config.clone()];
        descriptors.extend(manifest.layers.iter().cloned());
        // The blobs are not referenced by the index yet. The lease protects them from garbage
        // collection.
        let lease: Vec<Digest> =
            descriptors.iter().map(|descriptor| descriptor.digest.clone()).chain([digest.clone()]).collect();
        let lease = run_blocking(&self.store, {
            let digest = digest.clone();
            move |store| {
                let lease = store.lease(&lease.iter().map(Digest::hex).collect::<Vec<_>>())?;
                store.add_blob(&digest, &bytes[..])?;
                Ok(lease)
            }
        });
        let lease = lease.await?;
        descriptors.sort_by(|a, b| a.digest.cmp(&b.digest));
        descriptors.dedup_by(|a, b| a.digest == b.digest);
        let mut waiting = descriptors.into_iter();
        let mut fetch_tasks = JoinSet::new();
        loop {
            while fetch_tasks.len() < FETCH_CONCURRENCY
                && let Some(descriptor) = waiting.next()
            {
                let (store, registry) = (self.store.clone(), registry.clone());
                let is_document = descriptor.digest == manifest.config.digest;
                fetch_tasks.spawn(async move {
                    let mutex = store.fetch_locks.get(descriptor.digest.hex());
                    let _guard = mutex.lock().await;
                    // Another pull may have fetched the blob while this one waited.
                    if store.has(&descriptor.digest, is_document) {
                        return Ok(());
                    }
                    fetch_blob(&store, &registry, &descriptor).await
                });
            }
            let done = match fetch_tasks.join_next().await {
                None => break,
                Some(Ok(done)) => done,
                Some(Err(_)) => {
                    Err(Error::Missing("a blob, because its download task failed".to_owned()).into())
                }
            };
            if let Err(error) = done {
                // Wait until the other downloads are canceled, so that their temporary files are
                // removed before this returns.
                fetch_tasks.shutdown().await;
                return Err(error);
            }
        }
        let names = [(name.clone(), named)];
        // The blocking task also completes if this future is dropped, so it must own the lease.
        let add = move |store: &Store| {
            let _needed = lease;
            store.add_image(&digest, &manifest, &names)
        };
        Ok(run_blocking(&self.store, add).await?)
    }

    /// Returns the image of an earlier pull if the reference still resolves to it. Uses a HEAD
    /// request, which registries do not count against rate limits.
    async fn unchanged(
        &self,
        registry: &Registry,
        name: &Reference,
        tag_or_digest: &str,
    ) -> Result<Option<Image>, PullError> {
        if !self.store.has_repository(name)? {
            return Ok(None);
        }
        // Errors are ignored; the GET request that follows reports them.
        let head = registry.get(&RegistryRequest::head(tag_or_digest)).await.ok();
        let digest_header = head.as_ref().and_then(|(_, head)| head.headers().get("docker-content-digest"));
        let Some(digest) = digest_header.and_then(|value| Digest::parse(value.to_str().ok()?)) else {
            return Ok(None);
        };
        if name.digest.as_ref().is_some_and(|expected| *expected != digest) {
            return Ok(None);
        }
        let named = (name.clone(), digest);
        Ok(run_blocking(&self.store, move |store| store.tag_existing(&named)).await?)
    }

    /// Resolves a reference to the manifest for this host.
    async fn manifest(
        &self,
        registry: &Registry,
        name: &Reference,
        mut tag_or_digest: String,
    ) -> Result<ResolvedManifest, PullError> {
        let mut named = None;
        for _ in 0..MAX_INDEX_DEPTH {
            let bytes = fetch_manifest(registry, &RegistryRequest::manifest(&tag_or_digest)).await?;
            let digest = Digest::of(&bytes);
            if let Some(expected) = Digest::parse(&tag_or_digest)
                && expected != digest
            {
                return Err(Error::WrongDigest { what: expected, actual: digest }.into());
            }
            let named = named.get_or_insert_with(|| digest.clone()).clone();
            match Document::parse(&name.to_string(), &bytes)? {
                Document::Manifest(manifest) => {
                    return Ok(ResolvedManifest { reference_digest: named, digest, manifest, bytes });
                }
                Document::Index(index) => {
                    tag_or_digest = index.select_platform(&name.to_string())?.digest.to_string()
                }
            }
        }
        let reason = "indexes are nested too deeply".to_owned();
        Err(Error::Unusable { what: name.to_string(), reason }.into())
    }
}

/// Fetches a manifest, with retries.
async fn fetch_manifest(registry: &Registry, request: &RegistryRequest) -> Result<Bytes, PullError> {
    let mut attempts = 0;
    loop {
        let error = match registry.get_bytes(request, MAX_DOCUMENT_BYTES as usize).await {
            Err(error) if error.can_retry() => error,
            other => return other,
        };
        let most = if error.is_rate_limited() { MAX_ATTEMPTS } else { MAX_MANIFEST_ATTEMPTS };
        attempts += 1;
        if attempts >= most {
            return Err(error);
        }
        tokio::time::sleep(error.retry_delay(registry.timeouts, attempts - 1)).await;
    }
}

/// Runs blocking work on tokio's blocking thread pool.
async fn run_blocking<T: Send + 'static>(
    store: &Store,
    work: impl FnOnce(&Store) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let own = store.clone();
    let done = tokio::task::spawn_blocking(move || work(&own)).await;
    done.map_err(io::Error::other).map_err(file_error("run a blocking task for", store.root()))?
}

/// A partially downloaded blob.
struct PartialBlob {
    file: tempfile::NamedTempFile,
    hash: Sha256,
    received: u64,
}

impl PartialBlob {
    /// Hashing and disk writes may block, so they run on the blocking thread pool.
    async fn write(mut self, store: &Store, waiting: Vec<Bytes>) -> Result<PartialBlob, Error> {
        let write = move |_: &Store| {
            for bytes in &waiting {
                self.hash.update(bytes);
                self.file.write_all(bytes).map_err(file_error("write", self.file.path()))?;
            }
            Ok(self)
        };
        run_blocking(store, write).await
    }
}

/// Fetches a blob. Retries while the failures are transient and resumes at the last received byte.
async fn fetch_blob(store: &Store, registry: &Registry, descriptor: &Descriptor) -> Result<(), PullError> {
    let file = tempfile::NamedTempFile::new_in(store.temp_dir())
        .map_err(file_error("create a file in", store.temp_dir()))?;
    let mut partial = PartialBlob { file, hash: Sha256::new(), received: 0 };
    let mut attempts = 0;
    loop {
        let before = partial.received;
        let ended;
        (partial, ended) = fetch_range(store, registry, descriptor, partial).await?;
        match ended {
            Ok(()) => break,
            Err(error) if error.can_retry() => {
                // Progress resets the number of attempts.
                attempts = if partial.received > before { 1 } else { attempts + 1 };
                if attempts >= MAX_ATTEMPTS {
                    return Err(error);
                }
                tokio::time::sleep(error.retry_delay(registry.timeouts, attempts)).await;
            }
            Err(error) => return Err(error),
        }
    }
    let actual = Digest::from_hash(partial.hash);
    if actual != descriptor.digest {
        return Err(Error::WrongDigest { what: descriptor.digest.clone(), actual }.into());
    }
    Ok(run_blocking(store, move |store| store.persist_blob(partial.file, &actual)).await?)
}

/// Fetches the missing part of a blob. Returns what was received, even if the transfer failed.
async fn fetch_range(
    store: &Store,
    registry: &Registry,
    descriptor: &Descriptor,
    mut partial: PartialBlob,
) -> Result<(PartialBlob, Result<(), PullError>), Error> {
    let (url, response) =
        match registry.get(&RegistryRequest::blob(&descriptor.digest, partial.received)).await {
            Ok(found) => found,
            Err(error) => return Ok((partial, Err(error))),
        };
    let is_part = response.status() == StatusCode::PARTIAL_CONTENT;
    if partial.received > 0 && !is_part {
        // The registry ignores range requests and sends the whole blob.
        partial.received = 0;
        partial.hash = Sha256::new();
        partial.file.as_file().set_len(0).map_err(file_error("write", partial.file.path()))?;
        std::io::Seek::rewind(partial.file.as_file_mut())
            .map_err(file_error("write", partial.file.path()))?;
    }
    let mut body = response.into_body();
    let (mut waiting, mut size) = (Vec::new(), 0);
    let ended = loop {
        let bytes = match next_chunk(&url, &mut body, registry.timeouts).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        };
        partial.received += bytes.len() as u64;
        if descriptor.size > 0 && partial.received > descriptor.size {
            let reason =
                format!("received {} bytes, but the descriptor has {}", partial.received, descriptor.size);
            return Err(Error::Unusable { what: descriptor.digest.to_string(), reason });
        }
        size += bytes.len();
        waiting.push(bytes);
        if size >= WRITE_CHUNK_BYTES {
            partial = partial.write(store, std::mem::take(&mut waiting)).await?;
            size = 0;
        }
    };
    partial = partial.write(store, waiting).await?;
    let ended = match ended {
        Ok(()) if partial.received < descriptor.size => {
            Err(PullError::Cut { url, got: partial.received, expected: descriptor.size })
        }
        other => other,
    };
    Ok((partial, ended))
}

#[cfg(test)]
mod tests;
