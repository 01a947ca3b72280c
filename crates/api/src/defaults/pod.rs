//! Defaults of Pods and the types in a PodSpec.

use std::collections::BTreeMap;

use schema::quantity::Quantity;
use serde_json::{Value, json};

use super::DefaultRule::{Apply, Set};
use super::DefaultValue::{Flag, Int, Struct, Text};
use super::{TypeDefaults, image};
use crate::json::JsonExt;

/// 0644, the default mode of files in volumes.
const DEFAULT_FILE_MODE: i64 = 0o644;

pub(super) const TYPE_DEFAULTS: &[TypeDefaults] = &[
    TypeDefaults {
        ty: "core.v1.Pod",
        rules: &[
            Apply(requests_from_limits),
            Apply(pod_level_resources),
            Apply(host_ports),
            Apply(service_links),
        ],
    },
    TypeDefaults {
        ty: "core.v1.PodSpec",
        rules: &[
            Set("dnsPolicy", Text("ClusterFirst")),
            Set("restartPolicy", Text("Always")),
            Set("securityContext", Struct),
            Set("terminationGracePeriodSeconds", Int(30)),
            Set("schedulerName", Text("default-scheduler")),
        ],
    },
    TypeDefaults { ty: "core.v1.Container", rules: CONTAINER_RULES },
    TypeDefaults { ty: "core.v1.EphemeralContainer", rules: CONTAINER_RULES },
    TypeDefaults {
        ty: "core.v1.Probe",
        rules: &[
            Set("timeoutSeconds", Int(1)),
            Set("periodSeconds", Int(10)),
            Set("successThreshold", Int(1)),
            Set("failureThreshold", Int(3)),
        ],
    },
    TypeDefaults {
        ty: "core.v1.HTTPGetAction",
        rules: &[Set("path", Text("/")), Set("scheme", Text("HTTP"))],
    },
    TypeDefaults { ty: "core.v1.GRPCAction", rules: &[Set("service", Text(""))] },
    TypeDefaults { ty: "core.v1.ObjectFieldSelector", rules: &[Set("apiVersion", Text("v1"))] },
    TypeDefaults { ty: "core.v1.FileKeySelector", rules: &[Set("optional", Flag(false))] },
    TypeDefaults { ty: "core.v1.Volume", rules: &[Apply(volume)] },
    TypeDefaults { ty: "core.v1.HostPathVolumeSource", rules: &[Set("type", Text(""))] },
    TypeDefaults { ty: "core.v1.SecretVolumeSource", rules: &[Set("defaultMode", Int(DEFAULT_FILE_MODE))] },
    TypeDefaults {
        ty: "core.v1.ConfigMapVolumeSource",
        rules: &[Set("defaultMode", Int(DEFAULT_FILE_MODE))],
    },
    TypeDefaults {
        ty: "core.v1.DownwardAPIVolumeSource",
        rules: &[Set("defaultMode", Int(DEFAULT_FILE_MODE))],
    },
    TypeDefaults {
        ty: "core.v1.ProjectedVolumeSource",
        rules: &[Set("defaultMode", Int(DEFAULT_FILE_MODE))],
    },
    TypeDefaults {
        ty: "core.v1.ServiceAccountTokenProjection",
        rules: &[Set("expirationSeconds", Int(3600))],
    },
];

const CONTAINER_RULES: &[super::DefaultRule] = &[
    Apply(image::set_pull_policy),
    Set("terminationMessagePath", Text("/dev/termination-log")),
    Set("terminationMessagePolicy", Text("File")),
];

fn containers(spec: &mut Value) -> impl Iterator<Item = &mut Value> {
    let lists = spec.as_object_mut().into_iter().flatten();
    lists
        .filter(|(field, _)| matches!(field.as_str(), "containers" | "initContainers"))
        .flat_map(|(_, list)| list.as_array_mut().into_iter().flatten())
}

/// Defaults container requests to the limits.
fn requests_from_limits(pod: &mut Value) {
    for container in pod.get_mut("spec").into_iter().flat_map(containers) {
        let limits = container.path("resources.limits").as_object().cloned().unwrap_or_default();
        if let (false, Some(resources)) = (limits.is_empty(), container.get_mut("resources")) {
            set_absent(resources, "requests", &limits);
        }
    }
}

/// Adds the missing entries to a map.
pub(super) fn set_absent(object: &mut Value, field: &str, entries: &serde_json::Map<String, Value>) {
    if entries.is_empty() {
        return;
    }
    let map = object.object_mut(field);
    for (key, value) in entries {
        map.entry(key.as_str()).or_insert_with(|| value.clone());
    }
}

fn service_links(pod: &mut Value) {
    pod.object_mut("spec");
    pod["spec"].set_default("enableServiceLinks", true);
}

/// With host networking, the host port defaults to the container port.
fn host_ports(pod: &mut Value) {
    let Some(spec) = pod.get_mut("spec").filter(|spec| spec.flag("hostNetwork")) else { return };
    let ports = containers(spec)
        .filter_map(|container| container.get_mut("ports").and_then(Value::as_array_mut))
        .flatten();
    for port in ports {
        if port.int("hostPort").unwrap_or(0) == 0 && port.has("containerPort") {
            port.set("hostPort", port.at("containerPort").clone());
        }
    }
}

fn volume(volume: &mut Value) {
    let has_source = volume
        .as_object()
        .is_some_and(|map| map.iter().any(|(key, value)| key != "name" && !value.is_null()));
    if !has_source {
        volume.set("emptyDir", json!({}));
    }
    if let Some(source) = volume.get_mut("image").filter(|source| source.text("pullPolicy").is_empty()) {
        source.set("pullPolicy", image::pull_policy(source.text("reference")));
    }
}

/// Defaults pod-level resources if any are set: hugepage limits to the containers' total; requests to
/// the containers' total, then to the pod's limits.
fn pod_level_resources(pod: &mut Value) {
    let Some(spec) = pod.get_mut("spec").filter(|spec| spec.at("resources").is_object()) else { return };
    let declared =
        |spec: &Value, kind| spec.at("resources").at(kind).as_object().cloned().unwrap_or_default();
    let (requests, limits) = (declared(spec, "requests"), declared(spec, "limits"));
    if requests.is_empty() && limits.is_empty() {
        return;
    }
    let mut huge_pages = aggregate(spec, "limits");
    huge_pages.retain(|name, _| name.starts_with("hugepages-") && !requests.contains_key(name));
    set_absent(&mut spec["resources"], "limits", &huge_pages);

    let limits = declared(spec, "limits");
    if limits.is_empty() {
        return;
    }
    let mut pod_requests = aggregate(spec, "requests");
    pod_requests.retain(|name, _| matches!(name.as_str(), "cpu" | "memory"));
    set_absent(&mut spec["resources"], "requests", &pod_requests);
    let supported = |name: &str| matches!(name, "cpu" | "memory") || name.starts_with("hugepages-");
    let limits = limits.into_iter().filter(|(name, _)| supported(name)).collect();
    set_absent(&mut spec["resources"], "requests", &limits);
}

type Resources = BTreeMap<String, Quantity>;

/// The total of all containers: the sum of those that run together, or the largest need during
/// initialization.
fn aggregate(spec: &Value, kind: &str) -> serde_json::Map<String, Value> {
    let of = |container: &Value| -> Resources {
        let entries = container.at("resources").entries(kind);
        entries.filter_map(|(name, value)| Some((name.to_owned(), Quantity::from_value(value)?))).collect()
    };
    let mut total = Resources::new();
    spec.items("containers").iter().for_each(|container| add(&mut total, &of(container)));
    let (mut sidecars, mut peak) = (Resources::new(), Resources::new());
    for container in spec.items("initContainers") {
        let needed = of(container);
        if container.text("restartPolicy") == "Always" {
            add(&mut total, &needed);
            add(&mut sidecars, &needed);
            continue;
        }
        // Only the maximum of the resources that this container requests can change: the total includes
        // the sidecars.
        for (name, quantity) in needed {
            let sidecar_sum = sidecars.get(&name).copied().unwrap_or(Quantity::ZERO);
            let entry = peak.entry(name).or_insert(Quantity::ZERO);
            *entry = (*entry).max(quantity + sidecar_sum);
        }
    }
    for (name, quantity) in peak {
        let entry = total.entry(name).or_insert(quantity);
        *entry = (*entry).max(quantity);
    }
    total.into_iter().map(|(name, quantity)| (name, quantity.to_string().into())).collect()
}

fn add(total: &mut Resources, more: &Resources) {
    for (name, quantity) in more {
        let sum = total.entry(name.clone()).or_insert(Quantity::ZERO);
        *sum = *sum + *quantity;
    }
}
