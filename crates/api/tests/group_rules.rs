//! Tests the validation errors of kinds outside of the core group.

use api::{ErrorList, RESOURCES, RestStrategy};
use expect_test::Expect;
use serde_json::{Value, json};

#[path = "group_rules/admission.rs"]
mod admission;
#[path = "group_rules/autoscaling.rs"]
mod autoscaling;
#[path = "group_rules/certificates.rs"]
mod certificates;
#[path = "group_rules/crd.rs"]
mod crd;
#[path = "group_rules/devices.rs"]
mod devices;
#[path = "group_rules/flow.rs"]
mod flow;
#[path = "group_rules/policy.rs"]
mod policy;
#[path = "group_rules/rbac.rs"]
mod rbac;
#[path = "group_rules/reviews.rs"]
mod reviews;

fn strategy(kind: &str) -> &'static dyn RestStrategy {
    RESOURCES.iter().find(|row| row.kind == kind).unwrap_or_else(|| panic!("no row for {kind}")).strategy
}

fn lines(errors: &ErrorList) -> String {
    errors.0.iter().map(|error| format!("{}: {}\n", error.path, error.message)).collect()
}

/// Validates a new object.
#[track_caller]
fn check(kind: &str, mut obj: Value, expected: Expect) {
    let mut errors = ErrorList::default();
    strategy(kind).prepare_for_create(&mut obj);
    strategy(kind).validate(&obj, &mut errors);
    expected.assert_eq(&lines(&errors));
}

/// Validates a new object without errors.
#[track_caller]
fn check_valid(kind: &str, obj: Value) {
    check(kind, obj, expect_test::expect![""]);
}

/// Validates an update.
#[track_caller]
fn check_update(kind: &str, old: Value, mut new: Value, expected: Expect) {
    let mut errors = ErrorList::default();
    let mut stored = old;
    strategy(kind).prepare_for_create(&mut stored);
    new["status"] = stored["status"].clone();
    strategy(kind).prepare_for_update(&mut new, &stored);
    strategy(kind).validate(&new, &mut errors);
    strategy(kind).validate_update(&new, &stored, &mut errors);
    expected.assert_eq(&lines(&errors));
}

/// Validates a status update.
#[track_caller]
fn check_status(kind: &str, obj: Value, expected: Expect) {
    let mut errors = ErrorList::default();
    strategy(kind).validate_status_update(&obj, &json!({}), &mut errors);
    expected.assert_eq(&lines(&errors));
}

/// Replaces the value at a JSON pointer. Null removes it.
fn with_value(mut obj: Value, pointer: &str, value: Value) -> Value {
    let (parent, name) = pointer.rsplit_once('/').expect("a pointer");
    let parent = obj.pointer_mut(parent).unwrap_or_else(|| panic!("no value at {parent}"));
    match parent {
        Value::Object(map) if value.is_null() => {
            map.remove(name);
        }
        _ if parent.is_array() => parent[name.parse::<usize>().expect("an index")] = value,
        _ => parent[name] = value,
    }
    obj
}
