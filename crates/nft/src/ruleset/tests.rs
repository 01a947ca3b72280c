use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;
use crate::render::render;
use crate::{DataType, MatchValue, Statement, rule};

fn name(text: &str) -> Name {
    text.into()
}

/// A fragment with one chain and one map element per item: `a>1` creates chain `a`, and port 1 in `map`
/// goes to it.
fn fragment(text: &str) -> Fragment {
    let mut fragment = Fragment::default();
    for part in text.split_whitespace() {
        let (chain, port) = part.split_once('>').unwrap();
        let chain = name(chain);
        fragment.chain(&chain, vec![rule([Statement::Reject])]);
        fragment.element(
            &name("map"),
            vec![MatchValue::Port(port.parse().unwrap())],
            Some(Verdict::Goto(chain)),
        );
    }
    fragment
}

fn ruleset() -> Ruleset {
    let mut rules = Ruleset::default();
    let mut base = Fragment::default();
    base.set(&name("map"), Set::verdict_map(&[DataType::Port]));
    rules.put(&name(""), base);
    rules
}

#[track_caller]
fn check(steps: &[(&str, &str)], expected: Expect) {
    let mut rules = ruleset();
    let mut text = String::new();
    rules.changes();
    for (owner, parts) in steps {
        rules.put(&name(owner), fragment(parts));
        text.push_str("---\n");
        text.push_str(&render("t", &rules.changes_and_prune()));
    }
    expected.assert_eq(&text);
}

#[test]
fn batch_contains_only_changes() {
    check(
        &[("one", "a>1 b>2"), ("one", "a>1 b>3"), ("one", "a>1 b>3"), ("one", ""), ("two", "b>2")],
        expect![[r#"
            ---
            add chain inet t a
            add chain inet t b
            add rule inet t a reject
            add rule inet t b reject
            add element inet t map { 1 : goto a, 2 : goto b }
            ---
            delete element inet t map { 2 }
            add element inet t map { 3 : goto b }
            ---
            ---
            delete element inet t map { 1, 3 }
            flush chain inet t a
            flush chain inet t b
            ---
            delete chain inet t a
            add rule inet t b reject
            add element inet t map { 2 : goto b }
        "#]],
    );
}

#[test]
fn shared_element_stays_with_its_first_owner() {
    check(
        &[("two", "b>1"), ("one", "a>1"), ("two", "b>1"), ("one", "")],
        expect![[r#"
            ---
            add chain inet t b
            add rule inet t b reject
            add element inet t map { 1 : goto b }
            ---
            delete element inet t map { 1 }
            add chain inet t a
            add rule inet t a reject
            add element inet t map { 1 : goto a }
            ---
            ---
            delete element inet t map { 1 }
            flush chain inet t a
            add element inet t map { 1 : goto b }
        "#]],
    );
}

/// A simulated kernel that applies batches.
#[derive(Debug, Default, PartialEq)]
struct FakeKernel {
    chains: BTreeMap<Name, Vec<Rule>>,
    sets: BTreeMap<Name, (Set, BTreeMap<Key, Option<Verdict>>)>,
}

impl FakeKernel {
    fn apply(&mut self, batch: &Batch) {
        for command in &batch.commands {
            match command.clone() {
                Command::RecreateTable | Command::DeleteTable => *self = FakeKernel::default(),
                Command::AddSet(name, set) => {
                    assert!(self.sets.insert(name, (set, BTreeMap::new())).is_none());
                }
                Command::AddChain(name, _) => _ = self.chains.entry(name).or_default(),
                Command::FlushChain(name) => self.chains.get_mut(&name).unwrap().clear(),
                Command::AddRule(name, rule) => self.chains.get_mut(&name).unwrap().push(rule),
                Command::AddElements(set, elements) => {
                    for (key, verdict) in elements {
                        if let Some(Verdict::Goto(chain)) = &verdict {
                            assert!(self.chains.contains_key(chain));
                        }
                        let set = &mut self.sets.get_mut(&set).unwrap().1;
                        assert!(set.insert(key, verdict).is_none());
                    }
                }
                Command::DeleteElements(set, elements) => {
                    for (key, _) in elements {
                        assert!(self.sets.get_mut(&set).unwrap().1.remove(&key).is_some());
                    }
                }
                Command::DeleteChain(name) => {
                    let points_to_chain =
                        |verdict: &Option<Verdict>| *verdict == Some(Verdict::Goto(name.clone()));
                    assert!(!self.sets.values().any(|(_, elements)| elements.values().any(points_to_chain)));
                    assert!(self.chains.remove(&name).unwrap().is_empty());
                }
                Command::DeleteSet(name) => assert!(self.sets.remove(&name).is_some()),
            }
        }
    }
}

proptest! {
    /// Applying the changes one by one gives the same table as applying everything at once.
    #[test]
    fn changes_add_up_to_the_full_batch(steps in prop::collection::vec((0..3u8, prop::collection::btree_map(0..4u8, 1..5u16, 0..4), any::<bool>()), 0..20)) {
        let (mut rules, mut kernel) = (ruleset(), FakeKernel::default());
        for (owner, parts, apply_now) in steps {
            // Each chain belongs to one owner; elements may be claimed by several.
            let parts: Vec<String> = parts.iter().map(|(chain, port)| format!("c{owner}{chain}>{port}")).collect();
            rules.put(&name(&format!("o{owner}")), fragment(&parts.join(" ")));
            if apply_now {
                kernel.apply(&rules.changes_and_prune());
            }
        }
        kernel.apply(&rules.changes());
        kernel.apply(&rules.changes_and_prune());
        prop_assert!(rules.changes().is_empty());
        let mut fresh = FakeKernel::default();
        fresh.apply(&rules.full_batch());
        prop_assert_eq!(kernel, fresh);
    }
}
