//! Scales anything that has a size by what its metrics say.
//!
//! Every autoscaler is looked at when its spec changes and every fifteen seconds from then on: metrics do not
//! tell when they change. What was wanted and done lately is remembered in memory, as upstream does it.

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
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object as _, Served, Severity};

use crate::scale;
use plan::{Decision, History, Rescale, Target};

/// Upstream's defaults of `--concurrent-horizontal-pod-autoscaler-syncs` and
/// `--horizontal-pod-autoscaler-sync-period`.
const WORKERS: usize = 5;
const PERIOD: Duration = Duration::from_secs(15);
/// How often a size is written when others change the target at the same time.
const TRIES: usize = 5;

/// What is remembered of autoscalers.
#[derive(Default)]
struct Memory {
    histories: Mutex<HashMap<Key, History>>,
    /// Whose pods each looks at, to notice two that look at the same.
    selectors: Mutex<HashMap<Key, LabelSelector>>,
}

pub async fn run(ctx: Ctx) {
    // Upstream calls it so as a service account and in events, and otherwise as the row says.
    let ctx = ctx.named("horizontal-pod-autoscaler");
    let controller = Controller::new("horizontalpodautoscaler", &ctx);
    controller.on(ctx.caches.autoscalers(), specs);
    let _ = ctx.caches.pods();
    let (work, memory) = (ctx.clone(), Arc::<Memory>::default());
    let reconcile = move |key: Key| {
        let (ctx, memory) = (work.clone(), memory.clone());
        async move { reconcile(&ctx, &memory, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await;
}

/// Changes of specs. Those of statuses are the loop's own.
fn specs(changed: &Changed<'_, HorizontalPodAutoscaler>, enqueue: &mut dyn FnMut(Key)) {
    let spec = |hpa: Option<&Arc<HorizontalPodAutoscaler>>| hpa.map(|hpa| hpa.spec.clone());
    if spec(changed.before) != spec(changed.after) {
        enqueue(changed.newest().key());
    }
}

async fn reconcile(ctx: &Ctx, memory: &Memory, key: &Key) -> Result<Next, Error> {
    let Some(hpa) = ctx.caches.autoscalers().get(key) else {
        memory.histories.lock().remove(key);
        memory.selectors.lock().remove(key);
        return Ok(Next::Change);
    };
    let spec = &hpa.spec;
    let mut decision = match target(ctx, hpa.namespace(), spec).await {
        Err(error) => plan::without_scale(&hpa, &error, ctx.clock.now()),
        Ok((kind, scale)) => decide(ctx, memory, &hpa, spec, &kind, scale).await,
    };
    let told = std::mem::take(&mut decision.told);
    for (severity, reason, message) in told {
        match severity {
            Severity::Normal => ctx.events.normal(hpa.as_ref(), reason, message),
            Severity::Warning => ctx.events.warning(hpa.as_ref(), reason, message),
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
    Ok(Next::After(PERIOD))
}

/// What is scaled, and its size.
async fn target(
    ctx: &Ctx,
    namespace: &str,
    spec: &HorizontalPodAutoscalerSpec,
) -> Result<(Served, Scale), String> {
    let wanted = &spec.scale_target_ref;
    let api_version = wanted.api_version.as_deref().unwrap_or("v1");
    let kind = scale::kind(&ctx.client, api_version, &wanted.kind).await;
    let Some(kind) = kind.map_err(|error| error.to_string())? else {
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        return Err(format!("no matches for kind {:?} in group {group:?}", wanted.kind));
    };
    let key = Key::new(namespace, &wanted.name);
    let scale = scale::read(&ctx.client, &kind, &key).await.map_err(|error| error.to_string())?;
    Ok((kind, scale))
}

async fn decide(
    ctx: &Ctx,
    memory: &Memory,
    hpa: &HorizontalPodAutoscaler,
    spec: &HorizontalPodAutoscalerSpec,
    kind: &Served,
    scale: Scale,
) -> Decision {
    let key = hpa.key();
    let replicas = scale.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(0);
    let status = scale.status.clone().unwrap_or_default();
    let selector = status.selector.as_deref().unwrap_or_default();
    let parsed = LabelSelector::parse(selector);
    if let Ok(parsed) = &parsed {
        memory.selectors.lock().insert(key.clone(), parsed.clone());
    }
    let pods = parsed
        .map(|parsed| ctx.caches.pods().matching(hpa.namespace(), &parsed))
        .map_err(|error| error.to_string());
    let mut autoscalers: Vec<Key> = Vec::new();
    if let Ok(pods) = &pods {
        for (other, selector) in &*memory.selectors.lock() {
            let selects = pods.iter().any(|pod| selector.matches(|name| pod.label(name)));
            if other.namespace == key.namespace && selects {
                autoscalers.push(other.clone());
            }
        }
        autoscalers.sort();
    }
    let target = Target { replicas, running: status.replicas, selector, pods, autoscalers };
    let metrics = spec.metrics.as_deref().unwrap_or_default();
    let metrics = if plan::needs_metrics(spec, replicas) { metrics } else { &[] };
    let read = |metric| metrics::read(&ctx.client, hpa.namespace(), selector, metric);
    let readings = join_all(metrics.iter().map(read)).await;

    let mut history = memory.histories.lock().remove(&key).unwrap_or_default();
    let mut decision = plan::decide(hpa, &target, readings, &mut history, ctx.clock.now());
    if let Some(rescale) = decision.rescale.take() {
        let key = Key::new(hpa.namespace(), &spec.scale_target_ref.name);
        let result = write(ctx, kind, &key, scale, &rescale).await.map_err(|error| error.to_string());
        decision.scaled(hpa, &rescale, result, &mut history, ctx.clock.now());
    }
    memory.histories.lock().insert(key, history);
    decision
}

async fn write(ctx: &Ctx, kind: &Served, key: &Key, scale: Scale, rescale: &Rescale) -> Result<(), Error> {
    let mut scale = scale;
    let mut tries = 0;
    loop {
        scale.spec = Some(ScaleSpec { replicas: Some(rescale.to) });
        match scale::write(&ctx.client, kind, key, &scale).await {
            Err(error) if error.is_conflict() && tries < TRIES => {
                tries += 1;
                scale = scale::read(&ctx.client, kind, key).await?;
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests;
