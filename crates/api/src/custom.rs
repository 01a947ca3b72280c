//! Custom resources: rows of the resource table that CustomResourceDefinitions add at run time.
//!
//! A [`Definition`] is a CRD decoded without its schemas, which are many times larger than the rest. A
//! schema is compiled ([`VersionSchema`]) when objects of the kind are first read or written. The row
//! of a custom resource has a [`CrdHandle`] as its strategy: the row is constant as long as the names
//! are, and the handle always refers to the current definition (ADR 0012).

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
    CLEANUP_FINALIZER, TERMINATING_CONDITION, UsedNames, accept_names, is_condition_true, new_condition,
    set_condition, terminating_condition,
};
pub use printer_columns::CustomColumn;
pub use scale::ScalePaths;
pub use version_schema::VersionSchema;

use crate::resource_table::{Resource, SCALE, STATUS, Storage, Subresource, Verbs};
use crate::strategy::RestStrategy;

/// The mutable part of a custom resource's row.
pub struct CrdHandle {
    pub singular: &'static str,
    pub list_kind: &'static str,
    current: RwLock<Arc<Definition>>,
    version: &'static str,
}

impl CrdHandle {
    /// The current definition.
    pub fn definition(&self) -> Arc<Definition> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set_definition(&self, definition: Arc<Definition>) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = definition;
    }

    /// The compiled schema of the row's version.
    pub fn version_schema(&self) -> Arc<VersionSchema> {
        self.definition().version_schema(self.version)
    }
}

/// The properties of a custom resource that its row contains. A change of one needs a new row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CustomResourceKey {
    pub group: String,
    pub version: String,
    pub namespaced: bool,
    pub names: CrdNames,
    pub subresources: Vec<Subresource>,
}

impl CustomResourceKey {
    /// The rows of a definition: one per served version, the preferred version first.
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

    /// Creates the row. It is leaked, because requests keep `'static` references to rows. The number of
    /// rows is bounded by the number of distinct names of CRDs, and rows are small.
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
