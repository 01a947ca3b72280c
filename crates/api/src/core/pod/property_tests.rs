//! Property tests: validation of generated pods never panics.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::internal::{TYPE_FIELDS, semantic_equal};
use super::*;

/// A pseudo-random source. Small numbers are common, so that lists stay short and values collide.
struct RandomSource(u64);

impl RandomSource {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn pick<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[usize::try_from(self.below(of.len() as u64)).unwrap_or(0)]
    }
}

const STRINGS: &[&str] = &[
    "",
    "a",
    "b",
    "A b",
    "..",
    "/",
    "a/b",
    "-",
    "Always",
    "Never",
    "In",
    "Exists",
    "File",
    "TCP",
    "v1",
    "Localhost",
    "windows",
    "linux",
    "10.0.0.1",
    "::ffff:1.2.3.4",
    "metadata.name",
    "metadata.labels['k']",
    "hugepages-2Mi",
    "hugepages-",
    "é\u{0}\u{202e}",
    "iqn.2001-04.com:x",
    "eui",
    "naaé",
    "DoNotSchedule",
];
const QUANTITY_STRINGS: &[&str] = &["0", "1", "-1", "100m", "1Gi", "9223372036854775807", "1e400", "x"];

fn any_value(kind: &str, random: &mut RandomSource, depth: u32) -> Value {
    match kind {
        "s" => json!(random.pick(STRINGS)),
        "b" => json!(random.below(2) == 0),
        "i" => [json!(0), json!(1), json!(-1), json!(i64::MAX), json!(i64::MIN), json!(80)]
            [usize::try_from(random.below(6)).unwrap_or(0)]
        .clone(),
        "q" => json!(random.pick(QUANTITY_STRINGS)),
        "x" => {
            if random.below(2) == 0 {
                json!(random.below(100))
            } else {
                json!(random.pick(STRINGS))
            }
        }
        // A value without a known type: a number, string, list, map or bool.
        "n" => match random.below(5) {
            0 => any_value("i", random, depth),
            1 => any_value("s", random, depth),
            2 => json!([random.pick(STRINGS), random.pick(STRINGS)]),
            3 => {
                json!({random.pick(STRINGS): random.pick(QUANTITY_STRINGS), "cpu": random.pick(QUANTITY_STRINGS)})
            }
            _ => json!(true),
        },
        _ if kind.starts_with('[') => {
            let count = random.below(3);
            Value::Array((0..count).map(|_| any_value(&kind[1..], random, depth)).collect())
        }
        _ => any_object(kind.trim_start_matches('*'), random, depth),
    }
}

fn any_object(type_name: &str, random: &mut RandomSource, depth: u32) -> Value {
    let mut fields = Map::new();
    for field in TYPE_FIELDS.get(type_name).into_iter().flatten() {
        // Deeper fields are rarer, so that most pods stay small.
        if random.below(u64::from(depth) + 2) <= 1 {
            fields.insert(field.json.clone(), any_value(field.kind, random, depth + 1));
        }
    }
    Value::Object(fields)
}

fn any_pod(seed: u64) -> Value {
    let mut random = RandomSource(seed);
    let annotation =
        random.pick(&["kubernetes.io/config.mirror", "scheduler.alpha.kubernetes.io/tolerations", "a"]);
    let spec = any_object("PodSpec", &mut random, 0);
    let statuses = json!([{"name": "a", "state": {"terminated": {"exitCode": 1}}}, {"name": "b", "state": {"running": {}}}]);
    json!({"metadata": {"name": "p", "annotations": {annotation: random.pick(STRINGS)}, "labels": {"a": "b"}}, "spec": spec,
        "status": {"containerStatuses": statuses, "podIPs": [{"ip": random.pick(STRINGS)}, {"ip": random.pick(STRINGS)}]}})
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn validation_never_panics(first: u64, second: u64) {
        let (old, mut new) = (any_pod(first), any_pod(second));
        let mut errors = ErrorList::default();
        Pod.validate(&new, &mut errors);
        Pod.validate_create(&new, &mut errors);
        Pod.validate_update(&new, &old, &mut errors);
        Pod.validate_status_update(&new, &old, &mut errors);
        Pod.warnings(&new, None);
        Pod.selectable_fields(&new);
        validate_ephemeral_containers_update(&new, &old, &mut errors);
        validate_resize(&new, &old, &mut errors);
        prepare_resize(&mut new.clone(), &old);
        prepare_ephemeral_containers_update(&mut new.clone(), &old);
        Pod.prepare_for_status_update(&mut new, &old);
        Pod.prepare_for_update(&mut new, &old);
        Pod.prepare_for_create(&mut new);
        validate_pod_template_spec(&new, &Path::root(), &mut errors);
    }

    #[test]
    fn spec_is_equal_to_itself(seed: u64) {
        let pod = any_pod(seed);
        prop_assert!(semantic_equal("PodSpec", &pod["spec"], &pod["spec"]));
        prop_assert_eq!(diff::diff_values("PodSpec", &pod["spec"], &pod["spec"]), "");
    }

    #[test]
    fn drop_disabled_fields_twice_is_same_as_once(seed: u64) {
        let mut once = any_pod(seed);
        drop_disabled_fields(&mut once["spec"]);
        let mut twice = once.clone();
        drop_disabled_fields(&mut twice["spec"]);
        prop_assert_eq!(once, twice);
    }
}

/// Guards against quadratic rules: these would take much longer than all other tests.
#[test]
fn validation_time_is_linear_in_list_length() {
    let list = |make: &dyn Fn(usize) -> Value| Value::Array((0..2_000).map(make).collect());
    let spec = json!({
        "containers": [{"name": "a", "image": "i",
            "ports": list(&|_| json!({"containerPort": 80, "protocol": "TCP"})),
            "env": list(&|i| json!({"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": i.to_string()}}})),
            "volumeMounts": list(&|i| json!({"name": i.to_string(), "mountPath": i.to_string()})),
            "volumeDevices": list(&|i| json!({"name": i.to_string(), "devicePath": i.to_string()})),
            "resources": {"claims": list(&|i| json!({"name": i.to_string()}))}}],
        "initContainers": list(&|i| json!({"name": i.to_string(), "restartPolicy": "Always",
            "resources": {"requests": {format!("example.com/{i}"): "1"}}})),
        "ephemeralContainers": list(&|i| json!({"name": i.to_string()})),
        "volumes": list(&|i| json!({"name": i.to_string(), "emptyDir": {}})),
        "tolerations": list(&|i| json!({"key": i.to_string(), "operator": "Exists"})),
        "schedulingGates": list(&|i| json!({"name": i.to_string()})),
        "topologySpreadConstraints": list(&|i| json!({"topologyKey": i.to_string()})),
        "resources": {"requests": {"cpu": "1"}},
    });
    let files = json!({"name": "v", "secret": {"secretName": "s", "items": list(&|_| json!({"key": "k", "path": "p"}))}});
    let mut new = json!({"metadata": {"name": "p"}, "spec": spec});
    let old = new.clone();
    new["spec"]["volumes"][0] = files;
    let mut errors = ErrorList::default();
    Pod.validate(&new, &mut errors);
    Pod.validate_update(&new, &old, &mut errors);
    validate_ephemeral_containers_update(&new, &old, &mut errors);
    assert!(Pod.warnings(&new, None).len() < 1_000_000);
}
