//! Validates probes, lifecycle hooks and their handlers.

use serde_json::Value;

use super::containers::PodContext;
use super::rules::{non_negative, required, validate_name};
use crate::core::rules::validate_port_number_or_name;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

pub(super) fn validate_lifecycle_and_probes(
    e: &mut ErrorList,
    container: &Value,
    path: &Path,
    pod: &PodContext,
) {
    let lifecycle = container.at("lifecycle");
    let at = path.child("lifecycle");
    for hook in ["postStart", "preStop"] {
        if lifecycle.has(hook) {
            handler(e, lifecycle.at(hook), &at.child(hook), HOOK_HANDLERS, pod.grace_period);
        }
    }
    for field in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if container.has(field) {
            probe(e, container.at(field), &path.child(field), field == "readinessProbe", pod.grace_period);
        }
    }
}

fn probe(e: &mut ErrorList, probe: &Value, path: &Path, readiness: bool, grace_period: Option<i64>) {
    handler(e, probe, path, PROBE_HANDLERS, grace_period);
    for field in
        ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"]
    {
        non_negative(e, probe, path, field);
    }
    let at = path.child("terminationGracePeriodSeconds");
    let grace = probe.int("terminationGracePeriodSeconds");
    if let Some(grace) = grace
        && grace <= 0
    {
        e.invalid(&at, grace, "must be greater than 0");
    }
    if readiness {
        if let Some(grace) = grace {
            e.invalid(&at, grace, "must not be set for readinessProbes");
        }
    } else {
        let threshold = probe.int("successThreshold").unwrap_or(0);
        if threshold != 1 {
            e.invalid(&path.child("successThreshold"), threshold, "must be 1");
        }
    }
}

const PROBE_HANDLERS: &[&str] = &["exec", "httpGet", "tcpSocket", "grpc"];
const HOOK_HANDLERS: &[&str] = &["exec", "httpGet", "tcpSocket", "sleep"];

fn handler(
    e: &mut ErrorList,
    handler: &Value,
    path: &Path,
    handler_types: &[&str],
    grace_period: Option<i64>,
) {
    let mut found = false;
    for handler_type in handler_types {
        if !handler.has(handler_type) {
            continue;
        }
        let at = path.child(handler_type);
        if found {
            e.forbidden(&at, "may not specify more than 1 handler type");
            continue;
        }
        found = true;
        let action = handler.at(handler_type);
        match *handler_type {
            "exec" => {
                if action.items("command").is_empty() {
                    e.required(&at.child("command"), "");
                }
            }
            "httpGet" => http_get(e, action, &at),
            "sleep" => sleep(e, action, &at, grace_period),
            _ => validate_port_number_or_name(action.at("port"), &at.child("port"), e),
        }
    }
    if !found {
        e.required(path, "must specify a handler type");
    }
}

fn http_get(e: &mut ErrorList, action: &Value, path: &Path) {
    required(e, action, path, "path");
    validate_port_number_or_name(action.at("port"), &path.child("port"), e);
    let scheme = action.text("scheme");
    if !["HTTP", "HTTPS"].contains(&scheme) {
        e.not_supported(&path.child("scheme"), scheme, &["HTTP", "HTTPS"]);
    }
    for header in action.items("httpHeaders") {
        validate_name(e, &path.child("httpHeaders"), header.text("name"), names::http_header_name);
    }
}

fn sleep(e: &mut ErrorList, action: &Value, path: &Path, grace_period: Option<i64>) {
    let seconds = action.int("seconds").unwrap_or(0);
    if let Some(grace) = grace_period
        && !(0..=grace).contains(&seconds)
    {
        e.invalid(
            path,
            seconds,
            &format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})"),
        );
    }
}
