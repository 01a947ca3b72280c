//! Lets pods reach a server that listens on a loopback address only.
//!
//! The `kubernetes` Service leads to the node's address, where such a server would not answer. So it listens there as
//! well, but serves only pods of the cluster and this machine itself: connections from elsewhere are closed before
//! anything is read.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use apiserver::AcceptedConnection;
use nft::IpNet;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::address::AddressReceiver;

/// Until a port that is in use is tried again.
const LISTEN_RETRY: Duration = Duration::from_secs(10);
/// Connections that wait until the server takes them.
const BACKLOG: usize = 64;

/// Listens at the node's address for as long as the server takes connections.
pub fn listen(address: AddressReceiver, port: u16, pods: Vec<IpNet>) -> mpsc::Receiver<AcceptedConnection> {
    let (sender, accepted) = mpsc::channel(BACKLOG);
    tokio::spawn(async move {
        let mut changes = address.clone();
        loop {
            let at = *changes.borrow_and_update();
            tokio::select! {
                () = serve(at, port, &pods, &sender) => {}
                // An address that cannot change has nobody to tell of changes.
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
            tracing::warn!(%error, address = %at, port, "pods cannot reach the API server, trying again");
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

/// Whether a connection to the node's address comes from a pod, or from this machine, such as from a pod in its network.
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
