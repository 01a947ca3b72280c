//! The image store. `index.json` lists the images, `blobs/` holds their content as downloaded,
//! `layers/` the unpacked layers, `tmp/` incomplete content.
//!
//! Several processes may use a store at the same time:
//! - `lock` is held exclusively while `index.json` is changed.
//! - `busy` is held shared while content is added that is not referenced yet, and exclusively by
//!   [`Store::collect_garbage`] until all removed content is renamed away.
//! - A lease (`tmp/needed-*`) lists blobs and layers that an unfinished pull or import requires. It
//!   is created while `busy` is held and locked by its owner. A lease without a lock belongs to a
//!   process that was killed, and is ignored.
//!
//! Counterpart upstream: containerd's content store with leases and garbage collection.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::digest::DigestReader;
use crate::keyed_mutex::KeyedMutex;
use crate::manifest::{self, ImageConfig, Manifest};
use crate::{Digest, Error, Reference, file_error, unpack};

/// The minimum length of an ID prefix that identifies an image, as long as in listings. A shorter
/// prefix could be an image name.
const MIN_SHORT_ID_LENGTH: usize = 12;

/// The file name prefix of leases.
const LEASE_PREFIX: &str = "needed-";

/// An image store in a directory.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    /// Bytes and inodes of each unpacked layer, by directory name.
    layers: Arc<Mutex<BTreeMap<OsString, (u64, u64)>>>,
    /// Ensure that a blob is fetched once and a layer is unpacked once in this process.
    pub(crate) fetch_locks: Arc<KeyedMutex<tokio::sync::Mutex<()>>>,
    unpack_locks: Arc<KeyedMutex<Mutex<()>>>,
}

/// An image whose content is complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// The digest of the image configuration, which is the image ID in CRI.
    pub id: Digest,
    /// The digest of the manifest for this host.
    pub manifest: Digest,
    /// `registry/repository:tag`.
    pub tags: BTreeSet<String>,
    /// `registry/repository@digest`. If the image was pulled by an index, this is the digest of the
    /// index.
    pub digests: BTreeSet<String>,
    /// The size of the configuration and the compressed layers in bytes.
    pub size: u64,
    /// The directory names of the unpacked layers, lowest first.
    pub layers: Vec<String>,
}

/// Protects blobs and layers from garbage collection while the file exists and is locked. The lock
/// of a killed process is released by the kernel.
#[derive(Debug)]
pub(crate) struct BlobLease(
    #[expect(dead_code, reason = "it is there to be dropped")] tempfile::NamedTempFile,
);

/// A reference and the digest that it resolves to: a manifest or an index.
pub(crate) type NamedDigest = (Reference, Digest);

#[derive(Debug, Default, Serialize, Deserialize)]
struct Index {
    images: BTreeMap<Digest, Image>,
}

impl Index {
    fn by_short_id(&self, start: &str) -> Option<&Image> {
        let start = start.strip_prefix("sha256:").unwrap_or(start);
        let mut found = self.images.values().filter(|image| image.id.hex().starts_with(start));
        let first = found.next().filter(|_| start.len() >= MIN_SHORT_ID_LENGTH)?;
        found.next().is_none().then_some(first)
    }
}

impl Image {
    /// The tags, or the digests if there are none. An image from an archive may have neither.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let names = if self.tags.is_empty() { &self.digests } else { &self.tags };
        names.iter().map(String::as_str)
    }

    fn matches_reference(&self, name: &Reference) -> bool {
        let text = name.to_string();
        if self.tags.contains(&text) || self.digests.contains(&text) {
            return true;
        }
        // The image was pulled by an index, but is requested by the digest of its manifest.
        let repository = name.repository_path();
        let mut known_references =
            self.tags.iter().chain(&self.digests).filter_map(|known| Reference::parse(known).ok());
        name.digest.as_ref() == Some(&self.manifest)
            && known_references.any(|known| known.repository_path() == repository)
    }
}

impl Store {
    /// Opens a store. Creates its directories if they are missing.
    pub fn open(root: &Path) -> Result<Store, Error> {
        for name in ["blobs", "layers", "tmp"] {
            let path = root.join(name);
            fs::create_dir_all(&path).map_err(file_error("create", path))?;
        }
        use std::os::unix::fs::PermissionsExt as _;
        // Image content may include setuid files. Only root may reach them through the store.
        fs::set_permissions(root, fs::Permissions::from_mode(0o700))
            .map_err(file_error("change the mode of", root))?;
        let (layers, fetch_locks, unpack_locks) = Default::default();
        Ok(Store { root: root.to_owned(), layers, fetch_locks, unpack_locks })
    }

    /// Removes temporary content of processes that were killed. Only the process that owns the
    /// store may call this. Leases that are locked are kept.
    pub fn clean(&self) {
        for entry in fs::read_dir(self.temp_dir()).into_iter().flatten().flatten() {
            if is_locked(&entry.path()) {
                continue;
            }
            let _ = fs::remove_dir_all(entry.path()).or_else(|_| fs::remove_file(entry.path()));
        }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn temp_dir(&self) -> PathBuf {
        self.root.join("tmp")
    }

    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.root.join("blobs").join(digest.hex())
    }

    /// The directory of an unpacked layer.
    pub fn layer(&self, name: &str) -> PathBuf {
        self.root.join("layers").join(name)
    }

    /// Blocks garbage collection while the returned file is open: for an import whose blobs are not
    /// in the index yet, and for a container whose layers are not recorded yet. Must be held for a
    /// short time only.
    pub fn lock_shared(&self) -> Result<File, Error> {
        let path = self.root.join("busy");
        let locked = File::create(&path).and_then(|file| {
            rustix::fs::flock(&file, FlockOperation::LockShared)?;
            Ok(file)
        });
        locked.map_err(file_error("lock", path))
    }

    /// Protects blobs and layers with these names from garbage collection, whether they exist
    /// already or not. Waits for a running garbage collection.
    pub(crate) fn lease(&self, names: &[&str]) -> Result<BlobLease, Error> {
        let _guard = self.lock_shared()?;
        let file = tempfile::Builder::new().prefix(LEASE_PREFIX).tempfile_in(self.temp_dir());
        let written = file.and_then(|mut file| {
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            file.write_all(names.join("\n").as_bytes())?;
            Ok(BlobLease(file))
        });
        written.map_err(file_error("create a file in", self.temp_dir()))
    }

    /// The names in all leases that are held.
    fn lease_names(&self) -> Result<BTreeSet<String>, Error> {
        let mut lease_names = BTreeSet::new();
        let path = self.temp_dir();
        // Leases are locked exclusively by their owners, so a lease that is not locked is stale.
        for entry in fs::read_dir(&path).map_err(file_error("read", path))?.flatten() {
            let path = entry.path();
            if !entry.file_name().to_string_lossy().starts_with(LEASE_PREFIX) || !is_locked(&path) {
                continue;
            }
            match fs::read_to_string(&path) {
                Ok(names) => lease_names.extend(names.lines().map(str::to_owned)),
                // The lease was released between the listing and this read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(file_error("read", path)(error)),
            }
        }
        Ok(lease_names)
    }

    pub fn images(&self) -> Result<Vec<Image>, Error> {
        Ok(self.read_index()?.images.into_values().collect())
    }

    /// Finds an image by name, digest or ID. A unique prefix of the ID is sufficient.
    pub fn find(&self, name: &str) -> Result<Option<Image>, Error> {
        let index = self.read_index()?;
        let id = Digest::parse(name).or_else(|| Digest::parse(&format!("sha256:{name}")));
        if let Some(image) = id.and_then(|id| index.images.get(&id).cloned()) {
            return Ok(Some(image));
        }
        let reference = Reference::parse(name).ok();
        let called =
            reference.and_then(|name| index.images.values().find(|image| image.matches_reference(&name)));
        Ok(called.or_else(|| index.by_short_id(name)).cloned())
    }

    /// The configuration of an image.
    pub fn config(&self, image: &Image) -> Result<ImageConfig, Error> {
        manifest::parse(&image.id.to_string(), &self.read_blob(&image.id)?)
    }

    pub(crate) fn manifest(&self, image: &Image) -> Result<Manifest, Error> {
        manifest::parse(&image.manifest.to_string(), &self.read_blob(&image.manifest)?)
    }

    pub(crate) fn read_blob(&self, digest: &Digest) -> Result<Vec<u8>, Error> {
        let path = self.blob(digest);
        let file = File::open(&path).map_err(file_error("read", path))?;
        manifest::read(&digest.to_string(), file)
    }

    /// Adds a blob after verifying its digest.
    pub(crate) fn add_blob(&self, digest: &Digest, content: impl Read) -> Result<(), Error> {
        let mut file = tempfile::NamedTempFile::new_in(self.temp_dir())
            .map_err(file_error("create a file in", self.temp_dir()))?;
        let mut reader = DigestReader::new(content);
        io::copy(&mut reader, &mut file).map_err(file_error("write", file.path()))?;
        let (actual, _) = reader.finish().map_err(Error::Archive)?;
        if actual != *digest {
            return Err(Error::WrongDigest { what: digest.clone(), actual });
        }
        self.persist_blob(file, digest)
    }

    /// Moves a verified file to the final path of its blob.
    pub(crate) fn persist_blob(&self, file: tempfile::NamedTempFile, digest: &Digest) -> Result<(), Error> {
        let path = self.blob(digest);
        file.as_file().sync_all().map_err(file_error("write", path.clone()))?;
        file.persist(&path).map_err(|error| file_error("write", path)(error.error))?;
        Ok(())
    }

    /// Unpacks the layers of an image whose blobs are all in the store, and adds it to the index
    /// under these names.
    pub(crate) fn add_image(
        &self,
        digest: &Digest,
        manifest: &Manifest,
        names: &[NamedDigest],
    ) -> Result<Image, Error> {
        let id = manifest.config.digest.clone();
        let config: ImageConfig = manifest::parse(&id.to_string(), &self.read_blob(&id)?)?;
        if config.rootfs.diff_ids.len() != manifest.layers.len() {
            let reason = format!(
                "manifest has {} layers, but config has {} diff_ids",
                manifest.layers.len(),
                config.rootfs.diff_ids.len()
            );
            return Err(Error::Unusable { what: digest.to_string(), reason });
        }
        let mut layers: Vec<String> = Vec::new();
        let mut chain: Option<Digest> = None;
        for diff in &config.rootfs.diff_ids {
            let name = Digest::chain_id(chain.as_ref(), diff);
            // 128 bits of the chain ID are unique. Short names leave room for more layers in the
            // mount options, which are limited to a page.
            layers.push(name.hex()[..32].to_owned());
            chain = Some(name);
        }
        let _lease = self.lease(&layers.iter().map(String::as_str).collect::<Vec<_>>())?;
        for (at, (blob, diff)) in manifest.layers.iter().zip(&config.rootfs.diff_ids).enumerate() {
            let mutex = self.unpack_locks.get(&layers[at]);
            let _guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
            if !self.layer(&layers[at]).exists() {
                self.unpack(&blob.digest, diff, &layers[..at], &layers[at])?;
            }
        }
        let sizes = manifest.layers.iter().map(|layer| layer.size);
        let size = sizes.fold(manifest.config.size, u64::saturating_add);
        // A reference with tag and digest does not prove that the tag still resolves to this
        // digest.
        let is_tag = |name: &&Reference| name.tag.is_some() && name.digest.is_none();
        let tags = names.iter().map(|(name, _)| name).filter(is_tag);
        let image = Image {
            id,
            manifest: digest.clone(),
            tags: tags.map(ToString::to_string).collect(),
            digests: names.iter().map(|(name, stands_for)| name.with_digest(stands_for)).collect(),
            size,
            layers,
        };
        self.add_to_index(image)
    }

    fn unpack(&self, blob: &Digest, diff: &Digest, below: &[String], name: &str) -> Result<(), Error> {
        let path = self.blob(blob);
        let failed = |source| Error::Unpack { layer: blob.clone(), source };
        let directory = tempfile::TempDir::new_in(self.temp_dir())
            .map_err(file_error("create a file in", self.temp_dir()))?;
        let content = File::open(&path).map_err(file_error("read", path))?;
        let below: Vec<PathBuf> = below.iter().rev().map(|name| self.layer(name)).collect();
        let content = unpack::decompress(content).map_err(|error| failed(error.into()))?;
        let mut reader = DigestReader::new(content);
        let root = directory.path().join("root");
        unpack::unpack(&mut reader, &root, &below).map_err(failed)?;
        let (actual, _) = reader.finish().map_err(|error| failed(error.into()))?;
        if actual != *diff {
            return Err(Error::WrongDigest { what: diff.clone(), actual });
        }
        // The layer must be on disk before the rename, because a layer at its final path counts as
        // complete.
        let root_dir = File::open(&root).map_err(file_error("open", root.clone()))?;
        rustix::fs::syncfs(&root_dir).map_err(|error| file_error("write", root.clone())(error.into()))?;
        match fs::rename(&root, self.layer(name)) {
            // Another process has unpacked the same layer.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(file_error("write", self.layer(name))(error)),
            Ok(()) => Ok(()),
        }
    }

    /// Adds an image to the index. A tag that another image has is moved to this one.
    fn add_to_index(&self, image: Image) -> Result<Image, Error> {
        self.update_index(|index| {
            for other in index.images.values_mut().filter(|other| other.id != image.id) {
                other.tags.retain(|tag| !image.tags.contains(tag));
            }
            let known = index.images.entry(image.id.clone()).or_insert_with(|| image.clone());
            known.tags.extend(image.tags);
            known.digests.extend(image.digests);
            known.manifest = image.manifest;
            known.size = image.size;
            known.clone()
        })
    }

    /// Whether an image of this repository is in the store.
    pub(crate) fn has_repository(&self, name: &Reference) -> Result<bool, Error> {
        let prefix = format!("{}@", name.repository_path());
        let index = self.read_index()?;
        Ok(index.images.values().flat_map(|image| &image.digests).any(|known| known.starts_with(&prefix)))
    }

    /// Returns the image that was pulled from this repository by this digest, and adds the tag of
    /// the reference. Returns `None` if there is none or if content is missing.
    pub(crate) fn tag_existing(&self, (name, digest): &NamedDigest) -> Result<Option<Image>, Error> {
        let at = name.with_digest(digest);
        let has_digest = |image: &&Image| image.digests.contains(&at);
        let Some(mut image) = self.read_index()?.images.into_values().find(|image| has_digest(&image)) else {
            return Ok(None);
        };
        let manifest = self.manifest(&image).ok().filter(|_| self.has(&image.manifest, true));
        let is_whole = self.has(&image.id, true)
            && image.layers.iter().all(|layer| self.layer(layer).exists())
            && manifest
                .is_some_and(|manifest| manifest.layers.iter().all(|layer| self.has(&layer.digest, false)));
        if !is_whole {
            return Ok(None);
        }
        // A reference with tag and digest does not prove that the tag still resolves to this
        // digest.
        if name.tag.is_none() || name.digest.is_some() || image.tags.contains(&name.to_string()) {
            return Ok(Some(image));
        }
        self.tag(&image.id, name)?;
        image.tags.insert(name.to_string());
        // The image may have been removed or changed between the two index accesses.
        self.find(&at).map(|found| found.filter(|found| *found == image))
    }

    /// Adds a tag to an image and removes it from all others.
    pub fn tag(&self, image: &Digest, name: &Reference) -> Result<(), Error> {
        let name = name.to_string();
        self.update_index(|index| {
            for (id, known) in &mut index.images {
                if id == image {
                    known.tags.insert(name.clone());
                } else {
                    known.tags.remove(&name);
                }
            }
        })
    }

    /// Removes a tag, and the image with its last tag. An ID or digest removes the image with all
    /// tags. The content is released by the next [`Store::collect_garbage`].
    pub fn remove(&self, name: &str) -> Result<bool, Error> {
        let Some(image) = self.find(name)? else { return Ok(false) };
        let tag = Reference::parse(name).map(|reference| reference.to_string()).unwrap_or_default();
        self.update_index(|index| {
            let Some(known) = index.images.get_mut(&image.id) else { return };
            if !known.tags.remove(&tag) || known.tags.is_empty() {
                index.images.remove(&image.id);
            }
        })?;
        Ok(true)
    }

    /// Removes unused images, and all blobs and layers that no image requires. Returns the number
    /// of released bytes, or `None` if the store is in use and the caller should retry later.
    /// `in_use` returns the names of layers that containers use.
    pub fn collect_garbage(
        &self,
        in_use: impl FnOnce() -> io::Result<BTreeSet<String>>,
        unused: impl Fn(&Image, &BTreeSet<String>) -> bool,
    ) -> Result<Option<u64>, Error> {
        let path = self.root.join("busy");
        let exclusive_lock = File::create(&path).map_err(file_error("lock", path))?;
        if rustix::fs::flock(&exclusive_lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            // An import or a container creation is in progress. Its content is not referenced yet.
            return Ok(None);
        }
        // Must run under the lock: an earlier result would miss containers created since.
        let mut layers = in_use().map_err(file_error("list the users of", self.root.join("layers")))?;
        // Leases are read before the index: a pull that finishes in between drops its lease after
        // it has added the image to the index, so its content is found in one of the two.
        let lease_names = self.lease_names()?;
        let retained = self.update_index(|index| {
            index.images.retain(|_, image| !unused(image, &layers) && !self.is_invalid_image(image, &layers));
            index.images.values().cloned().collect::<Vec<_>>()
        })?;
        let mut blob_names = BTreeSet::new();
        for image in &retained {
            layers.extend(image.layers.iter().cloned());
            blob_names.extend([image.id.hex().to_owned(), image.manifest.hex().to_owned()]);
            match self.manifest(image) {
                Ok(manifest) => {
                    blob_names.extend(manifest.layers.iter().map(|layer| layer.digest.hex().to_owned()));
                }
                // A corrupt manifest must not block the collection of other images. The unpacked
                // layers are sufficient for containers; the blobs are only needed for an export,
                // which requires the manifest.
                Err(error) => {
                    tracing::warn!(%error, image = %image.id, "cannot read image manifest, image cannot be exported");
                }
            }
        }
        // Rename first: a partially removed layer must never be visible at its final path.
        let removal_dir = tempfile::TempDir::new_in(self.temp_dir())
            .map_err(file_error("create a file in", self.temp_dir()))?;
        let mut removed = Vec::new();
        for (directory, others) in [("blobs", &blob_names), ("layers", &layers)] {
            let path = self.root.join(directory);
            for entry in fs::read_dir(&path).map_err(file_error("read", path))?.flatten() {
                let name = entry.file_name();
                let is_in = |names: &BTreeSet<String>| names.contains(name.to_string_lossy().as_ref());
                if !is_in(others) && !is_in(&lease_names) {
                    let path = removal_dir.path().join(&name);
                    fs::rename(entry.path(), &path).map_err(file_error("remove", entry.path()))?;
                    removed.push(path);
                }
            }
        }
        // The removal may take long and does not need the lock.
        drop(exclusive_lock);
        let released_bytes = removed.iter().map(|path| sys::trees::usage(path).0).sum();
        let path = removal_dir.path().to_owned();
        removal_dir.close().map_err(file_error("remove", path))?;
        Ok(Some(released_bytes))
    }

    /// Whether the configuration of an image is missing or corrupt, so that no container can be
    /// created from it. An image that containers use is kept, so that it can still be inspected.
    /// Other read errors may be temporary.
    fn is_invalid_image(&self, image: &Image, in_use: &BTreeSet<String>) -> bool {
        let error = match self.config(image) {
            Err(error) if error.is_corrupt() => error,
            _ => return false,
        };
        let is_used = image.layers.last().is_some_and(|layer| in_use.contains(layer));
        let names: Vec<&str> = image.tags.iter().map(String::as_str).collect();
        let (id, names) = (&image.id, names.join(", "));
        if is_used {
            tracing::warn!(%error, image = %id, names, "keeping corrupt image, it is used by containers");
        } else {
            tracing::warn!(%error, image = %id, names, "removing corrupt image");
        }
        !is_used
    }

    /// Whether a blob is in the store. Documents are small, so their digest is verified.
    pub(crate) fn has(&self, digest: &Digest, is_document: bool) -> bool {
        if !is_document {
            return self.blob(digest).exists();
        }
        self.read_blob(digest).is_ok_and(|bytes| Digest::of(&bytes) == *digest)
    }

    /// The bytes and inodes that the store uses.
    pub fn usage(&self) -> (u64, u64) {
        let layers_dir = self.root.join("layers");
        let mut known = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        // An unpacked layer never changes and may have very many files, so it is counted once.
        let before = std::mem::take(&mut *known);
        for entry in fs::read_dir(&layers_dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let counted = before.get(&name).copied().unwrap_or_else(|| sys::trees::usage(&entry.path()));
            known.insert(name, counted);
        }
        let others = fs::read_dir(&self.root).into_iter().flatten().flatten().map(|entry| entry.path());
        let others = others.filter(|path| *path != layers_dir).map(|path| sys::trees::usage(&path));
        let sum = |one: (u64, u64), other: (u64, u64)| (one.0 + other.0, one.1 + other.1);
        // Two more inodes: the root directory and `layers/`.
        others.chain(known.values().copied()).fold((0, 2), sum)
    }

    fn read_index(&self) -> Result<Index, Error> {
        let path = self.root.join("index.json");
        match fs::read(&path) {
            Ok(bytes) => manifest::parse(&path.display().to_string(), &bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Index::default()),
            Err(error) => Err(file_error("read", path)(error)),
        }
    }

    /// Changes the index under the exclusive lock. The index is on disk when this returns.
    fn update_index<T>(&self, change: impl FnOnce(&mut Index) -> T) -> Result<T, Error> {
        let lock = self.root.join("lock");
        let locked = File::create(&lock).and_then(|file| {
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            Ok(file)
        });
        let _locked = locked.map_err(file_error("lock", lock))?;
        let mut index = self.read_index()?;
        let result = change(&mut index);
        let path = self.root.join("index.json");
        let bytes = serde_json::to_vec(&index).expect("an index has only strings and numbers");
        let written = tempfile::NamedTempFile::new_in(self.temp_dir()).and_then(|mut file| {
            file.write_all(&bytes)?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|error| error.error)?;
            File::open(&self.root)?.sync_all()
        });
        written.map_err(file_error("write", path))?;
        Ok(result)
    }
}

fn is_locked(path: &Path) -> bool {
    let file = File::open(path);
    file.is_ok_and(|file| rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_tags_or_digests() {
        let names = |tags: &[&str], digests: &[&str]| {
            let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            let (id, layers) = (Digest::of(b""), Vec::new());
            let image =
                Image { manifest: id.clone(), id, tags: set(tags), digests: set(digests), size: 0, layers };
            image.names().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&["a:1", "a:2"], &["a@x"]), "a:1 a:2");
        assert_eq!(names(&[], &["a@x"]), "a@x");
        assert_eq!(names(&[], &[]), "");
    }

    #[test]
    fn find_an_image_by_unique_id_prefix() {
        let id = |start: &str| Digest::parse(&format!("sha256:{start:0<64}")).unwrap();
        let image = |id: Digest| {
            let (tags, digests) = Default::default();
            Image { manifest: id.clone(), id, tags, digests, size: 0, layers: Vec::new() }
        };
        let ids = [id("abcdefabcdef1"), id("abcdefabcdef2")];
        let index = Index { images: ids.iter().map(|id| (id.clone(), image(id.clone()))).collect() };
        for (start, expected) in [
            ("abcdefabcdef", None),
            ("abcdefabcdef1", Some(&ids[0])),
            ("sha256:abcdefabcdef2", Some(&ids[1])),
            ("abcdefabcdef3", None),
            ("sha256:", None),
        ] {
            assert_eq!(index.by_short_id(start).map(|image| &image.id), expected, "{start}");
        }
    }
}
