//! The kinds this server serves: the rows of `api::RESOURCES` that are switched on, and those of custom kinds.
//!
//! Custom rows come and go as one list that is replaced; nobody looks at it who finds a built-in row.

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
    /// Every custom row there ever was: a kind that comes back gets its row back.
    row_cache: Mutex<HashMap<CustomResourceKey, &'static Resource>>,
    /// Counts how often the custom rows have changed.
    changes: watch::Sender<u64>,
}

/// The custom kinds that are served now.
#[derive(Default)]
struct CustomRows {
    rows: Vec<&'static Resource>,
    by_plural: HashMap<&'static str, Vec<&'static Resource>>,
}

#[derive(Debug, thiserror::Error, PartialEq)]
pub enum RuntimeConfigError {
    #[error(
        "runtime-config {0:?} is not of the form group/version[/resource]=true|false or api/all|ga=true|false"
    )]
    Syntax(String),
    #[error("runtime-config {0:?} names no known group and version")]
    Unknown(String),
}

impl Registry {
    /// `switches` are upstream's `--runtime-config` entries: `batch/v1=false`, `api/all=true`,
    /// `apps/v1/deployments=false`. Later entries win over earlier ones.
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

    /// The stored kinds, each once.
    pub fn stored(&self) -> impl Iterator<Item = &'static Resource> {
        let mut seen: Option<(&str, &str)> = None;
        self.rows().into_iter().filter(move |row| {
            // The versions of a custom kind stand side by side and are stored as one.
            let is_duplicate = row.custom.is_some() && seen == Some((row.group, row.plural));
            seen = Some((row.group, row.plural));
            row.storage == Storage::Own && !is_duplicate
        })
    }

    /// Whether there is a built-in kind of that name, which no definition can take.
    pub fn is_built_in(&self, group: &str, plural: &str) -> bool {
        api::RESOURCES.iter().any(|row| row.group == group && row.plural == plural)
    }

    /// The rows of a definition, which from now on go by it.
    pub fn rows_of(&self, definition: &Arc<Definition>) -> Vec<&'static Resource> {
        let mut row_cache = self.row_cache.lock();
        let mut rows = Vec::new();
        for key in CustomResourceKey::from_definition(definition) {
            let row = *row_cache.entry(key).or_insert_with_key(|key| key.to_resource(definition.clone()));
            if let Some(crd) = row.custom {
                crd.set(definition.clone());
            }
            rows.push(row);
        }
        rows
    }

    /// Serves these custom kinds and no others.
    pub fn set_custom_rows(&self, rows: impl Iterator<Item = &'static Resource>) {
        let mut custom = CustomRows { rows: rows.collect(), by_plural: HashMap::new() };
        for row in &custom.rows {
            custom.by_plural.entry(row.plural).or_default().push(row);
        }
        *self.custom.write() = Arc::new(custom);
        self.changes.send_modify(|count| *count += 1);
    }

    /// Tells when custom rows come, go or change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

/// The row in whose form objects of `row` are stored.
pub fn stored_as(row: &'static Resource) -> &'static Resource {
    match row.storage {
        Storage::StoredAs(group, version, plural) => api::RESOURCES
            .iter()
            .find(|other| other.group == group && other.version == version && other.plural == plural)
            .expect("the table names an existing row as storage"),
        _ => row,
    }
}

/// The store's prefix for objects of `row`, with a slash at the end.
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
