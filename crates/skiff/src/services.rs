//! Services on this node: the proxy's rules.

use std::sync::Arc;

use anyhow::Context as _;
use client::Client;
use nft::Net;
use proxy::Firewall as _;
use reconcile::Ctx;

use crate::flags::ServerFlags;
use crate::node;

/// What the proxy calls itself.
pub const PROXY: &str = "kube-proxy";

pub fn proxy_config(node: String, pods: &[String], services: &[String]) -> anyhow::Result<proxy::Config> {
    Ok(proxy::Config { node, pods: networks(pods)?, services: networks(services)? })
}

fn networks(texts: &[String]) -> anyhow::Result<Vec<Net>> {
    let parse = |text: &String| text.parse::<Net>().with_context(|| format!("{text:?}"));
    texts.iter().map(parse).collect()
}

/// Routes Services on this node as long as the context lasts.
pub fn route(ctx: &Ctx, client: Client, flags: &ServerFlags) -> anyhow::Result<()> {
    let config = proxy_config(node::name(flags), &flags.cluster_cidr, &flags.service_cidr)?;
    let ctx = Ctx { client: client.acting_as("system:kube-proxy"), ..ctx.clone() };
    proxy::prepare(&config.pods);
    tokio::spawn(proxy::run(ctx, config, Arc::new(proxy::Kernel)));
    Ok(())
}

/// Removes the table, whether there is one or not.
pub fn remove_rules() -> anyhow::Result<()> {
    proxy::Kernel.apply(&nft::Batch::remove()).context("cannot remove the rules")
}
