//! Validates the spec of ResourceClaims.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{
    MAX_CONFIGS, MAX_REQUESTS, TAINT_EFFECTS, string_value, validate_configuration,
    validate_fully_qualified_name, validate_label, validate_list, validate_selectors, validate_unique_list,
};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::{meta, names};

const MAX_CONSTRAINTS: usize = 32;
const MAX_FIRST_AVAILABLE: usize = 8;

/// Validates a `ResourceClaimSpec`.
pub(super) fn validate_claim_spec(spec: &Value, path: &Path, errors: &mut ErrorList) {
    let (devices, path) = (spec.at("devices"), path.child("devices"));
    let known = RequestNames::from_devices(devices);
    let name = |item: &Value| item.text("name").to_owned();
    validate_unique_list(
        devices.items("requests"),
        MAX_REQUESTS,
        &path.child("requests"),
        errors,
        validate_request,
        name,
    );
    let constraints = devices.items("constraints");
    validate_list(constraints, MAX_CONSTRAINTS, &path.child("constraints"), errors, |item, path, errors| {
        validate_constraint(item, &known, path, errors);
    });
    validate_list(
        devices.items("config"),
        MAX_CONFIGS,
        &path.child("config"),
        errors,
        |item, path, errors| {
            validate_request_references(item, &known, path, errors);
            validate_configuration(item, path, errors);
        },
    );
}

/// The names of the requests of a claim, with those of their subrequests.
pub(super) struct RequestNames<'a>(HashMap<&'a str, HashSet<&'a str>>);

impl<'a> RequestNames<'a> {
    pub(super) fn from_devices(devices: &'a Value) -> RequestNames<'a> {
        let sub_requests =
            |request: &'a Value| request.items("firstAvailable").iter().map(|sub| sub.text("name")).collect();
        let requests = devices.items("requests").iter();
        RequestNames(requests.map(|request| (request.text("name"), sub_requests(request))).collect())
    }

    fn has(&self, name: &str) -> bool {
        match name.split_once('/') {
            None => self.0.contains_key(name),
            Some((request, sub)) => self.0.get(request).is_some_and(|subs| subs.contains(sub)),
        }
    }
}

pub(super) fn validate_request_references(
    of: &Value,
    known: &RequestNames,
    path: &Path,
    errors: &mut ErrorList,
) {
    let check = |item: &Value, path: &Path, errors: &mut ErrorList| {
        validate_request_reference(item.as_str().unwrap_or(""), known, path, errors);
    };
    validate_unique_list(
        of.items("requests"),
        MAX_REQUESTS,
        &path.child("requests"),
        errors,
        check,
        string_value,
    );
}

pub(super) fn validate_request_reference(
    name: &str,
    known: &RequestNames,
    path: &Path,
    errors: &mut ErrorList,
) {
    const MESSAGE: &str = "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";
    if name.matches('/').count() > 1 {
        errors.invalid(path, name, MESSAGE);
        return;
    }
    name.split('/').for_each(|part| validate_label(part, path, errors));
    if !known.has(name) {
        errors.invalid(path, name, MESSAGE);
    }
}

fn validate_request(request: &Value, path: &Path, errors: &mut ErrorList) {
    validate_label(request.text("name"), &path.child("name"), errors);
    let sub_requests = request.items("firstAvailable");
    match (request.has("exactly"), !sub_requests.is_empty()) {
        (false, false) => {
            errors.required(path, "exactly one of `exactly` or `firstAvailable` is required");
        }
        (true, true) => errors.invalid(
            path,
            Value::Null,
            "exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set",
        ),
        (true, false) => validate_exact_request(request.at("exactly"), &path.child("exactly"), errors),
        (false, true) => {
            let check = |item: &Value, path: &Path, errors: &mut ErrorList| {
                validate_label(item.text("name"), &path.child("name"), errors);
                validate_exact_request(item, path, errors);
            };
            let name = |item: &Value| item.text("name").to_owned();
            validate_unique_list(
                sub_requests,
                MAX_FIRST_AVAILABLE,
                &path.child("firstAvailable"),
                errors,
                check,
                name,
            );
        }
    }
}

/// Validates the fields that exact requests and subrequests have in common.
fn validate_exact_request(request: &Value, path: &Path, errors: &mut ErrorList) {
    let class = request.text("deviceClassName");
    if class.is_empty() {
        errors.required(&path.child("deviceClassName"), "");
    } else {
        errors.invalid_each(&path.child("deviceClassName"), class, names::dns1123_subdomain(class));
    }
    validate_selectors(request.items("selectors"), &path.child("selectors"), errors);
    let (mode, count) = (request.text("allocationMode"), request.int("count").unwrap_or(0));
    match mode {
        "All" if count != 0 => {
            errors.invalid(&path.child("count"), count, "must not be specified when allocationMode is 'All'")
        }
        "ExactCount" if count <= 0 => {
            errors.invalid(&path.child("count"), count, "must be greater than zero");
        }
        "All" | "ExactCount" => {}
        _ => errors.not_supported(&path.child("allocationMode"), mode, &["All", "ExactCount"]),
    }
    for (i, item) in request.items("tolerations").iter().enumerate() {
        validate_toleration(item, &path.child("tolerations").index(i), errors);
    }
}

fn validate_toleration(toleration: &Value, path: &Path, errors: &mut ErrorList) {
    let (key, value) = (toleration.text("key"), toleration.text("value"));
    if !key.is_empty() {
        meta::validate_label_name(key, &path.child("key"), errors);
    }
    let at = path.child("value");
    match toleration.text("operator") {
        "Exists" if !value.is_empty() => errors.invalid(&at, value, "must be empty for operator `Exists`"),
        "Exists" => {}
        "Equal" => errors.invalid_each(&at, value, names::label_value(value)),
        "" => errors.required(&path.child("operator"), ""),
        other => errors.not_supported(&path.child("operator"), other, &["Equal", "Exists"]),
    }
    let effect = toleration.text("effect");
    if !effect.is_empty() && !TAINT_EFFECTS.contains(&effect) {
        errors.not_supported(&path.child("effect"), effect, &TAINT_EFFECTS);
    }
}

fn validate_constraint(constraint: &Value, known: &RequestNames, path: &Path, errors: &mut ErrorList) {
    validate_request_references(constraint, known, path, errors);
    for field in ["matchAttribute", "distinctAttribute"] {
        if constraint.has(field) {
            validate_fully_qualified_name(constraint.text(field), &path.child(field), errors);
            return;
        }
    }
    let detail =
        "exactly one of \"matchAttribute\" or \"distinctAttribute\" is required, but multiple fields are set";
    errors.required(path, detail);
}
