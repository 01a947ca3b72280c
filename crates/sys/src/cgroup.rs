//! Control groups, whichever of the two versions the host has: where they are, what they limit, who is in them, what
//! was used.
//!
//! A group is named by a path such as `/skiff/pod1/main`, the same in every hierarchy. Read [`Cgroups`].

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
    /// One directory for each controller; those mounted together have the same. The last is where only names count.
    V1 {
        /// Controller and where its hierarchy is.
        hierarchies: Vec<(String, PathBuf)>,
    },
    /// One tree for all.
    V2 {
        /// Where it is mounted.
        root: PathBuf,
    },
}

impl Cgroups {
    /// Looks where they are mounted.
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
            None => Err(io::Error::new(io::ErrorKind::NotFound, "no control groups are mounted")),
        }
    }

    /// Whether it is the second version.
    pub fn is_v2(&self) -> bool {
        matches!(self, Cgroups::V2 { .. })
    }

    /// The directories of a group, each once.
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

    /// The directory of a group for one controller, where there is one.
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

    /// Makes a group and those it is in.
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

    /// By which a new process can be in a group from its beginning ([`New`](crate::process::New)); only in the second
    /// version. To join one later it would have to wait until no other process of the whole machine is being made or ends,
    /// which takes milliseconds.
    pub fn open_dir(&self, group: &str) -> Option<OwnedFd> {
        use rustix::fs::{Mode, OFlags};
        let Cgroups::V2 { root } = self else { return None };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(root.join(group.trim_matches('/')), flags, Mode::empty()).ok()
    }

    /// The group that a process is in; only in the second version, where there is one.
    pub fn of_process(&self, pid: i32) -> Option<String> {
        let of_v2 = |line: String| line.strip_prefix("0::").map(str::to_owned);
        crate::lines(&format!("/proc/{pid}/cgroup")).ok()?.find_map(of_v2).filter(|_| self.is_v2())
    }

    /// Puts this process, which has one thread, into a group.
    pub fn join(&self, group: &str) -> io::Result<()> {
        // In the first version a thread may go by itself, and need not wait as at `door`.
        let file = if self.is_v2() { "cgroup.procs" } else { "tasks" };
        for directory in self.directories(group) {
            // Zero is whoever writes, whatever its number is in which namespace.
            write(&directory.join(file), "0")?;
        }
        Ok(())
    }

    /// Kills whatever is in a group and in those inside it. It takes a moment until they are gone.
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

    /// The processes in a group and in those inside it.
    pub fn processes(&self, group: &str) -> io::Result<Vec<i32>> {
        let Some(directory) = self.directory("memory", group) else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        collect_processes(&directory, &mut found)?;
        Ok(found)
    }

    /// Removes an empty group and those inside it; one that is gone is no failure.
    pub fn remove(&self, group: &str) -> io::Result<()> {
        for directory in self.directories(group) {
            remove(&directory)?;
        }
        Ok(())
    }
}

/// Lets groups below have all the controllers that there are here.
fn enable_subtree_controllers(path: &Path) {
    let Ok(controllers) = fs::read_to_string(path.join("cgroup.controllers")) else { return };
    for controller in controllers.split_whitespace() {
        // One by one: a controller that cannot be handed down does not keep the others back.
        let _ = write(&path.join("cgroup.subtree_control"), &format!("+{controller}"));
    }
}

fn create_dir(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// A new group of the first version has no processors and no memory nodes, and nobody can join it.
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

/// Writes one of the kernel's files; the error names it.
fn write(path: &Path, text: &str) -> io::Result<()> {
    // Not `fs::write`, which would ask for a file to be made.
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
