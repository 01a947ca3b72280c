//! Whether an object has to go with its owners. Pure.

use super::graph::{FINALIZER_DELETE_DEPENDENTS, FINALIZER_ORPHAN_DEPENDENTS, ObjectMetadata};

/// How it stands with one owner of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerState {
    Solid,
    /// There is no such owner.
    Dangling,
    /// It is being deleted and waits for its dependents to go first.
    DeletingDependents,
}

#[derive(Debug, PartialEq)]
pub enum Action {
    /// The owner references to these uids are taken off the object.
    RemoveOwners(Vec<String>),
    /// The object's owner references are made not to block their owners.
    Unblock,
    Delete {
        propagation: &'static str,
    },
}

/// What is to be done with an object whose owners stand as `standings` says, in the order of its references.
///
/// `dependents` tells of each of its own dependents whether it waits for its dependents in turn: then the
/// object may be part of a circle in which each waits for the other.
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
