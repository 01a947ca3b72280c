//! Persistent volumes: resolves the claim of a pod to a PersistentVolume, and that to a path on
//! this host.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{NFSVolumeSource, PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use reconcile::{Key, Object as _};

use super::{VolumeContext, VolumeError, host_path, iscsi, nfs};
use crate::config::Settings;
use crate::csi;

/// The volume of a claim on this host.
pub struct BoundVolume {
    /// The name of the PersistentVolume, for messages.
    pub name: String,
    pub path: PathBuf,
    pub read_only: bool,
    /// Whether the pod's group has to be set on it.
    pub needs_fs_group: bool,
    /// It is a block device without a filesystem.
    pub is_block: bool,
}

/// The name of the claim of a pod's volume. The claim of a generic ephemeral volume is named after
/// the pod and the volume.
pub fn claim_name(pod: &Pod, volume: &Volume) -> Option<String> {
    match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (_, Some(_)) => Some(format!("{}-{}", pod.name(), volume.name)),
        _ => None,
    }
}

/// Resolves a claim and sets up its volume. Both objects are fetched by name, because a node may
/// only read those of its own pods.
pub async fn set_up(
    volume_context: &VolumeContext<'_>,
    pod: &Pod,
    volume: &Volume,
    claim: &str,
) -> Result<BoundVolume, VolumeError> {
    let client = &volume_context.ctx.client;
    let failed = |message: String| VolumeError::new(&volume.name, message);
    let claim_error =
        |reason: String| failed(format!("error processing PVC {}/{claim}: {reason}", pod.namespace()));
    let key = Key::new(pod.namespace(), claim);
    let claim: PersistentVolumeClaim = client
        .get(&key)
        .await
        .map_err(|error| claim_error(format!("failed to fetch PVC from API server: {error}")))?;
    let volume_name = bound_volume_name(pod, volume, &claim).map_err(claim_error)?;
    let found: PersistentVolume = client
        .get(&Key::new("", &volume_name))
        .await
        .map_err(|error| claim_error(format!("failed to fetch PV {volume_name} from API server: {error}")))?;
    let read_only =
        volume.persistent_volume_claim.as_ref().and_then(|claim| claim.read_only).unwrap_or(false);
    let failed = |message: String| VolumeError::new(&volume_name, message);
    if let Some(request) = csi::volume::CsiVolumeSpec::persistent(&volume.name, &found, read_only) {
        let volume_error = |volume_error| VolumeError::from_csi(&volume_name, volume_error);
        let ready = csi::volume::set_up(volume_context, pod, &request).await.map_err(volume_error)?;
        if csi::volume::expand(volume_context, pod, &request, &found, &claim).await.map_err(volume_error)? {
            let message = format!("MountVolume.NodeExpandVolume succeeded for volume {volume_name:?}");
            volume_context.ctx.events.normal(pod, "FileSystemResizeSuccessful", message);
        }
        return Ok(BoundVolume {
            needs_fs_group: ready.apply_fs_group && !request.read_only,
            is_block: request.is_block,
            read_only: request.read_only,
            path: ready.path,
            name: volume_name,
        });
    }
    if let Some(request) = iscsi::DiskRequest::persistent(pod, &found, read_only) {
        return set_up_disk(volume_context, pod, &volume_name, &request).await;
    }
    let spec = found.spec.clone().unwrap_or_default();
    let is_block = spec.volume_mode.as_deref() == Some("Block");
    let path = match &spec.nfs {
        Some(source) if !is_block => {
            let dir =
                volume_context.settings.pod_dir(pod).join("volumes/kubernetes.io~nfs").join(&volume_name);
            let options = spec.mount_options.as_deref().unwrap_or_default();
            nfs::mount(
                &NFSVolumeSource {
                    path: source.path.clone(),
                    server: source.server.clone(),
                    read_only: source.read_only,
                },
                options,
                &dir,
            )
            .await
            .map_err(failed)?;
            dir
        }
        _ => volume_path(&found, volume_context.settings).map_err(failed)?,
    };
    let is_shared = !read_only && !is_block && supports_fs_group(&found);
    Ok(BoundVolume { name: volume_name, path, read_only, needs_fs_group: is_shared, is_block })
}

/// Whether the pod's group is set on a volume. An NFS server has its own ownership, and a directory
/// of the host belongs to the administrator, unless it was provisioned for a claim.
fn supports_fs_group(volume: &PersistentVolume) -> bool {
    let is_provisioned = volume.annotation("pv.kubernetes.io/provisioned-by").is_some();
    volume
        .spec
        .as_ref()
        .is_some_and(|spec| spec.nfs.is_none() && (spec.host_path.is_none() || is_provisioned))
}

/// Sets up an iSCSI disk.
pub async fn set_up_disk(
    volume_context: &VolumeContext<'_>,
    pod: &Pod,
    name: &str,
    request: &iscsi::DiskRequest,
) -> Result<BoundVolume, VolumeError> {
    let ready = iscsi::set_up(volume_context, pod, request).await;
    let ready = ready.map_err(|volume_error| VolumeError::from_csi(name, volume_error))?;
    Ok(BoundVolume {
        name: name.to_owned(),
        path: ready.path,
        read_only: request.read_only,
        needs_fs_group: ready.is_new && !request.read_only && !request.is_block,
        is_block: request.is_block,
    })
}

/// The name of the PersistentVolume that a claim is bound to.
fn bound_volume_name(pod: &Pod, volume: &Volume, claim: &PersistentVolumeClaim) -> Result<String, String> {
    if volume.ephemeral.is_some() && claim.controller().is_none_or(|owner| owner.uid != pod.uid()) {
        return Err("PVC was not created for pod".to_owned());
    }
    if claim.is_deleting() {
        return Err("PVC is being deleted".to_owned());
    }
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
    let phase = claim.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
    if phase != "Bound" || name.is_empty() {
        return Err(format!("PVC has non-bound phase ({phase:?}) or empty pvc.Spec.VolumeName ({name:?})"));
    }
    Ok(name)
}

fn volume_path(volume: &PersistentVolume, settings: &Settings) -> Result<PathBuf, String> {
    let Some(spec) = &volume.spec else { return Err("the PersistentVolume has no spec".to_owned()) };
    if spec.volume_mode.as_deref() == Some("Block") {
        let local = spec.local.as_ref().map(|local| PathBuf::from(&local.path));
        let path = local.ok_or("volumeMode Block is only supported for local volumes and CSI volumes")?;
        return match std::fs::metadata(&path) {
            Ok(known) if known.file_type().is_block_device() => Ok(path),
            Ok(_) => Err(format!("{} is not a block device", path.display())),
            Err(error) => Err(format!("{}: {error}", path.display())),
        };
    }
    if let Some(host) = &spec.host_path {
        return host_path(&host.path, host.type_.as_deref().unwrap_or_default(), settings);
    }
    if let Some(local) = &spec.local {
        let path = Path::new(&local.path);
        return match path.is_dir() {
            true => Ok(path.to_owned()),
            false if path.exists() => {
                Err(format!("{:?} is not a directory: mount the device there first", local.path))
            }
            false => Err(format!("path {:?} does not exist", local.path)),
        };
    }
    Err(super::unsupported::unsupported_message(spec))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod() -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "web", "uid": "u"}})).expect("a pod")
    }

    #[track_caller]
    fn check(volume: Value, claim: Value, expected: Result<&str, &str>) {
        let volume: Volume = serde_json::from_value(volume).expect("a volume");
        let claim: PersistentVolumeClaim = serde_json::from_value(claim).expect("a claim");
        let found = bound_volume_name(&pod(), &volume, &claim);
        assert_eq!(found, expected.map(str::to_owned).map_err(str::to_owned));
    }

    #[test]
    fn bound_claims_resolve_to_volumes() {
        let volume = || json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}});
        let own = || json!({"name": "data", "ephemeral": {}});
        let whole = json!({"spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}});
        check(volume(), whole.clone(), Ok("pv"));
        let unbound = "PVC has non-bound phase (\"Pending\") or empty pvc.Spec.VolumeName (\"\")";
        check(volume(), json!({"spec": {}, "status": {"phase": "Pending"}}), Err(unbound));
        check(own(), whole.clone(), Err("PVC was not created for pod"));
        let owner =
            json!([{"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u", "controller": true}]);
        let mut owned = whole;
        owned["metadata"] = json!({"ownerReferences": owner});
        check(own(), owned, Ok("pv"));
        let own: Volume = serde_json::from_value(own()).expect("a volume");
        assert_eq!(claim_name(&pod(), &own).as_deref(), Some("web-data"));
    }

    #[test]
    fn host_paths_keep_their_group() {
        let check = |metadata: Value, source: Value, expected: bool| {
            let volume = json!({"metadata": metadata, "spec": source});
            assert_eq!(supports_fs_group(&serde_json::from_value(volume).expect("a volume")), expected);
        };
        let provisioned = || json!({"annotations": {"pv.kubernetes.io/provisioned-by": "skiff"}});
        check(json!({}), json!({"local": {"path": "/data"}}), true);
        check(json!({}), json!({"hostPath": {"path": "/"}}), false);
        check(provisioned(), json!({"hostPath": {"path": "/data"}}), true);
        check(provisioned(), json!({"nfs": {"server": "s", "path": "/"}}), false);
    }

    #[test]
    fn volume_paths_on_the_host() {
        let settings = Settings::for_tests(Path::new("/node"));
        let found = |spec: Value| {
            let volume = serde_json::from_value(json!({"spec": spec})).expect("a volume");
            volume_path(&volume, &settings)
        };
        assert_eq!(found(json!({"local": {"path": "/"}})), Ok(PathBuf::from("/")));
        let missing = "path \"/not/there\" does not exist".to_owned();
        assert_eq!(found(json!({"local": {"path": "/not/there"}})), Err(missing));
        let no_device = "/ is not a block device".to_owned();
        assert_eq!(found(json!({"local": {"path": "/"}, "volumeMode": "Block"})), Err(no_device));
        assert!(found(json!({"hostPath": {"path": "/"}, "volumeMode": "Block"})).is_err());
        assert!(found(json!({"glusterfs": {"endpoints": "a", "path": "b"}})).is_err());
    }
}
