//! Keeps pods attached to their node: links, addresses and routes that were deleted are created again,
//! and pods of older versions of skiff are detached from the bridge.

use std::fs::File;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use podnet::{Address, Attachment};
use tokio::net::UnixDatagram;
use tokio::sync::Notify;

use super::super::pods::Pod;
use super::super::{Embedded, error_chain, link_name, supervisor_client, translate};
use super::bandwidth;
use crate::cri::NamespaceMode;

/// Deletions come in groups: deleting a link deletes its addresses and routes, and many pods may be
/// affected at once.
const COALESCE_DELAY: Duration = Duration::from_millis(200);

impl Embedded {
    /// Restores pod networks after deletions and on notification, until the runtime is dropped.
    pub(in super::super) fn watch_networks(&self, notify: Arc<Notify>) {
        let inner = Arc::downgrade(&self.inner);
        tokio::spawn(async move {
            let monitor = RemovalMonitor::open();
            loop {
                tokio::select! {
                    () = notify.notified() => {}
                    () = monitor.removed() => {}
                }
                let Some(inner) = Weak::upgrade(&inner) else { return };
                Embedded { inner }.restore_networks().await;
            }
        });
    }

    async fn restore_networks(&self) {
        let expected = self.attachments();
        if expected.is_empty() {
            return;
        }
        let (bridge, ranges) = (self.inner.config.bridge.clone(), self.inner.ranges.read().clone());
        let find = move || {
            podnet::prepare(&bridge, &ranges)?;
            podnet::incomplete(expected)
        };
        let incomplete = match tokio::task::spawn_blocking(find).await {
            Ok(Ok(incomplete)) => incomplete,
            Ok(Err(error)) => {
                let error = error_chain(&error);
                return tracing::warn!(%error, "cannot inspect pod networks, retrying at the next change");
            }
            Err(_) => return,
        };
        for attachment in incomplete {
            self.restore_network(attachment).await;
        }
    }

    async fn restore_network(&self, attachment: Attachment) {
        let pods = self.inner.pods.all();
        let Some(pod) = pods.into_iter().find(|pod| link_name(&pod.id) == attachment.link) else { return };
        // A stopping pod loses its link before its supervisor exits.
        let Ok(pid) = supervisor_client::supervisor_pid(&pod.directory).await else { return };
        let Ok(namespace) = File::open(format!("/proc/{pid}/ns/net")) else { return };
        // Checked after opening: if the supervisor has exited, its PID may belong to another process.
        if !*pod.is_ready.borrow() {
            return;
        }
        let name = attachment.link.clone();
        let result = tokio::task::spawn_blocking(move || podnet::restore(&attachment, namespace)).await;
        match result {
            Ok(Ok(())) => tracing::info!(pod = pod.id, link = name, "pod network restored"),
            Ok(Err(error)) => {
                tracing::warn!(
                    error = error_chain(&error),
                    pod = pod.id,
                    link = name,
                    "cannot restore pod network"
                );
            }
            Err(_) => {}
        }
    }

    /// The expected attachments of all running pods, except those attached by CNI.
    fn attachments(&self) -> Vec<Attachment> {
        let by_cni = self.cni_plugins().cached_ids();
        let running = self.inner.pods.all().into_iter();
        let running = running.filter(|pod| *pod.is_ready.borrow() && !by_cni.contains(&pod.id));
        running.filter_map(|pod| self.attachment_of(&pod)).collect()
    }

    fn attachment_of(&self, pod: &Pod) -> Option<Attachment> {
        let record = pod.record.lock();
        let config = record.config.as_ref()?;
        if record.is_unfinished || translate::namespaces(config).network() == NamespaceMode::Node {
            return None;
        }
        let ranges = self.inner.ranges.read();
        let address = |ip: IpAddr| {
            let range = ranges.iter().find(|range| range.contains(ip))?;
            Some(Address { ip, prefix: range.prefix(), gateway: range.gateway() })
        };
        let addresses: Vec<Address> = record.ips.iter().filter_map(|ip| address(ip.parse().ok()?)).collect();
        // Addresses of a range that the node no longer has cannot be restored.
        if addresses.is_empty() || addresses.len() != record.ips.len() {
            return None;
        }
        let bandwidth = bandwidth(&config.annotations).unwrap_or_default();
        Some(Attachment {
            link: link_name(&pod.id),
            bridge: self.inner.config.bridge.clone(),
            addresses,
            bandwidth,
        })
    }
}

/// Receives the kernel's notifications of deleted links, addresses and routes.
struct RemovalMonitor(Option<UnixDatagram>);

impl RemovalMonitor {
    fn open() -> RemovalMonitor {
        // A netlink socket can be read like any datagram socket.
        let socket = sys::netlink::subscribe_deletes().map(std::os::unix::net::UnixDatagram::from);
        let socket = socket.and_then(UnixDatagram::from_std);
        if let Err(error) = &socket {
            tracing::warn!(%error, "cannot watch for deleted links and routes, pod networks are not restored");
        }
        RemovalMonitor(socket.ok())
    }

    /// Waits for a deletion, then for the others of the same group.
    async fn removed(&self) {
        let Some(socket) = &self.0 else { return std::future::pending().await };
        let mut buffer = vec![0; 32 * 1024];
        loop {
            match socket.recv(&mut buffer).await {
                Ok(count) if !sys::netlink::is_removal(&buffer[..count]) => {}
                // An error means that the socket's buffer overflowed, so events were lost.
                _ => break,
            }
        }
        tokio::time::sleep(COALESCE_DELAY).await;
        while socket.try_recv(&mut buffer).is_ok() {}
    }
}
