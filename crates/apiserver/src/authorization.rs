//! Who is asked whether a request is allowed, in which order: the rules of nodes, the roles (`rbac`), and
//! webhooks beside them.
//!
//! The first who allows or denies settles it; members of `system:masters` are never asked about. Without
//! webhooks everything is decided from memory.

mod conditions;
mod configuration;
#[cfg(test)]
mod tests;
mod webhook;

use std::path::PathBuf;
use std::time::Duration;

use crate::https;

pub use configuration::chain as configured_chain;
pub use webhook::Webhook;

/// The authorizers in their order.
pub struct AuthorizerChain {
    pub steps: Vec<Step>,
}

pub enum Step {
    Node,
    Rbac,
    Webhook(Box<Webhook>),
}

impl Default for AuthorizerChain {
    fn default() -> AuthorizerChain {
        AuthorizerChain { steps: vec![Step::Node, Step::Rbac] }
    }
}

impl AuthorizerChain {
    pub fn has_webhooks(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Webhook(_)))
    }
}

/// What the flags say about authorization.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// An AuthorizationConfiguration.
    pub configuration: Option<PathBuf>,
    /// `--authorization-mode`.
    pub modes: Vec<String>,
    pub webhook: Option<WebhookOptions>,
}

/// How a webhook is asked.
#[derive(Clone, Debug)]
pub struct WebhookOptions {
    pub name: String,
    pub kubeconfig: PathBuf,
    /// `v1` or `v1beta1`.
    pub version: String,
    /// How long answers are kept; zero keeps none.
    pub authorized: Duration,
    pub unauthorized: Duration,
    pub timeout: Duration,
    /// Expressions that must hold for the webhook to be asked.
    pub conditions: Vec<String>,
    /// Whether a failure denies the request, or leaves it to others.
    pub deny_on_failure: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not an authorization configuration: {reason}")]
    Configuration { path: PathBuf, reason: String },
    #[error("{0}")]
    Flags(String),
    #[error("cannot reach the authorization webhook")]
    Webhook(#[from] https::ConfigError),
}

/// What came out of asking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub allowed: bool,
    /// Somebody spoke against it, so that nobody further was asked.
    pub denied: bool,
    pub reason: String,
    /// What went wrong while asking.
    pub evaluation_error: String,
}

impl AuthorizerChain {
    pub fn new(options: &Options) -> Result<AuthorizerChain, Error> {
        let flags = !options.modes.is_empty() || options.webhook.is_some();
        if let Some(path) = &options.configuration {
            if flags {
                return Err(Error::Flags("--authorization-config can not be specified when --authorization-mode or --authorization-webhook-* flags are defined".into()));
            }
            return configuration::read(path);
        }
        if options.modes.is_empty() && options.webhook.is_none() {
            return Ok(AuthorizerChain::default());
        }
        let mut steps = Vec::new();
        for mode in &options.modes {
            let step = match (mode.as_str(), &options.webhook) {
                ("Node", _) => Step::Node,
                ("RBAC", _) => Step::Rbac,
                ("Webhook", Some(webhook)) => Step::Webhook(Box::new(Webhook::new(webhook)?)),
                ("Webhook", None) => {
                    let reason = "authorization-mode Webhook's authorization config file not passed";
                    return Err(Error::Flags(reason.to_owned()));
                }
                (other, _) => {
                    let reason = format!("authorization-mode {other:?} is not one of Node, RBAC and Webhook");
                    return Err(Error::Flags(reason));
                }
            };
            steps.push(step);
        }
        let chain = AuthorizerChain { steps };
        if options.webhook.is_some() && !chain.has_webhooks() {
            let reason = "cannot specify --authorization-webhook-config-file without mode Webhook";
            return Err(Error::Flags(reason.to_owned()));
        }
        chain.validate().map_err(Error::Flags)
    }

    /// Neither nodes' rules nor roles can be left out, and neither is asked twice.
    fn validate(self) -> Result<AuthorizerChain, String> {
        let count = |predicate: fn(&Step) -> bool| self.steps.iter().filter(|step| predicate(step)).count();
        let (nodes, roles) =
            (count(|step| matches!(step, Step::Node)), count(|step| matches!(step, Step::Rbac)));
        if (nodes, roles) == (1, 1) {
            Ok(self)
        } else {
            Err("authorization needs Node and RBAC, each once; they cannot be switched off".to_owned())
        }
    }
}
