use jiff::civil::date;
use serde_json::Value;

use super::*;
use crate::rig::{Rig, until};

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

fn secret(annotations: Value, labels: Value) -> Secret {
    let metadata = json!({
        "name": "t", "namespace": "ns", "annotations": annotations, "labels": labels,
        "creationTimestamp": "2020-01-01T00:00:00Z",
    });
    typed(json!({"metadata": metadata, "type": "kubernetes.io/service-account-token"}))
}

fn account() -> ServiceAccount {
    typed(json!({"metadata": {"name": "a", "namespace": "ns", "uid": "u"}, "secrets": [{"name": "t"}]}))
}

#[test]
fn secrets_are_filled_once() {
    let bare = secret(json!({"kubernetes.io/service-account.name": "a"}), json!({}));
    let Filling::Fill { secret: mut filled, claims } = plan::filling(&bare, Some(&account()), "ca") else {
        panic!("a Secret without anything is filled");
    };
    assert_eq!(claims.map(|claims| claims["sub"].clone()), Some(json!("system:serviceaccount:ns:a")));
    plan::put(&mut filled, "token", "x");
    assert_eq!(plan::filling(&filled, Some(&account()), "ca"), Filling::Nothing);
    assert!(matches!(plan::filling(&filled, Some(&account()), "new"), Filling::Fill { claims: None, .. }));
    let other: ServiceAccount = typed(json!({"metadata": {"name": "a", "namespace": "ns", "uid": "v"}}));
    assert_eq!(plan::filling(&filled, Some(&other), "ca"), Filling::Delete);
    assert_eq!(plan::filling(&bare, None, "ca"), Filling::Delete);
}

#[test]
fn old_tokens_are_marked_and_then_deleted() {
    let today = date(2026, 6, 1);
    let named = json!({"kubernetes.io/service-account.name": "a"});
    let with = |labels: Value| secret(named.clone(), labels);
    let may = |secret: &Secret| plan::may_be_cleaned(secret, Some(&account()), today);
    assert!(may(&with(json!({}))));
    assert!(!may(&with(json!({"kubernetes.io/legacy-token-last-used": "2026-01-01"}))));
    assert!(may(&with(json!({"kubernetes.io/legacy-token-last-used": "2024-01-01"}))));
    assert!(!may(&with(json!({"kubernetes.io/legacy-token-last-used": "sometime"}))));
    let by_hand = ServiceAccount { secrets: None, ..account() };
    assert!(!plan::may_be_cleaned(&with(json!({})), Some(&by_hand), today), "a person made it");
    let since = Some(date(2021, 1, 1));
    let cleaning = |labels: Value| plan::cleaning(&with(labels), since, false, today);
    assert_eq!(cleaning(json!({})), Cleaning::Mark);
    assert_eq!(cleaning(json!({plan::INVALID_SINCE: "2026-01-01"})), Cleaning::Nothing);
    assert_eq!(cleaning(json!({plan::INVALID_SINCE: "2024-01-01"})), Cleaning::Delete);
    assert_eq!(plan::cleaning(&with(json!({})), since, true, today), Cleaning::Nothing);
    assert_eq!(plan::cleaning(&with(json!({})), Some(date(2026, 1, 1)), false, today), Cleaning::Nothing);
    assert_eq!(plan::cleaning(&with(json!({})), None, false, today), Cleaning::Nothing);
}

#[tokio::test]
async fn a_secret_gets_a_token_that_the_server_takes() {
    let rig = Rig::start(&["serviceaccount-token-controller"]).await;
    let metadata = json!({"name": "t", "annotations": {"kubernetes.io/service-account.name": "default"}});
    let object = json!({"metadata": metadata, "type": "kubernetes.io/service-account-token"});
    let path = "/api/v1/namespaces/default/secrets";
    rig.client.request(http::Method::POST, path, Some(&object)).await.expect("a secret");
    let key = Key::new("default", "t");
    let token = || async {
        let secret: Secret = rig.client.get(&key).await.ok()?;
        String::from_utf8(secret.data?.get("token")?.0.clone()).ok()
    };
    let token = until("a token", token).await;
    let review =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
    let path = "/apis/authentication.k8s.io/v1/tokenreviews";
    let answer = rig.client.request(http::Method::POST, path, Some(&review)).await.expect("a review");
    assert_eq!(answer["status"]["user"]["username"], "system:serviceaccount:default:default", "{answer}");
    let used = || async {
        let secret: Secret = rig.client.get(&key).await.ok()?;
        secret.label("kubernetes.io/legacy-token-last-used").map(str::to_owned)
    };
    until("a note that it was used", used).await;
    let patch = Patch::Merge(json!({"metadata": {"labels": {(plan::INVALID_SINCE): "2026-01-01"}}}));
    rig.client.patch::<Secret>(&key, &patch).await.expect("a mark");
    let answer = rig.client.request(http::Method::POST, path, Some(&review)).await.expect("a review");
    assert_eq!(answer["status"].get("authenticated"), None, "{answer}");
    let account = Key::new("default", "default");
    rig.client.delete::<ServiceAccount>(&account, &Delete::default()).await.expect("a deletion");
    let gone = || async { rig.client.get::<Secret>(&key).await.is_err().then_some(()) };
    until("the end of the Secret", gone).await;
}
