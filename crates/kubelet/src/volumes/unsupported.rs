//! Volume types that are part of the API but not supported by this kubelet: the error, and what to
//! use instead.

use k8s_openapi::serde::Serialize;

const USE_CSI_DRIVER: &str = "use a CSI driver for it";
/// Each type by the name of its field, with an alternative.
const UNSUPPORTED_KINDS: [(&str, &str); 18] = [
    ("awsElasticBlockStore", "use the CSI driver ebs.csi.aws.com"),
    ("azureDisk", "use the CSI driver disk.csi.azure.com"),
    ("azureFile", "use the CSI driver file.csi.azure.com"),
    ("cephfs", "use the CSI driver cephfs.csi.ceph.com"),
    ("cinder", "use the CSI driver cinder.csi.openstack.org"),
    ("fc", "mount the device on the node and use a local volume, or use a CSI driver"),
    ("flexVolume", USE_CSI_DRIVER),
    ("flocker", "Flocker is discontinued: use another volume type"),
    ("gcePersistentDisk", "use the CSI driver pd.csi.storage.gke.io"),
    ("gitRepo", "clone it by an init container into an emptyDir volume"),
    ("glusterfs", "mount it on the node and use a hostPath volume, or use a CSI driver"),
    ("photonPersistentDisk", "Photon is discontinued: use another volume type"),
    ("portworxVolume", "use the CSI driver pxd.portworx.com"),
    ("quobyte", USE_CSI_DRIVER),
    ("rbd", "use the CSI driver rbd.csi.ceph.com"),
    ("scaleIO", USE_CSI_DRIVER),
    ("storageos", "StorageOS is discontinued: use another volume type"),
    ("vsphereVolume", "use the CSI driver csi.vsphere.vmware.com"),
];

/// Why a volume or a PersistentVolume is not supported.
pub fn unsupported_message(source: &impl Serialize) -> String {
    let value = serde_json::to_value(source).unwrap_or_default();
    match UNSUPPORTED_KINDS.iter().find(|(kind, _)| value.get(kind).is_some_and(|found| !found.is_null())) {
        Some((kind, instead)) => format!("volumes of kind {kind} are not supported on this node: {instead}"),
        None => "this kind of volume is not supported on this node: use a CSI driver".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{PersistentVolumeSpec, Volume};
    use serde_json::json;

    use super::*;

    #[test]
    fn message_contains_kind_and_fallback() {
        let git = json!({"name": "v", "gitRepo": {"repository": "https://example.com/a.git"}});
        let volume: Volume = serde_json::from_value(git).expect("a volume");
        assert_eq!(
            unsupported_message(&volume),
            "volumes of kind gitRepo are not supported on this node: clone it by an init container into an emptyDir \
             volume"
        );
        let disk = json!({"capacity": {"storage": "1Gi"}, "awsElasticBlockStore": {"volumeID": "vol-1"}});
        let spec: PersistentVolumeSpec = serde_json::from_value(disk).expect("a spec");
        assert_eq!(
            unsupported_message(&spec),
            "volumes of kind awsElasticBlockStore are not supported on this node: use the CSI driver ebs.csi.aws.com"
        );
        let nothing: Volume = serde_json::from_value(json!({"name": "v"})).expect("a volume");
        assert_eq!(
            unsupported_message(&nothing),
            "this kind of volume is not supported on this node: use a CSI driver"
        );
    }
}
