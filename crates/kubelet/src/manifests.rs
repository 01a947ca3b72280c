//! Static pods: manifests in a directory of this host, each of which is a pod here for as long as the file is there.
//!
//! They are made known to the API as mirror pods, and looked after like all others. Whoever deletes one there finds
//! it made again.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use reconcile::{Delete, Error, Key, Object as _};

use crate::Node;
use crate::changes::Changes;

/// Marks a pod as the likeness of one that is not from the API; its value tells manifests apart.
pub const MIRROR: &str = "kubernetes.io/config.mirror";
const HASH: &str = "kubernetes.io/config.hash";
const SOURCE: &str = "kubernetes.io/config.source";
const AGAIN: Duration = Duration::from_secs(5);

/// Keeps the mirror pods as the directory says.
pub async fn run(node: &Arc<Node>) {
    let Some(dir) = node.settings.manifests.clone() else { return std::future::pending().await };
    node.ctx.caches.pods().filled().await;
    node.ctx.caches.nodes().filled().await;
    let changes = match Changes::of(&dir) {
        Ok(changes) => changes,
        Err(error) => {
            tracing::error!(%error, dir = %dir.display(), "no pods can be read from there");
            return std::future::pending().await;
        }
    };
    let (gone, mut went) = tokio::sync::watch::channel(());
    node.ctx.caches.pods().listen(move |changed| {
        if let (Some(pod), None) = (changed.before, changed.after)
            && pod.annotation(MIRROR).is_some()
        {
            gone.send_replace(());
        }
    });
    loop {
        let settled = settle(node, &read(&dir, &node.settings.node_name)).await;
        if let Err(error) = &settled {
            tracing::warn!(%error, "static pods are not all known to the API");
        }
        let pause = if settled.is_ok() { Duration::MAX } else { AGAIN };
        tokio::select! {
            _ = changes.next() => {}
            _ = went.changed() => {}
            () = tokio::time::sleep(pause.min(Duration::from_secs(3600))) => {}
        }
    }
}

/// The pods of all manifests, by the name they have here.
fn read(dir: &Path, node: &str) -> BTreeMap<Key, Pod> {
    let mut pods = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if hidden || !path.is_file() {
            continue;
        }
        let pod = std::fs::read_to_string(&path).map_err(|error| error.to_string());
        match pod.and_then(|text| parse(&text, node)) {
            Ok(pod) => drop(pods.insert(pod.key(), pod)),
            Err(error) => tracing::error!(error, file = %path.display(), "this is no pod"),
        }
    }
    pods
}

/// The mirror pod of a manifest in YAML or JSON.
fn parse(text: &str, node: &str) -> Result<Pod, String> {
    let value: serde_json::Value = schema::yaml::value(text).map_err(|error| error.to_string())?;
    if value["kind"] != "Pod" {
        return Err("its kind is not Pod".to_owned());
    }
    let mut pod: Pod = serde_json::from_value(value).map_err(|error| error.to_string())?;
    if pod.name().is_empty() {
        return Err("it has no name".to_owned());
    }
    let hash = format!("{:016x}{:016x}", fnv(text.as_bytes(), 0), fnv(text.as_bytes(), 1));
    pod.metadata.name = Some(format!("{}-{node}", pod.name()));
    pod.metadata.namespace.get_or_insert_with(|| "default".to_owned());
    let annotations = pod.metadata.annotations.get_or_insert_default();
    for (name, value) in [(MIRROR, hash.as_str()), (HASH, &hash), (SOURCE, "file")] {
        annotations.insert(name.to_owned(), value.to_owned());
    }
    let spec = pod.spec.get_or_insert_default();
    spec.node_name = Some(node.to_owned());
    // What may not be scheduled away from here stays whatever becomes of the node.
    let everything = serde_json::json!({"operator": "Exists", "effect": "NoExecute"});
    if let Ok(toleration) = serde_json::from_value(everything) {
        spec.tolerations.get_or_insert_default().push(toleration);
    }
    pod.status = None;
    Ok(pod)
}

/// FNV-1a: tells texts apart, and is the same tomorrow.
fn fnv(bytes: &[u8], seed: u64) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ seed;
    bytes.iter().fold(start, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Makes mirror pods that are missing, and removes those whose manifest is gone or has changed.
async fn settle(node: &Arc<Node>, wanted: &BTreeMap<Key, Pod>) -> Result<(), Error> {
    let present = node.ctx.caches.pods().indexed("node", &node.settings.node_name);
    for pod in present.iter().filter(|pod| pod.annotation(MIRROR).is_some()) {
        let same =
            wanted.get(&pod.key()).is_some_and(|wanted| wanted.annotation(MIRROR) == pod.annotation(MIRROR));
        if !same && !pod.is_deleting() {
            match node.ctx.client.delete::<Pod>(&pod.key(), &Delete::uid(pod.uid())).await {
                Err(error) if !error.is_not_found() && !error.is_conflict() => return Err(error),
                _ => {}
            }
        }
    }
    let Some(own) = node.ctx.caches.nodes().get(&Key::new("", &node.settings.node_name)) else {
        return Err(Error::NotSeen("the node".to_owned()));
    };
    for (key, pod) in wanted {
        if node.ctx.caches.pods().get(key).is_some() {
            continue;
        }
        let mut pod = pod.clone();
        pod.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: own.name().to_owned(),
            uid: own.uid().to_owned(),
            controller: Some(true),
            ..OwnerReference::default()
        }]);
        match node.ctx.create(&pod).await {
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
        let text =
            "kind: Pod\napiVersion: v1\nmetadata:\n  name: web\nspec:\n  containers:\n  - name: main\n";
        let pod = parse(text, "here").expect("a pod");
        assert_eq!(pod.key(), Key::new("default", "web-here"));
        assert_eq!(pod.annotation(SOURCE), Some("file"));
        assert_eq!(pod.annotation(MIRROR), parse(text, "here").expect("a pod").annotation(MIRROR));
        assert_ne!(
            pod.annotation(MIRROR),
            parse(&format!("{text}\n"), "here").expect("a pod").annotation(MIRROR)
        );
        assert_eq!(pod.spec.and_then(|spec| spec.node_name).as_deref(), Some("here"));
        assert!(parse("kind: Service", "here").is_err());
        assert!(parse("kind: Pod", "here").is_err());
        assert!(parse("{", "here").is_err());
    }

    #[test]
    fn only_files_that_are_meant_are_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let pod = r#"{"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": []}}"#;
        std::fs::write(dir.path().join("a.json"), pod).expect("written");
        std::fs::write(dir.path().join(".b.json.swp"), pod).expect("written");
        std::fs::write(dir.path().join("c.yaml"), "nonsense").expect("written");
        assert_eq!(read(dir.path(), "here").into_keys().collect::<Vec<_>>(), [Key::new("default", "a-here")]);
    }
}
