//! Imports and exports image archives: the OCI image layout and the format of `docker save`, in one
//! tar file.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::digest::DigestReader;
use crate::manifest::{self, Descriptor, DockerManifest, Document, Index, Manifest};
use crate::store::NamedDigest;
use crate::{Digest, Error, Image, Reference, Store, file_error, unpack};

/// Limits the nesting of indexes.
const MAX_INDEX_DEPTH: usize = 4;

/// The symlink limit of the Linux kernel.
const MAX_LINKS: usize = 40;

/// An archive that has been extracted to a temporary directory.
struct Archive<'a> {
    store: &'a Store,
    /// Holds the extracted files. Removed on drop.
    _directory: tempfile::TempDir,
    files: HashMap<PathBuf, PathBuf>,
}

/// Imports all images of an archive that run on this host.
pub fn import(store: &Store, content: impl Read + 'static) -> Result<Vec<Image>, Error> {
    let _busy = store.lock_shared()?;
    let archive = Archive::read(store, content)?;
    let tagged = archive.docker_tags()?;
    if !archive.has("index.json") {
        return archive.import_docker_archive();
    }
    let mut index: Index = archive.json("index.json")?;
    // Drops manifests of other platforms. Attestations have the platform unknown/unknown.
    index
        .manifests
        .retain(|entry| entry.platform.as_ref().is_none_or(|platform| platform.platform_rank().is_some()));
    if index.manifests.is_empty() {
        return Err(Error::NoPlatform { what: "index.json".to_owned() });
    }
    // An image with several names has one index entry per name.
    let mut found: Vec<(Digest, Manifest, Vec<NamedDigest>)> = Vec::new();
    for entry in &index.manifests {
        let (digest, manifest) = archive.manifest(entry, MAX_INDEX_DEPTH)?;
        let mut names: Vec<Reference> = image_name(entry).into_iter().collect();
        if names.is_empty() {
            names.extend(tagged.get(&manifest.config.digest).into_iter().flatten().cloned());
        }
        let names: Vec<_> = names.into_iter().map(|name| (name, entry.digest.clone())).collect();
        match found.iter_mut().find(|(known, ..)| *known == digest) {
            Some((_, _, known)) => known.extend(names),
            None => found.push((digest, manifest, names)),
        }
    }
    let mut images = Vec::new();
    for (digest, manifest, names) in found {
        archive.import_blob(&manifest.config.digest, true)?;
        for layer in &manifest.layers {
            archive.import_blob(&layer.digest, false)?;
        }
        archive.import_blob(&digest, true)?;
        images.push(store.add_image(&digest, &manifest, &names)?);
    }
    Ok(images)
}

fn image_name(entry: &Descriptor) -> Option<Reference> {
    let full = entry.annotations.get(manifest::ANNOTATION_IMAGE_NAME);
    // `org.opencontainers.image.ref.name` may be a bare tag, which is not a full name.
    let short = entry.annotations.get(manifest::ANNOTATION_REF_NAME).filter(|name| name.contains([':', '/']));
    full.or(short).and_then(|name| Reference::parse(name).ok())
}

impl<'a> Archive<'a> {
    /// Extracts the files of the archive under generated names, because the names in the archive
    /// are untrusted.
    fn read(store: &'a Store, content: impl Read + 'static) -> Result<Archive<'a>, Error> {
        let directory = tempfile::TempDir::new_in(store.temp_dir())
            .map_err(file_error("create a file in", store.temp_dir()))?;
        let mut files: HashMap<PathBuf, PathBuf> = HashMap::new();
        let mut links: HashMap<PathBuf, PathBuf> = HashMap::new();
        let content = unpack::decompress(content).map_err(Error::Archive)?;
        let mut archive = tar::Archive::new(unpack::PaxEscapeReader::new(content));
        for (number, entry) in archive.entries().map_err(Error::Archive)?.enumerate() {
            let mut entry = entry.map_err(Error::Archive)?;
            let named = normalize_path(&entry.path().map_err(Error::Archive)?);
            match entry.header().entry_type() {
                // `docker save` before version 25 stores a layer shared by several images once and
                // links to it. The link may come before its target.
                kind if kind.is_symlink() || kind.is_hard_link() => {
                    let target = entry.link_name().map_err(Error::Archive)?.unwrap_or_default();
                    // The target of a symlink is relative to its directory, the target of a hard
                    // link to the archive root.
                    let from = named.parent().filter(|_| kind.is_symlink()).unwrap_or(Path::new(""));
                    let target = normalize_path(&from.join(target));
                    files.remove(&named);
                    links.insert(named, target);
                }
                kind if kind.is_file() => {
                    let path = directory.path().join(number.to_string());
                    let written =
                        File::create_new(&path).and_then(|mut file| io::copy(&mut entry, &mut file));
                    written.map_err(file_error("write", path.clone()))?;
                    links.remove(&named);
                    files.insert(named, path);
                }
                _ => {}
            }
        }
        // Resolves chains of links. A cycle ends at the limit and resolves to no file.
        for (named, target) in &links {
            let mut target = target;
            for _ in 0..MAX_LINKS {
                target = links.get(target).unwrap_or(target);
            }
            if let Some(file) = files.get(target).cloned() {
                files.insert(named.clone(), file);
            }
        }
        Ok(Archive { store, _directory: directory, files })
    }

    fn has(&self, name: &str) -> bool {
        self.files.contains_key(Path::new(name))
    }

    fn open(&self, name: &str) -> Result<File, Error> {
        let path = self
            .files
            .get(&normalize_path(Path::new(name)))
            .ok_or_else(|| Error::Missing(name.to_owned()))?;
        File::open(path).map_err(file_error("read", path))
    }

    fn json<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T, Error> {
        manifest::parse(name, &manifest::read(name, self.open(name)?)?)
    }

    /// Resolves a descriptor to a manifest. An index is resolved to the manifest for this host.
    fn manifest(&self, entry: &Descriptor, depth: usize) -> Result<(Digest, Manifest), Error> {
        let name = blob_name(&entry.digest);
        let bytes = manifest::read(&name, self.open(&name)?)?;
        match Document::parse(&name, &bytes)? {
            Document::Manifest(manifest) => Ok((entry.digest.clone(), manifest)),
            Document::Index(index) if depth > 0 => self.manifest(index.select_platform(&name)?, depth - 1),
            Document::Index(_) => {
                Err(Error::Unusable { what: name, reason: "indexes are nested too deeply".into() })
            }
        }
    }

    fn import_blob(&self, digest: &Digest, is_document: bool) -> Result<(), Error> {
        if self.store.has(digest, is_document) {
            return Ok(());
        }
        self.store.add_blob(digest, self.open(&blob_name(digest))?)
    }

    /// The `RepoTags` of `manifest.json` by the digest of the image configuration.
    fn docker_tags(&self) -> Result<HashMap<Digest, Vec<Reference>>, Error> {
        if !self.has("manifest.json") {
            return Ok(HashMap::new());
        }
        let manifests: Vec<DockerManifest> = self.json("manifest.json")?;
        let mut names = HashMap::new();
        for one in manifests {
            let hex = one.config.rsplit('/').next().unwrap_or_default().trim_end_matches(".json");
            if let Some(digest) = Digest::parse(&format!("sha256:{hex}")) {
                names.insert(digest, references(one.repo_tags));
            }
        }
        Ok(names)
    }

    /// The legacy docker format has no OCI manifest, so one is generated. Its digest identifies the
    /// image.
    fn import_docker_archive(&self) -> Result<Vec<Image>, Error> {
        if !self.has("manifest.json") {
            return Err(Error::NoImage);
        }
        let manifests: Vec<DockerManifest> = self.json("manifest.json")?;
        let mut images = Vec::new();
        for one in manifests {
            let mut layers = Vec::new();
            for name in &one.layers {
                layers.push(self.import_file(name, manifest::MEDIA_TYPE_LAYER)?);
            }
            let image_manifest = Manifest {
                schema_version: 2,
                media_type: manifest::MEDIA_TYPE_MANIFEST.to_owned(),
                config: self.import_file(&one.config, manifest::MEDIA_TYPE_CONFIG)?,
                layers,
            };
            let bytes = serde_json::to_vec(&image_manifest).expect("a manifest has only strings and numbers");
            let digest = Digest::of(&bytes);
            self.store.add_blob(&digest, &bytes[..])?;
            let names = references(one.repo_tags).into_iter().map(|name| (name, digest.clone()));
            images.push(self.store.add_image(&digest, &image_manifest, &names.collect::<Vec<_>>())?);
        }
        Ok(images)
    }

    fn import_file(&self, name: &str, media_type: &str) -> Result<Descriptor, Error> {
        let (digest, size) = DigestReader::new(self.open(name)?).finish().map_err(Error::Archive)?;
        if !self.store.has(&digest, media_type == manifest::MEDIA_TYPE_CONFIG) {
            self.store.add_blob(&digest, self.open(name)?)?;
        }
        let (media_type, annotations) = (media_type.to_owned(), Default::default());
        Ok(Descriptor { media_type, digest, size, annotations, platform: None })
    }
}

fn references(tags: Option<Vec<String>>) -> Vec<Reference> {
    tags.into_iter().flatten().filter_map(|tag| Reference::parse(&tag).ok()).collect()
}

fn blob_name(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Normalizes a path lexically. Only used as a map key, never to access a file.
fn normalize_path(path: &Path) -> PathBuf {
    let mut normalized = PathBuf::new();
    for component in path.components() {
        match component {
            std::path::Component::Normal(part) => normalized.push(part),
            std::path::Component::ParentDir => drop(normalized.pop()),
            _ => {}
        }
    }
    normalized
}

/// Writes images to an archive that docker, containerd and this crate can read.
pub fn export(store: &Store, names: &[String], output: impl Write) -> Result<(), Error> {
    let mut archive = tar::Builder::new(output);
    let mut written = std::collections::BTreeSet::new();
    let (mut entries, mut docker) = (Vec::new(), Vec::new());
    for name in names {
        let image = store.find(name)?.ok_or_else(|| Error::NotFound(name.clone()))?;
        let manifest = store.manifest(&image)?;
        let layer_digests = manifest.layers.iter().map(|layer| &layer.digest);
        for digest in [&image.manifest, &image.id].into_iter().chain(layer_digests) {
            if written.insert(digest.clone()) {
                let path = store.blob(digest);
                let mut file = File::open(&path).map_err(file_error("read", path))?;
                let length = file.metadata().map_err(Error::Export)?.len();
                append(&mut archive, &blob_name(digest), length, &mut file)?;
            }
        }
        let size = std::fs::metadata(store.blob(&image.manifest)).map_or(0, |found| found.len());
        let tags = image.tags.iter().map(Some);
        for tag in tags.chain(image.tags.is_empty().then_some(None)) {
            let annotations = tag
                .map(|tag| (manifest::ANNOTATION_IMAGE_NAME.to_owned(), tag.clone()))
                .into_iter()
                .collect();
            let media_type = manifest::MEDIA_TYPE_MANIFEST.to_owned();
            let digest = image.manifest.clone();
            entries.push(Descriptor { media_type, digest, size, annotations, platform: None });
        }
        docker.push(serde_json::json!({
            "Config": blob_name(&image.id),
            "RepoTags": image.tags,
            "Layers": manifest.layers.iter().map(|layer| blob_name(&layer.digest)).collect::<Vec<_>>(),
        }));
    }
    let index =
        Index { schema_version: 2, media_type: manifest::MEDIA_TYPE_INDEX.to_owned(), manifests: entries };
    let files = [
        ("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
        ("index.json", serde_json::to_vec(&index).expect("an index has only strings and numbers")),
        ("manifest.json", serde_json::to_vec(&docker).expect("a docker manifest has only strings")),
    ];
    for (name, bytes) in files {
        append(&mut archive, name, bytes.len() as u64, &mut &bytes[..])?;
    }
    // A write error, such as a full disk, may only appear when the buffer is flushed.
    archive.into_inner().and_then(|mut output| output.flush()).map_err(Error::Export)
}

fn append(
    archive: &mut tar::Builder<impl Write>,
    name: &str,
    size: u64,
    content: &mut dyn Read,
) -> Result<(), Error> {
    let mut header = tar::Header::new_ustar();
    header.set_size(size);
    header.set_mode(0o644);
    archive.append_data(&mut header, name, content).map_err(Error::Export)
}

#[cfg(test)]
mod tests;
