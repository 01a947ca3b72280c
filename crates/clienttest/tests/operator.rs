//! An operator built with the `kube` crate: a controller for a custom resource that owns
//! ConfigMaps, updates its status and uses a finalizer for cleanup.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::controller::{Action, Controller};
use kube::runtime::finalizer::{Event, finalizer};
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::watcher;
use kube::{Client, Config, Resource as _, ResourceExt as _};
use serde_json::json;
use testkit::Server;

/// The timeout of each step.
const TIMEOUT: Duration = Duration::from_secs(60);
const FINALIZER: &str = "harbor.example.com/log";

#[tokio::test]
async fn operator_can_reconcile_custom_resource() -> Result<()> {
    let server = Server::start();
    let kubeconfig = Kubeconfig::read_from(server.kubeconfig())?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    create_crd(client.clone()).await.context("the definition")?;
    let operator = tokio::spawn(run(client.clone()));
    let result = tokio::time::timeout(TIMEOUT, run_user_scenario(client)).await;
    operator.abort();
    result.context("the operator takes too long")?
}

fn custom_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("harbor.example.com", "v1", "Boat"))
}

async fn create_crd(client: Client) -> Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(client);
    let crd: CustomResourceDefinition = serde_json::from_value(json!({
        "metadata": {"name": "boats.harbor.example.com"},
        "spec": {
            "group": "harbor.example.com", "scope": "Namespaced", "names": {"plural": "boats", "kind": "Boat"},
            "versions": [{
                "name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": {"type": "object", "properties": {"crew": {"type": "integer", "default": 2}}},
                    "status": {"type": "object", "properties": {"aboard": {"type": "integer"}}},
                }}},
            }],
        },
    }))?;
    api.create(&PostParams::default(), &crd).await?;
    let established = await_condition(api, "boats.harbor.example.com", conditions::is_crd_established());
    tokio::time::timeout(TIMEOUT, established).await??;
    Ok(())
}

async fn run(client: Client) {
    let api: Api<DynamicObject> = Api::default_namespaced_with(client.clone(), &custom_resource());
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let controller = Controller::new_with(api, watcher::Config::default(), custom_resource());
    let owned = controller.owns(maps, watcher::Config::default());
    let client = Arc::new(client);
    owned
        .run(reconcile, |_, _, _| Action::requeue(Duration::from_millis(100)), client)
        .for_each(|result| async move {
            if let Err(error) = result {
                println!("{error:?}");
            }
        })
        .await;
}

async fn reconcile(
    object: Arc<DynamicObject>,
    client: Arc<Client>,
) -> Result<Action, kube::runtime::finalizer::Error<kube::Error>> {
    let api: Api<DynamicObject> = Api::default_namespaced_with((*client).clone(), &custom_resource());
    let maps: Api<ConfigMap> = Api::default_namespaced((*client).clone());
    finalizer(&api.clone(), FINALIZER, object, |event| async move {
        match event {
            Event::Apply(object) => {
                let value = object.data["spec"]["crew"].clone();
                let owner = object.controller_owner_ref(&custom_resource());
                let map = json!({
                    "apiVersion": "v1", "kind": "ConfigMap",
                    "metadata": {"name": format!("{}-log", object.name_any()), "ownerReferences": [owner]},
                    "data": {"crew": value.to_string()},
                });
                let params = PatchParams::apply("harbor").force();
                maps.patch(&format!("{}-log", object.name_any()), &params, &Patch::Apply(map)).await?;
                let status = json!({"status": {"aboard": value}});
                api.patch_status(&object.name_any(), &PatchParams::default(), &Patch::Merge(status)).await?;
            }
            Event::Cleanup(object) => {
                let deleted =
                    maps.delete(&format!("{}-log", object.name_any()), &DeleteParams::default()).await;
                if let Err(error) = deleted
                    && !matches!(&error, kube::Error::Api(status) if status.code == 404)
                {
                    return Err(error);
                }
            }
        }
        Ok(Action::await_change())
    })
    .await
}

/// Runs the steps of a user and checks the results.
async fn run_user_scenario(client: Client) -> Result<()> {
    let api: Api<DynamicObject> = Api::default_namespaced_with(client.clone(), &custom_resource());
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    api.create(
        &PostParams::default(),
        &DynamicObject::new("tern", &custom_resource()).data(json!({"spec": {}})),
    )
    .await?;
    wait_for_status(&api, 2).await?;
    let map = maps.get("tern-log").await?;
    if map.owner_references().iter().all(|owner| owner.kind != "Boat") {
        bail!("the log has no owner: {map:?}");
    }
    let patch = json!({"spec": {"crew": 5}});
    api.patch("tern", &PatchParams::default(), &Patch::Merge(patch)).await?;
    wait_for_status(&api, 5).await?;
    assert_eq!(maps.get("tern-log").await?.data.unwrap_or_default()["crew"], "5");
    // An owned object that is deleted is created again.
    maps.delete("tern-log", &DeleteParams::default()).await?;
    await_condition(maps.clone(), "tern-log", |map: Option<&ConfigMap>| map.is_some()).await?;
    let uid = api.get("tern").await?.uid().unwrap_or_default();
    api.delete("tern", &DeleteParams::default()).await?;
    await_condition(api.clone(), "tern", conditions::is_deleted(&uid)).await?;
    assert_eq!(api.list(&ListParams::default()).await?.items.len(), 0);
    assert!(maps.get_opt("tern-log").await?.is_none());
    assert_eq!(custom_resource().plural, "boats");
    Ok(())
}

async fn wait_for_status(api: &Api<DynamicObject>, expected: i64) -> Result<()> {
    let is = move |object: Option<&DynamicObject>| {
        object.is_some_and(|object| object.data["status"]["aboard"].as_i64() == Some(expected))
    };
    await_condition(api.clone(), "tern", is).await?;
    Ok(())
}
