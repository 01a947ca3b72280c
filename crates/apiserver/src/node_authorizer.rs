//! The node authorizer: a kubelet may access what its own pods reference.
//!
//! Checks that need the object, such as the content of a create request, are left to the admission
//! plugin NodeRestriction. Permissions that all nodes share are in the ClusterRole `system:node`.
//! Upstream: `plugin/pkg/auth/authorizer/node`.

mod graph;
pub mod references;
#[cfg(test)]
mod tests;

use api::field::quote;

use crate::access::User;
use crate::cache::{Cache, IncrementalView};
use crate::rbac::{Attributes, PolicyRule, default_rules};
use crate::registry::prefix;
use graph::{Graph, SOURCE_RESOURCES, VertexType};
use references::ReferenceKind;

const NODE_USER_PREFIX: &str = "system:node:";
const NODES_GROUP: &str = "system:nodes";
/// The namespace of node leases.
pub const NODE_LEASE_NAMESPACE: &str = "kube-node-lease";

pub struct NodeAuthorizer {
    graph: IncrementalView<Graph, 4>,
    /// The rules of `system:node`.
    rules: Vec<PolicyRule>,
}

/// The node name of a node user. Empty for a node user without a name, `None` for other users.
pub fn node_name_of(user: &User) -> Option<&str> {
    user.name.strip_prefix(NODE_USER_PREFIX).filter(|_| user.is_in(NODES_GROUP))
}

/// The attributes of a node's request.
#[derive(Clone, Copy)]
struct NodeQuery<'a> {
    node: &'a str,
    verb: &'a str,
    subresource: &'a str,
    namespace: &'a str,
    name: &'a str,
    /// The field selector restricts the list to this node.
    has_own_node_selector: bool,
}

/// An error is the reason of the denial; it may be empty.
type NodeAuthorization = Result<(), String>;

impl NodeAuthorizer {
    pub fn new(cache: &Cache) -> NodeAuthorizer {
        let shards = SOURCE_RESOURCES.map(|(group, plural)| {
            let row = api::resource_table::find_resource(group, "v1", plural)
                .expect("graph source resources are in the resource table");
            cache.shard(&prefix(row))
        });
        NodeAuthorizer { graph: IncrementalView::new(shards), rules: default_rules("system:node") }
    }

    /// `None` if the user is not a node.
    pub fn authorize(&self, user: &User, attributes: &Attributes<'_>) -> Option<NodeAuthorization> {
        let node = node_name_of(user)?;
        if node.is_empty() {
            return Some(Err(format!("unknown node for user {}", quote(&user.name))));
        }
        Some(self.authorize_node(node, attributes))
    }

    fn authorize_node(&self, node: &str, attributes: &Attributes<'_>) -> NodeAuthorization {
        let by_rules = || match self.rules.iter().any(|rule| rule.allows(attributes)) {
            true => Ok(()),
            false => deny(""),
        };
        let Attributes::Resource { verb, group, resource, subresource, namespace, name, fields } =
            *attributes
        else {
            return by_rules();
        };
        let has_own_node_selector = fields.and_then(|fields| fields.exact("spec.nodeName")) == Some(node);
        let query = NodeQuery { node, verb, subresource, namespace, name, has_own_node_selector };
        let referenced = VertexType::Referenced;
        match (group, resource) {
            ("", "secrets") => self.authorize_read(referenced(ReferenceKind::Secret), query),
            ("", "configmaps") => self.authorize_read(referenced(ReferenceKind::ConfigMap), query),
            ("", "persistentvolumeclaims") if subresource == "status" => match verb {
                "update" | "patch" => {
                    self.authorize_related(referenced(ReferenceKind::PersistentVolumeClaim), query)
                }
                _ => deny("can only get/update/patch this type"),
            },
            ("", "persistentvolumeclaims") => {
                self.authorize_get(referenced(ReferenceKind::PersistentVolumeClaim), query)
            }
            ("", "persistentvolumes") => self.authorize_get(VertexType::Volume, query),
            ("resource.k8s.io", "resourceclaims") => {
                self.authorize_get(referenced(ReferenceKind::ResourceClaim), query)
            }
            ("storage.k8s.io", "volumeattachments") => self.authorize_get(VertexType::Attachment, query),
            ("", "serviceaccounts") => self.authorize_service_account(query),
            ("coordination.k8s.io", "leases") => authorize_lease(query),
            ("storage.k8s.io", "csinodes") => authorize_csi_node(query),
            ("resource.k8s.io", "resourceslices") => self.authorize_resource_slice(query),
            ("", "nodes") => authorize_node_object(query),
            ("", "pods") => self.authorize_pod(query),
            _ => by_rules(),
        }
    }

    fn authorize_related(&self, vertex: VertexType, query: NodeQuery<'_>) -> NodeAuthorization {
        if query.name.is_empty() {
            return deny("No Object name found");
        }
        if self.graph.current().is_related(vertex, query.namespace, query.name, query.node) {
            return Ok(());
        }
        Err(format!("no relationship found between node '{}' and this object", query.node))
    }

    fn authorize_get(&self, vertex: VertexType, query: NodeQuery<'_>) -> NodeAuthorization {
        match (query.verb, query.subresource) {
            ("get", "") => self.authorize_related(vertex, query),
            ("get", _) => deny("cannot get subresource"),
            _ => deny("can only get individual resources of this type"),
        }
    }

    fn authorize_read(&self, vertex: VertexType, query: NodeQuery<'_>) -> NodeAuthorization {
        if !matches!(query.verb, "get" | "list" | "watch") {
            deny("can only read resources of this type")
        } else if !query.subresource.is_empty() {
            deny("cannot read subresource")
        } else if query.namespace.is_empty() {
            deny("can only read namespaced object of this type")
        } else {
            self.authorize_related(vertex, query)
        }
    }

    fn authorize_service_account(&self, query: NodeQuery<'_>) -> NodeAuthorization {
        let account = VertexType::Referenced(ReferenceKind::ServiceAccount);
        match (query.verb, query.subresource) {
            ("get", "") => self.authorize_read(account, query),
            ("create", _) if query.name.is_empty() => {
                deny("can only create tokens for individual service accounts")
            }
            ("create", "token") => self.authorize_related(account, query),
            ("create", _) => deny("can only create token subresource of serviceaccount"),
            _ => deny("can only create tokens for individual service accounts"),
        }
    }

    fn authorize_resource_slice(&self, query: NodeQuery<'_>) -> NodeAuthorization {
        match (query.verb, query.subresource) {
            (_, sub) if !sub.is_empty() => deny("cannot authorize ResourceSlice subresources"),
            ("create", _) => Ok(()),
            ("get" | "update" | "patch" | "delete", _) => self.authorize_related(VertexType::Slice, query),
            ("watch" | "list" | "deletecollection", _) if query.has_own_node_selector => Ok(()),
            ("watch" | "list" | "deletecollection", _) => {
                deny("can only list/watch/deletecollection resourceslices with nodeName field selector")
            }
            _ => deny(
                "only the following verbs are allowed for a ResourceSlice: get, watch, list, create, update, patch, delete, deletecollection",
            ),
        }
    }

    fn authorize_pod(&self, query: NodeQuery<'_>) -> NodeAuthorization {
        match (query.subresource, query.verb) {
            ("", "get") => self.authorize_get(VertexType::Pod, query),
            ("", "list" | "watch") if query.has_own_node_selector => Ok(()),
            ("", "list" | "watch") if !query.name.is_empty() => {
                self.authorize_related(VertexType::Pod, query)
            }
            ("", "list" | "watch") => deny("can only list/watch pods with spec.nodeName field selector"),
            ("", "create" | "delete") | ("status", "update" | "patch") | ("eviction", "create") => Ok(()),
            _ => deny(""),
        }
    }
}

fn authorize_lease(query: NodeQuery<'_>) -> NodeAuthorization {
    if !matches!(query.verb, "get" | "create" | "update" | "patch" | "delete") {
        deny("can only get, create, update, patch, or delete a node lease")
    } else if query.namespace != NODE_LEASE_NAMESPACE {
        Err(format!("can only access leases in the {} system namespace", quote(NODE_LEASE_NAMESPACE)))
    } else if query.verb != "create" && query.name != query.node {
        deny("can only access node lease with the same name as the requesting node")
    } else {
        Ok(())
    }
}

fn authorize_csi_node(query: NodeQuery<'_>) -> NodeAuthorization {
    if !matches!(query.verb, "get" | "create" | "update" | "patch" | "delete") {
        deny("can only get, create, update, patch, or delete a CSINode")
    } else if !query.subresource.is_empty() {
        deny("cannot authorize CSINode subresources")
    } else if query.verb != "create" && query.name != query.node {
        deny("can only access CSINode with the same name as the requesting node")
    } else {
        Ok(())
    }
}

/// Access to Node objects. Decided by name, so that a kubelet may get its Node before the Node
/// exists.
fn authorize_node_object(query: NodeQuery<'_>) -> NodeAuthorization {
    let NodeQuery { node, name, .. } = query;
    match (query.subresource, query.verb) {
        ("", "create" | "update" | "patch") | ("status", "update" | "patch") => Ok(()),
        ("", "get" | "list" | "watch") if name == node => Ok(()),
        ("", "get" | "list" | "watch") if name.is_empty() => {
            Err(format!("node '{node}' cannot read all nodes, only its own Node object"))
        }
        ("", "get" | "list" | "watch") => {
            Err(format!("node '{node}' cannot read '{name}', only its own Node object"))
        }
        _ => deny(""),
    }
}

fn deny(reason: &str) -> NodeAuthorization {
    Err(reason.to_owned())
}
