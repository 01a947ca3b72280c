//! Property tests: validation never panics. Manifests get random replacement values that still match
//! their type.

use std::net::IpAddr;
use std::path::PathBuf;

use api::core::service::alloc::{self, AllocationRanges, AllocatorState};
use api::defaults::set_defaults;
use api::networking::ip::Cidr;
use api::{ErrorList, RESOURCES, Resource};
use proptest::prelude::*;
use serde_json::{Value, json};

fn manifest(row: &Resource) -> Value {
    let group = if row.group.is_empty() { "core" } else { row.group };
    let name = format!("{group}.{}.{}.json", row.version, row.kind);
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/manifests").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("a manifest is JSON")
}

/// Collects the JSON pointers of all values.
fn json_pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                json_pointers(value, &format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), found);
            }
        }
        Value::Array(items) => {
            for (i, value) in items.iter().enumerate() {
                json_pointers(value, &format!("{at}/{i}"), found);
            }
        }
        _ => {}
    }
}

fn edge_case_values() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        Just(json!({})),
        Just(json!([])),
        Just(json!([{}])),
        Just(json!({"": ""})),
        prop::sample::select(vec![
            "",
            "/",
            "//",
            ".",
            "..",
            "-",
            "*",
            "None",
            "%",
            "100%",
            "-1%",
            "é",
            "\u{0}",
            "::",
            "::/0",
            "0.0.0.0/0",
            "1.2.3.4",
            "255.255.255.255/32",
            "fd00::1",
            "1e400",
            "-1",
            "9999999999999999999999m",
            "Exists",
            "In",
            "ExternalName",
            "LoadBalancer",
            "NodePort",
            "ClusterIP",
            "Local",
            "SingleStack",
            "RequireDualStack",
            "PreferDualStack",
            "IPv6",
        ])
        .prop_map(Value::from),
        prop_oneof![Just(0), Just(-1), Just(1), Just(65536), Just(i64::MIN), Just(i64::MAX)]
            .prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        "\\PC{0,300}".prop_map(Value::from),
    ]
}

/// A manifest with some values replaced, if it still matches its type.
fn replace_values(row: &Resource, values: &[(prop::sample::Index, Value)]) -> Option<Value> {
    let table = schema::kubernetes();
    let ty = table.type_by_kind(row.group, row.version, row.kind)?;
    let mut obj = manifest(row);
    for (index, replacement) in values {
        let mut found = Vec::new();
        json_pointers(&obj, "", &mut found);
        let before = obj.clone();
        let pointer: &String = index.get(&found);
        *obj.pointer_mut(pointer)? = replacement.clone();
        let mut copy = obj.clone();
        match schema::normalize(table, ty, &mut copy) {
            Ok(_) if copy.is_object() => obj = copy,
            _ => obj = before,
        }
    }
    set_defaults(table, ty, &mut obj);
    Some(obj)
}

struct EmptyAllocatorState;

impl AllocatorState for EmptyAllocatorState {
    fn ip_in_use(&self, _ip: IpAddr) -> bool {
        false
    }

    fn port_in_use(&self, _port: u16) -> bool {
        false
    }

    fn random(&mut self, bound: u64) -> u64 {
        bound / 2
    }
}

fn run_validation(row: &Resource, mut old: Value, mut new: Value) {
    let strategy = row.strategy;
    let mut errors = ErrorList::default();
    if row.kind == "Service" {
        for cidrs in [vec!["10.0.0.0/24"], vec!["fd00::/112", "10.0.0.0/24"]] {
            let cidrs = cidrs.into_iter().filter_map(Cidr::parse).collect();
            let ranges = AllocationRanges::new(cidrs, 30000..=32767);
            let _ = alloc::allocate(&mut old, None, &ranges, &mut EmptyAllocatorState);
            let _ = alloc::allocate(&mut new, Some(&old), &ranges, &mut EmptyAllocatorState);
            let _ = alloc::allocated_resources(&new);
        }
    }
    strategy.prepare_for_create(&mut old);
    strategy.validate(&old, &mut errors);
    strategy.validate_create(&old, &mut errors);
    strategy.prepare_for_update(&mut new, &old);
    strategy.validate(&new, &mut errors);
    strategy.validate_update(&new, &old, &mut errors);
    strategy.validate_status_update(&new, &old, &mut errors);
    strategy.warnings(&new, None);
    strategy.warnings(&new, Some(&old));
    let names =
        |obj: &Value| strategy.selectable_fields(obj).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(&new), names(&Value::Null), "{} selects by different fields", row.kind);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn malformed_objects_never_panic(
        row in prop::sample::select((0..RESOURCES.len()).collect::<Vec<_>>()),
        one in prop::collection::vec((any::<prop::sample::Index>(), edge_case_values()), 0..6),
        other in prop::collection::vec((any::<prop::sample::Index>(), edge_case_values()), 0..6),
    ) {
        let row = &RESOURCES[row];
        if let (Some(old), Some(new)) = (replace_values(row, &one), replace_values(row, &other)) {
            run_validation(row, old, new);
        }
    }
}
