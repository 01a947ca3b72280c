//! Networks that the administrator has set up in CNI's words: their programs do the work, by CNI's specification.
//!
//! A network is a list of programs, each of which is told what the one before it has done ([`Network`]). What came of
//! it is kept in a file, so that it can be undone as it was done, whatever has become of the configuration since. Read
//! [`Programs::add`].

mod config;
mod run;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

pub use config::{Network, load};

/// Why a network of CNI's does not work.
#[derive(Debug, thiserror::Error)]
pub enum CniError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("error parsing configuration {}: {why}", path.display())]
    Config { path: PathBuf, why: String },
    #[error("failed to find plugin {name:?} in path {dirs:?}")]
    NoPlugin { name: String, dirs: Vec<PathBuf> },
    #[error("plugin type={name:?} failed ({command}): {why}")]
    Failed { name: String, command: String, why: String },
    #[error("plugin type={name:?} failed ({command}): no answer within {seconds} s")]
    Late { name: String, command: String, seconds: u64 },
}

/// Whose network it is about.
#[derive(Clone, Debug)]
pub struct RuntimeConf<'a> {
    pub id: &'a str,
    /// None for one that is gone already.
    pub namespace: Option<PathBuf>,
    /// `NAME=value`, for programs that want to know more.
    pub args: Vec<(String, String)>,
    /// What is wanted of those programs that can do it, by name: `portMappings`, `bandwidth`.
    pub capabilities: Map<String, Value>,
}

/// Where programs are, and where is written down what they have done.
#[derive(Clone, Debug)]
pub struct CniPlugins {
    pub dirs: Vec<PathBuf>,
    pub cache: PathBuf,
}

/// Before the names of files that are being written.
const PARTIAL_PREFIX: &str = ".";

/// What is written down of an attachment.
struct CachedAttachment {
    network: Network,
    args: Vec<(String, String)>,
    capabilities: Map<String, Value>,
    /// Null for one that was never finished.
    result: Value,
}

impl CniPlugins {
    /// Attaches; answers with the addresses. What fails is undone, now or by a later [`Programs::delete`].
    pub fn add(&self, network: &Network, runtime_conf: &RuntimeConf<'_>) -> Result<Vec<IpAddr>, CniError> {
        // Before anything is done: whoever is killed in the middle must be able to undo it.
        self.write_cache(network, runtime_conf, &Value::Null)?;
        let mut previous = Value::Null;
        for plugin in &network.plugins {
            match run::invoke(self, network, plugin, "ADD", runtime_conf, &previous) {
                Ok(result) => previous = result,
                Err(error) => {
                    self.rollback(network, runtime_conf, &Value::Null);
                    return Err(error);
                }
            }
        }
        if let Err(error) = self.write_cache(network, runtime_conf, &previous) {
            self.rollback(network, runtime_conf, &previous);
            return Err(error);
        }
        Ok(addresses(&previous))
    }

    /// Undoes what could not be done as a whole. What cannot be undone stays written down.
    fn rollback(&self, network: &Network, runtime_conf: &RuntimeConf<'_>, result: &Value) {
        if self.run_delete(network, runtime_conf, result).is_ok() {
            let _ = fs::remove_file(self.cache_path(runtime_conf.id));
        }
    }

    /// As CNI's own library does, so that other programs understand it. A result that is not known yet is left out.
    fn write_cache(
        &self,
        network: &Network,
        runtime_conf: &RuntimeConf<'_>,
        result: &Value,
    ) -> Result<(), CniError> {
        let mut record = json!({
            "kind": "cniCacheV1", "containerId": runtime_conf.id, "ifName": crate::POD_INTERFACE, "networkName": network.name,
            "config": network.json(), "cniArgs": runtime_conf.args, "capabilityArgs": runtime_conf.capabilities,
        });
        if !result.is_null() {
            record["result"] = result.clone();
        }
        // Under its name as a whole or not at all.
        let (path, partial) = (self.cache_path(runtime_conf.id), self.partial_path(runtime_conf.id));
        let written = fs::create_dir_all(&self.cache)
            .and_then(|()| fs::write(&partial, record.to_string()))
            .and_then(|()| File::open(&partial)?.sync_all())
            .and_then(|()| fs::rename(&partial, &path));
        written.map_err(|source| CniError::Write { path, source })
    }

    /// Whether it still is as it was made.
    pub fn check(&self, id: &str, namespace: &Path) -> Result<(), CniError> {
        let Some(cached) = self.cached(id) else { return Ok(()) };
        // Nothing is known of one that was never finished.
        if !cached.network.supports_check() || cached.result.is_null() {
            return Ok(());
        }
        let runtime_conf = cached.runtime_conf(id, Some(namespace.to_owned()));
        for plugin in &cached.network.plugins {
            run::invoke(self, &cached.network, plugin, "CHECK", &runtime_conf, &cached.result)?;
        }
        Ok(())
    }

    /// Undoes what was done; nothing where nothing was.
    pub fn delete(&self, id: &str, namespace: Option<PathBuf>) -> Result<(), CniError> {
        if let Some(cached) = self.cached(id) {
            self.run_delete(&cached.network, &cached.runtime_conf(id, namespace), &cached.result)?;
            let _ = fs::remove_file(self.cache_path(id));
        }
        let _ = fs::remove_file(self.partial_path(id));
        Ok(())
    }

    /// The ids of all that are attached, or may be, by what was written down.
    pub fn cached_ids(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.cache).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let ids = names.map(|name| name.strip_prefix(PARTIAL_PREFIX).unwrap_or(&name).to_owned());
        ids.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn run_delete(
        &self,
        network: &Network,
        runtime_conf: &RuntimeConf<'_>,
        result: &Value,
    ) -> Result<(), CniError> {
        for plugin in network.plugins.iter().rev() {
            run::invoke(self, network, plugin, "DEL", runtime_conf, result)?;
        }
        Ok(())
    }

    fn cache_path(&self, id: &str) -> PathBuf {
        self.cache.join(id)
    }

    fn partial_path(&self, id: &str) -> PathBuf {
        self.cache.join(format!("{PARTIAL_PREFIX}{id}"))
    }

    fn cached(&self, id: &str) -> Option<CachedAttachment> {
        let value: Value = serde_json::from_slice(&fs::read(self.cache_path(id)).ok()?).ok()?;
        Some(CachedAttachment {
            network: Network::parse(&value["config"].to_string()).ok()?,
            args: serde_json::from_value(value["cniArgs"].clone()).ok()?,
            capabilities: value["capabilityArgs"].as_object().cloned().unwrap_or_default(),
            result: value["result"].clone(),
        })
    }
}

impl CachedAttachment {
    fn runtime_conf<'a>(&self, id: &'a str, namespace: Option<PathBuf>) -> RuntimeConf<'a> {
        RuntimeConf { id, namespace, args: self.args.clone(), capabilities: self.capabilities.clone() }
    }
}

/// The addresses of a result, as the versions have them.
fn addresses(result: &Value) -> Vec<IpAddr> {
    let listed = result["ips"].as_array().into_iter().flatten().map(|ip| &ip["address"]);
    // Before 0.3.0.
    let old = ["ip4", "ip6"].into_iter().map(|family| &result[family]["ip"]);
    let strings = listed.chain(old).filter_map(Value::as_str);
    strings.filter_map(|text| text.split('/').next()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests;
