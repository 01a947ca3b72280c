//! What a pod must do to be hardened as far as is known to work.

use std::collections::BTreeSet;

use api::json::Json as _;
use serde_json::Value;

use super::baseline::{added, good_seccomp, seccomp};
use super::{Pod, Violation, containers, list, plural, setters, violation};

pub fn no_capabilities(pod: &Pod<'_>) -> Option<Violation> {
    let keeping = pod
        .contexts_where(|context| !context.at("capabilities").items("drop").iter().any(|name| name == "ALL"));
    let kept = (!keeping.is_empty())
        .then(|| format!("{} must set securityContext.capabilities.drop=[\"ALL\"]", containers(&keeping)));
    let details: Vec<String> = kept.into_iter().chain(added(pod, &["NET_BIND_SERVICE"])).collect();
    if details.is_empty() { None } else { violation("unrestricted capabilities", details.join("; ")) }
}

pub fn seccomp_required(pod: &Pod<'_>) -> Option<Violation> {
    if let Some(violation) = seccomp(pod) {
        return Some(violation);
    }
    if good_seccomp(pod.context()) == Some(true) {
        return None;
    }
    let names = pod.contexts_where(|context| good_seccomp(context).is_none());
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
    let said = |context: &Value| context.at("runAsNonRoot").as_bool();
    let names = pod.contexts_where(|context| said(context) == Some(false));
    if let Some(by) = setters(said(pod.context()) == Some(false), &names) {
        return violation(REASON, format!("{by} must not set securityContext.runAsNonRoot=false"));
    }
    if said(pod.context()) == Some(true) {
        return None;
    }
    let names = pod.contexts_where(|context| said(context).is_none());
    if names.is_empty() {
        return None;
    }
    violation(REASON, format!("pod or {} must set securityContext.runAsNonRoot=true", containers(&names)))
}

pub fn user_zero(pod: &Pod<'_>) -> Option<Violation> {
    let bad = |context: &Value| context.int("runAsUser") == Some(0);
    let by = setters(bad(pod.context()), &pod.contexts_where(bad))?;
    violation("runAsUser=0", format!("{by} must not set runAsUser=0"))
}
