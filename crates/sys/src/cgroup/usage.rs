//! The resource usage of a group.

use std::fs;
use std::path::Path;

use super::Cgroups;

/// The resource usage of a group and its descendants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time in nanoseconds.
    pub cpu: u64,
    /// In bytes, including reclaimable page cache.
    pub memory: u64,
    /// In bytes, without inactive page cache.
    pub working_set: u64,
    /// Anonymous memory in bytes.
    pub anonymous: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    /// In bytes; `None` without a limit.
    pub memory_limit: Option<u64>,
    /// Swapped bytes; `None` if the kernel does not account swap.
    pub swap: Option<u64>,
    /// In bytes; `None` without a limit.
    pub swap_limit: Option<u64>,
    /// Processes and threads.
    pub pids: u64,
}

impl Cgroups {
    /// Reads the usage of a group. Values that cannot be read are zero.
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
        // Without a limit the value is the largest multiple of the page size.
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

    /// The number of OOM kills in this group.
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

/// The number in the line that starts with `name`.
fn field(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_default()
}
