//! Authentication of requests.
//!
//! Authenticators run in upstream's order: request headers of a front proxy, client certificate,
//! then bearer token (static token file, service accounts, bootstrap tokens, OIDC issuers,
//! webhook). The first success wins. A credential that no authenticator accepts is rejected; only
//! requests without credentials may be anonymous. Credentials never appear in logs or errors.

mod bootstrap_token;
mod configuration;
mod front_proxy;
mod oidc;
mod options;
mod peer;
mod publish;
mod review_cache;
mod static_tokens;
mod webhook;

use std::sync::Arc;

use api::Status;
use http::HeaderMap;
use jiff::Timestamp;
use parking_lot::RwLock;

use crate::access::User;
use crate::server::Server;
use crate::tokens::{self, header};

pub use front_proxy::FrontProxy;
pub use options::{AnonymousAccess, Error, Oidc, Options};
pub use peer::Peer;
pub use publish::{NAME, NAMESPACE, publish};
pub use review_cache::ReviewCache;
pub use webhook::Options as WebhookOptions;

/// All authenticators except service account tokens.
#[derive(Default)]
pub struct Authenticators {
    clients: Option<pki::ClientAuthority>,
    client_ca_pem: String,
    proxy: Option<front_proxy::FrontProxyAuthenticator>,
    static_tokens: static_tokens::StaticTokens,
    bootstrap_tokens: bool,
    issuers: RwLock<Arc<[oidc::Issuer]>>,
    /// The `anonymous` section of the configuration file, which cannot change at runtime.
    anonymous_rule: Option<configuration::AnonymousRule>,
    /// The issuers of service account tokens.
    service_account_issuers: Vec<String>,
    webhook: Option<webhook::Webhook>,
    anonymous: AnonymousAccess,
}

/// The user of a token, and the requested audiences it is valid for.
pub struct TokenOwner {
    pub user: User,
    pub audiences: Vec<String>,
}

/// Errors of the authenticators that recognized the token, in upstream's wording.
pub type AuthenticationErrors = Vec<String>;

impl Authenticators {
    /// `service_account_issuers` must not be reused by OIDC issuers.
    pub fn new(options: Options, service_account_issuers: &[String]) -> Result<Authenticators, Error> {
        let (jwt, algorithms, anonymous, anonymous_rule) = options.issuers(service_account_issuers)?;
        let issuers = jwt.into_iter().map(|jwt| oidc::Issuer::new(jwt, algorithms.clone()));
        let clients = pki::ClientAuthority::new(&options.client_ca_pem, "the client CA")?;
        let proxy = options.front_proxy.map(front_proxy::FrontProxyAuthenticator::new).transpose()?;
        let static_tokens = match &options.token_file {
            Some(path) => static_tokens::StaticTokens::read(path)?,
            None => Default::default(),
        };
        let webhook = options.webhook.as_ref().map(webhook::Webhook::new).transpose()?;
        Ok(Authenticators {
            clients: Some(clients),
            client_ca_pem: options.client_ca_pem,
            proxy,
            static_tokens,
            bootstrap_tokens: options.bootstrap_tokens,
            issuers: RwLock::new(issuers.collect::<Result<Vec<_>, _>>()?.into()),
            anonymous_rule,
            service_account_issuers: service_account_issuers.to_vec(),
            webhook,
            anonymous,
        })
    }

    /// Reloads the configuration file. Only the issuers may change; `anonymous` is fixed at
    /// startup.
    pub fn reload(&self, text: &str) -> Result<(), String> {
        let configuration = configuration::Configuration::parse(text)?;
        configuration.check(&self.service_account_issuers).map_err(|error| error.to_string())?;
        if configuration.anonymous != self.anonymous_rule {
            return Err("anonymous: Forbidden: changed from initial configuration file".to_owned());
        }
        let issuers = configuration.jwt.into_iter().map(|jwt| oidc::Issuer::new(jwt, oidc::all_algorithms()));
        let issuers: Vec<_> = issuers.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
        *self.issuers.write() = issuers.into();
        Ok(())
    }

    /// The CAs that are announced to clients in the TLS handshake.
    pub fn authorities(&self) -> Vec<pki::ClientAuthority> {
        let proxy = self.proxy.as_ref().map(|proxy| &proxy.authority);
        self.clients.iter().chain(proxy).cloned().collect()
    }
}

/// Authenticates a request and removes the credentials from its headers.
pub async fn authenticate(
    server: &Server,
    peer: &Peer,
    path: &str,
    headers: &mut HeaderMap,
) -> Result<User, Status> {
    let authenticators = &server.authenticators;
    let now = Timestamp::now();
    let token = header::take_token(headers);
    let proxied = authenticators.proxy.as_ref().filter(|_| peer.is_proxy(now));
    if let Some(user) = proxied.and_then(|proxy| proxy.headers.take_user(headers)) {
        return Ok(user.authenticated());
    }
    if let Some(user) = peer.user(now) {
        return Ok(user);
    }
    let errors = match token {
        Ok(None) if peer.is_rejected(now) => {
            vec!["client certificate is not signed by a known CA".into()]
        }
        Ok(None) if authenticators.anonymous.allows(path) => return Ok(User::anonymous()),
        Ok(None) => vec!["no credentials provided".into()],
        Ok(Some(token)) => match authenticate_token(server, &token, &server.tokens.audiences(), now).await {
            Ok(owner) => return Ok(owner.user),
            Err(errors) => errors,
        },
        Err(header::MalformedToken) => Vec::new(),
    };
    tracing::debug!(why = crate::rbac::aggregate_errors(&errors), "authentication failed");
    Err(Status::failure(401, "Unauthorized", "Unauthorized"))
}

/// Authenticates a bearer token, trying all token authenticators.
pub async fn authenticate_token(
    server: &Server,
    token: &str,
    requested_audiences: &[String],
    now: Timestamp,
) -> Result<TokenOwner, AuthenticationErrors> {
    let authenticators = &server.authenticators;
    // Authenticators that are not audience-aware are valid for the server's own audiences.
    let audiences: Vec<String> = server
        .tokens
        .audiences()
        .into_iter()
        .filter(|audience| requested_audiences.contains(audience))
        .collect();
    let with_server_audiences =
        |user: User| TokenOwner { user: user.authenticated(), audiences: audiences.clone() };
    let mut errors = AuthenticationErrors::new();
    if !audiences.is_empty()
        && let Some(user) = authenticators.static_tokens.authenticate_token(token)
    {
        return Ok(with_server_audiences(user.clone()));
    }
    match tokens::authenticate(server, token, requested_audiences, now).await {
        Ok((user, audiences)) => return Ok(TokenOwner { user, audiences }),
        Err(tokens::TokenError::Unknown) => {}
        Err(reason) => errors.push(reason.to_string()),
    }
    if authenticators.bootstrap_tokens && !audiences.is_empty() {
        match bootstrap_token::authenticate_token(server, token, now).await {
            Ok(Some(user)) => return Ok(with_server_audiences(user)),
            Ok(None) => {}
            Err(status) => errors.push(status.message),
        }
    }
    let issuers = authenticators.issuers.read().clone();
    for issuer in issuers.iter().filter(|_| !audiences.is_empty()) {
        match issuer.authenticate_token(token, now).await {
            Ok(Some(user)) => return Ok(with_server_audiences(user)),
            Ok(None) => {}
            Err(reason) => errors.push(reason),
        }
    }
    if let Some(webhook) = &authenticators.webhook {
        match webhook.authenticate_token(token, requested_audiences, &server.tokens.audiences()).await {
            Ok(Some(owner)) => return Ok(TokenOwner { user: owner.user.authenticated(), ..owner }),
            Ok(None) => {}
            // The error is the webhook's text and may contain the token.
            Err(reason) => errors.push(reason.replace(token, "…")),
        }
    }
    Err(errors)
}
