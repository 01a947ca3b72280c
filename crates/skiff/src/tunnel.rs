//! Keeps a tunnel from this node to the server open. The server uses it to connect to the node, which
//! it may not be able to reach directly. The tunnel is opened again whenever it ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use pki::ClientCertificate;
use pki::join::PinnedAuthorityVerifier;
use proxy::routes::plan;
use reconcile::{Ctx, Key};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::join_server::TUNNEL_PATH;

const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(10);
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Keeps a tunnel to the server at `server_addr` (`host:port`) open until the shutdown of the context.
pub async fn run(
    ctx: Ctx,
    server_addr: String,
    node: String,
    pinned: Arc<PinnedAuthorityVerifier>,
    client_certificate: Arc<ClientCertificate>,
) -> anyhow::Result<()> {
    let mut tls = pinned.config(Some(client_certificate))?;
    // The protocol upgrade requires HTTP/1.1.
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let tls = TlsConnector::from(Arc::new(tls));
    let mut shutdown = ctx.shutdown.clone();
    let work = async {
        let mut backoff = INITIAL_BACKOFF;
        loop {
            let started = tokio::time::Instant::now();
            match open_tunnel(&ctx, &server_addr, &node, &tls).await {
                Ok(()) => tracing::debug!("the tunnel to the server ended"),
                Err(error) => tracing::warn!("cannot open a tunnel to the server, retrying: {error:#}"),
            }
            backoff = if started.elapsed() > MAX_BACKOFF {
                INITIAL_BACKOFF
            } else {
                (backoff * 2).min(MAX_BACKOFF)
            };
            tokio::time::sleep(backoff).await;
        }
    };
    tokio::select! {
        () = work => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
    Ok(())
}

async fn open_tunnel(ctx: &Ctx, server_addr: &str, node: &str, tls: &TlsConnector) -> anyhow::Result<()> {
    let host = server_addr
        .rsplit_once(':')
        .map_or(server_addr, |(host, _)| host)
        .trim_matches(['[', ']'])
        .to_owned();
    let name = ServerName::try_from(host).context("the server address has no valid host name")?;
    let connect = async {
        let stream = TcpStream::connect(server_addr).await?;
        stream.set_nodelay(true)?;
        tls.connect(name, stream).await
    };
    let stream = tokio::time::timeout(DIAL_TIMEOUT, connect).await.context("the connection timed out")??;
    let nodes = ctx.caches.nodes().clone();
    let key = Key::new("", node);
    // The server may connect only to the node's own addresses and its pods.
    let allowed = move |to: SocketAddr| {
        nodes.get(&key).is_some_and(|own| {
            let networks = plan::networks(&own);
            plan::addresses(&own).contains(&to.ip()) || networks.iter().any(|net| net.contains(to.ip()))
        })
    };
    Ok(stream::tunnel::serve_tunnel(stream, server_addr, TUNNEL_PATH, Arc::new(allowed)).await?)
}
