use jiff::civil::date;
use serde_json::Value;

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

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
fn token_secret_is_filled_only_once() {
    let bare = secret(json!({"kubernetes.io/service-account.name": "a"}), json!({}));
    let TokenAction::Fill { secret: mut filled, claims } = plan::plan_token(&bare, Some(&account()), "ca")
    else {
        panic!("an empty token Secret must be filled");
    };
    assert_eq!(claims.map(|claims| claims["sub"].clone()), Some(json!("system:serviceaccount:ns:a")));
    plan::set_data(&mut filled, "token", "x");
    assert_eq!(plan::plan_token(&filled, Some(&account()), "ca"), TokenAction::Nothing);
    assert!(matches!(
        plan::plan_token(&filled, Some(&account()), "new"),
        TokenAction::Fill { claims: None, .. }
    ));
    let other: ServiceAccount = typed(json!({"metadata": {"name": "a", "namespace": "ns", "uid": "v"}}));
    assert_eq!(plan::plan_token(&filled, Some(&other), "ca"), TokenAction::Delete);
    assert_eq!(plan::plan_token(&bare, None, "ca"), TokenAction::Delete);
}

#[test]
fn unused_legacy_token_is_invalid_before_deletion() {
    let current_date = date(2026, 6, 1);
    let named = json!({"kubernetes.io/service-account.name": "a"});
    let with = |labels: Value| secret(named.clone(), labels);
    let may_be_cleaned = |secret: &Secret| plan::may_be_cleaned(secret, Some(&account()), current_date);
    assert!(may_be_cleaned(&with(json!({}))));
    assert!(!may_be_cleaned(&with(json!({"kubernetes.io/legacy-token-last-used": "2026-01-01"}))));
    assert!(may_be_cleaned(&with(json!({"kubernetes.io/legacy-token-last-used": "2024-01-01"}))));
    assert!(!may_be_cleaned(&with(json!({"kubernetes.io/legacy-token-last-used": "sometime"}))));
    let by_hand = ServiceAccount { secrets: None, ..account() };
    assert!(
        !plan::may_be_cleaned(&with(json!({})), Some(&by_hand), current_date),
        "a manually created Secret must be kept"
    );
    let since = Some(date(2021, 1, 1));
    let cleanup_action = |labels: Value| plan::plan_cleanup(&with(labels), since, false, current_date);
    assert_eq!(cleanup_action(json!({})), CleanupAction::MarkInvalid);
    assert_eq!(cleanup_action(json!({plan::INVALID_SINCE: "2026-01-01"})), CleanupAction::Nothing);
    assert_eq!(cleanup_action(json!({plan::INVALID_SINCE: "2024-01-01"})), CleanupAction::Delete);
    assert_eq!(plan::plan_cleanup(&with(json!({})), since, true, current_date), CleanupAction::Nothing);
    assert_eq!(
        plan::plan_cleanup(&with(json!({})), Some(date(2026, 1, 1)), false, current_date),
        CleanupAction::Nothing
    );
    assert_eq!(plan::plan_cleanup(&with(json!({})), None, false, current_date), CleanupAction::Nothing);
}

#[tokio::test]
async fn token_in_secret_is_accepted_by_server() {
    let test_cluster = TestCluster::start(&["serviceaccount-token-controller"]).await;
    let metadata = json!({"name": "t", "annotations": {"kubernetes.io/service-account.name": "default"}});
    let object = json!({"metadata": metadata, "type": "kubernetes.io/service-account-token"});
    let path = "/api/v1/namespaces/default/secrets";
    test_cluster.client.request(http::Method::POST, path, Some(&object)).await.expect("a secret");
    let key = Key::new("default", "t");
    let token = || async {
        let secret: Secret = test_cluster.client.get(&key).await.ok()?;
        String::from_utf8(secret.data?.get("token")?.0.clone()).ok()
    };
    let token = wait_for("a token", token).await;
    let review =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
    let path = "/apis/authentication.k8s.io/v1/tokenreviews";
    let answer =
        test_cluster.client.request(http::Method::POST, path, Some(&review)).await.expect("a review");
    assert_eq!(answer["status"]["user"]["username"], "system:serviceaccount:default:default", "{answer}");
    let used = || async {
        let secret: Secret = test_cluster.client.get(&key).await.ok()?;
        secret.label("kubernetes.io/legacy-token-last-used").map(str::to_owned)
    };
    wait_for("the last-used label", used).await;
    let patch = Patch::Merge(json!({"metadata": {"labels": {(plan::INVALID_SINCE): "2026-01-01"}}}));
    test_cluster.client.patch::<Secret>(&key, &patch).await.expect("a mark");
    let answer =
        test_cluster.client.request(http::Method::POST, path, Some(&review)).await.expect("a review");
    assert_eq!(answer["status"].get("authenticated"), None, "{answer}");
    let account = Key::new("default", "default");
    test_cluster
        .client
        .delete::<ServiceAccount>(&account, &DeleteOptions::default())
        .await
        .expect("a deletion");
    let deleted = || async { test_cluster.client.get::<Secret>(&key).await.is_err().then_some(()) };
    wait_for("deletion of the Secret", deleted).await;
}
