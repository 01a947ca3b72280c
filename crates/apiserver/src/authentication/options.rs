//! Authentication options, from flags.

use std::path::PathBuf;

use super::configuration::{AnonymousRule, ClaimRule, Configuration, Jwt, Prefixed};
use super::front_proxy::FrontProxy;
use super::{oidc, webhook};
use crate::https;

#[derive(Default)]
pub struct Options {
    /// PEM of the CAs of client certificates (`--client-ca-file`).
    pub client_ca_pem: String,
    pub front_proxy: Option<FrontProxy>,
    /// `--token-auth-file`.
    pub token_file: Option<PathBuf>,
    /// `--enable-bootstrap-token-auth`.
    pub bootstrap_tokens: bool,
    pub webhook: Option<webhook::Options>,
    /// `--authentication-config`.
    pub configuration: Option<PathBuf>,
    /// `--oidc-*`.
    pub oidc: Option<Oidc>,
    /// `--anonymous-auth`, if given.
    pub anonymous: Option<bool>,
}

/// `--oidc-*`.
#[derive(Clone, Debug, Default)]
pub struct Oidc {
    pub issuer_url: String,
    pub client_id: String,
    /// PEM; empty uses the system's trust store.
    pub ca_pem: String,
    pub username_claim: String,
    /// Empty means the issuer URL and `#`, or no prefix if the claim is `email`; `-` means no
    /// prefix.
    pub username_prefix: String,
    pub groups_claim: String,
    pub groups_prefix: String,
    pub required_claims: Vec<(String, String)>,
    pub signing_algorithms: Vec<String>,
}

/// Issuers, allowed signing algorithms, anonymous access, and the `anonymous` section of the file.
type IssuerSettings = (Vec<Jwt>, Vec<String>, AnonymousAccess, Option<AnonymousRule>);

impl Options {
    /// Merges flags and configuration file.
    pub(super) fn issuers(&self, service_account_issuers: &[String]) -> Result<IssuerSettings, Error> {
        let mut configuration = match &self.configuration {
            Some(path) => Configuration::read(path)?,
            None => Configuration::default(),
        };
        let mut algorithms = oidc::all_algorithms();
        if let Some(flags) = &self.oidc {
            if self.configuration.is_some() {
                let reason = "authentication-config file and oidc-* flags are mutually exclusive".to_owned();
                return Err(Error::Flag { flag: "authentication-config", reason });
            }
            algorithms = oidc::algorithms(&flags.signing_algorithms)?;
            configuration.jwt.push(flags.jwt());
        }
        configuration.check(service_account_issuers)?;
        let anonymous = match (&configuration.anonymous, self.anonymous) {
            (Some(_), Some(_)) => {
                let reason = "--anonymous-auth flag cannot be set when anonymous field is configured in authentication configuration file".to_owned();
                return Err(Error::Flag { flag: "anonymous", reason });
            }
            (Some(rule), None) => rule.to_anonymous_access(),
            (None, Some(false)) => AnonymousAccess::Disabled,
            (None, _) => AnonymousAccess::AllPaths,
        };
        Ok((configuration.jwt, algorithms, anonymous, configuration.anonymous))
    }
}

impl Oidc {
    fn jwt(&self) -> Jwt {
        let prefix = match self.username_prefix.as_str() {
            "-" => String::new(),
            "" if self.username_claim != "email" => format!("{}#", self.issuer_url),
            prefix => prefix.to_owned(),
        };
        let rules = self.required_claims.iter().map(|(claim, value)| ClaimRule::required(claim, value));
        let mut jwt = Jwt { claim_validation_rules: rules.collect(), ..Jwt::default() };
        jwt.issuer.url = self.issuer_url.clone();
        jwt.issuer.audiences = vec![self.client_id.clone()];
        jwt.issuer.certificate_authority = self.ca_pem.clone();
        jwt.claim_mappings.username = Prefixed::new(&self.username_claim, &prefix);
        if !self.groups_claim.is_empty() {
            jwt.claim_mappings.groups = Prefixed::new(&self.groups_claim, &self.groups_prefix);
        }
        jwt
    }
}

/// Which paths allow anonymous requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AnonymousAccess {
    #[default]
    AllPaths,
    /// Only on these paths.
    Paths(Vec<String>),
    Disabled,
}

impl AnonymousAccess {
    pub fn allows(&self, path: &str) -> bool {
        match self {
            AnonymousAccess::AllPaths => true,
            AnonymousAccess::Paths(paths) => paths.iter().any(|allowed| allowed == path),
            AnonymousAccess::Disabled => false,
        }
    }
}

/// Configuration errors. They name files and lines, but never contain credentials.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("token file {path}, line {line}: {reason}")]
    TokenFile { path: PathBuf, line: usize, reason: &'static str },
    #[error("invalid certificate authority")]
    Authority(#[from] pki::Error),
    #[error("invalid client configuration of an authentication endpoint")]
    Https(#[from] https::ConfigError),
    #[error("{path} is not a valid AuthenticationConfiguration: {reason}")]
    Configuration { path: PathBuf, reason: String },
    #[error("invalid authentication configuration: {0}")]
    Invalid(String),
    #[error("{flag}: {reason}")]
    Flag { flag: &'static str, reason: String },
}
