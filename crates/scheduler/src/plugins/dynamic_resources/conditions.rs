//! Binding conditions: devices that their drivers must prepare before a pod is bound. Drivers report the
//! result as conditions in the claim's status.

use std::time::Duration;

use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::bind::BindContext;

/// How long drivers may take. Default of upstream's `bindingTimeout`.
const BINDING_TIMEOUT: Duration = Duration::from_secs(600);

/// Waits until all devices of a claim are ready. On failure the claim is deallocated, so that other devices
/// can be tried.
pub async fn wait_for_binding_conditions(
    context: &BindContext,
    key: &str,
    claim: &resource::ResourceClaim,
) -> Result<(), String> {
    if results(claim).all(|result| conditions(&result.binding_conditions).is_empty()) {
        return Ok(());
    }
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    let ready = context.resource_claims.wait(key, |claim| match claim {
        Some(claim) => check_binding_conditions(claim),
        None => Some(Err(format!("resourceclaim.resource.k8s.io {name:?} not found"))),
    });
    let binding = match tokio::time::timeout(BINDING_TIMEOUT, ready).await {
        Ok(binding) => binding,
        Err(_) => Err(format!("device binding timeout: claim={name}")),
    };
    if binding.is_err() {
        clear_allocation(context, key).await;
    }
    binding
}

/// Whether all devices are ready or one has failed; `None` if neither is decided yet.
fn check_binding_conditions(claim: &resource::ResourceClaim) -> Option<Result<(), String>> {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    let statuses = claim.status.as_ref().and_then(|status| status.devices.as_deref()).unwrap_or_default();
    // The allocation may not have arrived from the watch yet.
    claim.status.as_ref()?.allocation.as_ref()?;
    for result in results(claim).filter(|result| !conditions(&result.binding_conditions).is_empty()) {
        let status = statuses.iter().find(|status| {
            (&status.driver, &status.pool, &status.device) == (&result.driver, &result.pool, &result.device)
                && status.share_id == result.share_id
        })?;
        let find_true_condition = |condition_type: &String| -> Option<&Condition> {
            let mut all = status.conditions.iter().flatten();
            all.find(|condition| condition.type_ == *condition_type && condition.status == "True")
        };
        if let Some(failed) =
            conditions(&result.binding_failure_conditions).iter().find_map(find_true_condition)
        {
            let Condition { reason, message, .. } = failed;
            return Some(Err(format!(
                "device binding failed: claim={name}, reason={reason}, message={message:?}"
            )));
        }
        if !conditions(&result.binding_conditions)
            .iter()
            .all(|condition_type| find_true_condition(condition_type).is_some())
        {
            return None;
        }
    }
    Some(Ok(()))
}

fn results(
    claim: &resource::ResourceClaim,
) -> impl Iterator<Item = &resource::DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices.into_iter().flat_map(|devices| devices.results.iter().flatten())
}

fn conditions(list: &Option<Vec<String>>) -> &[String] {
    list.as_deref().unwrap_or_default()
}

/// Deallocates the claim, unless other pods share it.
async fn clear_allocation(context: &BindContext, key: &str) {
    let current = context.resource_claims.wait(key, |claim| Some(claim.cloned())).await;
    let Some(mut claim) = current else { return };
    let Some(status) = &mut claim.status else { return };
    if status.reserved_for.as_ref().is_some_and(|users| users.len() > 1) {
        return;
    }
    *status = resource::ResourceClaimStatus::default();
    if let Err(error) = context.api.update_resource_claim_status(&claim).await {
        tracing::warn!(%error, claim = key, "failed to deallocate ResourceClaim after device binding failure");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn check(devices: Value, expected: Option<Result<(), &str>>) {
        let result = json!({
            "request": "r", "driver": "d", "pool": "p", "device": "g0",
            "bindingConditions": ["Attached", "Warm"], "bindingFailureConditions": ["Broken"],
        });
        let claim = json!({"metadata": {"name": "c"}, "spec": {}, "status": {
            "allocation": {"devices": {"results": [result]}}, "devices": devices,
        }});
        let claim = serde_json::from_value(claim).expect("it is a claim");
        assert_eq!(
            check_binding_conditions(&claim),
            expected.map(|expected| expected.map_err(str::to_owned))
        );
    }

    fn device(conditions: &[(&str, &str)]) -> Value {
        let time = "2026-01-01T00:00:00Z";
        let conditions: Vec<Value> = conditions
            .iter()
            .map(|(kind, status)| {
                json!({"type": kind, "status": status, "reason": "R", "message": "m", "lastTransitionTime": time})
            })
            .collect();
        json!([{"driver": "d", "pool": "p", "device": "g0", "conditions": conditions}])
    }

    #[test]
    fn requires_all_binding_conditions_and_no_failure_condition() {
        check(json!([]), None);
        check(device(&[("Attached", "True")]), None);
        check(device(&[("Attached", "True"), ("Warm", "False")]), None);
        check(device(&[("Attached", "True"), ("Warm", "True")]), Some(Ok(())));
        check(device(&[("Attached", "True"), ("Warm", "True"), ("Broken", "False")]), Some(Ok(())));
        check(
            device(&[("Attached", "True"), ("Broken", "True")]),
            Some(Err("device binding failed: claim=c, reason=R, message=\"m\"")),
        );
    }
}
