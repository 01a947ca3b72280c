//! Passing on what comes for Ingresses to a node that serves them, byte by byte.
//!
//! For nodes that may not read the certificates' Secrets, which is all but those with an API server. Pods are told the
//! address of the node in between as their client's: what a connection says of where it came from would have to be
//! believed of everybody who can reach the other node.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

/// Connections open at a time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 4096;
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Passes connections on to `place` (`host:port`) until told to stop.
pub async fn relay(listener: TcpListener, upstream_addr: String, mut shutdown: watch::Receiver<bool>) {
    let (semaphore, upstream_addr) =
        (Arc::new(Semaphore::new(MAX_CONNECTIONS)), Arc::<str>::from(upstream_addr));
    loop {
        let accept = async {
            let permit = semaphore.clone().acquire_owned().await.expect("never closed");
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
        Ok(Err(error)) => return tracing::debug!(%error, upstream_addr, "nobody serves Ingresses there"),
        Err(_) => return tracing::debug!(upstream_addr, "no answer from where Ingresses are served"),
    };
    for stream in [&client, &upstream] {
        let _ = stream.set_nodelay(true);
        // Ends that vanish without a word are noticed.
        let _ = rustix::net::sockopt::set_socket_keepalive(stream, true);
    }
    if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut upstream).await {
        tracing::debug!(%error, upstream_addr, "a connection that was passed on broke");
    }
}
