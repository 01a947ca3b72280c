//! Static pods from manifest files, the counterpart of upstream's file source
//! (`pkg/kubelet/config/file.go`).
//!
//! Each file in the static pod directory is a pod on this node for as long as the file exists,
//! whether or not the API server is reachable. Once it is, a mirror pod is created for each static
//! pod. A mirror pod that is deleted through the API is created again.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::field::{ErrorList, Path as Field};
use api::strategy::{NameFormat, RestStrategy as _};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use reconcile::{DeleteOptions, Error, Key, Object as _};
use serde_json::{Value, json};

use crate::Node;
use crate::dir_watcher::DirWatcher;
use crate::static_pods::is_static;

/// Marks a mirror pod; the value is the UID of its static pod.
pub const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";
const HASH_ANNOTATION: &str = "kubernetes.io/config.hash";
const SOURCE_ANNOTATION: &str = "kubernetes.io/config.source";
const MIRROR_RETRY: Duration = Duration::from_secs(5);
/// How often, and at most how many times, to check whether a file is still being written.
const WRITE_POLL_INTERVAL: Duration = Duration::from_millis(100);
const MAX_WRITE_POLLS: usize = 10;

/// Watches the static pod directory and keeps the mirror pods up to date.
pub async fn run(node: &Arc<Node>) {
    tokio::join!(watch_manifests(node), run_mirror_pods(node));
}

async fn watch_manifests(node: &Arc<Node>) {
    let Some(dir) = &node.settings.manifests else { return };
    let changes = match DirWatcher::new(dir) {
        Ok(changes) => changes,
        Err(error) => {
            tracing::error!(%error, dir = %dir.display(), "cannot watch the static pod directory");
            return;
        }
    };
    loop {
        // The first reload also finds files that were written before the watch was set up.
        reload(node);
        if changes.next().await.is_err() {
            return;
        }
        // Rewriting a file in place truncates it first. An empty file must not end its pod, so wait
        // for a moment until none is empty.
        for _ in 0..MAX_WRITE_POLLS {
            tokio::time::sleep(WRITE_POLL_INTERVAL).await;
            if !is_being_written(dir) {
                break;
            }
        }
    }
}

fn is_being_written(dir: &Path) -> bool {
    let mut entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.any(|entry| entry.metadata().is_ok_and(|found| found.is_file() && found.len() == 0))
}

/// Reads the directory and applies its changes to the static pods.
pub fn reload(node: &Node) {
    let Some(dir) = &node.settings.manifests else { return };
    let desired = match read(dir, &node.settings.node_name) {
        Ok(desired) => desired,
        Err(error) => {
            return tracing::error!(%error, dir = %dir.display(), "cannot read the static pod directory, keeping the current static pods");
        }
    };
    let changed = node.static_pods.update(desired, node.ctx.clock.now());
    if !changed.is_empty() {
        node.termination_updates.send_modify(|count| *count += 1);
        node.static_pods.changed.notify_one();
    }
    changed.into_iter().for_each(|key| node.enqueue(key));
}

/// Creates and deletes mirror pods: on every change, and again after an error.
async fn run_mirror_pods(node: &Arc<Node>) {
    node.ctx.caches.pods().wait_for_sync().await;
    node.ctx.caches.nodes().wait_for_sync().await;
    let weak = Arc::downgrade(node);
    node.ctx.caches.pods().listen(move |changed| {
        let is_there = |pod: Option<&Arc<Pod>>| pod.is_some_and(|pod| !pod.is_deleting());
        // A completed deletion counts, too: the next mirror pod of that name cannot be created
        // before.
        let needs_sync = is_there(changed.before) != is_there(changed.after) || changed.after.is_none();
        if is_static(changed.latest())
            && needs_sync
            && let Some(node) = weak.upgrade()
        {
            node.static_pods.changed.notify_one();
        }
    });
    loop {
        let result = sync_mirror_pods(node).await;
        if let Err(error) = &result {
            tracing::warn!(%error, "cannot sync all mirror pods, will retry");
        }
        let again = async {
            match result {
                Ok(()) => std::future::pending().await,
                Err(_) => tokio::time::sleep(MIRROR_RETRY).await,
            }
        };
        tokio::select! {
            () = node.static_pods.changed.notified() => {}
            () = again => {}
        }
    }
}

/// The pods of all valid manifests by namespace and name.
fn read(dir: &Path, node: &str) -> io::Result<BTreeMap<Key, Pod>> {
    let mut pods = BTreeMap::new();
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(pods),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if hidden || !path.is_file() {
            continue;
        }
        let pod = std::fs::read_to_string(&path).map_err(|error| error.to_string());
        match pod.and_then(|text| parse(&text, node)) {
            Ok(pod) => drop(pods.insert(pod.key(), pod)),
            Err(error) => {
                tracing::error!(error, file = %path.display(), "ignoring an invalid static pod manifest")
            }
        }
    }
    Ok(pods)
}

/// Decodes a manifest (YAML or JSON), with the defaults and the validation of the API server.
fn parse(text: &str, node: &str) -> Result<Pod, String> {
    let mut value: Value = schema::yaml::parse(text).map_err(|error| error.to_string())?;
    if value["kind"] != "Pod" {
        return Err("kind must be Pod".to_owned());
    }
    let table = schema::kubernetes();
    let ty = table.type_by_kind("", "v1", "Pod").ok_or("the schema has no kind v1 Pod")?;
    schema::normalize(table, ty, &mut value).map_err(|error| error.to_string())?;
    let name = value["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    if name.is_empty() {
        return Err("metadata.name is required".to_owned());
    }
    let hash = format!("{:016x}{:016x}", fnv(text.as_bytes(), 0), fnv(text.as_bytes(), 1));
    let metadata = &mut value["metadata"];
    metadata["name"] = json!(format!("{name}-{node}"));
    if metadata["namespace"].as_str().unwrap_or_default().is_empty() {
        metadata["namespace"] = json!("default");
    }
    metadata["uid"] = json!(hash);
    for (name, value) in
        [(MIRROR_ANNOTATION, hash.as_str()), (HASH_ANNOTATION, &hash), (SOURCE_ANNOTATION, "file")]
    {
        metadata["annotations"][name] = json!(value);
    }
    let spec = &mut value["spec"];
    spec["nodeName"] = json!(node);
    // As upstream: static pods tolerate all `NoExecute` taints, because they cannot run elsewhere.
    let toleration = json!({"operator": "Exists", "effect": "NoExecute"});
    match spec["tolerations"].as_array_mut() {
        Some(tolerations) => tolerations.push(toleration),
        None => spec["tolerations"] = json!([toleration]),
    }
    // The Priority admission plugin does not see static pods, so the two built-in priority classes
    // are resolved here.
    match value["spec"]["priorityClassName"].as_str() {
        Some("system-node-critical") => value["spec"]["priority"] = json!(2_000_001_000),
        Some("system-cluster-critical") => value["spec"]["priority"] = json!(2_000_000_000),
        _ => {}
    }
    api::defaults::set_defaults(table, ty, &mut value);
    let rules = api::core::pod::Pod;
    rules.prepare_for_create(&mut value);
    let mut errors = ErrorList::default();
    let metadata = &value["metadata"];
    api::meta::validate_object_meta(
        metadata,
        true,
        NameFormat::Subdomain,
        &Field::new("metadata"),
        &mut errors,
    );
    rules.validate(&value, &mut errors);
    rules.validate_create(&value, &mut errors);
    if !errors.is_empty() {
        return Err(format!("invalid pod: {errors}"));
    }
    let pod: Pod = serde_json::from_value(value).map_err(|error| error.to_string())?;
    match forbidden_reference(&pod) {
        Some(what) => Err(format!("static pods may not reference {what}")),
        None => Ok(pod),
    }
}

/// The first reference to an API object, which static pods must not have; names and order are those
/// of upstream's `HasAPIObjectReference`.
fn forbidden_reference(pod: &Pod) -> Option<&'static str> {
    let spec = pod.spec.as_ref()?;
    let containers = crate::pod::containers(pod);
    let env = || containers.iter().flat_map(|one| one.env.iter().flatten());
    let from = || env().filter_map(|one| one.value_from.as_ref());
    let all_from = || containers.iter().flat_map(|one| one.env_from.iter().flatten());
    let volumes = || spec.volumes.iter().flatten();
    let projected =
        || volumes().filter_map(|one| one.projected.as_ref()).flat_map(|one| one.sources.iter().flatten());
    let secrets = spec.image_pull_secrets.as_ref().is_some_and(|all| !all.is_empty())
        || from().any(|one| one.secret_key_ref.is_some())
        || all_from().any(|one| one.secret_ref.is_some());
    let maps = from().any(|one| one.config_map_key_ref.is_some())
        || all_from().any(|one| one.config_map_ref.is_some());
    let found = [
        (spec.service_account_name.as_ref().is_some_and(|name| !name.is_empty()), "serviceaccounts"),
        (secrets, "secrets"),
        (maps, "configmaps"),
        (spec.resource_claims.as_ref().is_some_and(|all| !all.is_empty()), "resourceclaims"),
        (volumes().any(|one| one.config_map.is_some()), "configmaps (via configmap volumes)"),
        (volumes().any(|one| one.secret.is_some()), "secrets (via secret volumes)"),
        (volumes().any(|one| one.csi.is_some()), "csidrivers (via CSI volumes)"),
        (volumes().any(|one| one.glusterfs.is_some()), "endpoints (via glusterFS volumes)"),
        (volumes().any(|one| one.persistent_volume_claim.is_some()), "persistentvolumeclaims"),
        (volumes().any(|one| one.ephemeral.is_some()), "persistentvolumeclaims (via ephemeral volumes)"),
        (volumes().any(|one| one.azure_file.is_some()), "secrets (via azureFile volumes)"),
        (projected().any(|one| one.config_map.is_some()), "configmaps (via projected volumes)"),
        (projected().any(|one| one.secret.is_some()), "secrets (via projected volumes)"),
        (
            projected().any(|one| one.service_account_token.is_some()),
            "serviceaccounts (via projected volumes)",
        ),
        (projected().any(|one| one.cluster_trust_bundle.is_some()), "clustertrustbundles"),
        (projected().any(|one| one.pod_certificate.is_some()), "podcertificates"),
    ];
    found.into_iter().find(|(is_so, _)| *is_so).map(|(_, what)| what)
}

/// FNV-1a. The pod's UID depends on it, so it has to be stable across restarts.
fn fnv(bytes: &[u8], seed: u64) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ seed;
    bytes.iter().fold(start, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Deletes mirror pods that do not match a static pod, then creates missing ones. The mirror pod of
/// a terminating static pod stays until the pod has terminated.
async fn sync_mirror_pods(node: &Arc<Node>) -> Result<(), Error> {
    let present = node.ctx.caches.pods().indexed("node", &node.settings.node_name);
    for mirror in present.iter().filter(|pod| is_static(pod)) {
        let pod = node.static_pods.get(&mirror.key());
        let up_to_date = pod.is_some_and(|pod| {
            mirror.annotation(MIRROR_ANNOTATION) == Some(pod.uid())
                && (pod.is_deleting() || !mirror.is_deleting())
        });
        if !up_to_date {
            let options = DeleteOptions { grace_seconds: Some(0), ..DeleteOptions::uid(mirror.uid()) };
            match node.ctx.delete_with::<Pod>(&mirror.key(), &options).await {
                Err(error) if !error.is_conflict() => return Err(error),
                _ => {}
            }
        }
    }
    let is_unknown = |pod: &Arc<Pod>| !pod.is_deleting() && node.ctx.caches.pods().get(&pod.key()).is_none();
    for pod in node.static_pods.all().into_iter().filter(is_unknown) {
        let Some(own) = node.ctx.caches.nodes().get(&Key::new("", &node.settings.node_name)) else {
            return Err(Error::NotCached("the node".to_owned()));
        };
        let mut mirror = Pod { status: None, ..Pod::clone(&pod) };
        mirror.metadata.uid = None;
        mirror.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: own.name().to_owned(),
            uid: own.uid().to_owned(),
            controller: Some(true),
            ..OwnerReference::default()
        }]);
        match node.ctx.create(&mirror).await {
            Err(error) if !error.is_already_exists() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_become_pods_of_this_node() {
        let text = "kind: Pod\napiVersion: v1\nmetadata:\n  name: web\nspec:\n  containers:\n  - {name: main, image: i}\n";
        let pod = parse(text, "here").expect("a pod");
        assert_eq!(pod.key(), Key::new("default", "web-here"));
        assert_eq!(pod.annotation(SOURCE_ANNOTATION), Some("file"));
        assert_eq!(pod.annotation(MIRROR_ANNOTATION), Some(pod.uid()));
        assert_eq!(pod.uid(), parse(text, "here").expect("a pod").uid());
        assert_ne!(pod.uid(), parse(&format!("{text}\n"), "here").expect("a pod").uid());
        let spec = pod.spec.expect("a spec");
        assert_eq!(spec.node_name.as_deref(), Some("here"));
        // Defaults of the API server.
        assert_eq!(
            (spec.restart_policy.as_deref(), spec.termination_grace_period_seconds),
            (Some("Always"), Some(30))
        );
        assert_eq!(spec.containers[0].image_pull_policy.as_deref(), Some("Always"));
        let status = pod.status.expect("a status");
        assert_eq!(
            (status.phase.as_deref(), status.qos_class.as_deref()),
            (Some("Pending"), Some("BestEffort"))
        );
        let check = |text: &str, expected: &str| {
            let error = parse(text, "here").expect_err(text);
            assert!(error.contains(expected), "{error}");
        };
        check("kind: Service", "kind must be Pod");
        check("kind: Pod", "metadata.name is required");
        check("{", "");
        check("{kind: Pod, metadata: {name: a}, spec: {containers: [{name: c}]}}", "containers[0].image");
        check("{kind: Pod, metadata: {name: a}, spec: {containers: []}}", "spec.containers: Required value");
    }

    #[test]
    fn rejects_references_to_api_objects() {
        let check = |more: Value, expected: &str| {
            let mut spec = json!({"containers": [{"name": "c", "image": "i"}]});
            for (field, value) in more.as_object().expect("fields") {
                spec[field] = value.clone();
            }
            let text = json!({"kind": "Pod", "metadata": {"name": "a"}, "spec": spec}).to_string();
            let error = parse(&text, "here").expect_err("a reference");
            assert_eq!(error, format!("static pods may not reference {expected}"));
        };
        check(json!({"serviceAccountName": "x"}), "serviceaccounts");
        check(json!({"imagePullSecrets": [{"name": "x"}]}), "secrets");
        let env = json!([{"name": "E", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}]);
        check(json!({"containers": [{"name": "c", "image": "i", "env": env}]}), "configmaps");
        let volume = |source: Value| json!({"volumes": [source]});
        check(volume(json!({"name": "v", "secret": {"secretName": "s"}})), "secrets (via secret volumes)");
        let claim = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        check(volume(claim), "persistentvolumeclaims");
        let sources = json!([{"configMap": {"name": "m"}}]);
        check(
            volume(json!({"name": "v", "projected": {"sources": sources}})),
            "configmaps (via projected volumes)",
        );
    }

    #[test]
    fn ignores_hidden_and_invalid_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let pod = r#"{"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}"#;
        std::fs::write(dir.path().join("a.json"), pod).expect("written");
        std::fs::write(dir.path().join(".b.json.swp"), pod).expect("written");
        std::fs::write(dir.path().join("c.yaml"), "nonsense").expect("written");
        assert_eq!(
            read(dir.path(), "here").expect("pods").into_keys().collect::<Vec<_>>(),
            [Key::new("default", "a-here")]
        );
    }
}
