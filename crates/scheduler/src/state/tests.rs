//! Compares the incremental state with one that is rebuilt from scratch.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::selector::LabelSelector;
use jiff::Timestamp;
use proptest::prelude::*;

use super::topology::{PodMatcher, Scope};
use super::{PodInfo, State};
use crate::testing::{node, pod};

#[derive(Clone, Debug)]
enum Step {
    Node { name: u8, zone: u8, big: bool, image: bool },
    RemoveNode(u8),
    Pod { name: u8, node: u8, label: u8, shape: u8, terminating: bool },
    RemovePod(u8),
    Assume { name: u8, node: u8, label: u8, shape: u8 },
    Forget(u8),
    Bound(u8),
    Expire,
    Query,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..4u8, 0..3u8, any::<bool>(), any::<bool>())
            .prop_map(|(name, zone, big, image)| Step::Node { name, zone, big, image }),
        1 => (0..4u8).prop_map(Step::RemoveNode),
        5 => (0..8u8, 0..5u8, 0..3u8, 0..4u8, any::<bool>())
            .prop_map(|(name, node, label, shape, terminating)| Step::Pod { name, node, label, shape, terminating }),
        2 => (0..8u8).prop_map(Step::RemovePod),
        2 => (0..8u8, 0..5u8, 0..3u8, 0..4u8)
            .prop_map(|(name, node, label, shape)| Step::Assume { name, node, label, shape }),
        1 => (0..8u8).prop_map(Step::Forget),
        1 => (0..8u8).prop_map(Step::Bound),
        1 => Just(Step::Expire),
        2 => Just(Step::Query),
    ];
    prop::collection::vec(step, 1..60)
}

fn pod_line(name: u8, node: Option<u8>, label: u8, shape: u8, terminating: bool) -> String {
    let on = node.map(|node| format!("on=n{node}")).unwrap_or_default();
    let terminating = if terminating { "leaving" } else { "" };
    let shape = match shape {
        0 => "cpu=100m",
        1 => "port=80 claim=data",
        2 => {
            r#"memory=1Gi example.com/gpu=1 {"spec":{"affinity":{"podAntiAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[
                {"topologyKey":"topology.kubernetes.io/zone","labelSelector":{"matchLabels":{"app":"a0"}}}]}}}}"#
        }
        _ => {
            r#"cpu=1 {"spec":{"affinity":{"podAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[
                {"weight":5,"podAffinityTerm":{"topologyKey":"kubernetes.io/hostname","labelSelector":{"matchLabels":{"app":"a1"}}}}]}}}}"#
        }
    };
    format!("pod p{name} {on} {terminating} label=app=a{label} {shape}")
}

fn matcher_cases() -> Vec<PodMatcher> {
    let of = |text: &str, exclude_terminating| PodMatcher {
        all_of: vec![(
            Scope::Namespaces(vec!["default".into()]),
            LabelSelector::parse(text).expect("a valid selector"),
        )],
        exclude_terminating,
    };
    vec![of("app=a0", true), of("app in (a0,a1)", false), of("!app", false)]
}

const KEYS: [&str; 2] = ["topology.kubernetes.io/zone", "kubernetes.io/hostname"];

/// A simple model of the pods on nodes.
#[derive(Default)]
struct Model {
    nodes: BTreeMap<u8, String>,
    /// The line of each pod, whether it is assumed, and whether its binding succeeded.
    pods: BTreeMap<u8, (String, Option<bool>)>,
}

/// All query results, by name so that node IDs do not matter.
fn query_all(state: &mut State) -> BTreeMap<String, String> {
    state.refresh();
    let mut all = BTreeMap::new();
    let mut node_names: Vec<&str> = state.order().iter().map(|id| &*state.node(*id).name).collect();
    node_names.sort_unstable();
    all.insert("nodes".to_owned(), node_names.join(" "));
    let counts: Vec<_> = matcher_cases().iter().map(|matcher| state.count(matcher)).collect();
    let topologies = KEYS.map(|key| state.topology(key));
    for node in state.nodes() {
        let mut pods: Vec<&str> = node.pods.iter().map(|pod| &*pod.uid).collect();
        pods.sort_unstable();
        let counted: Vec<u32> =
            counts.iter().map(|count| count.get(node.id as usize).copied().unwrap_or_default()).collect();
        let size = |topology: &Arc<super::topology::Topology>| match topology.domain(node.id) {
            super::topology::NO_DOMAIN => 0,
            domain => topology.nodes_in(domain),
        };
        let sizes = topologies.each_ref().map(size);
        let summary = format!(
            "{pods:?} {:?} {:?} {:?} {:?} {:?} {counted:?} {sizes:?}",
            node.requested,
            node.nonzero,
            node.ports.sorted(),
            node.claims,
            node.images,
        );
        all.insert(format!("node {}", node.name), summary);
    }
    let name = |id: &u32| state.node(*id).name.to_string();
    for (term, uses) in &state.terms().anti {
        let uses: BTreeMap<String, u32> = uses.iter().map(|(node, count)| (name(node), *count)).collect();
        all.insert(format!("anti {term:?}"), format!("{uses:?}"));
    }
    for (term, uses) in &state.terms().scoring {
        let uses: BTreeMap<String, u32> = uses.iter().map(|(node, count)| (name(node), *count)).collect();
        all.insert(format!("scored {term:?}"), format!("{uses:?}"));
    }
    all.insert("claims".to_owned(), state.users_of_claim("default", "data").to_string());
    all.insert("image".to_owned(), state.nodes_with_image("img:latest").to_string());
    all.insert("placed".to_owned(), state.pod_count().to_string());
    all
}

fn info(state: &mut State, line: &str) -> Arc<PodInfo> {
    Arc::new(PodInfo::new(&pod(line), &mut state.strings))
}

fn apply(state: &mut State, model: &mut Model, step: &Step) {
    match step {
        Step::Node { name, zone, big, image } => {
            let (big, image) =
                (if *big { "cpu=8" } else { "" }, if *image { "image=img:latest@5" } else { "" });
            let zone = if *zone == 0 { String::new() } else { format!("zone=z{zone}") };
            let line = format!("node n{name} {zone} {big} {image}");
            state.set_node(Arc::new(node(&line)));
            model.nodes.insert(*name, line);
        }
        Step::RemoveNode(name) => {
            state.remove_node(&format!("n{name}"));
            model.nodes.remove(name);
        }
        Step::Pod { name, node, label, shape, terminating: leaving } => {
            let line = pod_line(*name, Some(*node), *label, *shape, *leaving);
            let pod = info(state, &line);
            state.set_pod(pod);
            model.pods.insert(*name, (line, None));
        }
        Step::RemovePod(name) => {
            state.remove_pod(&format!("uid-p{name}"));
            model.pods.remove(name);
        }
        Step::Assume { name, node, label, shape } => {
            let pod = info(state, &pod_line(*name, None, *label, *shape, false));
            state.assume_pod(pod, &format!("n{node}").into());
            let line = pod_line(*name, Some(*node), *label, *shape, false);
            model.pods.insert(*name, (line, Some(false)));
        }
        Step::Forget(name) => {
            let was = model.pods.get(name).is_some_and(|(_, assumed)| assumed.is_some());
            assert_eq!(state.forget_pod(&format!("uid-p{name}")), was);
            if was {
                model.pods.remove(name);
            }
        }
        Step::Bound(name) => {
            state.finish_binding(&format!("uid-p{name}"), Timestamp::UNIX_EPOCH);
            if let Some((_, Some(bound))) = model.pods.get_mut(name) {
                *bound = true;
            }
        }
        Step::Expire => {
            state.remove_expired_assumed_pods(Timestamp::from_second(1).expect("a second is a time"));
            model.pods.retain(|_, (_, assumed)| *assumed != Some(true));
        }
        Step::Query => drop(query_all(state)),
    }
}

fn state_from_model(model: &Model) -> State {
    let mut state = State::default();
    for line in model.nodes.values() {
        state.set_node(Arc::new(node(line)));
    }
    for (line, _) in model.pods.values() {
        let pod = info(&mut state, line);
        state.set_pod(pod);
    }
    state
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn updated_state_equals_state_from_scratch(steps in steps()) {
        let (mut state, mut model) = (State::default(), Model::default());
        // Query first, so that the results are cached from the start.
        query_all(&mut state);
        for step in &steps {
            apply(&mut state, &mut model, step);
        }
        prop_assert_eq!(query_all(&mut state), query_all(&mut state_from_model(&model)));
    }
}

#[test]
fn node_order_is_balanced_by_zone() {
    let mut cluster = crate::testing::test_cluster(
        "node a zone=z1\nnode b zone=z1\nnode c zone=z2\nnode d zone=z1\nnode e",
    );
    cluster.state.refresh();
    let order: Vec<&str> = cluster.state.order().iter().map(|id| &*cluster.state.node(*id).name).collect();
    assert_eq!(order, ["a", "c", "e", "b", "d"]);
}
