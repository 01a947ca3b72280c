//! Validates probes, lifecycle hooks and their handlers.

use serde_json::Value;

use super::containers::PodContext;
use super::rules::{invalid_name, non_negative, required};
use crate::core::rules::port_number_or_name;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

pub(super) fn lifecycle_and_probes(e: &mut ErrorList, container: &Value, path: &Path, pod: &PodContext) {
    let lifecycle = container.at("lifecycle");
    let at = path.child("lifecycle");
    for hook in ["postStart", "preStop"] {
        if lifecycle.has(hook) {
            handler(e, lifecycle.at(hook), &at.child(hook), HOOKS, pod.grace_period);
        }
    }
    for field in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if container.has(field) {
            probe(e, container.at(field), &path.child(field), field == "readinessProbe", pod.grace_period);
        }
    }
}

fn probe(e: &mut ErrorList, probe: &Value, path: &Path, readiness: bool, grace_period: Option<i64>) {
    handler(e, probe, path, PROBES, grace_period);
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

const PROBES: &[&str] = &["exec", "httpGet", "tcpSocket", "grpc"];
const HOOKS: &[&str] = &["exec", "httpGet", "tcpSocket", "sleep"];

fn handler(
    e: &mut ErrorList,
    handler: &Value,
    path: &Path,
    handler_types: &[&str],
    grace_period: Option<i64>,
) {
    let mut found = false;
    for sort in handler_types {
        if !handler.has(sort) {
            continue;
        }
        let at = path.child(sort);
        if found {
            e.forbidden(&at, "may not specify more than 1 handler type");
            continue;
        }
        found = true;
        let action = handler.at(sort);
        match *sort {
            "exec" => {
                if action.items("command").is_empty() {
                    e.required(&at.child("command"), "");
                }
            }
            "httpGet" => http_get(e, action, &at),
            "sleep" => sleep(e, action, &at, grace_period),
            _ => port_number_or_name(action.at("port"), &at.child("port"), e),
        }
    }
    if !found {
        e.required(path, "must specify a handler type");
    }
}

fn http_get(e: &mut ErrorList, action: &Value, path: &Path) {
    required(e, action, path, "path");
    port_number_or_name(action.at("port"), &path.child("port"), e);
    let scheme = action.text("scheme");
    if !["HTTP", "HTTPS"].contains(&scheme) {
        e.not_supported(&path.child("scheme"), scheme, &["HTTP", "HTTPS"]);
    }
    for header in action.items("httpHeaders") {
        invalid_name(e, &path.child("httpHeaders"), header.text("name"), names::http_header_name);
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
