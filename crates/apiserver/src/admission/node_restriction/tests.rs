//! Writes by node `a`, and the errors it gets.

use serde_json::json;

use super::*;
use crate::access::User;
use crate::admission::tests::FakeCluster;
use crate::request::Target;

const NODES: (&str, &str) = ("", "nodes");
const PODS: (&str, &str) = ("", "pods");

fn cluster() -> FakeCluster {
    let pod = |name: &str, node: &str, volumes: Value| json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {"nodeName": node, "volumes": volumes}});
    let volumes = json!([
        {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"audience": "vault"}}]}},
        {"name": "c", "csi": {"driver": "inline"}},
        {"name": "p", "persistentVolumeClaim": {"claimName": "claim"}},
        {"name": "e", "ephemeral": {}},
    ]);
    let driver = |name: &str, audience: &str| json!({"metadata": {"name": name}, "spec": {"tokenRequests": [{"audience": audience}]}});
    let claim = |name: &str, volume: &str| json!({"metadata": {"name": name, "namespace": "n"}, "spec": {"volumeName": volume}});
    let volume =
        |name: &str, driver: &str| json!({"metadata": {"name": name}, "spec": {"csi": {"driver": driver}}});
    FakeCluster::of(&[
        ("", "nodes", json!({"metadata": {"name": "a", "uid": "ua"}})),
        ("", "pods", pod("mine", "a", volumes)),
        ("", "pods", pod("other", "b", json!([]))),
        (
            "",
            "pods",
            pod("lost", "a", json!([{"name": "p", "persistentVolumeClaim": {"claimName": "gone"}}])),
        ),
        ("", "persistentvolumeclaims", claim("claim", "volume")),
        ("", "persistentvolumeclaims", claim("mine-e", "ephemeral")),
        ("", "persistentvolumes", volume("volume", "claimed")),
        ("", "persistentvolumes", volume("ephemeral", "made")),
        ("storage.k8s.io", "csidrivers", driver("inline", "i")),
        ("storage.k8s.io", "csidrivers", driver("claimed", "c")),
        ("storage.k8s.io", "csidrivers", driver("made", "m")),
    ])
}

/// The error of a write by `user`, or "". With an old object it is an update, without a new one a
/// deletion.
fn run(
    user: &str,
    (group, what): (&str, &str),
    namespaced_name: (&str, &str),
    new: Option<Value>,
    old: Option<Value>,
) -> String {
    let (plural, subresource) = what.split_once('/').unwrap_or((what, ""));
    let row = api::resource_table::find_resource(group, "v1", plural).expect("a known kind");
    let collection = Target::collection(row, namespaced_name.0);
    let target = Target { name: namespaced_name.1.into(), subresource: subresource.into(), ..collection };
    let operation = match (&new, &old) {
        (None, _) => Operation::Delete,
        (_, None) => Operation::Create,
        _ => Operation::Update,
    };
    let user = User { name: user.into(), groups: vec!["system:nodes".into()], ..User::default() };
    let mut new = new.unwrap_or_default();
    let request = Request::new(&target, operation, &new.clone(), old.as_ref(), Some(&user));
    admit(&request, &mut new, &cluster()).map_or_else(|status| status.message, |()| String::new())
}

/// A write by node `a`; `reason` is the text after `... is forbidden: `.
#[track_caller]
fn check(
    kind: (&str, &str),
    namespaced_name: (&str, &str),
    new: Option<Value>,
    old: Option<Value>,
    reason: &str,
) {
    let found = run("system:node:a", kind, namespaced_name, new.clone(), old);
    let found = found.split_once(" is forbidden: ").map_or(found.as_str(), |(_, reason)| reason);
    assert_eq!(found, reason, "{kind:?} {namespaced_name:?} {new:?}");
}

#[test]
fn only_nodes_are_restricted() {
    let pod = json!({"metadata": {"name": "p"}});
    assert_eq!(run("jo", PODS, ("n", ""), Some(pod.clone()), None), "");
    assert_eq!(
        run("system:node:", PODS, ("n", ""), Some(pod), None),
        "pods \"p\" is forbidden: could not determine node from user \"system:node:\""
    );
}

#[test]
fn node_can_only_create_own_mirror_pods_without_references() {
    let mirror = || {
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "ua", "controller": true});
        json!({"metadata": {"name": "p", "annotations": {MIRROR_ANNOTATION: "x"}, "ownerReferences": [owner]},
            "spec": {"nodeName": "a", "volumes": [{"name": "h", "hostPath": {}}, {"name": "d", "projected": {"sources": [{"downwardAPI": {}}]}}]}})
    };
    let changed = |path: &str, value: Value| {
        let mut pod = mirror();
        match pod.pointer_mut(path) {
            Some(old) => *old = value,
            None => {
                let (parent, name) = path.rsplit_once('/').expect("a path");
                pod.pointer_mut(parent).expect("a parent").set(name, value);
            }
        }
        Some(pod)
    };
    let check = |pod: Option<Value>, reason: &str| check(PODS, ("n", ""), pod, None, reason);
    let owner = "/metadata/ownerReferences/0";
    check(Some(mirror()), "");
    check(
        changed("/metadata/annotations", json!({})),
        r#"pod does not have "kubernetes.io/config.mirror" annotation, node "a" can only create mirror pods"#,
    );
    check(
        changed("/spec/nodeName", json!("b")),
        r#"node "a" can only create pods with spec.nodeName set to itself"#,
    );
    check(
        changed("/metadata/ownerReferences", json!([])),
        r#"node "a" can only create pods with an owner reference set to itself"#,
    );
    check(
        changed("/metadata/ownerReferences", json!([{}, {}])),
        r#"node "a" can only create pods with a single owner reference set to itself"#,
    );
    for (field, value) in [("apiVersion", "v2"), ("kind", "Pod"), ("name", "b")] {
        check(
            changed(&format!("{owner}/{field}"), json!(value)),
            r#"node "a" can only create pods with an owner reference set to itself"#,
        );
    }
    check(
        changed(&format!("{owner}/controller"), json!(false)),
        r#"node "a" can only create pods with a controller owner reference set to itself"#,
    );
    check(
        changed(&format!("{owner}/blockOwnerDeletion"), json!(true)),
        r#"node "a" must not set blockOwnerDeletion on an owner reference"#,
    );
    check(changed(&format!("{owner}/uid"), json!("ub")), "node a UID mismatch: expected ub got ua");
    let reference_error = |what: &str| format!("node \"a\" can not create pods that reference {what}");
    check(changed("/spec/serviceAccountName", json!("x")), &reference_error("serviceaccounts"));
    check(changed("/spec/imagePullSecrets", json!([{"name": "x"}])), &reference_error("secrets"));
    let env = json!([{"name": "c", "env": [{"valueFrom": {"configMapKeyRef": {"name": "x"}}}]}]);
    check(changed("/spec/containers", env), &reference_error("configmaps"));
    check(changed("/spec/resourceClaims", json!([{"name": "x"}])), &reference_error("resourceclaims"));
    for (volume, what) in [
        (json!({"secret": {"secretName": "x"}}), "secrets"),
        (json!({"secret": {}}), "secrets (via secret volumes)"),
        (json!({"configMap": {}}), "configmaps (via configmap volumes)"),
        (json!({"csi": {"driver": "d"}}), "csidrivers (via CSI volumes)"),
        (json!({"glusterfs": {}}), "endpoints (via glusterFS volumes)"),
        (json!({"persistentVolumeClaim": {"claimName": "x"}}), "persistentvolumeclaims"),
        (json!({"ephemeral": {}}), "persistentvolumeclaims (via ephemeral volumes)"),
        (json!({"azureFile": {}}), "secrets (via azureFile volumes)"),
        (json!({"projected": {"sources": [{"configMap": {}}]}}), "configmaps (via projected volumes)"),
        (json!({"projected": {"sources": [{"secret": {}}]}}), "secrets (via projected volumes)"),
        (
            json!({"projected": {"sources": [{"serviceAccountToken": {}}]}}),
            "serviceaccounts (via projected volumes)",
        ),
        (json!({"projected": {"sources": [{"clusterTrustBundle": {}}]}}), "clustertrustbundles"),
    ] {
        check(changed("/spec/volumes", json!([volume])), &reference_error(what));
    }
    check(
        changed("/spec/volumes", json!([{"name": "v", "future": {}}])),
        "error checking mirror pod for API references: unknown volume type for volume  \"v\"",
    );
}

#[test]
fn node_can_only_write_pods_on_itself() {
    let on =
        |node: &str| json!({"metadata": {"name": "p", "labels": {"l": "1"}}, "spec": {"nodeName": node}});
    check(PODS, ("n", "p"), None, Some(on("a")), "");
    check(
        PODS,
        ("n", "p"),
        None,
        Some(on("b")),
        r#"node "a" can only delete pods with spec.nodeName set to itself"#,
    );
    check(
        PODS,
        ("n", "p"),
        Some(on("a")),
        Some(on("a")),
        r#"unexpected operation "UPDATE", node "a" can only create and delete mirror pods"#,
    );
    check(
        ("", "pods/resize"),
        ("n", "p"),
        Some(on("a")),
        Some(on("a")),
        r#"unexpected pod subresource "resize", only 'status' and 'eviction' are allowed"#,
    );
    let status = ("", "pods/status");
    let with = |path: &str, value: Value| {
        let mut pod = on("a");
        pod["status"] = json!({});
        let (parent, name) = path.rsplit_once('/').expect("a path");
        pod.pointer_mut(parent).expect("a parent").set(name, value);
        Some(pod)
    };
    check(status, ("n", "p"), with("/status/phase", json!("Running")), Some(on("a")), "");
    check(
        status,
        ("n", "p"),
        with("/status/phase", json!("Running")),
        Some(on("b")),
        r#"node "a" can only update pod status for pods with spec.nodeName set to itself"#,
    );
    for (path, value, what) in [
        ("/metadata/labels", json!({"l": "2"}), "update labels through pod status"),
        ("/status/resourceClaimStatuses", json!([{"name": "r"}]), "update resource claim statues"),
        (
            "/status/extendedResourceClaimStatus",
            json!({"resourceClaimName": "r"}),
            "update extended resource claim status",
        ),
    ] {
        check(status, ("n", "p"), with(path, value), Some(on("a")), &format!("node \"a\" cannot {what}"));
    }
    let eviction = ("", "pods/eviction");
    check(eviction, ("n", "mine"), Some(Value::Null), None, "");
    check(
        eviction,
        ("n", "other"),
        Some(Value::Null),
        None,
        "node a can only evict pods with spec.nodeName set to itself",
    );
    check(eviction, ("n", "none"), Some(Value::Null), None, "pods \"none\" not found");
}

#[test]
fn node_can_only_write_its_own_node() {
    let node = |more: Value| {
        let mut node = json!({"metadata": {"name": "a"}, "spec": {}});
        for (part, fields) in more.as_object().expect("an object") {
            for (field, value) in fields.as_object().expect("an object") {
                node[part].set(field, value.clone());
            }
        }
        Some(node)
    };
    let labels = |names: &[&str]| {
        let labels: Vec<_> = names.iter().map(|name| ((*name).to_owned(), json!("x"))).collect();
        node(json!({"metadata": {"labels": Value::Object(labels.into_iter().collect())}}))
    };
    let plain = || node(json!({}));
    check(NODES, ("", ""), plain(), None, "");
    check(
        NODES,
        ("", ""),
        Some(json!({"metadata": {"name": "b"}})),
        None,
        r#"node "a" is not allowed to modify node "b""#,
    );
    // `generateName` is not the name.
    check(
        NODES,
        ("", ""),
        Some(json!({"metadata": {"generateName": "a"}})),
        None,
        r#"node "a" is not allowed to modify node """#,
    );
    check(NODES, ("", "b"), plain(), plain(), r#"node "a" is not allowed to modify node "b""#);
    check(("", "nodes/status"), ("", "b"), plain(), plain(), r#"node "a" is not allowed to modify node "b""#);
    check(NODES, ("", "b"), None, plain(), r#"node "a" is not allowed to modify node "b""#);
    check(("", "nodes/status"), ("", "a"), node(json!({"status": {"x": 1}})), plain(), "");
    let source = || node(json!({"spec": {"configSource": {}}}));
    check(
        NODES,
        ("", ""),
        source(),
        None,
        r#"node "a" is not allowed to create pods with a non-nil configSource"#,
    );
    let filled = || node(json!({"spec": {"configSource": {"configMap": {"name": "x"}}}}));
    check(
        NODES,
        ("", "a"),
        filled(),
        plain(),
        r#"node "a" is not allowed to update configSource to a new non-nil configSource"#,
    );
    check(NODES, ("", "a"), filled(), filled(), "");
    check(NODES, ("", "a"), plain(), filled(), "");
    let tainted = || node(json!({"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}}));
    check(NODES, ("", ""), tainted(), None, "");
    check(NODES, ("", "a"), plain(), tainted(), r#"node "a" is not allowed to modify taints"#);
    check(NODES, ("", "a"), node(json!({"spec": {"taints": []}})), plain(), "");
    let owned = || node(json!({"metadata": {"ownerReferences": [{"name": "x"}]}}));
    check(NODES, ("", "a"), owned(), plain(), r#"node "a" is not allowed to modify ownerReferences"#);
    let allowed_labels = [
        "x",
        "example.com/x",
        "kubernetes.io/hostname",
        "a.kubelet.kubernetes.io/x",
        "node.kubernetes.io/x",
        "topology.kubernetes.io/zone",
    ];
    check(NODES, ("", ""), labels(&allowed_labels), None, "");
    check(NODES, ("", "a"), labels(&allowed_labels), plain(), "");
    let denied_labels = [
        "node-restriction.kubernetes.io/x",
        "a.node-restriction.kubernetes.io/x",
        "kubernetes.io/x",
        "node-role.kubernetes.io/x",
        "a.k8s.io/x",
        "k8s.io/x",
    ];
    for label in denied_labels {
        check(
            NODES,
            ("", ""),
            labels(&[label]),
            None,
            &format!("node \"a\" is not allowed to set the following labels: {label}"),
        );
        check(
            NODES,
            ("", "a"),
            labels(&[label]),
            plain(),
            &format!("is not allowed to modify labels: {label}"),
        );
        check(
            NODES,
            ("", "a"),
            plain(),
            labels(&[label]),
            &format!("is not allowed to modify labels: {label}"),
        );
        check(NODES, ("", "a"), labels(&[label]), labels(&[label]), "");
    }
}

#[test]
fn node_can_only_update_claim_status() {
    let claim = |capacity: &str, label: &str| {
        Some(
            json!({"metadata": {"name": "c", "labels": {"l": label}, "resourceVersion": capacity}, "spec": {"volumeName": "v"},
            "status": {"phase": "Bound", "capacity": {"storage": capacity}, "conditions": [], "allocatedResources": {"storage": capacity}}}),
        )
    };
    let status = ("", "persistentvolumeclaims/status");
    check(status, ("n", "c"), claim("2", "x"), claim("1", "x"), "");
    check(
        status,
        ("n", "c"),
        claim("2", "y"),
        claim("1", "x"),
        r#"node "a" is not allowed to update fields other than status.quantity and status.conditions: metadata changed"#,
    );
    check(
        ("", "persistentvolumeclaims"),
        ("n", "c"),
        claim("1", "x"),
        claim("1", "x"),
        "may only update PVC status",
    );
}

#[test]
fn node_can_only_request_tokens_for_its_pods() {
    let kind = ("", "serviceaccounts/token");
    let token = |pod: &str, uid: &str, audiences: &[&str]| {
        let reference = json!({"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid});
        Some(json!({"spec": {"boundObjectRef": reference, "audiences": audiences}}))
    };
    let check = |token: Option<Value>, reason: &str| check(kind, ("n", "account"), token, None, reason);
    for audience in ["vault", "i", "c", "m"] {
        check(token("mine", "mine", &[audience]), "");
    }
    check(Some(json!({"spec": {}})), "node requested token not bound to a pod");
    let node = json!({"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "ua"});
    check(Some(json!({"spec": {"boundObjectRef": node}})), "node requested token not bound to a pod");
    check(token("mine", "", &[]), "node requested token with a pod binding without a uid");
    check(token("none", "x", &[]), "pods \"none\" not found");
    check(
        token("mine", "x", &[]),
        "the UID in the bound object reference (x) does not match the UID in record. The object might have been deleted and then recreated",
    );
    check(
        token("other", "other", &["vault"]),
        "node requested token bound to a pod scheduled on a different node",
    );
    check(token("mine", "mine", &["vault", "i"]), "node may only request 0 or 1 audiences");
    check(
        token("mine", "mine", &["x"]),
        r#"audience "x" not found in pod spec volume, system:node:a is not authorized to request tokens for this audience"#,
    );
    check(
        token("lost", "lost", &["x"]),
        r#"error validating audience "x": persistentvolumeclaims "gone" not found"#,
    );
}

#[test]
fn node_can_only_write_leases_csi_nodes_and_slices_of_its_name() {
    let named = |name: &str| json!({"metadata": {"name": name}});
    let leases = ("coordination.k8s.io", "leases");
    let foreign = "can only access node lease with the same name as the requesting node";
    check(leases, (NODE_LEASE_NAMESPACE, ""), Some(named("a")), None, "");
    check(leases, (NODE_LEASE_NAMESPACE, ""), Some(named("b")), None, foreign);
    check(
        leases,
        (NODE_LEASE_NAMESPACE, ""),
        Some(json!({"metadata": {"generateName": "a"}})),
        None,
        foreign,
    );
    check(leases, (NODE_LEASE_NAMESPACE, "b"), Some(named("b")), Some(named("b")), foreign);
    check(leases, (NODE_LEASE_NAMESPACE, "b"), None, Some(named("b")), foreign);
    check(
        leases,
        ("n", ""),
        Some(named("a")),
        None,
        r#"can only access leases in the "kube-node-lease" system namespace"#,
    );
    let csi = ("storage.k8s.io", "csinodes");
    check(csi, ("", ""), Some(named("a")), None, "");
    check(
        csi,
        ("", ""),
        Some(named("b")),
        None,
        "can only access CSINode with the same name as the requesting node",
    );
    check(
        csi,
        ("", "b"),
        None,
        Some(named("b")),
        "can only access CSINode with the same name as the requesting node",
    );
    let slice = |node: &str| json!({"metadata": {"name": "s"}, "spec": {"nodeName": node}});
    let slices = ("resource.k8s.io", "resourceslices");
    check(slices, ("", ""), Some(slice("a")), None, "");
    check(
        slices,
        ("", ""),
        Some(slice("b")),
        None,
        "can only create ResourceSlice with the same NodeName as the requesting node",
    );
    check(
        slices,
        ("", ""),
        Some(json!({"spec": {"allNodes": true}})),
        None,
        "can only create ResourceSlice with the same NodeName as the requesting node",
    );
    check(
        slices,
        ("", "s"),
        None,
        Some(slice("b")),
        "can only delete ResourceSlice with the same NodeName as the requesting node",
    );
    check(slices, ("", "s"), None, Some(slice("a")), "");
}

#[test]
fn node_can_only_request_certificates_for_its_name() {
    use base64::Engine as _;
    let csr = |pem: &str, signer: &str| {
        let request = base64::engine::general_purpose::STANDARD.encode(pem);
        Some(json!({"metadata": {"name": "c"}, "spec": {"request": request, "signerName": signer}}))
    };
    let user_csr = include_str!("../tests/jane.csr");
    let kind = ("certificates.k8s.io", "certificatesigningrequests");
    let wrong = "can only create a node CSR with CN=system:node:a";
    check(kind, ("", ""), csr(user_csr, "kubernetes.io/kubelet-serving"), None, wrong);
    check(kind, ("", ""), csr(user_csr, "kubernetes.io/kube-apiserver-client-kubelet"), None, wrong);
    check(kind, ("", ""), csr(user_csr, "example.com/x"), None, "");
    check(
        kind,
        ("", ""),
        csr("x", "kubernetes.io/kubelet-serving"),
        None,
        "unable to parse csr: PEM block type must be CERTIFICATE REQUEST",
    );
}
