//! CronJob: REST strategy and validation.

use jiff::tz::TimeZone;
use serde_json::Value;

use super::job;
use super::schedule::Schedule;
use crate::apps::workload;
use crate::core::pod::rules::{invalid_as, non_negative, render_value, required_one_of};
use crate::core::pod::template::name_warning;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::semantic_equal;
use crate::strategy::RestStrategy;

const TEMPLATE_PATH: &[&str] = &["spec", "jobTemplate", "spec", "template"];
/// The controller appends a dash and ten digits to the name of each Job.
const MAX_NAME_BYTES: usize = 52;

pub struct CronJob;

impl RestStrategy for CronJob {
    fn prepare(&self, new: &mut Value) {
        workload::prepare_template(new, TEMPLATE_PATH);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        match spec.text("schedule") {
            "" => errors.required(&path.child("schedule"), ""),
            text => schedule(text, &path.child("schedule"), errors),
        }
        non_negative(errors, spec, &path, "startingDeadlineSeconds");
        if let Some(zone) = spec.at("timeZone").as_str() {
            time_zone(zone, &path.child("timeZone"), errors);
        }
        required_one_of(errors, spec, &path, "concurrencyPolicy", &["Allow", "Forbid", "Replace"]);
        job_template(spec.path("jobTemplate.spec"), &path.child("jobTemplate.spec"), errors);
        non_negative(errors, spec, &path, "successfulJobsHistoryLimit");
        non_negative(errors, spec, &path, "failedJobsHistoryLimit");
    }

    fn validate_create(&self, new: &Value, errors: &mut ErrorList) {
        let name = new.at("metadata").text("name");
        if name.len() > MAX_NAME_BYTES {
            let message = format!("must be no more than {MAX_NAME_BYTES} characters");
            errors.invalid(&Path::new("metadata.name"), name, &message);
        }
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let mut found = Vec::new();
        if old.is_none() {
            found.extend(name_warning(new, "Pod names and hostnames"));
        }
        if !old.is_some_and(|old| semantic_equal(old.at("spec"), new.at("spec"))) {
            let at = Path::new("spec.jobTemplate.spec");
            found.extend(job::spec_warnings(new.path("spec.jobTemplate.spec"), &at));
        }
        if old.is_some() && new.at("spec").text("schedule").contains("TZ") {
            found.push(
                "cannot use TZ or CRON_TZ in spec.spec.schedule, use timeZone instead, see https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details"
                    .to_owned(),
            );
        }
        found
    }
}

fn schedule(text: &str, path: &Path, e: &mut ErrorList) {
    if let Err(reason) = Schedule::parse(text) {
        e.invalid(path, text, &reason);
    }
    if text.contains("TZ") {
        e.invalid(path, text, "cannot use TZ or CRON_TZ in schedule, use timeZone field instead");
    }
}

fn time_zone(zone: &str, path: &Path, e: &mut ErrorList) {
    if zone.is_empty() {
        return e.invalid(path, zone, "timeZone must be nil or non-empty string");
    }
    if zone.eq_ignore_ascii_case("Local") {
        let message = "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones";
        e.invalid(path, zone, message);
        if zone == "Local" {
            return;
        }
    }
    // The time zone database ignores case; upstream does not.
    if !TimeZone::get(zone).is_ok_and(|found| found.iana_name() == Some(zone)) {
        e.invalid(path, zone, &format!("unknown time zone {zone}"));
    }
}

fn job_template(spec: &Value, path: &Path, e: &mut ErrorList) {
    job::validate_spec(spec, path, e);
    let selector = spec.at("selector");
    if !selector.is_null() {
        invalid_as(e, &path.child("selector"), &render_value(selector), "`selector` will be auto-generated");
    }
    if spec.flag("manualSelector") {
        e.not_supported(&path.child("manualSelector"), true, &["nil", "false"]);
    }
}
