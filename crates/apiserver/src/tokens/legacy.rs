//! Legacy tokens: stored in a Secret, without expiration, valid as long as the Secret contains
//! them.

use api::json::JsonExt as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::Value;

use super::{TokenError, core_target};
use crate::access::User;
use crate::options::ResourceVersionMatch;
use crate::server::Server;
use crate::update::ObjectChange;
use crate::write::WriteOptions;

/// The issuer of legacy tokens.
pub const ISSUER: &str = "kubernetes/serviceaccount";
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";

/// The service account of a legacy token with verified claims.
pub async fn authenticate(
    server: &Server,
    token: &str,
    claims: &Value,
    expected: &[String],
    now: Timestamp,
) -> Result<(User, Vec<String>), TokenError> {
    let claim = |name: &str| claims.text(&format!("kubernetes.io/serviceaccount/{name}")).to_owned();
    let (namespace, name) = (claim("namespace"), claim("service-account.name"));
    let (uid, secret) = (claim("service-account.uid"), claim("secret.name"));
    let user_name = super::claims::subject(&namespace, &name);
    if [&namespace, &name, &uid, &secret].iter().any(|part| part.is_empty())
        || claims.text("sub") != user_name
    {
        return Err(TokenError::Unknown);
    }
    // Legacy tokens have no audience claim; they are for this server.
    let own = server.tokens.audiences();
    let audiences: Vec<String> = own.iter().filter(|audience| expected.contains(audience)).cloned().collect();
    if audiences.is_empty() {
        return Err(TokenError::Audience { token: own, expected: expected.to_vec() });
    }
    server
        .wait_until_fresh(ResourceVersionMatch::MostRecent)
        .await
        .map_err(|status| TokenError::Server(Box::new(status)))?;
    let target = core_target("secrets", &namespace, &secret);
    let stored_secret =
        server.find(&target).map(|object| object.value()).ok_or(TokenError::SecretNotFound)?;
    if stored_secret.at("metadata").has("deletionTimestamp") {
        return Err(TokenError::SecretNotFound);
    }
    if !matches_secret(&stored_secret, token) {
        return Err(TokenError::TokenMismatch);
    }
    let account = core_target("serviceaccounts", &namespace, &name);
    let found =
        server.find(&account).ok_or_else(|| TokenError::Server(Box::new(account.not_found())))?.value();
    let found = found.at("metadata");
    if found.has("deletionTimestamp") {
        return Err(TokenError::LegacyAccountDeleted(namespace, name));
    }
    if found.text("uid") != uid {
        return Err(TokenError::LegacyAccount { found: found.text("uid").to_owned(), claimed: uid });
    }
    let has_invalid_label = !stored_secret.path("metadata.labels").text(INVALID_SINCE).is_empty();
    record_last_used(server, &target, &stored_secret, now).await;
    if has_invalid_label {
        return Err(TokenError::InvalidLabel {
            secret: format!("{namespace}/{secret}"),
            account: format!("{namespace}/{name}"),
        });
    }
    let groups = [
        "system:serviceaccounts".to_owned(),
        format!("system:serviceaccounts:{namespace}"),
        "system:authenticated".to_owned(),
    ];
    Ok((User { name: user_name, uid, groups: groups.into(), ..User::default() }, audiences))
}

fn matches_secret(secret: &Value, token: &str) -> bool {
    let stored_token = STANDARD.decode(secret.at("data").text("token")).unwrap_or_default();
    // Compares all bytes, so that the duration does not reveal how many match.
    let difference = stored_token.iter().zip(token.as_bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    stored_token.len() == token.len() && difference == 0
}

/// Records once a day that the token is used, for the legacy token cleaner.
async fn record_last_used(server: &Server, target: &crate::request::Target, secret: &Value, now: Timestamp) {
    let current_date = now.to_zoned(TimeZone::UTC).date();
    let next_date = current_date.tomorrow().unwrap_or(current_date);
    let last_used = secret.path("metadata.labels").text(LAST_USED).to_owned();
    if last_used == current_date.to_string() || last_used == next_date.to_string() {
        return;
    }
    let make = |before: &Value| {
        let mut after = before.clone();
        after.object_mut("metadata");
        after["metadata"].object_mut("labels").insert(LAST_USED.into(), current_date.to_string().into());
        Ok(ObjectChange::replace(after))
    };
    // Boxed: writing includes authentication, so the future would contain itself.
    let result = Box::pin(server.update_object(target, &WriteOptions::internal(now), make)).await;
    if let Err(status) = result {
        tracing::warn!(
            secret = target.name,
            error = status.message,
            "failed to update the last-used label of a legacy token"
        );
    }
}
