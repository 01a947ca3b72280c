//! The state of the host that a node changes outside of its data directory: sysctls and created
//! directories. It is recorded before the first change, and `skiff reset` restores it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Value, json};

/// The state before skiff. Sysctls are valid for one boot only: the next boot starts with the host's
/// own values.
#[derive(Debug, Default, PartialEq, Eq)]
struct HostState {
    boot_id: String,
    sysctls: BTreeMap<String, String>,
    created: BTreeSet<PathBuf>,
}

/// Records the current values of sysctls (paths below `/proc/sys`) and which of the directories do not
/// exist yet.
pub fn record<'a>(
    data_dir: &Path,
    sysctls: &[&str],
    directories: impl IntoIterator<Item = &'a Path>,
) -> anyhow::Result<()> {
    let boot_id = read_trimmed(Path::new("/proc/sys/kernel/random/boot_id"));
    record_in(data_dir, Path::new("/proc/sys"), boot_id.unwrap_or_default(), sysctls, directories)
}

/// Restores the sysctls and removes the directories; returns what failed.
pub fn restore(data_dir: &Path) -> Vec<anyhow::Error> {
    let boot_id = read_trimmed(Path::new("/proc/sys/kernel/random/boot_id"));
    restore_in(data_dir, Path::new("/proc/sys"), &boot_id.unwrap_or_default())
}

fn record_in<'a>(
    data_dir: &Path,
    proc: &Path,
    boot_id: String,
    sysctls: &[&str],
    directories: impl IntoIterator<Item = &'a Path>,
) -> anyhow::Result<()> {
    let mut state = HostState::read(data_dir)?;
    if state.boot_id != boot_id {
        state.boot_id = boot_id;
        state.sysctls.clear();
    }
    for name in sysctls {
        if !state.sysctls.contains_key(*name)
            && let Some(value) = read_trimmed(&proc.join(name))
        {
            state.sysctls.insert((*name).to_owned(), value);
        }
    }
    state.created.extend(directories.into_iter().filter(|path| !path.exists()).map(Path::to_owned));
    state.write(data_dir)
}

fn restore_in(data_dir: &Path, proc: &Path, boot_id: &str) -> Vec<anyhow::Error> {
    let state = match HostState::read(data_dir) {
        Ok(state) => state,
        Err(error) => return vec![error],
    };
    let mut failures = Vec::new();
    for (name, value) in state.sysctls.iter().filter(|_| state.boot_id == boot_id) {
        let path = proc.join(name);
        if read_trimmed(&path).is_some_and(|now| now != *value)
            && let Err(error) = std::fs::write(&path, value)
        {
            failures.push(anyhow::Error::new(error).context(format!("cannot restore {}", path.display())));
        }
    }
    for path in &state.created {
        let unmounted = sys::mounts::unmount_below(path);
        let removed = unmounted.and_then(|()| match sys::trees::remove(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        });
        if let Err(error) = removed {
            failures.push(anyhow::Error::new(error).context(format!("cannot remove {}", path.display())));
        }
    }
    if failures.is_empty() {
        let _ = std::fs::remove_file(file(data_dir));
    }
    failures
}

impl HostState {
    fn read(data_dir: &Path) -> anyhow::Result<HostState> {
        let path = file(data_dir);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(HostState::default()),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let value: Value =
            serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?;
        let sysctls = value["sysctls"].as_object().into_iter().flatten();
        let created = value["created"].as_array().into_iter().flatten();
        Ok(HostState {
            boot_id: value["bootID"].as_str().unwrap_or_default().to_owned(),
            sysctls: sysctls
                .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
                .collect(),
            created: created.filter_map(|path| Some(PathBuf::from(path.as_str()?))).collect(),
        })
    }

    fn write(&self, data_dir: &Path) -> anyhow::Result<()> {
        let path = file(data_dir);
        let value = json!({"bootID": self.boot_id, "sysctls": self.sysctls, "created": self.created});
        let created = std::fs::create_dir_all(data_dir.join("agent"));
        created.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(pki::write_file(&path, value.to_string().as_bytes(), 0o600)?)
    }
}

fn file(data_dir: &Path) -> PathBuf {
    data_dir.join("agent/host-state.json")
}

fn read_trimmed(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORWARD: &str = "net/ipv4/ip_forward";

    struct Host {
        dir: tempfile::TempDir,
    }

    impl Host {
        fn new() -> Host {
            let host = Host { dir: tempfile::tempdir().unwrap() };
            std::fs::create_dir_all(host.path("sys/net/ipv4")).unwrap();
            host.set("0");
            host
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn set(&self, value: &str) {
            std::fs::write(self.path("sys").join(FORWARD), format!("{value}\n")).unwrap();
        }

        fn value(&self) -> String {
            read_trimmed(&self.path("sys").join(FORWARD)).unwrap()
        }

        fn record(&self, boot: &str) {
            let kubelet = self.path("kubelet");
            let [data, sys] = ["data", "sys"].map(|name| self.path(name));
            record_in(&data, &sys, boot.to_owned(), &[FORWARD, "net/none"], [&*kubelet]).unwrap();
        }

        fn restore(&self, boot: &str) {
            let failures = restore_in(&self.path("data"), &self.path("sys"), boot);
            assert!(failures.is_empty(), "{failures:?}");
        }
    }

    #[test]
    fn restore_returns_to_state_before_first_start() {
        let host = Host::new();
        host.record("a");
        host.set("1");
        std::fs::create_dir_all(host.path("kubelet/plugins")).unwrap();
        // The second start reads the value that skiff itself has set, which must not be recorded.
        host.record("a");
        host.restore("a");
        assert_eq!((host.value().as_str(), host.path("kubelet").exists()), ("0", false));
        // The record was deleted by the first restore.
        host.set("1");
        host.restore("a");
        assert_eq!(host.value(), "1");
    }

    #[test]
    fn restore_ignores_sysctls_of_previous_boot() {
        let host = Host::new();
        host.record("a");
        host.set("1");
        host.restore("b");
        assert_eq!(host.value(), "1", "by the administrator");
        let host = Host::new();
        host.record("a");
        host.set("1");
        host.record("b");
        host.set("2");
        host.restore("b");
        assert_eq!(host.value(), "1", "the value at the start of this boot");
    }

    #[test]
    fn restore_keeps_existing_directory() {
        let host = Host::new();
        std::fs::create_dir_all(host.path("kubelet/pki")).unwrap();
        host.record("a");
        host.restore("a");
        assert!(host.path("kubelet/pki").exists());
    }
}
