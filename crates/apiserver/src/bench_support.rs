//! Parts that the benchmark calls by themselves. Nothing else needs them.

use api::json::JsonExt as _;
use serde_json::Value;

use crate::access::User;
use crate::rbac::{Attributes, Rbac};

/// Decisions by roles and bindings alone.
pub struct BenchAuthorizer(Rbac);

/// Somebody who wants something.
pub struct BenchUser(User);

impl BenchUser {
    /// By name and groups.
    pub fn new(name: impl Into<String>, groups: Vec<String>) -> BenchUser {
        BenchUser(User { name: name.into(), groups, ..User::default() })
    }
}

impl BenchAuthorizer {
    /// By these Roles, ClusterRoles and their bindings.
    pub fn from_objects(objects: impl IntoIterator<Item = Value>) -> BenchAuthorizer {
        BenchAuthorizer(Rbac::with_view(|view| {
            for object in objects {
                let metadata = object.at("metadata");
                let (namespace, name) = (metadata.text("namespace"), metadata.text("name"));
                match object.text("kind") {
                    "Role" | "ClusterRole" => view.put_role(namespace, name, &object),
                    _ => view.put_binding(namespace, name, &object),
                }
            }
        }))
    }

    /// Whether somebody may do `verb` to one object of the core group, as a request asks.
    pub fn allows(
        &self,
        user: &BenchUser,
        verb: &str,
        resource: &str,
        (namespace, name): (&str, &str),
    ) -> bool {
        let (group, subresource) = ("", "");
        self.0.allows(
            &user.0,
            &Attributes::Resource { verb, group, resource, subresource, namespace, name, fields: None },
        )
    }
}
