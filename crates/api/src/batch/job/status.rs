//! Validates updates of a Job's status.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{indexes, is_indexed};
use crate::core::pod::rules::{IMMUTABLE, non_negative};
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt;
use crate::meta::semantic_equal;

/// Whether the Job has this condition with status `True`.
pub(super) fn is_condition_true(job: &Value, condition: &str) -> bool {
    has_condition(job, condition, "True")
}

fn has_condition(job: &Value, condition: &str, status: &str) -> bool {
    let conditions = job.at("status").items("conditions").iter();
    conditions.clone().any(|one| one.text("type") == condition && one.text("status") == status)
}

fn is_finished(job: &Value) -> bool {
    is_condition_true(job, "Complete") || is_condition_true(job, "Failed")
}

/// Rules about combinations of fields only apply if one of the fields changes, so that an invalid old
/// status can still be updated.
struct StatusUpdate<'a> {
    new: &'a Value,
    old: &'a Value,
}

impl StatusUpdate<'_> {
    fn field_changed(&self, name: &str) -> bool {
        !semantic_equal(self.new.at("status").at(name), self.old.at("status").at(name))
    }

    fn number_changed(&self, name: &str) -> bool {
        let number = |job: &Value| job.at("status").int(name).unwrap_or(0);
        number(self.new) != number(self.old)
    }

    fn condition_changed(&self, name: &str) -> bool {
        is_condition_true(self.new, name) != is_condition_true(self.old, name)
    }

    fn finished_changed(&self) -> bool {
        is_finished(self.new) != is_finished(self.old)
    }
}

pub(super) fn validate(new: &Value, old: &Value, e: &mut ErrorList) {
    let path = Path::new("status");
    let status = new.at("status");
    for field in ["active", "succeeded", "failed", "ready", "terminating"] {
        non_negative(e, status, &path, field);
    }
    validate_uncounted_pods(status.at("uncountedTerminatedPods"), &path.child("uncountedTerminatedPods"), e);
    let change = StatusUpdate { new, old };
    validate_terminal_conditions(&change, &path, e);
    validate_finished(&change, &path, e);
    index_lists(&change, &path, e);
    let ready = status.int("ready").unwrap_or(0);
    let finished = is_finished(new);
    if finished
        && status.int("terminating").unwrap_or(0) > 0
        && (change.finished_changed() || change.field_changed("terminating"))
    {
        let count = status.int("terminating").unwrap_or(0);
        e.invalid(&path.child("terminating"), count, "terminating>0 is invalid for finished job");
    }
    if ready > status.int("active").unwrap_or(0)
        && (change.field_changed("ready") || change.number_changed("active"))
    {
        e.invalid(&path.child("ready"), ready, "cannot set more ready pods than active");
    }
    success_criteria(new, &path, e);
    validate_status_transition(&change, &path, e);
}

fn invalid_conditions(e: &mut ErrorList, path: &Path, message: &str) {
    e.push(ErrorType::Invalid, &path.child("conditions"), format!("Invalid value: {message}"));
}

fn validate_uncounted_pods(pods: &Value, path: &Path, e: &mut ErrorList) {
    let mut seen = BTreeSet::new();
    for field in ["succeeded", "failed"] {
        for (i, uid) in pods.items(field).iter().enumerate() {
            let (at, uid) = (path.child(field).index(i), uid.as_str().unwrap_or(""));
            if uid.is_empty() {
                e.invalid(&at, uid, "must not be empty");
            } else if !seen.insert(uid) {
                e.duplicate(&at, uid);
            }
        }
    }
}

/// Validates the terminal conditions and the completion time.
fn validate_terminal_conditions(change: &StatusUpdate<'_>, path: &Path, e: &mut ErrorList) {
    let (job, status) = (change.new, change.new.at("status"));
    let (complete, failed) = (is_condition_true(job, "Complete"), is_condition_true(job, "Failed"));
    let complete_changed = change.condition_changed("Complete");
    if complete && failed && (complete_changed || change.condition_changed("Failed")) {
        invalid_conditions(e, path, "cannot set Complete=True and Failed=true conditions");
    }
    if complete
        && is_condition_true(job, "FailureTarget")
        && (complete_changed || change.condition_changed("FailureTarget"))
    {
        invalid_conditions(e, path, "cannot set Complete=True and FailureTarget=true conditions");
    }
    let at = path.child("completionTime");
    let (started, ended) = (status.text("startTime"), status.text("completionTime"));
    if complete_changed || change.field_changed("completionTime") {
        if !ended.is_empty() && !complete {
            e.invalid(&at, ended, "cannot set completionTime when there is no Complete=True condition");
        }
        if ended.is_empty() && complete {
            e.required(&at, "completionTime is required for Complete jobs");
        }
    }
    // Both are in UTC with seconds, so comparing the strings compares the times.
    if !started.is_empty()
        && !ended.is_empty()
        && ended < started
        && (change.field_changed("startTime") || change.field_changed("completionTime"))
    {
        e.invalid(&at, ended, "must be equal to or after `startTime`");
    }
    if failed
        && !is_condition_true(job, "FailureTarget")
        && (change.condition_changed("Failed") || change.field_changed("failedIndexes"))
    {
        invalid_conditions(
            e,
            path,
            "cannot set Failed=True condition without the FailureTarget=true condition",
        );
    }
    if complete
        && !is_condition_true(job, "SuccessCriteriaMet")
        && (complete_changed || change.condition_changed("SuccessCriteriaMet"))
    {
        invalid_conditions(
            e,
            path,
            "cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
        );
    }
}

fn validate_finished(change: &StatusUpdate<'_>, path: &Path, e: &mut ErrorList) {
    let (spec, status) = (change.new.at("spec"), change.new.at("status"));
    if !is_finished(change.new) {
        return;
    }
    let active = status.int("active").unwrap_or(0);
    if active > 0 && (change.finished_changed() || change.number_changed("active")) {
        e.invalid(&path.child("active"), active, "active>0 is invalid for finished job");
    }
    let nothing_to_do = spec.flag("suspend") && spec.int("completions") == Some(0);
    if !status.has("startTime")
        && (change.finished_changed() || change.field_changed("startTime"))
        && !nothing_to_do
    {
        e.required(&path.child("startTime"), "startTime is required for finished job");
    }
    let pods = status.at("uncountedTerminatedPods");
    let some = ["succeeded", "failed"].iter().any(|field| !pods.items(field).is_empty());
    if some && (change.finished_changed() || change.field_changed("uncountedTerminatedPods")) {
        let fields = [("Succeeded", "succeeded"), ("Failed", "failed")];
        let rendered = crate::core::pod::rules::render_fields(pods, &fields);
        let message = "must be empty for finished job";
        crate::core::pod::rules::invalid_as(e, &path.child("uncountedTerminatedPods"), &rendered, message);
    }
}

fn index_lists(change: &StatusUpdate<'_>, path: &Path, e: &mut ErrorList) {
    let (spec, status) = (change.new.at("spec"), change.new.at("status"));
    let (completed, failed) = (status.text("completedIndexes"), status.at("failedIndexes").as_str());
    let (completed_changed, failed_changed) =
        (change.field_changed("completedIndexes"), change.field_changed("failedIndexes"));
    let completions = spec.int("completions");
    if let Some(completions) = completions {
        if completed_changed && let Err(reason) = indexes::validate_index_ranges(completed, completions) {
            let message = format!("error parsing completedIndexes: {reason}");
            e.invalid(&path.child("completedIndexes"), completed, &message);
        }
        if let Some(failed) = failed.filter(|_| failed_changed && spec.has("backoffLimitPerIndex"))
            && let Err(reason) = indexes::validate_index_ranges(failed, completions)
        {
            let message = format!("error parsing failedIndexes: {reason}");
            e.invalid(&path.child("failedIndexes"), failed, &message);
        }
    }
    if completed_changed && !completed.is_empty() && !is_indexed(spec) {
        let message = "cannot set non-empty completedIndexes when non-indexed completion mode";
        e.invalid(&path.child("completedIndexes"), completed, message);
    }
    let Some(failed) = failed else { return };
    if failed_changed && !spec.has("backoffLimitPerIndex") {
        let message = "cannot set non-null failedIndexes when backoffLimitPerIndex is null";
        e.invalid(&path.child("failedIndexes"), failed, message);
    }
    if (failed_changed || completed_changed)
        && let Some(index) =
            completions.and_then(|completions| indexes::first_overlap(completed, failed, completions))
    {
        let message = format!("failedIndexes and completedIndexes overlap at index: {index}");
        e.invalid(&path.child("failedIndexes"), failed, &message);
    }
}

fn success_criteria(job: &Value, path: &Path, e: &mut ErrorList) {
    let met = is_condition_true(job, "SuccessCriteriaMet");
    if met && is_condition_true(job, "Failed") {
        invalid_conditions(e, path, "cannot set SuccessCriteriaMet=True and Failed=true conditions");
    }
    if met && is_condition_true(job, "FailureTarget") {
        invalid_conditions(e, path, "cannot set SuccessCriteriaMet=True and FailureTarget=true conditions");
    }
    if job.at("spec").has("successPolicy") && !met && is_condition_true(job, "Complete") {
        let message = "cannot set Complete=True for Job with SuccessPolicy unless SuccessCriteriaMet=True";
        invalid_conditions(e, path, message);
    }
}

/// Terminal conditions must not be removed, and counters must not decrease.
fn validate_status_transition(change: &StatusUpdate<'_>, path: &Path, e: &mut ErrorList) {
    let (new, old) = (change.new, change.old);
    for condition in ["Failed", "Complete", "FailureTarget"] {
        if is_condition_true(old, condition) && !is_condition_true(new, condition) {
            invalid_conditions(e, path, &format!("cannot disable the terminal {condition}=True condition"));
        }
    }
    let spec = new.at("spec");
    let elastic = is_indexed(spec) && spec.at("completions") == spec.at("parallelism");
    for (field, fixed) in [("failed", true), ("succeeded", !elastic)] {
        let number = |job: &Value| job.at("status").int(field).unwrap_or(0);
        if fixed && number(new) < number(old) {
            e.invalid(&path.child(field), number(new), &format!("cannot decrease the {field} counter"));
        }
    }
    let time = |job: &'_ Value, field: &str| job.at("status").at(field).clone();
    let ended = time(new, "completionTime");
    if !ended.is_null() && !time(old, "completionTime").is_null() && change.field_changed("completionTime") {
        e.invalid(&path.child("completionTime"), ended, IMMUTABLE);
    }
    let resuming = is_condition_true(old, "Suspended") && has_condition(new, "Suspended", "False");
    if !time(old, "startTime").is_null()
        && change.field_changed("startTime")
        && !resuming
        && !spec.flag("suspend")
    {
        let message = "field is immutable for unsuspended job once set";
        e.invalid(&path.child("startTime"), time(new, "startTime"), message);
    }
    if is_condition_true(old, "SuccessCriteriaMet") && !is_condition_true(new, "SuccessCriteriaMet") {
        invalid_conditions(e, path, "cannot disable the SuccessCriteriaMet=True condition");
    }
    if is_condition_true(old, "Complete")
        && !is_condition_true(old, "SuccessCriteriaMet")
        && is_condition_true(new, "SuccessCriteriaMet")
    {
        let message = "cannot set SuccessCriteriaMet=True for Job already has Complete=true conditions";
        invalid_conditions(e, path, message);
    }
}
