//! The authorizer chain: Node, RBAC and webhooks in the configured order.
//!
//! The first authorizer that allows or denies decides. `system:masters` bypasses the chain. Without
//! webhooks all decisions are made from memory.

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

/// The authorizers in order.
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

/// The `--authorization-*` flags.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// `--authorization-config`.
    pub configuration: Option<PathBuf>,
    /// `--authorization-mode`.
    pub modes: Vec<String>,
    pub webhook: Option<WebhookOptions>,
}

/// The configuration of a webhook authorizer.
#[derive(Clone, Debug)]
pub struct WebhookOptions {
    pub name: String,
    pub kubeconfig: PathBuf,
    /// `v1` or `v1beta1`.
    pub version: String,
    /// Cache TTLs; zero disables caching.
    pub authorized: Duration,
    pub unauthorized: Duration,
    pub timeout: Duration,
    /// Match conditions: the webhook is only called if all hold.
    pub conditions: Vec<String>,
    /// `failurePolicy: Deny`; otherwise an error is no opinion.
    pub deny_on_failure: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a valid AuthorizationConfiguration: {reason}")]
    Configuration { path: PathBuf, reason: String },
    #[error("{0}")]
    Flags(String),
    #[error("invalid client configuration of the authorization webhook")]
    Webhook(#[from] https::ConfigError),
}

/// The decision of an authorizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub allowed: bool,
    /// Explicitly denied: later authorizers are not called.
    pub denied: bool,
    pub reason: String,
    /// Errors during evaluation.
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

    /// Node and RBAC must each be in the chain exactly once.
    fn validate(self) -> Result<AuthorizerChain, String> {
        let count = |predicate: fn(&Step) -> bool| self.steps.iter().filter(|step| predicate(step)).count();
        let (nodes, roles) =
            (count(|step| matches!(step, Step::Node)), count(|step| matches!(step, Step::Rbac)));
        if (nodes, roles) == (1, 1) {
            Ok(self)
        } else {
            Err("authorization modes Node and RBAC are required exactly once each".to_owned())
        }
    }
}
