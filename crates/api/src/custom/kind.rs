//! The rules of a custom kind, which are those of its schema.

use serde_json::Value;

use super::{Form, Slot};
use crate::apiextensions::values;
use crate::field::{Errors, Path, Reason};
use crate::json::Json as _;
use crate::kind::Kind;
use crate::names;

const UNCHECKED: &str = "some validation rules were not checked because the object was invalid; correct the existing errors to complete validation";

impl Kind for Slot {
    fn prepare_create(&self, new: &mut Value) {
        if self.form().has_status {
            remove(new, "status");
        }
    }

    fn prepare_status(&self, new: &mut Value, _old: &Value) {
        if new.get("status").is_some_and(Value::is_null) {
            remove(new, "status");
        }
    }

    fn validate_create(&self, new: &Value, errors: &mut Errors) {
        let form = self.form();
        let root = Path::root();
        if !type_meta(&form, new, errors) {
            return;
        }
        values::check(&form.schema, new, &root, &form.patterns, errors);
        scale(&form, new, &["spec", "status"], errors);
        values::embedded(&form.schema, new, &root, errors);
        values::lists(&form.schema, new, &root, errors);
        rules(&form, new, None, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        let form = self.form();
        let root = Path::root();
        if !type_meta(&form, new, errors) {
            return;
        }
        values::check_change(&form.schema, new, old, &root, &form.patterns, errors);
        scale(&form, new, &["spec", "status"], errors);
        values::embedded(&form.schema, new, &root, errors);
        changed_lists(&form, new, old, errors);
        rules(&form, new, Some(old), errors);
    }

    fn validate_status(&self, new: &Value, old: &Value, errors: &mut Errors) {
        let form = self.form();
        if !type_meta(&form, new, errors) {
            return;
        }
        if let Some(status) = new.get("status") {
            let schema = form.schema.at("properties").at("status");
            let path = Path::new("status");
            let mut found = Errors::default();
            match old.get("status") {
                Some(old) => values::check_change(schema, status, old, &path, &form.patterns, &mut found),
                None => values::check(schema, status, &path, &form.patterns, &mut found),
            }
            errors.0.append(&mut found.0);
        }
        scale(&form, new, &["status"], errors);
        changed_lists(&form, new, old, errors);
        rules(&form, new, Some(old), errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let of = |object: &Value| -> Vec<String> {
            let list = object.at("metadata").items("finalizers");
            list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let known = old.map(of).unwrap_or_default();
        let mut added: Vec<String> = of(new).into_iter().filter(|name| !known.contains(name)).collect();
        added.sort();
        added.dedup();
        added.iter().flat_map(|name| finalizer(name)).collect()
    }
}

fn remove(object: &mut Value, name: &str) {
    if let Some(fields) = object.as_object_mut() {
        fields.remove(name);
    }
}

/// What an object says it is must be what the path says.
fn type_meta(form: &Form, object: &Value, errors: &mut Errors) -> bool {
    let before = errors.0.len();
    let expected = [("kind", form.kind.clone()), ("apiVersion", format!("{}/{}", form.group, form.version))];
    for (name, expected) in expected {
        let said = object.text(name);
        if said != expected {
            errors.invalid(&Path::new(name), said, &format!("must be {expected}"));
        }
    }
    errors.0.len() == before
}

/// Lists that had the same item twice before may keep it.
fn changed_lists(form: &Form, new: &Value, old: &Value, errors: &mut Errors) {
    let mut before = Errors::default();
    values::lists(&form.schema, old, &Path::root(), &mut before);
    if before.is_empty() {
        values::lists(&form.schema, new, &Path::root(), errors);
    }
}

/// The rules of the schema, unless they could meet what they do not expect.
fn rules(form: &Form, new: &Value, old: Option<&Value>, errors: &mut Errors) {
    let Some(rules) = &form.rules else { return };
    if is_blocked(errors) {
        errors.invalid(&Path::root(), Value::Null, UNCHECKED);
    } else {
        rules.check(&form.schema, new, old, errors);
    }
}

/// Whether rules could meet a value they do not expect.
fn is_blocked(errors: &Errors) -> bool {
    errors.0.iter().any(|error| {
        matches!(
            error.reason,
            Reason::NotSupported | Reason::Required | Reason::TooLong | Reason::TooMany | Reason::TypeInvalid
        )
    })
}

fn scale(form: &Form, object: &Value, parts: &[&str], errors: &mut Errors) {
    if let Some(scale) = &form.scale {
        scale.validate(object, parts, errors);
    }
}

/// Finalizers are not refused, only frowned upon.
fn finalizer(name: &str) -> Vec<String> {
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
