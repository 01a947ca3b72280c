//! Images from registries, by the distribution specification.
//!
//! What is fetched is written beside the store, checked against its digest and only then moved in; a connection that
//! breaks is taken up again where it broke. Read [`Puller::pull`].

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

use crate::manifest::{Descriptor, Document, LARGEST, Manifest};
use crate::{Digest, Error, Image, Reference, Store, on};

pub use credentials::Credentials;
pub use settings::Settings;

use proxy::Proxies;
use registry::{Ask, Patience, Registry, next};

/// Pieces fetched at once for one image.
const AT_ONCE: usize = 3;
/// Bytes of a piece that are written at a time.
const AT_A_TIME: usize = 256 << 10;
/// How often a broken connection is taken up again.
const TRIES: u32 = 5;
/// How often something small is asked for whose connection breaks: it hardly does again.
const FEW_TRIES: u32 = 2;
/// A registry that wants more time than this is asked earlier.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Indexes may name indexes, but not for ever.
const DEEPEST: usize = 4;

/// Why an image could not be pulled; worded as containerd words it, since people search for that.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error("failed to resolve reference {name:?}: {name}: not found")]
    NotFound { name: String },
    #[error(
        "failed to resolve reference {name:?}: pull access denied, repository does not exist or may require authorization: {why}"
    )]
    Denied { name: String, why: String },
    #[error("failed to do request: {method} {url:?}: {why}")]
    Unreachable { method: &'static str, url: String, why: String },
    #[error("unexpected status from {method} request to {url}: {status}{said}")]
    Status {
        method: &'static str,
        url: String,
        status: StatusCode,
        /// What the registry says of why, each reason in a line.
        said: String,
        /// How long the registry wants to be left alone.
        after: Option<Duration>,
    },
    #[error("{url} ended after {got} bytes of {expected}")]
    Cut { url: String, got: u64, expected: u64 },
    #[error(transparent)]
    Store(#[from] Error),
}

impl PullError {
    /// Whether it may be different the next time.
    fn may_pass(&self) -> bool {
        match self {
            PullError::Unreachable { .. } | PullError::Cut { .. } => true,
            PullError::Status { status, .. } if status.is_server_error() => true,
            other => other.asks_to_wait(),
        }
    }

    /// Whether the registry has too much to do.
    fn asks_to_wait(&self) -> bool {
        use StatusCode as Code;
        matches!(self, PullError::Status { status: Code::REQUEST_TIMEOUT | Code::TOO_MANY_REQUESTS, .. })
    }

    /// How long to wait after so many tries: as long as the registry says, but neither for ever nor in haste.
    fn pause(&self, patience: Patience, tries: u32) -> Duration {
        let usual = patience.pause * 2u32.pow(tries);
        match self {
            PullError::Status { after: Some(after), .. } => (*after).max(usual).min(LONGEST_PAUSE),
            _ => usual,
        }
    }
}

/// Pulls images into a store.
#[derive(Clone)]
pub struct Puller {
    store: Store,
    settings: Arc<Settings>,
    patience: Patience,
    proxies: Arc<Proxies>,
}

/// What a name has led to.
struct Found {
    /// The digest of what the name itself stands for: the manifest, or an index.
    named: Digest,
    digest: Digest,
    manifest: Manifest,
    /// The manifest as it came.
    bytes: Bytes,
}

impl Puller {
    pub fn new(store: Store, settings: Settings) -> Puller {
        let proxies = Arc::new(Proxies::of_environment());
        Puller { store, settings: Arc::new(settings), patience: Patience::default(), proxies }
    }

    /// Pulls an image from the first of its places that has it.
    pub async fn pull(
        &self,
        name: &Reference,
        credentials: Option<&Credentials>,
    ) -> Result<Image, PullError> {
        let mut last = PullError::NotFound { name: name.to_string() };
        for place in self.settings.places(&name.registry, &name.repository) {
            let own = self.settings.credentials(&place.host);
            let shown = credentials.cloned().or(own);
            let registry = Registry::new(place, name, shown, self.patience, self.proxies.clone())?;
            match self.pull_from(Arc::new(registry), name).await {
                Ok(image) => return Ok(image),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn pull_from(&self, registry: Arc<Registry>, name: &Reference) -> Result<Image, PullError> {
        let wanted = match (&name.digest, &name.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => "latest".to_owned(),
        };
        if let Some(image) = self.unchanged(&registry, name, &wanted).await? {
            return Ok(image);
        }
        let Found { named, digest, manifest, bytes } = self.manifest(&registry, name, wanted).await?;
        let Descriptor { digest: id, size, .. } = &manifest.config;
        if !(1..=LARGEST).contains(size) {
            let why = format!("its configuration {id} is said to have {size} bytes");
            return Err(Error::Unusable { what: name.to_string(), why }.into());
        }
        let mut pieces: Vec<Descriptor> = vec![manifest.config.clone()];
        pieces.extend(manifest.layers.iter().cloned());
        // What is being fetched is nobody's yet, and must not be tidied away.
        let needed: Vec<Digest> =
            pieces.iter().map(|piece| piece.digest.clone()).chain([digest.clone()]).collect();
        let needed = off_thread(&self.store, {
            let digest = digest.clone();
            move |store| {
                let needed = store.need(&needed.iter().map(Digest::hex).collect::<Vec<_>>())?;
                store.add_blob(&digest, &bytes[..])?;
                Ok(needed)
            }
        });
        let needed = needed.await?;
        pieces.sort_by(|a, b| a.digest.cmp(&b.digest));
        pieces.dedup_by(|a, b| a.digest == b.digest);
        let mut waiting = pieces.into_iter();
        let mut fetching = JoinSet::new();
        loop {
            while fetching.len() < AT_ONCE
                && let Some(piece) = waiting.next()
            {
                let (store, registry) = (self.store.clone(), registry.clone());
                let is_document = piece.digest == manifest.config.digest;
                fetching.spawn(async move {
                    let turn = store.fetching.at(piece.digest.hex());
                    let _turn = turn.lock().await;
                    // Another pull may have brought it meanwhile.
                    if store.has(&piece.digest, is_document) {
                        return Ok(());
                    }
                    fetch(&store, &registry, &piece).await
                });
            }
            let done = match fetching.join_next().await {
                None => break,
                Some(Ok(done)) => done,
                Some(Err(_)) => Err(Error::Missing("a piece whose fetching failed".to_owned()).into()),
            };
            if let Err(error) = done {
                // What the others have begun goes before anybody hears of this.
                fetching.shutdown().await;
                return Err(error);
            }
        }
        let names = [(name.clone(), named)];
        // This goes on also where nobody waits for it any more.
        let add = move |store: &Store| {
            let _needed = needed;
            store.add_image(&digest, &manifest, &names)
        };
        Ok(off_thread(&self.store, add).await?)
    }

    /// The image that a name led to before, if it still does. That is asked for in a way that registries do not count.
    async fn unchanged(
        &self,
        registry: &Registry,
        name: &Reference,
        wanted: &str,
    ) -> Result<Option<Image>, PullError> {
        if !self.store.knows_place(name)? {
            return Ok(None);
        }
        // Whatever is wrong comes up again.
        let head = registry.get(&Ask::head(wanted)).await.ok();
        let told = head.as_ref().and_then(|(_, head)| head.headers().get("docker-content-digest"));
        let Some(digest) = told.and_then(|value| Digest::parse(value.to_str().ok()?)) else {
            return Ok(None);
        };
        if name.digest.as_ref().is_some_and(|asked| *asked != digest) {
            return Ok(None);
        }
        let named = (name.clone(), digest);
        Ok(off_thread(&self.store, move |store| store.name_again(&named)).await?)
    }

    /// The manifest for this machine.
    async fn manifest(
        &self,
        registry: &Registry,
        name: &Reference,
        mut wanted: String,
    ) -> Result<Found, PullError> {
        let mut named = None;
        for _ in 0..DEEPEST {
            let bytes = fetch_small(registry, &Ask::manifest(&wanted)).await?;
            let digest = Digest::of(&bytes);
            if let Some(asked) = Digest::parse(&wanted)
                && asked != digest
            {
                return Err(Error::WrongDigest { what: asked, actual: digest }.into());
            }
            let named = named.get_or_insert_with(|| digest.clone()).clone();
            match Document::parse(&name.to_string(), &bytes)? {
                Document::Manifest(manifest) => return Ok(Found { named, digest, manifest, bytes }),
                Document::Index(index) => wanted = index.choose(&name.to_string())?.digest.to_string(),
            }
        }
        let why = "indexes of indexes without end".to_owned();
        Err(Error::Unusable { what: name.to_string(), why }.into())
    }
}

/// Fetches a manifest, with a few tries.
async fn fetch_small(registry: &Registry, ask: &Ask) -> Result<Bytes, PullError> {
    let mut tries = 0;
    loop {
        let error = match registry.small(ask, LARGEST as usize).await {
            Err(error) if error.may_pass() => error,
            other => return other,
        };
        let most = if error.asks_to_wait() { TRIES } else { FEW_TRIES };
        tries += 1;
        if tries >= most {
            return Err(error);
        }
        tokio::time::sleep(error.pause(registry.patience, tries - 1)).await;
    }
}

/// Does what takes a while where nobody else waits for the thread.
async fn off_thread<T: Send + 'static>(
    store: &Store,
    work: impl FnOnce(&Store) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let own = store.clone();
    let done = tokio::task::spawn_blocking(move || work(&own)).await;
    done.map_err(io::Error::other).map_err(on("work in", store.root()))?
}

/// As much of a piece as has come.
struct Part {
    file: tempfile::NamedTempFile,
    hash: Sha256,
    got: u64,
}

impl Part {
    /// A disk may take its time, as hashing does.
    async fn write(mut self, store: &Store, waiting: Vec<Bytes>) -> Result<Part, Error> {
        let write = move |_: &Store| {
            for bytes in &waiting {
                self.hash.update(bytes);
                self.file.write_all(bytes).map_err(on("write", self.file.path()))?;
            }
            Ok(self)
        };
        off_thread(store, write).await
    }
}

/// Fetches a piece, as often as it takes.
async fn fetch(store: &Store, registry: &Registry, piece: &Descriptor) -> Result<(), PullError> {
    let file =
        tempfile::NamedTempFile::new_in(store.temporary()).map_err(on("write in", store.temporary()))?;
    let mut part = Part { file, hash: Sha256::new(), got: 0 };
    let mut tries = 0;
    loop {
        let before = part.got;
        let ended;
        (part, ended) = fetch_some(store, registry, piece, part).await?;
        match ended {
            Ok(()) => break,
            Err(error) if error.may_pass() => {
                // One that gets on is given time.
                tries = if part.got > before { 1 } else { tries + 1 };
                if tries >= TRIES {
                    return Err(error);
                }
                tokio::time::sleep(error.pause(registry.patience, tries)).await;
            }
            Err(error) => return Err(error),
        }
    }
    let actual = Digest::from_hash(part.hash);
    if actual != piece.digest {
        return Err(Error::WrongDigest { what: piece.digest.clone(), actual }.into());
    }
    Ok(off_thread(store, move |store| store.keep(part.file, &actual)).await?)
}

/// Fetches what is missing of a piece, or as much of it as comes.
async fn fetch_some(
    store: &Store,
    registry: &Registry,
    piece: &Descriptor,
    mut part: Part,
) -> Result<(Part, Result<(), PullError>), Error> {
    let (url, response) = match registry.get(&Ask::blob(&piece.digest, part.got)).await {
        Ok(found) => found,
        Err(error) => return Ok((part, Err(error))),
    };
    let is_part = response.status() == StatusCode::PARTIAL_CONTENT;
    if part.got > 0 && !is_part {
        // A registry that does not know parts begins again.
        part.got = 0;
        part.hash = Sha256::new();
        part.file.as_file().set_len(0).map_err(on("write", part.file.path()))?;
        std::io::Seek::rewind(part.file.as_file_mut()).map_err(on("write", part.file.path()))?;
    }
    let mut body = response.into_body();
    let (mut waiting, mut size) = (Vec::new(), 0);
    let ended = loop {
        let bytes = match next(&url, &mut body, registry.patience).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        };
        part.got += bytes.len() as u64;
        if piece.size > 0 && part.got > piece.size {
            let why = format!("{} bytes where {} were promised", part.got, piece.size);
            return Err(Error::Unusable { what: piece.digest.to_string(), why });
        }
        size += bytes.len();
        waiting.push(bytes);
        if size >= AT_A_TIME {
            part = part.write(store, std::mem::take(&mut waiting)).await?;
            size = 0;
        }
    };
    part = part.write(store, waiting).await?;
    let ended = match ended {
        Ok(()) if part.got < piece.size => Err(PullError::Cut { url, got: part.got, expected: piece.size }),
        other => other,
    };
    Ok((part, ended))
}

#[cfg(test)]
mod tests;
