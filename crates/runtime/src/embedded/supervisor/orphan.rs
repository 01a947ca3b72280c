//! A pod whose directory is taken away under it, as by a user who removes all of skiff's data at once. Nobody will ever
//! call it again, so it ends by itself, and takes away what skiff would have.

use std::io;
use std::path::Path;

use rustix::event::Timespec;

use super::Supervisor;
use crate::embedded::record;

/// How often a group is tried whose processes are on their way out.
const MAX_REMOVE_ATTEMPTS: usize = 2000;
const REMOVE_RETRY_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

fn is_missing(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

impl Supervisor {
    /// Whether the pod is still known, and its containers.
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

    /// Removes the groups of containers, and the pod's if that was all.
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
                // Not the others inside, which somebody else may be about to join.
                let _ = std::fs::remove_dir(directory);
            }
        }
    }
}
