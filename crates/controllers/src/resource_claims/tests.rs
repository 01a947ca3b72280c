use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

/// A pod with a `gpu` claim from a template; `claim_name` is the name in its status.
fn gpu_pod(node: &str, phase: &str, claim_name: &str) -> Pod {
    let statuses = if claim_name.is_empty() {
        json!([])
    } else {
        json!([{"name": "gpu", "resourceClaimName": claim_name}])
    };
    typed(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {
            "containers": [], "nodeName": node,
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}],
        },
        "status": {"phase": phase, "resourceClaimStatuses": statuses},
    }))
}

fn template() -> ResourceClaimTemplate {
    typed(json!({"metadata": {"name": "t", "namespace": "ns"}, "spec": {"spec": {}}}))
}

/// A claim generated for the pod with this UID.
fn owned_claim(name: &str, uid: &str, allocated: bool, users: &[&str]) -> ResourceClaim {
    let users: Vec<Value> =
        users.iter().map(|uid| json!({"resource": "pods", "name": "p", "uid": uid})).collect();
    let mut value = json!({
        "metadata": {
            "name": name, "namespace": "ns", "uid": name,
            "annotations": {"resource.kubernetes.io/pod-claim-name": "gpu"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": true}],
        },
        "spec": {},
        "status": {"reservedFor": users},
    });
    if allocated {
        value["status"]["allocation"] = json!({});
        value["metadata"]["finalizers"] = json!([plan::FINALIZER]);
    }
    typed(value)
}

#[track_caller]
fn check(pod: &Pod, claims: Vec<ResourceClaim>, templates: Vec<ResourceClaimTemplate>, expected: Expect) {
    let namespace_claims = plan::NamespaceClaims {
        claims: claims.into_iter().map(Arc::new).collect(),
        templates: templates.into_iter().map(Arc::new).collect(),
    };
    let rendered = match plan::plan_pod(pod, &namespace_claims) {
        Step::Nothing => "nothing".into(),
        Step::Reject(reason) => reason,
        Step::Create { name, claim } => {
            format!("make {name} {}", claim.metadata.generate_name.unwrap_or_default())
        }
        Step::RecordClaimNames(names) => format!("note {names:?}"),
        Step::Reserve(claim) => {
            format!("reserve {} for {}", claim.name(), plan::reserved_pods(&claim).count())
        }
    };
    expected.assert_eq(&rendered);
}

#[test]
fn creates_claims_from_templates() {
    let new = gpu_pod("", "Pending", "");
    check(
        &new,
        vec![],
        vec![],
        expect![[
            r#"PodResourceClaim gpu: resource claim template "t": resourceclaimtemplate.resource.k8s.io "t" not found"#
        ]],
    );
    check(&new, vec![], vec![template()], expect!["make gpu p-gpu-"]);
    check(&new, vec![owned_claim("c", "u", false, &[])], vec![template()], expect![[r#"note {"gpu": "c"}"#]]);
    check(&new, vec![owned_claim("c", "other", false, &[])], vec![template()], expect!["make gpu p-gpu-"]);
    let claim_name = gpu_pod("", "Pending", "c");
    check(&claim_name, vec![owned_claim("c", "u", false, &[])], vec![template()], expect!["nothing"]);
    check(&claim_name, vec![], vec![template()], expect!["make gpu p-gpu-"]);
    let bound = gpu_pod("n", "Running", "c");
    check(&bound, vec![owned_claim("c", "u", true, &[])], vec![], expect!["reserve c for 1"]);
    check(&bound, vec![owned_claim("c", "u", true, &["u"])], vec![], expect!["nothing"]);
    check(&bound, vec![owned_claim("c", "u", false, &[])], vec![], expect!["nothing"]);
}

#[test]
fn unused_claims_are_released() {
    let plan_result = |claim: &ResourceClaim, pods: &[Pod], owner: Option<&Pod>| {
        let pods = pods.iter().map(|pod| (pod.uid().to_owned(), Arc::new(pod.clone()))).collect();
        let plan = plan::plan_claim(claim, &pods, owner);
        let status = plan
            .status
            .map(|status| (status.allocation.is_some(), status.reserved_for.map_or(0, |users| users.len())));
        (status, plan.release, plan.delete)
    };
    let (running, ended) = (gpu_pod("n", "Running", "c"), gpu_pod("n", "Failed", "c"));
    let used = owned_claim("c", "u", true, &["u"]);
    assert_eq!(plan_result(&used, std::slice::from_ref(&running), Some(&running)), (None, false, false));
    assert_eq!(
        plan_result(&used, std::slice::from_ref(&ended), Some(&ended)),
        (Some((false, 0)), true, true)
    );
    // The claim of a deleted pod is left to the garbage collector.
    assert_eq!(plan_result(&used, &[], None), (Some((false, 0)), true, false));
    assert_eq!(
        plan_result(&owned_claim("c", "u", true, &["u", "v"]), std::slice::from_ref(&running), None),
        (Some((true, 1)), false, false)
    );
    // Allocated by hand and not in use yet.
    assert_eq!(plan_result(&owned_claim("c", "u", true, &[]), &[], Some(&running)), (None, false, false));
    let mut deleting = owned_claim("c", "u", true, &[]);
    deleting.metadata.deletion_timestamp = Some(typed(json!("2026-01-01T00:00:00Z")));
    assert_eq!(plan_result(&deleting, &[], None), (Some((false, 0)), true, false));
}

#[test]
fn long_names_are_truncated() {
    let mut pod = gpu_pod("", "Pending", "");
    pod.metadata.name = Some("p".repeat(60));
    let namespace_claims = plan::NamespaceClaims { claims: vec![], templates: vec![Arc::new(template())] };
    let Step::Create { claim, .. } = plan::plan_pod(&pod, &namespace_claims) else {
        panic!("a claim is made")
    };
    assert_eq!(claim.metadata.generate_name.map(|name| name.len()), Some(52 + 1 + 2));
}

proptest! {
    /// For any state of a claim, applying the plan leads to a stable state.
    #[test]
    fn claim_plan_is_stable(
        allocated: bool, users in prop::sample::subsequence(vec!["u", "v", "w"], 0..=3), phase in 0usize..3, deleting: bool,
    ) {
        let pod = gpu_pod("n", ["Running", "Failed", "Succeeded"][phase], "c");
        let pods: BTreeMap<_, _> = [("u".to_owned(), Arc::new(pod.clone()))].into();
        let mut claim = owned_claim("c", "u", allocated, &users);
        if deleting {
            claim.metadata.deletion_timestamp = Some(typed(json!("2026-01-01T00:00:00Z")));
        }
        let plan = plan::plan_claim(&claim, &pods, Some(&pod));
        if let Some(status) = plan.status {
            claim.status = Some(status);
        }
        if plan.release {
            claim.metadata.finalizers = None;
        }
        // A pod that may run never loses its devices.
        let was_user = users.contains(&"u") && phase == 0;
        prop_assert_eq!(plan::reserved_pods(&claim).any(|(_, uid)| uid == "u"), was_user);
        if !plan.delete {
            prop_assert_eq!(plan::plan_claim(&claim, &pods, Some(&pod)), plan::ClaimPlan::default());
        }
    }
}

#[tokio::test]
async fn claim_of_pod_is_created_and_released() {
    let test_cluster = TestCluster::start(&["resourceclaim-controller"]).await;
    let post = async |path: &str, object: Value| {
        test_cluster.client.request(http::Method::POST, path, Some(&object)).await.expect("an object");
    };
    let request = json!({"name": "one", "exactly": {"deviceClassName": "gpu"}});
    let spec = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"devices": {"requests": [request]}}});
    let pod = json!({"metadata": {"name": "p"}, "spec": {
        "containers": [{"name": "c", "image": "i"}],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}],
    }});
    post("/api/v1/namespaces/default/pods", pod).await;
    post(
        "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates",
        json!({"metadata": {"name": "t"}, "spec": spec}),
    )
    .await;
    let key = Key::new("default", "p");
    let named = || async {
        let pod: Pod = test_cluster.client.get(&key).await.ok()?;
        pod.status?.resource_claim_statuses?.first()?.resource_claim_name.clone()
    };
    let name = wait_for("the claim name in the pod status", named).await;
    let claim: ResourceClaim = test_cluster.client.get(&Key::new("default", &name)).await.expect("the claim");
    assert_eq!((claim.label("a"), name.starts_with("p-gpu-")), (Some("b"), true));
    let ended = Patch::Merge(json!({"status": {"phase": "Failed"}}));
    test_cluster.client.patch_status::<Pod>(&key, &ended).await.expect("an end");
    let deleted = || async {
        test_cluster.client.list::<ResourceClaim>("default").await.ok()?.is_empty().then_some(())
    };
    wait_for("deletion of the claim", deleted).await;
}
