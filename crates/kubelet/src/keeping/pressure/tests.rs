use serde_json::{Value, json};

use super::*;

fn pod(name: &str, spec: Value) -> Arc<Pod> {
    let pod = json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec});
    Arc::new(serde_json::from_value(pod).expect("a pod"))
}

fn asking(name: &str, priority: i32, memory: &str) -> Arc<Pod> {
    let resources = json!({"requests": {"memory": memory}});
    pod(name, json!({"priority": priority, "containers": [{"name": "main", "resources": resources}]}))
}

const MI: u64 = 1 << 20;

/// There was enough of everything.
fn nothing() -> Before<'static> {
    static SHORT: BTreeSet<&str> = BTreeSet::new();
    Before { short: &SHORT, reclaim: &Limits::NONE }
}

#[test]
fn a_shortage_is_over_when_there_is_more_than_the_least() {
    let limits = Limits { disk: Amount::Percent(10), memory: Amount::Number(100 * MI), ..Limits::NONE };
    let reclaim = Limits { disk: Amount::Percent(5), inodes: Amount::Percent(50), ..Limits::NONE };
    let check = |disk: u64, short: &[&'static str], expected: &[u64]| {
        let disk = Left { available: disk, capacity: 1000 };
        let plenty = Left { available: 1 << 40, capacity: 1 << 40 };
        let signals = Signals { disk, inodes: disk, memory: plenty, ..Signals::default() };
        let short = short.iter().copied().collect();
        let found = limits.reached(&signals, &Before { short: &short, reclaim: &reclaim });
        assert_eq!(found.iter().map(|short| short.threshold).collect::<Vec<_>>(), expected, "{disk:?}");
    };
    check(101, &[], &[]);
    check(99, &[], &[100]);
    check(101, &[DISK], &[100]);
    check(149, &[DISK], &[100]);
    check(150, &[DISK], &[]);
    check(120, &[MEMORY], &[]);
}

#[test]
fn what_there_is_too_little_of() {
    let left = |available, capacity| Left { available, capacity };
    let plenty = Signals {
        memory: left(1 << 30, 8 << 30),
        pods_memory: left(1 << 30, 8 << 30),
        disk: left(50_000, 100_000),
        inodes: left(50_000, 100_000),
        image_disk: left(50_000, 100_000),
        image_inodes: left(50_000, 100_000),
        processes: left(100, 1000),
        images_apart: false,
    };
    let limits = Limits::default();
    let check = |signals: Signals, expected: &[&str]| {
        let short: Vec<_> = limits.reached(&signals, &nothing()).iter().map(Short::resource).collect();
        assert_eq!(short, expected);
    };
    check(plenty.clone(), &[]);
    check(Signals { memory: left(99 * MI, 8 << 30), ..plenty.clone() }, &["memory"]);
    check(Signals { pods_memory: left(99 * MI, 1 << 30), ..plenty.clone() }, &["memory"]);
    check(Signals { disk: left(9_999, 100_000), ..plenty.clone() }, &["ephemeral-storage"]);
    check(Signals { inodes: left(4_999, 100_000), ..plenty.clone() }, &["inodes"]);
    check(Signals { image_disk: left(14_999, 100_000), ..plenty.clone() }, &["ephemeral-storage"]);
    check(Signals { image_inodes: left(4_999, 100_000), ..plenty.clone() }, &["inodes"]);
    // What cannot be read is no reason to put anybody out.
    check(Signals::default(), &[]);
    let few = Limits { processes: Amount::Percent(20), ..Limits::default() };
    assert_eq!(few.reached(&plenty, &nothing()).first().map(Short::resource), Some("pids"));
}

#[test]
fn disks_are_told_apart_by_their_device() {
    let dir = tempfile::tempdir().expect("a directory");
    let within = dir.path().join("within");
    std::fs::create_dir(&within).expect("a directory");
    let [one, same, other] = [dir.path(), &within, Path::new("/proc")].map(Room::of);
    assert!(one.is_some() && other.is_some());
    // However much somebody has written between the two looks.
    let same = same.map(|room| Room { disk: Left { available: 1, ..room.disk }, ..room });
    assert!(!apart(one.as_ref(), same.as_ref()));
    assert!(apart(one.as_ref(), other.as_ref()));
    assert!(!apart(one.as_ref(), Room::of(&dir.path().join("none")).as_ref()));
}

#[test]
fn what_takes_room_on_which_disk() {
    let check = |signal: &'static str, together: [bool; 2], apart: [bool; 2]| {
        let short = Short { signal, threshold: 1, available: 0 };
        assert_eq!([false, true].map(|is_apart| short.takes_room(is_apart)), [together, apart], "{signal}");
    };
    for signal in [DISK, INODES] {
        check(signal, [true, true], [false, true]);
    }
    for signal in [IMAGE_DISK, IMAGE_INODES] {
        check(signal, [true, true], [true, false]);
    }
}

#[test]
fn who_goes_first() {
    let short = Short { signal: MEMORY, threshold: 100 * MI, available: 50 * MI };
    let pods = || {
        vec![
            (asking("within", 0, "200Mi"), 100 * MI),
            (asking("important", 100, "10Mi"), 500 * MI),
            (asking("little-over", 0, "10Mi"), 20 * MI),
            (asking("far-over", 0, "10Mi"), 90 * MI),
        ]
    };
    let mut order = Vec::new();
    let mut left = pods();
    while let Some((first, _)) = choose(&short, left.clone()) {
        left.retain(|(pod, _)| pod.name() != first.name());
        order.push(first.name().to_owned());
    }
    assert_eq!(order, ["far-over", "little-over", "important", "within"]);
    let text = message(&short, &asking("far-over", 0, "10Mi"), 90 * MI);
    let expected = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. Container main \
        was using 90Mi, request is 10Mi, has larger consumption of memory. ";
    assert_eq!(text, expected);
    assert!(may_be_evicted(&asking("a", 0, "1")) && !may_be_evicted(&asking("a", CRITICAL, "1")));
}

#[test]
fn every_signal_has_a_threshold_and_a_condition() {
    let (memory, disk, processes) = ([true, false, false], [false, true, false], [false, false, true]);
    for (signal, expected) in SIGNALS.into_iter().zip([memory, memory, disk, disk, disk, disk, processes]) {
        let mut limits = Limits::NONE;
        *limits.of_signal(signal).expect("one for each") = Amount::Number(2);
        let few = Left { available: 1, capacity: 10 };
        let (memory, pods_memory, disk, inodes) = (few, few, few, few);
        let (image_disk, image_inodes, processes) = (few, few, few);
        let images_apart = false;
        let signals =
            Signals { memory, pods_memory, disk, inodes, image_disk, image_inodes, processes, images_apart };
        let short = limits.named(&signals, &nothing());
        assert_eq!(short, [Short { signal, threshold: 2, available: 1 }]);
        let mut pressures = Pressures::default();
        pressures.note(&short, Timestamp::UNIX_EPOCH);
        assert_eq!(pressures.lasting(Timestamp::UNIX_EPOCH, LASTS), expected, "{signal}");
    }
}

#[test]
fn shortages_last_for_a_while() {
    let time = |second| Timestamp::from_second(second).expect("a time");
    let mut pressures = Pressures::default();
    pressures.note(&[Short { signal: INODES, threshold: 1, available: 0 }], time(1000));
    assert_eq!(pressures.lasting(time(1299), LASTS), [false, true, false]);
    assert_eq!(pressures.lasting(time(1300), LASTS), [false, false, false]);
}

#[test]
fn disks_of_pods() {
    let limited =
        |limit: &str| json!({"name": "main", "resources": {"limits": {"ephemeral-storage": limit}}});
    let volumes = json!([{"name": "cache", "emptyDir": {"sizeLimit": "1Mi"}}]);
    let whole = pod("a", json!({"containers": [limited("10Mi")], "volumes": volumes}));
    let check = |container: u64, volume: u64, expected: Option<&str>| {
        let found = over_limits(&whole, &|_| container, &|_| volume);
        assert_eq!(found.as_deref(), expected);
    };
    assert!(has_disk_limits(&whole));
    check(MI, MI, None);
    check(MI, 2 * MI, Some("Usage of EmptyDir volume \"cache\" exceeds the limit \"1Mi\". "));
    check(
        10 * MI,
        MI,
        Some("Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. "),
    );
    let two = pod("b", json!({"containers": [limited("10Mi"), {"name": "other"}]}));
    let found = over_limits(&two, &|name| if name == "main" { 11 * MI } else { 0 }, &|_| 0);
    assert_eq!(
        found.as_deref(),
        Some("Container main exceeded its local ephemeral storage limit \"10Mi\". ")
    );
}

#[test]
fn what_should_be_left_is_waited_for() {
    let at = |second: i64| Timestamp::from_second(second).expect("a time");
    let patience = BTreeMap::from([(MEMORY.to_owned(), SignedDuration::from_secs(90))]);
    let limits = Limits { memory: Amount::Number(500 * MI), ..Limits::NONE };
    let soft = Soft { limits, patience, grace: 0 };
    let mut since = BTreeMap::new();
    let mut check = |second: i64, available: u64, expected: usize| {
        let memory = Left { available, capacity: 8 << 30 };
        // Pods may use all they have, as far as this is about them.
        let pods_memory = Left { available: 0, capacity: 8 << 30 };
        let signals = Signals { memory, pods_memory, ..Signals::default() };
        assert_eq!(soft.due(&signals, &mut since, &Limits::NONE, at(second)).len(), expected, "{second}");
    };
    check(0, 600 * MI, 0);
    check(10, 400 * MI, 0);
    check(60, 400 * MI, 0);
    check(100, 400 * MI, 1);
    // There was enough meanwhile, so it begins anew.
    check(110, 600 * MI, 0);
    check(120, 400 * MI, 0);
    check(210, 400 * MI, 1);
}
