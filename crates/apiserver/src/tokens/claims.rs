//! The claims of service account tokens.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::access::User;

/// The allowed clock skew.
pub const CLOCK_SKEW_SECONDS: i64 = 60;

#[derive(Debug, Serialize, Deserialize)]
pub struct Claims {
    #[serde(rename = "aud")]
    pub audiences: Vec<String>,
    #[serde(rename = "exp")]
    pub expires_at: i64,
    #[serde(rename = "iat")]
    pub issued_at: i64,
    #[serde(rename = "iss")]
    pub issuer: String,
    #[serde(rename = "jti")]
    pub id: String,
    #[serde(rename = "kubernetes.io")]
    pub kubernetes: BoundObjects,
    #[serde(rename = "nbf")]
    pub not_before: i64,
    #[serde(rename = "sub")]
    pub subject: String,
}

/// The objects that a token is bound to.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct BoundObjects {
    pub namespace: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<Reference>,
    pub serviceaccount: Reference,
    /// The time after which use of an extended token is reported as stale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warnafter: Option<i64>,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
}

/// The validity of a token at a point in time.
#[derive(Debug, PartialEq, Eq)]
pub enum TokenValidity {
    NotYetValid,
    Valid,
    Expired,
    /// The issue time is in the future.
    IssuedInFuture,
}

impl Claims {
    pub fn validity(&self, now: Timestamp) -> TokenValidity {
        let now = now.as_second();
        if now + CLOCK_SKEW_SECONDS < self.not_before {
            TokenValidity::NotYetValid
        } else if now - CLOCK_SKEW_SECONDS > self.expires_at {
            TokenValidity::Expired
        } else if now + CLOCK_SKEW_SECONDS < self.issued_at {
            TokenValidity::IssuedInFuture
        } else {
            TokenValidity::Valid
        }
    }

    pub fn user(&self) -> User {
        let BoundObjects { namespace, node, pod, serviceaccount, .. } = &self.kubernetes;
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
        let mut add_extra = |what: &str, text: String| {
            user.extra.insert(format!("authentication.kubernetes.io/{what}"), vec![text]);
        };
        if !self.id.is_empty() {
            add_extra("credential-id", format!("JTI={}", self.id));
        }
        if let Some(pod) = pod {
            add_extra("pod-name", pod.name.clone());
            add_extra("pod-uid", pod.uid.clone());
        }
        if let Some(node) = node {
            add_extra("node-name", node.name.clone());
            if !node.uid.is_empty() {
                add_extra("node-uid", node.uid.clone());
            }
        }
        user
    }
}

/// The user name of a service account.
pub fn subject(namespace: &str, name: &str) -> String {
    format!("system:serviceaccount:{namespace}:{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allows_one_minute_of_clock_skew() {
        let claims = Claims {
            audiences: Vec::new(),
            expires_at: 2_000,
            issued_at: 1_000,
            issuer: String::new(),
            id: String::new(),
            kubernetes: BoundObjects::default(),
            not_before: 1_000,
            subject: String::new(),
        };
        let at = |second| claims.validity(Timestamp::from_second(second).unwrap());
        assert_eq!(at(939), TokenValidity::NotYetValid);
        assert_eq!(at(940), TokenValidity::Valid);
        assert_eq!(at(2_060), TokenValidity::Valid);
        assert_eq!(at(2_061), TokenValidity::Expired);
        let future = Claims { issued_at: 1_500, ..claims };
        assert_eq!(future.validity(Timestamp::from_second(1_000).unwrap()), TokenValidity::IssuedInFuture);
    }
}
