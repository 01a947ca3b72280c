//! What the API answers when it does not answer an object: reason, message, details and code together.

use serde::Serialize;

use crate::field::{Errors, quoted};

/// `metav1.Status`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Status {
    pub kind: &'static str,
    #[serde(rename = "apiVersion")]
    pub api_version: &'static str,
    pub metadata: Empty,
    pub status: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
    pub code: u16,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Empty {}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Details {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
    #[serde(skip_serializing_if = "is_zero")]
    pub retry_after_seconds: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cause {
    pub reason: String,
    pub message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub field: String,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

impl Status {
    pub fn failure(code: u16, reason: &'static str, message: impl Into<String>) -> Status {
        Status {
            kind: "Status",
            api_version: "v1",
            metadata: Empty {},
            status: "Failure",
            message: message.into(),
            reason,
            details: None,
            code,
        }
    }

    /// About one object: `pods "web" not found`.
    pub fn about(mut self, group: &str, kind: &str, name: &str) -> Status {
        let details = self.details.get_or_insert_default();
        details.group = group.to_owned();
        details.kind = kind.to_owned();
        details.name = name.to_owned();
        self
    }

    pub fn bad_request(message: impl Into<String>) -> Status {
        Status::failure(400, "BadRequest", message)
    }

    /// No such path; kubectl words this one itself.
    pub fn no_such_path() -> Status {
        let mut status = Status::failure(404, "NotFound", "the server could not find the requested resource");
        status.details = Some(Details::default());
        status
    }

    /// `resource` is the plural, qualified as `deployments.apps` where it has a group.
    pub fn not_found(group: &str, plural: &str, name: &str) -> Status {
        let message = format!("{} {} not found", qualified(group, plural), quoted(name));
        Status::failure(404, "NotFound", message).about(group, plural, name)
    }

    pub fn already_exists(group: &str, plural: &str, name: &str) -> Status {
        let message = format!("{} {} already exists", qualified(group, plural), quoted(name));
        Status::failure(409, "AlreadyExists", message).about(group, plural, name)
    }

    pub fn conflict(group: &str, plural: &str, name: &str, why: &str) -> Status {
        let message =
            format!("Operation cannot be fulfilled on {} {}: {why}", qualified(group, plural), quoted(name));
        Status::failure(409, "Conflict", message).about(group, plural, name)
    }

    pub fn forbidden(group: &str, plural: &str, name: &str, why: &str) -> Status {
        let message = format!("{} {} is forbidden: {why}", qualified(group, plural), quoted(name));
        Status::failure(403, "Forbidden", message).about(group, plural, name)
    }

    pub fn expired(message: impl Into<String>) -> Status {
        Status::failure(410, "Expired", message)
    }

    pub fn internal(message: impl std::fmt::Display) -> Status {
        let mut status = Status::failure(500, "InternalError", format!("Internal error occurred: {message}"));
        status.details = Some(Details {
            causes: vec![Cause { message: message.to_string(), ..Cause::default() }],
            ..Details::default()
        });
        status
    }

    /// 422: `Pod "x" is invalid: spec.containers: Required value`.
    pub fn invalid(group: &str, kind: &str, name: &str, errors: &Errors) -> Status {
        let all = if errors.is_empty() { String::new() } else { format!(": {errors}") };
        let message = format!("{} {} is invalid{all}", qualified(group, kind), quoted(name));
        let mut status = Status::failure(422, "Invalid", message).about(group, kind, name);
        status.details.get_or_insert_default().causes = errors
            .0
            .iter()
            .map(|error| Cause {
                reason: error.reason.cause().to_owned(),
                message: error.message.clone(),
                field: error.path.to_string(),
            })
            .collect();
        status
    }
}

fn qualified(group: &str, plural: &str) -> String {
    if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") }
}
