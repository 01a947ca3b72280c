use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use super::*;
use crate::convert::api_version;
use crate::json::JsonExt;

#[test]
fn names_are_unique() {
    let mut resource_names = BTreeSet::new();
    let mut kinds = BTreeSet::new();
    for row in RESOURCES {
        assert!(resource_names.insert((row.group, row.version, row.plural)), "two rows for {}", row.plural);
        assert!(kinds.insert((row.group, row.version, row.kind)), "two rows for {}", row.kind);
        let mut subresources = BTreeSet::new();
        for sub in row.subresources {
            assert!(subresources.insert(sub.name), "{} has {} twice", row.plural, sub.name);
        }
    }
}

#[test]
fn short_names_are_unique() {
    let mut seen: BTreeSet<(&str, &str, &str)> = BTreeSet::new();
    for row in RESOURCES {
        for short in row.short_names {
            assert!(seen.insert((row.group, row.version, short)), "{short} is used twice");
        }
    }
}

#[test]
fn find_returns_resource_and_storage_resource() {
    for row in RESOURCES {
        let found = find_resource(row.group, row.version, row.plural).expect("its own row");
        assert_eq!((found.kind, found.api_version()), (row.kind, row.api_version()));
        assert!(find_kind(row.group, row.version, row.kind).is_some());
        match row.storage {
            Storage::None => assert!(row.storage_resource().is_none()),
            _ => {
                let stored = row.storage_resource().expect("a row to be stored as");
                assert_eq!(
                    stored.storage,
                    Storage::Own,
                    "{} is stored as what is stored elsewhere",
                    row.plural
                );
            }
        }
    }
}

#[test]
fn every_kind_has_schema_type_and_status_field() {
    let table = schema::kubernetes();
    for row in RESOURCES {
        let ty = table
            .type_by_kind(row.group, row.version, row.kind)
            .unwrap_or_else(|| panic!("no type {}", row.kind));
        if row.has_status() {
            assert!(table.get(ty).field("status").is_some(), "{} has no status", row.kind);
        }
        for sub in row.subresources.iter().filter(|sub| !sub.kind.is_empty()) {
            let (group, version) = sub.group_version.unwrap_or((row.group, row.version));
            let known =
                table.type_by_kind(group, version, sub.kind).is_some() || sub.kind.ends_with("Options");
            assert!(known, "no type {group}/{version} {}", sub.kind);
        }
    }
}

/// Formats a resource or subresource of the table or of upstream's discovery as a line.
fn line(group: &str, version: &str, name: &str, kind: &str, verbs: &[&str], more: String) -> String {
    format!("{} {name} {kind} {} {more}", api_version(group, version), verbs.join(","))
}

fn actual() -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for row in RESOURCES {
        let more = format!(
            "{} short={} categories={} singular={}",
            if row.namespaced { "Namespaced" } else { "Cluster" },
            row.short_names.join(","),
            row.categories.join(","),
            row.singular(),
        );
        lines.insert(line(row.group, row.version, row.plural, row.kind, row.verb_names(), more));
        for sub in row.subresources {
            let kind = if sub.kind.is_empty() { row.kind } else { sub.kind };
            let name = format!("{}/{}", row.plural, sub.name);
            let of = sub.group_version.map_or(String::new(), |(group, version)| api_version(group, version));
            lines.insert(line(row.group, row.version, &name, kind, sub.verbs, of));
        }
    }
    lines
}

fn expected(discovery: &Value) -> BTreeSet<String> {
    let strings = |value: &Value, field: &str| -> Vec<String> {
        value.items(field).iter().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let mut lines = BTreeSet::new();
    for group in discovery.items("items") {
        let group_name = group.at("metadata").text("name");
        let stable = |version: &&Value| !version.text("version").contains(['a', 'b']);
        for version in group.items("versions").iter().filter(stable) {
            for resource in version.items("resources") {
                let (plural, kind) = (resource.text("resource"), resource.at("responseKind").text("kind"));
                let more = format!(
                    "{} short={} categories={} singular={}",
                    resource.text("scope"),
                    strings(resource, "shortNames").join(","),
                    strings(resource, "categories").join(","),
                    resource.text("singularResource"),
                );
                let verbs = strings(resource, "verbs");
                let verbs: Vec<&str> = verbs.iter().map(String::as_str).collect();
                lines.insert(line(group_name, version.text("version"), plural, kind, &verbs, more));
                for sub in resource.items("subresources") {
                    let kind = sub.at("responseKind");
                    let of = match (kind.text("group"), kind.text("version")) {
                        (_, "") => String::new(),
                        (group, version) => api_version(group, version),
                    };
                    let verbs = strings(sub, "verbs");
                    let verbs: Vec<&str> = verbs.iter().map(String::as_str).collect();
                    let name = format!("{plural}/{}", sub.text("subresource"));
                    lines.insert(line(
                        group_name,
                        version.text("version"),
                        &name,
                        kind.text("kind"),
                        &verbs,
                        of,
                    ));
                }
            }
        }
    }
    lines
}

/// The reference contains the groups under `/apis`. The table has only their stable versions.
#[test]
fn table_matches_upstream_discovery() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/reference/kubernetes-1.36/discovery.json");
    let Ok(text) = std::fs::read_to_string(&file) else {
        return eprintln!("skipped: no {}", file.display());
    };
    let discovery: Value = serde_json::from_str(&text).expect("the reference is JSON");
    let (ours, theirs) = (actual(), expected(&discovery));
    let missing: Vec<_> = theirs.difference(&ours).collect();
    let extra: Vec<_> = ours.difference(&theirs).filter(|line| !line.starts_with("v1 ")).collect();
    assert!(missing.is_empty() && extra.is_empty(), "missing: {missing:#?}\nextra: {extra:#?}");
}
