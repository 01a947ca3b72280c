//! A small manifest of every kind in the table: read strictly, defaulted, found valid, and the same after
//! being written and read again.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use api::defaults::set_defaults;
use api::meta::validate_object_meta;
use api::table::Storage;
use api::{Errors, Path, RESOURCES, Resource, convert};
use serde_json::{Value, json};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/manifests")
}

fn file_name(row: &Resource) -> String {
    let group = if row.group.is_empty() { "core" } else { row.group };
    format!("{group}.{}.{}.json", row.version, row.kind)
}

fn read(row: &Resource, bytes: &[u8]) -> Value {
    let table = schema::kubernetes();
    let ty = table.kind(row.group, row.version, row.kind).expect("the kind has a type");
    let decoded = schema::from_json(table, ty, bytes).unwrap_or_else(|error| panic!("{}: {error}", row.kind));
    assert!(decoded.unknown.is_empty(), "{}: {:?}", file_name(row), decoded.unknown);
    decoded.value
}

/// The row whose form an object of this row is stored and checked in.
fn stored(row: &'static Resource) -> &'static Resource {
    let Storage::As(group, version, plural) = row.storage else { return row };
    RESOURCES
        .iter()
        .find(|other| (other.group, other.version, other.plural) == (group, version, plural))
        .expect("the stored form has a row")
}

/// What is wrong with a new object.
fn complaints(row: &'static Resource, mut obj: Value) -> Vec<String> {
    let table = schema::kubernetes();
    let ty = table.kind(row.group, row.version, row.kind).expect("the kind has a type");
    set_defaults(table, ty, &mut obj);
    let home = stored(row);
    let mut obj = convert::convert((row.group, row.version), (home.group, home.version), row.kind, obj);
    if row.storage != Storage::None {
        // What the server gives every new object before anything looks at it.
        obj["metadata"]["uid"] = "5c1a9a0e-2b7e-4a36-9d3e-0d7a1f0f6f1c".into();
        obj["metadata"]["creationTimestamp"] = "2026-01-02T03:04:05Z".into();
    }
    home.rules.prepare_create(&mut obj);
    let mut errors = Errors::default();
    if row.storage != Storage::None {
        let path = Path::new("metadata");
        validate_object_meta(&obj["metadata"], row.namespaced, home.rules.name_rule(), &path, &mut errors);
    }
    home.rules.validate(&obj, &mut errors);
    errors.0.iter().map(|error| format!("{}: {}: {}", file_name(row), error.path, error.message)).collect()
}

#[test]
fn every_kind_has_a_manifest() {
    let wanted: BTreeSet<String> = RESOURCES.iter().map(file_name).collect();
    let found: BTreeSet<String> = std::fs::read_dir(folder())
        .expect("the folder of manifests")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("a plain name"))
        .collect();
    assert_eq!(wanted, found);
}

#[test]
fn every_manifest_is_valid_and_stays_itself() {
    let mut wrong = Vec::new();
    for row in RESOURCES {
        let bytes = std::fs::read(folder().join(file_name(row))).expect("a manifest");
        let obj = read(row, &bytes);
        let again = read(row, &serde_json::to_vec(&obj).expect("JSON"));
        assert_eq!(obj, again, "{}", file_name(row));
        wrong.extend(complaints(row, obj));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The checks above would pass if nothing were checked, so something must be.
#[test]
fn an_empty_object_is_wrong_for_most_kinds() {
    let silent: Vec<&str> = RESOURCES
        .iter()
        .filter(|row| {
            let empty = read(row, br#"{"metadata":{"name":"x","namespace":"y"}}"#);
            complaints(row, empty).is_empty()
        })
        .map(|row| row.kind)
        .collect();
    assert!(silent.len() < RESOURCES.len() / 2, "{silent:?}");
}

/// The rules trust `schema` with the shape of an object, but not with their lives.
#[test]
fn no_value_makes_the_rules_panic() {
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(i64::MAX),
        json!(1.5),
        json!(""),
        json!("é/é/-.%"),
        json!("99999999999999999999%"),
        json!([]),
        json!([null, {}, "x", ["x"]]),
        json!({}),
        json!({"": null, "é": {"x": [{}]}}),
    ];
    for row in RESOURCES {
        let bytes = std::fs::read(folder().join(file_name(row))).expect("a manifest");
        let obj = read(row, &bytes);
        let mut pointers = Vec::new();
        places(&obj, String::new(), &mut pointers);
        for pointer in &pointers {
            for value in &values {
                let mut odd = obj.clone();
                *odd.pointer_mut(pointer).expect("a place in the object") = value.clone();
                let outcome = catch_unwind(AssertUnwindSafe(|| use_rules(row, &obj, odd)));
                assert!(outcome.is_ok(), "{} with {value} at {pointer}", file_name(row));
            }
        }
    }
}

fn places(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(name, child)| {
            let name = name.replace('~', "~0").replace('/', "~1");
            places(child, format!("{at}/{name}"), found);
        }),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, child)| places(child, format!("{at}/{i}"), found));
        }
        _ => {}
    }
    found.push(at);
}

fn use_rules(row: &'static Resource, obj: &Value, odd: Value) {
    let rules = stored(row).rules;
    let mut errors = Errors::default();
    for (mut new, old) in [(odd.clone(), obj), (obj.clone(), &odd)] {
        rules.prepare_create(&mut new.clone());
        rules.prepare_update(&mut new, old);
        rules.validate(&new, &mut errors);
        rules.validate_update(&new, old, &mut errors);
        rules.validate_status(&new, old, &mut errors);
        rules.selectable(&new);
        rules.warnings(&new, Some(old));
    }
}
