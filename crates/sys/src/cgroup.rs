//! Control groups, v1 and v2: hierarchies, limits, processes and usage.
//!
//! A group is named by a path such as `/skiff/pod1/main`, the same in every hierarchy. Start reading at
//! [`Cgroups`].

mod devices;
mod limits;
mod usage;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

pub use devices::{DeviceKind, DeviceRule, ParseDeviceRuleError};
pub use limits::Limits;
pub use usage::Usage;

/// The controllers that pods use.
const CONTROLLERS: [&str; 8] =
    ["cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "pids", "hugetlb"];

/// The hierarchies of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cgroups {
    /// cgroup v1: a hierarchy for each controller. Controllers that are mounted together share one.
    V1 {
        /// Controller and mount point.
        hierarchies: Vec<(String, PathBuf)>,
    },
    /// cgroup v2: the unified hierarchy.
    V2 {
        /// Its mount point.
        root: PathBuf,
    },
}

impl Cgroups {
    /// Detects the hierarchies. A host whose memory controller is on v1 counts as v1.
    pub fn of_host() -> io::Result<Cgroups> {
        Cgroups::parse(crate::lines("/proc/self/mounts")?)
    }

    fn parse(mounts: impl Iterator<Item = String>) -> io::Result<Cgroups> {
        let mut hierarchies = Vec::new();
        let mut unified = None;
        for line in mounts {
            let mut words = line.split(' ');
            let (Some(_), Some(mount_point), Some(kind), Some(options)) =
                (words.next(), words.next(), words.next(), words.next())
            else {
                continue;
            };
            if kind == "cgroup" {
                let named = options.split(',').filter(|option| CONTROLLERS.contains(option));
                hierarchies.extend(named.map(|name| (name.to_owned(), PathBuf::from(mount_point))));
            } else if kind == "cgroup2" && unified.is_none() {
                unified = Some(PathBuf::from(mount_point));
            }
        }
        match unified {
            _ if hierarchies.iter().any(|(name, _)| name == "memory") => Ok(Cgroups::V1 { hierarchies }),
            Some(root) => Ok(Cgroups::V2 { root }),
            None => Err(io::Error::new(io::ErrorKind::NotFound, "no cgroup hierarchy is mounted")),
        }
    }

    /// Whether this is cgroup v2.
    pub fn is_v2(&self) -> bool {
        matches!(self, Cgroups::V2 { .. })
    }

    /// The directories of a group, without duplicates.
    pub fn directories(&self, group: &str) -> Vec<PathBuf> {
        let group = group.trim_matches('/');
        match self {
            Cgroups::V2 { root } => vec![root.join(group)],
            Cgroups::V1 { hierarchies } => {
                let mut paths: Vec<&PathBuf> = hierarchies.iter().map(|(_, path)| path).collect();
                paths.sort();
                paths.dedup();
                paths.into_iter().map(|path| path.join(group)).collect()
            }
        }
    }

    /// The directory of a group for a controller, if the host has that controller.
    pub fn directory(&self, controller: &str, group: &str) -> Option<PathBuf> {
        let group = group.trim_matches('/');
        match self {
            Cgroups::V2 { root } => Some(root.join(group)),
            Cgroups::V1 { hierarchies } => {
                let found = hierarchies.iter().find(|(name, _)| name == controller);
                found.map(|(_, path)| path.join(group))
            }
        }
    }

    /// Creates a group and its parents.
    pub fn create(&self, group: &str) -> io::Result<()> {
        match self {
            Cgroups::V2 { root } => {
                let mut path = root.clone();
                for part in group.trim_matches('/').split('/') {
                    enable_subtree_controllers(&path);
                    path.push(part);
                    create_dir(&path)?;
                }
            }
            Cgroups::V1 { .. } => {
                for directory in self.directories(group) {
                    fs::create_dir_all(&directory)?;
                }
                if let Some(directory) = self.directory("cpuset", group) {
                    inherit_cpuset(&directory)?;
                }
            }
        }
        Ok(())
    }

    /// Opens a group's directory, so that a new process can start in the group
    /// ([`CloneOptions`](crate::process::CloneOptions)); v2 only. Joining a group later takes
    /// milliseconds, because the kernel waits until no process of the whole host is forking or exiting.
    pub fn open_dir(&self, group: &str) -> Option<OwnedFd> {
        use rustix::fs::{Mode, OFlags};
        let Cgroups::V2 { root } = self else { return None };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(root.join(group.trim_matches('/')), flags, Mode::empty()).ok()
    }

    /// The group of a process; v2 only.
    pub fn of_process(&self, pid: i32) -> Option<String> {
        let of_v2 = |line: String| line.strip_prefix("0::").map(str::to_owned);
        crate::lines(&format!("/proc/{pid}/cgroup")).ok()?.find_map(of_v2).filter(|_| self.is_v2())
    }

    /// Moves this single-threaded process into a group.
    pub fn join(&self, group: &str) -> io::Result<()> {
        // On v1 a thread can move alone, without the wait described at `open_dir`.
        let file = if self.is_v2() { "cgroup.procs" } else { "tasks" };
        for directory in self.directories(group) {
            // 0 is the writing process, whatever its PID in which namespace.
            write(&directory.join(file), "0")?;
        }
        Ok(())
    }

    /// Kills all processes in a group and its descendants. They exit asynchronously.
    pub fn kill(&self, group: &str) -> io::Result<()> {
        if let Cgroups::V2 { root } = self {
            let file = root.join(group.trim_matches('/')).join("cgroup.kill");
            if file.exists() {
                return write(&file, "1");
            }
        }
        for pid in self.processes(group)? {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        Ok(())
    }

    /// The processes in a group and its descendants.
    pub fn processes(&self, group: &str) -> io::Result<Vec<i32>> {
        let Some(directory) = self.directory("memory", group) else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        collect_processes(&directory, &mut found)?;
        Ok(found)
    }

    /// Removes an empty group and its descendants. A missing group is not an error.
    pub fn remove(&self, group: &str) -> io::Result<()> {
        for directory in self.directories(group) {
            remove(&directory)?;
        }
        Ok(())
    }
}

/// Enables all available controllers for the children of a group.
fn enable_subtree_controllers(path: &Path) {
    let Ok(controllers) = fs::read_to_string(path.join("cgroup.controllers")) else { return };
    for controller in controllers.split_whitespace() {
        // One by one, so that a controller that cannot be enabled does not affect the others.
        let _ = write(&path.join("cgroup.subtree_control"), &format!("+{controller}"));
    }
}

fn create_dir(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// A new cpuset (v1) has no CPUs and no memory nodes, and processes cannot join it. Copies those of its
/// parent.
fn inherit_cpuset(directory: &Path) -> io::Result<()> {
    let Some(parent) = directory.parent() else { return Ok(()) };
    let read = |directory: &Path, file: &str| {
        fs::read_to_string(directory.join(file)).map(|text| text.trim().to_owned())
    };
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if !read(directory, file)?.is_empty() {
            continue;
        }
        if read(parent, file)?.is_empty() {
            inherit_cpuset(parent)?;
        }
        write(&directory.join(file), &read(parent, file)?)?;
    }
    Ok(())
}

fn collect_processes(directory: &Path, found: &mut Vec<i32>) -> io::Result<()> {
    let text = match fs::read_to_string(directory.join("cgroup.procs")) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    for entry in fs::read_dir(directory)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_processes(&entry.path(), found)?;
        }
    }
    Ok(())
}

fn remove(directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path())?;
        }
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes to a control file. The error names the file.
fn write(path: &Path, text: &str) -> io::Result<()> {
    // Not `fs::write`, which would try to create the file.
    let done = fs::OpenOptions::new().write(true).open(path).and_then(|mut file| {
        use io::Write as _;
        file.write_all(text.as_bytes())
    });
    done.map_err(|error| {
        io::Error::new(error.kind(), format!("write {text:?} to {}: {error}", path.display()))
    })
}

#[cfg(test)]
mod tests;
