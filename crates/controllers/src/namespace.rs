//! Empties namespaces that are being deleted, then lets them go.
//!
//! Everything in such a namespace is deleted as a client would delete it, so pods keep their grace period and
//! finalizers hold what they hold; pods go first, so that nothing they use goes before them. While something is
//! left, the namespace's conditions tell what.

mod plan;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use reconcile::{Changed, Controller, Ctx, Delete, Error, Key, Next, Object, Served, keys};
use serde::Deserialize;
use serde_json::{Value, json};

use plan::Rest;

const FINALIZER: &str = "kubernetes";
const WORKERS: usize = 10;

pub async fn run(ctx: Ctx) {
    let controller = Controller::new("namespace", &ctx);
    controller.on(ctx.caches.namespaces(), keys::own::<Namespace>);
    controller.on(ctx.caches.pods(), |changed: &Changed<'_, Pod>, enqueue| {
        if changed.after.is_none() {
            enqueue(Key::new("", changed.newest().namespace()));
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(namespace) = ctx.caches.namespaces().get(key) else { return Ok(Next::Forget) };
    let finalizers = namespace.spec.as_ref().and_then(|spec| spec.finalizers.as_deref()).unwrap_or_default();
    let held = finalizers.iter().any(|finalizer| finalizer == FINALIZER);
    let Some(since) = namespace.metadata.deletion_timestamp.as_ref().filter(|_| held) else {
        return Ok(Next::Change);
    };
    let found = ctx.client.discover().await?;
    let mut rest = Rest {
        unknown: found.failed.iter().map(|(group, error)| format!("{group}: {error}")).collect(),
        ..Rest::default()
    };
    let deletable =
        |kind: &Served| kind.preferred && kind.namespaced && kind.can("delete") && kind.can("list");
    let mut kinds: Vec<Served> = found.kinds.into_iter().filter(deletable).collect();
    kinds.sort_by_key(|kind| !is_pods(kind));
    for kind in kinds {
        let name = namespace.name();
        match empty(ctx, name, &kind, &mut rest).await {
            Ok(()) => {}
            Err(error) => rest.errors.push(error.to_string()),
        }
        if is_pods(&kind) && !rest.objects.is_empty() {
            // Nothing else goes before them, nor is it told what is left then.
            let waiting =
                Rest { objects: Default::default(), finalizers: Default::default(), ..rest.clone() };
            tell(ctx, &namespace, &waiting).await?;
            return Ok(Next::After(plan::pause(since.0, ctx.clock.now())));
        }
    }
    let namespace = tell(ctx, &namespace, &rest).await?;
    if rest.is_clear() {
        finalize(ctx, &namespace).await?;
        return Ok(Next::Change);
    }
    Ok(Next::After(plan::pause(since.0, ctx.clock.now())))
}

fn is_pods(kind: &Served) -> bool {
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

/// Deletes all objects of a kind in a namespace and notes what is left.
async fn empty(ctx: &Ctx, namespace: &str, kind: &Served, rest: &mut Rest) -> Result<(), Error> {
    let path = kind.collection(namespace);
    let list = || async {
        match ctx.client.read::<Items>(&path).await {
            Ok(list) => Ok(list.items),
            // Discovery was quicker than the kind's end.
            Err(error) if matches!(error.code(), 404 | 405) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    };
    let mut items = list().await?;
    if items.iter().any(|item| item.metadata.deletion_timestamp.is_none()) {
        let options = Delete { propagation: Some("Background"), ..Delete::default() };
        if kind.can("deletecollection") {
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
        rest.objects.insert(format!("{}.{}", kind.plural, kind.group), items.len());
    }
    for finalizer in items.into_iter().flat_map(|item| item.metadata.finalizers) {
        *rest.finalizers.entry(finalizer).or_default() += 1;
    }
    Ok(())
}

async fn tell(ctx: &Ctx, namespace: &Namespace, rest: &Rest) -> Result<Namespace, Error> {
    let mut namespace = namespace.clone();
    let status = namespace.status.get_or_insert_default();
    let before = status.conditions.as_deref().unwrap_or_default();
    let after = plan::conditions(before, rest, ctx.clock.now());
    match after {
        Some(conditions) => {
            status.conditions = Some(conditions);
            ctx.replace_status(&namespace).await
        }
        None => Ok(namespace),
    }
}

/// Nothing of ours holds the namespace any more.
async fn finalize(ctx: &Ctx, namespace: &Namespace) -> Result<(), Error> {
    let mut namespace = namespace.clone();
    if let Some(finalizers) = namespace.spec.as_mut().and_then(|spec| spec.finalizers.as_mut()) {
        finalizers.retain(|finalizer| finalizer != FINALIZER);
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
    use crate::rig::{Rig, until};

    async fn make(rig: &Rig, path: &str, value: Value) {
        rig.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
    }

    #[tokio::test]
    async fn a_deleted_namespace_takes_everything_with_it() {
        let rig = Rig::start(&["namespace-controller"]).await;
        make(&rig, "/api/v1/namespaces", json!({"metadata": {"name": "n"}})).await;
        make(&rig, "/api/v1/namespaces/n/configmaps", json!({"metadata": {"name": "plain"}})).await;
        let held = json!({"metadata": {"name": "held", "finalizers": ["example.com/x"]}});
        make(&rig, "/api/v1/namespaces/n/configmaps", held).await;
        let key = Key::new("", "n");
        rig.client.delete::<Namespace>(&key, &Delete::default()).await.expect("a deletion");
        let told = || async {
            let namespace: Namespace = rig.client.get(&key).await.ok()?;
            let conditions = namespace.status?.conditions?;
            let told = conditions.into_iter().filter(|condition| condition.status == "True");
            let told: BTreeMap<String, Option<String>> = told.map(|c| (c.type_, c.message)).collect();
            (told.len() == 2).then_some(told)
        };
        let told = until("the conditions", told).await;
        assert_eq!(
            told["NamespaceContentRemaining"].as_deref(),
            Some("Some resources are remaining: configmaps. has 1 resource instances")
        );
        assert_eq!(
            told["NamespaceFinalizersRemaining"].as_deref(),
            Some(
                "Some content in the namespace has finalizers remaining: example.com/x in 1 resource instances"
            )
        );
        let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        let _: ConfigMap = rig.client.patch(&Key::new("n", "held"), &release).await.expect("a release");
        let gone = || async { rig.client.get::<Namespace>(&key).await.is_err().then_some(()) };
        until("the end of the namespace", gone).await;
    }
}
