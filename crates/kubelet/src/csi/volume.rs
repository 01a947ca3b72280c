//! One volume of a driver: attached (which others do), staged for all pods of the node, published for one of them; and
//! the way back.

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
use super::record::{self, Record};
use crate::config::Settings;
use crate::volumes::Materials;

/// How long a driver is left alone that failed to publish again.
const UNPUBLISHED: jiff::SignedDuration = jiff::SignedDuration::from_secs(10);

/// A volume that a pod wants.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    pub driver: String,
    pub handle: String,
    /// The persistent volume's name, or the volume's in the pod.
    pub name: String,
    /// What the pod calls it.
    pub in_pod: String,
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

/// A volume that is there.
#[derive(Debug)]
pub struct Ready {
    pub path: PathBuf,
    /// Whether the pod's group is still to be given it.
    pub share: bool,
}

/// Why a volume is not there.
#[derive(Debug)]
pub enum Trouble {
    /// Others have to do something first, which is nothing to complain about.
    Waits,
    Failed {
        operation: &'static str,
        message: String,
    },
}

const DEVICE: &str = "MountVolume.MountDevice";
const SET_UP: &str = "MountVolume.SetUp";

fn failed(operation: &'static str, message: impl ToString) -> Trouble {
    Trouble::Failed { operation, message: message.to_string() }
}

impl Wanted {
    /// One that is made for the pod alone.
    pub fn inline(pod: &Pod, volume: &Volume) -> Option<Wanted> {
        let source = volume.csi.as_ref()?;
        let secret = source.node_publish_secret_ref.as_ref().map(|secret| SecretReference {
            name: Some(secret.name.clone()),
            namespace: Some(pod.namespace().to_owned()),
        });
        Some(Wanted {
            driver: source.driver.clone(),
            handle: format!("csi-{}", record::digest(&format!("{}{}", pod.uid(), volume.name))),
            name: volume.name.clone(),
            in_pod: volume.name.clone(),
            is_ephemeral: true,
            read_only: source.read_only == Some(true),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            access_mode: "ReadWriteOnce".to_owned(),
            publish_secret: secret,
            ..Wanted::default()
        })
    }

    /// One that outlives the pod.
    pub fn persistent(in_pod: &str, volume: &PersistentVolume, read_only: bool) -> Option<Wanted> {
        let spec = volume.spec.as_ref()?;
        let source = spec.csi.as_ref()?;
        let mode = spec.access_modes.iter().flatten().next();
        Some(Wanted {
            driver: source.driver.clone(),
            handle: source.volume_handle.clone(),
            name: volume.name().to_owned(),
            in_pod: in_pod.to_owned(),
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

    fn record(&self, dir: PathBuf) -> Record {
        Record {
            driver: self.driver.clone(),
            handle: self.handle.clone(),
            name: self.name.clone(),
            in_pod: self.in_pod.clone(),
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
                .filter(|_| driver.mounts_for_groups())
                .map_or_else(String::new, |group| group.to_string()),
        };
        VolumeCapability {
            block: self.is_block.then_some(Empty {}),
            mount: (!self.is_block).then(mount),
            access_mode: Some(driver.access_mode(&self.access_mode)),
        }
    }

    /// Whether the kubelet gives it to the pod's group, as the driver wants that.
    fn is_shared(&self, driver: &Driver, object: Option<&CSIDriver>) -> bool {
        if driver.mounts_for_groups() || self.is_block {
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

/// Makes a volume be there for a pod; may be repeated.
pub async fn set_up(materials: &Materials<'_>, pod: &Pod, wanted: &Wanted) -> Result<Ready, Trouble> {
    let drivers = materials.csi;
    let root = &materials.settings.root;
    let name = record::unique_name(&wanted.driver, &wanted.handle);
    let _alone = drivers.busy.alone(&name).await;
    let object = driver_object(materials, &wanted.driver).await;
    check_mode(wanted, object.as_ref()).map_err(|why| failed(SET_UP, why))?;
    let driver = drivers.find(&wanted.driver).map_err(|why| {
        let (operation, who) = match wanted.is_ephemeral {
            true => (SET_UP, "mounter.SetUpAt failed to get CSI client"),
            false => (DEVICE, "attacher.MountDevice failed to create newCsiDriverClient"),
        };
        failed(operation, format!("kubernetes.io/csi: {who}: {why}"))
    })?;
    let published = wanted.record(record::published_dir(root, pod.uid(), &wanted.name));
    let share = wanted.is_shared(&driver, object.as_ref());
    let key = (pod.uid().to_owned(), wanted.name.clone());
    let now = materials.ctx.clock.now();
    let before = drivers.published.lock().get(&key).copied();
    let comes_again = object.as_ref().is_some_and(|object| object.spec.requires_republish == Some(true));
    let again = |pause| if comes_again { now.checked_add(pause).ok() } else { None };
    if let Some(before) = before {
        if !comes_again || before.is_some_and(|again| now < again) {
            drivers.published.lock().insert(key, before.filter(|_| comes_again));
            return Ok(Ready { path: published.place(), share: false });
        }
        // Whatever comes of it now.
        drivers.published.lock().insert(key.clone(), again(UNPUBLISHED));
    }
    let mut staging = PathBuf::new();
    let mut publish_context = BTreeMap::new();
    if !wanted.is_ephemeral {
        let is_attached = object.as_ref().is_none_or(|object| object.spec.attach_required != Some(false));
        publish_context = match is_attached {
            true => attached(materials, wanted, &name).await?,
            false => {
                drivers.use_of(&name, true);
                BTreeMap::new()
            }
        };
        staging = match before {
            None => stage(materials, pod, wanted, &driver, &publish_context).await?,
            Some(_) => wanted.record(record::staged_dir(root, &wanted.driver, &wanted.handle)).staging(),
        };
    }
    let message = |error: std::io::Error| failed(SET_UP, error);
    published.write(&materials.settings.node_name).map_err(message)?;
    let mut request = NodePublishVolumeRequest {
        volume_id: wanted.handle.clone(),
        publish_context,
        staging_target_path: if driver.stages() { shown(&staging) } else { String::new() },
        target_path: shown(&published.place()),
        volume_capability: Some(wanted.capability(&driver, group(pod))),
        readonly: wanted.read_only,
        secrets: secrets(materials, wanted.publish_secret.as_ref(), "NodePublishSecretRef", SET_UP).await?,
        volume_context: wanted.attributes.clone(),
    };
    if let Some(object) = &object {
        introduce_pod(materials, pod, wanted, object, &mut request)
            .await
            .map_err(|why| failed(SET_UP, why))?;
    }
    if let Err(refusal) = driver.publish(&request).await {
        if before.is_none() && refusal.code != DEADLINE {
            let _ = published.erase(&published.place());
        }
        return Err(failed(SET_UP, refusal));
    }
    drivers.published.lock().insert(key, again(materials.settings.keeping.republish));
    Ok(Ready { path: published.place(), share: share && before.is_none() })
}

/// After this one nobody knows what the driver did.
const DEADLINE: runtime::RefusalCode = runtime::RefusalCode::DeadlineExceeded;

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn group(pod: &Pod) -> Option<i64> {
    pod.spec.as_ref()?.security_context.as_ref()?.fs_group
}

/// Drivers need not be described; by name, since not every node is allowed to see all.
async fn driver_object(materials: &Materials<'_>, name: &str) -> Option<CSIDriver> {
    let drivers = materials.ctx.caches.csi_drivers();
    drivers.filled().await;
    drivers.get(&Key::new("", name)).map(|driver| CSIDriver::clone(&driver))
}

fn check_mode(wanted: &Wanted, object: Option<&CSIDriver>) -> Result<(), String> {
    let mode = if wanted.is_ephemeral { "Ephemeral" } else { "Persistent" };
    let refused = |why: String| {
        Err(format!(
            "kubernetes.io/csi: mounter.SetupAt failed to check volume lifecycle mode: volume mode {mode:?} not \
             supported by driver {} ({why})",
            wanted.driver
        ))
    };
    let Some(object) = object else {
        return if wanted.is_ephemeral { refused("no CSIDriver object".to_owned()) } else { Ok(()) };
    };
    let modes = object.spec.volume_lifecycle_modes.clone().unwrap_or_else(|| vec!["Persistent".to_owned()]);
    match modes.iter().any(|known| known == mode) {
        true => Ok(()),
        false => {
            let modes: Vec<String> = modes.iter().map(|mode| format!("{mode:?}")).collect();
            refused(format!("only supports [{}]", modes.join(" ")))
        }
    }
}

/// Waits for the volume to be attached, after having said that it is going to be used. Answers with what the driver's
/// other half has to say about it.
async fn attached(
    materials: &Materials<'_>,
    wanted: &Wanted,
    name: &str,
) -> Result<BTreeMap<String, String>, Trouble> {
    may_be_used(materials, name)?;
    let node_name = &materials.settings.node_name;
    let key = Key::new("", &record::attachment_name(&wanted.handle, &wanted.driver, node_name));
    let attachment = materials.ctx.client.get::<VolumeAttachment>(&key).await;
    let attachment = attachment.map_err(|error| failed("MountVolume.WaitForAttach", error))?;
    Ok(attachment.status.and_then(|status| status.attachment_metadata).unwrap_or_default())
}

/// Says that a volume is going to be used, and waits until the node's status tells that both is so: that it is attached
/// here, and that it must not be detached.
pub fn may_be_used(materials: &Materials<'_>, name: &str) -> Result<(), Trouble> {
    materials.csi.use_of(name, true);
    let node = materials.ctx.caches.nodes().get(&Key::new("", &materials.settings.node_name));
    let status = node.as_ref().and_then(|node| node.status.as_ref()).ok_or(Trouble::Waits)?;
    let is_told = status.volumes_in_use.iter().flatten().any(|known| known == name);
    let is_attached = status.volumes_attached.iter().flatten().any(|known| known.name == name);
    if is_told && is_attached { Ok(()) } else { Err(Trouble::Waits) }
}

/// Puts a volume where all pods of this node get it from; where that is.
async fn stage(
    materials: &Materials<'_>,
    pod: &Pod,
    wanted: &Wanted,
    driver: &Driver,
    publish_context: &BTreeMap<String, String>,
) -> Result<PathBuf, Trouble> {
    let staged = wanted.record(record::staged_dir(&materials.settings.root, &wanted.driver, &wanted.handle));
    let written = staged.write(&materials.settings.node_name);
    let place = staged.staging();
    written.and_then(|()| std::fs::create_dir_all(&place)).map_err(|error| failed(DEVICE, error))?;
    if driver.stages() {
        let request = NodeStageVolumeRequest {
            volume_id: wanted.handle.clone(),
            publish_context: publish_context.clone(),
            staging_target_path: shown(&place),
            volume_capability: Some(wanted.capability(driver, group(pod))),
            secrets: secrets(materials, wanted.stage_secret.as_ref(), "NodeStageSecretRef", DEVICE).await?,
            volume_context: wanted.attributes.clone(),
        };
        driver.stage(&request).await.map_err(|refusal| failed(DEVICE, refusal))?;
    }
    Ok(place)
}

async fn secrets(
    materials: &Materials<'_>,
    reference: Option<&SecretReference>,
    what: &str,
    operation: &'static str,
) -> Result<BTreeMap<String, String>, Trouble> {
    let Some(reference) = reference else { return Ok(BTreeMap::new()) };
    let (namespace, name) =
        (reference.namespace.as_deref().unwrap_or_default(), reference.name.as_deref().unwrap_or_default());
    crate::volumes::secret_data(materials, namespace, name)
        .await
        .map_err(|why| failed(operation, format!("fetching {what} {namespace}/{name} failed: {why}")))
}

/// Tells the driver which pod it is for, where it wants to know.
async fn introduce_pod(
    materials: &Materials<'_>,
    pod: &Pod,
    wanted: &Wanted,
    object: &CSIDriver,
    request: &mut NodePublishVolumeRequest,
) -> Result<(), String> {
    let account =
        pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref()).unwrap_or("default");
    if object.spec.pod_info_on_mount == Some(true) {
        let ephemeral = wanted.is_ephemeral.to_string();
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
    for wanted in object.spec.token_requests.iter().flatten() {
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": pod.name(), "uid": pod.uid()});
        let body = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {
                "audiences": [wanted.audience], "expirationSeconds": wanted.expiration_seconds,
                "boundObjectRef": bound,
            }
        });
        let key = Key::new(pod.namespace(), account);
        let answer = materials.ctx.client.create_at::<ServiceAccount>(&key, "token", &body).await;
        let answer = answer.map_err(|error| format!("failed to fetch token: {error}"))?;
        let status = &answer["status"];
        let token = json!({"token": status["token"], "expirationTimestamp": status["expirationTimestamp"]});
        tokens.insert(wanted.audience.clone(), token);
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

/// Lets a volume that has grown elsewhere grow on this node as well; whether it did.
pub async fn expand(
    materials: &Materials<'_>,
    pod: &Pod,
    wanted: &Wanted,
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
) -> Result<bool, Trouble> {
    const OPERATION: &str = "MountVolume.NodeExpandVolume";
    let Some((size, bytes)) = grown(volume, claim) else { return Ok(false) };
    let Ok(driver) = materials.csi.find(&wanted.driver) else { return Ok(false) };
    let _alone = materials.csi.busy.alone(&record::unique_name(&wanted.driver, &wanted.handle)).await;
    let root = &materials.settings.root;
    if driver.expands() {
        let staging = record::staged_dir(root, &wanted.driver, &wanted.handle).join("globalmount");
        let request = NodeExpandVolumeRequest {
            volume_id: wanted.handle.clone(),
            volume_path: shown(&record::published_dir(root, pod.uid(), &wanted.name).join("mount")),
            capacity_range: Some(CapacityRange { required_bytes: bytes }),
            staging_target_path: if driver.stages() { shown(&staging) } else { String::new() },
            volume_capability: Some(wanted.capability(&driver, group(pod))),
            secrets: secrets(materials, wanted.expand_secret.as_ref(), "NodeExpandSecretRef", OPERATION)
                .await?,
        };
        driver.expand(&request).await.map_err(|refusal| failed(OPERATION, refusal))?;
    }
    let conditions = claim.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let left: Vec<Value> = conditions
        .filter(|condition| !matches!(&*condition.type_, "FileSystemResizePending" | "Resizing"))
        .map(|condition| json!(condition))
        .collect();
    let told = json!({"status": {
        "capacity": {"storage": size}, "conditions": left, "allocatedResourceStatuses": null,
    }});
    let (client, told) = (&materials.ctx.client, Patch::Merge(told));
    client
        .patch_status::<PersistentVolumeClaim>(&claim.key(), &told)
        .await
        .map_err(|error| failed(OPERATION, error))?;
    Ok(true)
}

/// The size of a volume that is larger than its claim knows, as written and in bytes.
fn grown(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<(String, i64)> {
    let size = volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?.0.clone();
    let known = claim.status.as_ref()?.capacity.as_ref()?.get("storage")?.0.clone();
    let bytes = |text: &str| Some(schema::quantity::Quantity::parse(text).ok()?.value());
    (bytes(&size)? > bytes(&known)?).then_some(())?;
    Some((size.clone(), bytes(&size)?))
}

/// Takes all volumes away from a pod that is gone; what nobody uses any more is unstaged as well.
pub async fn let_go(drivers: &super::Drivers, settings: &Settings, pod: &str) -> Result<(), String> {
    let root = &settings.root;
    for published in record::published(root, pod) {
        let _alone = drivers.busy.alone(&published.unique_name()).await;
        // The pod's worker and the removal of orphaned pods overlap: the other one may have unpublished it by now.
        if !published.is_written() {
            continue;
        }
        let driver = drivers.find(&published.driver)?;
        let at = VolumeAt { volume_id: published.handle.clone(), path: shown(&published.place()) };
        driver.unpublish(&at).await.map_err(|refusal| refusal.to_string())?;
        published.erase(&published.place()).map_err(|error| error.to_string())?;
        drivers.published.lock().remove(&(pod.to_owned(), published.name.clone()));
        let staged = Record {
            dir: record::staged_dir(root, &published.driver, &published.handle),
            ..published.clone()
        };
        if !published.is_ephemeral && !record::is_published(root, &published.driver, &published.handle) {
            if driver.stages() {
                let at = VolumeAt { volume_id: staged.handle.clone(), path: shown(&staged.staging()) };
                driver.unstage(&at).await.map_err(|refusal| refusal.to_string())?;
            }
            staged.erase(&staged.staging()).map_err(|error| error.to_string())?;
            drivers.use_of(&staged.unique_name(), false);
        }
    }
    // Nothing of anybody's is below, or this fails.
    let pods = root.join("pods");
    for dir in ["volumes/kubernetes.io~csi", "volumes", ""] {
        let _ = std::fs::remove_dir(pods.join(pod).join(dir));
    }
    Ok(())
}

/// What a pod's volumes hold, by their names, as drivers tell it.
pub async fn stats(
    drivers: &super::Drivers,
    settings: &Settings,
    pod: &str,
) -> BTreeMap<String, Vec<VolumeUsage>> {
    let mut all = BTreeMap::new();
    for published in record::published(&settings.root, pod) {
        let Ok(driver) = drivers.find(&published.driver) else { continue };
        if !driver.tells_stats() {
            continue;
        }
        let staging =
            record::staged_dir(&settings.root, &published.driver, &published.handle).join("globalmount");
        let request = NodeGetVolumeStatsRequest {
            volume_id: published.handle.clone(),
            volume_path: shown(&published.place()),
            staging_target_path: if driver.stages() { shown(&staging) } else { String::new() },
        };
        if let Ok(usage) = driver.stats(&request).await {
            all.insert(published.in_pod, usage);
        }
    }
    all
}
