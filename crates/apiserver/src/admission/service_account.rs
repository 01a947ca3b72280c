//! ServiceAccount: sets the service account of a pod and mounts its token, unless the pod opts out.

use api::Status;
use api::json::JsonExt as _;
use serde_json::{Value, json};

use super::{Cluster, Operation, Request};
use crate::node_authorizer::references::is_mirror;

const MOUNT_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const VOLUME_PREFIX: &str = "kube-api-access-";

const ENFORCE_SECRETS: &str = "kubernetes.io/enforce-mountable-secrets";
/// Upstream's `WarnOnlyBoundTokenExpirationSeconds`: one hour plus 7 seconds, so that clients that
/// do not reload the token can be detected.
const TOKEN_EXPIRATION_SECONDS: i64 = 60 * 60 + 7;

pub fn admit(request: &Request<'_>, pod: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !request.creates("", "pods") || is_mirror(pod) {
        return Ok(());
    }
    if pod.at("spec").text("serviceAccountName").is_empty() {
        // `serviceAccount` is the deprecated alias of `serviceAccountName`.
        let spec = pod.object_mut("spec");
        spec.insert("serviceAccountName".into(), "default".into());
        spec.insert("serviceAccount".into(), "default".into());
    }
    let account = account(request, pod, cluster)?;
    let automount = |value: &Value| value.at("automountServiceAccountToken").as_bool();
    if automount(pod.at("spec")).or(automount(&account)).unwrap_or(true) {
        mount_token(pod.object_mut("spec"));
    }
    let secrets = account.items("imagePullSecrets");
    if pod.at("spec").items("imagePullSecrets").is_empty() && !secrets.is_empty() {
        let names: Vec<Value> = secrets.iter().map(|secret| json!({"name": secret.at("name")})).collect();
        pod.object_mut("spec").insert("imagePullSecrets".into(), names.into());
    }
    Ok(())
}

pub fn validate(request: &Request<'_>, pod: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if (request.row.group, request.row.plural) != ("", "pods") {
        return Ok(());
    }
    let is_ephemeral_update =
        request.operation == Operation::Update && request.subresource == "ephemeralcontainers";
    if !is_ephemeral_update && !request.creates("", "pods") {
        return Ok(());
    }
    let to_status = |reason: String| request.forbidden(reason);
    if !is_ephemeral_update && is_mirror(pod) {
        return check_mirror(pod).map_err(to_status);
    }
    if pod.at("spec").text("serviceAccountName").is_empty() {
        let name = pod.at("metadata").text("name");
        return Err(to_status(format!("no service account specified for pod {}/{name}", request.namespace)));
    }
    let account = account(request, pod, cluster)?;
    let enforced = account.at("metadata").at("annotations").text(ENFORCE_SECRETS);
    if !matches!(enforced, "1" | "t" | "T" | "true" | "TRUE" | "True") {
        return Ok(());
    }
    let kinds: &[_] = match is_ephemeral_update {
        true => &[("ephemeralContainers", "ephemeral container")],
        false => &[("initContainers", "init container"), ("containers", "container")],
    };
    limit_secrets(&account, pod.at("spec"), kinds, is_ephemeral_update).map_err(to_status)
}

fn account(request: &Request<'_>, pod: &Value, cluster: &dyn Cluster) -> Result<Value, Status> {
    let name = pod.at("spec").text("serviceAccountName");
    let found = cluster.get("", "serviceaccounts", request.namespace, name);
    found.map(|account| account.value()).ok_or_else(|| {
        let namespaced_name = format!("{}/{name}", request.namespace);
        // Upstream uses the singular here.
        request.forbidden(format!(
            "error looking up service account {namespaced_name}: serviceaccount {name:?} not found"
        ))
    })
}

/// Mirror pods must not reference secrets or service accounts: the node could read them through the
/// pod.
fn check_mirror(pod: &Value) -> Result<(), String> {
    let spec = pod.at("spec");
    if !spec.text("serviceAccountName").is_empty() {
        return Err("a mirror pod may not reference service accounts".into());
    }
    let containers = ["containers", "initContainers", "ephemeralContainers"];
    let mut containers = containers.iter().flat_map(|list| spec.items(list));
    let in_containers = containers.any(|container| {
        container.items("env").iter().any(|env| env.at("valueFrom").has("secretKeyRef"))
            || container.items("envFrom").iter().any(|from| from.has("secretRef"))
    });
    let in_volumes = spec.items("volumes").iter().any(volume_has_secret);
    if in_containers || in_volumes || !spec.items("imagePullSecrets").is_empty() {
        return Err("a mirror pod may not reference secrets".into());
    }
    let projected_sources =
        spec.items("volumes").iter().flat_map(|volume| volume.at("projected").items("sources"));
    if projected_sources.into_iter().any(|source| source.has("serviceAccountToken")) {
        return Err("a mirror pod may not use ServiceAccountToken volume projections".into());
    }
    Ok(())
}

fn volume_has_secret(volume: &Value) -> bool {
    const SECRET_REFERENCES: &[(&str, &[&str])] = &[
        ("azureFile", &["secretName"]),
        ("cephfs", &["secretRef"]),
        ("cinder", &["secretRef"]),
        ("csi", &["nodePublishSecretRef"]),
        ("flexVolume", &["secretRef"]),
        ("iscsi", &["secretRef"]),
        ("rbd", &["secretRef"]),
        ("scaleIO", &["secretRef"]),
        ("storageos", &["secretRef"]),
    ];
    volume.has("secret")
        || volume.at("projected").items("sources").iter().any(|source| source.has("secret"))
        || SECRET_REFERENCES
            .iter()
            .any(|(source, fields)| fields.iter().any(|field| volume.at(source).has(field)))
}

/// `kubernetes.io/enforce-mountable-secrets`: pods of the account may only use the secrets it
/// lists.
fn limit_secrets(
    account: &Value,
    spec: &Value,
    kinds: &[(&str, &str)],
    only_containers: bool,
) -> Result<(), String> {
    let lists = |field: &str, name: &str| account.items(field).iter().any(|entry| entry.text("name") == name);
    let owner = account.at("metadata").text("name");
    let deny = |what: String| {
        Err(format!("{what} is not allowed because service account {owner} does not reference that secret"))
    };
    if !only_containers {
        for volume in spec.items("volumes").iter().filter(|volume| volume.has("secret")) {
            let name = volume.at("secret").text("secretName");
            if !lists("secrets", name) {
                return deny(format!("volume with secret.secretName=\"{name}\""));
            }
        }
    }
    for (field, word) in kinds {
        for container in spec.items(field) {
            let container_name = container.text("name");
            for env in container.items("env").iter().filter(|env| env.at("valueFrom").has("secretKeyRef")) {
                let name = env.path("valueFrom.secretKeyRef").text("name");
                if !lists("secrets", name) {
                    let env = env.text("name");
                    return deny(format!(
                        "{word} {container_name} with envVar {env} referencing secret.secretName=\"{name}\""
                    ));
                }
            }
            for from in container.items("envFrom").iter().filter(|from| from.has("secretRef")) {
                let name = from.at("secretRef").text("name");
                if !lists("secrets", name) {
                    return deny(format!(
                        "{word} {container_name} with envFrom referencing secret.secretName=\"{name}\""
                    ));
                }
            }
        }
    }
    if only_containers {
        return Ok(());
    }
    for (i, secret) in spec.items("imagePullSecrets").iter().enumerate() {
        let name = secret.text("name");
        if !lists("imagePullSecrets", name) {
            return Err(format!(
                "imagePullSecrets[{i}].name=\"{name}\" is not allowed because service account {owner} does not reference that imagePullSecret"
            ));
        }
    }
    Ok(())
}

/// Adds the projected token volume, and mounts it unless something else is mounted at the path.
fn mount_token(spec: &mut serde_json::Map<String, Value>) {
    let volumes = spec.get("volumes").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let existing_volume =
        volumes.iter().map(|volume| volume.text("name")).find(|name| name.starts_with(VOLUME_PREFIX));
    let existing_volume = existing_volume.map(str::to_owned);
    let missing = existing_volume.is_none();
    let name = existing_volume.unwrap_or_else(|| format!("{VOLUME_PREFIX}{}", random_suffix()));
    let mut mounted = false;
    for field in ["initContainers", "containers"] {
        for container in spec.get_mut(field).and_then(Value::as_array_mut).into_iter().flatten() {
            if container.items("volumeMounts").iter().any(|mount| mount.text("mountPath") == MOUNT_PATH) {
                continue;
            }
            push(container, "volumeMounts", json!({"mountPath": MOUNT_PATH, "name": name, "readOnly": true}));
            mounted = true;
        }
    }
    if !missing || !mounted {
        return;
    }
    let volume = json!({"name": name, "projected": {"defaultMode": 420, "sources": [
        {"serviceAccountToken": {"expirationSeconds": TOKEN_EXPIRATION_SECONDS, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [
            {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}},
        ]}},
    ]}});
    match spec.get_mut("volumes").and_then(Value::as_array_mut) {
        Some(volumes) => volumes.push(volume),
        None => drop(spec.insert("volumes".into(), json!([volume]))),
    }
}

/// Appends to a list field, creating it if absent.
pub fn push(value: &mut Value, field: &str, item: Value) {
    match value.get_mut(field).and_then(Value::as_array_mut) {
        Some(list) => list.push(item),
        None => value.set(field, json!([item])),
    }
}

/// As upstream's `rand.String`: no vowels, so that no words are formed.
fn random_suffix() -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let bytes = uuid::Uuid::new_v4().into_bytes();
    bytes[..5].iter().map(|byte| LETTERS[usize::from(*byte) % LETTERS.len()] as char).collect()
}
