//! Where images are kept: `index.json` says which there are, `blobs/` has their pieces as they came, `layers/` the
//! unpacked ones, `tmp/` what is not ready.
//!
//! Several processes may use a store at once; whoever changes the index holds `lock`. Pieces that are in their places and
//! not in the index yet are named in files in `tmp/` that are locked by who needs them; such files are written while
//! `busy` is held, and whoever removes pieces holds that alone until all that goes is out of its place.

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

/// How much of an id stands for all of it, as lists show it. Less could be a name that somebody means to pull.
const MIN_SHORT_ID_LENGTH: usize = 12;

/// How the names of files begin that say what is needed.
const LEASE_PREFIX: &str = "needed-";

/// Images in a directory.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    /// Bytes and files of each unpacked layer.
    layers: Arc<Mutex<BTreeMap<OsString, (u64, u64)>>>,
    /// Whose turn it is to fetch a piece, and to unpack a layer.
    pub(crate) fetch_locks: Arc<KeyedMutex<tokio::sync::Mutex<()>>>,
    unpack_locks: Arc<KeyedMutex<Mutex<()>>>,
}

/// An image that is there as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// The digest of its configuration, which is what CRI calls an image's id.
    pub id: Digest,
    /// The digest of what it is made of, for this machine.
    pub manifest: Digest,
    /// `registry/repository:tag`.
    pub tags: BTreeSet<String>,
    /// `registry/repository@digest`, by which it can be pulled again: the digest of an index, where it came by one.
    pub digests: BTreeSet<String>,
    /// Bytes, as it came.
    pub size: u64,
    /// The unpacked layers by their directories' names, lowest first.
    pub layers: Vec<String>,
}

/// Says which pieces somebody needs, for as long as it is there and locked: a process that is killed needs nothing.
#[derive(Debug)]
pub(crate) struct BlobLease(
    #[expect(dead_code, reason = "it is there to be dropped")] tempfile::NamedTempFile,
);

/// A name, and the digest of what it stands for: a manifest, or an index that leads to it.
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
    /// What people know it by: its tags, or what it can be pulled by where it has none. An image from an archive may have
    /// neither.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let names = if self.tags.is_empty() { &self.digests } else { &self.tags };
        names.iter().map(String::as_str)
    }

    fn matches_reference(&self, name: &Reference) -> bool {
        let text = name.to_string();
        if self.tags.contains(&text) || self.digests.contains(&text) {
            return true;
        }
        // By the digest of its manifest, behind the index it came by.
        let repository = name.repository_path();
        let mut known_references =
            self.tags.iter().chain(&self.digests).filter_map(|known| Reference::parse(known).ok());
        name.digest.as_ref() == Some(&self.manifest)
            && known_references.any(|known| known.repository_path() == repository)
    }
}

impl Store {
    /// Opens or makes a store.
    pub fn open(root: &Path) -> Result<Store, Error> {
        for name in ["blobs", "layers", "tmp"] {
            let path = root.join(name);
            fs::create_dir_all(&path).map_err(file_error("make", path))?;
        }
        use std::os::unix::fs::PermissionsExt as _;
        // Files of images may be set-user-id; nobody but root is to reach them here.
        fs::set_permissions(root, fs::Permissions::from_mode(0o700)).map_err(file_error("protect", root))?;
        let (layers, fetch_locks, unpack_locks) = Default::default();
        Ok(Store { root: root.to_owned(), layers, fetch_locks, unpack_locks })
    }

    /// Removes what was left behind when this program was last killed. Only for the one process that owns the store.
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

    /// Keeps pieces that nobody is known to need yet from being removed, for as long as it is held, which should not be
    /// long: those of an archive, and the layers of a container that is not written down.
    pub fn lock_shared(&self) -> Result<File, Error> {
        let path = self.root.join("busy");
        let locked = File::create(&path).and_then(|file| {
            rustix::fs::flock(&file, FlockOperation::LockShared)?;
            Ok(file)
        });
        locked.map_err(file_error("lock", path))
    }

    /// Keeps pieces of these names from being removed, whether they are there already or are still to come. Waits for
    /// whoever removes some.
    pub(crate) fn lease(&self, names: &[&str]) -> Result<BlobLease, Error> {
        let _guard = self.lock_shared()?;
        let file = tempfile::Builder::new().prefix(LEASE_PREFIX).tempfile_in(self.temp_dir());
        let written = file.and_then(|mut file| {
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            file.write_all(names.join("\n").as_bytes())?;
            Ok(BlobLease(file))
        });
        written.map_err(file_error("write in", self.temp_dir()))
    }

    /// What anybody needs that is on its way.
    fn lease_names(&self) -> Result<BTreeSet<String>, Error> {
        let mut lease_names = BTreeSet::new();
        let path = self.temp_dir();
        for entry in fs::read_dir(&path).map_err(file_error("read", path))?.flatten() {
            let path = entry.path();
            if !entry.file_name().to_string_lossy().starts_with(LEASE_PREFIX) || !is_locked(&path) {
                continue;
            }
            match fs::read_to_string(&path) {
                Ok(names) => lease_names.extend(names.lines().map(str::to_owned)),
                // It is there by now, or was given up.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(file_error("read", path)(error)),
            }
        }
        Ok(lease_names)
    }

    /// All images.
    pub fn images(&self) -> Result<Vec<Image>, Error> {
        Ok(self.read_index()?.images.into_values().collect())
    }

    /// The image of this name, digest or id; the beginning of an id will do, where no other begins so.
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

    /// What the image says of itself.
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

    /// Keeps a piece, once it is certain that it is what it is called.
    pub(crate) fn add_blob(&self, digest: &Digest, content: impl Read) -> Result<(), Error> {
        let mut file = tempfile::NamedTempFile::new_in(self.temp_dir())
            .map_err(file_error("write in", self.temp_dir()))?;
        let mut reader = DigestReader::new(content);
        io::copy(&mut reader, &mut file).map_err(file_error("write", file.path()))?;
        let (actual, _) = reader.finish().map_err(Error::Archive)?;
        if actual != *digest {
            return Err(Error::WrongDigest { what: digest.clone(), actual });
        }
        self.persist_blob(file, digest)
    }

    /// Moves a file that was checked to its place.
    pub(crate) fn persist_blob(&self, file: tempfile::NamedTempFile, digest: &Digest) -> Result<(), Error> {
        let path = self.blob(digest);
        file.as_file().sync_all().map_err(file_error("write", path.clone()))?;
        file.persist(&path).map_err(|error| file_error("write", path)(error.error))?;
        Ok(())
    }

    /// Unpacks the layers of an image whose pieces are all here, and gives it these names.
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
                "{} layers, but {} are described",
                manifest.layers.len(),
                config.rootfs.diff_ids.len()
            );
            return Err(Error::Unusable { what: digest.to_string(), why: reason });
        }
        let mut layers: Vec<String> = Vec::new();
        let mut chain: Option<Digest> = None;
        for diff in &config.rootfs.diff_ids {
            let name = Digest::chain_id(chain.as_ref(), diff);
            // Half of the digest is plenty to tell layers apart, and many of them must fit into a mount's options.
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
        // Who names a digest does not say that the tag beside it still leads there.
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
        let directory =
            tempfile::TempDir::new_in(self.temp_dir()).map_err(file_error("write in", self.temp_dir()))?;
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
        // What is under its final name is on disk as a whole.
        let root_dir = File::open(&root).map_err(file_error("open", root.clone()))?;
        rustix::fs::syncfs(&root_dir).map_err(|error| file_error("write", root.clone())(error.into()))?;
        match fs::rename(&root, self.layer(name)) {
            // Somebody else was faster.
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

    /// Writes an image down; names it takes from others are theirs no more.
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

    /// Whether anything of this place is here.
    pub(crate) fn has_repository(&self, name: &Reference) -> Result<bool, Error> {
        let prefix = format!("{}@", name.repository_path());
        let index = self.read_index()?;
        Ok(index.images.values().flat_map(|image| &image.digests).any(|known| known.starts_with(&prefix)))
    }

    /// The image that came from a place by a digest, with a further name of that place; none unless all of it is here.
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
        // Who names a digest does not say that the tag beside it still leads there.
        if name.tag.is_none() || name.digest.is_some() || image.tags.contains(&name.to_string()) {
            return Ok(Some(image));
        }
        self.tag(&image.id, name)?;
        image.tags.insert(name.to_string());
        // It may have been removed meanwhile.
        self.find(&at).map(|found| found.filter(|found| *found == image))
    }

    /// Gives an image one more name.
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

    /// Takes a name away, and the image with its last one; by id or digest the image with all its names. Its pieces go
    /// with the next [`Store::collect`].
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

    /// Removes images without any use and all pieces that no image needs; answers how many bytes were freed, or nothing
    /// where it has to be done another time. `in_use` finds the names of layers that containers stand on.
    pub fn collect_garbage(
        &self,
        in_use: impl FnOnce() -> io::Result<BTreeSet<String>>,
        unused: impl Fn(&Image, &BTreeSet<String>) -> bool,
    ) -> Result<Option<u64>, Error> {
        let path = self.root.join("busy");
        let exclusive_lock = File::create(&path).map_err(file_error("lock", path))?;
        if rustix::fs::flock(&exclusive_lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            // An archive or a container is on its way, and its pieces are nobody's yet: they go another time.
            return Ok(None);
        }
        // Only now: what was read earlier would not know who has come since.
        let mut layers = in_use().map_err(file_error("find out who uses", self.root.join("layers")))?;
        // Before the index: who is not here any more is there.
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
                // One damaged image keeps no other. Its layers are here unpacked; as they came they are needed only to
                // be handed on, which is over for it.
                Err(error) => {
                    tracing::warn!(%error, image = %image.id, "cannot read an image's manifest: it cannot be exported");
                }
            }
        }
        // Out of its place first: half of a layer must never look like a layer.
        let removal_dir =
            tempfile::TempDir::new_in(self.temp_dir()).map_err(file_error("write in", self.temp_dir()))?;
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
        // Nobody has to wait until all of it is gone.
        drop(exclusive_lock);
        let released_bytes = removed.iter().map(|path| sys::trees::usage(path).0).sum();
        let path = removal_dir.path().to_owned();
        removal_dir.close().map_err(file_error("remove", path))?;
        Ok(Some(released_bytes))
    }

    /// Whether an image is of no use any more: what it says of itself is gone, so that no container can be made of it.
    /// Those that are there keep it, since somebody may want to know what they are made of. What cannot be read for
    /// another reason may be read later.
    fn is_invalid_image(&self, image: &Image, in_use: &BTreeSet<String>) -> bool {
        let error = match self.config(image) {
            Err(error) if error.is_corrupt() => error,
            _ => return false,
        };
        let is_used = image.layers.last().is_some_and(|layer| in_use.contains(layer));
        let names: Vec<&str> = image.tags.iter().map(String::as_str).collect();
        let (id, names) = (&image.id, names.join(", "));
        if is_used {
            tracing::warn!(%error, image = %id, names, "a damaged image is kept for its containers");
        } else {
            tracing::warn!(%error, image = %id, names, "a damaged image is removed");
        }
        !is_used
    }

    /// Whether a piece is here. A document is small, and so it is looked at: one that is damaged is not here.
    pub(crate) fn has(&self, digest: &Digest, is_document: bool) -> bool {
        if !is_document {
            return self.blob(digest).exists();
        }
        self.read_blob(digest).is_ok_and(|bytes| Digest::of(&bytes) == *digest)
    }

    /// Bytes and files in the store.
    pub fn usage(&self) -> (u64, u64) {
        let layers_dir = self.root.join("layers");
        let mut known = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        // A layer in its place never changes, and may have very many files.
        let before = std::mem::take(&mut *known);
        for entry in fs::read_dir(&layers_dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let counted = before.get(&name).copied().unwrap_or_else(|| sys::trees::usage(&entry.path()));
            known.insert(name, counted);
        }
        let others = fs::read_dir(&self.root).into_iter().flatten().flatten().map(|entry| entry.path());
        let others = others.filter(|path| *path != layers_dir).map(|path| sys::trees::usage(&path));
        let sum = |one: (u64, u64), other: (u64, u64)| (one.0 + other.0, one.1 + other.1);
        // The directories of all and of layers count too.
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

    /// Changes the index while nobody else does. It is on disk when this returns.
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
