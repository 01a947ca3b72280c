//! The REST strategy of a kind. Behaviour common to all kinds (metadata, generation, status separation,
//! deletion) is in `apiserver`. Upstream: `registry/rest` strategies.

use serde_json::Value;

use crate::field::ErrorList;

/// The kind-specific rules, to which a row of the resource table refers. The defaults suit a kind
/// without rules.
///
/// Objects have been decoded and defaulted (see `defaults`).
pub trait RestStrategy: Sync {
    /// Prepares an object for validation: drops fields that clients must not set, and sets fields
    /// derived from others. For kinds that do the same on create and update.
    fn prepare(&self, _new: &mut Value) {}

    /// Prepares a new object. `status` has already been removed if the kind has a status subresource.
    fn prepare_for_create(&self, new: &mut Value) {
        self.prepare(new);
    }

    /// Whether a new object keeps its status. Only Nodes do: they register with their status.
    fn keeps_status_on_create(&self) -> bool {
        false
    }

    /// Prepares an update. `new.status` has already been set to `old.status` if the kind has a status
    /// subresource.
    fn prepare_for_update(&self, new: &mut Value, _old: &Value) {
        self.prepare(new);
    }

    /// Prepares an update through `/status`. `new` has the old spec.
    fn prepare_for_status_update(&self, _new: &mut Value, _old: &Value) {}

    /// Validates an object on create and update. The caller validates metadata, except for
    /// kind-specific rules.
    fn validate(&self, _obj: &Value, _errors: &mut ErrorList) {}

    /// Additional validation of a new object. Called after `validate`.
    fn validate_create(&self, _new: &Value, _errors: &mut ErrorList) {}

    /// Additional validation of an update of the main resource, such as immutable fields. Called after
    /// `validate`.
    fn validate_update(&self, _new: &Value, _old: &Value, _errors: &mut ErrorList) {}

    /// Validates an update through `/status`. `new` has the old spec.
    fn validate_status_update(&self, _new: &Value, _old: &Value, _errors: &mut ErrorList) {}

    /// The format of `metadata.name`.
    fn name_format(&self) -> NameFormat {
        NameFormat::Subdomain
    }

    /// The selectable fields besides `metadata.name` and `metadata.namespace` with their values. The
    /// names must be the same for all objects, including `Value::Null`.
    fn selectable_fields(&self, _obj: &Value) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// The name of a selectable field in the storage version.
    fn stored_field<'n>(&self, name: &'n str) -> &'n str {
        name
    }

    /// The texts for the `Warning` header, such as deprecations.
    fn warnings(&self, _new: &Value, _old: Option<&Value>) -> Vec<String> {
        Vec::new()
    }
}

/// The formats of object names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameFormat {
    /// RFC 1123 subdomain, up to 253 characters.
    Subdomain,
    /// RFC 1123 label, up to 63 characters.
    Label,
    /// RFC 1035 label, up to 63 characters: starts with a letter.
    Label1035,
    /// Any string that is a single path segment (RBAC names).
    PathSegment,
}

/// The strategy of kinds without rules.
pub struct DefaultStrategy;

impl RestStrategy for DefaultStrategy {}
