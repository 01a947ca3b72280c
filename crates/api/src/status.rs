//! `metav1.Status`, the body of error responses.

use std::borrow::Cow;

use serde::Serialize;

use crate::field::{ErrorList, quote};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Status {
    pub kind: &'static str,
    #[serde(rename = "apiVersion")]
    pub api_version: &'static str,
    pub metadata: ListMeta,
    pub status: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// A `StatusReason` of the API, or the reason of a webhook.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub reason: Cow<'static, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<StatusDetails>,
    pub code: u16,
}

/// Empty, except for an expired list, which may continue with a new token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ListMeta {
    #[serde(rename = "continue", skip_serializing_if = "str::is_empty")]
    pub token: Box<str>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusDetails {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<StatusCause>,
    #[serde(skip_serializing_if = "is_zero")]
    pub retry_after_seconds: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StatusCause {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub field: String,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

const UNKNOWN_PATH: &str = "the server could not find the requested resource";

impl Status {
    pub fn failure(code: u16, reason: &'static str, message: impl Into<String>) -> Status {
        Status {
            kind: "Status",
            api_version: "v1",
            metadata: ListMeta::default(),
            status: "Failure",
            message: message.into(),
            reason: Cow::Borrowed(reason),
            details: None,
            code,
        }
    }

    /// Sets the details: the object that the error is about.
    pub fn with_details(mut self, group: &str, kind: &str, name: &str) -> Status {
        let details = self.details.get_or_insert_default();
        details.group = group.to_owned();
        details.kind = kind.to_owned();
        details.name = name.to_owned();
        self
    }

    pub fn bad_request(message: impl Into<String>) -> Status {
        Status::failure(400, "BadRequest", message)
    }

    /// 404 for a path that does not exist. kubectl has its own text for it.
    pub fn unknown_path() -> Status {
        let mut status = Status::failure(404, "NotFound", UNKNOWN_PATH);
        status.details = Some(StatusDetails::default());
        status
    }

    /// Whether the path does not exist on this server.
    pub fn is_unknown_path(&self) -> bool {
        self.code == 404 && self.message == UNKNOWN_PATH
    }

    /// `resource` is the plural, with its group if it has one, such as `deployments.apps`.
    pub fn not_found(group: &str, plural: &str, name: &str) -> Status {
        let message = format!("{} {} not found", qualified_resource(group, plural), quote(name));
        Status::failure(404, "NotFound", message).with_details(group, plural, name)
    }

    pub fn already_exists(group: &str, plural: &str, name: &str) -> Status {
        let message = format!("{} {} already exists", qualified_resource(group, plural), quote(name));
        Status::failure(409, "AlreadyExists", message).with_details(group, plural, name)
    }

    pub fn conflict(group: &str, plural: &str, name: &str, detail: &str) -> Status {
        let message = format!(
            "Operation cannot be fulfilled on {} {}: {detail}",
            qualified_resource(group, plural),
            quote(name)
        );
        Status::failure(409, "Conflict", message).with_details(group, plural, name)
    }

    pub fn forbidden(group: &str, plural: &str, name: &str, detail: &str) -> Status {
        let message = match (plural, name) {
            ("", _) => format!("forbidden: {detail}"),
            (_, "") => format!("{} is forbidden: {detail}", qualified_resource(group, plural)),
            _ => format!("{} {} is forbidden: {detail}", qualified_resource(group, plural), quote(name)),
        };
        Status::failure(403, "Forbidden", message).with_details(group, plural, name)
    }

    pub fn expired(message: impl Into<String>) -> Status {
        Status::failure(410, "Expired", message)
    }

    pub fn internal(message: impl std::fmt::Display) -> Status {
        let mut status = Status::failure(500, "InternalError", format!("Internal error occurred: {message}"));
        status.details = Some(StatusDetails {
            causes: vec![StatusCause { message: message.to_string(), ..StatusCause::default() }],
            ..StatusDetails::default()
        });
        status
    }

    /// 422, such as `Pod "x" is invalid: spec.containers: Required value`.
    pub fn invalid(group: &str, kind: &str, name: &str, errors: &ErrorList) -> Status {
        let all = if errors.is_empty() { String::new() } else { format!(": {errors}") };
        let message = format!("{} {} is invalid{all}", qualified_resource(group, kind), quote(name));
        let mut status = Status::failure(422, "Invalid", message).with_details(group, kind, name);
        status.details.get_or_insert_default().causes = errors
            .0
            .iter()
            .map(|error| StatusCause {
                reason: error.error_type.cause().to_owned(),
                message: error.message.clone(),
                field: error.path.to_string(),
            })
            .collect();
        status
    }
}

fn qualified_resource(group: &str, plural: &str) -> String {
    if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::field::Path;

    #[test]
    fn invalid_status_lists_causes() {
        let mut errors = ErrorList::default();
        let message = |errors: &ErrorList| Status::invalid("apps", "Deployment", "x", errors).message;
        assert_eq!(message(&errors), "Deployment.apps \"x\" is invalid");
        errors.required(&Path::new("spec.a"), "");
        assert_eq!(message(&errors), "Deployment.apps \"x\" is invalid: spec.a: Required value");
        errors.required(&Path::new("spec.a"), "");
        errors.duplicate(&Path::new("spec.b"), "c");
        let status = Status::invalid("apps", "Deployment", "x", &errors);
        expect![[r#"
            {
              "kind": "Status",
              "apiVersion": "v1",
              "metadata": {},
              "status": "Failure",
              "message": "Deployment.apps \"x\" is invalid: [spec.a: Required value, spec.b: Duplicate value: \"c\"]",
              "reason": "Invalid",
              "details": {
                "name": "x",
                "group": "apps",
                "kind": "Deployment",
                "causes": [
                  {
                    "reason": "FieldValueRequired",
                    "message": "Required value",
                    "field": "spec.a"
                  },
                  {
                    "reason": "FieldValueRequired",
                    "message": "Required value",
                    "field": "spec.a"
                  },
                  {
                    "reason": "FieldValueDuplicate",
                    "message": "Duplicate value: \"c\"",
                    "field": "spec.b"
                  }
                ]
              },
              "code": 422
            }"#]]
        .assert_eq(&serde_json::to_string_pretty(&status).expect("JSON"));
    }

    #[test]
    fn messages_match_upstream() {
        let messages = [
            Status::not_found("", "pods", "a"),
            Status::not_found("apps", "deployments", "a"),
            Status::already_exists("", "pods", "a"),
            Status::conflict("", "pods", "a", "why"),
            Status::forbidden("", "pods", "a", "why"),
            Status::forbidden("apps", "deployments", "", "why"),
            Status::internal("why"),
        ]
        .map(|status| format!("{} {}: {}", status.code, status.reason, status.message));
        expect![[r#"
            404 NotFound: pods "a" not found
            404 NotFound: deployments.apps "a" not found
            409 AlreadyExists: pods "a" already exists
            409 Conflict: Operation cannot be fulfilled on pods "a": why
            403 Forbidden: pods "a" is forbidden: why
            403 Forbidden: deployments.apps is forbidden: why
            500 InternalError: Internal error occurred: why"#]]
        .assert_eq(&messages.join("\n"));
    }
}
