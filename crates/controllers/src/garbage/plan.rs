//! Decides whether an object is deleted because of its owners. Does no I/O.

use super::graph::{FINALIZER_DELETE_DEPENDENTS, FINALIZER_ORPHAN_DEPENDENTS, ObjectMetadata};

/// The state of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerState {
    Solid,
    /// The owner does not exist.
    Dangling,
    /// The owner is in foreground deletion and waits for its dependents.
    DeletingDependents,
}

#[derive(Debug, PartialEq)]
pub enum Action {
    /// Remove the owner references with these UIDs.
    RemoveOwners(Vec<String>),
    /// Set `blockOwnerDeletion` to false in all owner references.
    Unblock,
    Delete {
        propagation: &'static str,
    },
}

/// Plans the actions for an object. `owner_states` holds the states of its owners in the order of its
/// references.
///
/// `dependents` holds for each of its dependents whether that one is in foreground deletion, too. In that
/// case the object may be part of a cycle in which each waits for the other, and its references must not
/// block.
pub fn plan(object: &ObjectMetadata, owner_states: &[OwnerState], dependents: &[bool]) -> Vec<Action> {
    let is_already_deleting = object.is_deleting() && !object.has_finalizer(FINALIZER_DELETE_DEPENDENTS);
    if is_already_deleting || owner_states.is_empty() {
        return Vec::new();
    }
    if owner_states.contains(&OwnerState::Solid) {
        let to_remove = object.owner_references.iter().zip(owner_states);
        let to_remove = to_remove.filter(|(_, owner_state)| **owner_state != OwnerState::Solid);
        let to_remove: Vec<String> = to_remove.map(|(owner, _)| owner.uid.clone()).collect();
        return if to_remove.is_empty() { Vec::new() } else { vec![Action::RemoveOwners(to_remove)] };
    }
    if owner_states.contains(&OwnerState::DeletingDependents) && !dependents.is_empty() {
        let delete = Action::Delete { propagation: "Foreground" };
        let has_cycle = dependents.contains(&true);
        return if has_cycle { vec![Action::Unblock, delete] } else { vec![delete] };
    }
    let propagation = match object {
        _ if object.has_finalizer(FINALIZER_ORPHAN_DEPENDENTS) => "Orphan",
        _ if object.has_finalizer(FINALIZER_DELETE_DEPENDENTS) => "Foreground",
        _ => "Background",
    };
    vec![Action::Delete { propagation }]
}
