//! Publishes pod and container lifecycle events, so that clients need not poll (`GetContainerEvents`).

use std::sync::Arc;

use tokio::sync::{broadcast, watch};

use super::pods::Pod;
use super::view;
use crate::cri::{ContainerEventResponse, ContainerEventType};

/// Events that a subscriber may fall behind before it loses some.
const MAX_PENDING_EVENTS: usize = 256;

/// Counts changes and sends events to subscribers.
#[derive(Clone, Debug)]
pub struct EventPublisher {
    /// The number of changes so far.
    changes: Arc<watch::Sender<u64>>,
    events: broadcast::Sender<Arc<ContainerEventResponse>>,
}

impl Default for EventPublisher {
    fn default() -> EventPublisher {
        EventPublisher {
            changes: Arc::new(watch::Sender::new(0)),
            events: broadcast::Sender::new(MAX_PENDING_EVENTS),
        }
    }
}

impl EventPublisher {
    /// Publishes an event of a container, or of the pod itself if `id` is the pod's.
    pub fn publish(&self, kind: ContainerEventType, pod: &Pod, id: &str) {
        if self.events.receiver_count() > 0 {
            let containers: Vec<_> = pod.containers.lock().values().cloned().collect();
            let event = ContainerEventResponse {
                container_id: id.to_owned(),
                container_event_type: kind.into(),
                created_at: super::now(),
                pod_sandbox_status: Some(view::sandbox_status(pod)),
                containers_statuses: containers
                    .iter()
                    .map(|known| view::container_status(pod, known))
                    .collect(),
            };
            // The last subscriber may have gone in the meantime.
            let _ = self.events.send(Arc::new(event));
        }
        self.changes.send_modify(|count| *count += 1);
    }

    /// Waits until the number of changes differs from `since` and returns it.
    pub async fn wait_for_change(&self, since: u64) -> u64 {
        let mut changes = self.changes.subscribe();
        let count = changes.wait_for(|count| *count != since).await;
        count.map_or(since, |count| *count)
    }

    pub fn subscribe(&self) -> broadcast::Receiver<Arc<ContainerEventResponse>> {
        self.events.subscribe()
    }
}
