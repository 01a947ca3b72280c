//! Relays TCP connections to a node that serves Ingresses.
//!
//! For nodes that are not allowed to read Secrets with certificates, which are all nodes without an
//! API server. Pods see the address of the relaying node as the client address. The PROXY protocol
//! would transmit the original address, but the other node would have to trust every peer that can
//! connect to it.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

/// The limit of open connections. Further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 4096;
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Relays connections to `place` (`host:port`) until shutdown.
pub async fn relay(listener: TcpListener, upstream_addr: String, mut shutdown: watch::Receiver<bool>) {
    let (semaphore, upstream_addr) =
        (Arc::new(Semaphore::new(MAX_CONNECTIONS)), Arc::<str>::from(upstream_addr));
    loop {
        let accept = async {
            let permit = semaphore.clone().acquire_owned().await.expect("the semaphore is never closed");
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            accepted = accept => accepted,
            _ = shutdown.wait_for(|stop| *stop) => return,
        };
        let Ok((client, _)) = accepted else {
            tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            continue;
        };
        let (upstream_addr, mut stopped) = (upstream_addr.clone(), shutdown.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = relay_connection(client, &upstream_addr) => {}
                _ = stopped.wait_for(|stop| *stop) => {}
            }
            drop(permit);
        });
    }
}

async fn relay_connection(mut client: TcpStream, upstream_addr: &str) {
    let mut upstream = match tokio::time::timeout(DIAL_TIMEOUT, TcpStream::connect(upstream_addr)).await {
        Ok(Ok(upstream)) => upstream,
        Ok(Err(error)) => return tracing::debug!(%error, upstream_addr, "cannot connect to ingress node"),
        Err(_) => return tracing::debug!(upstream_addr, "timeout connecting to ingress node"),
    };
    for stream in [&client, &upstream] {
        let _ = stream.set_nodelay(true);
        // Keepalive detects peers that disappear without closing the connection.
        let _ = rustix::net::sockopt::set_socket_keepalive(stream, true);
    }
    if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut upstream).await {
        tracing::debug!(%error, upstream_addr, "relayed connection failed");
    }
}
