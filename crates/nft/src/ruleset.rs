//! The desired content of the table, and which changes were not sent to the kernel yet.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{BaseChain, Batch, Command, Fragment, Key, Name, Rule, Set, Verdict};

/// One table, composed of the fragments of its owners. A chain or set has exactly one owner. An element
/// may be claimed by several owners; the first of them by name determines its verdict.
#[derive(Debug, Default)]
pub struct Ruleset {
    owned: HashMap<Name, OwnerState>,
    base_chains: BTreeMap<Name, BaseChain>,
    chains: HashMap<Name, Vec<Rule>>,
    sets: HashMap<Name, Set>,
    elements: HashMap<Name, HashMap<Key, Claims>>,
    pending: PendingChanges,
    /// Chains that are no longer referenced. Kernels before 6.2 need some time before they allow the
    /// deletion.
    stale: BTreeSet<Name>,
}

/// The names of an owner's objects in the table.
#[derive(Debug, Default)]
struct OwnerState {
    chains: Vec<Name>,
    sets: Vec<Name>,
    elements: Vec<(Name, Key)>,
}

/// The owners of an element with the verdict each of them wants, sorted by owner.
type Claims = Vec<(Name, Option<Verdict>)>;

/// The state of each changed object as the kernel has it: before the first change that was not sent.
#[derive(Debug, Default)]
struct PendingChanges {
    chains: BTreeMap<Name, Option<Vec<Rule>>>,
    sets: BTreeMap<Name, Option<Set>>,
    elements: BTreeMap<(Name, Key), Option<Option<Verdict>>>,
}

impl Ruleset {
    /// Replaces everything that `owner` has in the table. An empty fragment removes it.
    pub fn put(&mut self, owner: &Name, fragment: Fragment) {
        let old = self.owned.remove(owner).unwrap_or_default();
        for name in old.chains.iter().filter(|name| !fragment.chains.contains_key(*name)) {
            self.change_chain(name, None);
            self.base_chains.remove(name);
        }
        for name in old.sets.iter().filter(|name| !fragment.sets.contains_key(*name)) {
            self.change_set(name, None);
        }
        for element in old.elements.iter().filter(|element| !fragment.elements.contains_key(*element)) {
            self.change_element(owner, element, None);
        }
        if fragment.is_empty() {
            return;
        }
        let owned = OwnerState {
            chains: fragment.chains.keys().cloned().collect(),
            sets: fragment.sets.keys().cloned().collect(),
            elements: fragment.elements.keys().cloned().collect(),
        };
        self.owned.insert(owner.clone(), owned);
        self.base_chains.extend(fragment.base_chains);
        for (name, rules) in fragment.chains {
            self.change_chain(&name, Some(rules));
        }
        for (name, set) in fragment.sets {
            self.change_set(&name, Some(set));
        }
        for (element, verdict) in fragment.elements {
            self.change_element(owner, &element, Some(verdict));
        }
    }

    /// Removes all owners for which `keep` returns false.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        let removed: Vec<Name> = self.owned.keys().filter(|owner| !keep(owner)).cloned().collect();
        for owner in removed {
            self.put(&owner, Fragment::default());
        }
    }

    /// The changes since the last batch.
    pub fn changes(&mut self) -> Batch {
        let PendingChanges { chains, sets, elements } = std::mem::take(&mut self.pending);
        let mut batch = Batch::default();
        // The order of commands follows the references: elements and rules go before the sets and
        // chains that they reference, and come after them.
        let (removed, new) = self.changed_elements(elements);
        for (set, elements) in removed {
            batch.push(Command::DeleteElements(set, elements));
        }
        let changed: Vec<(Name, bool)> = chains
            .into_iter()
            .filter(|(name, before)| self.chains.get(name) != before.as_ref())
            .map(|(name, before)| (name, before.is_some()))
            .collect();
        for (name, _) in changed.iter().filter(|(_, was_there)| *was_there) {
            batch.push(Command::FlushChain(name.clone()));
        }
        let sets: Vec<(Name, bool)> = sets
            .into_iter()
            .filter(|(name, before)| self.sets.get(name) != before.as_ref())
            .map(|(name, before)| (name, before.is_some()))
            .collect();
        for (name, _) in sets.iter().filter(|(_, was_there)| *was_there) {
            batch.push(Command::DeleteSet(name.clone()));
        }
        for (name, _) in &sets {
            if let Some(set) = self.sets.get(name) {
                batch.push(Command::AddSet(name.clone(), set.clone()));
            }
        }
        for (name, was_there) in &changed {
            match self.chains.contains_key(name) {
                true if !was_there && !self.stale.remove(name) => {
                    batch.push(Command::AddChain(name.clone(), self.base_chains.get(name).copied()));
                }
                true => {}
                // The chain is only emptied now. `changes_and_prune` deletes it later.
                false => _ = self.stale.insert(name.clone()),
            }
        }
        for (name, _) in &changed {
            self.add_rules(name, &mut batch);
        }
        for (set, elements) in new {
            batch.push(Command::AddElements(set, elements));
        }
        batch
    }

    /// Like [`Ruleset::changes`], and deletes the stale chains first. Call it only when these have been
    /// unused for some time.
    pub fn changes_and_prune(&mut self) -> Batch {
        let stale = std::mem::take(&mut self.stale);
        let reused: Vec<Name> =
            stale.iter().filter(|name| self.chains.contains_key(*name)).cloned().collect();
        self.stale = reused.into_iter().collect();
        let pruned = stale.into_iter().filter(|name| !self.stale.contains(name)).map(Command::DeleteChain);
        let pruned: Vec<Command> = pruned.collect();
        let mut batch = self.changes();
        batch.commands.splice(0..0, pruned);
        batch
    }

    /// A batch that recreates the table with all its content.
    pub fn full_batch(&mut self) -> Batch {
        self.pending = PendingChanges::default();
        self.stale.clear();
        let mut batch = Batch { commands: vec![Command::RecreateTable] };
        let sets: BTreeMap<&Name, &Set> = self.sets.iter().collect();
        for (name, set) in sets {
            batch.push(Command::AddSet(name.clone(), set.clone()));
        }
        let chains: BTreeSet<&Name> = self.chains.keys().collect();
        for name in &chains {
            batch.push(Command::AddChain((*name).clone(), self.base_chains.get(*name).copied()));
        }
        for name in &chains {
            self.add_rules(name, &mut batch);
        }
        let elements: BTreeMap<&Name, &HashMap<Key, Claims>> = self.elements.iter().collect();
        for (set, elements) in elements {
            let mut elements: Vec<(Key, Option<Verdict>)> = elements
                .iter()
                .filter_map(|(key, claims)| Some((key.clone(), claims.first()?.1.clone())))
                .collect();
            elements.sort();
            batch.push(Command::AddElements(set.clone(), elements));
        }
        batch
    }

    /// The rules of a chain.
    pub fn chain(&self, name: &str) -> Option<&[Rule]> {
        self.chains.get(name).map(Vec::as_slice)
    }

    /// The base chains.
    pub fn base_chains(&self) -> impl Iterator<Item = (&Name, &BaseChain)> {
        self.base_chains.iter()
    }

    /// The elements of a set with their verdicts.
    pub fn elements(&self, set: &str) -> impl Iterator<Item = (&Key, Option<&Verdict>)> {
        let elements = self.elements.get(set).into_iter().flatten();
        elements.filter_map(|(key, claims)| Some((key, claims.first()?.1.as_ref())))
    }

    pub fn element(&self, set: &str, key: &Key) -> Option<Option<&Verdict>> {
        Some(self.elements.get(set)?.get(key)?.first()?.1.as_ref())
    }

    /// The number of chains.
    pub fn len(&self) -> usize {
        self.chains.len()
    }

    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    fn add_rules(&self, chain: &Name, batch: &mut Batch) {
        for rule in self.chains.get(chain).into_iter().flatten() {
            batch.push(Command::AddRule(chain.clone(), rule.clone()));
        }
    }

    fn change_chain(&mut self, name: &Name, rules: Option<Vec<Rule>>) {
        if self.chains.get(name) == rules.as_ref() {
            return;
        }
        let before = match rules {
            Some(rules) => self.chains.insert(name.clone(), rules),
            None => self.chains.remove(name),
        };
        self.pending.chains.entry(name.clone()).or_insert(before);
    }

    fn change_set(&mut self, name: &Name, set: Option<Set>) {
        if self.sets.get(name) == set.as_ref() {
            return;
        }
        let before = match set {
            Some(set) => self.sets.insert(name.clone(), set),
            None => self.sets.remove(name),
        };
        self.pending.sets.entry(name.clone()).or_insert(before);
    }

    fn change_element(&mut self, owner: &Name, element: &(Name, Key), verdict: Option<Option<Verdict>>) {
        let (set, key) = element;
        let elements = self.elements.entry(set.clone()).or_default();
        let claims = elements.entry(key.clone()).or_default();
        let before = claims.first().map(|(_, verdict)| verdict.clone());
        match (claims.binary_search_by(|(claimant, _)| claimant.cmp(owner)), verdict) {
            (Ok(at), Some(verdict)) => claims[at].1 = verdict,
            (Ok(at), None) => _ = claims.remove(at),
            (Err(at), Some(verdict)) => claims.insert(at, (owner.clone(), verdict)),
            (Err(_), None) => {}
        }
        let after = claims.first().map(|(_, verdict)| verdict.clone());
        if claims.is_empty() {
            elements.remove(key);
        }
        if before != after {
            self.pending.elements.entry(element.clone()).or_insert(before);
        }
    }

    /// The elements to delete and to add, by set. An element with a changed verdict is deleted and
    /// added.
    fn changed_elements(
        &self,
        before: BTreeMap<(Name, Key), Option<Option<Verdict>>>,
    ) -> (ElementsBySet, ElementsBySet) {
        let (mut removed, mut new) = (ElementsBySet::new(), ElementsBySet::new());
        for ((set, key), before) in before {
            let after = self.element(&set, &key).map(Option::<&Verdict>::cloned);
            if before == after {
                continue;
            }
            if let Some(before) = before {
                removed.entry(set.clone()).or_default().push((key.clone(), before));
            }
            if let Some(after) = after {
                new.entry(set).or_default().push((key, after));
            }
        }
        (removed, new)
    }
}

type ElementsBySet = BTreeMap<Name, Vec<(Key, Option<Verdict>)>>;

#[cfg(test)]
mod tests;
