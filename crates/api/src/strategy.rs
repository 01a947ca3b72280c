//! What is special about a kind. Everything ordinary (metadata, generation, status separation, deletion)
//! is done once, in `apiserver`.

use serde_json::Value;

use crate::field::ErrorList;

/// The rules of one kind; a table row points at one of these. The defaults suit a kind without rules.
///
/// Objects come in with their shape checked and their defaults set (see `defaults`).
pub trait RestStrategy: Sync {
    /// Brings an object into the shape the rules expect, before validation: drops what a client may not
    /// set, fills in what follows from other fields. For kinds that do the same on create and on update.
    fn prepare(&self, _new: &mut Value) {}

    /// The same for a new object; `status` has already been removed where the kind has a status
    /// subresource.
    fn prepare_for_create(&self, new: &mut Value) {
        self.prepare(new);
    }

    /// Nodes register themselves with their status; for every other kind a new object starts without one.
    fn keeps_status_on_create(&self) -> bool {
        false
    }

    /// The same for an update; `new.status` has already been set to `old.status` where the kind has a
    /// status subresource.
    fn prepare_for_update(&self, new: &mut Value, _old: &Value) {
        self.prepare(new);
    }

    /// The same for an update through `/status`; `new` has the old spec.
    fn prepare_for_status_update(&self, _new: &mut Value, _old: &Value) {}

    /// The rules every object of the kind keeps, on create and update alike. Metadata is checked by the
    /// caller, except for what only this kind asks of it.
    fn validate(&self, _obj: &Value, _errors: &mut ErrorList) {}

    /// What only a new object must keep. Called after `validate` on a create.
    fn validate_create(&self, _new: &Value, _errors: &mut ErrorList) {}

    /// What may not change. Called after `validate` on an update of the main resource.
    fn validate_update(&self, _new: &Value, _old: &Value, _errors: &mut ErrorList) {}

    /// The rules for an update through `/status`; `new` has the old spec.
    fn validate_status_update(&self, _new: &Value, _old: &Value, _errors: &mut ErrorList) {}

    /// How `metadata.name` is checked.
    fn name_format(&self) -> NameFormat {
        NameFormat::Subdomain
    }

    /// Fields besides `metadata.name` and `metadata.namespace` that a field selector may name, with the
    /// object's value for each. Must name the same fields for every object, `Value::Null` included.
    fn selectable_fields(&self, _obj: &Value) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// What the version that is stored calls a field that can be selected by.
    fn stored_field<'n>(&self, name: &'n str) -> &'n str {
        name
    }

    /// Words for the `Warning` header, such as use of a deprecated field.
    fn warnings(&self, _new: &Value, _old: Option<&Value>) -> Vec<String> {
        Vec::new()
    }
}

/// The name formats upstream checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameFormat {
    /// RFC 1123 subdomain, 253 characters.
    Subdomain,
    /// RFC 1123 label, 63 characters.
    Label,
    /// RFC 1035 label, 63 characters: starts with a letter.
    Label1035,
    /// Any string that is one path segment (RBAC names).
    PathSegment,
}

/// A kind without rules of its own.
pub struct DefaultStrategy;

impl RestStrategy for DefaultStrategy {}
