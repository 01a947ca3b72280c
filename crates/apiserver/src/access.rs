//! Who asks, and whether they may.
//!
//! Client certificates say who; members of `system:masters` may do everything, everybody may see whether
//! the server is healthy, and everything else is refused. Never switched off.

use api::Status;

use crate::request::Target;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub groups: Vec<String>,
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
        User { name: "system:anonymous".into(), groups: vec!["system:unauthenticated".into()] }
    }

    /// As a verified client certificate names them.
    pub fn from_certificate(identity: pki::Identity) -> User {
        let mut groups = identity.groups;
        groups.push("system:authenticated".into());
        User { name: identity.user, groups }
    }
}

/// Paths that tell nothing but that the server is there.
const PUBLIC: &[&str] = &["/healthz", "/livez", "/readyz", "/version"];

pub fn authorize(user: &User, asks: &Asks<'_>) -> Result<(), Status> {
    if user.groups.iter().any(|group| group == "system:masters") {
        return Ok(());
    }
    let name = &user.name;
    match asks {
        Asks::Path("GET" | "HEAD", path)
            if PUBLIC.iter().any(|public| {
                path == public || path.strip_prefix(public).is_some_and(|rest| rest.starts_with('/'))
            }) =>
        {
            Ok(())
        }
        Asks::Path(method, path) => {
            let verb = method.to_ascii_lowercase();
            Err(Status::failure(
                403,
                "Forbidden",
                format!("forbidden: User {name:?} cannot {verb} path {path:?}"),
            )
            .about("", "", ""))
        }
        Asks::Resource(verb, target) => {
            let resource = target.resource;
            let plural = match target.subresource.as_str() {
                "" => resource.plural.to_owned(),
                subresource => format!("{}/{subresource}", resource.plural),
            };
            let place = match (resource.namespaced, target.namespace.as_str()) {
                (true, namespace) if !namespace.is_empty() => format!("in the namespace {namespace:?}"),
                _ => "at the cluster scope".to_owned(),
            };
            let why = format!(
                "User {name:?} cannot {verb} resource {plural:?} in API group {:?} {place}",
                resource.group
            );
            let shown = match resource.group {
                "" => resource.plural.to_owned(),
                group => format!("{}.{group}", resource.plural),
            };
            let subject = if target.name.is_empty() { shown } else { format!("{shown} {:?}", target.name) };
            Err(Status::failure(403, "Forbidden", format!("{subject} is forbidden: {why}")).about(
                resource.group,
                resource.plural,
                &target.name,
            ))
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
        let user = User { name: "jo".into(), groups: groups.iter().map(|g| (*g).to_owned()).collect() };
        let registry = Registry::new(&[]).unwrap();
        let route = route(&registry, path).unwrap();
        let asks = match &route {
            Route::Resource(target) => Asks::Resource("list", target),
            _ => Asks::Path("GET", path),
        };
        assert_eq!(authorize(&user, &asks).err().map(|status| status.message).as_deref(), expected);
    }

    #[test]
    fn only_masters_may_do_more_than_look_at_health() {
        check(&["system:masters"], "/api/v1/secrets", None);
        check(&[], "/readyz", None);
        check(&[], "/livez/ping", None);
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
