//! Custom kinds: rows of the table that CustomResourceDefinitions bring while the server runs.
//!
//! A [`Definition`] is what a CRD says, read without its schemas, which are many times larger than the rest
//! and only worked out ([`Form`]) when somebody writes or looks at an object of the kind. A row made of it has a [`Slot`] in
//! the place of a module with rules: the row stays the same as long as its names do, the slot always has the
//! definition that counts now.

mod accept;
mod columns;
mod definition;
mod form;
mod kind;
mod path;
pub(crate) mod rules;
mod scale;

use std::sync::{Arc, PoisonError, RwLock};

pub use accept::{CLEANUP, Names, TERMINATING, accepted, condition, is_true, set_condition, terminating};
pub use columns::CustomColumn;
pub use definition::{Conversion, Definition, Naming, Version};
pub use form::Form;
pub use scale::ScalePaths;

use crate::kind::Kind;
use crate::table::{Resource, SCALE, STATUS, Storage, Subresource, Verbs};

/// The part of a custom kind's row that changes while the server runs.
pub struct Slot {
    pub singular: &'static str,
    pub list_kind: &'static str,
    current: RwLock<Arc<Definition>>,
    version: &'static str,
}

impl Slot {
    /// What counts now.
    pub fn definition(&self) -> Arc<Definition> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set(&self, definition: Arc<Definition>) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = definition;
    }

    /// The schema and all that goes by it, in the version of the row.
    pub fn form(&self) -> Arc<Form> {
        self.definition().form(self.version)
    }
}

/// What makes a row of a custom kind another row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RowKey {
    pub group: String,
    pub version: String,
    pub namespaced: bool,
    pub naming: Naming,
    pub subresources: Vec<Subresource>,
}

impl RowKey {
    /// The rows a definition asks for, one for each version that is served, the preferred one first.
    pub fn of(definition: &Definition) -> Vec<RowKey> {
        let mut served: Vec<&Version> = definition.versions.iter().filter(|version| version.served).collect();
        served.sort_by(|a, b| crate::names::compare_versions(&b.name, &a.name));
        let key = |version: &Version| {
            let scale = version.scale.as_ref().map(|_| SCALE);
            let status = version.has_status.then_some(STATUS);
            RowKey {
                group: definition.group.clone(),
                version: version.name.clone(),
                namespaced: definition.namespaced,
                naming: definition.accepted.clone(),
                subresources: status.into_iter().chain(scale).collect(),
            }
        };
        served.into_iter().map(key).collect()
    }

    /// Makes the row. It lives as long as the program, since everything that a request touches refers to
    /// rows; there are as many as there ever were different names of kinds, and they are small.
    pub fn row(&self, definition: Arc<Definition>) -> &'static Resource {
        let text = |text: &str| -> &'static str { Box::leak(text.into()) };
        let texts = |texts: &[String]| -> &'static [&'static str] {
            Box::leak(texts.iter().map(|one| text(one)).collect())
        };
        let version = text(&self.version);
        let slot: &'static Slot = Box::leak(Box::new(Slot {
            singular: text(&self.naming.singular),
            list_kind: text(&self.naming.list_kind),
            current: RwLock::new(definition),
            version,
        }));
        Box::leak(Box::new(Resource {
            group: text(&self.group),
            version,
            kind: text(&self.naming.kind),
            plural: text(&self.naming.plural),
            short_names: texts(&self.naming.short_names),
            categories: texts(&self.naming.categories),
            namespaced: self.namespaced,
            verbs: Verbs::All,
            subresources: Box::leak(self.subresources.clone().into_boxed_slice()),
            storage: Storage::Own,
            generation: true,
            rules: slot as &dyn Kind,
            custom: Some(slot),
        }))
    }
}

#[cfg(test)]
mod tests;
