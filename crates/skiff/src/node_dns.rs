//! Names on this node: where they are asked, who is told of that, and how a node that stops leaves them to others.

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

/// How long to wait until trying again to tell where names are asked.
const PUBLISH_RETRY: Duration = Duration::from_secs(1);
/// How long to wait until trying again to listen.
const LISTEN_RETRY: Duration = Duration::from_secs(30);
/// How long others may take to hear that this node stops.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the rules of this node may take to follow.
const RULE_SYNC_DELAY: Duration = Duration::from_millis(200);

/// Who is told where this node answers.
pub enum EndpointPublisher {
    /// The Service itself, by who may write endpoints.
    Service(Client),
    /// The node's object, by the node: a server makes it an endpoint.
    Node(Client),
}

/// Answering for names at the node's address, wherever that is, as an endpoint of the Service that pods ask.
pub struct NodeDns {
    ctx: Ctx,
    publisher: EndpointPublisher,
    node: String,
    domain: String,
    cluster_ips: Vec<IpAddr>,
    resolver: ResolverConfig,
    pods: Vec<IpNet>,
    metrics: Arc<dns::Metrics>,
    /// Where, once that was told.
    endpoint: watch::Sender<Option<DnsEndpoint>>,
}

impl NodeDns {
    /// Begins to answer; ends with the context.
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

    /// Until told to stop; answers must come from the address that was asked, so that another one means to begin again.
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
        // Nobody is to ask before there are answers.
        self.ctx.caches.wait_for_sync().await;
        let bound = async {
            // Where pods ask already if this process was killed: their rules need not change then.
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
                tracing::error!(%error, %address, "nobody answers for names: cannot listen");
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
                tracing::debug!(%error, "cannot tell yet where names are asked");
                tokio::time::sleep(PUBLISH_RETRY).await;
            }
            self.endpoint.send_replace(Some(endpoint));
        };
        tokio::join!(server.run(self.ctx.clone(), config, self.metrics.clone()), publish);
    }

    /// The port at which this node was asked last.
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

    /// Leaves names to other nodes before this one stops, if there are others: pods here are to ask them meanwhile.
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
            Ok(Err(error)) => tracing::debug!(%error, "cannot tell that names are not to be asked here"),
            Err(_) => tracing::debug!("nobody has heard yet that names are not to be asked here"),
        }
    }

    /// The nodes that are asked for names.
    fn ready_nodes(&self) -> Vec<String> {
        let slices = self.slices();
        let ready = slices.iter().flat_map(|slice| nodes(slice)).filter(|(_, ready)| *ready);
        ready.map(|(node, _)| node.to_owned()).collect()
    }

    fn slices(&self) -> Vec<Arc<EndpointSlice>> {
        self.ctx.caches.endpoint_slices().indexed("service", announce::SERVICE_KEY)
    }
}

/// The nodes of endpoints, and whether they are ready.
fn nodes(slice: &EndpointSlice) -> impl Iterator<Item = (&str, bool)> {
    slice.endpoints.iter().flatten().filter_map(|one| {
        let ready = one.conditions.as_ref().and_then(|conditions| conditions.ready);
        Some((one.node_name.as_deref()?, ready.unwrap_or(true)))
    })
}

/// Who knows all other names: whom this host asks, unless that is us.
fn upstream(resolver: &ResolverConfig, own: &[IpAddr]) -> Vec<SocketAddr> {
    resolver
        .servers()
        .into_iter()
        .filter(|server| !own.contains(server))
        .map(|server| SocketAddr::new(server, 53))
        .collect()
}

/// Pods and nodes are answered, the rest of the world is not.
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
