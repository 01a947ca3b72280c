//! What a pod or a volume refers to by name.

use api::json::Json as _;
use serde_json::Value;

/// Kinds that pods refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    ServiceAccount,
    Secret,
    ConfigMap,
    /// PersistentVolumeClaim.
    Claim,
    ResourceClaim,
}

pub const KINDS: usize = 5;

pub const MIRROR: &str = "kubernetes.io/config.mirror";
const CONTAINERS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// Where the volumes of pods name a secret.
const SECRETS: &[(&str, &str)] = &[
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

/// Where a PersistentVolume names a secret that the node needs.
const VOLUME_SECRETS: &[(&str, &str)] = &[
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

/// Whether a pod is the copy of one that a node runs by itself.
pub fn is_mirror(pod: &Value) -> bool {
    pod.at("metadata").at("annotations").has(MIRROR)
}

/// Everything a pod refers to in its own namespace.
pub fn of_pod<'a>(pod: &'a Value, mut see: impl FnMut(Kind, &'a str)) {
    let mut see = |kind, name: &'a str| {
        if !name.is_empty() {
            see(kind, name);
        }
    };
    let spec = pod.at("spec");
    see(Kind::ServiceAccount, spec.text("serviceAccountName"));
    for secret in spec.items("imagePullSecrets") {
        see(Kind::Secret, secret.text("name"));
    }
    for container in CONTAINERS.iter().flat_map(|list| spec.items(list)) {
        for from in container.items("envFrom") {
            see(Kind::Secret, from.at("secretRef").text("name"));
            see(Kind::ConfigMap, from.at("configMapRef").text("name"));
        }
        for from in container.items("env").iter().map(|env| env.at("valueFrom")) {
            see(Kind::Secret, from.at("secretKeyRef").text("name"));
            see(Kind::ConfigMap, from.at("configMapKeyRef").text("name"));
        }
    }
    for volume in spec.items("volumes") {
        for (source, path) in SECRETS {
            see(Kind::Secret, volume.at(source).path(path).as_str().unwrap_or(""));
        }
        see(Kind::ConfigMap, volume.at("configMap").text("name"));
        see(Kind::Claim, volume.at("persistentVolumeClaim").text("claimName"));
        for source in volume.at("projected").items("sources") {
            see(Kind::Secret, source.at("secret").text("name"));
            see(Kind::ConfigMap, source.at("configMap").text("name"));
        }
    }
    let statuses = pod.at("status").items("resourceClaimStatuses");
    for claim in spec.items("resourceClaims") {
        let made = statuses.iter().filter(|status| status.text("name") == claim.text("name"));
        match claim.text("resourceClaimName") {
            "" if claim.has("resourceClaimTemplateName") => {
                made.for_each(|status| see(Kind::ResourceClaim, status.text("resourceClaimName")));
            }
            name => see(Kind::ResourceClaim, name),
        }
    }
    let extended = pod.at("status").at("extendedResourceClaimStatus");
    see(Kind::ResourceClaim, extended.text("resourceClaimName"));
}

/// The claims made for a pod's ephemeral volumes, which are named after both.
pub fn ephemeral_claims(pod: &Value) -> impl Iterator<Item = String> {
    let volumes = pod.at("spec").items("volumes").iter().filter(|volume| volume.has("ephemeral"));
    volumes.map(|volume| format!("{}-{}", pod.at("metadata").text("name"), volume.text("name")))
}

/// The namespaces and names of the secrets that nodes need for a PersistentVolume.
pub fn secrets_of_volume(volume: &Value) -> Vec<(&str, &str)> {
    let spec = volume.at("spec");
    let claimed = spec.at("claimRef").text("namespace");
    let or_claimed = |namespace| Some(namespace).filter(|name: &&str| !name.is_empty()).unwrap_or(claimed);
    let mut secrets = Vec::new();
    for (source, field) in VOLUME_SECRETS {
        let secret = spec.at(source).at(field);
        // These have always named a namespace of their own.
        let own = matches!(*source, "cinder" | "csi" | "storageos");
        let namespace = secret.text("namespace");
        secrets.push((if own { namespace } else { or_claimed(namespace) }, secret.text("name")));
    }
    let azure = spec.at("azureFile");
    secrets.push((or_claimed(azure.text("secretNamespace")), azure.text("secretName")));
    secrets.retain(|(_, name)| !name.is_empty());
    secrets
}

/// What a pod that no secret may leave the server for refers to, in upstream's words.
pub fn forbidden_in_mirror(pod: &Value) -> Result<Option<&'static str>, String> {
    let spec = pod.at("spec");
    let mut kinds = [false; KINDS];
    of_pod(pod, |kind, _| kinds[kind as usize] = true);
    let named = [
        (kinds[Kind::ServiceAccount as usize], "serviceaccounts"),
        (kinds[Kind::Secret as usize], "secrets"),
        (kinds[Kind::ConfigMap as usize], "configmaps"),
        (!spec.items("resourceClaims").is_empty(), "resourceclaims"),
    ];
    if let Some((_, word)) = named.iter().find(|(is, _)| *is) {
        return Ok(Some(word));
    }
    for volume in spec.items("volumes") {
        match VOLUMES.iter().find(|(source, _)| volume.has(source)) {
            None => return Err(format!("unknown volume type for volume  {:?}", volume.text("name"))),
            Some((_, "")) => {}
            Some((_, word)) => return Ok(Some(word)),
        }
        for source in volume.at("projected").items("sources") {
            match PROJECTED.iter().find(|(kind, _)| source.has(kind)) {
                None => return Err(format!("unknown source for projected volume {:?}", volume.text("name"))),
                Some((_, "")) => {}
                Some((_, word)) => return Ok(Some(word)),
            }
        }
    }
    Ok(None)
}

/// What each kind of volume refers to.
const VOLUMES: &[(&str, &str)] = &[
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

const PROJECTED: &[(&str, &str)] = &[
    ("clusterTrustBundle", "clustertrustbundles"),
    ("configMap", "configmaps (via projected volumes)"),
    ("downwardAPI", ""),
    ("podCertificate", "podcertificates"),
    ("secret", "secrets (via projected volumes)"),
    ("serviceAccountToken", "serviceaccounts (via projected volumes)"),
];
