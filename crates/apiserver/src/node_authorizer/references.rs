//! The objects that a pod or a PersistentVolume references by name.

use api::json::JsonExt as _;
use serde_json::Value;

/// The resources that pods reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceKind {
    ServiceAccount,
    Secret,
    ConfigMap,
    PersistentVolumeClaim,
    ResourceClaim,
}

pub const REFERENCE_KINDS: usize = 5;

pub const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";
const CONTAINER_LISTS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// Fields of pod volumes that name a secret.
const POD_VOLUME_SECRET_FIELDS: &[(&str, &str)] = &[
    ("azureFile", "secretName"),
    ("cephfs", "secretRef.name"),
    ("cinder", "secretRef.name"),
    ("csi", "nodePublishSecretRef.name"),
    ("flexVolume", "secretRef.name"),
    ("iscsi", "secretRef.name"),
    ("rbd", "secretRef.name"),
    ("scaleIO", "secretRef.name"),
    ("secret", "secretName"),
    ("storageos", "secretRef.name"),
];

/// Fields of a PersistentVolume that name a secret which the node needs.
const PERSISTENT_VOLUME_SECRET_FIELDS: &[(&str, &str)] = &[
    ("cephfs", "secretRef"),
    ("cinder", "secretRef"),
    ("csi", "nodeExpandSecretRef"),
    ("csi", "nodePublishSecretRef"),
    ("csi", "nodeStageSecretRef"),
    ("flexVolume", "secretRef"),
    ("iscsi", "secretRef"),
    ("rbd", "secretRef"),
    ("scaleIO", "secretRef"),
    ("storageos", "secretRef"),
];

/// Whether the pod is a mirror pod: the API object of a static pod.
pub fn is_mirror(pod: &Value) -> bool {
    pod.at("metadata").at("annotations").has(MIRROR_ANNOTATION)
}

/// Visits every reference of a pod within its namespace. Upstream: `VisitPodSecretNames` and
/// others.
pub fn visit_pod_references<'a>(pod: &'a Value, mut visit: impl FnMut(ReferenceKind, &'a str)) {
    let mut visit = |kind, name: &'a str| {
        if !name.is_empty() {
            visit(kind, name);
        }
    };
    let spec = pod.at("spec");
    visit(ReferenceKind::ServiceAccount, spec.text("serviceAccountName"));
    for secret in spec.items("imagePullSecrets") {
        visit(ReferenceKind::Secret, secret.text("name"));
    }
    for container in CONTAINER_LISTS.iter().flat_map(|list| spec.items(list)) {
        for from in container.items("envFrom") {
            visit(ReferenceKind::Secret, from.at("secretRef").text("name"));
            visit(ReferenceKind::ConfigMap, from.at("configMapRef").text("name"));
        }
        for from in container.items("env").iter().map(|env| env.at("valueFrom")) {
            visit(ReferenceKind::Secret, from.at("secretKeyRef").text("name"));
            visit(ReferenceKind::ConfigMap, from.at("configMapKeyRef").text("name"));
        }
    }
    for volume in spec.items("volumes") {
        for (source, path) in POD_VOLUME_SECRET_FIELDS {
            visit(ReferenceKind::Secret, volume.at(source).path(path).as_str().unwrap_or(""));
        }
        visit(ReferenceKind::ConfigMap, volume.at("configMap").text("name"));
        visit(ReferenceKind::PersistentVolumeClaim, volume.at("persistentVolumeClaim").text("claimName"));
        for source in volume.at("projected").items("sources") {
            visit(ReferenceKind::Secret, source.at("secret").text("name"));
            visit(ReferenceKind::ConfigMap, source.at("configMap").text("name"));
        }
    }
    let statuses = pod.at("status").items("resourceClaimStatuses");
    for claim in spec.items("resourceClaims") {
        let allocated = statuses.iter().filter(|status| status.text("name") == claim.text("name"));
        match claim.text("resourceClaimName") {
            "" if claim.has("resourceClaimTemplateName") => {
                allocated
                    .for_each(|status| visit(ReferenceKind::ResourceClaim, status.text("resourceClaimName")));
            }
            name => visit(ReferenceKind::ResourceClaim, name),
        }
    }
    let extended = pod.at("status").at("extendedResourceClaimStatus");
    visit(ReferenceKind::ResourceClaim, extended.text("resourceClaimName"));
}

/// The names of the PersistentVolumeClaims for a pod's ephemeral volumes.
pub fn ephemeral_claims(pod: &Value) -> impl Iterator<Item = String> {
    let volumes = pod.at("spec").items("volumes").iter().filter(|volume| volume.has("ephemeral"));
    volumes.map(|volume| format!("{}-{}", pod.at("metadata").text("name"), volume.text("name")))
}

/// Namespaces and names of the secrets that nodes need for a PersistentVolume. Upstream:
/// `VisitPVSecretNames`.
pub fn secrets_of_volume(volume: &Value) -> Vec<(&str, &str)> {
    let spec = volume.at("spec");
    let claim_namespace = spec.at("claimRef").text("namespace");
    let or_claim_namespace =
        |namespace| Some(namespace).filter(|name: &&str| !name.is_empty()).unwrap_or(claim_namespace);
    let mut secrets = Vec::new();
    for (source, field) in PERSISTENT_VOLUME_SECRET_FIELDS {
        let secret = spec.at(source).at(field);
        // These sources require a namespace. The others fall back to the claim's namespace.
        let own = matches!(*source, "cinder" | "csi" | "storageos");
        let namespace = secret.text("namespace");
        secrets.push((if own { namespace } else { or_claim_namespace(namespace) }, secret.text("name")));
    }
    let azure = spec.at("azureFile");
    secrets.push((or_claim_namespace(azure.text("secretNamespace")), azure.text("secretName")));
    secrets.retain(|(_, name)| !name.is_empty());
    secrets
}

/// The first reference that a mirror pod may not have, worded as upstream does.
pub fn forbidden_in_mirror(pod: &Value) -> Result<Option<&'static str>, String> {
    let spec = pod.at("spec");
    let mut kinds = [false; REFERENCE_KINDS];
    visit_pod_references(pod, |kind, _| kinds[kind as usize] = true);
    let named = [
        (kinds[ReferenceKind::ServiceAccount as usize], "serviceaccounts"),
        (kinds[ReferenceKind::Secret as usize], "secrets"),
        (kinds[ReferenceKind::ConfigMap as usize], "configmaps"),
        (!spec.items("resourceClaims").is_empty(), "resourceclaims"),
    ];
    if let Some((_, word)) = named.iter().find(|(is, _)| *is) {
        return Ok(Some(word));
    }
    for volume in spec.items("volumes") {
        match VOLUME_SOURCE_REFERENCES.iter().find(|(source, _)| volume.has(source)) {
            None => return Err(format!("unknown volume type for volume  {:?}", volume.text("name"))),
            Some((_, "")) => {}
            Some((_, word)) => return Ok(Some(word)),
        }
        for source in volume.at("projected").items("sources") {
            match PROJECTED_SOURCE_REFERENCES.iter().find(|(kind, _)| source.has(kind)) {
                None => return Err(format!("unknown source for projected volume {:?}", volume.text("name"))),
                Some((_, "")) => {}
                Some((_, word)) => return Ok(Some(word)),
            }
        }
    }
    Ok(None)
}

/// What each volume source references; empty if it references nothing.
const VOLUME_SOURCE_REFERENCES: &[(&str, &str)] = &[
    ("awsElasticBlockStore", ""),
    ("azureDisk", ""),
    ("azureFile", "secrets (via azureFile volumes)"),
    ("cephfs", ""),
    ("cinder", ""),
    ("configMap", "configmaps (via configmap volumes)"),
    ("csi", "csidrivers (via CSI volumes)"),
    ("downwardAPI", ""),
    ("emptyDir", ""),
    ("ephemeral", "persistentvolumeclaims (via ephemeral volumes)"),
    ("fc", ""),
    ("flexVolume", ""),
    ("flocker", ""),
    ("gcePersistentDisk", ""),
    ("gitRepo", ""),
    ("glusterfs", "endpoints (via glusterFS volumes)"),
    ("hostPath", ""),
    ("image", ""),
    ("iscsi", ""),
    ("nfs", ""),
    ("persistentVolumeClaim", "persistentvolumeclaims"),
    ("photonPersistentDisk", ""),
    ("portworxVolume", ""),
    ("projected", ""),
    ("quobyte", ""),
    ("rbd", ""),
    ("scaleIO", ""),
    ("secret", "secrets (via secret volumes)"),
    ("storageos", ""),
    ("vsphereVolume", ""),
];

const PROJECTED_SOURCE_REFERENCES: &[(&str, &str)] = &[
    ("clusterTrustBundle", "clustertrustbundles"),
    ("configMap", "configmaps (via projected volumes)"),
    ("downwardAPI", ""),
    ("podCertificate", "podcertificates"),
    ("secret", "secrets (via projected volumes)"),
    ("serviceAccountToken", "serviceaccounts (via projected volumes)"),
];
