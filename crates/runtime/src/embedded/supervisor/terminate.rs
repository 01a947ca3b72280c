//! SIGTERM to a supervisor stops its pod gracefully. An init system that terminates all processes
//! before a shutdown sends it to pods that skiff has not stopped before. The containers themselves do
//! not react to it: the first process of a PID namespace ignores signals without a handler, and the
//! shutdown would wait until it is killed.

use std::path::Path;
use std::time::{Duration, Instant};

use super::Supervisor;
use crate::embedded::record::{self, ContainerRecord};

/// Time for the containers to stop. systemd waits for 90 seconds by default before it kills what is
/// left.
const TERMINATION_GRACE_PERIOD: Duration = Duration::from_secs(10);
const SIGTERM: i32 = 15;

impl Supervisor {
    /// Sends their stop signal to all containers. The pod stops with the last of them.
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

    /// Whether SIGTERM was received and all containers have exited or the grace period is over.
    pub(super) fn is_terminated(&self) -> bool {
        let runs = || self.containers.values().any(|running| running.child.is_some());
        self.terminates_at.is_some_and(|deadline| !runs() || deadline <= Instant::now())
    }
}

/// The stop signal of the container's image.
fn stop_signal(directory: &Path) -> i32 {
    let record: Option<ContainerRecord> = record::read(directory).ok();
    record.map(|record| record.stop_signal).filter(|signal| *signal > 0).unwrap_or(SIGTERM)
}
