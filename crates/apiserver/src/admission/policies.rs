//! ValidatingAdmissionPolicy and MutatingAdmissionPolicy: CEL expressions and the bindings that
//! enable them.
//!
//! Policies are compiled when they change. `matching` decides whether one applies to a request,
//! `params` finds its parameters, `activation` provides the variables of its expressions;
//! `validating` and `mutating` evaluate them.

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

/// All policies and bindings.
pub struct Policies {
    configured: IncrementalView<Configured, 4>,
    metrics: metrics::PolicyMetrics,
}

/// The order of the shards in the `IncrementalView`.
const POLICY_RESOURCES: [&str; 4] = [
    "mutatingadmissionpolicies",
    "mutatingadmissionpolicybindings",
    "validatingadmissionpolicies",
    "validatingadmissionpolicybindings",
];
const MUTATING: usize = 0;
const VALIDATING: usize = 1;

/// Policies and bindings by name.
#[derive(Default)]
struct Configured {
    policies: [BTreeMap<String, Arc<Policy>>; 2],
    bindings: [BTreeMap<String, Arc<Binding>>; 2],
    hooks: [PolicyHooks; 2],
}

/// A policy with its bindings.
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

    /// Appends the metrics of policies in the Prometheus text format.
    pub fn print(&self, out: &mut String) {
        self.metrics.print(out);
    }

    pub fn is_empty(&self) -> bool {
        self.configured.current().hooks.iter().all(|hooks| hooks.is_empty())
    }

    /// The policies to evaluate for the request.
    fn hooks(&self, phase: usize, request: &Request<'_>) -> PolicyHooks {
        match should_handle(request) {
            true => self.configured.current().hooks[phase].clone(),
            false => PolicyHooks::default(),
        }
    }
}

/// As upstream: policies do not see authentication and authorization reviews.
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

/// An error in a policy, handled by its failure policy.
struct PolicyFailure {
    policy: String,
    /// `None` if the error is in the policy itself.
    binding: Option<String>,
    message: String,
    /// The reason of the Status, if not the default.
    reason: Option<&'static str>,
}

impl PolicyFailure {
    /// An error in the configuration of the policy or binding.
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
