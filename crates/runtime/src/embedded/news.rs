//! What happens to pods and containers, for whoever listens. Nobody has to ask again and again.

use std::sync::Arc;

use tokio::sync::{broadcast, watch};

use super::pods::Pod;
use super::view;
use crate::cri::{ContainerEventResponse, ContainerEventType};

/// As far as a listener may fall behind before it misses something.
const BEHIND: usize = 256;

/// Tells what happens.
#[derive(Clone, Debug)]
pub struct News {
    /// Counts changes.
    changes: Arc<watch::Sender<u64>>,
    events: broadcast::Sender<Arc<ContainerEventResponse>>,
}

impl Default for News {
    fn default() -> News {
        News { changes: Arc::new(watch::Sender::new(0)), events: broadcast::Sender::new(BEHIND) }
    }
}

impl News {
    /// Something happened to a container, or to the pod itself where the id is the pod's.
    pub fn tell(&self, kind: ContainerEventType, pod: &Pod, id: &str) {
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
    pub async fn changed(&self, since: u64) -> u64 {
        let mut changes = self.changes.subscribe();
        let count = changes.wait_for(|count| *count != since).await;
        count.map_or(since, |count| *count)
    }

    pub fn events(&self) -> broadcast::Receiver<Arc<ContainerEventResponse>> {
        self.events.subscribe()
    }
}
