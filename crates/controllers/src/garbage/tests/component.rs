//! Tests against a real API server.

use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::{Client, DeleteOptions, Key, Object, Patch};
use serde_json::json;

use crate::test_cluster::{TestCluster, wait_for};

const NAME: &str = "garbage-collector-controller";

async fn create(client: &Client, name: &str, owners: &[&ConfigMap]) -> ConfigMap {
    let owners = owners.iter().map(|owner| OwnerReference {
        api_version: "v1".into(),
        kind: "ConfigMap".into(),
        name: owner.name().into(),
        uid: owner.uid().into(),
        block_owner_deletion: Some(true),
        controller: None,
    });
    let metadata = ObjectMeta {
        name: Some(name.into()),
        namespace: Some("default".into()),
        owner_references: Some(owners.collect()),
        ..ObjectMeta::default()
    };
    client.create(&ConfigMap { metadata, ..ConfigMap::default() }).await.expect("an object")
}

fn key(name: &str) -> Key {
    Key::new("default", name)
}

async fn exists(client: &Client, name: &str) -> bool {
    client.get::<ConfigMap>(&key(name)).await.is_ok()
}

async fn wait_until_deleted(client: &Client, name: &str) {
    wait_for(&format!("deletion of {name}"), || async move { (!exists(client, name).await).then_some(()) })
        .await
}

async fn delete(client: &Client, name: &str, propagation: &'static str) {
    let options = DeleteOptions { propagation: Some(propagation), ..DeleteOptions::default() };
    client.delete::<ConfigMap>(&key(name), &options).await.expect("a deletion");
}

#[tokio::test]
async fn dependents_are_deleted_in_background() {
    let test_cluster = TestCluster::start(&[NAME]).await;
    let client = &test_cluster.client;
    let owner = create(client, "owner", &[]).await;
    let other = create(client, "other", &[]).await;
    let child = create(client, "child", &[&owner]).await;
    create(client, "grandchild", &[&child]).await;
    create(client, "shared", &[&owner, &other]).await;
    delete(client, "owner", "Background").await;
    wait_until_deleted(client, "child").await;
    wait_until_deleted(client, "grandchild").await;
    let one_owner = || async {
        let shared: ConfigMap = client.get(&key("shared")).await.ok()?;
        let owners = shared.metadata.owner_references.unwrap_or_default();
        (owners.len() == 1 && owners[0].name == "other").then_some(())
    };
    wait_for("the shared object to lose an owner", one_owner).await;
    // An owner that never existed.
    let mut absent_owner = other.clone();
    absent_owner.metadata.uid = Some("11111111-1111-1111-1111-111111111111".into());
    absent_owner.metadata.name = Some("never".into());
    create(client, "stray", &[&absent_owner]).await;
    wait_until_deleted(client, "stray").await;
    assert!(exists(client, "shared").await);
}

#[tokio::test]
async fn orphan_and_foreground_deletion() {
    let test_cluster = TestCluster::start(&[NAME]).await;
    let client = &test_cluster.client;
    let owner = create(client, "owner", &[]).await;
    let child = create(client, "child", &[&owner]).await;
    create(client, "grandchild", &[&child]).await;
    delete(client, "owner", "Orphan").await;
    wait_until_deleted(client, "owner").await;
    let child: ConfigMap = client.get(&key("child")).await.expect("the orphan");
    assert_eq!(child.metadata.owner_references, None);

    let hold = json!({"metadata": {"finalizers": ["example.com/hold"]}});
    let _: ConfigMap = client.patch(&key("grandchild"), &Patch::Merge(hold)).await.expect("a hold");
    delete(client, "child", "Foreground").await;
    let deleting =
        || async { client.get::<ConfigMap>(&key("grandchild")).await.ok()?.is_deleting().then_some(()) };
    wait_for("the grandchild to be deleted", deleting).await;
    assert!(exists(client, "child").await, "the owner must wait for its blocking dependent");
    let release = json!({"metadata": {"finalizers": null}});
    let _: ConfigMap = client.patch(&key("grandchild"), &Patch::Merge(release)).await.expect("a release");
    wait_until_deleted(client, "child").await;
    wait_until_deleted(client, "grandchild").await;
}

#[tokio::test]
async fn owner_in_other_namespace_is_invalid() {
    let test_cluster = TestCluster::start(&[NAME]).await;
    let client = &test_cluster.client;
    let namespace = Namespace {
        metadata: ObjectMeta { name: Some("far".into()), ..ObjectMeta::default() },
        ..Namespace::default()
    };
    client.create(&namespace).await.expect("a namespace");
    let metadata =
        ObjectMeta { name: Some("owner".into()), namespace: Some("far".into()), ..ObjectMeta::default() };
    let other_namespace_owner = ConfigMap { metadata, ..ConfigMap::default() };
    let other_namespace_owner = client.create(&other_namespace_owner).await.expect("an owner elsewhere");
    let child = create(client, "child", &[&other_namespace_owner]).await;
    wait_until_deleted(client, "child").await;
    let find_event = || async {
        let events: Vec<Event> = client.list("default").await.ok()?;
        events.into_iter().find(|event| event.reason.as_deref() == Some("OwnerRefInvalidNamespace"))
    };
    let event = wait_for("an event", find_event).await;
    let expected = format!(
        "ownerRef [v1/ConfigMap, namespace: default, name: owner, uid: {}] does not exist in namespace \"default\"",
        other_namespace_owner.uid()
    );
    assert_eq!(event.message, Some(expected));
    assert_eq!(event.involved_object.uid.as_deref(), Some(child.uid()));
}
