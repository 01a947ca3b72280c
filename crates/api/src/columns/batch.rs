//! The cells of jobs, cron jobs and the other workloads.

use serde_json::Value;

use super::row::AgeText;
use super::text::{is_condition_true, is_deleting, qualified, selector, selector_cell, since, timestamp};
use crate::json::JsonExt as _;
use crate::time::human_duration;

/// `ready/desired` of a Deployment or StatefulSet.
pub fn ready(obj: &Value) -> String {
    let ready = obj.at("status").int("readyReplicas").unwrap_or(0);
    format!("{ready}/{}", obj.at("spec").int("replicas").unwrap_or(0))
}

/// The selector of a Deployment. An empty one prints as an empty string, not as `<none>`.
pub fn deployment_selector(obj: &Value) -> String {
    selector(obj.path("spec.selector")).unwrap_or_else(|| "<invalid>".to_owned())
}

/// The selector of other workloads.
pub fn label_selector(obj: &Value) -> String {
    selector_cell(obj.path("spec.selector"))
}

/// The status of a Job: the first of these conditions that is true.
pub fn job_status(job: &Value) -> String {
    let status = if is_condition_true(job, "Complete") {
        "Complete"
    } else if is_condition_true(job, "Failed") {
        "Failed"
    } else if is_deleting(job) {
        "Terminating"
    } else {
        let later = ["Suspended", "FailureTarget", "SuccessCriteriaMet"];
        later.into_iter().find(|kind| is_condition_true(job, kind)).unwrap_or("Running")
    };
    status.to_owned()
}

pub fn completions(job: &Value) -> String {
    let succeeded = job.at("status").int("succeeded").unwrap_or(0);
    let spec = job.at("spec");
    match (spec.int("completions"), spec.int("parallelism").unwrap_or(0)) {
        (Some(completions), _) => format!("{succeeded}/{completions}"),
        (None, parallelism) if parallelism > 1 => format!("{succeeded}/1 of {parallelism}"),
        (None, _) => format!("{succeeded}/1"),
    }
}

/// The duration of a Job until its completion or until now.
pub fn duration(job: &Value) -> AgeText {
    let status = job.at("status");
    match (timestamp(status.at("startTime")), timestamp(status.at("completionTime"))) {
        (Some(start), Some(end)) => human_duration(start.duration_until(end)).into(),
        (since, _) => AgeText { since, ..AgeText::default() },
    }
}

pub fn suspend(cron_job: &Value) -> String {
    match cron_job.path("spec.suspend").as_bool() {
        None => "<unset>",
        Some(true) => "True",
        Some(false) => "False",
    }
    .to_owned()
}

pub fn last_schedule(cron_job: &Value) -> AgeText {
    match cron_job.path("status.lastScheduleTime") {
        Value::Null => "<none>".to_owned().into(),
        time => since(time),
    }
}

/// The controller of a ControllerRevision.
pub fn controller(obj: &Value) -> String {
    let owners = obj.at("metadata").items("ownerReferences");
    let Some(owner) = owners.iter().find(|owner| owner.flag("controller")) else {
        return "<none>".to_owned();
    };
    let group = owner.text("apiVersion").split_once('/').map_or("", |(group, _)| group);
    format!("{}/{}", qualified(owner.text("kind"), group).to_lowercase(), owner.text("name"))
}

/// `current/target` of up to two metrics of an autoscaler.
pub fn targets(hpa: &Value) -> String {
    let metrics = hpa.at("spec").items("metrics");
    if metrics.is_empty() {
        return "<none>".to_owned();
    }
    let current = hpa.at("status").items("currentMetrics");
    let rendered: Vec<String> =
        metrics.iter().enumerate().map(|(i, metric)| target(metric, current.get(i))).collect();
    super::text::join_limited(2, &rendered, rendered.len(), ", ")
}

fn target(metric: &Value, status: Option<&Value>) -> String {
    let source = match metric.text("type") {
        "External" => "external",
        "Pods" => "pods",
        "Object" => "object",
        "Resource" => "resource",
        "ContainerResource" => "containerResource",
        _ => return "<unknown type>".to_owned(),
    };
    let target = metric.at(source).at("target");
    let current = status.map(|status| status.at(source)).filter(|status| !status.is_null());
    let current = |field: &str, suffix: &str| match current.map(|status| status.at("current").at(field)) {
        None | Some(Value::Null) => "<unknown>".to_owned(),
        Some(value) => format!("{}{suffix}", metric_value(value)),
    };
    let of_resource = source == "resource" || source == "containerResource";
    let prefix = if of_resource { format!("{}: ", metric.at(source).text("name")) } else { String::new() };
    match (target.at("averageValue"), target.at("averageUtilization")) {
        (Value::Null, Value::Null) if of_resource => {
            format!("{prefix}{}/<auto>", current("averageUtilization", "%"))
        }
        (Value::Null, Value::Null) => {
            format!("{}/{}", current("value", ""), metric_value(target.at("value")))
        }
        (Value::Null, percent) => {
            format!("{prefix}{}/{}%", current("averageUtilization", "%"), metric_value(percent))
        }
        (value, _) => {
            let average = if of_resource || source == "pods" { "" } else { " (avg)" };
            format!("{prefix}{}/{}{average}", current("averageValue", ""), metric_value(value))
        }
    }
}

/// A number or quantity as written; `0` if absent.
fn metric_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "0".to_owned(),
        other => other.to_string(),
    }
}
