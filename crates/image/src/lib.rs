//! Container images: references, the content store, OCI and docker archives, and pulls from
//! registries.
//!
//! All content is in one directory. Blobs are named by their digests and verified against them. A
//! layer is unpacked once and shared by all images that contain it. Content is fetched and unpacked
//! in `tmp/` and renamed to its final path when it is complete, so no repair is needed after a
//! crash. This crate knows nothing about containers. Start with [`Store`], then [`unpack::unpack`].
//!
//! Counterpart upstream: containerd's content store, snapshotter and `core/remotes/docker`.

mod archive;
mod digest;
mod keyed_mutex;
mod manifest;
pub mod pull;
mod reference;
mod store;
pub mod unpack;

pub use archive::{export, import};
pub use digest::Digest;
pub use manifest::{ImageConfig, ImageProcess};
pub use reference::{InvalidReference, Reference};
pub use store::{Image, Store};

use std::path::PathBuf;

/// An error of an operation on an image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {operation} {}", path.display())]
    File { operation: &'static str, path: PathBuf, source: std::io::Error },
    #[error("digest mismatch for {what}: content has the digest {actual}")]
    WrongDigest { what: Digest, actual: Digest },
    #[error("cannot read the archive")]
    Archive(#[source] std::io::Error),
    #[error("cannot write the archive")]
    Export(#[source] std::io::Error),
    #[error("the archive has no image: it needs an index.json or a manifest.json")]
    NoImage,
    #[error("file missing in the archive: {0}")]
    Missing(String),
    #[error("cannot parse {what}")]
    Malformed { what: String, source: serde_json::Error },
    #[error("{what} cannot be used: {reason}")]
    Unusable { what: String, reason: String },
    #[error("no manifest for linux/{} in {what}", manifest::architecture())]
    NoPlatform { what: String },
    #[error("cannot unpack the layer {layer}")]
    Unpack { layer: Digest, source: unpack::Error },
    #[error("there is no image {0}")]
    NotFound(String),
    #[error(transparent)]
    Reference(#[from] InvalidReference),
}

impl Error {
    /// Whether content of the store is missing or does not match its digest.
    pub fn is_corrupt(&self) -> bool {
        match self {
            Error::File { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            Error::Malformed { .. } | Error::WrongDigest { .. } => true,
            _ => false,
        }
    }
}

/// Adds the operation and the path to an I/O error.
pub(crate) fn file_error(
    operation: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.into();
    move |source| Error::File { operation, path, source }
}
