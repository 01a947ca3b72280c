//! Pure functions in a loop: the cost of decoding, validating, patching and encoding one object.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use api::selector::LabelSelector;
use api::{ErrorList, Path};
use jiff::Timestamp;
use patch::apply::{FieldManager, apply, track};
use schema::{TypeId, protobuf};
use serde_json::{Value, json};

use crate::objects::{GROUP_COUNT, labels, pod};
use crate::report::{Report, Unit, median};

/// The baseline of all other rows: serde_json decodes the same pod without a schema.
const BASELINE: &str = "yardstick/parse-json-pod";
const WRITER: FieldManager<'_> = FieldManager {
    manager: "bench",
    api_version: "v1",
    subresource: "",
    now: "2026-01-01T00:00:00Z",
    ignore: &[&["status"]],
};

/// The minimum duration of a batch and the number of batches.
#[derive(Clone, Copy)]
pub struct Iterations {
    pub min_batch_time: Duration,
    pub batch_count: usize,
}

pub fn run(report: &mut Report, iterations: Iterations, label_sets: usize) -> Result<()> {
    let table = schema::kubernetes();
    let ty = table.type_by_kind("", "v1", "Pod").context("Pod is not a built-in type")?;
    let row = api::resource_table::find_resource("", "v1", "pods").context("pods are not in the table")?;
    let sent = pod(1);
    let bytes = sent.to_string().into_bytes();
    let full = stored_pod(ty, &sent)?;
    let mut time = |name: &str, op: &mut dyn FnMut()| {
        let nanos = nanos_per_call(iterations, op);
        match name == BASELINE {
            true => report.add(name, Unit::Nanos, nanos),
            false => report.add_relative(name, Unit::Nanos, nanos, BASELINE),
        }
    };

    time(BASELINE, &mut || drop(black_box(serde_json::from_slice::<Value>(black_box(&bytes)))));
    time("decode/pod", &mut || drop(black_box(schema::from_json(table, ty, black_box(&bytes)))));
    time("encode/pod", &mut || drop(black_box(serde_json::to_vec(black_box(&full)))));
    time("clone/pod", &mut || drop(black_box(full.clone())));
    // Includes a clone, because defaults are set only once; the same holds for the patches below.
    // Compare with clone/pod.
    time("defaults/pod", &mut || {
        let mut object = sent.clone();
        api::defaults::set_defaults(table, ty, &mut object);
        black_box(object);
    });
    time("validate/pod", &mut || {
        let mut errors = ErrorList::default();
        api::meta::validate_object_meta(
            &full["metadata"],
            true,
            row.strategy.name_format(),
            &Path::new("metadata"),
            &mut errors,
        );
        row.strategy.validate(black_box(&full), &mut errors);
        row.strategy.validate_create(&full, &mut errors);
        black_box(errors);
    });

    let proto = protobuf::to_protobuf(table, ty, &full);
    ensure!(protobuf::from_protobuf(table, ty, &proto).is_ok(), "the protobuf round trip of a pod failed");
    time("protobuf/encode-pod", &mut || drop(black_box(protobuf::to_protobuf(table, ty, black_box(&full)))));
    time("protobuf/decode-pod", &mut || {
        drop(black_box(protobuf::from_protobuf(table, ty, black_box(&proto))))
    });

    patches(&mut time, ty, &full, &sent)?;
    selectors(&mut time, label_sets)?;
    let now = Timestamp::now();
    time("table/cells-pod", &mut || drop(black_box(api::columns::cells("", "pods", black_box(&full), now))));
    Ok(())
}

/// The pod as it is stored, with defaults, status and managed fields. It must be valid.
fn stored_pod(ty: TypeId, sent: &Value) -> Result<Value> {
    let table = schema::kubernetes();
    let decoded = schema::from_json(table, ty, sent.to_string().as_bytes())?;
    ensure!(decoded.strict_errors.is_empty(), "{:?}", decoded.strict_errors);
    let mut full = decoded.value;
    api::defaults::set_defaults(table, ty, &mut full);
    full["metadata"]["uid"] = "0e6f3c1e-7d0c-4c6b-9f6a-1d2e3f4a5b6c".into();
    full["metadata"]["creationTimestamp"] = WRITER.now.into();
    full["status"] = json!({"phase": "Running", "podIP": "10.42.0.7", "qosClass": "Burstable"});
    track(table, ty, None, &mut full, &WRITER);
    let row = api::resource_table::find_resource("", "v1", "pods").context("pods are not in the table")?;
    let mut errors = ErrorList::default();
    row.strategy.validate(&full, &mut errors);
    ensure!(errors.is_empty(), "{errors:?}");
    Ok(full)
}

fn patches(
    time: &mut dyn FnMut(&str, &mut dyn FnMut()),
    ty: TypeId,
    full: &Value,
    sent: &Value,
) -> Result<()> {
    let table = schema::kubernetes();
    let change = json!({
        "metadata": {"labels": {"tier": "middle"}},
        "spec": {"containers": [{"name": "api", "image": "registry.example.com/orders/api:4.2.1"}]},
    });
    patch::strategic(table, ty, &mut full.clone(), &change)?;
    time("patch/strategic-pod", &mut || {
        let mut object = full.clone();
        drop(black_box(patch::strategic(table, ty, &mut object, black_box(&change))));
        black_box(object);
    });
    let mut config = sent.clone();
    config["metadata"]["labels"]["tier"] = "middle".into();
    apply(table, ty, Some(full), &config, &WRITER, true)?;
    time("patch/apply-pod", &mut || {
        drop(black_box(apply(table, ty, Some(full), black_box(&config), &WRITER, true)))
    });
    let mut changed = full.clone();
    changed["spec"]["containers"][0]["image"] = "registry.example.com/orders/api:4.2.1".into();
    time("patch/track-pod", &mut || {
        let mut object = changed.clone();
        track(table, ty, Some(full), &mut object, &WRITER);
        black_box(object);
    });
    Ok(())
}

fn selectors(time: &mut dyn FnMut(&str, &mut dyn FnMut()), sets: usize) -> Result<()> {
    let text = "group in (g7),tier!=middle,app.kubernetes.io/name=orders";
    let selector = LabelSelector::parse(text)?;
    time("selector/parse", &mut || drop(black_box(LabelSelector::parse(black_box(text)))));
    let labels: Vec<Value> = (0..sets).map(labels).collect();
    let found = labels.iter().filter(|labels| selector.matches_labels(labels)).count();
    ensure!(found == sets.div_ceil(GROUP_COUNT), "the selector does not match 1 % of the label sets");
    // Cycles through all label sets, so that none of them stays in the CPU caches.
    let mut sets = labels.iter().cycle();
    time("selector/match-labels", &mut || {
        black_box(sets.next().map(|labels| selector.matches_labels(labels)));
    });
    Ok(())
}

/// The duration of one call: the median over all batches.
fn nanos_per_call(iterations: Iterations, op: &mut dyn FnMut()) -> f64 {
    // Doubles the number of calls until a batch takes long enough for the clock's resolution. This
    // warms up as well.
    let mut calls = 1_u32;
    let mut elapsed = time_calls(calls, op);
    while elapsed < iterations.min_batch_time && calls < 1 << 24 {
        calls *= 2;
        elapsed = time_calls(calls, op);
    }
    let mut samples: Vec<f64> = (0..iterations.batch_count)
        .map(|_| time_calls(calls, op).as_nanos() as f64 / f64::from(calls))
        .collect();
    median(&mut samples)
}

fn time_calls(calls: u32, op: &mut dyn FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..calls {
        op();
    }
    start.elapsed()
}
