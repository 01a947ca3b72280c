//! ServiceAccount controller: maintains the service account `default` in every namespace.
//!
//! Upstream: `pkg/controller/serviceaccount/serviceaccounts_controller.go`.

use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction, keys};

const DEFAULT: &str = "default";

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("service-account-controller"), ..ctx };
    let controller = Controller::new("serviceaccount", &ctx);
    controller.on(ctx.caches.namespaces(), keys::own::<Namespace>);
    controller.on(ctx.caches.service_accounts(), |changed: &ObjectUpdate<'_, ServiceAccount>, enqueue| {
        let account = changed.latest();
        if changed.after.is_none() && account.name() == DEFAULT {
            enqueue(Key::new("", account.namespace()));
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, 1, reconcile).await
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(namespace) = ctx.caches.namespaces().get(key) else { return Ok(ReconcileAction::Forget) };
    let account = Key::new(namespace.name(), DEFAULT);
    if namespace.is_deleting() || ctx.caches.service_accounts().get(&account).is_some() {
        return Ok(ReconcileAction::AwaitChange);
    }
    let metadata = ObjectMeta {
        name: Some(DEFAULT.into()),
        namespace: Some(namespace.name().into()),
        ..ObjectMeta::default()
    };
    match ctx.create(&ServiceAccount { metadata, ..ServiceAccount::default() }).await {
        Err(error) if error.is_already_exists() || error.is_namespace_terminating() => {
            Ok(ReconcileAction::AwaitChange)
        }
        other => other.map(|_| ReconcileAction::AwaitChange),
    }
}
