//! Decides which Jobs a CronJob creates and deletes. Does no I/O.

use std::sync::Arc;

use api::batch::schedule::Schedule;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{CronJob, CronJobSpec, CronJobStatus, Job};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use reconcile::{EventType, Object as _, reference};

use crate::template::new_controller_ref;

/// The annotation with the scheduled time of a Job.
const SCHEDULED_TIMESTAMP: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";
/// The number of missed start times above which a warning is emitted.
const MISSED_STARTS_WARNING: i64 = 100;

/// The changes that a CronJob needs.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    /// Events: severity, reason, message.
    pub events: Vec<(EventType, &'static str, String)>,
    /// Jobs to delete: beyond the history limits, or active and to be replaced.
    pub delete: Vec<Arc<Job>>,
    pub start: Option<JobStart>,
    /// The new status, without the effects of `delete` and `start`.
    pub status: CronJobStatus,
    /// When to sync again without a change.
    pub requeue_at: Option<Timestamp>,
}

/// A Job to start.
#[derive(Debug, PartialEq)]
pub struct JobStart {
    pub job: Job,
    /// The Job exists already and only has to be added to the status.
    pub exists: bool,
    pub at: Timestamp,
}

/// Plans the changes of `cron`, given the Jobs it owns. `local` is the time zone of schedules without one.
pub fn plan(cron: &CronJob, jobs: &[Arc<Job>], now: Timestamp, local: &TimeZone) -> Plan {
    let mut plan = Plan { status: cron.status.clone().unwrap_or_default(), ..Plan::default() };
    let spec = &cron.spec;
    plan.delete = jobs_over_history_limit(spec, jobs);
    let next_schedule = next_schedule(cron, spec, now, local);
    let scheduled_name = match &next_schedule {
        NextSchedule::Run { at, .. } => job_name(cron, *at),
        _ => String::new(),
    };
    sync_active_jobs(jobs, &scheduled_name, &mut plan);
    for job in &plan.delete {
        remove_active_job(&mut plan.status, job);
    }
    if !cron.is_deleting() && spec.suspend != Some(true) {
        plan_start(cron, spec, jobs, next_schedule, &mut plan);
    }
    plan
}

/// The next run of a CronJob whose schedule has changed.
pub fn next_run(cron: &CronJob, now: Timestamp, local: &TimeZone) -> Option<Timestamp> {
    match next_schedule(cron, &cron.spec, now, local) {
        NextSchedule::Run { next, .. } | NextSchedule::Later(next) => next,
        NextSchedule::Invalid(..) => None,
    }
}

/// The status after a Job is started.
pub fn status_after_start(mut status: CronJobStatus, job: &Job, at: Timestamp) -> CronJobStatus {
    let active = status.active.get_or_insert_default();
    if !active.iter().any(|known| known.uid.as_deref() == Some(job.uid())) {
        active.push(reference(job));
    }
    status.last_schedule_time = Some(Time(at));
    status
}

/// Removes a deleted Job from the status.
pub fn remove_active_job(status: &mut CronJobStatus, job: &Job) {
    remove_active(status, |known| known.uid.as_deref() == Some(job.uid()));
}

fn remove_active(status: &mut CronJobStatus, is_removed: impl Fn(&ObjectReference) -> bool) {
    if let Some(active) = &mut status.active {
        active.retain(|known| !is_removed(known));
        if active.is_empty() {
            status.active = None;
        }
    }
}

/// The condition type of a finished Job: `Complete` or `Failed`.
pub fn finished_status(job: &Job) -> Option<&str> {
    let conditions = job.status.as_ref()?.conditions.as_ref()?;
    let ends = |kind: &str| matches!(kind, "Complete" | "Failed");
    let ended = conditions.iter().find(|condition| ends(&condition.type_) && condition.status == "True")?;
    Some(&ended.type_)
}

/// The oldest finished Jobs beyond the history limits.
fn jobs_over_history_limit(spec: &CronJobSpec, jobs: &[Arc<Job>]) -> Vec<Arc<Job>> {
    let mut surplus = Vec::new();
    for (kind, limit) in
        [("Complete", spec.successful_jobs_history_limit), ("Failed", spec.failed_jobs_history_limit)]
    {
        let Some(limit) = limit else { continue };
        let mut ended: Vec<&Arc<Job>> =
            jobs.iter().filter(|job| finished_status(job) == Some(kind)).collect();
        ended.sort_by_key(|job| {
            let start = job.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
            (start.is_none(), start, job.name().to_owned())
        });
        let count = ended.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
        surplus.extend(ended[..count].iter().filter(|job| !job.is_deleting()).map(|job| (*job).clone()));
    }
    surplus
}

/// Updates the list of active Jobs. An unknown Job with the name of the due run is expected: it was created
/// before a restart that prevented the status update.
fn sync_active_jobs(jobs: &[Arc<Job>], scheduled_name: &str, plan: &mut Plan) {
    for job in jobs {
        let active = plan.status.active.iter().flatten();
        let known = active.into_iter().any(|known| known.uid.as_deref() == Some(job.uid()));
        let Some(finished_status) = finished_status(job) else {
            if !known && job.name() != scheduled_name {
                let message =
                    format!("Saw a job that the controller did not create or forgot: {}", job.name());
                plan.events.push((EventType::Warning, "UnexpectedJob", message));
            }
            continue;
        };
        if known {
            remove_active_job(&mut plan.status, job);
            let message = format!("Saw completed job: {}, condition: {finished_status}", job.name());
            plan.events.push((EventType::Normal, "SawCompletedJob", message));
        }
        let completed = job.status.as_ref().and_then(|status| status.completion_time.as_ref());
        if let Some(completed) = completed.filter(|_| finished_status == "Complete") {
            let last = plan.status.last_successful_time.as_ref();
            if last.is_none_or(|last| last.0 < completed.0) {
                plan.status.last_successful_time = Some(completed.clone());
            }
        }
    }
    let is_missing =
        |known: &ObjectReference| !jobs.iter().any(|job| known.uid.as_deref() == Some(job.uid()));
    for known in plan.status.active.iter().flatten().filter(|known| is_missing(known)) {
        let message = format!("Active job went missing: {}", known.name.as_deref().unwrap_or_default());
        plan.events.push((EventType::Normal, "MissingJob", message));
    }
    remove_active(&mut plan.status, is_missing);
}

/// The next run by the schedule.
enum NextSchedule {
    /// A run is due since `at`. The following run is at `next`.
    Run {
        at: Timestamp,
        many_missed: bool,
        next: Option<Timestamp>,
    },
    Later(Option<Timestamp>),
    /// The schedule is invalid: event reason and message.
    Invalid(&'static str, String),
}

fn plan_start(
    cron: &CronJob,
    spec: &CronJobSpec,
    jobs: &[Arc<Job>],
    next_schedule: NextSchedule,
    plan: &mut Plan,
) {
    let (at, many_missed, next) = match next_schedule {
        NextSchedule::Invalid(reason, message) => {
            return plan.events.push((EventType::Warning, reason, message));
        }
        NextSchedule::Later(next) => return plan.requeue_at = next,
        NextSchedule::Run { at, many_missed, next } => (at, many_missed, next),
    };
    plan.requeue_at = next;
    if many_missed {
        let message =
            "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew";
        plan.events.push((EventType::Warning, "TooManyMissedTimes", message.to_owned()));
    }
    let name = job_name(cron, at);
    let active: Vec<&ObjectReference> = plan.status.active.iter().flatten().collect();
    let already_started = active.iter().any(|known| known.name.as_deref() == Some(&name));
    if already_started || plan.status.last_schedule_time.as_ref().is_some_and(|last| last.0 == at) {
        return;
    }
    let is_active = |job: &Job| active.iter().any(|known| known.uid.as_deref() == Some(job.uid()));
    match spec.concurrency_policy.as_deref() {
        Some("Forbid") if !active.is_empty() => {
            let message =
                "Not starting job because prior execution is running and concurrency policy is Forbid";
            plan.events.push((EventType::Normal, "JobAlreadyActive", message.to_owned()));
            return;
        }
        Some("Replace") => plan.delete.extend(jobs.iter().filter(|job| is_active(job)).cloned()),
        _ => {}
    }
    let existing = jobs.iter().find(|job| job.name() == name);
    plan.start = Some(JobStart {
        job: existing.map_or_else(|| job(cron, spec, at), |job| Job::clone(job)),
        exists: existing.is_some(),
        at,
    });
}

fn next_schedule(cron: &CronJob, spec: &CronJobSpec, now: Timestamp, local: &TimeZone) -> NextSchedule {
    let zone = match &spec.time_zone {
        None => local.clone(),
        Some(name) => match TimeZone::get(name) {
            Ok(zone) => zone,
            Err(_) => {
                let message = format!("invalid timeZone: {name:?}: unknown time zone {name}");
                return NextSchedule::Invalid("UnknownTimeZone", message);
            }
        },
    };
    let schedule = match Schedule::parse(&spec.schedule) {
        Ok(schedule) => schedule,
        Err(reason) => {
            let message = format!("unparseable schedule: {:?} : {reason}", spec.schedule);
            return NextSchedule::Invalid("UnparseableSchedule", message);
        }
    };
    let created = cron.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
    let last = cron.status.as_ref().and_then(|status| status.last_schedule_time.as_ref());
    let anchor = last.map_or(created, |time| time.0);
    let (Some(first), Some(recent)) =
        (schedule.next(anchor, &zone), most_recent_schedule_time(&schedule, &zone, anchor, now))
    else {
        let reason = "time difference between two schedules is less than 1 second";
        return NextSchedule::Invalid(
            "InvalidSchedule",
            format!("invalid schedule: {} : {reason}", spec.schedule),
        );
    };
    let next = schedule.next(recent.unwrap_or(anchor), &zone);
    let deadline = spec
        .starting_deadline_seconds
        .map(|seconds| now.checked_sub(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MIN));
    match recent {
        Some(at) if deadline.is_none_or(|deadline| at > deadline) => {
            let first =
                deadline.and_then(|deadline| schedule.next(deadline.max(anchor), &zone)).unwrap_or(first);
            NextSchedule::Run {
                at,
                many_missed: missed_starts(&schedule, &zone, first, now) > MISSED_STARTS_WARNING,
                next,
            }
        }
        _ => NextSchedule::Later(next),
    }
}

/// The last start time after `anchor` and not after `now`, if any. The outer `None` means that the schedule
/// has no start times at all.
fn most_recent_schedule_time(
    schedule: &Schedule,
    zone: &TimeZone,
    anchor: Timestamp,
    now: Timestamp,
) -> Option<Option<Timestamp>> {
    let first = schedule.next(anchor, zone)?;
    if first > now {
        return Some(None);
    }
    if let Schedule::Every(pause) = schedule {
        let pause = i64::try_from(pause.as_secs()).unwrap_or(i64::MAX).max(1);
        let runs = now.duration_since(first).as_secs() / pause;
        let late = SignedDuration::from_secs(runs.saturating_mul(pause));
        return Some(Some(first.checked_add(late).unwrap_or(first)));
    }
    // The search window doubles each time, to avoid iterating over all start times of several years.
    let mut back = SignedDuration::from_mins(2);
    loop {
        let from = now.checked_sub(back).unwrap_or(Timestamp::MIN).max(anchor);
        let mut found = schedule.next(from, zone)?;
        if found <= now {
            while let Some(next) = schedule.next(found, zone).filter(|next| *next <= now) {
                found = next;
            }
            return Some(Some(found));
        }
        back = back.saturating_mul(2);
    }
}

/// An estimate of the number of start times since `first`, assuming a constant interval.
fn missed_starts(schedule: &Schedule, zone: &TimeZone, first: Timestamp, now: Timestamp) -> i64 {
    let Some(second) = schedule.next(first, zone) else { return 0 };
    now.duration_since(first).as_secs() / second.duration_since(first).as_secs().max(1) + 1
}

/// The name is deterministic for a scheduled time (in minutes), so that no run is started twice.
fn job_name(cron: &CronJob, at: Timestamp) -> String {
    format!("{}-{}", cron.name(), at.as_second().div_euclid(60))
}

fn job(cron: &CronJob, spec: &CronJobSpec, at: Timestamp) -> Job {
    let template = spec.job_template.metadata.as_ref();
    let zone = spec.time_zone.as_deref().and_then(|name| TimeZone::get(name).ok()).unwrap_or(TimeZone::UTC);
    let zoned = at.to_zoned(zone);
    let offset = if zoned.offset().is_zero() { "Z".to_owned() } else { zoned.strftime("%:z").to_string() };
    let mut annotations = template.and_then(|meta| meta.annotations.clone()).unwrap_or_default();
    annotations
        .insert(SCHEDULED_TIMESTAMP.to_owned(), format!("{}{offset}", zoned.strftime("%Y-%m-%dT%H:%M:%S")));
    let metadata = ObjectMeta {
        name: Some(job_name(cron, at)),
        namespace: Some(cron.namespace().to_owned()),
        labels: template.and_then(|meta| meta.labels.clone()),
        annotations: Some(annotations),
        owner_references: Some(vec![new_controller_ref(cron)]),
        ..ObjectMeta::default()
    };
    Job { metadata, spec: spec.job_template.spec.clone(), status: None }
}
