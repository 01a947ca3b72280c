//! What the authenticators are told at start.

use std::path::PathBuf;

use super::front_proxy::FrontProxy;
use super::webhook;
use crate::https;

#[derive(Default)]
pub struct Options {
    /// The authorities of client certificates, PEM.
    pub client_ca_pem: String,
    pub front_proxy: Option<FrontProxy>,
    /// A CSV file of tokens and their users.
    pub token_file: Option<PathBuf>,
    /// Whether Secrets `bootstrap-token-*` let people in.
    pub bootstrap_tokens: bool,
    pub webhook: Option<webhook::Options>,
    pub anonymous: Anonymous,
}

/// Where requests without a credential are let in at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Anonymous {
    #[default]
    Everywhere,
    /// On these paths only.
    Paths(Vec<String>),
    Nowhere,
}

impl Anonymous {
    pub fn allows(&self, path: &str) -> bool {
        match self {
            Anonymous::Everywhere => true,
            Anonymous::Paths(paths) => paths.iter().any(|allowed| allowed == path),
            Anonymous::Nowhere => false,
        }
    }
}

/// Why authentication cannot be set up as asked. Names files and lines, never what is secret in them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("token file {path}, line {line}: {why}")]
    TokenFile { path: PathBuf, line: usize, why: &'static str },
    #[error("cannot use the certificate authority")]
    Authority(#[from] pki::Error),
    #[error("cannot use the webhook")]
    Webhook(#[from] https::ConfigError),
    #[error("{flag}: {why}")]
    Flag { flag: &'static str, why: String },
}
