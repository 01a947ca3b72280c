use serde_json::{Value, json};

use super::*;

fn pod(name: &str, spec: Value) -> Arc<Pod> {
    let pod = json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec});
    Arc::new(serde_json::from_value(pod).expect("a pod"))
}

fn pod_with_requests(name: &str, priority: i32, memory: &str) -> Arc<Pod> {
    let resources = json!({"requests": {"memory": memory}});
    pod(name, json!({"priority": priority, "containers": [{"name": "main", "resources": resources}]}))
}

const MI: u64 = 1 << 20;

/// No threshold was met before.
fn no_signals_met() -> ReclaimState<'static> {
    static MET_SIGNALS: BTreeSet<&str> = BTreeSet::new();
    ReclaimState { met_signals: &MET_SIGNALS, reclaim: &EvictionThresholds::NONE }
}

#[test]
fn threshold_stays_met_until_minimum_reclaim() {
    let limits = EvictionThresholds {
        disk: ThresholdValue::Percent(10),
        memory: ThresholdValue::Number(100 * MI),
        ..EvictionThresholds::NONE
    };
    let reclaim = EvictionThresholds {
        disk: ThresholdValue::Percent(5),
        inodes: ThresholdValue::Percent(50),
        ..EvictionThresholds::NONE
    };
    let check = |disk: u64, met: &[&'static str], expected: &[u64]| {
        let disk = SignalObservation { available: disk, capacity: 1000 };
        let no_pressure = SignalObservation { available: 1 << 40, capacity: 1 << 40 };
        let signals =
            SignalObservations { disk, inodes: disk, memory: no_pressure, ..SignalObservations::default() };
        let met = met.iter().copied().collect();
        let found = limits.thresholds_met(&signals, &ReclaimState { met_signals: &met, reclaim: &reclaim });
        assert_eq!(found.iter().map(|met| met.threshold).collect::<Vec<_>>(), expected, "{disk:?}");
    };
    check(101, &[], &[]);
    check(99, &[], &[100]);
    check(101, &[DISK], &[100]);
    check(149, &[DISK], &[100]);
    check(150, &[DISK], &[]);
    check(120, &[MEMORY], &[]);
}

#[test]
fn detects_thresholds_met() {
    let left = |available, capacity| SignalObservation { available, capacity };
    let no_pressure = SignalObservations {
        memory: left(1 << 30, 8 << 30),
        pods_memory: left(1 << 30, 8 << 30),
        disk: left(50_000, 100_000),
        inodes: left(50_000, 100_000),
        image_disk: left(50_000, 100_000),
        image_inodes: left(50_000, 100_000),
        processes: left(100, 1000),
        has_dedicated_image_fs: false,
    };
    let limits = EvictionThresholds::default();
    let check = |signals: SignalObservations, expected: &[&str]| {
        let met: Vec<_> =
            limits.thresholds_met(&signals, &no_signals_met()).iter().map(MetThreshold::resource).collect();
        assert_eq!(met, expected);
    };
    check(no_pressure.clone(), &[]);
    check(SignalObservations { memory: left(99 * MI, 8 << 30), ..no_pressure.clone() }, &["memory"]);
    check(SignalObservations { pods_memory: left(99 * MI, 1 << 30), ..no_pressure.clone() }, &["memory"]);
    check(SignalObservations { disk: left(9_999, 100_000), ..no_pressure.clone() }, &["ephemeral-storage"]);
    check(SignalObservations { inodes: left(4_999, 100_000), ..no_pressure.clone() }, &["inodes"]);
    check(
        SignalObservations { image_disk: left(14_999, 100_000), ..no_pressure.clone() },
        &["ephemeral-storage"],
    );
    check(SignalObservations { image_inodes: left(4_999, 100_000), ..no_pressure.clone() }, &["inodes"]);
    check(SignalObservations::default(), &[]);
    let pid_limits =
        EvictionThresholds { processes: ThresholdValue::Percent(20), ..EvictionThresholds::default() };
    assert_eq!(
        pid_limits.thresholds_met(&no_pressure, &no_signals_met()).first().map(MetThreshold::resource),
        Some("pids")
    );
}

#[test]
fn filesystem_comparison_uses_device() {
    let dir = tempfile::tempdir().expect("a directory");
    let within = dir.path().join("within");
    std::fs::create_dir(&within).expect("a directory");
    let [one, same, other] = [dir.path(), &within, Path::new("/proc")].map(FilesystemStats::for_path);
    assert!(one.is_some() && other.is_some());
    // Another amount of free space does not matter.
    let same =
        same.map(|room| FilesystemStats { disk: SignalObservation { available: 1, ..room.disk }, ..room });
    assert!(!are_different_devices(one.as_ref(), same.as_ref()));
    assert!(are_different_devices(one.as_ref(), other.as_ref()));
    assert!(!are_different_devices(
        one.as_ref(),
        FilesystemStats::for_path(&dir.path().join("none")).as_ref()
    ));
}

#[test]
fn usage_sources_with_and_without_dedicated_image_fs() {
    let check = |signal: &'static str, shared: [bool; 2], separate: [bool; 2]| {
        let met = MetThreshold { signal, threshold: 1, available: 0 };
        assert_eq!(
            [false, true].map(|has_dedicated_image_fs| met.usage_sources(has_dedicated_image_fs)),
            [shared, separate],
            "{signal}"
        );
    };
    for signal in [DISK, INODES] {
        check(signal, [true, true], [false, true]);
    }
    for signal in [IMAGE_DISK, IMAGE_INODES] {
        check(signal, [true, true], [true, false]);
    }
}

#[test]
fn pods_above_requests_are_first_for_eviction() {
    let met = MetThreshold { signal: MEMORY, threshold: 100 * MI, available: 50 * MI };
    let pods = || {
        vec![
            (pod_with_requests("within", 0, "200Mi"), 100 * MI),
            (pod_with_requests("important", 100, "10Mi"), 500 * MI),
            (pod_with_requests("little-over", 0, "10Mi"), 20 * MI),
            (pod_with_requests("far-over", 0, "10Mi"), 90 * MI),
        ]
    };
    let mut order = Vec::new();
    let mut left = pods();
    while let Some((first, _)) = select_pod(&met, left.clone()) {
        left.retain(|(pod, _)| pod.name() != first.name());
        order.push(first.name().to_owned());
    }
    assert_eq!(order, ["far-over", "little-over", "important", "within"]);
    let text = eviction_message(&met, &pod_with_requests("far-over", 0, "10Mi"), 90 * MI);
    let expected = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. Container main \
        was using 90Mi, request is 10Mi, has larger consumption of memory. ";
    assert_eq!(text, expected);
    assert!(
        can_be_evicted(&pod_with_requests("a", 0, "1"))
            && !can_be_evicted(&pod_with_requests("a", SYSTEM_CRITICAL_PRIORITY, "1"))
    );
}

#[test]
fn every_signal_has_a_threshold_and_a_condition() {
    let (memory, disk, processes) = ([true, false, false], [false, true, false], [false, false, true]);
    for (signal, expected) in SIGNALS.into_iter().zip([memory, memory, disk, disk, disk, disk, processes]) {
        let mut limits = EvictionThresholds::NONE;
        *limits.threshold_mut(signal).expect("one for each") = ThresholdValue::Number(2);
        let observation = SignalObservation { available: 1, capacity: 10 };
        let (memory, pods_memory, disk, inodes) = (observation, observation, observation, observation);
        let (image_disk, image_inodes, processes) = (observation, observation, observation);
        let has_dedicated_image_fs = false;
        let signals = SignalObservations {
            memory,
            pods_memory,
            disk,
            inodes,
            image_disk,
            image_inodes,
            processes,
            has_dedicated_image_fs,
        };
        let met = limits.evaluate(&signals, &no_signals_met());
        assert_eq!(met, [MetThreshold { signal, threshold: 2, available: 1 }]);
        let mut last_pressure = LastPressure::default();
        last_pressure.observe(&met, Timestamp::UNIX_EPOCH);
        assert_eq!(
            last_pressure.is_active(Timestamp::UNIX_EPOCH, PRESSURE_TRANSITION_PERIOD),
            expected,
            "{signal}"
        );
    }
}

#[test]
fn pressure_is_active_for_transition_period() {
    let time = |second| Timestamp::from_second(second).expect("a time");
    let mut last_pressure = LastPressure::default();
    last_pressure.observe(&[MetThreshold { signal: INODES, threshold: 1, available: 0 }], time(1000));
    assert_eq!(last_pressure.is_active(time(1299), PRESSURE_TRANSITION_PERIOD), [false, true, false]);
    assert_eq!(last_pressure.is_active(time(1300), PRESSURE_TRANSITION_PERIOD), [false, false, false]);
}

#[test]
fn local_storage_limits_of_pods_and_volumes() {
    let limited =
        |limit: &str| json!({"name": "main", "resources": {"limits": {"ephemeral-storage": limit}}});
    let volumes = json!([{"name": "cache", "emptyDir": {"sizeLimit": "1Mi"}}]);
    let whole = pod("a", json!({"containers": [limited("10Mi")], "volumes": volumes}));
    let check = |container: u64, volume: u64, expected: Option<&str>| {
        let found = limit_exceeded_message(&whole, &|_| container, &|_| volume);
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
    let found = limit_exceeded_message(&two, &|name| if name == "main" { 11 * MI } else { 0 }, &|_| 0);
    assert_eq!(
        found.as_deref(),
        Some("Container main exceeded its local ephemeral storage limit \"10Mi\". ")
    );
}

#[test]
fn soft_threshold_requires_grace_period() {
    let at = |second: i64| Timestamp::from_second(second).expect("a time");
    let grace_by_signal = BTreeMap::from([(MEMORY.to_owned(), SignedDuration::from_secs(90))]);
    let limits = EvictionThresholds { memory: ThresholdValue::Number(500 * MI), ..EvictionThresholds::NONE };
    let soft = SoftEviction { limits, grace_by_signal, max_pod_grace_seconds: 0 };
    let mut since = BTreeMap::new();
    let mut check = |second: i64, available: u64, expected: usize| {
        let memory = SignalObservation { available, capacity: 8 << 30 };
        // A soft `memory` threshold does not apply to the memory of all pods.
        let pods_memory = SignalObservation { available: 0, capacity: 8 << 30 };
        let signals = SignalObservations { memory, pods_memory, ..SignalObservations::default() };
        assert_eq!(
            soft.thresholds_past_grace_period(&signals, &mut since, &EvictionThresholds::NONE, at(second))
                .len(),
            expected,
            "{second}"
        );
    };
    check(0, 600 * MI, 0);
    check(10, 400 * MI, 0);
    check(60, 400 * MI, 0);
    check(100, 400 * MI, 1);
    // The shortage has ended, so the grace period starts again.
    check(110, 600 * MI, 0);
    check(120, 400 * MI, 0);
    check(210, 400 * MI, 1);
}
