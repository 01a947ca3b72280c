//! Parts that the benchmark calls by themselves. Nothing else needs them.

use api::json::Json as _;
use serde_json::Value;

use crate::access::User;
use crate::rbac::{Ask, Rbac};

/// Decisions by roles and bindings alone.
pub struct Access(Rbac);

/// Somebody who wants something.
pub struct Somebody(User);

impl Somebody {
    /// By name and groups.
    pub fn new(name: impl Into<String>, groups: Vec<String>) -> Somebody {
        Somebody(User { name: name.into(), groups, ..User::default() })
    }
}

impl Access {
    /// By these Roles, ClusterRoles and their bindings.
    pub fn of(objects: impl IntoIterator<Item = Value>) -> Access {
        Access(Rbac::knowing(|view| {
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
        who: &Somebody,
        verb: &str,
        resource: &str,
        (namespace, name): (&str, &str),
    ) -> bool {
        let (group, subresource) = ("", "");
        self.0.allows(
            &who.0,
            &Ask::Resource { verb, group, resource, subresource, namespace, name, fields: None },
        )
    }
}
