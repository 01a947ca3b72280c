//! What every control loop stands on: shared typed caches, one work queue, one loop, writes that are seen.
//!
//! A loop reads [`Caches`], decides by a pure `plan`, and acts through [`Ctx`]. A write through `Ctx` comes
//! back only once the cache shows it, so no loop ever plans from a state older than its own last write and
//! none needs to keep accounts of what it expects. Knows no kind's rules. Read [`Ctx`] and [`Controller`] first.
//!
//! ```ignore
//! let ctx = ctx.named("replicaset-controller");
//! let controller = Controller::new("replicaset");
//! controller.on(ctx.caches.replica_sets(), keys::own);
//! controller.on(ctx.caches.pods(), keys::controller_of_kind("ReplicaSet"));
//! controller.run(&ctx, 5, move |key| async move { reconcile(&ctx, &key).await }).await;
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

/// A typed selector in the form that matches: an absent one matches nothing, and so does one that cannot be
/// understood.
pub fn selector(selector: Option<&meta::LabelSelector>) -> LabelSelector {
    let value = serde_json::to_value(selector).unwrap_or_default();
    LabelSelector::from_value(&value).unwrap_or_else(|_| LabelSelector::nothing())
}
