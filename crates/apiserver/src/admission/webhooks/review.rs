//! What a webhook is told, an AdmissionReview, and what its answer means.

use api::field::quoted;
use api::json::Json as _;
use api::status::{Cause, Details};
use api::{Resource, Status};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;

use super::config::{Hook, Version};
use super::{form, matching};
use crate::admission::expressions::{self, Subject};
use crate::admission::{Operation, Request};
use crate::server::Server;
use crate::tokens::user_info;

/// A webhook that lets the request pass.
#[derive(Debug)]
pub struct Answer {
    /// Operations on the object as it was told.
    pub patch: Option<Value>,
}

/// A webhook that does not.
#[derive(Debug)]
pub enum Trouble {
    /// It could not be asked, or said nothing of use; its failure policy decides.
    Calling { why: String, code: u16 },
    /// It says no.
    Rejected(Box<Status>),
    /// It may not be asked, or what it wants cannot be done.
    Internal(Box<Status>),
}

fn calling(why: impl Into<String>, code: u16) -> Trouble {
    Trouble::Calling { why: why.into(), code }
}

/// Asks one webhook about a request whose object it is told as `told`.
pub async fn ask(
    server: &Server,
    hook: &Hook,
    request: &Request<'_>,
    row: &'static Resource,
    told: &Value,
    mutating: bool,
) -> Result<Answer, Trouble> {
    match hook.side_effects {
        _ if !request.dry_run => {}
        None => return Err(calling("Webhook SideEffects is nil", 400)),
        Some(true) => {
            let why = format!("admission webhook {} does not support dry run", quoted(&hook.name));
            return Err(Trouble::Internal(Box::new(Status::bad_request(why))));
        }
        Some(false) => {}
    }
    let Some(version) = hook.version else {
        let why = "could not create admission objects: webhook does not accept known AdmissionReview versions (v1, v1beta1)";
        return Err(calling(why, 400));
    };
    let users = &server.admission.settings.webhook_users;
    let callout = hook.callout(users[usize::from(!mutating)].as_deref());
    let callout = callout.map_err(|why| calling(format!("could not get REST client: {why}"), 500))?;
    let uid = uuid::Uuid::new_v4().to_string();
    let mut asked = request_of(request, row, told);
    asked.insert("uid".into(), uid.clone().into());
    let body = json!({"kind": "AdmissionReview", "apiVersion": version.name(), "request": asked});
    let reply = callout.post(server, body.to_string().into(), hook.timeout).await;
    let reply = reply
        .map_err(|failure| calling(format!("failed to call webhook: {}", failure.message), failure.code))?;
    let review = read(&reply).map_err(|why| calling(format!("failed to call webhook: {why}"), 503))?;
    let response = check(review, version, &uid, mutating)
        .map_err(|why| calling(format!("received invalid webhook response: {why}"), 503))?;
    for (key, text) in response.audit_annotations.unwrap_or_default() {
        request.remarks.annotate(format!("{}/{key}", hook.name), text);
    }
    for warning in response.warnings.unwrap_or_default() {
        request.remarks.warn(warning);
    }
    if response.allowed != Some(true) {
        return Err(Trouble::Rejected(Box::new(denied(&hook.name, &response.status.unwrap_or_default()))));
    }
    let patch = match (mutating, response.patch.filter(|patch| !patch.is_empty())) {
        (true, Some(patch)) => Some(decode_patch(&patch, response.patch_type.as_deref(), version)?),
        _ => None,
    };
    Ok(Answer { patch })
}

/// The request as webhooks and policies see it, without a uid.
pub fn request_of(request: &Request<'_>, row: &'static Resource, told: &Value) -> Map<String, Value> {
    let kind = |row| {
        let (group, version, kind) = form::kind_of(row, request.subresource);
        json!({"group": group, "version": version, "kind": kind})
    };
    let resource =
        |row: &Resource| json!({"group": row.group, "version": row.version, "resource": row.plural});
    let old = request.old.map_or(Value::Null, |old| form::told(request, row, old));
    let mut out = Map::new();
    let mut put = |name: &str, value: Value| drop(out.insert(name.to_owned(), value));
    put("kind", kind(row));
    put("resource", resource(row));
    put("requestKind", kind(request.asked));
    put("requestResource", resource(request.asked));
    if !request.subresource.is_empty() {
        put("subResource", request.subresource.into());
        put("requestSubResource", request.subresource.into());
    }
    let namespace = matching::namespace(request);
    for (name, text) in [("name", request.told_name.as_str()), ("namespace", namespace)] {
        if !text.is_empty() {
            put(name, text.into());
        }
    }
    put("operation", request.operation.word().into());
    put("userInfo", request.user.map_or_else(|| json!({}), user_info));
    put("object", told.clone());
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

/// What comes back, as far as it is looked at.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
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

fn read(reply: &[u8]) -> Result<Review, String> {
    serde_json::from_slice(reply).map_err(|error| match schema::syntax::error(reply) {
        Some(why) => format!("couldn't get version/kind; json parse error: {why}"),
        None => error.to_string(),
    })
}

fn check(review: Review, version: Version, uid: &str, mutating: bool) -> Result<Response, String> {
    let response = review.response.ok_or("webhook response was absent")?;
    // The old version has never been so strict.
    if version == Version::V1Beta1 {
        return Ok(response);
    }
    let said = response.uid.as_deref().unwrap_or("");
    if said != uid {
        return Err(format!("expected response.uid={}, got {}", quoted(uid), quoted(said)));
    }
    let (said, kind) = (review.api_version.unwrap_or_default(), review.kind.unwrap_or_default());
    if (said.as_str(), kind.as_str()) != (version.name(), "AdmissionReview") {
        let slash = if said.contains('/') { "" } else { "/" };
        return Err(format!(
            "expected webhook response of {}, Kind=AdmissionReview, got {slash}{said}, Kind={kind}",
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

fn decode_patch(patch: &str, kind: Option<&str>, version: Version) -> Result<Value, Trouble> {
    let bad = |why: String| calling(format!("received undecodable patch in webhook response: {why}"), 503);
    let bytes = STANDARD.decode(patch).map_err(|error| bad(error.to_string()))?;
    let patch: Value = serde_json::from_slice(&bytes)
        .map_err(|error| bad(schema::syntax::error(&bytes).unwrap_or_else(|| error.to_string())))?;
    if !patch.is_array() && !patch.is_null() {
        return Err(bad("json: cannot unmarshal object into Go value of type jsonpatch.Patch".to_owned()));
    }
    match (version, kind) {
        (Version::V1, Some(other)) if other != "JSONPatch" => {
            Err(calling(format!("unsupported patch type {}", quoted(other)), 400))
        }
        _ => Ok(patch),
    }
}

/// A refusal in the webhook's own words, as far as it has any.
fn denied(name: &str, said: &Value) -> Status {
    let by = format!("admission webhook {} denied the request", quoted(name));
    let message = match (said.text("message"), said.text("reason")) {
        ("", "") => format!("{by} without explanation"),
        ("", reason) => format!("{by}: {reason}"),
        (message, _) => format!("{by}: {message}"),
    };
    let code =
        said.int("code").and_then(|code| u16::try_from(code).ok()).filter(|code| (400..1000).contains(code));
    let mut status = Status::failure(code.unwrap_or(400), "", message);
    status.reason = Cow::Owned(said.text("reason").to_owned());
    let details = said.at("details");
    if details.is_object() {
        let text = |name: &str| details.text(name).to_owned();
        let causes = details.items("causes").iter().map(|cause| Cause {
            reason: cause.text("reason").to_owned(),
            message: cause.text("message").to_owned(),
            field: cause.text("field").to_owned(),
        });
        let wait = details.int("retryAfterSeconds").and_then(|wait| u32::try_from(wait).ok());
        status.details = Some(Details {
            name: text("name"),
            group: text("group"),
            kind: text("kind"),
            uid: text("uid"),
            causes: causes.collect(),
            retry_after_seconds: wait.unwrap_or(0),
        });
    }
    status
}

/// Whether a webhook's own conditions hold.
pub fn conditions(
    server: &Server,
    hook: &Hook,
    request: &Request<'_>,
    row: &'static Resource,
    told: &Value,
) -> Result<bool, String> {
    let mut asked = request_of(request, row, told);
    asked.remove("object");
    let old = asked.remove("oldObject").unwrap_or_default();
    let Some(user) = request.user else { return Ok(false) };
    let subject = Subject { server, user, request: &asked.into(), object: told, old: &old };
    expressions::hold(&hook.conditions, &subject)
}
