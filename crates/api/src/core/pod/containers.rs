//! Validates init, main and ephemeral containers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::rules::{
    has_parent_refs, is_sidecar, required, required_one_of, validate_label, validate_relative_path,
};
use super::{env, probes, resources, security};
use crate::core::rules::validate_port_number;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

/// The properties of the pod that container validation needs.
pub(super) struct PodContext<'a> {
    /// The valid volumes by name.
    pub volumes: BTreeMap<&'a str, &'a Value>,
    pub claims: BTreeSet<&'a str>,
    pub grace_period: Option<i64>,
    pub restart_policy: &'a str,
    pub host_users: bool,
}

const EPHEMERAL_FORBIDDEN: &str = "cannot be set for an Ephemeral Container";
const NOT_SIDECAR: &str = "may not be set for init containers without restartPolicy=Always";

/// Validates the main containers.
pub(super) fn validate_containers(e: &mut ErrorList, containers: &[Value], path: &Path, pod: &PodContext) {
    if containers.is_empty() {
        e.required(path, "");
        return;
    }
    let mut names = BTreeSet::new();
    for (i, container) in containers.iter().enumerate() {
        let at = path.index(i);
        validate_container(e, container, &at, pod);
        if !names.insert(container.text("name")) {
            e.duplicate(&at.child("name"), container.text("name"));
        }
        probes::validate_lifecycle_and_probes(e, container, &at, pod);
        restart_policy(e, container, &at, false);
    }
    host_ports(e, containers.iter().enumerate(), path);
}

pub(super) fn validate_init_containers(e: &mut ErrorList, spec: &Value, path: &Path, pod: &PodContext) {
    let mut names: BTreeSet<&str> = spec.items("containers").iter().map(|c| c.text("name")).collect();
    for (i, container) in spec.items("initContainers").iter().enumerate() {
        let at = path.index(i);
        validate_container(e, container, &at, pod);
        restart_policy(e, container, &at, true);
        let name = container.text("name");
        if names.contains(name) {
            e.duplicate(&at.child("name"), name);
        } else if !name.is_empty() {
            names.insert(name);
        }
        // Upstream checks each init container separately and always reports the index 0.
        host_ports(e, std::iter::once((0, container)), path);
        let sidecar = is_sidecar(container);
        if sidecar {
            probes::validate_lifecycle_and_probes(e, container, &at, pod);
        } else {
            for field in ["lifecycle", "livenessProbe", "readinessProbe", "startupProbe"] {
                if container.has(field) {
                    e.forbidden(&at.child(field), NOT_SIDECAR);
                }
            }
            for (j, policy) in container.items("resizePolicy").iter().enumerate() {
                if policy.text("restartPolicy") == "RestartContainer" {
                    e.invalid(
                        &at.child("resizePolicy").index(j).child("restartPolicy"),
                        "RestartContainer",
                        "must not be set to 'RestartContainer' for non-sidecar initContainers",
                    );
                }
            }
        }
    }
}

pub(super) fn validate_ephemeral_containers(e: &mut ErrorList, spec: &Value, path: &Path, pod: &PodContext) {
    let others: BTreeSet<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|list| spec.items(list))
        .map(|container| container.text("name"))
        .collect();
    let mut names = others.clone();
    for (i, container) in spec.items("ephemeralContainers").iter().enumerate() {
        let at = path.index(i);
        validate_container(e, container, &at, pod);
        validate_image(e, container, &at);
        if !names.insert(container.text("name")) {
            e.duplicate(&at.child("name"), container.text("name"));
        }
        let target = container.text("targetContainerName");
        if !target.is_empty() && !others.contains(target) {
            e.not_found(&at.child("targetContainerName"), target);
        }
        for field in EPHEMERAL_FORBIDDEN_FIELDS {
            if is_set(container.at(field)) {
                e.forbidden(&at.child(field), EPHEMERAL_FORBIDDEN);
            }
        }
        for (j, mount) in container.items("volumeMounts").iter().enumerate() {
            for field in ["subPath", "subPathExpr"] {
                if !mount.text(field).is_empty() {
                    e.forbidden(&at.child("volumeMounts").index(j).child(field), EPHEMERAL_FORBIDDEN);
                }
            }
        }
    }
}

const EPHEMERAL_FORBIDDEN_FIELDS: &[&str] = &[
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

/// For pods only, not for templates: an image must not have surrounding whitespace.
pub(super) fn validate_image(e: &mut ErrorList, container: &Value, path: &Path) {
    let image = container.text("image");
    if image.trim() != image {
        e.invalid(&path.child("image"), image, "must not have leading or trailing whitespace");
    }
}

fn validate_container(e: &mut ErrorList, container: &Value, path: &Path, pod: &PodContext) {
    match container.text("name") {
        "" => e.required(&path.child("name"), ""),
        name => validate_label(e, &path.child("name"), name),
    }
    required(e, container, path, "image");
    required_one_of(e, container, path, "terminationMessagePolicy", &["File", "FallbackToLogsOnError"]);
    ports(e, container.items("ports"), &path.child("ports"));
    env::validate_env(e, container.items("env"), &path.child("env"));
    env::validate_env_from(e, container.items("envFrom"), &path.child("envFrom"));
    validate_mounts(e, container, &path.child("volumeMounts"), pod);
    validate_devices(e, container, &path.child("volumeDevices"), pod);
    required_one_of(e, container, path, "imagePullPolicy", PULL_POLICIES);
    resources::validate_container_resources(
        e,
        container.at("resources"),
        &path.child("resources"),
        &pod.claims,
    );
    resize_policy(e, container.items("resizePolicy"), &path.child("resizePolicy"), pod.restart_policy);
    security::validate_container_security_context(
        e,
        container.at("securityContext"),
        &path.child("securityContext"),
        pod.host_users,
    );
}

pub(super) const PULL_POLICIES: &[&str] = &["Always", "IfNotPresent", "Never"];

fn ports(e: &mut ErrorList, ports: &[Value], path: &Path) {
    let mut seen = BTreeSet::new();
    for (i, port) in ports.iter().enumerate() {
        let at = path.index(i);
        let name = port.text("name");
        if !name.is_empty() {
            let messages = names::port_name(name);
            if messages.is_empty() && !seen.insert(name) {
                e.duplicate(&at.child("name"), name);
            }
            for message in messages {
                e.invalid(&at.child("name"), name, &message);
            }
        }
        match port.int("containerPort").unwrap_or(0) {
            0 => e.required(&at.child("containerPort"), ""),
            number => validate_port_number(number, &at.child("containerPort"), e),
        }
        if let Some(number) = port.int("hostPort").filter(|&n| n != 0) {
            validate_port_number(number, &at.child("hostPort"), e);
        }
        required_one_of(e, port, &at, "protocol", &["SCTP", "TCP", "UDP"]);
    }
}

fn host_ports<'a>(e: &mut ErrorList, containers: impl Iterator<Item = (usize, &'a Value)>, path: &Path) {
    let mut taken = BTreeSet::new();
    for (i, container) in containers {
        for (j, port) in container.items("ports").iter().enumerate() {
            let Some(number) = port.int("hostPort").filter(|&n| n != 0) else { continue };
            let key = format!("{}/{}/{number}", port.text("protocol"), port.text("hostIP"));
            if taken.contains(&key) {
                e.duplicate(&path.index(i).child("ports").index(j).child("hostPort"), key);
            } else {
                taken.insert(key);
            }
        }
    }
}

fn validate_mounts(e: &mut ErrorList, container: &Value, path: &Path, pod: &PodContext) {
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
            e.not_found(&at.child("name"), name);
        }
        required(e, mount, &at, "mountPath");
        if !points.insert(point) {
            e.invalid(&at.child("mountPath"), point, "must be unique");
        }
        if devices.contains(name) {
            e.invalid(&at.child("name"), name, "must not already exist in volumeDevices");
        }
        if device_paths.contains(point) {
            e.invalid(&at.child("mountPath"), point, "must not already exist as a path in volumeDevices");
        }
        // Upstream's paths have no index here either.
        let sub = mount.text("subPath");
        if !sub.is_empty() {
            validate_relative_path(e, &path.child("subPath"), sub);
        }
        let expression = mount.text("subPathExpr");
        if !expression.is_empty() {
            if !sub.is_empty() {
                e.invalid(
                    &at.child("subPathExpr"),
                    expression,
                    "subPathExpr and subPath are mutually exclusive",
                );
            }
            validate_relative_path(e, &path.child("subPathExpr"), expression);
        }
        validate_mount_propagation(e, mount, container, &path.child("mountPropagation"));
        recursive_read_only(e, mount, &path.child("recursiveReadOnly"));
    }
}

fn validate_mount_propagation(e: &mut ErrorList, mount: &Value, container: &Value, path: &Path) {
    let Some(mode) = mount.at("mountPropagation").as_str() else { return };
    const MODES: &[&str] = &["Bidirectional", "HostToContainer", "None"];
    if !MODES.contains(&mode) {
        e.not_supported(path, mode, MODES);
    }
    if mode == "Bidirectional" && !container.at("securityContext").flag("privileged") {
        e.forbidden(path, "Bidirectional mount propagation is available only to privileged containers");
    }
}

fn recursive_read_only(e: &mut ErrorList, mount: &Value, path: &Path) {
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

fn validate_devices(e: &mut ErrorList, container: &Value, path: &Path, pod: &PodContext) {
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
            e.invalid(&at.child("name"), name, "must be unique");
        }
        match pod.volumes.get(name) {
            Some(volume) if !volume.has("persistentVolumeClaim") && !volume.has("ephemeral") => e.invalid(
                &at.child("name"),
                name,
                "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode",
            ),
            Some(_) => {}
            None => e.not_found(&at.child("name"), name),
        }
        required(e, device, &at, "devicePath");
        if points.contains(point) {
            e.invalid(&at.child("devicePath"), point, "must be unique");
        }
        if has_parent_refs(point) {
            e.invalid(&at.child("devicePath"), point, "can not contain backsteps ('..')");
        } else {
            points.insert(point);
        }
        if mounts.contains(name) {
            e.invalid(&at.child("name"), name, "must not already exist in volumeMounts");
        }
        if mount_paths.contains(point) {
            e.invalid(&at.child("devicePath"), point, "must not already exist as a path in volumeMounts");
        }
        if !name.is_empty() {
            names.insert(name);
        }
    }
}

fn resize_policy(e: &mut ErrorList, policies: &[Value], path: &Path, pod_restart_policy: &str) {
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

/// Validates the restart policy of a container and its restart rules.
fn restart_policy(e: &mut ErrorList, container: &Value, path: &Path, is_init: bool) {
    let rules = container.items("restartPolicyRules");
    match container.at("restartPolicy").as_str() {
        None if rules.is_empty() => return,
        None => {
            e.required(
                &path.child("restartPolicy"),
                "must specify restartPolicy when restart rules are used",
            );
            if is_init {
                return;
            }
        }
        Some(policy) => {
            const POLICIES: &[&str] = &["Always", "Never", "OnFailure"];
            if !POLICIES.contains(&policy) {
                e.not_supported(&path.child("restartPolicy"), policy, POLICIES);
            }
        }
    }
    let at = path.child("restartPolicyRules");
    if rules.len() > 20 {
        e.too_many(&at, rules.len(), 20);
    }
    for (i, rule) in rules.iter().enumerate() {
        let at = at.index(i);
        const ACTIONS: &[&str] = &["Restart", "RestartAllContainers"];
        if !ACTIONS.contains(&rule.text("action")) {
            e.not_supported(&at.child("action"), rule.text("action"), ACTIONS);
        }
        if !rule.has("exitCodes") {
            e.required(&at.child("exitCodes"), "must be specified");
            continue;
        }
        let codes = rule.at("exitCodes");
        const OPERATORS: &[&str] = &["In", "NotIn"];
        if !OPERATORS.contains(&codes.text("operator")) {
            e.not_supported(&at.child("exitCodes.operator"), codes.text("operator"), OPERATORS);
        }
        if codes.items("values").len() > 255 {
            e.too_many(&at.child("exitCodes.values"), codes.items("values").len(), 255);
        }
    }
}
