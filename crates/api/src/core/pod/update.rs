//! What may change on a pod: a few fields by update, its ephemeral containers and its resources by
//! subresources of their own.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::diff;
use super::internal::same;
use super::rules::{MIRROR, annotation, in_range, invalid_as, is_sidecar};
use super::{Pod, affinity, qos_class, security};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::meta;

const UPDATABLE: &str = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,\
`spec.tolerations` (only additions to existing tolerations),\
`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

pub(super) fn update(e: &mut Errors, new: &Value, old: &Value) {
    annotation_updates(e, new.at("metadata"), old.at("metadata"));
    let path = Path::new("spec");
    let (new, old) = (new.at("spec"), old.at("spec"));
    for list in ["containers", "initContainers"] {
        if !container_updates(e, new.items(list), old.items(list), &path.at(list)) {
            return;
        }
    }
    if !active_deadline(e, new, old, &path.at("activeDeadlineSeconds")) {
        return;
    }
    added_tolerations(e, new, old, &path.at("tolerations"));
    removed_gates(e, new, old, &path.at("schedulingGates"));
    if same("PodSpec", new, old) {
        return;
    }
    let mut munged = new.clone();
    for list in ["containers", "initContainers"] {
        for (i, container) in old.items(list).iter().enumerate() {
            copy(&mut munged[list][i], container, "image");
        }
    }
    for field in ["activeDeadlineSeconds", "schedulingGates", "tolerations"] {
        copy(&mut munged, old, field);
    }
    if old.int("terminationGracePeriodSeconds").is_some_and(|old| old < 0)
        && new.int("terminationGracePeriodSeconds") == Some(1)
    {
        copy(&mut munged, old, "terminationGracePeriodSeconds");
    }
    if !old.items("schedulingGates").is_empty() {
        gated(e, &mut munged, new, old, &path);
    }
    if !same("PodSpec", &munged, old) {
        let words = format!(
            "pod updates may not change fields other than {UPDATABLE}\n{}",
            diff::of_type("PodSpec", old, &munged)
        );
        e.forbidden(&path, &words);
    }
}

/// Sets a field of `to` to what it is in `from`, or to nothing.
fn copy(to: &mut Value, from: &Value, field: &str) {
    let Some(to) = to.as_object_mut() else { return };
    match from.get(field) {
        Some(value) => to.insert(field.to_owned(), value.clone()),
        None => to.remove(field),
    };
}

/// Whether there are as many containers as before, so that the rest can be compared one by one.
fn container_updates(e: &mut Errors, new: &[Value], old: &[Value], path: &Path) -> bool {
    if new.len() != old.len() {
        e.forbidden(path, "pod updates may not add or remove containers");
        return false;
    }
    for (i, container) in new.iter().enumerate() {
        super::rules::required(e, container, &path.index(i), "image");
        super::containers::trimmed_image(e, container, &path.index(i));
    }
    true
}

/// A deadline may be set and brought forward. Returns whether to go on.
fn active_deadline(e: &mut Errors, new: &Value, old: &Value, path: &Path) -> bool {
    let old = old.int("activeDeadlineSeconds");
    let Some(new) = new.int("activeDeadlineSeconds") else {
        if old.is_some() {
            invalid_as(e, path, "null", "must not update from a positive integer to nil value");
        }
        return true;
    };
    let before = e.0.len();
    in_range(e, path, new, 0, i64::from(i32::MAX));
    if e.0.len() == before && old.is_some_and(|old| old < new) {
        e.invalid(path, new, "must be less than or equal to previous value");
    }
    e.0.len() == before
}

fn added_tolerations(e: &mut Errors, new: &Value, old: &Value, path: &Path) {
    let without_time = |toleration: &Value| {
        let mut fields = toleration.as_object().cloned().unwrap_or_default();
        fields.remove("tolerationSeconds");
        Value::Object(fields).to_string()
    };
    let kept: BTreeSet<String> = new.items("tolerations").iter().map(without_time).collect();
    if old.items("tolerations").iter().any(|one| !kept.contains(&without_time(one))) {
        return e.forbidden(path, "existing toleration can not be modified except its tolerationSeconds");
    }
    affinity::tolerations(e, new.items("tolerations"), path);
}

fn removed_gates(e: &mut Errors, new: &Value, old: &Value, path: &Path) {
    let known: BTreeSet<&str> = old.items("schedulingGates").iter().map(|gate| gate.text("name")).collect();
    for (i, gate) in new.items("schedulingGates").iter().enumerate() {
        let name = gate.text("name");
        if !known.contains(name) {
            let words = format!("only deletion is allowed, but found new scheduling gate '{name}'");
            e.forbidden(&path.index(i).at("name"), &words);
        }
    }
}

/// While a pod is gated, where it may run can be narrowed further.
fn gated(e: &mut Errors, munged: &mut Value, new: &Value, old: &Value, path: &Path) {
    const WORDS: &str = "only additions to spec.nodeSelector are allowed (no mutations or deletions)";
    let selector = new.at("nodeSelector");
    if old.entries("nodeSelector").any(|(key, value)| selector.get(key) != Some(value)) {
        let empty = Value::Object(Map::new());
        let shown = if selector.is_null() { empty } else { selector.clone() };
        e.invalid(&path.at("nodeSelector"), shown, WORDS);
    }
    copy(munged, old, "nodeSelector");
    let (before, after) = (old.path("affinity.nodeAffinity"), new.path("affinity.nodeAffinity"));
    if meta::same(before, after) {
        return;
    }
    node_affinity_additions(e, after, before, &path.at("affinity.nodeAffinity"));
    let mut affinity = new.at("affinity").as_object().cloned().unwrap_or_default();
    match before {
        Value::Null => affinity.remove("nodeAffinity"),
        _ => affinity.insert("nodeAffinity".to_owned(), before.clone()),
    };
    let gone = affinity.is_empty() && !old.has("affinity");
    let affinity = if gone { Value::Null } else { Value::Object(affinity) };
    munged["affinity"] = affinity;
}

fn node_affinity_additions(e: &mut Errors, new: &Value, old: &Value, path: &Path) {
    const TERMS: &str = "requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms";
    let (all, before) = (new.path(TERMS), old.path(TERMS));
    let list = |terms: &'_ Value| terms.as_array().map_or(0, Vec::len);
    if list(before) == 0 {
        return;
    }
    if list(all) != list(before) {
        let words = "no additions/deletions to non-empty NodeSelectorTerms list are allowed";
        return e.invalid(&path.at(TERMS), all.clone(), words);
    }
    let pairs = all.as_array().into_iter().flatten().zip(before.as_array().into_iter().flatten());
    for (i, (new, old)) in pairs.enumerate() {
        const PARTS: [&str; 2] = ["matchExpressions", "matchFields"];
        let empty = |term: &Value| PARTS.iter().all(|part| term.items(part).is_empty());
        let grown = PARTS.iter().all(|part| {
            let (new, old) = (new.items(part), old.items(part));
            new.len() >= old.len() && new[..old.len()] == *old
        });
        if (empty(old) && !empty(new)) || !grown {
            let words = "only additions are allowed (no mutations or deletions)";
            e.invalid(&path.at(TERMS).index(i), new.clone(), words);
        }
    }
}

/// Annotations that say what a pod is or how it is confined stay as they were made.
pub(super) fn annotation_updates(e: &mut Errors, new: &Value, old: &Value) {
    let path = Path::new("metadata.annotations");
    for (key, value) in old.entries("annotations") {
        if annotation(new, key) == value.as_str() {
            continue;
        }
        if key.starts_with(security::APP_ARMOR) {
            e.forbidden(&path.key(key), "may not remove or update AppArmor annotations");
        }
        if key == MIRROR {
            e.forbidden(&path.key(key), "may not remove or update mirror pod annotation");
        }
    }
    for (key, _) in new.entries("annotations").filter(|(key, _)| annotation(old, key).is_none()) {
        if key.starts_with(security::APP_ARMOR) {
            e.forbidden(&path.key(key), "may not add AppArmor annotations");
        }
        if key == MIRROR {
            e.forbidden(&path.key(key), "may not add mirror pod annotation");
        }
    }
}

/// The rules of the `ephemeralcontainers` subresource, those of every pod among them: containers can be
/// added, and stay.
pub fn validate_ephemeral_containers_update(new: &Value, old: &Value, e: &mut Errors) {
    Pod.validate(new, e);
    annotation_updates(e, new.at("metadata"), old.at("metadata"));
    if annotation(old.at("metadata"), MIRROR).is_some() {
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
            Some(now) if !same("EphemeralContainer", before, now) => {
                let diff = diff::of_type("EphemeralContainer", before, now);
                let words = format!("existing ephemeral containers {name:?} may not be changed\n{diff}");
                e.forbidden(&path, &words);
            }
            Some(_) => {}
        }
    }
}

/// Keeps of an update through `ephemeralcontainers` only those containers.
pub fn prepare_ephemeral_containers_update(new: &mut Value, old: &Value) {
    let containers = new.path("spec.ephemeralContainers").clone();
    let mut spec = old.at("spec").clone();
    if let Some(spec) = spec.as_object_mut() {
        spec.insert("ephemeralContainers".to_owned(), containers);
    }
    keep_only(new, old, spec);
}

/// Keeps of an update through `resize` only resources and resize policies, as long as the containers are
/// the same ones.
pub fn prepare_resize(new: &mut Value, old: &Value) {
    const LISTS: [&str; 2] = ["containers", "initContainers"];
    let (asked, before) = (new.at("spec"), old.at("spec"));
    if LISTS.iter().any(|list| asked.items(list).len() != before.items(list).len()) {
        return;
    }
    let mut spec = before.clone();
    copy(&mut spec, asked, "resources");
    for list in LISTS {
        let named =
            |spec: &Value| spec.items(list).iter().map(|c| c.text("name").to_owned()).collect::<Vec<_>>();
        if named(asked) != named(before) {
            copy(&mut spec, asked, list);
            continue;
        }
        for (i, container) in asked.items(list).iter().enumerate() {
            copy(&mut spec[list][i], container, "resources");
            copy(&mut spec[list][i], container, "resizePolicy");
        }
    }
    keep_only(new, old, spec);
}

fn keep_only(new: &mut Value, old: &Value, spec: Value) {
    let version = new.path("metadata.resourceVersion").clone();
    let managed = new.path("metadata.managedFields").clone();
    let mut kept = old.clone();
    if let Some(kept) = kept.as_object_mut() {
        kept.insert("spec".to_owned(), spec);
    }
    let meta = kept.object_mut("metadata");
    for (field, value) in [("resourceVersion", version), ("managedFields", managed)] {
        if !value.is_null() {
            meta.insert(field.to_owned(), value);
        }
    }
    *new = kept;
}

const ONLY_RESOURCES: &str = "only cpu and memory resources are mutable";

/// The rules of the `resize` subresource, those of every pod among them.
pub fn validate_resize(new: &Value, old: &Value, e: &mut Errors) {
    Pod.validate(new, e);
    let refused = if annotation(old.at("metadata"), MIRROR).is_some() {
        Some("static pods cannot be resized")
    } else if old.path("spec.os").text("name") == "windows" {
        Some("windows pods cannot be resized")
    } else {
        None
    };
    if let Some(words) = refused {
        e.0.clear();
        return e.forbidden(&Path::root(), words);
    }
    let path = Path::new("spec");
    let class = match old.at("status").text("qosClass") {
        "" => qos_class(old),
        class => class,
    };
    if class != qos_class(new) {
        let shown = new.at("status").text("qosClass");
        e.invalid(&path, shown, "Pod QOS Class may not change as a result of resizing");
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
    let mut munged = new.clone();
    if [new, old].iter().any(|spec| has_amounts(spec.at("resources"))) {
        pod_resize(e, &mut munged, new, old, &path);
    }
    if !same_containers(e, new, old, &path) {
        return;
    }
    for list in ["initContainers", "containers"] {
        for (i, (now, before)) in new.items(list).iter().zip(old.items(list)).enumerate() {
            let at = path.at(list).index(i).at("resources");
            removals(e, now.at("resources"), before.at("resources"), &at, "resource");
        }
    }
    for list in ["containers", "initContainers"] {
        for (i, before) in old.items(list).iter().enumerate() {
            let container = &mut munged[list][i];
            let resources = restored(container.at("resources"), before.at("resources"));
            container.object_mut("resources").clone_from(&resources);
            let (container, asked) = (&munged[list][i], &new.items(list)[i]);
            if list == "containers" {
                if !same("Container", container, before) {
                    e.forbidden(&path, ONLY_RESOURCES);
                }
                continue;
            }
            let at = path.at(list).index(i);
            if !same("Container", container, before) {
                let words = "only cpu and memory resources for init or sidecar containers are mutable";
                e.forbidden(&at, words);
            }
            if !same("Container", asked, before) && !is_sidecar(asked) {
                let policies = asked.items("resizePolicy").iter();
                for _ in policies.filter(|policy| policy.text("restartPolicy") == "RestartContainer") {
                    let words = "non-sidecar init containers with a resize policy of RestartContainer cannot be resized";
                    e.forbidden(&at, words);
                }
            }
        }
    }
    if e.is_empty() && !same("PodSpec", &munged, old) {
        e.forbidden(&path, ONLY_RESOURCES);
    }
}

fn has_amounts(resources: &Value) -> bool {
    ["requests", "limits"].iter().any(|field| resources.entries(field).next().is_some())
}

fn pod_resize(e: &mut Errors, munged: &mut Value, new: &Value, old: &Value, path: &Path) {
    let (now, before) = (new.at("resources"), old.at("resources"));
    let at = path.at("resources");
    if !before.is_null() {
        if now.is_null() {
            return e.forbidden(&at, "pod-level resources cannot be removed");
        }
        removals(e, now, before, &at, "pod-level resource");
    }
    let resources = restored(now, before);
    munged["resources"] = if resources.is_empty() { Value::Null } else { Value::Object(resources) };
    if !meta::same(munged.at("resources"), before) {
        e.forbidden(path, "only cpu and memory resources are mutable at pod-level");
    }
}

fn removals(e: &mut Errors, new: &Value, old: &Value, path: &Path, what: &str) {
    for field in ["requests", "limits"] {
        if old.entries(field).any(|(name, _)| new.at(field).get(name).is_none()) {
            e.forbidden(&path.at(field), &format!("{what} {field} cannot be removed"));
        }
    }
}

/// The new resources with the old cpu and memory, so that what still differs is what may not.
fn restored(new: &Value, old: &Value) -> Map<String, Value> {
    let mut resources = new.as_object().cloned().unwrap_or_default();
    for field in ["requests", "limits"] {
        let mut amounts = new.at(field).as_object().cloned().unwrap_or_default();
        for name in ["cpu", "memory"] {
            match old.at(field).get(name) {
                Some(amount) => amounts.insert(name.to_owned(), amount.clone()),
                None => amounts.remove(name),
            };
        }
        if amounts.is_empty() {
            resources.remove(field);
        } else {
            resources.insert(field.to_owned(), Value::Object(amounts));
        }
    }
    resources
}

fn same_containers(e: &mut Errors, new: &Value, old: &Value, path: &Path) -> bool {
    let before = e.0.len();
    for list in ["containers", "initContainers"] {
        let (now, then) = (new.items(list), old.items(list));
        let at = path.at(list);
        if now.len() != then.len() {
            e.forbidden(&at, &format!("{list} may not be added or removed on resize"));
            continue;
        }
        for (i, (now, then)) in now.iter().zip(then).enumerate() {
            if now.text("name") != then.text("name") {
                let words = format!("{list} may not be renamed or reordered on resize");
                e.forbidden(&at.index(i).at("name"), &words);
            }
        }
    }
    e.0.len() == before
}
