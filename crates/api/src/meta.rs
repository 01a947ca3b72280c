//! The rules for `metadata`, and for the labels and selectors other fields are made of.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::field::{Errors, Path, printable, quoted};
use crate::json::Json;
use crate::kind::NameRule;
use crate::names;

/// All keys and values of an object's annotations together.
const ANNOTATIONS_MAX: usize = 256 << 10;
const FIELD_MANAGER_MAX: usize = 128;
/// How many controllers too many are told of.
const CONTROLLERS_SHOWN: usize = 10;

/// What a selector may hold beyond the rules, for objects stored before them.
#[derive(Clone, Copy, Debug, Default)]
pub struct SelectorOptions {
    pub allow_invalid_values: bool,
    /// Reviews pass operators on that only the authorizer may know.
    pub allow_unknown_operators: bool,
}

/// Finalizers that belong to nobody in particular.
const STANDARD_FINALIZERS: [&str; 3] = ["kubernetes", "orphan", "foregroundDeletion"];

/// Checks a new object's `metadata`, after its name was generated. `path` is that of the metadata.
pub fn validate_object_meta(
    meta: &Value,
    namespaced: bool,
    rule: NameRule,
    path: &Path,
    errors: &mut Errors,
) {
    let generate = meta.text("generateName");
    if !generate.is_empty() {
        errors.invalid_each(&path.at("generateName"), generate, name_prefix(generate, rule));
    }
    match meta.text("name") {
        "" => errors.required(&path.at("name"), "name or generateName is required"),
        text => errors.invalid_each(&path.at("name"), text, name(text, rule)),
    }
    match (namespaced, meta.text("namespace")) {
        (true, "") => errors.required(&path.at("namespace"), ""),
        (true, text) => errors.invalid_each(&path.at("namespace"), text, names::dns1123_label(text)),
        (false, "") => {}
        (false, _) => errors.forbidden(&path.at("namespace"), "not allowed on this type"),
    }
    non_negative(meta.at("generation"), &path.at("generation"), errors);
    labels(meta.at("labels"), &path.at("labels"), errors);
    annotations(meta.at("annotations"), &path.at("annotations"), errors);
    owner_references(meta.at("ownerReferences"), &path.at("ownerReferences"), errors);
    finalizers(meta.at("finalizers"), &path.at("finalizers"), errors);
    managed_fields(meta.at("managedFields"), &path.at("managedFields"), errors);
}

/// Checks the `metadata` of an update. The resource version is the caller's to check.
pub fn validate_object_meta_update(new: &Value, old: &Value, path: &Path, errors: &mut Errors) {
    if old.has("deletionTimestamp") {
        no_new_finalizers(new, old, &path.at("finalizers"), errors);
    }
    let (generation, before) = (new.int("generation").unwrap_or(0), old.int("generation").unwrap_or(0));
    if generation < before {
        errors.invalid(&path.at("generation"), generation, "must not be decremented");
    }
    for field in ["name", "namespace", "uid"] {
        if new.text(field) != old.text(field) {
            errors.invalid(&path.at(field), new.text(field), "field is immutable");
        }
    }
    for field in ["creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"] {
        immutable(new.at(field), old.at(field), &path.at(field), errors);
    }
    labels(new.at("labels"), &path.at("labels"), errors);
    annotations(new.at("annotations"), &path.at("annotations"), errors);
    owner_references(new.at("ownerReferences"), &path.at("ownerReferences"), errors);
    managed_fields(new.at("managedFields"), &path.at("managedFields"), errors);
}

/// What is wrong with an object's name.
pub fn name(text: &str, rule: NameRule) -> Vec<String> {
    match rule {
        NameRule::Subdomain => names::dns1123_subdomain(text),
        NameRule::Label => names::dns1123_label(text),
        NameRule::Label1035 => names::dns1035_label(text),
        NameRule::PathSegment => names::path_segment_name(text),
    }
}

/// What is wrong with a `generateName`: it may end with a dash, for more follows.
pub fn name_prefix(text: &str, rule: NameRule) -> Vec<String> {
    if rule == NameRule::PathSegment {
        return names::path_segment_prefix(text);
    }
    // Upstream puts one letter for the last two.
    match text.strip_suffix('-').and_then(|head| head.get(..head.len().checked_sub(1)?)) {
        Some(head) => name(&format!("{head}a"), rule),
        None => name(text, rule),
    }
}

/// A map of labels, as `metadata.labels` or `matchLabels`.
pub fn labels(labels: &Value, path: &Path, errors: &mut Errors) {
    for (key, value) in labels.as_object().into_iter().flatten() {
        label_name(key, path, errors);
        let value = value.as_str().unwrap_or("");
        errors.invalid_each(path, value, names::label_value(value));
    }
}

/// The key of a label.
pub fn label_name(key: &str, path: &Path, errors: &mut Errors) {
    errors.invalid_each(path, key, names::qualified_name(key));
}

pub fn annotations(annotations: &Value, path: &Path, errors: &mut Errors) {
    let mut size = 0;
    for (key, value) in annotations.as_object().into_iter().flatten() {
        errors.invalid_each(path, key.as_str(), names::qualified_name(&key.to_lowercase()));
        size += key.len() + value.as_str().map_or(0, str::len);
    }
    if size > ANNOTATIONS_MAX {
        errors.too_long(path, ANNOTATIONS_MAX);
    }
}

/// A `metav1.LabelSelector`; an absent one has nothing wrong with it.
pub fn label_selector(selector: &Value, path: &Path, options: SelectorOptions, errors: &mut Errors) {
    labels(selector.at("matchLabels"), &path.at("matchLabels"), errors);
    for (i, requirement) in selector.items("matchExpressions").iter().enumerate() {
        label_selector_requirement(requirement, &path.at("matchExpressions").index(i), options, errors);
    }
}

pub fn label_selector_requirement(
    requirement: &Value,
    path: &Path,
    options: SelectorOptions,
    errors: &mut Errors,
) {
    selector_operator(requirement, path, options, errors);
    label_name(requirement.text("key"), &path.at("key"), errors);
    if !options.allow_invalid_values {
        for (i, value) in requirement.items("values").iter().enumerate() {
            let value = value.as_str().unwrap_or("");
            errors.invalid_each(&path.at("values").index(i), value, names::label_value(value));
        }
    }
}

/// A `metav1.FieldSelectorRequirement`.
pub fn field_selector_requirement(
    requirement: &Value,
    path: &Path,
    options: SelectorOptions,
    errors: &mut Errors,
) {
    if requirement.text("key").is_empty() {
        errors.required(&path.at("key"), "must be specified");
    }
    selector_operator(requirement, path, options, errors);
}

fn selector_operator(requirement: &Value, path: &Path, options: SelectorOptions, errors: &mut Errors) {
    let no_values = requirement.items("values").is_empty();
    match requirement.text("operator") {
        "In" | "NotIn" if no_values => {
            errors.required(&path.at("values"), "must be specified when `operator` is 'In' or 'NotIn'")
        }
        "Exists" | "DoesNotExist" if !no_values => errors.forbidden(
            &path.at("values"),
            "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
        ),
        "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
        _ if options.allow_unknown_operators => {}
        other => errors.invalid(&path.at("operator"), other, "not a valid selector operator"),
    }
}

/// Whether a stored selector already holds a value the rules forbid, which an update may then keep.
pub fn selector_has_invalid_value(selector: &Value) -> bool {
    let values = |requirement| Json::items(requirement, "values");
    selector
        .items("matchExpressions")
        .iter()
        .flat_map(values)
        .any(|value| !names::label_value(value.as_str().unwrap_or("")).is_empty())
}

pub fn owner_references(references: &Value, path: &Path, errors: &mut Errors) {
    let mut controller: Option<String> = None;
    let mut shown = 0;
    for reference in references.as_array().into_iter().flatten() {
        owner_reference(reference, path, errors);
        if reference.flag("controller") {
            let this = format!("{}/{}", reference.text("kind"), reference.text("name"));
            match &controller {
                // Each complaint holds the whole list, which a client may make long.
                Some(_) if shown == CONTROLLERS_SHOWN => {}
                Some(first) => {
                    shown += 1;
                    let words = format!(
                        "Only one reference can have Controller set to true. Found \"true\" in references for {first} and {this}"
                    );
                    errors.invalid(path, references.clone(), &words);
                }
                None => controller = Some(this),
            }
        }
    }
}

fn owner_reference(reference: &Value, path: &Path, errors: &mut Errors) {
    let api_version = reference.text("apiVersion");
    if api_version.rsplit('/').next().unwrap_or("").is_empty() {
        errors.invalid(&path.at("apiVersion"), api_version, "version must not be empty");
    }
    for field in ["kind", "name", "uid"] {
        if reference.text(field).is_empty() {
            errors.invalid(&path.at(field), "", "must not be empty");
        }
    }
    if (api_version, reference.text("kind")) == ("v1", "Event") {
        errors.invalid(path, reference.clone(), "/v1, Kind=Event is disallowed from being an owner");
    }
}

pub fn finalizers(finalizers: &Value, path: &Path, errors: &mut Errors) {
    let mut seen = (false, false);
    for finalizer in finalizers.as_array().into_iter().flatten().filter_map(Value::as_str) {
        errors.invalid_each(path, finalizer, names::qualified_name(finalizer));
        seen.0 |= finalizer == "orphan";
        seen.1 |= finalizer == "foregroundDeletion";
    }
    if seen == (true, true) {
        errors.invalid(
            path,
            finalizers.clone(),
            "finalizer orphan and foregroundDeletion cannot be both set",
        );
    }
}

/// Of Kubernetes' own kinds, finalizers are standard ones or name who they belong to.
pub fn own_finalizers(meta: &Value, path: &Path, errors: &mut Errors) {
    for (i, finalizer) in meta.items("finalizers").iter().filter_map(Value::as_str).enumerate() {
        if !finalizer.contains('/') && !STANDARD_FINALIZERS.contains(&finalizer) {
            let detail = "name is neither a standard finalizer name nor is it fully qualified";
            errors.invalid(&path.at("finalizers").index(i), finalizer, detail);
        }
    }
}

fn no_new_finalizers(new: &Value, old: &Value, path: &Path, errors: &mut Errors) {
    let set = |meta: &Value| -> BTreeSet<String> {
        meta.items("finalizers").iter().filter_map(Value::as_str).map(quoted).collect()
    };
    let extra: Vec<String> = set(new).difference(&set(old)).cloned().collect();
    if !extra.is_empty() {
        let list = extra.join(", ");
        errors.forbidden(
            path,
            &format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{list}}}"
            ),
        );
    }
}

pub fn managed_fields(entries: &Value, path: &Path, errors: &mut Errors) {
    for (i, entry) in entries.as_array().into_iter().flatten().enumerate() {
        let path = path.index(i);
        let operation = entry.text("operation");
        if !matches!(operation, "Apply" | "Update") {
            errors.invalid(&path.at("operation"), operation, "must be `Apply` or `Update`");
        }
        let fields_type = entry.text("fieldsType");
        if !matches!(fields_type, "" | "FieldsV1") {
            errors.invalid(&path.at("fieldsType"), fields_type, "must be `FieldsV1`");
        }
        field_manager(entry.text("manager"), &path.at("manager"), errors);
        if entry.text("subresource").len() > 256 {
            errors.too_long(&path.at("subresource"), 256);
        }
    }
}

/// The name of a field manager: short and printable.
pub fn field_manager(manager: &str, path: &Path, errors: &mut Errors) {
    if manager.len() > FIELD_MANAGER_MAX {
        return errors.too_long(path, FIELD_MANAGER_MAX);
    }
    for (i, c) in manager.char_indices().filter(|(_, c)| !printable(*c)) {
        let words = format!("invalid character U+{:04X} (at position {i})", u32::from(c));
        errors.invalid(path, manager, &words);
    }
}

/// A list of `metav1.Condition`.
pub fn conditions(conditions: &Value, path: &Path, errors: &mut Errors) {
    let mut seen = BTreeSet::new();
    for (i, condition) in conditions.as_array().into_iter().flatten().enumerate() {
        let path = path.index(i);
        let kind = condition.text("type");
        if !seen.insert(kind) {
            errors.duplicate(&path.at("type"), kind);
        }
        validate_condition(condition, &path, errors);
    }
}

fn validate_condition(condition: &Value, path: &Path, errors: &mut Errors) {
    label_name(condition.text("type"), &path.at("type"), errors);
    let status = condition.text("status");
    if !matches!(status, "True" | "False" | "Unknown") {
        errors.not_supported(&path.at("status"), status, &["False", "True", "Unknown"]);
    }
    if let Some(generation) = condition.int("observedGeneration").filter(|g| *g < 0) {
        errors.invalid(&path.at("observedGeneration"), generation, "must be greater than or equal to zero");
    }
    if !condition.has("lastTransitionTime") {
        errors.required(&path.at("lastTransitionTime"), "");
    }
    match condition.text("reason") {
        "" => errors.required(&path.at("reason"), ""),
        reason => {
            errors.invalid_each(&path.at("reason"), reason, names::condition_reason(reason));
            if reason.len() > 1 << 10 {
                errors.too_long(&path.at("reason"), 1 << 10);
            }
        }
    }
    if condition.text("message").len() > 32 << 10 {
        errors.too_long(&path.at("message"), 32 << 10);
    }
}

/// Complains if a field that may not change has changed.
pub fn immutable(new: &Value, old: &Value, path: &Path, errors: &mut Errors) {
    if !same(new, old) {
        errors.invalid(path, new.clone(), "field is immutable");
    }
}

/// Equal, where an absent list or map equals an empty one.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let in_a = a.iter().all(|(key, value)| same(value, b.get(key).unwrap_or(&Value::Null)));
            in_a && b.iter().all(|(key, value)| a.contains_key(key) || empty(value))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (a, b) => a == b || (empty(a) && empty(b)),
    }
}

fn empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Complains about a number below zero.
pub fn non_negative(value: &Value, path: &Path, errors: &mut Errors) {
    if value.as_i64().is_some_and(|number| number < 0) {
        errors.invalid(path, value.clone(), "must be greater than or equal to 0");
    }
}

#[cfg(test)]
mod tests;
