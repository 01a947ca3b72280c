//! Monitors addresses and routes of this host. Other programs change these, too: when a network
//! interface is reconfigured, our routes are deleted with it.

use std::time::Duration;

use tokio::net::UnixDatagram;

/// Changes come in groups, for example an address and its routes. They are handled together after this
/// delay.
const BATCH_DELAY: Duration = Duration::from_millis(500);

/// Notifies of changes to addresses and routes of this host.
pub struct RouteMonitor(Option<UnixDatagram>);

impl RouteMonitor {
    /// Subscribes to changes from now on. If that fails, a warning is logged and no change is ever
    /// reported.
    pub fn open() -> RouteMonitor {
        // tokio has no type for netlink sockets. For reading, one behaves like a datagram socket.
        let socket = sys::netlink::subscribe_changes().map(std::os::unix::net::UnixDatagram::from);
        let socket = socket.and_then(UnixDatagram::from_std);
        if let Err(error) = &socket {
            tracing::warn!(%error, "failed to subscribe to address and route changes, they will not be noticed");
        }
        RouteMonitor(socket.ok())
    }

    /// Whether the subscription failed.
    pub fn is_closed(&self) -> bool {
        self.0.is_none()
    }

    /// Waits for a change and for others that closely follow it.
    pub async fn changed(&self) {
        let Some(socket) = &self.0 else { return std::future::pending().await };
        let mut buffer = [0; 8192];
        // An overflow of the receive buffer is an error here, but also means that there were changes.
        let _ = socket.recv(&mut buffer).await;
        tokio::time::sleep(BATCH_DELAY).await;
        while socket.try_recv(&mut buffer).is_ok() {}
    }
}
