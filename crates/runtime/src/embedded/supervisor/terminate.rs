//! SIGTERM to a supervisor ends its pod in order: an init system that ends all processes before a shutdown sends it to
//! those that no skiff has ended before. Containers do not hear of it: a first process in a process namespace ignores
//! signals that it has no handler for, and a shutdown would wait for it until it is killed.

use std::path::Path;
use std::time::{Duration, Instant};

use super::Supervisor;
use crate::embedded::record::{self, ContainerRecord};

/// How long containers have to end. systemd waits for 90 seconds by default before it kills what is left.
const TERMINATION_GRACE_PERIOD: Duration = Duration::from_secs(10);
const SIGTERM: i32 = 15;

impl Supervisor {
    /// Asks all containers to end; the pod ends with the last of them.
    pub(super) fn terminate(&mut self) {
        if self.terminates_at.is_some() {
            return;
        }
        self.terminates_at = Some(Instant::now() + TERMINATION_GRACE_PERIOD);
        for (id, running) in &self.containers {
            if let Some(child) = &running.child {
                let _ = child.signal(stop_signal(&self.directory.join(id)));
            }
        }
    }

    /// Whether the pod was asked to end, and all containers have or their time is over.
    pub(super) fn is_terminated(&self) -> bool {
        let runs = || self.containers.values().any(|running| running.child.is_some());
        self.terminates_at.is_some_and(|deadline| !runs() || deadline <= Instant::now())
    }
}

/// The signal that the container's image wants.
fn stop_signal(directory: &Path) -> i32 {
    let record: Option<ContainerRecord> = record::read(directory).ok();
    record.map(|record| record.stop_signal).filter(|signal| *signal > 0).unwrap_or(SIGTERM)
}
