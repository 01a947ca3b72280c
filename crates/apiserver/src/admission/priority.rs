//! Priority: resolves `priorityClassName` to the integer priority of a pod.

use api::Status;
use api::json::JsonExt as _;
use serde_json::{Value, json};

use super::{Cluster, Operation, Request};

const GROUP: &str = "scheduling.k8s.io";

/// The built-in classes: name, value, description.
pub const SYSTEM_CLASSES: &[(&str, i64, &str)] = &[
    (
        "system-node-critical",
        2_000_001_000,
        "Used for system critical pods that must not be moved from their current node.",
    ),
    (
        "system-cluster-critical",
        2_000_000_000,
        "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary.",
    ),
];

pub fn admit(request: &Request<'_>, pod: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !request.is("", "pods") {
        return Ok(());
    }
    match (request.operation, request.old) {
        (Operation::Create, _) => set_priority(request, pod, cluster),
        (Operation::Update, Some(old)) => {
            for field in ["priority", "preemptionPolicy"] {
                let old_value = old.at("spec").at(field);
                if !pod.at("spec").has(field) && !old_value.is_null() {
                    pod.object_mut("spec").insert(field.into(), old_value.clone());
                }
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn set_priority(request: &Request<'_>, pod: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
    let named = pod.at("spec").text("priorityClassName").to_owned();
    let class = match named.as_str() {
        "" => default_class(cluster).unwrap_or(json!({"preemptionPolicy": "PreemptLowerPriority"})),
        name => match cluster.get(GROUP, "priorityclasses", "", name) {
            Some(class) => class.value(),
            None => return Err(request.forbidden(format!("no PriorityClass with name {name} was found"))),
        },
    };
    let value = class.int("value").unwrap_or(0);
    if let Some(provided) = pod.at("spec").int("priority").filter(|provided| *provided != value) {
        return Err(request.forbidden(format!(
            "the integer value of priority ({provided}) must not be provided in pod spec; priority admission controller computed {value} from the given PriorityClass name"
        )));
    }
    let policy = class.text("preemptionPolicy");
    let provided = pod.at("spec").text("preemptionPolicy");
    if !policy.is_empty() && !provided.is_empty() && provided != policy {
        return Err(request.forbidden(format!(
            "the string value of PreemptionPolicy ({provided}) must not be provided in pod spec; priority admission controller computed {policy} from the given PriorityClass name"
        )));
    }
    let spec = pod.object_mut("spec");
    spec.insert("priority".into(), value.into());
    if !policy.is_empty() {
        spec.insert("preemptionPolicy".into(), policy.into());
    }
    let name = class.at("metadata").text("name");
    if named.is_empty() && !name.is_empty() {
        spec.insert("priorityClassName".into(), name.into());
    }
    Ok(())
}

pub fn validate(request: &Request<'_>, class: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if !request.is(GROUP, "priorityclasses") || !class.flag("globalDefault") {
        return Ok(());
    }
    let Some(other) = default_class(cluster) else { return Ok(()) };
    let name = other.at("metadata").text("name");
    match request.operation {
        Operation::Update if name == class.at("metadata").text("name") => Ok(()),
        _ => Err(request.forbidden(format!(
            "PriorityClass {name} is already marked as default. Only one default can exist"
        ))),
    }
}

/// The default class; of several the one with the lowest value, as upstream.
fn default_class(cluster: &dyn Cluster) -> Option<Value> {
    let classes = cluster.list(GROUP, "priorityclasses", "");
    let candidates = classes.iter().filter(|class| class.contains_text("\"globalDefault\":true"));
    let defaults = candidates.map(|class| class.value()).filter(|class| class.flag("globalDefault"));
    defaults.min_by_key(|class| class.int("value").unwrap_or(0))
}
