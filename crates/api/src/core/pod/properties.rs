//! Pods of every shape, made from the table of types: whatever a client sends is answered, never a panic.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::internal::{ROWS, same};
use super::*;

/// A source of choices; small numbers come up often, so that lists stay short and words meet.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn pick<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[usize::try_from(self.roll(of.len() as u64)).unwrap_or(0)]
    }
}

const WORDS: &[&str] = &[
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
const AMOUNTS: &[&str] = &["0", "1", "-1", "100m", "1Gi", "9223372036854775807", "1e400", "x"];

fn make(kind: &str, dice: &mut Dice, depth: u32) -> Value {
    match kind {
        "s" => json!(dice.pick(WORDS)),
        "b" => json!(dice.roll(2) == 0),
        "i" => [json!(0), json!(1), json!(-1), json!(i64::MAX), json!(i64::MIN), json!(80)]
            [usize::try_from(dice.roll(6)).unwrap_or(0)]
        .clone(),
        "q" => json!(dice.pick(AMOUNTS)),
        "x" => {
            if dice.roll(2) == 0 {
                json!(dice.roll(100))
            } else {
                json!(dice.pick(WORDS))
            }
        }
        // Something without a type of its own: a number, a word, a list or a map.
        "n" => match dice.roll(5) {
            0 => make("i", dice, depth),
            1 => make("s", dice, depth),
            2 => json!([dice.pick(WORDS), dice.pick(WORDS)]),
            3 => json!({dice.pick(WORDS): dice.pick(AMOUNTS), "cpu": dice.pick(AMOUNTS)}),
            _ => json!(true),
        },
        _ if kind.starts_with('[') => {
            let count = dice.roll(3);
            Value::Array((0..count).map(|_| make(&kind[1..], dice, depth)).collect())
        }
        _ => object(kind.trim_start_matches('*'), dice, depth),
    }
}

fn object(of: &str, dice: &mut Dice, depth: u32) -> Value {
    let mut fields = Map::new();
    for field in ROWS.get(of).into_iter().flatten() {
        // Deeper fields are rarer, so that most pods stay small.
        if dice.roll(u64::from(depth) + 2) <= 1 {
            fields.insert(field.json.clone(), make(field.kind, dice, depth + 1));
        }
    }
    Value::Object(fields)
}

fn pod(seed: u64) -> Value {
    let mut dice = Dice(seed);
    let annotation =
        dice.pick(&["kubernetes.io/config.mirror", "scheduler.alpha.kubernetes.io/tolerations", "a"]);
    let spec = object("PodSpec", &mut dice, 0);
    let statuses = json!([{"name": "a", "state": {"terminated": {"exitCode": 1}}}, {"name": "b", "state": {"running": {}}}]);
    json!({"metadata": {"name": "p", "annotations": {annotation: dice.pick(WORDS)}, "labels": {"a": "b"}}, "spec": spec,
        "status": {"containerStatuses": statuses, "podIPs": [{"ip": dice.pick(WORDS)}, {"ip": dice.pick(WORDS)}]}})
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_pod_is_answered(first: u64, second: u64) {
        let (old, mut new) = (pod(first), pod(second));
        let mut errors = Errors::default();
        Pod.validate(&new, &mut errors);
        Pod.validate_create(&new, &mut errors);
        Pod.validate_update(&new, &old, &mut errors);
        Pod.validate_status(&new, &old, &mut errors);
        Pod.warnings(&new, None);
        Pod.selectable(&new);
        validate_ephemeral_containers_update(&new, &old, &mut errors);
        validate_resize(&new, &old, &mut errors);
        prepare_resize(&mut new.clone(), &old);
        prepare_ephemeral_containers_update(&mut new.clone(), &old);
        Pod.prepare_status(&mut new, &old);
        Pod.prepare_update(&mut new, &old);
        Pod.prepare_create(&mut new);
        validate_pod_template_spec(&new, &Path::root(), &mut errors);
    }

    #[test]
    fn a_spec_is_the_same_as_itself(seed: u64) {
        let pod = pod(seed);
        prop_assert!(same("PodSpec", &pod["spec"], &pod["spec"]));
        prop_assert_eq!(diff::of_type("PodSpec", &pod["spec"], &pod["spec"]), "");
    }

    #[test]
    fn preparing_twice_changes_nothing_more(seed: u64) {
        let mut once = pod(seed);
        drop_disabled(&mut once["spec"]);
        let mut twice = once.clone();
        drop_disabled(&mut twice["spec"]);
        prop_assert_eq!(once, twice);
    }
}

/// Lists as long as a request can hold them take time in proportion: were a rule to compare all with
/// all, this would take much longer than the rest of the tests.
#[test]
fn long_lists_do_not_keep_a_server_busy() {
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
    let mut errors = Errors::default();
    Pod.validate(&new, &mut errors);
    Pod.validate_update(&new, &old, &mut errors);
    validate_ephemeral_containers_update(&new, &old, &mut errors);
    assert!(Pod.warnings(&new, None).len() < 1_000_000);
}
