//! TokenRequest: `POST serviceaccounts/<name>/token`.

use api::field::Path;
use api::json::JsonExt as _;
use api::{ErrorList, Status};
use http::{Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::claims::{BoundObjects, Claims, Reference, subject};
use super::{Tokens, core_target};
use crate::body::Body;
use crate::codec;
use crate::render::encode_response;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::write::{WriteOptions, with_warnings};

const TOKEN_REQUEST_KIND: (&str, &str, &str) = ("authentication.k8s.io", "v1", "TokenRequest");
/// The expiration that kubelets request for default pod tokens. Upstream extends these to a year,
/// since clients may not reload them.
const WARN_ONLY_SECONDS: i64 = 60 * 60 + 7;
const EXTENDED_SECONDS: i64 = 365 * 24 * 60 * 60;

pub async fn issue(server: &Server, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    let options = WriteOptions::parse(call, "CreateOptions")?;
    let media = codec::body_media(&call.headers)?;
    let decoded = codec::decode(media, &call.body, TOKEN_REQUEST_KIND, options.validation)?;
    let mut request = decoded.value;
    let ty = codec::type_of(TOKEN_REQUEST_KIND.0, TOKEN_REQUEST_KIND.1, TOKEN_REQUEST_KIND.2)?;
    api::defaults::set_defaults(schema::kubernetes(), ty, &mut request);
    check_name(&request, target)?;
    crate::create::set_namespace(&mut request, target)?;
    server.admit_subresource_create(target, &mut request, &options).await?;
    let writer = patch::apply::FieldManager {
        manager: &options.manager,
        api_version: &codec::api_version(TOKEN_REQUEST_KIND.0, TOKEN_REQUEST_KIND.1),
        subresource: "token",
        now: &options.timestamp(),
        ignore: &[],
    };
    patch::apply::track(schema::kubernetes(), ty, None, &mut request, &writer);

    let account =
        current_object(server, &core_target("serviceaccounts", &target.namespace, &target.name)).await?;
    let uid = account.at("metadata").text("uid");
    complete(&mut request, target, uid, &server.tokens)?;
    request.object_mut("metadata").insert("creationTimestamp".into(), options.timestamp().into());
    let mut errors = ErrorList::default();
    api::authentication::token_request::validate(&request, &mut errors);
    if !errors.is_empty() {
        return Err(Status::invalid(TOKEN_REQUEST_KIND.0, TOKEN_REQUEST_KIND.2, "", &errors));
    }
    let mut bound = bound_object(server, target, request.at("spec").at("boundObjectRef")).await?;
    bound.namespace = target.namespace.clone();
    bound.serviceaccount = Reference { name: target.name.clone(), uid: uid.to_owned() };

    let requested_seconds = api::authentication::token_request::expiration_seconds(&request);
    if let Some(max_seconds) =
        server.tokens.max_expiration_seconds.filter(|max_seconds| requested_seconds > *max_seconds)
    {
        call.recorder.warn(format!(
            "requested expiration of {requested_seconds} seconds shortened to {max_seconds} seconds"
        ));
        request["spec"]["expirationSeconds"] = max_seconds.into();
    }
    let (claims, expires_at) = build_claims(&request, bound, &server.tokens, call.now);
    let claims = serde_json::to_value(&claims).map_err(Status::internal)?;
    let token = server.tokens.keys.sign(&claims);
    let token = token.map_err(|error| Status::internal(format!("failed to generate token: {error}")))?;
    request["status"] = json!({"token": token, "expirationTimestamp": api::time::rfc3339(expires_at)});
    Ok(with_warnings(encode_response(StatusCode::CREATED, &call.format, request), &decoded.warnings))
}

fn check_name(request: &Value, target: &Target) -> Result<(), Status> {
    let name = request.at("metadata").text("name");
    let mut errors = ErrorList::default();
    if !name.is_empty() && name != target.name {
        let path = Path::new("metadata.name");
        errors.invalid(&path, name, "must match the service account name if specified");
        return Err(Status::invalid(TOKEN_REQUEST_KIND.0, TOKEN_REQUEST_KIND.2, &target.name, &errors));
    }
    Ok(())
}

/// Fills in defaults of the request.
fn complete(request: &mut Value, target: &Target, uid: &str, tokens: &Tokens) -> Result<(), Status> {
    let metadata = request.object_mut("metadata");
    match metadata.get("uid").and_then(Value::as_str).unwrap_or("") {
        "" => {}
        requested_uid if requested_uid == uid => {}
        requested_uid => {
            let message = format!(
                "the UID in the token request ({requested_uid}) does not match the UID of the service account ({uid})"
            );
            return Err(Status::conflict(TOKEN_REQUEST_KIND.0, TOKEN_REQUEST_KIND.2, &target.name, &message));
        }
    }
    metadata.insert("uid".into(), uid.into());
    metadata.insert("name".into(), target.name.clone().into());
    if request.at("spec").items("audiences").is_empty() {
        request.object_mut("spec").insert("audiences".into(), tokens.audiences().into());
    }
    Ok(())
}

/// The bound object, which must exist.
async fn bound_object(server: &Server, target: &Target, reference: &Value) -> Result<BoundObjects, Status> {
    let mut bound = BoundObjects::default();
    if !reference.is_object() {
        return Ok(bound);
    }
    let (kind, name) = (reference.text("kind"), reference.text("name"));
    let (group, version) = match reference.text("apiVersion") {
        text if text.matches('/').count() > 1 => ("", ""),
        text => text.split_once('/').unwrap_or(("", text)),
    };
    let object = match (group, kind) {
        ("", "Pod") => core_target("pods", &target.namespace, name),
        ("", "Secret") => core_target("secrets", &target.namespace, name),
        ("", "Node") => core_target("nodes", "", name),
        _ => {
            let kind = format!("{group}/{version}, Kind={kind}");
            return Err(Status::bad_request(format!("cannot bind token to object of type {kind}")));
        }
    };
    let found = current_object(server, &object).await?;
    if kind == "Pod" {
        let spec = found.at("spec");
        if spec.text("serviceAccountName") != target.name {
            return Err(Status::bad_request(format!(
                "cannot bind token for serviceaccount {} to pod running with different serviceaccount name.",
                api::field::quote(&target.name)
            )));
        }
        bound.node = Some(spec.text("nodeName")).filter(|node| !node.is_empty()).map(|node| {
            // A node that does not exist is recorded without a UID.
            let object = server.find(&core_target("nodes", "", node)).map(|node| node.value());
            let uid = object.as_ref().map_or("", |object| object.at("metadata").text("uid"));
            Reference { name: node.to_owned(), uid: uid.to_owned() }
        });
    }
    let uid = found.at("metadata").text("uid");
    let requested_uid = reference.text("uid");
    if !requested_uid.is_empty() && requested_uid != uid {
        let message = format!(
            "the UID in the bound object reference ({requested_uid}) does not match the UID in record. The object might have been deleted and then recreated"
        );
        return Err(Status::conflict(group, kind, name, &message));
    }
    let reference = Some(Reference { name: name.to_owned(), uid: uid.to_owned() });
    match kind {
        "Pod" => bound.pod = reference,
        "Secret" => bound.secret = reference,
        _ => bound.node = reference,
    }
    Ok(bound)
}

/// The claims, and the expiration that is reported to the client.
fn build_claims(
    request: &Value,
    mut bound: BoundObjects,
    tokens: &Tokens,
    now: Timestamp,
) -> (Claims, Timestamp) {
    let spec = request.at("spec");
    let audiences: Vec<String> =
        spec.items("audiences").iter().filter_map(Value::as_str).map(str::to_owned).collect();
    let requested_seconds = api::authentication::token_request::expiration_seconds(request);
    let issued_at = now.as_second();
    let own_audiences = tokens.audiences();
    let mut seconds = requested_seconds;
    if tokens.extend_expiration
        && bound.pod.is_some()
        && requested_seconds == WARN_ONLY_SECONDS
        && audiences.iter().all(|audience| own_audiences.contains(audience))
    {
        bound.warnafter = Some(issued_at.saturating_add(requested_seconds));
        seconds = EXTENDED_SECONDS;
    }
    let claims = Claims {
        audiences,
        expires_at: issued_at.saturating_add(seconds),
        issued_at,
        issuer: tokens.issuer().to_owned(),
        id: uuid::Uuid::new_v4().to_string(),
        subject: subject(&bound.namespace, &bound.serviceaccount.name),
        kubernetes: bound,
        not_before: issued_at,
    };
    (claims, now.checked_add(SignedDuration::from_secs(requested_seconds)).unwrap_or(Timestamp::MAX))
}

async fn current_object(server: &Server, target: &Target) -> Result<Value, Status> {
    let found = server.current(target).await?;
    Ok(found.ok_or_else(|| target.not_found())?.value())
}
