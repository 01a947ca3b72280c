//! Tokens of old: they stand in a Secret, never expire, and are good for as long as the Secret has them.

use api::json::Json as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::Value;

use super::{Refused, named};
use crate::access::User;
use crate::options::Version;
use crate::server::Server;
use crate::update::Change;
use crate::write::WriteOptions;

/// In whose name they are made.
pub const ISSUER: &str = "kubernetes/serviceaccount";
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";

/// The service account of a token with these claims, whose signature has been checked.
pub async fn owner(
    server: &Server,
    token: &str,
    claims: &Value,
    wanted: &[String],
    now: Timestamp,
) -> Result<(User, Vec<String>), Refused> {
    let claim = |name: &str| claims.text(&format!("kubernetes.io/serviceaccount/{name}")).to_owned();
    let (namespace, name) = (claim("namespace"), claim("service-account.name"));
    let (uid, secret) = (claim("service-account.uid"), claim("secret.name"));
    let user_name = super::claims::subject(&namespace, &name);
    if [&namespace, &name, &uid, &secret].iter().any(|part| part.is_empty())
        || claims.text("sub") != user_name
    {
        return Err(Refused::Unknown);
    }
    // They say nothing of whom they are for, so they are for this server.
    let own = server.tokens.audiences();
    let audiences: Vec<String> = own.iter().filter(|audience| wanted.contains(audience)).cloned().collect();
    if audiences.is_empty() {
        return Err(Refused::Audience { token: own, wanted: wanted.to_vec() });
    }
    server.fresh(Version::MostRecent).await.map_err(|status| Refused::Server(Box::new(status)))?;
    let place = named("secrets", &namespace, &secret);
    let kept = server.find(&place).map(|object| object.value()).ok_or(Refused::NoSecret)?;
    if kept.at("metadata").has("deletionTimestamp") {
        return Err(Refused::NoSecret);
    }
    if !is_kept(&kept, token) {
        return Err(Refused::OtherToken);
    }
    let account = named("serviceaccounts", &namespace, &name);
    let found = server.find(&account).ok_or_else(|| Refused::Server(Box::new(account.not_found())))?.value();
    let found = found.at("metadata");
    if found.has("deletionTimestamp") {
        return Err(Refused::LegacyAccountDeleted(namespace, name));
    }
    if found.text("uid") != uid {
        return Err(Refused::LegacyAccount { found: found.text("uid").to_owned(), claimed: uid });
    }
    let marked = !kept.path("metadata.labels").text(INVALID_SINCE).is_empty();
    note_use(server, &place, &kept, now).await;
    if marked {
        return Err(Refused::Marked {
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

fn is_kept(secret: &Value, token: &str) -> bool {
    let kept = STANDARD.decode(secret.at("data").text("token")).unwrap_or_default();
    // All of it, so that how long it takes tells nothing of the token.
    let difference = kept.iter().zip(token.as_bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    kept.len() == token.len() && difference == 0
}

/// Writes down once a day that a token is used, so that others can be taken away.
async fn note_use(server: &Server, place: &crate::request::Target, secret: &Value, now: Timestamp) {
    let today = now.to_zoned(TimeZone::UTC).date();
    let tomorrow = today.tomorrow().unwrap_or(today);
    let noted = secret.path("metadata.labels").text(LAST_USED).to_owned();
    if noted == today.to_string() || noted == tomorrow.to_string() {
        return;
    }
    let make = |before: &Value| {
        let mut after = before.clone();
        after.object_mut("metadata");
        after["metadata"].object_mut("labels").insert(LAST_USED.into(), today.to_string().into());
        Ok(Change::replace(after))
    };
    // Boxed, since writing asks for much that asks who somebody is.
    let written = Box::pin(server.change(place, &WriteOptions::internal(now), make)).await;
    if let Err(status) = written {
        tracing::warn!(secret = place.name, error = status.message, "cannot note that a token was used");
    }
}
