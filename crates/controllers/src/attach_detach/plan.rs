//! Decides which volumes are attached to and detached from a node. Does no I/O.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{AttachedVolume, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use reconcile::{EventType, Key, Object};

use super::disks;
use crate::node;

/// Set by kubelets that leave attaching and detaching to this controller.
const CONTROLLER_MANAGED_ATTACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
/// How long an unhealthy node may keep an unused volume mounted (upstream's `maxWaitForUnmountDuration`).
const MAX_WAIT_FOR_UNMOUNT: SignedDuration = SignedDuration::from_secs(360);

/// A volume that pods on a node use.
#[derive(Debug)]
pub struct VolumeToAttach {
    pub volume: Arc<PersistentVolume>,
    pub pods: Vec<Arc<Pod>>,
    /// Names of pods on other nodes that use the same volume.
    pub pods_on_other_nodes: Vec<String>,
}

/// The state of a node, which may be deleted.
pub struct NodeState<'a> {
    pub name: &'a str,
    pub node: Option<&'a Node>,
    /// The iSCSI disks that its pods use.
    pub disks: &'a [VolumeToAttach],
    /// The exclusive disks among them that another node has.
    pub taken: &'a BTreeSet<String>,
}

#[derive(Debug, PartialEq)]
pub enum Action {
    /// Update `status.volumesAttached` of the node.
    UpdateVolumesAttached(Vec<AttachedVolume>),
    Detach(Arc<VolumeAttachment>),
    Attach(Box<VolumeAttachment>),
    Event {
        pod: Arc<Pod>,
        severity: EventType,
        reason: &'static str,
        message: String,
    },
    RequeueAt(Timestamp),
}

impl Action {
    /// The volumes of [`Action::UpdateVolumesAttached`].
    pub fn volumes_attached(&self) -> Option<&[AttachedVolume]> {
        if let Action::UpdateVolumesAttached(volumes) = self { Some(volumes) } else { None }
    }
}

/// The claim that a volume is bound to.
pub fn claim_of(volume: &PersistentVolume) -> Option<Key> {
    let claim = volume.spec.as_ref()?.claim_ref.as_ref()?;
    Some(Key::new(claim.namespace.as_deref()?, claim.name.as_deref()?))
}

pub fn driver(volume: &PersistentVolume) -> Option<&str> {
    Some(volume.spec.as_ref()?.csi.as_ref()?.driver.as_str())
}

/// Whether a volume is bound to the claim and has to be attached before it can be mounted.
pub fn is_attachable(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
    driver: Option<&CSIDriver>,
) -> bool {
    let attached = driver.is_none_or(|driver| driver.spec.attach_required != Some(false));
    is_owned(claim, volume) && attached && self::driver(volume).is_some()
}

/// Whether a volume is bound to the claim, by UID.
pub fn is_owned(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    let owner = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    owner.is_some_and(|owner| owner.uid.as_deref() == Some(claim.uid()))
}

/// Whether a volume can be attached to one node only.
pub fn is_exclusive(volume: &PersistentVolume) -> bool {
    let modes = volume.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
    !modes.is_empty() && modes.iter().all(|mode| mode == "ReadWriteOnce" || mode == "ReadWriteOncePod")
}

/// The name that CSI drivers and kubelets expect for the VolumeAttachment.
pub fn csi_attachment_name(to_attach: &VolumeToAttach, node: &str) -> String {
    let csi = to_attach.volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    let (handle, driver) = csi.map_or(("", ""), |csi| (&csi.volume_handle, &csi.driver));
    attachment_name(handle, driver, node)
}

fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, format!("{handle}{driver}{node}").as_bytes());
    digest.as_ref().iter().fold("csi-".to_owned(), |mut name, byte| {
        let _ = write!(name, "{byte:02x}");
        name
    })
}

/// The unique volume name in node statuses.
fn unique_name(volume: &PersistentVolume) -> String {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    csi.map_or_else(String::new, |csi| format!("kubernetes.io/csi/{}^{}", csi.driver, csi.volume_handle))
}

fn is_attached(attachment: &VolumeAttachment) -> bool {
    attachment.status.as_ref().is_some_and(|status| status.attached)
}

/// Plans the actions for a node. `since` holds the time since when each attachment is unused.
///
/// The order of the actions matters: attachments first, then the status update, then the detaches. A volume
/// is removed from `volumesAttached` before it is detached.
pub fn plan(
    state: &NodeState<'_>,
    to_attach: &[VolumeToAttach],
    attachments: &[Arc<VolumeAttachment>],
    other_attachments: &[Arc<VolumeAttachment>],
    since: &HashMap<String, Timestamp>,
    now: Timestamp,
) -> Vec<Action> {
    if state.node.is_some_and(|node| node.annotation(CONTROLLER_MANAGED_ATTACH).is_none()) {
        return Vec::new();
    }
    let (mut actions, mut detached) = (Vec::new(), Vec::new());
    let reported = state.node.map(reported_volumes).unwrap_or_default();
    let mut report: Vec<String> = Vec::new();
    for to_attach in to_attach {
        let (name, unique) = (csi_attachment_name(to_attach, state.name), unique_name(&to_attach.volume));
        let attachment = attachments.iter().find(|attachment| attachment.name() == name);
        match attachment {
            Some(attachment) if is_attached(attachment) => {
                if !reported.contains(&unique) {
                    let volume = to_attach.volume.name();
                    let message = format!("AttachVolume.Attach succeeded for volume {volume:?} ");
                    record_pod_events(
                        &mut actions,
                        to_attach,
                        EventType::Normal,
                        "SuccessfulAttachVolume",
                        &message,
                    );
                }
                report.push(unique);
            }
            Some(attachment) => {
                let error = attachment.status.as_ref().and_then(|status| status.attach_error.as_ref());
                if let Some(reason) = error.and_then(|error| error.message.as_deref()) {
                    let message = format!(
                        "AttachVolume.Attach failed for volume {:?} : {reason}",
                        to_attach.volume.name()
                    );
                    record_pod_events(
                        &mut actions,
                        to_attach,
                        EventType::Warning,
                        "FailedAttachVolume",
                        &message,
                    );
                }
            }
            // Volumes are not attached to a deleted node.
            None if state.node.is_none() => {}
            None => {
                let volume = Some(to_attach.volume.name());
                let taken = |other: &&Arc<VolumeAttachment>| {
                    other.spec.source.persistent_volume_name.as_deref() == volume
                };
                match other_attachments.iter().find(taken) {
                    Some(_) => report_multi_attach_error(&mut actions, to_attach),
                    None => {
                        actions.push(Action::Attach(Box::new(attachment_of(to_attach, name, state.name))))
                    }
                }
            }
        }
    }
    let mut requeue_at = None;
    for attachment in attachments.iter().filter(|attachment| !attachment.is_deleting()) {
        if to_attach.iter().any(|to_attach| csi_attachment_name(to_attach, state.name) == attachment.name())
            || !is_managed_attachment(attachment)
        {
            continue;
        }
        let unique = mounted_volume_name(attachment, state.node);
        let deadline = unmount_deadline(since.get(attachment.name()), now);
        let free = match (state.node, &unique) {
            (Some(node), Some(_)) => is_lost(node, deadline, now),
            _ => true,
        };
        match free {
            true => detached.push(Action::Detach(attachment.clone())),
            false => {
                report.extend(unique);
                if deadline > now {
                    requeue_at = Some(requeue_at.map_or(deadline, |other: Timestamp| other.min(deadline)));
                }
            }
        }
    }
    let disks = disks::plan(state, since, now);
    actions.extend(disks.actions);
    report.extend(disks.report);
    requeue_at = requeue_at.into_iter().chain(disks.requeue_at).min();
    report.sort();
    report.dedup();
    if state.node.is_some() && report != reported {
        let volume = |name: String| AttachedVolume { name, device_path: String::new() };
        actions.push(Action::UpdateVolumesAttached(report.into_iter().map(volume).collect()));
    }
    actions.extend(detached);
    actions.extend(requeue_at.map(Action::RequeueAt));
    actions
}

/// Until when an unhealthy node may keep an unused volume mounted.
pub fn unmount_deadline(since: Option<&Timestamp>, now: Timestamp) -> Timestamp {
    since.map_or(now, |since| *since).saturating_add(MAX_WAIT_FOR_UNMOUNT).unwrap_or(now)
}

/// Whether a volume may be force-detached without waiting for the node to unmount it.
pub fn is_lost(node: &Node, deadline: Timestamp, now: Timestamp) -> bool {
    has_taint(node, OUT_OF_SERVICE) || !node::is_ready(node) && deadline <= now
}

/// Emits the `FailedAttachVolume` event for an exclusive volume that another node has.
pub fn report_multi_attach_error(actions: &mut Vec<Action>, to_attach: &VolumeToAttach) {
    let reason = match to_attach.pods_on_other_nodes.as_slice() {
        [] => "Volume is already exclusively attached to one node, waiting on detach before it can be attached to another node".to_owned(),
        pods => format!("Volume is already used by pod(s) {}", pods.join(", ")),
    };
    let message = format!("Waiting for detach for volume {:?} {reason}", to_attach.volume.name());
    record_pod_events(actions, to_attach, EventType::Warning, "FailedAttachVolume", &message);
}

pub fn record_pod_events(
    actions: &mut Vec<Action>,
    to_attach: &VolumeToAttach,
    severity: EventType,
    reason: &'static str,
    message: &str,
) {
    actions.extend(to_attach.pods.iter().map(|pod| Action::Event {
        pod: pod.clone(),
        severity,
        reason,
        message: message.to_owned(),
    }));
}

/// The sorted names in the node's `status.volumesAttached`.
pub fn reported_volumes(node: &Node) -> Vec<String> {
    let volumes = node.status.iter().flat_map(|status| status.volumes_attached.iter().flatten());
    let mut names: Vec<String> = volumes.map(|volume| volume.name.clone()).collect();
    names.sort();
    names
}

/// The unique name under which the volume of an attachment is in use on its node, if it is. The
/// PersistentVolume may be deleted already, so the name is matched by the attachment name that it would
/// lead to.
fn mounted_volume_name(attachment: &VolumeAttachment, node: Option<&Node>) -> Option<String> {
    let spec = &attachment.spec;
    let of_driver = format!("kubernetes.io/csi/{}^", spec.attacher);
    let used = node?.status.as_ref()?.volumes_in_use.as_ref()?;
    let is_it = |used: &&String| {
        let handle = used.strip_prefix(&of_driver);
        handle.is_some_and(|handle| {
            attachment_name(handle, &spec.attacher, &spec.node_name) == attachment.name()
        })
    };
    used.iter().find(is_it).cloned()
}

/// Whether the attachment was created by this controller.
fn is_managed_attachment(attachment: &VolumeAttachment) -> bool {
    attachment.name().starts_with("csi-") && attachment.spec.source.persistent_volume_name.is_some()
}

fn has_taint(node: &Node, key: &str) -> bool {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.into_iter().any(|taint| taint.key == key)
}

fn attachment_of(to_attach: &VolumeToAttach, name: String, node: &str) -> VolumeAttachment {
    VolumeAttachment {
        metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
        spec: VolumeAttachmentSpec {
            attacher: driver(&to_attach.volume).unwrap_or_default().to_owned(),
            node_name: node.to_owned(),
            source: VolumeAttachmentSource {
                persistent_volume_name: Some(to_attach.volume.name().to_owned()),
                inline_volume_spec: None,
            },
        },
        status: None,
    }
}
