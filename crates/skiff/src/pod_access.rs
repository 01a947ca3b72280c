//! Makes a server that listens only on a loopback address reachable for pods.
//!
//! The endpoint of the `kubernetes` Service is the node's address, where such a server does not listen.
//! It therefore listens there as well, but accepts only connections from pods and from this host. Other
//! connections are closed before anything is read.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use apiserver::AcceptedConnection;
use nft::IpNet;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::address::AddressReceiver;

/// Delay before a port in use is tried again.
const LISTEN_RETRY: Duration = Duration::from_secs(10);
/// Accepted connections that may wait for the server.
const BACKLOG: usize = 64;

/// Listens on the node's address until the server drops the receiver.
pub fn listen(address: AddressReceiver, port: u16, pods: Vec<IpNet>) -> mpsc::Receiver<AcceptedConnection> {
    let (sender, accepted) = mpsc::channel(BACKLOG);
    tokio::spawn(async move {
        let mut changes = address.clone();
        loop {
            let at = *changes.borrow_and_update();
            tokio::select! {
                () = serve(at, port, &pods, &sender) => {}
                // `changed` fails if the address is fixed; the branch is then disabled.
                Ok(()) = changes.changed() => {}
                () = sender.closed() => return,
            }
        }
    });
    accepted
}

async fn serve(at: Option<IpAddr>, port: u16, pods: &[IpNet], sender: &mpsc::Sender<AcceptedConnection>) {
    let Some(at) = at else { return std::future::pending().await };
    let listener = match TcpListener::bind((at, port)).await {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(%error, address = %at, port, "pods cannot reach the API server, retrying");
            return tokio::time::sleep(LISTEN_RETRY).await;
        }
    };
    tracing::info!(address = %at, port, "serving pods");
    loop {
        match listener.accept().await {
            Ok((stream, peer)) if is_allowed(peer, at, pods) => {
                if sender.send((stream, peer)).await.is_err() {
                    return;
                }
            }
            Ok((_, peer)) => tracing::debug!(%peer, "closed a connection from outside of the cluster"),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(LISTEN_RETRY).await;
            }
        }
    }
}

/// Whether a connection comes from a pod or from this host, which includes pods with `hostNetwork`.
fn is_allowed(peer: SocketAddr, at: IpAddr, pods: &[IpNet]) -> bool {
    let peer = peer.ip().to_canonical();
    peer == at || peer.is_loopback() || pods.iter().any(|net| net.contains(peer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allows_only_pods_and_local_peers() {
        let pods: Vec<IpNet> = ["10.42.0.0/16", "fd42::/48"].map(|net| net.parse().unwrap()).into();
        let check = |peer: &str, expected: bool| {
            let at = "192.0.2.7".parse().unwrap();
            assert_eq!(
                is_allowed(SocketAddr::new(peer.parse().unwrap(), 40000), at, &pods),
                expected,
                "{peer}"
            );
        };
        check("10.42.0.5", true);
        check("::ffff:10.42.0.5", true);
        check("fd42::5", true);
        check("192.0.2.7", true);
        check("127.0.0.1", true);
        check("192.0.2.8", false);
        check("10.43.0.5", false);
        check("2001:db8::1", false);
    }

    #[tokio::test]
    async fn accepts_connections_after_address_change() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (address_sender, address) = tokio::sync::watch::channel(None);
        let mut accepted = listen(address, port, Vec::new());
        for at in ["127.0.0.2", "127.0.0.3"] {
            address_sender.send_replace(Some(at.parse().unwrap()));
            let connect = async {
                loop {
                    if let Ok(stream) = tokio::net::TcpStream::connect((at, port)).await {
                        break stream;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            let _client = tokio::time::timeout(LISTEN_RETRY, connect).await.unwrap();
            let (stream, _) = accepted.recv().await.unwrap();
            assert_eq!(stream.local_addr().unwrap().ip().to_string(), at);
        }
    }
}
