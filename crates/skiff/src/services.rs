//! Services on this node: the proxy's rules, and names.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use client::Client;
use k8s_openapi::api::core::v1::ObjectReference;
use nft::Net;
use proxy::Firewall as _;
use reconcile::{Ctx, Severity};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::facts::Facts;
use crate::flags::{NodeFlags, ServerFlags};
use crate::node;

/// What the proxy calls itself.
pub const PROXY: &str = "kube-proxy";
/// Which address of the Services' networks names are asked at. Upstream's habit.
const DNS_NUMBER: u8 = 10;
/// How long to wait until trying again to tell where names are asked.
const PAUSE: Duration = Duration::from_secs(1);
/// How long to wait until trying again to get a port that somebody else has.
const PORT_PAUSE: Duration = Duration::from_secs(30);

/// Services alone: no NetworkPolicies, for which one has to know all pods, and no way out for pods.
pub fn proxy_config(node: String, pods: &[String], services: &[String]) -> anyhow::Result<proxy::Config> {
    Ok(proxy::Config {
        node,
        pods: networks(pods)?,
        services: networks(services)?,
        ..proxy::Config::default()
    })
}

fn networks(texts: &[String]) -> anyhow::Result<Vec<Net>> {
    let parse = |text: &String| text.parse::<Net>().with_context(|| format!("{text:?}"));
    texts.iter().map(parse).collect()
}

/// Routes Services on this node as long as the context lasts.
pub fn route(ctx: &Ctx, client: Client, flags: &NodeFlags, facts: &Facts) -> anyhow::Result<()> {
    let config = proxy_config(node::name(flags), &facts.cluster_cidr, &facts.service_cidr)?;
    let config = proxy::Config { way_out: true, policies: !flags.disable_network_policy, ..config };
    let ctx = Ctx { client: client.acting_as("system:kube-proxy"), ..ctx.clone() };
    proxy::prepare(&config.pods);
    tokio::spawn(proxy::routes::run(ctx.clone(), config.node.clone()));
    tokio::spawn(proxy::run(ctx, config, Arc::new(proxy::Kernel::default())));
    Ok(())
}

/// Removes the table, whether there is one or not.
pub fn remove_rules() -> anyhow::Result<()> {
    proxy::Kernel::default().apply(&nft::Batch::remove()).context("cannot remove the rules")
}

/// Where pods ask for names: what was said, or the usual address of each network of Services.
pub fn dns_addresses(flags: &ServerFlags) -> anyhow::Result<Vec<IpAddr>> {
    if !flags.cluster_dns.is_empty() || is_disabled(flags, "dns") {
        return Ok(flags.cluster_dns.clone());
    }
    let networks = networks(&flags.service_cidr)?;
    let tenth = |net: &Net| match net.first() {
        IpAddr::V4(first) => IpAddr::V4(Ipv4Addr::from_bits(first.to_bits() | u32::from(DNS_NUMBER))),
        IpAddr::V6(first) => IpAddr::V6(Ipv6Addr::from_bits(first.to_bits() | u128::from(DNS_NUMBER))),
    };
    Ok(networks.iter().map(tenth).collect())
}

pub fn is_disabled(flags: &ServerFlags, part: &str) -> bool {
    flags.disable.iter().any(|name| name == part)
}

/// Answers for names at the node's address, as an endpoint of the Service that pods ask. Returns what it counts.
pub async fn names(
    ctx: &Ctx,
    admin: Client,
    flags: &ServerFlags,
    address: IpAddr,
) -> anyhow::Result<Arc<dns::Metrics>> {
    let server = dns::Server::bind(SocketAddr::new(address, 0)).await.context("cannot listen for DNS")?;
    let place = dns::announce::Place {
        node: node::name(&flags.node),
        udp: server.udp_address()?,
        tcp: server.tcp_address()?,
    };
    let cluster_ips = dns_addresses(flags)?;
    let config = dns::Config {
        domain: flags.cluster_domain.clone(),
        upstream: upstream(&cluster_ips),
        allowed: allowed(ctx, networks(&flags.cluster_cidr)?, address),
    };
    let metrics = Arc::new(dns::Metrics::default());
    tokio::spawn(server.run(ctx.clone(), config, metrics.clone()));
    let mut shutdown = ctx.shutdown.clone();
    let telling = async move {
        while let Err(error) = dns::announce::announce(&admin, &cluster_ips, &place).await {
            tracing::warn!(%error, "cannot make the Service kube-dns, trying again");
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::spawn(async move {
        tokio::select! {
            () = telling => {}
            _ = shutdown.wait_for(|stop| *stop) => {}
        }
    });
    Ok(metrics)
}

/// Serves Ingresses at the node's address. Returns what it counts.
pub async fn ingress(
    ctx: &Ctx,
    admin: Client,
    flags: &ServerFlags,
    address: Option<IpAddr>,
) -> anyhow::Result<Arc<ingress::Metrics>> {
    match admin.create(&ingress::class()).await {
        Err(error) if !error.is_already_exists() => {
            return Err(error).context("cannot make the class of Ingresses");
        }
        _ => {}
    }
    let ingress = ingress::Ingress::start(ctx, ingress::Config { client: admin, address })?;
    let metrics = ingress.metrics();
    for (port, tls) in [(flags.ingress_http_port, false), (flags.ingress_https_port, true)] {
        if port != 0 {
            tokio::spawn(outside(ctx.clone(), ingress.clone(), node::name(&flags.node), port, tls));
        }
    }
    Ok(metrics)
}

/// Serves Ingresses on a port as soon as nobody else has it.
async fn outside(ctx: Ctx, ingress: ingress::Ingress, node: String, port: u16, tls: bool) {
    let mut told = false;
    let listener = loop {
        let error = match listen(port).await {
            Ok(listener) => break listener,
            Err(error) => error,
        };
        if !std::mem::replace(&mut told, true) {
            let message = format!("Ingresses are not served on port {port}: {error}");
            tracing::warn!("{message}; trying again now and then");
            let about = ObjectReference {
                kind: Some("Node".to_owned()),
                name: Some(node.clone()),
                uid: Some(node.clone()),
                ..ObjectReference::default()
            };
            ctx.events.from("skiff-ingress").record(about, Severity::Warning, "IngressPortTaken", message);
        }
        tokio::time::sleep(PORT_PAUSE).await;
    };
    match tls {
        true => ingress.https(listener).await,
        false => ingress.http(listener).await,
    }
}

/// On all addresses, of both families if there are both.
async fn listen(port: u16) -> std::io::Result<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(error),
        Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await,
    }
}

/// Answers for names as soon as a node elsewhere has come, since without any nobody asks.
pub async fn names_once(
    mut nodes: watch::Receiver<u64>,
    ctx: Ctx,
    admin: Client,
    flags: ServerFlags,
    address: IpAddr,
) {
    if nodes.wait_for(|seen| *seen > 0).await.is_ok()
        && let Err(error) = names(&ctx, admin, &flags, address).await
    {
        tracing::error!("nobody answers for names: {error:#}");
    }
}

/// Who knows all other names: whom this host asks, unless that is us.
fn upstream(own: &[IpAddr]) -> Vec<SocketAddr> {
    let servers = kubelet::host_dns().servers;
    let servers = servers.iter().filter_map(|text| text.parse::<IpAddr>().ok());
    servers.filter(|server| !own.contains(server)).map(|server| SocketAddr::new(server, 53)).collect()
}

/// Pods and nodes are answered, the rest of the world is not.
fn allowed(ctx: &Ctx, pods: Vec<Net>, own: IpAddr) -> dns::Allowed {
    let nodes = ctx.caches.nodes().clone();
    Arc::new(move |address| {
        let is_node = || {
            let text = address.to_string();
            nodes.all().iter().any(|node| {
                let status = node.status.as_ref().and_then(|status| status.addresses.as_ref());
                status.into_iter().flatten().any(|found| found.address == text)
            })
        };
        address.is_loopback() || address == own || pods.iter().any(|net| net.contains(address)) || is_node()
    })
}
