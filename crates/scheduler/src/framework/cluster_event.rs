//! Cluster events that can make pods schedulable, with the object before and after. Counterpart of upstream's
//! `ClusterEvent`.

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::api::storage::v1 as storage;

use crate::state::{NodeInfo, PodInfo};

/// An object before and after a change. `old` is `None` for an addition, `new` for a deletion.
pub struct ObjectPair<'a, T> {
    pub old: Option<&'a T>,
    pub new: Option<&'a T>,
}

impl<T> Clone for ObjectPair<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for ObjectPair<'_, T> {}

impl<'a, T> ObjectPair<'a, T> {
    /// The new object of an addition.
    pub fn added(&self) -> Option<&'a T> {
        if self.old.is_none() { self.new } else { None }
    }

    /// The old object of a deletion.
    pub fn removed(&self) -> Option<&'a T> {
        if self.new.is_none() { self.old } else { None }
    }

    /// Both objects of an update.
    pub fn changed(&self) -> Option<(&'a T, &'a T)> {
        self.old.zip(self.new)
    }
}

/// An event that may make rejected pods schedulable.
#[derive(Clone, Copy)]
pub enum ClusterEvent<'a> {
    Node(ObjectPair<'a, NodeInfo>),
    /// An assigned pod, or an update of the unscheduled pod itself.
    Pod(ObjectPair<'a, PodInfo>),
    VolumeClaim(ObjectPair<'a, core::PersistentVolumeClaim>),
    Volume(ObjectPair<'a, core::PersistentVolume>),
    StorageClass(ObjectPair<'a, storage::StorageClass>),
    CsiNode(ObjectPair<'a, storage::CSINode>),
    CsiDriver(ObjectPair<'a, storage::CSIDriver>),
    Capacity(ObjectPair<'a, storage::CSIStorageCapacity>),
    Attachment(ObjectPair<'a, storage::VolumeAttachment>),
    ResourceClaim(ObjectPair<'a, resource::ResourceClaim>),
    DeviceClass(ObjectPair<'a, resource::DeviceClass>),
    ResourceSlice(ObjectPair<'a, resource::ResourceSlice>),
    /// Requeues pods regardless of their queueing hints.
    ForceActivate,
}

impl ClusterEvent<'_> {
    /// The event's label in metrics.
    pub fn label(&self) -> &'static str {
        fn verb<T>(pair: &ObjectPair<'_, T>, names: [&'static str; 3]) -> &'static str {
            match (pair.old, pair.new) {
                (None, _) => names[0],
                (Some(_), Some(_)) => names[1],
                (Some(_), None) => names[2],
            }
        }
        match self {
            ClusterEvent::Node(pair) => verb(pair, ["NodeAdd", "NodeUpdate", "NodeDelete"]),
            ClusterEvent::Pod(pair) => {
                verb(pair, ["AssignedPodAdd", "AssignedPodUpdate", "AssignedPodDelete"])
            }
            ClusterEvent::VolumeClaim(pair) => verb(
                pair,
                ["PersistentVolumeClaimAdd", "PersistentVolumeClaimUpdate", "PersistentVolumeClaimDelete"],
            ),
            ClusterEvent::Volume(pair) => {
                verb(pair, ["PersistentVolumeAdd", "PersistentVolumeUpdate", "PersistentVolumeDelete"])
            }
            ClusterEvent::StorageClass(pair) => {
                verb(pair, ["StorageClassAdd", "StorageClassUpdate", "StorageClassDelete"])
            }
            ClusterEvent::CsiNode(pair) => verb(pair, ["CSINodeAdd", "CSINodeUpdate", "CSINodeDelete"]),
            ClusterEvent::CsiDriver(pair) => {
                verb(pair, ["CSIDriverAdd", "CSIDriverUpdate", "CSIDriverDelete"])
            }
            ClusterEvent::Capacity(pair) => {
                verb(pair, ["CSIStorageCapacityAdd", "CSIStorageCapacityUpdate", "CSIStorageCapacityDelete"])
            }
            ClusterEvent::Attachment(pair) => {
                verb(pair, ["VolumeAttachmentAdd", "VolumeAttachmentUpdate", "VolumeAttachmentDelete"])
            }
            ClusterEvent::ResourceClaim(pair) => {
                verb(pair, ["ResourceClaimAdd", "ResourceClaimUpdate", "ResourceClaimDelete"])
            }
            ClusterEvent::DeviceClass(pair) => {
                verb(pair, ["DeviceClassAdd", "DeviceClassUpdate", "DeviceClassDelete"])
            }
            ClusterEvent::ResourceSlice(pair) => {
                verb(pair, ["ResourceSliceAdd", "ResourceSliceUpdate", "ResourceSliceDelete"])
            }
            ClusterEvent::ForceActivate => "ForceActivate",
        }
    }
}
