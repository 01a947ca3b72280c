//! Who may ask this node for what: the cluster says, as upstream's kubelet lets it.
//!
//! A certificate of the cluster's authority or a token says who asks (TokenReview); the API server judges whether
//! they may (SubjectAccessReview), as if they asked for a subresource of the Node. The API server itself has asked
//! before and is let in. Nobody is anonymous.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderMap, Method, StatusCode};
use jiff::Timestamp;
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Api, Refused};
use crate::Node;

/// Who may do everything, whatever roles say.
const MASTERS: &str = "system:masters";
const KNOWN_FOR: Duration = Duration::from_secs(120);
const ALLOWED_FOR: Duration = Duration::from_secs(300);
const REFUSED_FOR: Duration = Duration::from_secs(30);
/// Answers that are kept at most; then all are forgotten.
const MOST_KEPT: usize = 1000;

/// Whoever asks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct User {
    name: String,
    groups: Vec<String>,
    uid: String,
    /// As JSON.
    extra: String,
}

/// What the API server has said lately.
#[derive(Default)]
pub struct Reviews {
    tokens: Kept<String, Option<User>>,
    verdicts: Kept<(User, &'static str, &'static str), bool>,
}

/// Who shows these certificates, which must be vouched for at this time.
pub fn shown(api: &Api, chain: &[CertificateDer<'_>], now: Timestamp) -> Option<User> {
    if !api.authority.vouches_for(chain, now) {
        return None;
    }
    let identity = pki::identity_of(chain.first()?).ok()?;
    let uid = identity.uid.unwrap_or_default();
    Some(User { name: identity.user, groups: identity.groups, uid, extra: String::new() })
}

/// Lets a request in, or says why not.
pub async fn admit(
    node: &Node,
    api: &Api,
    shown: Option<&User>,
    (method, path): (&Method, &str),
    headers: &HeaderMap,
) -> Result<(), Refused> {
    let user = match shown {
        Some(user) => Some(user.clone()),
        None => match bearer(headers) {
            Some(token) => whose(node, token).await,
            None => None,
        },
    };
    let Some(user) = user else { return Err((StatusCode::UNAUTHORIZED, "Unauthorized".to_owned())) };
    if user.name == api.user || user.groups.iter().any(|group| group == MASTERS) {
        return Ok(());
    }
    let verb = verb(method);
    let subresources = subresources(path);
    for subresource in subresources {
        if may(node, &user, verb, subresource).await? {
            return Ok(());
        }
    }
    let why = format!(
        "Forbidden (user={}, verb={verb}, resource=nodes, subresource(s)=[{}])",
        user.name,
        subresources.join(" ")
    );
    Err((StatusCode::FORBIDDEN, why))
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

async fn whose(node: &Node, token: &str) -> Option<User> {
    if let Some(known) = node.reviews.tokens.get(&token.to_owned()) {
        return known;
    }
    let review =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
    let path = "/apis/authentication.k8s.io/v1/tokenreviews";
    let answer = match node.ctx.client.request(Method::POST, path, Some(&review)).await {
        Ok(answer) => answer,
        Err(error) => {
            tracing::warn!(%error, "cannot ask whose token it is");
            return None;
        }
    };
    let user = (answer["status"]["authenticated"] == true).then(|| named(&answer["status"]["user"]));
    node.reviews.tokens.put(token.to_owned(), user.clone(), KNOWN_FOR);
    user
}

fn named(user: &Value) -> User {
    let text = |field: &str| user[field].as_str().unwrap_or_default().to_owned();
    let groups = user["groups"].as_array().into_iter().flatten();
    User {
        name: text("username"),
        groups: groups.filter_map(|group| group.as_str().map(str::to_owned)).collect(),
        uid: text("uid"),
        extra: user.get("extra").filter(|extra| extra.is_object()).map(Value::to_string).unwrap_or_default(),
    }
}

async fn may(
    node: &Node,
    user: &User,
    verb: &'static str,
    subresource: &'static str,
) -> Result<bool, Refused> {
    let key = (user.clone(), verb, subresource);
    if let Some(known) = node.reviews.verdicts.get(&key) {
        return Ok(known);
    }
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {
            "user": user.name, "groups": user.groups, "uid": user.uid,
            "extra": serde_json::from_str::<Value>(&user.extra).unwrap_or(Value::Null),
            "resourceAttributes": {
                "verb": verb, "version": "v1", "resource": "nodes", "subresource": subresource,
                "name": node.settings.node_name,
            }
        }
    });
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let answer = node.ctx.client.request(Method::POST, path, Some(&review)).await.map_err(|error| {
        tracing::warn!(%error, "cannot ask who may ask");
        let why = format!(
            "Authorization error (user={}, verb={verb}, resource=nodes, subresource={subresource})",
            user.name
        );
        (StatusCode::INTERNAL_SERVER_ERROR, why)
    })?;
    let allowed = answer["status"]["allowed"] == true;
    node.reviews.verdicts.put(key, allowed, if allowed { ALLOWED_FOR } else { REFUSED_FOR });
    Ok(allowed)
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

/// The subresources of a node that a path is one of; being allowed one of them is enough.
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

/// Answers that hold for a while.
struct Kept<K, V>(Mutex<HashMap<K, (V, Instant)>>);

impl<K, V> Default for Kept<K, V> {
    fn default() -> Kept<K, V> {
        Kept(Mutex::default())
    }
}

impl<K: Hash + Eq, V: Clone> Kept<K, V> {
    fn get(&self, key: &K) -> Option<V> {
        self.0.lock().get(key).filter(|(_, until)| *until > Instant::now()).map(|(value, _)| value.clone())
    }

    fn put(&self, key: K, value: V, time: Duration) {
        let mut kept = self.0.lock();
        if kept.len() >= MOST_KEPT {
            kept.clear();
        }
        kept.insert(key, (value, Instant::now() + time));
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
    fn paths_are_subresources_of_the_node() {
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

    #[tokio::test(start_paused = true)]
    async fn answers_hold_for_a_while() {
        let kept: Kept<u32, bool> = Kept::default();
        kept.put(1, true, Duration::from_secs(30));
        assert_eq!((kept.get(&1), kept.get(&2)), (Some(true), None));
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(kept.get(&1), None);
    }

    #[test]
    fn tokens() {
        let mut headers = HeaderMap::new();
        assert_eq!(bearer(&headers), None);
        headers.insert(AUTHORIZATION, "bearer abc ".parse().expect("a header"));
        assert_eq!(bearer(&headers), Some("abc"));
        headers.insert(AUTHORIZATION, "Basic abc".parse().expect("a header"));
        assert_eq!(bearer(&headers), None);
    }
}
