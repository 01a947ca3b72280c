//! Asks the API server who somebody is and what they may do, for components that serve something themselves.
//!
//! TokenReview says whose a token is, SubjectAccessReview whether they may; answers hold for a while, as
//! upstream's delegating components let them.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use http::Method;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{Client, Error};

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
    /// The user's name.
    pub name: String,
    /// The groups they are in.
    pub groups: Vec<String>,
    /// Their UID, if they have one.
    pub uid: String,
    /// More about them, as JSON.
    pub extra: String,
}

impl User {
    /// Somebody who has shown nothing.
    pub fn anonymous() -> User {
        User {
            name: "system:anonymous".to_owned(),
            groups: vec!["system:unauthenticated".to_owned()],
            ..User::default()
        }
    }

    /// Whether there is nothing they may not.
    pub fn is_master(&self) -> bool {
        self.groups.iter().any(|group| group == MASTERS)
    }

    fn read(user: &Value) -> User {
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

/// What the API server has said lately.
#[derive(Default)]
pub struct Reviews {
    tokens: Kept<String, Option<User>>,
    /// By user and, as JSON, what they want.
    verdicts: Kept<(User, String), bool>,
}

impl Reviews {
    /// Whose a token is; `None` if nobody's.
    pub async fn whose(&self, client: &Client, token: &str) -> Result<Option<User>, Error> {
        if let Some(known) = self.tokens.get(&token.to_owned()) {
            return Ok(known);
        }
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
        let path = "/apis/authentication.k8s.io/v1/tokenreviews";
        let answer = client.request(Method::POST, path, Some(&review)).await?;
        let status = &answer["status"];
        let user = (status["authenticated"] == true).then(|| User::read(&status["user"]));
        self.tokens.put(token.to_owned(), user.clone(), KNOWN_FOR);
        Ok(user)
    }

    /// Whether a user may do what the attributes say: `resourceAttributes` or `nonResourceAttributes` with theirs.
    pub async fn may(
        &self,
        client: &Client,
        user: &User,
        (what, attributes): (&str, Value),
    ) -> Result<bool, Error> {
        let key = (user.clone(), format!("{what} {attributes}"));
        if let Some(known) = self.verdicts.get(&key) {
            return Ok(known);
        }
        let mut spec = json!({
            "user": user.name, "groups": user.groups, "uid": user.uid,
            "extra": serde_json::from_str::<Value>(&user.extra).unwrap_or(Value::Null),
        });
        spec[what] = attributes;
        let review =
            json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec});
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        let answer = client.request(Method::POST, path, Some(&review)).await?;
        let allowed = answer["status"]["allowed"] == true;
        self.verdicts.put(key, allowed, if allowed { ALLOWED_FOR } else { REFUSED_FOR });
        Ok(allowed)
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

    #[tokio::test(start_paused = true)]
    async fn answers_hold_for_a_while() {
        let kept: Kept<u32, bool> = Kept::default();
        kept.put(1, true, Duration::from_secs(30));
        assert_eq!((kept.get(&1), kept.get(&2)), (Some(true), None));
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(kept.get(&1), None);
    }

    #[test]
    fn users_are_read_as_reviews_tell_them() {
        let user = json!({"username": "jane", "groups": ["a", "system:masters"], "extra": {"k": ["v"]}});
        let user = User::read(&user);
        assert_eq!((user.name.as_str(), user.extra.as_str()), ("jane", r#"{"k":["v"]}"#));
        assert!(user.is_master() && !User::anonymous().is_master());
    }
}
