//! What can change in a cluster, with what it was and what it is.

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::api::storage::v1 as storage;

use crate::state::{NodeInfo, PodInfo};

/// An object before and after: added without the first, removed without the second.
pub struct Pair<'a, T> {
    pub old: Option<&'a T>,
    pub new: Option<&'a T>,
}

impl<T> Clone for Pair<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Pair<'_, T> {}

impl<'a, T> Pair<'a, T> {
    /// The object, if it was just added.
    pub fn added(&self) -> Option<&'a T> {
        if self.old.is_none() { self.new } else { None }
    }

    /// The object, if it was just removed.
    pub fn removed(&self) -> Option<&'a T> {
        if self.new.is_none() { self.old } else { None }
    }

    /// Both, if it was changed.
    pub fn changed(&self) -> Option<(&'a T, &'a T)> {
        self.old.zip(self.new)
    }
}

/// A change that may help pods that were turned away.
#[derive(Clone, Copy)]
pub enum Change<'a> {
    Node(Pair<'a, NodeInfo>),
    /// A pod on a node, or one that waits itself.
    Pod(Pair<'a, PodInfo>),
    VolumeClaim(Pair<'a, core::PersistentVolumeClaim>),
    Volume(Pair<'a, core::PersistentVolume>),
    StorageClass(Pair<'a, storage::StorageClass>),
    CsiNode(Pair<'a, storage::CSINode>),
    CsiDriver(Pair<'a, storage::CSIDriver>),
    Capacity(Pair<'a, storage::CSIStorageCapacity>),
    Attachment(Pair<'a, storage::VolumeAttachment>),
    ResourceClaim(Pair<'a, resource::ResourceClaim>),
    DeviceClass(Pair<'a, resource::DeviceClass>),
    ResourceSlice(Pair<'a, resource::ResourceSlice>),
    /// Something that may help anyone.
    Anything,
}

impl Change<'_> {
    /// The name of the change in metrics.
    pub fn label(&self) -> &'static str {
        fn verb<T>(pair: &Pair<'_, T>, names: [&'static str; 3]) -> &'static str {
            match (pair.old, pair.new) {
                (None, _) => names[0],
                (Some(_), Some(_)) => names[1],
                (Some(_), None) => names[2],
            }
        }
        match self {
            Change::Node(pair) => verb(pair, ["NodeAdd", "NodeUpdate", "NodeDelete"]),
            Change::Pod(pair) => verb(pair, ["AssignedPodAdd", "AssignedPodUpdate", "AssignedPodDelete"]),
            Change::VolumeClaim(pair) => verb(
                pair,
                ["PersistentVolumeClaimAdd", "PersistentVolumeClaimUpdate", "PersistentVolumeClaimDelete"],
            ),
            Change::Volume(pair) => {
                verb(pair, ["PersistentVolumeAdd", "PersistentVolumeUpdate", "PersistentVolumeDelete"])
            }
            Change::StorageClass(pair) => {
                verb(pair, ["StorageClassAdd", "StorageClassUpdate", "StorageClassDelete"])
            }
            Change::CsiNode(pair) => verb(pair, ["CSINodeAdd", "CSINodeUpdate", "CSINodeDelete"]),
            Change::CsiDriver(pair) => verb(pair, ["CSIDriverAdd", "CSIDriverUpdate", "CSIDriverDelete"]),
            Change::Capacity(pair) => {
                verb(pair, ["CSIStorageCapacityAdd", "CSIStorageCapacityUpdate", "CSIStorageCapacityDelete"])
            }
            Change::Attachment(pair) => {
                verb(pair, ["VolumeAttachmentAdd", "VolumeAttachmentUpdate", "VolumeAttachmentDelete"])
            }
            Change::ResourceClaim(pair) => {
                verb(pair, ["ResourceClaimAdd", "ResourceClaimUpdate", "ResourceClaimDelete"])
            }
            Change::DeviceClass(pair) => {
                verb(pair, ["DeviceClassAdd", "DeviceClassUpdate", "DeviceClassDelete"])
            }
            Change::ResourceSlice(pair) => {
                verb(pair, ["ResourceSliceAdd", "ResourceSliceUpdate", "ResourceSliceDelete"])
            }
            Change::Anything => "ForceActivate",
        }
    }
}
