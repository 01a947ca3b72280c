//! Errors of requests.

use serde::Deserialize;

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server returned an error status.
    #[error("{}", .0.message)]
    Api(Box<Failure>),
    #[error("cannot reach the API server")]
    Unreachable(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot decode the response to {request}")]
    Decode { request: String, source: serde_json::Error },
    #[error("cannot encode the object as JSON")]
    Encode(#[source] serde_json::Error),
    #[error("{0} did not show up in the cache in time")]
    NotCached(String),
}

/// The fields of a `metav1.Status` that clients use.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct Failure {
    pub code: u16,
    pub reason: String,
    pub message: String,
    pub details: Details,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, rename_all = "camelCase")]
pub struct Details {
    pub name: String,
    pub kind: String,
    pub causes: Vec<Cause>,
    pub retry_after_seconds: u32,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct Cause {
    pub reason: String,
    pub message: String,
    pub field: String,
}

impl Error {
    /// The reason in the Status, such as `NotFound`. `""` if there was no response.
    pub fn reason(&self) -> &str {
        match self {
            Error::Api(failure) => &failure.reason,
            _ => "",
        }
    }

    pub fn code(&self) -> u16 {
        match self {
            Error::Api(failure) => failure.code,
            _ => 0,
        }
    }

    pub fn is_not_found(&self) -> bool {
        self.reason() == "NotFound"
    }

    pub fn is_conflict(&self) -> bool {
        self.reason() == "Conflict"
    }

    pub fn is_already_exists(&self) -> bool {
        self.reason() == "AlreadyExists"
    }

    pub fn is_invalid(&self) -> bool {
        self.reason() == "Invalid"
    }

    /// The namespace is terminating, so no objects can be created in it.
    pub fn is_namespace_terminating(&self) -> bool {
        self.has_cause("NamespaceTerminating")
    }

    /// Whether one of the causes in the Status has this reason.
    pub fn has_cause(&self, reason: &str) -> bool {
        matches!(self, Error::Api(failure) if failure.details.causes.iter().any(|cause| cause.reason == reason))
    }
}
