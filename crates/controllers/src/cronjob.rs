//! CronJob controller: creates Jobs on a schedule.
//!
//! Upstream: `pkg/controller/cronjob`.

pub mod plan;

use std::sync::Arc;
use std::time::Duration;

use jiff::tz::TimeZone;
use k8s_openapi::api::batch::v1::{CronJob, CronJobStatus, Job};
use reconcile::{Controller, Ctx, DeleteOptions, Error, Key, Object as _, ReconcileAction, keys};

use plan::{JobStart, Plan, plan};

const WORKERS: usize = 5;

pub async fn run(ctx: Ctx) {
    // Schedules without a time zone use the local time zone of this process.
    let local = TimeZone::system();
    let controller = Controller::new("cronjob", &ctx);
    let (later, clock, zone) = (controller.enqueue(), ctx.clock.clone(), local.clone());
    controller.on(ctx.caches.cron_jobs(), move |changed, enqueue| {
        let schedule_fields = |cron: &Arc<CronJob>| (cron.spec.schedule.clone(), cron.spec.time_zone.clone());
        match (changed.before, changed.after) {
            // A changed schedule starts now: runs that it would have had in the past are not made up for.
            (Some(before), Some(after)) if schedule_fields(before) != schedule_fields(after) => {
                let now = clock.now();
                if let Some(next) = plan::next_run(after, now, &zone) {
                    let pause = Duration::try_from(next.duration_since(now)).unwrap_or_default();
                    later.after(after.key(), pause);
                }
            }
            _ => keys::own(changed, enqueue),
        }
    });
    controller.on(ctx.caches.jobs(), keys::owner_of_kind("CronJob"));
    let shared = ctx.clone();
    controller
        .run(&ctx, WORKERS, move |key| {
            let (ctx, local) = (shared.clone(), local.clone());
            async move { reconcile(&ctx, &key, &local).await }
        })
        .await;
}

async fn reconcile(ctx: &Ctx, key: &Key, local: &TimeZone) -> Result<ReconcileAction, Error> {
    let Some(cron) = ctx.caches.cron_jobs().get(key) else { return Ok(ReconcileAction::Forget) };
    let jobs = jobs(ctx, &cron).await?;
    let Plan { events, delete, start, mut status, requeue_at } = plan(&cron, &jobs, ctx.clock.now(), local);
    for (severity, reason, message) in events {
        ctx.events.record(reconcile::reference(&*cron), severity, reason, message);
    }
    let done = apply(ctx, &cron, &delete, start, &mut status).await;
    if cron.status.clone().unwrap_or_default() != status {
        ctx.replace_status(&CronJob { status: Some(status), ..CronJob::clone(&cron) }).await?;
    }
    done?;
    Ok(requeue_at.map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt))
}

/// The Jobs of a CronJob, including those in `status.active` that the cache does not have yet.
async fn jobs(ctx: &Ctx, cron: &CronJob) -> Result<Vec<Arc<Job>>, Error> {
    let mut jobs = ctx.caches.jobs().owned_by(cron.uid());
    for active in cron.status.iter().flat_map(|status| status.active.iter().flatten()) {
        let (Some(name), Some(uid)) = (&active.name, &active.uid) else { continue };
        if jobs.iter().any(|job| job.uid() == uid) {
            continue;
        }
        match ctx.client.get::<Job>(&Key::new(cron.namespace(), name)).await {
            Ok(job) if job.uid() == uid => jobs.push(Arc::new(job)),
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
    }
    Ok(jobs)
}

/// Deletes and creates Jobs. `status` is updated for each step that succeeds, also on failure.
async fn apply(
    ctx: &Ctx,
    cron: &CronJob,
    delete: &[Arc<Job>],
    start: Option<JobStart>,
    status: &mut CronJobStatus,
) -> Result<(), Error> {
    for job in delete {
        let options = DeleteOptions { propagation: Some("Background"), ..DeleteOptions::uid(job.uid()) };
        if let Err(error) = ctx.delete_with::<Job>(&job.key(), &options).await {
            ctx.events.warning(cron, "FailedDelete", format!("Deleted job: {error}"));
            return Err(error);
        }
        plan::remove_active_job(status, job);
        ctx.events.normal(cron, "SuccessfulDelete", format!("Deleted job {}", job.name()));
    }
    let Some(JobStart { job, exists, at }) = start else { return Ok(()) };
    if exists {
        *status = plan::status_after_start(std::mem::take(status), &job, at);
        return Ok(());
    }
    match ctx.create(&job).await {
        Ok(job) => {
            ctx.events.normal(cron, "SuccessfulCreate", format!("Created job {}", job.name()));
            *status = plan::status_after_start(std::mem::take(status), &job, at);
            Ok(())
        }
        // Another controller instance has created the Job and will update the status.
        Err(error) if error.is_already_exists() || error.is_namespace_terminating() => Ok(()),
        Err(error) => {
            ctx.events.warning(cron, "FailedCreate", format!("Error creating job: {error}"));
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests;
