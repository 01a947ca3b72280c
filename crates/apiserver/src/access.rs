//! Request identity and authorization.
//!
//! `authentication` establishes the user, `rbac` authorizes the request, and `impersonation`
//! decides whether the user may act as another one. Authorization cannot be disabled.

mod impersonation;

use std::borrow::Cow;
use std::collections::BTreeMap;

use api::Status;
use api::selector::FieldSelector;

use crate::rbac::{Attributes, Rbac};
use crate::request::Target;

pub use impersonation::impersonate;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

/// What a request does, before authorization attributes are derived from it.
pub enum RequestInfo<'a> {
    /// Verb, target, object name (empty for collections) and the field selector of a list.
    Resource(&'static str, &'a Target, &'a str, Option<&'a FieldSelector>),
    /// Method and path of a non-resource request.
    Path(&'a str, &'a str),
}

impl User {
    /// The user of a request without credentials.
    pub fn anonymous() -> User {
        User { name: ANONYMOUS.into(), groups: vec![UNAUTHENTICATED.into()], ..User::default() }
    }

    /// The user that a verified client certificate names.
    pub fn from_certificate(identity: pki::Identity) -> User {
        let uid = identity.uid.unwrap_or_default();
        User { name: identity.user, uid, groups: identity.groups, ..User::default() }.authenticated()
    }

    /// Adds `system:authenticated`, unless the user is anonymous.
    pub fn authenticated(mut self) -> User {
        if self.name != ANONYMOUS && !self.is_in(AUTHENTICATED) && !self.is_in(UNAUTHENTICATED) {
            self.groups.push(AUTHENTICATED.into());
        }
        self
    }

    pub fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|member| member == group)
    }
}

const ANONYMOUS: &str = "system:anonymous";
const AUTHENTICATED: &str = "system:authenticated";
const UNAUTHENTICATED: &str = "system:unauthenticated";
/// Members may do everything, whatever roles and bindings allow.
pub const SYSTEM_PRIVILEGED_GROUP: &str = "system:masters";

/// Parses a path that has the form of a resource path but names no known resource. Authorization
/// treats it as a resource request, so only users who may read such objects learn that the resource
/// does not exist. Returns the verb, and group, resource, subresource, namespace and name.
fn parse_unknown_resource<'a>(method: &str, path: &'a str) -> Option<(&'static str, [&'a str; 5])> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let (group, mut rest) = match parts.as_slice() {
        ["api", _, rest @ ..] if !rest.is_empty() => ("", rest),
        ["apis", group, _, rest @ ..] if !rest.is_empty() => (*group, rest),
        _ => return None,
    };
    let watch = rest[0] == "watch";
    if watch {
        rest = &rest[1..];
    }
    let namespace = match rest {
        ["namespaces", namespace, ..] => *namespace,
        _ => "",
    };
    if let ["namespaces", _, inner, ..] = rest
        && !matches!(*inner, "status" | "finalize")
    {
        rest = &rest[2..];
    }
    let part = |i: usize| rest.get(i).copied().unwrap_or("");
    let verb = match (method, part(1)) {
        _ if watch => "watch",
        ("GET" | "HEAD", "") => "list",
        ("GET" | "HEAD", _) => "get",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", "") => "deletecollection",
        ("DELETE", _) => "delete",
        _ => "",
    };
    Some((verb, [group, part(0), part(2), namespace, part(1)]))
}

/// An update that creates a missing object needs the `create` permission, too.
pub async fn authorize_creation(rbac: &Rbac, user: &User, target: &Target) -> Result<(), Status> {
    authorize(rbac, user, &RequestInfo::Resource("create", target, &target.name, None)).await
}

pub async fn authorize(rbac: &Rbac, user: &User, request_info: &RequestInfo<'_>) -> Result<(), Status> {
    rbac.authorize(user, &request_info.attributes(&request_info.verb())).await
}

impl RequestInfo<'_> {
    pub fn verb(&self) -> Cow<'static, str> {
        match self {
            RequestInfo::Resource(verb, ..) => Cow::Borrowed(verb),
            RequestInfo::Path(method, path) => match parse_unknown_resource(method, path) {
                Some((verb, _)) => Cow::Borrowed(verb),
                None => Cow::Owned(method.to_ascii_lowercase()),
            },
        }
    }

    /// The authorization attributes for `verb` on this target.
    pub fn attributes<'b>(&'b self, verb: &'b str) -> Attributes<'b> {
        match self {
            RequestInfo::Path(method, path) => match parse_unknown_resource(method, path) {
                Some((_, [group, resource, subresource, namespace, name])) => {
                    Attributes::Resource { verb, group, resource, subresource, namespace, name, fields: None }
                }
                None => Attributes::Path { verb, path },
            },
            RequestInfo::Resource(_, target, name, fields) => {
                let resource = target.resource;
                // As upstream: a Namespace is in the namespace of its own name, so RoleBindings
                // there can grant access to it.
                let is_namespace = resource.group.is_empty() && resource.plural == "namespaces";
                Attributes::Resource {
                    verb,
                    group: resource.group,
                    resource: resource.plural,
                    subresource: &target.subresource,
                    namespace: if is_namespace { &target.name } else { &target.namespace },
                    name,
                    fields: *fields,
                }
            }
        }
    }
}
