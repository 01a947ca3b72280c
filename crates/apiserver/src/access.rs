//! Who asks, and whether they may.
//!
//! Client certificates say who, or else `tokens`; roles and their bindings (`rbac`) say whether, also who
//! may act as somebody else. Never switched off.

use std::collections::BTreeMap;

use api::Status;
use http::HeaderMap;

use crate::rbac::{Ask, Rbac};
use crate::request::{Target, percent_decode};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

/// What a request asks to do.
pub enum Asks<'a> {
    /// A verb on objects, and the name where it is about one.
    Resource(&'static str, &'a Target, &'a str),
    /// A method on any other path.
    Path(&'a str, &'a str),
}

impl User {
    /// Without a credential.
    pub fn anonymous() -> User {
        User { name: ANONYMOUS.into(), groups: vec![UNAUTHENTICATED.into()], ..User::default() }
    }

    /// As a verified client certificate names them.
    pub fn from_certificate(identity: pki::Identity) -> User {
        let mut groups = identity.groups;
        groups.push(AUTHENTICATED.into());
        User { name: identity.user, groups, ..User::default() }
    }

    pub fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|member| member == group)
    }
}

const ANONYMOUS: &str = "system:anonymous";
const AUTHENTICATED: &str = "system:authenticated";
const UNAUTHENTICATED: &str = "system:unauthenticated";
/// Who may do everything, whatever roles say.
pub const MASTERS: &str = "system:masters";

/// The user that `Impersonate-*` headers name, where `user` may act as others.
pub fn impersonate(rbac: &Rbac, user: User, headers: &HeaderMap) -> Result<User, Status> {
    let texts = |name: &str| -> Vec<String> {
        headers
            .get_all(name)
            .iter()
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
            .collect()
    };
    let first = |name: &str| texts(name).into_iter().next().unwrap_or_default();
    let mut other = User {
        name: first("impersonate-user"),
        uid: first("impersonate-uid"),
        groups: texts("impersonate-group"),
        extra: BTreeMap::new(),
    };
    for name in headers.keys() {
        if let Some(key) = name.as_str().strip_prefix("impersonate-extra-") {
            other.extra.insert(percent_decode(key), texts(name.as_str()));
        }
    }
    if other.name.is_empty() {
        return if other == User::default() {
            Ok(user)
        } else {
            Err(Status::bad_request(format!(
                "requested {:?} without impersonating a user",
                [other.groups, vec![other.uid], other.extra.into_keys().collect()].concat()
            )))
        };
    }
    let account = other.name.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
    may_act_as(rbac, &user, &other, account)?;
    if let (true, Some((namespace, _))) = (other.groups.is_empty(), account) {
        other.groups = vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")];
    }
    if other.name == ANONYMOUS {
        if !other.is_in(UNAUTHENTICATED) {
            other.groups.push(UNAUTHENTICATED.into());
        }
    } else if !other.is_in(AUTHENTICATED) && !other.is_in(UNAUTHENTICATED) {
        other.groups.push(AUTHENTICATED.into());
    }
    Ok(other)
}

/// Each part of another's identity needs its own permission.
fn may_act_as(rbac: &Rbac, user: &User, other: &User, account: Option<(&str, &str)>) -> Result<(), Status> {
    let check = |(group, resource, subresource): (&str, &str, &str), namespace: &str, name: &str| {
        let verb = "impersonate";
        rbac.authorize(user, &Ask::Resource { verb, group, resource, subresource, namespace, name })
    };
    match account {
        Some((namespace, name)) => check(("", "serviceaccounts", ""), namespace, name)?,
        None => check(("", "users", ""), "", &other.name)?,
    }
    for group in &other.groups {
        check(("", "groups", ""), "", group)?;
    }
    for (key, values) in &other.extra {
        for value in values {
            check(("authentication.k8s.io", "userextras", key), "", value)?;
        }
    }
    if !other.uid.is_empty() {
        check(("authentication.k8s.io", "uids", ""), "", &other.uid)?;
    }
    Ok(())
}

/// What a path asks for that looks like one of objects but leads to none: only those who may see objects
/// of that kind learn that there is no such kind.
fn unserved<'a>(method: &str, path: &'a str) -> Option<Ask<'a>> {
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
    let (resource, name, subresource) = (part(0), part(1), part(2));
    Some(Ask::Resource { verb, group, resource, subresource, namespace, name })
}

/// A change of what is not there makes it, which is more than changing it.
pub fn authorize_creation(rbac: &Rbac, user: &User, target: &Target) -> Result<(), Status> {
    authorize(rbac, user, &Asks::Resource("create", target, &target.name))
}

pub fn authorize(rbac: &Rbac, user: &User, asks: &Asks<'_>) -> Result<(), Status> {
    match asks {
        Asks::Path(method, path) => {
            let verb = &method.to_ascii_lowercase();
            rbac.authorize(user, &unserved(method, path).unwrap_or(Ask::Path { verb, path }))
        }
        Asks::Resource(verb, target, name) => {
            let resource = target.resource;
            // A namespace is also in itself, so that its owners can see it.
            let itself = resource.group.is_empty() && resource.plural == "namespaces";
            let ask = Ask::Resource {
                verb,
                group: resource.group,
                resource: resource.plural,
                subresource: &target.subresource,
                namespace: if itself { &target.name } else { &target.namespace },
                name,
            };
            rbac.authorize(user, &ask)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;

    #[track_caller]
    fn check_headers(from: &str, headers: &[(&str, &str)], expected: &str) {
        let user = match from {
            "" => User::anonymous(),
            group => User { name: "jo".into(), groups: vec![group.into()], ..User::default() },
        };
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(http::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        let found = match impersonate(&Rbac::new(&Cache::new()), user, &map) {
            Ok(user) => format!("{} {:?} {} {:?}", user.name, user.groups, user.uid, user.extra),
            Err(status) => format!("{} {}", status.code, status.message),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn masters_may_act_as_others() {
        let as_ann = ("Impersonate-User", "ann");
        check_headers("system:masters", &[as_ann], r#"ann ["system:authenticated"]  {}"#);
        check_headers(
            "system:masters",
            &[as_ann, ("Impersonate-Group", "a"), ("Impersonate-Group", "b"), ("Impersonate-Uid", "7")],
            r#"ann ["a", "b", "system:authenticated"] 7 {}"#,
        );
        check_headers(
            "system:masters",
            &[as_ann, ("Impersonate-Extra-Acme.com%2fx", "1"), ("Impersonate-Extra-Acme.com%2fx", "2")],
            r#"ann ["system:authenticated"]  {"acme.com/x": ["1", "2"]}"#,
        );
        check_headers(
            "system:masters",
            &[("Impersonate-User", "system:serviceaccount:a:b")],
            r#"system:serviceaccount:a:b ["system:serviceaccounts", "system:serviceaccounts:a", "system:authenticated"]  {}"#,
        );
        check_headers(
            "system:masters",
            &[("Impersonate-User", "system:anonymous")],
            r#"system:anonymous ["system:unauthenticated"]  {}"#,
        );
        check_headers(
            "devs",
            &[as_ann],
            r#"403 users "ann" is forbidden: User "jo" cannot impersonate resource "users" in API group "" at the cluster scope"#,
        );
        check_headers(
            "devs",
            &[("Impersonate-User", "system:serviceaccount:a:b")],
            r#"403 serviceaccounts "b" is forbidden: User "jo" cannot impersonate resource "serviceaccounts" in API group "" in the namespace "a""#,
        );
        check_headers(
            "system:masters",
            &[("Impersonate-Group", "a")],
            r#"400 requested ["a", ""] without impersonating a user"#,
        );
    }
}
