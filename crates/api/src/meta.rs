//! Validates `metadata`, labels, selectors, conditions and other common types.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::field::{ErrorList, Path, is_printable, quote};
use crate::json::JsonExt;
use crate::names;
use crate::strategy::NameFormat;

/// Maximum total size of the annotations of an object.
const MAX_ANNOTATIONS_BYTES: usize = 256 << 10;
const MAX_FIELD_MANAGER_BYTES: usize = 128;
/// Maximum number of reported errors about several controller references.
const MAX_REPORTED_CONTROLLERS: usize = 10;

/// Relaxations for stored objects with selectors that violate newer rules.
#[derive(Clone, Copy, Debug, Default)]
pub struct SelectorOptions {
    pub allow_invalid_values: bool,
    /// SubjectAccessReviews may contain operators that only the authorizer knows.
    pub allow_unknown_operators: bool,
}

/// The finalizers without a domain prefix.
const STANDARD_FINALIZERS: [&str; 3] = ["kubernetes", "orphan", "foregroundDeletion"];

/// Validates the `metadata` of a new object, after `generateName` is applied. `path` is the path of the
/// metadata.
pub fn validate_object_meta(
    meta: &Value,
    namespaced: bool,
    rule: NameFormat,
    path: &Path,
    errors: &mut ErrorList,
) {
    let generate = meta.text("generateName");
    if !generate.is_empty() {
        errors.invalid_each(&path.child("generateName"), generate, name_prefix_errors(generate, rule));
    }
    match meta.text("name") {
        "" => errors.required(&path.child("name"), "name or generateName is required"),
        text => errors.invalid_each(&path.child("name"), text, name_errors(text, rule)),
    }
    match (namespaced, meta.text("namespace")) {
        (true, "") => errors.required(&path.child("namespace"), ""),
        (true, text) => errors.invalid_each(&path.child("namespace"), text, names::dns1123_label(text)),
        (false, "") => {}
        (false, _) => errors.forbidden(&path.child("namespace"), "not allowed on this type"),
    }
    validate_non_negative(meta.at("generation"), &path.child("generation"), errors);
    validate_labels(meta.at("labels"), &path.child("labels"), errors);
    validate_annotations(meta.at("annotations"), &path.child("annotations"), errors);
    validate_owner_references(meta.at("ownerReferences"), &path.child("ownerReferences"), errors);
    validate_finalizers(meta.at("finalizers"), &path.child("finalizers"), errors);
    validate_managed_fields(meta.at("managedFields"), &path.child("managedFields"), errors);
}

/// Validates the `metadata` of an update. The caller checks the resource version.
pub fn validate_object_meta_update(new: &Value, old: &Value, path: &Path, errors: &mut ErrorList) {
    if old.has("deletionTimestamp") {
        validate_no_new_finalizers(new, old, &path.child("finalizers"), errors);
    }
    let (generation, before) = (new.int("generation").unwrap_or(0), old.int("generation").unwrap_or(0));
    if generation < before {
        errors.invalid(&path.child("generation"), generation, "must not be decremented");
    }
    for field in ["name", "namespace", "uid"] {
        if new.text(field) != old.text(field) {
            errors.invalid(&path.child(field), new.text(field), "field is immutable");
        }
    }
    for field in ["creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"] {
        validate_immutable(new.at(field), old.at(field), &path.child(field), errors);
    }
    validate_labels(new.at("labels"), &path.child("labels"), errors);
    validate_annotations(new.at("annotations"), &path.child("annotations"), errors);
    validate_owner_references(new.at("ownerReferences"), &path.child("ownerReferences"), errors);
    validate_managed_fields(new.at("managedFields"), &path.child("managedFields"), errors);
}

/// The errors of an object name.
pub fn name_errors(text: &str, rule: NameFormat) -> Vec<String> {
    match rule {
        NameFormat::Subdomain => names::dns1123_subdomain(text),
        NameFormat::Label => names::dns1123_label(text),
        NameFormat::Label1035 => names::dns1035_label(text),
        NameFormat::PathSegment => names::path_segment_name(text),
    }
}

/// The errors of a `generateName`, which may end with a dash.
pub fn name_prefix_errors(text: &str, rule: NameFormat) -> Vec<String> {
    if rule == NameFormat::PathSegment {
        return names::path_segment_prefix(text);
    }
    // Upstream replaces the last two characters with one letter.
    match text.strip_suffix('-').and_then(|head| head.get(..head.len().checked_sub(1)?)) {
        Some(head) => name_errors(&format!("{head}a"), rule),
        None => name_errors(text, rule),
    }
}

/// Validates a map of labels, such as `metadata.labels` or `matchLabels`.
pub fn validate_labels(labels: &Value, path: &Path, errors: &mut ErrorList) {
    for (key, value) in labels.as_object().into_iter().flatten() {
        validate_label_name(key, path, errors);
        let value = value.as_str().unwrap_or("");
        errors.invalid_each(path, value, names::label_value(value));
    }
}

/// Validates a label key.
pub fn validate_label_name(key: &str, path: &Path, errors: &mut ErrorList) {
    errors.invalid_each(path, key, names::qualified_name(key));
}

pub fn validate_annotations(annotations: &Value, path: &Path, errors: &mut ErrorList) {
    let mut size = 0;
    for (key, value) in annotations.as_object().into_iter().flatten() {
        errors.invalid_each(path, key.as_str(), names::qualified_name(&key.to_lowercase()));
        size += key.len() + value.as_str().map_or(0, str::len);
    }
    if size > MAX_ANNOTATIONS_BYTES {
        errors.too_long(path, MAX_ANNOTATIONS_BYTES);
    }
}

/// Validates a `metav1.LabelSelector`, which may be absent.
pub fn validate_label_selector(
    selector: &Value,
    path: &Path,
    options: SelectorOptions,
    errors: &mut ErrorList,
) {
    validate_labels(selector.at("matchLabels"), &path.child("matchLabels"), errors);
    for (i, requirement) in selector.items("matchExpressions").iter().enumerate() {
        validate_label_selector_requirement(
            requirement,
            &path.child("matchExpressions").index(i),
            options,
            errors,
        );
    }
}

pub fn validate_label_selector_requirement(
    requirement: &Value,
    path: &Path,
    options: SelectorOptions,
    errors: &mut ErrorList,
) {
    validate_selector_operator(requirement, path, options, errors);
    validate_label_name(requirement.text("key"), &path.child("key"), errors);
    if !options.allow_invalid_values {
        for (i, value) in requirement.items("values").iter().enumerate() {
            let value = value.as_str().unwrap_or("");
            errors.invalid_each(&path.child("values").index(i), value, names::label_value(value));
        }
    }
}

/// Validates a `metav1.FieldSelectorRequirement`.
pub fn validate_field_selector_requirement(
    requirement: &Value,
    path: &Path,
    options: SelectorOptions,
    errors: &mut ErrorList,
) {
    if requirement.text("key").is_empty() {
        errors.required(&path.child("key"), "must be specified");
    }
    validate_selector_operator(requirement, path, options, errors);
}

fn validate_selector_operator(
    requirement: &Value,
    path: &Path,
    options: SelectorOptions,
    errors: &mut ErrorList,
) {
    let no_values = requirement.items("values").is_empty();
    match requirement.text("operator") {
        "In" | "NotIn" if no_values => {
            errors.required(&path.child("values"), "must be specified when `operator` is 'In' or 'NotIn'")
        }
        "Exists" | "DoesNotExist" if !no_values => errors.forbidden(
            &path.child("values"),
            "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
        ),
        "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
        _ if options.allow_unknown_operators => {}
        other => errors.invalid(&path.child("operator"), other, "not a valid selector operator"),
    }
}

/// Whether a stored selector has an invalid label value, which updates may then keep.
pub fn selector_has_invalid_value(selector: &Value) -> bool {
    let values = |requirement| JsonExt::items(requirement, "values");
    selector
        .items("matchExpressions")
        .iter()
        .flat_map(values)
        .any(|value| !names::label_value(value.as_str().unwrap_or("")).is_empty())
}

pub fn validate_owner_references(references: &Value, path: &Path, errors: &mut ErrorList) {
    let mut controller: Option<String> = None;
    let mut reported = 0;
    for reference in references.as_array().into_iter().flatten() {
        validate_owner_reference(reference, path, errors);
        if reference.flag("controller") {
            let this = format!("{}/{}", reference.text("kind"), reference.text("name"));
            match &controller {
                // Each message contains the names of the owners, which clients may make long.
                Some(_) if reported == MAX_REPORTED_CONTROLLERS => {}
                Some(first) => {
                    reported += 1;
                    let detail = format!(
                        "Only one reference can have Controller set to true. Found \"true\" in references for {first} and {this}"
                    );
                    errors.invalid(path, references.clone(), &detail);
                }
                None => controller = Some(this),
            }
        }
    }
}

fn validate_owner_reference(reference: &Value, path: &Path, errors: &mut ErrorList) {
    let api_version = reference.text("apiVersion");
    if api_version.rsplit('/').next().unwrap_or("").is_empty() {
        errors.invalid(&path.child("apiVersion"), api_version, "version must not be empty");
    }
    for field in ["kind", "name", "uid"] {
        if reference.text(field).is_empty() {
            errors.invalid(&path.child(field), "", "must not be empty");
        }
    }
    if (api_version, reference.text("kind")) == ("v1", "Event") {
        errors.invalid(path, reference.clone(), "/v1, Kind=Event is disallowed from being an owner");
    }
}

pub fn validate_finalizers(finalizers: &Value, path: &Path, errors: &mut ErrorList) {
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

/// Validates finalizers of built-in kinds: standard ones or names with a domain prefix.
pub fn validate_builtin_finalizers(meta: &Value, path: &Path, errors: &mut ErrorList) {
    for (i, finalizer) in meta.items("finalizers").iter().filter_map(Value::as_str).enumerate() {
        if !finalizer.contains('/') && !STANDARD_FINALIZERS.contains(&finalizer) {
            let detail = "name is neither a standard finalizer name nor is it fully qualified";
            errors.invalid(&path.child("finalizers").index(i), finalizer, detail);
        }
    }
}

fn validate_no_new_finalizers(new: &Value, old: &Value, path: &Path, errors: &mut ErrorList) {
    let set = |meta: &Value| -> BTreeSet<String> {
        meta.items("finalizers").iter().filter_map(Value::as_str).map(quote).collect()
    };
    let added: Vec<String> = set(new).difference(&set(old)).cloned().collect();
    if !added.is_empty() {
        let list = added.join(", ");
        errors.forbidden(
            path,
            &format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{list}}}"
            ),
        );
    }
}

pub fn validate_managed_fields(entries: &Value, path: &Path, errors: &mut ErrorList) {
    for (i, entry) in entries.as_array().into_iter().flatten().enumerate() {
        let path = path.index(i);
        let operation = entry.text("operation");
        if !matches!(operation, "Apply" | "Update") {
            errors.invalid(&path.child("operation"), operation, "must be `Apply` or `Update`");
        }
        let fields_type = entry.text("fieldsType");
        if !matches!(fields_type, "" | "FieldsV1") {
            errors.invalid(&path.child("fieldsType"), fields_type, "must be `FieldsV1`");
        }
        validate_field_manager(entry.text("manager"), &path.child("manager"), errors);
        if entry.text("subresource").len() > 256 {
            errors.too_long(&path.child("subresource"), 256);
        }
    }
}

/// Validates the name of a field manager: length and printable characters.
pub fn validate_field_manager(manager: &str, path: &Path, errors: &mut ErrorList) {
    if manager.len() > MAX_FIELD_MANAGER_BYTES {
        return errors.too_long(path, MAX_FIELD_MANAGER_BYTES);
    }
    for (i, c) in manager.char_indices().filter(|(_, c)| !is_printable(*c)) {
        let detail = format!("invalid character U+{:04X} (at position {i})", u32::from(c));
        errors.invalid(path, manager, &detail);
    }
}

/// Validates a list of `metav1.Condition`.
pub fn validate_conditions(conditions: &Value, path: &Path, errors: &mut ErrorList) {
    let mut seen = BTreeSet::new();
    for (i, condition) in conditions.as_array().into_iter().flatten().enumerate() {
        let path = path.index(i);
        let kind = condition.text("type");
        if !seen.insert(kind) {
            errors.duplicate(&path.child("type"), kind);
        }
        validate_condition(condition, &path, errors);
    }
}

fn validate_condition(condition: &Value, path: &Path, errors: &mut ErrorList) {
    validate_label_name(condition.text("type"), &path.child("type"), errors);
    let status = condition.text("status");
    if !matches!(status, "True" | "False" | "Unknown") {
        errors.not_supported(&path.child("status"), status, &["False", "True", "Unknown"]);
    }
    if let Some(generation) = condition.int("observedGeneration").filter(|g| *g < 0) {
        errors.invalid(
            &path.child("observedGeneration"),
            generation,
            "must be greater than or equal to zero",
        );
    }
    if !condition.has("lastTransitionTime") {
        errors.required(&path.child("lastTransitionTime"), "");
    }
    match condition.text("reason") {
        "" => errors.required(&path.child("reason"), ""),
        reason => {
            errors.invalid_each(&path.child("reason"), reason, names::condition_reason(reason));
            if reason.len() > 1 << 10 {
                errors.too_long(&path.child("reason"), 1 << 10);
            }
        }
    }
    if condition.text("message").len() > 32 << 10 {
        errors.too_long(&path.child("message"), 32 << 10);
    }
}

/// Validates that a field does not change.
pub fn validate_immutable(new: &Value, old: &Value, path: &Path, errors: &mut ErrorList) {
    if !semantic_equal(new, old) {
        errors.invalid(path, new.clone(), "field is immutable");
    }
}

/// Whether two values are equal, where absent, null and empty lists and maps are equal
/// (`apiequality.Semantic`).
pub fn semantic_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let in_a = a.iter().all(|(key, value)| semantic_equal(value, b.get(key).unwrap_or(&Value::Null)));
            in_a && b.iter().all(|(key, value)| a.contains_key(key) || is_empty_value(value))
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| semantic_equal(a, b))
        }
        (a, b) => a == b || (is_empty_value(a) && is_empty_value(b)),
    }
}

fn is_empty_value(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Validates that a number is not negative.
pub fn validate_non_negative(value: &Value, path: &Path, errors: &mut ErrorList) {
    if value.as_i64().is_some_and(|number| number < 0) {
        errors.invalid(path, value.clone(), "must be greater than or equal to 0");
    }
}

#[cfg(test)]
mod tests;
