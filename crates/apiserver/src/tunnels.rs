//! Reverse tunnels to nodes that cannot be dialed: a node connects to this server and keeps a
//! tunnel open, through which its kubelet and pods are dialed. Without a tunnel, they are dialed
//! directly.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use api::Status;
use api::json::JsonExt as _;
use api::networking::ip::Cidr;
use http::header::{CONNECTION, HeaderValue, UPGRADE};
use http::{Response, StatusCode};
use parking_lot::Mutex;
use serde_json::Value;
pub use stream::Conn;
use stream::tunnel::{Tunnel, UPGRADE_PROTOCOL};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::body::Body;
use crate::node_authorizer::node_name_of;
use crate::request::Target;
use crate::server::{Call, Server};

/// The open tunnels by node name.
#[derive(Default)]
pub struct Tunnels {
    open: Mutex<HashMap<String, (u64, Tunnel)>>,
    next_id: AtomicU64,
    /// Counts all tunnels ever opened.
    pub total_count: watch::Sender<u64>,
}

/// Handles a node's request to open a tunnel.
pub fn handle(server: &Arc<Server>, call: &Call) -> Result<Response<Body>, Status> {
    let Some(node) = node_name_of(&call.user).filter(|node| !node.is_empty()).map(str::to_owned) else {
        return Err(Status::failure(403, "Forbidden", "only nodes may open tunnels"));
    };
    let is_tunnel_request = call.header(UPGRADE).eq_ignore_ascii_case(UPGRADE_PROTOCOL);
    let Some(upgrade) = call.upgrade.clone().filter(|_| is_tunnel_request) else {
        return Err(Status::bad_request("Upgrade request required"));
    };
    let server = server.clone();
    tokio::spawn(async move {
        let Ok(offered) = upgrade.await else { return };
        let Ok((tunnel, closed)) = Tunnel::from_upgraded(offered).await else { return };
        let id = server.tunnels.next_id.fetch_add(1, Ordering::Relaxed);
        server.tunnels.open.lock().insert(node.clone(), (id, tunnel));
        server.tunnels.total_count.send_modify(|total_count| *total_count += 1);
        tracing::debug!(node, "tunnel opened");
        let mut shutdown = server.shutdown.clone();
        tokio::select! {
            () = closed => {}
            () = crate::cache::wait_for_shutdown(&mut shutdown) => {}
        }
        let mut open = server.tunnels.open.lock();
        // The node may have opened another tunnel in the meantime.
        if open.get(&node).is_some_and(|(known, _)| *known == id) {
            open.remove(&node);
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static(UPGRADE_PROTOCOL));
    Ok(response)
}

/// Connects to a node or pod, through the tunnel of its node if one is open.
pub async fn connect(server: &Server, host: &str, port: u16) -> io::Result<Box<dyn Conn>> {
    if let Some(tunnel) = find_tunnel(server, host) {
        match tunnel.dial(host, port).await {
            Ok(connection) => return Ok(Box::new(connection)),
            Err(error) if !tunnel.is_open() => {
                tracing::debug!(%error, host, "tunnel closed, dialing directly")
            }
            Err(error) => return Err(error),
        }
    }
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    Ok(Box::new(stream))
}

/// The tunnel of the node that has the address.
fn find_tunnel(server: &Server, host: &str) -> Option<Tunnel> {
    // Cloned, so that the lock is not held during the cache lookups below.
    let open: Vec<(String, Tunnel)> = {
        let open = server.tunnels.open.lock();
        open.iter().map(|(node, (_, tunnel))| (node.clone(), tunnel.clone())).collect()
    };
    if open.is_empty() {
        return None;
    }
    let address: IpAddr = host.parse().ok()?;
    let nodes =
        api::resource_table::find_resource("", "v1", "nodes").expect("nodes are in the resource table");
    open.into_iter().find_map(|(name, tunnel)| {
        let target = Target { name, ..Target::collection(nodes, "") };
        let node = server.find(&target)?.value();
        has_address(&node, address).then_some(tunnel)
    })
}

/// Whether the address belongs to the node or to one of its pods.
fn has_address(node: &Value, address: IpAddr) -> bool {
    let own = node.at("status").items("addresses");
    let networks = node.at("spec").items("podCIDRs").iter().filter_map(Value::as_str);
    own.iter().any(|known| known.text("address").parse() == Ok(address))
        || networks.filter_map(Cidr::parse).any(|network| network.contains(address))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn addresses_match_node_and_pod_network() {
        let node = json!({
            "spec": {"podCIDRs": ["10.42.1.0/24"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.2"}, {"type": "Hostname", "address": "b"}]},
        });
        let at = |address: &str| has_address(&node, address.parse().expect("an address"));
        assert!(at("192.0.2.2") && at("10.42.1.7"));
        assert!(!at("192.0.2.3") && !at("10.42.2.7") && !at("2001:db8::1"));
    }
}
