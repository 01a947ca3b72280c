//! Controller references: owners adopt objects that match their selector and release those that no longer do.
//!
//! Upstream: `pkg/controller/controller_ref_manager.go`.

use std::sync::Arc;

use api::selector::LabelSelector;
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Cache, Cached, Ctx, Error, Object, Patch};
use serde_json::json;

use crate::template::new_controller_ref;

/// The result of matching objects against an owner and its selector.
#[derive(Debug, PartialEq)]
pub struct ClaimResult<T> {
    /// Owned and matching.
    pub owned: Vec<Arc<T>>,
    /// Without controller and matching.
    pub adopt: Vec<Arc<T>>,
    /// Owned and no longer matching.
    pub release: Vec<Arc<T>>,
}

impl<T> ClaimResult<T> {
    pub fn has_no_changes(&self) -> bool {
        self.adopt.is_empty() && self.release.is_empty()
    }
}

/// The objects that `owner` may claim: those it controls, and those in its namespace without a controller.
pub fn candidates<O: Object, T: Object>(owner: &O, cache: &Cache<T>) -> Vec<Arc<T>> {
    let mut objects = cache.owned_by(owner.uid());
    objects.extend(cache.orphans(owner.namespace()));
    objects
}

/// Matches objects against an owner. An owner that is being deleted neither adopts nor releases.
pub fn claim<O: Object, T: Object>(
    owner: &O,
    selector: &LabelSelector,
    objects: impl IntoIterator<Item = Arc<T>>,
) -> ClaimResult<T> {
    let mut claim = ClaimResult { owned: Vec::new(), adopt: Vec::new(), release: Vec::new() };
    for object in objects {
        let matches = selector.matches(|name| object.label(name));
        let controller = object.controller().map(|controller| controller.uid == owner.uid());
        match (controller, matches) {
            (Some(true), true) => claim.owned.push(object),
            (Some(true), false) if !owner.is_deleting() => claim.release.push(object),
            (None, true) if !owner.is_deleting() && !object.is_deleting() => claim.adopt.push(object),
            _ => {}
        }
    }
    claim
}

/// Applies the adoptions and releases. The writes are visible in the caches afterwards.
pub async fn adopt_and_release<O: Object, T: Cached>(
    ctx: &Ctx,
    owner: &O,
    claim: &ClaimResult<T>,
) -> Result<(), Error> {
    adopt_and_release_with_finalizers(ctx, owner, claim, &[]).await
}

/// As [`adopt_and_release`], for owners that put finalizers on their objects.
pub async fn adopt_and_release_with_finalizers<O: Object, T: Cached>(
    ctx: &Ctx,
    owner: &O,
    claim: &ClaimResult<T>,
    finalizers: &[&str],
) -> Result<(), Error> {
    if claim.has_no_changes() {
        return Ok(());
    }
    for object in &claim.release {
        release(ctx, owner, object.as_ref(), finalizers).await?;
    }
    if claim.adopt.is_empty() {
        return Ok(());
    }
    if !is_alive(ctx, owner).await? {
        // Without the adopted objects the owner would create replacements. The error delays the sync until
        // its deletion is in the cache.
        return Err(Error::NotCached(format!("deletion of {}", owner.key())));
    }
    for object in &claim.adopt {
        let mut metadata = json!({"ownerReferences": [new_controller_ref(owner)], "uid": object.uid()});
        if !finalizers.is_empty() {
            metadata["finalizers"] = json!(finalizers);
        }
        let patch = Patch::Strategic(json!({"metadata": metadata}));
        match ctx.patch::<T>(&object.key(), &patch).await {
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

async fn release<O: Object, T: Cached>(
    ctx: &Ctx,
    owner: &O,
    object: &T,
    finalizers: &[&str],
) -> Result<(), Error> {
    let owner_removal = json!([{"$patch": "delete", "uid": owner.uid()}]);
    let mut metadata = json!({"ownerReferences": owner_removal, "uid": object.uid()});
    if !finalizers.is_empty() {
        metadata["$deleteFromPrimitiveList/finalizers"] = json!(finalizers);
    }
    let patch = Patch::Strategic(json!({"metadata": metadata}));
    match ctx.patch::<T>(&object.key(), &patch).await {
        // The object is deleted, or another one has its name.
        Err(error) if !error.is_not_found() && !error.is_invalid() => Err(error),
        _ => Ok(()),
    }
}

/// Whether the owner still exists, by a live read: objects adopted by a deleted owner would never be
/// collected.
pub async fn is_alive<O: Object>(ctx: &Ctx, owner: &O) -> Result<bool, Error> {
    match ctx.client.get::<O>(&owner.key()).await {
        Ok(fresh) => Ok(fresh.uid() == owner.uid() && !fresh.is_deleting()),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether an owner may create pods. `reported` is the number of pods in its status. If pods disappeared or
/// are being deleted, the owner may be deleted, too, without the cache showing it yet, so a live read
/// decides.
pub async fn may_create_pods<O: Object>(
    ctx: &Ctx,
    owner: &O,
    pods: &[Arc<Pod>],
    reported: Option<i32>,
) -> Result<bool, Error> {
    let reported = reported.and_then(|reported| usize::try_from(reported).ok()).unwrap_or(0);
    if pods.len() >= reported && !pods.iter().any(|pod| pod.is_deleting()) {
        return Ok(true);
    }
    is_alive(ctx, owner).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::apps::v1::ReplicaSet;
    use k8s_openapi::api::core::v1::Pod;

    fn object<T: Object>(name: &str, app: &str, owner: &str, deleting: bool) -> T {
        let mut metadata = json!({"name": name, "uid": name, "labels": {"app": app}});
        if !owner.is_empty() {
            metadata["ownerReferences"] =
                json!([{"apiVersion": "v1", "kind": "K", "name": "o", "uid": owner, "controller": true}]);
        }
        if deleting {
            metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        serde_json::from_value(json!({"metadata": metadata})).expect("an object")
    }

    #[test]
    fn matching_orphans_and_mismatched_pods_change_owner() {
        let selector = LabelSelector::parse("app=a").expect("a selector");
        let pods: Vec<Arc<Pod>> = vec![
            Arc::new(object("mine", "a", "set", false)),
            Arc::new(object("mine-ending", "a", "set", true)),
            Arc::new(object("lost", "b", "set", false)),
            Arc::new(object("orphan", "a", "", false)),
            Arc::new(object("orphan-ending", "a", "", true)),
            Arc::new(object("stranger", "b", "", false)),
            Arc::new(object("taken", "a", "other", false)),
        ];
        let names = |pods: &[Arc<Pod>]| pods.iter().map(|pod| pod.name().to_owned()).collect::<Vec<_>>();
        let names_for = |owner: &ReplicaSet| {
            let claim = claim(owner, &selector, pods.clone());
            (names(&claim.owned), names(&claim.adopt), names(&claim.release))
        };
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let owned = list(&["mine", "mine-ending"]);
        let alive = (owned.clone(), list(&["orphan"]), list(&["lost"]));
        assert_eq!(names_for(&object("set", "", "", false)), alive);
        assert_eq!(names_for(&object("set", "", "", true)), (owned, vec![], vec![]));
    }
}
