//! Authentication and authorization of the kubelet's API, as in upstream's webhook mode.
//!
//! A user is identified by a client certificate of the cluster's CA or by a token (TokenReview).
//! The API server decides whether the user may access a subresource of the Node
//! (SubjectAccessReview). The API server's own user is always allowed, because the API server has
//! authorized the original request. There are no anonymous users.

use http::header::AUTHORIZATION;
use http::{HeaderMap, Method, StatusCode};
use jiff::Timestamp;
use reconcile::review::User;
use rustls::pki_types::CertificateDer;
use serde_json::json;

use super::{HttpError, KubeletServer};
use crate::Node;

/// The user of a client certificate chain, which has to be valid at this time.
pub fn certificate_user(api: &KubeletServer, chain: &[CertificateDer<'_>], now: Timestamp) -> Option<User> {
    if !api.authority.is_trusted(chain, now) {
        return None;
    }
    let identity = pki::identity_of(chain.first()?).ok()?;
    let uid = identity.uid.unwrap_or_default();
    Some(User { name: identity.user, groups: identity.groups, uid, extra: String::new() })
}

/// Authorizes a request, or returns the error response.
pub async fn authorize(
    node: &Node,
    api: &KubeletServer,
    certificate_user: Option<&User>,
    (method, path): (&Method, &str),
    headers: &HeaderMap,
) -> Result<(), HttpError> {
    let user = match certificate_user {
        Some(user) => Some(user.clone()),
        None => match bearer_token(headers) {
            Some(token) => authenticate_token(node, token).await,
            None => None,
        },
    };
    let Some(user) = user else { return Err((StatusCode::UNAUTHORIZED, "Unauthorized".to_owned())) };
    if user.name == api.api_server_user || user.is_privileged() {
        return Ok(());
    }
    let verb = verb(method);
    let subresources = subresources(path);
    for subresource in subresources {
        if is_authorized(node, &user, verb, subresource).await? {
            return Ok(());
        }
    }
    let message = format!(
        "Forbidden (user={}, verb={verb}, resource=nodes, subresource(s)=[{}])",
        user.name,
        subresources.join(" ")
    );
    Err((StatusCode::FORBIDDEN, message))
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

async fn authenticate_token(node: &Node, token: &str) -> Option<User> {
    node.reviews.authenticate(&node.ctx.client, token).await.unwrap_or_else(|error| {
        tracing::warn!(%error, "TokenReview failed");
        None
    })
}

async fn is_authorized(
    node: &Node,
    user: &User,
    verb: &'static str,
    subresource: &'static str,
) -> Result<bool, HttpError> {
    let attributes = json!({
        "verb": verb, "version": "v1", "resource": "nodes", "subresource": subresource,
        "name": node.settings.node_name,
    });
    let review = node.reviews.authorize(&node.ctx.client, user, ("resourceAttributes", attributes)).await;
    review.map_err(|error| {
        tracing::warn!(%error, "SubjectAccessReview failed");
        let message = format!(
            "Authorization error (user={}, verb={verb}, resource=nodes, subresource={subresource})",
            user.name
        );
        (StatusCode::INTERNAL_SERVER_ERROR, message)
    })
}

fn verb(method: &Method) -> &'static str {
    match method.as_str() {
        "POST" => "create",
        "GET" => "get",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "",
    }
}

/// The subresources of a node that a path maps to. Access to one of them is sufficient.
fn subresources(path: &str) -> &'static [&'static str] {
    match path.trim_start_matches('/').split('/').next().unwrap_or_default() {
        "pods" | "runningpods" => &["pods", "proxy"],
        "healthz" => &["healthz", "proxy"],
        "configz" => &["configz", "proxy"],
        "stats" => &["stats"],
        "metrics" => &["metrics"],
        "logs" => &["log"],
        "checkpoint" => &["checkpoint"],
        "statusz" => &["statusz"],
        "flagz" => &["configz"],
        _ => &["proxy"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(path: &str, expected: &[&str]) {
        assert_eq!(subresources(path), expected, "{path}");
    }

    #[test]
    fn paths_map_to_node_subresources() {
        check("/pods", &["pods", "proxy"]);
        check("/runningpods/", &["pods", "proxy"]);
        check("/podsoup", &["proxy"]);
        check("/healthz/ping", &["healthz", "proxy"]);
        check("/metrics/resource", &["metrics"]);
        check("/stats/summary", &["stats"]);
        check("/logs/", &["log"]);
        check("/exec/default/web/main", &["proxy"]);
        check("/", &["proxy"]);
    }

    #[test]
    fn reads_bearer_tokens() {
        let mut headers = HeaderMap::new();
        assert_eq!(bearer_token(&headers), None);
        headers.insert(AUTHORIZATION, "bearer abc ".parse().expect("a header"));
        assert_eq!(bearer_token(&headers), Some("abc"));
        headers.insert(AUTHORIZATION, "Basic abc".parse().expect("a header"));
        assert_eq!(bearer_token(&headers), None);
    }
}
