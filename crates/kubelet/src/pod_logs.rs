//! Where pods' logs are, and links to them by the names of their containers.
//!
//! Who collects logs looks in `/var/log/pods` and `/var/log/containers`, which are shared with whoever else runs pods on this
//! machine. So each pod has an entry in a directory of the node's own: a link to where its logs are, or its logs themselves.
//! What has no entry is somebody else's and stays, and a pod keeps the place it began with, wherever others begin.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use reconcile::Key;
use runtime::cri;

use crate::config::log_path;
use crate::observed::CONTAINER_NAME;
use crate::pod_of;

/// The longest name that usual file systems take, and how those of logs end.
const MAX_FILE_NAME_BYTES: usize = 255;
const LOG_SUFFIX: &str = ".log";

/// Where containers' logs are.
#[derive(Clone, Debug, PartialEq)]
pub struct PodLogs {
    /// Nobody else's; has an entry for each pod.
    pub own: PathBuf,
    /// Where pods that are made now have their logs.
    pub dir: PathBuf,
    /// Where links to logs are, if anywhere.
    pub links: Option<PathBuf>,
}

/// The pods that have logs, by their entries, and where those are.
pub type Entries = BTreeMap<String, PathBuf>;

impl PodLogs {
    /// All in one directory.
    pub fn within(own: PathBuf) -> PodLogs {
        PodLogs { dir: own.clone(), own, links: None }
    }

    /// The directory of a pod's logs: where it has begun to write them, or else where it is going to.
    pub fn pod_dir(&self, pod: &Key, uid: &str) -> PathBuf {
        let name = entry_name(pod, uid);
        self.resolve(&name).unwrap_or_else(|| self.dir.join(name))
    }

    fn resolve(&self, name: &str) -> Option<PathBuf> {
        let entry = self.own.join(name);
        std::fs::read_link(&entry).ok().or_else(|| entry.exists().then_some(entry))
    }

    /// Makes the directory of a pod's logs, and before that an entry for it.
    pub fn create_pod_dir(&self, pod: &Key, uid: &str) -> io::Result<()> {
        let (log_dir, entry) = (self.pod_dir(pod, uid), self.own.join(entry_name(pod, uid)));
        if log_dir != entry {
            create_link(&log_dir, &entry)?;
        }
        std::fs::create_dir_all(log_dir)
    }

    /// The pods that have logs.
    pub fn entries(&self) -> Entries {
        let found = std::fs::read_dir(&self.own).into_iter().flatten().flatten();
        let names = found.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter_map(|name| Some((name.clone(), self.resolve(&name)?))).collect()
    }

    /// A link to the log of a container that was started, for those who look for it by its name.
    pub fn link(&self, container: &cri::Container) {
        let (Some(links), Some(name), Some(log)) = (&self.links, link_name(container), self.log(container))
        else {
            return;
        };
        // One that writes none needs none.
        if log.exists()
            && let Err(error) =
                std::fs::create_dir_all(links).and_then(|()| create_link(&log, &links.join(name)))
        {
            tracing::warn!(%error, log = %log.display(), "cannot link to a log");
        }
    }

    fn log(&self, container: &cri::Container) -> Option<PathBuf> {
        let (pod, uid) = pod_of(&container.labels)?;
        let attempt = container.metadata.as_ref().map_or(0, |metadata| metadata.attempt);
        Some(self.pod_dir(&pod, &uid).join(log_path(container.labels.get(CONTAINER_NAME)?, attempt)))
    }

    /// Removes the logs of pods that are gone, and links to logs that are, but for those of containers that run: theirs are
    /// about to be there again.
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

    /// Removes what pods have left where others have their logs as well.
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
        // Only where nobody has anything any more.
        shared.into_iter().flatten().for_each(|dir| drop(std::fs::remove_dir(dir)));
        Ok(())
    }

    /// The links to logs of these pods, and to where.
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

/// Whether this is the directory of one of these pods' logs.
fn is_pod_log_dir(entries: &Entries, dir: &Path) -> bool {
    let name = dir.file_name().map(|name| name.to_string_lossy());
    name.and_then(|name| entries.get(&*name)).is_some_and(|log_dir| log_dir == dir)
}

/// Removes the entry of logs that were somewhere else.
fn remove_entry(entry: &Path, log_dir: &Path) {
    if entry != log_dir {
        let _ = std::fs::remove_file(entry);
    }
}

fn entry_name(pod: &Key, uid: &str) -> String {
    format!("{}_{}_{uid}", pod.namespace, pod.name)
}

/// Upstream's names.
fn link_name(container: &cri::Container) -> Option<String> {
    let (pod, _) = pod_of(&container.labels)?;
    let name = container.labels.get(CONTAINER_NAME)?;
    let full_name = format!("{}_{}_{name}-{}", pod.name, pod.namespace, container.id);
    Some(full_name.chars().take(MAX_FILE_NAME_BYTES - LOG_SUFFIX.len()).chain(LOG_SUFFIX.chars()).collect())
}

/// Makes a link that may be there already.
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

    /// A machine on which somebody else has logs too.
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

    /// Starts a container of a pod.
    fn write(logs: &PodLogs, container: &cri::Container) -> PathBuf {
        let (pod, uid) = pod_of(&container.labels).expect("a pod");
        logs.create_pod_dir(&pod, &uid).expect("begun");
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
        // Once more is no failure, and one without a log gets no link.
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
        // Between two steps of its rotation.
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
        // Nobody else has anything there.
        std::fs::remove_dir_all(logs.dir.join("default_theirs_9")).expect("removed");
        logs.remove_all().expect("left");
        assert!(!logs.dir.exists());
    }
}
