//! Two nodes with one object of every type each: neither may access the other's.

use std::sync::Arc;

use api::selector::FieldSelector;
use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::*;
use crate::access::{self, RequestInfo};
use crate::cache::View as _;
use crate::object::{Object, to_stored};
use crate::request::{Route, Target, route, verb};
use crate::tests::TestServer;

/// A pod on a node that references something of every kind in every possible way.
fn pod(name: &str, node: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "n"},
        "spec": {
            "nodeName": node,
            "serviceAccountName": format!("account-{node}"),
            "imagePullSecrets": [{"name": format!("pull-{node}")}],
            "initContainers": [{"name": "i", "envFrom": [
                {"secretRef": {"name": format!("env-from-{node}")}}, {"configMapRef": {"name": format!("env-from-{node}")}}]}],
            "containers": [{"name": "c", "env": [
                {"name": "s", "valueFrom": {"secretKeyRef": {"name": format!("env-{node}")}}},
                {"name": "c", "valueFrom": {"configMapKeyRef": {"name": format!("env-{node}")}}}]}],
            "ephemeralContainers": [{"name": "d", "env": [
                {"name": "s", "valueFrom": {"secretKeyRef": {"name": format!("debug-{node}")}}}]}],
            "volumes": [
                {"name": "v1", "secret": {"secretName": format!("secret-{node}")}},
                {"name": "v2", "configMap": {"name": format!("map-{node}")}},
                {"name": "v3", "projected": {"sources": [
                    {"secret": {"name": format!("projected-{node}")}}, {"configMap": {"name": format!("projected-{node}")}}]}},
                {"name": "v4", "persistentVolumeClaim": {"claimName": format!("claim-{node}")}},
                {"name": "v5", "ephemeral": {"volumeClaimTemplate": {}}},
                {"name": "v6", "csi": {"driver": "d", "nodePublishSecretRef": {"name": format!("csi-{node}")}}},
                {"name": "v7", "azureFile": {"secretName": format!("azure-{node}")}},
            ],
            "resourceClaims": [
                {"name": "r1", "resourceClaimName": format!("device-{node}")},
                {"name": "r2", "resourceClaimTemplateName": "t"},
                {"name": "r3", "resourceClaimTemplateName": "t"},
            ],
        },
        "status": {
            "resourceClaimStatuses": [{"name": "r2", "resourceClaimName": format!("made-{node}")}, {"name": "r3"}],
            "extendedResourceClaimStatus": {"resourceClaimName": format!("extended-{node}")},
        },
    })
}

fn volume(node: &str) -> Value {
    let secret =
        |name: &str, namespace: &str| json!({"name": format!("{name}-{node}"), "namespace": namespace});
    json!({
        "metadata": {"name": format!("volume-{node}")},
        "spec": {
            "claimRef": {"namespace": "n", "name": format!("claim-{node}")},
            "csi": {"driver": "d", "nodeStageSecretRef": secret("stage", "other"),
                "nodePublishSecretRef": secret("publish", "n"), "controllerPublishSecretRef": secret("control", "n")},
            "azureFile": {"secretName": format!("share-{node}")},
            "iscsi": {"secretRef": {"name": format!("chap-{node}")}},
        },
    })
}

/// With the index of its resource in `SOURCE_RESOURCES`.
fn node_objects(node: &str) -> Vec<(usize, Value)> {
    vec![
        (0, pod(&format!("pod-{node}"), node)),
        (1, volume(node)),
        (2, json!({"metadata": {"name": format!("attachment-{node}")}, "spec": {"nodeName": node}})),
        (3, json!({"metadata": {"name": format!("slice-{node}")}, "spec": {"nodeName": node}})),
    ]
}

fn apply(graph: &mut Graph, kind: usize, value: &Value, deleted: bool) {
    let (group, plural) = SOURCE_RESOURCES[kind];
    let row = api::resource_table::find_resource(group, "v1", plural).expect("a known kind");
    let metadata = api::json::JsonExt::at(value, "metadata");
    let text = |name| api::json::JsonExt::text(metadata, name);
    let target = Target { name: text("name").to_owned(), ..Target::collection(row, text("namespace")) };
    let object = Object::new(target.key().into(), to_stored(value.clone()), 1).expect("an object");
    graph.apply(kind, &object, deleted);
}

fn node_authorizer(graph: Graph) -> NodeAuthorizer {
    let cache = Cache::new();
    let fresh = NodeAuthorizer::new(&cache);
    let shards = SOURCE_RESOURCES.map(|(group, plural)| {
        cache.shard(&prefix(api::resource_table::find_resource(group, "v1", plural).expect("a known kind")))
    });
    NodeAuthorizer { graph: IncrementalView::with_loaded_view(shards, graph), ..fresh }
}

fn user(node: &str) -> User {
    User { name: format!("{NODE_USER_PREFIX}{node}"), groups: vec![NODES_GROUP.into()], ..User::default() }
}

/// The objects of one node (`{}` is its name), and the verbs that the node may use on them.
const OWN_OBJECTS: &[(&str, &str, &str, &str, &[&str])] = &[
    ("", "secrets", "n", "pull-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "env-from-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "env-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "debug-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "secret-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "projected-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "csi-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "azure-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "publish-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "share-{}", &["get", "list", "watch"]),
    ("", "secrets", "n", "chap-{}", &["get", "list", "watch"]),
    ("", "secrets", "other", "stage-{}", &["get", "list", "watch"]),
    ("", "configmaps", "n", "env-from-{}", &["get", "list", "watch"]),
    ("", "configmaps", "n", "env-{}", &["get", "list", "watch"]),
    ("", "configmaps", "n", "map-{}", &["get", "list", "watch"]),
    ("", "configmaps", "n", "projected-{}", &["get", "list", "watch"]),
    ("", "persistentvolumeclaims", "n", "claim-{}", &["get"]),
    ("", "persistentvolumeclaims", "n", "pod-{}-v5", &["get"]),
    ("", "persistentvolumeclaims/status", "n", "claim-{}", &["update", "patch"]),
    ("", "persistentvolumes", "", "volume-{}", &["get"]),
    ("", "serviceaccounts", "n", "account-{}", &["get"]),
    ("", "serviceaccounts/token", "n", "account-{}", &["create"]),
    ("", "pods", "n", "pod-{}", &["get", "list", "watch", "create", "delete"]),
    ("", "nodes", "", "{}", &["get", "list", "watch", "create", "update", "patch"]),
    ("resource.k8s.io", "resourceclaims", "n", "device-{}", &["get"]),
    ("resource.k8s.io", "resourceclaims", "n", "made-{}", &["get"]),
    ("resource.k8s.io", "resourceclaims", "n", "extended-{}", &["get"]),
    ("resource.k8s.io", "resourceslices", "", "slice-{}", &["get", "update", "patch", "delete", "create"]),
    ("storage.k8s.io", "volumeattachments", "", "attachment-{}", &["get"]),
    ("storage.k8s.io", "csinodes", "", "{}", &["get", "create", "update", "patch", "delete"]),
    (
        "coordination.k8s.io",
        "leases",
        "kube-node-lease",
        "{}",
        &["get", "create", "update", "patch", "delete"],
    ),
];

/// Requests that NodeRestriction decides, since only the object names its node.
const CHECKED_BY_ADMISSION: &[(&str, &str)] = &[
    ("pods", "create"),
    ("pods", "delete"),
    ("nodes", "create"),
    ("nodes", "update"),
    ("nodes", "patch"),
    ("resourceslices", "create"),
    ("csinodes", "create"),
    ("leases", "create"),
];

const VERBS: [&str; 8] = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"];

fn is_allowed(nodes: &NodeAuthorizer, node: &str, verb: &str, row: (&str, &str, &str, &str)) -> bool {
    let (group, what, namespace, name) = row;
    let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
    let attributes =
        Attributes::Resource { verb, group, resource, subresource, namespace, name, fields: None };
    nodes.authorize(&user(node), &attributes).expect("a node").is_ok()
}

#[test]
fn node_can_access_only_its_own_objects() {
    let mut graph = Graph::default();
    for node in ["a", "b"] {
        node_objects(node).iter().for_each(|(kind, value)| apply(&mut graph, *kind, value, false));
    }
    let nodes = node_authorizer(graph);
    let mut checked = 0;
    for (group, what, namespace, name, verbs) in OWN_OBJECTS {
        for (owner, other) in [("a", "b"), ("b", "a"), ("a", "c"), ("a", "")] {
            let name = name.replace("{}", owner);
            let row = (*group, *what, *namespace, name.as_str());
            for verb in VERBS {
                let own = is_allowed(&nodes, owner, verb, row);
                assert_eq!(own, verbs.contains(&verb), "{owner} {verb} {row:?}");
                let by_admission = CHECKED_BY_ADMISSION.contains(&(*what, verb)) && !other.is_empty();
                assert_eq!(is_allowed(&nodes, other, verb, row), by_admission, "{other} {verb} {row:?}");
                checked += 2;
            }
        }
    }
    assert!(checked > 1500, "{checked}");
}

#[test]
fn references_are_deleted_with_the_pod() {
    let mut graph = Graph::default();
    let all: Vec<_> = node_objects("a").into_iter().chain(node_objects("b")).collect();
    all.iter().for_each(|(kind, value)| apply(&mut graph, *kind, value, false));
    apply(&mut graph, 0, &pod("second-a", "a"), false);
    apply(&mut graph, 0, &pod("pod-a", "a"), true);
    let secret = VertexType::Referenced(ReferenceKind::Secret);
    assert!(graph.is_related(secret, "n", "env-a", "a"), "another pod still references it");
    assert!(!graph.is_related(VertexType::Pod, "n", "pod-a", "a"));
    apply(&mut graph, 0, &pod("second-a", "a"), true);
    assert!(!graph.is_related(secret, "n", "env-a", "a"));
    assert!(!graph.is_related(secret, "other", "stage-a", "a"), "no pod references the volume");
    assert!(graph.is_related(secret, "other", "stage-b", "b"));
    all.iter().for_each(|(kind, value)| apply(&mut graph, *kind, value, true));
    assert!(graph.is_empty());
}

#[test]
fn mirror_pods_grant_no_access() {
    let mut graph = Graph::default();
    let mut mirror = pod("p", "a");
    mirror["metadata"]["annotations"] = json!({references::MIRROR_ANNOTATION: "x"});
    apply(&mut graph, 0, &mirror, false);
    assert!(graph.is_related(VertexType::Pod, "n", "p", "a"));
    for kind in [
        ReferenceKind::ServiceAccount,
        ReferenceKind::Secret,
        ReferenceKind::ConfigMap,
        ReferenceKind::PersistentVolumeClaim,
        ReferenceKind::ResourceClaim,
    ] {
        for name in ["account-a", "secret-a", "map-a", "claim-a", "device-a"] {
            assert!(!graph.is_related(VertexType::Referenced(kind), "n", name, "a"), "{kind:?} {name}");
        }
    }
}

/// Pods whose text mentions a node without being on one, and pods that change while they are on
/// one.
#[test]
fn graph_follows_new_pod_references() {
    let mut graph = Graph::default();
    let mut pod = pod("p", "");
    pod["metadata"]["annotations"] = json!({"nodeName": "a", "x": "\"nodeName\":\"a\""});
    pod["spec"].as_object_mut().unwrap().remove("ephemeralContainers");
    apply(&mut graph, 0, &pod, false);
    assert!(graph.is_empty());
    pod["spec"]["nodeName"] = json!("a");
    apply(&mut graph, 0, &pod, false);
    assert!(graph.is_related(VertexType::Pod, "n", "p", "a"));
    let debug = json!({"name": "d", "env": [{"name": "e", "valueFrom": {"secretKeyRef": {"name": "late"}}}]});
    pod["spec"]["ephemeralContainers"] = json!([debug]);
    apply(&mut graph, 0, &pod, false);
    assert!(graph.is_related(VertexType::Referenced(ReferenceKind::Secret), "n", "late", "a"));
    pod["status"]["resourceClaimStatuses"] = json!([{"name": "r3", "resourceClaimName": "made"}]);
    apply(&mut graph, 0, &pod, false);
    assert!(graph.is_related(VertexType::Referenced(ReferenceKind::ResourceClaim), "n", "made", "a"));
    apply(&mut graph, 0, &pod, true);
    assert!(graph.is_empty());
}

/// In any order of changes, the graph equals the one built from the last states alone.
#[test]
fn graph_is_the_same_for_any_order_of_changes() {
    let mut seed = 7u64;
    let mut random = |n: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % n
    };
    let mut graph = Graph::default();
    let mut objects: std::collections::BTreeMap<(usize, String), Value> = Default::default();
    let letters = ["a", "b", "c"];
    for _ in 0..2_000 {
        let (node, name) = (letters[random(3) as usize], letters[random(3) as usize]);
        let (kind, value) = match random(4) {
            0 => (1, volume(node)),
            1 => node_objects(node).swap_remove(2),
            _ => (0, pod(name, node)),
        };
        let key = (kind, value["metadata"]["name"].to_string());
        // A pod does not move between nodes: it is deleted and created.
        if let Some(old) = objects.remove(&key) {
            apply(&mut graph, kind, &old, true);
        }
        if random(2) == 0 {
            apply(&mut graph, kind, &value, false);
            objects.insert(key, value);
        }
        if random(20) == 0 {
            let mut fresh = Graph::default();
            objects.iter().for_each(|((kind, _), value)| apply(&mut fresh, *kind, value, false));
            let (graph_says, fresh_says) = (related_objects(&graph), related_objects(&fresh));
            assert_eq!(graph_says, fresh_says);
        }
    }
    objects.iter().for_each(|((kind, _), value)| apply(&mut graph, *kind, value, true));
    assert!(graph.is_empty());
}

fn related_objects(graph: &Graph) -> Vec<String> {
    let mut yes = Vec::new();
    for (group, what, namespace, name, _) in OWN_OBJECTS {
        let vertex = match (*group, *what) {
            ("", "secrets") => VertexType::Referenced(ReferenceKind::Secret),
            ("", "configmaps") => VertexType::Referenced(ReferenceKind::ConfigMap),
            ("", "persistentvolumeclaims") => VertexType::Referenced(ReferenceKind::PersistentVolumeClaim),
            ("", "persistentvolumes") => VertexType::Volume,
            ("storage.k8s.io", "volumeattachments") => VertexType::Attachment,
            _ => continue,
        };
        for owner in ["a", "b", "c"] {
            let name = name.replace("{}", owner);
            let related =
                ["a", "b", "c"].into_iter().filter(|node| graph.is_related(vertex, namespace, &name, node));
            yes.extend(related.map(|node| format!("{what} {name} {node}")));
        }
    }
    yes
}

/// `verb resource[/sub][.group] [namespace:name] [selector]` by node `a`.
#[track_caller]
fn check(request: &str, expected: Expect) {
    let mut graph = Graph::default();
    node_objects("a").iter().for_each(|(kind, value)| apply(&mut graph, *kind, value, false));
    let words: Vec<&str> = request.split_whitespace().collect();
    let (what, group) = words[1].split_once('.').unwrap_or((words[1], ""));
    let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
    let (namespace, name) = words.get(2).and_then(|key| key.split_once(':')).unwrap_or(("", ""));
    let fields = FieldSelector::parse(words.get(3).unwrap_or(&"")).expect("a selector");
    let fields = Some(&fields);
    let attributes =
        Attributes::Resource { verb: words[0], group, resource, subresource, namespace, name, fields };
    let answer = node_authorizer(graph).authorize(&user("a"), &attributes).expect("a node");
    expected.assert_eq(
        &answer.map_or_else(|reason| format!("no {reason}").trim().to_owned(), |()| "yes".to_owned()),
    );
}

#[test]
fn reasons_match_upstream() {
    check("get secrets n:secret-b", expect!["no no relationship found between node 'a' and this object"]);
    check("list secrets n:", expect!["no No Object name found"]);
    check("list secrets", expect!["no can only read namespaced object of this type"]);
    check("delete secrets n:secret-a", expect!["no can only read resources of this type"]);
    check("get secrets/x n:secret-a", expect!["no cannot read subresource"]);
    check("list persistentvolumes", expect!["no can only get individual resources of this type"]);
    check("get persistentvolumes/status :volume-a", expect!["no cannot get subresource"]);
    check("get persistentvolumeclaims/status n:claim-a", expect!["no can only get/update/patch this type"]);
    check("list serviceaccounts n:", expect!["no can only create tokens for individual service accounts"]);
    check(
        "create serviceaccounts n:account-a",
        expect!["no can only create token subresource of serviceaccount"],
    );
    check(
        "list leases.coordination.k8s.io kube-node-lease:",
        expect!["no can only get, create, update, patch, or delete a node lease"],
    );
    check(
        "get leases.coordination.k8s.io kube-system:a",
        expect![[r#"no can only access leases in the "kube-node-lease" system namespace"#]],
    );
    check(
        "get leases.coordination.k8s.io kube-node-lease:b",
        expect!["no can only access node lease with the same name as the requesting node"],
    );
    check(
        "list csinodes.storage.k8s.io",
        expect!["no can only get, create, update, patch, or delete a CSINode"],
    );
    check(
        "get csinodes.storage.k8s.io :b",
        expect!["no can only access CSINode with the same name as the requesting node"],
    );
    check("get csinodes/x.storage.k8s.io :a", expect!["no cannot authorize CSINode subresources"]);
    check("list nodes", expect!["no node 'a' cannot read all nodes, only its own Node object"]);
    check("get nodes :b", expect!["no node 'a' cannot read 'b', only its own Node object"]);
    check("delete nodes :a", expect!["no"]);
    check("list pods", expect!["no can only list/watch pods with spec.nodeName field selector"]);
    check(
        "list pods : spec.nodeName=b",
        expect!["no can only list/watch pods with spec.nodeName field selector"],
    );
    check(
        "list pods : spec.nodeName!=a",
        expect!["no can only list/watch pods with spec.nodeName field selector"],
    );
    check("list pods : spec.nodeName=a", expect!["yes"]);
    check("watch pods n: status.phase=Running,spec.nodeName=a", expect!["yes"]);
    check("update pods n:pod-a", expect!["no"]);
    check("create pods/exec n:pod-a", expect!["no"]);
    check("create pods/binding n:pod-a", expect!["no"]);
    check("patch pods/status n:pod-a", expect!["yes"]);
    check("create pods/eviction n:pod-a", expect!["yes"]);
    check("list resourceslices.resource.k8s.io : spec.nodeName=a", expect!["yes"]);
    check(
        "deletecollection resourceslices.resource.k8s.io",
        expect!["no can only list/watch/deletecollection resourceslices with nodeName field selector"],
    );
    check(
        "bind resourceslices.resource.k8s.io",
        expect![
            "no only the following verbs are allowed for a ResourceSlice: get, watch, list, create, update, patch, delete, deletecollection"
        ],
    );
    check(
        "get resourceslices/x.resource.k8s.io :slice-a",
        expect!["no cannot authorize ResourceSlice subresources"],
    );
    // Permissions that all nodes share.
    check("list services", expect!["yes"]);
    check("create events n:", expect!["yes"]);
    check("create certificatesigningrequests.certificates.k8s.io", expect!["yes"]);
    check("update certificatesigningrequests/approval.certificates.k8s.io :x", expect!["no"]);
    check("list deployments.apps", expect!["no"]);
    check("get namespaces n:n", expect!["no"]);
}

#[test]
fn node_users_need_prefix_and_group() {
    let with = |name: &str, groups: &[&str]| User {
        name: name.into(),
        groups: groups.iter().map(|group| (*group).to_owned()).collect(),
        ..User::default()
    };
    assert_eq!(node_name_of(&with("system:node:a", &["x", NODES_GROUP])), Some("a"));
    assert_eq!(node_name_of(&with("system:node:", &[NODES_GROUP])), Some(""));
    assert_eq!(node_name_of(&with("system:node:a", &[])), None);
    assert_eq!(node_name_of(&with("a", &[NODES_GROUP])), None);
    let decision = node_authorizer(Graph::default())
        .authorize(&with("system:node:", &[NODES_GROUP]), &Attributes::Path { verb: "get", path: "/" });
    assert_eq!(decision, Some(Err("unknown node for user \"system:node:\"".into())));
}

async fn authorize_request(test_server: &TestServer, node: &str, request: &str) -> String {
    let (method, path) = request.split_once(' ').expect("a method and a path");
    let Ok(Route::Resource(target)) = route(&test_server.server.registry, path) else {
        panic!("{path} is not a resource path")
    };
    let request_info = RequestInfo::Resource(
        verb(&method.parse().expect("a method"), &target, false),
        &target,
        &target.name,
        None,
    );
    let answer = access::authorize(&test_server.server.rbac, &user(node), &request_info).await;
    answer.map_or_else(|status| status.message, |()| "may".to_owned())
}

/// End to end: authorization follows the objects in the store.
#[tokio::test]
async fn authorization_follows_stored_objects() {
    let test_server = TestServer::start().await;
    let secret = "GET /api/v1/namespaces/default/secrets/s";
    let pod = json!({"metadata": {"name": "p"}, "spec": {
        "containers": [{"name": "c", "image": "i"}], "volumes": [{"name": "v", "secret": {"secretName": "s"}}]}});
    test_server.send("POST /api/v1/namespaces/default/pods", pod.clone()).await;
    let forbidden = r#"secrets "s" is forbidden: User "system:node:a" cannot get resource "secrets" in API group "" in the namespace "default": no relationship found between node 'a' and this object"#;
    assert_eq!(authorize_request(&test_server, "a", secret).await, forbidden);
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "a"}});
    let (code, _) = test_server.send("POST /api/v1/namespaces/default/pods/p/binding", binding).await;
    assert_eq!(code, 201);
    test_server
        .server
        .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
        .await
        .expect("a fresh cache");
    assert_eq!(authorize_request(&test_server, "a", secret).await, "may");
    assert_eq!(
        authorize_request(&test_server, "b", secret).await,
        forbidden.replace("node:a", "node:b").replace("'a'", "'b'")
    );
    // As if so many events had expired that the graph must be rebuilt.
    let pods = api::resource_table::find_resource("", "v1", "pods").expect("pods are in the table");
    test_server
        .server
        .shard(pods)
        .expire_events(std::time::Duration::ZERO, crate::cache::EventRetention::default());
    let by_admission = json!({"metadata": {"name": "q"}, "spec": {"nodeName": "b", "containers": [{"name": "c", "image": "i"}],
        "volumes": [{"name": "v", "configMap": {"name": "m"}}]}});
    test_server.send("POST /api/v1/namespaces/default/pods", by_admission).await;
    test_server
        .server
        .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
        .await
        .expect("a fresh cache");
    test_server
        .server
        .shard(pods)
        .expire_events(std::time::Duration::ZERO, crate::cache::EventRetention::default());
    assert_eq!(
        authorize_request(&test_server, "b", "GET /api/v1/namespaces/default/configmaps/m").await,
        "may"
    );
    assert_eq!(authorize_request(&test_server, "a", secret).await, "may");
    test_server.send("DELETE /api/v1/namespaces/default/pods/p?gracePeriodSeconds=0", json!({})).await;
    test_server.send("DELETE /api/v1/namespaces/default/pods/p", json!({"gracePeriodSeconds": 0})).await;
    test_server
        .server
        .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
        .await
        .expect("a fresh cache");
    assert_eq!(authorize_request(&test_server, "a", secret).await, forbidden);
}

#[tokio::test]
async fn access_reviews_use_node_authorizer() {
    let test_server = TestServer::start().await;
    let review = |selector: Value| {
        let attributes = json!({"verb": "list", "resource": "pods", "fieldSelector": selector});
        json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "spec": {"user": "system:node:a", "groups": [NODES_GROUP], "resourceAttributes": attributes}})
    };
    let path = "POST /apis/authorization.k8s.io/v1/subjectaccessreviews";
    for (selector, allowed) in [
        (json!({"requirements": [{"key": "spec.nodeName", "operator": "In", "values": ["a"]}]}), true),
        (json!({"requirements": [{"key": "spec.nodeName", "operator": "NotIn", "values": ["a"]}]}), false),
        (json!({"rawSelector": "spec.nodeName=b"}), false),
    ] {
        let (_, answer) = test_server.send(path, review(selector.clone())).await;
        assert_eq!(answer["status"]["allowed"], json!(allowed), "{selector}");
    }
    let rules = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": "default"}});
    let path = "POST /apis/authorization.k8s.io/v1/selfsubjectrulesreviews";
    let (_, answer) = test_server.call_as(user("a"), path, "application/json", &rules.to_string()).await;
    assert_eq!(answer["status"]["incomplete"], json!(true));
    assert_eq!(
        answer["status"]["evaluationError"],
        json!("node authorizer does not support user rule resolution")
    );
}

#[test]
fn node_authorizer_is_send_and_sync() {
    fn shared<T: Send + Sync>(_: Arc<T>) {}
    shared(Arc::new(node_authorizer(Graph::default())));
}
