//! HorizontalPodAutoscaler controller: sets the scale of a target by its metrics.
//!
//! Every autoscaler is synced when its spec changes and every fifteen seconds, because metrics have no watch.
//! Recent recommendations and scale events are kept in memory only, as upstream does.
//!
//! Upstream: `pkg/controller/podautoscaler`.

mod metrics;
mod plan;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use api::selector::LabelSelector;
use futures_util::future::join_all;
use k8s_openapi::api::autoscaling::v1::{Scale, ScaleSpec};
use k8s_openapi::api::autoscaling::v2::{HorizontalPodAutoscaler, HorizontalPodAutoscalerSpec};
use parking_lot::Mutex;
use reconcile::{
    ApiResource, Controller, Ctx, Error, EventType, Key, Object as _, ObjectUpdate, ReconcileAction,
};

use crate::scale;
use plan::{Decision, History, Rescale, ScaleTarget};

/// Upstream's defaults of `--concurrent-horizontal-pod-autoscaler-syncs` and
/// `--horizontal-pod-autoscaler-sync-period`.
const WORKERS: usize = 5;
const SYNC_PERIOD: Duration = Duration::from_secs(15);
/// How often a scale update is retried on conflicts.
const MAX_SCALE_UPDATE_RETRIES: usize = 5;

/// In-memory state of all autoscalers.
#[derive(Default)]
struct AutoscalerState {
    history_by_key: Mutex<HashMap<Key, History>>,
    /// The pod selector of each target, to detect autoscalers that select the same pods.
    selectors: Mutex<HashMap<Key, LabelSelector>>,
}

pub async fn run(ctx: Ctx) {
    // Upstream uses this name for the service account and for events, and the controller name elsewhere.
    let ctx = ctx.for_controller("horizontal-pod-autoscaler");
    let controller = Controller::new("horizontalpodautoscaler", &ctx);
    controller.on(ctx.caches.autoscalers(), enqueue_spec_changes);
    let _ = ctx.caches.pods();
    let (work, state) = (ctx.clone(), Arc::<AutoscalerState>::default());
    let reconcile = move |key: Key| {
        let (ctx, state) = (work.clone(), state.clone());
        async move { reconcile(&ctx, &state, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await;
}

/// Enqueues autoscalers whose spec changed. Status changes are this controller's own.
fn enqueue_spec_changes(changed: &ObjectUpdate<'_, HorizontalPodAutoscaler>, enqueue: &mut dyn FnMut(Key)) {
    let spec = |hpa: Option<&Arc<HorizontalPodAutoscaler>>| hpa.map(|hpa| hpa.spec.clone());
    if spec(changed.before) != spec(changed.after) {
        enqueue(changed.latest().key());
    }
}

async fn reconcile(ctx: &Ctx, state: &AutoscalerState, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(hpa) = ctx.caches.autoscalers().get(key) else {
        state.history_by_key.lock().remove(key);
        state.selectors.lock().remove(key);
        return Ok(ReconcileAction::AwaitChange);
    };
    let spec = &hpa.spec;
    let mut decision = match read_scale(ctx, hpa.namespace(), spec).await {
        Err(error) => plan::get_scale_failed(&hpa, &error, ctx.clock.now()),
        Ok((kind, scale)) => compute_decision(ctx, state, &hpa, spec, &kind, scale).await,
    };
    let events = std::mem::take(&mut decision.events);
    for (severity, reason, message) in events {
        match severity {
            EventType::Normal => ctx.events.normal(hpa.as_ref(), reason, message),
            EventType::Warning => ctx.events.warning(hpa.as_ref(), reason, message),
        }
    }
    if hpa.status.as_ref() != Some(&decision.status) {
        let updated = HorizontalPodAutoscaler { status: Some(decision.status), ..hpa.as_ref().clone() };
        match ctx.replace_status(&updated).await {
            Ok(_) => {}
            Err(error) if error.is_conflict() || error.is_not_found() => {}
            Err(error) => ctx.events.warning(hpa.as_ref(), "FailedUpdateStatus", error.to_string()),
        }
    }
    Ok(ReconcileAction::RequeueAfter(SYNC_PERIOD))
}

/// The kind of the scale target and its scale.
async fn read_scale(
    ctx: &Ctx,
    namespace: &str,
    spec: &HorizontalPodAutoscalerSpec,
) -> Result<(ApiResource, Scale), String> {
    let target_ref = &spec.scale_target_ref;
    let api_version = target_ref.api_version.as_deref().unwrap_or("v1");
    let kind = scale::find_kind(&ctx.client, api_version, &target_ref.kind).await;
    let Some(kind) = kind.map_err(|error| error.to_string())? else {
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        return Err(format!("no matches for kind {:?} in group {group:?}", target_ref.kind));
    };
    let key = Key::new(namespace, &target_ref.name);
    let scale = scale::get_scale(&ctx.client, &kind, &key).await.map_err(|error| error.to_string())?;
    Ok((kind, scale))
}

async fn compute_decision(
    ctx: &Ctx,
    state: &AutoscalerState,
    hpa: &HorizontalPodAutoscaler,
    spec: &HorizontalPodAutoscalerSpec,
    kind: &ApiResource,
    scale: Scale,
) -> Decision {
    let key = hpa.key();
    let replicas = scale.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(0);
    let status = scale.status.clone().unwrap_or_default();
    let selector = status.selector.as_deref().unwrap_or_default();
    let parsed = LabelSelector::parse(selector);
    if let Ok(parsed) = &parsed {
        state.selectors.lock().insert(key.clone(), parsed.clone());
    }
    let pods = parsed
        .map(|parsed| ctx.caches.pods().matching(hpa.namespace(), &parsed))
        .map_err(|error| error.to_string());
    let mut autoscalers: Vec<Key> = Vec::new();
    if let Ok(pods) = &pods {
        for (other, selector) in &*state.selectors.lock() {
            let matches = pods.iter().any(|pod| selector.matches(|name| pod.label(name)));
            if other.namespace == key.namespace && matches {
                autoscalers.push(other.clone());
            }
        }
        autoscalers.sort();
    }
    let target = ScaleTarget { replicas, running: status.replicas, selector, pods, autoscalers };
    let metrics = spec.metrics.as_deref().unwrap_or_default();
    let metrics = if plan::needs_metrics(spec, replicas) { metrics } else { &[] };
    let read = |metric| metrics::fetch_metric(&ctx.client, hpa.namespace(), selector, metric);
    let metric_values = join_all(metrics.iter().map(read)).await;

    // The history is taken out, so that the lock is not held across the update of the scale. The queue never
    // runs one key twice at the same time.
    let mut history = state.history_by_key.lock().remove(&key).unwrap_or_default();
    let mut decision = plan::compute_decision(hpa, &target, metric_values, &mut history, ctx.clock.now());
    if let Some(rescale) = decision.rescale.take() {
        let key = Key::new(hpa.namespace(), &spec.scale_target_ref.name);
        let result = update_scale(ctx, kind, &key, scale, &rescale).await.map_err(|error| error.to_string());
        decision.record_rescale(hpa, &rescale, result, &mut history, ctx.clock.now());
    }
    state.history_by_key.lock().insert(key, history);
    decision
}

async fn update_scale(
    ctx: &Ctx,
    kind: &ApiResource,
    key: &Key,
    scale: Scale,
    rescale: &Rescale,
) -> Result<(), Error> {
    let mut scale = scale;
    let mut attempts = 0;
    loop {
        scale.spec = Some(ScaleSpec { replicas: Some(rescale.to) });
        match scale::update_scale(&ctx.client, kind, key, &scale).await {
            Err(error) if error.is_conflict() && attempts < MAX_SCALE_UPDATE_RETRIES => {
                attempts += 1;
                scale = scale::get_scale(&ctx.client, kind, key).await?;
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests;
