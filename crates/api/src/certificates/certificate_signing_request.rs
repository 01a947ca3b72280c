//! CertificateSigningRequest: REST strategy and validation. Requester, approver and signer use
//! different endpoints: the spec is immutable, `/approval` sets the conditions Approved and Denied,
//! `/status` sets the certificate and the other conditions.

use std::collections::HashSet;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::pem::Pem;
use x509_parser::prelude::{AttributeTypeAndValue, FromDer, X509Name};

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::{NameFormat, RestStrategy};
use crate::{meta, names};

const LEGACY_SIGNER: &str = "kubernetes.io/legacy-unknown";
const MIN_EXPIRATION_SECONDS: i64 = 600;
const APPROVED: &str = "Approved";
const DENIED: &str = "Denied";
const FAILED: &str = "Failed";

const USAGES: [&str; 23] = [
    "any",
    "cert sign",
    "client auth",
    "code signing",
    "content commitment",
    "crl sign",
    "data encipherment",
    "decipher only",
    "digital signature",
    "email protection",
    "encipher only",
    "ipsec end system",
    "ipsec tunnel",
    "ipsec user",
    "key agreement",
    "key encipherment",
    "microsoft sgc",
    "netscape sgc",
    "ocsp signing",
    "s/mime",
    "server auth",
    "signing",
    "timestamping",
];

pub struct CertificateSigningRequest;

impl RestStrategy for CertificateSigningRequest {
    /// Clears the requester fields. The caller sets them with [`set_requester`].
    fn prepare_for_create(&self, new: &mut Value) {
        let spec = new.object_mut("spec");
        for field in ["username", "uid", "groups", "extra"] {
            spec.remove(field);
        }
        new.set("status", json!({}));
    }

    fn prepare_for_update(&self, new: &mut Value, old: &Value) {
        new.set("spec", old.at("spec").clone());
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate_spec(obj.at("spec"), None, errors);
        validate_conditions(obj.at("status"), None, errors);
        validate_certificate(obj, None, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        errors.0.retain(|error| error.path.as_str().starts_with("metadata"));
        validate_csr_update(new, old, UpdateEndpoint::Main, errors);
    }

    fn validate_status_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        validate_csr_update(new, old, UpdateEndpoint::Status, errors);
    }

    fn name_format(&self) -> NameFormat {
        NameFormat::PathSegment
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        vec![("spec.signerName", obj.at("spec").text("signerName").to_owned())]
    }
}

/// Sets the requester from the authenticated user.
pub fn set_requester(
    csr: &mut Value,
    username: &str,
    uid: &str,
    groups: &[String],
    extra: &Map<String, Value>,
) {
    let spec = csr.object_mut("spec");
    for (field, text) in [("username", username), ("uid", uid)] {
        if !text.is_empty() {
            spec.insert(field.to_owned(), text.into());
        }
    }
    if !groups.is_empty() {
        spec.insert("groups".to_owned(), groups.into());
    }
    if !extra.is_empty() {
        spec.insert("extra".to_owned(), extra.clone().into());
    }
}

/// Prepares an update through `/status`: keeps the spec, and the conditions Approved and Denied unless
/// the client adds or removes one, which validation rejects. `now` is an RFC 3339 time.
pub fn prepare_status(new: &mut Value, old: &Value, now: &str) {
    new.set("spec", old.at("spec").clone());
    for kind in [APPROVED, DENIED] {
        let before: Vec<Value> = conditions_of_type(old, kind).cloned().collect();
        if conditions_of_type(new, kind).count() != before.len() {
            continue;
        }
        let list = conditions_mut(new);
        let conditions = list.iter_mut().filter(|condition| condition.text("type") == kind);
        conditions.zip(before).for_each(|(target, condition)| *target = condition);
    }
    stamp_conditions(new, old, now);
}

/// Prepares an update through `/approval`: only the conditions may change.
pub fn prepare_approval(new: &mut Value, old: &Value, now: &str) {
    stamp_conditions(new, old, now);
    let conditions = new.path("status.conditions").clone();
    new.set("spec", old.at("spec").clone());
    new.set("status", old.at("status").clone());
    let status = new.object_mut("status");
    status.remove("conditions");
    if !conditions.is_null() {
        status.insert("conditions".to_owned(), conditions);
    }
}

pub fn validate_approval(new: &Value, old: &Value, errors: &mut ErrorList) {
    validate_csr_update(new, old, UpdateEndpoint::Approval, errors);
}

/// The endpoints, which differ in what they may change.
#[derive(Clone, Copy, PartialEq)]
enum UpdateEndpoint {
    Main,
    Status,
    Approval,
}

fn conditions_mut(csr: &mut Value) -> &mut [Value] {
    csr.get_mut("status")
        .and_then(|status| status.get_mut("conditions"))
        .and_then(Value::as_array_mut)
        .map_or(&mut [], Vec::as_mut_slice)
}

fn conditions_of_type<'a>(csr: &'a Value, kind: &'a str) -> impl Iterator<Item = &'a Value> {
    csr.at("status").items("conditions").iter().filter(move |condition| condition.text("type") == kind)
}

fn stamp_conditions(new: &mut Value, old: &Value, now: &str) {
    for condition in conditions_mut(new) {
        condition.set_default("lastUpdateTime", now);
        let same = |before: &&Value| {
            ["type", "status"].iter().all(|field| before.text(field) == condition.text(field))
                && before.has("lastTransitionTime")
        };
        let before = old.at("status").items("conditions").iter().find(same);
        let since = before.map_or(now, |before| before.text("lastTransitionTime")).to_owned();
        condition.set_default("lastTransitionTime", since);
    }
}

fn validate_spec(spec: &Value, old: Option<&Value>, errors: &mut ErrorList) {
    let path = Path::new("spec");
    let request = spec.text("request");
    if let Some(error) = request_error(request) {
        errors.invalid(&path.child("request"), request, error);
    }
    let usages: Vec<&str> = spec.items("usages").iter().map(|usage| usage.as_str().unwrap_or("")).collect();
    let at_usages = path.child("usages");
    if usages.is_empty() {
        errors.required(&at_usages, "");
    }
    // The spec is immutable, so updates do not validate it again.
    if old.is_none() {
        for (i, usage) in usages.iter().enumerate().filter(|(_, usage)| !USAGES.contains(usage)) {
            errors.not_supported(&at_usages.index(i), *usage, &USAGES);
        }
        let mut seen = HashSet::new();
        for (i, usage) in usages.iter().enumerate() {
            if !seen.insert(usage) {
                errors.duplicate(&at_usages.index(i), *usage);
            }
        }
    }
    let signer = spec.text("signerName");
    if signer == LEGACY_SIGNER && old.is_none() {
        let message = "the legacy signerName is not allowed via this API version";
        errors.invalid(&path.child("signerName"), signer, message);
    } else {
        validate_signer_name(signer, &path.child("signerName"), errors);
    }
    if let Some(seconds) = spec.int("expirationSeconds").filter(|seconds| *seconds < MIN_EXPIRATION_SECONDS) {
        let message = "may not specify a duration less than 600 seconds (10 minutes)";
        errors.invalid(&path.child("expirationSeconds"), seconds, message);
    }
}

fn pem_blocks(base64: &str) -> Vec<Pem> {
    let bytes = STANDARD.decode(base64).unwrap_or_default();
    Pem::iter_from_buffer(&bytes).map_while(Result::ok).collect()
}

fn request_error(request: &str) -> Option<&'static str> {
    match pem_blocks(request).first() {
        Some(block) if block.label == "CERTIFICATE REQUEST" => {
            let parsed = X509CertificationRequest::from_der(&block.contents);
            parsed.is_err().then_some("asn1: structure error: not a certificate request")
        }
        _ => Some("PEM block type must be CERTIFICATE REQUEST"),
    }
}

/// The organizations in the subject of the request. They become groups.
pub fn organizations(csr: &Value) -> Result<Vec<String>, &'static str> {
    subject(csr, |subject| attribute_strings(subject.iter_organization()))
}

/// The common names in the subject of the request. The common name becomes the user name.
pub fn common_names(csr: &Value) -> Result<Vec<String>, &'static str> {
    subject(csr, |subject| attribute_strings(subject.iter_common_name()))
}

fn subject(csr: &Value, read: impl Fn(&X509Name<'_>) -> Vec<String>) -> Result<Vec<String>, &'static str> {
    let request = csr.at("spec").text("request");
    if let Some(error) = request_error(request) {
        return Err(error);
    }
    let block = pem_blocks(request).into_iter().next();
    let parsed = block.as_ref().and_then(|block| X509CertificationRequest::from_der(&block.contents).ok());
    Ok(parsed.map(|(_, parsed)| read(&parsed.certification_request_info.subject)).unwrap_or_default())
}

/// Values that are not strings are ignored.
fn attribute_strings<'a>(parts: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>) -> Vec<String> {
    parts.filter_map(|part| part.as_str().ok()).map(str::to_owned).collect()
}

/// Validates a signer name such as `example.com/signer`.
fn validate_signer_name(name: &str, path: &Path, errors: &mut ErrorList) {
    const MAX_SUBDOMAIN_BYTES: usize = 253;
    if name.is_empty() {
        errors.required(path, "");
        return;
    }
    let parts: Vec<&str> = name.split('/').collect();
    let [domain, rest] = parts.as_slice() else {
        let message = "must be a fully qualified domain and path of the form 'example.com/signer-name'";
        errors.invalid(path, name, message);
        return;
    };
    if domain.len() > MAX_SUBDOMAIN_BYTES {
        errors.too_long(path, MAX_SUBDOMAIN_BYTES);
    }
    report_first_invalid_label(domain, names::dns1123_label, path, errors);
    if !domain.contains('.') {
        errors.invalid(path, *domain, "should be a domain with at least two segments separated by dots");
    }
    report_first_invalid_label(rest, names::dns1123_subdomain, path, errors);
    let max_bytes = MAX_SUBDOMAIN_BYTES + 1 + MAX_SUBDOMAIN_BYTES + 1 + 63;
    if name.len() > max_bytes {
        errors.too_long(path, max_bytes);
    }
}

/// Reports only the first invalid label.
fn report_first_invalid_label(
    part: &str,
    check: fn(&str) -> Vec<String>,
    path: &Path,
    errors: &mut ErrorList,
) {
    let bad = part.split('.').map(|label| (label, check(label))).find(|(_, messages)| !messages.is_empty());
    if let Some((label, messages)) = bad {
        for message in messages {
            errors.invalid(path, part, &format!("validating label {label:?}: {message}"));
        }
    }
}

/// Validates the conditions. Violations that the old object has are allowed.
fn validate_conditions(status: &Value, old: Option<&Value>, errors: &mut ErrorList) {
    let path = Path::new("status.conditions");
    let old_types: Vec<&str> = old
        .map_or(&[][..], |old| old.at("status").items("conditions"))
        .iter()
        .map(|condition| condition.text("type"))
        .collect();
    let had_both = old_types.contains(&APPROVED) && old_types.contains(&DENIED);
    let had_empty = old_types.contains(&"");
    let had_duplicates = old_types.iter().collect::<HashSet<_>>().len() < old_types.len();
    let mut seen = HashSet::new();
    for (i, condition) in status.items("conditions").iter().enumerate() {
        let (kind, state, at) = (condition.text("type"), condition.text("status"), path.index(i));
        if kind.is_empty() && !had_empty {
            errors.required(&at.child("type"), "");
        }
        let known: &[&str] = match kind {
            APPROVED | DENIED | FAILED => &["True"],
            _ => &["False", "True", "Unknown"],
        };
        if state.is_empty() {
            errors.required(&at.child("status"), "");
        } else if !known.contains(&state) {
            errors.not_supported(&at.child("status"), state, known);
        }
        let other = if kind == APPROVED { DENIED } else { APPROVED };
        if matches!(kind, APPROVED | DENIED) && seen.contains(other) && !had_both {
            errors.invalid(&path, kind, "Approved and Denied conditions are mutually exclusive");
        }
        if !seen.insert(kind) && !had_duplicates {
            errors.duplicate(&at.child("type"), kind);
        }
    }
}

fn validate_certificate(csr: &Value, old: Option<&Value>, errors: &mut ErrorList) {
    let given = csr.at("status").text("certificate");
    let before = old.map(|old| old.at("status").text("certificate"));
    let allowed = before.is_some_and(|before| before == given || certificate_error(before).is_some());
    if !allowed && let Some(error) = certificate_error(given) {
        errors.invalid(&Path::new("status.certificate"), "<certificate data>", &error);
    }
}

fn certificate_error(base64: &str) -> Option<String> {
    if base64.is_empty() {
        return None;
    }
    let blocks = pem_blocks(base64);
    if blocks.is_empty() {
        return Some("must contain at least one CERTIFICATE PEM block".to_owned());
    }
    blocks.iter().find_map(|block| {
        if block.label != "CERTIFICATE" {
            let label = Value::from(block.label.as_str());
            return Some(format!("only CERTIFICATE PEM blocks are allowed, found {label}"));
        }
        block.parse_x509().is_err().then(|| "x509: malformed certificate".to_owned())
    })
}

fn validate_csr_update(new: &Value, old: &Value, endpoint: UpdateEndpoint, errors: &mut ErrorList) {
    validate_spec(new.at("spec"), Some(old), errors);
    validate_conditions(new.at("status"), Some(old), errors);
    validate_certificate(new, Some(old), errors);

    let path = Path::new("status.conditions");
    let count = |csr: &Value, kind: &str| conditions_of_type(csr, kind).count();
    for kind in [APPROVED, DENIED, FAILED] {
        if count(new, kind) < count(old, kind) {
            errors.forbidden(&path, &format!("updates may not remove a condition of type \"{kind}\""));
        }
    }
    if endpoint != UpdateEndpoint::Approval {
        for kind in [APPROVED, DENIED] {
            let (new_count, old_count) = (count(new, kind), count(old, kind));
            let changed = || {
                conditions_of_type(new, kind)
                    .zip(conditions_of_type(old, kind))
                    .any(|(a, b)| !meta::semantic_equal(a, b))
            };
            if new_count > old_count {
                errors.forbidden(&path, &format!("updates may not add a condition of type \"{kind}\""));
            } else if new_count == old_count && changed() {
                errors.forbidden(&path, &format!("updates may not modify a condition of type \"{kind}\""));
            }
        }
    }
    let (given, before) = (new.at("status").text("certificate"), old.at("status").text("certificate"));
    if given != before {
        let path = Path::new("status.certificate");
        if endpoint != UpdateEndpoint::Status {
            errors.forbidden(&path, "updates may not set certificate content");
        } else if !before.is_empty() {
            errors.forbidden(&path, "updates may not modify existing certificate content");
        }
    }
}
