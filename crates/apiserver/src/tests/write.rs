use api::json::JsonExt as _;
use serde_json::{Value, json};

use super::{TestServer, summary};

const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";
const PODS: &str = "/api/v1/namespaces/default/pods";
const MERGE_PATCH: &str = "application/merge-patch+json";
const APPLY_PATCH: &str = "application/apply-patch+yaml";

fn map(name: &str) -> Value {
    json!({"metadata": {"name": name}, "data": {"a": "1"}})
}

fn pod(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}})
}

#[tokio::test]
async fn unchanged_write_does_not_change_resource_version() {
    let test_server = TestServer::start().await;
    let first = test_server.send(&format!("POST {CONFIG_MAPS}"), map("a")).await.1;
    let version = first.at("metadata").at("resourceVersion");
    for (content_type, request, body) in [
        ("application/json", format!("PUT {CONFIG_MAPS}/a"), first.to_string()),
        (MERGE_PATCH, format!("PATCH {CONFIG_MAPS}/a"), json!({"data": {"a": "1"}}).to_string()),
        (MERGE_PATCH, format!("PATCH {CONFIG_MAPS}/a"), "{}".to_owned()),
    ] {
        let again = test_server.call(&request, content_type, &body).await;
        assert_eq!(
            (again.0, again.1.at("metadata").at("resourceVersion")),
            (200, version),
            "{request} {body}"
        );
    }
    let config = r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"s"},"data":{"a":"1"}}"#;
    let apply = format!("PATCH {CONFIG_MAPS}/s?fieldManager=me");
    let created = test_server.call(&apply, APPLY_PATCH, config).await;
    let again = test_server.call(&apply, APPLY_PATCH, config).await;
    assert_eq!((created.0, again.0), (201, 200));
    assert_eq!(created.1, again.1);
}

#[tokio::test]
async fn creates_objects() {
    let test_server = TestServer::start().await;
    #[track_caller]
    fn check(answer: (u16, Value), expected: &str) {
        assert_eq!(summary(&answer, &["metadata.name"]), expected);
    }
    let post = format!("POST {CONFIG_MAPS}");
    check(test_server.send(&post, map("a")).await, "201 a");
    check(test_server.send(&post, map("a")).await, "409 configmaps \"a\" already exists");
    check(
        test_server.send(&format!("{post}?dryRun=All"), map("a")).await,
        "409 configmaps \"a\" already exists",
    );
    check(test_server.send(&format!("{post}?dryRun=All"), map("b")).await, "201 b");
    check(test_server.call(&format!("GET {CONFIG_MAPS}/b"), "", "").await, "404 configmaps \"b\" not found");
    let versioned = json!({"metadata": {"name": "v", "resourceVersion": "5"}});
    check(
        test_server.send(&post, versioned).await,
        "500 resourceVersion should not be set on objects to be created",
    );
    let other_namespace = json!({"metadata": {"name": "x", "namespace": "kube-system"}});
    check(
        test_server.send(&post, other_namespace).await,
        "400 the namespace of the provided object does not match the namespace sent on the request",
    );
    let with_namespace = json!({"metadata": {"name": "n1", "namespace": "default"}});
    check(test_server.send("POST /api/v1/namespaces", with_namespace).await, "201 n1");
    let generated = test_server.send(&post, json!({"metadata": {"generateName": "g-"}})).await;
    let name = generated.1.at("metadata").text("name");
    assert!(generated.0 == 201 && name.starts_with("g-") && name.len() == 7, "{name}");
}

#[tokio::test]
async fn updates_objects() {
    let test_server = TestServer::start().await;
    let one = test_server.send(&format!("POST {CONFIG_MAPS}"), map("a")).await.1;
    let put = format!("PUT {CONFIG_MAPS}/a");
    #[track_caller]
    fn check(answer: (u16, Value), expected: &str) {
        assert_eq!(summary(&answer, &["data"]), expected);
    }
    let mut changed = one.clone();
    changed["data"] = json!({"a": "2"});
    check(test_server.send(&put, changed.clone()).await, r#"200 {"a":"2"}"#);
    let modified = "409 Operation cannot be fulfilled on configmaps \"a\": the object has been modified; please apply your changes to the latest version and try again";
    check(test_server.send(&put, changed.clone()).await, modified);
    changed["metadata"]["resourceVersion"] = json!("");
    changed["data"] = json!({"a": "3"});
    check(test_server.send(&put, changed.clone()).await, r#"200 {"a":"3"}"#);
    let uid = one.at("metadata").text("uid").to_owned();
    changed["metadata"]["uid"] = json!("other");
    check(
        test_server.send(&put, changed).await,
        &format!(
            "409 Operation cannot be fulfilled on configmaps \"a\": StorageError: invalid object, Code: 4, Key: /registry/configmaps/default/a, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: other, UID in object meta: {uid}"
        ),
    );
    check(
        test_server.send(&format!("PUT {CONFIG_MAPS}/none"), map("none")).await,
        "404 configmaps \"none\" not found",
    );
    check(
        test_server.send(&put, map("b")).await,
        "400 the name of the object (b) does not match the name on the URL (a)",
    );
    check(
        test_server.send(&put, json!({"data": {}})).await,
        "400 the name of the object (a based on URL) was undeterminable: name must be provided",
    );
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let lease = json!({"metadata": {"name": "l"}, "spec": {"holderIdentity": "x"}});
    let created = test_server.send(&format!("PUT {leases}/l"), lease.clone()).await;
    assert_eq!(created.0, 201);
    check(
        test_server.send(&format!("PUT {leases}/l"), lease).await,
        "422 leases.coordination.k8s.io \"l\" is invalid: metadata.resourceVersion: Invalid value: 0: must be specified for an update",
    );
    let patched = test_server
        .call(&format!("PATCH {leases}/l"), MERGE_PATCH, r#"{"spec":{"holderIdentity":"y"}}"#)
        .await;
    assert_eq!(summary(&patched, &["spec.holderIdentity"]), "200 y");
}

#[tokio::test]
async fn status_update_changes_only_allowed_fields() {
    let test_server = TestServer::start().await;
    let pods = test_server.send(&format!("POST {PODS}"), pod("p")).await.1;
    let mut sent = pods.clone();
    sent["spec"]["containers"][0]["image"] = json!("other");
    sent["metadata"]["labels"] = json!({"l": "1"});
    sent["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "u"}]);
    sent["status"] = json!({"phase": "Running"});
    let answer = test_server.send(&format!("PUT {PODS}/p/status"), sent).await;
    assert_eq!(
        summary(
            &answer,
            &[
                "status.phase",
                "status.qosClass",
                "spec.containers",
                "metadata.labels",
                "metadata.ownerReferences",
                "metadata.generation"
            ]
        ),
        format!("200 Running BestEffort {} {{\"l\":\"1\"}} null 1", pods.path("spec.containers")),
    );
    let main = json!({"metadata": {"labels": {"l": "2"}}, "status": {"phase": "Failed"}}).to_string();
    let answer = test_server.call(&format!("PATCH {PODS}/p"), MERGE_PATCH, &main).await;
    assert_eq!(
        summary(&answer, &["status.phase", "metadata.labels.l", "metadata.generation"]),
        "200 Running 2 1"
    );
}

#[tokio::test]
async fn rejects_invalid_patches() {
    let test_server = TestServer::start().await;
    test_server.send(&format!("POST {CONFIG_MAPS}"), map("a")).await;
    let patch = format!("PATCH {CONFIG_MAPS}/a");
    for (content_type, query, body, expected) in [
        ("application/json-patch+json", "", "[{", "400 error decoding patch: unexpected end of JSON input"),
        (
            "application/json-patch+json",
            "",
            "{}",
            "400 error decoding patch: json: cannot unmarshal object into Go value of type []handlers.jsonPatchOp",
        ),
        (
            "application/strategic-merge-patch+json",
            "",
            "[]",
            "400 json: cannot unmarshal array into Go value of type map[string]interface {}",
        ),
        (
            "application/json-patch+json",
            "",
            r#"[{"op":"remove","path":"/data/b"}]"#,
            "422 the server rejected our request due to an error in our request",
        ),
        (
            "application/strategic-merge-patch+json",
            "",
            r#"{"data":{"a":5}}"#,
            "422  \"\" is invalid: patch: Invalid value: \"map[data:map[a:5]]\": unrecognized type: string",
        ),
        (
            MERGE_PATCH,
            "?force=true",
            "{}",
            "422 PatchOptions.meta.k8s.io \"\" is invalid: force: Forbidden: may not be specified for non-apply patch",
        ),
        (
            MERGE_PATCH,
            "?fieldManager=a%E2%80%8Bb",
            "{}",
            "422 PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Invalid value: \"a\\u200bb\": invalid character U+200B (at position 1)",
        ),
        (
            MERGE_PATCH,
            "",
            r#"{"metadata":{"resourceVersion":"1"}}"#,
            "409 Operation cannot be fulfilled on configmaps \"a\": the object has been modified; please apply your changes to the latest version and try again",
        ),
        (
            APPLY_PATCH,
            "?fieldManager=me",
            r#"{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}}"#,
            "400 invalid object type: /v1, Kind=Secret",
        ),
        (
            APPLY_PATCH,
            "",
            "{}",
            "422 PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch",
        ),
    ] {
        let answer = test_server.call(&format!("{patch}{query}"), content_type, body).await;
        assert_eq!(summary(&answer, &[]), expected, "{body}");
    }
}

#[tokio::test]
async fn deletes_objects() {
    let test_server = TestServer::start().await;
    test_server.send(&format!("POST {CONFIG_MAPS}"), map("a")).await;
    let delete = format!("DELETE {CONFIG_MAPS}/a");
    let wrong = test_server.send(&delete, json!({"preconditions": {"uid": "x"}})).await;
    assert!(
        wrong.1.text("message").starts_with(
            "Operation cannot be fulfilled on ConfigMap \"a\": the UID in the precondition (x) does not match the UID in record ("
        ),
        "{}",
        wrong.1
    );
    let dry = test_server.call(&format!("{delete}?dryRun=All"), "", "").await;
    assert_eq!(summary(&dry, &["status", "details.kind", "details.name"]), "200 Success configmaps a");
    assert_eq!(test_server.call(&delete, "", "").await.0, 200);
    assert_eq!(summary(&test_server.call(&delete, "", "").await, &[]), "404 configmaps \"a\" not found");

    test_server.send(&format!("POST {PODS}"), pod("p")).await;
    let deleted = test_server.call(&format!("DELETE {PODS}/p"), "", "").await;
    assert_eq!(summary(&deleted, &["kind", "metadata.deletionGracePeriodSeconds"]), "200 Pod 0");
    let with_finalizer = json!({"metadata": {"name": "h", "finalizers": ["example.com/x"]}});
    test_server.send(&format!("POST {CONFIG_MAPS}"), with_finalizer).await;
    let terminating =
        test_server.send(&format!("DELETE {CONFIG_MAPS}/h"), json!({"orphanDependents": false})).await;
    assert_eq!(summary(&terminating, &["kind", "metadata.finalizers"]), "202 ConfigMap [\"example.com/x\"]");
    let released = test_server
        .call(&format!("PATCH {CONFIG_MAPS}/h"), MERGE_PATCH, r#"{"metadata":{"finalizers":null}}"#)
        .await;
    assert_eq!(released.0, 200);
    assert_eq!(test_server.get(&format!("{CONFIG_MAPS}/h")).await.int("code"), Some(404));
}

#[tokio::test]
async fn managed_fields_contain_only_sent_fields() {
    let test_server = TestServer::start().await;
    let service = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}});
    let created = test_server.send("POST /api/v1/namespaces/default/services", service).await.1;
    let owned = &created.at("metadata").items("managedFields")[0];
    assert!(owned.path("fieldsV1.f:spec.f:ports").is_object(), "{owned}");
    assert!(owned.path("fieldsV1.f:spec.f:clusterIP").is_null(), "{owned}");
    assert!(!created.at("spec").text("clusterIP").is_empty());
}

/// Objects may nest as deep as they can be read back, including the managedFields entry of their
/// deepest field.
#[tokio::test]
async fn reads_back_objects_of_any_accepted_depth() {
    let test_server = TestServer::start().await;
    let definitions = crate::custom::Definitions::load(&test_server.server);
    tokio::spawn(crate::custom::run_controller(
        test_server.server.clone(),
        definitions,
        test_server.stop.subscribe(),
    ));
    let definition = json!({
        "metadata": {"name": "things.x.io"},
        "spec": {
            "group": "x.io", "scope": "Namespaced", "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true,
            }}}],
        },
    });
    let created =
        test_server.send("POST /apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition).await;
    assert_eq!(created.0, 201, "{}", created.1);
    let served = async {
        while test_server.server.registry.find("x.io", "v1", "things").is_none() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), served).await.expect("the kind is served");
    let collection = "/apis/x.io/v1/namespaces/default/things";
    let thing = |name: &str, depth: usize| {
        let spec = format!("{}1{}", r#"{"a":"#.repeat(depth - 1), "}".repeat(depth - 1));
        format!(r#"{{"apiVersion":"x.io/v1","kind":"Thing","metadata":{{"name":"{name}"}},"spec":{spec}}}"#)
    };
    let mut accepted = Vec::new();
    for depth in 110..140 {
        let name = format!("d{depth}");
        let (code, answer) =
            test_server.call(&format!("POST {collection}"), "application/json", &thing(&name, depth)).await;
        if code != 201 {
            assert_eq!(
                (code, answer["message"].as_str()),
                (400, Some("Thing in version \"v1\" cannot be handled as a Thing: exceeded max depth")),
                "{depth}"
            );
            continue;
        }
        accepted.push(depth);
        let path = format!("{collection}/{name}");
        let read = test_server.get(&path).await;
        assert_eq!(read["metadata"]["name"], name.as_str(), "{depth}");
        assert_eq!(test_server.send(&format!("PUT {path}"), read).await.0, 200, "{depth}");
        let label = json!({"metadata": {"labels": {"a": "b"}}}).to_string();
        assert_eq!(
            test_server.call(&format!("PATCH {path}"), "application/merge-patch+json", &label).await.0,
            200
        );
    }
    assert_eq!(accepted, (110..=122).collect::<Vec<_>>());
    let nested = json!([{"op": "copy", "from": "/spec/a", "path": "/spec/a/a/b"}]).to_string();
    let patch = format!("PATCH {collection}/d122");
    assert_eq!(test_server.call(&patch, "application/json-patch+json", &nested).await.0, 400);
}
