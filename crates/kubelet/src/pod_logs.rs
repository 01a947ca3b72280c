//! The log directories of pods, and symlinks to container logs.
//!
//! Log collectors read `/var/log/pods` and `/var/log/containers`, which may be shared with another
//! kubelet on this host. So each pod has an entry in a directory of the node's own: a symlink to
//! its log directory, or that directory itself. Logs without an entry belong to others and are not
//! touched. A pod keeps its log directory, even if new pods get theirs in another place.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use reconcile::Key;
use runtime::cri;

use crate::config::log_path;
use crate::observed::CONTAINER_NAME;
use crate::pod_of;

/// The maximum length of a file name on common file systems, and the suffix of log files.
const MAX_FILE_NAME_BYTES: usize = 255;
const LOG_SUFFIX: &str = ".log";

/// The log directories of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct PodLogs {
    /// The node's own directory, with an entry for each pod.
    pub own: PathBuf,
    /// The parent of the log directories of new pods.
    pub dir: PathBuf,
    /// The directory of symlinks to container logs, if any are created.
    pub links: Option<PathBuf>,
}

/// The log directories of all pods by the name of their entry.
pub type Entries = BTreeMap<String, PathBuf>;

impl PodLogs {
    /// All logs are in the own directory, and there are no symlinks.
    pub fn within(own: PathBuf) -> PodLogs {
        PodLogs { dir: own.clone(), own, links: None }
    }

    /// The log directory of a pod: the one it has, or the one it would get.
    pub fn pod_dir(&self, pod: &Key, uid: &str) -> PathBuf {
        let name = entry_name(pod, uid);
        self.resolve(&name).unwrap_or_else(|| self.dir.join(name))
    }

    fn resolve(&self, name: &str) -> Option<PathBuf> {
        let entry = self.own.join(name);
        std::fs::read_link(&entry).ok().or_else(|| entry.exists().then_some(entry))
    }

    /// Creates the log directory of a pod. Its entry is created first, so that no directory is left
    /// without one.
    pub fn create_pod_dir(&self, pod: &Key, uid: &str) -> io::Result<()> {
        let (log_dir, entry) = (self.pod_dir(pod, uid), self.own.join(entry_name(pod, uid)));
        if log_dir != entry {
            create_link(&log_dir, &entry)?;
        }
        std::fs::create_dir_all(log_dir)
    }

    /// All pods with logs.
    pub fn entries(&self) -> Entries {
        let found = std::fs::read_dir(&self.own).into_iter().flatten().flatten();
        let names = found.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter_map(|name| Some((name.clone(), self.resolve(&name)?))).collect()
    }

    /// Creates the symlink to the log of a started container.
    pub fn link(&self, container: &cri::Container) {
        let (Some(links), Some(name), Some(log)) = (&self.links, link_name(container), self.log(container))
        else {
            return;
        };
        // A container without a log needs no symlink.
        if log.exists()
            && let Err(error) =
                std::fs::create_dir_all(links).and_then(|()| create_link(&log, &links.join(name)))
        {
            tracing::warn!(%error, log = %log.display(), "cannot create the symlink to a container log");
        }
    }

    fn log(&self, container: &cri::Container) -> Option<PathBuf> {
        let (pod, uid) = pod_of(&container.labels)?;
        let attempt = container.metadata.as_ref().map_or(0, |metadata| metadata.attempt);
        Some(self.pod_dir(&pod, &uid).join(log_path(container.labels.get(CONTAINER_NAME)?, attempt)))
    }

    /// Removes the logs of removed pods, and symlinks whose target is gone. Symlinks of running
    /// containers stay, because a log is missing for a moment while it is rotated.
    pub fn collect_garbage(
        &self,
        entries: &Entries,
        is_removed: impl Fn(&str) -> bool,
        running: &[cri::Container],
    ) {
        let uid = |name: &String| name.rsplit('_').next().unwrap_or_default().to_owned();
        let removed: Vec<_> = entries.iter().filter(|(name, _)| is_removed(&uid(name))).collect();
        for (_, log_dir) in &removed {
            let _ = std::fs::remove_dir_all(log_dir);
        }
        let running: BTreeSet<String> = running.iter().filter_map(link_name).collect();
        for (link, log) in self.links_into(entries) {
            let runs = link.file_name().is_some_and(|name| running.contains(&*name.to_string_lossy()));
            if !runs && !log.exists() {
                let _ = std::fs::remove_file(link);
            }
        }
        for (name, log_dir) in removed {
            remove_entry(&self.own.join(name), log_dir);
        }
    }

    /// Removes all logs and symlinks of this node from shared directories.
    pub fn remove_all(&self) -> io::Result<()> {
        let entries = self.entries();
        for (link, _) in self.links_into(&entries) {
            std::fs::remove_file(link)?;
        }
        let external = entries.iter().filter(|(_, log_dir)| !log_dir.starts_with(&self.own));
        for (name, log_dir) in external {
            match std::fs::remove_dir_all(log_dir) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => remove_entry(&self.own.join(name), log_dir),
            }
        }
        let shared = [Some(&self.dir).filter(|dir| **dir != self.own), self.links.as_ref()];
        // This removes empty directories only.
        shared.into_iter().flatten().for_each(|dir| drop(std::fs::remove_dir(dir)));
        Ok(())
    }

    /// The symlinks to logs of these pods, with their targets.
    fn links_into(&self, entries: &Entries) -> Vec<(PathBuf, PathBuf)> {
        let is_own = |log: &Path| {
            log.starts_with(&self.own)
                || log.ancestors().nth(2).is_some_and(|pod| is_pod_log_dir(entries, pod))
        };
        let links = self.links.iter().flat_map(std::fs::read_dir).flatten().flatten().map(|link| link.path());
        let read = links.filter_map(|link| Some((link.clone(), std::fs::read_link(link).ok()?)));
        read.filter(|(_, log)| is_own(log)).collect()
    }
}

/// Whether this is the log directory of one of these pods.
fn is_pod_log_dir(entries: &Entries, dir: &Path) -> bool {
    let name = dir.file_name().map(|name| name.to_string_lossy());
    name.and_then(|name| entries.get(&*name)).is_some_and(|log_dir| log_dir == dir)
}

/// Removes the entry of a log directory outside the own directory.
fn remove_entry(entry: &Path, log_dir: &Path) {
    if entry != log_dir {
        let _ = std::fs::remove_file(entry);
    }
}

fn entry_name(pod: &Key, uid: &str) -> String {
    format!("{}_{}_{uid}", pod.namespace, pod.name)
}

/// The name of upstream's symlink: `<pod>_<namespace>_<container>-<id>.log`, truncated to the
/// maximum length.
fn link_name(container: &cri::Container) -> Option<String> {
    let (pod, _) = pod_of(&container.labels)?;
    let name = container.labels.get(CONTAINER_NAME)?;
    let full_name = format!("{}_{}_{name}-{}", pod.name, pod.namespace, container.id);
    Some(full_name.chars().take(MAX_FILE_NAME_BYTES - LOG_SUFFIX.len()).chain(LOG_SUFFIX.chars()).collect())
}

/// Creates a symlink, unless it exists.
fn create_link(to: &Path, at: &Path) -> io::Result<()> {
    match symlink(to, at) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observed::{POD_NAME, POD_NAMESPACE, POD_UID};

    struct TestLogs {
        _dir: tempfile::TempDir,
        logs: PodLogs,
    }

    /// A host with logs of another kubelet.
    fn test_logs() -> TestLogs {
        let dir = tempfile::tempdir().expect("a directory");
        let [own, pods, links] = ["own", "pods", "links"].map(|name| dir.path().join(name));
        for dir in [&own, &pods.join("default_theirs_9/c"), &links] {
            std::fs::create_dir_all(dir).expect("a directory");
        }
        std::fs::write(pods.join("default_theirs_9/c/0.log"), "").expect("written");
        symlink(pods.join("default_theirs_9/c/1.log"), links.join("theirs_default_c-9.log")).expect("a link");
        TestLogs { logs: PodLogs { own, dir: pods, links: Some(links) }, _dir: dir }
    }

    fn container(pod: &str, uid: &str, id: &str) -> cri::Container {
        let labels = [(POD_NAME, pod), (POD_NAMESPACE, "default"), (POD_UID, uid), (CONTAINER_NAME, "c")];
        cri::Container {
            id: id.to_owned(),
            metadata: Some(cri::ContainerMetadata { name: "c".to_owned(), attempt: 0 }),
            labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            ..cri::Container::default()
        }
    }

    /// Writes the log of a container.
    fn write(logs: &PodLogs, container: &cri::Container) -> PathBuf {
        let (pod, uid) = pod_of(&container.labels).expect("a pod");
        logs.create_pod_dir(&pod, &uid).expect("started");
        let log = logs.log(container).expect("a log");
        std::fs::create_dir_all(log.parent().expect("a parent")).expect("a directory");
        std::fs::write(&log, "").expect("written");
        logs.link(container);
        log
    }

    fn names(dir: &Path) -> Vec<String> {
        let found = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut names: Vec<_> = found.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn seen(logs: &PodLogs) -> [Vec<String>; 3] {
        [names(&logs.own), names(&logs.dir), logs.links.iter().flat_map(|links| names(links)).collect()]
    }

    #[test]
    fn creates_logs_and_links_in_upstream_layout() {
        let TestLogs { logs, _dir } = test_logs();
        let log = write(&logs, &container("web", "1", "abc"));
        assert_eq!(log, logs.dir.join("default_web_1/c/0.log"));
        let link = logs.links.as_ref().expect("links").join("web_default_c-abc.log");
        assert_eq!(std::fs::read_link(link).expect("a link"), log);
        // Linking twice is no error, and a container without a log gets no symlink.
        logs.link(&container("web", "1", "abc"));
        logs.link(&container("web", "2", "def"));
        let expected = [
            vec!["default_web_1"],
            vec!["default_theirs_9", "default_web_1"],
            vec!["theirs_default_c-9.log", "web_default_c-abc.log"],
        ];
        assert_eq!(seen(&logs), expected);
        let long = link_name(&container(&"x".repeat(250), "1", "abc")).expect("a name");
        assert_eq!((long.len(), &long[248..]), (255, "xx_.log"));
    }

    #[test]
    fn pod_keeps_its_log_dir() {
        let TestLogs { logs, _dir } = test_logs();
        let before = PodLogs::within(logs.own.clone());
        let old = write(&before, &container("old", "1", "a"));
        let new = write(&logs, &container("new", "2", "b"));
        assert!(old.starts_with(&logs.own) && new.starts_with(&logs.dir));
        for logs in [&before, &logs, &PodLogs { dir: "/elsewhere".into(), ..logs.clone() }] {
            assert_eq!(logs.log(&container("old", "1", "a")).as_ref(), Some(&old));
            assert_eq!(logs.log(&container("new", "2", "b")).as_ref(), Some(&new));
        }
    }

    #[test]
    fn only_own_logs_and_links_are_removed() {
        let TestLogs { logs, _dir } = test_logs();
        let (runs, removed, old) =
            (container("a", "1", "1"), container("b", "2", "2"), container("c", "3", "3"));
        write(&PodLogs { links: logs.links.clone(), ..PodLogs::within(logs.own.clone()) }, &old);
        write(&logs, &removed);
        let log = write(&logs, &runs);
        // An earlier run of the same pod.
        let earlier = container("a", "1", "0");
        logs.link(&earlier);
        // As in the middle of a rotation.
        std::fs::remove_file(&log).expect("removed");
        logs.collect_garbage(&logs.entries(), |uid| uid != "1", &[runs]);
        let foreign = "theirs_default_c-9.log";
        let expected = [
            vec!["default_a_1"],
            vec!["default_a_1", "default_theirs_9"],
            vec!["a_default_c-1.log", foreign],
        ];
        assert_eq!(seen(&logs), expected);
        logs.remove_all().expect("left");
        assert_eq!(seen(&logs), [vec![], vec!["default_theirs_9"], vec![foreign]]);
        // The directories are empty now.
        std::fs::remove_dir_all(logs.dir.join("default_theirs_9")).expect("removed");
        logs.remove_all().expect("left");
        assert!(!logs.dir.exists());
    }
}
