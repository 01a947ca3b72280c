//! The cluster's certificates and keys: certificate authorities, the certificates they sign (also for
//! keys of others, by certificate signing requests, see [`Request`]), TLS configurations, and the keys
//! that sign service account tokens ([`token`]).
//!
//! Owns key material and nothing else: it does not know API objects, opens no sockets and does not read
//! the clock (the time is an argument). Every generated key is ECDSA P-256. Files are written
//! atomically with mode 0600, in directories of mode 0700. Start reading at [`Authority`] and
//! [`load_or_issue`].

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

/// An error from creating, reading or using a certificate or key.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("the private key of {cert} is missing")]
    KeyMissing { cert: PathBuf },
    #[error("{cert} does not match its private key")]
    KeyMismatch { cert: PathBuf },
    #[error("the certificate authority {cert} is valid only from {not_before} to {not_after}")]
    Expired { cert: PathBuf, not_before: jiff::Timestamp, not_after: jiff::Timestamp },
    #[error("invalid join token: must have the form K10<CA digest>::<id>.<secret>")]
    Token,
    #[error("cannot parse {what}: invalid certificate or key")]
    Malformed { what: String },
    #[error("a certificate can have only one organization, {common_name:?} requests {count}")]
    Organizations { common_name: String, count: usize },
    #[error("the client certificate has no common name")]
    NoCommonName,
    #[error("cannot sign a certificate for {common_name:?}")]
    Sign { common_name: String, source: rcgen::Error },
    #[error("cannot generate a private key")]
    Key { source: rcgen::Error },
    #[error("cannot generate or use a signing key: no random bytes available")]
    Randomness,
    #[error("cannot set up TLS")]
    Tls { source: rustls::Error },
    #[error("cannot set up the verification of client certificates")]
    ClientAuthority { source: rustls::server::VerifierBuilderError },
}
