//! The served resources: the enabled rows of `api::RESOURCES`, and the rows of custom resources.
//!
//! The custom rows are replaced as one list. Lookups of built-in rows do not touch it.

use std::collections::HashMap;
use std::sync::Arc;

use api::Resource;
use api::custom::{CustomResourceKey, Definition};
use api::resource_table::Storage;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use crate::cache::REGISTRY_PREFIX;

pub struct Registry {
    rows: Vec<&'static Resource>,
    custom: RwLock<Arc<CustomRows>>,
    /// All custom rows ever created: rows are leaked, so a resource that is defined again reuses
    /// its row.
    row_cache: Mutex<HashMap<CustomResourceKey, &'static Resource>>,
    /// Counts the changes of the custom rows.
    changes: watch::Sender<u64>,
}

/// The served custom resources.
#[derive(Default)]
struct CustomRows {
    rows: Vec<&'static Resource>,
    by_plural: HashMap<&'static str, Vec<&'static Resource>>,
}

#[derive(Debug, thiserror::Error, PartialEq)]
pub enum RuntimeConfigError {
    #[error(
        "invalid runtime-config entry {0:?}: must be group/version[/resource]=true|false or api/all|ga=true|false"
    )]
    Syntax(String),
    #[error("invalid runtime-config entry {0:?}: unknown group and version")]
    Unknown(String),
}

impl Registry {
    /// `runtime_config` are upstream's `--runtime-config` entries: `batch/v1=false`,
    /// `api/all=true`, `apps/v1/deployments=false`. Later entries take precedence.
    pub fn new(runtime_config: &[String]) -> Result<Registry, RuntimeConfigError> {
        let mut rows: Vec<(&'static Resource, bool)> = api::RESOURCES.iter().map(|row| (row, true)).collect();
        for entry in runtime_config {
            let syntax_error = || RuntimeConfigError::Syntax(entry.clone());
            let (name, value) = entry.split_once('=').unwrap_or((entry, "true"));
            let on: bool = value.parse().map_err(|_| syntax_error())?;
            let parts: Vec<&str> = name.split('/').collect();
            let matches = |row: &Resource| match parts.as_slice() {
                ["api", "all" | "ga"] => Some(true),
                ["api", "beta" | "alpha"] => Some(false),
                ["v1"] | ["api", "v1"] => Some(row.group.is_empty()),
                [group, version] => Some(row.group == *group && row.version == *version),
                [group, version, plural] => {
                    Some(row.group == *group && row.version == *version && row.plural == *plural)
                }
                _ => None,
            };
            let mut found = name == "api/beta" || name == "api/alpha";
            for (row, enabled) in &mut rows {
                if matches(row).ok_or_else(syntax_error)? {
                    *enabled = on;
                    found = true;
                }
            }
            if !found {
                return Err(RuntimeConfigError::Unknown(entry.clone()));
            }
        }
        Ok(Registry {
            rows: rows.into_iter().filter(|(_, on)| *on).map(|(row, _)| row).collect(),
            custom: RwLock::default(),
            row_cache: Mutex::default(),
            changes: watch::Sender::new(0),
        })
    }

    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<&'static Resource> {
        let is =
            |row: &&'static Resource| row.plural == plural && row.group == group && row.version == version;
        let built_in = self.rows.iter().copied().find(is);
        built_in.or_else(|| self.custom.read().by_plural.get(plural)?.iter().copied().find(is))
    }

    /// All rows, built-in ones first.
    pub fn rows(&self) -> Vec<&'static Resource> {
        [self.rows.as_slice(), &self.custom.read().rows].concat()
    }

    /// The stored resources, each once.
    pub fn stored(&self) -> impl Iterator<Item = &'static Resource> {
        let mut seen: Option<(&str, &str)> = None;
        self.rows().into_iter().filter(move |row| {
            // The versions of a custom resource are adjacent and share one storage.
            let is_duplicate = row.custom.is_some() && seen == Some((row.group, row.plural));
            seen = Some((row.group, row.plural));
            row.storage == Storage::Own && !is_duplicate
        })
    }

    /// Whether a built-in resource has that name. Definitions cannot take it.
    pub fn is_built_in(&self, group: &str, plural: &str) -> bool {
        api::RESOURCES.iter().any(|row| row.group == group && row.plural == plural)
    }

    /// The rows of a definition, updated to it.
    pub fn rows_of(&self, definition: &Arc<Definition>) -> Vec<&'static Resource> {
        let mut row_cache = self.row_cache.lock();
        let mut rows = Vec::new();
        for key in CustomResourceKey::from_definition(definition) {
            let row = *row_cache.entry(key).or_insert_with_key(|key| key.to_resource(definition.clone()));
            if let Some(crd) = row.custom {
                crd.set_definition(definition.clone());
            }
            rows.push(row);
        }
        rows
    }

    /// Replaces the served custom resources.
    pub fn set_custom_rows(&self, rows: impl Iterator<Item = &'static Resource>) {
        let mut custom = CustomRows { rows: rows.collect(), by_plural: HashMap::new() };
        for row in &custom.rows {
            custom.by_plural.entry(row.plural).or_default().push(row);
        }
        *self.custom.write() = Arc::new(custom);
        self.changes.send_modify(|count| *count += 1);
    }

    /// Notifies of changes to the custom rows.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

/// The row of the version in which objects of `row` are stored.
pub fn stored_as(row: &'static Resource) -> &'static Resource {
    match row.storage {
        Storage::StoredAs(group, version, plural) => api::RESOURCES
            .iter()
            .find(|other| other.group == group && other.version == version && other.plural == plural)
            .expect("the storage row of a resource is in the resource table"),
        _ => row,
    }
}

/// The store's key prefix for objects of `row`, with a trailing slash.
pub fn prefix(row: &'static Resource) -> String {
    let row = stored_as(row);
    if row.group.is_empty() {
        format!("{REGISTRY_PREFIX}{}/", row.plural)
    } else {
        format!("{REGISTRY_PREFIX}{}/{}/", row.group, row.plural)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry_with(runtime_config: &[&str]) -> Result<Registry, RuntimeConfigError> {
        Registry::new(&runtime_config.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn runtime_config_disables_groups_versions_and_resources() {
        let registry = registry_with(&["batch/v1=false", "apps/v1/deployments=false"]).unwrap();
        assert!(registry.find("batch", "v1", "jobs").is_none());
        assert!(registry.find("apps", "v1", "deployments").is_none());
        assert!(registry.find("apps", "v1", "replicasets").is_some());
        let only_core = registry_with(&["api/all=false", "v1=true"]).unwrap();
        assert!(only_core.rows().iter().all(|row| row.group.is_empty()));
        assert!(matches!(registry_with(&["nope/v1=true"]), Err(RuntimeConfigError::Unknown(_))));
        assert!(matches!(registry_with(&["batch/v1=maybe"]), Err(RuntimeConfigError::Syntax(_))));
    }

    #[test]
    fn every_row_has_a_storage_prefix() {
        for row in api::RESOURCES {
            assert!(prefix(row).starts_with(REGISTRY_PREFIX) && prefix(row).ends_with('/'), "{}", row.plural);
        }
    }
}
