//! Role-based access control: who may do what, by roles and their bindings.
//!
//! [`Rbac`] answers from memory: bindings are found by user and group, roles through the bindings
//! (`view`), and every decision first takes in what has changed since the last one. `defaults` makes the
//! roles every cluster has, `aggregate` puts roles together from others, `escalation` keeps people from
//! granting what they do not have.

mod defaults;
pub mod escalation;
mod rule;
#[cfg(test)]
mod tests;
mod view;

use std::collections::HashSet;
use std::sync::Arc;

use api::Status;
use api::field::quoted;
use api::selector::FieldSelector;
use parking_lot::RwLock;

use crate::access::{MASTERS, User};
use crate::authorization::{Chain, Step, Verdict};
use crate::cache::{Cache, Followed};
use crate::nodes::Nodes;
use crate::object::Object;
use crate::registry::prefix;

pub use defaults::{default_rules, ensure_defaults};
pub use rule::Rule;
pub use view::{Binding, Held};

pub const GROUP: &str = "rbac.authorization.k8s.io";

/// What somebody wants to do.
#[derive(Clone, Copy, Debug)]
pub enum Ask<'a> {
    Resource {
        verb: &'a str,
        group: &'a str,
        resource: &'a str,
        subresource: &'a str,
        /// Empty across all namespaces, and for what has none.
        namespace: &'a str,
        /// Empty for a collection.
        name: &'a str,
        /// What a list is narrowed down to.
        fields: Option<&'a FieldSelector>,
    },
    Path {
        /// In lower case.
        verb: &'a str,
        path: &'a str,
    },
}

pub enum Decision {
    /// By a binding; or by being in `system:masters`, or a node.
    Allow(Option<Arc<Binding>>),
    Deny {
        /// Why it is nothing for this node.
        node: String,
        /// What went wrong while looking for a rule.
        problems: Vec<String>,
    },
}

/// The authorizer: the four kinds in the cache, and the view compiled of them. Nodes have rules of their
/// own, which are asked first.
pub struct Rbac {
    view: Followed<view::View, 4>,
    nodes: Nodes,
    /// Who is asked, and in which order.
    chain: RwLock<Arc<Chain>>,
}

const KINDS: [&str; 4] = ["clusterroles", "roles", "clusterrolebindings", "rolebindings"];

impl Rbac {
    pub fn new(cache: &Cache) -> Rbac {
        let view = Followed::new(KINDS.map(|plural| cache.shard(&prefix(row(plural)))));
        Rbac { view, nodes: Nodes::new(cache), chain: RwLock::default() }
    }

    /// One that knows what `fill` puts into it, and never more.
    pub fn knowing(fill: impl FnOnce(&mut view::View)) -> Rbac {
        let cache = Cache::new();
        let shards = KINDS.map(|plural| cache.shard(&prefix(row(plural))));
        let mut view = view::View::default();
        fill(&mut view);
        Rbac { view: Followed::knowing(shards, view), ..Rbac::new(&cache) }
    }

    /// What we know ourselves, webhooks left out.
    pub fn decide(&self, user: &User, ask: &Ask<'_>) -> Decision {
        if user.is_in(MASTERS) {
            return Decision::Allow(None);
        }
        let node = match self.nodes.decide(user, ask) {
            Some(Ok(())) => return Decision::Allow(None),
            Some(Err(why)) => why,
            None => String::new(),
        };
        match self.view.look().decide(user, ask) {
            Ok(binding) => Decision::Allow(Some(binding)),
            Err(problems) => Decision::Deny { node, problems },
        }
    }

    /// Who is asked, in their order.
    pub fn chain(&self) -> Arc<Chain> {
        self.chain.read().clone()
    }

    /// Asks others from now on.
    pub fn set_chain(&self, chain: Chain) {
        *self.chain.write() = Arc::new(chain);
    }

    /// What everybody in the chain says.
    pub async fn judge(&self, user: &User, ask: &Ask<'_>) -> Verdict {
        let chain = self.chain();
        if user.is_in(MASTERS) || !chain.has_webhooks() {
            let decision = self.decide(user, ask);
            let allowed = matches!(decision, Decision::Allow(_));
            return Verdict { allowed, reason: decision.reason(user), ..Verdict::default() };
        }
        let (mut reasons, mut problems) = (Vec::new(), Vec::new());
        for step in &chain.steps {
            let verdict = match step {
                Step::Node => match self.nodes.decide(user, ask) {
                    Some(Ok(())) => Verdict { allowed: true, ..Verdict::default() },
                    Some(Err(reason)) => Verdict { reason, ..Verdict::default() },
                    None => continue,
                },
                Step::Rbac => {
                    let decision = match self.view.look().decide(user, ask) {
                        Ok(binding) => Decision::Allow(Some(binding)),
                        Err(problems) => Decision::Deny { node: String::new(), problems },
                    };
                    let allowed = matches!(decision, Decision::Allow(_));
                    Verdict { allowed, reason: decision.reason(user), ..Verdict::default() }
                }
                Step::Webhook(webhook) => webhook.judge(user, ask).await,
            };
            if verdict.allowed || verdict.denied {
                return verdict;
            }
            reasons.extend(Some(verdict.reason).filter(|reason| !reason.is_empty()));
            problems.extend(Some(verdict.problem).filter(|problem| !problem.is_empty()));
        }
        let problem = if problems.is_empty() { String::new() } else { together(&problems) };
        Verdict { reason: reasons.join("\n"), problem, ..Verdict::default() }
    }

    /// As `judge`, with a refusal in upstream's words.
    pub async fn authorize(&self, user: &User, ask: &Ask<'_>) -> Result<(), Status> {
        ask.permitted(user, self.judge(user, ask).await)
    }

    /// By what we know ourselves.
    pub fn allows(&self, user: &User, ask: &Ask<'_>) -> bool {
        matches!(self.decide(user, ask), Decision::Allow(_))
    }

    /// Every rule that bindings give `user` in `namespace`.
    pub fn held(&self, user: &User, namespace: &str) -> Held {
        self.view.look().held(user, namespace)
    }

    /// The rules of a role; an empty namespace means a ClusterRole.
    pub fn rules_of(&self, namespace: &str, name: &str) -> Option<Arc<[Rule]>> {
        self.view.look().rules_of(namespace, name)
    }
}

impl crate::cache::View for view::View {
    fn apply(&mut self, kind: usize, object: &Object, deleted: bool) {
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
    /// Why, in the words of a review; empty where there is nothing to say.
    pub fn reason(&self, user: &User) -> String {
        match self {
            Decision::Allow(Some(binding)) => format!("RBAC: allowed by {}", binding.describe(user)),
            Decision::Allow(None) => String::new(),
            Decision::Deny { node, problems } => {
                let rbac = match problems.as_slice() {
                    [] => String::new(),
                    problems => format!("RBAC: {}", together(problems)),
                };
                let both = if node.is_empty() || rbac.is_empty() { "" } else { "\n" };
                [node.as_str(), both, &rbac].concat()
            }
        }
    }
}

impl Ask<'_> {
    pub fn namespace(&self) -> &str {
        match self {
            Ask::Resource { namespace, .. } => namespace,
            Ask::Path { .. } => "",
        }
    }

    /// Whether the verdict is a permission. Where nobody could be asked it is nobody's fault but ours.
    pub fn permitted(&self, user: &User, verdict: Verdict) -> Result<(), Status> {
        match verdict {
            Verdict { allowed: true, .. } => Ok(()),
            Verdict { problem, .. } if !problem.is_empty() => Err(Status::internal(problem)),
            Verdict { reason, .. } => Err(self.refusal(user, &reason)),
        }
    }

    /// 403 with upstream's text; `reason` may be empty.
    pub fn refusal(&self, user: &User, reason: &str) -> Status {
        let who = quoted(&user.name);
        let tail = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        match *self {
            Ask::Path { verb, path } => {
                let why = format!("User {who} cannot {verb} path {}{tail}", quoted(path));
                Status::forbidden("", "", "", &why)
            }
            Ask::Resource { verb, group, resource, subresource, namespace, name, .. } => {
                let slash = if subresource.is_empty() { "" } else { "/" };
                let what = quoted(&format!("{resource}{slash}{subresource}"));
                let place = match namespace {
                    "" => "at the cluster scope".to_owned(),
                    namespace => format!("in the namespace {}", quoted(namespace)),
                };
                let why = format!(
                    "User {who} cannot {verb} resource {what} in API group {} {place}{tail}",
                    quoted(group)
                );
                Status::forbidden(group, resource, name, &why)
            }
        }
    }
}

/// Several problems as one text: each once, in brackets where there is more than one.
pub fn together(problems: &[String]) -> String {
    let mut seen = HashSet::new();
    let each: Vec<&str> =
        problems.iter().map(String::as_str).filter(|problem| seen.insert(*problem)).collect();
    if each.len() == 1 { each.concat() } else { format!("[{}]", each.join(", ")) }
}

fn row(plural: &str) -> &'static api::Resource {
    api::table::find(GROUP, "v1", plural).expect("the kinds of RBAC are in the table")
}
