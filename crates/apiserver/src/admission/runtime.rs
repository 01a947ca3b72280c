//! RuntimeClass: adds the overhead and the scheduling constraints of the runtime class to pods.

use api::Status;
use api::json::JsonExt as _;
use api::resources::resource_list;
use serde_json::Value;

use super::{Cluster, Request};

const OVERHEAD_MISMATCH: &str = "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead";

pub fn admit(request: &Request<'_>, pod: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !request.creates("", "pods") {
        return Ok(());
    }
    let Some(class) = runtime_class(request, pod, cluster)? else { return Ok(()) };
    if class.has("overhead") {
        let pod_overhead = resource_list(pod.at("spec"), "overhead");
        if !pod_overhead.is_empty() && pod_overhead != resource_list(class.at("overhead"), "podFixed") {
            return Err(request.forbidden(OVERHEAD_MISMATCH));
        }
        let overhead = class.at("overhead").at("podFixed");
        if !overhead.is_null() {
            pod.object_mut("spec").insert("overhead".into(), overhead.clone());
        }
    }
    if class.has("scheduling") {
        schedule(request, pod, class.at("scheduling"))?;
    }
    Ok(())
}

pub fn validate(request: &Request<'_>, pod: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !request.creates("", "pods") {
        return Ok(());
    }
    match runtime_class(request, pod, cluster)?.filter(|class| class.has("overhead")) {
        Some(class)
            if resource_list(pod.at("spec"), "overhead")
                != resource_list(class.at("overhead"), "podFixed") =>
        {
            Err(request.forbidden(OVERHEAD_MISMATCH))
        }
        None if pod.at("spec").has("overhead") => Err(request
            .forbidden("pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead")),
        _ => Ok(()),
    }
}

fn runtime_class(request: &Request<'_>, pod: &Value, cluster: &dyn Cluster) -> Result<Option<Value>, Status> {
    let Some(name) = pod.at("spec").at("runtimeClassName").as_str() else { return Ok(None) };
    match cluster.get("node.k8s.io", "runtimeclasses", "", name) {
        Some(class) => Ok(Some(class.value())),
        None => Err(request.forbidden(format!("pod rejected: RuntimeClass {name:?} not found"))),
    }
}

fn schedule(request: &Request<'_>, pod: &mut Value, scheduling: &Value) -> Result<(), Status> {
    for (key, value) in scheduling.entries("nodeSelector") {
        let existing = pod.at("spec").at("nodeSelector").get(key);
        if let Some(existing) = existing.filter(|existing| *existing != value) {
            let (value, existing) = (value.as_str().unwrap_or(""), existing.as_str().unwrap_or(""));
            return Err(request.forbidden(format!(
                "conflict: runtimeClass.scheduling.nodeSelector[{key}] = {value}; pod.spec.nodeSelector[{key}] = {existing}"
            )));
        }
        pod.object_mut("spec");
        pod["spec"].object_mut("nodeSelector").insert(key.to_owned(), value.clone());
    }
    let all: Vec<&Value> =
        pod.at("spec").items("tolerations").iter().chain(scheduling.items("tolerations")).collect();
    let merged = merge_tolerations(&all);
    if !merged.is_empty() {
        pod.object_mut("spec").insert("tolerations".into(), merged.into());
    }
    Ok(())
}

/// Removes tolerations that another one covers; of equal ones the first stays.
fn merge_tolerations(all: &[&Value]) -> Vec<Value> {
    let mut merged: Vec<Value> = Vec::new();
    for (i, toleration) in all.iter().enumerate() {
        let before = merged.iter().any(|other| covers(other, toleration));
        let later = all[i + 1..].iter().any(|other| *other != *toleration && covers(other, toleration));
        if !before && !later {
            merged.push((*toleration).clone());
        }
    }
    merged
}

/// Whether `wide` tolerates everything that `narrow` tolerates.
fn covers(wide: &Value, narrow: &Value) -> bool {
    if wide == narrow {
        return true;
    }
    let exists = wide.text("operator") == "Exists";
    if wide.text("key") != narrow.text("key") && !(wide.text("key").is_empty() && exists) {
        return false;
    }
    if wide.text("effect") != narrow.text("effect") && !wide.text("effect").is_empty() {
        return false;
    }
    if wide.text("effect") == "NoExecute"
        && let Some(seconds) = wide.int("tolerationSeconds")
        && narrow.int("tolerationSeconds").is_none_or(|other| other > seconds)
    {
        return false;
    }
    match wide.text("operator") {
        "Exists" => true,
        "Equal" | "" => {
            matches!(narrow.text("operator"), "Equal" | "") && wide.text("value") == narrow.text("value")
        }
        _ => false,
    }
}
