//! A way for the server back to this node, which may be where the server cannot reach it: a tunnel is left with the
//! server, and left again whenever it has ended.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use pki::Showing;
use pki::join::Pinned;
use proxy::routes::plan;
use reconcile::{Ctx, Key};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::welcome::TUNNEL;

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const DIAL: Duration = Duration::from_secs(10);

/// Leaves a tunnel with the server at `place` (`host:port`) until the context's shutdown.
pub async fn keep(
    ctx: Ctx,
    place: String,
    node: String,
    pinned: Arc<Pinned>,
    showing: Arc<Showing>,
) -> anyhow::Result<()> {
    let mut tls = pinned.config(Some(showing))?;
    // HTTP/2 cannot change to another protocol.
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let tls = TlsConnector::from(Arc::new(tls));
    let mut shutdown = ctx.shutdown.clone();
    let work = async {
        let mut pause = FIRST_PAUSE;
        loop {
            let begun = tokio::time::Instant::now();
            match leave(&ctx, &place, &node, &tls).await {
                Ok(()) => tracing::debug!("the tunnel to the server ended"),
                Err(error) => tracing::warn!("no tunnel to the server: {error:#}"),
            }
            pause =
                if begun.elapsed() > LONGEST_PAUSE { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
            tokio::time::sleep(pause).await;
        }
    };
    tokio::select! {
        () = work => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
    Ok(())
}

async fn leave(ctx: &Ctx, place: &str, node: &str, tls: &TlsConnector) -> anyhow::Result<()> {
    let host = place.rsplit_once(':').map_or(place, |(host, _)| host).trim_matches(['[', ']']).to_owned();
    let name = ServerName::try_from(host).context("not a name")?;
    let connect = async {
        let stream = TcpStream::connect(place).await?;
        stream.set_nodelay(true)?;
        tls.connect(name, stream).await
    };
    let stream = tokio::time::timeout(DIAL, connect).await.context("no answer")??;
    let nodes = ctx.caches.nodes().clone();
    let key = Key::new("", node);
    // Its own kubelet and its own pods, and nobody else.
    let allowed = move |to: SocketAddr| {
        nodes.get(&key).is_some_and(|own| {
            let networks = plan::networks(&own);
            plan::addresses(&own).contains(&to.ip()) || networks.iter().any(|net| net.contains(to.ip()))
        })
    };
    Ok(stream::tunnel::offer(stream, place, TUNNEL, Arc::new(allowed)).await?)
}
