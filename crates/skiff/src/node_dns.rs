//! DNS on this node: listens on the node's address, publishes that address as an endpoint of the DNS
//! Service, and removes it before the node stops.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use client::{Client, Key, Patch};
use dns::announce::{self, DnsEndpoint};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kubelet::ResolverConfig;
use nft::IpNet;
use reconcile::Ctx;
use serde_json::json;
use tokio::sync::{Notify, watch};

use crate::address::AddressReceiver;
use crate::cluster_info::ClusterInfo;
use crate::flags::NodeFlags;
use crate::node;
use crate::services::parse_networks;

/// Delay before a failed publication of the endpoint is retried.
const PUBLISH_RETRY: Duration = Duration::from_secs(1);
/// Delay before `bind` is retried.
const LISTEN_RETRY: Duration = Duration::from_secs(30);
/// How long to wait at shutdown until the endpoint is removed.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the proxy of this node may take to apply the change to its rules.
const RULE_SYNC_DELAY: Duration = Duration::from_millis(200);

/// How the endpoint of this node is published.
pub enum EndpointPublisher {
    /// Written to the EndpointSlice of the Service, with a client that may write endpoints.
    Service(Client),
    /// Written to an annotation of the Node by the node itself. The server creates the endpoint from
    /// it.
    Node(Client),
}

/// The DNS server on the node's current address, an endpoint of the DNS Service.
pub struct NodeDns {
    ctx: Ctx,
    publisher: EndpointPublisher,
    node: String,
    domain: String,
    cluster_ips: Vec<IpAddr>,
    resolver: ResolverConfig,
    pods: Vec<IpNet>,
    metrics: Arc<dns::Metrics>,
    /// The published endpoint; `None` before that.
    endpoint: watch::Sender<Option<DnsEndpoint>>,
}

impl NodeDns {
    /// Starts the DNS server. It runs until the shutdown of the context.
    pub fn start(
        ctx: &Ctx,
        publisher: EndpointPublisher,
        flags: &NodeFlags,
        cluster_info: &ClusterInfo,
        address: AddressReceiver,
    ) -> anyhow::Result<Arc<NodeDns>> {
        let node_dns = Arc::new(NodeDns {
            ctx: ctx.clone(),
            publisher,
            node: node::name(flags),
            resolver: flags.resolv_conf.clone().map_or(ResolverConfig::Host, ResolverConfig::File),
            domain: cluster_info.cluster_domain.clone(),
            cluster_ips: cluster_info.cluster_dns.clone(),
            pods: parse_networks(&cluster_info.cluster_cidr)?,
            metrics: Arc::default(),
            endpoint: watch::Sender::new(None),
        });
        ctx.caches.endpoint_slices();
        if let EndpointPublisher::Service(admin) = &node_dns.publisher {
            tokio::spawn(dns::nodes::run(ctx.clone(), admin.clone()));
        }
        tokio::spawn(node_dns.clone().run(address));
        Ok(node_dns)
    }

    pub fn metrics(&self) -> Arc<dns::Metrics> {
        self.metrics.clone()
    }

    /// Runs until shutdown. Responses must come from the address that was queried, so the server
    /// restarts when the address changes.
    async fn run(self: Arc<NodeDns>, mut address: AddressReceiver) {
        let mut shutdown = self.ctx.shutdown.clone();
        loop {
            let now = *address.borrow_and_update();
            let serve = async {
                match now {
                    Some(ip) => self.serve(ip).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = serve => {}
                Ok(()) = address.changed() => {}
                _ = shutdown.wait_for(|stop| *stop) => return,
            }
        }
    }

    async fn serve(&self, address: IpAddr) {
        // The endpoint must not be published before the caches are complete.
        self.ctx.caches.wait_for_sync().await;
        let bound = async {
            // Reuses the port of the previous process, if any: the rules of pods then need no change.
            let server = match self.previous_port() {
                Some(port) => dns::Server::bind(SocketAddr::new(address, port)).await.ok(),
                None => None,
            };
            let server = match server {
                Some(server) => server,
                None => dns::Server::bind(SocketAddr::new(address, 0)).await?,
            };
            let (udp, tcp) = (server.udp_address()?, server.tcp_address()?);
            std::io::Result::Ok((server, DnsEndpoint { node: self.node.clone(), udp, tcp, ready: true }))
        };
        let (server, endpoint) = match bound.await {
            Ok(bound) => bound,
            Err(error) => {
                tracing::error!(%error, %address, "the DNS server cannot listen, retrying");
                return tokio::time::sleep(LISTEN_RETRY).await;
            }
        };
        let config = dns::Config {
            domain: self.domain.clone(),
            upstream: upstream(&self.resolver, &self.cluster_ips),
            allowed: allowed(&self.ctx, self.pods.clone(), address),
        };
        let publish = async {
            while let Err(error) = self.publish(&endpoint).await {
                tracing::debug!(%error, "cannot publish the DNS endpoint, retrying");
                tokio::time::sleep(PUBLISH_RETRY).await;
            }
            self.endpoint.send_replace(Some(endpoint));
        };
        tokio::join!(server.run(self.ctx.clone(), config, self.metrics.clone()), publish);
    }

    /// The port in the existing endpoint of this node.
    fn previous_port(&self) -> Option<u16> {
        let slices = self.slices();
        let own = slices.iter().find(|slice| nodes(slice).any(|(node, _)| node == self.node))?;
        let ports = own.ports.iter().flatten();
        ports.filter_map(|port| u16::try_from(port.port?).ok()).find(|port| *port != 0)
    }

    async fn publish(&self, endpoint: &DnsEndpoint) -> Result<(), client::Error> {
        match &self.publisher {
            EndpointPublisher::Service(admin) => announce::publish(admin, &self.cluster_ips, endpoint).await,
            EndpointPublisher::Node(client) => {
                let ports =
                    endpoint.ready.then(|| format!("{},{}", endpoint.udp.port(), endpoint.tcp.port()));
                let patch = Patch::Merge(
                    json!({"metadata": {"annotations": {announce::DNS_PORTS_ANNOTATION: ports}}}),
                );
                client.patch::<Node>(&Key::new("", &self.node), &patch).await.map(drop)
            }
        }
    }

    /// Removes this node's endpoint before it stops, if other nodes serve DNS: pods on this node then
    /// query those.
    pub async fn leave(&self) {
        let Some(endpoint) = self.endpoint.borrow().clone() else { return };
        if !self.ready_nodes().iter().any(|node| *node != self.node) {
            return;
        }
        let slices_changed = Arc::new(Notify::new());
        let wake = slices_changed.clone();
        self.ctx.caches.endpoint_slices().listen(move |_| wake.notify_one());
        let leave = async {
            self.publish(&DnsEndpoint { ready: false, ..endpoint }).await?;
            while self.ready_nodes().contains(&self.node) {
                slices_changed.notified().await;
            }
            tokio::time::sleep(RULE_SYNC_DELAY).await;
            Ok::<_, client::Error>(())
        };
        match tokio::time::timeout(LEAVE_TIMEOUT, leave).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "cannot remove the DNS endpoint"),
            Err(_) => tracing::debug!("timed out waiting until the DNS endpoint is removed"),
        }
    }

    /// The nodes whose DNS endpoints are ready.
    fn ready_nodes(&self) -> Vec<String> {
        let slices = self.slices();
        let ready = slices.iter().flat_map(|slice| nodes(slice)).filter(|(_, ready)| *ready);
        ready.map(|(node, _)| node.to_owned()).collect()
    }

    fn slices(&self) -> Vec<Arc<EndpointSlice>> {
        self.ctx.caches.endpoint_slices().indexed("service", announce::SERVICE_KEY)
    }
}

/// The nodes of the endpoints, and whether they are ready.
fn nodes(slice: &EndpointSlice) -> impl Iterator<Item = (&str, bool)> {
    slice.endpoints.iter().flatten().filter_map(|one| {
        let ready = one.conditions.as_ref().and_then(|conditions| conditions.ready);
        Some((one.node_name.as_deref()?, ready.unwrap_or(true)))
    })
}

/// The upstream DNS servers: those of this host, except the cluster DNS itself.
fn upstream(resolver: &ResolverConfig, own: &[IpAddr]) -> Vec<SocketAddr> {
    resolver
        .servers()
        .into_iter()
        .filter(|server| !own.contains(server))
        .map(|server| SocketAddr::new(server, 53))
        .collect()
}

/// Only pods, nodes and this host may send queries.
fn allowed(ctx: &Ctx, pods: Vec<IpNet>, own: IpAddr) -> dns::ClientFilter {
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
