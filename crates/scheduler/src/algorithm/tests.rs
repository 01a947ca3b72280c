use std::collections::BTreeMap;
use std::sync::Arc;

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::{Algorithm, NoExtenders, Random, ScheduleFailure};
use crate::framework::{Cycle, NoNominations};
use crate::state::{PodInfo, State};
use crate::testing::{default_profile, node, pod, test_cluster};

#[track_caller]
fn check(cluster: &str, pod: &str, expected: Expect) {
    expected.assert_eq(&test_cluster(cluster).attempt(&default_profile(), pod));
}

#[test]
fn fit_error_counts_reasons_in_order() {
    check("", "pod p", expect!["no nodes available to schedule pods\n"]);
    check(
        "
        node a taint=k=v:NoSchedule
        node b taint=k=v:NoSchedule
        node c cpu=1 memory=1Gi",
        "pod p cpu=2 memory=2Gi",
        expect![[r#"
            0/3 nodes are available: 1 Insufficient cpu, 1 Insufficient memory, 2 node(s) had untolerated taint(s). no new claims to deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.
        "#]],
    );
    check(
        "node a\nnode b",
        "pod p claim=missing",
        expect![[r#"
            0/2 nodes are available: persistentvolumeclaim "missing" not found. no new claims to deallocate, preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.
        "#]],
    );
}

#[test]
fn filters_only_nodes_named_by_affinity() {
    let named = |names: &str| {
        format!(
            r#"pod p {{"spec":{{"affinity":{{"nodeAffinity":{{"requiredDuringSchedulingIgnoredDuringExecution":{{"nodeSelectorTerms":[{{"matchFields":[{{"key":"metadata.name","operator":"In","values":["{names}"]}}]}}]}}}}}}}}}}"#
        )
    };
    check("node a\nnode b", &named("b"), expect!["on b\n"]);
    check(
        "node a unschedulable\nnode b",
        &named("a"),
        expect![[r#"
            0/2 nodes are available: 1 node(s) didn't satisfy plugin(s) [NodeAffinity], 1 node(s) were unschedulable. no new claims to deallocate, preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.
        "#]],
    );
}

#[test]
fn least_allocated_node_wins() {
    check("node a\nnode b\npod x on=a cpu=1 memory=1Gi", "pod p cpu=1 memory=1Gi", expect!["on b\n"]);
}

#[test]
fn samples_percentage_of_nodes_in_large_clusters() {
    let profile = default_profile();
    let algorithm = Algorithm::new(0, 1);
    for (nodes, enough) in [(10, 10), (100, 100), (1000, 420), (5000, 500), (6000, 300)] {
        assert_eq!(algorithm.num_feasible_nodes_to_find(&profile, nodes), enough, "of {nodes}");
    }
    assert_eq!(Algorithm::new(70, 1).num_feasible_nodes_to_find(&profile, 1000), 700);
}

#[test]
fn random_choice_between_equal_scores() {
    let mut random = Random::new(42);
    let mut counts = [0; 4];
    for _ in 0..4000 {
        counts[random.best(&[7, 3, 7, 7])] += 1;
    }
    assert_eq!(counts[1], 0);
    assert!(counts.iter().enumerate().all(|(i, count)| i == 1 || (1150..1520).contains(count)), "{counts:?}");
}

/// All nodes are used although each search considers only some of them.
#[test]
fn search_starts_after_last_visited_node() {
    let mut state = State::default();
    for i in 0..300 {
        state.set_node(Arc::new(node(&format!("node n{i} zone=z{}", i % 3))));
    }
    state.refresh();
    let (profile, mut algorithm) = (default_profile(), Algorithm::new(0, 3));
    let mut used: BTreeMap<Arc<str>, u32> = BTreeMap::new();
    for i in 0..900 {
        let object = pod(&format!("pod p{i} cpu=400m memory=800Mi"));
        let info = Arc::new(PodInfo::new(&object, &mut state.strings));
        let cycle = Cycle { state: &state, pod: &info, object: &object };
        let found = algorithm.schedule(&profile, &cycle, &NoNominations, &NoExtenders);
        let Ok(found) = found else { panic!("a node has free resources") };
        *used.entry(found.node.clone()).or_default() += 1;
        state.assume_pod(info, &found.node);
    }
    assert_eq!(used.len(), 300);
    assert!(used.values().all(|count| (2..=4).contains(count)), "{used:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// For any workload: no node holds more than its allocatable resources, or pods that violate constraints.
    #[test]
    fn never_binds_pod_to_node_without_capacity(
        nodes in prop::collection::vec((1..4u8, 1..4u8, 0..3u8, any::<bool>()), 1..6),
        pods in prop::collection::vec((1..20u8, 0..4u8, any::<bool>(), any::<bool>()), 1..40),
    ) {
        let mut state = State::default();
        for (i, (cpu, pods, zone, tainted)) in nodes.iter().enumerate() {
            let taint = if *tainted { "taint=k=v:NoSchedule" } else { "" };
            state.set_node(Arc::new(node(&format!("node n{i} cpu={cpu} pods={} zone=z{zone} {taint}", pods * 4))));
        }
        state.refresh();
        let (profile, mut algorithm) = (default_profile(), Algorithm::new(0, 5));
        for (i, (tenths, port, tolerates, spread)) in pods.iter().enumerate() {
            let port = if *port == 0 { "port=80" } else { "" };
            let tolerates = if *tolerates { "tolerates=k:" } else { "" };
            let spread = if *spread {
                r#"{"spec":{"topologySpreadConstraints":[{"topologyKey":"kubernetes.io/hostname","maxSkew":2,"whenUnsatisfiable":"DoNotSchedule","labelSelector":{"matchLabels":{"app":"x"}}}]}}"#
            } else {
                ""
            };
            let object = pod(&format!("pod p{i} label=app=x cpu={}m {port} {tolerates} {spread}", u32::from(*tenths) * 100));
            let info = Arc::new(PodInfo::new(&object, &mut state.strings));
            let cycle = Cycle { state: &state, pod: &info, object: &object };
            match algorithm.schedule(&profile, &cycle, &NoNominations, &NoExtenders) {
                Ok(found) => state.assume_pod(info, &found.node),
                Err(ScheduleFailure::Unschedulable { .. }) => {}
                Err(_) => prop_assert!(false, "scheduling must not fail with an internal error"),
            }
        }
        for node in state.nodes() {
            prop_assert!(node.requested.milli_cpu <= node.allocatable.milli_cpu);
            prop_assert!(node.pods.len() as i64 <= node.allocatable.pods);
            let ports = node.ports.sorted();
            prop_assert!(ports.windows(2).all(|pair| pair[0] != pair[1]));
            prop_assert!(node.taints.is_empty() || node.pods.iter().all(|pod| !pod.tolerations.is_empty()));
        }
    }
}
