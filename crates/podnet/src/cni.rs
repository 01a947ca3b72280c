//! Networks configured by the administrator's CNI plugins.
//!
//! A network is a list of plugins; each receives the result of the one before it ([`Network`]). The
//! attachment is cached in a file with its configuration and result, so that `DEL` runs with the
//! configuration that `ADD` had, even if the configuration directory has changed since. Start reading
//! at [`CniPlugins::add`].
//!
//! Upstream: `libcni` in github.com/containernetworking/cni.

mod config;
mod run;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

pub use config::{Network, load};

/// An error of a CNI operation.
#[derive(Debug, thiserror::Error)]
pub enum CniError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("error parsing configuration {}: {reason}", path.display())]
    Config { path: PathBuf, reason: String },
    #[error("failed to find plugin {name:?} in path {dirs:?}")]
    NoPlugin { name: String, dirs: Vec<PathBuf> },
    #[error("plugin type={name:?} failed ({command}): {reason}")]
    Failed { name: String, command: String, reason: String },
    #[error("plugin type={name:?} failed ({command}): timed out after {seconds} s")]
    Late { name: String, command: String, seconds: u64 },
}

/// The container that an operation is about, as `RuntimeConf` in libcni.
#[derive(Clone, Debug)]
pub struct RuntimeConf<'a> {
    pub id: &'a str,
    /// `None` if the namespace does not exist any more.
    pub namespace: Option<PathBuf>,
    /// `CNI_ARGS`, as `NAME=value`.
    pub args: Vec<(String, String)>,
    /// Capability arguments by name (`portMappings`, `bandwidth`), for plugins that declare the
    /// capability.
    pub capabilities: Map<String, Value>,
}

/// The plugin directories and the directory of cached attachments.
#[derive(Clone, Debug)]
pub struct CniPlugins {
    pub dirs: Vec<PathBuf>,
    pub cache: PathBuf,
}

/// The prefix of files that are being written.
const PARTIAL_PREFIX: &str = ".";

/// A cached attachment.
struct CachedAttachment {
    network: Network,
    args: Vec<(String, String)>,
    capabilities: Map<String, Value>,
    /// Null if `ADD` was not completed.
    result: Value,
}

impl CniPlugins {
    /// Runs `ADD` and returns the addresses. After a failure the attachment is removed again, now or by
    /// a later [`CniPlugins::delete`].
    pub fn add(&self, network: &Network, runtime_conf: &RuntimeConf<'_>) -> Result<Vec<IpAddr>, CniError> {
        // The cache entry is written first, so that an `ADD` that is interrupted by a crash can be
        // deleted.
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

    /// Deletes a failed attachment. If that fails, too, the cache entry stays for a later
    /// [`CniPlugins::delete`].
    fn rollback(&self, network: &Network, runtime_conf: &RuntimeConf<'_>, result: &Value) {
        if self.run_delete(network, runtime_conf, result).is_ok() {
            let _ = fs::remove_file(self.cache_path(runtime_conf.id));
        }
    }

    /// Writes the cache entry in libcni's format. A null result is left out.
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
        // Write to a temporary file and rename it: the entry must never be partial.
        let (path, partial) = (self.cache_path(runtime_conf.id), self.partial_path(runtime_conf.id));
        let written = fs::create_dir_all(&self.cache)
            .and_then(|()| fs::write(&partial, record.to_string()))
            .and_then(|()| File::open(&partial)?.sync_all())
            .and_then(|()| fs::rename(&partial, &path));
        written.map_err(|source| CniError::Write { path, source })
    }

    /// Runs `CHECK` on the attachment.
    pub fn check(&self, id: &str, namespace: &Path) -> Result<(), CniError> {
        let Some(cached) = self.cached(id) else { return Ok(()) };
        // An attachment that was not completed has no result to check.
        if !cached.network.supports_check() || cached.result.is_null() {
            return Ok(());
        }
        let runtime_conf = cached.runtime_conf(id, Some(namespace.to_owned()));
        for plugin in &cached.network.plugins {
            run::invoke(self, &cached.network, plugin, "CHECK", &runtime_conf, &cached.result)?;
        }
        Ok(())
    }

    /// Runs `DEL`. Does nothing if there is no attachment.
    pub fn delete(&self, id: &str, namespace: Option<PathBuf>) -> Result<(), CniError> {
        if let Some(cached) = self.cached(id) {
            self.run_delete(&cached.network, &cached.runtime_conf(id, namespace), &cached.result)?;
            let _ = fs::remove_file(self.cache_path(id));
        }
        let _ = fs::remove_file(self.partial_path(id));
        Ok(())
    }

    /// The IDs of all containers that are attached or may be, according to the cache.
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

/// The addresses in a result, in the format of any CNI version.
fn addresses(result: &Value) -> Vec<IpAddr> {
    let listed = result["ips"].as_array().into_iter().flatten().map(|ip| &ip["address"]);
    // The format before CNI 0.3.0.
    let old = ["ip4", "ip6"].into_iter().map(|family| &result[family]["ip"]);
    let strings = listed.chain(old).filter_map(Value::as_str);
    strings.filter_map(|text| text.split('/').next()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests;
