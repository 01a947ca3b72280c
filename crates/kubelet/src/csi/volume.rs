//! The lifecycle of a CSI volume on the node. A volume is attached (by the attach/detach
//! controller), staged once per node, and published for each pod. Tear-down reverses these steps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, Pod, SecretReference, ServiceAccount, Volume,
};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use reconcile::{Key, Object as _, Patch};
use serde_json::{Value, json};

use super::driver::Driver;
use super::messages::*;
use super::record::{self, VolumeRecord};
use crate::config::Settings;
use crate::volumes::VolumeContext;

/// The delay before a failed republish is retried.
const REPUBLISH_RETRY: jiff::SignedDuration = jiff::SignedDuration::from_secs(10);

/// A CSI volume of a pod.
#[derive(Clone, Debug, Default)]
pub struct CsiVolumeSpec {
    pub driver: String,
    pub handle: String,
    /// The name of the PersistentVolume. For an inline volume, the name in the pod.
    pub name: String,
    /// The name of the volume in the pod.
    pub pod_volume_name: String,
    pub is_ephemeral: bool,
    pub is_block: bool,
    pub read_only: bool,
    fs_type: String,
    pub attributes: BTreeMap<String, String>,
    access_mode: String,
    mount_options: Vec<String>,
    stage_secret: Option<SecretReference>,
    publish_secret: Option<SecretReference>,
    expand_secret: Option<SecretReference>,
}

/// A published volume.
#[derive(Debug)]
pub struct PublishedVolume {
    pub path: PathBuf,
    /// Whether the kubelet still has to apply `fsGroup`.
    pub apply_fs_group: bool,
}

/// Why a volume is not published.
#[derive(Debug)]
pub enum SetUpError {
    /// The volume waits for a controller, for example to be attached. Not reported as an error.
    Waiting,
    Failed {
        operation: &'static str,
        message: String,
    },
}

const MOUNT_DEVICE: &str = "MountVolume.MountDevice";
const SET_UP: &str = "MountVolume.SetUp";

fn failed(operation: &'static str, message: impl ToString) -> SetUpError {
    SetUpError::Failed { operation, message: message.to_string() }
}

impl CsiVolumeSpec {
    /// An inline (ephemeral) volume of the pod.
    pub fn inline(pod: &Pod, volume: &Volume) -> Option<CsiVolumeSpec> {
        let source = volume.csi.as_ref()?;
        let secret = source.node_publish_secret_ref.as_ref().map(|secret| SecretReference {
            name: Some(secret.name.clone()),
            namespace: Some(pod.namespace().to_owned()),
        });
        Some(CsiVolumeSpec {
            driver: source.driver.clone(),
            handle: format!("csi-{}", record::digest(&format!("{}{}", pod.uid(), volume.name))),
            name: volume.name.clone(),
            pod_volume_name: volume.name.clone(),
            is_ephemeral: true,
            read_only: source.read_only == Some(true),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            access_mode: "ReadWriteOnce".to_owned(),
            publish_secret: secret,
            ..CsiVolumeSpec::default()
        })
    }

    /// A persistent volume.
    pub fn persistent(
        pod_volume_name: &str,
        volume: &PersistentVolume,
        read_only: bool,
    ) -> Option<CsiVolumeSpec> {
        let spec = volume.spec.as_ref()?;
        let source = spec.csi.as_ref()?;
        let mode = spec.access_modes.iter().flatten().next();
        Some(CsiVolumeSpec {
            driver: source.driver.clone(),
            handle: source.volume_handle.clone(),
            name: volume.name().to_owned(),
            pod_volume_name: pod_volume_name.to_owned(),
            is_ephemeral: false,
            is_block: spec.volume_mode.as_deref() == Some("Block"),
            read_only: read_only || source.read_only == Some(true),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            access_mode: mode.cloned().unwrap_or_else(|| "ReadWriteOnce".to_owned()),
            mount_options: spec.mount_options.clone().unwrap_or_default(),
            stage_secret: source.node_stage_secret_ref.clone(),
            publish_secret: source.node_publish_secret_ref.clone(),
            expand_secret: source.node_expand_secret_ref.clone(),
        })
    }

    fn record(&self, dir: PathBuf) -> VolumeRecord {
        VolumeRecord {
            driver: self.driver.clone(),
            handle: self.handle.clone(),
            name: self.name.clone(),
            pod_volume_name: self.pod_volume_name.clone(),
            is_ephemeral: self.is_ephemeral,
            is_block: self.is_block,
            dir,
        }
    }

    fn capability(&self, driver: &Driver, group: Option<i64>) -> VolumeCapability {
        let mount = || MountVolume {
            fs_type: self.fs_type.clone(),
            mount_flags: self.mount_options.clone(),
            volume_mount_group: group
                .filter(|_| driver.supports_mount_group())
                .map_or_else(String::new, |group| group.to_string()),
        };
        VolumeCapability {
            block: self.is_block.then_some(Empty {}),
            mount: (!self.is_block).then(mount),
            access_mode: Some(driver.access_mode(&self.access_mode)),
        }
    }

    /// Whether the kubelet applies `fsGroup`, by the driver's capabilities and its `fsGroupPolicy`.
    fn applies_fs_group(&self, driver: &Driver, object: Option<&CSIDriver>) -> bool {
        if driver.supports_mount_group() || self.is_block {
            return false;
        }
        match object.and_then(|object| object.spec.fs_group_policy.as_deref()) {
            Some("None") => false,
            Some("File") => true,
            _ => {
                !self.fs_type.is_empty() && matches!(&*self.access_mode, "ReadWriteOnce" | "ReadWriteOncePod")
            }
        }
    }
}

/// Stages and publishes a volume for a pod. Idempotent.
pub async fn set_up(
    mount_context: &VolumeContext<'_>,
    pod: &Pod,
    volume_spec: &CsiVolumeSpec,
) -> Result<PublishedVolume, SetUpError> {
    let drivers = mount_context.csi;
    let root = &mount_context.settings.root;
    let name = record::unique_name(&volume_spec.driver, &volume_spec.handle);
    let _guard = drivers.volume_locks.lock(&name).await;
    let object = driver_object(mount_context, &volume_spec.driver).await;
    check_mode(volume_spec, object.as_ref()).map_err(|why| failed(SET_UP, why))?;
    let driver = drivers.find(&volume_spec.driver).map_err(|why| {
        let (operation, who) = match volume_spec.is_ephemeral {
            true => (SET_UP, "mounter.SetUpAt failed to get CSI client"),
            false => (MOUNT_DEVICE, "attacher.MountDevice failed to create newCsiDriverClient"),
        };
        failed(operation, format!("kubernetes.io/csi: {who}: {why}"))
    })?;
    let published = volume_spec.record(record::published_dir(root, pod.uid(), &volume_spec.name));
    let apply_fs_group = volume_spec.applies_fs_group(&driver, object.as_ref());
    let key = (pod.uid().to_owned(), volume_spec.name.clone());
    let now = mount_context.ctx.clock.now();
    let before = drivers.republish_times.lock().get(&key).copied();
    let requires_republish =
        object.as_ref().is_some_and(|object| object.spec.requires_republish == Some(true));
    let republish_at = |pause| if requires_republish { now.checked_add(pause).ok() } else { None };
    // `before` is set if this process has published the volume already. It is published again only
    // when the driver requires that and the time has come.
    if let Some(before) = before {
        if !requires_republish || before.is_some_and(|republish_at| now < republish_at) {
            drivers.republish_times.lock().insert(key, before.filter(|_| requires_republish));
            return Ok(PublishedVolume { path: published.target_path(), apply_fs_group: false });
        }
        // Set the retry time first: it holds on every failure below.
        drivers.republish_times.lock().insert(key.clone(), republish_at(REPUBLISH_RETRY));
    }
    let mut staging = PathBuf::new();
    let mut publish_context = BTreeMap::new();
    if !volume_spec.is_ephemeral {
        let is_attached = object.as_ref().is_none_or(|object| object.spec.attach_required != Some(false));
        publish_context = match is_attached {
            true => wait_for_attach(mount_context, volume_spec, &name).await?,
            false => {
                drivers.set_in_use(&name, true);
                BTreeMap::new()
            }
        };
        staging = match before {
            None => stage(mount_context, pod, volume_spec, &driver, &publish_context).await?,
            Some(_) => volume_spec
                .record(record::staged_dir(root, &volume_spec.driver, &volume_spec.handle))
                .staging_path(),
        };
    }
    let message = |error: std::io::Error| failed(SET_UP, error);
    published.write(&mount_context.settings.node_name).map_err(message)?;
    let mut request = NodePublishVolumeRequest {
        volume_id: volume_spec.handle.clone(),
        publish_context,
        staging_target_path: if driver.supports_stage() { path_string(&staging) } else { String::new() },
        target_path: path_string(&published.target_path()),
        volume_capability: Some(volume_spec.capability(&driver, group(pod))),
        readonly: volume_spec.read_only,
        secrets: secrets(mount_context, volume_spec.publish_secret.as_ref(), "NodePublishSecretRef", SET_UP)
            .await?,
        volume_context: volume_spec.attributes.clone(),
    };
    if let Some(object) = &object {
        add_pod_info(mount_context, pod, volume_spec, object, &mut request)
            .await
            .map_err(|why| failed(SET_UP, why))?;
    }
    if let Err(refusal) = driver.publish(&request).await {
        // After a timeout the driver may still be mounting, so the metadata stays for the
        // tear-down.
        if before.is_none() && refusal.code != DEADLINE_EXCEEDED {
            let _ = published.remove(&published.target_path());
        }
        return Err(failed(SET_UP, refusal));
    }
    drivers
        .republish_times
        .lock()
        .insert(key, republish_at(mount_context.settings.kubelet_config.republish_interval));
    Ok(PublishedVolume { path: published.target_path(), apply_fs_group: apply_fs_group && before.is_none() })
}

/// The outcome of a call with this error is unknown.
const DEADLINE_EXCEEDED: runtime::RefusalCode = runtime::RefusalCode::DeadlineExceeded;

fn path_string(path: &Path) -> String {
    path.display().to_string()
}

fn group(pod: &Pod) -> Option<i64> {
    pod.spec.as_ref()?.security_context.as_ref()?.fs_group
}

/// The CSIDriver object is optional. The node authorizer may not allow listing them, so it is read
/// by name.
async fn driver_object(mount_context: &VolumeContext<'_>, name: &str) -> Option<CSIDriver> {
    let drivers = mount_context.ctx.caches.csi_drivers();
    drivers.wait_for_sync().await;
    drivers.get(&Key::new("", name)).map(|driver| CSIDriver::clone(&driver))
}

fn check_mode(volume_spec: &CsiVolumeSpec, object: Option<&CSIDriver>) -> Result<(), String> {
    let mode = if volume_spec.is_ephemeral { "Ephemeral" } else { "Persistent" };
    let unsupported = |why: String| {
        Err(format!(
            "kubernetes.io/csi: mounter.SetupAt failed to check volume lifecycle mode: volume mode {mode:?} not \
             supported by driver {} ({why})",
            volume_spec.driver
        ))
    };
    let Some(object) = object else {
        return if volume_spec.is_ephemeral { unsupported("no CSIDriver object".to_owned()) } else { Ok(()) };
    };
    let modes = object.spec.volume_lifecycle_modes.clone().unwrap_or_else(|| vec!["Persistent".to_owned()]);
    match modes.iter().any(|known| known == mode) {
        true => Ok(()),
        false => {
            let modes: Vec<String> = modes.iter().map(|mode| format!("{mode:?}")).collect();
            unsupported(format!("only supports [{}]", modes.join(" ")))
        }
    }
}

/// Reports the volume in use and waits until it is attached. Returns the publish context from the
/// VolumeAttachment.
async fn wait_for_attach(
    mount_context: &VolumeContext<'_>,
    volume_spec: &CsiVolumeSpec,
    name: &str,
) -> Result<BTreeMap<String, String>, SetUpError> {
    check_attached(mount_context, name)?;
    let node_name = &mount_context.settings.node_name;
    let key = Key::new("", &record::attachment_name(&volume_spec.handle, &volume_spec.driver, node_name));
    let attachment = mount_context.ctx.client.get::<VolumeAttachment>(&key).await;
    let attachment = attachment.map_err(|error| failed("MountVolume.WaitForAttach", error))?;
    Ok(attachment.status.and_then(|status| status.attachment_metadata).unwrap_or_default())
}

/// Reports the volume in use. Succeeds once the node status lists it both in `volumesInUse` and in
/// `volumesAttached`. This order keeps the attach/detach controller from detaching a volume that is
/// about to be mounted.
pub fn check_attached(mount_context: &VolumeContext<'_>, name: &str) -> Result<(), SetUpError> {
    mount_context.csi.set_in_use(name, true);
    let node = mount_context.ctx.caches.nodes().get(&Key::new("", &mount_context.settings.node_name));
    let status = node.as_ref().and_then(|node| node.status.as_ref()).ok_or(SetUpError::Waiting)?;
    let is_reported_in_use = status.volumes_in_use.iter().flatten().any(|known| known == name);
    let is_attached = status.volumes_attached.iter().flatten().any(|known| known.name == name);
    if is_reported_in_use && is_attached { Ok(()) } else { Err(SetUpError::Waiting) }
}

/// Stages a volume for all pods of the node. Returns the staging path.
async fn stage(
    mount_context: &VolumeContext<'_>,
    pod: &Pod,
    volume_spec: &CsiVolumeSpec,
    driver: &Driver,
    publish_context: &BTreeMap<String, String>,
) -> Result<PathBuf, SetUpError> {
    let staged = volume_spec.record(record::staged_dir(
        &mount_context.settings.root,
        &volume_spec.driver,
        &volume_spec.handle,
    ));
    let written = staged.write(&mount_context.settings.node_name);
    let staging_path = staged.staging_path();
    written
        .and_then(|()| std::fs::create_dir_all(&staging_path))
        .map_err(|error| failed(MOUNT_DEVICE, error))?;
    if driver.supports_stage() {
        let request = NodeStageVolumeRequest {
            volume_id: volume_spec.handle.clone(),
            publish_context: publish_context.clone(),
            staging_target_path: path_string(&staging_path),
            volume_capability: Some(volume_spec.capability(driver, group(pod))),
            secrets: secrets(
                mount_context,
                volume_spec.stage_secret.as_ref(),
                "NodeStageSecretRef",
                MOUNT_DEVICE,
            )
            .await?,
            volume_context: volume_spec.attributes.clone(),
        };
        driver.stage(&request).await.map_err(|refusal| failed(MOUNT_DEVICE, refusal))?;
    }
    Ok(staging_path)
}

async fn secrets(
    mount_context: &VolumeContext<'_>,
    reference: Option<&SecretReference>,
    what: &str,
    operation: &'static str,
) -> Result<BTreeMap<String, String>, SetUpError> {
    let Some(reference) = reference else { return Ok(BTreeMap::new()) };
    let (namespace, name) =
        (reference.namespace.as_deref().unwrap_or_default(), reference.name.as_deref().unwrap_or_default());
    crate::volumes::secret_data(mount_context, namespace, name)
        .await
        .map_err(|why| failed(operation, format!("fetching {what} {namespace}/{name} failed: {why}")))
}

/// Adds pod information and service account tokens to the request, as far as the CSIDriver requests
/// them.
async fn add_pod_info(
    mount_context: &VolumeContext<'_>,
    pod: &Pod,
    volume_spec: &CsiVolumeSpec,
    object: &CSIDriver,
    request: &mut NodePublishVolumeRequest,
) -> Result<(), String> {
    let account =
        pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref()).unwrap_or("default");
    if object.spec.pod_info_on_mount == Some(true) {
        let ephemeral = volume_spec.is_ephemeral.to_string();
        let pairs = [
            ("pod.name", pod.name()),
            ("pod.namespace", pod.namespace()),
            ("pod.uid", pod.uid()),
            ("serviceAccount.name", account),
            ("ephemeral", &ephemeral),
        ];
        let pairs = pairs.map(|(name, value)| (format!("csi.storage.k8s.io/{name}"), value.to_owned()));
        request.volume_context.extend(pairs);
    }
    let mut tokens = BTreeMap::new();
    for token_request in object.spec.token_requests.iter().flatten() {
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": pod.name(), "uid": pod.uid()});
        let body = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {
                "audiences": [token_request.audience], "expirationSeconds": token_request.expiration_seconds,
                "boundObjectRef": bound,
            }
        });
        let key = Key::new(pod.namespace(), account);
        let answer = mount_context.ctx.client.create_at::<ServiceAccount>(&key, "token", &body).await;
        let answer = answer.map_err(|error| format!("failed to fetch token: {error}"))?;
        let status = &answer["status"];
        let token = json!({"token": status["token"], "expirationTimestamp": status["expirationTimestamp"]});
        tokens.insert(token_request.audience.clone(), token);
    }
    if !tokens.is_empty() {
        let name = "csi.storage.k8s.io/serviceAccount.tokens".to_owned();
        let text = json!(tokens).to_string();
        match object.spec.service_account_token_in_secrets == Some(true) {
            true => request.secrets.insert(name, text),
            false => request.volume_context.insert(name, text),
        };
    }
    Ok(())
}

/// Expands a volume on the node after its PersistentVolume has grown. Returns whether it was
/// expanded.
pub async fn expand(
    mount_context: &VolumeContext<'_>,
    pod: &Pod,
    volume_spec: &CsiVolumeSpec,
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
) -> Result<bool, SetUpError> {
    const OPERATION: &str = "MountVolume.NodeExpandVolume";
    let Some((size, bytes)) = expanded_size(volume, claim) else { return Ok(false) };
    let Ok(driver) = mount_context.csi.find(&volume_spec.driver) else { return Ok(false) };
    let _guard = mount_context
        .csi
        .volume_locks
        .lock(&record::unique_name(&volume_spec.driver, &volume_spec.handle))
        .await;
    let root = &mount_context.settings.root;
    if driver.supports_expand() {
        let staging = record::staged_dir(root, &volume_spec.driver, &volume_spec.handle).join("globalmount");
        let request = NodeExpandVolumeRequest {
            volume_id: volume_spec.handle.clone(),
            volume_path: path_string(
                &record::published_dir(root, pod.uid(), &volume_spec.name).join("mount"),
            ),
            capacity_range: Some(CapacityRange { required_bytes: bytes }),
            staging_target_path: if driver.supports_stage() { path_string(&staging) } else { String::new() },
            volume_capability: Some(volume_spec.capability(&driver, group(pod))),
            secrets: secrets(
                mount_context,
                volume_spec.expand_secret.as_ref(),
                "NodeExpandSecretRef",
                OPERATION,
            )
            .await?,
        };
        driver.expand(&request).await.map_err(|refusal| failed(OPERATION, refusal))?;
    }
    let conditions = claim.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let conditions_left: Vec<Value> = conditions
        .filter(|condition| !matches!(&*condition.type_, "FileSystemResizePending" | "Resizing"))
        .map(|condition| json!(condition))
        .collect();
    let patch = json!({"status": {
        "capacity": {"storage": size}, "conditions": conditions_left, "allocatedResourceStatuses": null,
    }});
    let (client, patch) = (&mount_context.ctx.client, Patch::Merge(patch));
    client
        .patch_status::<PersistentVolumeClaim>(&claim.key(), &patch)
        .await
        .map_err(|error| failed(OPERATION, error))?;
    Ok(true)
}

/// The new size, as written and in bytes, if the volume is larger than the claim's status reports.
fn expanded_size(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<(String, i64)> {
    let size = volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?.0.clone();
    let known = claim.status.as_ref()?.capacity.as_ref()?.get("storage")?.0.clone();
    let bytes = |text: &str| Some(schema::quantity::Quantity::parse(text).ok()?.value());
    (bytes(&size)? > bytes(&known)?).then_some(())?;
    Some((size.clone(), bytes(&size)?))
}

/// Unpublishes all volumes of a deleted pod, and unstages those that no other pod uses.
pub async fn tear_down(drivers: &super::Drivers, settings: &Settings, pod: &str) -> Result<(), String> {
    let root = &settings.root;
    for published in record::published_volumes(root, pod) {
        let _guard = drivers.volume_locks.lock(&published.unique_name()).await;
        // The pod's worker and the removal of orphaned pods overlap: the other one may have unpublished it by now.
        if !published.is_written() {
            continue;
        }
        let driver = drivers.find(&published.driver)?;
        let target = VolumeTargetRequest {
            volume_id: published.handle.clone(),
            path: path_string(&published.target_path()),
        };
        driver.unpublish(&target).await.map_err(|refusal| refusal.to_string())?;
        published.remove(&published.target_path()).map_err(|error| error.to_string())?;
        drivers.republish_times.lock().remove(&(pod.to_owned(), published.name.clone()));
        let staged = VolumeRecord {
            dir: record::staged_dir(root, &published.driver, &published.handle),
            ..published.clone()
        };
        if !published.is_ephemeral && !record::is_published(root, &published.driver, &published.handle) {
            if driver.supports_stage() {
                let target = VolumeTargetRequest {
                    volume_id: staged.handle.clone(),
                    path: path_string(&staged.staging_path()),
                };
                driver.unstage(&target).await.map_err(|refusal| refusal.to_string())?;
            }
            staged.remove(&staged.staging_path()).map_err(|error| error.to_string())?;
            drivers.set_in_use(&staged.unique_name(), false);
        }
    }
    // Only empty directories are removed.
    let pods = root.join("pods");
    for dir in ["volumes/kubernetes.io~csi", "volumes", ""] {
        let _ = std::fs::remove_dir(pods.join(pod).join(dir));
    }
    Ok(())
}

/// The usage of a pod's volumes by name, as the drivers report it.
pub async fn stats(
    drivers: &super::Drivers,
    settings: &Settings,
    pod: &str,
) -> BTreeMap<String, Vec<VolumeUsage>> {
    let mut all = BTreeMap::new();
    for published in record::published_volumes(&settings.root, pod) {
        let Ok(driver) = drivers.find(&published.driver) else { continue };
        if !driver.supports_stats() {
            continue;
        }
        let staging =
            record::staged_dir(&settings.root, &published.driver, &published.handle).join("globalmount");
        let request = NodeGetVolumeStatsRequest {
            volume_id: published.handle.clone(),
            volume_path: path_string(&published.target_path()),
            staging_target_path: if driver.supports_stage() { path_string(&staging) } else { String::new() },
        };
        if let Ok(usage) = driver.stats(&request).await {
            all.insert(published.pod_volume_name, usage);
        }
    }
    all
}
