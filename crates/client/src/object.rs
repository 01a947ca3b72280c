//! Properties that all typed objects have: path, key and revision.

use std::fmt;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::{ClusterResourceScope, Metadata, NamespaceResourceScope, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A typed API object.
pub trait Object:
    Resource<Scope: Scope>
    + Metadata<Ty = ObjectMeta>
    + Clone
    + fmt::Debug
    + PartialEq
    + Serialize
    + DeserializeOwned
    + Send
    + Sync
    + 'static
{
    fn name(&self) -> &str {
        self.metadata().name.as_deref().unwrap_or_default()
    }

    /// `""` for cluster-scoped objects.
    fn namespace(&self) -> &str {
        self.metadata().namespace.as_deref().unwrap_or_default()
    }

    fn uid(&self) -> &str {
        self.metadata().uid.as_deref().unwrap_or_default()
    }

    fn key(&self) -> Key {
        Key::new(self.namespace(), self.name())
    }

    fn is_deleting(&self) -> bool {
        self.metadata().deletion_timestamp.is_some()
    }

    fn label(&self, name: &str) -> Option<&str> {
        self.metadata().labels.as_ref()?.get(name).map(String::as_str)
    }

    fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata().annotations.as_ref()?.get(name).map(String::as_str)
    }

    /// The owner reference with `controller: true`.
    fn controller(&self) -> Option<&OwnerReference> {
        controller_of(self.metadata())
    }

    fn revision(&self) -> u64 {
        revision_of(self.metadata())
    }
}

impl<T> Object for T where
    T: Resource<Scope: Scope>
        + Metadata<Ty = ObjectMeta>
        + Clone
        + fmt::Debug
        + PartialEq
        + Serialize
        + DeserializeOwned
        + Send
        + Sync
        + 'static
{
}

/// Whether a resource is namespaced.
pub trait Scope {
    const NAMESPACED: bool;
}

impl Scope for NamespaceResourceScope {
    const NAMESPACED: bool = true;
}

impl Scope for ClusterResourceScope {
    const NAMESPACED: bool = false;
}

/// The namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// `""` for cluster-scoped objects.
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl Key {
    pub fn new(namespace: &str, name: &str) -> Key {
        Key { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.namespace {
            "" => f.write_str(&self.name),
            namespace => write!(f, "{namespace}/{}", self.name),
        }
    }
}

/// The owner reference with `controller: true`.
pub fn controller_of(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata.owner_references.as_ref()?.iter().find(|owner| owner.controller == Some(true))
}

/// The resourceVersion as a number. 0 if there is none.
pub fn revision_of(metadata: &ObjectMeta) -> u64 {
    metadata.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// The path of a collection, in one namespace unless `namespace` is `""`.
pub fn collection_path<T: Object>(namespace: &str) -> String {
    let root = if T::GROUP.is_empty() { "/api" } else { "/apis" };
    let (version, plural) = (T::API_VERSION, T::URL_PATH_SEGMENT);
    match <T::Scope as Scope>::NAMESPACED && !namespace.is_empty() {
        true => format!("{root}/{version}/namespaces/{namespace}/{plural}"),
        false => format!("{root}/{version}/{plural}"),
    }
}

/// The path of one object.
pub fn object_path<T: Object>(key: &Key) -> String {
    format!("{}/{}", collection_path::<T>(&key.namespace), key.name)
}
