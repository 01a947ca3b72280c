//! Handles a pod whose directory is deleted while it runs, for example by a user who deletes skiff's
//! data directory. No skiff will ever stop such a pod, so the supervisor stops it and removes its
//! cgroups.

use std::io;
use std::path::Path;

use rustix::event::Timespec;

use super::Supervisor;
use crate::embedded::record;

/// Attempts to remove a cgroup whose processes are still exiting.
const MAX_REMOVE_ATTEMPTS: usize = 2000;
const REMOVE_RETRY_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

fn is_missing(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

impl Supervisor {
    /// Checks that the directories of the pod and of its containers still exist.
    pub(super) fn check_directories(&mut self) {
        if is_missing(&self.directory.join(record::RECORD_FILE)) {
            self.is_orphan = true;
            self.is_shutdown = true;
            return;
        }
        for (id, running) in &self.containers {
            let Some(child) = &running.child else { continue };
            if is_missing(&self.directory.join(id)) {
                let _ = child.signal(9);
            }
        }
    }

    /// Removes the cgroups of the containers, and the pod's if it is empty then.
    pub(super) fn remove_cgroups(&self) {
        let groups = self.containers.values().map(|running| running.spec.cgroup.as_str());
        for group in groups.clone() {
            for _ in 0..MAX_REMOVE_ATTEMPTS {
                let _ = self.cgroups.kill(group);
                if self.cgroups.remove(group).is_ok() {
                    break;
                }
                let _ = rustix::event::poll(&mut [], Some(&REMOVE_RETRY_INTERVAL));
            }
        }
        if let Some((parent, _)) = groups.clone().next().and_then(|group| group.rsplit_once('/'))
            && parent.trim_matches('/').contains('/')
        {
            for directory in self.cgroups.directories(parent) {
                // Not recursive: another process may be about to join a nested cgroup.
                let _ = std::fs::remove_dir(directory);
            }
        }
    }
}
