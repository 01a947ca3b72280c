//! What stands behind a node, a pod or a service.

use std::net::IpAddr;
use std::sync::Arc;

use api::Status;
use api::json::Json as _;
use serde_json::Value;

use super::unavailable;
use crate::kubelets::Place;
use crate::request::Target;
use crate::server::Server;

/// How the far end is spoken to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    Plain,
    /// Over TLS, whoever it is: an address of a pod says nothing about names.
    Tls,
    /// As the API server, to a certificate of the cluster.
    Kubelet,
}

/// Where a request goes.
#[derive(Debug, PartialEq)]
pub struct Far {
    pub place: Place,
    pub way: Way,
}

impl Far {
    /// As in a Host header.
    pub fn shown(&self) -> String {
        self.place.shown()
    }
}

/// A name as it is in paths: `name`, `name:port` or `scheme:name:port`.
#[derive(Debug, PartialEq)]
struct Named<'a> {
    scheme: &'a str,
    name: &'a str,
    port: &'a str,
}

impl Named<'_> {
    fn parse(id: &str) -> Option<Named<'_>> {
        let parts: Vec<&str> = id.split(':').collect();
        let (scheme, name, port) = match parts.as_slice() {
            [name] => ("", *name, ""),
            [name, port] => ("", *name, *port),
            [scheme, name, port] => (*scheme, *name, *port),
            _ => return None,
        };
        (!name.is_empty() && matches!(scheme, "" | "http" | "https")).then_some(Named { scheme, name, port })
    }

    fn way(&self) -> Way {
        if self.scheme == "https" { Way::Tls } else { Way::Plain }
    }

    fn number(&self, port: &str) -> Result<u16, Status> {
        match port {
            "" => Ok(if self.scheme == "https" { 443 } else { 80 }),
            port => port.parse().map_err(|_| {
                unavailable(format!(
                    "error trying to reach service: dial tcp: lookup tcp/{port}: unknown port"
                ))
            }),
        }
    }
}

/// Finds what a request for `proxy` is meant for.
pub async fn find(server: &Arc<Server>, target: &Target) -> Result<Far, Status> {
    let kind = target.resource.singular();
    let Some(named) = Named::parse(&target.name) else {
        return Err(Status::bad_request(format!("invalid {kind} request {:?}", target.name)));
    };
    let plain = Target { name: named.name.to_owned(), subresource: String::new(), ..target.clone() };
    if target.resource.plural == "services" {
        return service(server, &named, &plain).await;
    }
    let object = server.current(&plain).await?.ok_or_else(|| plain.not_found())?.value();
    if target.resource.plural == "nodes" { node(&named, &object) } else { pod(&named, &object) }
}

fn node(named: &Named<'_>, node: &Value) -> Result<Far, Status> {
    let kubelet = Place::of(node)?;
    if named.port.is_empty() || named.port == kubelet.port.to_string() {
        return Ok(Far { place: kubelet, way: Way::Kubelet });
    }
    Ok(Far {
        place: Place { host: allowed(&kubelet.host)?, port: named.number(named.port)? },
        way: named.way(),
    })
}

fn pod(named: &Named<'_>, pod: &Value) -> Result<Far, Status> {
    let ports = pod.at("spec").items("containers").iter().flat_map(|container| container.items("ports"));
    let first = ports.filter_map(|port| port.at("containerPort").as_u64()).next();
    let port = match (named.port, first) {
        ("", Some(first)) => first.to_string(),
        (port, _) => port.to_owned(),
    };
    let ip = pod.at("status").items("podIPs").first().map_or("", |ip| ip.text("ip"));
    Ok(Far { place: Place { host: allowed(ip)?, port: named.number(&port)? }, way: named.way() })
}

/// One of the pods that a service stands for; by chance, as long as it has the port.
async fn service(server: &Arc<Server>, named: &Named<'_>, target: &Target) -> Result<Far, Status> {
    let mut port = named.port.to_owned();
    if let Ok(number) = named.port.parse::<i64>() {
        let service = server.current(target).await?.ok_or_else(|| target.not_found())?.value();
        let found =
            service.at("spec").items("ports").iter().find(|port| port.at("port").as_i64() == Some(number));
        let Some(found) = found else {
            let message = format!("no service port {number} found for service {:?}", named.name);
            return Err(unavailable(message));
        };
        port = found.text("name").to_owned();
    }
    let endpoints = api::table::find("", "v1", "endpoints").expect("endpoints are in the table");
    let endpoints =
        Target { name: named.name.to_owned(), ..Target::collection(endpoints, &target.namespace) };
    let object = server.current(&endpoints).await?.ok_or_else(|| endpoints.not_found())?.value();
    let subsets = object.items("subsets");
    if subsets.is_empty() {
        return Err(unavailable(format!("no endpoints available for service {:?}", named.name)));
    }
    let mut places = Vec::new();
    for subset in subsets {
        for open in subset.items("ports").iter().filter(|open| open.text("name") == port) {
            let number = open.at("port").as_u64().and_then(|number| u16::try_from(number).ok());
            for address in subset.items("addresses") {
                places.extend(number.map(|number| (address, number)));
            }
        }
    }
    let start = (server.random() * places.len() as f64) as usize;
    for i in 0..places.len() {
        let (address, port) = places[(start + i) % places.len()];
        if is_of_a_pod(server, address, &target.namespace) {
            let place = Place { host: allowed(address.text("ip"))?, port };
            return Ok(Far { place, way: named.way() });
        }
    }
    let id = [named.scheme, named.name, named.port].map(str::to_owned);
    let id = id.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(":");
    Err(unavailable(format!("no endpoints available for service {id:?}")))
}

/// Somebody who may write endpoints must not reach whatever they like from here.
fn is_of_a_pod(server: &Server, address: &Value, namespace: &str) -> bool {
    let reference = address.at("targetRef");
    if reference.text("kind") != "Pod" || reference.text("namespace") != namespace {
        return false;
    }
    let pods = api::table::find("", "v1", "pods").expect("pods are in the table");
    let target = Target { name: reference.text("name").to_owned(), ..Target::collection(pods, namespace) };
    let Some(pod) = server.find(&target).map(|pod| pod.value()) else { return false };
    pod.at("status").items("podIPs").iter().any(|ip| ip.text("ip") == address.text("ip"))
}

/// Neither this machine itself nor everybody at once.
fn allowed(host: &str) -> Result<String, Status> {
    let refused = || Status::bad_request("address not allowed");
    let ip: IpAddr = host.parse().map_err(|_| refused())?;
    let reserved = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if reserved || ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() {
        return Err(refused());
    }
    Ok(host.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(id: &str, expected: Option<(&str, &str, &str)>) {
        let found = Named::parse(id).map(|named| (named.scheme, named.name, named.port));
        assert_eq!(found, expected, "{id}");
    }

    #[test]
    fn names() {
        check("web", Some(("", "web", "")));
        check("web:http", Some(("", "web", "http")));
        check("https:web:443", Some(("https", "web", "443")));
        check("https:web:", Some(("https", "web", "")));
        check(":web:80", Some(("", "web", "80")));
        check("ftp:web:21", None);
        check(":80", None);
        check("a:b:c:d", None);
    }

    #[track_caller]
    fn at(id: &str, ip: &str, expected: Result<(&str, Way), &str>) {
        let object = json!({
            "spec": {"containers": [{"name": "a"}, {"name": "b", "ports": [{"containerPort": 8080}]}]},
            "status": {"podIPs": [{"ip": ip}]}
        });
        let far = pod(&Named::parse(id).expect("a name"), &object);
        let found = far.map(|far| (far.shown(), far.way)).map_err(|status| status.message);
        assert_eq!(found, expected.map(|(at, way)| (at.to_owned(), way)).map_err(str::to_owned), "{id}");
    }

    #[test]
    fn pods() {
        at("web", "10.1.2.3", Ok(("10.1.2.3:8080", Way::Plain)));
        at("web:81", "10.1.2.3", Ok(("10.1.2.3:81", Way::Plain)));
        at("https:web:8443", "fd00::1", Ok(("[fd00::1]:8443", Way::Tls)));
        at("web", "127.0.0.1", Err("address not allowed"));
        at("web", "169.254.169.254", Err("address not allowed"));
        at("web", "", Err("address not allowed"));
        at(
            "web:http",
            "10.1.2.3",
            Err("error trying to reach service: dial tcp: lookup tcp/http: unknown port"),
        );
    }
}
