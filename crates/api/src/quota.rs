//! Computes the usage of an object for ResourceQuotas, and matches objects with quota scopes. Does no I/O.
//!
//! Used by the quota admission plugin of the API server and by the quota controller.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use schema::quantity::{Format, Quantity};
use serde_json::Value;

use crate::json::JsonExt as _;
use crate::resources::{ResourceList, add_resources, pod_resources_in_use, resource_list};

/// Core resources with their own quota name besides `count/...`.
const COUNTED_CORE_RESOURCES: &[&str] = &[
    "configmaps",
    "persistentvolumeclaims",
    "pods",
    "replicationcontrollers",
    "resourcequotas",
    "secrets",
    "services",
];
const COMPUTE_RESOURCES: &[&str] =
    &["cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory"];
const STORAGE_CLASS_SUFFIX: &str = ".storageclass.storage.k8s.io/";

/// A resource by group and plural. The core group is `""`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QuotaResource<'a> {
    pub group: &'a str,
    pub plural: &'a str,
}

impl<'a> QuotaResource<'a> {
    /// A resource of the core group.
    pub const fn core(plural: &'a str) -> QuotaResource<'a> {
        QuotaResource { group: "", plural }
    }

    /// The quota name, such as `count/deployments.apps`.
    fn count_name(self) -> String {
        match self.group {
            "" => format!("count/{}", self.plural),
            group => format!("count/{}.{group}", self.plural),
        }
    }

    fn is_core(self, plural: &str) -> bool {
        self.group.is_empty() && self.plural == plural
    }

    /// Whether the usage depends on the contents of the object.
    pub fn needs_object(self) -> bool {
        ["pods", "services", "persistentvolumeclaims"].into_iter().any(|plural| self.is_core(plural))
    }
}

impl<'a> From<&'a crate::Resource> for QuotaResource<'a> {
    fn from(row: &'a crate::Resource) -> QuotaResource<'a> {
        QuotaResource { group: row.group, plural: row.plural }
    }
}

/// The kind of object that uses a quota resource; `None` if nothing uses it.
pub fn resource_for(resource: &str) -> Option<QuotaResource<'_>> {
    if let Some(name) = resource.strip_prefix("count/") {
        let (plural, group) = name.split_once('.').unwrap_or((name, ""));
        return Some(QuotaResource { group, plural });
    }
    if COUNTED_CORE_RESOURCES.contains(&resource) {
        return Some(QuotaResource::core(resource));
    }
    if matches!(resource, "services.nodeports" | "services.loadbalancers") {
        return Some(QuotaResource::core("services"));
    }
    if resource == "requests.storage" || resource.contains(STORAGE_CLASS_SUFFIX) {
        return Some(QuotaResource::core("persistentvolumeclaims"));
    }
    let compute = resource.strip_prefix("requests.").or(resource.strip_prefix("limits."));
    let name = compute.unwrap_or(resource);
    let of_pods = matches!(name, "cpu" | "memory" | "ephemeral-storage")
        || name.starts_with("hugepages-") && !resource.starts_with("limits.")
        || resource.strip_prefix("requests.").is_some_and(is_extended);
    of_pods.then_some(QuotaResource::core("pods"))
}

/// Whether objects of this kind use `resource`.
pub fn is_used_by(kind: QuotaResource<'_>, resource: &str) -> bool {
    resource_for(resource) == Some(kind)
}

/// Whether this is an extended resource, with a domain outside of `kubernetes.io`.
pub fn is_extended(name: &str) -> bool {
    let native = !name.contains('/') || name.contains("kubernetes.io/");
    !native && !name.starts_with("requests.")
}

/// The storage class of a claim, from the legacy annotation or the field.
pub fn storage_class(claim: &Value) -> &str {
    match claim.path("metadata.annotations").get("volume.beta.kubernetes.io/storage-class") {
        Some(class) => class.as_str().unwrap_or(""),
        None => claim.at("spec").text("storageClassName"),
    }
}

/// The usage of an object. `object` may be `Null` for kinds without [`QuotaResource::needs_object`].
pub fn usage(kind: QuotaResource<'_>, object: &Value, now: Timestamp) -> ResourceList {
    let mut used = ResourceList::new();
    used.insert(kind.count_name(), count_quantity(1));
    if !kind.group.is_empty() {
        return used;
    }
    match kind.plural {
        "pods" if !is_counted(object, now) => return used,
        "pods" => add_resources(&mut used, &pod_usage(object)),
        "services" => service_usage(object.at("spec"), &mut used),
        "persistentvolumeclaims" => claim_usage(object, &mut used),
        _ => {}
    }
    if COUNTED_CORE_RESOURCES.contains(&kind.plural) {
        used.insert(kind.plural.to_owned(), count_quantity(1));
    }
    used
}

fn count_quantity(n: usize) -> Quantity {
    Quantity::new(i64::try_from(n).unwrap_or(i64::MAX), Format::DecimalSI)
}

/// Finished pods, and deleted pods whose grace period has expired, are not counted.
fn is_counted(pod: &Value, now: Timestamp) -> bool {
    let ended = matches!(pod.at("status").text("phase"), "Failed" | "Succeeded");
    !ended && counted_until(pod).is_none_or(|until| now.as_second() <= until)
}

/// The time until which a pod that is being deleted is counted.
pub fn counted_until(pod: &Value) -> Option<i64> {
    let metadata = pod.at("metadata");
    let end = metadata.text("deletionTimestamp").parse::<Timestamp>().ok()?;
    Some(end.as_second().saturating_add(metadata.int("deletionGracePeriodSeconds")?))
}

fn pod_usage(pod: &Value) -> ResourceList {
    let mut requests = pod_resources_in_use(pod, "requests");
    let mut limits = pod_resources_in_use(pod, "limits");
    let overhead = resource_list(pod.at("spec"), "overhead");
    add_resources(&mut requests, &overhead);
    for (name, quantity) in overhead {
        if let Some(limit) = limits.get_mut(&name) {
            *limit = *limit + quantity;
        }
    }
    compute_usage(&requests, &limits)
}

/// The usage of requests and limits under their quota names.
fn compute_usage(requests: &ResourceList, limits: &ResourceList) -> ResourceList {
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

fn service_usage(spec: &Value, used: &mut ResourceList) {
    let ports = spec.items("ports");
    let (lb_count, node_ports) = match spec.text("type") {
        "NodePort" => (0, ports.len()),
        "LoadBalancer" if spec.at("allocateLoadBalancerNodePorts") == false => {
            (1, ports.iter().filter(|port| port.int("nodePort").unwrap_or(0) != 0).count())
        }
        "LoadBalancer" => (1, ports.len()),
        _ => (0, 0),
    };
    used.insert("services.loadbalancers".into(), count_quantity(lb_count));
    used.insert("services.nodeports".into(), count_quantity(node_ports));
}

fn claim_usage(claim: &Value, used: &mut ResourceList) {
    let class = storage_class(claim);
    if !class.is_empty() {
        used.insert(format!("{class}{STORAGE_CLASS_SUFFIX}persistentvolumeclaims"), count_quantity(1));
    }
    // A claim that is being resized counts with the larger size.
    let requested = Quantity::from_value(claim.path("spec.resources.requests.storage"));
    let allocated = Quantity::from_value(claim.path("status.allocatedResources.storage"));
    if let Some(size) = requested.max(allocated) {
        used.insert("requests.storage".into(), size);
        if !class.is_empty() {
            used.insert(format!("{class}{STORAGE_CLASS_SUFFIX}requests.storage"), size);
        }
    }
}

/// If a quota restricts compute resources, all containers must specify them.
pub fn missing_requirements(kind: QuotaResource<'_>, restricted: &[&str], object: &Value) -> Option<String> {
    if !kind.is_core("pods") {
        return None;
    }
    let spec = object.at("spec");
    let declared = |value: &Value| {
        let resources = value.at("resources");
        compute_usage(&resource_list(resources, "requests"), &resource_list(resources, "limits"))
    };
    let pod_declared = declared(spec);
    let mut missing: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for container in spec.items("containers").iter().chain(spec.items("initContainers")) {
        let declared = declared(container);
        for name in restricted.iter().filter(|name| COMPUTE_RESOURCES.contains(name)) {
            if !declared.contains_key(*name) && !pod_declared.contains_key(*name) {
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

/// The properties of an object that quota scopes match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ScopeAttributes {
    /// Scopes only apply to pods and claims. A quota with scopes does not count other kinds.
    #[default]
    Other,
    Pod {
        terminating: bool,
        best_effort: bool,
        priority_class: String,
        cross_namespace_affinity: bool,
    },
    Claim {
        attributes_class: String,
    },
}

impl ScopeAttributes {
    pub fn from_object(kind: QuotaResource<'_>, object: &Value) -> ScopeAttributes {
        let spec = object.at("spec");
        if kind.is_core("pods") {
            return ScopeAttributes::Pod {
                terminating: spec.int("activeDeadlineSeconds").is_some_and(|seconds| seconds >= 0),
                best_effort: crate::core::pod::qos_class(object) == "BestEffort",
                priority_class: spec.text("priorityClassName").to_owned(),
                cross_namespace_affinity: has_cross_namespace_affinity(spec.at("affinity")),
            };
        }
        match kind.is_core("persistentvolumeclaims") {
            true => {
                ScopeAttributes::Claim { attributes_class: spec.text("volumeAttributesClassName").to_owned() }
            }
            false => ScopeAttributes::Other,
        }
    }
}

pub fn has_scopes(spec: &Value) -> bool {
    !spec.items("scopes").is_empty() || spec.has("scopeSelector")
}

/// Whether an object matches all scopes of a quota.
pub fn matches(quota: &Value, attributes: &ScopeAttributes) -> bool {
    let spec = quota.at("spec");
    let scopes =
        spec.items("scopes").iter().filter_map(Value::as_str).map(|scope| (scope, "Exists", &[][..]));
    let selectors = spec.at("scopeSelector").items("matchExpressions").iter();
    let selectors =
        selectors.map(|term| (term.text("scopeName"), term.text("operator"), term.items("values")));
    scopes.chain(selectors).all(|(scope, operator, values)| in_scope(attributes, scope, operator, values))
}

fn in_scope(attributes: &ScopeAttributes, scope: &str, operator: &str, values: &[Value]) -> bool {
    let named = |name: &str| match operator {
        "Exists" => !name.is_empty(),
        "DoesNotExist" => name.is_empty(),
        "In" => values.iter().any(|value| value == name),
        "NotIn" => !values.iter().any(|value| value == name),
        _ => false,
    };
    match (attributes, scope) {
        (ScopeAttributes::Pod { terminating, .. }, "Terminating") => *terminating,
        (ScopeAttributes::Pod { terminating, .. }, "NotTerminating") => !terminating,
        (ScopeAttributes::Pod { best_effort, .. }, "BestEffort") => *best_effort,
        (ScopeAttributes::Pod { best_effort, .. }, "NotBestEffort") => !best_effort,
        (ScopeAttributes::Pod { priority_class, .. }, "PriorityClass") => named(priority_class),
        (
            ScopeAttributes::Pod { cross_namespace_affinity: crosses_namespaces, .. },
            "CrossNamespacePodAffinity",
        ) => *crosses_namespaces,
        (ScopeAttributes::Claim { attributes_class }, "VolumeAttributesClass") => named(attributes_class),
        _ => false,
    }
}

fn has_cross_namespace_affinity(affinity: &Value) -> bool {
    let is_cross_namespace =
        |term: &Value| !term.items("namespaces").is_empty() || term.has("namespaceSelector");
    ["podAffinity", "podAntiAffinity"].iter().any(|kind| {
        let rules = affinity.at(kind);
        rules.items("requiredDuringSchedulingIgnoredDuringExecution").iter().any(is_cross_namespace)
            || rules
                .items("preferredDuringSchedulingIgnoredDuringExecution")
                .iter()
                .any(|weighted| is_cross_namespace(weighted.at("podAffinityTerm")))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn maps_quota_resource_to_group_resource() {
        let check = |resource: &str, expected: Option<(&str, &str)>| {
            assert_eq!(resource_for(resource).map(|kind| (kind.group, kind.plural)), expected, "{resource}");
        };
        check("count/deployments.apps", Some(("apps", "deployments")));
        check("count/widgets.example.com", Some(("example.com", "widgets")));
        check("count/pods", Some(("", "pods")));
        check("secrets", Some(("", "secrets")));
        check("services.nodeports", Some(("", "services")));
        check("gold.storageclass.storage.k8s.io/requests.storage", Some(("", "persistentvolumeclaims")));
        check("limits.memory", Some(("", "pods")));
        check("requests.example.com/gpu", Some(("", "pods")));
        check("limits.hugepages-2Mi", None);
        check("example.com/gpu", None);
    }

    #[test]
    fn scopes_select_pods() {
        let in_scope = |scope: Value, spec: Value| {
            let quota = json!({"spec": scope});
            matches(
                &quota,
                &ScopeAttributes::from_object(QuotaResource::core("pods"), &json!({"spec": spec})),
            )
        };
        let plain = |scope: &str| json!({"scopes": [scope]});
        let class = |operator: &str, values: Value| json!({"scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass", "operator": operator, "values": values}]}});
        let cases = [
            (plain("Terminating"), json!({"activeDeadlineSeconds": 5}), true),
            (plain("Terminating"), json!({}), false),
            (plain("NotTerminating"), json!({}), true),
            (plain("BestEffort"), json!({"containers": [{"name": "c"}]}), true),
            (plain("NotBestEffort"), json!({"containers": [{"name": "c"}]}), false),
            (class("In", json!(["high"])), json!({"priorityClassName": "high"}), true),
            (class("In", json!(["high"])), json!({"priorityClassName": "low"}), false),
            (class("NotIn", json!(["high"])), json!({}), true),
            (class("Exists", json!([])), json!({}), false),
            (json!({}), json!({}), true),
        ];
        for (scope, spec, expected) in cases {
            assert_eq!(in_scope(scope.clone(), spec.clone()), expected, "{scope} {spec}");
        }
    }

    #[test]
    fn usage_of_each_resource() {
        let now = "2026-01-01T00:00:00Z".parse().unwrap();
        let check = |plural: &str, object: Value, expected: &str| {
            let kind = QuotaResource::core(plural);
            let used = usage(kind, &object, now);
            let used: Vec<String> =
                used.iter().map(|(name, quantity)| format!("{name}={quantity}")).collect();
            assert_eq!(used.join(" "), expected, "{object}");
            for name in used.iter().filter_map(|part| part.split_once('=')).map(|(name, _)| name) {
                assert!(is_used_by(kind, name), "{name}");
            }
        };
        let resources = json!({"requests": {"cpu": "1", "example.com/gpu": "2", "hugepages-2Mi": "4Mi"}, "limits": {"memory": "1Gi"}});
        let pod = |phase: &str| json!({"spec": {"containers": [{"name": "c", "resources": resources}], "overhead": {"cpu": "500m"}}, "status": {"phase": phase}});
        check(
            "pods",
            pod("Pending"),
            "count/pods=1 cpu=1500m hugepages-2Mi=4Mi limits.memory=1Gi pods=1 requests.cpu=1500m requests.example.com/gpu=2 requests.hugepages-2Mi=4Mi",
        );
        check("pods", pod("Succeeded"), "count/pods=1");
        let late = json!({"metadata": {"deletionTimestamp": "2025-12-31T23:59:00Z", "deletionGracePeriodSeconds": 30}});
        check("pods", late, "count/pods=1");
        check("configmaps", Value::Null, "configmaps=1 count/configmaps=1");
        let service = json!({"spec": {"type": "LoadBalancer", "ports": [{"port": 1}, {"port": 2}]}});
        check(
            "services",
            service,
            "count/services=1 services=1 services.loadbalancers=1 services.nodeports=2",
        );
        let bare = json!({"spec": {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "ports": [{"port": 1}]}});
        check("services", bare, "count/services=1 services=1 services.loadbalancers=1 services.nodeports=0");
        let claim = json!({"spec": {"storageClassName": "fast", "resources": {"requests": {"storage": "1Gi"}}}, "status": {"allocatedResources": {"storage": "2Gi"}}});
        check(
            "persistentvolumeclaims",
            claim,
            "count/persistentvolumeclaims=1 fast.storageclass.storage.k8s.io/persistentvolumeclaims=1 fast.storageclass.storage.k8s.io/requests.storage=2Gi persistentvolumeclaims=1 requests.storage=2Gi",
        );
    }
}
