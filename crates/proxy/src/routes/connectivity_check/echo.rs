//! The echo server for connectivity checks of other nodes.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use reconcile::Ctx;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use super::super::plan;
use super::{LARGE_TCP_BYTES, PORT};

/// Limits on the connections to the echo server, higher than a check needs.
const ECHO_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_CONCURRENT_STREAMS: usize = 64;

/// Runs the echo server until it is dropped. If the port is in use, it logs that and does nothing.
pub async fn run(ctx: &Ctx) {
    // One dual-stack socket if the host has IPv6.
    let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT));
    let v4 = SocketAddr::from(([0, 0, 0, 0], PORT));
    let sockets = async |address: SocketAddr| -> std::io::Result<(UdpSocket, TcpListener)> {
        Ok((UdpSocket::bind(address).await?, TcpListener::bind(address).await?))
    };
    let bound = match sockets(both).await {
        Err(error) if error.kind() != std::io::ErrorKind::AddrInUse => sockets(v4).await,
        bound => bound,
    };
    match bound {
        Ok((udp, tcp)) => drop(tokio::join!(answer_udp(ctx, udp), answer_tcp(ctx, tcp))),
        Err(error) => {
            tracing::info!(%error, port = PORT, "failed to listen, other nodes cannot check the connectivity to this node's pods");
            std::future::pending().await
        }
    }
}

/// Only nodes and pods get a response, so that the server cannot be used for reflection attacks.
fn is_allowed(ctx: &Ctx, from: IpAddr) -> bool {
    let from = from.to_canonical();
    ctx.caches.nodes().all().iter().any(|node| {
        plan::addresses(node).contains(&from) || plan::networks(node).iter().any(|net| net.contains(from))
    })
}

async fn answer_udp(ctx: &Ctx, socket: UdpSocket) {
    let mut buffer = vec![0; 2048];
    loop {
        // Errors here are ICMP errors for earlier responses.
        let Ok((count, from)) = socket.recv_from(&mut buffer).await else { continue };
        if is_allowed(ctx, from.ip()) {
            let _ = socket.send_to(&buffer[..count], from).await;
        }
    }
}

async fn answer_tcp(ctx: &Ctx, listener: TcpListener) {
    let permits = Arc::new(Semaphore::new(MAX_CONCURRENT_STREAMS));
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Ok(permit) = permits.clone().try_acquire_owned() else { continue };
        if is_allowed(ctx, from.ip()) {
            tokio::spawn(async move {
                let _ = tokio::time::timeout(ECHO_TIMEOUT, echo_stream(stream)).await;
                drop(permit);
            });
        }
    }
}

async fn echo_stream(mut stream: TcpStream) -> std::io::Result<()> {
    let mut buffer = vec![0; LARGE_TCP_BYTES];
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(()),
            count => stream.write_all(&buffer[..count]).await?,
        }
    }
}
