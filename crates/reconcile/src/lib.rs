//! The base of every controller: shared typed caches, a work queue, the reconcile loop, and writes that wait
//! for the cache. Counterpart of client-go's informers, listers, workqueue, events and leader election.
//!
//! A controller reads [`Caches`], decides in a pure `plan` function and acts through [`Ctx`]. A write through
//! `Ctx` returns only once the cache shows it, so a controller never plans from a state older than its own
//! last write and needs no expectations (upstream's `ControllerExpectations`). This crate knows the rules of
//! no kind. Start with [`Ctx`] and [`Controller`].
//!
//! ```no_run
//! use reconcile::{Controller, Ctx, Error, Key, ReconcileAction, keys};
//!
//! async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
//!     let Some(_set) = ctx.caches.replica_sets().get(key) else { return Ok(ReconcileAction::Forget) };
//!     // Read what it owns from `ctx.caches`, plan, and write through `ctx`.
//!     Ok(ReconcileAction::AwaitChange)
//! }
//!
//! async fn run(ctx: Ctx) {
//!     let controller = Controller::new("replicaset", &ctx);
//!     controller.on(ctx.caches.replica_sets(), keys::own);
//!     controller.on(ctx.caches.pods(), keys::owner_of_kind("ReplicaSet"));
//!     let work = ctx.clone();
//!     let reconcile = move |key: Key| {
//!         let ctx = work.clone();
//!         async move { reconcile(&ctx, &key).await }
//!     };
//!     controller.run(&ctx, 5, reconcile).await;
//! }
//! ```

mod cache;
mod caches;
mod clock;
pub mod cloud;
pub mod conditions;
mod controller;
mod ctx;
mod events;
pub mod keys;
pub mod labels;
mod leader;
mod metrics;
pub mod placement;
mod queue;
mod settings;

pub use cache::{Cache, Index, ObjectUpdate};
pub use caches::{Cached, Caches, claims_of};
pub use clock::Clock;
pub use controller::{Controller, Enqueue, ReconcileAction};
pub use ctx::Ctx;
pub use events::{EventRecord, EventType, Recorder, reference};
pub use leader::{Election, lead};
pub use metrics::Metrics;
pub use queue::WorkQueue;
pub use settings::{NodeMonitorConfig, Settings, Signers};

pub use client::review;
pub use client::{
    ApiResource, Client, Connection, DeleteOptions, Error, Key, Object, Patch, RawObject, ServerResources,
    Watch, WatchChange, WatchEvent,
};

use api::selector::LabelSelector;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;

/// Converts a typed selector. An absent selector matches nothing, and neither does an invalid one.
pub fn selector(selector: Option<&meta::LabelSelector>) -> LabelSelector {
    let value = serde_json::to_value(selector).unwrap_or_default();
    LabelSelector::from_value(&value).unwrap_or_else(|_| LabelSelector::nothing())
}
