//! Decides which Jobs a CronJob starts, replaces and forgets.

use std::sync::Arc;

use api::batch::schedule::Schedule;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{CronJob, CronJobSpec, CronJobStatus, Job};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use reconcile::{Object as _, Severity, reference};

use crate::template::controlled_by;

/// Says for which time a Job was made.
const SCHEDULED_AT: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";
/// More missed runs than this are worth a warning.
const MANY: i64 = 100;

/// What a CronJob needs.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    /// What is told: severity, reason, message.
    pub events: Vec<(Severity, &'static str, String)>,
    /// Jobs to delete: beyond the history limits, or still running and to be replaced.
    pub delete: Vec<Arc<Job>>,
    pub start: Option<Start>,
    /// The status, but for what is deleted and started.
    pub status: CronJobStatus,
    /// When to look again although nothing happens.
    pub recheck: Option<Timestamp>,
}

/// A run that is due.
#[derive(Debug, PartialEq)]
pub struct Start {
    pub job: Job,
    /// The Job is there already; only the status does not tell yet.
    pub is_there: bool,
    pub at: Timestamp,
}

/// What `cron` needs, given the Jobs it owns. `local` is the time zone of schedules that name none.
pub fn plan(cron: &CronJob, jobs: &[Arc<Job>], now: Timestamp, local: &TimeZone) -> Plan {
    let mut plan = Plan { status: cron.status.clone().unwrap_or_default(), ..Plan::default() };
    let spec = &cron.spec;
    plan.delete = history(spec, jobs);
    let due = due(cron, spec, now, local);
    let due_name = match &due {
        Due::Run { at, .. } => job_name(cron, *at),
        _ => String::new(),
    };
    follow(jobs, &due_name, &mut plan);
    for job in &plan.delete {
        forget(&mut plan.status, job);
    }
    if !cron.is_deleting() && spec.suspend != Some(true) {
        begin(cron, spec, jobs, due, &mut plan);
    }
    plan
}

/// When a CronJob whose schedule has changed is due next.
pub fn next_run(cron: &CronJob, now: Timestamp, local: &TimeZone) -> Option<Timestamp> {
    match due(cron, &cron.spec, now, local) {
        Due::Run { next, .. } | Due::Later(next) => next,
        Due::Broken(..) => None,
    }
}

/// The status once a run has been started.
pub fn started(mut status: CronJobStatus, job: &Job, at: Timestamp) -> CronJobStatus {
    let active = status.active.get_or_insert_default();
    if !active.iter().any(|known| known.uid.as_deref() == Some(job.uid())) {
        active.push(reference(job));
    }
    status.last_schedule_time = Some(Time(at));
    status
}

/// The status once a Job is deleted.
pub fn forget(status: &mut CronJobStatus, job: &Job) {
    remove(status, |known| known.uid.as_deref() == Some(job.uid()));
}

fn remove(status: &mut CronJobStatus, gone: impl Fn(&ObjectReference) -> bool) {
    if let Some(active) = &mut status.active {
        active.retain(|known| !gone(known));
        if active.is_empty() {
            status.active = None;
        }
    }
}

/// How a finished Job has ended: `Complete` or `Failed`.
pub fn outcome(job: &Job) -> Option<&str> {
    let conditions = job.status.as_ref()?.conditions.as_ref()?;
    let ends = |kind: &str| matches!(kind, "Complete" | "Failed");
    let ended = conditions.iter().find(|condition| ends(&condition.type_) && condition.status == "True")?;
    Some(&ended.type_)
}

/// The oldest finished Jobs beyond what is kept.
fn history(spec: &CronJobSpec, jobs: &[Arc<Job>]) -> Vec<Arc<Job>> {
    let mut surplus = Vec::new();
    for (kind, limit) in
        [("Complete", spec.successful_jobs_history_limit), ("Failed", spec.failed_jobs_history_limit)]
    {
        let Some(limit) = limit else { continue };
        let mut ended: Vec<&Arc<Job>> = jobs.iter().filter(|job| outcome(job) == Some(kind)).collect();
        ended.sort_by_key(|job| {
            let start = job.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
            (start.is_none(), start, job.name().to_owned())
        });
        let count = ended.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
        surplus.extend(ended[..count].iter().filter(|job| !job.is_deleting()).map(|job| (*job).clone()));
    }
    surplus
}

/// Brings the list of active Jobs up to date. The Job of a run that is due is one we were stopped from
/// noting down.
fn follow(jobs: &[Arc<Job>], due: &str, plan: &mut Plan) {
    for job in jobs {
        let active = plan.status.active.iter().flatten();
        let known = active.into_iter().any(|known| known.uid.as_deref() == Some(job.uid()));
        let Some(outcome) = outcome(job) else {
            if !known && job.name() != due {
                let message =
                    format!("Saw a job that the controller did not create or forgot: {}", job.name());
                plan.events.push((Severity::Warning, "UnexpectedJob", message));
            }
            continue;
        };
        if known {
            forget(&mut plan.status, job);
            let message = format!("Saw completed job: {}, condition: {outcome}", job.name());
            plan.events.push((Severity::Normal, "SawCompletedJob", message));
        }
        let completed = job.status.as_ref().and_then(|status| status.completion_time.as_ref());
        if let Some(completed) = completed.filter(|_| outcome == "Complete") {
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
        plan.events.push((Severity::Normal, "MissingJob", message));
    }
    remove(&mut plan.status, is_missing);
}

/// What the schedule says.
enum Due {
    /// A run is due since `at`; the one after it is `next`.
    Run {
        at: Timestamp,
        many_missed: bool,
        next: Option<Timestamp>,
    },
    Later(Option<Timestamp>),
    /// The schedule makes no sense: reason and message.
    Broken(&'static str, String),
}

fn begin(cron: &CronJob, spec: &CronJobSpec, jobs: &[Arc<Job>], due: Due, plan: &mut Plan) {
    let (at, many_missed, next) = match due {
        Due::Broken(reason, message) => return plan.events.push((Severity::Warning, reason, message)),
        Due::Later(next) => return plan.recheck = next,
        Due::Run { at, many_missed, next } => (at, many_missed, next),
    };
    plan.recheck = next;
    if many_missed {
        let message =
            "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew";
        plan.events.push((Severity::Warning, "TooManyMissedTimes", message.to_owned()));
    }
    let name = job_name(cron, at);
    let active: Vec<&ObjectReference> = plan.status.active.iter().flatten().collect();
    let begun = active.iter().any(|known| known.name.as_deref() == Some(&name));
    if begun || plan.status.last_schedule_time.as_ref().is_some_and(|last| last.0 == at) {
        return;
    }
    let is_active = |job: &Job| active.iter().any(|known| known.uid.as_deref() == Some(job.uid()));
    match spec.concurrency_policy.as_deref() {
        Some("Forbid") if !active.is_empty() => {
            let message =
                "Not starting job because prior execution is running and concurrency policy is Forbid";
            plan.events.push((Severity::Normal, "JobAlreadyActive", message.to_owned()));
            return;
        }
        Some("Replace") => plan.delete.extend(jobs.iter().filter(|job| is_active(job)).cloned()),
        _ => {}
    }
    let is_there = jobs.iter().find(|job| job.name() == name);
    plan.start = Some(Start {
        job: is_there.map_or_else(|| job(cron, spec, at), |job| Job::clone(job)),
        is_there: is_there.is_some(),
        at,
    });
}

fn due(cron: &CronJob, spec: &CronJobSpec, now: Timestamp, local: &TimeZone) -> Due {
    let zone = match &spec.time_zone {
        None => local.clone(),
        Some(name) => match TimeZone::get(name) {
            Ok(zone) => zone,
            Err(_) => {
                let message = format!("invalid timeZone: {name:?}: unknown time zone {name}");
                return Due::Broken("UnknownTimeZone", message);
            }
        },
    };
    let schedule = match Schedule::parse(&spec.schedule) {
        Ok(schedule) => schedule,
        Err(why) => {
            let message = format!("unparseable schedule: {:?} : {why}", spec.schedule);
            return Due::Broken("UnparseableSchedule", message);
        }
    };
    let created = cron.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
    let last = cron.status.as_ref().and_then(|status| status.last_schedule_time.as_ref());
    let anchor = last.map_or(created, |time| time.0);
    let (Some(first), Some(recent)) =
        (schedule.next(anchor, &zone), most_recent(&schedule, &zone, anchor, now))
    else {
        let why = "time difference between two schedules is less than 1 second";
        return Due::Broken("InvalidSchedule", format!("invalid schedule: {} : {why}", spec.schedule));
    };
    let next = schedule.next(recent.unwrap_or(anchor), &zone);
    let deadline = spec
        .starting_deadline_seconds
        .map(|seconds| now.checked_sub(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MIN));
    match recent {
        Some(at) if deadline.is_none_or(|deadline| at > deadline) => {
            let first =
                deadline.and_then(|deadline| schedule.next(deadline.max(anchor), &zone)).unwrap_or(first);
            Due::Run { at, many_missed: missed(&schedule, &zone, first, now) > MANY, next }
        }
        _ => Due::Later(next),
    }
}

/// The last run due after `anchor` and not after `now`, if any. Outer `None` if there never is one.
fn most_recent(
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
    // Looks back twice as far each time, so as not to go through all the runs of years.
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

/// About how many runs are due since `first`.
fn missed(schedule: &Schedule, zone: &TimeZone, first: Timestamp, now: Timestamp) -> i64 {
    let Some(second) = schedule.next(first, zone) else { return 0 };
    now.duration_since(first).as_secs() / second.duration_since(first).as_secs().max(1) + 1
}

/// The same for the same time, so that no run is started twice.
fn job_name(cron: &CronJob, at: Timestamp) -> String {
    format!("{}-{}", cron.name(), at.as_second().div_euclid(60))
}

fn job(cron: &CronJob, spec: &CronJobSpec, at: Timestamp) -> Job {
    let template = spec.job_template.metadata.as_ref();
    let zone = spec.time_zone.as_deref().and_then(|name| TimeZone::get(name).ok()).unwrap_or(TimeZone::UTC);
    let zoned = at.to_zoned(zone);
    let offset = if zoned.offset().is_zero() { "Z".to_owned() } else { zoned.strftime("%:z").to_string() };
    let mut annotations = template.and_then(|meta| meta.annotations.clone()).unwrap_or_default();
    annotations.insert(SCHEDULED_AT.to_owned(), format!("{}{offset}", zoned.strftime("%Y-%m-%dT%H:%M:%S")));
    let metadata = ObjectMeta {
        name: Some(job_name(cron, at)),
        namespace: Some(cron.namespace().to_owned()),
        labels: template.and_then(|meta| meta.labels.clone()),
        annotations: Some(annotations),
        owner_references: Some(vec![controlled_by(cron)]),
        ..ObjectMeta::default()
    };
    Job { metadata, spec: spec.job_template.spec.clone(), status: None }
}
