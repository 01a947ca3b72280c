//! The table of built-in kinds. Routes, discovery, OpenAPI paths, storage keys, RBAC names and columns all
//! derive from its rows.

use crate::kind::Kind;

/// One row: a resource in one group and version.
pub struct Resource {
    /// `""` for core.
    pub group: &'static str,
    pub version: &'static str,
    pub kind: &'static str,
    pub plural: &'static str,
    pub singular: &'static str,
    pub short_names: &'static [&'static str],
    pub categories: &'static [&'static str],
    pub namespaced: bool,
    pub verbs: Verbs,
    pub subresources: &'static [Subresource],
    /// Where the object is stored when not under its own group and version's rules: rows of the same
    /// stored kind (Events, HPA) share `storage` and convert on the way in and out.
    pub storage: Storage,
    /// `metadata.generation` counts changes to anything but metadata and status.
    pub generation: bool,
    /// The definition name of the type, `io.k8s.api.core.v1.Pod`.
    pub type_name: &'static str,
    pub rules: &'static dyn Kind,
}

/// The verbs of the main resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbs {
    /// create delete deletecollection get list patch update watch
    All,
    /// All but deletecollection (namespaces, services before 1.23).
    NoDeleteCollection,
    /// Reviews: create and nothing stored.
    CreateOnly,
    /// componentstatuses.
    GetList,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subresource {
    pub name: &'static str,
    /// The group and version of `kind` where they are not the row's, as in `autoscaling/v1 Scale`.
    pub group_version: Option<(&'static str, &'static str)>,
    pub kind: &'static str,
    pub verbs: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Under `/registry/<group?>/<plural>/`, this version being the stored one.
    Own,
    /// Stored as this other row: (group, version, plural).
    As(&'static str, &'static str, &'static str),
    /// Never stored (reviews).
    None,
}

pub static RESOURCES: &[Resource] = &[];
