//! Devices by the names their vendors gave them (CDI, the container device interface): files say what a container needs
//! that is to use one: variables, device nodes, mounts, groups, hooks.
//!
//! What a file wants that this runtime cannot do is an error and not left out: a device that works by half is worse.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::{spec, translate};
use crate::cri::{CdiDevice, ContainerConfig, Mount, MountPropagation};

/// Where files are; what is in the later one wins.
pub const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// The mode of a device where nothing is said about it.
const MODE: u32 = 0o666;
/// Parts of edits that take more than this runtime has.
const BEYOND: [&str; 2] = ["intelRdt", "netDevices"];

/// What becomes different about a container.
#[derive(Debug, Default, PartialEq)]
pub struct Edits {
    /// `NAME=value`.
    env: Vec<String>,
    devices: Vec<spec::Device>,
    mounts: Vec<Mount>,
    groups: Vec<i64>,
    hooks: Vec<spec::Hook>,
}

/// A device in a file.
struct Found {
    file: Arc<Value>,
    /// Its place among the file's.
    at: usize,
    priority: usize,
    /// Another one has the same name, so that nobody knows which is meant.
    is_doubtful: bool,
}

/// What the files in these directories say about devices.
pub fn find(directories: &[&Path], wanted: &[CdiDevice]) -> Result<Edits, String> {
    if wanted.is_empty() {
        return Ok(Edits::default());
    }
    let known = devices(directories);
    let names: BTreeSet<&str> = wanted.iter().map(|device| device.name.as_str()).collect();
    let resolved = |name: &&str| known.get(*name).filter(|found| !found.is_doubtful);
    let missing: Vec<&str> = names.iter().filter(|name| resolved(name).is_none()).copied().collect();
    if !missing.is_empty() {
        return Err(format!("unresolvable CDI devices {}", missing.join(", ")));
    }
    let mut edits = Edits::default();
    let mut begun: Vec<Arc<Value>> = Vec::new();
    let mut left = names.clone();
    // In the order they are wanted, each once.
    for name in wanted.iter().map(|device| device.name.as_str()).filter(|name| left.remove(name)) {
        let Some(found) = resolved(&name) else { continue };
        // What is said of all devices of a file is done once.
        if !begun.iter().any(|file| Arc::ptr_eq(file, &found.file)) {
            begun.push(found.file.clone());
            edits.add(&found.file["containerEdits"]).map_err(|why| format!("{name}: {why}"))?;
        }
        let own = &found.file["devices"][found.at]["containerEdits"];
        edits.add(own).map_err(|why| format!("{name}: {why}"))?;
    }
    Ok(edits)
}

/// All devices by their whole names. A file that cannot be read has none.
fn devices(directories: &[&Path]) -> BTreeMap<String, Found> {
    let mut known: BTreeMap<String, Found> = BTreeMap::new();
    for (priority, directory) in directories.iter().enumerate() {
        for file in files(directory) {
            let Some(file) = read(&file) else { continue };
            let file = Arc::new(file);
            let kind = text(&file["kind"]);
            for (at, device) in list(&file["devices"]).enumerate() {
                let name = format!("{kind}={}", text(&device["name"]));
                let is_doubtful = known.get(&name).is_some_and(|other| other.priority == priority);
                known.insert(name, Found { file: file.clone(), at, priority, is_doubtful });
            }
        }
    }
    known
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files
}

fn read(file: &Path) -> Option<Value> {
    let value = match file.extension()?.to_str()? {
        "json" => serde_json::from_slice(&std::fs::read(file).ok()?).ok(),
        "yaml" => schema::yaml::value(&std::fs::read_to_string(file).ok()?).ok(),
        _ => return None,
    };
    value.filter(|value: &Value| !text(&value["cdiVersion"]).is_empty())
}

impl Edits {
    fn add(&mut self, edits: &Value) -> Result<(), String> {
        if let Some(part) = BEYOND.iter().find(|part| !is_empty(&edits[**part])) {
            return Err(format!("{part} are not supported"));
        }
        for variable in list(&edits["env"]) {
            let variable = text(variable);
            if !variable.contains('=') {
                return Err("env: a variable has no value".to_owned());
            }
            self.env.push(variable.to_owned());
        }
        for node in list(&edits["deviceNodes"]) {
            self.devices.push(device(node)?);
        }
        for wanted in list(&edits["mounts"]) {
            self.mounts.push(mount(wanted)?);
        }
        for wanted in list(&edits["hooks"]) {
            self.hooks.push(hook(wanted)?);
        }
        // 0 says nothing.
        self.groups.extend(list(&edits["additionalGids"]).filter_map(Value::as_i64).filter(|gid| *gid > 0));
        Ok(())
    }

    /// Adds to a container's configuration what it has words for.
    pub fn apply(&self, config: &mut ContainerConfig) {
        config.mounts.extend(self.mounts.iter().cloned());
        if !self.groups.is_empty() {
            let security = config.linux.get_or_insert_default().security_context.get_or_insert_default();
            security.supplemental_groups.extend(&self.groups);
        }
    }

    /// Adds the variables, the devices, of which more can be said than a configuration has words for, and the hooks. A
    /// variable that is set already keeps its position.
    pub fn complete(self, container: &mut spec::Container) {
        for variable in self.env {
            match translate::position(&container.env, &variable) {
                Some(at) => container.env[at] = variable,
                None => container.env.push(variable),
            }
        }
        container.hooks.extend(self.hooks);
        for device in self.devices {
            container.devices.retain(|known| known.target != device.target);
            container.devices.push(device);
        }
    }
}

fn device(node: &Value) -> Result<spec::Device, String> {
    let target = text(&node["path"]);
    if !target.starts_with('/') {
        return Err(format!("deviceNodes: {target:?} is not an absolute path"));
    }
    let source = Some(text(&node["hostPath"])).filter(|path| !path.is_empty()).unwrap_or(target);
    let number = |name: &str| node[name].as_u64().and_then(|number| u32::try_from(number).ok());
    let kind = match text(&node["type"]) {
        "" => None,
        "b" => Some(true),
        "c" | "u" => Some(false),
        other => return Err(format!("deviceNodes: devices of type {other:?} are not supported")),
    };
    let numbers = kind.zip(number("major").filter(|major| *major != 0));
    let access = Some(text(&node["permissions"])).filter(|access| !access.is_empty()).unwrap_or("rwm");
    Ok(spec::Device {
        source: source.into(),
        target: target.to_owned(),
        access: access.to_owned(),
        made: Some(spec::Made {
            numbers: numbers.map(|(is_block, major)| (is_block, major, number("minor").unwrap_or(0))),
            mode: number("fileMode").unwrap_or(MODE),
            uid: number("uid").unwrap_or(0),
            gid: number("gid").unwrap_or(0),
        }),
    })
}

fn mount(wanted: &Value) -> Result<Mount, String> {
    let (source, target) = (text(&wanted["hostPath"]), text(&wanted["containerPath"]));
    if source.is_empty() || !target.starts_with('/') {
        return Err(format!("mounts: {source:?} cannot be mounted at {target:?}"));
    }
    if !["", "bind", "none"].contains(&text(&wanted["type"])) {
        return Err(format!("mounts: file systems of type {} are not supported", wanted["type"]));
    }
    let has = |option: &str| list(&wanted["options"]).any(|known| text(known) == option);
    let propagation = if has("rshared") || has("shared") {
        MountPropagation::Bidirectional
    } else if has("rslave") || has("slave") {
        MountPropagation::HostToContainer
    } else {
        MountPropagation::Private
    };
    Ok(Mount {
        host_path: source.to_owned(),
        container_path: target.to_owned(),
        readonly: has("ro"),
        propagation: propagation.into(),
        ..Mount::default()
    })
}

fn hook(wanted: &Value) -> Result<spec::Hook, String> {
    let (name, path) = (text(&wanted["hookName"]), text(&wanted["path"]));
    let stage = spec::Stage::ALL.into_iter().find(|stage| stage.name() == name);
    let stage = stage.ok_or_else(|| format!("hooks: there is no hook {name:?}"))?;
    if !path.starts_with('/') {
        return Err(format!("hooks: {path:?} is not an absolute path"));
    }
    let texts = |value: &Value| list(value).map(|one| text(one).to_owned()).collect();
    let timeout = wanted["timeout"].as_u64().and_then(|seconds| u32::try_from(seconds).ok());
    Ok(spec::Hook {
        stage,
        path: path.into(),
        args: texts(&wanted["args"]),
        env: texts(&wanted["env"]),
        timeout,
    })
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
