//! Reclaims volumes of the built-in storage class: deletes the directory of a deleted volume.

use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolume;
use reconcile::Object as _;

use crate::Node;

const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
const PROVISIONER: &str = "rancher.io/local-path";
const ON_NODE: &str = "local.path.provisioner/selected-node";

/// Deletes the directory of each deleted volume whose reclaim policy is `Delete`.
pub fn listen(node: &Arc<Node>) {
    let own = node.settings.node_name.clone();
    node.ctx.caches.persistent_volumes().listen(move |changed| {
        let (Some(volume), None) = (changed.before, changed.after) else { return };
        let Some(dir) = reclaim_dir(volume, &own) else { return };
        tokio::task::spawn_blocking(move || match sys::trees::remove(&dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%error, dir = %dir.display(), "cannot remove the directory of a deleted volume");
            }
            _ => {}
        });
    });
}

/// The directory of a volume, if it was provisioned on this node and is named after the volume.
fn reclaim_dir(volume: &PersistentVolume, node: &str) -> Option<PathBuf> {
    let spec = volume.spec.as_ref()?;
    let provisioned_here =
        volume.annotation(PROVISIONED_BY) == Some(PROVISIONER) && volume.annotation(ON_NODE) == Some(node);
    let delete = spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete");
    let path = PathBuf::from(&spec.host_path.as_ref()?.path);
    // A PersistentVolume that a user wrote by hand must not delete other directories.
    let named = path.file_name()?.to_str()?.starts_with(&format!("{}_", volume.name()));
    let plain = path.is_absolute() && path.components().all(|part| part.as_os_str() != "..");
    (provisioned_here && delete && named && plain && !volume.name().is_empty()).then_some(path)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(path: &str, policy: &str, node: &str, expected: bool) {
        let annotations = json!({PROVISIONED_BY: PROVISIONER, ON_NODE: "here"});
        let volume = json!({
            "metadata": {"name": "pvc-1", "annotations": annotations},
            "spec": {"hostPath": {"path": path}, "persistentVolumeReclaimPolicy": policy},
        });
        let volume: PersistentVolume = serde_json::from_value(volume).expect("a volume");
        assert_eq!(
            reclaim_dir(&volume, node),
            expected.then(|| PathBuf::from(path)),
            "{path} {policy} {node}"
        );
    }

    #[test]
    fn only_provisioned_directories_are_removed() {
        check("/data/pvc-1_default_data", "Delete", "here", true);
        check("/data/pvc-1_default_data", "Retain", "here", false);
        check("/data/pvc-1_default_data", "Delete", "there", false);
        check("/data/other", "Delete", "here", false);
        check("/data/../etc/pvc-1_x", "Delete", "here", false);
        check("/", "Delete", "here", false);
    }
}
