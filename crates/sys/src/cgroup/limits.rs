//! The resource limits of a group.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Cgroups, write};

/// Limits in the units of CRI. Zero is unset.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// The relative CPU weight, 1024 for one CPU.
    pub cpu_shares: i64,
    /// CPU time per period in microseconds; negative for no limit.
    pub cpu_quota: i64,
    /// In microseconds.
    pub cpu_period: i64,
    /// The CPUs to use, such as `0-3`.
    pub cpus: String,
    /// The memory nodes to use.
    pub memory_nodes: String,
    /// In bytes.
    pub memory: i64,
    /// Memory and swap together, in bytes. Unset means no swap, a negative value no limit.
    pub memory_and_swap: i64,
    /// Processes and threads.
    pub pids: i64,
    /// Page size, such as `2MB`, and bytes.
    pub huge_pages: Vec<(String, u64)>,
    /// The OOM killer kills all processes of the group together (`memory.oom.group`).
    #[serde(default)]
    pub ends_together: bool,
    /// Further v2 control files by name.
    pub unified: Vec<(String, String)>,
}

/// Converts CPU shares of v1 (2 to 262,144) to a weight of v2 (1 to 10,000). The curve maps the
/// defaults to each other, 1024 and 100.
pub fn weight(shares: i64) -> i64 {
    if shares <= 2 {
        return 1;
    }
    if shares >= 262_144 {
        return 10_000;
    }
    let log = (shares as f64).log2();
    let exponent = (log * log + 125.0 * log) / 612.0 - 7.0 / 34.0;
    (10f64.powf(exponent).ceil() as i64).clamp(1, 10_000)
}

impl Cgroups {
    /// Sets the limits of a group.
    pub fn limit(&self, group: &str, limits: &Limits) -> io::Result<()> {
        match self {
            Cgroups::V1 { .. } => self.limit_v1(group, limits),
            Cgroups::V2 { root } => limit_v2(&root.join(group.trim_matches('/')), limits),
        }
    }

    fn limit_v1(&self, group: &str, limits: &Limits) -> io::Result<()> {
        let set = |controller: &str, file: &str, value: &dyn std::fmt::Display| {
            match self.directory(controller, group) {
                Some(directory) => write(&directory.join(file), &value.to_string()),
                // Without the controller there is no limit, as usual on such hosts.
                None => Ok(()),
            }
        };
        if limits.cpu_shares > 0 {
            set("cpu", "cpu.shares", &limits.cpu_shares)?;
        }
        if limits.cpu_period > 0 {
            set("cpu", "cpu.cfs_period_us", &limits.cpu_period)?;
        }
        if limits.cpu_quota != 0 {
            set("cpu", "cpu.cfs_quota_us", &limits.cpu_quota)?;
        }
        if !limits.cpus.is_empty() {
            set("cpuset", "cpuset.cpus", &limits.cpus)?;
        }
        if !limits.memory_nodes.is_empty() {
            set("cpuset", "cpuset.mems", &limits.memory_nodes)?;
        }
        if limits.memory > 0 {
            let memory_and_swap =
                if limits.memory_and_swap != 0 { limits.memory_and_swap } else { limits.memory };
            let swap = "memory.memsw.limit_in_bytes";
            let counts_swap = self.directory("memory", group).is_some_and(|place| place.join(swap).exists());
            // memory.memsw must never be below memory: set it first when it is raised, last when it is
            // lowered.
            let swap_limit_set = counts_swap && set("memory", swap, &memory_and_swap).is_ok();
            set("memory", "memory.limit_in_bytes", &limits.memory)?;
            if counts_swap && !swap_limit_set {
                set("memory", swap, &memory_and_swap)?;
            }
        }
        if limits.pids > 0 {
            set("pids", "pids.max", &limits.pids)?;
        }
        for (size, bytes) in &limits.huge_pages {
            // The limit of usage, and that of reservations if the kernel has it.
            for kind in ["", "rsvd."] {
                let file = format!("hugetlb.{size}.{kind}limit_in_bytes");
                if self.directory("hugetlb", group).is_some_and(|place| place.join(&file).exists()) {
                    set("hugetlb", &file, bytes)?;
                }
            }
        }
        Ok(())
    }
}

fn limit_v2(directory: &Path, limits: &Limits) -> io::Result<()> {
    let set = |file: &str, value: String| write(&directory.join(file), &value);
    // If cpu.weight is set explicitly below, the computed weight must not apply even for a moment.
    if limits.cpu_shares > 0 && !limits.unified.iter().any(|(file, _)| file == "cpu.weight") {
        set("cpu.weight", weight(limits.cpu_shares).to_string())?;
    }
    if limits.cpu_quota != 0 {
        let period = if limits.cpu_period > 0 { limits.cpu_period } else { 100_000 };
        let quota = if limits.cpu_quota < 0 { "max".to_owned() } else { limits.cpu_quota.to_string() };
        set("cpu.max", format!("{quota} {period}"))?;
    }
    if !limits.cpus.is_empty() {
        set("cpuset.cpus", limits.cpus.clone())?;
    }
    if !limits.memory_nodes.is_empty() {
        set("cpuset.mems", limits.memory_nodes.clone())?;
    }
    if limits.memory > 0 {
        set("memory.max", limits.memory.to_string())?;
        if directory.join("memory.swap.max").exists() {
            let swap = match limits.memory_and_swap {
                any if any < 0 => "max".to_owned(),
                memory_and_swap => (memory_and_swap - limits.memory).max(0).to_string(),
            };
            set("memory.swap.max", swap)?;
        }
        if limits.ends_together && directory.join("memory.oom.group").exists() {
            set("memory.oom.group", "1".to_owned())?;
        }
    }
    if limits.pids > 0 {
        set("pids.max", limits.pids.to_string())?;
    }
    for (size, bytes) in &limits.huge_pages {
        for file in [format!("hugetlb.{size}.max"), format!("hugetlb.{size}.rsvd.max")] {
            // Without the controller there is no limit, as usual on such hosts.
            if directory.join(&file).exists() {
                set(&file, bytes.to_string())?;
            }
        }
    }
    for (file, value) in &limits.unified {
        if file.contains('/') {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{file} is not a cgroup control file"),
            ));
        }
        set(file, value.clone())?;
    }
    Ok(())
}
