//! Admission by policies: CEL expressions that users write down, and bindings that say where they hold.
//!
//! Policies are compiled when they change. `matching` says whether one concerns a request, `params` what it is
//! parameterised with, `subject` what its expressions see; `validating` and `mutating` act on what they say.

mod asking;
mod config;
mod matching;
mod mutating;
mod params;
mod patches;
mod subject;
mod tally;
#[cfg(test)]
mod tests;
mod validating;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::config::{Binding, Policy};
use super::Request;
use crate::cache::{Cache, Followed, View};
use crate::object::Object;

pub use asking::Asking;
pub use mutating::Rounds;

/// Every policy there is.
pub struct Policies {
    configured: Followed<Configured, 4>,
    tally: tally::Tally,
}

/// The four kinds, in the order in which their shards are followed.
const PLURALS: [&str; 4] = [
    "mutatingadmissionpolicies",
    "mutatingadmissionpolicybindings",
    "validatingadmissionpolicies",
    "validatingadmissionpolicybindings",
];
const MUTATING: usize = 0;
const VALIDATING: usize = 1;

/// Policies with their bindings, by name.
#[derive(Default)]
struct Configured {
    policies: [BTreeMap<String, Arc<Policy>>; 2],
    bindings: [BTreeMap<String, Arc<Binding>>; 2],
    hooks: [Hooks; 2],
}

/// A policy that is bound.
struct Hook {
    policy: Arc<Policy>,
    bindings: Vec<Arc<Binding>>,
}

type Hooks = Arc<[Hook]>;

impl View for Configured {
    fn apply(&mut self, kind: usize, object: &Object, deleted: bool) {
        let (side, name) = (kind / 2, object.name().to_owned());
        match (kind % 2, deleted) {
            (0, true) => drop(self.policies[side].remove(&name)),
            (0, false) => drop(self.policies[side].insert(name, Arc::new(Policy::compile(&object.value())))),
            (_, true) => drop(self.bindings[side].remove(&name)),
            (_, false) => drop(self.bindings[side].insert(name, Arc::new(Binding::read(&object.value())))),
        }
        let bound = |policy: &Arc<Policy>| Hook {
            policy: policy.clone(),
            bindings: self.bindings[side].values().filter(|one| one.policy == policy.name).cloned().collect(),
        };
        let hooks = self.policies[side].values().map(bound).filter(|hook| !hook.bindings.is_empty());
        self.hooks[side] = hooks.collect();
    }
}

impl Policies {
    pub fn new(cache: &Cache) -> Policies {
        let shard = |plural| {
            let row = api::table::find("admissionregistration.k8s.io", "v1", plural);
            cache.shard(&crate::registry::prefix(row.expect("policies are in the table")))
        };
        Policies { configured: Followed::new(PLURALS.map(shard)), tally: tally::Tally::default() }
    }

    /// Appends what became of policies, in Prometheus' text form.
    pub fn print(&self, out: &mut String) {
        self.tally.print(out);
    }

    pub fn are_none(&self) -> bool {
        self.configured.look().hooks.iter().all(|hooks| hooks.is_empty())
    }

    /// Those that may have something to say.
    fn hooks(&self, side: usize, request: &Request<'_>) -> Hooks {
        match concerns(request) {
            true => self.configured.look().hooks[side].clone(),
            false => Hooks::default(),
        }
    }
}

/// What only asks who somebody is or may do passes unseen.
const REVIEWS: [(&str, &str); 6] = [
    ("authentication.k8s.io", "selfsubjectreviews"),
    ("authentication.k8s.io", "tokenreviews"),
    ("authorization.k8s.io", "localsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectrulesreviews"),
    ("authorization.k8s.io", "subjectaccessreviews"),
];

fn concerns(request: &Request<'_>) -> bool {
    super::webhooks::concerns(request) && !REVIEWS.contains(&(request.row.group, request.row.plural))
}

/// What went wrong with a policy, for which its failure policy decides.
struct Problem {
    policy: String,
    /// None where the policy itself is at fault.
    binding: Option<String>,
    message: String,
    /// The reason of the answer, if it is not the usual one.
    reason: Option<&'static str>,
}

impl Problem {
    /// Something about the configuration, of the policy or of the binding.
    fn configuring(policy: &Policy, binding: Option<&Binding>, why: &str) -> Problem {
        let what = if binding.is_some() { "binding" } else { "policy" };
        Problem {
            policy: policy.name.clone(),
            binding: binding.map(|binding| binding.name.clone()),
            message: format!("failed to configure {what}: {why}"),
            reason: None,
        }
    }
}
