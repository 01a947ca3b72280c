//! What the authenticators are told at start.

use std::path::PathBuf;

use super::configuration::{AnonymousRule, ClaimRule, Configuration, Jwt, Prefixed};
use super::front_proxy::FrontProxy;
use super::{oidc, webhook};
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
    /// An AuthenticationConfiguration.
    pub configuration: Option<PathBuf>,
    /// One issuer, as flags tell of it.
    pub oidc: Option<Oidc>,
    /// `--anonymous-auth`, where it was given.
    pub anonymous: Option<bool>,
}

/// `--oidc-*`.
#[derive(Clone, Debug, Default)]
pub struct Oidc {
    pub issuer_url: String,
    pub client_id: String,
    /// PEM; empty trusts what the machine trusts.
    pub ca_pem: String,
    pub username_claim: String,
    /// Empty stands for the issuer's URL, except with e-mail addresses; `-` for none.
    pub username_prefix: String,
    pub groups_claim: String,
    pub groups_prefix: String,
    pub required_claims: Vec<(String, String)>,
    pub signing_algorithms: Vec<String>,
}

/// Issuers of tokens, the algorithms they may use, where requests may be anonymous, and what the file says of it.
type IssuerSettings = (Vec<Jwt>, Vec<String>, AnonymousAccess, Option<AnonymousRule>);

impl Options {
    /// What flags and file say together.
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

/// Where requests without a credential are let in at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AnonymousAccess {
    #[default]
    AllPaths,
    /// On these paths only.
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

/// Why authentication cannot be set up as asked. Names files and lines, never what is secret in them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("token file {path}, line {line}: {reason}")]
    TokenFile { path: PathBuf, line: usize, reason: &'static str },
    #[error("cannot use the certificate authority")]
    Authority(#[from] pki::Error),
    #[error("cannot reach out")]
    Https(#[from] https::ConfigError),
    #[error("{path} is not an authentication configuration: {reason}")]
    Configuration { path: PathBuf, reason: String },
    #[error("invalid authentication configuration: {0}")]
    Invalid(String),
    #[error("{flag}: {reason}")]
    Flag { flag: &'static str, reason: String },
}
