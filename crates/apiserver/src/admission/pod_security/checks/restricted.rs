//! Checks of the restricted level.

use std::collections::BTreeSet;

use api::json::JsonExt as _;
use serde_json::Value;

use super::baseline::{forbidden_capabilities, is_allowed_seccomp, seccomp};
use super::{Pod, Violation, containers, format_subjects, list, plural, violation};

pub fn no_capabilities(pod: &Pod<'_>) -> Option<Violation> {
    let missing_drop_all = pod
        .contexts_where(|context| !context.at("capabilities").items("drop").iter().any(|name| name == "ALL"));
    let drop_violation = (!missing_drop_all.is_empty()).then(|| {
        format!("{} must set securityContext.capabilities.drop=[\"ALL\"]", containers(&missing_drop_all))
    });
    let details: Vec<String> =
        drop_violation.into_iter().chain(forbidden_capabilities(pod, &["NET_BIND_SERVICE"])).collect();
    if details.is_empty() { None } else { violation("unrestricted capabilities", details.join("; ")) }
}

pub fn seccomp_required(pod: &Pod<'_>) -> Option<Violation> {
    if let Some(violation) = seccomp(pod) {
        return Some(violation);
    }
    if is_allowed_seccomp(pod.context()) == Some(true) {
        return None;
    }
    let names = pod.contexts_where(|context| is_allowed_seccomp(context).is_none());
    if names.is_empty() {
        return None;
    }
    violation(
        "seccompProfile",
        format!(
            "pod or {} must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\"",
            containers(&names)
        ),
    )
}

pub fn escalation(pod: &Pod<'_>) -> Option<Violation> {
    let names = pod.contexts_where(|context| context.at("allowPrivilegeEscalation").as_bool() != Some(false));
    if names.is_empty() {
        return None;
    }
    violation(
        "allowPrivilegeEscalation != false",
        format!("{} must set securityContext.allowPrivilegeEscalation=false", containers(&names)),
    )
}

pub fn volume_types(pod: &Pod<'_>) -> Option<Violation> {
    const ALLOWED: [&str; 9] = [
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ];
    const KNOWN: [&str; 21] = [
        "hostPath",
        "gcePersistentDisk",
        "awsElasticBlockStore",
        "gitRepo",
        "nfs",
        "iscsi",
        "glusterfs",
        "rbd",
        "flexVolume",
        "cinder",
        "cephfs",
        "flocker",
        "fc",
        "azureFile",
        "vsphereVolume",
        "quobyte",
        "azureDisk",
        "photonPersistentDisk",
        "portworxVolume",
        "scaleIO",
        "storageos",
    ];
    let volumes = pod.spec.items("volumes").iter();
    let bad: Vec<&Value> = volumes.filter(|volume| !ALLOWED.iter().any(|kind| volume.has(kind))).collect();
    if bad.is_empty() {
        return None;
    }
    let kind = |volume: &&Value| KNOWN.into_iter().find(|kind| volume.has(kind)).unwrap_or("unknown");
    let kinds: BTreeSet<&str> = bad.iter().map(kind).collect();
    violation(
        "restricted volume types",
        format!(
            "{} {} {} {} {}",
            plural(bad.len(), "volume", "volumes"),
            list(bad.iter().map(|volume| volume.text("name"))),
            plural(bad.len(), "uses", "use"),
            plural(kinds.len(), "restricted volume type", "restricted volume types"),
            list(kinds)
        ),
    )
}

pub fn non_root(pod: &Pod<'_>) -> Option<Violation> {
    const REASON: &str = "runAsNonRoot != true";
    let run_as_non_root = |context: &Value| context.at("runAsNonRoot").as_bool();
    let names = pod.contexts_where(|context| run_as_non_root(context) == Some(false));
    if let Some(by) = format_subjects(run_as_non_root(pod.context()) == Some(false), &names) {
        return violation(REASON, format!("{by} must not set securityContext.runAsNonRoot=false"));
    }
    if run_as_non_root(pod.context()) == Some(true) {
        return None;
    }
    let names = pod.contexts_where(|context| run_as_non_root(context).is_none());
    if names.is_empty() {
        return None;
    }
    violation(REASON, format!("pod or {} must set securityContext.runAsNonRoot=true", containers(&names)))
}

pub fn user_zero(pod: &Pod<'_>) -> Option<Violation> {
    let bad = |context: &Value| context.int("runAsUser") == Some(0);
    let by = format_subjects(bad(pod.context()), &pod.contexts_where(bad))?;
    violation("runAsUser=0", format!("{by} must not set runAsUser=0"))
}
