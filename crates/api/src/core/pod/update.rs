//! Validates pod updates: the main endpoint may change a few fields, the `ephemeralcontainers` and
//! `resize` subresources may add ephemeral containers and change resources.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::diff;
use super::internal::semantic_equal;
use super::rules::{MIRROR_ANNOTATION, annotation, invalid_as, is_sidecar, validate_range};
use super::{Pod, affinity, qos_class, security};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta;
use crate::strategy::RestStrategy;

const MUTABLE_FIELDS_MESSAGE: &str = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,\
`spec.tolerations` (only additions to existing tolerations),\
`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

pub(super) fn validate_update(e: &mut ErrorList, new: &Value, old: &Value) {
    validate_annotation_updates(e, new.at("metadata"), old.at("metadata"));
    let path = Path::new("spec");
    let (new, old) = (new.at("spec"), old.at("spec"));
    for list in ["containers", "initContainers"] {
        if !validate_container_updates(e, new.items(list), old.items(list), &path.child(list)) {
            return;
        }
    }
    if !validate_active_deadline_update(e, new, old, &path.child("activeDeadlineSeconds")) {
        return;
    }
    validate_toleration_update(e, new, old, &path.child("tolerations"));
    validate_gate_update(e, new, old, &path.child("schedulingGates"));
    if semantic_equal("PodSpec", new, old) {
        return;
    }
    let mut masked_spec = new.clone();
    for list in ["containers", "initContainers"] {
        for (i, container) in old.items(list).iter().enumerate() {
            copy_field(&mut masked_spec[list][i], container, "image");
        }
    }
    for field in ["activeDeadlineSeconds", "schedulingGates", "tolerations"] {
        copy_field(&mut masked_spec, old, field);
    }
    if old.int("terminationGracePeriodSeconds").is_some_and(|old| old < 0)
        && new.int("terminationGracePeriodSeconds") == Some(1)
    {
        copy_field(&mut masked_spec, old, "terminationGracePeriodSeconds");
    }
    if !old.items("schedulingGates").is_empty() {
        validate_gated_update(e, &mut masked_spec, new, old, &path);
    }
    if !semantic_equal("PodSpec", &masked_spec, old) {
        let message = format!(
            "pod updates may not change fields other than {MUTABLE_FIELDS_MESSAGE}\n{}",
            diff::diff_values("PodSpec", old, &masked_spec)
        );
        e.forbidden(&path, &message);
    }
}

/// Copies a field from `from` to `to`, or removes it if it is absent.
fn copy_field(to: &mut Value, from: &Value, field: &str) {
    let Some(to) = to.as_object_mut() else { return };
    match from.get(field) {
        Some(value) => to.insert(field.to_owned(), value.clone()),
        None => to.remove(field),
    };
}

/// Whether the number of containers is unchanged, so that they can be compared one by one.
fn validate_container_updates(e: &mut ErrorList, new: &[Value], old: &[Value], path: &Path) -> bool {
    if new.len() != old.len() {
        e.forbidden(path, "pod updates may not add or remove containers");
        return false;
    }
    for (i, container) in new.iter().enumerate() {
        super::rules::required(e, container, &path.index(i), "image");
        super::containers::validate_image(e, container, &path.index(i));
    }
    true
}

/// The active deadline may be set or shortened. Returns whether to continue.
fn validate_active_deadline_update(e: &mut ErrorList, new: &Value, old: &Value, path: &Path) -> bool {
    let old = old.int("activeDeadlineSeconds");
    let Some(new) = new.int("activeDeadlineSeconds") else {
        if old.is_some() {
            invalid_as(e, path, "null", "must not update from a positive integer to nil value");
        }
        return true;
    };
    let before = e.0.len();
    validate_range(e, path, new, 0, i64::from(i32::MAX));
    if e.0.len() == before && old.is_some_and(|old| old < new) {
        e.invalid(path, new, "must be less than or equal to previous value");
    }
    e.0.len() == before
}

fn validate_toleration_update(e: &mut ErrorList, new: &Value, old: &Value, path: &Path) {
    let without_time = |toleration: &Value| {
        let mut fields = toleration.as_object().cloned().unwrap_or_default();
        fields.remove("tolerationSeconds");
        Value::Object(fields).to_string()
    };
    let new_tolerations: BTreeSet<String> = new.items("tolerations").iter().map(without_time).collect();
    if old.items("tolerations").iter().any(|one| !new_tolerations.contains(&without_time(one))) {
        return e.forbidden(path, "existing toleration can not be modified except its tolerationSeconds");
    }
    affinity::validate_tolerations(e, new.items("tolerations"), path);
}

fn validate_gate_update(e: &mut ErrorList, new: &Value, old: &Value, path: &Path) {
    let known: BTreeSet<&str> = old.items("schedulingGates").iter().map(|gate| gate.text("name")).collect();
    for (i, gate) in new.items("schedulingGates").iter().enumerate() {
        let name = gate.text("name");
        if !known.contains(name) {
            let message = format!("only deletion is allowed, but found new scheduling gate '{name}'");
            e.forbidden(&path.index(i).child("name"), &message);
        }
    }
}

/// While a pod has scheduling gates, its node selector and affinity may be narrowed.
fn validate_gated_update(e: &mut ErrorList, masked_spec: &mut Value, new: &Value, old: &Value, path: &Path) {
    const NODE_SELECTOR_MESSAGE: &str =
        "only additions to spec.nodeSelector are allowed (no mutations or deletions)";
    let selector = new.at("nodeSelector");
    if old.entries("nodeSelector").any(|(key, value)| selector.get(key) != Some(value)) {
        let empty = Value::Object(Map::new());
        let rendered = if selector.is_null() { empty } else { selector.clone() };
        e.invalid(&path.child("nodeSelector"), rendered, NODE_SELECTOR_MESSAGE);
    }
    copy_field(masked_spec, old, "nodeSelector");
    let (before, after) = (old.path("affinity.nodeAffinity"), new.path("affinity.nodeAffinity"));
    if meta::semantic_equal(before, after) {
        return;
    }
    validate_node_affinity_mutation(e, after, before, &path.child("affinity.nodeAffinity"));
    let mut affinity = new.at("affinity").as_object().cloned().unwrap_or_default();
    match before {
        Value::Null => affinity.remove("nodeAffinity"),
        _ => affinity.insert("nodeAffinity".to_owned(), before.clone()),
    };
    let remove_affinity = affinity.is_empty() && !old.has("affinity");
    let affinity = if remove_affinity { Value::Null } else { Value::Object(affinity) };
    masked_spec["affinity"] = affinity;
}

fn validate_node_affinity_mutation(e: &mut ErrorList, new: &Value, old: &Value, path: &Path) {
    const TERMS: &str = "requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms";
    let (all, before) = (new.path(TERMS), old.path(TERMS));
    let count = |terms: &'_ Value| terms.as_array().map_or(0, Vec::len);
    if count(before) == 0 {
        return;
    }
    if count(all) != count(before) {
        let message = "no additions/deletions to non-empty NodeSelectorTerms list are allowed";
        return e.invalid(&path.child(TERMS), all.clone(), message);
    }
    let pairs = all.as_array().into_iter().flatten().zip(before.as_array().into_iter().flatten());
    for (i, (new, old)) in pairs.enumerate() {
        const PARTS: [&str; 2] = ["matchExpressions", "matchFields"];
        let empty = |term: &Value| PARTS.iter().all(|part| term.items(part).is_empty());
        let only_added = PARTS.iter().all(|part| {
            let (new, old) = (new.items(part), old.items(part));
            new.len() >= old.len() && new[..old.len()] == *old
        });
        if (empty(old) && !empty(new)) || !only_added {
            let message = "only additions are allowed (no mutations or deletions)";
            e.invalid(&path.child(TERMS).index(i), new.clone(), message);
        }
    }
}

/// Annotations with security or identity semantics must not change.
pub(super) fn validate_annotation_updates(e: &mut ErrorList, new: &Value, old: &Value) {
    let path = Path::new("metadata.annotations");
    for (key, value) in old.entries("annotations") {
        if annotation(new, key) == value.as_str() {
            continue;
        }
        if key.starts_with(security::APP_ARMOR) {
            e.forbidden(&path.key(key), "may not remove or update AppArmor annotations");
        }
        if key == MIRROR_ANNOTATION {
            e.forbidden(&path.key(key), "may not remove or update mirror pod annotation");
        }
    }
    for (key, _) in new.entries("annotations").filter(|(key, _)| annotation(old, key).is_none()) {
        if key.starts_with(security::APP_ARMOR) {
            e.forbidden(&path.key(key), "may not add AppArmor annotations");
        }
        if key == MIRROR_ANNOTATION {
            e.forbidden(&path.key(key), "may not add mirror pod annotation");
        }
    }
}

/// Validates an update through `ephemeralcontainers`, including the rules of all pods. Existing
/// ephemeral containers must not change.
pub fn validate_ephemeral_containers_update(new: &Value, old: &Value, e: &mut ErrorList) {
    Pod.validate(new, e);
    validate_annotation_updates(e, new.at("metadata"), old.at("metadata"));
    if annotation(old.at("metadata"), MIRROR_ANNOTATION).is_some() {
        e.0.clear();
        return e.forbidden(&Path::root(), "static pods do not support ephemeral containers");
    }
    let path = Path::new("spec.ephemeralContainers");
    let now: BTreeMap<&str, &Value> =
        new.at("spec").items("ephemeralContainers").iter().map(|now| (now.text("name"), now)).collect();
    for before in old.at("spec").items("ephemeralContainers") {
        let name = before.text("name");
        match now.get(name) {
            None => {
                e.forbidden(&path, &format!("existing ephemeral containers {name:?} may not be removed\n"));
            }
            Some(now) if !semantic_equal("EphemeralContainer", before, now) => {
                let diff = diff::diff_values("EphemeralContainer", before, now);
                let message = format!("existing ephemeral containers {name:?} may not be changed\n{diff}");
                e.forbidden(&path, &message);
            }
            Some(_) => {}
        }
    }
}

/// Discards all changes of an `ephemeralcontainers` update except ephemeral containers.
pub fn prepare_ephemeral_containers_update(new: &mut Value, old: &Value) {
    let containers = new.path("spec.ephemeralContainers").clone();
    let mut spec = old.at("spec").clone();
    if let Some(spec) = spec.as_object_mut() {
        spec.insert("ephemeralContainers".to_owned(), containers);
    }
    replace_spec(new, old, spec);
}

/// Discards all changes of a `resize` update except resources and resize policies, if the containers
/// are the same.
pub fn prepare_resize(new: &mut Value, old: &Value) {
    const LISTS: [&str; 2] = ["containers", "initContainers"];
    let (requested, before) = (new.at("spec"), old.at("spec"));
    if LISTS.iter().any(|list| requested.items(list).len() != before.items(list).len()) {
        return;
    }
    let mut spec = before.clone();
    copy_field(&mut spec, requested, "resources");
    for list in LISTS {
        let named =
            |spec: &Value| spec.items(list).iter().map(|c| c.text("name").to_owned()).collect::<Vec<_>>();
        if named(requested) != named(before) {
            copy_field(&mut spec, requested, list);
            continue;
        }
        for (i, container) in requested.items(list).iter().enumerate() {
            copy_field(&mut spec[list][i], container, "resources");
            copy_field(&mut spec[list][i], container, "resizePolicy");
        }
    }
    replace_spec(new, old, spec);
}

fn replace_spec(new: &mut Value, old: &Value, spec: Value) {
    let version = new.path("metadata.resourceVersion").clone();
    let managed = new.path("metadata.managedFields").clone();
    let mut result = old.clone();
    if let Some(result_map) = result.as_object_mut() {
        result_map.insert("spec".to_owned(), spec);
    }
    let meta = result.object_mut("metadata");
    for (field, value) in [("resourceVersion", version), ("managedFields", managed)] {
        if !value.is_null() {
            meta.insert(field.to_owned(), value);
        }
    }
    *new = result;
}

const ONLY_RESOURCES_MESSAGE: &str = "only cpu and memory resources are mutable";

/// Validates an update through `resize`, including the rules of all pods.
pub fn validate_resize(new: &Value, old: &Value, e: &mut ErrorList) {
    Pod.validate(new, e);
    let rejection = if annotation(old.at("metadata"), MIRROR_ANNOTATION).is_some() {
        Some("static pods cannot be resized")
    } else if old.path("spec.os").text("name") == "windows" {
        Some("windows pods cannot be resized")
    } else {
        None
    };
    if let Some(message) = rejection {
        e.0.clear();
        return e.forbidden(&Path::root(), message);
    }
    let path = Path::new("spec");
    let class = match old.at("status").text("qosClass") {
        "" => qos_class(old),
        class => class,
    };
    if class != qos_class(new) {
        let rendered = new.at("status").text("qosClass");
        e.invalid(&path, rendered, "Pod QOS Class may not change as a result of resizing");
    }
    let running = old
        .at("status")
        .items("containerStatuses")
        .iter()
        .find(|status| status.path("state.running").is_object());
    if running.is_some_and(|status| !status.has("resources")) {
        e.forbidden(&path, "Pod running on node without support for resize");
    }
    let (new, old) = (new.at("spec"), old.at("spec"));
    let mut masked_spec = new.clone();
    if [new, old].iter().any(|spec| has_resources(spec.at("resources"))) {
        validate_pod_level_resize(e, &mut masked_spec, new, old, &path);
    }
    if !validate_same_containers(e, new, old, &path) {
        return;
    }
    for list in ["initContainers", "containers"] {
        for (i, (now, before)) in new.items(list).iter().zip(old.items(list)).enumerate() {
            let at = path.child(list).index(i).child("resources");
            validate_no_removed_resources(e, now.at("resources"), before.at("resources"), &at, "resource");
        }
    }
    for list in ["containers", "initContainers"] {
        for (i, before) in old.items(list).iter().enumerate() {
            let container = &mut masked_spec[list][i];
            let resources = restore_cpu_and_memory(container.at("resources"), before.at("resources"));
            container.object_mut("resources").clone_from(&resources);
            let (container, requested) = (&masked_spec[list][i], &new.items(list)[i]);
            if list == "containers" {
                if !semantic_equal("Container", container, before) {
                    e.forbidden(&path, ONLY_RESOURCES_MESSAGE);
                }
                continue;
            }
            let at = path.child(list).index(i);
            if !semantic_equal("Container", container, before) {
                let message = "only cpu and memory resources for init or sidecar containers are mutable";
                e.forbidden(&at, message);
            }
            if !semantic_equal("Container", requested, before) && !is_sidecar(requested) {
                let policies = requested.items("resizePolicy").iter();
                for _ in policies.filter(|policy| policy.text("restartPolicy") == "RestartContainer") {
                    let message = "non-sidecar init containers with a resize policy of RestartContainer cannot be resized";
                    e.forbidden(&at, message);
                }
            }
        }
    }
    if e.is_empty() && !semantic_equal("PodSpec", &masked_spec, old) {
        e.forbidden(&path, ONLY_RESOURCES_MESSAGE);
    }
}

fn has_resources(resources: &Value) -> bool {
    ["requests", "limits"].iter().any(|field| resources.entries(field).next().is_some())
}

fn validate_pod_level_resize(
    e: &mut ErrorList,
    masked_spec: &mut Value,
    new: &Value,
    old: &Value,
    path: &Path,
) {
    let (now, before) = (new.at("resources"), old.at("resources"));
    let at = path.child("resources");
    if !before.is_null() {
        if now.is_null() {
            return e.forbidden(&at, "pod-level resources cannot be removed");
        }
        validate_no_removed_resources(e, now, before, &at, "pod-level resource");
    }
    let resources = restore_cpu_and_memory(now, before);
    masked_spec["resources"] = if resources.is_empty() { Value::Null } else { Value::Object(resources) };
    if !meta::semantic_equal(masked_spec.at("resources"), before) {
        e.forbidden(path, "only cpu and memory resources are mutable at pod-level");
    }
}

fn validate_no_removed_resources(e: &mut ErrorList, new: &Value, old: &Value, path: &Path, what: &str) {
    for field in ["requests", "limits"] {
        if old.entries(field).any(|(name, _)| new.at(field).get(name).is_none()) {
            e.forbidden(&path.child(field), &format!("{what} {field} cannot be removed"));
        }
    }
}

/// The new resources with the old CPU and memory. Remaining differences are not allowed.
fn restore_cpu_and_memory(new: &Value, old: &Value) -> Map<String, Value> {
    let mut resources = new.as_object().cloned().unwrap_or_default();
    for field in ["requests", "limits"] {
        let mut values = new.at(field).as_object().cloned().unwrap_or_default();
        for name in ["cpu", "memory"] {
            match old.at(field).get(name) {
                Some(amount) => values.insert(name.to_owned(), amount.clone()),
                None => values.remove(name),
            };
        }
        if values.is_empty() {
            resources.remove(field);
        } else {
            resources.insert(field.to_owned(), Value::Object(values));
        }
    }
    resources
}

fn validate_same_containers(e: &mut ErrorList, new: &Value, old: &Value, path: &Path) -> bool {
    let before = e.0.len();
    for list in ["containers", "initContainers"] {
        let (now, then) = (new.items(list), old.items(list));
        let at = path.child(list);
        if now.len() != then.len() {
            e.forbidden(&at, &format!("{list} may not be added or removed on resize"));
            continue;
        }
        for (i, (now, then)) in now.iter().zip(then).enumerate() {
            if now.text("name") != then.text("name") {
                let message = format!("{list} may not be renamed or reordered on resize");
                e.forbidden(&at.index(i).child("name"), &message);
            }
        }
    }
    e.0.len() == before
}
