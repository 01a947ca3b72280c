//! Storage plugins: DefaultStorageClass, StorageObjectInUseProtection, PersistentVolumeClaimResize.

use api::Status;
use api::json::JsonExt as _;
use api::quota::storage_class;
use schema::quantity::Quantity;
use serde_json::{Value, json};

use super::defaults::default_class_name;
use super::service_account::push;
use super::{Cluster, Operation, Request};

const GROUP: &str = "storage.k8s.io";
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";

/// DefaultStorageClass.
pub fn default_class(request: &Request<'_>, claim: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !request.creates("", "persistentvolumeclaims")
        || claim.at("spec").has("storageClassName")
        || claim.path("metadata.annotations").has(CLASS_ANNOTATION)
    {
        return Ok(());
    }
    let default_annotations =
        &["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"];
    if let Some(name) = default_class_name(cluster, GROUP, "storageclasses", default_annotations) {
        claim.object_mut("spec").insert("storageClassName".into(), name.into());
    }
    Ok(())
}

/// StorageObjectInUseProtection: adds the protection finalizers, which block deletion while an
/// object is in use.
pub fn protect(request: &Request<'_>, object: &mut Value, _: &dyn Cluster) -> Result<(), Status> {
    let finalizer = match (request.row.group, request.row.plural) {
        ("", "persistentvolumes") => "kubernetes.io/pv-protection",
        ("", "persistentvolumeclaims") => "kubernetes.io/pvc-protection",
        (GROUP, "volumeattributesclasses") => "kubernetes.io/vac-protection",
        _ => return Ok(()),
    };
    if request.operation != Operation::Create || !request.subresource.is_empty() {
        return Ok(());
    }
    if !object.at("metadata").items("finalizers").iter().any(|existing| existing == finalizer) {
        object.object_mut("metadata");
        push(&mut object["metadata"], "finalizers", json!(finalizer));
    }
    Ok(())
}

/// PersistentVolumeClaimResize: only bound claims whose class has `allowVolumeExpansion` may grow.
pub fn resize(request: &Request<'_>, claim: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    let Some(old) = request
        .old
        .filter(|_| request.is("", "persistentvolumeclaims") && request.operation == Operation::Update)
    else {
        return Ok(());
    };
    let size = |claim: &Value| {
        Quantity::from_value(claim.path("spec.resources.requests.storage")).unwrap_or(Quantity::ZERO)
    };
    if size(claim) <= size(old) {
        return Ok(());
    }
    if old.at("status").text("phase") != "Bound" {
        return Err(request.forbidden("Only bound persistent volume claims can be expanded"));
    }
    let (class, before) = (storage_class(claim), storage_class(old));
    let found =
        cluster.get(GROUP, "storageclasses", "", class).filter(|_| !class.is_empty() && class == before);
    if found.is_some_and(|class| class.value().flag("allowVolumeExpansion")) {
        return Ok(());
    }
    Err(request.forbidden(
        "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize",
    ))
}
