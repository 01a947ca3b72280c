//! Images: what they are called, where their pieces are kept, how they come from archives and registries.
//!
//! Everything is kept under one directory. Pieces are named by their digests and checked against them; a layer is
//! unpacked once and shared by all images that have it. What is in its place is complete: whatever is being fetched or
//! unpacked is elsewhere until it is, so that nothing needs repair after a crash. Knows nothing of containers. Read
//! [`Store`], then [`unpack::unpack`].

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

/// Why something could not be done with an image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {doing} {}", path.display())]
    File { doing: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{what} is not what its name says: it has the digest {actual}")]
    WrongDigest { what: Digest, actual: Digest },
    #[error("cannot read the archive")]
    Archive(#[source] std::io::Error),
    #[error("cannot write the archive")]
    Export(#[source] std::io::Error),
    #[error("the archive has no image: it needs an index.json or a manifest.json")]
    NoImage,
    #[error("the archive lacks {0}")]
    Missing(String),
    #[error("{what} cannot be understood")]
    Malformed { what: String, source: serde_json::Error },
    #[error("{what} cannot be used: {why}")]
    Unusable { what: String, why: String },
    #[error("there is nothing for linux/{} in {what}", manifest::architecture())]
    NoPlatform { what: String },
    #[error("cannot unpack the layer {layer}")]
    Unpack { layer: Digest, source: unpack::Error },
    #[error("there is no image {0}")]
    NotFound(String),
    #[error(transparent)]
    Reference(#[from] InvalidReference),
}

impl Error {
    /// Whether it says that something in the store is gone or not what it was.
    pub fn is_corrupt(&self) -> bool {
        match self {
            Error::File { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            Error::Malformed { .. } | Error::WrongDigest { .. } => true,
            _ => false,
        }
    }
}

/// Names the file that an error is about.
pub(crate) fn file_error(
    doing: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.into();
    move |source| Error::File { doing, path, source }
}
