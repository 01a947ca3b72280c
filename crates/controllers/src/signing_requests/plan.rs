//! Which requests are approved by themselves, which are signed, and how long they are kept. Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pki::Request;

const CLIENT: &str = "kubernetes.io/kube-apiserver-client";
const KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";
const NODES: &str = "system:nodes";
const NODE: &str = "system:node:";

/// How long certificates last unless less was asked for, and how long at least.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);
const SHORTEST: Duration = Duration::from_secs(10 * 60);
/// How long requests are kept that are done, and those nobody cares for.
const DONE: SignedDuration = SignedDuration::from_hours(1);
const FORGOTTEN: SignedDuration = SignedDuration::from_hours(24);

pub fn condition<'a>(
    request: &'a CertificateSigningRequest,
    kind: &str,
) -> Option<&'a CertificateSigningRequestCondition> {
    request.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

pub fn is_issued(request: &CertificateSigningRequest) -> bool {
    let certificate = request.status.as_ref().and_then(|status| status.certificate.as_ref());
    certificate.is_some_and(|certificate| !certificate.0.is_empty())
}

/// A permission by which a request is approved without anybody looking at it.
#[derive(Debug, PartialEq)]
pub struct Recognized {
    /// Whoever asks must be allowed to create this subresource of signing requests.
    pub subresource: &'static str,
    pub message: &'static str,
}

/// As what a request is recognized, in the order in which to ask. `taken` says whether an address is that of a node
/// other than the one of this name.
pub fn recognized(
    request: &CertificateSigningRequest,
    parsed: &Request,
    taken: impl Fn(IpAddr, &str) -> bool,
) -> Vec<Recognized> {
    let decided = condition(request, "Approved").is_some() || condition(request, "Denied").is_some();
    if decided || is_issued(request) {
        return Vec::new();
    }
    let own = request.spec.username.as_deref() == Some(parsed.common_name.as_str());
    match request.spec.signer_name.as_str() {
        KUBELET_CLIENT if kubelet_client(parsed, &usages(request)).is_ok() => {
            let own = own.then_some(Recognized {
                subresource: "selfnodeclient",
                message: "Auto approving self kubelet client certificate after SubjectAccessReview.",
            });
            let any = Recognized {
                subresource: "nodeclient",
                message: "Auto approving kubelet client certificate after SubjectAccessReview.",
            };
            own.into_iter().chain([any]).collect()
        }
        // Nobody is allowed this unless a cluster says so: it takes a node's word for its address.
        KUBELET_SERVING if own && kubelet_serving(parsed, &usages(request)).is_ok() => {
            let node = parsed.common_name.strip_prefix(NODE).unwrap_or_default();
            let honest = parsed.dns_names.iter().all(|name| name == node)
                && !parsed.ips.iter().any(|ip| ip.is_loopback() || taken(*ip, node));
            let serving = Recognized {
                subresource: "selfnodeserver",
                message: "Auto approving self kubelet server certificate after SubjectAccessReview.",
            };
            honest.then_some(serving).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

pub fn usages(request: &CertificateSigningRequest) -> Vec<String> {
    request.spec.usages.clone().unwrap_or_default()
}

/// Why a signer does not sign what it was asked to.
pub fn check(signer: &str, parsed: &Request, usages: &[String]) -> Result<(), String> {
    match signer {
        KUBELET_CLIENT => kubelet_client(parsed, usages),
        KUBELET_SERVING => kubelet_serving(parsed, usages),
        CLIENT => client(usages),
        _ => Ok(()),
    }
}

fn refuse(bad: bool, why: &str) -> Result<(), String> {
    if bad { Err(why.to_owned()) } else { Ok(()) }
}

fn needs(usages: &[String], kind: &str) -> Result<(), String> {
    let found: BTreeSet<&str> = usages.iter().map(String::as_str).collect();
    let wanted = BTreeSet::from([kind, "digital signature", "key encipherment"]);
    let without_rsa = BTreeSet::from([kind, "digital signature"]);
    let names: Vec<&str> = wanted.iter().copied().collect();
    let why = format!("usages did not match [{}]", names.join(" "));
    refuse(found != wanted && found != without_rsa, &why)
}

fn kubelet_client(parsed: &Request, usages: &[String]) -> Result<(), String> {
    refuse(parsed.organizations != [NODES], "subject organization is not system:nodes")?;
    refuse(!parsed.dns_names.is_empty(), "DNS subjectAltNames are not allowed")?;
    refuse(parsed.emails > 0, "Email subjectAltNames are not allowed")?;
    refuse(!parsed.ips.is_empty(), "IP subjectAltNames are not allowed")?;
    refuse(parsed.uris > 0, "URI subjectAltNames are not allowed")?;
    let named = parsed.common_name.starts_with(NODE);
    refuse(!named, "subject common name does not begin with system:node:")?;
    needs(usages, "client auth")
}

fn kubelet_serving(parsed: &Request, usages: &[String]) -> Result<(), String> {
    refuse(parsed.organizations != [NODES], "subject organization is not system:nodes")?;
    let nameless = parsed.dns_names.is_empty() && parsed.ips.is_empty();
    refuse(nameless, "DNS or IP subjectAltName is required")?;
    refuse(parsed.emails > 0, "Email subjectAltNames are not allowed")?;
    refuse(parsed.uris > 0, "URI subjectAltNames are not allowed")?;
    needs(usages, "server auth")?;
    let named = parsed.common_name.starts_with(NODE);
    refuse(!named, "subject common name does not begin with system:node:")
}

fn client(usages: &[String]) -> Result<(), String> {
    const ALLOWED: [&str; 3] = ["digital signature", "key encipherment", "client auth"];
    if let Some(other) = usages.iter().find(|usage| !ALLOWED.contains(&usage.as_str())) {
        return Err(format!("invalid usage for client certificate: {other}"));
    }
    let missing = !usages.iter().any(|usage| usage == "client auth");
    refuse(missing, "missing required usage for client certificate: client auth")
}

/// How long a certificate lasts.
pub fn lifetime(request: &CertificateSigningRequest) -> Duration {
    match request.spec.expiration_seconds {
        None => LONGEST,
        Some(seconds) => {
            Duration::from_secs(u64::from(seconds.max(0).unsigned_abs())).clamp(SHORTEST, LONGEST)
        }
    }
}

/// When a request is not worth keeping any more. `ends` is when its certificate ends.
pub fn kept_until(request: &CertificateSigningRequest, ends: Option<Timestamp>) -> Option<Timestamp> {
    let after =
        |time: Option<&Time>, span: SignedDuration| time.and_then(|time| time.0.checked_add(span).ok());
    let updated =
        |kind: &str| condition(request, kind).and_then(|condition| condition.last_update_time.as_ref());
    let created = request.metadata.creation_timestamp.as_ref();
    let undecided = request
        .status
        .as_ref()
        .is_none_or(|status| status.conditions.as_ref().is_none_or(|conditions| conditions.is_empty()));
    let pending = if undecided { after(created, FORGOTTEN) } else { None };
    let approved = after(updated("Approved"), if is_issued(request) { DONE } else { FORGOTTEN });
    let ended = ends.filter(|_| updated("Approved").is_some());
    let times = [pending, approved, ended, after(updated("Denied"), DONE), after(updated("Failed"), DONE)];
    times.into_iter().flatten().min()
}
