//! Resolves a node, pod or service to the address that the proxy connects to.

use std::net::IpAddr;
use std::sync::Arc;

use api::Status;
use api::json::JsonExt as _;
use serde_json::Value;

use super::unavailable;
use crate::kubelets::UpstreamAddr;
use crate::request::Target;
use crate::server::Server;

/// How the proxy connects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpstreamTransport {
    Plain,
    /// TLS without certificate verification: a pod's address does not determine a name to verify.
    Tls,
    /// TLS with the API server's client certificate; the kubelet's certificate is verified.
    Kubelet,
}

/// The resolved destination of a proxy request.
#[derive(Debug, PartialEq)]
pub struct Upstream {
    pub addr: UpstreamAddr,
    pub transport: UpstreamTransport,
}

impl Upstream {
    /// As in a Host header.
    pub fn host_port(&self) -> String {
        self.addr.host_port()
    }
}

/// A name as in proxy paths: `name`, `name:port` or `scheme:name:port`.
#[derive(Debug, PartialEq)]
struct ProxyName<'a> {
    scheme: &'a str,
    name: &'a str,
    port: &'a str,
}

impl ProxyName<'_> {
    fn parse(id: &str) -> Option<ProxyName<'_>> {
        let parts: Vec<&str> = id.split(':').collect();
        let (scheme, name, port) = match parts.as_slice() {
            [name] => ("", *name, ""),
            [name, port] => ("", *name, *port),
            [scheme, name, port] => (*scheme, *name, *port),
            _ => return None,
        };
        (!name.is_empty() && matches!(scheme, "" | "http" | "https")).then_some(ProxyName {
            scheme,
            name,
            port,
        })
    }

    fn transport(&self) -> UpstreamTransport {
        if self.scheme == "https" { UpstreamTransport::Tls } else { UpstreamTransport::Plain }
    }

    fn port_number(&self, port: &str) -> Result<u16, Status> {
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

/// Resolves the destination of a proxy request.
pub async fn resolve(server: &Arc<Server>, target: &Target) -> Result<Upstream, Status> {
    let kind = target.resource.singular();
    let Some(proxy_name) = ProxyName::parse(&target.name) else {
        return Err(Status::bad_request(format!("invalid {kind} request {:?}", target.name)));
    };
    let plain = Target { name: proxy_name.name.to_owned(), subresource: String::new(), ..target.clone() };
    if target.resource.plural == "services" {
        return service(server, &proxy_name, &plain).await;
    }
    let object = server.current(&plain).await?.ok_or_else(|| plain.not_found())?.value();
    if target.resource.plural == "nodes" { node(&proxy_name, &object) } else { pod(&proxy_name, &object) }
}

fn node(proxy_name: &ProxyName<'_>, node: &Value) -> Result<Upstream, Status> {
    let kubelet = UpstreamAddr::from_node(node)?;
    if proxy_name.port.is_empty() || proxy_name.port == kubelet.port.to_string() {
        return Ok(Upstream { addr: kubelet, transport: UpstreamTransport::Kubelet });
    }
    Ok(Upstream {
        addr: UpstreamAddr {
            host: allowed_host(&kubelet.host)?,
            port: proxy_name.port_number(proxy_name.port)?,
        },
        transport: proxy_name.transport(),
    })
}

fn pod(proxy_name: &ProxyName<'_>, pod: &Value) -> Result<Upstream, Status> {
    let ports = pod.at("spec").items("containers").iter().flat_map(|container| container.items("ports"));
    let first = ports.filter_map(|port| port.at("containerPort").as_u64()).next();
    let port = match (proxy_name.port, first) {
        ("", Some(first)) => first.to_string(),
        (port, _) => port.to_owned(),
    };
    let ip = pod.at("status").items("podIPs").first().map_or("", |ip| ip.text("ip"));
    Ok(Upstream {
        addr: UpstreamAddr { host: allowed_host(ip)?, port: proxy_name.port_number(&port)? },
        transport: proxy_name.transport(),
    })
}

/// A random endpoint of a service that has the port and is the address of a pod.
async fn service(
    server: &Arc<Server>,
    proxy_name: &ProxyName<'_>,
    target: &Target,
) -> Result<Upstream, Status> {
    let mut port = proxy_name.port.to_owned();
    if let Ok(number) = proxy_name.port.parse::<i64>() {
        let service = server.current(target).await?.ok_or_else(|| target.not_found())?.value();
        let found =
            service.at("spec").items("ports").iter().find(|port| port.at("port").as_i64() == Some(number));
        let Some(found) = found else {
            let message = format!("no service port {number} found for service {:?}", proxy_name.name);
            return Err(unavailable(message));
        };
        port = found.text("name").to_owned();
    }
    let endpoints = api::resource_table::find_resource("", "v1", "endpoints")
        .expect("endpoints are in the resource table");
    let endpoints =
        Target { name: proxy_name.name.to_owned(), ..Target::collection(endpoints, &target.namespace) };
    let object = server.current(&endpoints).await?.ok_or_else(|| endpoints.not_found())?.value();
    let subsets = object.items("subsets");
    if subsets.is_empty() {
        return Err(unavailable(format!("no endpoints available for service {:?}", proxy_name.name)));
    }
    let mut candidates = Vec::new();
    for subset in subsets {
        for open in subset.items("ports").iter().filter(|open| open.text("name") == port) {
            let number = open.at("port").as_u64().and_then(|number| u16::try_from(number).ok());
            for address in subset.items("addresses") {
                candidates.extend(number.map(|number| (address, number)));
            }
        }
    }
    let start = (server.random() * candidates.len() as f64) as usize;
    for i in 0..candidates.len() {
        let (address, port) = candidates[(start + i) % candidates.len()];
        if is_pod_address(server, address, &target.namespace) {
            let addr = UpstreamAddr { host: allowed_host(address.text("ip"))?, port };
            return Ok(Upstream { addr, transport: proxy_name.transport() });
        }
    }
    let id = [proxy_name.scheme, proxy_name.name, proxy_name.port].map(str::to_owned);
    let id = id.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(":");
    Err(unavailable(format!("no endpoints available for service {id:?}")))
}

/// Users who may write Endpoints must not reach arbitrary addresses through the proxy.
fn is_pod_address(server: &Server, address: &Value, namespace: &str) -> bool {
    let reference = address.at("targetRef");
    if reference.text("kind") != "Pod" || reference.text("namespace") != namespace {
        return false;
    }
    let pods = api::resource_table::find_resource("", "v1", "pods").expect("pods are in the resource table");
    let target = Target { name: reference.text("name").to_owned(), ..Target::collection(pods, namespace) };
    let Some(pod) = server.find(&target).map(|pod| pod.value()) else { return false };
    pod.at("status").items("podIPs").iter().any(|ip| ip.text("ip") == address.text("ip"))
}

/// Rejects addresses of this machine, link-local and multicast addresses.
fn allowed_host(host: &str) -> Result<String, Status> {
    let not_allowed = || Status::bad_request("address not allowed");
    let ip: IpAddr = host.parse().map_err(|_| not_allowed())?;
    let reserved = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if reserved || ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() {
        return Err(not_allowed());
    }
    Ok(host.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(id: &str, expected: Option<(&str, &str, &str)>) {
        let found =
            ProxyName::parse(id).map(|proxy_name| (proxy_name.scheme, proxy_name.name, proxy_name.port));
        assert_eq!(found, expected, "{id}");
    }

    #[test]
    fn proxy_names_are_parsed() {
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
    fn check_pod(id: &str, ip: &str, expected: Result<(&str, UpstreamTransport), &str>) {
        let object = json!({
            "spec": {"containers": [{"name": "a"}, {"name": "b", "ports": [{"containerPort": 8080}]}]},
            "status": {"podIPs": [{"ip": ip}]}
        });
        let upstream = pod(&ProxyName::parse(id).expect("a name"), &object);
        let found = upstream
            .map(|upstream| (upstream.host_port(), upstream.transport))
            .map_err(|status| status.message);
        assert_eq!(
            found,
            expected.map(|(at, transport)| (at.to_owned(), transport)).map_err(str::to_owned),
            "{id}"
        );
    }

    #[test]
    fn resolves_pod_addresses() {
        check_pod("web", "10.1.2.3", Ok(("10.1.2.3:8080", UpstreamTransport::Plain)));
        check_pod("web:81", "10.1.2.3", Ok(("10.1.2.3:81", UpstreamTransport::Plain)));
        check_pod("https:web:8443", "fd00::1", Ok(("[fd00::1]:8443", UpstreamTransport::Tls)));
        check_pod("web", "127.0.0.1", Err("address not allowed"));
        check_pod("web", "169.254.169.254", Err("address not allowed"));
        check_pod("web", "", Err("address not allowed"));
        check_pod(
            "web:http",
            "10.1.2.3",
            Err("error trying to reach service: dial tcp: lookup tcp/http: unknown port"),
        );
    }
}
