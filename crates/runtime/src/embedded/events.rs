//! What happens to pods and containers, for whoever listens. Nobody has to ask again and again.

use std::sync::Arc;

use tokio::sync::{broadcast, watch};

use super::pods::Pod;
use super::view;
use crate::cri::{ContainerEventResponse, ContainerEventType};

/// As far as a listener may fall behind before it misses something.
const MAX_PENDING_EVENTS: usize = 256;

/// Tells what happens.
#[derive(Clone, Debug)]
pub struct EventPublisher {
    /// Counts changes.
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
    /// Something happened to a container, or to the pod itself where the id is the pod's.
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
            // The last one may just have gone.
            let _ = self.events.send(Arc::new(event));
        }
        self.changes.send_modify(|count| *count += 1);
    }

    /// Waits until there were more changes than these; answers how many there were.
    pub async fn wait_for_change(&self, since: u64) -> u64 {
        let mut changes = self.changes.subscribe();
        let count = changes.wait_for(|count| *count != since).await;
        count.map_or(since, |count| *count)
    }

    pub fn subscribe(&self) -> broadcast::Receiver<Arc<ContainerEventResponse>> {
        self.events.subscribe()
    }
}
