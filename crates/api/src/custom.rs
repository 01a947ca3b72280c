//! Custom kinds: rows of the table that CustomResourceDefinitions bring while the server runs.
//!
//! A [`Definition`] is what a CRD says, read without its schemas, which are many times larger than the rest
//! and only worked out ([`Form`]) when somebody writes or looks at an object of the kind. A row made of it has a [`Slot`] in
//! the place of a module with rules: the row stays the same as long as its names do, the slot always has the
//! definition that counts now.

mod definition;
mod json_path;
mod names_accepted;
mod printer_columns;
mod scale;
mod strategy;
pub(crate) mod validation_rules;
mod version_schema;

use std::sync::{Arc, PoisonError, RwLock};

pub use definition::{Conversion, CrdNames, Definition, Version};
pub use names_accepted::{
    CLEANUP_FINALIZER, TERMINATING_CONDITION, UsedNames, accept_names, is_true, new_condition, set_condition,
    terminating_condition,
};
pub use printer_columns::CustomColumn;
pub use scale::ScalePaths;
pub use version_schema::VersionSchema;

use crate::resource_table::{Resource, SCALE, STATUS, Storage, Subresource, Verbs};
use crate::strategy::RestStrategy;

/// The part of a custom kind's row that changes while the server runs.
pub struct CrdHandle {
    pub singular: &'static str,
    pub list_kind: &'static str,
    current: RwLock<Arc<Definition>>,
    version: &'static str,
}

impl CrdHandle {
    /// What counts now.
    pub fn definition(&self) -> Arc<Definition> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set(&self, definition: Arc<Definition>) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = definition;
    }

    /// The schema and all that goes by it, in the version of the row.
    pub fn version_schema(&self) -> Arc<VersionSchema> {
        self.definition().version_schema(self.version)
    }
}

/// What makes a row of a custom kind another row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CustomResourceKey {
    pub group: String,
    pub version: String,
    pub namespaced: bool,
    pub names: CrdNames,
    pub subresources: Vec<Subresource>,
}

impl CustomResourceKey {
    /// The rows a definition asks for, one for each version that is served, the preferred one first.
    pub fn from_definition(definition: &Definition) -> Vec<CustomResourceKey> {
        let mut served: Vec<&Version> = definition.versions.iter().filter(|version| version.served).collect();
        served.sort_by(|a, b| crate::names::compare_versions(&b.name, &a.name));
        let key = |version: &Version| {
            let scale = version.scale.as_ref().map(|_| SCALE);
            let status = version.has_status.then_some(STATUS);
            CustomResourceKey {
                group: definition.group.clone(),
                version: version.name.clone(),
                namespaced: definition.namespaced,
                names: definition.accepted_names.clone(),
                subresources: status.into_iter().chain(scale).collect(),
            }
        };
        served.into_iter().map(key).collect()
    }

    /// Makes the row. It lives as long as the program, since everything that a request touches refers to
    /// rows; there are as many as there ever were different names of kinds, and they are small.
    pub fn to_resource(&self, definition: Arc<Definition>) -> &'static Resource {
        let leak_str = |leak_str: &str| -> &'static str { Box::leak(leak_str.into()) };
        let leak_list = |leak_list: &[String]| -> &'static [&'static str] {
            Box::leak(leak_list.iter().map(|one| leak_str(one)).collect())
        };
        let version = leak_str(&self.version);
        let handle: &'static CrdHandle = Box::leak(Box::new(CrdHandle {
            singular: leak_str(&self.names.singular),
            list_kind: leak_str(&self.names.list_kind),
            current: RwLock::new(definition),
            version,
        }));
        Box::leak(Box::new(Resource {
            group: leak_str(&self.group),
            version,
            kind: leak_str(&self.names.kind),
            plural: leak_str(&self.names.plural),
            short_names: leak_list(&self.names.short_names),
            categories: leak_list(&self.names.categories),
            namespaced: self.namespaced,
            verbs: Verbs::All,
            subresources: Box::leak(self.subresources.clone().into_boxed_slice()),
            storage: Storage::Own,
            generation: true,
            strategy: handle as &dyn RestStrategy,
            custom: Some(handle),
        }))
    }
}

#[cfg(test)]
mod tests;
