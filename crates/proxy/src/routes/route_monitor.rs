//! What the kernel tells of addresses and routes, which others change too: a network that is set up anew takes our
//! routes with it.

use std::time::Duration;

use tokio::net::UnixDatagram;

/// Changes do not come alone: after an address there are routes.
const BATCH_DELAY: Duration = Duration::from_millis(500);

/// Tells that addresses or routes of this machine have changed.
pub struct RouteMonitor(Option<UnixDatagram>);

impl RouteMonitor {
    /// From now on. Where the kernel does not tell, nothing is ever heard.
    pub fn open() -> RouteMonitor {
        // A socket of datagrams like any other, as far as reading from it goes.
        let socket = sys::netlink::subscribe_changes().map(std::os::unix::net::UnixDatagram::from);
        let socket = socket.and_then(UnixDatagram::from_std);
        if let Err(error) = &socket {
            tracing::warn!(%error, "the kernel does not tell of changes to addresses and routes");
        }
        RouteMonitor(socket.ok())
    }

    /// Whether the kernel does not tell.
    pub fn is_closed(&self) -> bool {
        self.0.is_none()
    }

    /// Waits until there was a change, and for those that come with it.
    pub async fn changed(&self) {
        let Some(socket) = &self.0 else { return std::future::pending().await };
        let mut buffer = [0; 8192];
        // Too much for the socket to hold is news as well, and an error.
        let _ = socket.recv(&mut buffer).await;
        tokio::time::sleep(BATCH_DELAY).await;
        while socket.try_recv(&mut buffer).is_ok() {}
    }
}
