//! Bootstrap tokens: Secrets `bootstrap-token-<id>` in `kube-system`, valid until they expire or
//! are deleted.

use std::collections::BTreeSet;

use api::Status;
use api::json::JsonExt as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::access::User;
use crate::options::ResourceVersionMatch;
use crate::request::Target;
use crate::server::Server;

const SECRET_TYPE: &str = "bootstrap.kubernetes.io/token";
const GROUP: &str = "system:bootstrappers";

/// The user of a valid bootstrap token; `None` if it is not one.
pub async fn authenticate_token(
    server: &Server,
    token: &str,
    now: Timestamp,
) -> Result<Option<User>, Status> {
    let Some((id, secret)) = parse(token) else { return Ok(None) };
    let resource = api::resource_table::find_resource("", "v1", "secrets").expect("Secrets are in the table");
    let collection = Target::collection(resource, "kube-system");
    let target = Target { name: format!("bootstrap-token-{id}"), ..collection };
    server.wait_until_fresh(ResourceVersionMatch::MostRecent).await?;
    let Some(object) = server.find(&target) else { return Ok(None) };
    Ok(match validate_secret(&object.value(), id, secret, now) {
        Ok(user) => Some(user),
        Err(reason) => {
            tracing::debug!(id, reason, "bootstrap token rejected");
            None
        }
    })
}

/// Splits a bootstrap token into id and secret.
fn parse(token: &str) -> Option<(&str, &str)> {
    let (id, secret) = token.split_once('.')?;
    let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    (id.len() == 6 && secret.len() == 16 && plain(id) && plain(secret)).then_some((id, secret))
}

fn validate_secret(object: &Value, id: &str, secret: &str, now: Timestamp) -> Result<User, &'static str> {
    if object.at("metadata").has("deletionTimestamp") {
        return Err("Secret is being deleted");
    }
    if object.text("type") != SECRET_TYPE {
        return Err("Secret has the wrong type");
    }
    let data = |key: &str| {
        let bytes = STANDARD.decode(object.at("data").text(key)).unwrap_or_default();
        String::from_utf8(bytes).unwrap_or_default()
    };
    // Compare digests to prevent timing attacks.
    if Sha256::digest(data("token-secret")) != Sha256::digest(secret) {
        return Err("token-secret does not match");
    }
    if data("token-id") != id {
        return Err("token-id does not match");
    }
    let expiration = data("expiration");
    if !expiration.is_empty() && api::time::parse_rfc3339(&expiration).is_none_or(|end| end <= now) {
        return Err("token has expired");
    }
    if data("usage-bootstrap-authentication") != "true" {
        return Err("usage-bootstrap-authentication is not true");
    }
    let mut groups = BTreeSet::from([GROUP.to_owned()]);
    let extra = data("auth-extra-groups");
    for group in extra.split(',').filter(|_| !extra.is_empty()) {
        if !is_group(group) {
            return Err("auth-extra-groups has an invalid group");
        }
        groups.insert(group.to_owned());
    }
    let name = format!("system:bootstrap:{id}");
    Ok(User { name, groups: groups.into_iter().collect(), ..User::default() })
}

/// `system:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]`.
fn is_group(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(GROUP).and_then(|rest| rest.strip_prefix(':')) else { return false };
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=256).contains(&rest.len())
        && rest.bytes().all(|byte| plain(byte) || matches!(byte, b':' | b'-'))
        && rest.bytes().next_back().is_some_and(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_valid_bootstrap_tokens() {
        assert_eq!(parse("abc123.0123456789abcdef"), Some(("abc123", "0123456789abcdef")));
        for other in
            ["", "abc123", "abc12.0123456789abcdef", "abc123.0123456789abcde", "ABC123.0123456789abcdef"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn validates_bootstrap_groups() {
        for good in ["system:bootstrappers:foo", "system:bootstrappers:foo:bar-42"] {
            assert!(is_group(good), "{good}");
        }
        for bad in [
            "system:masters",
            "system:bootstrappers",
            "system:bootstrappers:",
            "system:bootstrappers:Foo",
            "system:bootstrappers:foo-",
        ] {
            assert!(!is_group(bad), "{bad}");
        }
    }
}
