//! Builds, creates and deletes the pods of controllers, with the usual events (upstream's `RealPodControl`).

use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::{Ctx, Error, Object};

/// An owner's name of this length leaves no room for a dash in the generated name.
const MAX_NAME_BYTES: usize = 253;

/// The controller reference to `owner`.
pub fn new_controller_ref<T: Object>(owner: &T) -> OwnerReference {
    OwnerReference {
        api_version: T::API_VERSION.to_owned(),
        kind: T::KIND.to_owned(),
        name: owner.name().to_owned(),
        uid: owner.uid().to_owned(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Builds a pod from a template, controlled by `owner` and with a name generated from the owner's name.
pub fn pod_from_template<T: Object>(owner: &T, template: &PodTemplateSpec) -> Pod {
    let (name, template_meta) = (owner.name(), template.metadata.as_ref());
    let dash = if name.len() < MAX_NAME_BYTES { "-" } else { "" };
    let metadata = ObjectMeta {
        generate_name: Some(format!("{name}{dash}")),
        namespace: Some(owner.namespace().to_owned()),
        labels: template_meta.and_then(|meta| meta.labels.clone()),
        annotations: template_meta.and_then(|meta| meta.annotations.clone()),
        finalizers: template_meta.and_then(|meta| meta.finalizers.clone()),
        owner_references: Some(vec![new_controller_ref(owner)]),
        ..ObjectMeta::default()
    };
    Pod { metadata, spec: template.spec.clone(), status: None }
}

/// Creates a pod for `owner` and emits an event, except in a terminating namespace, where nothing can be
/// created.
pub async fn create_pod<T: Object>(ctx: &Ctx, owner: &T, pod: &Pod) -> Result<Pod, Error> {
    let created = ctx.create(pod).await;
    match &created {
        Ok(pod) => ctx.events.normal(owner, "SuccessfulCreate", format!("Created pod: {}", pod.name())),
        // The pod exists, but the cache does not show it yet.
        Err(Error::NotCached(_)) => {}
        Err(error) if error.is_namespace_terminating() => {}
        Err(error) => ctx.events.warning(owner, "FailedCreate", format!("Error creating: {error}")),
    }
    created
}

/// Deletes a pod of `owner` and emits an event. A pod that is deleted already is neither an error nor an
/// event.
pub async fn delete_pod<T: Object>(ctx: &Ctx, owner: &T, pod: &Pod) -> Result<(), Error> {
    let options = reconcile::DeleteOptions::uid(pod.uid());
    let deleted = ctx.client.delete::<Pod>(&pod.key(), &options).await;
    match deleted {
        Ok(()) => {
            ctx.events.normal(owner, "SuccessfulDelete", format!("Deleted pod: {}", pod.name()));
            ctx.caches.pods().wait_until_deleted(&pod.key(), pod.uid()).await
        }
        // The pod is deleted, or another pod has its name.
        Err(error) if error.is_not_found() || error.is_conflict() => {
            ctx.caches.pods().wait_until_deleted(&pod.key(), pod.uid()).await
        }
        Err(error) => {
            ctx.events.warning(owner, "FailedDelete", format!("Error deleting: {error}"));
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::apps::v1::ReplicaSet;
    use serde_json::json;

    #[test]
    fn pod_has_template_fields_and_controller() {
        let set: ReplicaSet = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u"},
            "spec": {"selector": {}, "template": {
                "metadata": {"labels": {"app": "web"}, "annotations": {"a": "b"}, "name": "not-this"},
                "spec": {"containers": [{"name": "c"}]}}},
        }))
        .expect("a set");
        let template = set.spec.as_ref().and_then(|spec| spec.template.as_ref()).expect("a template");
        assert_eq!(
            serde_json::to_value(pod_from_template(&set, template)).expect("a pod"),
            json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"generateName": "web-", "namespace": "shop", "labels": {"app": "web"},
                    "annotations": {"a": "b"}, "ownerReferences": [{"apiVersion": "apps/v1",
                        "kind": "ReplicaSet", "name": "web", "uid": "u", "controller": true,
                        "blockOwnerDeletion": true}]},
                "spec": {"containers": [{"name": "c"}]}})
        );
    }
}
