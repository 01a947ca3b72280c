//! The collector on a real API server.

use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::{Client, Delete, Key, Object, Patch};
use serde_json::json;

use crate::rig::{Rig, until};

const NAME: &str = "garbage-collector-controller";

async fn make(client: &Client, name: &str, owners: &[&ConfigMap]) -> ConfigMap {
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

async fn gone(client: &Client, name: &str) {
    until(&format!("the end of {name}"), || async move { (!exists(client, name).await).then_some(()) }).await
}

async fn delete(client: &Client, name: &str, propagation: &'static str) {
    let options = Delete { propagation: Some(propagation), ..Delete::default() };
    client.delete::<ConfigMap>(&key(name), &options).await.expect("a deletion");
}

#[tokio::test]
async fn dependents_follow_their_owners_in_the_background() {
    let rig = Rig::start(&[NAME]).await;
    let client = &rig.client;
    let owner = make(client, "owner", &[]).await;
    let other = make(client, "other", &[]).await;
    let child = make(client, "child", &[&owner]).await;
    make(client, "grandchild", &[&child]).await;
    make(client, "shared", &[&owner, &other]).await;
    delete(client, "owner", "Background").await;
    gone(client, "child").await;
    gone(client, "grandchild").await;
    let one_owner = || async {
        let shared: ConfigMap = client.get(&key("shared")).await.ok()?;
        let owners = shared.metadata.owner_references.unwrap_or_default();
        (owners.len() == 1 && owners[0].name == "other").then_some(())
    };
    until("the shared one losing an owner", one_owner).await;
    // An owner that never was.
    let mut never = other.clone();
    never.metadata.uid = Some("11111111-1111-1111-1111-111111111111".into());
    never.metadata.name = Some("never".into());
    make(client, "stray", &[&never]).await;
    gone(client, "stray").await;
    assert!(exists(client, "shared").await);
}

#[tokio::test]
async fn orphans_stay_and_foreground_owners_wait() {
    let rig = Rig::start(&[NAME]).await;
    let client = &rig.client;
    let owner = make(client, "owner", &[]).await;
    let child = make(client, "child", &[&owner]).await;
    make(client, "grandchild", &[&child]).await;
    delete(client, "owner", "Orphan").await;
    gone(client, "owner").await;
    let child: ConfigMap = client.get(&key("child")).await.expect("the orphan");
    assert_eq!(child.metadata.owner_references, None);

    let hold = json!({"metadata": {"finalizers": ["example.com/hold"]}});
    let _: ConfigMap = client.patch(&key("grandchild"), &Patch::Merge(hold)).await.expect("a hold");
    delete(client, "child", "Foreground").await;
    let going =
        || async { client.get::<ConfigMap>(&key("grandchild")).await.ok()?.is_deleting().then_some(()) };
    until("the grandchild being deleted", going).await;
    assert!(exists(client, "child").await, "the owner waits for the dependent that blocks it");
    let release = json!({"metadata": {"finalizers": null}});
    let _: ConfigMap = client.patch(&key("grandchild"), &Patch::Merge(release)).await.expect("a release");
    gone(client, "child").await;
    gone(client, "grandchild").await;
}

#[tokio::test]
async fn owners_in_other_namespaces_count_for_nothing() {
    let rig = Rig::start(&[NAME]).await;
    let client = &rig.client;
    let namespace = Namespace {
        metadata: ObjectMeta { name: Some("far".into()), ..ObjectMeta::default() },
        ..Namespace::default()
    };
    client.create(&namespace).await.expect("a namespace");
    let metadata =
        ObjectMeta { name: Some("owner".into()), namespace: Some("far".into()), ..ObjectMeta::default() };
    let far = ConfigMap { metadata, ..ConfigMap::default() };
    let far = client.create(&far).await.expect("an owner elsewhere");
    let child = make(client, "child", &[&far]).await;
    gone(client, "child").await;
    let told = || async {
        let events: Vec<Event> = client.list("default").await.ok()?;
        events.into_iter().find(|event| event.reason.as_deref() == Some("OwnerRefInvalidNamespace"))
    };
    let event = until("an event", told).await;
    let expected = format!(
        "ownerRef [v1/ConfigMap, namespace: default, name: owner, uid: {}] does not exist in namespace \"default\"",
        far.uid()
    );
    assert_eq!(event.message, Some(expected));
    assert_eq!(event.involved_object.uid.as_deref(), Some(child.uid()));
}
