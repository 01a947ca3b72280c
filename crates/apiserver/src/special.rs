//! Behaviour of single resources that needs the request or a clock, or concerns a subresource,
//! beyond the rules in `api`.

use api::certificates::certificate_signing_request;
use api::core::namespace;
use api::json::JsonExt as _;
use api::resource::{resource_claim, resource_slice};
use api::{ErrorList, Resource};
use serde_json::{Map, Value};

use crate::server::Call;
use crate::strategy;

/// Sets fields that depend on the request, after the resource's own `prepare_create`.
pub fn before_create(stored: &Resource, value: &mut Value, call: Option<&Call>) {
    if (stored.group, stored.plural) == ("certificates.k8s.io", "certificatesigningrequests")
        && let Some(call) = call
    {
        // The requester is the authenticated user; `prepare_create` has dropped what the client
        // sent.
        certificate_signing_request::set_requester(
            value,
            &call.user.name,
            "",
            &call.user.groups,
            &Map::new(),
        );
    }
}

/// Prepares an update through `/status` that needs a clock.
pub fn prepare_status(stored: &Resource, new: &mut Value, old: &Value, now: &str) {
    match (stored.group, stored.plural) {
        ("certificates.k8s.io", _) => certificate_signing_request::prepare_status(new, old, now),
        ("resource.k8s.io", "resourceclaims") => resource_claim::prepare_status(new, old),
        ("", "persistentvolumes") => set_phase_transition_time(new, old, now),
        _ => {}
    }
}

pub fn prepare_approval(new: &mut Value, old: &Value, now: &str) {
    certificate_signing_request::prepare_approval(new, old, now);
}

/// Sets timestamps that only the server may set.
pub fn set_server_times(stored: &Resource, value: &mut Value, now: &str) {
    if strategy::is(stored, "resource.k8s.io", "resourceslices") {
        resource_slice::set_taint_time(value, now);
    }
    if strategy::is(stored, "", "persistentvolumes") && value.at("status").text("phase") == "Pending" {
        value.object_mut("status").entry("lastPhaseTransitionTime").or_insert_with(|| now.into());
    }
}

/// Sets `lastPhaseTransitionTime` when the phase changes, unless the client has set it.
fn set_phase_transition_time(new: &mut Value, old: &Value, now: &str) {
    const TIME: &str = "lastPhaseTransitionTime";
    let before = old.at("status").at(TIME);
    let phase_changed = old.at("status").text("phase") != new.at("status").text("phase");
    let requested = new.at("status").at(TIME).clone();
    let status = new.object_mut("status");
    if phase_changed && (requested.is_null() || requested == *before) {
        status.insert(TIME.into(), now.into());
    } else if !phase_changed && requested.is_null() && !before.is_null() {
        status.insert(TIME.into(), before.clone());
    }
}

/// Validates updates through subresources other than status.
pub fn validate_subresource(
    stored: &Resource,
    subresource: &str,
    new: &Value,
    old: &Value,
    errors: &mut ErrorList,
) {
    match (stored.plural, subresource) {
        ("pods", "ephemeralcontainers") => {
            api::core::pod::validate_ephemeral_containers_update(new, old, errors)
        }
        ("pods", "resize") => api::core::pod::validate_resize(new, old, errors),
        ("certificatesigningrequests", "approval") => {
            certificate_signing_request::validate_approval(new, old, errors);
        }
        ("namespaces", "finalize") => namespace::validate_finalize(new, errors),
        // Bindings and evictions are validated in their handlers.
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn phase_transition_time_follows_phase() {
        let volume = |phase: &str, time: Option<&str>| match time {
            Some(time) => json!({"status": {"phase": phase, "lastPhaseTransitionTime": time}}),
            None => json!({"status": {"phase": phase}}),
        };
        #[track_caller]
        fn check(mut new: Value, old: Value, expected: Option<&str>) {
            set_phase_transition_time(&mut new, &old, "now");
            assert_eq!(new["status"].get("lastPhaseTransitionTime").and_then(Value::as_str), expected);
        }
        let old = volume("Pending", Some("then"));
        check(volume("Pending", None), old.clone(), Some("then"));
        check(volume("Bound", None), old.clone(), Some("now"));
        check(volume("Bound", Some("then")), old.clone(), Some("now"));
        check(volume("Bound", Some("later")), old.clone(), Some("later"));
        check(volume("Pending", None), volume("Pending", None), None);
    }
}
