//! Decodes a small manifest of every kind strictly, defaults and validates it, and checks that it
//! round-trips.

use std::collections::BTreeSet;
use std::path::PathBuf;

use api::defaults::set_defaults;
use api::meta::validate_object_meta;
use api::resource_table::Storage;
use api::{ErrorList, Path, RESOURCES, Resource, convert};
use serde_json::Value;

fn manifest_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/manifests")
}

fn file_name(row: &Resource) -> String {
    let group = if row.group.is_empty() { "core" } else { row.group };
    format!("{group}.{}.{}.json", row.version, row.kind)
}

fn read(row: &Resource, bytes: &[u8]) -> Value {
    let table = schema::kubernetes();
    let ty = table.type_by_kind(row.group, row.version, row.kind).expect("the kind has a type");
    let decoded = schema::from_json(table, ty, bytes).unwrap_or_else(|error| panic!("{}: {error}", row.kind));
    assert!(decoded.strict_errors.is_empty(), "{}: {:?}", file_name(row), decoded.strict_errors);
    decoded.value
}

/// The row in whose version objects of this row are stored and validated.
fn storage_resource(row: &'static Resource) -> &'static Resource {
    let Storage::StoredAs(group, version, plural) = row.storage else { return row };
    RESOURCES
        .iter()
        .find(|other| (other.group, other.version, other.plural) == (group, version, plural))
        .expect("the stored form has a row")
}

/// The validation errors of a new object.
fn validation_errors(row: &'static Resource, mut obj: Value) -> Vec<String> {
    let table = schema::kubernetes();
    let ty = table.type_by_kind(row.group, row.version, row.kind).expect("the kind has a type");
    set_defaults(table, ty, &mut obj);
    let storage_row = storage_resource(row);
    let mut obj =
        convert::convert((row.group, row.version), (storage_row.group, storage_row.version), row.kind, obj);
    if row.storage != Storage::None {
        // The API server sets these fields before validation.
        obj["metadata"]["uid"] = "5c1a9a0e-2b7e-4a36-9d3e-0d7a1f0f6f1c".into();
        obj["metadata"]["creationTimestamp"] = "2026-01-02T03:04:05Z".into();
    }
    storage_row.strategy.prepare_for_create(&mut obj);
    let mut errors = ErrorList::default();
    if row.storage != Storage::None {
        let path = Path::new("metadata");
        validate_object_meta(
            &obj["metadata"],
            row.namespaced,
            storage_row.strategy.name_format(),
            &path,
            &mut errors,
        );
    }
    storage_row.strategy.validate(&obj, &mut errors);
    errors.0.iter().map(|error| format!("{}: {}: {}", file_name(row), error.path, error.message)).collect()
}

#[test]
fn every_kind_has_a_manifest() {
    let expected: BTreeSet<String> = RESOURCES.iter().map(file_name).collect();
    let found: BTreeSet<String> = std::fs::read_dir(manifest_dir())
        .expect("the folder of manifests")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("a plain name"))
        .collect();
    assert_eq!(expected, found);
}

#[test]
fn every_manifest_is_valid_and_round_trips() {
    let mut errors = Vec::new();
    for row in RESOURCES {
        let bytes = std::fs::read(manifest_dir().join(file_name(row))).expect("a manifest");
        let obj = read(row, &bytes);
        let again = read(row, &serde_json::to_vec(&obj).expect("JSON"));
        assert_eq!(obj, again, "{}", file_name(row));
        errors.extend(validation_errors(row, obj));
    }
    assert!(errors.is_empty(), "{}", errors.join("\n"));
}

/// Guards against missing validation: most kinds must reject an empty object.
#[test]
fn empty_object_is_invalid_for_most_kinds() {
    let silent: Vec<&str> = RESOURCES
        .iter()
        .filter(|row| {
            let empty = read(row, br#"{"metadata":{"name":"x","namespace":"y"}}"#);
            validation_errors(row, empty).is_empty()
        })
        .map(|row| row.kind)
        .collect();
    assert!(silent.len() < RESOURCES.len() / 2, "{silent:?}");
}
