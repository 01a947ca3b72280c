//! Role-based access control: who may do what, by roles and their bindings.
//!
//! [`Rbac`] answers from memory: bindings are found by user and group, roles through the bindings
//! (`view`), and every decision first takes in what has changed since the last one. `defaults` makes the
//! roles every cluster has, `aggregate` puts roles together from others, `escalation` keeps people from
//! granting what they do not have.

mod aggregate;
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
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::access::{MASTERS, User};
use crate::cache::{Batch, Cache, Shard};
use crate::object::Object;
use crate::registry::prefix;

pub use aggregate::keep_aggregated;
pub use defaults::ensure_defaults;
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
    },
    Path {
        /// In lower case.
        verb: &'a str,
        path: &'a str,
    },
}

pub enum Decision {
    /// By a binding, or by being in `system:masters`.
    Allow(Option<Arc<Binding>>),
    /// With what went wrong while looking for a rule.
    Deny(Vec<String>),
}

/// The authorizer: the four kinds in the cache, and the view compiled of them.
pub struct Rbac {
    shards: [Arc<Shard>; 4],
    state: RwLock<State>,
}

struct State {
    /// Up to where the events of each shard are in the view; `None` before everything was read once.
    positions: Option<[u64; 4]>,
    view: view::View,
}

const KINDS: [&str; 4] = ["clusterroles", "roles", "clusterrolebindings", "rolebindings"];

impl Rbac {
    pub fn new(cache: &Cache) -> Rbac {
        let shards = KINDS.map(|plural| cache.shard(&prefix(row(plural))));
        Rbac { shards, state: RwLock::new(State { positions: None, view: view::View::default() }) }
    }

    pub fn decide(&self, user: &User, ask: &Ask<'_>) -> Decision {
        if user.is_in(MASTERS) {
            return Decision::Allow(None);
        }
        self.state().view.decide(user, ask)
    }

    /// As `decide`, with a refusal in upstream's words.
    pub fn authorize(&self, user: &User, ask: &Ask<'_>) -> Result<(), Status> {
        let decision = self.decide(user, ask);
        if let Decision::Allow(_) = decision {
            Ok(())
        } else {
            Err(ask.refusal(user, &decision.reason(user)))
        }
    }

    pub fn allows(&self, user: &User, ask: &Ask<'_>) -> bool {
        matches!(self.decide(user, ask), Decision::Allow(_))
    }

    /// Every rule that bindings give `user` in `namespace`.
    pub fn held(&self, user: &User, namespace: &str) -> Held {
        self.state().view.held(user, namespace)
    }

    /// The rules of a role; an empty namespace means a ClusterRole.
    pub fn rules_of(&self, namespace: &str, name: &str) -> Option<Arc<[Rule]>> {
        self.state().view.rules_of(namespace, name)
    }

    /// The view, with everything in it that is in the cache.
    fn state(&self) -> RwLockReadGuard<'_, State> {
        let newest = self.shards.each_ref().map(|shard| Some(shard.position()));
        let state = self.state.read();
        if state.positions.map(|positions| positions.map(Some)) == Some(newest) {
            return state;
        }
        drop(state);
        let mut state = self.state.write();
        if !state.catch_up(&self.shards) {
            state.reload(&self.shards);
        }
        RwLockWriteGuard::downgrade(state)
    }
}

impl State {
    /// Takes in new events; false where some are no longer there.
    fn catch_up(&mut self, shards: &[Arc<Shard>; 4]) -> bool {
        let Some(mut positions) = self.positions else { return false };
        for (kind, shard) in shards.iter().enumerate() {
            let Batch::Events(events) = shard.events_from(positions[kind], usize::MAX) else { return false };
            positions[kind] += events.len() as u64;
            for event in events {
                self.apply(kind, &event.object, event.deleted);
            }
        }
        self.positions = Some(positions);
        true
    }

    fn reload(&mut self, shards: &[Arc<Shard>; 4]) {
        self.view = view::View::default();
        let mut positions = [0; 4];
        for (kind, shard) in shards.iter().enumerate() {
            let (snapshot, position) = shard.snapshot_and_position("", 0);
            positions[kind] = position;
            for object in &snapshot.objects {
                self.apply(kind, object, false);
            }
        }
        self.positions = Some(positions);
    }

    fn apply(&mut self, kind: usize, object: &Object, deleted: bool) {
        let namespaced = kind % 2 == 1;
        let namespace = if namespaced { object.namespace() } else { "" };
        let name = object.name();
        match (kind < 2, deleted) {
            (true, false) => self.view.put_role(namespace, name, &object.value()),
            (true, true) => self.view.remove_role(namespace, name),
            (false, false) => self.view.put_binding(namespace, name, &object.value()),
            (false, true) => self.view.remove_binding(namespace, name),
        }
    }
}

impl Decision {
    /// Why, in the words of a review; empty where there is nothing to say.
    pub fn reason(&self, user: &User) -> String {
        match self {
            Decision::Allow(Some(binding)) => format!("RBAC: allowed by {}", binding.describe(user)),
            Decision::Deny(problems) if !problems.is_empty() => format!("RBAC: {}", together(problems)),
            _ => String::new(),
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

    /// 403 with upstream's text; `reason` may be empty.
    pub fn refusal(&self, user: &User, reason: &str) -> Status {
        let who = quoted(&user.name);
        let tail = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        match *self {
            Ask::Path { verb, path } => {
                let why = format!("User {who} cannot {verb} path {}{tail}", quoted(path));
                Status::forbidden("", "", "", &why)
            }
            Ask::Resource { verb, group, resource, subresource, namespace, name } => {
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
