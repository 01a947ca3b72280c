//! The devices a ResourceClaim asks for.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{
    MAX_CONFIG, MAX_REQUESTS, TAINT_EFFECTS, configuration, each, each_once, fully_qualified, label,
    own_text, selectors,
};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::{meta, names};

const MAX_CONSTRAINTS: usize = 32;
const MAX_ALTERNATIVES: usize = 8;

/// A `ResourceClaimSpec`.
pub(super) fn spec(spec: &Value, path: &Path, errors: &mut Errors) {
    let (devices, path) = (spec.at("devices"), path.at("devices"));
    let known = RequestNames::of(devices);
    let name = |item: &Value| item.text("name").to_owned();
    each_once(devices.items("requests"), MAX_REQUESTS, &path.at("requests"), errors, request, name);
    let constraints = devices.items("constraints");
    each(constraints, MAX_CONSTRAINTS, &path.at("constraints"), errors, |item, path, errors| {
        constraint(item, &known, path, errors);
    });
    each(devices.items("config"), MAX_CONFIG, &path.at("config"), errors, |item, path, errors| {
        request_references(item, &known, path, errors);
        configuration(item, path, errors);
    });
}

/// The requests of a claim, and their alternatives.
pub(super) struct RequestNames<'a>(HashMap<&'a str, HashSet<&'a str>>);

impl<'a> RequestNames<'a> {
    pub(super) fn of(devices: &'a Value) -> RequestNames<'a> {
        let alternatives =
            |request: &'a Value| request.items("firstAvailable").iter().map(|sub| sub.text("name")).collect();
        let requests = devices.items("requests").iter();
        RequestNames(requests.map(|request| (request.text("name"), alternatives(request))).collect())
    }

    fn has(&self, name: &str) -> bool {
        match name.split_once('/') {
            None => self.0.contains_key(name),
            Some((request, sub)) => self.0.get(request).is_some_and(|subs| subs.contains(sub)),
        }
    }
}

pub(super) fn request_references(of: &Value, known: &RequestNames, path: &Path, errors: &mut Errors) {
    let check = |item: &Value, path: &Path, errors: &mut Errors| {
        request_reference(item.as_str().unwrap_or(""), known, path, errors);
    };
    each_once(of.items("requests"), MAX_REQUESTS, &path.at("requests"), errors, check, own_text);
}

pub(super) fn request_reference(name: &str, known: &RequestNames, path: &Path, errors: &mut Errors) {
    const MESSAGE: &str = "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";
    if name.matches('/').count() > 1 {
        errors.invalid(path, name, MESSAGE);
        return;
    }
    name.split('/').for_each(|part| label(part, path, errors));
    if !known.has(name) {
        errors.invalid(path, name, MESSAGE);
    }
}

fn request(request: &Value, path: &Path, errors: &mut Errors) {
    label(request.text("name"), &path.at("name"), errors);
    let alternatives = request.items("firstAvailable");
    match (request.has("exactly"), !alternatives.is_empty()) {
        (false, false) => {
            errors.required(path, "exactly one of `exactly` or `firstAvailable` is required");
        }
        (true, true) => errors.invalid(
            path,
            Value::Null,
            "exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set",
        ),
        (true, false) => wanted(request.at("exactly"), &path.at("exactly"), errors),
        (false, true) => {
            let check = |item: &Value, path: &Path, errors: &mut Errors| {
                label(item.text("name"), &path.at("name"), errors);
                wanted(item, path, errors);
            };
            let name = |item: &Value| item.text("name").to_owned();
            each_once(alternatives, MAX_ALTERNATIVES, &path.at("firstAvailable"), errors, check, name);
        }
    }
}

/// What an exact request and an alternative both say.
fn wanted(request: &Value, path: &Path, errors: &mut Errors) {
    let class = request.text("deviceClassName");
    if class.is_empty() {
        errors.required(&path.at("deviceClassName"), "");
    } else {
        errors.invalid_each(&path.at("deviceClassName"), class, names::dns1123_subdomain(class));
    }
    selectors(request.items("selectors"), &path.at("selectors"), errors);
    let (mode, count) = (request.text("allocationMode"), request.int("count").unwrap_or(0));
    match mode {
        "All" if count != 0 => {
            errors.invalid(&path.at("count"), count, "must not be specified when allocationMode is 'All'")
        }
        "ExactCount" if count <= 0 => {
            errors.invalid(&path.at("count"), count, "must be greater than zero");
        }
        "All" | "ExactCount" => {}
        _ => errors.not_supported(&path.at("allocationMode"), mode, &["All", "ExactCount"]),
    }
    for (i, item) in request.items("tolerations").iter().enumerate() {
        toleration(item, &path.at("tolerations").index(i), errors);
    }
}

fn toleration(toleration: &Value, path: &Path, errors: &mut Errors) {
    let (key, value) = (toleration.text("key"), toleration.text("value"));
    if !key.is_empty() {
        meta::label_name(key, &path.at("key"), errors);
    }
    let at = path.at("value");
    match toleration.text("operator") {
        "Exists" if !value.is_empty() => errors.invalid(&at, value, "must be empty for operator `Exists`"),
        "Exists" => {}
        "Equal" => errors.invalid_each(&at, value, names::label_value(value)),
        "" => errors.required(&path.at("operator"), ""),
        other => errors.not_supported(&path.at("operator"), other, &["Equal", "Exists"]),
    }
    let effect = toleration.text("effect");
    if !effect.is_empty() && !TAINT_EFFECTS.contains(&effect) {
        errors.not_supported(&path.at("effect"), effect, &TAINT_EFFECTS);
    }
}

fn constraint(constraint: &Value, known: &RequestNames, path: &Path, errors: &mut Errors) {
    request_references(constraint, known, path, errors);
    for field in ["matchAttribute", "distinctAttribute"] {
        if constraint.has(field) {
            fully_qualified(constraint.text(field), &path.at(field), errors);
            return;
        }
    }
    let why =
        "exactly one of \"matchAttribute\" or \"distinctAttribute\" is required, but multiple fields are set";
    errors.required(path, why);
}
