//! What a group has used.

use std::fs;
use std::path::Path;

use super::Cgroups;

/// What a group and those inside it have used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Nanoseconds of processor time.
    pub cpu: u64,
    /// Bytes, with what the kernel could take back.
    pub memory: u64,
    /// Bytes that are in use by any reckoning: without files that were not looked at for long.
    pub working_set: u64,
    /// Bytes of the processes' own.
    pub anonymous: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    /// Bytes, or none where nothing is limited.
    pub memory_limit: Option<u64>,
    /// Bytes that were moved out of memory; none where the kernel does not count them.
    pub swap: Option<u64>,
    /// How many that may be, or none where nothing is limited.
    pub swap_limit: Option<u64>,
    /// Processes and threads.
    pub pids: u64,
}

impl Cgroups {
    /// Reads what a group has used; what cannot be read is zero.
    pub fn usage(&self, group: &str) -> Usage {
        let directory = |controller: &str| self.directory(controller, group).unwrap_or_default();
        let memory = directory("memory");
        let stat = fs::read_to_string(memory.join("memory.stat")).unwrap_or_default();
        if self.is_v2() {
            let cpu = fs::read_to_string(memory.join("cpu.stat")).unwrap_or_default();
            let used = number(&memory.join("memory.current"));
            return Usage {
                cpu: field(&cpu, "usage_usec") * 1000,
                memory: used,
                working_set: used.saturating_sub(field(&stat, "inactive_file")),
                anonymous: field(&stat, "anon"),
                page_faults: field(&stat, "pgfault"),
                major_page_faults: field(&stat, "pgmajfault"),
                memory_limit: read(&memory.join("memory.max")),
                swap: read(&memory.join("memory.swap.current")),
                swap_limit: read(&memory.join("memory.swap.max")),
                pids: number(&memory.join("pids.current")),
            };
        }
        let used = number(&memory.join("memory.usage_in_bytes"));
        // No limit is written as the largest number of whole pages.
        let limit = |file: &str| read(&memory.join(file)).filter(|limit| *limit < 1 << 62);
        let memory_limit = limit("memory.limit_in_bytes");
        let memory_and_swap = read(&memory.join("memory.memsw.usage_in_bytes"));
        let both_limit = limit("memory.memsw.limit_in_bytes");
        Usage {
            cpu: number(&directory("cpuacct").join("cpuacct.usage")),
            memory: used,
            working_set: used.saturating_sub(field(&stat, "total_inactive_file")),
            anonymous: field(&stat, "total_rss"),
            page_faults: field(&stat, "total_pgfault"),
            major_page_faults: field(&stat, "total_pgmajfault"),
            memory_limit,
            swap: memory_and_swap.map(|memory_and_swap| memory_and_swap.saturating_sub(used)),
            swap_limit: both_limit
                .zip(memory_limit)
                .map(|(memory_and_swap, memory)| memory_and_swap.saturating_sub(memory)),
            pids: number(&directory("pids").join("pids.current")),
        }
    }

    /// How often the kernel has killed somebody in this group for want of memory.
    pub fn oom_kill_count(&self, group: &str) -> u64 {
        let Some(directory) = self.directory("memory", group) else { return 0 };
        let file = if self.is_v2() { "memory.events" } else { "memory.oom_control" };
        field(&fs::read_to_string(directory.join(file)).unwrap_or_default(), "oom_kill")
    }
}

fn read(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn number(path: &Path) -> u64 {
    read(path).unwrap_or_default()
}

/// The number behind a name at the beginning of a line.
fn field(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_default()
}
