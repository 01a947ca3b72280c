//! Decides which requests are approved automatically, whether they may be signed, and when they expire.
//! Does no I/O.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pki::Request;

const SIGNER_CLIENT: &str = "kubernetes.io/kube-apiserver-client";
const SIGNER_KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const SIGNER_KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";
const NODES_GROUP: &str = "system:nodes";
const NODE_USER_PREFIX: &str = "system:node:";

/// The default and maximum lifetime of certificates, and the minimum.
const MAX_LIFETIME: Duration = Duration::from_secs(365 * 24 * 60 * 60);
const MIN_LIFETIME: Duration = Duration::from_secs(10 * 60);
/// How long finished requests are kept, and pending ones.
const FINISHED_EXPIRATION: SignedDuration = SignedDuration::from_hours(1);
const PENDING_EXPIRATION: SignedDuration = SignedDuration::from_hours(24);

pub fn condition<'a>(
    request: &'a CertificateSigningRequest,
    kind: &str,
) -> Option<&'a CertificateSigningRequestCondition> {
    request.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

pub fn has_certificate(request: &CertificateSigningRequest) -> bool {
    let certificate = request.status.as_ref().and_then(|status| status.certificate.as_ref());
    certificate.is_some_and(|certificate| !certificate.0.is_empty())
}

/// A rule by which a request is approved automatically.
#[derive(Debug, PartialEq)]
pub struct ApprovalRule {
    /// The requester must be authorized to create this subresource of CertificateSigningRequests.
    pub subresource: &'static str,
    pub message: &'static str,
}

/// The approval rules that match a request, in order of precedence. `taken` returns whether an address
/// belongs to a node other than the named one.
pub fn matching_approval_rules(
    request: &CertificateSigningRequest,
    parsed: &Request,
    taken: impl Fn(IpAddr, &str) -> bool,
) -> Vec<ApprovalRule> {
    let has_decision = condition(request, "Approved").is_some() || condition(request, "Denied").is_some();
    if has_decision || has_certificate(request) {
        return Vec::new();
    }
    let own = request.spec.username.as_deref() == Some(parsed.common_name.as_str());
    match request.spec.signer_name.as_str() {
        SIGNER_KUBELET_CLIENT if check_kubelet_client(parsed, &usages(request)).is_ok() => {
            let own = own.then_some(ApprovalRule {
                subresource: "selfnodeclient",
                message: "Auto approving self kubelet client certificate after SubjectAccessReview.",
            });
            let any = ApprovalRule {
                subresource: "nodeclient",
                message: "Auto approving kubelet client certificate after SubjectAccessReview.",
            };
            own.into_iter().chain([any]).collect()
        }
        // By default no user is authorized for this rule, because it trusts the node's claim about its
        // addresses.
        SIGNER_KUBELET_SERVING if own && check_kubelet_serving(parsed, &usages(request)).is_ok() => {
            let node = parsed.common_name.strip_prefix(NODE_USER_PREFIX).unwrap_or_default();
            let is_valid = parsed.dns_names.iter().all(|name| name == node)
                && !parsed.ips.iter().any(|ip| ip.is_loopback() || taken(*ip, node));
            let serving = ApprovalRule {
                subresource: "selfnodeserver",
                message: "Auto approving self kubelet server certificate after SubjectAccessReview.",
            };
            is_valid.then_some(serving).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

pub fn usages(request: &CertificateSigningRequest) -> Vec<String> {
    request.spec.usages.clone().unwrap_or_default()
}

/// Validates a request for a signer and returns why it is rejected.
pub fn check_request(signer: &str, parsed: &Request, usages: &[String]) -> Result<(), String> {
    match signer {
        SIGNER_KUBELET_CLIENT => check_kubelet_client(parsed, usages),
        SIGNER_KUBELET_SERVING => check_kubelet_serving(parsed, usages),
        SIGNER_CLIENT => check_client(usages),
        _ => Ok(()),
    }
}

fn reject_if(bad: bool, reason: &str) -> Result<(), String> {
    if bad { Err(reason.to_owned()) } else { Ok(()) }
}

fn check_usages(usages: &[String], kind: &str) -> Result<(), String> {
    let found: BTreeSet<&str> = usages.iter().map(String::as_str).collect();
    let expected = BTreeSet::from([kind, "digital signature", "key encipherment"]);
    let without_rsa = BTreeSet::from([kind, "digital signature"]);
    let names: Vec<&str> = expected.iter().copied().collect();
    let reason = format!("usages did not match [{}]", names.join(" "));
    reject_if(found != expected && found != without_rsa, &reason)
}

fn check_kubelet_client(parsed: &Request, usages: &[String]) -> Result<(), String> {
    reject_if(parsed.organizations != [NODES_GROUP], "subject organization is not system:nodes")?;
    reject_if(!parsed.dns_names.is_empty(), "DNS subjectAltNames are not allowed")?;
    reject_if(parsed.email_count > 0, "Email subjectAltNames are not allowed")?;
    reject_if(!parsed.ips.is_empty(), "IP subjectAltNames are not allowed")?;
    reject_if(parsed.uri_count > 0, "URI subjectAltNames are not allowed")?;
    let named = parsed.common_name.starts_with(NODE_USER_PREFIX);
    reject_if(!named, "subject common name does not begin with system:node:")?;
    check_usages(usages, "client auth")
}

fn check_kubelet_serving(parsed: &Request, usages: &[String]) -> Result<(), String> {
    reject_if(parsed.organizations != [NODES_GROUP], "subject organization is not system:nodes")?;
    let has_no_names = parsed.dns_names.is_empty() && parsed.ips.is_empty();
    reject_if(has_no_names, "DNS or IP subjectAltName is required")?;
    reject_if(parsed.email_count > 0, "Email subjectAltNames are not allowed")?;
    reject_if(parsed.uri_count > 0, "URI subjectAltNames are not allowed")?;
    check_usages(usages, "server auth")?;
    let named = parsed.common_name.starts_with(NODE_USER_PREFIX);
    reject_if(!named, "subject common name does not begin with system:node:")
}

fn check_client(usages: &[String]) -> Result<(), String> {
    const ALLOWED: [&str; 3] = ["digital signature", "key encipherment", "client auth"];
    if let Some(other) = usages.iter().find(|usage| !ALLOWED.contains(&usage.as_str())) {
        return Err(format!("invalid usage for client certificate: {other}"));
    }
    let missing = !usages.iter().any(|usage| usage == "client auth");
    reject_if(missing, "missing required usage for client certificate: client auth")
}

/// The lifetime of the certificate.
pub fn lifetime(request: &CertificateSigningRequest) -> Duration {
    match request.spec.expiration_seconds {
        None => MAX_LIFETIME,
        Some(seconds) => {
            Duration::from_secs(u64::from(seconds.max(0).unsigned_abs())).clamp(MIN_LIFETIME, MAX_LIFETIME)
        }
    }
}

/// When a request can be deleted. `ends` is the end of its certificate's validity.
pub fn expires_at(request: &CertificateSigningRequest, ends: Option<Timestamp>) -> Option<Timestamp> {
    let after =
        |time: Option<&Time>, span: SignedDuration| time.and_then(|time| time.0.checked_add(span).ok());
    let updated =
        |kind: &str| condition(request, kind).and_then(|condition| condition.last_update_time.as_ref());
    let created = request.metadata.creation_timestamp.as_ref();
    let has_no_condition = request
        .status
        .as_ref()
        .is_none_or(|status| status.conditions.as_ref().is_none_or(|conditions| conditions.is_empty()));
    let pending = if has_no_condition { after(created, PENDING_EXPIRATION) } else { None };
    let approved = after(
        updated("Approved"),
        if has_certificate(request) { FINISHED_EXPIRATION } else { PENDING_EXPIRATION },
    );
    let ended = ends.filter(|_| updated("Approved").is_some());
    let times = [
        pending,
        approved,
        ended,
        after(updated("Denied"), FINISHED_EXPIRATION),
        after(updated("Failed"), FINISHED_EXPIRATION),
    ];
    times.into_iter().flatten().min()
}
