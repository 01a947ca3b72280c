//! Role-based access control.
//!
//! [`Rbac`] decides in memory: bindings are indexed by user and group, roles are found through the
//! bindings (`index`), and every decision first applies the changes since the last one. `defaults`
//! creates the roles that every cluster has, `escalation` prevents privilege escalation.

mod defaults;
pub mod escalation;
mod index;
mod rule;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use api::Status;
use api::field::quote;
use api::selector::FieldSelector;
use parking_lot::RwLock;

use crate::access::{SYSTEM_PRIVILEGED_GROUP, User};
use crate::authorization::{AuthorizerChain, Step, Verdict};
use crate::cache::{Cache, IncrementalView};
use crate::node_authorizer::NodeAuthorizer;
use crate::object::Object;
use crate::registry::prefix;

pub use defaults::{default_rules, ensure_defaults};
pub use index::{Binding, ResolvedRules};
pub use rule::PolicyRule;

pub const GROUP: &str = "rbac.authorization.k8s.io";

/// The attributes of a request to authorize. Upstream: `authorizer.Attributes`.
#[derive(Clone, Copy, Debug)]
pub enum Attributes<'a> {
    Resource {
        verb: &'a str,
        group: &'a str,
        resource: &'a str,
        subresource: &'a str,
        /// Empty for requests across all namespaces and for cluster-scoped resources.
        namespace: &'a str,
        /// Empty for collections.
        name: &'a str,
        /// The field selector of a list.
        fields: Option<&'a FieldSelector>,
    },
    Path {
        /// In lower case.
        verb: &'a str,
        path: &'a str,
    },
}

pub enum Decision {
    /// With the binding that allows it; `None` for `system:masters` and for the node authorizer.
    Allow(Option<Arc<Binding>>),
    Deny {
        /// The reason of the node authorizer; empty if the user is not a node.
        node: String,
        /// Errors while resolving rules.
        errors: Vec<String>,
    },
}

/// The authorizer: the RBAC index, which follows four resources in the cache, and the node
/// authorizer, which decides first.
pub struct Rbac {
    view: IncrementalView<index::RbacIndex, 4>,
    nodes: NodeAuthorizer,
    /// The configured authorizers, in order.
    chain: RwLock<Arc<AuthorizerChain>>,
}

const RBAC_RESOURCES: [&str; 4] = ["clusterroles", "roles", "clusterrolebindings", "rolebindings"];

impl Rbac {
    pub fn new(cache: &Cache) -> Rbac {
        let view = IncrementalView::new(RBAC_RESOURCES.map(|plural| cache.shard(&prefix(row(plural)))));
        Rbac { view, nodes: NodeAuthorizer::new(cache), chain: RwLock::default() }
    }

    /// A fixed authorizer with what `fill` adds to its index; it follows no cache.
    pub fn with_view(fill: impl FnOnce(&mut index::RbacIndex)) -> Rbac {
        let cache = Cache::new();
        let shards = RBAC_RESOURCES.map(|plural| cache.shard(&prefix(row(plural))));
        let mut view = index::RbacIndex::default();
        fill(&mut view);
        Rbac { view: IncrementalView::with_loaded_view(shards, view), ..Rbac::new(&cache) }
    }

    /// The decision of the built-in authorizers, without webhooks.
    pub fn authorize_local(&self, user: &User, attributes: &Attributes<'_>) -> Decision {
        if user.is_in(SYSTEM_PRIVILEGED_GROUP) {
            return Decision::Allow(None);
        }
        let node = match self.nodes.authorize(user, attributes) {
            Some(Ok(())) => return Decision::Allow(None),
            Some(Err(message)) => message,
            None => String::new(),
        };
        match self.view.current().find_binding(user, attributes) {
            Ok(binding) => Decision::Allow(Some(binding)),
            Err(errors) => Decision::Deny { node, errors },
        }
    }

    /// The configured authorizers, in order.
    pub fn chain(&self) -> Arc<AuthorizerChain> {
        self.chain.read().clone()
    }

    /// Replaces the configured authorizers.
    pub fn set_chain(&self, chain: AuthorizerChain) {
        *self.chain.write() = Arc::new(chain);
    }

    /// The verdict of the authorizer chain, including webhooks.
    pub async fn evaluate(&self, user: &User, attributes: &Attributes<'_>) -> Verdict {
        let chain = self.chain();
        if user.is_in(SYSTEM_PRIVILEGED_GROUP) || !chain.has_webhooks() {
            let decision = self.authorize_local(user, attributes);
            let allowed = matches!(decision, Decision::Allow(_));
            return Verdict { allowed, reason: decision.reason(user), ..Verdict::default() };
        }
        let (mut reasons, mut errors) = (Vec::new(), Vec::new());
        for step in &chain.steps {
            let verdict = match step {
                Step::Node => match self.nodes.authorize(user, attributes) {
                    Some(Ok(())) => Verdict { allowed: true, ..Verdict::default() },
                    Some(Err(reason)) => Verdict { reason, ..Verdict::default() },
                    None => continue,
                },
                Step::Rbac => {
                    let decision = match self.view.current().find_binding(user, attributes) {
                        Ok(binding) => Decision::Allow(Some(binding)),
                        Err(errors) => Decision::Deny { node: String::new(), errors },
                    };
                    let allowed = matches!(decision, Decision::Allow(_));
                    Verdict { allowed, reason: decision.reason(user), ..Verdict::default() }
                }
                Step::Webhook(webhook) => webhook.authorize(user, attributes).await,
            };
            if verdict.allowed || verdict.denied {
                return verdict;
            }
            reasons.extend(Some(verdict.reason).filter(|reason| !reason.is_empty()));
            errors.extend(
                Some(verdict.evaluation_error).filter(|evaluation_error| !evaluation_error.is_empty()),
            );
        }
        let evaluation_error = if errors.is_empty() { String::new() } else { aggregate_errors(&errors) };
        Verdict { reason: reasons.join("\n"), evaluation_error, ..Verdict::default() }
    }

    /// Like `evaluate`, with a Forbidden status as upstream words it.
    pub async fn authorize(&self, user: &User, attributes: &Attributes<'_>) -> Result<(), Status> {
        attributes.check_verdict(user, self.evaluate(user, attributes).await)
    }

    /// Whether the built-in authorizers allow it.
    pub fn allows(&self, user: &User, attributes: &Attributes<'_>) -> bool {
        matches!(self.authorize_local(user, attributes), Decision::Allow(_))
    }

    /// All rules that bindings grant to `user` in `namespace`.
    pub fn resolve_rules(&self, user: &User, namespace: &str) -> ResolvedRules {
        self.view.current().resolve_rules(user, namespace)
    }

    /// The rules of a role; an empty namespace selects a ClusterRole.
    pub fn rules_of(&self, namespace: &str, name: &str) -> Option<Arc<[PolicyRule]>> {
        self.view.current().rules_of(namespace, name)
    }
}

impl crate::cache::View for index::RbacIndex {
    fn apply(&mut self, kind: usize, object: &Object, deleted: bool) {
        // The index is that of `RBAC_RESOURCES`: roles first, namespaced ones at odd indices.
        let namespaced = kind % 2 == 1;
        let namespace = if namespaced { object.namespace() } else { "" };
        let name = object.name();
        match (kind < 2, deleted) {
            (true, false) => self.put_role(namespace, name, &object.value()),
            (true, true) => self.remove_role(namespace, name),
            (false, false) => self.put_binding(namespace, name, &object.value()),
            (false, true) => self.remove_binding(namespace, name),
        }
    }
}

impl Decision {
    /// The reason as in a SubjectAccessReview; may be empty.
    pub fn reason(&self, user: &User) -> String {
        match self {
            Decision::Allow(Some(binding)) => format!("RBAC: allowed by {}", binding.describe(user)),
            Decision::Allow(None) => String::new(),
            Decision::Deny { node, errors: problems } => {
                let rbac = match problems.as_slice() {
                    [] => String::new(),
                    errors => format!("RBAC: {}", aggregate_errors(errors)),
                };
                let both = if node.is_empty() || rbac.is_empty() { "" } else { "\n" };
                [node.as_str(), both, &rbac].concat()
            }
        }
    }
}

impl Attributes<'_> {
    pub fn namespace(&self) -> &str {
        match self {
            Attributes::Resource { namespace, .. } => namespace,
            Attributes::Path { .. } => "",
        }
    }

    /// Converts the verdict to a result. An authorizer that failed is an internal error, not a
    /// denial.
    pub fn check_verdict(&self, user: &User, verdict: Verdict) -> Result<(), Status> {
        match verdict {
            Verdict { allowed: true, .. } => Ok(()),
            Verdict { evaluation_error: problem, .. } if !problem.is_empty() => {
                Err(Status::internal(problem))
            }
            Verdict { reason, .. } => Err(self.forbidden_status(user, &reason)),
        }
    }

    /// A 403 with upstream's message; `reason` may be empty.
    pub fn forbidden_status(&self, user: &User, reason: &str) -> Status {
        let user_name = quote(&user.name);
        let tail = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        match *self {
            Attributes::Path { verb, path } => {
                let message = format!("User {user_name} cannot {verb} path {}{tail}", quote(path));
                Status::forbidden("", "", "", &message)
            }
            Attributes::Resource { verb, group, resource, subresource, namespace, name, .. } => {
                let slash = if subresource.is_empty() { "" } else { "/" };
                let what = quote(&format!("{resource}{slash}{subresource}"));
                let scope = match namespace {
                    "" => "at the cluster scope".to_owned(),
                    namespace => format!("in the namespace {}", quote(namespace)),
                };
                let message = format!(
                    "User {user_name} cannot {verb} resource {what} in API group {} {scope}{tail}",
                    quote(group)
                );
                Status::forbidden(group, resource, name, &message)
            }
        }
    }
}

/// Aggregates errors as upstream's `utilerrors.Aggregate`: duplicates removed, in brackets if there
/// are several.
pub fn aggregate_errors(errors: &[String]) -> String {
    let mut seen = HashSet::new();
    let unique: Vec<&str> =
        errors.iter().map(String::as_str).filter(|evaluation_error| seen.insert(*evaluation_error)).collect();
    if unique.len() == 1 { unique.concat() } else { format!("[{}]", unique.join(", ")) }
}

fn row(plural: &str) -> &'static api::Resource {
    api::resource_table::find_resource(GROUP, "v1", plural).expect("RBAC resources are in the resource table")
}
