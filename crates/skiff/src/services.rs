//! Services on this node: the proxy, and the ports of the Ingress controller.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use client::{Client, Key, Patch};
use k8s_openapi::api::core::v1::{Node, ObjectReference};
use nft::IpNet;
use podnet::HostPort;
use proxy::Firewall as _;
use reconcile::{Ctx, EventType};
use serde_json::{Value, json};
use stream::Dialer;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::address::AddressReceiver;
use crate::cluster_info::ClusterInfo;
use crate::flags::{AgentFlags, NodeFlags, ServerFlags};
use crate::node;

/// User agent of the proxy.
pub const PROXY_AGENT: &str = "kube-proxy";
/// Offset of the cluster DNS address in the Service network. 10 is the common convention.
const DNS_ADDRESS_OFFSET: u8 = 10;
/// Delay before a failed update of the node's annotation is retried.
const ANNOTATE_RETRY: Duration = Duration::from_secs(1);
/// Delay before a port in use is tried again.
const PORT_RETRY: Duration = Duration::from_secs(30);

/// Configuration of the proxy for Services only: no NetworkPolicies (which need access to all pods), no
/// masquerading of pod traffic and no host ports.
pub fn proxy_config(node: String, pods: &[String], services: &[String]) -> anyhow::Result<proxy::Config> {
    Ok(proxy::Config {
        node,
        pods: parse_networks(pods)?,
        services: parse_networks(services)?,
        ..proxy::Config::default()
    })
}

pub fn parse_networks(cidrs: &[String]) -> anyhow::Result<Vec<IpNet>> {
    let parse = |text: &String| text.parse::<IpNet>().with_context(|| format!("{text:?}"));
    cidrs.iter().map(parse).collect()
}

/// Starts the proxy of this node. It runs until the shutdown of the context.
pub fn start_proxy(
    ctx: &Ctx,
    client: Client,
    flags: &NodeFlags,
    cluster_info: &ClusterInfo,
    ports: watch::Receiver<Vec<HostPort>>,
) -> anyhow::Result<()> {
    let config = proxy_config(node::name(flags), &cluster_info.cluster_cidr, &cluster_info.service_cidr)?;
    let policies = !flags.disable_network_policy;
    let bridge = Some(kubelet::network::BRIDGE);
    let config = proxy::Config {
        masquerade_outgoing: true,
        policies,
        accept_in_host_firewall: true,
        host_ports: true,
        bridge,
        ports: Some(ports),
        ..config
    };
    let ctx = Ctx { client: client.impersonate("system:kube-proxy"), ..ctx.clone() };
    proxy::enable_forwarding(&config.pods);
    tokio::spawn(proxy::routes::run(ctx.clone(), config.node.clone()));
    tokio::spawn(proxy::run(ctx, config, Arc::new(proxy::NetlinkFirewall::default())));
    Ok(())
}

/// Removes all rules of the proxy. Succeeds if there are none.
pub fn remove_rules() -> anyhow::Result<()> {
    // `route_localnet` must be reset first: without the rules, pods could reach services on loopback
    // addresses.
    match proxy::allow_loopback(kubelet::network::BRIDGE, false) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).context("cannot disable routing of loopback addresses");
        }
        _ => {}
    }
    proxy::host_firewall::remove().context("cannot remove rules from the tables of other programs")?;
    proxy::NetlinkFirewall::default().apply(&nft::Batch::delete_table()).context("cannot remove the rules")
}

/// Addresses of the cluster DNS: --cluster-dns, else the tenth address of each Service network.
pub fn dns_addresses(flags: &ServerFlags) -> anyhow::Result<Vec<IpAddr>> {
    if !flags.cluster_dns.is_empty() || is_disabled(flags, "dns") {
        return Ok(flags.cluster_dns.clone());
    }
    let networks = parse_networks(&flags.service_cidr)?;
    let dns_address = |net: &IpNet| match net.first() {
        IpAddr::V4(first) => IpAddr::V4(Ipv4Addr::from_bits(first.to_bits() | u32::from(DNS_ADDRESS_OFFSET))),
        IpAddr::V6(first) => {
            IpAddr::V6(Ipv6Addr::from_bits(first.to_bits() | u128::from(DNS_ADDRESS_OFFSET)))
        }
    };
    Ok(networks.iter().map(dns_address).collect())
}

pub fn is_disabled(flags: &ServerFlags, part: &str) -> bool {
    flags.disable.iter().any(|name| name == part)
}

/// Runs the Ingress controller on the node's address; `dial` connects to pods. Returns its metrics.
pub async fn ingress(
    ctx: &Ctx,
    admin: Client,
    flags: &ServerFlags,
    address: AddressReceiver,
    dial: Dialer,
) -> anyhow::Result<Arc<ingress::Metrics>> {
    match admin.create(&ingress::ingress_class()).await {
        Err(error) if !error.is_already_exists() => {
            return Err(error).context("cannot create the IngressClass");
        }
        _ => {}
    }
    let ingress = ingress::IngressServer::start(ctx, ingress::Config { client: admin, address, dial })?;
    let metrics = ingress.metrics();
    for (port, tls) in [(flags.ingress_http_port, false), (flags.ingress_https_port, true)] {
        if port != 0 {
            tokio::spawn(serve_ingress_port(
                ctx.clone(),
                ingress.clone(),
                node::name(&flags.node),
                port,
                tls,
            ));
        }
    }
    Ok(metrics)
}

/// Relays Ingress connections to the server, and publishes that on the Node when a port is bound.
pub fn relay_ingress(
    ctx: &Ctx,
    client: &Client,
    flags: &AgentFlags,
    server: &str,
    cluster_info: &ClusterInfo,
) {
    let host = server.rsplit_once(':').map_or(server, |(host, _)| host).to_owned();
    let node = node::name(&flags.node);
    let own = [flags.ingress_http_port, flags.ingress_https_port];
    let ports: Vec<(u16, u16)> = own
        .into_iter()
        .zip(cluster_info.ingress_ports)
        .filter(|(own, there)| *own != 0 && *there != 0)
        .collect();
    if ports.is_empty() {
        // Removes the annotation of an earlier run.
        tokio::spawn(publish_relay_annotation(client.clone(), node, Value::Null));
        return;
    }
    for (port, there) in ports {
        let (ctx, client, node) = (ctx.clone(), client.clone(), node.clone());
        let upstream_addr = format!("{host}:{there}");
        tokio::spawn(async move {
            let listener = listen_when_free(&ctx, &node, port).await;
            let relay = ingress::relay(listener, upstream_addr, ctx.shutdown.clone());
            tokio::join!(relay, publish_relay_annotation(client, node, json!("true")));
        });
    }
}

/// Sets or removes the annotation that marks this node as an Ingress relay. Retries until the Node
/// exists.
async fn publish_relay_annotation(client: Client, node: String, value: Value) {
    let patch = Patch::Merge(json!({"metadata": {"annotations": {ingress::RELAY_ANNOTATION: value}}}));
    while let Err(error) = client.patch::<Node>(&Key::new("", &node), &patch).await {
        tracing::debug!(%error, "cannot update the Ingress relay annotation, retrying");
        tokio::time::sleep(ANNOTATE_RETRY).await;
    }
}

/// Serves Ingresses on a port as soon as it is free.
async fn serve_ingress_port(ctx: Ctx, ingress: ingress::IngressServer, node: String, port: u16, tls: bool) {
    let listener = listen_when_free(&ctx, &node, port).await;
    match tls {
        true => ingress.serve_https(listener).await,
        false => ingress.serve_http(listener).await,
    }
}

/// Binds a port of this node; retries while it is in use.
async fn listen_when_free(ctx: &Ctx, node: &str, port: u16) -> TcpListener {
    let mut is_reported = false;
    loop {
        let error = match listen(port).await {
            Ok(listener) => return listener,
            Err(error) => error,
        };
        if !std::mem::replace(&mut is_reported, true) {
            let message = format!("Ingresses are not served on port {port}: {error}");
            tracing::warn!("{message}; retrying");
            let object_reference = ObjectReference {
                kind: Some("Node".to_owned()),
                name: Some(node.to_owned()),
                uid: Some(node.to_owned()),
                ..ObjectReference::default()
            };
            ctx.events.from("skiff-ingress").record(
                object_reference,
                EventType::Warning,
                "IngressPortTaken",
                message,
            );
        }
        tokio::time::sleep(PORT_RETRY).await;
    }
}

/// Listens on all addresses, of both IP families if possible.
async fn listen(port: u16) -> std::io::Result<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(error),
        Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await,
    }
}
