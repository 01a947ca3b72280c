//! The node authorizer: a node sees what its own pods need, and nothing else.
//!
//! What cannot be decided without the object, such as its content in a creation, is left to the admission
//! plugin NodeRestriction. Everything that is the same for all nodes is in the role `system:node`.

mod graph;
pub mod references;
#[cfg(test)]
mod tests;

use api::field::quoted;

use crate::access::User;
use crate::cache::{Cache, Followed};
use crate::rbac::{Ask, Rule, default_rules};
use crate::registry::prefix;
use graph::{FOLLOWED, Graph, Thing};
use references::Kind;

const PREFIX: &str = "system:node:";
const GROUP: &str = "system:nodes";
/// The only namespace with leases of nodes.
pub const LEASES: &str = "kube-node-lease";

pub struct Nodes {
    graph: Followed<Graph, 4>,
    /// What any node may do.
    rules: Vec<Rule>,
}

/// The name of the node that a user is; empty where it has none.
pub fn node_of(user: &User) -> Option<&str> {
    user.name.strip_prefix(PREFIX).filter(|_| user.is_in(GROUP))
}

/// What a node asks.
#[derive(Clone, Copy)]
struct Query<'a> {
    node: &'a str,
    verb: &'a str,
    subresource: &'a str,
    namespace: &'a str,
    name: &'a str,
    /// The selector of a list insists on this node.
    own: bool,
}

/// Without a reason, nobody needs to be told.
type Answer = Result<(), String>;

impl Nodes {
    pub fn new(cache: &Cache) -> Nodes {
        let shards = FOLLOWED.map(|(group, plural)| {
            let row = api::table::find(group, "v1", plural).expect("what pods refer to is in the table");
            cache.shard(&prefix(row))
        });
        Nodes { graph: Followed::new(shards), rules: default_rules("system:node") }
    }

    /// `None` where the user is no node.
    pub fn decide(&self, user: &User, ask: &Ask<'_>) -> Option<Answer> {
        let node = node_of(user)?;
        if node.is_empty() {
            return Some(Err(format!("unknown node for user {}", quoted(&user.name))));
        }
        Some(self.answer(node, ask))
    }

    fn answer(&self, node: &str, ask: &Ask<'_>) -> Answer {
        let by_rules = || match self.rules.iter().any(|rule| rule.allows(ask)) {
            true => Ok(()),
            false => no(""),
        };
        let Ask::Resource { verb, group, resource, subresource, namespace, name, fields } = *ask else {
            return by_rules();
        };
        let own = fields.and_then(|fields| fields.exact("spec.nodeName")) == Some(node);
        let query = Query { node, verb, subresource, namespace, name, own };
        let referred = Thing::Referred;
        match (group, resource) {
            ("", "secrets") => self.read(referred(Kind::Secret), query),
            ("", "configmaps") => self.read(referred(Kind::ConfigMap), query),
            ("", "persistentvolumeclaims") if subresource == "status" => match verb {
                "update" | "patch" => self.related(referred(Kind::Claim), query),
                _ => no("can only get/update/patch this type"),
            },
            ("", "persistentvolumeclaims") => self.get(referred(Kind::Claim), query),
            ("", "persistentvolumes") => self.get(Thing::Volume, query),
            ("resource.k8s.io", "resourceclaims") => self.get(referred(Kind::ResourceClaim), query),
            ("storage.k8s.io", "volumeattachments") => self.get(Thing::Attachment, query),
            ("", "serviceaccounts") => self.account(query),
            ("coordination.k8s.io", "leases") => lease(query),
            ("storage.k8s.io", "csinodes") => csi_node(query),
            ("resource.k8s.io", "resourceslices") => self.slice(query),
            ("", "nodes") => itself(query),
            ("", "pods") => self.pod(query),
            _ => by_rules(),
        }
    }

    fn related(&self, thing: Thing, query: Query<'_>) -> Answer {
        if query.name.is_empty() {
            return no("No Object name found");
        }
        if self.graph.look().leads(thing, query.namespace, query.name, query.node) {
            return Ok(());
        }
        Err(format!("no relationship found between node '{}' and this object", query.node))
    }

    fn get(&self, thing: Thing, query: Query<'_>) -> Answer {
        match (query.verb, query.subresource) {
            ("get", "") => self.related(thing, query),
            ("get", _) => no("cannot get subresource"),
            _ => no("can only get individual resources of this type"),
        }
    }

    fn read(&self, thing: Thing, query: Query<'_>) -> Answer {
        if !matches!(query.verb, "get" | "list" | "watch") {
            no("can only read resources of this type")
        } else if !query.subresource.is_empty() {
            no("cannot read subresource")
        } else if query.namespace.is_empty() {
            no("can only read namespaced object of this type")
        } else {
            self.related(thing, query)
        }
    }

    fn account(&self, query: Query<'_>) -> Answer {
        let account = Thing::Referred(Kind::ServiceAccount);
        match (query.verb, query.subresource) {
            ("get", "") => self.read(account, query),
            ("create", _) if query.name.is_empty() => {
                no("can only create tokens for individual service accounts")
            }
            ("create", "token") => self.related(account, query),
            ("create", _) => no("can only create token subresource of serviceaccount"),
            _ => no("can only create tokens for individual service accounts"),
        }
    }

    fn slice(&self, query: Query<'_>) -> Answer {
        match (query.verb, query.subresource) {
            (_, sub) if !sub.is_empty() => no("cannot authorize ResourceSlice subresources"),
            ("create", _) => Ok(()),
            ("get" | "update" | "patch" | "delete", _) => self.related(Thing::Slice, query),
            ("watch" | "list" | "deletecollection", _) if query.own => Ok(()),
            ("watch" | "list" | "deletecollection", _) => {
                no("can only list/watch/deletecollection resourceslices with nodeName field selector")
            }
            _ => no(
                "only the following verbs are allowed for a ResourceSlice: get, watch, list, create, update, patch, delete, deletecollection",
            ),
        }
    }

    fn pod(&self, query: Query<'_>) -> Answer {
        match (query.subresource, query.verb) {
            ("", "get") => self.get(Thing::Pod, query),
            ("", "list" | "watch") if query.own => Ok(()),
            ("", "list" | "watch") if !query.name.is_empty() => self.related(Thing::Pod, query),
            ("", "list" | "watch") => no("can only list/watch pods with spec.nodeName field selector"),
            ("", "create" | "delete") | ("status", "update" | "patch") | ("eviction", "create") => Ok(()),
            _ => no(""),
        }
    }
}

fn lease(query: Query<'_>) -> Answer {
    if !matches!(query.verb, "get" | "create" | "update" | "patch" | "delete") {
        no("can only get, create, update, patch, or delete a node lease")
    } else if query.namespace != LEASES {
        Err(format!("can only access leases in the {} system namespace", quoted(LEASES)))
    } else if query.verb != "create" && query.name != query.node {
        no("can only access node lease with the same name as the requesting node")
    } else {
        Ok(())
    }
}

fn csi_node(query: Query<'_>) -> Answer {
    if !matches!(query.verb, "get" | "create" | "update" | "patch" | "delete") {
        no("can only get, create, update, patch, or delete a CSINode")
    } else if !query.subresource.is_empty() {
        no("cannot authorize CSINode subresources")
    } else if query.verb != "create" && query.name != query.node {
        no("can only access CSINode with the same name as the requesting node")
    } else {
        Ok(())
    }
}

/// Nodes about nodes. By name, so that a node may look for itself before it is there.
fn itself(query: Query<'_>) -> Answer {
    let Query { node, name, .. } = query;
    match (query.subresource, query.verb) {
        ("", "create" | "update" | "patch") | ("status", "update" | "patch") => Ok(()),
        ("", "get" | "list" | "watch") if name == node => Ok(()),
        ("", "get" | "list" | "watch") if name.is_empty() => {
            Err(format!("node '{node}' cannot read all nodes, only its own Node object"))
        }
        ("", "get" | "list" | "watch") => {
            Err(format!("node '{node}' cannot read '{name}', only its own Node object"))
        }
        _ => no(""),
    }
}

fn no(why: &str) -> Answer {
    Err(why.to_owned())
}
