//! The REST strategy of custom resources: validation by their schema.

use serde_json::Value;

use super::{CrdHandle, VersionSchema};
use crate::apiextensions::values;
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt as _;
use crate::names;
use crate::strategy::RestStrategy;

const RULES_NOT_CHECKED: &str = "some validation rules were not checked because the object was invalid; correct the existing errors to complete validation";

impl RestStrategy for CrdHandle {
    fn prepare_for_create(&self, new: &mut Value) {
        if self.version_schema().has_status {
            remove_field(new, "status");
        }
    }

    fn prepare_for_status_update(&self, new: &mut Value, _old: &Value) {
        if new.get("status").is_some_and(Value::is_null) {
            remove_field(new, "status");
        }
    }

    fn validate_create(&self, new: &Value, errors: &mut ErrorList) {
        let version_schema = self.version_schema();
        let root = Path::root();
        if !validate_type_meta(&version_schema, new, errors) {
            return;
        }
        values::validate_value(&version_schema.schema, new, &root, &version_schema.patterns, errors);
        validate_scale(&version_schema, new, &["spec", "status"], errors);
        values::validate_embedded(&version_schema.schema, new, &root, errors);
        values::validate_lists(&version_schema.schema, new, &root, errors);
        validate_rules(&version_schema, new, None, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let version_schema = self.version_schema();
        let root = Path::root();
        if !validate_type_meta(&version_schema, new, errors) {
            return;
        }
        values::validate_value_update(
            &version_schema.schema,
            new,
            old,
            &root,
            &version_schema.patterns,
            errors,
        );
        validate_scale(&version_schema, new, &["spec", "status"], errors);
        values::validate_embedded(&version_schema.schema, new, &root, errors);
        validate_changed_lists(&version_schema, new, old, errors);
        validate_rules(&version_schema, new, Some(old), errors);
    }

    fn validate_status_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let version_schema = self.version_schema();
        if !validate_type_meta(&version_schema, new, errors) {
            return;
        }
        if let Some(status) = new.get("status") {
            let schema = version_schema.schema.at("properties").at("status");
            let path = Path::new("status");
            let mut found = ErrorList::default();
            match old.get("status") {
                Some(old) => values::validate_value_update(
                    schema,
                    status,
                    old,
                    &path,
                    &version_schema.patterns,
                    &mut found,
                ),
                None => values::validate_value(schema, status, &path, &version_schema.patterns, &mut found),
            }
            errors.0.append(&mut found.0);
        }
        validate_scale(&version_schema, new, &["status"], errors);
        validate_changed_lists(&version_schema, new, old, errors);
        validate_rules(&version_schema, new, Some(old), errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let finalizers = |object: &Value| -> Vec<String> {
            let list = object.at("metadata").items("finalizers");
            list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let old_finalizers = old.map(finalizers).unwrap_or_default();
        let mut added: Vec<String> =
            finalizers(new).into_iter().filter(|name| !old_finalizers.contains(name)).collect();
        added.sort();
        added.dedup();
        added.iter().flat_map(|name| finalizer_warnings(name)).collect()
    }
}

fn remove_field(object: &mut Value, name: &str) {
    if let Some(fields) = object.as_object_mut() {
        fields.remove(name);
    }
}

/// Validates that type and version of the object are those of the request path.
fn validate_type_meta(version_schema: &VersionSchema, object: &Value, errors: &mut ErrorList) -> bool {
    let error_count = errors.0.len();
    let expected = [
        ("kind", version_schema.kind.clone()),
        ("apiVersion", format!("{}/{}", version_schema.group, version_schema.version)),
    ];
    for (name, expected) in expected {
        let actual = object.text(name);
        if actual != expected {
            errors.invalid(&Path::new(name), actual, &format!("must be {expected}"));
        }
    }
    errors.0.len() == error_count
}

/// Validates the uniqueness of list items, unless the old object violates it, too.
fn validate_changed_lists(version_schema: &VersionSchema, new: &Value, old: &Value, errors: &mut ErrorList) {
    let mut old_errors = ErrorList::default();
    values::validate_lists(&version_schema.schema, old, &Path::root(), &mut old_errors);
    if old_errors.is_empty() {
        values::validate_lists(&version_schema.schema, new, &Path::root(), errors);
    }
}

/// Evaluates the CEL rules, unless earlier errors prevent this.
fn validate_rules(version_schema: &VersionSchema, new: &Value, old: Option<&Value>, errors: &mut ErrorList) {
    let Some(rules) = &version_schema.rules else { return };
    if blocks_rules(errors) {
        errors.invalid(&Path::root(), Value::Null, RULES_NOT_CHECKED);
    } else {
        rules.check(&version_schema.schema, new, old, errors);
    }
}

/// Whether an error of these types may have left values that CEL rules do not expect.
fn blocks_rules(errors: &ErrorList) -> bool {
    errors.0.iter().any(|error| {
        matches!(
            error.error_type,
            ErrorType::NotSupported
                | ErrorType::Required
                | ErrorType::TooLong
                | ErrorType::TooMany
                | ErrorType::TypeInvalid
        )
    })
}

fn validate_scale(version_schema: &VersionSchema, object: &Value, parts: &[&str], errors: &mut ErrorList) {
    if let Some(scale) = &version_schema.scale {
        scale.validate(object, parts, errors);
    }
}

/// Invalid finalizers only cause a warning.
fn finalizer_warnings(name: &str) -> Vec<String> {
    const PATH: &str = "metadata.finalizers";
    let mut warnings: Vec<String> =
        names::qualified_name(name).iter().map(|word| format!("{PATH}: {name:?}: {word}")).collect();
    if !name.contains('/') && !matches!(name, "orphan" | "foregroundDeletion" | "kubernetes") {
        let path = if name.contains('.') { " including a path (/)" } else { "" };
        warnings.push(format!(
            "{PATH}: {name:?}: prefer a domain-qualified finalizer name{path} to avoid accidental conflicts with other finalizer writers"
        ));
    }
    warnings
}
