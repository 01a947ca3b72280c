//! `skiff agent`: joins a server and runs everything that belongs to a node: kubelet, Service proxy,
//! node DNS and the Ingress relay.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr as _;
use std::sync::Arc;

use anyhow::Context as _;
use client::Client;
use jiff::Timestamp;
use kubelet::ObjectManager;
use pki::join::JoinToken;
use reconcile::{Clock, Ctx};
use tokio::sync::watch;

use crate::address::{self, AddressReceiver};
use crate::flags::AgentFlags;
use crate::join::{self, JoinConfig};
use crate::node;
use crate::node_dns::{EndpointPublisher, NodeDns};
use crate::reset;
use crate::running;
use crate::server::{ShutdownHooks, create_private_dir, handle_shutdown, log_stopped};
use crate::services;
use crate::threads::runtime_builder;
use crate::tunnel;

pub fn run(flags: AgentFlags) -> anyhow::Result<()> {
    runtime_builder().build()?.block_on(serve(flags))
}

async fn serve(flags: AgentFlags) -> anyhow::Result<()> {
    anyhow::ensure!(node::can_run_pods(&flags.node), "this process cannot run pods");
    create_private_dir(&flags.node.data_dir)?;
    let _lock = reset::lock(&flags.node.data_dir)?;
    let server_addr = server_addr(&flags.server)?;
    let token = read_token(&flags)?;
    let node_ips = node::node_ips(&flags.node)?;
    let (stop, shutdown) = watch::channel(false);
    let hooks = ShutdownHooks::default();
    tokio::spawn(handle_shutdown(stop, hooks.clone()));
    running::register("agent", Some(&flags.node.data_dir));
    let mut stopped = shutdown.clone();
    let join = async {
        let address = first_address(node_ips.0, &server_addr).await;
        let dir = flags.node.data_dir.join("agent/tls");
        let server = flags.server.clone();
        let join_config = JoinConfig {
            cert_dir: dir,
            server,
            token,
            name: node::name(&flags.node),
            address,
            second_ip: node_ips.1,
        };
        let joined = join_config.join().await?;
        anyhow::Ok((join_config, joined))
    };
    let (join_config, joined) = tokio::select! {
        joined = join => joined?,
        _ = stopped.wait_for(|stop| *stop) => return Ok(()),
    };
    tracing::info!(server = flags.server, node = join_config.name, address = %join_config.address, "joined");
    let credentials = joined.credentials(&flags.server)?;
    let object_manager = ObjectManager::new(Arc::new(credentials.remote.clone()));
    let ctx = Ctx::new(Client::new(object_manager.clone(), "kubelet"), Clock::default(), shutdown);
    let api = node::ServingCredentials {
        serving: credentials.serving.clone(),
        authority: pki::ClientAuthority::new(&joined.cluster_info.client_ca, "the cluster's client CA")?,
    };
    let address = follow_address(node_ips.0, join_config.address, &server_addr);
    let config = node::config(&flags.node, &joined.cluster_info, address.clone(), api)?;
    let config = kubelet::Config { object_manager: Some(object_manager.clone()), ..config };
    hooks.set_node(&config);
    let ports = watch::Sender::default();
    if !flags.node.disable_kube_proxy {
        let client = Client::new(object_manager, services::PROXY_AGENT);
        services::start_proxy(&ctx, client, &flags.node, &joined.cluster_info, ports.subscribe())?;
    }
    if joined.cluster_info.has_node_dns {
        let publisher = EndpointPublisher::Node(ctx.client.clone());
        let node_dns = NodeDns::start(&ctx, publisher, &flags.node, &joined.cluster_info, address.clone())?;
        let dns_metrics = node_dns.metrics();
        ctx.metrics.register_writer(move |out| dns_metrics.write(out));
        let _ = hooks.node_dns.set(node_dns);
    }
    services::relay_ingress(&ctx, &ctx.client, &flags, &server_addr, &joined.cluster_info);
    let (pinned, client_certificate) = (joined.pinned.clone(), credentials.client_certificate.clone());
    tokio::spawn(tunnel::run(ctx.clone(), server_addr, join_config.name.clone(), pinned, client_certificate));
    tokio::spawn(join::keep_renewed(join_config, joined, credentials, address, Timestamp::now));
    let runtime = node::runtime(&flags.node, ports, ctx.shutdown.clone()).await?;
    kubelet::run(ctx, runtime, config).await;
    log_stopped(&flags.node.data_dir);
    Ok(())
}

/// The first address of this node: `--node-ip`, else the source address of the route to the server.
pub async fn first_address(configured_ip: Option<IpAddr>, server_addr: &str) -> IpAddr {
    match configured_ip {
        Some(address) => address,
        None => wait_for_source_address(server_addr).await,
    }
}

/// Follows the node's address after that. An address from `--node-ip` is fixed.
pub fn follow_address(configured_ip: Option<IpAddr>, first: IpAddr, server_addr: &str) -> AddressReceiver {
    if configured_ip.is_some() {
        return address::fixed(configured_ip);
    }
    let server_addr = server_addr.to_owned();
    address::follow(Some(first), move || {
        let server_addr = server_addr.clone();
        async move { find_source_address(&server_addr).await.ok() }
    })
}

/// Parses `host:port` from the URL of the server; the default port is 443.
pub fn server_addr(url: &str) -> anyhow::Result<String> {
    let invalid = || format!("--server {url:?} must be a URL such as https://host:port");
    let server_addr =
        url.strip_prefix("https://").map(|rest| rest.trim_end_matches('/')).with_context(invalid)?;
    anyhow::ensure!(!server_addr.is_empty() && !server_addr.contains('/'), invalid());
    let has_port = server_addr.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    Ok(if has_port && !server_addr.ends_with(']') {
        server_addr.to_owned()
    } else {
        format!("{server_addr}:443")
    })
}

fn read_token(flags: &AgentFlags) -> anyhow::Result<Option<JoinToken>> {
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let text = match (&flags.token, &flags.token_file) {
        (Some(text), _) => Some(text.clone()),
        (None, Some(path)) => Some(read(path)?),
        (None, None) => None,
    };
    Ok(text.as_deref().map(JoinToken::from_str).transpose()?)
}

/// Waits until there is a route to the server and returns the source address of that route.
async fn wait_for_source_address(server_addr: &str) -> IpAddr {
    loop {
        match find_source_address(server_addr).await {
            Ok(address) => return address,
            Err(error) => {
                tracing::warn!(%error, server = server_addr, "no route to the server yet, retrying")
            }
        }
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    }
}

async fn find_source_address(server_addr: &str) -> std::io::Result<IpAddr> {
    let to = tokio::net::lookup_host(server_addr).await?.next().ok_or(std::io::ErrorKind::NotFound)?;
    address::source_address_for(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_host_and_port_from_server_url() {
        let check = |url: &str, expected: Option<&str>| {
            assert_eq!(server_addr(url).ok().as_deref(), expected, "{url}")
        };
        check("https://a:6443", Some("a:6443"));
        check("https://a:6443/", Some("a:6443"));
        check("https://192.0.2.1", Some("192.0.2.1:443"));
        check("https://[2001:db8::1]:6443", Some("[2001:db8::1]:6443"));
        check("https://[2001:db8::1]", Some("[2001:db8::1]:443"));
        check("http://a", None);
        check("https://", None);
        check("https://a/b", None);
    }
}
