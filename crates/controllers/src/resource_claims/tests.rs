use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::rig::{Rig, until};

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

/// A pod that wants a `gpu` by template, with what is known of it.
fn gpu_pod(node: &str, phase: &str, noted: &str) -> Pod {
    let statuses =
        if noted.is_empty() { json!([]) } else { json!([{"name": "gpu", "resourceClaimName": noted}]) };
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

/// A claim made for the pod with this uid; `allocated` may be so.
fn made(name: &str, uid: &str, allocated: bool, users: &[&str]) -> ResourceClaim {
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
    let around = plan::Around {
        claims: claims.into_iter().map(Arc::new).collect(),
        templates: templates.into_iter().map(Arc::new).collect(),
    };
    let shown = match plan::pod(pod, &around) {
        Step::Nothing => "nothing".into(),
        Step::Refuse(why) => why,
        Step::Make { name, claim } => {
            format!("make {name} {}", claim.metadata.generate_name.unwrap_or_default())
        }
        Step::Note(names) => format!("note {names:?}"),
        Step::Reserve(claim) => format!("reserve {} for {}", claim.name(), plan::consumers(&claim).count()),
    };
    expected.assert_eq(&shown);
}

#[test]
fn pods_get_claims_from_templates() {
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
    check(&new, vec![made("c", "u", false, &[])], vec![template()], expect![[r#"note {"gpu": "c"}"#]]);
    check(&new, vec![made("c", "other", false, &[])], vec![template()], expect!["make gpu p-gpu-"]);
    let noted = gpu_pod("", "Pending", "c");
    check(&noted, vec![made("c", "u", false, &[])], vec![template()], expect!["nothing"]);
    check(&noted, vec![], vec![template()], expect!["make gpu p-gpu-"]);
    let bound = gpu_pod("n", "Running", "c");
    check(&bound, vec![made("c", "u", true, &[])], vec![], expect!["reserve c for 1"]);
    check(&bound, vec![made("c", "u", true, &["u"])], vec![], expect!["nothing"]);
    check(&bound, vec![made("c", "u", false, &[])], vec![], expect!["nothing"]);
}

#[test]
fn claims_are_given_up() {
    let shown = |claim: &ResourceClaim, pods: &[Pod], owner: Option<&Pod>| {
        let pods = pods.iter().map(|pod| (pod.uid().to_owned(), Arc::new(pod.clone()))).collect();
        let plan = plan::claim(claim, &pods, owner);
        let status = plan
            .status
            .map(|status| (status.allocation.is_some(), status.reserved_for.map_or(0, |users| users.len())));
        (status, plan.release, plan.delete)
    };
    let (running, ended) = (gpu_pod("n", "Running", "c"), gpu_pod("n", "Failed", "c"));
    let used = made("c", "u", true, &["u"]);
    assert_eq!(shown(&used, std::slice::from_ref(&running), Some(&running)), (None, false, false));
    assert_eq!(shown(&used, std::slice::from_ref(&ended), Some(&ended)), (Some((false, 0)), true, true));
    // The collector takes away what belongs to a pod that is gone.
    assert_eq!(shown(&used, &[], None), (Some((false, 0)), true, false));
    assert_eq!(
        shown(&made("c", "u", true, &["u", "v"]), std::slice::from_ref(&running), None),
        (Some((true, 1)), false, false)
    );
    // Allocated by hand, not used yet.
    assert_eq!(shown(&made("c", "u", true, &[]), &[], Some(&running)), (None, false, false));
    let mut going = made("c", "u", true, &[]);
    going.metadata.deletion_timestamp = Some(typed(json!("2026-01-01T00:00:00Z")));
    assert_eq!(shown(&going, &[], None), (Some((false, 0)), true, false));
}

#[test]
fn long_names_are_cut_in_proportion() {
    let mut pod = gpu_pod("", "Pending", "");
    pod.metadata.name = Some("p".repeat(60));
    let around = plan::Around { claims: vec![], templates: vec![Arc::new(template())] };
    let Step::Make { claim, .. } = plan::pod(&pod, &around) else { panic!("a claim is made") };
    assert_eq!(claim.metadata.generate_name.map(|name| name.len()), Some(52 + 1 + 2));
}

proptest! {
    /// However a claim is found, carrying out what is planned for it leaves nothing to do.
    #[test]
    fn claims_come_to_rest(
        allocated: bool, users in prop::sample::subsequence(vec!["u", "v", "w"], 0..=3), phase in 0usize..3, deleting: bool,
    ) {
        let pod = gpu_pod("n", ["Running", "Failed", "Succeeded"][phase], "c");
        let pods: BTreeMap<_, _> = [("u".to_owned(), Arc::new(pod.clone()))].into();
        let mut claim = made("c", "u", allocated, &users);
        if deleting {
            claim.metadata.deletion_timestamp = Some(typed(json!("2026-01-01T00:00:00Z")));
        }
        let plan = plan::claim(&claim, &pods, Some(&pod));
        if let Some(status) = plan.status {
            claim.status = Some(status);
        }
        if plan.release {
            claim.metadata.finalizers = None;
        }
        // No pod that may run loses its devices.
        let was_user = users.contains(&"u") && phase == 0;
        prop_assert_eq!(plan::consumers(&claim).any(|(_, uid)| uid == "u"), was_user);
        if !plan.delete {
            prop_assert_eq!(plan::claim(&claim, &pods, Some(&pod)), plan::ClaimPlan::default());
        }
    }
}

#[tokio::test]
async fn a_pod_gets_its_claim_and_gives_it_up() {
    let rig = Rig::start(&["resourceclaim-controller"]).await;
    let post = async |path: &str, object: Value| {
        rig.client.request(http::Method::POST, path, Some(&object)).await.expect("an object");
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
        let pod: Pod = rig.client.get(&key).await.ok()?;
        pod.status?.resource_claim_statuses?.first()?.resource_claim_name.clone()
    };
    let name = until("a claim's name in the pod", named).await;
    let claim: ResourceClaim = rig.client.get(&Key::new("default", &name)).await.expect("the claim");
    assert_eq!((claim.label("a"), name.starts_with("p-gpu-")), (Some("b"), true));
    let ended = Patch::Merge(json!({"status": {"phase": "Failed"}}));
    rig.client.patch_status::<Pod>(&key, &ended).await.expect("an end");
    let gone = || async { rig.client.list::<ResourceClaim>("default").await.ok()?.is_empty().then_some(()) };
    until("the end of the claim", gone).await;
}
