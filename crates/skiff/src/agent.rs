//! `skiff agent`: a node that joins a server elsewhere, and everything that runs on it.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr as _;
use std::sync::Arc;

use anyhow::Context as _;
use client::Client;
use jiff::Timestamp;
use kubelet::Referred;
use pki::join::JoinToken;
use reconcile::{Clock, Ctx};
use tokio::sync::watch;

use crate::address::{self, Address};
use crate::flags::AgentFlags;
use crate::join::{self, Joining};
use crate::names::{Names, Tell};
use crate::node;
use crate::reset;
use crate::running;
use crate::server::{ShutdownHooks, log_stopped, private_dir, stop_when_told};
use crate::services;
use crate::threads::threads;
use crate::tunnel;

pub fn run(flags: AgentFlags) -> anyhow::Result<()> {
    threads().build()?.block_on(serve(flags))
}

async fn serve(flags: AgentFlags) -> anyhow::Result<()> {
    anyhow::ensure!(node::can_run_pods(&flags.node), "this process cannot run pods");
    private_dir(&flags.node.data_dir)?;
    let _lock = reset::lock(&flags.node.data_dir)?;
    let place = place(&flags.server)?;
    let token = token(&flags)?;
    let own = node::node_ips(&flags.node)?;
    let (stop, shutdown) = watch::channel(false);
    let hooks = ShutdownHooks::default();
    tokio::spawn(stop_when_told(stop, hooks.clone()));
    running::register("agent", Some(&flags.node.data_dir));
    let mut stopped = shutdown.clone();
    let joining = async {
        let address = first_address(own.0, &place).await;
        let dir = flags.node.data_dir.join("agent/tls");
        let server = flags.server.clone();
        let joining = Joining { dir, server, token, name: node::name(&flags.node), address, second: own.1 };
        let joined = joining.join().await?;
        anyhow::Ok((joining, joined))
    };
    let (joining, joined) = tokio::select! {
        joined = joining => joined?,
        _ = stopped.wait_for(|stop| *stop) => return Ok(()),
    };
    tracing::info!(server = flags.server, node = joining.name, address = %joining.address, "joined");
    let credentials = joined.credentials(&flags.server)?;
    let referred = Referred::new(Arc::new(credentials.remote.clone()));
    let ctx = Ctx::new(Client::new(referred.clone(), "kubelet"), Clock::default(), shutdown);
    let api = node::Credentials {
        serving: credentials.serving.clone(),
        authority: pki::ClientAuthority::new(&joined.facts.client_ca, "the cluster's authority for clients")?,
    };
    let address = address(own.0, joining.address, &place);
    let config = node::config(&flags.node, &joined.facts, address.clone(), api)?;
    let config = kubelet::Config { referred: Some(referred.clone()), ..config };
    hooks.set_node(&config);
    let ports = watch::Sender::default();
    if !flags.node.disable_kube_proxy {
        let client = Client::new(referred, services::PROXY);
        services::route(&ctx, client, &flags.node, &joined.facts, ports.subscribe())?;
    }
    if joined.facts.own_dns {
        let tell = Tell::Node(ctx.client.clone());
        let names = Names::start(&ctx, tell, &flags.node, &joined.facts, address.clone())?;
        let counted = names.metrics();
        ctx.metrics.also(move |out| counted.write(out));
        let _ = hooks.names.set(names);
    }
    services::relay_ingress(&ctx, &ctx.client, &flags, &place, &joined.facts);
    let (pinned, showing) = (joined.pinned.clone(), credentials.showing.clone());
    tokio::spawn(tunnel::keep(ctx.clone(), place, joining.name.clone(), pinned, showing));
    tokio::spawn(join::keep_renewed(joining, joined, credentials, address, Timestamp::now));
    let runtime = node::runtime(&flags.node, ports, ctx.shutdown.clone()).await?;
    kubelet::run(ctx, runtime, config).await;
    log_stopped(&flags.node.data_dir);
    Ok(())
}

/// Where this node is reached: where it is told to be, else where the way to the server begins.
pub async fn first_address(told: Option<IpAddr>, place: &str) -> IpAddr {
    match told {
        Some(address) => address,
        None => way_to(place).await,
    }
}

/// The same from then on.
pub fn address(told: Option<IpAddr>, first: IpAddr, place: &str) -> Address {
    if told.is_some() {
        return address::fixed(told);
    }
    let place = place.to_owned();
    address::follow(Some(first), move || {
        let place = place.clone();
        async move { found(&place).await.ok() }
    })
}

/// `host:port` of the server's URL.
pub fn place(url: &str) -> anyhow::Result<String> {
    let wrong = || format!("--server {url:?} is not written https://host:port");
    let place = url.strip_prefix("https://").map(|rest| rest.trim_end_matches('/')).with_context(wrong)?;
    anyhow::ensure!(!place.is_empty() && !place.contains('/'), wrong());
    let has_port = place.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    Ok(if has_port && !place.ends_with(']') { place.to_owned() } else { format!("{place}:443") })
}

fn token(flags: &AgentFlags) -> anyhow::Result<Option<JoinToken>> {
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

/// This machine's address on the way to the server; waits until there is one.
async fn way_to(place: &str) -> IpAddr {
    loop {
        match found(place).await {
            Ok(address) => return address,
            Err(error) => tracing::warn!(%error, server = place, "no way to the server yet"),
        }
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    }
}

async fn found(place: &str) -> std::io::Result<IpAddr> {
    let to = tokio::net::lookup_host(place).await?.next().ok_or(std::io::ErrorKind::NotFound)?;
    address::toward(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_server_is() {
        let check =
            |url: &str, expected: Option<&str>| assert_eq!(place(url).ok().as_deref(), expected, "{url}");
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
