//! Containers of every sort: what they all keep, and what only init and ephemeral ones do.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::rules::{descending_path, has_backsteps, is_sidecar, label, required, required_one_of};
use super::{env, probes, resources, security};
use crate::core::rules::port_number;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::names;

/// What the rules of a container need to know about its pod.
pub(super) struct Surroundings<'a> {
    /// The valid volumes by name.
    pub volumes: BTreeMap<&'a str, &'a Value>,
    pub claims: BTreeSet<&'a str>,
    pub grace_period: Option<i64>,
    pub restart_policy: &'a str,
    pub host_users: bool,
}

const EPHEMERAL: &str = "cannot be set for an Ephemeral Container";
const NOT_SIDECAR: &str = "may not be set for init containers without restartPolicy=Always";

/// The main containers.
pub(super) fn main(e: &mut Errors, containers: &[Value], path: &Path, pod: &Surroundings) {
    if containers.is_empty() {
        e.required(path, "");
        return;
    }
    let mut names = BTreeSet::new();
    for (i, container) in containers.iter().enumerate() {
        let at = path.index(i);
        every(e, container, &at, pod);
        if !names.insert(container.text("name")) {
            e.duplicate(&at.at("name"), container.text("name"));
        }
        probes::lifecycle_and_probes(e, container, &at, pod);
        restart_policy(e, container, &at, false);
    }
    host_ports(e, containers.iter().enumerate(), path);
}

pub(super) fn init(e: &mut Errors, spec: &Value, path: &Path, pod: &Surroundings) {
    let mut names: BTreeSet<&str> = spec.items("containers").iter().map(|c| c.text("name")).collect();
    for (i, container) in spec.items("initContainers").iter().enumerate() {
        let at = path.index(i);
        every(e, container, &at, pod);
        restart_policy(e, container, &at, true);
        let name = container.text("name");
        if names.contains(name) {
            e.duplicate(&at.at("name"), name);
        } else if !name.is_empty() {
            names.insert(name);
        }
        // Upstream looks at each init container alone and always calls it the first.
        host_ports(e, std::iter::once((0, container)), path);
        let sidecar = is_sidecar(container);
        if sidecar {
            probes::lifecycle_and_probes(e, container, &at, pod);
        } else {
            for field in ["lifecycle", "livenessProbe", "readinessProbe", "startupProbe"] {
                if container.has(field) {
                    e.forbidden(&at.at(field), NOT_SIDECAR);
                }
            }
            for (j, policy) in container.items("resizePolicy").iter().enumerate() {
                if policy.text("restartPolicy") == "RestartContainer" {
                    e.invalid(
                        &at.at("resizePolicy").index(j).at("restartPolicy"),
                        "RestartContainer",
                        "must not be set to 'RestartContainer' for non-sidecar initContainers",
                    );
                }
            }
        }
    }
}

pub(super) fn ephemeral(e: &mut Errors, spec: &Value, path: &Path, pod: &Surroundings) {
    let others: BTreeSet<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|list| spec.items(list))
        .map(|container| container.text("name"))
        .collect();
    let mut names = others.clone();
    for (i, container) in spec.items("ephemeralContainers").iter().enumerate() {
        let at = path.index(i);
        every(e, container, &at, pod);
        trimmed_image(e, container, &at);
        if !names.insert(container.text("name")) {
            e.duplicate(&at.at("name"), container.text("name"));
        }
        let target = container.text("targetContainerName");
        if !target.is_empty() && !others.contains(target) {
            e.not_found(&at.at("targetContainerName"), target);
        }
        for field in EPHEMERAL_FORBIDS {
            if is_set(container.at(field)) {
                e.forbidden(&at.at(field), EPHEMERAL);
            }
        }
        for (j, mount) in container.items("volumeMounts").iter().enumerate() {
            for field in ["subPath", "subPathExpr"] {
                if !mount.text(field).is_empty() {
                    e.forbidden(&at.at("volumeMounts").index(j).at(field), EPHEMERAL);
                }
            }
        }
    }
}

const EPHEMERAL_FORBIDS: &[&str] = &[
    "ports",
    "resources",
    "resizePolicy",
    "restartPolicy",
    "restartPolicyRules",
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "lifecycle",
];

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    }
}

/// Only for pods, not templates: an image name without spaces around it.
pub(super) fn trimmed_image(e: &mut Errors, container: &Value, path: &Path) {
    let image = container.text("image");
    if image.trim() != image {
        e.invalid(&path.at("image"), image, "must not have leading or trailing whitespace");
    }
}

fn every(e: &mut Errors, container: &Value, path: &Path, pod: &Surroundings) {
    match container.text("name") {
        "" => e.required(&path.at("name"), ""),
        name => label(e, &path.at("name"), name),
    }
    required(e, container, path, "image");
    required_one_of(e, container, path, "terminationMessagePolicy", &["File", "FallbackToLogsOnError"]);
    ports(e, container.items("ports"), &path.at("ports"));
    env::env(e, container.items("env"), &path.at("env"));
    env::env_from(e, container.items("envFrom"), &path.at("envFrom"));
    mounts(e, container, &path.at("volumeMounts"), pod);
    devices(e, container, &path.at("volumeDevices"), pod);
    required_one_of(e, container, path, "imagePullPolicy", PULL_POLICIES);
    resources::container(e, container.at("resources"), &path.at("resources"), &pod.claims);
    resize_policy(e, container.items("resizePolicy"), &path.at("resizePolicy"), pod.restart_policy);
    security::container(e, container.at("securityContext"), &path.at("securityContext"), pod.host_users);
}

pub(super) const PULL_POLICIES: &[&str] = &["Always", "IfNotPresent", "Never"];

fn ports(e: &mut Errors, ports: &[Value], path: &Path) {
    let mut seen = BTreeSet::new();
    for (i, port) in ports.iter().enumerate() {
        let at = path.index(i);
        let name = port.text("name");
        if !name.is_empty() {
            let messages = names::port_name(name);
            if messages.is_empty() && !seen.insert(name) {
                e.duplicate(&at.at("name"), name);
            }
            for message in messages {
                e.invalid(&at.at("name"), name, &message);
            }
        }
        match port.int("containerPort").unwrap_or(0) {
            0 => e.required(&at.at("containerPort"), ""),
            number => port_number(number, &at.at("containerPort"), e),
        }
        if let Some(number) = port.int("hostPort").filter(|&n| n != 0) {
            port_number(number, &at.at("hostPort"), e);
        }
        required_one_of(e, port, &at, "protocol", &["SCTP", "TCP", "UDP"]);
    }
}

fn host_ports<'a>(e: &mut Errors, containers: impl Iterator<Item = (usize, &'a Value)>, path: &Path) {
    let mut taken = BTreeSet::new();
    for (i, container) in containers {
        for (j, port) in container.items("ports").iter().enumerate() {
            let Some(number) = port.int("hostPort").filter(|&n| n != 0) else { continue };
            let key = format!("{}/{}/{number}", port.text("protocol"), port.text("hostIP"));
            if taken.contains(&key) {
                e.duplicate(&path.index(i).at("ports").index(j).at("hostPort"), key);
            } else {
                taken.insert(key);
            }
        }
    }
}

fn mounts(e: &mut Errors, container: &Value, path: &Path, pod: &Surroundings) {
    let taken = |field: &str| -> BTreeSet<&str> {
        container.items("volumeDevices").iter().map(|device| device.text(field)).collect()
    };
    let (devices, device_paths) = (taken("name"), taken("devicePath"));
    let mut points = BTreeSet::new();
    for (i, mount) in container.items("volumeMounts").iter().enumerate() {
        let at = path.index(i);
        let (name, point) = (mount.text("name"), mount.text("mountPath"));
        required(e, mount, &at, "name");
        if !pod.volumes.contains_key(name) {
            e.not_found(&at.at("name"), name);
        }
        required(e, mount, &at, "mountPath");
        if !points.insert(point) {
            e.invalid(&at.at("mountPath"), point, "must be unique");
        }
        if devices.contains(name) {
            e.invalid(&at.at("name"), name, "must not already exist in volumeDevices");
        }
        if device_paths.contains(point) {
            e.invalid(&at.at("mountPath"), point, "must not already exist as a path in volumeDevices");
        }
        // These paths lack the index upstream, too.
        let sub = mount.text("subPath");
        if !sub.is_empty() {
            descending_path(e, &path.at("subPath"), sub);
        }
        let expression = mount.text("subPathExpr");
        if !expression.is_empty() {
            if !sub.is_empty() {
                e.invalid(
                    &at.at("subPathExpr"),
                    expression,
                    "subPathExpr and subPath are mutually exclusive",
                );
            }
            descending_path(e, &path.at("subPathExpr"), expression);
        }
        propagation(e, mount, container, &path.at("mountPropagation"));
        recursive_read_only(e, mount, &path.at("recursiveReadOnly"));
    }
}

fn propagation(e: &mut Errors, mount: &Value, container: &Value, path: &Path) {
    let Some(mode) = mount.at("mountPropagation").as_str() else { return };
    const MODES: &[&str] = &["Bidirectional", "HostToContainer", "None"];
    if !MODES.contains(&mode) {
        e.not_supported(path, mode, MODES);
    }
    if mode == "Bidirectional" && !container.at("securityContext").flag("privileged") {
        e.forbidden(path, "Bidirectional mount propagation is available only to privileged containers");
    }
}

fn recursive_read_only(e: &mut Errors, mount: &Value, path: &Path) {
    match mount.at("recursiveReadOnly").as_str() {
        None | Some("Disabled") => {}
        Some("Enabled" | "IfPossible") => {
            if !mount.flag("readOnly") {
                e.forbidden(path, "may only be specified when readOnly is true");
            }
            if !matches!(mount.at("mountPropagation").as_str(), None | Some("None")) {
                e.forbidden(path, "may only be specified when mountPropagation is None or not specified");
            }
        }
        Some(other) => e.not_supported(path, other, &["Disabled", "Enabled", "IfPossible"]),
    }
}

fn devices(e: &mut Errors, container: &Value, path: &Path, pod: &Surroundings) {
    let taken = |field: &str| -> BTreeSet<&str> {
        container.items("volumeMounts").iter().map(|mount| mount.text(field)).collect()
    };
    let (mounts, mount_paths) = (taken("name"), taken("mountPath"));
    let (mut names, mut points) = (BTreeSet::new(), BTreeSet::new());
    for (i, device) in container.items("volumeDevices").iter().enumerate() {
        let at = path.index(i);
        let (name, point) = (device.text("name"), device.text("devicePath"));
        required(e, device, &at, "name");
        if names.contains(name) {
            e.invalid(&at.at("name"), name, "must be unique");
        }
        match pod.volumes.get(name) {
            Some(volume) if !volume.has("persistentVolumeClaim") && !volume.has("ephemeral") => e.invalid(
                &at.at("name"),
                name,
                "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode",
            ),
            Some(_) => {}
            None => e.not_found(&at.at("name"), name),
        }
        required(e, device, &at, "devicePath");
        if points.contains(point) {
            e.invalid(&at.at("devicePath"), point, "must be unique");
        }
        if has_backsteps(point) {
            e.invalid(&at.at("devicePath"), point, "can not contain backsteps ('..')");
        } else {
            points.insert(point);
        }
        if mounts.contains(name) {
            e.invalid(&at.at("name"), name, "must not already exist in volumeMounts");
        }
        if mount_paths.contains(point) {
            e.invalid(&at.at("devicePath"), point, "must not already exist as a path in volumeMounts");
        }
        if !name.is_empty() {
            names.insert(name);
        }
    }
}

fn resize_policy(e: &mut Errors, policies: &[Value], path: &Path, pod_restart_policy: &str) {
    let mut seen = BTreeSet::new();
    for (i, policy) in policies.iter().enumerate() {
        let (resource, restart) = (policy.text("resourceName"), policy.text("restartPolicy"));
        if !seen.insert(resource) {
            e.duplicate(&path.index(i), resource);
        }
        for (value, allowed) in
            [(resource, &["cpu", "memory"]), (restart, &["NotRequired", "RestartContainer"])]
        {
            if value.is_empty() {
                e.required(path, "");
            } else if !allowed.contains(&value) {
                e.not_supported(path, value, allowed);
            }
        }
        if pod_restart_policy == "Never" && restart != "NotRequired" {
            e.invalid(path, restart, "must be 'NotRequired' when pod `restartPolicy` is 'Never'");
        }
    }
}

/// The container's own restart policy, and the rules that go with it.
fn restart_policy(e: &mut Errors, container: &Value, path: &Path, is_init: bool) {
    let rules = container.items("restartPolicyRules");
    match container.at("restartPolicy").as_str() {
        None if rules.is_empty() => return,
        None => {
            e.required(&path.at("restartPolicy"), "must specify restartPolicy when restart rules are used");
            if is_init {
                return;
            }
        }
        Some(policy) => {
            const POLICIES: &[&str] = &["Always", "Never", "OnFailure"];
            if !POLICIES.contains(&policy) {
                e.not_supported(&path.at("restartPolicy"), policy, POLICIES);
            }
        }
    }
    let at = path.at("restartPolicyRules");
    if rules.len() > 20 {
        e.too_many(&at, rules.len(), 20);
    }
    for (i, rule) in rules.iter().enumerate() {
        let at = at.index(i);
        const ACTIONS: &[&str] = &["Restart", "RestartAllContainers"];
        if !ACTIONS.contains(&rule.text("action")) {
            e.not_supported(&at.at("action"), rule.text("action"), ACTIONS);
        }
        if !rule.has("exitCodes") {
            e.required(&at.at("exitCodes"), "must be specified");
            continue;
        }
        let codes = rule.at("exitCodes");
        const OPERATORS: &[&str] = &["In", "NotIn"];
        if !OPERATORS.contains(&codes.text("operator")) {
            e.not_supported(&at.at("exitCodes.operator"), codes.text("operator"), OPERATORS);
        }
        if codes.items("values").len() > 255 {
            e.too_many(&at.at("exitCodes.values"), codes.items("values").len(), 255);
        }
    }
}
