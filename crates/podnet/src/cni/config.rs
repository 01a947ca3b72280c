//! Loads CNI network configurations from a directory.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::CniError;

/// `CHECK` was introduced in this version of the specification.
const MIN_CHECK_VERSION: [u64; 3] = [0, 4, 0];

/// A network: a list of plugins that run in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    pub name: String,
    pub version: String,
    /// The configuration of each plugin, with its `type`.
    pub plugins: Vec<Value>,
    disable_check: bool,
}

/// Loads the first valid network of a directory, sorted by file name; `None` if there is none. As in
/// other runtimes, invalid files are skipped if a valid one follows; otherwise the first error is
/// returned.
pub fn load(dir: &Path, except: &[&str]) -> Result<Option<Network>, CniError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(CniError::Read { path: dir.to_owned(), source }),
    };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    let mut broken = None;
    for path in files {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !matches!(extension, Some("conf" | "conflist" | "json")) || except.contains(&name) {
            continue;
        }
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(source) => {
                broken.get_or_insert(CniError::Read { path, source });
                continue;
            }
        };
        match Network::parse(&text) {
            Ok(network) => return Ok(Some(network)),
            Err(reason) => drop(broken.get_or_insert(CniError::Config { path, reason })),
        }
    }
    broken.map_or(Ok(None), Err)
}

impl Network {
    /// Parses a plugin list or a single plugin configuration.
    pub fn parse(text: &str) -> Result<Network, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let word = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        let plugins = match (value.get("plugins"), value.get("type")) {
            (Some(Value::Array(plugins)), _) => plugins.clone(),
            (Some(_), _) => return Err("'plugins' is not a list".to_owned()),
            (None, Some(_)) => vec![value.clone()],
            (None, None) => return Err("no 'plugins' key".to_owned()),
        };
        if plugins.is_empty() {
            return Err("no plugins in list".to_owned());
        }
        for plugin in &plugins {
            let name = plugin["type"].as_str().unwrap_or_default();
            // The name is joined to the plugin directories and must not lead out of them.
            if name.is_empty() || name.contains('/') || name == ".." {
                return Err("missing 'type'".to_owned());
            }
        }
        let name = word("name");
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        if name.is_empty()
            || !name.chars().all(is_plain)
            || !name.starts_with(|c: char| c.is_ascii_alphanumeric())
        {
            return Err(format!("invalid network name {name:?}"));
        }
        let version = Some(word("cniVersion")).filter(|version| !version.is_empty());
        let disable_check = match &value["disableCheck"] {
            Value::String(text) => text == "true",
            other => other.as_bool().unwrap_or(false),
        };
        Ok(Network { name, version: version.unwrap_or_else(|| "0.1.0".to_owned()), plugins, disable_check })
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "name": self.name, "cniVersion": self.version, "plugins": self.plugins, "disableCheck": self.disable_check,
        })
    }

    pub(super) fn supports_check(&self) -> bool {
        let mut parts = self.version.split('.').map(|part| part.parse().unwrap_or(0));
        let version = [(); 3].map(|()| parts.next().unwrap_or(0));
        !self.disable_check && version >= MIN_CHECK_VERSION
    }
}
