//! Admission by policies: CEL expressions that users write down, and bindings that say where they hold.
//!
//! Policies are compiled when they change. `matching` says whether one concerns a request, `params` what it is
//! parameterised with, `subject` what its expressions see; `validating` and `mutating` act on what they say.

mod activation;
mod authorizer;
mod config;
mod matching;
mod metrics;
mod mutating;
mod params;
mod patches;
#[cfg(test)]
mod tests;
mod validating;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::config::{Binding, Policy};
use super::Request;
use crate::cache::{Cache, IncrementalView, View};
use crate::object::Object;

pub use authorizer::CelAuthorizer;
pub use mutating::PolicyReinvokeContext;

/// Every policy there is.
pub struct Policies {
    configured: IncrementalView<Configured, 4>,
    metrics: metrics::PolicyMetrics,
}

/// The four kinds, in the order in which their shards are followed.
const POLICY_RESOURCES: [&str; 4] = [
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
    hooks: [PolicyHooks; 2],
}

/// A policy that is bound.
struct PolicyHook {
    policy: Arc<Policy>,
    bindings: Vec<Arc<Binding>>,
}

type PolicyHooks = Arc<[PolicyHook]>;

impl View for Configured {
    fn apply(&mut self, kind: usize, object: &Object, deleted: bool) {
        let (phase, name) = (kind / 2, object.name().to_owned());
        match (kind % 2, deleted) {
            (0, true) => drop(self.policies[phase].remove(&name)),
            (0, false) => drop(self.policies[phase].insert(name, Arc::new(Policy::compile(&object.value())))),
            (_, true) => drop(self.bindings[phase].remove(&name)),
            (_, false) => drop(self.bindings[phase].insert(name, Arc::new(Binding::read(&object.value())))),
        }
        let bound = |policy: &Arc<Policy>| PolicyHook {
            policy: policy.clone(),
            bindings: self.bindings[phase]
                .values()
                .filter(|one| one.policy == policy.name)
                .cloned()
                .collect(),
        };
        let hooks = self.policies[phase].values().map(bound).filter(|hook| !hook.bindings.is_empty());
        self.hooks[phase] = hooks.collect();
    }
}

impl Policies {
    pub fn new(cache: &Cache) -> Policies {
        let shard = |plural| {
            let row = api::resource_table::find_resource("admissionregistration.k8s.io", "v1", plural);
            cache.shard(&crate::registry::prefix(row.expect("policies are in the table")))
        };
        Policies {
            configured: IncrementalView::new(POLICY_RESOURCES.map(shard)),
            metrics: metrics::PolicyMetrics::default(),
        }
    }

    /// Appends what became of policies, in Prometheus' text form.
    pub fn print(&self, out: &mut String) {
        self.metrics.print(out);
    }

    pub fn is_empty(&self) -> bool {
        self.configured.current().hooks.iter().all(|hooks| hooks.is_empty())
    }

    /// Those that may have something to say.
    fn hooks(&self, phase: usize, request: &Request<'_>) -> PolicyHooks {
        match should_handle(request) {
            true => self.configured.current().hooks[phase].clone(),
            false => PolicyHooks::default(),
        }
    }
}

/// What only asks who somebody is or may do passes unseen.
const EXCLUDED_RESOURCES: [(&str, &str); 6] = [
    ("authentication.k8s.io", "selfsubjectreviews"),
    ("authentication.k8s.io", "tokenreviews"),
    ("authorization.k8s.io", "localsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectrulesreviews"),
    ("authorization.k8s.io", "subjectaccessreviews"),
];

fn should_handle(request: &Request<'_>) -> bool {
    super::webhooks::should_handle(request)
        && !EXCLUDED_RESOURCES.contains(&(request.row.group, request.row.plural))
}

/// What went wrong with a policy, for which its failure policy decides.
struct PolicyFailure {
    policy: String,
    /// None where the policy itself is at fault.
    binding: Option<String>,
    message: String,
    /// The reason of the answer, if it is not the usual one.
    reason: Option<&'static str>,
}

impl PolicyFailure {
    /// Something about the configuration, of the policy or of the binding.
    fn configuration_failure(policy: &Policy, binding: Option<&Binding>, error: &str) -> PolicyFailure {
        let what = if binding.is_some() { "binding" } else { "policy" };
        PolicyFailure {
            policy: policy.name.clone(),
            binding: binding.map(|binding| binding.name.clone()),
            message: format!("failed to configure {what}: {error}"),
            reason: None,
        }
    }
}
