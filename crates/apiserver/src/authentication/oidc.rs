//! OpenID Connect tokens.
//!
//! The keys of an issuer are fetched when its first token arrives, and again when a token is signed
//! by an unknown key, but at most every ten seconds: tokens are untrusted until verified and must
//! not cause traffic to the issuer.

mod claims;
pub mod expressions;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use api::field::quote;
use api::json::JsonExt as _;
use jiff::Timestamp;
use parking_lot::RwLock;
use pki::jwk::{ALGORITHMS, KeySet, Unverified};
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::Error;
use super::configuration::Jwt;
use crate::access::User;
use crate::https::{self, Credentials, HttpsClient};

const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(10);
/// Tolerated clock skew for `nbf`.
const NOT_BEFORE_SKEW_SECONDS: i64 = 5 * 60;
const WELL_KNOWN: &str = "/.well-known/openid-configuration";

/// A configured issuer.
pub struct Issuer {
    jwt: Jwt,
    claim_expressions: expressions::ClaimExpressions,
    algorithms: Vec<String>,
    discovery: HttpsClient,
    /// `None` until the first fetch.
    keys: RwLock<Option<Arc<KeySet>>>,
    fetch_state: Mutex<KeyFetchState>,
}

#[derive(Default)]
struct KeyFetchState {
    /// Client for the `jwks_uri` of the discovery document.
    key_set: Option<HttpsClient>,
    last: Option<Instant>,
}

/// Validates `--oidc-signing-algs`.
pub fn algorithms(named: &[String]) -> Result<Vec<String>, Error> {
    for name in named {
        if !ALGORITHMS.contains(&name.as_str()) {
            let reason = format!("oidc: unsupported signing alg: {}", quote(name));
            return Err(Error::Flag { flag: "oidc-signing-algs", reason });
        }
    }
    Ok(if named.is_empty() { vec!["RS256".to_owned()] } else { named.to_vec() })
}

pub fn all_algorithms() -> Vec<String> {
    ALGORITHMS.map(str::to_owned).to_vec()
}

impl Issuer {
    pub fn new(jwt: Jwt, algorithms: Vec<String>) -> Result<Issuer, Error> {
        let discovery = match jwt.issuer.discovery_url.as_deref().filter(|url| !url.is_empty()) {
            Some(url) => url.to_owned(),
            None => format!("{}{WELL_KNOWN}", jwt.issuer.url.trim_end_matches('/')),
        };
        // Errors in expressions were reported when the configuration was validated.
        let claim_expressions = expressions::ClaimExpressions::new(&jwt, "jwt", &mut Vec::new());
        Ok(Issuer {
            claim_expressions,
            discovery: HttpsClient::new(&discovery, credentials(&jwt))?,
            jwt,
            algorithms,
            keys: RwLock::default(),
            fetch_state: Mutex::default(),
        })
    }

    /// The user of a valid token; `None` if another issuer signed it.
    pub async fn authenticate_token(&self, token: &str, now: Timestamp) -> Result<Option<User>, String> {
        let Some(token) = Unverified::parse(token) else { return Ok(None) };
        if issuer_of(&token.claims) != self.jwt.issuer.url {
            return Ok(None);
        }
        self.verify(&token, now).await?;
        claims::user_from_claims(&self.jwt, &self.claim_expressions, &token.claims).map(Some)
    }

    async fn verify(&self, token: &Unverified<'_>, now: Timestamp) -> Result<(), String> {
        let verify_error = |reason: String| format!("oidc: verify token: {reason}");
        self.check_times_and_audience(&token.claims, now).map_err(verify_error)?;
        if !self.algorithms.contains(&token.algorithm) {
            return Err(verify_error(format!(
                "oidc: id token signed with unsupported algorithm, expected {} got {}",
                list(&self.algorithms),
                quote(&token.algorithm)
            )));
        }
        let keys = self.keys.read().clone();
        if keys.as_ref().is_some_and(|keys| keys.signed(token)) {
            return Ok(());
        }
        let known = keys.is_some();
        match self.fetch(keys).await {
            Ok(keys) if keys.signed(token) => Ok(()),
            Err(error) if known => {
                Err(verify_error(format!("failed to verify signature: fetching keys {error}")))
            }
            Err(error) => {
                tracing::warn!(issuer = self.jwt.issuer.url, %error, "cannot fetch the keys of the OIDC issuer");
                Err("oidc: authenticator not initialized".to_owned())
            }
            Ok(_) => Err(verify_error(
                "failed to verify signature: failed to verify id token signature".to_owned(),
            )),
        }
    }

    fn check_times_and_audience(&self, claims: &Value, now: Timestamp) -> Result<(), String> {
        let token_audiences = match claims.at("aud") {
            Value::String(one) => vec![one.clone()],
            _ => claims.items("aud").iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        };
        let expected_audiences = &self.jwt.issuer.audiences;
        if !token_audiences.iter().any(|audience| expected_audiences.contains(audience)) {
            return Err(match expected_audiences.as_slice() {
                [one] => format!("oidc: expected audience {} got {}", quote(one), list(&token_audiences)),
                many => format!("oidc: expected audience in {} got {}", list(many), list(&token_audiences)),
            });
        }
        let expires = seconds(claims.at("exp")).unwrap_or(0);
        if expires < now.as_second() {
            return Err(format!("oidc: token is expired (Token Expiry: {})", format_time(expires)));
        }
        match seconds(claims.at("nbf")) {
            Some(begins) if now.as_second() + NOT_BEFORE_SKEW_SECONDS < begins => Err(format!(
                "oidc: current time {} before the nbf (not before) time: {}",
                format_time(now.as_second()),
                format_time(begins)
            )),
            _ => Ok(()),
        }
    }

    /// Newer keys than `seen`: from a concurrent fetch, or from the issuer. The lock makes requests
    /// wait for a fetch in progress instead of starting their own.
    async fn fetch(&self, seen: Option<Arc<KeySet>>) -> Result<Arc<KeySet>, FetchError> {
        let mut fetch_state = self.fetch_state.lock().await;
        let current = self.keys.read().clone();
        match (current, seen) {
            (Some(current), None) => return Ok(current),
            (Some(current), Some(seen)) if !Arc::ptr_eq(&current, &seen) => return Ok(current),
            // Rate limit, so that invalid tokens cannot flood the issuer with requests.
            (Some(current), _) if fetch_state.is_rate_limited() => return Ok(current),
            (None, _) if fetch_state.is_rate_limited() => return Err(FetchError::RateLimited),
            _ => {}
        }
        fetch_state.last = Some(Instant::now());
        let client = match &fetch_state.key_set {
            Some(client) => client,
            None => fetch_state.key_set.insert(self.discover().await?),
        };
        let keys = Arc::new(KeySet::parse(&client.get().await?).ok_or(FetchError::NoKeySet)?);
        *self.keys.write() = Some(keys.clone());
        Ok(keys)
    }

    async fn discover(&self) -> Result<HttpsClient, FetchError> {
        let document = self.discovery.get().await?;
        if document.text("issuer") != self.jwt.issuer.url {
            return Err(FetchError::OtherIssuer(document.text("issuer").to_owned()));
        }
        Ok(HttpsClient::new(document.text("jwks_uri"), credentials(&self.jwt))?)
    }
}

impl KeyFetchState {
    fn is_rate_limited(&self) -> bool {
        self.last.is_some_and(|last| last.elapsed() < MIN_FETCH_INTERVAL)
    }
}

/// Why keys cannot be fetched.
#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error("rate limited after a failed attempt")]
    RateLimited,
    #[error(transparent)]
    Https(#[from] https::Error),
    #[error("invalid jwks_uri in the discovery document: {0}")]
    Url(#[from] https::ConfigError),
    #[error("discovery document has another issuer: {0:?}")]
    OtherIssuer(String),
    #[error("jwks_uri does not return a JSON Web Key Set")]
    NoKeySet,
}

fn credentials(jwt: &Jwt) -> Credentials {
    let pem = &jwt.issuer.certificate_authority;
    Credentials { authorities: (!pem.is_empty()).then(|| pem.clone()), ..Credentials::default() }
}

fn issuer_of(claims: &Value) -> &str {
    match claims.text("iss") {
        // Google's tokens used to have no scheme in `iss`, as upstream accepts.
        "accounts.google.com" => "https://accounts.google.com",
        issuer => issuer,
    }
}

/// NumericDate; some issuers send fractions.
fn seconds(value: &Value) -> Option<i64> {
    // The cast saturates if the float is out of range.
    value.as_i64().or_else(|| value.as_f64().map(|seconds| seconds as i64))
}

/// A time as Go's `time.Time` prints it.
fn format_time(seconds: i64) -> String {
    match Timestamp::from_second(seconds) {
        Ok(at) => at.strftime("%Y-%m-%d %H:%M:%S +0000 UTC").to_string(),
        Err(_) => seconds.to_string(),
    }
}

fn list(strings: &[String]) -> String {
    let quoted: Vec<String> = strings.iter().map(|text| quote(text)).collect();
    format!("[{}]", quoted.join(" "))
}
