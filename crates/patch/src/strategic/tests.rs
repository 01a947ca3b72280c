use proptest::prelude::*;
use serde_json::{Value, json};

use super::{StrategicError, strategic};
use crate::json_patch::tests::any_json;
use crate::test_schema::{table, thing};

/// Applies a patch to `spec`.
#[track_caller]
fn check(spec: Value, patch: Value, want: Value) {
    let mut doc = json!({"spec": spec});
    strategic(table(), thing(), &mut doc, &json!({"spec": patch})).expect("the patch applies");
    assert_eq!(doc, json!({"spec": want}));
}

#[track_caller]
fn check_error(spec: Value, patch: Value, want: &str) {
    let mut doc = json!({"spec": spec});
    let error = strategic(table(), thing(), &mut doc, &json!({"spec": patch})).expect_err("refused");
    assert_eq!(error.to_string(), want);
}

#[test]
fn merges_fields_like_merge_patch() {
    check(json!({"replicas": 1}), json!({"replicas": 2}), json!({"replicas": 2}));
    check(json!({"replicas": 1}), json!({"replicas": null}), json!({}));
    check(json!({}), json!({"replicas": null}), json!({}));
    check(json!({"args": ["a"]}), json!({"args": ["b"]}), json!({"args": ["b"]}));
    check(
        json!({"selector": {"a": "1"}}),
        json!({"selector": {"b": "2"}}),
        json!({"selector": {"a": "1", "b": "2"}}),
    );
    check(
        json!({}),
        json!({"strategy": {"type": "x", "rollingUpdate": null}}),
        json!({"strategy": {"type": "x"}}),
    );
}

#[test]
fn merges_lists_by_key_with_new_items_first() {
    check(
        json!({"containers": [{"name": "a", "image": "1"}]}),
        json!({"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}]}),
        json!({"containers": [{"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}]}),
    );
    check(
        json!({"containers": [{"name": "a"}, {"name": "b"}]}),
        json!({"containers": [{"name": "c"}]}),
        json!({"containers": [{"name": "c"}, {"name": "a"}, {"name": "b"}]}),
    );
    check(
        json!({"containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}),
        json!({"containers": [{"name": "b", "image": "2"}]}),
        json!({"containers": [{"name": "a"}, {"name": "b", "image": "2"}, {"name": "c"}]}),
    );
    check(
        json!({"containers": [{"name": "a"}]}),
        json!({"containers": [{"name": "a", "image": null}]}),
        json!({"containers": [{"name": "a"}]}),
    );
}

#[test]
fn applies_patch_directives() {
    check(
        json!({"containers": [{"name": "a"}, {"name": "b"}]}),
        json!({"containers": [{"name": "a", "$patch": "delete"}]}),
        json!({"containers": [{"name": "b"}]}),
    );
    check(
        json!({"containers": [{"name": "a"}, {"name": "b"}]}),
        json!({"containers": [{"$patch": "replace"}, {"name": "c"}]}),
        json!({"containers": [{"name": "c"}]}),
    );
    check(
        json!({"strategy": {"type": "a", "rollingUpdate": {"name": "x"}}}),
        json!({"strategy": {"$patch": "replace", "type": "b"}}),
        json!({"strategy": {"type": "b"}}),
    );
    check(
        json!({"strategy": {"type": "a"}}),
        json!({"strategy": {"$patch": "delete"}}),
        json!({"strategy": {}}),
    );
    check(json!({}), json!({"strategy": {"$patch": "delete"}}), json!({}));
    check_error(
        json!({"strategy": {}}),
        json!({"strategy": {"$patch": "merge", "type": "b"}}),
        "unknown patch type: merge in map: map[$patch:merge type:b]",
    );
    check_error(
        json!({"containers": [{"name": "a"}]}),
        json!({"containers": [{"$patch": "merge"}]}),
        "merging lists cannot yet be specified in the patch",
    );
}

#[test]
fn applies_retain_keys() {
    check(
        json!({"strategy": {"type": "a", "rollingUpdate": {"name": "x"}}}),
        json!({"strategy": {"$retainKeys": ["type"], "type": "b"}}),
        json!({"strategy": {"type": "b"}}),
    );
    check_error(
        json!({"strategy": {}}),
        json!({"strategy": {"$retainKeys": ["type"], "rollingUpdate": {}}}),
        "invalid patch format of retainKeys",
    );
    check_error(
        json!({"strategy": {}}),
        json!({"strategy": {"$retainKeys": 1}}),
        "invalid patch format of retainKeys",
    );
}

#[test]
fn merges_and_deletes_from_primitive_lists() {
    let patched = |finalizers: Value, patch: Value| {
        let mut doc = json!({"metadata": {"finalizers": finalizers}});
        strategic(table(), thing(), &mut doc, &json!({"metadata": patch})).expect("applies");
        doc["metadata"]["finalizers"].take()
    };
    assert_eq!(patched(json!(["a", "b"]), json!({"finalizers": ["c", "a"]})), json!(["c", "a", "b"]));
    assert_eq!(
        patched(json!(["a", "b"]), json!({"$deleteFromPrimitiveList/finalizers": ["a"]})),
        json!(["b"])
    );
    assert_eq!(
        patched(json!(["a", "b", "c"]), json!({"$setElementOrder/finalizers": ["c", "a"]})),
        json!(["b", "c", "a"])
    );
    assert_eq!(
        patched(
            json!(["a", "b"]),
            json!({"$deleteFromPrimitiveList/finalizers": ["a"], "$setElementOrder/finalizers": ["b", "c"], "finalizers": ["c"]})
        ),
        json!(["b", "c"])
    );
}

#[test]
fn applies_set_element_order() {
    check(
        json!({"containers": [{"name": "a"}, {"name": "b"}]}),
        json!({"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}], "containers": [{"name": "a", "image": "1"}]}),
        json!({"containers": [{"name": "b"}, {"name": "a", "image": "1"}]}),
    );
    check(
        json!({"containers": [{"name": "a"}, {"name": "server"}, {"name": "b"}]}),
        json!({"$setElementOrder/containers": [{"name": "a"}, {"name": "new"}, {"name": "b"}], "containers": [{"name": "new"}]}),
        json!({"containers": [{"name": "a"}, {"name": "new"}, {"name": "server"}, {"name": "b"}]}),
    );
    check(
        json!({"containers": [{"name": "a"}, {"name": "b"}, {"name": "server"}]}),
        json!({"$setElementOrder/containers": [{"name": "b"}, {"name": "new"}], "containers": [{"name": "new"}, {"name": "a", "$patch": "delete"}]}),
        json!({"containers": [{"name": "b"}, {"name": "server"}, {"name": "new"}]}),
    );
    check_error(
        json!({"containers": [{"name": "a"}]}),
        json!({"$setElementOrder/containers": [{"name": "a"}], "containers": [{"name": "b"}]}),
        "The order in patch list:\n[map[name:b]]\n doesn't match $setElementOrder list:\n[map[name:a]]\n",
    );
    check_error(
        json!({"containers": [{"name": "a"}]}),
        json!({"$setElementOrder/containers": "x"}),
        "expected a []interface {}, but received a string",
    );
    check_error(json!({}), json!({"$setElementOrder": []}), "invalid patch format of setElementOrder list");
}

#[test]
fn rejects_invalid_patches() {
    check_error(
        json!({"containers": [{"name": "a"}]}),
        json!({"containers": [{"image": "x"}]}),
        "map: map[image:x] does not contain declared merge key: name",
    );
    check_error(
        json!({"containers": [{"name": "a"}]}),
        json!({"containers": ["x"]}),
        "list element types are not identical: [[map[name:a]] [x]]",
    );
    check_error(json!({"containers": []}), json!({"containers": [[]]}), "lists of lists are not supported");
    check_error(
        json!({"bogus": {}}),
        json!({"bogus": {}}),
        "unable to find api field in struct ThingSpec for the json field \"bogus\"",
    );
    check_error(
        json!({"selector": {"a": {}}}),
        json!({"selector": {"a": {}}}),
        "merging an object in json but data type is not struct, instead is: map",
    );
    let error = strategic(table(), thing(), &mut json!({}), &json!([])).expect_err("no object");
    assert_eq!(error, StrategicError::BadRequest("invalid JSON document".to_owned()));
}

#[test]
fn merges_long_lists_in_linear_time() {
    let items = |from: usize| -> Vec<Value> {
        (from..from + 50_000).map(|n| json!({"name": n.to_string()})).collect()
    };
    let mut doc = json!({"spec": {"containers": items(0)}});
    strategic(table(), thing(), &mut doc, &json!({"spec": {"containers": items(25_000)}})).expect("applies");
    assert_eq!(doc["spec"]["containers"].as_array().map(Vec::len), Some(75_000));
}

/// An arbitrary `Thing` or a patch of one, mostly with valid types.
fn any_thing() -> impl Strategy<Value = Value> {
    let pair = ("[ab]", prop::option::of("[xy]"), prop::option::of("delete|replace|merge"));
    let item = pair.prop_map(|(name, image, directive)| {
        let mut item = json!({"name": name});
        if let Some(image) = image {
            item["image"] = image.into();
        }
        if let Some(directive) = directive {
            item["$patch"] = directive.into();
        }
        item
    });
    let items = prop::collection::vec(item, 0..4);
    let names = prop::collection::vec("[abc]", 0..3);
    (items.clone(), items, names.clone(), names, any_json()).prop_map(
        |(containers, order, set, gone, junk)| {
            json!({
                "metadata": {"finalizers": set, "$deleteFromPrimitiveList/finalizers": gone},
                "spec": {"containers": containers, "$setElementOrder/containers": order, "raw": junk},
            })
        },
    )
}

proptest! {
    #[test]
    fn random_patches_never_panic(mut doc in any_thing(), patch in any_thing(), junk in any_json()) {
        let _ = strategic(table(), thing(), &mut doc.clone(), &junk);
        let _ = strategic(table(), thing(), &mut doc, &patch);
    }
}
