//! LimitRanger: default requests and limits for containers; minimum, maximum and ratio for
//! containers, pods, claims.

use api::Status;
use api::json::JsonExt as _;
use api::resources::{ResourceList, pod_resources, resource_list};
use schema::quantity::Quantity;
use serde_json::Value;

use super::{Cluster, Operation, Request};

const ANNOTATION: &str = "kubernetes.io/limit-ranger";

pub fn admit(request: &Request<'_>, object: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !supports(request) || request.row.plural != "pods" {
        return Ok(());
    }
    for range in ranges(request, cluster) {
        set_defaults(&range, object);
    }
    Ok(())
}

pub fn validate(request: &Request<'_>, object: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !supports(request) {
        return Ok(());
    }
    for range in ranges(request, cluster) {
        let mut errors = Vec::new();
        for limit in range.at("spec").items("limits") {
            check_limit(request, limit, object.at("spec"), &mut errors);
        }
        if let Some(reason) = aggregate(errors) {
            return Err(request.forbidden(reason));
        }
    }
    Ok(())
}

/// Whether LimitRanger handles the request: creation and resize of pods, and claims; never objects
/// being deleted.
fn supports(request: &Request<'_>) -> bool {
    let (row, operation) = (request.row, request.operation);
    let kind = match (row.group, row.plural, request.subresource) {
        ("", "pods", "resize") => operation == Operation::Update,
        ("", "pods", "") => operation == Operation::Create,
        ("", "persistentvolumeclaims", "") => operation != Operation::Delete,
        _ => false,
    };
    kind && !request.old.is_some_and(|old| old.at("metadata").has("deletionTimestamp"))
}

fn ranges(request: &Request<'_>, cluster: &dyn Cluster) -> Vec<Value> {
    cluster.list("", "limitranges", request.namespace).iter().map(|range| range.value()).collect()
}

fn set_defaults(range: &Value, pod: &mut Value) {
    let limits = range.at("spec").items("limits");
    let containers: Vec<&Value> = limits.iter().filter(|limit| limit.text("type") == "Container").collect();
    let mut changes = Vec::new();
    for (field, word) in [("containers", "container"), ("initContainers", "init container")] {
        let list = pod.get_mut("spec").and_then(|spec| spec.get_mut(field)).and_then(Value::as_array_mut);
        for container in list.into_iter().flatten() {
            let name = container.text("name").to_owned();
            for (from, to, what) in
                [("defaultRequest", "requests", "request"), ("default", "limits", "limit")]
            {
                let set =
                    merge_defaults(container, to, containers.iter().flat_map(|limit| limit.entries(from)));
                if !set.is_empty() {
                    changes.push(format!("{} {what} for {word} {name}", set.join(", ")));
                }
            }
        }
    }
    if !changes.is_empty() {
        let message = format!("LimitRanger plugin set: {}", changes.join("; "));
        let metadata = pod.object_mut("metadata");
        let annotations = metadata.entry("annotations").or_insert(Value::Null);
        if !annotations.is_object() {
            *annotations = Value::Object(serde_json::Map::new());
        }
        annotations.set(ANNOTATION, message);
    }
}

/// Adds missing resources to `field` and returns their names. Of several defaults the last one
/// wins.
fn merge_defaults<'a>(
    container: &mut Value,
    field: &str,
    defaults: impl Iterator<Item = (&'a str, &'a Value)>,
) -> Vec<String> {
    let existing = resource_list(container.at("resources"), field);
    let mut set = Vec::new();
    for (name, quantity) in defaults.filter(|(name, _)| !existing.contains_key(*name)) {
        container.object_mut("resources");
        container["resources"].object_mut(field).insert(name.to_owned(), quantity.clone());
        set.push(name.to_owned());
    }
    set.sort();
    set.dedup();
    set
}

fn check_limit(request: &Request<'_>, limit: &Value, spec: &Value, errors: &mut Vec<String>) {
    let kind = limit.text("type");
    match (request.row.plural, kind) {
        ("persistentvolumeclaims", "PersistentVolumeClaim") => {
            let requested = resource_list(spec.at("resources"), "requests");
            let target = LimitTarget { kind, requests: requested, limits: ResourceList::new() };
            for (name, min) in resource_list(limit, "min") {
                errors.extend(target.min_constraint(&name, min));
            }
            for (name, max) in resource_list(limit, "max") {
                errors.extend(target.max_request_constraint(&name, max));
            }
        }
        ("pods", "Container") => {
            let containers = spec.items("containers").iter().chain(spec.items("initContainers"));
            for container in containers {
                let resources = container.at("resources");
                let (requests, limits) =
                    (resource_list(resources, "requests"), resource_list(resources, "limits"));
                LimitTarget { kind, requests, limits }.check(limit, errors);
            }
        }
        ("pods", "Pod") => {
            let (requests, limits) = (pod_resources(spec, "requests"), pod_resources(spec, "limits"));
            LimitTarget { kind, requests, limits }.check(limit, errors);
        }
        _ => {}
    }
}

/// The requests and limits that are compared with one limit.
struct LimitTarget<'a> {
    kind: &'a str,
    requests: ResourceList,
    limits: ResourceList,
}

impl LimitTarget<'_> {
    fn check(&self, limit: &Value, errors: &mut Vec<String>) {
        for (name, min) in resource_list(limit, "min") {
            errors.extend(self.min_constraint(&name, min));
        }
        for (name, max) in resource_list(limit, "max") {
            errors.extend(self.max_constraint(&name, max));
        }
        for (name, ratio) in resource_list(limit, "maxLimitRequestRatio") {
            errors.extend(self.limit_request_ratio_constraint(&name, ratio));
        }
    }

    fn min_constraint(&self, name: &str, min: Quantity) -> Option<String> {
        let bound = format!("minimum {name} usage per {} is {min}", self.kind);
        let Some(request) = self.requests.get(name) else {
            return Some(format!("{bound}.  No request is specified"));
        };
        if *request < min {
            return Some(format!("{bound}, but request is {request}"));
        }
        let limit = self.limits.get(name).filter(|limit| **limit < min)?;
        Some(format!("{bound}, but limit is {limit}"))
    }

    fn max_constraint(&self, name: &str, max: Quantity) -> Option<String> {
        let bound = format!("maximum {name} usage per {} is {max}", self.kind);
        let Some(limit) = self.limits.get(name) else {
            return Some(format!("{bound}.  No limit is specified"));
        };
        if *limit > max {
            return Some(format!("{bound}, but limit is {limit}"));
        }
        let request = self.requests.get(name).filter(|request| **request > max)?;
        Some(format!("{bound}, but request is {request}"))
    }

    /// Claims have requests only.
    fn max_request_constraint(&self, name: &str, max: Quantity) -> Option<String> {
        let bound = format!("maximum {name} usage per {} is {max}", self.kind);
        let Some(request) = self.requests.get(name) else {
            return Some(format!("{bound}.  No request is specified"));
        };
        (*request > max).then(|| format!("{bound}, but request is {request}"))
    }

    fn limit_request_ratio_constraint(&self, name: &str, max_ratio: Quantity) -> Option<String> {
        let bound = format!("{name} max limit to request ratio per {} is {max_ratio}", self.kind);
        let Some(request) = self.requests.get(name).filter(|request| !request.is_zero()) else {
            return Some(format!("{bound}, but no request is specified or request is 0"));
        };
        let Some(limit) = self.limits.get(name).filter(|limit| !limit.is_zero()) else {
            return Some(format!("{bound}, but no limit is specified or limit is 0"));
        };
        let ratio = limit.to_f64() / request.to_f64();
        (ratio > max_ratio.to_f64()).then(|| format!("{bound}, but provided ratio is {ratio:.6}"))
    }
}

/// Joins errors as upstream's `utilerrors.NewAggregate`, without duplicates.
fn aggregate(errors: Vec<String>) -> Option<String> {
    let mut unique: Vec<String> = Vec::new();
    for error in errors {
        if !unique.contains(&error) {
            unique.push(error);
        }
    }
    match unique.len() {
        0 => None,
        1 => unique.pop(),
        _ => Some(format!("[{}]", unique.join(", "))),
    }
}
