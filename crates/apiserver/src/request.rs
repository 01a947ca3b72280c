//! The target of a request, parsed from its path and query.

use api::{Resource, Status};
use http::Method;
use stream::url_encoding;

use crate::options::SelectionPredicate;
use crate::registry::Registry;

/// The handler that a path leads to.
pub enum Route {
    /// Objects, or a subresource of an object.
    Resource(Target),
    /// `/api`, `/apis`, `/apis/apps`, `/api/v1`…, as path segments.
    Discovery(Vec<String>),
    /// Any other path: health, version, metrics, OpenAPI.
    NonResource,
}

/// The objects that a request addresses.
#[derive(Clone)]
pub struct Target {
    pub resource: &'static Resource,
    /// Empty for cluster-scoped resources and for requests across all namespaces.
    pub namespace: String,
    /// Empty for collections.
    pub name: String,
    /// Empty for the object itself.
    pub subresource: String,
    /// The path is a deprecated `/watch/` path.
    pub watch: bool,
}

impl Target {
    /// All objects of a resource in a namespace; empty for cluster-scoped resources and for all
    /// namespaces.
    pub fn collection(resource: &'static Resource, namespace: &str) -> Target {
        Target {
            resource,
            namespace: namespace.to_owned(),
            name: String::new(),
            subresource: String::new(),
            watch: false,
        }
    }

    pub fn not_found(&self) -> Status {
        Status::not_found(self.resource.group, self.resource.plural, &self.name)
    }

    /// The store's key of the object, or of the collection with a trailing slash.
    pub fn key(&self) -> String {
        let prefix = crate::registry::prefix(self.resource);
        match (self.namespace.is_empty(), self.name.is_empty()) {
            (true, true) => prefix,
            (true, false) => prefix + &self.name,
            (false, true) => format!("{prefix}{}/", self.namespace),
            (false, false) => format!("{prefix}{}/{}", self.namespace, self.name),
        }
    }
}

impl Target {
    /// The common key prefix of all objects that a selection can match.
    pub fn key_prefix(&self, selection: &SelectionPredicate) -> String {
        let collection = Target { name: String::new(), ..self.clone() }.key();
        match selection.exact_name() {
            Some(name) if !self.namespace.is_empty() || !self.resource.namespaced => collection + name,
            _ => collection,
        }
    }
}

/// Parses a path.
pub fn route(registry: &Registry, path: &str) -> Result<Route, Status> {
    let segments: Vec<String> =
        path.split('/').filter(|segment| !segment.is_empty()).map(url_encoding::unescape).collect();
    let parts: Vec<&str> = segments.iter().map(String::as_str).collect();
    let (group, version, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
        ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
        ["api", ..] | ["apis", ..] if parts.len() <= 3 => return Ok(Route::Discovery(segments)),
        _ => return Ok(Route::NonResource),
    };
    let (watch, rest) = match rest {
        ["watch", rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let (namespace, plural, rest) = match rest {
        // `namespaces/x/status` is a subresource of the namespace, `namespaces/x/pods` a collection
        // in it.
        ["namespaces", _, "status" | "finalize"] => ("", "namespaces", &rest[1..]),
        ["namespaces", namespace, plural, rest @ ..] => (*namespace, *plural, rest),
        [plural, rest @ ..] => ("", *plural, rest),
        [] => return Err(Status::unknown_path()),
    };
    let (name, subresource) = match rest {
        [] => ("", String::new()),
        [name] => (*name, String::new()),
        [name, subresource] => (*name, (*subresource).to_owned()),
        [name, "proxy", ..] => (*name, "proxy".to_owned()),
        _ => return Err(Status::unknown_path()),
    };
    let Some(resource) = registry.find(group, version, plural) else { return Err(Status::unknown_path()) };
    let scope_mismatch =
        if resource.namespaced { namespace.is_empty() && !name.is_empty() } else { !namespace.is_empty() };
    let unknown = !subresource.is_empty() && resource.subresources.iter().all(|sub| sub.name != subresource);
    if scope_mismatch || unknown {
        return Err(Status::unknown_path());
    }
    Ok(Route::Resource(Target {
        resource,
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        subresource,
        watch,
    }))
}

/// The verb for authorization, metrics and audit.
pub fn verb(method: &Method, target: &Target, watch: bool) -> &'static str {
    match (method.as_str(), target.name.is_empty()) {
        ("GET" | "HEAD", _) if watch => "watch",
        ("GET" | "HEAD", true) => "list",
        ("GET" | "HEAD", false) => "get",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", true) => "deletecollection",
        ("DELETE", false) => "delete",
        _ => "",
    }
}

/// A decoded query string.
#[derive(Clone, Debug, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    pub fn parse(raw: &str) -> Query {
        Query(url_encoding::parse_query(raw).collect())
    }

    /// The first value, or `""`.
    pub fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }

    /// Encodes the query, sorted by name.
    pub fn encode(&self) -> String {
        let mut pairs: Vec<&(String, String)> = self.0.iter().collect();
        pairs.sort_by_key(|(name, _)| name);
        let pairs =
            pairs.iter().map(|(name, value)| format!("{}={}", percent_encode(name), percent_encode(value)));
        pairs.collect::<Vec<_>>().join("&")
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(key, _)| key == name)
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn int(&self, name: &str) -> Result<Option<i64>, Status> {
        match self.get(name) {
            "" => Ok(None),
            text => text.parse().map(Some).map_err(|error: std::num::ParseIntError| {
                let reason = match error.kind() {
                    std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow => {
                        "value out of range"
                    }
                    _ => "invalid syntax",
                };
                Status::bad_request(format!("strconv.ParseInt: parsing {text:?}: {reason}"))
            }),
        }
    }

    /// Parses a boolean as upstream does in queries: anything but `0` and `false` is true.
    pub fn flag(&self, name: &str) -> Option<bool> {
        match self.get(name) {
            _ if !self.has(name) => None,
            "false" | "0" => Some(false),
            _ => Some(true),
        }
    }
}

/// Percent-encodes a name or value of a query.
fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(byte.into()),
            b' ' => out.push('+'),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(path: &str, expected: &str) {
        let found = match route(&Registry::new(&[]).unwrap(), path) {
            Ok(Route::Resource(t)) => {
                format!("{} {}|{}|{}", t.resource.plural, t.namespace, t.name, t.subresource)
            }
            Ok(Route::Discovery(parts)) => format!("discovery {}", parts.join(" ")),
            Ok(Route::NonResource) => "other".to_owned(),
            Err(status) => status.code.to_string(),
        };
        assert_eq!(found, expected, "{path}");
    }

    #[test]
    fn paths_map_to_routes() {
        check("/api/v1/pods", "pods ||");
        check("/api/v1/namespaces/a/pods/b", "pods a|b|");
        check("/api/v1/namespaces/a/pods/b/status", "pods a|b|status");
        check("/api/v1/namespaces/a", "namespaces |a|");
        check("/api/v1/namespaces/a/status", "namespaces |a|status");
        check("/api/v1/namespaces/a/finalize", "namespaces |a|finalize");
        check("/api/v1/namespaces", "namespaces ||");
        check("/api/v1/nodes/n/proxy/logs/x", "nodes |n|proxy");
        check("/api/v1/watch/namespaces/a/pods", "pods a||");
        check("/apis/apps/v1/namespaces/a/deployments/b/scale", "deployments a|b|scale");
        check("/api/v1/pods/b", "404");
        check("/api/v1/namespaces/a/nodes/b", "404");
        check("/api/v1/namespaces/a/pods/b/nothing", "404");
        check("/apis/apps/v1/nope", "404");
        check("/apis/apps/v1", "discovery apis apps v1");
        check("/api", "discovery api");
        check("/version", "other");
        check("/", "other");
    }

    #[test]
    fn query_values_are_decoded() {
        let query = Query::parse("a=b%20c&limit=x&watch=1&big=99999999999999999999&plus=a+b&none");
        assert_eq!((query.get("a"), query.get("plus"), query.get("absent")), ("b c", "a b", ""));
        assert_eq!(
            (query.flag("watch"), query.flag("none"), query.flag("absent")),
            (Some(true), Some(true), None)
        );
        assert_eq!(
            query.int("limit").unwrap_err().message,
            "strconv.ParseInt: parsing \"x\": invalid syntax"
        );
        assert!(query.int("big").unwrap_err().message.ends_with("value out of range"));
    }
}
