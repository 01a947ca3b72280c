mod component;

use std::collections::{BTreeMap, BTreeSet, HashSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use proptest::prelude::*;

use super::graph::{
    FINALIZER_DELETE_DEPENDENTS, FINALIZER_ORPHAN_DEPENDENTS, Graph, GraphAction, KindId, ObjectMetadata, Uid,
};
use super::plan::{Action, OwnerState, plan};

/// An object given as `name owner... !`: its owners (`+` means blocking) and its deletion state: `!`,
/// `!orphan`, `!foreground`.
fn object(text: &str) -> ObjectMetadata {
    let mut words = text.split_whitespace();
    let name = words.next().unwrap_or_default();
    let mut meta = ObjectMetadata {
        uid: name.into(),
        name: name.into(),
        namespace: "ns".into(),
        ..ObjectMetadata::default()
    };
    for word in words {
        if let Some(how) = word.strip_prefix('!') {
            meta.deletion_timestamp = Some("2026-01-01T00:00:00Z".into());
            match how {
                "orphan" => meta.finalizers.push(FINALIZER_ORPHAN_DEPENDENTS.into()),
                "foreground" => meta.finalizers.push(FINALIZER_DELETE_DEPENDENTS.into()),
                _ => {}
            }
            continue;
        }
        let owner = word.trim_end_matches('+');
        meta.owner_references.push(OwnerReference {
            api_version: "v1".into(),
            kind: "Thing".into(),
            name: owner.into(),
            uid: owner.into(),
            block_owner_deletion: Some(word.ends_with('+')),
            controller: None,
        });
    }
    meta
}

fn observe(graph: &mut Graph, text: &str, wake: &mut dyn FnMut(Uid)) {
    graph.observe(KindId(0), ("", "Thing"), &object(text), wake);
}

/// Observes objects in order (`-name` is deleted) and checks what the last one wakes and the resulting
/// actions.
#[track_caller]
fn check_graph(script: &[&str], expected: &str) {
    let mut graph = Graph::default();
    let mut names = BTreeMap::new();
    let mut woken = BTreeSet::new();
    for line in script {
        woken.clear();
        let mut wake = |uid| woken.extend([uid]);
        match line.strip_prefix('-') {
            Some(name) => graph.forget(Uid::of(name), &mut wake),
            None => {
                let name = line.split_whitespace().next().unwrap_or_default().to_owned();
                names.insert(Uid::of(&name), name);
                observe(&mut graph, line, &mut wake);
            }
        }
    }
    let name = |uid: &Uid| names.get(uid).map_or("?", String::as_str);
    let list = |uids: &[Uid]| {
        let mut names: Vec<&str> = uids.iter().map(name).collect();
        names.sort();
        names.join(",")
    };
    let mut found: Vec<String> = woken
        .iter()
        .map(|uid| match graph.next_action(*uid) {
            GraphAction::Nothing => format!("{} nothing", name(uid)),
            GraphAction::ProcessOwners => format!("{} verify", name(uid)),
            GraphAction::Orphan { dependents } => format!("{} orphan {}", name(uid), list(&dependents)),
            GraphAction::Foreground { blocked_by } => {
                format!("{} foreground {}", name(uid), list(&blocked_by))
            }
        })
        .collect();
    found.sort();
    assert_eq!(found.join("; "), expected);
}

#[test]
fn graph_wakes_affected_objects() {
    check_graph(&["a"], "");
    // The owner is observed first, or the dependent is.
    check_graph(&["a", "b a"], "b nothing");
    check_graph(&["b a"], "b verify");
    check_graph(&["b a", "a"], "");
    // Owners that are deleted.
    check_graph(&["a", "b a", "-a"], "b verify");
    check_graph(&["a", "b a", "a !"], "");
    check_graph(&["a", "b a", "c a+", "a !orphan"], "a orphan b,c");
    check_graph(&["a", "b a", "c a+", "a !foreground"], "a foreground c; b verify; c verify");
    // Dependents that block an owner.
    check_graph(&["a", "c a+", "a !foreground", "-c"], "a foreground ");
    check_graph(&["a", "c a+", "a !foreground", "c a"], "a foreground ; c verify");
    check_graph(&["a", "c a+", "a !foreground", "c"], "a foreground ; c nothing");
    check_graph(&["a", "c a+", "a !foreground", "c a+ !"], "");
    check_graph(&["a !foreground", "d a+"], "d verify");
    // An object that is already being deleted needs no action.
    check_graph(&["a", "b a !", "-a"], "b nothing");
}

#[test]
fn missed_deletions_are_detected_after_relist() {
    let mut graph = Graph::default();
    for text in ["a", "b a", "c d"] {
        observe(&mut graph, text, &mut |_| {});
    }
    let mut woken = BTreeSet::new();
    let present = HashSet::from(["b", "c"].map(Uid::of));
    graph.remove_absent(KindId(0), &present, &mut |uid| woken.extend([uid]));
    assert_eq!(woken, BTreeSet::from(["b", "c"].map(Uid::of)));
    assert_eq!(graph.len(), 2);
}

#[test]
fn owner_must_match_namespace_and_name() {
    let mut graph = Graph::default();
    observe(&mut graph, "a", &mut |_| {});
    let mut other_namespace = object("b a");
    other_namespace.namespace = "other".into();
    graph.observe(KindId(0), ("", "Thing"), &other_namespace, &mut |_| {});
    assert_eq!(graph.next_action(Uid::of("b")), GraphAction::ProcessOwners);
    let mut renamed = object("c a");
    renamed.owner_references[0].name = "z".into();
    graph.observe(KindId(0), ("", "Thing"), &renamed, &mut |_| {});
    assert_eq!(graph.next_action(Uid::of("c")), GraphAction::ProcessOwners);
}

#[test]
fn uid_formats_as_parsed() {
    let text = "0b1c2d3e-0000-4000-8000-00000000abcd";
    assert_eq!(Uid::of(text).to_string(), text);
    assert_ne!(Uid::of("0B1C2D3E-0000-4000-8000-00000000ABCD"), Uid::of(text));
    assert_ne!(Uid::of("one"), Uid::of("two"));
}

#[track_caller]
fn check_plan(meta: &str, owner_states: &str, dependents: &[bool], expected: &str) {
    let owner_states: Vec<OwnerState> = owner_states
        .split_whitespace()
        .map(|word| match word {
            "solid" => OwnerState::Solid,
            "absent" => OwnerState::Dangling,
            _ => OwnerState::DeletingDependents,
        })
        .collect();
    let actions = plan(&object(meta), &owner_states, dependents);
    let actions: Vec<String> = actions
        .iter()
        .map(|action| match action {
            Action::RemoveOwners(uids) => format!("remove {}", uids.join(",")),
            Action::Unblock => "unblock".into(),
            Action::Delete { propagation } => format!("delete {propagation}"),
        })
        .collect();
    assert_eq!(actions.join("; "), expected);
}

#[test]
fn object_is_deleted_with_last_owner() {
    check_plan("x", "", &[], "");
    check_plan("x a", "solid", &[], "");
    check_plan("x a", "absent", &[], "delete Background");
    check_plan("x a b", "absent absent", &[false], "delete Background");
    check_plan("x a b", "solid absent", &[], "remove b");
    check_plan("x a b c", "waiting solid absent", &[], "remove a,c");
    check_plan("x a", "waiting", &[], "delete Background");
    check_plan("x a", "waiting", &[false], "delete Foreground");
    check_plan("x a", "waiting", &[false, true], "unblock; delete Foreground");
    check_plan("x a !", "absent", &[], "");
    let mut with_orphan_finalizer = object("x a");
    with_orphan_finalizer.finalizers.push(FINALIZER_ORPHAN_DEPENDENTS.into());
    assert_eq!(
        plan(&with_orphan_finalizer, &[OwnerState::Dangling], &[]),
        [Action::Delete { propagation: "Orphan" }]
    );
}

proptest! {
    /// For any order of events, every dependent of a missing owner is woken, and the graph keeps nothing of
    /// deleted objects.
    #[test]
    fn dependents_of_absent_owners_are_woken(steps in prop::collection::vec((0..6u8, 0..6u8, 0..4u8), 1..60)) {
        let mut graph = Graph::default();
        let mut alive: BTreeMap<u8, Option<u8>> = BTreeMap::new();
        let mut woken = BTreeSet::new();
        for (object, owner, what) in steps {
            let name = format!("o{object}");
            let mut wake = |uid| woken.extend([uid]);
            match what {
                0 => {
                    alive.remove(&object);
                    graph.forget(Uid::of(&name), &mut wake);
                }
                1 => {
                    alive.insert(object, None);
                    observe(&mut graph, &name, &mut wake);
                }
                _ => {
                    alive.insert(object, Some(owner));
                    observe(&mut graph, &format!("{name} o{owner}"), &mut wake);
                }
            }
        }
        for (object, owner) in &alive {
            let uid = Uid::of(&format!("o{object}"));
            let lost = owner.is_some_and(|owner| !alive.contains_key(&owner));
            prop_assert_eq!(graph.next_action(uid) == GraphAction::ProcessOwners, lost);
            prop_assert!(!lost || woken.contains(&uid));
        }
        prop_assert_eq!(graph.len(), alive.len());
    }
}
