//! Whether an object has to go with its owners. Pure.

use super::graph::{FOREGROUND, Meta, ORPHAN};

/// How it stands with one owner of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Solid,
    /// There is no such owner.
    Absent,
    /// It is being deleted and waits for its dependents to go first.
    Waiting,
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
pub fn plan(object: &Meta, standings: &[Standing], dependents: &[bool]) -> Vec<Action> {
    let is_on_its_way = object.is_deleting() && !object.held_by(FOREGROUND);
    if is_on_its_way || standings.is_empty() {
        return Vec::new();
    }
    if standings.contains(&Standing::Solid) {
        let lost = object.owner_references.iter().zip(standings);
        let lost = lost.filter(|(_, standing)| **standing != Standing::Solid);
        let lost: Vec<String> = lost.map(|(owner, _)| owner.uid.clone()).collect();
        return if lost.is_empty() { Vec::new() } else { vec![Action::RemoveOwners(lost)] };
    }
    if standings.contains(&Standing::Waiting) && !dependents.is_empty() {
        let delete = Action::Delete { propagation: "Foreground" };
        let circle = dependents.contains(&true);
        return if circle { vec![Action::Unblock, delete] } else { vec![delete] };
    }
    let propagation = match object {
        _ if object.held_by(ORPHAN) => "Orphan",
        _ if object.held_by(FOREGROUND) => "Foreground",
        _ => "Background",
    };
    vec![Action::Delete { propagation }]
}
