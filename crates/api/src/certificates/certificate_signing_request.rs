//! CertificateSigningRequest: asked for by anyone, approved by one party, signed by another. The three write
//! through different doors: the request itself never changes, `/approval` sets the conditions Approved and
//! Denied, `/status` sets the certificate.

use std::collections::HashSet;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::pem::Pem;
use x509_parser::prelude::{AttributeTypeAndValue, FromDer, X509Name};

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::{Kind, NameRule};
use crate::{meta, names};

const LEGACY_SIGNER: &str = "kubernetes.io/legacy-unknown";
const MIN_SECONDS: i64 = 600;
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

impl Kind for CertificateSigningRequest {
    /// Forgets who the client says it is; the caller fills that in with [`set_requester`].
    fn prepare_create(&self, new: &mut Value) {
        let spec = new.object_mut("spec");
        for field in ["username", "uid", "groups", "extra"] {
            spec.remove(field);
        }
        new.set("status", json!({}));
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        new.set("spec", old.at("spec").clone());
    }

    fn validate(&self, obj: &Value, errors: &mut Errors) {
        specification(obj.at("spec"), None, errors);
        conditions(obj.at("status"), None, errors);
        certificate(obj, None, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        errors.0.retain(|complaint| complaint.path.as_str().starts_with("metadata"));
        update(new, old, Door::Main, errors);
    }

    fn validate_status(&self, new: &Value, old: &Value, errors: &mut Errors) {
        update(new, old, Door::Status, errors);
    }

    fn name_rule(&self) -> NameRule {
        NameRule::PathSegment
    }

    fn selectable(&self, obj: &Value) -> Vec<(&'static str, String)> {
        vec![("spec.signerName", obj.at("spec").text("signerName").to_owned())]
    }
}

/// Who is asking, as authenticated.
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

/// Before an update through `/status`: the request stays, and so do Approved and Denied as long as the client
/// neither adds nor removes one (which validation then refuses). `now` is an RFC 3339 time.
pub fn prepare_status(new: &mut Value, old: &Value, now: &str) {
    new.set("spec", old.at("spec").clone());
    for kind in [APPROVED, DENIED] {
        let before: Vec<Value> = of_type(old, kind).cloned().collect();
        if of_type(new, kind).count() != before.len() {
            continue;
        }
        let list = conditions_mut(new);
        let places = list.iter_mut().filter(|condition| condition.text("type") == kind);
        places.zip(before).for_each(|(place, condition)| *place = condition);
    }
    stamp_conditions(new, old, now);
}

/// Before an update through `/approval`: only the conditions change.
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

pub fn validate_approval(new: &Value, old: &Value, errors: &mut Errors) {
    update(new, old, Door::Approval, errors);
}

/// The ways in, which differ in what they may change.
#[derive(Clone, Copy, PartialEq)]
enum Door {
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

fn of_type<'a>(csr: &'a Value, kind: &'a str) -> impl Iterator<Item = &'a Value> {
    csr.at("status").items("conditions").iter().filter(move |condition| condition.text("type") == kind)
}

fn stamp_conditions(new: &mut Value, old: &Value, now: &str) {
    for condition in conditions_mut(new) {
        condition.default_to("lastUpdateTime", now);
        let same = |before: &&Value| {
            ["type", "status"].iter().all(|field| before.text(field) == condition.text(field))
                && before.has("lastTransitionTime")
        };
        let before = old.at("status").items("conditions").iter().find(same);
        let since = before.map_or(now, |before| before.text("lastTransitionTime")).to_owned();
        condition.default_to("lastTransitionTime", since);
    }
}

fn specification(spec: &Value, old: Option<&Value>, errors: &mut Errors) {
    let path = Path::new("spec");
    let request = spec.text("request");
    if let Some(problem) = request_problem(request) {
        errors.invalid(&path.at("request"), request, problem);
    }
    let usages: Vec<&str> = spec.items("usages").iter().map(|usage| usage.as_str().unwrap_or("")).collect();
    let at_usages = path.at("usages");
    if usages.is_empty() {
        errors.required(&at_usages, "");
    }
    // The request never changes, so on an update there is nothing new to find fault with.
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
        errors.invalid(&path.at("signerName"), signer, message);
    } else {
        signer_name(signer, &path.at("signerName"), errors);
    }
    if let Some(seconds) = spec.int("expirationSeconds").filter(|seconds| *seconds < MIN_SECONDS) {
        let message = "may not specify a duration less than 600 seconds (10 minutes)";
        errors.invalid(&path.at("expirationSeconds"), seconds, message);
    }
}

fn pem_blocks(base64: &str) -> Vec<Pem> {
    let bytes = STANDARD.decode(base64).unwrap_or_default();
    Pem::iter_from_buffer(&bytes).map_while(Result::ok).collect()
}

fn request_problem(request: &str) -> Option<&'static str> {
    match pem_blocks(request).first() {
        Some(block) if block.label == "CERTIFICATE REQUEST" => {
            let parsed = X509CertificationRequest::from_der(&block.contents);
            parsed.is_err().then_some("asn1: structure error: not a certificate request")
        }
        _ => Some("PEM block type must be CERTIFICATE REQUEST"),
    }
}

/// The organizations, which become groups, in the subject of the request.
pub fn organizations(csr: &Value) -> Result<Vec<String>, &'static str> {
    subject(csr, |subject| texts(subject.iter_organization()))
}

/// The common names, of which one becomes the user, in the subject of the request.
pub fn common_names(csr: &Value) -> Result<Vec<String>, &'static str> {
    subject(csr, |subject| texts(subject.iter_common_name()))
}

fn subject(csr: &Value, read: impl Fn(&X509Name<'_>) -> Vec<String>) -> Result<Vec<String>, &'static str> {
    let request = csr.at("spec").text("request");
    if let Some(problem) = request_problem(request) {
        return Err(problem);
    }
    let block = pem_blocks(request).into_iter().next();
    let parsed = block.as_ref().and_then(|block| X509CertificationRequest::from_der(&block.contents).ok());
    Ok(parsed.map(|(_, parsed)| read(&parsed.certification_request_info.subject)).unwrap_or_default())
}

/// One that is no text names nobody.
fn texts<'a>(parts: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>) -> Vec<String> {
    parts.filter_map(|part| part.as_str().ok()).map(str::to_owned).collect()
}

/// `example.com/signer`.
fn signer_name(name: &str, path: &Path, errors: &mut Errors) {
    const MAX: usize = 253;
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
    if domain.len() > MAX {
        errors.too_long(path, MAX);
    }
    first_bad_label(domain, names::dns1123_label, path, errors);
    if !domain.contains('.') {
        errors.invalid(path, *domain, "should be a domain with at least two segments separated by dots");
    }
    first_bad_label(rest, names::dns1123_subdomain, path, errors);
    let longest = MAX + 1 + MAX + 1 + 63;
    if name.len() > longest {
        errors.too_long(path, longest);
    }
}

/// Complaining about the first is enough, for the others would read alike.
fn first_bad_label(part: &str, check: fn(&str) -> Vec<String>, path: &Path, errors: &mut Errors) {
    let bad = part.split('.').map(|label| (label, check(label))).find(|(_, words)| !words.is_empty());
    if let Some((label, words)) = bad {
        for word in words {
            errors.invalid(path, part, &format!("validating label {label:?}: {word}"));
        }
    }
}

/// What holds for the conditions; what `old` already broke is let be.
fn conditions(status: &Value, old: Option<&Value>, errors: &mut Errors) {
    let path = Path::new("status.conditions");
    let old_types: Vec<&str> = old
        .map_or(&[][..], |old| old.at("status").items("conditions"))
        .iter()
        .map(|condition| condition.text("type"))
        .collect();
    let had_both = old_types.contains(&APPROVED) && old_types.contains(&DENIED);
    let had_empty = old_types.contains(&"");
    let had_twice = old_types.iter().collect::<HashSet<_>>().len() < old_types.len();
    let mut seen = HashSet::new();
    for (i, condition) in status.items("conditions").iter().enumerate() {
        let (kind, state, at) = (condition.text("type"), condition.text("status"), path.index(i));
        if kind.is_empty() && !had_empty {
            errors.required(&at.at("type"), "");
        }
        let known: &[&str] = match kind {
            APPROVED | DENIED | FAILED => &["True"],
            _ => &["False", "True", "Unknown"],
        };
        if state.is_empty() {
            errors.required(&at.at("status"), "");
        } else if !known.contains(&state) {
            errors.not_supported(&at.at("status"), state, known);
        }
        let other = if kind == APPROVED { DENIED } else { APPROVED };
        if matches!(kind, APPROVED | DENIED) && seen.contains(other) && !had_both {
            errors.invalid(&path, kind, "Approved and Denied conditions are mutually exclusive");
        }
        if !seen.insert(kind) && !had_twice {
            errors.duplicate(&at.at("type"), kind);
        }
    }
}

fn certificate(csr: &Value, old: Option<&Value>, errors: &mut Errors) {
    let given = csr.at("status").text("certificate");
    let before = old.map(|old| old.at("status").text("certificate"));
    let tolerated = before.is_some_and(|before| before == given || certificate_problem(before).is_some());
    if !tolerated && let Some(problem) = certificate_problem(given) {
        errors.invalid(&Path::new("status.certificate"), "<certificate data>", &problem);
    }
}

fn certificate_problem(base64: &str) -> Option<String> {
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

fn update(new: &Value, old: &Value, door: Door, errors: &mut Errors) {
    specification(new.at("spec"), Some(old), errors);
    conditions(new.at("status"), Some(old), errors);
    certificate(new, Some(old), errors);

    let path = Path::new("status.conditions");
    let count = |csr: &Value, kind: &str| of_type(csr, kind).count();
    for kind in [APPROVED, DENIED, FAILED] {
        if count(new, kind) < count(old, kind) {
            errors.forbidden(&path, &format!("updates may not remove a condition of type \"{kind}\""));
        }
    }
    if door != Door::Approval {
        for kind in [APPROVED, DENIED] {
            let (now, before) = (count(new, kind), count(old, kind));
            let changed = || of_type(new, kind).zip(of_type(old, kind)).any(|(a, b)| !meta::same(a, b));
            if now > before {
                errors.forbidden(&path, &format!("updates may not add a condition of type \"{kind}\""));
            } else if now == before && changed() {
                errors.forbidden(&path, &format!("updates may not modify a condition of type \"{kind}\""));
            }
        }
    }
    let (given, before) = (new.at("status").text("certificate"), old.at("status").text("certificate"));
    if given != before {
        let path = Path::new("status.certificate");
        if door != Door::Status {
            errors.forbidden(&path, "updates may not set certificate content");
        } else if !before.is_empty() {
            errors.forbidden(&path, "updates may not modify existing certificate content");
        }
    }
}
