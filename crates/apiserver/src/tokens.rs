//! Service account tokens: authentication, TokenRequest, TokenReview, and the OIDC discovery
//! documents for external verifiers.
//!
//! A token is only valid together with the objects that it references: the service account and the
//! bound object must exist in the latest state of the store, so deleting one of them revokes the
//! token at once. Tokens never appear in logs or errors.

mod claims;
pub mod header;
mod issue;
mod legacy;
#[cfg(test)]
mod tests;

use api::Status;
use api::json::JsonExt as _;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Response};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::ServiceAccountTokenConfig;
use crate::access::User;
use crate::authentication::{self, TokenOwner};
use crate::body::Body;
use crate::options::ResourceVersionMatch;
use crate::request::Target;
use crate::server::Server;

use claims::{Claims, Reference, TokenValidity};
pub use issue::issue;

/// The signing keys and issuers of service account tokens.
pub struct Tokens {
    keys: pki::token::Keys,
    issuers: Vec<String>,
    audiences: Vec<String>,
    /// The discovery document and the JWKS, as served.
    configuration: String,
    key_set: String,
    max_expiration_seconds: Option<i64>,
    extend_expiration: bool,
}

/// Why a token is rejected, worded as upstream. Values come from claims that this server has
/// signed.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("invalid bearer token")]
    Unknown,
    #[error("invalid signature, no keys found")]
    UnknownKey,
    #[error("go-jose/go-jose: error in cryptographic primitive")]
    Signature,
    #[error("token audiences {} is invalid for the target audiences {}", quoted_list(.token), quoted_list(.expected))]
    Audience { token: Vec<String>, expected: Vec<String> },
    #[error("service account token has expired")]
    Expired,
    #[error("service account token is not valid yet")]
    NotYetValid,
    #[error("service account token is issued in the future")]
    IssuedInFuture,
    #[error("{}", .0.message)]
    Server(Box<Status>),
    #[error("service account UID ({found}) does not match claim ({claimed})")]
    Account { found: String, claimed: String },
    #[error("service account {0}/{1} has been deleted")]
    AccountDeleted(String, String),
    #[error("service account token has been invalidated")]
    Invalidated,
    #[error("Token has been invalidated")]
    SecretNotFound,
    #[error("Token does not match server's copy")]
    TokenMismatch,
    #[error("ServiceAccount UID ({found}) does not match claim ({claimed})")]
    LegacyAccount { found: String, claimed: String },
    #[error("ServiceAccount {0}/{1} has been deleted")]
    LegacyAccountDeleted(String, String),
    #[error(
        "the token in secret {secret} for service account {account} has been marked invalid. Use tokens from the TokenRequest API or manually created secret-based tokens, or remove the 'kubernetes.io/legacy-token-invalid-since' label from the secret to temporarily allow use of this token"
    )]
    InvalidLabel { secret: String, account: String },
    #[error("{kind} UID ({found}) does not match service account {kind} ref claim ({claimed})")]
    Bound { kind: &'static str, found: String, claimed: String },
}

impl Tokens {
    /// `authority` is the external address of this server: `host:port`.
    pub fn new(options: ServiceAccountTokenConfig, authority: &str) -> Tokens {
        let ServiceAccountTokenConfig {
            keys,
            issuers,
            audiences,
            key_set_url,
            max_expiration_seconds: max_seconds,
            extend_expiration: extend,
        } = options;
        let audiences = if audiences.is_empty() { issuers.clone() } else { audiences };
        let (key_set, algorithms) = keys.key_set();
        // In the order of upstream's struct fields.
        let configuration = format!(
            "{{\"issuer\":{},\"jwks_uri\":{},\"response_types_supported\":[\"id_token\"],\
             \"subject_types_supported\":[\"public\"],\"id_token_signing_alg_values_supported\":{}}}",
            json!(issuers.first()),
            json!(key_set_url.unwrap_or_else(|| format!("https://{authority}/openid/v1/jwks"))),
            json!(algorithms)
        );
        Tokens {
            keys,
            issuers,
            audiences,
            configuration,
            key_set,
            max_expiration_seconds: max_seconds,
            extend_expiration: extend,
        }
    }

    /// The audiences that tokens need for this server.
    pub fn audiences(&self) -> Vec<String> {
        self.audiences.clone()
    }

    /// The issuer of new tokens.
    fn issuer(&self) -> &str {
        self.issuers.first().map_or("", String::as_str)
    }
}

/// The status of a TokenReview.
pub async fn review(server: &Server, spec: &Value, now: Timestamp) -> Value {
    let mut expected: Vec<String> =
        spec.items("audiences").iter().filter_map(Value::as_str).map(str::to_owned).collect();
    if expected.is_empty() {
        expected = server.tokens.audiences();
    }
    // A token that is no valid header value cannot be a credential.
    let sent = HeaderValue::from_str(&format!("Bearer {}", spec.text("token"))).ok();
    let owner = match sent.as_ref().and_then(header::bearer_token) {
        Some(token) => authentication::authenticate_token(server, &token, &expected, now).await,
        None => Err(Vec::new()),
    };
    match owner {
        Ok(TokenOwner { user, audiences }) => {
            json!({"authenticated": true, "user": user_info(&user), "audiences": audiences})
        }
        // Upstream reports the generic error first, then the error of each authenticator.
        Err(mut errors) => {
            errors.insert(0, TokenError::Unknown.to_string());
            json!({"user": {}, "error": crate::rbac::aggregate_errors(&errors)})
        }
    }
}

/// A user as `authentication.k8s.io` UserInfo.
pub fn user_info(user: &User) -> Value {
    let mut info = json!({"username": user.name, "groups": user.groups});
    if !user.uid.is_empty() {
        info.set("uid", user.uid.clone());
    }
    if !user.extra.is_empty() {
        info.set("extra", json!(user.extra));
    }
    info
}

/// The OIDC discovery documents.
pub fn handle_discovery(server: &Server, path: &str) -> Option<Response<Body>> {
    let (content_type, text) = match path {
        "/.well-known/openid-configuration" => ("application/json", &server.tokens.configuration),
        "/openid/v1/jwks" => ("application/jwk-set+json", &server.tokens.key_set),
        _ => return None,
    };
    let mut response = Response::new(Body::from(bytes::Bytes::from(text.clone())));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("public, max-age=3600"));
    Some(response)
}

/// The service account of a token, and which of the expected audiences the token has.
pub async fn authenticate(
    server: &Server,
    token: &str,
    expected: &[String],
    now: Timestamp,
) -> Result<(User, Vec<String>), TokenError> {
    let tokens = &server.tokens;
    let unverified = pki::token::unverified_claims(token).ok_or(TokenError::Unknown)?;
    let is_legacy = unverified.text("iss") == legacy::ISSUER;
    if !is_legacy && !tokens.issuers.iter().any(|issuer| issuer == unverified.text("iss")) {
        return Err(TokenError::Unknown);
    }
    let claims = tokens.keys.verify(token).map_err(|error| match error {
        pki::token::TokenSignatureError::Malformed => TokenError::Unknown,
        pki::token::TokenSignatureError::UnknownKey => TokenError::UnknownKey,
        pki::token::TokenSignatureError::Signature => TokenError::Signature,
    })?;
    if is_legacy {
        return legacy::authenticate(server, token, &claims, expected, now).await;
    }
    let claims: Claims = serde_json::from_value(claims).map_err(|_| TokenError::Unknown)?;
    let audiences: Vec<String> =
        claims.audiences.iter().filter(|audience| expected.contains(audience)).cloned().collect();
    if audiences.is_empty() {
        return Err(TokenError::Audience { token: claims.audiences, expected: expected.to_vec() });
    }
    match claims.validity(now) {
        TokenValidity::NotYetValid => return Err(TokenError::NotYetValid),
        TokenValidity::Expired => return Err(TokenError::Expired),
        TokenValidity::IssuedInFuture => return Err(TokenError::IssuedInFuture),
        TokenValidity::Valid => {}
    }
    server
        .wait_until_fresh(ResourceVersionMatch::MostRecent)
        .await
        .map_err(|status| TokenError::Server(Box::new(status)))?;
    check_account(server, &claims, now)?;
    check_bound(server, &claims, now)?;
    Ok((claims.user(), audiences))
}

fn check_account(server: &Server, claims: &Claims, now: Timestamp) -> Result<(), TokenError> {
    let (bound, account) = (&claims.kubernetes, &claims.kubernetes.serviceaccount);
    let target = core_target("serviceaccounts", &bound.namespace, &account.name);
    let Some(found) = BoundObject::of(server, &target) else {
        return Err(TokenError::Server(Box::new(target.not_found())));
    };
    if found.uid != account.uid {
        return Err(TokenError::Account { found: found.uid, claimed: account.uid.clone() });
    }
    if found.is_deleted(now) {
        return Err(TokenError::AccountDeleted(bound.namespace.clone(), account.name.clone()));
    }
    Ok(())
}

/// Checks that the bound object still exists. The node of a pod is informational and not checked.
fn check_bound(server: &Server, claims: &Claims, now: Timestamp) -> Result<(), TokenError> {
    let bound = &claims.kubernetes;
    let node = bound.node.as_ref().filter(|_| bound.pod.is_none());
    let references = [
        ("secret", "secrets", bound.namespace.as_str(), bound.secret.as_ref()),
        ("pod", "pods", bound.namespace.as_str(), bound.pod.as_ref()),
        ("node", "nodes", "", node),
    ];
    for (kind, plural, namespace, reference) in references {
        let Some(Reference { name, uid }) = reference else { continue };
        let found =
            BoundObject::of(server, &core_target(plural, namespace, name)).ok_or(TokenError::Invalidated)?;
        if found.uid != *uid {
            return Err(TokenError::Bound { kind, found: found.uid, claimed: uid.clone() });
        }
        if found.is_deleted(now) {
            return Err(TokenError::Invalidated);
        }
    }
    Ok(())
}

/// The UID and deletion time of an object that a token references.
struct BoundObject {
    uid: String,
    deleted: Option<Timestamp>,
}

impl BoundObject {
    fn of(server: &Server, target: &Target) -> Option<BoundObject> {
        let value = server.find(target)?.value();
        let metadata = value.at("metadata");
        let deleted = metadata.at("deletionTimestamp").as_str();
        Some(BoundObject {
            uid: metadata.text("uid").to_owned(),
            // An invalid time counts as long ago.
            deleted: deleted.map(|text| api::time::parse_rfc3339(text).unwrap_or(Timestamp::UNIX_EPOCH)),
        })
    }

    /// Deleted longer ago than the clock skew allows.
    fn is_deleted(&self, now: Timestamp) -> bool {
        self.deleted.is_some_and(|at| at.as_second() + claims::CLOCK_SKEW_SECONDS < now.as_second())
    }
}

fn core_target(plural: &str, namespace: &str, name: &str) -> Target {
    let resource = api::resource_table::find_resource("", "v1", plural)
        .expect("core resources are in the resource table");
    Target { name: name.to_owned(), ..Target::collection(resource, namespace) }
}

/// Formats a list like Go's `%q`.
fn quoted_list(texts: &[String]) -> String {
    let quoted: Vec<String> = texts.iter().map(|text| api::field::quote(text)).collect();
    format!("[{}]", quoted.join(" "))
}
