//! The `api-approved.kubernetes.io` annotation for API groups of the Kubernetes project.

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

pub(super) const APPROVAL_ANNOTATION: &str = "api-approved.kubernetes.io";

#[derive(PartialEq)]
enum Approval {
    Missing,
    Bypassed,
    Approved,
    Invalid,
}

impl Approval {
    fn from_crd(crd: &Value) -> Approval {
        let annotation = crd.path("metadata.annotations").text(APPROVAL_ANNOTATION);
        let has_host = annotation.split_once("://").is_some_and(|(scheme, rest)| {
            !scheme.is_empty()
                && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
                && !rest.is_empty()
                && !rest.starts_with(['/', '?', '#'])
                && !rest.contains(|c: char| c.is_ascii_control() || c == ' ')
        });
        match annotation {
            "" => Approval::Missing,
            _ if annotation.starts_with("unapproved") => Approval::Bypassed,
            _ if has_host => Approval::Approved,
            _ => Approval::Invalid,
        }
    }
}

/// Groups under `k8s.io` and `kubernetes.io` are reserved. They need a link to the API review.
pub(super) fn validate_approval(crd: &Value, old: Option<&Value>, errors: &mut ErrorList) {
    const POLICY_URL: &str = "see https://github.com/kubernetes/enhancements/pull/1111";
    let group = crd.at("spec").text("group");
    let protected = ["k8s.io", "kubernetes.io"]
        .iter()
        .any(|domain| group.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')));
    let state = Approval::from_crd(crd);
    if !protected || old.is_some_and(|old| Approval::from_crd(old) == state) {
        return;
    }
    let path = Path::new("metadata.annotations").key(APPROVAL_ANNOTATION);
    match state {
        Approval::Missing => {
            let detail = format!(
                "protected groups must have approval annotation \"{APPROVAL_ANNOTATION}\", {POLICY_URL}"
            );
            errors.required(&path, &detail);
        }
        Approval::Invalid => {
            let detail = format!(
                "protected groups must have approval annotation \"{APPROVAL_ANNOTATION}\" with either a URL or a reason starting with \"unapproved\", {POLICY_URL}"
            );
            errors.invalid(&path, crd.path("metadata.annotations").text(APPROVAL_ANNOTATION), &detail);
        }
        Approval::Bypassed | Approval::Approved => {}
    }
}
