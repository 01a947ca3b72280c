//! What an object uses of a quota, and which quotas count it. Pure.

use std::collections::{BTreeMap, BTreeSet};

use api::Resource;
use api::json::Json as _;
use jiff::Timestamp;
use schema::quantity::{Format, Quantity};
use serde_json::Value;

use super::optional::is_extended;
use super::resources::{ResourceList, add, list, of_pod};
use super::storage::class_of;
use super::{Operation, Request};

/// Core kinds that have a name of their own in a quota besides `count/...`.
const COUNTED: &[&str] = &[
    "configmaps",
    "persistentvolumeclaims",
    "pods",
    "replicationcontrollers",
    "resourcequotas",
    "secrets",
    "services",
];
const COMPUTE: &[&str] = &["cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory"];
const CLASS: &str = ".storageclass.storage.k8s.io/";

/// Whether quotas could care about a request at all.
pub fn concerns(request: &Request<'_>) -> bool {
    let row = request.row;
    if !row.namespaced || (row.group.is_empty() && row.plural == "events") {
        return false;
    }
    match request.operation {
        Operation::Create => request.subresource.is_empty(),
        Operation::Update => matches!(
            (row.group, row.plural, request.subresource),
            ("", "pods", "resize") | ("", "services" | "persistentvolumeclaims", "")
        ),
        Operation::Delete | Operation::Connect => false,
    }
}

/// `count/deployments.apps`.
fn count_name(row: &Resource) -> String {
    match row.group {
        "" => format!("count/{}", row.plural),
        group => format!("count/{}.{group}", row.plural),
    }
}

/// Whether usage of `resource` comes from objects of `row`.
pub fn is_of(row: &Resource, resource: &str) -> bool {
    if resource == count_name(row) {
        return true;
    }
    if !row.group.is_empty() {
        return false;
    }
    if COUNTED.contains(&row.plural) && resource == row.plural {
        return true;
    }
    match row.plural {
        "pods" => {
            let compute = resource.strip_prefix("requests.").or(resource.strip_prefix("limits."));
            let name = compute.unwrap_or(resource);
            matches!(name, "cpu" | "memory" | "ephemeral-storage")
                || name.starts_with("hugepages-") && !resource.starts_with("limits.")
                || resource.strip_prefix("requests.").is_some_and(is_extended)
        }
        "services" => matches!(resource, "services.nodeports" | "services.loadbalancers"),
        "persistentvolumeclaims" => resource == "requests.storage" || resource.contains(CLASS),
        _ => false,
    }
}

/// What one object uses. Only some kinds need to be looked into; for the rest `object` may be `Null`.
pub fn usage(row: &Resource, object: &Value, now: Timestamp) -> ResourceList {
    let mut used = ResourceList::new();
    used.insert(count_name(row), whole(1));
    if !row.group.is_empty() {
        return used;
    }
    match row.plural {
        "pods" if !counts(object, now) => return used,
        "pods" => add(&mut used, &of_running(object.at("spec"))),
        "services" => of_service(object.at("spec"), &mut used),
        "persistentvolumeclaims" => of_claim(object, &mut used),
        _ => {}
    }
    if COUNTED.contains(&row.plural) {
        used.insert(row.plural.to_owned(), whole(1));
    }
    used
}

/// Whether an object must be decoded to know what it uses.
pub fn looks_inside(row: &Resource) -> bool {
    row.group.is_empty() && matches!(row.plural, "pods" | "services" | "persistentvolumeclaims")
}

fn whole(n: usize) -> Quantity {
    Quantity::new(i64::try_from(n).unwrap_or(i64::MAX), Format::DecimalSI)
}

/// A pod that has ended, or should have long ago, uses nothing any more.
fn counts(pod: &Value, now: Timestamp) -> bool {
    if matches!(pod.at("status").text("phase"), "Failed" | "Succeeded") {
        return false;
    }
    let metadata = pod.at("metadata");
    let end = metadata.text("deletionTimestamp").parse::<Timestamp>().ok();
    match (end, metadata.int("deletionGracePeriodSeconds")) {
        (Some(end), Some(grace)) => now.as_second() <= end.as_second().saturating_add(grace),
        _ => true,
    }
}

fn of_running(spec: &Value) -> ResourceList {
    let mut requests = of_pod(spec, "requests");
    let mut limits = of_pod(spec, "limits");
    let overhead = list(spec, "overhead");
    add(&mut requests, &overhead);
    for (name, quantity) in overhead {
        if let Some(limit) = limits.get_mut(&name) {
            *limit = *limit + quantity;
        }
    }
    compute(&requests, &limits)
}

/// Requests and limits under the names quotas have for them.
fn compute(requests: &ResourceList, limits: &ResourceList) -> ResourceList {
    let mut used = ResourceList::new();
    for (name, quantity) in requests {
        let plain = matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage");
        if plain || name.starts_with("hugepages-") {
            used.insert(name.clone(), *quantity);
            used.insert(format!("requests.{name}"), *quantity);
        } else if is_extended(name) {
            used.insert(format!("requests.{name}"), *quantity);
        }
    }
    for (name, quantity) in limits {
        if matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage") {
            used.insert(format!("limits.{name}"), *quantity);
        }
    }
    used
}

fn of_service(spec: &Value, used: &mut ResourceList) {
    let ports = spec.items("ports");
    let (balancers, node_ports) = match spec.text("type") {
        "NodePort" => (0, ports.len()),
        "LoadBalancer" if spec.at("allocateLoadBalancerNodePorts") == false => {
            (1, ports.iter().filter(|port| port.int("nodePort").unwrap_or(0) != 0).count())
        }
        "LoadBalancer" => (1, ports.len()),
        _ => (0, 0),
    };
    used.insert("services.loadbalancers".into(), whole(balancers));
    used.insert("services.nodeports".into(), whole(node_ports));
}

fn of_claim(claim: &Value, used: &mut ResourceList) {
    let class = class_of(claim);
    if !class.is_empty() {
        used.insert(format!("{class}{CLASS}persistentvolumeclaims"), whole(1));
    }
    // A claim that has grown or shrinks counts with the larger size.
    let asked = Quantity::read(claim.path("spec.resources.requests.storage"));
    let given = Quantity::read(claim.path("status.allocatedResources.storage"));
    if let Some(size) = asked.max(given) {
        used.insert("requests.storage".into(), size);
        if !class.is_empty() {
            used.insert(format!("{class}{CLASS}requests.storage"), size);
        }
    }
}

/// Where a quota limits compute, every container must say what it takes.
pub fn missing(row: &Resource, restricted: &[&str], object: &Value) -> Option<String> {
    if row.plural != "pods" || !row.group.is_empty() {
        return None;
    }
    let spec = object.at("spec");
    let said = |value: &Value| {
        let resources = value.at("resources");
        compute(&list(resources, "requests"), &list(resources, "limits"))
    };
    let of_pod = said(spec);
    let mut missing: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for container in spec.items("containers").iter().chain(spec.items("initContainers")) {
        let said = said(container);
        for name in restricted.iter().filter(|name| COMPUTE.contains(name)) {
            if !said.contains_key(*name) && !of_pod.contains_key(*name) {
                missing.entry(name).or_default().insert(container.text("name"));
            }
        }
    }
    let lines: Vec<String> = missing
        .into_iter()
        .map(|(name, containers)| {
            format!("{name} for: {}", containers.into_iter().collect::<Vec<_>>().join(","))
        })
        .collect();
    (!lines.is_empty()).then(|| format!("must specify {}", lines.join("; ")))
}

/// Whether a quota counts an object: all of its scopes hold. Scopes are about pods and claims; a quota that
/// has any counts nothing else.
pub fn matches(quota: &Value, row: &Resource, object: &Value) -> bool {
    let spec = quota.at("spec");
    let plain = spec.items("scopes").iter().filter_map(Value::as_str).map(|scope| (scope, "Exists", &[][..]));
    let selected = spec.at("scopeSelector").items("matchExpressions").iter();
    let selected = selected.map(|term| (term.text("scopeName"), term.text("operator"), term.items("values")));
    plain.chain(selected).all(|(scope, operator, values)| in_scope(row, object, scope, operator, values))
}

fn in_scope(row: &Resource, object: &Value, scope: &str, operator: &str, values: &[Value]) -> bool {
    let spec = object.at("spec");
    let named = |name: &str| match operator {
        "Exists" => !name.is_empty(),
        "DoesNotExist" => name.is_empty(),
        "In" => values.iter().any(|value| value == name),
        "NotIn" => !values.iter().any(|value| value == name),
        _ => false,
    };
    match (row.group, row.plural, scope) {
        ("", "pods", "Terminating") => spec.int("activeDeadlineSeconds").is_some_and(|seconds| seconds >= 0),
        ("", "pods", "NotTerminating") => spec.int("activeDeadlineSeconds").is_none_or(|seconds| seconds < 0),
        ("", "pods", "BestEffort") => api::core::pod::qos_class(object) == "BestEffort",
        ("", "pods", "NotBestEffort") => api::core::pod::qos_class(object) != "BestEffort",
        ("", "pods", "PriorityClass") => named(spec.text("priorityClassName")),
        ("", "pods", "CrossNamespacePodAffinity") => crosses_namespaces(spec.at("affinity")),
        ("", "persistentvolumeclaims", "VolumeAttributesClass") => {
            named(spec.text("volumeAttributesClassName"))
        }
        _ => false,
    }
}

fn crosses_namespaces(affinity: &Value) -> bool {
    let crosses = |term: &Value| !term.items("namespaces").is_empty() || term.has("namespaceSelector");
    ["podAffinity", "podAntiAffinity"].iter().any(|kind| {
        let rules = affinity.at(kind);
        rules.items("requiredDuringSchedulingIgnoredDuringExecution").iter().any(crosses)
            || rules
                .items("preferredDuringSchedulingIgnoredDuringExecution")
                .iter()
                .any(|weighted| crosses(weighted.at("podAffinityTerm")))
    })
}
