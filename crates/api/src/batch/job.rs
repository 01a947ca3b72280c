//! Job: REST strategy and validation.

mod indexes;
mod policies;
mod status;

use serde_json::Value;

use crate::apps::workload;
use crate::core::pod::internal::{self, format_compact};
use crate::core::pod::rules::{IMMUTABLE, invalid_as, non_negative, render_value, validate_immutable};
use crate::core::pod::template::name_warning;
use crate::core::pod::{validate_pod_template_spec, warnings};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions, semantic_equal};
use crate::names;
use crate::selector::LabelSelector;
use crate::strategy::RestStrategy;

const UID_LABEL: &str = "batch.kubernetes.io/controller-uid";
const NAME_LABEL: &str = "batch.kubernetes.io/job-name";
const OLD_UID_LABEL: &str = "controller-uid";
const OLD_NAME_LABEL: &str = "job-name";

const INDEXED_JOB_LIMIT: i64 = 100_000;
const LIMIT_FOR_HIGH_COMPLETIONS: i64 = 10_000;

pub struct Job;

impl RestStrategy for Job {
    fn prepare_for_create(&self, new: &mut Value) {
        if !new.at("spec").flag("manualSelector") {
            generate_selector(new);
        }
        inherit_labels(new);
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn prepare_for_update(&self, new: &mut Value, _old: &Value) {
        inherit_labels(new);
        workload::prepare_template(new, &["spec", "template"]);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        validate_generated_selector(obj, errors);
        validate_spec(spec, &path, errors);
        let selector = spec.at("selector");
        if selector.is_null() {
            errors.required(&path.child("selector"), "");
        } else {
            meta::validate_label_selector(
                selector,
                &path.child("selector"),
                SelectorOptions::default(),
                errors,
            );
        }
        if let Ok(parsed) = LabelSelector::from_value(selector) {
            workload::validate_template_labels(&parsed, spec, &path, errors);
        }
        if is_indexed(spec)
            && let Some(completions) = spec.int("completions").filter(|&completions| completions > 0)
        {
            let name = obj.at("metadata").text("name");
            let last = format!("{name}-{}", completions - 1);
            if !names::dns1123_label(&last).is_empty() {
                let message = format!("will not able to create pod with invalid DNS label: {last}");
                errors.invalid(&Path::new("metadata.name"), name, &message);
            }
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let path = Path::new("spec");
        let (spec, before) = (new.at("spec"), old.at("spec"));
        validate_completions_update(spec, before, &path.child("completions"), errors);
        validate_immutable(errors, &path.child("selector"), spec.at("selector"), before.at("selector"));
        validate_template_update(new, old, errors);
        for field in
            ["completionMode", "podFailurePolicy", "backoffLimitPerIndex", "managedBy", "successPolicy"]
        {
            validate_immutable(errors, &path.child(field), spec.at(field), before.at(field));
        }
    }

    fn validate_status_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        status::validate(new, old, errors);
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        vec![("status.successful", obj.at("status").int("succeeded").unwrap_or(0).to_string())]
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        if old.is_some_and(|old| semantic_equal(old.at("spec"), new.at("spec"))) {
            return Vec::new();
        }
        let name = if old.is_none() { name_warning(new, "Pod names and hostnames") } else { None };
        name.into_iter().chain(spec_warnings(new.at("spec"), &Path::new("spec"))).collect()
    }
}

/// Warnings about the spec of a Job or of a Job template.
pub(super) fn spec_warnings(spec: &Value, path: &Path) -> Vec<String> {
    let number = |field| spec.int(field).unwrap_or(0);
    let mut found = Vec::new();
    if is_indexed(spec)
        && number("completions") > INDEXED_JOB_LIMIT
        && number("parallelism") > LIMIT_FOR_HIGH_COMPLETIONS
    {
        found.push(format!(
            "{path}: In Indexed Jobs with a number of completions higher than 10^5 and a parallelism higher than 10^4, Kubernetes might not be able to track completedIndexes when a big number of indexes fail"
        ));
    }
    found.extend(warnings::for_template(spec.at("template"), &path.child("template")));
    found
}

fn is_indexed(spec: &Value) -> bool {
    spec.text("completionMode") == "Indexed"
}

/// Generates selector and labels from the uid of the Job, unless `manualSelector` is set.
fn generate_selector(job: &mut Value) {
    let name = job.at("metadata").text("name").to_owned();
    let uid = job.at("metadata").text("uid").to_owned();
    let Some(spec) = job.get_mut("spec").filter(|spec| spec.is_object()) else { return };
    spec.object_mut("template");
    let template = &mut spec["template"];
    template.object_mut("metadata");
    let labels = [(OLD_NAME_LABEL, &name), (NAME_LABEL, &name), (OLD_UID_LABEL, &uid), (UID_LABEL, &uid)];
    for (key, value) in labels {
        template["metadata"].object_mut("labels").entry(key).or_insert_with(|| Value::String(value.clone()));
    }
    spec.object_mut("selector");
    let matched = spec["selector"].object_mut("matchLabels");
    matched.entry(UID_LABEL).or_insert_with(|| Value::String(uid));
}

/// Defaults the labels of a Job to those of its template, including the generated ones.
fn inherit_labels(job: &mut Value) {
    let labels = job.path("spec.template.metadata.labels").clone();
    let is_empty = |labels: &Value| labels.as_object().is_none_or(serde_json::Map::is_empty);
    if is_empty(job.path("metadata.labels")) && !is_empty(&labels) {
        job.object_mut("metadata").insert("labels".into(), labels);
    }
}

fn validate_generated_selector(job: &Value, e: &mut ErrorList) {
    let spec = job.at("spec");
    if spec.flag("manualSelector") || spec.at("selector").is_null() {
        return;
    }
    let (name, uid) = (job.at("metadata").text("name"), job.at("metadata").text("uid"));
    if uid.is_empty() {
        e.required(&Path::new("metadata.uid"), "");
    }
    let labels = spec.path("template.metadata.labels");
    let expected = [(OLD_UID_LABEL, uid), (OLD_NAME_LABEL, name), (UID_LABEL, uid), (NAME_LABEL, name)];
    for (key, value) in expected {
        let at = Path::new("spec.template.metadata.labels").key(key);
        let message = format!("must be '{value}'");
        match labels.get(key).and_then(Value::as_str) {
            None => e.required(&at, &message),
            Some(found) if found != value => e.invalid(&at, labels.clone(), &message),
            Some(_) => {}
        }
    }
    if let Ok(selector) = LabelSelector::from_value(spec.at("selector")) {
        let get = |key: &str| expected.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        if !selector.matches(get) {
            let at = Path::new("spec.selector");
            invalid_as(e, &at, &render_value(spec.at("selector")), "`selector` not auto-generated");
        }
    }
}

/// Validates the parts of a Job spec that also apply to the template of a CronJob.
pub(super) fn validate_spec(spec: &Value, path: &Path, e: &mut ErrorList) {
    const COUNTS: [&str; 7] = [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ];
    for field in COUNTS {
        non_negative(e, spec, path, field);
    }
    if spec.has("maxFailedIndexes") && !spec.has("backoffLimitPerIndex") {
        e.required(&path.child("backoffLimitPerIndex"), "when maxFailedIndexes is specified");
    }
    if let Some(manager) = spec.at("managedBy").as_str() {
        names::domain_prefixed_path(manager, &path.child("managedBy"), e);
        if manager.len() > 63 {
            e.too_long(&path.child("managedBy"), 63);
        }
    }
    completion_mode(spec, path, e);
    policies::validate(spec, path, e);
    validate_pod_template_spec(spec.at("template"), &path.child("template"), e);
    restart_policy(spec, &path.child("template.spec.restartPolicy"), e);
}

fn restart_policy(spec: &Value, path: &Path, e: &mut ErrorList) {
    match spec.path("template.spec").text("restartPolicy") {
        "Always" | "" => e.required(path, "valid values: \"OnFailure\", \"Never\""),
        "OnFailure" if spec.has("podFailurePolicy") => {
            let message = "only \"Never\" is supported when podFailurePolicy is specified";
            e.invalid(path, "OnFailure", message);
        }
        "OnFailure" | "Never" => {}
        other => e.not_supported(path, other, &["OnFailure", "Never"]),
    }
}

fn completion_mode(spec: &Value, path: &Path, e: &mut ErrorList) {
    let number = |field| spec.int(field);
    match spec.at("completionMode").as_str() {
        Some("Indexed") => validate_indexed(spec, path, e),
        None | Some("NonIndexed") => {
            for field in ["backoffLimitPerIndex", "maxFailedIndexes"] {
                if let Some(value) = number(field) {
                    e.invalid(&path.child(field), value, "requires indexed completion mode");
                }
            }
        }
        Some(other) => e.not_supported(&path.child("completionMode"), other, &["NonIndexed", "Indexed"]),
    }
}

fn validate_indexed(spec: &Value, path: &Path, e: &mut ErrorList) {
    let number = |field| spec.int(field);
    let (completions, parallelism, failed) =
        (number("completions"), number("parallelism"), number("maxFailedIndexes"));
    if completions.is_none() {
        e.required(&path.child("completions"), "when completion mode is Indexed");
    }
    let mut at_most = |field: &str, value: Option<i64>, max: i64, message: &str| {
        if let Some(value) = value.filter(|&value| value > max) {
            e.invalid(&path.child(field), value, &format!("must be less than or equal to {message}"));
        }
    };
    at_most("parallelism", parallelism, INDEXED_JOB_LIMIT, "100000 when completion mode is Indexed");
    if let Some(completions) = completions {
        at_most("maxFailedIndexes", failed, completions, "completions");
    }
    at_most("maxFailedIndexes", failed, INDEXED_JOB_LIMIT, "100000");
    if completions.is_some_and(|completions| completions > INDEXED_JOB_LIMIT)
        && spec.has("backoffLimitPerIndex")
    {
        const HIGH_COMPLETIONS_MESSAGE: &str =
            "10000 when completions are above 100000 and used with backoff limit per index";
        if failed.is_none() {
            let message = "must be specified when completions is above 100000";
            e.required(&path.child("maxFailedIndexes"), message);
        }
        let mut at_most = |field: &str, value: Option<i64>| {
            if let Some(value) = value.filter(|&value| value > LIMIT_FOR_HIGH_COMPLETIONS) {
                e.invalid(
                    &path.child(field),
                    value,
                    &format!("must be less than or equal to {HIGH_COMPLETIONS_MESSAGE}"),
                );
            }
        };
        at_most("parallelism", parallelism);
        at_most("maxFailedIndexes", failed);
    }
}

/// An Indexed Job may change its completions together with its parallelism.
fn validate_completions_update(new: &Value, old: &Value, path: &Path, e: &mut ErrorList) {
    let (new_value, old_value) = (new.at("completions"), old.at("completions"));
    if !is_indexed(new) {
        return validate_immutable(e, path, new_value, old_value);
    }
    if new_value != old_value && !new_value.is_null() && new_value != new.at("parallelism") {
        e.invalid(path, new_value.clone(), "can only be modified in tandem with spec.parallelism");
    }
}

/// The pod template is immutable, except that a suspended Job without running pods may change
/// scheduling fields and container resources.
fn validate_template_update(new: &Value, old: &Value, e: &mut ErrorList) {
    const MUTABLE_TEMPLATE_FIELDS: [&str; 3] = ["nodeSelector", "tolerations", "schedulingGates"];
    let path = Path::new("spec.template");
    let new_template = new.path("spec.template");
    let mut old_template = old.path("spec.template").clone();
    let is_mutable = is_suspended_and_not_running(old);
    if is_mutable {
        for field in ["labels", "annotations"] {
            copy_field(&mut old_template["metadata"], new_template.at("metadata"), field);
        }
        for field in MUTABLE_TEMPLATE_FIELDS {
            copy_field(&mut old_template["spec"], new_template.at("spec"), field);
        }
        let affinity = new_template.path("spec.affinity");
        old_template["spec"].object_mut("affinity");
        copy_field(&mut old_template["spec"]["affinity"], affinity, "nodeAffinity");
    }
    if !old.at("spec").flag("suspend") || !is_mutable {
        if !internal::semantic_equal("PodTemplateSpec", new_template, &old_template) {
            invalid_as(e, &path, &format_compact("PodTemplateSpec", new_template), IMMUTABLE);
        }
        return;
    }
    for list in ["containers", "initContainers"] {
        let (new_containers, old_list) =
            (new_template.at("spec").items(list), old_template["spec"].get_mut(list));
        let old_containers = old_list
            .and_then(Value::as_array_mut)
            .filter(|old_containers| old_containers.len() == new_containers.len());
        for (old_container, new_container) in old_containers.into_iter().flatten().zip(new_containers) {
            if old_container.text("name") == new_container.text("name") {
                copy_field(old_container, new_container, "resources");
            }
        }
    }
    if !internal::semantic_equal("PodSpec", new_template.at("spec"), old_template.at("spec")) {
        invalid_as(e, &path.child("spec"), &format_compact("PodSpec", new_template.at("spec")), IMMUTABLE);
    }
}

fn copy_field(to: &mut Value, from: &Value, field: &str) {
    if !to.is_object() {
        *to = Value::Object(serde_json::Map::new());
    }
    if let Some(to) = to.as_object_mut() {
        match from.get(field) {
            Some(value) => to.insert(field.to_owned(), value.clone()),
            None => to.remove(field),
        };
    }
}

fn is_suspended_and_not_running(job: &Value) -> bool {
    let status = job.at("status");
    let suspended = status::is_condition_true(job, "Suspended");
    job.at("spec").flag("suspend")
        && (!status.has("startTime") || suspended)
        && status.int("active").unwrap_or(0) == 0
}
