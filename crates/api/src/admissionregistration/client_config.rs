//! `WebhookClientConfig`: a URL or a Service reference, and the CA bundle of the webhook server.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use x509_parser::pem::Pem;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

/// Validates a `WebhookClientConfig` of an admission or conversion webhook.
pub fn validate_client_config(config: &Value, path: &Path, errors: &mut ErrorList) {
    match (config.at("url").as_str(), config.at("service")) {
        (Some(address), Value::Null) => url(address, &path.child("url"), errors),
        (None, at) if !at.is_null() => service(at, &path.child("service"), errors),
        _ => errors.required(path, "exactly one of url or service is required"),
    }
}

fn url(address: &str, path: &Path, errors: &mut ErrorList) {
    const URL_FORMAT: &str = "; desired format: https://host[/path]";
    if address.contains(|c: char| c.is_ascii_control() || c == ' ') {
        let detail =
            format!("url must be a valid URL: parse {address:?}: invalid character in URL{URL_FORMAT}");
        errors.required(path, &detail);
        return;
    }
    let (rest, fragment) = address.split_once('#').unwrap_or((address, ""));
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (scheme, rest) = rest.split_once(':').unwrap_or(("", rest));
    let authority = rest.strip_prefix("//").map_or("", |rest| rest.split('/').next().unwrap_or(""));
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    if !scheme.eq_ignore_ascii_case("https") {
        errors.invalid(path, scheme, &format!("'https' is the only allowed URL scheme{URL_FORMAT}"));
    }
    if host.is_empty() {
        errors.invalid(path, "", &format!("host must be specified{URL_FORMAT}"));
    }
    if !user.is_empty() {
        errors.invalid(path, user, "user information is not permitted in the URL");
    }
    if !fragment.is_empty() {
        errors.invalid(path, fragment, "fragments are not permitted in the URL");
    }
    if !query.is_empty() {
        errors.invalid(path, query, "query parameters are not permitted in the URL");
    }
}

fn service(service: &Value, path: &Path, errors: &mut ErrorList) {
    validate_service_reference(service, ["name", "namespace"], path, errors);
    url_path(service.text("path"), &path.child("path"), errors);
}

/// Validates the Service reference of a webhook or APIService. `required` are the required fields, in
/// upstream's order.
pub(crate) fn validate_service_reference(
    service: &Value,
    required: [&str; 2],
    path: &Path,
    errors: &mut ErrorList,
) {
    for field in required {
        if service.text(field).is_empty() {
            errors.required(&path.child(field), "");
        }
    }
    let port = service.int("port").unwrap_or(443);
    let messages = names::port_number(port);
    if !messages.is_empty() {
        let message = format!("port is not valid: {}", messages.join(", "));
        errors.invalid(&path.child("port"), port, &message);
    }
}

fn url_path(value: &str, path: &Path, errors: &mut ErrorList) {
    match value {
        "" | "/" => return,
        "//" => {
            errors.invalid(path, value, "segment[0] may not be empty");
            return;
        }
        _ => {}
    }
    let steps = value.strip_prefix('/').unwrap_or_else(|| {
        errors.invalid(path, value, "must start with a '/'");
        // Upstream skips the first character even if it is not a slash.
        value.char_indices().nth(1).map_or("", |(i, _)| &value[i..])
    });
    for (i, step) in steps.strip_suffix('/').unwrap_or(steps).split('/').enumerate() {
        if step.is_empty() {
            errors.invalid(path, value, &format!("segment[{i}] may not be empty"));
            continue;
        }
        for message in names::dns1123_subdomain(step) {
            errors.invalid(path, value, &format!("segment[{i}]: {message}"));
        }
    }
}

/// The validation error of a `caBundle`, which is base64 as in JSON.
pub fn ca_bundle_error(bundle: &str) -> Option<&'static str> {
    const NOT_PEM: &str = "unable to load root certificates: unable to parse bytes as PEM block";
    const INVALID_CERTIFICATE: &str = "unable to load root certificates: failed to parse certificate";
    let Ok(bytes) = STANDARD.decode(bundle) else { return Some(NOT_PEM) };
    let blocks: Vec<Pem> = Pem::iter_from_buffer(&bytes).map_while(Result::ok).collect();
    let mut certificates = blocks.iter().filter(|block| block.label == "CERTIFICATE").peekable();
    if certificates.peek().is_none() {
        return Some(NOT_PEM);
    }
    certificates.any(|block| block.parse_x509().is_err()).then_some(INVALID_CERTIFICATE)
}
