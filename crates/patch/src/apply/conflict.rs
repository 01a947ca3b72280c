//! The conflicts of an apply with the fields of other managers.

use super::field_set::Set;
use super::managed::Owner;

/// The conflicting fields of an apply and their managers.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.message())]
pub struct Conflicts {
    list: Vec<Conflict>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Conflict {
    sort_key: String,
    owner: String,
    path: String,
}

/// A status cause with reason `FieldManagerConflict`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    pub message: String,
    pub field: String,
}

impl Conflicts {
    pub(crate) fn new<'s>(owned: impl IntoIterator<Item = (&'s Owner, Set)>) -> Conflicts {
        let mut list: Vec<Conflict> = owned
            .into_iter()
            .flat_map(|(owner, set)| {
                let (sort_key, owner) = (owner.sort_key(), owner.describe());
                set.paths().into_iter().map(move |path| Conflict {
                    sort_key: sort_key.clone(),
                    owner: owner.clone(),
                    path,
                })
            })
            .collect();
        list.sort_by(|a, b| a.sort_key.cmp(&b.sort_key));
        Conflicts { list }
    }

    pub fn causes(&self) -> impl Iterator<Item = Cause> {
        self.list.iter().map(|found| Cause {
            message: format!("conflict with {}", found.owner),
            field: found.path.clone(),
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Removes the conflicts about fields in `allowed`.
    pub(crate) fn except(mut self, allowed: &Set) -> Conflicts {
        let allowed: std::collections::HashSet<String> = allowed.paths().into_iter().collect();
        self.list.retain(|conflict| !allowed.contains(&conflict.path));
        self
    }

    fn message(&self) -> String {
        if let [one] = self.list.as_slice() {
            return format!("Apply failed with 1 conflict: conflict with {}: {}", one.owner, one.path);
        }
        let mut lines = Vec::new();
        let mut owner = None;
        for found in &self.list {
            if owner.replace(&found.sort_key) != Some(&found.sort_key) {
                lines.push(format!("conflicts with {}:", found.owner));
            }
            lines.push(format!("- {}", found.path));
        }
        format!("Apply failed with {} conflicts: {}", self.list.len(), lines.join("\n"))
    }
}
