//! The cluster's certificates: authorities, the leaves they sign, and what both look like on disk and on
//! the wire; certificates for keys of others, by their requests ([`Request`]); and the keys that sign service accounts' tokens ([`token`]).
//!
//! Owns key material and nothing else: it knows no API objects, opens no sockets and reads no clock (the
//! time is an argument). Every key is ECDSA P-256; every file is written whole, mode 0600, in a directory
//! of mode 0700. Read [`Authority`] and [`load_or_issue`] first.

mod authority;
mod client_certificate;
mod csr;
mod der;
mod file;
mod identity;
pub mod join;
pub mod jwk;
mod kubeconfig;
mod leaf;
mod request;
mod tls;
pub mod token;

use std::{io, path::PathBuf};

pub use authority::Authority;
pub use client_certificate::{
    ClientCertificate, client_tls_config, server_verifier, server_verifier_with_self_signed,
};
pub use csr::{CsrKeyPair, create_csr, load_certificate, store_certificate};
pub use file::write_file;
pub use identity::{Identity, identity_of};
pub use kubeconfig::kubeconfig;
pub use leaf::{CertKeyPair, Leaf, Usage, expiry, load_or_issue, self_signed};
pub use request::Request;
pub use tls::{
    ClientAuthority, ClientTls, ServingCertificate, certified_key, insecure_verifier, server_config,
    unverified,
};

/// Why a certificate could not be made, read or used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("{cert} has no private key beside it")]
    KeyMissing { cert: PathBuf },
    #[error("{cert} does not belong to the private key beside it")]
    KeyMismatch { cert: PathBuf },
    #[error("the certificate authority {cert} is valid from {not_before} to {not_after} only")]
    Expired { cert: PathBuf, not_before: jiff::Timestamp, not_after: jiff::Timestamp },
    #[error(
        "a token for joining is written K10<digest of the authority>::<id>.<secret>, as the server's own is"
    )]
    Token,
    #[error("{what} is not a certificate or key")]
    Malformed { what: String },
    #[error("a certificate can name one organization, {common_name:?} asks for {count}")]
    Organizations { common_name: String, count: usize },
    #[error("the certificate names no user: its subject has no common name")]
    NoCommonName,
    #[error("cannot sign a certificate for {common_name:?}")]
    Sign { common_name: String, source: rcgen::Error },
    #[error("cannot make a private key")]
    Key { source: rcgen::Error },
    #[error("cannot make or use a signing key: no randomness")]
    Randomness,
    #[error("cannot set up TLS")]
    Tls { source: rustls::Error },
    #[error("cannot set up the verification of client certificates")]
    ClientAuthority { source: rustls::server::VerifierBuilderError },
}
