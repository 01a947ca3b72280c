//! Root CA publisher: maintains the ConfigMap `kube-root-ca.crt` in every namespace.
//!
//! Upstream: `pkg/controller/certificates/rootcacertpublisher`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction, keys};

const NAME: &str = "kube-root-ca.crt";
const DESCRIPTION: &str = "kubernetes.io/description";
const DESCRIPTION_TEXT: &str = "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such as the internal service IP or kubernetes.default.svc. No other usage is guaranteed across distributions of Kubernetes clusters.";

pub async fn run(ctx: Ctx) {
    if ctx.settings.root_ca.is_empty() {
        return;
    }
    let ctx = Ctx { client: ctx.client.impersonate("root-ca-cert-publisher"), ..ctx };
    let controller = Controller::new("root_ca_cert_publisher", &ctx);
    controller.on(ctx.caches.namespaces(), keys::own::<Namespace>);
    controller.on(ctx.caches.root_certificates(), |changed: &ObjectUpdate<'_, ConfigMap>, enqueue| {
        enqueue(Key::new("", changed.latest().namespace()));
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, 1, reconcile).await
}

/// The ConfigMap to write, or `None` if it is up to date.
fn plan(namespace: &str, found: Option<&ConfigMap>, root_ca: &str) -> Option<ConfigMap> {
    let data = BTreeMap::from([("ca.crt".to_owned(), root_ca.to_owned())]);
    let metadata =
        ObjectMeta { name: Some(NAME.into()), namespace: Some(namespace.into()), ..ObjectMeta::default() };
    let mut map = found.cloned().unwrap_or_else(|| ConfigMap { metadata, ..ConfigMap::default() });
    let annotations = map.metadata.annotations.get_or_insert_default();
    if map.data.as_ref() == Some(&data)
        && annotations.get(DESCRIPTION).is_some_and(|text| text == DESCRIPTION_TEXT)
    {
        return None;
    }
    annotations.insert(DESCRIPTION.into(), DESCRIPTION_TEXT.into());
    map.data = Some(data);
    Some(map)
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(namespace) = ctx.caches.namespaces().get(key) else { return Ok(ReconcileAction::Forget) };
    if namespace.is_deleting() {
        return Ok(ReconcileAction::AwaitChange);
    }
    let found = ctx.caches.root_certificates().get(&Key::new(namespace.name(), NAME));
    let Some(map) = plan(namespace.name(), found.as_deref(), &ctx.settings.root_ca) else {
        return Ok(ReconcileAction::AwaitChange);
    };
    let written = match found {
        Some(_) => ctx.replace(&map).await,
        None => ctx.create(&map).await,
    };
    match written {
        Err(error) if error.is_already_exists() || error.is_namespace_terminating() => {
            Ok(ReconcileAction::AwaitChange)
        }
        other => other.map(|_| ReconcileAction::AwaitChange),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_cluster::{TestCluster, wait_for};

    #[test]
    fn up_to_date_config_map_is_unchanged() {
        let created = plan("ns", None, "ca").expect("a missing ConfigMap is created");
        assert_eq!(plan("ns", Some(&created), "ca"), None);
        let updated = plan("ns", Some(&created), "other").expect("another certificate");
        assert_eq!(
            updated.data.as_ref().and_then(|data| data.get("ca.crt")).map(String::as_str),
            Some("other")
        );
        assert_eq!(plan("ns", Some(&updated), "other"), None);
    }

    #[tokio::test]
    async fn deleted_config_map_is_created_again() {
        let test_cluster =
            TestCluster::start(&["serviceaccount-controller", "root-ca-certificate-publisher-controller"])
                .await;
        let key = Key::new("kube-system", NAME);
        let find = || async { test_cluster.client.get::<ConfigMap>(&key).await.ok() };
        let first = wait_for("a certificate", find).await;
        test_cluster
            .client
            .delete::<ConfigMap>(&key, &reconcile::DeleteOptions::default())
            .await
            .expect("a deletion");
        let again = || async { find().await.filter(|map| map.uid() != first.uid()) };
        wait_for("a new one", again).await;
        let account = || async {
            test_cluster
                .client
                .get::<k8s_openapi::api::core::v1::ServiceAccount>(&Key::new("kube-system", "default"))
                .await
                .ok()
        };
        wait_for("an account", account).await;
    }
}
