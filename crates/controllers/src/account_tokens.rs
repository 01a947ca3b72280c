//! Controllers for legacy service account token Secrets. `fill` adds tokens to Secrets of type
//! `kubernetes.io/service-account-token` and deletes them with their account; `clean` invalidates and then
//! deletes auto-generated token Secrets that are no longer used.
//!
//! Upstream: `pkg/controller/serviceaccount` (`tokens_controller.go`,
//! `legacy_serviceaccount_token_cleaner.go`).

mod plan;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use jiff::tz::TimeZone;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, ServiceAccount};
use reconcile::{
    Controller, Ctx, DeleteOptions, Error, Key, Object, ObjectUpdate, Patch, ReconcileAction, keys,
};
use serde_json::json;

use plan::{CleanupAction, TokenAction};

const WORKERS: usize = 2;
/// How often token Secrets are checked for disuse.
const SYNC_INTERVAL: Duration = Duration::from_secs(24 * 3600);
const TRACKING: &str = "kube-apiserver-legacy-service-account-token-tracking";

pub async fn fill(ctx: Ctx) {
    let Some(keys) = ctx.settings.account_tokens.clone() else { return };
    // Upstream runs this controller under the identity of the controller manager, because it starts before
    // the service accounts of the other controllers exist.
    let ctx = Ctx { client: ctx.client.impersonate("system:kube-controller-manager"), ..ctx };
    let controller = Controller::new("serviceaccount_tokens_secret", &ctx);
    controller.on(ctx.caches.account_tokens(), keys::own::<Secret>);
    let secrets = ctx.caches.account_tokens().clone();
    controller.on(
        ctx.caches.service_accounts(),
        move |changed: &ObjectUpdate<'_, ServiceAccount>, enqueue| {
            let account = changed.latest();
            let is_account_token = |secret: &&Arc<Secret>| plan::account_name(secret) == Some(account.name());
            secrets
                .in_namespace(account.namespace())
                .iter()
                .filter(is_account_token)
                .for_each(|secret| enqueue(secret.key()));
        },
    );
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let (ctx, keys) = (work.clone(), keys.clone());
        async move { fill_token(&ctx, &keys, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

async fn fill_token(ctx: &Ctx, keys: &pki::token::Keys, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(secret) = ctx.caches.account_tokens().get(key) else {
        return remove_secret_reference(ctx, key).await;
    };
    let Some(name) = plan::account_name(&secret) else { return Ok(ReconcileAction::AwaitChange) };
    let account_key = Key::new(secret.namespace(), name);
    let account = match ctx.caches.service_accounts().get(&account_key) {
        Some(account) => Some(account),
        // A missing account leads to the deletion of the Secret, so a live read confirms the cache.
        None => match ctx.client.get::<ServiceAccount>(&account_key).await {
            Ok(account) => Some(Arc::new(account)),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(error),
        },
    };
    match plan::plan_token(&secret, account.as_deref(), &ctx.settings.root_ca) {
        TokenAction::Nothing => {}
        TokenAction::Delete => ctx.delete(&*secret).await?,
        TokenAction::Fill { mut secret, claims } => {
            if let Some(claims) = claims {
                let Ok(token) = keys.sign(&claims) else {
                    tracing::error!(secret = %key, "failed to sign service account token, will retry");
                    return Ok(ReconcileAction::RequeueAfter(Duration::from_secs(10)));
                };
                plan::set_data(&mut secret, "token", &token);
            }
            match ctx.replace(&*secret).await {
                Err(error) if error.is_not_found() => {}
                other => drop(other?),
            }
        }
    }
    Ok(ReconcileAction::AwaitChange)
}

/// Removes the reference to a deleted Secret from the service accounts that list it.
async fn remove_secret_reference(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    for account in ctx.caches.service_accounts().in_namespace(&key.namespace) {
        if let Some(account) = plan::without_secret(&account, &key.name) {
            // The cache holds token Secrets only. A Secret of another type may have the same name.
            match ctx.client.get::<Secret>(key).await {
                Err(error) if error.is_not_found() => drop(ctx.replace(&account).await?),
                Err(error) => return Err(error),
                Ok(_) => {}
            }
        }
    }
    Ok(ReconcileAction::AwaitChange)
}

pub async fn clean(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("legacy-service-account-token-cleaner"), ..ctx };
    let controller = Controller::new("legacy_service_account_token_cleaner", &ctx);
    controller.on(ctx.caches.account_tokens(), keys::own::<Secret>);
    let _ = (ctx.caches.service_accounts(), ctx.caches.pods());
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { clean_token(&ctx, &key).await }
    };
    controller.run(&ctx, 1, reconcile).await
}

async fn clean_token(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let caches = &ctx.caches;
    let Some(secret) = caches.account_tokens().get(key) else { return Ok(ReconcileAction::Forget) };
    let name = plan::account_name(&secret).unwrap_or_default();
    let account = caches.service_accounts().get(&Key::new(secret.namespace(), name));
    let current_date = ctx.clock.now().to_zoned(TimeZone::UTC).date();
    // The cheap check comes first: most Secrets do not qualify, and the tracking start date needs a live
    // read.
    if !plan::may_be_cleaned(&secret, account.as_deref(), current_date) {
        return Ok(ReconcileAction::RequeueAfter(SYNC_INTERVAL));
    }
    let tracking = match ctx.client.get::<ConfigMap>(&Key::new("kube-system", TRACKING)).await {
        Ok(map) => map.data.as_ref().and_then(|data| data.get("since")?.parse().ok()),
        Err(error) if error.is_not_found() => None,
        Err(error) => return Err(error),
    };
    let pods: Vec<Arc<Pod>> = caches.pods().in_namespace(secret.namespace());
    let mounted = pods.iter().any(|pod| plan::references_secret(pod, secret.name()));
    match plan::plan_cleanup(&secret, tracking, mounted, current_date) {
        CleanupAction::Nothing => {}
        CleanupAction::MarkInvalid => {
            let labels = json!({plan::INVALID_SINCE: current_date.to_string()});
            let patch = Patch::Merge(json!({"metadata": {"uid": secret.uid(), "labels": labels}}));
            match ctx.patch::<Secret>(key, &patch).await {
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                other => drop(other?),
            }
        }
        CleanupAction::Delete => {
            let options = DeleteOptions {
                resource_version: secret.metadata.resource_version.clone(),
                ..DeleteOptions::uid(secret.uid())
            };
            match ctx.delete_with::<Secret>(key, &options).await {
                Err(error) if !error.is_conflict() => return Err(error),
                _ => {}
            }
        }
    }
    Ok(ReconcileAction::RequeueAfter(SYNC_INTERVAL))
}
