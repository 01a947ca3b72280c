//! Entry points for benchmarks. Production code does not use them.

use api::json::JsonExt as _;
use serde_json::Value;

use crate::access::User;
use crate::rbac::{Attributes, Rbac};

/// RBAC decisions without webhooks.
pub struct BenchAuthorizer(Rbac);

/// A user of the benchmark.
pub struct BenchUser(User);

impl BenchUser {
    pub fn new(name: impl Into<String>, groups: Vec<String>) -> BenchUser {
        BenchUser(User { name: name.into(), groups, ..User::default() })
    }
}

impl BenchAuthorizer {
    /// From Roles, ClusterRoles and their bindings.
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

    /// Whether `user` may `verb` one object of the core group.
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
