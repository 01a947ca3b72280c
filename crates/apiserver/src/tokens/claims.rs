//! What a service account's token says.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::access::User;

/// How far clocks may be apart.
pub const LEEWAY: i64 = 60;

#[derive(Debug, Serialize, Deserialize)]
pub struct Claims {
    #[serde(rename = "aud")]
    pub audiences: Vec<String>,
    #[serde(rename = "exp")]
    pub expires: i64,
    #[serde(rename = "iat")]
    pub issued: i64,
    #[serde(rename = "iss")]
    pub issuer: String,
    #[serde(rename = "jti")]
    pub id: String,
    #[serde(rename = "kubernetes.io")]
    pub kubernetes: Bound,
    #[serde(rename = "nbf")]
    pub begins: i64,
    #[serde(rename = "sub")]
    pub subject: String,
}

/// The objects a token stands and falls with.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Bound {
    pub namespace: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<Reference>,
    pub serviceaccount: Reference,
    /// When a token whose life was extended should have been replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warnafter: Option<i64>,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
}

/// Where a moment is, seen from a token's life.
#[derive(Debug, PartialEq, Eq)]
pub enum Window {
    Before,
    Within,
    After,
    /// The token comes from the future.
    Future,
}

impl Claims {
    pub fn window(&self, now: Timestamp) -> Window {
        let now = now.as_second();
        if now + LEEWAY < self.begins {
            Window::Before
        } else if now - LEEWAY > self.expires {
            Window::After
        } else if now + LEEWAY < self.issued {
            Window::Future
        } else {
            Window::Within
        }
    }

    pub fn user(&self) -> User {
        let Bound { namespace, node, pod, serviceaccount, .. } = &self.kubernetes;
        let mut user = User {
            name: subject(namespace, &serviceaccount.name),
            uid: serviceaccount.uid.clone(),
            groups: vec![
                "system:serviceaccounts".to_owned(),
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated".to_owned(),
            ],
            ..User::default()
        };
        let mut tell = |what: &str, text: String| {
            user.extra.insert(format!("authentication.kubernetes.io/{what}"), vec![text]);
        };
        if !self.id.is_empty() {
            tell("credential-id", format!("JTI={}", self.id));
        }
        if let Some(pod) = pod {
            tell("pod-name", pod.name.clone());
            tell("pod-uid", pod.uid.clone());
        }
        if let Some(node) = node {
            tell("node-name", node.name.clone());
            if !node.uid.is_empty() {
                tell("node-uid", node.uid.clone());
            }
        }
        user
    }
}

/// A service account's name as a user.
pub fn subject(namespace: &str, name: &str) -> String {
    format!("system:serviceaccount:{namespace}:{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_may_differ_by_a_minute() {
        let claims = Claims {
            audiences: Vec::new(),
            expires: 2_000,
            issued: 1_000,
            issuer: String::new(),
            id: String::new(),
            kubernetes: Bound::default(),
            begins: 1_000,
            subject: String::new(),
        };
        let at = |second| claims.window(Timestamp::from_second(second).unwrap());
        assert_eq!(at(939), Window::Before);
        assert_eq!(at(940), Window::Within);
        assert_eq!(at(2_060), Window::Within);
        assert_eq!(at(2_061), Window::After);
        let future = Claims { issued: 1_500, ..claims };
        assert_eq!(future.window(Timestamp::from_second(1_000).unwrap()), Window::Future);
    }
}
