//! The graph of owners and dependents of all objects, built from watch events. Does no I/O.
//!
//! A node holds only what is needed to find owners and dependents. Each update wakes the objects to
//! process; whether one of them is deleted is decided by its live state ([`super::plan`](mod@super::plan)).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use reconcile::Key;
use serde::Deserialize;

pub const FINALIZER_DELETE_DEPENDENTS: &str = "foregroundDeletion";
pub const FINALIZER_ORPHAN_DEPENDENTS: &str = "orphan";

/// An object's UID in compact form. The API server generates UIDs in one format. Other text in an owner
/// reference is hashed to a number that no generated UID has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Uid(u128);

impl Uid {
    pub fn of(text: &str) -> Uid {
        let digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
        let form = text.len() == 36
            && text.bytes().enumerate().all(|(i, c)| match i {
                8 | 13 | 18 | 23 => c == b'-',
                _ => digit(c),
            });
        match u128::from_str_radix(&text.replace('-', ""), 16) {
            Ok(number) if form => Uid(number),
            // Bits 76-79 of a UUID are its version. Version 4 never has bit 79 set, so the hash cannot
            // collide with a generated UID.
            _ => Uid(u128::from(hash(text)) | 1 << 127 | 1 << 79),
        }
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:032x}", self.0);
        write!(f, "{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
    }
}

/// Index of a watched kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KindId(pub u16);

/// The parts of an object's metadata that the collector needs.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectMetadata {
    pub uid: String,
    pub name: String,
    pub namespace: String,
    pub resource_version: String,
    pub deletion_timestamp: Option<String>,
    pub finalizers: Vec<String>,
    pub owner_references: Vec<OwnerReference>,
}

/// An object of which only the metadata is decoded.
#[derive(Debug, Default, Deserialize)]
pub struct PartialObject {
    #[serde(default)]
    pub metadata: ObjectMetadata,
}

impl ObjectMetadata {
    pub fn is_deleting(&self) -> bool {
        self.deletion_timestamp.is_some()
    }

    pub fn has_finalizer(&self, finalizer: &str) -> bool {
        self.finalizers.iter().any(|existing| existing == finalizer)
    }
}

/// A hash of group, kind and name, to compare an owner reference with the object it refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityHash(u64);

impl IdentityHash {
    pub fn new(group: &str, kind: &str, name: &str) -> IdentityHash {
        IdentityHash(hash((group, kind, name)))
    }

    pub fn of(reference: &OwnerReference) -> IdentityHash {
        let group = reference.api_version.split_once('/').map_or("", |(group, _)| group);
        IdentityHash::new(group, &reference.kind, &reference.name)
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The deletion state of an object as far as its dependents are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeletionStage {
    NotDeleting,
    Deleting,
    /// Waits until its dependents are orphaned.
    Orphaning,
    /// Waits until its blocking dependents are deleted.
    Foreground,
}

impl DeletionStage {
    fn of(meta: &ObjectMetadata) -> DeletionStage {
        match meta.is_deleting() {
            false => DeletionStage::NotDeleting,
            true if meta.has_finalizer(FINALIZER_ORPHAN_DEPENDENTS) => DeletionStage::Orphaning,
            true if meta.has_finalizer(FINALIZER_DELETE_DEPENDENTS) => DeletionStage::Foreground,
            true => DeletionStage::Deleting,
        }
    }
}

struct Node {
    kind: KindId,
    namespace: Arc<str>,
    name: Box<str>,
    identity: IdentityHash,
    owners: Box<[Owner]>,
    stage: DeletionStage,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Owner {
    uid: Uid,
    identity: IdentityHash,
    blocked: bool,
}

/// What has to be done for an object.
#[derive(Debug, PartialEq)]
pub enum GraphAction {
    Nothing,
    /// Read its owners and process it.
    ProcessOwners,
    /// Remove the owner reference from these dependents, then the finalizer.
    Orphan {
        dependents: Vec<Uid>,
    },
    /// Wait for these dependents to be deleted. If there are none, remove the finalizer.
    Foreground {
        blocked_by: Vec<Uid>,
    },
}

/// All objects of all watched kinds.
#[derive(Default)]
pub struct Graph {
    nodes: HashMap<Uid, Node>,
    /// The dependents of each owner, including owners that were never observed.
    dependents: HashMap<Uid, BTreeSet<Uid>>,
    namespaces: HashSet<Arc<str>>,
}

impl Graph {
    /// Adds or updates an object and calls `wake` for the objects to process.
    pub fn observe(
        &mut self,
        kind: KindId,
        group_kind: (&str, &str),
        meta: &ObjectMetadata,
        wake: &mut dyn FnMut(Uid),
    ) {
        let uid = Uid::of(&meta.uid);
        let owners: Box<[Owner]> = meta
            .owner_references
            .iter()
            .map(|reference| Owner {
                uid: Uid::of(&reference.uid),
                identity: IdentityHash::of(reference),
                blocked: reference.block_owner_deletion == Some(true),
            })
            .collect();
        let node = Node {
            kind,
            namespace: self.shared_namespace(&meta.namespace),
            name: meta.name.as_str().into(),
            identity: IdentityHash::new(group_kind.0, group_kind.1, &meta.name),
            owners,
            stage: DeletionStage::of(meta),
        };
        let stage = node.stage;
        let before = self.nodes.remove(&uid);
        let (previous_stage, previous_owners) = match &before {
            Some(before) => (Some(before.stage), before.owners.clone()),
            None => (None, Box::default()),
        };
        for owner in node.owners.iter().filter(|owner| !previous_owners.contains(owner)) {
            self.dependents.entry(owner.uid).or_default().insert(uid);
        }
        let still_owned = |owner: &Owner| node.owners.iter().any(|now| now.uid == owner.uid);
        for owner in previous_owners.iter().filter(|owner| !still_owned(owner)) {
            self.remove_dependent(owner.uid, uid);
        }
        for owner in previous_owners.iter().filter(|owner| !node.owners.contains(owner)) {
            self.wake_if_deleting_dependents(owner.uid, wake);
        }
        if previous_owners != node.owners {
            wake(uid);
        }
        let is_new = before.is_none();
        self.nodes.insert(uid, node);
        if previous_stage != Some(stage)
            && matches!(stage, DeletionStage::Orphaning | DeletionStage::Foreground)
        {
            wake(uid);
        }
        // Dependents that referred to another object by this UID, and dependents to delete before this one.
        if is_new || previous_stage != Some(stage) && stage == DeletionStage::Foreground {
            for dependent in self.dependents_of(uid) {
                if self.next_action(dependent) == GraphAction::ProcessOwners {
                    wake(dependent);
                }
            }
        }
    }

    /// Removes a deleted object.
    pub fn forget(&mut self, uid: Uid, wake: &mut dyn FnMut(Uid)) {
        let Some(node) = self.nodes.remove(&uid) else { return };
        self.dependents_of(uid).into_iter().for_each(&mut *wake);
        for owner in &node.owners {
            self.remove_dependent(owner.uid, uid);
            self.wake_if_deleting_dependents(owner.uid, wake);
        }
    }

    /// Removes all objects of a kind except `present`, because their delete events may have been missed.
    pub fn remove_absent(&mut self, kind: KindId, present: &HashSet<Uid>, wake: &mut dyn FnMut(Uid)) {
        let deleted =
            |(uid, node): (&Uid, &Node)| (node.kind == kind && !present.contains(uid)).then_some(*uid);
        let deleted: Vec<Uid> = self.nodes.iter().filter_map(deleted).collect();
        deleted.into_iter().for_each(|uid| self.forget(uid, wake));
        self.wake_dependents_of_unknown_owners(wake);
    }

    /// Wakes the dependents of owners that were never observed.
    pub fn wake_dependents_of_unknown_owners(&self, wake: &mut dyn FnMut(Uid)) {
        let unknown_owners = self.dependents.iter().filter(|(owner, _)| !self.nodes.contains_key(owner));
        unknown_owners.flat_map(|(_, dependents)| dependents).for_each(|uid| wake(*uid));
    }

    /// Removes a kind that is no longer served. Dependents are not woken, because its objects may still
    /// exist.
    pub fn remove_kind(&mut self, kind: KindId) {
        self.remove_absent(kind, &HashSet::new(), &mut |_| {});
    }

    pub fn next_action(&self, uid: Uid) -> GraphAction {
        let Some(node) = self.nodes.get(&uid) else { return GraphAction::Nothing };
        match node.stage {
            DeletionStage::Orphaning => GraphAction::Orphan { dependents: self.dependents_of(uid) },
            DeletionStage::Foreground => {
                let blocks = |dependent: &Uid| {
                    let owners = self.nodes.get(dependent).map(|node| &*node.owners).unwrap_or_default();
                    owners.iter().any(|owner| owner.uid == uid && owner.blocked)
                };
                let blocked_by = self.dependents_of(uid).into_iter().filter(blocks).collect();
                GraphAction::Foreground { blocked_by }
            }
            DeletionStage::Deleting => GraphAction::Nothing,
            DeletionStage::NotDeleting
                if node.owners.iter().all(|owner| self.is_valid_owner(node, owner)) =>
            {
                GraphAction::Nothing
            }
            DeletionStage::NotDeleting => GraphAction::ProcessOwners,
        }
    }

    /// Whether the owner exists, matches the reference and is not waiting for its dependents to be deleted.
    fn is_valid_owner(&self, node: &Node, owner: &Owner) -> bool {
        self.nodes.get(&owner.uid).is_some_and(|found| {
            let reachable = found.namespace.is_empty() || found.namespace == node.namespace;
            reachable && found.identity == owner.identity && found.stage != DeletionStage::Foreground
        })
    }

    /// The kind and key of an object.
    pub fn locate(&self, uid: Uid) -> Option<(KindId, Key)> {
        let node = self.nodes.get(&uid)?;
        Some((node.kind, Key { namespace: node.namespace.clone(), name: (&*node.name).into() }))
    }

    /// Whether the object is in foreground deletion.
    pub fn is_deleting_dependents(&self, uid: Uid) -> bool {
        self.nodes.get(&uid).is_some_and(|node| node.stage == DeletionStage::Foreground)
    }

    pub fn dependents_of(&self, uid: Uid) -> Vec<Uid> {
        self.dependents.get(&uid).into_iter().flatten().copied().collect()
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    fn wake_if_deleting_dependents(&self, owner: Uid, wake: &mut dyn FnMut(Uid)) {
        if self.is_deleting_dependents(owner) {
            wake(owner);
        }
    }

    fn remove_dependent(&mut self, owner: Uid, dependent: Uid) {
        if let Some(dependents) = self.dependents.get_mut(&owner) {
            dependents.remove(&dependent);
            if dependents.is_empty() {
                self.dependents.remove(&owner);
            }
        }
    }

    fn shared_namespace(&mut self, namespace: &str) -> Arc<str> {
        if let Some(known) = self.namespaces.get(namespace) {
            return known.clone();
        }
        let new: Arc<str> = namespace.into();
        self.namespaces.insert(new.clone());
        new
    }
}
