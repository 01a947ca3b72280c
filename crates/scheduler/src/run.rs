//! The scheduler with its hands: listens, lets the engine decide, and acts.
//!
//! One task decides; bindings, status patches and removals run beside it.

mod acts;
mod api;
mod subscribe;

use std::sync::Arc;

#[cfg(test)]
pub(crate) use api::Calls;
use jiff::{SignedDuration, Timestamp};
use reconcile::Ctx;
use tokio::sync::{Semaphore, mpsc};

use crate::bind::BindContext;
use crate::board::Board;
use crate::config::{Config, ConfigError};
use crate::engine::{Engine, Event};
use crate::extender::HttpExtenders;
use crate::framework::registry::{BUILT_IN, Row};
use crate::metrics::Metrics;

/// How many calls to the API run at once.
const AT_ONCE: usize = 256;
/// How often, at most, it is looked whose time has come.
const EVERY: SignedDuration = SignedDuration::from_millis(250);
/// Pods tried before other tasks get a turn.
const TURN: usize = 32;

/// What everyone who acts has at hand.
#[derive(Clone)]
struct Hands {
    ctx: Ctx,
    bind: BindContext,
    extenders: Arc<HttpExtenders>,
    at_once: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    events: mpsc::UnboundedSender<Event>,
}

/// Schedules pods until told to stop. `own` are plugins beside upstream's.
pub async fn run(ctx: Ctx, config: Config, own: &[Row]) -> Result<(), ConfigError> {
    let rows: Vec<Row> = BUILT_IN.iter().chain(own).copied().collect();
    let extenders = Arc::new(HttpExtenders::new(&config.extenders)?);
    let seed = u64::try_from(ctx.clock.now().as_nanosecond()).unwrap_or(1);
    let mut engine = Engine::new(&config, &rows, extenders.clone(), seed)?;
    let counted = engine.metrics.clone();
    ctx.metrics.also(move |out| counted.write(out));
    let (events, mut happened) = mpsc::unbounded_channel();
    let (claims, resource_claims): (Arc<Board<_>>, Arc<Board<_>>) = Default::default();
    subscribe::all(&ctx.caches, &events, (&claims, &resource_claims));
    ctx.caches.filled().await;
    let metrics = engine.metrics.clone();
    let api = Arc::new(api::Calls(ctx.client.clone()));
    let bind = BindContext { api, claims, resource_claims, metrics: metrics.clone() };
    let at_once = Arc::new(Semaphore::new(AT_ONCE));
    let hands = Hands { ctx: ctx.clone(), bind, extenders, at_once, metrics, events };
    let mut shutdown = ctx.shutdown.clone();
    let (mut tried, mut next_tick) = (0, Timestamp::MIN);
    loop {
        let now = ctx.clock.now();
        while let Ok(event) = happened.try_recv() {
            engine.handle(event, now);
        }
        if now >= next_tick {
            engine.tick(now);
            next_tick = now.checked_add(EVERY).unwrap_or(Timestamp::MAX);
        }
        let begun = std::time::Instant::now();
        let stepped = engine.step(now);
        for action in engine.actions() {
            hands.act(action);
        }
        if stepped {
            engine.metrics.chose(begun.elapsed().as_secs_f64());
            tried += 1;
            if tried % TURN == 0 {
                engine.look();
                tokio::task::yield_now().await;
            }
            continue;
        }
        engine.look();
        let until = engine.queue.next_deadline().map(|deadline| wait(deadline, ctx.clock.now()));
        tokio::select! {
            event = happened.recv() => match event {
                Some(event) => engine.handle(event, ctx.clock.now()),
                None => return Ok(()),
            },
            () = tokio::time::sleep(until.unwrap_or_default()), if until.is_some() => {}
            _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
        }
    }
}

fn wait(deadline: Timestamp, now: Timestamp) -> std::time::Duration {
    deadline.duration_since(now).max(EVERY).unsigned_abs()
}
