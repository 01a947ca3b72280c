//! AdmissionReview: the request to a webhook and the meaning of its response.

use api::field::quote;
use api::json::JsonExt as _;
use api::status::{StatusCause, StatusDetails};
use api::{Resource, Status};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;

use super::config::{Hook, ReviewVersion};
use super::{conversion, matching};
use crate::admission::expressions::{self, ConditionInput};
use crate::admission::{Operation, Request};
use crate::server::Server;
use crate::tokens::user_info;

/// The response of a webhook that allows the request.
#[derive(Debug)]
pub struct WebhookResponse {
    /// JSON patch of the object in the version that was sent.
    pub patch: Option<Value>,
}

/// Why a webhook does not allow the request.
#[derive(Debug)]
pub enum WebhookError {
    /// The call failed or the response is invalid; the failure policy applies.
    CallFailed { reason: String, code: u16 },
    /// The webhook denied the request.
    Rejected(Box<Status>),
    /// The webhook must not be called (dry run), or its patch cannot be applied. The failure policy
    /// does not apply.
    Internal(Box<Status>),
}

fn call_failed(reason: impl Into<String>, code: u16) -> WebhookError {
    WebhookError::CallFailed { reason: reason.into(), code }
}

/// Calls one webhook; `versioned_object` is the object in the version of `row`.
pub async fn call_webhook(
    server: &Server,
    hook: &Hook,
    request: &Request<'_>,
    row: &'static Resource,
    versioned_object: &Value,
    mutating: bool,
) -> Result<WebhookResponse, WebhookError> {
    match hook.side_effects {
        _ if !request.dry_run => {}
        None => return Err(call_failed("Webhook SideEffects is nil", 400)),
        Some(true) => {
            let reason = format!("admission webhook {} does not support dry run", quote(&hook.name));
            return Err(WebhookError::Internal(Box::new(Status::bad_request(reason))));
        }
        Some(false) => {}
    }
    let Some(version) = hook.version else {
        let reason = "could not create admission objects: webhook does not accept known AdmissionReview versions (v1, v1beta1)";
        return Err(call_failed(reason, 400));
    };
    let users = &server.admission.settings.webhook_users;
    let client = hook.webhook_client(users[usize::from(!mutating)].as_deref());
    let client = client.map_err(|reason| call_failed(format!("could not get REST client: {reason}"), 500))?;
    let uid = uuid::Uuid::new_v4().to_string();
    let mut admission_request = build_request(request, row, versioned_object);
    admission_request.insert("uid".into(), uid.clone().into());
    let body = json!({"kind": "AdmissionReview", "apiVersion": version.name(), "request": admission_request});
    let reply = client.post(server, body.to_string().into(), hook.timeout).await;
    let reply = reply.map_err(|failure| {
        call_failed(format!("failed to call webhook: {}", failure.message), failure.code)
    })?;
    let review =
        read(&reply).map_err(|reason| call_failed(format!("failed to call webhook: {reason}"), 503))?;
    let response = verify_response(review, version, &uid, mutating)
        .map_err(|reason| call_failed(format!("received invalid webhook response: {reason}"), 503))?;
    for (key, text) in response.audit_annotations.unwrap_or_default() {
        request.recorder.annotate(format!("{}/{key}", hook.name), text);
    }
    for warning in response.warnings.unwrap_or_default() {
        request.recorder.warn(warning);
    }
    if response.allowed != Some(true) {
        return Err(WebhookError::Rejected(Box::new(rejected_status(
            &hook.name,
            &response.status.unwrap_or_default(),
        ))));
    }
    let patch = match (mutating, response.patch.filter(|patch| !patch.is_empty())) {
        (true, Some(patch)) => Some(decode_patch(&patch, response.patch_type.as_deref(), version)?),
        _ => None,
    };
    Ok(WebhookResponse { patch })
}

/// The AdmissionRequest for webhooks and policies, without uid.
pub fn build_request(
    request: &Request<'_>,
    row: &'static Resource,
    versioned_object: &Value,
) -> Map<String, Value> {
    let kind = |row| {
        let (group, version, kind) = conversion::kind_of(row, request.subresource);
        json!({"group": group, "version": version, "kind": kind})
    };
    let resource =
        |row: &Resource| json!({"group": row.group, "version": row.version, "resource": row.plural});
    let old = request.old.map_or(Value::Null, |old| conversion::to_versioned(request, row, old));
    let mut out = Map::new();
    let mut put = |name: &str, value: Value| drop(out.insert(name.to_owned(), value));
    put("kind", kind(row));
    put("resource", resource(row));
    put("requestKind", kind(request.requested_row));
    put("requestResource", resource(request.requested_row));
    if !request.subresource.is_empty() {
        put("subResource", request.subresource.into());
        put("requestSubResource", request.subresource.into());
    }
    let namespace = matching::namespace(request);
    for (name, text) in [("name", request.review_name.as_str()), ("namespace", namespace)] {
        if !text.is_empty() {
            put(name, text.into());
        }
    }
    put("operation", request.operation.as_str().into());
    put("userInfo", request.user.map_or_else(|| json!({}), user_info));
    put("object", versioned_object.clone());
    put("oldObject", old);
    put("dryRun", request.dry_run.into());
    put("options", options(request));
    out
}

fn options(request: &Request<'_>) -> Value {
    let kind = match request.operation {
        Operation::Create => "CreateOptions",
        Operation::Update => "UpdateOptions",
        Operation::Delete => "DeleteOptions",
        Operation::Connect => return Value::Null,
    };
    let mut options = request.options.as_object().cloned().unwrap_or_default();
    options.retain(|_, value| !value.is_null());
    options.insert("kind".into(), kind.into());
    options.insert("apiVersion".into(), "meta.k8s.io/v1".into());
    options.into()
}

/// The fields of an AdmissionReview response that are used.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AdmissionReviewResponse {
    api_version: Option<String>,
    kind: Option<String>,
    response: Option<Response>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    uid: Option<String>,
    allowed: Option<bool>,
    status: Option<Value>,
    patch: Option<String>,
    patch_type: Option<String>,
    audit_annotations: Option<BTreeMap<String, String>>,
    warnings: Option<Vec<String>>,
}

fn read(reply: &[u8]) -> Result<AdmissionReviewResponse, String> {
    serde_json::from_slice(reply).map_err(|error| match schema::syntax::syntax_error(reply) {
        Some(reason) => format!("couldn't get version/kind; json parse error: {reason}"),
        None => error.to_string(),
    })
}

fn verify_response(
    review: AdmissionReviewResponse,
    version: ReviewVersion,
    uid: &str,
    mutating: bool,
) -> Result<Response, String> {
    let response = review.response.ok_or("webhook response was absent")?;
    // As upstream, `v1beta1` responses are not verified.
    if version == ReviewVersion::V1Beta1 {
        return Ok(response);
    }
    let response_uid = response.uid.as_deref().unwrap_or("");
    if response_uid != uid {
        return Err(format!("expected response.uid={}, got {}", quote(uid), quote(response_uid)));
    }
    let (api_version, kind) = (review.api_version.unwrap_or_default(), review.kind.unwrap_or_default());
    if (api_version.as_str(), kind.as_str()) != (version.name(), "AdmissionReview") {
        let slash = if api_version.contains('/') { "" } else { "/" };
        return Err(format!(
            "expected webhook response of {}, Kind=AdmissionReview, got {slash}{api_version}, Kind={kind}",
            version.name()
        ));
    }
    let patch = response.patch.as_ref().is_some_and(|patch| !patch.is_empty());
    let wrong = match (mutating, patch, response.patch_type.as_deref()) {
        (true, true, None) => "webhook returned response.patch but not response.patchType",
        (true, false, Some(_)) => "webhook returned response.patchType but not response.patch",
        (true, _, Some("")) => "webhook returned invalid response.patchType of \"\"",
        (false, true, _) => "validating webhook may not return response.patch",
        (false, _, Some(_)) => "validating webhook may not return response.patchType",
        _ => return Ok(response),
    };
    Err(wrong.to_owned())
}

fn decode_patch(patch: &str, kind: Option<&str>, version: ReviewVersion) -> Result<Value, WebhookError> {
    let bad = |reason: String| {
        call_failed(format!("received undecodable patch in webhook response: {reason}"), 503)
    };
    let bytes = STANDARD.decode(patch).map_err(|error| bad(error.to_string()))?;
    let patch: Value = serde_json::from_slice(&bytes)
        .map_err(|error| bad(schema::syntax::syntax_error(&bytes).unwrap_or_else(|| error.to_string())))?;
    if !patch.is_array() && !patch.is_null() {
        return Err(bad("json: cannot unmarshal object into Go value of type jsonpatch.Patch".to_owned()));
    }
    match (version, kind) {
        (ReviewVersion::V1, Some(other)) if other != "JSONPatch" => {
            Err(call_failed(format!("unsupported patch type {}", quote(other)), 400))
        }
        _ => Ok(patch),
    }
}

/// The Status of a denial, from the Status in the response.
fn rejected_status(name: &str, webhook_status: &Value) -> Status {
    let prefix = format!("admission webhook {} denied the request", quote(name));
    let message = match (webhook_status.text("message"), webhook_status.text("reason")) {
        ("", "") => format!("{prefix} without explanation"),
        ("", reason) => format!("{prefix}: {reason}"),
        (message, _) => format!("{prefix}: {message}"),
    };
    let code = webhook_status
        .int("code")
        .and_then(|code| u16::try_from(code).ok())
        .filter(|code| (400..1000).contains(code));
    let mut status = Status::failure(code.unwrap_or(400), "", message);
    status.reason = Cow::Owned(webhook_status.text("reason").to_owned());
    let details = webhook_status.at("details");
    if details.is_object() {
        let text = |name: &str| details.text(name).to_owned();
        let causes = details.items("causes").iter().map(|cause| StatusCause {
            reason: cause.text("reason").to_owned(),
            message: cause.text("message").to_owned(),
            field: cause.text("field").to_owned(),
        });
        let retry_after =
            details.int("retryAfterSeconds").and_then(|retry_after| u32::try_from(retry_after).ok());
        status.details = Some(StatusDetails {
            name: text("name"),
            group: text("group"),
            kind: text("kind"),
            uid: text("uid"),
            causes: causes.collect(),
            retry_after_seconds: retry_after.unwrap_or(0),
        });
    }
    status
}

/// Whether the match conditions of a webhook hold.
pub fn conditions_match(
    server: &Server,
    hook: &Hook,
    request: &Request<'_>,
    row: &'static Resource,
    versioned_object: &Value,
) -> Result<bool, String> {
    let mut admission_request = build_request(request, row, versioned_object);
    admission_request.remove("object");
    let old = admission_request.remove("oldObject").unwrap_or_default();
    let Some(user) = request.user else { return Ok(false) };
    let subject = ConditionInput {
        server,
        user,
        request: &admission_request.into(),
        object: versioned_object,
        old: &old,
    };
    expressions::conditions_match(&hook.conditions, &subject)
}
