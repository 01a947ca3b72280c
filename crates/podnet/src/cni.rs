//! Networks that the administrator has set up in CNI's words: their programs do the work, by CNI's specification.
//!
//! A network is a list of programs, each of which is told what the one before it has done ([`Network`]). What came of
//! it is kept in a file, so that it can be undone as it was done, whatever has become of the configuration since. Read
//! [`Programs::add`].

mod config;
mod run;

use std::fs;
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
pub struct Attached<'a> {
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
pub struct Programs {
    pub dirs: Vec<PathBuf>,
    pub cache: PathBuf,
}

/// What is written down of an attachment.
struct Cached {
    network: Network,
    args: Vec<(String, String)>,
    capabilities: Map<String, Value>,
    result: Value,
}

impl Programs {
    /// Attaches; answers with the addresses. What fails is undone.
    pub fn add(&self, network: &Network, to: &Attached<'_>) -> Result<Vec<IpAddr>, CniError> {
        let mut previous = Value::Null;
        for plugin in &network.plugins {
            match run::program(self, network, plugin, "ADD", to, &previous) {
                Ok(result) => previous = result,
                Err(error) => {
                    let _ = self.undo(network, to, &Value::Null);
                    return Err(error);
                }
            }
        }
        let path = self.file(to.id);
        let kept = json!({
            "kind": "cniCacheV1", "containerId": to.id, "ifName": crate::INSIDE, "networkName": network.name,
            "config": network.json(), "cniArgs": to.args, "capabilityArgs": to.capabilities, "result": previous,
        });
        let written = fs::create_dir_all(&self.cache).and_then(|()| fs::write(&path, kept.to_string()));
        if let Err(source) = written {
            let _ = self.undo(network, to, &previous);
            return Err(CniError::Write { path, source });
        }
        Ok(addresses(&previous))
    }

    /// Whether it still is as it was made.
    pub fn check(&self, id: &str, namespace: &Path) -> Result<(), CniError> {
        let Some(cached) = self.cached(id) else { return Ok(()) };
        if !cached.network.can_be_checked() {
            return Ok(());
        }
        let to = cached.attached(id, Some(namespace.to_owned()));
        for plugin in &cached.network.plugins {
            run::program(self, &cached.network, plugin, "CHECK", &to, &cached.result)?;
        }
        Ok(())
    }

    /// Undoes what was done; nothing where nothing was.
    pub fn delete(&self, id: &str, namespace: Option<PathBuf>) -> Result<(), CniError> {
        let Some(cached) = self.cached(id) else { return Ok(()) };
        self.undo(&cached.network, &cached.attached(id, namespace), &cached.result)?;
        let _ = fs::remove_file(self.file(id));
        Ok(())
    }

    /// The ids of all that are attached, by what was written down.
    pub fn attached(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.cache).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    fn undo(&self, network: &Network, to: &Attached<'_>, result: &Value) -> Result<(), CniError> {
        for plugin in network.plugins.iter().rev() {
            run::program(self, network, plugin, "DEL", to, result)?;
        }
        Ok(())
    }

    fn file(&self, id: &str) -> PathBuf {
        self.cache.join(id)
    }

    fn cached(&self, id: &str) -> Option<Cached> {
        let value: Value = serde_json::from_slice(&fs::read(self.file(id)).ok()?).ok()?;
        Some(Cached {
            network: Network::parse(&value["config"].to_string()).ok()?,
            args: serde_json::from_value(value["cniArgs"].clone()).ok()?,
            capabilities: value["capabilityArgs"].as_object().cloned().unwrap_or_default(),
            result: value["result"].clone(),
        })
    }
}

impl Cached {
    fn attached<'a>(&self, id: &'a str, namespace: Option<PathBuf>) -> Attached<'a> {
        Attached { id, namespace, args: self.args.clone(), capabilities: self.capabilities.clone() }
    }
}

/// The addresses of a result, as the versions have them.
fn addresses(result: &Value) -> Vec<IpAddr> {
    let listed = result["ips"].as_array().into_iter().flatten().map(|ip| &ip["address"]);
    // Before 0.3.0.
    let old = ["ip4", "ip6"].into_iter().map(|family| &result[family]["ip"]);
    let texts = listed.chain(old).filter_map(Value::as_str);
    texts.filter_map(|text| text.split('/').next()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests;
