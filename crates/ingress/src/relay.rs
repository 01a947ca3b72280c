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
const MOST_CONNECTIONS: usize = 4096;
const DIAL: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);

/// Passes connections on to `place` (`host:port`) until told to stop.
pub async fn relay(listener: TcpListener, place: String, mut shutdown: watch::Receiver<bool>) {
    let (room, place) = (Arc::new(Semaphore::new(MOST_CONNECTIONS)), Arc::<str>::from(place));
    loop {
        let accept = async {
            let permit = room.clone().acquire_owned().await.expect("never closed");
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            accepted = accept => accepted,
            _ = shutdown.wait_for(|stop| *stop) => return,
        };
        let Ok((near, _)) = accepted else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let (place, mut stopped) = (place.clone(), shutdown.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = tie(near, &place) => {}
                _ = stopped.wait_for(|stop| *stop) => {}
            }
            drop(permit);
        });
    }
}

async fn tie(mut near: TcpStream, place: &str) {
    let mut far = match tokio::time::timeout(DIAL, TcpStream::connect(place)).await {
        Ok(Ok(far)) => far,
        Ok(Err(error)) => return tracing::debug!(%error, place, "nobody serves Ingresses there"),
        Err(_) => return tracing::debug!(place, "no answer from where Ingresses are served"),
    };
    for stream in [&near, &far] {
        let _ = stream.set_nodelay(true);
        // Ends that vanish without a word are noticed.
        let _ = rustix::net::sockopt::set_socket_keepalive(stream, true);
    }
    if let Err(error) = tokio::io::copy_bidirectional(&mut near, &mut far).await {
        tracing::debug!(%error, place, "a connection that was passed on broke");
    }
}
