//! LimitRanger: default resources for containers, and bounds for containers, pods and claims.

use api::Status;
use api::json::Json as _;
use api::resources::{ResourceList, list, of_pod};
use schema::quantity::Quantity;
use serde_json::Value;

use super::{Cluster, Operation, Request};

const ANNOTATION: &str = "kubernetes.io/limit-ranger";

pub fn admit(request: &Request<'_>, object: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !concerns(request) || request.row.plural != "pods" {
        return Ok(());
    }
    for range in ranges(request, cluster) {
        set_defaults(&range, object);
    }
    Ok(())
}

pub fn validate(request: &Request<'_>, object: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !concerns(request) {
        return Ok(());
    }
    for range in ranges(request, cluster) {
        let mut complaints = Vec::new();
        for limit in range.at("spec").items("limits") {
            check_limit(request, limit, object.at("spec"), &mut complaints);
        }
        if let Some(why) = aggregate(complaints) {
            return Err(request.forbidden(why));
        }
    }
    Ok(())
}

/// Pods as they come and as they are resized, and claims; nothing that is being deleted.
fn concerns(request: &Request<'_>) -> bool {
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
    let mut notes = Vec::new();
    for (field, word) in [("containers", "container"), ("initContainers", "init container")] {
        let list = pod.get_mut("spec").and_then(|spec| spec.get_mut(field)).and_then(Value::as_array_mut);
        for container in list.into_iter().flatten() {
            let name = container.text("name").to_owned();
            for (from, to, what) in
                [("defaultRequest", "requests", "request"), ("default", "limits", "limit")]
            {
                let set = merge(container, to, containers.iter().flat_map(|limit| limit.entries(from)));
                if !set.is_empty() {
                    notes.push(format!("{} {what} for {word} {name}", set.join(", ")));
                }
            }
        }
    }
    if !notes.is_empty() {
        let note = format!("LimitRanger plugin set: {}", notes.join("; "));
        let metadata = pod.object_mut("metadata");
        let annotations = metadata.entry("annotations").or_insert(Value::Null);
        if !annotations.is_object() {
            *annotations = Value::Object(serde_json::Map::new());
        }
        annotations.set(ANNOTATION, note);
    }
}

/// Fills in what is missing of `field` and names it; of several defaults the last counts.
fn merge<'a>(
    container: &mut Value,
    field: &str,
    defaults: impl Iterator<Item = (&'a str, &'a Value)>,
) -> Vec<String> {
    let had = list(container.at("resources"), field);
    let mut set = Vec::new();
    for (name, quantity) in defaults.filter(|(name, _)| !had.contains_key(*name)) {
        container.object_mut("resources");
        container["resources"].object_mut(field).insert(name.to_owned(), quantity.clone());
        set.push(name.to_owned());
    }
    set.sort();
    set.dedup();
    set
}

fn check_limit(request: &Request<'_>, limit: &Value, spec: &Value, complaints: &mut Vec<String>) {
    let kind = limit.text("type");
    match (request.row.plural, kind) {
        ("persistentvolumeclaims", "PersistentVolumeClaim") => {
            let asked = list(spec.at("resources"), "requests");
            let bounds = Bounds { kind, requests: asked, limits: ResourceList::new() };
            for (name, min) in list(limit, "min") {
                complaints.extend(bounds.too_little(&name, min));
            }
            for (name, max) in list(limit, "max") {
                complaints.extend(bounds.request_too_large(&name, max));
            }
        }
        ("pods", "Container") => {
            let containers = spec.items("containers").iter().chain(spec.items("initContainers"));
            for container in containers {
                let resources = container.at("resources");
                let (requests, limits) = (list(resources, "requests"), list(resources, "limits"));
                Bounds { kind, requests, limits }.check(limit, complaints);
            }
        }
        ("pods", "Pod") => {
            let (requests, limits) = (of_pod(spec, "requests"), of_pod(spec, "limits"));
            Bounds { kind, requests, limits }.check(limit, complaints);
        }
        _ => {}
    }
}

/// What something asks for, to be held against a limit.
struct Bounds<'a> {
    kind: &'a str,
    requests: ResourceList,
    limits: ResourceList,
}

impl Bounds<'_> {
    fn check(&self, limit: &Value, complaints: &mut Vec<String>) {
        for (name, min) in list(limit, "min") {
            complaints.extend(self.too_little(&name, min));
        }
        for (name, max) in list(limit, "max") {
            complaints.extend(self.too_much(&name, max));
        }
        for (name, ratio) in list(limit, "maxLimitRequestRatio") {
            complaints.extend(self.too_generous(&name, ratio));
        }
    }

    fn too_little(&self, name: &str, min: Quantity) -> Option<String> {
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

    fn too_much(&self, name: &str, max: Quantity) -> Option<String> {
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

    /// Claims have no limits.
    fn request_too_large(&self, name: &str, max: Quantity) -> Option<String> {
        let bound = format!("maximum {name} usage per {} is {max}", self.kind);
        let Some(request) = self.requests.get(name) else {
            return Some(format!("{bound}.  No request is specified"));
        };
        (*request > max).then(|| format!("{bound}, but request is {request}"))
    }

    fn too_generous(&self, name: &str, most: Quantity) -> Option<String> {
        let bound = format!("{name} max limit to request ratio per {} is {most}", self.kind);
        let Some(request) = self.requests.get(name).filter(|request| !request.is_zero()) else {
            return Some(format!("{bound}, but no request is specified or request is 0"));
        };
        let Some(limit) = self.limits.get(name).filter(|limit| !limit.is_zero()) else {
            return Some(format!("{bound}, but no limit is specified or limit is 0"));
        };
        let ratio = limit.to_f64() / request.to_f64();
        (ratio > most.to_f64()).then(|| format!("{bound}, but provided ratio is {ratio:.6}"))
    }
}

/// Several complaints as upstream joins them, each said once.
fn aggregate(complaints: Vec<String>) -> Option<String> {
    let mut said: Vec<String> = Vec::new();
    for complaint in complaints {
        if !said.contains(&complaint) {
            said.push(complaint);
        }
    }
    match said.len() {
        0 => None,
        1 => said.pop(),
        _ => Some(format!("[{}]", said.join(", "))),
    }
}
