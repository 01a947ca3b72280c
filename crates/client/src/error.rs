//! Why a request did not get what it asked for.

use serde::Deserialize;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server said no.
    #[error("{}", .0.message)]
    Api(Box<Failure>),
    #[error("cannot reach the API server")]
    Unreachable(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the answer to {request} cannot be understood")]
    Decode { request: String, source: serde_json::Error },
    #[error("the object cannot be written as JSON")]
    Encode(#[source] serde_json::Error),
    #[error("{0} did not show up in the cache in time")]
    NotCached(String),
}

/// `metav1.Status` of a failure, as far as clients look at it.
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
    /// The server's reason, such as `NotFound`; `""` where the server did not answer.
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

    /// The namespace is going away, so nothing can be made in it any more.
    pub fn is_namespace_terminating(&self) -> bool {
        self.has_cause("NamespaceTerminating")
    }

    /// One of the causes the server lists has this reason.
    pub fn has_cause(&self, reason: &str) -> bool {
        matches!(self, Error::Api(failure) if failure.details.causes.iter().any(|cause| cause.reason == reason))
    }
}
