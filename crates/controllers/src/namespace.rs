//! Namespace controller: deletes the content of terminating namespaces, then removes the `kubernetes`
//! finalizer.
//!
//! All objects are deleted through the API, so that grace periods and finalizers are respected. Pods are
//! deleted before everything else, so that nothing they use disappears before them. While content remains,
//! the namespace's conditions describe it.
//!
//! Upstream: `pkg/controller/namespace`.

mod plan;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use reconcile::{
    ApiResource, Controller, Ctx, DeleteOptions, Error, Key, Object, ObjectUpdate, ReconcileAction, keys,
};
use serde::Deserialize;
use serde_json::{Value, json};

use plan::RemainingContent;

const NAMESPACE_FINALIZER: &str = "kubernetes";
const WORKERS: usize = 10;

pub async fn run(ctx: Ctx) {
    let controller = Controller::new("namespace", &ctx);
    controller.on(ctx.caches.namespaces(), keys::own::<Namespace>);
    controller.on(ctx.caches.pods(), |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        if changed.after.is_none() {
            enqueue(Key::new("", changed.latest().namespace()));
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(namespace) = ctx.caches.namespaces().get(key) else { return Ok(ReconcileAction::Forget) };
    let finalizers = namespace.spec.as_ref().and_then(|spec| spec.finalizers.as_deref()).unwrap_or_default();
    let has_finalizer = finalizers.iter().any(|finalizer| finalizer == NAMESPACE_FINALIZER);
    let Some(since) = namespace.metadata.deletion_timestamp.as_ref().filter(|_| has_finalizer) else {
        return Ok(ReconcileAction::AwaitChange);
    };
    let found = ctx.client.discover().await?;
    let mut remaining = RemainingContent {
        unknown: found.failed.iter().map(|(group, error)| format!("{group}: {error}")).collect(),
        ..RemainingContent::default()
    };
    let can_delete = |kind: &ApiResource| {
        kind.preferred && kind.namespaced && kind.supports_verb("delete") && kind.supports_verb("list")
    };
    let mut kinds: Vec<ApiResource> = found.kinds.into_iter().filter(can_delete).collect();
    kinds.sort_by_key(|kind| !is_pods(kind));
    for kind in kinds {
        let name = namespace.name();
        match delete_all_of_kind(ctx, name, &kind, &mut remaining).await {
            Ok(()) => {}
            Err(error) => remaining.errors.push(error.to_string()),
        }
        if is_pods(&kind) && !remaining.objects.is_empty() {
            // Other kinds are neither deleted nor reported until all pods are gone.
            let waiting = RemainingContent {
                objects: Default::default(),
                finalizers: Default::default(),
                ..remaining.clone()
            };
            update_conditions(ctx, &namespace, &waiting).await?;
            return Ok(ReconcileAction::RequeueAfter(plan::requeue_delay(since.0, ctx.clock.now())));
        }
    }
    let namespace = update_conditions(ctx, &namespace, &remaining).await?;
    if remaining.is_empty() {
        finalize(ctx, &namespace).await?;
        return Ok(ReconcileAction::AwaitChange);
    }
    Ok(ReconcileAction::RequeueAfter(plan::requeue_delay(since.0, ctx.clock.now())))
}

fn is_pods(kind: &ApiResource) -> bool {
    kind.group.is_empty() && kind.plural == "pods"
}

#[derive(Deserialize)]
struct Items {
    #[serde(default)]
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    metadata: Metadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: String,
    #[serde(default)]
    finalizers: Vec<String>,
    deletion_timestamp: Option<String>,
}

/// Deletes all objects of a kind in a namespace and records the remaining ones.
async fn delete_all_of_kind(
    ctx: &Ctx,
    namespace: &str,
    kind: &ApiResource,
    remaining: &mut RemainingContent,
) -> Result<(), Error> {
    let path = kind.collection(namespace);
    let list = || async {
        match ctx.client.read::<Items>(&path).await {
            Ok(list) => Ok(list.items),
            // The kind was removed after discovery.
            Err(error) if matches!(error.code(), 404 | 405) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    };
    let mut items = list().await?;
    if items.iter().any(|item| item.metadata.deletion_timestamp.is_none()) {
        let options = DeleteOptions { propagation: Some("Background"), ..DeleteOptions::default() };
        if kind.supports_verb("deletecollection") {
            ctx.client.delete_at(&path, &options).await?;
        } else {
            for item in &items {
                let deleted = ctx.client.delete_at(&format!("{path}/{}", item.metadata.name), &options).await;
                deleted.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })?;
            }
        }
        items = list().await?;
    }
    if !items.is_empty() {
        remaining.objects.insert(format!("{}.{}", kind.plural, kind.group), items.len());
    }
    for finalizer in items.into_iter().flat_map(|item| item.metadata.finalizers) {
        *remaining.finalizers.entry(finalizer).or_default() += 1;
    }
    Ok(())
}

async fn update_conditions(
    ctx: &Ctx,
    namespace: &Namespace,
    remaining: &RemainingContent,
) -> Result<Namespace, Error> {
    let mut namespace = namespace.clone();
    let status = namespace.status.get_or_insert_default();
    let before = status.conditions.as_deref().unwrap_or_default();
    let after = plan::conditions(before, remaining, ctx.clock.now());
    match after {
        Some(conditions) => {
            status.conditions = Some(conditions);
            ctx.replace_status(&namespace).await
        }
        None => Ok(namespace),
    }
}

/// Removes this controller's finalizer from the namespace.
async fn finalize(ctx: &Ctx, namespace: &Namespace) -> Result<(), Error> {
    let mut namespace = namespace.clone();
    if let Some(finalizers) = namespace.spec.as_mut().and_then(|spec| spec.finalizers.as_mut()) {
        finalizers.retain(|finalizer| finalizer != NAMESPACE_FINALIZER);
    }
    let path = format!("/api/v1/namespaces/{}/finalize", namespace.name());
    let body: Value = json!(namespace);
    match ctx.client.request(http::Method::PUT, &path, Some(&body)).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::api::core::v1::ConfigMap;
    use reconcile::Patch;

    use super::*;
    use crate::test_cluster::{TestCluster, wait_for};

    async fn create(test_cluster: &TestCluster, path: &str, value: Value) {
        test_cluster.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
    }

    #[tokio::test]
    async fn all_content_is_deleted_before_namespace() {
        let test_cluster = TestCluster::start(&["namespace-controller"]).await;
        create(&test_cluster, "/api/v1/namespaces", json!({"metadata": {"name": "n"}})).await;
        create(&test_cluster, "/api/v1/namespaces/n/configmaps", json!({"metadata": {"name": "plain"}}))
            .await;
        let with_finalizer = json!({"metadata": {"name": "held", "finalizers": ["example.com/x"]}});
        create(&test_cluster, "/api/v1/namespaces/n/configmaps", with_finalizer).await;
        let key = Key::new("", "n");
        test_cluster.client.delete::<Namespace>(&key, &DeleteOptions::default()).await.expect("a deletion");
        let true_conditions = || async {
            let namespace: Namespace = test_cluster.client.get(&key).await.ok()?;
            let conditions = namespace.status?.conditions?;
            let true_conditions = conditions.into_iter().filter(|condition| condition.status == "True");
            let true_conditions: BTreeMap<String, Option<String>> =
                true_conditions.map(|c| (c.type_, c.message)).collect();
            (true_conditions.len() == 2).then_some(true_conditions)
        };
        let true_conditions = wait_for("the conditions", true_conditions).await;
        assert_eq!(
            true_conditions["NamespaceContentRemaining"].as_deref(),
            Some("Some resources are remaining: configmaps. has 1 resource instances")
        );
        assert_eq!(
            true_conditions["NamespaceFinalizersRemaining"].as_deref(),
            Some(
                "Some content in the namespace has finalizers remaining: example.com/x in 1 resource instances"
            )
        );
        let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        let _: ConfigMap =
            test_cluster.client.patch(&Key::new("n", "held"), &release).await.expect("a release");
        let deleted = || async { test_cluster.client.get::<Namespace>(&key).await.is_err().then_some(()) };
        wait_for("deletion of the namespace", deleted).await;
    }
}
