//! The `pods/eviction` subresource: deletes a pod if its PodDisruptionBudget allows it.

use api::json::JsonExt as _;
use api::status::{StatusCause, StatusDetails};
use api::{Resource, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::body::Body;
use crate::codec;
use crate::delete::DeleteOptions;
use crate::render::encode_response;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::subresource::{set_condition, success};
use crate::update::ObjectChange;
use crate::write::{OBJECT_MODIFIED_MESSAGE, WriteOptions};

/// A budget with more unconfirmed evictions than this rejects further ones. Upstream:
/// `MaxDisruptedPodSize`.
const MAX_DISRUPTED_PODS: usize = 2000;
/// How often an eviction is retried when the pod changes concurrently.
const MAX_EVICTION_ATTEMPTS: usize = 20;
const BUDGET_VIOLATION_MESSAGE: &str = "Cannot evict pod as it would violate the pod's disruption budget.";

pub async fn evict(server: &Server, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    let options = WriteOptions::parse(call, "CreateOptions")?;
    let media = codec::body_media(&call.headers)?;
    let mut eviction =
        codec::decode(media, &call.body, ("policy", "v1", "Eviction"), options.validation)?.value;
    crate::create::set_namespace(&mut eviction, target)?;
    server.admit_subresource_create(target, &mut eviction, &options).await?;
    let dry_run: Vec<&str> = call.query.all("dryRun").collect();
    let options_value = api::policy::eviction::delete_options(&eviction, &target.name, &dry_run)?;
    let delete = DeleteOptions::from_value(&options_value)?;
    let pod_target = Target { subresource: String::new(), ..target.clone() };
    for _ in 0..MAX_EVICTION_ATTEMPTS {
        let pod = server.current(&pod_target).await?.ok_or_else(|| target.not_found())?.value();
        let mode = check_disruption_budget(server, &pod, target, delete.dry_run, &options).await?;
        let mut attempt = delete.clone();
        if mode == EvictionMode::IfUnchanged && delete.resource_version.is_empty() {
            attempt.resource_version = pod.at("metadata").text("resourceVersion").to_owned();
        }
        match add_condition_and_delete_pod(server, &pod_target, attempt, &options).await {
            // The pod changed since the check: check the budget again.
            Err(status) if status.code == 409 && mode == EvictionMode::IfUnchanged => {
                if !delete.resource_version.is_empty() {
                    return Err(status);
                }
            }
            Err(status) => return Err(status),
            Ok(()) => return Ok(encode_response(StatusCode::CREATED, &call.format, success())),
        }
    }
    Err(Status::conflict("", "pods", &target.name, OBJECT_MODIFIED_MESSAGE))
}

/// How the pod may be deleted, if it may be evicted at all.
#[derive(Clone, Copy, PartialEq)]
enum EvictionMode {
    Delete,
    /// Only if its resourceVersion is still the one that was checked.
    IfUnchanged,
}

async fn check_disruption_budget(
    server: &Server,
    pod: &Value,
    target: &Target,
    dry_run: bool,
    options: &WriteOptions,
) -> Result<EvictionMode, Status> {
    let is_terminal = matches!(pod.at("status").text("phase"), "Succeeded" | "Failed");
    if is_terminal || pod.at("metadata").has("deletionTimestamp") {
        return Ok(EvictionMode::Delete);
    }
    if pod.at("status").text("phase") == "Pending" {
        return Ok(EvictionMode::IfUnchanged);
    }
    let row: &'static Resource = api::resource_table::find_resource("policy", "v1", "poddisruptionbudgets")
        .expect("poddisruptionbudgets are in the resource table");
    let collection = Target::collection(row, &target.namespace);
    let mut budgets = server.shard(row).snapshot(&collection.key(), 0).objects;
    budgets.retain(|budget| {
        let budget = budget.value();
        let selector = api::selector::LabelSelector::from_value(budget.path("spec.selector"));
        budget.at("spec").has("selector")
            && selector.is_ok_and(|selector| selector.matches_labels(pod.path("metadata.labels")))
    });
    let budget = match budgets.as_slice() {
        [] => return Ok(EvictionMode::Delete),
        [budget] => budget.value(),
        _ => {
            return Err(Status::failure(
                500,
                "",
                "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
            ));
        }
    };
    if !is_ready(pod) && can_ignore_unready(&budget) {
        return Ok(EvictionMode::IfUnchanged);
    }
    let name = budget.at("metadata").text("name").to_owned();
    let status = Target { name, subresource: "status".into(), ..collection };
    let now = options.timestamp();
    // The budget is updated by the server, not by the requesting user.
    let options = WriteOptions { dry_run, user: None, ..options.clone() };
    let decrement =
        |before: &Value| check_and_decrement(before, &target.name, &now).map(ObjectChange::replace);
    server.update_object(&status, &options, decrement).await?;
    Ok(EvictionMode::Delete)
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod.at("status").items("conditions");
    conditions.iter().any(|condition| condition.text("type") == "Ready" && condition.text("status") == "True")
}

/// Whether the budget does not count for a pod that is not ready: evicting it does not reduce the
/// number of healthy pods.
fn can_ignore_unready(budget: &Value) -> bool {
    let healthy = budget.at("status").int("currentHealthy").unwrap_or(0);
    let desired = budget.at("status").int("desiredHealthy").unwrap_or(0);
    budget.at("spec").text("unhealthyPodEvictionPolicy") == "AlwaysAllow" || healthy >= desired && desired > 0
}

/// The budget with `disruptionsAllowed` decremented and the pod recorded as disrupted, or the
/// reason for rejecting the eviction.
fn check_and_decrement(budget: &Value, pod: &str, now: &str) -> Result<Value, Status> {
    let name = budget.at("metadata").text("name");
    let status = budget.at("status");
    let observed = status.int("observedGeneration").unwrap_or(0);
    if observed < budget.at("metadata").int("generation").unwrap_or(0) {
        let reason = "is still being processed by the server.";
        return Err(too_many_requests(name, 10, reason));
    }
    let forbidden = |reason: &str| Err(Status::forbidden("policy", "poddisruptionbudget", name, reason));
    let allowed = status.int("disruptionsAllowed").unwrap_or(0);
    if allowed < 0 {
        return forbidden("pdb disruptions allowed is negative");
    }
    if status.entries("disruptedPods").count() > MAX_DISRUPTED_PODS {
        return forbidden("DisruptedPods map too big - too many evictions not confirmed by PDB controller");
    }
    if allowed == 0 {
        return Err(too_many_requests(name, 0, &not_allowed_reason(status)));
    }
    let mut after = budget.clone();
    let fields = after.object_mut("status");
    fields.insert("disruptionsAllowed".into(), (allowed - 1).into());
    after["status"].object_mut("disruptedPods").insert(pod.to_owned(), now.into());
    if allowed == 1 {
        let condition = json!({
            "type": "DisruptionAllowed", "status": "False", "reason": "InsufficientPods", "message": "",
            "observedGeneration": observed,
        });
        set_condition(&mut after, condition, now);
    }
    Ok(after)
}

/// Why the budget allows no disruption. Texts are upstream's.
fn not_allowed_reason(status: &Value) -> String {
    let (healthy, desired) =
        (status.int("currentHealthy").unwrap_or(0), status.int("desiredHealthy").unwrap_or(0));
    let conditions = status.items("conditions").iter();
    let not_allowed = conditions
        .filter(|condition| condition.text("type") == "DisruptionAllowed")
        .find(|condition| condition.text("status") == "False" && !condition.text("message").is_empty());
    match not_allowed.map(|condition| (condition.text("reason"), condition.text("message"))) {
        Some(("SyncFailed", message)) => {
            format!("does not allow evicting pods currently because it failed sync: {message}")
        }
        _ if healthy <= desired => format!("needs {desired} healthy pods and has {healthy} currently"),
        Some((reason, message)) => format!("does not allow evicting pods currently ({reason}): {message}"),
        None => "does not allow evicting pods currently".to_owned(),
    }
}

fn too_many_requests(budget: &str, seconds: u32, reason: &str) -> Status {
    let mut status = Status::failure(429, "TooManyRequests", BUDGET_VIOLATION_MESSAGE);
    let message = format!("The disruption budget {budget} {reason}");
    let cause = StatusCause { reason: "DisruptionBudget".into(), message, field: String::new() };
    status.details =
        Some(StatusDetails { causes: vec![cause], retry_after_seconds: seconds, ..StatusDetails::default() });
    status
}

/// Sets the DisruptionTarget condition, then deletes the pod.
async fn add_condition_and_delete_pod(
    server: &Server,
    pod: &Target,
    mut delete: DeleteOptions,
    options: &WriteOptions,
) -> Result<(), Status> {
    if !delete.dry_run {
        let status = Target { subresource: "status".into(), ..pod.clone() };
        let now = options.timestamp();
        let set_disruption_target = |before: &Value| {
            crate::delete::check_preconditions(pod.resource, &delete, before)?;
            let mut after = before.clone();
            let condition = json!({
                "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting", "lastProbeTime": null,
            });
            set_condition(&mut after, condition, &now);
            Ok(ObjectChange { value: after, managed_fields_set: true, retry_on_conflict: true })
        };
        let options = WriteOptions { dry_run: false, user: None, ..options.clone() };
        let (result, _) = server.update_object(&status, &options, set_disruption_target).await?;
        if let crate::write::WriteResult::Stored(object) = result
            && !delete.resource_version.is_empty()
        {
            // The condition changed the resourceVersion: the precondition moves on to the new one.
            delete.resource_version = object.revision.to_string();
        }
    }
    server.delete_object(pod, &delete, options.now).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(status: Value, expected: &str) {
        let budget = json!({"metadata": {"name": "b", "generation": 2}, "status": status});
        let found = match check_and_decrement(&budget, "p", "now") {
            Ok(after) => after.at("status").to_string(),
            Err(status) => {
                let causes = status.details.map(|details| details.causes).unwrap_or_default();
                format!("{} {}", status.code, causes.first().map_or(status.message, |c| c.message.clone()))
            }
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn eviction_uses_one_allowed_disruption() {
        let status = |more: Value| {
            let mut status = json!({"observedGeneration": 2, "currentHealthy": 3, "desiredHealthy": 2});
            status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            status
        };
        check(
            json!({"observedGeneration": 1, "disruptionsAllowed": 1}),
            "429 The disruption budget b is still being processed by the server.",
        );
        check(
            status(json!({"disruptionsAllowed": 0, "currentHealthy": 2})),
            "429 The disruption budget b needs 2 healthy pods and has 2 currently",
        );
        check(status(json!({})), "429 The disruption budget b does not allow evicting pods currently");
        check(
            status(json!({"disruptionsAllowed": -1})),
            "403 poddisruptionbudget.policy \"b\" is forbidden: pdb disruptions allowed is negative",
        );
        check(
            status(json!({"disruptionsAllowed": 2})),
            r#"{"currentHealthy":3,"desiredHealthy":2,"disruptedPods":{"p":"now"},"disruptionsAllowed":1,"observedGeneration":2}"#,
        );
    }

    #[test]
    fn unready_pods_follow_unhealthy_pod_eviction_policy() {
        let budget = |policy: &str, healthy: i64| {
            json!({"spec": {"unhealthyPodEvictionPolicy": policy},
                "status": {"currentHealthy": healthy, "desiredHealthy": 2}})
        };
        assert!(can_ignore_unready(&budget("AlwaysAllow", 0)));
        assert!(can_ignore_unready(&budget("IfHealthyBudget", 2)));
        assert!(!can_ignore_unready(&budget("", 1)));
    }
}
