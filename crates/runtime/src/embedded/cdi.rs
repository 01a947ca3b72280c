//! CDI (Container Device Interface): reads the vendors' spec files and applies their container edits
//! (environment variables, device nodes, mounts, groups, hooks).
//!
//! An edit that this runtime does not support is an error. Skipping it would leave the device half
//! configured. Upstream counterpart: `tags.cncf.io/container-device-interface`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::{spec, translate};
use crate::cri::{CdiDevice, ContainerConfig, Mount, MountPropagation};

/// The directories of spec files, in ascending priority.
pub const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// The mode of a device node whose spec has no `fileMode`.
const DEFAULT_DEVICE_MODE: u32 = 0o666;
/// Fields of `containerEdits` that this runtime does not support.
const UNSUPPORTED_FIELDS: [&str; 2] = ["intelRdt", "netDevices"];

/// The edits of all requested devices, merged.
#[derive(Debug, Default, PartialEq)]
pub struct ContainerEdits {
    /// As `NAME=value`.
    env: Vec<String>,
    devices: Vec<spec::Device>,
    mounts: Vec<Mount>,
    groups: Vec<i64>,
    hooks: Vec<spec::Hook>,
}

/// A device in a spec file.
struct DeviceEntry {
    file: Arc<Value>,
    /// Its index in the file's `devices`.
    index: usize,
    priority: usize,
    /// Another file of the same priority has a device of the same name. Such a device cannot be
    /// resolved.
    is_ambiguous: bool,
}

/// Resolves the requested devices with the spec files in `directories`.
pub fn resolve_devices(directories: &[&Path], requested: &[CdiDevice]) -> Result<ContainerEdits, String> {
    if requested.is_empty() {
        return Ok(ContainerEdits::default());
    }
    let known = devices(directories);
    let names: BTreeSet<&str> = requested.iter().map(|device| device.name.as_str()).collect();
    let resolved = |name: &&str| known.get(*name).filter(|found| !found.is_ambiguous);
    let missing: Vec<&str> = names.iter().filter(|name| resolved(name).is_none()).copied().collect();
    if !missing.is_empty() {
        return Err(format!("unresolvable CDI devices {}", missing.join(", ")));
    }
    let mut container_edits = ContainerEdits::default();
    let mut applied_files: Vec<Arc<Value>> = Vec::new();
    let mut left = names.clone();
    // In the order of the request, each device once.
    for name in requested.iter().map(|device| device.name.as_str()).filter(|name| left.remove(name)) {
        let Some(found) = resolved(&name) else { continue };
        // The edits of the file itself apply once, however many of its devices are requested.
        if !applied_files.iter().any(|file| Arc::ptr_eq(file, &found.file)) {
            applied_files.push(found.file.clone());
            container_edits.add(&found.file["containerEdits"]).map_err(|why| format!("{name}: {why}"))?;
        }
        let own = &found.file["devices"][found.index]["containerEdits"];
        container_edits.add(own).map_err(|why| format!("{name}: {why}"))?;
    }
    Ok(container_edits)
}

/// All devices by their fully qualified names. Unreadable files are skipped.
fn devices(directories: &[&Path]) -> BTreeMap<String, DeviceEntry> {
    let mut known: BTreeMap<String, DeviceEntry> = BTreeMap::new();
    for (priority, directory) in directories.iter().enumerate() {
        for file in files(directory) {
            let Some(file) = read(&file) else { continue };
            let file = Arc::new(file);
            let kind = text(&file["kind"]);
            for (at, device) in list(&file["devices"]).enumerate() {
                let name = format!("{kind}={}", text(&device["name"]));
                let is_ambiguous = known.get(&name).is_some_and(|other| other.priority == priority);
                known.insert(name, DeviceEntry { file: file.clone(), index: at, priority, is_ambiguous });
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
        "yaml" => schema::yaml::parse(&std::fs::read_to_string(file).ok()?).ok(),
        _ => return None,
    };
    value.filter(|value: &Value| !text(&value["cdiVersion"]).is_empty())
}

impl ContainerEdits {
    fn add(&mut self, container_edits: &Value) -> Result<(), String> {
        if let Some(part) = UNSUPPORTED_FIELDS.iter().find(|part| !is_empty(&container_edits[**part])) {
            return Err(format!("{part} are not supported"));
        }
        for variable in list(&container_edits["env"]) {
            let variable = text(variable);
            if !variable.contains('=') {
                return Err("env: a variable is not NAME=value".to_owned());
            }
            self.env.push(variable.to_owned());
        }
        for node in list(&container_edits["deviceNodes"]) {
            self.devices.push(device(node)?);
        }
        for requested in list(&container_edits["mounts"]) {
            self.mounts.push(mount(requested)?);
        }
        for requested in list(&container_edits["hooks"]) {
            self.hooks.push(hook(requested)?);
        }
        // As in the CDI library, GID 0 is ignored.
        self.groups.extend(
            list(&container_edits["additionalGids"]).filter_map(Value::as_i64).filter(|gid| *gid > 0),
        );
        Ok(())
    }

    /// Applies the edits that CRI can express, mounts and groups, to a container's configuration.
    pub fn apply(&self, config: &mut ContainerConfig) {
        config.mounts.extend(self.mounts.iter().cloned());
        if !self.groups.is_empty() {
            let security = config.linux.get_or_insert_default().security_context.get_or_insert_default();
            security.supplemental_groups.extend(&self.groups);
        }
    }

    /// Applies the other edits: environment variables, hooks, and devices, of which CRI expresses only
    /// a part. A variable that is already set is replaced in place.
    pub fn apply_to_spec(self, container: &mut spec::Container) {
        for variable in self.env {
            match translate::env_position(&container.env, &variable) {
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
        made: Some(spec::DeviceNode {
            numbers: numbers.map(|(is_block, major)| (is_block, major, number("minor").unwrap_or(0))),
            mode: number("fileMode").unwrap_or(DEFAULT_DEVICE_MODE),
            uid: number("uid").unwrap_or(0),
            gid: number("gid").unwrap_or(0),
        }),
    })
}

fn mount(requested: &Value) -> Result<Mount, String> {
    let (source, target) = (text(&requested["hostPath"]), text(&requested["containerPath"]));
    if source.is_empty() || !target.starts_with('/') {
        return Err(format!("mounts: {source:?} cannot be mounted at {target:?}"));
    }
    if !["", "bind", "none"].contains(&text(&requested["type"])) {
        return Err(format!("mounts: file systems of type {} are not supported", requested["type"]));
    }
    let has = |option: &str| list(&requested["options"]).any(|known| text(known) == option);
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

fn hook(requested: &Value) -> Result<spec::Hook, String> {
    let (name, path) = (text(&requested["hookName"]), text(&requested["path"]));
    let stage = spec::Stage::ALL.into_iter().find(|stage| stage.name() == name);
    let stage = stage.ok_or_else(|| format!("hooks: unknown hook {name:?}"))?;
    if !path.starts_with('/') {
        return Err(format!("hooks: {path:?} is not an absolute path"));
    }
    let strings = |value: &Value| list(value).map(|one| text(one).to_owned()).collect();
    let timeout = requested["timeout"].as_u64().and_then(|seconds| u32::try_from(seconds).ok());
    Ok(spec::Hook {
        stage,
        path: path.into(),
        args: strings(&requested["args"]),
        env: strings(&requested["env"]),
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
