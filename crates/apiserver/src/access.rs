//! Who asks, and whether they may.
//!
//! Client certificates say who; members of `system:masters` may do everything, also as somebody else.
//! Everybody may see whether the server is healthy; whoever is known may see what it serves and ask about
//! themselves. Everything else is refused. Never switched off.

use std::collections::BTreeMap;

use api::Status;
use api::field::quoted;
use http::{HeaderMap, header};

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
    /// A verb on objects.
    Resource(&'static str, &'a Target),
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

    fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|member| member == group)
    }
}

const ANONYMOUS: &str = "system:anonymous";
const AUTHENTICATED: &str = "system:authenticated";
const UNAUTHENTICATED: &str = "system:unauthenticated";
const MASTERS: &str = "system:masters";

/// Paths that tell nothing but that the server is there, and those that tell what it serves.
const PUBLIC: &[&str] = &["/healthz", "/livez", "/readyz", "/version"];
const DISCOVERY: &[&str] = &["/api", "/apis", "/openapi"];
/// What everybody who is known may ask about themselves.
const SELF_REVIEWS: &[&str] = &["selfsubjectreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews"];

/// Who a request is from, given who its connection is from.
pub fn authenticate(user: User, headers: &HeaderMap) -> Result<User, Status> {
    let token = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let bearer = token.is_some_and(|text| text.len() > 7 && text[..7].eq_ignore_ascii_case(b"bearer "));
    if bearer && user.name == ANONYMOUS {
        // No token is known here.
        return Err(Status::failure(401, "Unauthorized", "Unauthorized"));
    }
    impersonate(user, headers)
}

/// The user that `Impersonate-*` headers name, where `user` may act as others.
fn impersonate(user: User, headers: &HeaderMap) -> Result<User, Status> {
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
    if !user.is_in(MASTERS) {
        let (resource, name, place) = match account {
            Some((namespace, name)) => {
                ("serviceaccounts", name, format!("in the namespace {}", quoted(namespace)))
            }
            None => ("users", other.name.as_str(), "at the cluster scope".to_owned()),
        };
        let why = format!(
            "User {} cannot impersonate resource {resource:?} in API group \"\" {place}",
            quoted(&user.name)
        );
        return Err(Status::forbidden("", resource, name, &why));
    }
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

pub fn authorize(user: &User, asks: &Asks<'_>) -> Result<(), Status> {
    if user.is_in(MASTERS) {
        return Ok(());
    }
    let known = user.is_in(AUTHENTICATED);
    let name = quoted(&user.name);
    let below = |path: &str, paths: &[&str]| {
        paths.iter().any(|public| {
            path.strip_prefix(public).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    };
    match asks {
        Asks::Path("GET" | "HEAD", path) if below(path, PUBLIC) || known && below(path, DISCOVERY) => Ok(()),
        Asks::Resource("create", target) if known && SELF_REVIEWS.contains(&target.resource.plural) => Ok(()),
        Asks::Path(method, path) => {
            let verb = method.to_ascii_lowercase();
            let why = format!("User {name} cannot {verb} path {}", quoted(path));
            Err(Status::forbidden("", "", "", &why))
        }
        Asks::Resource(verb, target) => {
            let resource = target.resource;
            let plural = match target.subresource.as_str() {
                "" => resource.plural.to_owned(),
                subresource => format!("{}/{subresource}", resource.plural),
            };
            let place = match (resource.namespaced, target.namespace.as_str()) {
                (true, namespace) if !namespace.is_empty() => {
                    format!("in the namespace {}", quoted(namespace))
                }
                _ => "at the cluster scope".to_owned(),
            };
            let group = resource.group;
            let why = format!("User {name} cannot {verb} resource {plural:?} in API group {group:?} {place}");
            Err(Status::forbidden(group, resource.plural, &target.name, &why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Registry;
    use crate::request::{Route, route};

    #[track_caller]
    fn check(groups: &[&str], path: &str, expected: Option<&str>) {
        let groups = groups.iter().map(|g| (*g).to_owned()).collect();
        let user = User { name: "jo".into(), groups, ..User::default() };
        let registry = Registry::new(&[]).unwrap();
        let route = route(&registry, path).unwrap();
        let asks = match &route {
            Route::Resource(target) => Asks::Resource("list", target),
            _ => Asks::Path("GET", path),
        };
        assert_eq!(authorize(&user, &asks).err().map(|status| status.message).as_deref(), expected);
    }

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
        let found = match authenticate(user, &map) {
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

    #[test]
    fn unknown_tokens_are_refused() {
        check_headers("", &[("Authorization", "Bearer x")], "401 Unauthorized");
        check_headers(
            "",
            &[("Authorization", "Basic x")],
            r#"system:anonymous ["system:unauthenticated"]  {}"#,
        );
        check_headers("devs", &[("Authorization", "Bearer x")], r#"jo ["devs"]  {}"#);
    }

    #[test]
    fn only_masters_may_do_more_than_look_at_health() {
        check(&["system:masters"], "/api/v1/secrets", None);
        check(&[], "/readyz", None);
        check(&[], "/livez/ping", None);
        check(&["system:authenticated"], "/apis/apps", None);
        check(&[], "/apis", Some("forbidden: User \"jo\" cannot get path \"/apis\""));
        check(&[], "/livezzz", Some("forbidden: User \"jo\" cannot get path \"/livezzz\""));
        check(
            &["system:authenticated"],
            "/apis/apps/v1/namespaces/x/deployments",
            Some(
                "deployments.apps is forbidden: User \"jo\" cannot list resource \"deployments\" in API group \"apps\" in the namespace \"x\"",
            ),
        );
        check(
            &[],
            "/api/v1/nodes",
            Some(
                "nodes is forbidden: User \"jo\" cannot list resource \"nodes\" in API group \"\" at the cluster scope",
            ),
        );
    }
}
