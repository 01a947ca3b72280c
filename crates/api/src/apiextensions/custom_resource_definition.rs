//! CustomResourceDefinition: a new row for the table of kinds, brought by a client.
//!
//! Upstream checks an older inner form, into which what all versions share is moved up: the schema that a
//! reader finds at `spec.versions[0].schema` is complained about as `spec.validation`. [`Shared`] keeps that
//! visible, since those paths are what people search the web for.

mod approval;
mod conversion;
mod field_path;
mod formats;
mod inner;
mod lists;
mod rules;
mod schema;
mod structural;
mod version;

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::custom;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::meta;
use crate::names;

const NAME_RULE: &str = "must be spec.names.plural+\".\"+spec.group";

pub struct CustomResourceDefinition;

impl Kind for CustomResourceDefinition {
    fn prepare_create(&self, new: &mut Value) {
        new.set("status", json!({}));
        remember_storage_version(new);
    }

    fn prepare_update(&self, new: &mut Value, _old: &Value) {
        remember_storage_version(new);
    }

    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let name = obj.at("metadata").text("name");
        let names = obj.path("spec.names");
        if name != format!("{}.{}", names.text("plural"), obj.at("spec").text("group")) {
            errors.invalid(&Path::new("metadata.name"), name, NAME_RULE);
        }
        definition(obj, None, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        // Once more, with an eye on what the stored object already had, in upstream's order.
        let note = Path::new("metadata.annotations").key(approval::APPROVED);
        errors.0.retain(|complaint| {
            let path = complaint.path.as_str();
            let of_name = path == "metadata.name" && complaint.message.ends_with(NAME_RULE);
            path.starts_with("metadata") && complaint.path != note && !of_name
        });
        definition(new, Some(old), errors);
    }

    fn validate_status(&self, new: &Value, _old: &Value, errors: &mut Errors) {
        accepted_names(new, errors);
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

/// The first request to delete a definition keeps it until all its objects are gone.
pub fn begin_deletion(crd: &mut Value, now: &Value) {
    let metadata = crd.object_mut("metadata");
    let finalizers = metadata.entry("finalizers").or_insert_with(|| json!([]));
    if let Some(finalizers) = finalizers.as_array_mut()
        && !finalizers.iter().any(|name| name == custom::CLEANUP)
    {
        finalizers.push(custom::CLEANUP.into());
    }
    let mut conditions = crd.at("status").items("conditions").to_vec();
    let pending = custom::condition(
        custom::TERMINATING,
        "True",
        "InstanceDeletionPending",
        "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
    );
    custom::set_condition(&mut conditions, pending, now.as_str().unwrap_or_default());
    crd.object_mut("status").insert("conditions".into(), Value::Array(conditions));
}

/// Objects may be stored in any version that ever was the storage version, so those are kept count of.
fn remember_storage_version(crd: &mut Value) {
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

/// A field of every version: in one place if it is the same in all of them, otherwise in each.
enum Shared<'a> {
    ByAll(&'a Value),
    Apart,
}

impl<'a> Shared<'a> {
    fn of(versions: &'a [Value], field: &str) -> Shared<'a> {
        let Some((first, rest)) = versions.split_first() else { return Shared::Apart };
        let same = |version: &Value| {
            let (one, other) = (first.at(field), version.at(field));
            one == other || is_empty(one) && is_empty(other)
        };
        if rest.iter().all(same) { Shared::ByAll(first.at(field)) } else { Shared::Apart }
    }

    /// The value shared by all, or null.
    fn by_all(&self) -> &'a Value {
        static NOTHING: Value = Value::Null;
        match self {
            Shared::ByAll(value) => value,
            Shared::Apart => &NOTHING,
        }
    }

    /// A version's own value, which is null where it has been moved up.
    fn own<'b>(&self, version: &'b Value, field: &str) -> &'b Value {
        static NOTHING: Value = Value::Null;
        match self {
            Shared::ByAll(_) => &NOTHING,
            Shared::Apart => version.at(field),
        }
    }
}

fn is_empty(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

fn definition(crd: &Value, old: Option<&Value>, errors: &mut Errors) {
    let (spec, path) = (crd.at("spec"), Path::new("spec"));
    specification(spec, &path, errors);
    if let Some(old) = old {
        let before = old.at("spec");
        let established = is_established(old);
        conversion::ca_bundle_update(spec, before, established, &path.at("conversion"), errors);
        let names = |spec: &Value, field: &str| Value::from(spec.at("names").text(field));
        if established {
            meta::immutable(
                &spec.text("scope").into(),
                &before.text("scope").into(),
                &path.at("scope"),
                errors,
            );
            meta::immutable(&names(spec, "kind"), &names(before, "kind"), &path.at("names.kind"), errors);
        }
        meta::immutable(&spec.text("group").into(), &before.text("group").into(), &path.at("group"), errors);
        meta::immutable(&names(spec, "plural"), &names(before, "plural"), &path.at("names.plural"), errors);
    }
    accepted_names(crd, errors);
    stored_versions(crd, errors);
    approval::approval(crd, old, errors);
    let old_preserved = old.is_some_and(|old| old.at("spec").flag("preserveUnknownFields"));
    if spec.flag("preserveUnknownFields") && !old_preserved {
        errors.invalid(
            &path.at("preserveUnknownFields"),
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

fn specification(spec: &Value, path: &Path, errors: &mut Errors) {
    group(spec.text("group"), &path.at("group"), errors);
    one_of(spec.text("scope"), &["Cluster", "Namespaced"], &path.at("scope"), errors);

    let versions = spec.items("versions");
    let schemas = Shared::of(versions, "schema");
    let subresources = Shared::of(versions, "subresources");
    let columns = Shared::of(versions, "additionalPrinterColumns");
    let selectable = Shared::of(versions, "selectableFields");
    let at_version = |i: usize| path.at("versions").index(i);

    for (i, version) in versions.iter().enumerate() {
        if !version.at("schema").has("openAPIV3Schema") {
            errors.required(&at_version(i).at("schema.openAPIV3Schema"), "");
        }
    }
    let preserve = spec.flag("preserveUnknownFields");
    let has_defaults =
        |version: &Value| schema::any(version.path("schema.openAPIV3Schema"), |s| s.has("default"));
    if preserve && versions.iter().any(has_defaults) {
        errors.invalid(
            &path.at("preserveUnknownFields"),
            true,
            "must be false in order to use defaults in the schema",
        );
    }
    let has_status = |version: &Value| version.at("subresources").has("status");
    for (i, version) in versions.iter().enumerate() {
        let path = at_version(i);
        let name = version.text("name");
        joined(names::dns1035_label(name), name, "", &path.at("name"), errors);
        version::deprecation(version, &path.at("deprecationWarning"), errors);
        let validation = schemas.own(version, "schema");
        schema::validation(validation, has_status(version), &path.at("schema"), errors);
        version::scale(subresources.own(version, "subresources"), &path.at("subresources"), errors);
        version::printer_columns(
            columns.own(version, "additionalPrinterColumns"),
            &path.at("additionalPrinterColumns"),
            errors,
        );
        version::selectable_fields(
            selectable.own(version, "selectableFields"),
            version.at("schema"),
            &path.at("selectableFields"),
            errors,
        );
    }
    version_list(versions, path, errors);

    let naming = spec.at("names");
    for field in ["plural", "singular", "kind", "listKind"] {
        if naming.text(field).is_empty() {
            errors.required(&path.at("names").at(field), "");
        }
    }
    resource_names(naming, &path.at("names"), errors);
    schema::validation(schemas.by_all(), versions.iter().any(has_status), &path.at("validation"), errors);
    version::scale(subresources.by_all(), &path.at("subresources"), errors);
    version::printer_columns(columns.by_all(), &path.at("additionalPrinterColumns"), errors);
    let first = versions.first().map_or(&Value::Null, |version| version.at("schema"));
    version::selectable_fields(selectable.by_all(), first, &path.at("selectableFields"), errors);

    let strategy = spec.at("conversion").text("strategy");
    if spec.has("conversion") && strategy != "None" && preserve {
        let path = path.at("conversion.strategy");
        errors.invalid(&path, strategy, "must be None if spec.preserveUnknownFields is true");
    }
    conversion::conversion(spec.at("conversion"), &path.at("conversion"), errors);
}

fn group(group: &str, path: &Path, errors: &mut Errors) {
    let messages = names::dns1123_subdomain(group);
    if group.is_empty() {
        errors.required(path, "");
    } else if !messages.is_empty() {
        errors.invalid(path, group, &messages.join(","));
    } else if !group.contains('.') {
        errors.invalid(path, group, "should be a domain with at least one dot");
    }
}

fn one_of(value: &str, known: &[&str], path: &Path, errors: &mut Errors) {
    if value.is_empty() {
        errors.required(path, "");
    } else if !known.contains(&value) {
        errors.not_supported(path, value, known);
    }
}

/// All that is wrong with a name as one complaint.
fn joined(messages: Vec<String>, value: &str, prefix: &str, path: &Path, errors: &mut Errors) {
    if !messages.is_empty() {
        errors.invalid(path, value, &format!("{prefix}{}", messages.join(",")));
    }
}

/// What holds for the versions taken together.
fn version_list(versions: &[Value], path: &Path, errors: &mut Errors) {
    let mut seen: Vec<&str> = versions.iter().map(|version| version.text("name")).collect();
    seen.sort_unstable();
    seen.dedup();
    let mut complain = |message: &str| {
        let shown = inner::versions(versions);
        let message = format!("Invalid value: {shown}: {message}");
        errors.push(crate::field::Reason::Invalid, &path.at("versions"), message);
    };
    if seen.len() != versions.len() {
        complain("must contain unique version names");
    }
    if versions.iter().filter(|version| version.flag("storage")).count() != 1 {
        complain("must have exactly one version marked as storage version");
    }
    // The inner form also keeps the first version's name by itself.
    if let Some(first) = versions.first().map(|version| version.text("name")).filter(|name| !name.is_empty())
    {
        joined(names::dns1035_label(first), first, "", &path.at("version"), errors);
    }
}

fn accepted_names(crd: &Value, errors: &mut Errors) {
    resource_names(crd.path("status.acceptedNames"), &Path::new("status.acceptedNames"), errors);
}

fn resource_names(given: &Value, path: &Path, errors: &mut Errors) {
    const MIXED_CASE: &str = "may have mixed case, but should otherwise match: ";
    for field in ["plural", "singular", "kind", "listKind"] {
        let value = given.text(field);
        if value.is_empty() {
            continue;
        }
        let mixed = matches!(field, "kind" | "listKind");
        let (label, prefix) = if mixed { (value.to_lowercase(), MIXED_CASE) } else { (value.to_owned(), "") };
        joined(names::dns1035_label(&label), value, prefix, &path.at(field), errors);
    }
    let labels = |field: &str, errors: &mut Errors| {
        for (i, item) in given.items(field).iter().enumerate() {
            let label = item.as_str().unwrap_or("");
            joined(names::dns1035_label(label), label, "", &path.at(field).index(i), errors);
        }
    };
    labels("shortNames", errors);
    if !given.text("kind").is_empty() && given.text("kind") == given.text("listKind") {
        errors.invalid(&path.at("listKind"), given.text("listKind"), "kind and listKind may not be the same");
    }
    labels("categories", errors);
}

fn stored_versions(crd: &Value, errors: &mut Errors) {
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
