//! The `kube` crate as a client: typed objects, lists, watches, streaming lists and server-side apply.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher;
use kube::{Client, Config, ResourceExt as _};
use serde_json::json;
use testkit::Server;

/// The timeout of each response.
const TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::test]
async fn the_kube_crate_works() -> Result<()> {
    let server = Server::start();
    let kubeconfig = Kubeconfig::read_from(server.kubeconfig())?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    assert_eq!(client.apiserver_version().await?.major, "1");
    config_maps(client.clone()).await.context("ConfigMaps")?;
    pods(client.clone()).await.context("Pods")?;
    streaming_lists(client.clone()).await.context("streaming lists")?;
    apply(client).await.context("server-side apply")
}

async fn config_maps(client: Client) -> Result<()> {
    let api: Api<ConfigMap> = Api::default_namespaced(client);
    let params = WatchParams::default().labels("app=web");
    let version = api.list(&ListParams::default()).await?.metadata.resource_version.unwrap_or_default();
    let mut watch = Box::pin(api.watch(&params, &version).await?);
    let map: ConfigMap = serde_json::from_value(json!({
        "metadata": {"name": "a", "labels": {"app": "web"}}, "data": {"key": "value"},
    }))?;
    let created = api.create(&PostParams::default(), &map).await?;
    assert_eq!(event(&mut watch).await?, "added a");
    let patch = json!({"data": {"key": "other"}});
    let patched = api.patch("a", &PatchParams::default(), &Patch::Merge(patch)).await?;
    assert_ne!(patched.resource_version(), created.resource_version());
    assert_eq!(event(&mut watch).await?, "modified a");
    let listed = api.list(&ListParams::default().labels("app=web").limit(1)).await?;
    assert_eq!(listed.items, [patched]);
    // A stale resourceVersion.
    let error = api.replace("a", &PostParams::default(), &created).await.unwrap_err();
    assert!(matches!(error, kube::Error::Api(status) if status.code == 409 && status.reason == "Conflict"));
    api.delete("a", &DeleteParams::default()).await?;
    assert_eq!(event(&mut watch).await?, "deleted a");
    assert!(api.get_opt("a").await?.is_none());
    Ok(())
}

async fn pods(client: Client) -> Result<()> {
    let api: Api<Pod> = Api::default_namespaced(client);
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "web"}, "spec": {"containers": [{"name": "web", "image": "web:1"}]},
    }))?;
    api.create(&PostParams::default(), &pod).await?;
    let patch = json!({"spec": {"containers": [{"name": "web", "image": "web:2"}]}});
    let patched = api.patch("web", &PatchParams::default(), &Patch::Strategic(patch)).await?;
    let container = &patched.spec.as_ref().context("no spec")?.containers[0];
    assert_eq!(container.image.as_deref(), Some("web:2"));
    assert_eq!(container.termination_message_policy.as_deref(), Some("File"), "defaults are kept");
    let status = json!({"status": {"phase": "Running"}});
    let running = api.patch_status("web", &PatchParams::default(), &Patch::Merge(status)).await?;
    assert_eq!(running.status.context("no status")?.phase.as_deref(), Some("Running"));
    api.delete_collection(&DeleteParams::default().grace_period(0), &ListParams::default()).await?;
    assert_eq!(api.list(&ListParams::default()).await?.items, []);
    Ok(())
}

/// A watch with `sendInitialEvents`, as controllers built with kube can use instead of a list.
async fn streaming_lists(client: Client) -> Result<()> {
    let api: Api<ConfigMap> = Api::default_namespaced(client);
    for name in ["x", "y"] {
        let map = ConfigMap {
            metadata: kube::core::ObjectMeta { name: Some(name.into()), ..Default::default() },
            ..Default::default()
        };
        api.create(&PostParams::default(), &map).await?;
    }
    // The watch may start at any cached state. After a list of the latest state, it is at least as
    // new as that.
    api.list(&ListParams::default()).await?;
    let mut events = Box::pin(watcher(api.clone(), watcher::Config::default().streaming_lists()));
    let mut seen = Vec::new();
    loop {
        let event = tokio::time::timeout(TIMEOUT, events.try_next()).await??.context("the watch ended")?;
        match event {
            watcher::Event::Init => seen.push("init".to_owned()),
            watcher::Event::InitApply(map) => seen.push(map.name_any()),
            watcher::Event::InitDone => break,
            other => bail!("{other:?} before the list was done"),
        }
    }
    // The controller manager may have created a ConfigMap in the namespace.
    seen.retain(|name| name != "kube-root-ca.crt");
    assert_eq!(seen, ["init", "x", "y"]);
    api.delete("x", &DeleteParams::default()).await?;
    let event = tokio::time::timeout(TIMEOUT, events.try_next()).await??;
    assert!(matches!(event, Some(watcher::Event::Delete(map)) if map.name_any() == "x"));
    Ok(())
}

async fn apply(client: Client) -> Result<()> {
    let api: Api<Deployment> = Api::default_namespaced(client);
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {
            "replicas": 2, "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "web", "image": "web:1"}]},
            },
        },
    });
    let params = PatchParams::apply("kube-test");
    let first = api.patch("web", &params, &Patch::Apply(&deployment)).await?;
    let second = api.patch("web", &params, &Patch::Apply(&deployment)).await?;
    assert_eq!(first, second, "applying the same object changes nothing");
    let conflicting = json!({"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"replicas": 3}});
    let other = PatchParams::apply("other-manager");
    let error = api.patch("web", &other, &Patch::Apply(&conflicting)).await.unwrap_err();
    let kube::Error::Api(status) = error else { bail!("{error}") };
    assert_eq!(status.message, "Apply failed with 1 conflict: conflict with \"kube-test\": .spec.replicas");
    let forced = api.patch("web", &other.force(), &Patch::Apply(&conflicting)).await?;
    assert_eq!(forced.spec.context("no spec")?.replicas, Some(3));
    let scale = api.get_scale("web").await?;
    assert_eq!(scale.spec.and_then(|spec| spec.replicas), Some(3));
    Ok(())
}

/// The next event as type and name. Bookmarks are skipped.
async fn event(
    watch: &mut (impl Stream<Item = kube::Result<WatchEvent<ConfigMap>>> + Unpin),
) -> Result<String> {
    loop {
        let event = tokio::time::timeout(TIMEOUT, watch.next()).await?.context("the watch ended")??;
        return Ok(match event {
            WatchEvent::Added(map) => format!("added {}", map.name_any()),
            WatchEvent::Modified(map) => format!("modified {}", map.name_any()),
            WatchEvent::Deleted(map) => format!("deleted {}", map.name_any()),
            WatchEvent::Bookmark(_) => continue,
            WatchEvent::Error(error) => bail!("{error:?}"),
        });
    }
}
