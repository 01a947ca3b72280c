//! ClusterRole aggregation controller: collects the rules of the ClusterRoles that an aggregation rule
//! selects.
//!
//! Upstream: `pkg/controller/clusterroleaggregation`.

mod plan;

use std::sync::Arc;

use k8s_openapi::api::rbac::v1::ClusterRole;
use reconcile::{Cache, Controller, Ctx, Error, Key, Object, ObjectUpdate, Patch, ReconcileAction};
use serde_json::json;

use plan::plan;

const NAME: &str = "clusterrole-aggregation-controller";

pub async fn run(ctx: Ctx) {
    let controller = Controller::new("ClusterRoleAggregator", &ctx);
    controller.on(ctx.caches.cluster_roles(), enqueue_aggregated_roles(ctx.caches.cluster_roles().clone()));
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, 5, reconcile).await
}

/// Enqueues all aggregated roles, because any role may be selected by any of them.
fn enqueue_aggregated_roles(
    roles: Arc<Cache<ClusterRole>>,
) -> impl Fn(&ObjectUpdate<'_, ClusterRole>, &mut dyn FnMut(Key)) + Send + Sync {
    move |changed, enqueue| {
        let latest = changed.latest();
        if latest.aggregation_rule.is_some() {
            enqueue(latest.key());
        }
        let aggregated = roles.all().into_iter().filter(|role| role.aggregation_rule.is_some());
        aggregated.for_each(|role| enqueue(role.key()));
    }
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(role) = ctx.caches.cluster_roles().get(key) else { return Ok(ReconcileAction::Forget) };
    let Some(rules) = plan(&role, &ctx.caches.cluster_roles().all()) else {
        return Ok(ReconcileAction::AwaitChange);
    };
    let object = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": role.name()}, "rules": rules,
    });
    match ctx.patch::<ClusterRole>(key, &Patch::Apply { manager: NAME, object }).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(ReconcileAction::AwaitChange),
    }
}
