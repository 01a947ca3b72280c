//! Computes when a pod is evicted because of device taints. Does no I/O.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    Device, DeviceRequestAllocationResult, DeviceTaint, DeviceToleration, ResourceClaim, ResourceSlice,
};
use reconcile::Object;

const NO_EXECUTE: &str = "NoExecute";

fn allocated(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices.into_iter().flat_map(|devices| devices.results.iter().flatten())
}

/// Whether a claim has devices of the slice's pool allocated.
pub fn uses_pool(claim: &ResourceClaim, slice: &ResourceSlice) -> bool {
    allocated(claim).any(|device| device.driver == slice.spec.driver && device.pool == slice.spec.pool.name)
}

/// The time when the first taint on the pod's devices is no longer tolerated. `None` means never.
pub fn eviction_time(
    pod: &Pod,
    claims: &[Arc<ResourceClaim>],
    slices: &[Arc<ResourceSlice>],
    now: Timestamp,
) -> Option<Timestamp> {
    let used = claims.iter().filter(|claim| {
        let users = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
        users.into_iter().any(|user| user.uid == pod.uid())
    });
    let devices = used.flat_map(|claim| allocated(claim));
    let times = devices.flat_map(|allocated| {
        let taints =
            find_device(allocated, slices).into_iter().flat_map(|device| device.taints.iter().flatten());
        let tolerations = allocated.tolerations.as_deref().unwrap_or_default();
        taints
            .filter(|taint| taint.effect == NO_EXECUTE)
            .filter_map(|taint| toleration_end(taint, tolerations, now))
            .collect::<Vec<_>>()
    });
    times.min()
}

/// The device in the pool's latest generation of slices.
fn find_device<'a>(
    allocated: &DeviceRequestAllocationResult,
    slices: &'a [Arc<ResourceSlice>],
) -> Option<&'a Device> {
    let of_pool = slices
        .iter()
        .filter(|slice| slice.spec.driver == allocated.driver && slice.spec.pool.name == allocated.pool);
    let latest = of_pool.clone().map(|slice| slice.spec.pool.generation).max()?;
    of_pool
        .filter(|slice| slice.spec.pool.generation == latest)
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .find(|device| device.name == allocated.device)
}

/// Until when a taint is tolerated. `None` means forever. A taint without `timeAdded` counts as added now.
fn toleration_end(
    taint: &DeviceTaint,
    tolerations: &[DeviceToleration],
    now: Timestamp,
) -> Option<Timestamp> {
    let since = taint.time_added.as_ref().map_or(now, |time| time.0);
    let mut shortest: Option<i64> = None;
    for toleration in tolerations.iter().filter(|toleration| tolerates(toleration, taint)) {
        let seconds = toleration.toleration_seconds?.max(0);
        shortest = Some(shortest.map_or(seconds, |shortest| shortest.min(seconds)));
    }
    let time = SignedDuration::from_secs(shortest.unwrap_or(0));
    Some(since.checked_add(time).unwrap_or(Timestamp::MAX))
}

fn tolerates(toleration: &DeviceToleration, taint: &DeviceTaint) -> bool {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let key = text(&toleration.key);
    let matches_key_and_effect =
        toleration.effect.as_deref() == Some(NO_EXECUTE) && (key.is_empty() || key == taint.key);
    match toleration.operator.as_deref() {
        None | Some("" | "Equal") => matches_key_and_effect && text(&toleration.value) == text(&taint.value),
        Some("Exists") => matches_key_and_effect,
        _ => false,
    }
}
