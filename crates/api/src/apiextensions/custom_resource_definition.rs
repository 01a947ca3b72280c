//! CustomResourceDefinition: REST strategy and validation.
//!
//! Upstream validates the internal version, where a field that is equal in all versions moves to the
//! top level: an error in `spec.versions[0].schema` is reported at `spec.validation`. [`PerVersion`]
//! reproduces this, because users search the web for these paths.

mod approval;
mod cel_rules;
mod conversion;
mod field_path;
mod formats;
mod internal_format;
mod lists;
mod schema;
mod structural;
mod version;

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::custom;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta;
use crate::names;
use crate::strategy::RestStrategy;

const NAME_RULE: &str = "must be spec.names.plural+\".\"+spec.group";

pub struct CustomResourceDefinition;

impl RestStrategy for CustomResourceDefinition {
    fn prepare_for_create(&self, new: &mut Value) {
        new.set("status", json!({}));
        add_stored_version(new);
    }

    fn prepare_for_update(&self, new: &mut Value, _old: &Value) {
        add_stored_version(new);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let name = obj.at("metadata").text("name");
        let names = obj.path("spec.names");
        if name != format!("{}.{}", names.text("plural"), obj.at("spec").text("group")) {
            errors.invalid(&Path::new("metadata.name"), name, NAME_RULE);
        }
        validate_definition(obj, None, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        // Validates again with the old object, in upstream's order. Only the errors of the first pass
        // about metadata are kept, which the second pass does not repeat.
        let annotation_path = Path::new("metadata.annotations").key(approval::APPROVAL_ANNOTATION);
        errors.0.retain(|error| {
            let path = error.path.as_str();
            let is_name_error = path == "metadata.name" && error.message.ends_with(NAME_RULE);
            path.starts_with("metadata") && error.path != annotation_path && !is_name_error
        });
        validate_definition(new, Some(old), errors);
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        validate_accepted_names(new, errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let known = old.map(formats::unrecognized_formats).unwrap_or_default();
        formats::unrecognized_formats(new)
            .into_iter()
            .filter(|format| !known.contains(format))
            .map(|format| format!("unrecognized format {}", Value::from(format)))
            .collect()
    }
}

/// Adds the cleanup finalizer and the Terminating condition on the first delete request.
pub fn begin_deletion(crd: &mut Value, now: &Value) {
    let metadata = crd.object_mut("metadata");
    let finalizers = metadata.entry("finalizers").or_insert_with(|| json!([]));
    if let Some(finalizers) = finalizers.as_array_mut()
        && !finalizers.iter().any(|name| name == custom::CLEANUP_FINALIZER)
    {
        finalizers.push(custom::CLEANUP_FINALIZER.into());
    }
    let mut conditions = crd.at("status").items("conditions").to_vec();
    let pending = custom::new_condition(
        custom::TERMINATING_CONDITION,
        "True",
        "InstanceDeletionPending",
        "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
    );
    custom::set_condition(&mut conditions, pending, now.as_str().unwrap_or_default());
    crd.object_mut("status").insert("conditions".into(), Value::Array(conditions));
}

/// Adds the storage version to `status.storedVersions`: objects may still be stored in any former
/// storage version.
fn add_stored_version(crd: &mut Value) {
    let storage = crd.at("spec").items("versions").iter().find(|version| version.flag("storage"));
    let Some(name) = storage.map(|version| version.text("name").to_owned()) else { return };
    let status = crd.object_mut("status");
    let stored = status.entry("storedVersions").or_insert(Value::Null);
    if !stored.is_array() {
        *stored = json!([]);
    }
    if let Some(list) = stored.as_array_mut()
        && !list.iter().any(|version| version == name.as_str())
    {
        list.push(name.into());
    }
}

/// A field of all versions: either equal in all of them (at the top level of the internal version) or
/// kept per version.
enum PerVersion<'a> {
    Shared(&'a Value),
    Distinct,
}

impl<'a> PerVersion<'a> {
    fn from_versions(versions: &'a [Value], field: &str) -> PerVersion<'a> {
        let Some((first, rest)) = versions.split_first() else { return PerVersion::Distinct };
        let same = |version: &Value| {
            let (one, other) = (first.at(field), version.at(field));
            one == other || is_empty(one) && is_empty(other)
        };
        if rest.iter().all(same) { PerVersion::Shared(first.at(field)) } else { PerVersion::Distinct }
    }

    /// The value common to all versions, or null.
    fn shared_value(&self) -> &'a Value {
        static NULL: Value = Value::Null;
        match self {
            PerVersion::Shared(value) => value,
            PerVersion::Distinct => &NULL,
        }
    }

    /// The value of a single version; null if it has moved to the top level.
    fn version_value<'b>(&self, version: &'b Value, field: &str) -> &'b Value {
        static NULL: Value = Value::Null;
        match self {
            PerVersion::Shared(_) => &NULL,
            PerVersion::Distinct => version.at(field),
        }
    }
}

fn is_empty(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

fn validate_definition(crd: &Value, old: Option<&Value>, errors: &mut ErrorList) {
    let (spec, path) = (crd.at("spec"), Path::new("spec"));
    validate_spec(spec, &path, errors);
    if let Some(old) = old {
        let before = old.at("spec");
        let established = is_established(old);
        conversion::validate_ca_bundle_update(spec, before, established, &path.child("conversion"), errors);
        let names = |spec: &Value, field: &str| Value::from(spec.at("names").text(field));
        if established {
            meta::validate_immutable(
                &spec.text("scope").into(),
                &before.text("scope").into(),
                &path.child("scope"),
                errors,
            );
            meta::validate_immutable(
                &names(spec, "kind"),
                &names(before, "kind"),
                &path.child("names.kind"),
                errors,
            );
        }
        meta::validate_immutable(
            &spec.text("group").into(),
            &before.text("group").into(),
            &path.child("group"),
            errors,
        );
        meta::validate_immutable(
            &names(spec, "plural"),
            &names(before, "plural"),
            &path.child("names.plural"),
            errors,
        );
    }
    validate_accepted_names(crd, errors);
    validate_stored_versions(crd, errors);
    approval::validate_approval(crd, old, errors);
    let old_preserved = old.is_some_and(|old| old.at("spec").flag("preserveUnknownFields"));
    if spec.flag("preserveUnknownFields") && !old_preserved {
        errors.invalid(
            &path.child("preserveUnknownFields"),
            true,
            "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema instead",
        );
    }
}

fn is_established(crd: &Value) -> bool {
    crd.at("status")
        .items("conditions")
        .iter()
        .any(|condition| condition.text("type") == "Established" && condition.text("status") == "True")
}

fn validate_spec(spec: &Value, path: &Path, errors: &mut ErrorList) {
    validate_group(spec.text("group"), &path.child("group"), errors);
    required_one_of(spec.text("scope"), &["Cluster", "Namespaced"], &path.child("scope"), errors);

    let versions = spec.items("versions");
    let schemas = PerVersion::from_versions(versions, "schema");
    let subresources = PerVersion::from_versions(versions, "subresources");
    let columns = PerVersion::from_versions(versions, "additionalPrinterColumns");
    let selectable = PerVersion::from_versions(versions, "selectableFields");
    let at_version = |i: usize| path.child("versions").index(i);

    for (i, version) in versions.iter().enumerate() {
        if !version.at("schema").has("openAPIV3Schema") {
            errors.required(&at_version(i).child("schema.openAPIV3Schema"), "");
        }
    }
    let preserve = spec.flag("preserveUnknownFields");
    let has_defaults =
        |version: &Value| schema::any_schema(version.path("schema.openAPIV3Schema"), |s| s.has("default"));
    if preserve && versions.iter().any(has_defaults) {
        errors.invalid(
            &path.child("preserveUnknownFields"),
            true,
            "must be false in order to use defaults in the schema",
        );
    }
    let has_status = |version: &Value| version.at("subresources").has("status");
    for (i, version) in versions.iter().enumerate() {
        let path = at_version(i);
        let name = version.text("name");
        invalid_joined(names::dns1035_label(name), name, "", &path.child("name"), errors);
        version::validate_deprecation(version, &path.child("deprecationWarning"), errors);
        let validation = schemas.version_value(version, "schema");
        schema::validate_version_schema(validation, has_status(version), &path.child("schema"), errors);
        version::validate_scale(
            subresources.version_value(version, "subresources"),
            &path.child("subresources"),
            errors,
        );
        version::validate_printer_columns(
            columns.version_value(version, "additionalPrinterColumns"),
            &path.child("additionalPrinterColumns"),
            errors,
        );
        version::validate_selectable_fields(
            selectable.version_value(version, "selectableFields"),
            version.at("schema"),
            &path.child("selectableFields"),
            errors,
        );
    }
    validate_versions(versions, path, errors);

    let names = spec.at("names");
    for field in ["plural", "singular", "kind", "listKind"] {
        if names.text(field).is_empty() {
            errors.required(&path.child("names").child(field), "");
        }
    }
    validate_resource_names(names, &path.child("names"), errors);
    schema::validate_version_schema(
        schemas.shared_value(),
        versions.iter().any(has_status),
        &path.child("validation"),
        errors,
    );
    version::validate_scale(subresources.shared_value(), &path.child("subresources"), errors);
    version::validate_printer_columns(
        columns.shared_value(),
        &path.child("additionalPrinterColumns"),
        errors,
    );
    let first = versions.first().map_or(&Value::Null, |version| version.at("schema"));
    version::validate_selectable_fields(
        selectable.shared_value(),
        first,
        &path.child("selectableFields"),
        errors,
    );

    let strategy = spec.at("conversion").text("strategy");
    if spec.has("conversion") && strategy != "None" && preserve {
        let path = path.child("conversion.strategy");
        errors.invalid(&path, strategy, "must be None if spec.preserveUnknownFields is true");
    }
    conversion::validate_conversion(spec.at("conversion"), &path.child("conversion"), errors);
}

fn validate_group(group: &str, path: &Path, errors: &mut ErrorList) {
    let messages = names::dns1123_subdomain(group);
    if group.is_empty() {
        errors.required(path, "");
    } else if !messages.is_empty() {
        errors.invalid(path, group, &messages.join(","));
    } else if !group.contains('.') {
        errors.invalid(path, group, "should be a domain with at least one dot");
    }
}

fn required_one_of(value: &str, known: &[&str], path: &Path, errors: &mut ErrorList) {
    if value.is_empty() {
        errors.required(path, "");
    } else if !known.contains(&value) {
        errors.not_supported(path, value, known);
    }
}

/// Reports all messages of a name check as a single error.
fn invalid_joined(messages: Vec<String>, value: &str, prefix: &str, path: &Path, errors: &mut ErrorList) {
    if !messages.is_empty() {
        errors.invalid(path, value, &format!("{prefix}{}", messages.join(",")));
    }
}

/// Validates the list of versions as a whole.
fn validate_versions(versions: &[Value], path: &Path, errors: &mut ErrorList) {
    let mut seen: Vec<&str> = versions.iter().map(|version| version.text("name")).collect();
    seen.sort_unstable();
    seen.dedup();
    let mut report = |message: &str| {
        let rendered = internal_format::format_versions(versions);
        let message = format!("Invalid value: {rendered}: {message}");
        errors.push(crate::field::ErrorType::Invalid, &path.child("versions"), message);
    };
    if seen.len() != versions.len() {
        report("must contain unique version names");
    }
    if versions.iter().filter(|version| version.flag("storage")).count() != 1 {
        report("must have exactly one version marked as storage version");
    }
    // The internal version also has the name of the first version as `spec.version`.
    if let Some(first) = versions.first().map(|version| version.text("name")).filter(|name| !name.is_empty())
    {
        invalid_joined(names::dns1035_label(first), first, "", &path.child("version"), errors);
    }
}

fn validate_accepted_names(crd: &Value, errors: &mut ErrorList) {
    validate_resource_names(crd.path("status.acceptedNames"), &Path::new("status.acceptedNames"), errors);
}

fn validate_resource_names(given: &Value, path: &Path, errors: &mut ErrorList) {
    const MIXED_CASE: &str = "may have mixed case, but should otherwise match: ";
    for field in ["plural", "singular", "kind", "listKind"] {
        let value = given.text(field);
        if value.is_empty() {
            continue;
        }
        let mixed = matches!(field, "kind" | "listKind");
        let (label, prefix) = if mixed { (value.to_lowercase(), MIXED_CASE) } else { (value.to_owned(), "") };
        invalid_joined(names::dns1035_label(&label), value, prefix, &path.child(field), errors);
    }
    let labels = |field: &str, errors: &mut ErrorList| {
        for (i, item) in given.items(field).iter().enumerate() {
            let label = item.as_str().unwrap_or("");
            invalid_joined(names::dns1035_label(label), label, "", &path.child(field).index(i), errors);
        }
    };
    labels("shortNames", errors);
    if !given.text("kind").is_empty() && given.text("kind") == given.text("listKind") {
        errors.invalid(
            &path.child("listKind"),
            given.text("listKind"),
            "kind and listKind may not be the same",
        );
    }
    labels("categories", errors);
}

fn validate_stored_versions(crd: &Value, errors: &mut ErrorList) {
    let path = Path::new("status.storedVersions");
    let stored = crd.at("status").items("storedVersions");
    if stored.is_empty() {
        errors.invalid(&path, Value::Null, "must have at least one stored version");
        return;
    }
    let versions = crd.at("spec").items("versions");
    let served: HashSet<&str> = versions.iter().map(|version| version.text("name")).collect();
    for version in versions.iter().filter(|version| version.flag("storage")) {
        if !stored.contains(version.at("name")) {
            let message = format!("must have the storage version {}", version.text("name"));
            errors.invalid(&path, stored.to_vec(), &message);
        }
    }
    for (i, name) in stored.iter().enumerate() {
        let v = name.as_str().unwrap_or("");
        if !served.contains(v) {
            let message = format!(
                "missing from spec.versions; {v} was previously a storage version, and must remain in spec.versions until a storage migration ensures no data remains persisted in {v} and removes {v} from status.storedVersions"
            );
            errors.invalid(&path.index(i), v, &message);
        }
    }
}
