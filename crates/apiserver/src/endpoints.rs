//! Resolves a Service port to an endpoint address, as upstream's `ResolveEndpoint` does.
//!
//! The server dials endpoints itself, so that webhooks and aggregated API servers work wherever
//! their pods can be reached, with or without a service proxy on this machine.

use api::json::JsonExt as _;

use crate::admission::Cluster as _;
use crate::server::Server;

/// Host and port of a random ready endpoint of the Service port. Error texts are upstream's.
pub fn resolve(server: &Server, namespace: &str, name: &str, port: u16) -> Result<(String, u16), String> {
    let Some(service) = server.get("", "services", namespace, name) else {
        return Err(format!("service {name:?} not found"));
    };
    let service = service.value();
    let spec = service.at("spec");
    match spec.text("type") {
        "ExternalName" => return Ok((spec.text("externalName").to_owned(), port)),
        "ClusterIP" | "NodePort" | "LoadBalancer" => {}
        other => return Err(format!("unsupported service type {other:?}")),
    }
    let found = spec.items("ports").iter().find(|found| found.int("port") == Some(port.into()));
    let Some(found) = found else {
        return Err(format!("no service port {port} found for service {name:?}"));
    };
    let slices = server.list("discovery.k8s.io", "endpointslices", namespace);
    let slices = slices.iter().filter(|slice| slice.label("kubernetes.io/service-name") == Some(name));
    let mut slices: Vec<_> = slices.map(|slice| slice.value()).collect();
    let first = spec.items("ipFamilies").first().and_then(|family| family.as_str()).unwrap_or("IPv4");
    slices.sort_by_key(|slice| slice.text("addressType") != first);
    let best = slices.iter().find_map(|slice| {
        let port = slice.items("ports").iter().find(|port| port.text("name") == found.text("name"))?;
        let port = u16::try_from(port.int("port")?).ok()?;
        let ready = |endpoint: &&serde_json::Value| {
            endpoint.at("conditions").at("ready").as_bool() != Some(false)
                && !endpoint.items("addresses").is_empty()
        };
        let ready: Vec<_> = slice.items("endpoints").iter().filter(ready).collect();
        let chosen = ready.get((server.random() * ready.len() as f64) as usize)?;
        let address = chosen.items("addresses").first()?.as_str()?;
        Some((address.to_owned(), port))
    });
    best.ok_or_else(|| format!("no endpoints available for service {name:?}"))
}
