mod component;

use std::collections::{BTreeMap, BTreeSet, HashSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use proptest::prelude::*;

use super::graph::{FOREGROUND, Graph, KindId, Look, Meta, ORPHAN, Uid};
use super::plan::{Action, Standing, plan};

/// `name owner... !` is an object, its owners (`+` blocked), and how it is being deleted: `!` `!orphan`
/// `!foreground`.
fn object(text: &str) -> Meta {
    let mut words = text.split_whitespace();
    let name = words.next().unwrap_or_default();
    let mut meta = Meta { uid: name.into(), name: name.into(), namespace: "ns".into(), ..Meta::default() };
    for word in words {
        if let Some(how) = word.strip_prefix('!') {
            meta.deletion_timestamp = Some("2026-01-01T00:00:00Z".into());
            match how {
                "orphan" => meta.finalizers.push(ORPHAN.into()),
                "foreground" => meta.finalizers.push(FOREGROUND.into()),
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

/// Takes in objects (`-name` is one that is gone) and tells whom the last one wakes and what they call for.
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
        .map(|uid| match graph.look(*uid) {
            Look::Nothing => format!("{} nothing", name(uid)),
            Look::Verify => format!("{} verify", name(uid)),
            Look::Orphan { dependents } => format!("{} orphan {}", name(uid), list(&dependents)),
            Look::Foreground { blocked_by } => format!("{} foreground {}", name(uid), list(&blocked_by)),
        })
        .collect();
    found.sort();
    assert_eq!(found.join("; "), expected);
}

#[test]
fn the_graph_tells_whom_to_look_at() {
    check_graph(&["a"], "");
    // The owner first, and the dependent first.
    check_graph(&["a", "b a"], "b nothing");
    check_graph(&["b a"], "b verify");
    check_graph(&["b a", "a"], "");
    // Owners that go.
    check_graph(&["a", "b a", "-a"], "b verify");
    check_graph(&["a", "b a", "a !"], "");
    check_graph(&["a", "b a", "c a+", "a !orphan"], "a orphan b,c");
    check_graph(&["a", "b a", "c a+", "a !foreground"], "a foreground c; b verify; c verify");
    // What an owner waits for.
    check_graph(&["a", "c a+", "a !foreground", "-c"], "a foreground ");
    check_graph(&["a", "c a+", "a !foreground", "c a"], "a foreground ; c verify");
    check_graph(&["a", "c a+", "a !foreground", "c"], "a foreground ; c nothing");
    check_graph(&["a", "c a+", "a !foreground", "c a+ !"], "");
    check_graph(&["a !foreground", "d a+"], "d verify");
    // What is on its way needs no looking after.
    check_graph(&["a", "b a !", "-a"], "b nothing");
}

#[test]
fn missed_deletions_are_made_up_for() {
    let mut graph = Graph::default();
    for text in ["a", "b a", "c d"] {
        observe(&mut graph, text, &mut |_| {});
    }
    let mut woken = BTreeSet::new();
    let present = HashSet::from(["b", "c"].map(Uid::of));
    graph.retain(KindId(0), &present, &mut |uid| woken.extend([uid]));
    assert_eq!(woken, BTreeSet::from(["b", "c"].map(Uid::of)));
    assert_eq!(graph.len(), 2);
}

#[test]
fn another_namespace_or_name_is_another_owner() {
    let mut graph = Graph::default();
    observe(&mut graph, "a", &mut |_| {});
    let mut elsewhere = object("b a");
    elsewhere.namespace = "other".into();
    graph.observe(KindId(0), ("", "Thing"), &elsewhere, &mut |_| {});
    assert_eq!(graph.look(Uid::of("b")), Look::Verify);
    let mut renamed = object("c a");
    renamed.owner_references[0].name = "z".into();
    graph.observe(KindId(0), ("", "Thing"), &renamed, &mut |_| {});
    assert_eq!(graph.look(Uid::of("c")), Look::Verify);
}

#[test]
fn uids_print_as_they_are_written() {
    let text = "0b1c2d3e-0000-4000-8000-00000000abcd";
    assert_eq!(Uid::of(text).to_string(), text);
    assert_ne!(Uid::of("0B1C2D3E-0000-4000-8000-00000000ABCD"), Uid::of(text));
    assert_ne!(Uid::of("one"), Uid::of("two"));
}

#[track_caller]
fn check_plan(meta: &str, standings: &str, dependents: &[bool], expected: &str) {
    let standings: Vec<Standing> = standings
        .split_whitespace()
        .map(|word| match word {
            "solid" => Standing::Solid,
            "absent" => Standing::Absent,
            _ => Standing::Waiting,
        })
        .collect();
    let actions = plan(&object(meta), &standings, dependents);
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
fn objects_go_with_their_last_owner() {
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
    let mut held = object("x a");
    held.finalizers.push(ORPHAN.into());
    assert_eq!(plan(&held, &[Standing::Absent], &[]), [Action::Delete { propagation: "Orphan" }]);
}

proptest! {
    /// Whatever is told in whatever order, every dependent of an owner that is not there gets looked at, and
    /// the graph holds nothing of objects that are gone.
    #[test]
    fn nobody_is_forgotten(steps in prop::collection::vec((0..6u8, 0..6u8, 0..4u8), 1..60)) {
        let mut graph = Graph::default();
        let mut alive: BTreeMap<u8, Option<u8>> = BTreeMap::new();
        let mut due = BTreeSet::new();
        for (object, owner, what) in steps {
            let name = format!("o{object}");
            let mut wake = |uid| due.extend([uid]);
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
            prop_assert_eq!(graph.look(uid) == Look::Verify, lost);
            prop_assert!(!lost || due.contains(&uid));
        }
        prop_assert_eq!(graph.len(), alive.len());
    }
}
