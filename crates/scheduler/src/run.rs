//! Runs the scheduler: feeds informer events to the engine and executes its actions.
//!
//! Scheduling cycles run in one task; binding cycles, status patches and preemptions run concurrently.

mod api;
mod event_handlers;
mod executor;

use std::sync::Arc;

#[cfg(test)]
pub(crate) use api::ClientApi;
use jiff::{SignedDuration, Timestamp};
use reconcile::Ctx;
use tokio::sync::{Semaphore, mpsc};

use crate::bind::BindContext;
use crate::config::{Config, ConfigError};
use crate::engine::{Engine, Event};
use crate::extender::HttpExtenders;
use crate::framework::registry::{IN_TREE_PLUGINS, RegistryEntry};
use crate::metrics::Metrics;
use crate::object_waiter::ObjectWaiter;

/// How many API tasks run concurrently.
const MAX_CONCURRENT_TASKS: usize = 256;
/// Minimum interval between flushes of the queue.
const TICK_INTERVAL: SignedDuration = SignedDuration::from_millis(250);
/// Number of scheduling cycles after which the task yields.
const ATTEMPTS_PER_YIELD: usize = 32;

/// Executes actions. Cloned into each task.
#[derive(Clone)]
struct Executor {
    ctx: Ctx,
    bind: BindContext,
    extenders: Arc<HttpExtenders>,
    task_limit: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    events: mpsc::UnboundedSender<Event>,
}

/// Schedules pods until shutdown. `own` are out-of-tree plugins.
pub async fn run(ctx: Ctx, config: Config, own: &[RegistryEntry]) -> Result<(), ConfigError> {
    let rows: Vec<RegistryEntry> = IN_TREE_PLUGINS.iter().chain(own).copied().collect();
    let extenders = Arc::new(HttpExtenders::new(&config.extenders)?);
    let seed = u64::try_from(ctx.clock.now().as_nanosecond()).unwrap_or(1);
    let mut engine = Engine::new(&config, &rows, extenders.clone(), seed)?;
    let counted = engine.metrics.clone();
    ctx.metrics.register_writer(move |out| counted.write(out));
    let (events, mut event_receiver) = mpsc::unbounded_channel();
    let (claims, resource_claims): (Arc<ObjectWaiter<_>>, Arc<ObjectWaiter<_>>) = Default::default();
    event_handlers::add_all_event_handlers(&ctx.caches, &events, (&claims, &resource_claims));
    ctx.caches.wait_for_sync().await;
    let metrics = engine.metrics.clone();
    let api = Arc::new(api::ClientApi(ctx.client.clone()));
    let bind = BindContext { api, claims, resource_claims, metrics: metrics.clone() };
    let task_limit = Arc::new(Semaphore::new(MAX_CONCURRENT_TASKS));
    let executor = Executor { ctx: ctx.clone(), bind, extenders, task_limit, metrics, events };
    let mut shutdown = ctx.shutdown.clone();
    let (mut attempts, mut next_tick) = (0, Timestamp::MIN);
    loop {
        let now = ctx.clock.now();
        while let Ok(event) = event_receiver.try_recv() {
            engine.handle(event, now);
        }
        if now >= next_tick {
            engine.tick(now);
            next_tick = now.checked_add(TICK_INTERVAL).unwrap_or(Timestamp::MAX);
        }
        let started = std::time::Instant::now();
        let did_attempt = engine.schedule_one(now);
        for action in engine.actions() {
            executor.execute(action);
        }
        if did_attempt {
            engine.metrics.observe_scheduling_algorithm(started.elapsed().as_secs_f64());
            attempts += 1;
            if attempts % ATTEMPTS_PER_YIELD == 0 {
                engine.update_metrics();
                tokio::task::yield_now().await;
            }
            continue;
        }
        engine.update_metrics();
        let until = engine.queue.next_deadline().map(|deadline| duration_until(deadline, ctx.clock.now()));
        tokio::select! {
            event = event_receiver.recv() => match event {
                Some(event) => engine.handle(event, ctx.clock.now()),
                None => return Ok(()),
            },
            () = tokio::time::sleep(until.unwrap_or_default()), if until.is_some() => {}
            _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
        }
    }
}

fn duration_until(deadline: Timestamp, now: Timestamp) -> std::time::Duration {
    deadline.duration_since(now).max(TICK_INTERVAL).unsigned_abs()
}
