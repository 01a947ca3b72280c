use proptest::prelude::*;
use serde_json::{Value, json};

use super::created::ExcludedFields;
use super::field_set::Set;
use super::typed::Typed;
use super::{ApplyError, Cause, FieldManager, apply, keep_times, track};
use crate::json_patch::tests::any_json;
use crate::test_schema::{table, thing};

fn writer<'a>(manager: &'a str, now: &'a str) -> FieldManager<'a> {
    FieldManager { manager, api_version: "v1", subresource: "", now, ignore: &[&["status"]] }
}

/// A `Thing` with these fields.
fn named(fields: Value) -> Value {
    let mut object =
        json!({"apiVersion": "v1", "kind": "Thing", "metadata": {"name": "t", "namespace": "ns"}});
    crate::merge_patch(&mut object, &fields);
    object
}

fn applied(live: Option<&Value>, manager: &str, config: Value) -> Result<Value, ApplyError> {
    apply(table(), thing(), live, &named(config), &writer(manager, "2026-01-01T00:00:00Z"), false)
}

fn updated(live: Option<&Value>, manager: &str, now: &str, object: Value) -> Value {
    let mut object = object;
    track(table(), thing(), live, &mut object, &writer(manager, now));
    object
}

/// Each entry as `manager operation set`.
fn owners(object: &Value) -> Vec<String> {
    let entries = object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    let text = |entry: &Value, name: &str| entry[name].as_str().unwrap_or("-").to_owned();
    entries
        .iter()
        .map(|entry| format!("{} {} {}", text(entry, "manager"), text(entry, "operation"), entry["fieldsV1"]))
        .collect()
}

#[track_caller]
fn conflict(result: Result<Value, ApplyError>) -> (String, Vec<Cause>) {
    match result {
        Err(ApplyError::Conflict(conflicts)) => (conflicts.to_string(), conflicts.causes().collect()),
        other => panic!("expected a conflict, got {other:?}"),
    }
}

#[test]
fn managers_share_and_conflict_over_map_fields() {
    let one = applied(None, "one", json!({"data": {"a": "1"}})).unwrap();
    assert_eq!(owners(&one), [r#"one Apply {"f:data":{"f:a":{}}}"#]);

    let (text, causes) = conflict(applied(Some(&one), "two", json!({"data": {"a": "2", "b": "2"}})));
    assert_eq!(text, r#"Apply failed with 1 conflict: conflict with "one": .data.a"#);
    assert_eq!(causes, [Cause { message: r#"conflict with "one""#.into(), field: ".data.a".into() }]);

    // Applying the same value is not a conflict; both managers own it.
    let both = applied(Some(&one), "two", json!({"data": {"a": "1", "b": "2"}})).unwrap();
    assert_eq!(
        owners(&both),
        [r#"one Apply {"f:data":{"f:a":{}}}"#, r#"two Apply {"f:data":{"f:a":{},"f:b":{}}}"#,]
    );

    let w = writer("two", "2026-01-01T00:00:00Z");
    let config = named(json!({"data": {"a": "2", "b": "2"}}));
    let forced = apply(table(), thing(), Some(&one), &config, &w, true).unwrap();
    assert_eq!(owners(&forced), [r#"two Apply {"f:data":{"f:a":{},"f:b":{}}}"#]);
    assert_eq!(forced["data"], json!({"a": "2", "b": "2"}));

    // Leaving a field out removes it, unless another manager owns it.
    let less = applied(Some(&forced), "two", json!({"data": {"b": "2"}})).unwrap();
    assert_eq!(less["data"], json!({"b": "2"}));
    let less = applied(Some(&both), "two", json!({"data": {"b": "2"}})).unwrap();
    assert_eq!(less["data"], json!({"a": "1", "b": "2"}));
    assert_eq!(owners(&less), [r#"one Apply {"f:data":{"f:a":{}}}"#, r#"two Apply {"f:data":{"f:b":{}}}"#]);
    let none = applied(Some(&less), "two", json!({})).unwrap();
    assert_eq!(none["data"], json!({"a": "1"}));
    assert_eq!(owners(&none), [r#"one Apply {"f:data":{"f:a":{}}}"#]);
}

#[test]
fn merges_lists_by_key_with_defaults() {
    let one = applied(None, "one", json!({"spec": {"ports": [{"name": "x", "port": 80}]}})).unwrap();
    assert_eq!(
        owners(&one),
        [
            r#"one Apply {"f:spec":{"f:ports":{"k:{\"port\":80,\"protocol\":\"TCP\"}":{".":{},"f:name":{},"f:port":{}}}}}"#
        ]
    );
    let stored = named(json!({
        "metadata": {"managedFields": one["metadata"]["managedFields"]},
        "spec": {"ports": [{"name": "x", "port": 80, "protocol": "TCP"}]},
    }));
    let two = applied(
        Some(&stored),
        "two",
        json!({"spec": {"ports": [{"port": 80, "protocol": "UDP"}, {"port": 81}]}}),
    )
    .unwrap();
    assert_eq!(
        two["spec"]["ports"],
        json!([
            {"name": "x", "port": 80, "protocol": "TCP"}, {"port": 80, "protocol": "UDP"}, {"port": 81},
        ])
    );
    let result = applied(Some(&two), "one", json!({})).unwrap();
    assert_eq!(result["spec"]["ports"], json!([{"port": 80, "protocol": "UDP"}, {"port": 81}]));

    let (text, _) =
        conflict(applied(Some(&stored), "two", json!({"spec": {"ports": [{"name": "y", "port": 80}]}})));
    assert_eq!(
        text,
        r#"Apply failed with 1 conflict: conflict with "one": .spec.ports[port=80,protocol="TCP"].name"#
    );
}

#[test]
fn applies_sets_and_atomic_values() {
    let one = applied(
        None,
        "one",
        json!({
            "metadata": {"finalizers": ["a"]},
            "spec": {"args": ["x"], "selector": {"k": "v"}, "raw": {"any": 1}},
        }),
    )
    .unwrap();
    assert_eq!(
        owners(&one),
        [
            r#"one Apply {"f:metadata":{"f:finalizers":{"v:\"a\"":{}}},"f:spec":{"f:args":{},"f:raw":{},"f:selector":{}}}"#
        ]
    );
    let two = applied(Some(&one), "two", json!({"metadata": {"finalizers": ["b", "a"]}})).unwrap();
    assert_eq!(two["metadata"]["finalizers"], json!(["b", "a"]));
    let one_left = applied(Some(&two), "one", json!({})).unwrap();
    assert_eq!(one_left["metadata"]["finalizers"], json!(["b", "a"]));
    assert!(one_left["spec"].is_null());
    let (text, causes) =
        conflict(applied(Some(&one), "two", json!({"spec": {"args": ["y"], "selector": {"k": "w"}}})));
    assert_eq!(
        text,
        "Apply failed with 2 conflicts: conflicts with \"one\":\n- .spec.args\n- .spec.selector"
    );
    assert_eq!(causes.len(), 2);
}

#[test]
fn merged_list_keeps_live_and_applied_order() {
    #[track_caller]
    fn check(live: &[&str], config: &[&str], want: &[&str]) {
        let items = |names: &[&str]| -> Value { names.iter().map(|name| json!({"name": name})).collect() };
        let live = named(json!({"spec": {"containers": items(live)}}));
        let result = applied(Some(&live), "one", json!({"spec": {"containers": items(config)}})).unwrap();
        assert_eq!(result["spec"]["containers"], items(want));
    }
    check(&["a", "b"], &["b", "a"], &["b", "a"]);
    check(&["a", "b", "c"], &["c", "a"], &["b", "c", "a"]);
    check(&["a", "b", "c"], &["b"], &["a", "b", "c"]);
    check(&["a"], &["b", "a"], &["b", "a"]);
    check(&["a"], &["b"], &["a", "b"]);
    check(&["a", "s", "b"], &["a", "n", "b"], &["a", "s", "n", "b"]);
}

#[test]
fn apply_conflicts_with_update_managers() {
    let live =
        updated(None, "kubectl-create", "2025-01-01T00:00:00Z", named(json!({"spec": {"replicas": 1}})));
    assert_eq!(owners(&live), [r#"kubectl-create Update {"f:spec":{"f:replicas":{}}}"#]);
    let (text, _) = conflict(applied(Some(&live), "one", json!({"spec": {"replicas": 2}})));
    assert_eq!(
        text,
        r#"Apply failed with 1 conflict: conflict with "kubectl-create" using v1: .spec.replicas"#
    );

    let mut scaled = live.clone();
    scaled["spec"]["replicas"] = json!(3);
    let scale_manager = FieldManager { subresource: "scale", ..writer("hpa", "2025-01-01T00:00:01Z") };
    track(table(), thing(), Some(&live), &mut scaled, &scale_manager);
    let (text, _) = conflict(applied(Some(&scaled), "one", json!({"spec": {"replicas": 2}})));
    assert_eq!(
        text,
        r#"Apply failed with 1 conflict: conflict with "hpa" with subresource "scale" using v1: .spec.replicas"#
    );
}

#[test]
fn adds_before_first_apply_manager_for_untracked_objects() {
    let live = named(json!({"metadata": {"uid": "u"}, "data": {"a": "1"}}));
    let (text, _) = conflict(applied(Some(&live), "one", json!({"data": {"a": "2"}})));
    assert_eq!(text, r#"Apply failed with 1 conflict: conflict with "before-first-apply" using v1: .data.a"#);
    let taken = applied(Some(&live), "one", json!({"data": {"b": "2"}})).unwrap();
    assert_eq!(
        owners(&taken),
        [r#"one Apply {"f:data":{"f:b":{}}}"#, r#"before-first-apply Update {"f:data":{".":{},"f:a":{}}}"#,]
    );
}

#[test]
fn tracks_ownership_of_updates() {
    let created = updated(
        None,
        "a",
        "2025-01-01T00:00:00Z",
        named(json!({
            "metadata": {"uid": "u", "labels": {"l": "1"}},
            "spec": {"containers": [{"name": "c", "image": "i"}], "strategy": {"rollingUpdate": {"name": "n"}}},
            "status": {"ready": true},
        })),
    );
    assert_eq!(
        owners(&created),
        [
            r#"a Update {"f:metadata":{"f:labels":{".":{},"f:l":{}}},"f:spec":{"f:containers":{".":{},"k:{\"name\":\"c\"}":{".":{},"f:image":{},"f:name":{}}},"f:strategy":{"f:rollingUpdate":{".":{},"f:name":{}}}}}"#
        ]
    );
    assert_eq!(created["metadata"]["managedFields"][0]["time"], "2025-01-01T00:00:00Z");

    // No tracked field has changed: the entries including their time are kept.
    let mut same = created.clone();
    same["metadata"]["resourceVersion"] = json!("7");
    same["status"]["ready"] = json!(false);
    let same = updated(Some(&created), "b", "2025-01-02T00:00:00Z", same);
    assert_eq!(same["metadata"]["managedFields"], created["metadata"]["managedFields"]);

    // Changed fields are assigned to the writer; removed fields disappear.
    let mut changed = created.clone();
    changed["spec"]["containers"][0]["image"] = json!("j");
    changed["metadata"]["labels"] = json!({"m": "1"});
    changed["metadata"].as_object_mut().unwrap().remove("managedFields");
    let changed = updated(Some(&created), "b", "2025-01-02T00:00:00Z", changed);
    assert_eq!(
        owners(&changed),
        [
            r#"a Update {"f:metadata":{"f:labels":{}},"f:spec":{"f:containers":{".":{},"k:{\"name\":\"c\"}":{".":{},"f:name":{}}},"f:strategy":{"f:rollingUpdate":{".":{},"f:name":{}}}}}"#,
            r#"b Update {"f:metadata":{"f:labels":{"f:m":{}}},"f:spec":{"f:containers":{"k:{\"name\":\"c\"}":{"f:image":{}}}}}"#,
        ]
    );

    // An empty list or a single empty entry clears the managed fields. The object is not tracked
    // afterwards.
    for reset in [json!([]), json!([{}])] {
        let mut cleared = created.clone();
        cleared["metadata"]["managedFields"] = reset;
        cleared["data"] = json!({"x": "y"});
        let cleared = updated(Some(&created), "b", "2025-01-02T00:00:00Z", cleared);
        assert!(cleared["metadata"].get("managedFields").is_none());
        let mut later = cleared.clone();
        later["data"] = json!({"x": "z"});
        let later = updated(Some(&cleared), "b", "2025-01-03T00:00:00Z", later);
        assert!(later["metadata"].get("managedFields").is_none());
    }
}

#[test]
fn caps_number_of_update_managers() {
    let mut object = updated(None, "w0", "2025-01-01T00:00:00Z", named(json!({"data": {"k0": "v"}})));
    for n in 1..=14 {
        let mut next = object.clone();
        next["data"][format!("k{n}")] = json!("v");
        let now = format!("2025-01-01T00:00:{n:02}Z");
        object = updated(Some(&object), &format!("w{n}"), &now, next);
    }
    let owners = owners(&object);
    assert_eq!(owners.len(), 10);
    assert_eq!(
        owners[0],
        r#"ancient-changes Update {"f:data":{".":{},"f:k0":{},"f:k1":{},"f:k2":{},"f:k3":{},"f:k4":{},"f:k5":{}}}"#
    );
    assert!(owners[9].starts_with("w14 "));
}

#[test]
fn reports_schema_errors_with_path() {
    #[track_caller]
    fn check(config: Value, want: &str) {
        let error = applied(None, "one", config).expect_err("refused");
        assert_eq!(
            error.to_string(),
            format!("failed to create typed patch object (ns/t; /v1, Kind=Thing): {want}")
        );
    }
    check(
        json!({"spec": {"ports": [{"name": true, "port": 81}]}}),
        ".spec.ports[port=81,protocol=\"TCP\"].name: expected string, got &value.valueUnstructured{Value:true}",
    );
    check(json!({"spec": {"replicas": "x"}}), ".spec.replicas: expected numeric (int or float), got string");
    check(json!({"status": {"ready": "x"}}), ".status.ready: expected boolean, got &{x}");
    check(json!({"spec": {"target": {}}}), ".spec.target: expected any scalar, got &{map[]}");
    check(json!({"spec": 1}), ".spec: expected map, got &{1}");
    check(json!({"spec": {"args": {"a": 1}}}), ".spec.args: expected list, got &{map[a:1]}");
    check(json!({"bogus": 1}), ".bogus: field not declared in schema");
    check(
        json!({"spec": {"containers": [{"name": "a"}, {"name": "a"}]}}),
        ".spec.containers: duplicate entries for key [name=\"a\"]",
    );
    check(
        json!({"spec": {"containers": [{"image": "a"}]}}),
        ".spec.containers: element 0: associative list with keys has an element that omits all key fields \
         [\"name\"] (and doesn't have default values for any key fields)",
    );
    check(
        json!({"metadata": {"finalizers": [{}]}}),
        ".metadata.finalizers: element 0: associative list without keys has an element that's a map type",
    );
    check(
        json!({"spec": {"replicas": "x", "args": [1]}}),
        "errors:\n  .spec.args[0]: expected string, got &value.valueUnstructured{Value:1}\n  \
         .spec.replicas: expected numeric (int or float), got string",
    );
}

#[test]
fn rejects_invalid_requests() {
    let error = applied(None, "one", json!({"metadata": {"managedFields": []}})).expect_err("refused");
    assert_eq!(error, ApplyError::BadRequest("metadata.managedFields must be nil".to_owned()));
    let error = applied(None, "one", json!({"apiVersion": "apps/v1"})).expect_err("refused");
    assert_eq!(error, ApplyError::BadRequest("invalid object type: apps/v1, Kind=Thing".to_owned()));
    let live = named(json!({"metadata": {"managedFields": [{"operation": "Guess"}]}}));
    let error = applied(Some(&live), "one", json!({})).expect_err("refused");
    assert_eq!(
        error,
        ApplyError::Internal(
            "failed to decode managed fields: operation must be `Apply` or `Update`".to_owned()
        )
    );
}

#[test]
fn kubectl_takes_ownership_of_client_side_applied_fields() {
    let last =
        r#"{"apiVersion":"v1","data":{"a":"1"},"kind":"Thing","metadata":{"name":"t","namespace":"ns"}}"#;
    let annotations = json!({"kubectl.kubernetes.io/last-applied-configuration": last});
    let live = named(json!({"metadata": {"annotations": annotations}, "data": {"a": "1", "b": "1"}}));
    let live = updated(None, "kubectl-client-side-apply", "2025-01-01T00:00:00Z", live);

    let taken = applied(Some(&live), "kubectl", json!({"data": {"a": "2"}})).unwrap();
    assert_eq!(taken["data"], json!({"a": "2", "b": "1"}));
    assert_eq!(
        taken["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"],
        "{\"apiVersion\":\"v1\",\"data\":{\"a\":\"2\"},\"kind\":\"Thing\",\"metadata\":{\"name\":\"t\",\"namespace\":\"ns\"}}\n"
    );
    // Fields set by another writer are not taken over, and another manager takes over nothing.
    let (text, _) = conflict(applied(Some(&live), "kubectl", json!({"data": {"a": "2", "b": "2"}})));
    assert!(text.starts_with("Apply failed with 1 conflict: ") && text.ends_with(": .data.b"), "{text}");
    conflict(applied(Some(&live), "other", json!({"data": {"a": "2"}})));
}

#[test]
fn keeps_times_when_nothing_else_changed() {
    let live = updated(None, "a", "2025-01-01T00:00:00Z", named(json!({"data": {"k": "v"}})));
    let mut again = live.clone();
    again["metadata"]["managedFields"][0]["time"] = json!("2025-01-02T00:00:00Z");
    again["metadata"]["resourceVersion"] = json!("9");
    keep_times(&live, &mut again);
    assert_eq!(again["metadata"]["managedFields"], live["metadata"]["managedFields"]);
    again["metadata"]["managedFields"][0]["time"] = json!("2025-01-02T00:00:00Z");
    again["data"]["k"] = json!("w");
    keep_times(&live, &mut again);
    assert_eq!(again["metadata"]["managedFields"][0]["time"], "2025-01-02T00:00:00Z");
}

#[test]
fn long_lists_are_handled_in_time() {
    // In descending order, which is the worst case for inserting one by one.
    let names: Vec<String> = (0..30_000).rev().map(|n| format!("{n:06}")).collect();
    let config = json!({"metadata": {"finalizers": names}});
    let live = applied(None, "one", config.clone()).unwrap();
    let both = applied(Some(&live), "two", config.clone()).unwrap();
    assert_eq!(owners(&both).len(), 2);
    let numbers: serde_json::Map<String, Value> =
        (0..30_000).map(|n| (format!("v:-{n}"), json!({}))).collect();
    let entry =
        json!({"operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": numbers});
    let sent = named(json!({"metadata": {"managedFields": [entry]}, "data": {"a": "b"}}));
    let object = updated(Some(&named(json!({}))), "three", "2025-01-01T00:00:00Z", sent);
    assert_eq!(owners(&object).len(), 2);
}

#[test]
fn deep_values_are_safe() {
    let nested = |leaf: Value| (0..120).fold(leaf, |inner, _| json!({"nested": inner}));
    let free = |leaf: Value| (0..120).fold(leaf, |inner, _| json!({"raw": inner}));
    let config = json!({"spec": nested(json!({"replicas": 1}))});
    let live = applied(None, "one", config.clone()).unwrap();
    let mut other = named(json!({"spec": nested(json!({"replicas": 2}))}));
    other["spec"]["raw"] = free(json!(1));
    let other = updated(Some(&live), "two", "2025-01-01T00:00:00Z", other);
    conflict(applied(Some(&other), "one", config.clone()));
    let back = apply(table(), thing(), Some(&other), &named(config), &writer("one", "now"), true).unwrap();
    assert_eq!(back["spec"]["nested"], live["spec"]["nested"]);
    let mut doc = back.clone();
    let patch = json!({"spec": {"nested": other["spec"]["nested"]}});
    crate::strategic(table(), thing(), &mut doc, &patch).unwrap();
    assert_eq!(doc["spec"], other["spec"]);
}

/// A `Thing` that matches its schema.
fn any_thing() -> impl Strategy<Value = Value> {
    let data = prop::collection::btree_map("[abc]", "[xy]", 0..3);
    let containers = prop::collection::btree_map("[abc]", prop::option::of("[xy]"), 0..3);
    let ports = prop::collection::btree_map((80..83u16, "TCP|UDP"), "[pq]", 0..3);
    let finalizers = prop::collection::btree_set("[abc]", 0..3);
    let args = prop::option::of(prop::collection::vec("[xy]", 0..3));
    (data, containers, ports, finalizers, args).prop_map(|(data, containers, ports, finalizers, args)| {
        let containers: Vec<Value> = containers
            .into_iter()
            .map(|(name, image)| match image {
                Some(image) => json!({"name": name, "image": image}),
                None => json!({"name": name}),
            })
            .collect();
        let ports: Vec<Value> = ports
            .into_iter()
            .map(|((port, protocol), name)| json!({"port": port, "protocol": protocol, "name": name}))
            .collect();
        let mut object = named(json!({"spec": {"containers": containers, "ports": ports, "args": args}}));
        if !data.is_empty() {
            object["data"] = json!(data);
        }
        if !finalizers.is_empty() {
            object["metadata"]["finalizers"] = json!(finalizers);
        }
        object
    })
}

proptest! {
    #[test]
    fn apply_is_stable_when_repeated(live in any_thing(), config in any_thing()) {
        let live = updated(None, "other", "2025-01-01T00:00:00Z", live);
        let run = |live: &Value, now| apply(table(), thing(), Some(live), &config, &writer("me", now), true);
        let once = run(&live, "2026-01-01T00:00:00Z").unwrap();
        let twice = run(&once, "2026-01-02T00:00:00Z").unwrap();
        prop_assert_eq!(once, twice);
    }

    #[test]
    fn applied_config_is_in_result(live in any_thing(), config in any_thing()) {
        let result = apply(table(), thing(), Some(&live), &config, &writer("me", "2026-01-01T00:00:00Z"), true).unwrap();
        let set = super::typed::field_set(super::Typed::root(table(), thing()), &config);
        let typed = super::Typed::root(table(), thing());
        let changes = super::compare::compare(typed, &config, &result);
        prop_assert!(changes.modified.intersection(&set).is_empty());
    }

    #[test]
    fn apply_of_empty_config_drops_owned_fields(config in any_thing()) {
        let now = "2026-01-01T00:00:00Z";
        let once = apply(table(), thing(), None, &config, &writer("me", now), false).unwrap();
        let empty = named(json!({}));
        let result = apply(table(), thing(), Some(&once), &empty, &writer("me", now), false).unwrap();
        prop_assert!(result.get("data").is_none(), "{}", result);
        prop_assert!(result["metadata"].get("finalizers").is_none(), "{}", result);
    }

    /// The fast path for creates must give the same result as `track`.
    #[test]
    fn fields_of_created_object_equal_changes_from_zero_object(
        usual in any_thing(),
        odd in any_json(),
        field in prop::sample::select(vec!["spec", "data", "status", "other"]),
        ignored in prop::sample::select(vec!["status", "data", "none"]),
        is_odd: bool,
    ) {
        let mut object = usual;
        if is_odd {
            object[field] = odd;
        }
        let (typed, ignored) = (Typed::root(table(), thing()), Set::of(&[&[ignored]]));
        let left_out = ExcludedFields { paths: Some(&super::STRIP_SET), trees: Some(&ignored) };
        let zero = super::typed::zero(table(), thing());
        let changes = super::compare::compare(typed, &zero, &object).without_trees(&ignored);
        let mut owned = changes.modified;
        owned.add(changes.added);
        owned.subtract(&super::STRIP_SET);
        let mut text = Vec::new();
        match super::created::fields(typed, &object, left_out, &mut text) {
            Ok(any) => {
                let expected = super::fields_v1::print(&owned);
                prop_assert_eq!(any, !owned.is_empty());
                prop_assert_eq!(String::from_utf8(text).unwrap(), expected.to_string());
            }
            Err(_) => prop_assert!(is_odd, "the fast path must support an ordinary object"),
        }
    }

    #[test]
    fn random_input_never_panics(live in any_json(), mut new in any_json(), config in any_json(), record in any_json()) {
        let now = "2026-01-01T00:00:00Z";
        let tracked = named(json!({"metadata": {"managedFields": record}, "spec": live}));
        let _ = apply(table(), thing(), Some(&live), &config, &writer("me", now), true);
        let _ = apply(table(), thing(), Some(&tracked), &named(json!({"spec": config})), &writer("me", now), false);
        track(table(), thing(), Some(&live), &mut new, &writer("me", now));
        track(table(), thing(), Some(&tracked), &mut new, &writer("me", now));
        keep_times(&live, &mut new);
    }
}
