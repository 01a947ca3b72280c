//! Delegated authentication and authorization, for components that serve an API themselves.
//!
//! A TokenReview returns the user of a token, a SubjectAccessReview whether a user is authorized.
//! The results are cached with the default TTLs of upstream's kubelet.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use http::Method;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{Client, Error};

/// The group whose members are authorized for everything.
const SYSTEM_PRIVILEGED_GROUP: &str = "system:masters";
const TOKEN_CACHE_TTL: Duration = Duration::from_secs(120);
const ALLOWED_CACHE_TTL: Duration = Duration::from_secs(300);
const DENIED_CACHE_TTL: Duration = Duration::from_secs(30);
/// The maximum number of cached results. The cache is cleared when it is full.
const MAX_CACHE_ENTRIES: usize = 1000;

/// The user that sent a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct User {
    pub name: String,
    /// The groups of the user.
    pub groups: Vec<String>,
    /// The UID, or empty.
    pub uid: String,
    /// The extra attributes as JSON, or empty.
    pub extra: String,
}

impl User {
    /// The user of a request without credentials.
    pub fn anonymous() -> User {
        User {
            name: "system:anonymous".to_owned(),
            groups: vec!["system:unauthenticated".to_owned()],
            ..User::default()
        }
    }

    /// Whether the user is a member of `system:masters`, which is authorized for everything.
    pub fn is_privileged(&self) -> bool {
        self.groups.iter().any(|group| group == SYSTEM_PRIVILEGED_GROUP)
    }

    fn from_review(user: &Value) -> User {
        let text = |field: &str| user[field].as_str().unwrap_or_default().to_owned();
        let groups = user["groups"].as_array().into_iter().flatten();
        User {
            name: text("username"),
            groups: groups.filter_map(|group| group.as_str().map(str::to_owned)).collect(),
            uid: text("uid"),
            extra: user
                .get("extra")
                .filter(|extra| extra.is_object())
                .map(Value::to_string)
                .unwrap_or_default(),
        }
    }
}

/// Sends reviews and caches their results.
#[derive(Default)]
pub struct ReviewClient {
    tokens: TtlCache<String, Option<User>>,
    /// By user and by the JSON of the requested attributes.
    access_reviews: TtlCache<(User, String), bool>,
}

impl ReviewClient {
    /// The user of a token. `None` if the token is invalid.
    pub async fn authenticate(&self, client: &Client, token: &str) -> Result<Option<User>, Error> {
        if let Some(known) = self.tokens.get(&token.to_owned()) {
            return Ok(known);
        }
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
        let path = "/apis/authentication.k8s.io/v1/tokenreviews";
        let answer = client.request(Method::POST, path, Some(&review)).await?;
        let status = &answer["status"];
        let user = (status["authenticated"] == true).then(|| User::from_review(&status["user"]));
        self.tokens.put(token.to_owned(), user.clone(), TOKEN_CACHE_TTL);
        Ok(user)
    }

    /// Whether a user is authorized for the attributes: `resourceAttributes` or
    /// `nonResourceAttributes` with their value.
    pub async fn authorize(
        &self,
        client: &Client,
        user: &User,
        (attributes_field, attributes): (&str, Value),
    ) -> Result<bool, Error> {
        let key = (user.clone(), format!("{attributes_field} {attributes}"));
        if let Some(known) = self.access_reviews.get(&key) {
            return Ok(known);
        }
        let mut spec = json!({
            "user": user.name, "groups": user.groups, "uid": user.uid,
            "extra": serde_json::from_str::<Value>(&user.extra).unwrap_or(Value::Null),
        });
        spec[attributes_field] = attributes;
        let review =
            json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec});
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        let answer = client.request(Method::POST, path, Some(&review)).await?;
        let allowed = answer["status"]["allowed"] == true;
        self.access_reviews.put(key, allowed, if allowed { ALLOWED_CACHE_TTL } else { DENIED_CACHE_TTL });
        Ok(allowed)
    }
}

/// Entries that expire.
struct TtlCache<K, V>(Mutex<HashMap<K, (V, Instant)>>);

impl<K, V> Default for TtlCache<K, V> {
    fn default() -> TtlCache<K, V> {
        TtlCache(Mutex::default())
    }
}

impl<K: Hash + Eq, V: Clone> TtlCache<K, V> {
    fn get(&self, key: &K) -> Option<V> {
        self.0.lock().get(key).filter(|(_, until)| *until > Instant::now()).map(|(value, _)| value.clone())
    }

    fn put(&self, key: K, value: V, time: Duration) {
        let mut entries = self.0.lock();
        if entries.len() >= MAX_CACHE_ENTRIES {
            entries.clear();
        }
        entries.insert(key, (value, Instant::now() + time));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn cache_entries_expire() {
        let cache: TtlCache<u32, bool> = TtlCache::default();
        cache.put(1, true, Duration::from_secs(30));
        assert_eq!((cache.get(&1), cache.get(&2)), (Some(true), None));
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(cache.get(&1), None);
    }

    #[test]
    fn user_is_parsed_from_token_review() {
        let user = json!({"username": "jane", "groups": ["a", "system:masters"], "extra": {"k": ["v"]}});
        let user = User::from_review(&user);
        assert_eq!((user.name.as_str(), user.extra.as_str()), ("jane", r#"{"k":["v"]}"#));
        assert!(user.is_privileged() && !User::anonymous().is_privileged());
    }
}
